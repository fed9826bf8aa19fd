"""Rotated normals: the leading coordinates of a sample move what matters most to the softmax.

Low-discrepancy points fill their leading coordinates best. With G [T, K] the factors in logit space
and p the softmax of the location, the covariance of the logits as the softmax sees them is
A = G~ diag(p) G~^T [T, T], where G~_tk = G_tk - sum_i p_i G_ti, since a softmax ignores what all
logits share. For an orthogonal U whose first columns span the principal directions of A, z U^T is
standard normal, so the estimate stays unbiased for any U that does not depend on z. The gradient of
U is stopped.

Two rounds of subspace iteration find the directions. On a trained head with R = 50 they were as
good at S = 64 as an eigendecomposition per example, while one U for a whole batch gained little.
They need products with `NUM_DIRECTIONS` columns only, and A is never formed.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from het_plugin.integrate.samplers import Sampler

NUM_DIRECTIONS = 8
NUM_ROUNDS = 2


@struct.dataclass
class Draws:
  """Keys and rotation from which the normals of a batch are drawn.

  Attributes:
    keys: typed PRNG keys [B], one per example, or [1], whose draws all examples share.
    rotation: (V [B, T, m], P [B, m, T]) of U = I - P^T V^T; None for the sampler's own coordinates.
  """

  keys: jax.Array
  rotation: tuple[jax.Array, jax.Array] | None = None

  def letters(self) -> 'Draws':
    """Letters of the dimensions, for `Placement.shard_map`."""
    rotation = None if self.rotation is None else ('btm', 'bmt')
    return Draws('b' if len(self.keys) > 1 else '1', rotation)

  def normals(self, sampler: Sampler, sample_index: jax.Array, num_normals: int) -> jax.Array:
    """z [B, s, T], or [1, s, T] if all examples share it."""
    z = sampler(self.keys, sample_index, num_normals)
    if self.rotation is None:
      return z
    left, right = (x.astype(z.dtype) for x in self.rotation)
    z = jnp.broadcast_to(z, (len(left), *z.shape[1:]))
    along = jnp.einsum('bst,btm->bsm', z, left, precision=jax.lax.Precision.HIGHEST)
    return z - jnp.einsum('bsm,bmt->bst', along, right, precision=jax.lax.Precision.HIGHEST)


def find_rotation(
  to_logits: Callable[[jax.Array], jax.Array], location: jax.Array, num_normals: int
) -> tuple[jax.Array, jax.Array]:
  """The rotation of `Draws`.

  Args:
    to_logits: the linear map from normals [B, m, T] to the noise of the logits over tau [B, m, K].
    location: location of the logits over tau [B, K].
    num_normals: T.
  """
  count = min(NUM_DIRECTIONS, num_normals)
  p = jax.nn.softmax(location)[:, None]
  start = jax.random.normal(jax.random.key(0), (count, num_normals), location.dtype)
  directions = jnp.broadcast_to(start, (len(location), *start.shape))
  for _ in range(NUM_ROUNDS):
    noise, pull = jax.vjp(to_logits, directions)
    weighted = p * (noise - jnp.sum(p * noise, axis=-1, keepdims=True))
    (directions,) = pull(weighted - p * weighted.sum(axis=-1, keepdims=True))
    largest = jnp.abs(directions).max(axis=(1, 2), keepdims=True)
    directions /= jnp.where(largest > 0, largest, 1.0)
  return jax.lax.stop_gradient(_reflections(directions))


def _reflections(rows):
  """Householder's reflections U = H_0 H_1 ... whose leading columns span rows [B, m, T]."""
  lefts, rights = [], []
  for j in range(rows.shape[1]):
    x = jnp.where(jnp.arange(rows.shape[2]) < j, 0.0, rows[:, j])  # [B, T]
    size = jnp.linalg.norm(x, axis=-1)
    v = x.at[:, j].add(jnp.where(x[:, j] < 0, -size, size))
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
