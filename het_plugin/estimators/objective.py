"""The objective of a fit: a sum over blocks of all rows, with its gradient in one pass."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from het_plugin.estimators import compilation
from het_plugin.estimators.model import ROW_MULTIPLE, Model
from het_plugin.integrate import Draws

# Budget for the logits, samples and factors of a block, in bytes.
BLOCK_BYTES = 2**27
# On a CPU they stay in its caches: at K = 100 and R = 4, HET took 0.5 to 0.7 of the time.
CACHE_BYTES = 2**23


@struct.dataclass
class Blocks:
  """N rows in blocks of b; the last block is filled up with rows of weight 0.

  Attributes:
    x: [n, b, D].
    target: int32 [n, b, L] or float [n, b, K].
    weight: [n, b].
    total: the sum of the weights.
    strength, noise_strength: 1 / C and 1 / C_noise.
    draws: `with_draws`; None is those that the model takes at its parameters.
  """

  x: jax.Array
  target: jax.Array
  weight: jax.Array
  total: jax.Array
  strength: jax.Array
  noise_strength: jax.Array
  draws: Draws | None = None


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


def make_rows(model, x, mean, target, weight, c, c_noise) -> Blocks:
  """`Blocks` from arrays [N, ...]; `mean` [D] is subtracted from the features."""
  size = block_rows(model, len(x))
  num_blocks = -(-len(x) // size)

  def blocks(values, dtype):
    padded = np.zeros((num_blocks * size, *values.shape[1:]), dtype)
    np.copyto(padded[: len(values)], values, casting='same_kind')
    return jnp.asarray(padded.reshape(num_blocks, size, *values.shape[1:]))

  return Blocks(
    blocks(x - mean, np.float32),
    blocks(target, target.dtype),
    blocks(weight, np.float32),
    jnp.float32(weight.sum()),
    jnp.float32(1.0 / c),
    jnp.float32(1.0 / c_noise),
  )


def with_draws(model: Model, params, rows: Blocks) -> Blocks:
  """Blocks with the draws of the model at `params`, which then do not move with the parameters.

  The objective is then a smooth function, whose gradient is exact. For a head with R factors they
  are 16 (R + 1) numbers a row.
  """
  if not model.is_sampled:
    return rows
  return dataclasses.replace(rows, draws=_draws(model, params, rows.x))


@functools.partial(compilation.jit, static_argnums=0)
def _draws(model, params, x):
  params = model.multiplied(params)
  return jax.lax.scan(lambda _, x: (None, model.draws(params, x)), None, x)[1]


def _block_sum(model, params, x, target, weight, draws):
  return jnp.sum(weight * model.nll(params, x, target, draws))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(model, params, rows):
  """sum_i w_i nll_i."""
  return jax.lax.scan(
    lambda total, block: (total + _block_sum(model, params, *block), None),
    jnp.zeros(()),
    (rows.x, rows.target, rows.weight, rows.draws),
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
  return jax.lax.scan(add, start, (rows.x, rows.target, rows.weight, rows.draws))[0]


def _sum_bwd(model, gradient, g):
  del model
  return jax.tree.map(lambda x: g * x, gradient), None


_sum.defvjp(_sum_fwd, _sum_bwd)


def objective(model: Model, params, rows: Blocks) -> jax.Array:
  """The objective (`model`)."""
  of_location, of_noise = model.penalty(params)
  penalty = 0.5 * (rows.strength * of_location + rows.noise_strength * of_noise)
  return (_sum(model, model.multiplied(params), rows) + penalty) / rows.total


def mean_nll(model: Model, params, rows: Blocks) -> jax.Array:
  """The objective without its penalty."""
  return _sum(model, model.multiplied(params), rows) / rows.total
