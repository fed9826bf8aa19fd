"""The objective of a fit: a sum over blocks of all rows, with its gradient in one pass."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

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
_ALIGNMENT = 64  # bytes


@struct.dataclass
class Blocks:
  """N rows in blocks of b; the last block is filled up with rows of weight 0.

  Attributes:
    x: [n, b, D].
    target: int32 [n, b, L] or float [n, b, K].
    weight: [n, b].
    total: the sum of the weights.
    strength, noise_strength: 1 / C and 1 / C_noise.
    draws: `drawn`; None is those that the model takes at its parameters.
  """

  x: jax.Array
  target: jax.Array
  weight: jax.Array
  total: jax.Array
  strength: jax.Array
  noise_strength: jax.Array
  draws: Draws | None = None

  @property
  def scales(self) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What the objective needs besides the rows: total, strength and noise_strength."""
    return self.total, self.strength, self.noise_strength

  @property
  def width(self) -> int:
    """D."""
    return self.x.shape[-1]

  def drawn(self, model: Model, params: dict) -> 'Blocks':
    """Blocks with the draws of the model at `params`, which do not move with the parameters.

    The objective is then a smooth function, whose gradient is exact. For a head with R factors they
    are 16 (R + 1) numbers a row.
    """
    if not model.is_sampled:
      return self
    return dataclasses.replace(self, draws=_draws(model, params, self.x))

  def some(self, num_rows: int) -> 'Blocks':
    """About `num_rows` rows, evenly spaced, in blocks of the same size."""
    stride = self.weight.size // num_rows
    return self if stride < 2 else _strided(self, stride)

  def stages(self, model: Model) -> Iterator[tuple['Blocks', float, str]]:
    """Rows that are fitted one after the other, the gap at which a fit may end, and a title."""
    del model
    yield self, 0.0, ''


@functools.partial(compilation.jit, static_argnums=1)
def _strided(blocks: Blocks, stride: int) -> Blocks:
  size = blocks.weight.shape[1]

  def chosen(values):
    rows = values.reshape(-1, *values.shape[2:])[::stride]
    padding = -len(rows) % size
    rows = jnp.pad(rows, [(0, padding), *[(0, 0)] * (rows.ndim - 1)])
    return rows.reshape(-1, size, *rows.shape[1:])

  names = 'x', 'target', 'weight'
  return dataclasses.replace(blocks, **{name: chosen(getattr(blocks, name)) for name in names})


def block_rows(model: Model, num_rows: int, num_features: int) -> int:
  """Rows per block: its features, and its numbers per class and factor or sample, fit a budget."""
  num_factors = dict(model.noise).get('num_factors', 0)
  samples = 0 if model.head == 'det' or model.link == 'sigmoid' else min(32, model.num_samples)
  copies = 2 + num_factors + samples
  row_bytes = 4 * max(copies * model.num_classes, num_features)
  limit = BLOCK_BYTES // row_bytes
  if jax.default_backend() == 'cpu':
    limit = max(CACHE_BYTES // row_bytes, min(limit, 256))
  limit = max(64, limit)
  num_blocks = -(-num_rows // limit)
  return -(-num_rows // num_blocks // ROW_MULTIPLE) * ROW_MULTIPLE


def make_blocks(
  x: np.ndarray,
  mean: np.ndarray,
  target: np.ndarray,
  weight: np.ndarray,
  size: int,
  num_blocks: int | None = None,
  **others: Any,
) -> Blocks:
  """`Blocks` of `size` rows each from arrays [N, ...], and from what they have besides.

  `mean` [D] is subtracted from the features. None is as many blocks as the rows need.
  """
  num_blocks = num_blocks or -(-len(x) // size)
  blocks = {}
  for name, values in {'x': x, 'target': target, 'weight': weight}.items():
    dtype = values.dtype if name == 'target' else np.float32
    padded = _aligned((num_blocks * size, *values.shape[1:]), dtype)
    padded[len(values) :] = 0
    rows = padded[: len(values)]
    if name == 'x':
      np.subtract(values, mean, out=rows, casting='same_kind')
    else:
      np.copyto(rows, values, casting='same_kind')
    blocks[name] = jax.device_put(padded.reshape(num_blocks, size, *values.shape[1:]))
  return Blocks(**blocks, **others)


def _aligned(shape, dtype):
  """An array without values that JAX takes on a CPU without a copy."""
  dtype = np.dtype(dtype)
  content = np.empty(int(np.prod(shape)) * dtype.itemsize + _ALIGNMENT, np.uint8)
  content = content[-content.ctypes.data % _ALIGNMENT :]
  return content[: int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)


def make_rows(model, x, mean, target, weight, c, c_noise) -> Blocks:
  """`Blocks` from arrays [N, ...]; `mean` [D] is subtracted from the features."""
  return make_blocks(
    x,
    mean,
    target,
    weight,
    block_rows(model, *x.shape),
    total=jnp.float32(weight.sum()),
    strength=jnp.float32(1.0 / c),
    noise_strength=jnp.float32(1.0 / c_noise),
  )


@functools.partial(compilation.jit, static_argnums=0)
def _draws(model, params, x):
  params = model.multiplied(params)
  return jax.lax.scan(lambda _, x: (None, model.draws(params, x)), None, x)[1]


def add(model: Model, params: dict, totals: Any, rows: Blocks) -> Any:
  """Adds sum_i w_i nll_i of the rows and its gradient by `params`, of `Model.multiplied`.

  Value and gradient of a block are made together: reverse mode through the loop would keep or
  recompute the logits of every block.
  """

  def of_block(params, x, target, weight, draws):
    return jnp.sum(weight * model.nll(params, x, target, draws))

  def body(totals, block):
    return jax.tree.map(jnp.add, totals, jax.value_and_grad(of_block)(params, *block)), None

  return jax.lax.scan(body, totals, (rows.x, rows.target, rows.weight, rows.draws))[0]


def nothing(params: dict) -> Any:
  """The totals of no row."""
  return jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
