"""Where the samples of a softmax's loss are taken: around the noise that explains the label.

The loss of one label needs p(y) = E[f(z)], f(z) = softmax(u(z))_y, z ~ N(0, I). The dear
part of f(z) is the sum of exponentials over all K classes. So few classes stand for all (`Few`):
their f_C(z) is near f(z), and costs C exponentials in place of K.

  1. C classes are found, with weights. At a guess z1 of the posterior's mode, p_k is the softmax.
     A class counts as m_k = p_k exp(s_k^2 / 2) with s_k^2 the variance of its noise, or as
     m_k = p_k where W projects the noise and s_k^2 would cost a product more. The C classes with
     the largest m_k / h_k are taken, where h_k in (0, 1) is a fixed sequence. Each has the weight
     max(m_k, t) / m_k, with t the largest m_k / h_k that is left out. So the probable ones are
     taken surely, and the rest stands for all other classes (priority sampling: Duffield, Lund and
     Thorup 2007). The sum and the p-weighted mean of the noise of the rest are set to those of all
     other classes.
  2. A Gaussian q is fitted to the posterior f_C(z) N(z; 0, I): the closest one in
     KL(q | posterior), by a few fixed-point steps (Opper and Archambeau 2009). It differs from
     N(0, I) in m dimensions only, which the noise of the classes of highest priority spans. Only a
     `SHARE` of its precision is used, because its tails are lighter than the posterior's.
  3. N points of q in pairs z_n+ and z_n-, mirrored at its mean, have the weights
     w_n = f_C(z_n) N(z_n; 0, I) / (N q(z_n)), whose sum is p_C.
  4. S / 2 pairs are chosen with the probabilities (w_n+ + w_n-) / p_C. With f / f_C the mean over
     the pair, weighted by w,

       p(y) ~ p_C / (S / 2) sum_s f / f_C

     is unbiased whatever the few classes and q are, since a chosen pair has the mean
     1 / p_C sum_n w_n f(z_n) / f_C(z_n). Its variance is that of f / f_C where the posterior is.
     What is odd in z - mean cancels, most of all in the gradient.

What is chosen has no gradient: the gradient of the loss is that of the mean over the posterior.

A quarter of the points comes from N(mean, I), which is as wide as the noise, so that no point has a
large weight (a defensive mixture, Hesterberg 1995). Where the noise is many times tau, the softmax
is near a step, and no Gaussian is near its posterior.

B examples, K classes, C of them, T = R + 1 normals, m dimensions of the fit. A remainder 'diag' has
Q normals in place of one: the fit takes the one along the direction that moves the label, and the
samples draw the rest.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from het_plugin.integrate.classes import (
  Classes,
  Tile,
  Tiling,
  best_of_shards,
  best_so_far,
  fold,
  noisy_classes,
)
from het_plugin.integrate.directions import (
  Rotation,
  leading_rows,
  principal_directions,
  rotated,
  rotation_to,
)
from het_plugin.integrate.gaussian import PADDED, GaussianLogits, Hashed, Linear, LowRank
from het_plugin.integrate.placement import dims
from het_plugin.integrate.samplers import Index, Sampler

NUM_CLASSES = 126  # C; with the label and the threshold a TPU's registers are full
MIN_POINTS = 64  # N, and at least `POINTS_PER_SAMPLE` S
POINTS_PER_SAMPLE = 4
NUM_FIT_STEPS = 3
NUM_FIT_POINTS = 16
RECALL = 0.8  # of the classes of highest priority; nearly 1 of the first ones (Chern et al. 2022)
NUM_CELLS = 64  # of the interval of a, in each refinement of it
NUM_REFINEMENTS = 2
NUM_FITTED = 16  # m, dimensions of the fit
SHARE = 0.5
WIDE_SHARE = 0.25  # of the points
MAX_STEP = 2.0  # of the mean of q, in standard deviations of the noise
SMALL_TAIL = 1e-3  # below this share of all classes, the mean of those left out is rounding
GOLDEN = (
  0.6180339887498949  # h_k = frac(k GOLDEN) fills (0, 1) evenly, whichever classes are probable
)


@struct.dataclass
class Few:
  """Few classes that stand for all: f_C(z) = softmax(location + z factors) at the first one.

  Attributes:
    location: [B, C + 2], with the logarithm of the weights; the first one is the label, the others
      have descending priorities, and the last one does not count.
    factors: [B, T, C + 2].
  """

  location: jax.Array
  factors: jax.Array

  def log_p(self, z: jax.Array) -> jax.Array:
    """log f_C [B, s] of normals z [B, s, T]."""
    # Relative to the label, because with a slice of all logits XLA took three times as long.
    factors = self.factors - self.factors[..., :1]
    location = self.location - self.location[:, :1]
    u = location[:, None] + jnp.einsum('bst,btc->bsc', z, factors)
    return -jax.nn.logsumexp(u, axis=-1)


def few_classes(tiling: Tiling, classes: Classes, label: jax.Array | None) -> Few:
  """The few classes for labels int32 [B]; without labels at the location, and the first is none."""
  batch = classes.low_rank.diag.shape[0]
  zero = jnp.zeros_like(classes.low_rank.diag, shape=(batch, classes.low_rank.num_normals))
  if label is None:
    of_label = jnp.full_like(zero[:, :1], PADDED), zero[..., None]
    label = jnp.full(batch, -1)
    z = zero
  else:
    of_label = classes.at(label[:, None])
    z = _mode(tiling, classes, of_label)
  largest, chosen, log_total, mean = _pass_at(tiling, classes, z, label)

  # Weights of the classes. One whose m_k is at least t is taken surely.
  threshold = largest.min(axis=-1, keepdims=True)
  # The last one is left out by a mask: for a slice of a `top_k`, XLA sorts all classes on a CPU.
  is_real = (largest > PADDED / 2) & (np.arange(largest.shape[-1]) < largest.shape[-1] - 1)
  location, factors = classes.at(chosen)
  u = location + jnp.einsum('bt,btc->bc', z, factors)
  # log p_k of a class with m_k = t
  if classes.kernel is None:
    threshold = threshold - _gain(jnp.square(factors).sum(axis=1))
  is_sure = (u >= threshold) & is_real
  p_sure = jnp.where(is_sure, jnp.exp(u - log_total), 0.0)
  p_other = jnp.where(is_real & ~is_sure, jnp.exp(threshold - log_total), 0.0)
  share = 1.0 - p_sure.sum(axis=-1, keepdims=True)  # of all other classes
  sampled = p_other.sum(axis=-1, keepdims=True)
  is_large = (share > SMALL_TAIL) & (sampled > 0)
  share = jnp.where(is_large, share, 1.0)
  sampled = jnp.where(is_large, sampled, 1.0)
  rest = mean - jnp.einsum('bc,btc->bt', p_sure, factors)
  shift = rest / share - jnp.einsum('bc,btc->bt', p_other, factors) / sampled
  shift = jnp.where(is_large, shift, 0.0)  # [B, T]
  weight = jnp.log(share / sampled) + threshold - u - jnp.einsum('bt,bt->b', z, shift)[:, None]
  weight = jnp.where(is_sure, 0.0, weight)
  shift = jnp.where(is_sure[:, None], 0.0, shift[..., None])

  location = jnp.where(is_real, location + weight, PADDED)
  factors = jnp.where(is_real[:, None], factors + shift, 0.0)
  return Few(
    jnp.concatenate([of_label[0], location], axis=-1),
    jnp.concatenate([of_label[1], factors], axis=-1),
  )


def _pass_at(
  tiling: Tiling, classes: Classes, z: jax.Array, label: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """A pass over all classes but the label, with logits at z [B, T].

  Returns:
    The C + 1 largest priorities log(m_k / h_k) + log_total and their classes [B, C + 1]; the
    log-sum-exp of the logits, [B, 1]; and the p-weighted mean of the factors, [B, T].
  """
  count = min(NUM_CLASSES, tiling.num_classes) + 1

  def local(classes, z, label):
    is_one_tile = count <= classes.num_classes <= tiling.tile

    def body(carry, tile: Tile):
      best, top, total, mean = carry
      counts = tile.counts & (tile.ids != label[:, None])
      u = jnp.where(counts, tile.classes.logits(z[:, None])[:, 0], PADDED)
      high = jnp.maximum(top, u.max(axis=-1, keepdims=True))
      e = jnp.exp(u - high)
      shrink = jnp.exp(top - high)
      total = total * shrink + e.sum(axis=-1, keepdims=True)
      own = tile.classes
      in_tile = _pull(own.low_rank, e) if own.kernel is None else own.sum_of(e)
      mean = mean * shrink + in_tile
      rate = (tile.ids + 1).astype(u.dtype) * GOLDEN % 1.0 + 1e-6
      priority = u - jnp.log(rate)
      if own.kernel is None:
        priority += jnp.where(counts, _gain(own.low_rank.variances()), 0.0)
      best = best_so_far(best, priority, tile, count, RECALL)
      return best, high, total, mean

    like = jnp.zeros_like(z[:, :1])
    nothing = (
      jnp.full_like(like, 2 * PADDED, shape=(z.shape[0], count)),
      jnp.zeros_like(like, jnp.int32, shape=(z.shape[0], count)),
    )
    start = (
      None if is_one_tile else nothing,
      jnp.full_like(like, 2 * PADDED),
      like,
      jnp.zeros_like(z if classes.kernel is None else classes.low_rank.diag),
    )
    best, top, total, mean = fold(tiling, classes, body, start)
    top, scale = tiling.highest(top)
    total = tiling.sum_of_shards(total * scale)
    mean = mean * scale
    if classes.kernel is not None:
      mean = _pull(classes.low_rank, mean)
    mean = tiling.sum_of_shards(mean) / total
    return *best_of_shards(tiling, *best, count), top + jnp.log(total), mean

  inputs = classes.letters(), dims('bt'), dims('b')
  outputs = dims('bc'), dims('bc'), dims('bn'), dims('bt')
  return tiling.placement.shard_map(local, inputs, outputs)(classes, z, label)


def _gain(variance: jax.Array) -> jax.Array:
  """log(m_k / p_k), bounded so that a sum with it keeps the digits of log p_k."""
  return jnp.minimum(0.5 * variance, 1e4)


def _pull(noise: LowRank, vector: jax.Array) -> jax.Array:
  """The factors times a vector [B, Q] of the noise space, [B, T]."""
  zero = jnp.zeros_like(vector, shape=(vector.shape[0], 1, noise.num_normals))
  return jax.vjp(noise.noise, zero)[1](vector[:, None])[0][:, 0]


def _mode(tiling: Tiling, classes: Classes, of_label: tuple[jax.Array, jax.Array]) -> jax.Array:
  """The mode z1 [B, T] of the posterior along the factors g of the label, as if all other classes
  had no noise: z1 = a g with a = 1 - softmax(mu + a |g|^2 e_y)_y.
  """

  mu, factors = of_label

  def local(classes):
    def body(carry, tile: Tile):
      top, total = carry
      u = tile.masked(tile.classes.mean()[:, 0])
      high = jnp.maximum(top, u.max(axis=-1, keepdims=True))
      return high, total * jnp.exp(top - high) + jnp.exp(u - high).sum(axis=-1, keepdims=True)

    zero = jnp.zeros_like(classes.low_rank.diag[:, :1])
    top, total = fold(tiling, classes, body, (zero + 2 * PADDED, zero))
    top, scale = tiling.highest(top)
    return top, jnp.log(tiling.sum_of_shards(total * scale))

  run = tiling.placement.shard_map(local, (classes.letters(),), (dims('bn'), dims('bn')))
  top, log_total = run(classes)
  log_p = (mu - top) - log_total
  log_odds = log_p - jnp.log1p(-jnp.minimum(jnp.exp(log_p), 1.0 - 1e-6))  # [B, 1]
  size = jnp.square(factors).sum(axis=1)

  # a is the zero of an increasing function, in the last of its cells that starts below it.
  step = 1.0
  low = jnp.zeros_like(mu)
  for _ in range(NUM_REFINEMENTS):
    step /= NUM_CELLS
    a = low + step * np.arange(1, NUM_CELLS, dtype=np.float32)  # [B, NUM_CELLS - 1]
    is_below = a < jax.nn.sigmoid(-(log_odds + a * size))
    low = low + step * is_below.sum(axis=-1, keepdims=True, dtype=mu.dtype)
  return low * factors[..., 0]


@struct.dataclass
class Gaussian:
  """The q of the module docstring: z M^T = (mean + x inverse, x') with (x, x') ~ N(0, I).

  It differs from N(0, I) in m dimensions only, the first ones of the rotation M.

  Attributes:
    mean: [B, m].
    lower: L [B, m, m] of the precision L L^T.
    inverse: of L.
    rotation: as in `directions.Draws`; None where m = T.
  """

  mean: jax.Array
  lower: jax.Array
  inverse: jax.Array
  rotation: Rotation | None

  def points(self, x: jax.Array, is_wide: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """The mean and the differences from it, [B, 1 + s, T], of pairs of points; and
    log N(z; 0, I) / q(z) of mean + difference and of mean - difference, [B, 2, s].

    Args:
      x: normals [B, s, T].
      is_wide: bool [s], those that come from N(mean, I).
    """
    size = self.mean.shape[-1]
    near = x[..., :size]
    away = jnp.einsum('bsn,bnt->bst', near, self.inverse)
    away = jnp.where(is_wide[:, None], near, away)
    mean = self.mean[:, None]
    both = jnp.stack([mean + away, mean - away], axis=1)  # [B, 2, s, m]

    near = jnp.einsum('bst,btn->bsn', away, self.lower)
    log_root = jnp.log(jnp.diagonal(self.lower, axis1=-2, axis2=-1)).sum(axis=-1)[:, None]
    log_q = log_root - 0.5 * jnp.square(near).sum(axis=-1)
    log_wide = -0.5 * jnp.square(away).sum(axis=-1)
    log_mixed = jnp.logaddexp(
      log_q + math.log((~is_wide).mean()), log_wide + math.log(is_wide.mean())
    )
    log_ratio = -0.5 * jnp.square(both).sum(axis=-1) - log_mixed[:, None]

    rest = jnp.pad(x[..., size:], ((0, 0), (1, 0), (0, 0)))
    z = jnp.concatenate([jnp.concatenate([mean, away], axis=1), rest], axis=-1)
    return rotated(z, self.rotation), log_ratio


def fit(few: Few) -> Gaussian:
  """The q of few classes. With N_k the factors of class k and p = softmax(u), at the solution

  mean = E_q[N_y - sum_k p_k N_k],    precision = I + E_q[sum_k p_k N_k N_k^T - (N p) (N p)^T]

  The m dimensions are spanned by the differences of the first m classes' noise and the label's.
  """
  # What all classes share is seen by no softmax, and would cancel in float32.
  shared = jnp.einsum('bc,btc->bt', jax.nn.softmax(few.location), few.factors)
  factors = few.factors - shared[..., None]
  batch, num_normals, count = factors.shape
  size = min(NUM_FITTED, count - 1, num_normals)
  rotation = None
  if size < num_normals:
    rows = factors[..., 1 : size + 1] - factors[..., :1]
    rotation = rotation_to(jnp.swapaxes(rows, 1, 2))
    factors = jnp.einsum('bmt,btc->bmc', leading_rows(rotation, size), factors)
  # Antithetic constants; NumPy promises that their values stay.
  half = np.random.RandomState(0).normal(size=(NUM_FIT_POINTS // 2, size))
  x = jnp.asarray(np.concatenate([half, -half]), factors.dtype)
  # With zeros of the factors, because inside a `jax.shard_map` these may vary along an axis.
  square = jnp.zeros_like(factors, shape=(batch, size, size))
  eye = square + jnp.eye(size, dtype=factors.dtype)

  def curvature_at(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradient of log softmax_y [B, m] and minus its Hessian [B, m, m], at the mean of z."""
    p = jax.nn.softmax(few.location[:, None] + jnp.einsum('bst,btc->bsc', z, factors))
    mean = p.mean(axis=1)  # [B, C]
    each = jnp.einsum('bsc,btc->bst', p, factors)
    second = jnp.einsum('btc,buc->btu', factors * mean[:, None], factors)
    return factors[..., 0] - each.mean(axis=1), second - jnp.einsum(
      'bst,bsu->btu', each, each
    ) / z.shape[1]

  def move(_, state):
    mean, _, inverse = state
    z = mean[:, None] + jnp.einsum('sn,bnt->bst', x, inverse)
    slope, curvature = curvature_at(z)
    inverse = root_of(eye + curvature, eye)[1]
    half_step = jnp.einsum('bnt,bt->bn', inverse, slope - mean)
    step = jnp.einsum('bn,bnt->bt', half_step, inverse)
    length = jnp.linalg.norm(step, axis=-1, keepdims=True)
    step = step * jnp.minimum(1.0, MAX_STEP / jnp.where(length > 0, length, 1.0))
    return mean + jnp.where(jnp.isfinite(step), step, 0.0), curvature, inverse

  state = jnp.zeros_like(factors[..., 0]), square, square
  mean, curvature, _ = jax.lax.fori_loop(0, NUM_FIT_STEPS, move, state)
  lower, inverse = root_of(eye + SHARE * curvature, eye)
  return Gaussian(mean, lower, inverse, rotation)


