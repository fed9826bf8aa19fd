"""Sums over many examples: the Gram matrix of centred features and the sums of each class.

Examples pass in blocks, on the host in float64 or over a mesh in float32 with compensated sums.
Neither holds more of them than a block, nor anything of size N x K.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

HOST_ROWS = 4096  # of a block
DEVICE_ROWS = 1024  # of a block on each device; products are summed in float32 within it
FLOAT32_CUT = (
  1e-6  # of the largest eigenvalue: below, a Gram matrix from the mesh is rounding error
)


def centred_sums(
  x: np.ndarray, ids: np.ndarray, num_classes: int, mean: np.ndarray, mesh: Mesh | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """X^T X and the class sums of X, with X = x - mean.

  Args:
    x: any float [N, D], possibly memory-mapped.
    ids: int [N], classes 0 .. num_classes - 1.
    num_classes: K.
    mean: float64 [D].
    mesh: devices to compute on; each sums rows of its own, without communication, and the sums are
      added up in float64 at the end. None for the host.

  Returns:
    float64 [D, D] and [K, D].
  """
  if mesh is not None:
    return _mesh_sums(x, ids, num_classes, mean, mesh)
  gram, sums = np.zeros((len(mean), len(mean))), np.zeros((num_classes, len(mean)))
  for rows in blocks(len(x), HOST_ROWS):
    z = x[rows] - mean
    gram += z.T @ z
    order = np.argsort(ids[rows], kind='stable')
    present, starts = np.unique(ids[rows][order], return_index=True)
    sums[present] += np.add.reduceat(z[order], starts, axis=0)
  return gram, sums


def moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Mean, float64 [D], and which features are constant, bool [D], of x, any float [N, D]."""
  total = np.zeros(x.shape[1])
  low, high = x[0], x[0]
  for rows in blocks(len(x), HOST_ROWS):
    total += x[rows].sum(axis=0, dtype=np.float64)
    low, high = np.minimum(low, x[rows].min(axis=0)), np.maximum(high, x[rows].max(axis=0))
  return total / len(x), low == high


def _mesh_sums(x, ids, num_classes, mean, mesh):
  over_rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
  dim = len(mean)
  shapes = (mesh.size, dim, dim), (mesh.size, num_classes, dim)
  # (sum, compensation) of each device.
  zeros = jax.jit(
    lambda: tuple((jnp.zeros(s, jnp.float32), jnp.zeros(s, jnp.float32)) for s in shapes),
    out_shardings=over_rows,
  )
  state, add = zeros(), _add_block(mesh)
  for rows in blocks(len(x), DEVICE_ROWS * mesh.size):
    z = (x[rows] - mean).astype(np.float32)
    padding = DEVICE_ROWS * mesh.size - len(z)
    z = np.pad(z, ((0, padding), (0, 0)))
    here = np.pad(ids[rows].astype(np.int32), (0, padding))
    state = add(state, *jax.device_put((z, here), over_rows))
  return tuple(
    np.sum(jax.device_get(total), axis=0, dtype=np.float64)
    + np.sum(jax.device_get(compensation), axis=0, dtype=np.float64)
    for total, compensation in state
  )


@functools.cache
def _add_block(mesh: Mesh):
  spec = PartitionSpec(mesh.axis_names)

  def add(state, z, ids):
    (gram, gram_rest), (sums, sums_rest) = state
    block = jnp.matmul(z.T, z, precision=jax.lax.Precision.HIGHEST)
    # Padding adds zeros to class 0.
    of_classes = jax.ops.segment_sum(z, ids, sums.shape[1])
    return _add_exactly(gram, gram_rest, block), _add_exactly(sums, sums_rest, of_classes)

  mapped = jax.shard_map(add, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec)
  return jax.jit(mapped, donate_argnums=0)


def _add_exactly(total, rest, block):
  """total + rest + block, `rest` collecting what float32 rounds off (Knuth's two-sum)."""
  block = block[None]
  new = total + block
  of_block = new - total
  return new, rest + ((total - (new - of_block)) + (block - of_block))


def blocks(length: int, step: int) -> Iterator[slice]:
  """Slices of at most `step`, at least 1, that cover 0 .. length."""
  step = max(1, step)
  return (slice(start, min(start + step, length)) for start in range(0, length, step))
