"""The objective of a fit over all rows: a sum over blocks of rows, with its gradient in one pass.

L-BFGS works in coordinates in which the features are white: the matrices and biases that act on
them are [K; b] = T theta, where T T^T is the inverse of the features' second moments plus the
curvature of the penalty. Badly scaled or correlated features then cost no iterations. The
objective itself does not change.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct, traverse_util

from het_plugin.estimators.model import ROW_MULTIPLE, Model, on_features

# Budget for the logits, samples and factors of a block, in bytes.
BLOCK_BYTES = 2**27
# On a CPU they stay in its caches: at K = 100 and R = 4, HET took 0.5 to 0.7 of the time.
CACHE_BYTES = 2**23
MOMENT_ROWS = 8  # per feature, and 2^13 at least: what is nearly separable has few rows that count


@struct.dataclass
class Rows:
  """N rows in blocks of b; the last block is filled up with rows of weight 0.

  Attributes:
    x: [n, b, D].
    target: int32 [n, b, L] or float [n, b, K].
    weight: [n, b].
    total: the sum of the weights.
    strength, noise_strength: 1 / C and 1 / C_noise.
  """

  x: jax.Array
  target: jax.Array
  weight: jax.Array
  total: jax.Array
  strength: jax.Array
  noise_strength: jax.Array


def block_rows(model: Model, num_rows: int) -> int:
  """Rows per block, so that the numbers per class and factor or sample fit `BLOCK_BYTES`."""
  num_factors = dict(model.noise).get('num_factors', 0)
  samples = 0 if model.head == 'det' or model.link == 'sigmoid' else min(32, model.num_samples)
  copies = 2 + num_factors + samples
  row_bytes = copies * model.num_classes * 4
  limit = BLOCK_BYTES // row_bytes
  if jax.default_backend() == 'cpu':
    limit = max(CACHE_BYTES // row_bytes, min(limit, 256))
  limit = max(64, limit)
  num_blocks = -(-num_rows // limit)
  return -(-num_rows // num_blocks // ROW_MULTIPLE) * ROW_MULTIPLE


def make_rows(model, x, mean, target, weight, c, c_noise) -> Rows:
  """`Rows` from arrays [N, ...]; `mean` [D] is subtracted from the features."""
  size = block_rows(model, len(x))
  num_blocks = -(-len(x) // size)

  def blocks(values, dtype):
    padded = np.zeros((num_blocks * size, *values.shape[1:]), dtype)
    np.copyto(padded[: len(values)], values, casting='same_kind')
    return jnp.asarray(padded.reshape(num_blocks, size, *values.shape[1:]))

  return Rows(
    blocks(x - mean, np.float32),
    blocks(target, target.dtype),
    blocks(weight, np.float32),
    jnp.float32(weight.sum()),
    jnp.float32(1.0 / c),
    jnp.float32(1.0 / c_noise),
  )


def _block_sum(model, params, x, target, weight):
  return jnp.sum(weight * model.nll(params, x, target))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(model, params, rows):
  """sum_i w_i nll_i."""
  return jax.lax.scan(
    lambda total, block: (total + _block_sum(model, params, *block), None),
    jnp.zeros(()),
    (rows.x, rows.target, rows.weight),
  )[0]


# The gradient of a sum over blocks is the sum of their gradients, and the cotangent g of the sum is
# a number. So the forward pass adds up value and gradient of a block together, and the backward
# pass multiplies by g. Reverse mode through the scan would keep or recompute the logits of every
# block.
def _sum_fwd(model, params, rows):
  def add(totals, block):
    new = jax.value_and_grad(lambda p: _block_sum(model, p, *block))(params)
    return jax.tree.map(jnp.add, totals, new), None

  start = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
  return jax.lax.scan(add, start, (rows.x, rows.target, rows.weight))[0]


def _sum_bwd(model, gradient, g):
  del model
  return jax.tree.map(lambda x: g * x, gradient), None


_sum.defvjp(_sum_fwd, _sum_bwd)


def objective(model: Model, theta, rows: Rows, whitening: jax.Array):
  """The objective (`model`) at white coordinates."""
  params = unwhiten(model, theta, whitening)
  of_location, of_noise = model.penalty(params)
  penalty = 0.5 * (rows.strength * of_location + rows.noise_strength * of_noise)
  return (_sum(model, model.multiplied(params), rows) + penalty) / rows.total


def mean_nll(model: Model, params, rows: Rows) -> jax.Array:
  """The objective without its penalty."""
  return _sum(model, model.multiplied(params), rows) / rows.total


@functools.partial(jax.jit, static_argnums=0)
def _moments(model, params, rows):
  """E[c (x, 1) (x, 1)^T] and E[c], where c is the curvature of a row's loss by its logits.

  That is the variance of the indicator of a class without noise, averaged over the classes. The
  mean is over about `MOMENT_ROWS` (D + 1) rows, evenly spaced: it preconditions the search, and all
  rows would cost as much as several iterations.
  """
  size = rows.x.shape[-1] + 1
  stride = max(1, rows.weight.size // max(MOMENT_ROWS * size, 2**13))
  x, weight = rows.x.reshape(-1, size - 1)[::stride], rows.weight.ravel()[::stride]
  blocks = -(-len(x) // rows.x.shape[1])
  x = jnp.pad(x, [(0, blocks * rows.x.shape[1] - len(x)), (0, 0)])
  weight = jnp.pad(weight, (0, len(x) - len(weight)))

  # The Hessian of -log softmax_y by column k of [W; b] is p_k (1 - p_k) (x, 1) (x, 1)^T.
  def add(total, block):
    x, weight = block
    p = model.location_prob(params, x)
    weight = weight * jnp.mean(p * (1.0 - p), axis=1)
    x = jnp.concatenate([x, jnp.ones_like(x[:, :1])], axis=1)
    moments = jnp.matmul(x.T * weight, x, precision=jax.lax.Precision.HIGHEST)
    return total + moments, None

  blocks = x.reshape(blocks, -1, size - 1), weight.reshape(blocks, -1)
  return jax.lax.scan(add, jnp.zeros((size, size)), blocks)[0] / weight.sum()


def whitening_of(model: Model, params, rows: Rows) -> jax.Array:
  """T [D + 1, D + 1], where T T^T is the inverse curvature of the objective by a column of W.

  The curvature is that at `params`, averaged over the classes.
  """
  moments = np.asarray(_moments(model, params, rows), np.float64)
  # The bias is not regularised.
  ridge = np.full(len(moments), float(rows.strength) / float(rows.total))
  ridge[-1] = 0.0
  moments += np.diag(ridge)
  # Small features would lie below the floor otherwise.
  scale = 1.0 / np.sqrt(np.maximum(np.diag(moments), np.finfo(np.float32).tiny))
  values, vectors = np.linalg.eigh(scale[:, None] * moments * scale)
  floor = values[-1] * len(moments) * np.finfo(np.float32).eps
  return jnp.asarray(scale[:, None] * vectors / np.sqrt(np.maximum(values, floor)), jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def _map_on_features(model, params, matrix):
  # x K + b = (x, 1) [K; b], so [K; b] = T theta turns the features (x, 1) into (x, 1) T, whose
  # second moments, weighted by the curvature, are the identity if T T^T is their inverse.
  flat = traverse_util.flatten_dict(params)
  for path in list(flat):
    if on_features(model, path):
      beside = (*path[:-1], path[-1].removesuffix('kernel') + 'bias')
      kernel, bias = flat[path], flat[beside]
      both = jnp.concatenate([kernel.reshape(len(kernel), -1), bias.reshape(1, -1)])
      both = jnp.matmul(matrix, both, precision=jax.lax.Precision.HIGHEST)
      flat[path] = both[:-1].reshape(kernel.shape)
      flat[beside] = both[-1].reshape(bias.shape)
  return traverse_util.unflatten_dict(flat)


def unwhiten(model: Model, theta, whitening: jax.Array):
  """Parameters from white coordinates."""
  return _map_on_features(model, theta, whitening)


def whiten(model: Model, params, whitening: jax.Array):
  """White coordinates from parameters."""
  inverse = np.linalg.inv(np.asarray(whitening, np.float64))
  return _map_on_features(model, params, jnp.asarray(inverse, whitening.dtype))
