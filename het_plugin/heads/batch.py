"""How a batch of pairs is cut over devices and into chunks, for its softmax (`batch_softmax`)."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import core
from flax.linen import partitioning as flax_partitioning

from het_plugin.integrate.gaussian import PADDED
from het_plugin.integrate.placement import AnyMesh, Placement, in_shard_map, mesh_axes

CHUNK_BYTES = 2**26


@dataclasses.dataclass(frozen=True)
class BatchPlan:
  """On which devices the rows lie and in which chunks they are processed (static under jit).

  Attributes:
    mesh: the active mesh; None where it does not cut the batch.
    axes: the mesh axes that cut the batch, slowest first.
    dtype: compute type of the products.
    chunk_bytes: budget for the logits of a chunk, in bytes per device.
  """

  mesh: AnyMesh | None
  axes: tuple[str, ...]
  dtype: jnp.dtype
  chunk_bytes: int

  @property
  def accumulate(self) -> jnp.dtype:
    return jnp.promote_types(self.dtype, jnp.float32)

  def shard_map(self, function, inputs: tuple, outputs: tuple):
    """`function` on each device's part; arrays with 'b' are cut along the rows, with '' whole."""
    return Placement(self.mesh, self.axes).shard_map(function, inputs, outputs)

  def gather(self, x: jax.Array) -> jax.Array:
    """[b, ...] of every device as one [B, ...]."""
    return jax.lax.all_gather(x, self.axes, tiled=True) if self.axes else x

  def scatter_sum(self, x: jax.Array) -> jax.Array:
    """The sum of [B, ...] over devices; each device gets its own part [b, ...]."""
    # The transpose of `gather`: every device used all gathered rows, so the gradient of a row is
    # the sum of what the devices computed for it.
    if not self.axes:
      return x
    return jax.lax.psum_scatter(x, self.axes, scatter_dimension=0, tiled=True)

  def sum(self, x):
    return jax.lax.psum(x, self.axes) if self.axes else x

  def max(self, x):
    return jax.lax.pmax(x, self.axes) if self.axes else x

  def labels(self, num_rows: int) -> jax.Array:
    """The column that belongs to each of this device's rows, int32 [b]."""
    start = jax.lax.axis_index(self.axes) * num_rows if self.axes else 0
    return start + jnp.arange(num_rows, dtype=jnp.int32)

  def chunks(self, num_rows: int, bytes_a_row: int) -> tuple[int, int]:
    """(number of chunks, rows of each) within the budget, nearly all of them full."""
    limit = max(1, self.chunk_bytes // max(1, bytes_a_row))
    size = math.ceil(num_rows / math.ceil(num_rows / limit))
    return math.ceil(num_rows / size), size


def plan_batch(caller, rows, columns, dtype, chunk_bytes):
  """The `BatchPlan` of a loss over rows and columns [B, D]; errors name the caller."""
  if rows.shape != columns.shape or rows.ndim != 2 or len(rows) == 0:
    raise ValueError(
      f'{caller}: rows {rows.shape} and columns {columns.shape} must be of one shape [B, D], with '
      'B at least 1'
    )
  if chunk_bytes < 1:
    raise ValueError(f'{caller}: chunk_bytes={chunk_bytes} must be at least 1')
  mesh, axes = _cut(len(rows))
  return BatchPlan(mesh, axes, jnp.dtype(dtype), chunk_bytes)


def _cut(batch_size):
  """The active mesh, and those of its axes that cut a batch of this size."""
  mesh = core.meta.get_global_mesh()
  if mesh is None or in_shard_map() or not flax_partitioning.get_axis_rules():
    return None, ()
  batch = mesh_axes('batch')
  batch = batch if isinstance(batch, tuple) else (batch,)
  batch = [axis for axis in batch if axis is not None]
  axes = []
  shards = 1
  for axis in (*batch, *(axis for axis in mesh.axis_names if axis not in batch)):
    if batch_size % (shards * mesh.shape[axis]) == 0:
      axes.append(axis)
      shards *= mesh.shape[axis]
  return (mesh, tuple(axes)) if axes else (None, ())


def is_real_pair(mask, batch_size):
  """bool [B]: the pairs that count, all where there is no mask."""
  return jnp.ones(batch_size, bool) if mask is None else mask > 0


def real_rows(x, valid, dtype):
  """Sets rows that do not count to 0, even if they contain NaN."""
  return jnp.where(valid.reshape(-1, *(1,) * (x.ndim - 1)), x, 0).astype(dtype)


def to_chunks(x, chunks):
  """[b, ...] to [C, c, ...]; the last chunk is filled up with copies of the last row."""
  # `in_batch` masks the losses of the copies, so they add nothing to a gradient.
  num_chunks, size = chunks
  if num_chunks * size != len(x):
    x = x[jnp.minimum(jnp.arange(num_chunks * size), len(x) - 1)]
  return x.reshape(num_chunks, size, *x.shape[1:])


def in_batch(chunks, num_rows):
  """bool [C, c], False at the rows that `to_chunks` added."""
  return jnp.arange(math.prod(chunks)).reshape(chunks) < num_rows


def from_chunks(x, num_rows):
  """The inverse of `to_chunks`: [n, c, ...] to [num_rows, ...]."""
  return x.reshape(-1, *x.shape[2:])[:num_rows]


def products(plan, x, y):
  """x [c, D] times y [B, D] gives [c, B]; both have the compute type."""
  return jax.lax.dot_general(x, y, (((1,), (1,)), ((), ())), preferred_element_type=plan.accumulate)


def excluded(valid, dtype):
  """Added to the logits of a row or column: 0, or `PADDED` if it is no candidate for others."""
  return jnp.where(valid, 0.0, PADDED).astype(dtype)
