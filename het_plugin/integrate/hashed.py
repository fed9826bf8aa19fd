"""HET-H's softmax as one over its buckets.

All classes of a bucket share their noise, so that with M_h = sum_{k: h(k) = h} exp(mu_k)

    p(k) = exp(mu_k) / M_h(k)  E[softmax(log M + eps)_h(k)],    eps in R^H

exactly. The first factor, the share of a class in its bucket, has no noise. What is left to sample
is a HET with H classes in place of K, from the same normals. In the same way, given the noise,

    H(y | z) = H(h | z) + sum_h p(h | z) H(y | h)

B examples, K classes, Kp with padding, H buckets, L labels.
"""

import jax
import jax.numpy as jnp
from flax import struct

from het_plugin.integrate.gaussian import PADDED, GaussianLogits, Hashed, masked
from het_plugin.integrate.order import placement_of
from het_plugin.integrate.placement import num_shards


@struct.dataclass
class BucketSums:
  """log M in two parts, since u - maximum is exact: log-probabilities near 0 keep their digits.

  Attributes:
    buckets: h(k), int32 [Kp].
    top: the maximum of mu over the classes of each bucket, [B, H]; its gradient is stopped.
    log_total: log sum exp(mu - top), [B, H].

  For a bucket without classes top is at most `PADDED`, and log_total is 0.
  """

  buckets: jax.Array
  top: jax.Array
  log_total: jax.Array

  def logits(self, logits: GaussianLogits) -> GaussianLogits:
    """The logits over tau of the buckets, with H padded to what the mesh divides."""
    noise = logits.noise.scaled(1.0 / logits.temperature)
    num_buckets = self.top.shape[-1]
    location = jnp.maximum(self.top + self.log_total, PADDED)
    rest = -num_buckets % num_shards('vocab')
    location, noise = jax.tree.map(
      lambda x: jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, rest),)), (location, noise)
    )
    one = jnp.ones_like(logits.temperature)
    return GaussianLogits(location, noise, None, one, num_classes=num_buckets)

  def at(
    self, logits: GaussianLogits, labels: jax.Array, mu: jax.Array
  ) -> tuple[jax.Array, jax.Array, GaussianLogits]:
    """The problem of some labels.

    Args:
      logits: of HET-H.
      labels: int32 [B, L].
      mu: at the labels, [B, L].

    Returns:
      log exp(mu_y) / M_h(y), [B, L], undefined for labels outside [0, K); the labels' buckets,
      int32 [B, L], -1 for labels outside [0, K); and the logits over tau of the buckets.
    """
    inside = (labels >= 0) & (labels < logits.num_classes)
    of_label = self.buckets[jnp.where(inside, labels, 0)]
    top, log_total = (jnp.take_along_axis(x, of_label, axis=-1) for x in (self.top, self.log_total))
    return (mu - top) - log_total, jnp.where(inside, of_label, -1), self.logits(logits)


def has_fewer_buckets(logits: GaussianLogits) -> bool:
  """Whether these are logits of HET-H whose softmax has fewer buckets than classes."""
  is_hashed = logits.link == 'softmax' and isinstance(logits.projection, Hashed)
  return is_hashed and logits.noise.diag.shape[-1] < logits.location.shape[-1]


def shares_of(logits: GaussianLogits) -> tuple[BucketSums, jax.Array]:
  """The sums of HET-H's mu [B, Kp], and the shares of all classes [B, Kp].

  `tiled_losses.bucket_sums` makes the sums in tiles of classes.
  """
  sums, mu = _sums(logits)
  return sums, (mu - sums.top[:, sums.buckets]) - sums.log_total[:, sums.buckets]


def at_labels(
  logits: GaussianLogits, labels: jax.Array
) -> tuple[jax.Array, jax.Array, GaussianLogits]:
  """What `BucketSums.at` returns, for labels int32 [B, L]."""
  sums, mu = _sums(logits)
  classes = jnp.clip(labels, 0, mu.shape[-1] - 1)
  return sums.at(logits, labels, jnp.take_along_axis(mu, classes, axis=-1))


def _sums(logits):
  """`BucketSums`, and mu [B, Kp] with `PADDED` at padded classes."""
  buckets = logits.projection.buckets
  num_buckets = logits.noise.diag.shape[-1]

  def of_shard(mu, buckets):
    peak = max_in_buckets(mu, buckets, num_buckets)
    total = jax.ops.segment_sum(jnp.exp(mu - peak[:, buckets]).T, buckets, num_buckets).T
    return peak[None], total[None]

  mu = masked(logits, logits.location / logits.temperature)
  run = placement_of(logits).shard_map(of_shard, ('bk', 'k'), ('kbh', 'kbh'))
  peak, total = run(mu, buckets)  # [M, B, H] of M shards of classes
  top = peak.max(axis=0)
  total = jnp.sum(total * jnp.exp(peak - top), axis=0)
  return BucketSums(buckets, top, jnp.log(jnp.where(total > 0, total, 1.0))), mu


def max_in_buckets(mu: jax.Array, buckets: jax.Array, num_buckets: int) -> jax.Array:
  """The maximum of mu [B, k] over the classes of each bucket, [B, H], without a gradient;
  2 `PADDED` for a bucket without classes.
  """
  # Class by class: a CPU took 15 times as long for a maximum under a mask [B, H, K].
  mu = jax.lax.stop_gradient(mu).T
  lowest = jnp.full_like(mu, 2 * PADDED, shape=(num_buckets, mu.shape[1]))
  return lowest.at[buckets].max(mu).T


def entropy_in_buckets(sums: BucketSums, log_share: jax.Array) -> jax.Array:
  """H(y | h) of each bucket, [B, H], for the shares of all classes [B, Kp]."""
  terms = -jnp.exp(log_share) * log_share
  return jax.ops.segment_sum(terms.T, sums.buckets, sums.top.shape[-1]).T
