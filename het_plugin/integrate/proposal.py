"""Where the samples of a softmax's loss are taken: around the noise that explains the label.

The loss of one label needs p(y) = E[f(z)], f(z) = softmax(u(z))_y, z ~ N(0, I). The dear
part of f(z) is the sum of exponentials over all K classes. So few classes stand for all (`Few`):
their f_C(z) is near f(z), and costs C exponentials in place of K.

  1. C classes are found, with weights. A class counts as m_k = p_k exp(s_k^2 / 2) at a point z1
     where the label is more probable, with s_k^2 the variance of its noise; or as m_k = p_k where W
     projects the noise and s_k^2 would cost a product more. The C classes with the largest
     m_k / h_k are taken, where h_k in (0, 1) is a fixed sequence. Each has the weight
     max(m_k, t) / m_k, with t the smallest m_k / h_k. So the probable ones are taken surely, and
     the rest stands for all other classes (priority sampling: Duffield, Lund and Thorup 2007).
  2. q = N(m, I) is fitted to the posterior f_C(z) N(z; 0, I): the closest one in KL(q | posterior).
     It is as wide as the noise, so that its tails are not lighter than the posterior's.
  3. N points of q in pairs z_n+ and z_n-, mirrored at m, have the weights
     w_n = f_C(z_n) N(z_n; 0, I) / (N q(z_n)), whose sum is p_C. Sobol's points fill their leading
     coordinates best, so these are turned to the principal directions of the noise at m.
  4. S / 2 pairs are chosen with the probabilities (w_n+ + w_n-) / p_C. With f / f_C the mean over
     the pair, weighted by w,

       p(y) ~ p_C / (S / 2) sum_s f / f_C

     is unbiased whatever the few classes and m are, since a chosen pair has the mean
     1 / p_C sum_n w_n f(z_n) / f_C(z_n). Its variance is that of f / f_C where the posterior is.
     What is odd in z - m cancels, most of all in the gradient.

What is chosen has no gradient: the gradient of the loss is that of the mean over the posterior.

B examples, K classes, C of them, T = R + 1 normals. A remainder 'diag' has Q normals in place of
one: the fit takes the one along the direction that moves the label, and the samples draw the rest.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from het_plugin.integrate.classes import Classes, EveryClass, Tile, Tiling, noisy_classes
from het_plugin.integrate.directions import (
  HIGHEST,
  principal_directions,
  rotated,
  rotation_to,
  turned_to,
)
from het_plugin.integrate.gaussian import PADDED, GaussianLogits, Hashed, Linear, LowRank
from het_plugin.integrate.samplers import Index, Sampler

MANY_CLASSES = 8192  # from this K on, C is twice as large
NUM_BINS = 5  # of the rough `top_k`, for each class
STEP = 0.25  # where the few classes are chosen, in factors of the label
MIN_POINTS = 256  # N, and at least `POINTS_PER_SAMPLE` S
POINTS_PER_SAMPLE = 8
NUM_TURNED = 4  # coordinates
NUM_FIT_STEPS = 5
NUM_FIT_PAIRS = 8
PAIRS_AT_ONCE = 16
MAX_STEP = 2.0  # of the mean of q, in standard deviations of the noise
MAX_NOISE = 4.0  # that the fit sees, of a class relative to the label, over tau
MAX_LOG = 60.0  # exponentials of it, and sums of them, are normal numbers
TINY = 1e-30
GOLDEN = 0.6180339887498949  # h_k = frac(k GOLDEN) fills (0, 1), whichever classes are probable


@struct.dataclass
class Few:
  """Few classes that stand for all: f_C(z) = 1 / sum_c exp(location_c + z factors_c).

  Attributes:
    location: [B, C], relative to that of the label, with the logarithm of the weights. The first
      one is the label itself, if there is one; `PADDED` where there is no class.
    factors: [B, T, C], relative to those of the label.
  """

  location: jax.Array
  factors: jax.Array

  def at(self, z: jax.Array) -> jax.Array:
    """The logits [B, C] at z [B, T]."""
    return self.location + jnp.einsum('bt,btc->bc', z, self.factors)


def num_few(num_classes: int) -> int:
  """C for K classes: with the label and the threshold, registers of a TPU are full.

  Of 20,000 random classes, twice as many had 0.6 of the error, for a tenth more time.
  """
  return 126 if num_classes < MANY_CLASSES else 254


def few_classes(tiling: Tiling, classes: Classes, label: jax.Array | None) -> Few:
  """The few classes for labels int32 [B]; without labels those at the location."""
  noise = classes.noise
  every_class = EveryClass(tiling, classes)
  z = jnp.zeros_like(noise.diag, shape=(noise.diag.shape[0], noise.num_normals))
  if label is not None:
    mu, factors_of_label = every_class.at(label[:, None])
    z = STEP * factors_of_label[..., 0]
  count = num_few(tiling.num_classes)
  chosen, priority = dataclasses.replace(every_class, constants=(z, label)).top_k(
    _priority, min(count + 1, tiling.num_classes), num_bins=NUM_BINS * (count + 2)
  )
  location, factors = every_class.at(chosen)  # [B, C], [B, T, C]
  is_real = priority > PADDED / 2
  if chosen.shape[-1] > count:
    # For a slice of a `top_k`, XLA sorts all classes on a CPU.
    is_real &= np.arange(count + 1) < count
    log_size = Few(location, factors).at(z)
    if classes.kernel is None:
      log_size += _gain(jnp.square(factors).sum(axis=1))
    location += jnp.maximum(priority.min(axis=-1, keepdims=True) - log_size, 0.0)
  if label is not None:
    location = jnp.concatenate([mu, location], axis=-1) - mu
    factors = jnp.concatenate([factors_of_label, factors], axis=-1) - factors_of_label
    is_real = jnp.pad(is_real, ((0, 0), (1, 0)), constant_values=True)
  return Few(jnp.where(is_real, location, PADDED), jnp.where(is_real[:, None], factors, 0.0))


def _priority(tile: Tile) -> jax.Array:
  """log(m_k / h_k), up to a constant of an example, [B, t]; `PADDED` at the label."""
  z, label = tile.constants
  size = tile.classes.logits(z[:, None])[:, 0]
  if tile.classes.kernel is None:
    size += _gain(tile.classes.noise.variances())
  priority = size - jnp.log((tile.ids + 1).astype(size.dtype) * GOLDEN % 1.0 + 1e-6)
  return priority if label is None else jnp.where(tile.ids == label[:, None], PADDED, priority)


def _gain(variance: jax.Array) -> jax.Array:
  """log(m_k / p_k), bounded so that a sum with it keeps the digits of log p_k."""
  return jnp.minimum(0.5 * variance, 1e4)


def growth(x: jax.Array, factors: jax.Array) -> jax.Array:
  """exp(x factors) [B, n, C] of differences x [B, n, T] and factors [B, T, C].

  That of -x is its inverse, so a pair takes one exponential. The bound makes f_C another function
  where the noise is far more than tau.
  """
  return jnp.exp(jnp.clip(jnp.einsum('bnt,btc->bnc', x, factors), -MAX_LOG, MAX_LOG))


def fit(few: Few) -> jax.Array:
  """The mean m [B, T] of q, where m = E_q[N_y - sum_k p_k N_k].

  Steepest ascent of E_q[log f_C(z) N(z; 0, I)], which is concave in m, with Newton's step along
  each direction.
  """
  # The closest q to a posterior near a step is far inside of it, where few of its points count.
  largest = jnp.sqrt(jnp.square(few.factors).sum(axis=1).max(axis=-1))  # [B]
  scale = jnp.minimum(1.0, MAX_NOISE / jnp.maximum(largest, TINY))
  few = Few(few.location * scale[:, None], few.factors * scale[:, None, None])
  # Constants; NumPy promises that their values stay.
  x = np.random.RandomState(0).normal(size=(NUM_FIT_PAIRS, few.factors.shape[1]))
  mean = jnp.zeros_like(few.factors[..., 0])
  grown = growth(mean[:, None] + jnp.asarray(x, mean.dtype), few.factors)
  grown = jnp.concatenate([grown, 1.0 / grown], axis=1)  # [B, n, C]

  def climb(_, mean):
    e = jax.nn.softmax(few.at(mean))
    inverse = 1.0 / jnp.einsum('bc,bnc->bn', e, grown)
    p = e * jnp.einsum('bn,bnc->bc', inverse, grown) / grown.shape[1]
    slope = -jnp.einsum('bc,btc->bt', p, few.factors) - mean
    along = jnp.einsum('bt,btc->bc', slope, few.factors)
    of_points = inverse * jnp.einsum('bc,bnc->bn', e * along, grown)
    curvature = (p * jnp.square(along)).sum(axis=-1) - jnp.square(of_points).mean(axis=-1)
    square = jnp.square(slope).sum(axis=-1)
    step = square / (square + jnp.maximum(curvature, TINY))
    step = jnp.minimum(step, MAX_STEP * jax.lax.rsqrt(square + TINY))[:, None] * slope
    return mean + jnp.where(jnp.isfinite(step), step, 0.0)

  return jax.lax.fori_loop(0, NUM_FIT_STEPS, climb, mean)


@struct.dataclass
class Chosen:
  """The chosen points of a loss, in the place of `directions.Draws`.

  Those with numbers below S / 2 are mean + away, and the others mean - away.

  Attributes:
    keys: as in `Draws`.
    mean: of q, [B, T].
    away: [B, S / 2, T].
    log_weights: log p_C - log f_C(z), and that of twice the share in the pair, [B, S].
    direction: of the remainder 'diag', [B, Q] of length 1, along which the last of the T normals
      is; None for the remainder 'rank_one'.
  """

  keys: jax.Array
  mean: jax.Array
  away: jax.Array
  log_weights: jax.Array
  direction: jax.Array | None = None

  @property
  def num_pairs(self) -> int:
    """S / 2."""
    return self.away.shape[1]

  def normals(self, sampler: Sampler, sample_index: Index, num_normals: int) -> jax.Array:
    """z [B, s, num_normals]."""
    pair = sample_index % self.num_pairs
    away = jnp.take(self.away, pair, axis=1, mode='clip')
    mean = self.mean[:, None]
    if self.direction is not None:
      rest = sampler(_folded(self.keys, 1), pair, num_normals - away.shape[-1] + 1)
      rest = jnp.broadcast_to(rest.astype(away.dtype), (*away.shape[:2], rest.shape[-1]))
      along = jnp.einsum('bsq,bq->bs', rest, self.direction)
      rest = rest + (away[..., -1] - along)[..., None] * self.direction[:, None]
      of_mean = mean[..., -1:] * self.direction[:, None]
      mean = jnp.concatenate([mean[..., :-1], of_mean], axis=-1)
      away = jnp.concatenate([away[..., :-1], rest], axis=-1)
    return mean + jnp.where(sample_index < self.num_pairs, 1.0, -1.0)[:, None] * away

  def log_weight(self, sample_index: Index) -> jax.Array:
    """[B, s], of the points with numbers [s]."""
    return jnp.take(self.log_weights, sample_index, axis=1, mode='clip')


def _folded(keys: jax.Array, number: int) -> jax.Array:
  return jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)


def choose(
  tiling: Tiling,
  logits: GaussianLogits,
  label: jax.Array,
  keys: jax.Array,
  sampler: Sampler,
  num_samples: int,
) -> Chosen:
  """The points of a loss.

  Args:
    tiling: how classes are cut.
    logits: over tau, with noise and a known projection.
    label: int32 [B], class ids; anything where there is none.
    keys: typed PRNG keys [B], or [1].
    sampler: of the points of q.
    num_samples: S.
  """
  logits = jax.lax.stop_gradient(logits)
  label = jnp.clip(label, 0, logits.num_classes - 1)
  noise, direction = along_label(logits, label)
  few = few_classes(tiling, noisy_classes(logits, noise), label)
  mean = fit(few)
  batch, num_normals = mean.shape
  count = max(MIN_POINTS, POINTS_PER_SAMPLE * num_samples) // 2
  count = -(-count // PAIRS_AT_ONCE) * PAIRS_AT_ONCE
  # Without it XLA drew earlier, and held the normals beside the columns of W of the few classes.
  keys, mean = jax.lax.optimization_barrier((keys, mean))
  # In another order, because every n-th point of Sobol's sequence is from one part of the cube.
  order = np.random.RandomState(0).permutation(count).astype(np.int32)
  # One normal more, whose first one moves the places below: it is independent of all the others.
  # XLA would make the normals once more for each of their four uses.
  x = jax.lax.optimization_barrier(sampler(keys, order, num_normals + 1).astype(mean.dtype))
  x = jnp.broadcast_to(x, (batch, *x.shape[1:]))
  offset = 0.5 + 0.5 * jax.lax.erf(math.sqrt(0.5) * x[:, :1, -1])  # [B, 1], uniform
  x = x[..., :-1]

  u = few.at(mean)
  rotation = rotation_to(principal_directions(u, few.factors, NUM_TURNED, num_rounds=1))
  turned = turned_to(rotation, few.factors)
  log_e = jax.nn.log_softmax(u)
  e = jnp.exp(log_e)

  def totals(x: jax.Array) -> jax.Array:
    """sum_c e_c exp(z factors_c) at both points of pairs [B, n, T], [B, 2, n]."""
    grown = growth(x, turned)
    return jnp.stack([jnp.einsum('bc,bnc->bn', e, y) for y in (grown, 1.0 / grown)], axis=1)

  parts = jnp.moveaxis(x.reshape(batch, -1, PAIRS_AT_ONCE, num_normals), 1, 0)
  found = jnp.moveaxis(jax.lax.map(totals, parts), 0, 2).reshape(batch, 2, count)
  log_p = log_e[:, :1, None] - jnp.log(found)  # log f_C [B, 2, N / 2]
  along = jnp.einsum(
    'bnt,btm->bmn', x, turned_to(rotation, mean[..., None]), precision=HIGHEST
  )  # [B, 1, N / 2]
  log_ratio = jnp.concatenate([-along, along], axis=1)  # log N(z; 0, I) / q(z)
  log_ratio -= 0.5 * jnp.square(mean).sum(axis=-1)[:, None, None]
  log_w = log_p + log_ratio
  log_pair = jnp.logaddexp(log_w[:, 0], log_w[:, 1])
  log_total = jax.nn.logsumexp(log_pair, axis=-1, keepdims=True)

  # One of S / 2 equal parts of the cumulative weights each, all moved alike (systematic sampling).
  num_pairs = -(-num_samples // 2)
  places = (jnp.arange(num_pairs, dtype=log_w.dtype) + offset) / num_pairs
  cumulative = jnp.cumsum(jnp.exp(log_pair - log_total), axis=-1)
  places = places * cumulative[:, -1:]
  # A count, since inside a `jax.shard_map` JAX refuses `jnp.searchsorted`.
  pair = (cumulative[:, None] < places[..., None]).sum(axis=-1, dtype=jnp.int32)
  pair = jnp.minimum(pair, count - 1)
  # log p_C / f_C(z) plus the logarithm of twice the share in the pair
  log_weights = log_ratio - log_pair[:, None] + (log_total - math.log(count))[..., None]
  log_weights = jnp.take_along_axis(
    log_weights, pair[:, None], axis=2, mode='promise_in_bounds'
  ).reshape(batch, -1)
  away = jnp.take_along_axis(x, pair[..., None], axis=1, mode='promise_in_bounds')
  away = rotated(away, rotation)
  return jax.lax.stop_gradient(Chosen(keys, mean, away, log_weights, direction))


def along_label(logits: GaussianLogits, label: jax.Array) -> tuple[LowRank, jax.Array | None]:
  """The noise with the remainder 'rank_one': a remainder 'diag' keeps its part along the
  direction [B, Q] that moves the label, which is returned too.
  """
  noise = logits.noise
  if noise.remainder == 'rank_one':
    return noise, None
  if isinstance(logits.projection, Linear):
    vector = logits.projection.kernel[:, label].T.astype(noise.diag.dtype)  # [B, Q]
  else:
    is_hashed = isinstance(logits.projection, Hashed)
    place = logits.projection.buckets[label] if is_hashed else label
    vector = jax.nn.one_hot(place, noise.diag.shape[-1], dtype=noise.diag.dtype)
  direction = noise.diag * vector
  length = jnp.linalg.norm(direction, axis=-1, keepdims=True)
  direction = direction / jnp.where(length > 0, length, 1.0)
  return dataclasses.replace(noise, diag=noise.diag * direction, remainder='rank_one'), direction


def directions(tiling: Tiling, logits: GaussianLogits) -> jax.Array:
  """The principal directions of the noise at the location, [B, m, num_normals], over few classes.

  With a remainder 'diag' they are the directions of its factors.
  """
  logits = jax.lax.stop_gradient(logits)
  num_normals = logits.noise.num_normals
  noise = logits.noise
  if noise.remainder == 'diag':
    noise = dataclasses.replace(noise, diag=jnp.zeros_like(noise.diag), remainder='rank_one')
  few = few_classes(tiling, noisy_classes(logits, noise), None)
  found = principal_directions(few.location, few.factors)
  return jnp.pad(found, ((0, 0), (0, 0), (0, num_normals - found.shape[-1])))
