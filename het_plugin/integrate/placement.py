"""How batch and classes are sharded: logical axes 'batch' and 'vocab' under the active mesh."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import core
from flax.linen import partitioning as flax_partitioning
from jax import export

from het_plugin.integrate.gaussian import GaussianLogits

LOGICAL_AXES = ('batch', 'vocab')  # of logits [B, K]
# Bytes of logits that are made at one time.
CPU_BYTES = 2**25  # glibc gives larger blocks back to the system at each step
DEVICE_BYTES = 2**27  # each loop over tiles costs a TPU a copy of W in bfloat16, and zeros as large
AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


@dataclasses.dataclass(frozen=True)
class Placement:
  """How arrays are cut over devices (static under jit).

  Attributes:
    mesh: the active mesh; None for one device.
    batch: the mesh axis or axes of B; None if it is not sharded.
    vocab: the mesh axis or axes of K; None if it is not sharded.
  """

  mesh: AnyMesh | None = None
  batch: str | tuple[str, ...] | None = None
  vocab: str | tuple[str, ...] | None = None

  @classmethod
  def current(cls, batch_size: int = 0) -> 'Placement':
    """The placement under the active mesh (`jax.set_mesh`) and flax's logical axis rules.

    A batch that the mesh does not divide is not sharded.
    """
    batch, vocab = (mesh_axes(x) if num_shards(x) > 1 else None for x in LOGICAL_AXES)
    if batch_size % num_shards('batch'):
      batch = None
    mesh = None if batch is None and vocab is None else core.meta.get_global_mesh()
    return cls(mesh, batch, vocab)

  def shard_map(
    self, function: Callable[..., Any], inputs: Sequence[Any], outputs: Any
  ) -> Callable[..., Any]:
    """`function` on each device's part of its arguments; outside a mesh, `function` itself.

    Args:
      function: maps arrays to arrays.
      inputs: a pytree per argument, with a letter per dimension of every array: b is cut over
        `batch`, k over `vocab`. In the place of a tree, letters of the first dimensions of all its
        arrays.
      outputs: the same for the result.
    """
    if self.mesh is None:
      return function
    in_specs, out_specs = jax.tree.map(self._spec, (tuple(inputs), outputs))
    return jax.shard_map(
      function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )

  def shard_index(self) -> jax.Array | int:
    """Inside `shard_map`, the index of this device's part of the classes."""
    return 0 if self.vocab is None else jax.lax.axis_index(self.vocab)

  def _spec(self, letters: str) -> jax.sharding.PartitionSpec:
    axes = {'b': self.batch, 'k': self.vocab}
    return jax.sharding.PartitionSpec(*(axes.get(letter) for letter in letters))


def on_mesh_of_caller(
  function: Callable[..., Any], result: str, logits: GaussianLogits, *args: Any
) -> Any:
  """`function(logits, *args)` also inside `jax.shard_map` and on a mesh with explicit axes.

  Inside `jax.shard_map`, arrays that are the same on all devices become varying along the axes that
  others vary along, so that JAX sums their gradients. With explicit axes (the default of
  `jax.make_mesh`) the compiler shards what is in between. Both may be: a `jax.shard_map` over some
  axes leaves the others explicit.

  Args:
    function: maps logits and arrays to an array.
    result: letters of the dimensions of its result, 'b' or 'bk', sharded as the location is.
    logits: `GaussianLogits`.
    *args: arrays or None.
  """
  if in_shard_map():
    logits, args = varying_alike((logits, args))
  if logits.location.shape[0] == 0:  # nothing to compute, and a dimension of -1 would be unknown
    return logits.location if result == 'bk' else logits.location[:, 0]
  sharding = jax.typeof(logits.location).sharding
  if not sharding.mesh.explicit_axes:
    return function(logits, *args)
  sharding = sharding.update(spec=jax.sharding.PartitionSpec(*sharding.spec[: len(result)]))
  explicit = sharding.mesh.explicit_axes
  return jax.sharding.auto_axes(function, axes=explicit, out_sharding=sharding)(logits, *args)


def varying_alike(tree: Any) -> Any:
  """The arrays of a tree, varying along the axes of a `jax.shard_map` that any of them does."""
  varying = jax.tree.map(lambda x: jax.typeof(x).mat.varying, tree)
  axes = frozenset().union(*jax.tree.leaves(varying, is_leaf=lambda x: isinstance(x, frozenset)))
  return jax.tree.map(
    lambda x, has: jax.lax.pcast(x, tuple(sorted(axes - has)), to='varying'), tree, varying
  )


def in_shard_map() -> bool:
  """Whether this is inside a `jax.shard_map`: its axes have cut the arrays already, and the
  compiler shards along the others.
  """
  return bool(jax.sharding.get_abstract_mesh().manual_axes)


def num_shards(logical_axis: str) -> int:
  """Shards of 'batch' or 'vocab' under the active mesh and flax's axis rules; 1 outside a mesh."""
  mesh = core.meta.get_global_mesh()
  axis = mesh_axes(logical_axis)
  if mesh is None or axis is None:
    return 1
  return math.prod(mesh.shape[name] for name in ((axis,) if isinstance(axis, str) else axis))


def mesh_axes(logical_axis: str) -> str | tuple[str, ...] | None:
  """The mesh axis or axes of 'batch' or 'vocab'; None if it is not sharded.

  A mesh axis that the rules give to both is that of the first rule, as in flax.
  """
  has_mesh = core.meta.get_global_mesh() is not None and not in_shard_map()
  if not has_mesh or not flax_partitioning.get_axis_rules():
    return None
  axes = flax_partitioning.logical_to_mesh_axes(LOGICAL_AXES) or (None, None)
  return axes[LOGICAL_AXES.index(logical_axis)]


def budget(max_bytes: int | None) -> int:
  """`max_bytes`, or if it is None that of the devices of the active mesh or the default ones."""
  if max_bytes is not None:
    return max_bytes
  return CPU_BYTES if platform() == 'cpu' else DEVICE_BYTES


def platform() -> str:
  """'cpu', 'tpu', ...: that of the devices of the active mesh, or of the default ones."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return jax.default_backend() if device is None else device.platform


def num_examples(batch: Any) -> int:
  """B; 1 if it is symbolic (`jax.export`)."""
  return 1 if export.is_symbolic_dim(batch) else batch


def bytes_per_device(logits: jax.Array) -> int:
  """Bytes of an array [B, Kp] on one device, at least 1; with a symbolic B (`jax.export`), those
  of one example.
  """
  batch, num_classes = logits.shape
  num_elements = num_examples(batch) * num_classes
  shards = num_shards('vocab') * num_shards('batch')
  return max(1, num_elements * logits.dtype.itemsize // shards)
