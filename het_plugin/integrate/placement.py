"""How batch and classes are sharded: logical axes 'batch' and 'vocab' under the active mesh."""

import dataclasses
import functools
import math
from typing import Any

import jax
from flax import core
from flax.linen import partitioning as flax_partitioning
from jax import export

LOGICAL_AXES = ('batch', 'vocab')  # of logits [B, K]
AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
# Of the logits of the examples that a CPU takes at one time. With many classes that is one example.
# With K = 50 and S = 64 ten at a time took half the CPU time of one, whose loop costs more than
# its sums.
GROUP_BYTES = 2**17


def dims(letters: str | None) -> Any:
  """Letters of an array's dimensions, put in its place in a pytree (`Placement.shard_map`)."""
  return letters


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

  def shard_map(self, function, inputs, outputs):
    """`function` on each device's part of its arguments; outside a mesh, `function` itself.

    Args:
      function: maps arrays to arrays.
      inputs: a pytree per argument, with a letter per dimension of every array: b is cut over
        `batch`, k over `vocab`.
      outputs: the same for the result.
    """
    if self.mesh is None:
      return function
    in_specs, out_specs = jax.tree.map(self._spec, (tuple(inputs), outputs))
    return jax.shard_map(
      function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )

  def by_example(self, function, inputs, example_bytes):
    """`function` of a batch; on a CPU without a mesh, of one example or a few after the other.

    Their arrays then stay in the cache: the loss and gradient of HET-H took half the CPU time
    (S = 64, K = 4000, B = 16).

    Args:
      function: from arrays to arrays [B, ...], independent across examples.
      inputs: letters as in `shard_map`; arrays whose first dimension is not b are shared.
      example_bytes: of the logits of an example.
    """
    if self.mesh is not None:
      return function

    def in_turn(*args):
      leaves, tree = jax.tree.flatten(args)
      is_cut = [letters.startswith('b') for letters in jax.tree.leaves(inputs)]

      def some(group):
        parts = iter(group)
        mixed = [next(parts) if cut else x for x, cut in zip(leaves, is_cut, strict=True)]
        return function(*tree.unflatten(mixed))

      examples = [x for x, cut in zip(leaves, is_cut, strict=True) if cut]
      size = _group_size(examples[0].shape[0], example_bytes)
      groups = [x.reshape(x.shape[0] // size, size, *x.shape[1:]) for x in examples]
      return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.lax.map(some, groups))

    return functools.partial(jax.lax.platform_dependent, cpu=in_turn, default=function)

  def shard_index(self) -> jax.Array | int:
    """Inside `shard_map`, the index of this device's part of the classes."""
    return 0 if self.vocab is None else jax.lax.axis_index(self.vocab)

  def _spec(self, letters):
    axes = {'b': self.batch, 'k': self.vocab}
    return jax.sharding.PartitionSpec(*(axes.get(letter) for letter in letters))


def _group_size(batch_size, example_bytes):
  """The largest divisor of B that `GROUP_BYTES` has room for; 1 where B is symbolic."""
  if not isinstance(batch_size, int):
    return 1
  most = max(1, min(batch_size, GROUP_BYTES // example_bytes))
  return next(size for size in range(most, 0, -1) if batch_size % size == 0)


def on_mesh_of_caller(function, result: str, logits, *args):
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


def varying_alike(tree):
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


def bytes_per_device(logits: jax.Array) -> int:
  """Bytes of an array [B, Kp] on one device, at least 1; with a symbolic B (`jax.export`), those
  of one example.
  """
  batch, num_classes = logits.shape
  num_elements = (1 if export.is_symbolic_dim(batch) else batch) * num_classes
  shards = num_shards('vocab') * num_shards('batch')
  return max(1, num_elements * logits.dtype.itemsize // shards)