def root_of(matrix: jax.Array, eye: jax.Array) -> tuple[jax.Array, jax.Array]:
  """L of a matrix L L^T [B, m, m], and its inverse; I where rounding leaves none.

  Elimination below the diagonal makes D U of the matrix U^T D U, and U^-T of I beside it. On a CPU
  the library's call takes a third of the time, but with jaxlib 0.10 it never ends a step on several
  devices.
  """
  size = matrix.shape[-1]
  place = np.arange(size, dtype=np.int32)  # as j is, where types are not promoted

  def eliminate(j, both):
    row = jax.lax.dynamic_index_in_dim(both, j, 1, keepdims=False)  # [B, 2 m]
    pivot = jax.lax.dynamic_index_in_dim(row, j, 1)  # [B, 1]
    # By symmetry, the row has the column below the pivot.
    share = jnp.where(place > j, row[:, :size], 0.0) / pivot  # [B, m]
    return both - share[..., None] * row[:, None]

  both = jnp.concatenate([matrix, eye], axis=-1)
  both = jax.lax.fori_loop(0, size - 1, eliminate, both)
  pivots = jnp.diagonal(both, axis1=1, axis2=2)  # [B, m]
  both = both * jax.lax.rsqrt(pivots)[..., None]
  is_finite = jnp.isfinite(both).all(axis=(1, 2), keepdims=True)
  lower = jnp.where(place[:, None] >= place, jnp.swapaxes(both[..., :size], 1, 2), 0.0)
  return jnp.where(is_finite, lower, eye), jnp.where(is_finite, both[..., size:], eye)


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
  few = few_classes(tiling, noisy_classes(logits, noise, not tiling.is_whole), label)
  q = fit(few)
  num_pairs = -(-num_samples // 2)
  count = max(MIN_POINTS, POINTS_PER_SAMPLE * num_samples) // 2
  index = np.arange(count, dtype=np.int32)
  batch, num_normals, _ = few.factors.shape
  # One normal more, whose first one moves the places below: it is independent of all the others.
  x = sampler(keys, index, num_normals + 1).astype(few.factors.dtype)
  x = jnp.broadcast_to(x, (batch, *x.shape[1:]))
  z, log_ratio = q.points(x[..., :-1], np.arange(count) >= (1.0 - WIDE_SHARE) * count)
  mean = z[:, 0]
  away = z[:, 1:]
  log_p = few.log_p(jnp.concatenate([z[:, :1] + away, z[:, :1] - away], axis=1))
  log_w = log_p + log_ratio.reshape(batch, -1)
  log_pair = jnp.logaddexp(log_w[:, :count], log_w[:, count:])
  log_total = jax.nn.logsumexp(log_pair, axis=-1, keepdims=True)

  # One of S / 2 equal parts of the cumulative weights each, all moved alike (systematic sampling),
  # from short differences to long ones. In the order of Sobol's sequence every n-th pair would
  # come from one part of the cube.
  by_length = jnp.argsort(jnp.square(away).sum(axis=-1), axis=-1)
  offset = 0.5 + 0.5 * jax.lax.erf(math.sqrt(0.5) * x[:, :1, -1])  # [B, 1], uniform
  places = (jnp.arange(num_pairs, dtype=log_w.dtype) + offset) / num_pairs
  weights = jnp.take_along_axis(
    jnp.exp(log_pair - log_total), by_length, axis=-1, mode='promise_in_bounds'
  )
  cumulative = jnp.cumsum(weights, axis=-1)
  places = places * cumulative[:, -1:]
  # A count, since inside a `jax.shard_map` JAX refuses `jnp.searchsorted`.
  pair = (cumulative[:, None] < places[..., None]).sum(axis=-1, dtype=jnp.int32)
  pair = jnp.take_along_axis(
    by_length, jnp.minimum(pair, count - 1), axis=-1, mode='promise_in_bounds'
  )
  # log p_C / f_C(z) plus the logarithm of twice the share in the pair
  log_weights = (log_w - log_p).reshape(batch, 2, count) - log_pair[:, None]
  log_weights += (log_total - math.log(count))[..., None]
  log_weights = jnp.take_along_axis(
    log_weights, pair[:, None], axis=2, mode='promise_in_bounds'
  ).reshape(batch, -1)
  away = jnp.take_along_axis(away, pair[..., None], axis=1, mode='promise_in_bounds')
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
  few = few_classes(tiling, noisy_classes(logits, noise, not tiling.is_whole), None)
  found = principal_directions(few.location, few.factors)
  return jnp.pad(found, ((0, 0), (0, 0), (0, num_normals - found.shape[-1])))
