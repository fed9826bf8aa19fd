"""Where the batch and the classes lie: logical axes 'batch' and 'vocab' under the active mesh."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import core
from flax.linen import partitioning as flax_partitioning


@dataclasses.dataclass(frozen=True)
class Placement:
  """How arrays are cut over devices (static under jit).

  Attributes:
    mesh: the active mesh; None for one device.
    batch: the mesh axis, or axes, of B; None where it is whole.
    vocab: those of K.
  """

  mesh: jax.sharding.Mesh | None = None
  batch: str | tuple[str, ...] | None = None
  vocab: str | tuple[str, ...] | None = None

  @classmethod
  def current(cls) -> 'Placement':
    """That of the active mesh (`jax.set_mesh`) and flax's logical axis rules."""
    batch, vocab = mesh_axes('batch'), mesh_axes('vocab')
    mesh = None if batch is None and vocab is None else core.meta.get_global_mesh()
    return cls(mesh, batch, vocab)

  def shard_map(self, function, specs: str):
    """`function` on each device's part of its arguments.

    Args:
      function: from arrays to an array or a tuple of arrays.
      specs: a letter per dimension, as 'btk k -> b': b is cut over `batch`, k over `vocab`.
    """
    if self.mesh is None:
      return function
    inputs, outputs = (tuple(map(self._spec, side.split())) for side in specs.split('->'))
    outputs = outputs if len(outputs) > 1 else outputs[0]
    return jax.shard_map(
      function, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False
    )

  def _spec(self, letters):
    axes = {'b': self.batch, 'k': self.vocab}
    return jax.sharding.PartitionSpec(*(axes.get(letter) for letter in letters))


def num_shards(logical_axis: str) -> int:
  """Shards of a logical axis under the active mesh and flax's axis rules; 1 outside a mesh."""
  axis = mesh_axes(logical_axis)
  names = axis if isinstance(axis, tuple) else (axis,)
  return math.prod(core.meta.get_global_mesh().shape[name] for name in names if name is not None)


def mesh_axes(logical_axis: str) -> str | tuple[str, ...] | None:
  """The mesh axis, or axes, of a logical axis; None where it is whole."""
  if core.meta.get_global_mesh() is None or not flax_partitioning.get_axis_rules():
    return None
  (axis,) = flax_partitioning.logical_to_mesh_axes((logical_axis,)) or (None,)
  return axis


def bytes_per_device(logits: jax.Array) -> int:
  """Bytes of an array [B, Kp] on one device, at least 1."""
  shards = num_shards('vocab') * num_shards('batch')
  return max(1, logits.size * logits.dtype.itemsize // shards)


def tile(x, num_tiles):
  """[..., Kp] to [M, ..., k], sharded by tile."""
  x = jnp.moveaxis(x.reshape(*x.shape[:-1], num_tiles, -1), -2, 0)
  return on_its_shard(x)


def untile(x):
  """[M, B, k] to [B, Kp]."""
  x = jnp.moveaxis(x, 0, -2)
  return x.reshape(*x.shape[:-2], -1)


def on_every_shard(x, num_tiles):
  """[...] to [M, ...]: each tile gets a copy, so that its gradient stays on its own shard until the
  loop is over.
  """
  return on_its_shard(jnp.broadcast_to(x, (num_tiles, *x.shape)))


def on_its_shard(x):
  """Pins the tile axis of [M, ...] to the model axis and leaves the other axes to the compiler."""
  if num_shards('vocab') == 1:
    return x
  spec = jax.sharding.PartitionSpec(
    mesh_axes('vocab'), *(jax.sharding.PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1)
  )
  return jax.lax.with_sharding_constraint(x, spec)
