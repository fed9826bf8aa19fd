"""E[softmax(u)] of sampled logits u, in log space, and its gradient.

A sample s of the noise needs two numbers of all classes, the maximum of u_sk and the sum of
exponentials relative to it; then

    log p(k) = log mean_s exp(u_sk - log Z_s),    log Z_s = log sum_k exp(u_sk)

A loop over tiles of classes finds both as an online softmax does, with a running maximum
(`classes.EveryClass`). A second loop makes the logits again for the gradient

    dL / du_sk = g_s exp(u_sk - log Z_s) + h_s 1[k = y]

with g and h the cotangents of log Z and u_y. DET is the case of one sample. Where all classes are
one tile, JAX keeps the logits.

HET-H. All classes of a bucket share their noise, so that with
M_h = sum_{k: h(k) = h} exp(mu_k)

    p(k) = exp(mu_k) / M_h(k)  E[softmax(log M + eps)_h(k)],    eps in R^H

exactly. The first factor, the share of a class in its bucket, has no noise. What is left to sample
is a HET with H classes in place of K, from the same normals (`BucketSoftmax`). In the same way,
given the noise,

    H(y | z) = H(h | z) + sum_h p(h | z) H(y | h)

B examples, S samples, K classes, Kp with padding, H buckets, L labels, M shards of classes.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from het_plugin.integrate.classes import (
  EveryClass,
  MaybeArray,
  Sums,
  Terms,
  Tile,
  Tiling,
  classes_of,
)
from het_plugin.integrate.gaussian import PADDED, GaussianLogits, Hashed
from het_plugin.integrate.placement import num_shards
from het_plugin.integrate.sampled_logits import Samples

NUM_BUCKET_ROWS = 8  # values per class and example of HET-H's location and its reductions


class Softmax(Samples):
  """log p of a softmax with samples."""

  def nll(self, labels: jax.Array) -> jax.Array:
    """The mean of -log p over the labels int32 [B, L], [B]; padding is negative."""
    log_p = self.log_p_at(labels)
    listed = labels >= 0
    count = listed.sum(-1, dtype=log_p.dtype)
    return -jnp.where(listed, log_p, 0.0).sum(-1) / jnp.maximum(count, 1)

  def log_p_at(self, labels: jax.Array) -> jax.Array:
    """log p [B, L] at labels int32 [B, L]; undefined at labels outside [0, K)."""

    def of_chunk(chunk: EveryClass) -> jax.Array:
      found = chunk.sums(_terms)
      # u - maximum is exact: log-probabilities near 0 keep their digits.
      log_p = (found.sums - found.top[..., None]) - found.log_total[..., None]  # [B, s, L]
      log_weight = chunk.constants.log_weight
      return log_p if log_weight is None else log_p + log_weight[..., None]

    of_samples = self.each(of_chunk, labels)  # [C, B, s, L]
    return jax.nn.logsumexp(of_samples, axis=(0, 2), b=1.0 / self.num_samples)

  def prepared(self, chunk: EveryClass) -> EveryClass:
    """As in `Samples`; the arrays are the maximum and log Z, None if a tile has all classes."""
    if self.tiling.is_whole and self.tiling.placement.vocab is None:
      return chunk
    found = chunk.sums(_terms)
    return dataclasses.replace(chunk, arrays=(found.top, found.log_total))

  def log_p_of(self, tile: Tile) -> jax.Array:
    """As in `Samples`."""
    log_p = _log_p(tile)
    log_weight = tile.constants.log_weight
    if log_weight is not None:
      log_p = log_p + log_weight[..., None]
    if self.num_samples == 1:
      return log_p[:, 0]
    return jax.nn.logsumexp(log_p, axis=1, b=1.0 / self.num_samples)

  def entropies(self, tile: Tile) -> jax.Array:
    """As in `Samples`."""
    log_p = _log_p(tile)
    log_weight = tile.constants.log_weight
    p = jnp.exp(log_p if log_weight is None else log_p + log_weight[..., None])
    return -(p * log_p).sum(axis=1)


def _log_p(tile: Tile) -> jax.Array:
  """log softmax(u) [B, s, t] of a tile; without sums the tile has all classes."""
  u = tile.logits(tile.constants.z)
  if tile.arrays is None:
    top = jax.lax.stop_gradient(u.max(axis=-1))
    log_total = jnp.log(jnp.exp(u - top[..., None]).sum(axis=-1))
  else:
    top, log_total = tile.arrays
  return (u - top[..., None]) - log_total[..., None]


# Sums over classes


def _terms(tile: Tile) -> Terms:
  """Of the sums of exp(u) for each sample, and u [B, s, L] at the labels, 0 outside [0, K)."""
  labels = tile.constants.labels
  u = tile.logits(tile.constants.z)
  return Terms(u, None if labels is None else tile.at(u, labels))


# HET-H


def fewer_buckets(logits: GaussianLogits) -> MaybeArray:
  """h(k) int32 [Kp] of HET-H with fewer buckets than classes; None of all other logits."""
  if not isinstance(logits.projection, Hashed):
    return None
  is_fewer = logits.noise.diag.shape[-1] < logits.location.shape[-1]
  return logits.projection.buckets if is_fewer else None


@dataclasses.dataclass(frozen=True)
class BucketSoftmax(Softmax):
  """log p of HET-H, as a softmax over buckets and the shares of classes in them.

  Its one chunk has the location's classes, with their buckets.

  Attributes:
    logits: of HET-H, over tau.
    softmax: logits over tau of the buckets, and labels among them or None -> `Softmax`.
  """

  logits: GaussianLogits
  softmax: Callable[[GaussianLogits, jax.Array | None], Softmax]

  @classmethod
  def of(
    cls,
    logits: GaussianLogits,
    softmax: Callable[[GaussianLogits, jax.Array | None], Softmax],
    max_bytes: int | None,
  ) -> 'BucketSoftmax':
    """The link of logits that have fewer buckets than classes."""
    tiling = Tiling.of(logits, NUM_BUCKET_ROWS, max_bytes)
    every_class = EveryClass(tiling, classes_of(logits), buckets=fewer_buckets(logits))
    return cls.of_one(every_class, logits=logits, softmax=softmax)

  def log_p_at(self, labels: jax.Array) -> jax.Array:
    """log p [B, L] at labels (`Softmax.log_p_at`)."""
    found, of_buckets = self.sums(labels)
    inside = (labels >= 0) & (labels < self.logits.num_classes)
    of_label = self.chunk(0).buckets[jnp.where(inside, labels, 0)]
    top, log_total = (
      jnp.take_along_axis(x, of_label, axis=-1, mode='promise_in_bounds')
      for x in (found.top, found.log_total)
    )
    of_label = jnp.where(inside, of_label, -1)
    log_p = self.softmax(of_buckets, of_label).log_p_at(of_label)
    return (found.sums - top) - log_total + log_p

  def expected_entropy(self) -> jax.Array:
    """The entropy given the noise, [B] (`Softmax.expected_entropy`)."""
    every_class, softmax = self._parts()
    return softmax.expected_entropy() + every_class.total(self.entropies)

  def prepared(self, chunk: EveryClass) -> EveryClass:
    """As in `Samples`; the arrays are of the buckets: maximum and log sum [B, H], and log p."""
    return self._parts()[0]

  def log_p_of(self, tile: Tile) -> jax.Array:
    """As in `Samples`."""
    return _log_share(tile) + tile.arrays[2][:, tile.buckets]

  def entropies(self, tile: Tile) -> jax.Array:
    """-p(h) p(k | h) log p(k | h) [B, t], whose sum is H(y | h)."""
    log_share = tile.masked(_log_share(tile))
    return -jnp.exp(log_share + tile.arrays[2][:, tile.buckets]) * log_share

  def sums(self, labels: jax.Array | None = None) -> tuple[Sums, GaussianLogits]:
    """The sums of exp(mu) in each bucket [B, H], and mu [B, L] at the labels, 0 outside [0, K); and
    the logits over tau of the buckets, padded to what the mesh divides.
    """
    noise = self.logits.noise
    num_buckets = noise.diag.shape[-1]
    terms = functools.partial(_bucket_terms, num_buckets)
    found = self.chunk(0, labels).sums(terms)
    location = jnp.maximum(found.top + found.log_total, PADDED)
    rest = -num_buckets % num_shards('vocab')
    location, noise = jax.tree.map(
      lambda x: jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, rest),)), (location, noise)
    )
    return found, GaussianLogits(location, noise, None, self.logits.temperature, num_buckets)

  def _parts(self) -> tuple[EveryClass, Softmax]:
    """What the values of a class are made from, and the softmax over buckets."""
    found, of_buckets = self.sums()
    softmax = self.softmax(of_buckets, None)
    arrays = found.top, found.log_total, softmax.log_prob()
    return dataclasses.replace(self.chunk(0), arrays=arrays), softmax


def _log_share(tile: Tile) -> jax.Array:
  """log exp(mu_k) / M_h(k) [B, t]."""
  own = tile.buckets
  top, log_total, _ = tile.arrays
  return (tile.classes.logits()[:, 0] - top[:, own]) - log_total[:, own]


def _bucket_terms(num_buckets: int, tile: Tile) -> Terms:
  """Of the sums of exp(mu) in each bucket, and mu [B, L] at the labels."""
  labels = tile.constants.labels
  mu = tile.logits()  # [B, 1, t]
  at = None if labels is None else tile.at(mu, labels)[:, 0]
  return Terms(mu[:, 0], at, num_buckets=num_buckets)
