"""Principal directions of the noise: for the normals of a softmax, and for fewer factors.

Low-discrepancy points fill their leading coordinates best. With G [T, K] the factors in logit space
and p the softmax of the location, the covariance of the logits as the softmax sees them is
A = G~ diag(p) G~^T [T, T], where G~_tk = G_tk - sum_i p_i G_ti. The subtraction is there because a
softmax does not change if all logits move together. For an orthogonal M whose first rows span
the principal directions of A, z M is standard normal, so the estimate stays unbiased for any M that
does not depend on z. The gradient of M is stopped. Two rounds of subspace iteration find the
directions, over the few classes that stand for all (`proposal`).
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from het_plugin.integrate.gaussian import LowRank
from het_plugin.integrate.samplers import Index, Sampler

NUM_DIRECTIONS = 8
NUM_ROUNDS = 2
SMALL = 1e-4
# Of subspace iteration for `principal_axes`, and products with the Gram matrix in each.
NUM_AXIS_ROUNDS = 2
NUM_PRODUCTS = 2
HIGHEST = jax.lax.Precision.HIGHEST  # a rotation that is not orthogonal is a bias

Rotation = tuple[jax.Array, jax.Array]  # V [B, T, m], P [B, m, T] of M = I - V P


@struct.dataclass
class Draws:
  """Keys and rotation with which the normals of a batch are drawn.

  Attributes:
    keys: typed PRNG keys [B], one per example, or [1], whose draws all examples share.
    rotation: V and P of z M = z - z V P; None for the sampler's own coordinates.
  """

  keys: jax.Array
  rotation: Rotation | None = None

  def normals(self, sampler: Sampler, sample_index: Index, num_normals: int) -> jax.Array:
    """z [B, s, T], or [1, s, T] if all examples share it."""
    return rotated(sampler(self.keys, sample_index, num_normals), self.rotation)


def rotated(z: jax.Array, rotation: Rotation | None) -> jax.Array:
  """z M [B, s, T] of z [B, s, T] or [1, s, T]; z itself without a rotation."""
  if rotation is None:
    return z
  left, right = (x.astype(z.dtype) for x in rotation)
  z = jnp.broadcast_to(z, (left.shape[0], *z.shape[1:]))
  along = jnp.einsum('bst,btm->bsm', z, left, precision=HIGHEST)
  return z - jnp.einsum('bsm,bmt->bst', along, right, precision=HIGHEST)


def turned_to(rotation: Rotation, x: jax.Array) -> jax.Array:
  """M x of x [B, T, n]: what the normals before the rotation are multiplied with."""
  left, right = rotation
  along = jnp.einsum('bmt,btn->bmn', right, x, precision=HIGHEST)
  return x - jnp.einsum('btm,bmn->btn', left, along, precision=HIGHEST)


def principal_directions(
  location: jax.Array,
  factors: jax.Array,
  count: int = NUM_DIRECTIONS,
  num_rounds: int = NUM_ROUNDS,
) -> jax.Array:
  """The principal directions of A, [B, m, T], neither orthogonal nor of length 1.

  Args:
    location: of the logits over tau [B, C].
    factors: [B, T, C].
    count: m, if T is not less.
    num_rounds: of subspace iteration. The last directions depend less on rounding after fewer.
  """
  p = jax.nn.softmax(location)[:, None]
  centred = factors - jnp.sum(p * factors, axis=-1, keepdims=True)
  num_normals = factors.shape[1]
  # A constant of the program, which then needs no keys; NumPy promises that its values stay.
  start = np.random.RandomState(0).normal(size=(min(count, num_normals), num_normals))
  start = jnp.asarray(start.astype(np.float32), factors.dtype)
  directions = jnp.broadcast_to(start, (factors.shape[0], *start.shape))
  for _ in range(num_rounds):
    noise = jnp.einsum('bmt,btc->bmc', directions, centred)
    directions = jnp.einsum('bmc,btc->bmt', p * noise, centred)
    largest = jnp.abs(directions).max(axis=(1, 2), keepdims=True)
    directions /= jnp.where(largest > 0, largest, 1.0)
  return jax.lax.stop_gradient(directions)


def rotation_to(rows: jax.Array) -> Rotation:
  """The rotation of `Draws` whose leading rows span rows [B, m, T] (Householder reflections).

  Where a row is nearly in the span of those before it, the rest of it is rounding. A coordinate of
  `SMALL` of its length then sets the column, so that an estimate does not depend on rounding: with
  none, p moved by 5e-5 to 0.07 where the input moved by 1e-7 (HET-XL, R = 5, K = 10).
  """
  batch, count, num_normals = rows.shape
  place = jnp.arange(num_normals)

  def reflect(j: jax.Array, state: tuple) -> tuple:
    rows, left, right = state
    row = rows[:, j]
    is_j = place == j
    x = jnp.where(place < j, 0.0, row)  # [B, T]
    sign = jnp.where(x[:, j] < 0, -1.0, 1.0)
    x = x + jnp.where(is_j, (SMALL * sign * jnp.linalg.norm(row, axis=-1))[:, None], 0.0)
    v = x + jnp.where(is_j, (sign * jnp.linalg.norm(x, axis=-1))[:, None], 0.0)
    length = jnp.linalg.norm(v, axis=-1, keepdims=True)
    v = v / jnp.where(length > 0, length, 1.0)
    along = jnp.einsum('bmt,bt->bm', rows, v, precision=HIGHEST)
    rows = rows - 2.0 * along[:, :, None] * v[:, None]
    # With U = M^T: U (I - 2 v v^T) = U - p v^T with p = 2 U v
    along = jnp.einsum('btm,bt->bm', left, v, precision=HIGHEST)
    p = v - jnp.einsum('bm,bmt->bt', along, right, precision=HIGHEST)
    is_column = jnp.arange(count) == j  # in place of a scatter, for which ONNX has no word
    left = jnp.where(is_column, v[:, :, None], left)
    return rows, left, jnp.where(is_column[:, None], 2.0 * p[:, None], right)

  # A loop, since a program with every reflection is several times as large.
  start = rows, jnp.zeros_like(rows, shape=(batch, num_normals, count)), jnp.zeros_like(rows)
  return jax.lax.fori_loop(0, count, reflect, start)[1:]


# Fewer factors


def reduced(noise: LowRank, num_factors: int) -> LowRank:
  """Noise of m = `num_factors` principal factors with the remainder 'diag', for the exact sigmoid.

  It is the same noise if m is at least R, where fewer factors would save nothing. The variances of
  the logits are s_k^2 = sum_t (F_t w_k)^2, with F [T, Q] all factors of an example and w_k the
  column of W of class k. With any orthonormal U [m, T], the same sum is

      s_k^2 = sum_j (U_j F w_k)^2 + sum_t (E_t w_k)^2,    E = F - U^T U F

  The first term projects m factors. In the second one, the covariance E^T E is replaced by its
  diagonal e_q = sum_t F_tq^2 - sum_j (U F)_jq^2, as if the dimensions of the noise space were
  independent:

      s_k^2 ~ sum_j (U_j F w_k)^2 + sum_q e_q W_qk^2

  which costs as much as one more factor. The rows of U are the principal directions of the Gram
  matrix F F^T [T, T], which leave the least e; their gradient is stopped. Everything else is
  differentiated: the result is a Gaussian over logits as any other, with a likelihood of its own.
  """
  if num_factors >= noise.num_factors:
    return noise
  factors = noise.factors()  # [B, T, Q]
  axes = principal_axes(jax.lax.stop_gradient(factors), num_factors)
  loading = jnp.einsum('bmt,btq->bmq', axes, factors, precision=HIGHEST)  # U F
  rest = noise.variances() - jnp.square(loading).sum(1)
  return LowRank(None, loading, _root(rest), 'diag')


def principal_axes(factors: jax.Array, count: int) -> jax.Array:
  """Orthonormal U [B, m, T] of factors [B, T, Q], near the first m = `count` singular vectors."""
  gram = jnp.einsum('btq,bsq->bts', factors, factors, precision=HIGHEST)  # [B, T, T]
  largest = jnp.abs(gram).max(axis=(1, 2), keepdims=True)
  gram /= jnp.where(largest > 0, largest, 1.0)
  # A constant of the program, as in `principal_directions`.
  start = np.random.RandomState(0).normal(size=(count, factors.shape[1])).astype(np.float32)
  axes = jnp.broadcast_to(start.astype(factors.dtype), (factors.shape[0], *start.shape))
  leading = jnp.eye(*start.shape, dtype=factors.dtype)[None]
  for _ in range(NUM_AXIS_ROUNDS):
    for _ in range(NUM_PRODUCTS):
      axes = jnp.matmul(axes, gram, precision=HIGHEST)
    axes = rotated(leading, rotation_to(axes))  # orthonormal, also where they span less than m
  return axes


def _root(x: jax.Array) -> jax.Array:
  """sqrt(x), and 0 with a gradient of 0 where rounding left nothing of x."""
  is_positive = x > 0
  return jnp.where(is_positive, jnp.sqrt(jnp.where(is_positive, x, 1.0)), 0.0)
