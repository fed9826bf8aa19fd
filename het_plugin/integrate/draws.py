"""Which normals are drawn for a softmax: rotated, and around the noise that explains the label.

Rotation. Low-discrepancy points fill their leading coordinates best. With G [T, K] the factors in
logit space and p the softmax of the location, the covariance of the logits as the softmax sees them
is A = G~ diag(p) G~^T [T, T], where G~_tk = G_tk - sum_i p_i G_ti. The subtraction is there because
a softmax does not change if all logits move together. For an orthogonal U whose first columns span
the principal directions of A, z U^T is standard normal, so the estimate stays unbiased for any U
that does not depend on z. The gradient of U is stopped. Two rounds of subspace iteration find the
directions. On a trained head with R = 50 they were as good at S = 64 as an eigendecomposition per
example, while one U for a whole batch gained little. They need products with `NUM_DIRECTIONS`
columns only, and A is never formed.

Tilt (importance sampling with a shifted mean, as in Glasserman, Heidelberger and Shahabuddin 1999).
The loss needs p(y) = E[softmax(mu + z G)_y] of one label. With z ~ N(m, I) and the weights
exp(-z m + |m|^2 / 2) the estimate is unbiased for any m that does not depend on z. Its variance is
lowest where m is near the mode of softmax(mu + z G)_y N(z; 0, I), the solution of

    m = G (e_y - softmax(mu + m G))

The same draws then also estimate the gradient better, whose mean is over this posterior of z. Its
own gradient is stopped.

Fit. With few samples the covariance of the draws matters too. Where the noise is large, the
posterior of z is narrower than N(0, I) in its leading directions and its mean is far from the mode.
In the span of `NUM_DIRECTIONS` principal directions the Gaussian q that is closest to it,
KL(q | posterior), has

    E_q[N (e_y - softmax(u))] = mean,    precision = I + E_q[N (diag(p) - p p^T) N^T]

with N the noise of the logits along the directions (Opper and Archambeau 2009, "The variational
Gaussian approximation revisited"). A few fixed-point steps with E_q over fixed points find it. They
need products with N only. q's tails are lighter than the posterior's, so only a share of the
precision is used (`SHARE`).
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from het_plugin.integrate.placement import dims
from het_plugin.integrate.samplers import Sampler, sobol

NUM_DIRECTIONS = 8
NUM_ROUNDS = 2
SMALL = 1e-4
NUM_TILT_STEPS = 2
MAX_TILT = 1.5
NUM_FIT_STEPS = 4
NUM_FIT_POINTS = 16
MAX_FIT_STEP = 2.0  # in standard deviations of the noise
SHARE = 0.6


@struct.dataclass
class Draws:
  """Keys, rotation, scale and mean with which the normals of a batch are drawn.

  Attributes:
    keys: typed PRNG keys [B], one per example, or [1], whose draws all examples share.
    rotation: (V [B, T, m], P [B, m, T]) of U = I - P^T V^T; None for the sampler's own coordinates.
    mean: m [B, T]; None for 0.
    scale: [B, m], standard deviations of the leading coordinates of a rotation; None for 1.
  """

  keys: jax.Array
  rotation: tuple[jax.Array, jax.Array] | None = None
  mean: jax.Array | None = None
  scale: jax.Array | None = None

  def letters(self) -> 'Draws':
    """Letters of the dimensions, for `Placement.shard_map`."""
    rotation = None if self.rotation is None else (dims('btm'), dims('bmt'))
    mean = None if self.mean is None else dims('bt')
    scale = None if self.scale is None else dims('bm')
    return Draws(dims('1' if self.keys.shape[0] == 1 else 'b'), rotation, mean, scale)

  def normals(self, sampler: Sampler, sample_index: jax.Array, num_normals: int) -> jax.Array:
    """z [B, s, T], or [1, s, T] if all examples share it."""
    z = sampler(self.keys, sample_index, num_normals)
    if self.scale is not None:
      rest = ((0, 0), (0, num_normals - self.scale.shape[1]))
      z = z * jnp.pad(self.scale, rest, constant_values=1.0)[:, None].astype(z.dtype)
    if self.rotation is not None:
      left, right = (x.astype(z.dtype) for x in self.rotation)
      z = jnp.broadcast_to(z, (left.shape[0], *z.shape[1:]))
      along = jnp.einsum('bst,btm->bsm', z, left, precision=jax.lax.Precision.HIGHEST)
      z = z - jnp.einsum('bsm,bmt->bst', along, right, precision=jax.lax.Precision.HIGHEST)
    return z if self.mean is None else z + self.mean[:, None].astype(z.dtype)

  def log_weight(self, z: jax.Array) -> jax.Array:
    """log N(z; 0, I) - log q(z), [B, s], for normals z [B, s, T] drawn from q."""
    if self.mean is None:
      return jnp.zeros(z.shape[:2], z.dtype)
    mean = self.mean[:, None].astype(z.dtype)
    log_weight = jnp.sum(mean * (0.5 * mean - z), axis=-1)
    if self.scale is None or self.rotation is None:
      return log_weight
    left, right = (x.astype(z.dtype) for x in self.rotation)
    scale, highest = self.scale[:, None].astype(z.dtype), jax.lax.Precision.HIGHEST
    leading, z = left[:, : scale.shape[-1]], z - mean
    along = jnp.einsum('bst,bmt->bsm', z, right, precision=highest)
    along = jnp.einsum('bsm,bjm->bsj', along, leading, precision=highest)
    along = z[..., : scale.shape[-1]] - along  # in the leading coordinates
    log_ratio = 0.5 * jnp.square(along) * (1.0 / jnp.square(scale) - 1.0) + jnp.log(scale)
    return log_weight + log_ratio.sum(axis=-1)


def find_tilt(
  to_logits: Callable[[jax.Array], jax.Array],
  location: jax.Array,
  label: jax.Array,
  num_normals: int,
) -> tuple[jax.Array, jax.Array]:
  """The mean m [B, T] of `Draws` for labels int32 [B], and location + m G [B, K].

  The other arguments are those of `find_rotation`. Each step goes to the maximum of the quadratic
  model of log softmax_y - |m|^2 / 2 along its gradient.
  """
  is_label = jax.nn.one_hot(label, location.shape[-1], dtype=location.dtype)
  # Of the location, so that inside `jax.shard_map` it is varying: `pull` would sum over devices.
  mean, u = jnp.zeros_like(location, shape=(location.shape[0], num_normals)), location
  _, pull = jax.vjp(to_logits, mean[:, None])
  for _ in range(NUM_TILT_STEPS):
    p = jax.nn.softmax(u)
    step = pull((is_label - p)[:, None])[0][:, 0] - mean  # [B, T]
    along = to_logits(step[:, None])[:, 0]  # [B, K]
    along -= jnp.sum(p * along, axis=-1, keepdims=True)
    slope = jnp.sum(jnp.square(step), axis=-1, keepdims=True)
    curvature = slope + jnp.sum(p * jnp.square(along), axis=-1, keepdims=True)
    length = slope / jnp.where(curvature > 0, curvature, 1.0)
    mean, u = mean + length * step, u + length * along
  shrink = shrink_of_tilt(mean)
  return jax.lax.stop_gradient((mean * shrink, location + shrink * (u - location)))


def shrink_of_tilt(mean: jax.Array) -> jax.Array:
  """The factor [B, 1] that makes means [B, T] no longer than `MAX_TILT`."""
  # The weights of a long m vary much where the mode is not the only one.
  size = jnp.linalg.norm(mean, axis=-1, keepdims=True)
  return jnp.minimum(1.0, MAX_TILT / jnp.where(size > 0, size, 1.0))


def fit(
  draws: Draws,
  to_logits: Callable[[jax.Array], jax.Array],
  location: jax.Array,
  label: jax.Array,
) -> Draws:
  """Draws of few samples: mean, rotation and scale of the fit (module docstring).

  Args:
    draws: with the mean m of `find_tilt`.
    to_logits: as in `find_rotation`.
    location: location + m G [B, K], as `find_tilt` returns it.
    label: int32 [B].
  """
  mean = mean_of(draws)
  axes = leading_axes(find_rotation(to_logits, location, mean.shape[1], num_rounds=1), mean.dtype)
  noise = to_logits(axes)
  # A softmax ignores what all logits share.
  noise -= jnp.sum(jax.nn.softmax(location)[:, None] * noise, axis=-1, keepdims=True)
  is_label = jax.nn.one_hot(label, location.shape[-1], dtype=location.dtype)

  def expectations(at):
    """The gradient of log softmax_y [B, m] and minus its Hessian [B, m, m], for at [B, s, m]."""
    p = jax.nn.softmax(location[:, None] + at @ noise)
    average, along = p.mean(axis=1), p @ jnp.swapaxes(noise, 1, 2)
    gradient = jnp.einsum('bk,bmk->bm', is_label - average, noise)
    second = jnp.einsum('bmk,bnk->bmn', noise * average[:, None], noise)
    return gradient, second - jnp.einsum('bsm,bsn->bmn', along, along) / at.shape[1]

  return fit_along(draws, axes, expectations)


def mean_of(draws: Draws) -> jax.Array:
  """The mean [B, T]; ValueError if there is none."""
  if draws.mean is None:
    raise ValueError('fit: the draws need a mean; call find_tilt first')
  return draws.mean


def leading_axes(rotation: tuple[jax.Array, jax.Array], dtype: jnp.dtype) -> jax.Array:
  """The first m columns of U as rows [B, m, T]."""
  left, right = rotation
  count, num_normals = right.shape[1:]
  return jnp.eye(count, num_normals, dtype=dtype) - left[:, :count] @ right


def fit_along(
  draws: Draws,
  axes: jax.Array,
  expectations: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
) -> Draws:
  """The fit in the span of axes [B, m, T], from the expectations that `fit` defines."""
  mean, count = mean_of(draws), axes.shape[1]
  points = sobol(jax.random.key(0)[None], jnp.arange(NUM_FIT_POINTS), count).astype(mean.dtype)
  start = jnp.einsum('bmt,bt->bm', axes, mean)
  offset = jnp.zeros_like(start)  # of q's mean from m
  _, curvature = expectations(offset[:, None])
  size, basis = jnp.linalg.eigh(curvature)
  for _ in range(NUM_FIT_STEPS):
    root = basis * jax.lax.rsqrt(1.0 + size)[:, None]
    gradient, curvature = expectations(offset[:, None] + points @ jnp.swapaxes(root, 1, 2))
    size, basis = jnp.linalg.eigh(curvature)
    size = jnp.maximum(size, 0.0)
    step = jnp.einsum('bmn,bm->bn', basis, gradient - start - offset) / (1.0 + size)
    step = jnp.einsum('bmn,bn->bm', basis, step)
    length = jnp.linalg.norm(step, axis=-1, keepdims=True)
    offset += step * jnp.minimum(1.0, MAX_FIT_STEP / jnp.where(length > 0, length, 1.0))
  # The largest come first, where low-discrepancy points are best.
  size, basis = size[:, ::-1], basis[:, :, ::-1]
  mean = mean + jnp.einsum('bm,bmt->bt', offset, axes)
  rotation = _reflections(jnp.einsum('bmn,bmt->bnt', basis, axes))
  scale = jax.lax.rsqrt(1.0 + SHARE * size)
  return jax.lax.stop_gradient(
    dataclasses.replace(draws, mean=mean, rotation=rotation, scale=scale)
  )


def find_rotation(
  to_logits: Callable[[jax.Array], jax.Array],
  location: jax.Array,
  num_normals: int,
  num_rounds: int = NUM_ROUNDS,
) -> tuple[jax.Array, jax.Array]:
  """The rotation of `Draws`.

  Args:
    to_logits: the linear map from normals [B, m, T] to the noise of the logits over tau [B, m, K].
    location: location of the logits over tau [B, K].
    num_normals: T.
    num_rounds: of subspace iteration.
  """
  p = jax.nn.softmax(location)[:, None]

  def multiply(directions):
    noise, pull = jax.vjp(to_logits, directions)
    weighted = p * (noise - jnp.sum(p * noise, axis=-1, keepdims=True))
    return pull(weighted - p * weighted.sum(axis=-1, keepdims=True))[0]

  # Varying, as in `find_tilt`.
  return rotation_of(multiply, jnp.zeros_like(location[:, :1, None]), num_normals, num_rounds)


def rotation_of(
  multiply: Callable[[jax.Array], jax.Array], zero: jax.Array, num_normals: int, num_rounds: int
) -> tuple[jax.Array, jax.Array]:
  """The rotation of `Draws` from products with the covariance A: multiply(directions [B, m, T]);
  zero [B, 1, 1] has the dtype.
  """
  count = min(NUM_DIRECTIONS, num_normals)
  # A constant of the program, which then needs no keys; NumPy promises that its values stay.
  start = np.random.RandomState(0).normal(size=(count, num_normals)).astype(np.float32)
  directions = jnp.asarray(start, zero.dtype) + zero
  for _ in range(num_rounds):
    directions = multiply(directions)
    largest = jnp.abs(directions).max(axis=(1, 2), keepdims=True)
    directions /= jnp.where(largest > 0, largest, 1.0)
  return jax.lax.stop_gradient(_reflections(directions))


def _reflections(rows):
  """Householder's reflections U = H_0 H_1 ... whose leading columns span rows [B, m, T].

  Where a row is nearly in the span of those before it, the rest of it is rounding. A coordinate of
  `SMALL` of its length then sets the column, so that an estimate does not depend on rounding: with
  none, p moved by 5e-5 to 0.07 where the input moved by 1e-7 (HET-XL, R = 5, K = 10).
  """
  lefts, rights = [], []
  for j in range(rows.shape[1]):
    place = jnp.arange(rows.shape[2])
    x = jnp.where(place < j, 0.0, rows[:, j])  # [B, T]
    sign = jnp.where(x[:, j] < 0, -1.0, 1.0)
    small = SMALL * jnp.linalg.norm(rows[:, j], axis=-1)
    x = x + jnp.where(place == j, (sign * small)[:, None], 0.0)
    size = jnp.linalg.norm(x, axis=-1)
    v = x + jnp.where(place == j, (sign * size)[:, None], 0.0)
    length = jnp.linalg.norm(v, axis=-1, keepdims=True)
    v = v / jnp.where(length > 0, length, 1.0)
    along = jnp.einsum('bmt,bt->bm', rows, v, precision=jax.lax.Precision.HIGHEST)
    rows = rows - 2.0 * along[:, :, None] * v[:, None]
    # U (I - 2 v v^T) = U - p v^T with p = 2 U v
    p = v
    for left, right in zip(lefts, rights, strict=True):
      p = p - right * jnp.sum(left * v, axis=-1, keepdims=True)
    lefts.append(v)
    rights.append(2.0 * p)
  return jnp.stack(lefts, axis=-1), jnp.stack(rights, axis=1)
