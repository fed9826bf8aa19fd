"""Device mesh, logical axis rules and jit with shardings, as in t5x's `partitioning` module.

Names and meanings follow t5x, so its gin bindings and axis names work here. The mesh axes are
(data, model) or (replica, data, model).
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from flax import traverse_util
from flax.linen import partitioning as flax_partitioning
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from het_plugin.system import processes
from het_plugin.training import optimizers
from het_plugin.training import state as state_lib

PyTree = Any
LogicalAxisRules = Sequence[tuple[str, str | tuple[str, ...] | None]]

# The replicated names of t5x and of the heads: the factors R and the noise dimension Q are not
# split.
_REPLICATED_AXES = (
  'relpos_buckets',
  'abspos_buckets',
  'length',
  'layers',
  'stack',
  'mlp_activations',
  'factors',
  'noise',
)


def standard_logical_axis_rules(
  activation_partitioning_dims: Literal[1, 2] = 1,
  parameter_partitioning_dims: Literal[1, 2] = 1,
  additional_rules: LogicalAxisRules = (),
) -> LogicalAxisRules:
  """Rules from logical axis names to the mesh axes 'data' and 'model', as t5x sets them.

  Args:
    activation_partitioning_dims: 2 also splits the 'embed' axis of activations over 'model'.
    parameter_partitioning_dims: 2 also splits the 'embed' axis of parameters over 'data'.
    additional_rules: appended; a standard rule for the same axis comes first.
  """
  rules = [
    ('batch', 'data'),
    ('vocab', 'model'),
    ('mlp', 'model'),
    ('heads', 'model'),
    ('kv', None),
    ('joined_kv', 'model'),
    ('expert', 'data'),
    ('expert_group', None),
  ]
  # The first rule whose mesh axis is still free wins, hence 'model' before 'data'.
  if activation_partitioning_dims == 2:
    rules.append(('embed', 'model'))
  if parameter_partitioning_dims == 2:
    rules.append(('embed', 'data'))
  rules.append(('embed', None))
  rules.extend((name, None) for name in _REPLICATED_AXES)
  return (*rules, *additional_rules)


class PartitionedFn:
  """A jitted function, traced under the partitioner's mesh and logical axis rules.

  Several processes start it together: they wait for each other when they have compiled it.
  """

  def __init__(self, jitted: Any, context: Callable[[], contextlib.AbstractContextManager]):
    self._jitted = jitted
    self._context = context
    self._compiled: set[Any] = set()  # shapes of the arguments, with several processes

  def __call__(self, *args: Any) -> Any:
    with self._context():
      if jax.process_count() > 1:
        self._compile(args)
      return self._jitted(*args)

  def _compile(self, args: Sequence[Any]) -> None:
    leaves, structure = jax.tree.flatten(args)
    shapes = structure, tuple(map(jax.typeof, leaves))
    if shapes not in self._compiled:
      self._jitted.trace(*args).lower().compile()  # the call finds it in JAX's cache
      processes.meet()
      self._compiled.add(shapes)

  def trace(self, *args: Any) -> jax.stages.Traced:
    with self._context():
      return self._jitted.trace(*args)


class PjitPartitioner:
  """Places parameters, optimizer state, batches and computations on a (data, model) mesh.

  With num_replicas above 1, for several slices with slow links between them, the mesh is (replica,
  data, model). Batches are split over replica and data, parameters over data and model only, so
  that only gradients cross slices.

  Attributes:
    mesh: the device mesh.
    is_explicit: whether it has explicit axes.
    logical_axis_rules: (logical axis name, mesh axis or axes or None), the first match counts.
    data_partition_spec: PartitionSpec of a batch.
    data_shards: number of shards of a batch, over the replica and data axes.
    model_shards: size of the model axis, the number of shards of the class dimension K.
  """

  def __init__(
    self,
    num_partitions: int | None = None,
    model_parallel_submesh: Sequence[int] | None = None,
    logical_axis_rules: LogicalAxisRules | None = None,
    devices: Sequence[jax.Device] | None = None,
    num_replicas: int = 1,
    explicit: bool = False,
  ):
    """Sets up the mesh; compiles nothing.

    Args:
      num_partitions: size of the model axis; None is 1, pure data parallelism.
      model_parallel_submesh: t5x's (x, y, z, c) tile, whose product is the size of the model axis;
        an alternative to num_partitions.
      logical_axis_rules: defaults to `standard_logical_axis_rules()`.
      devices: defaults to all devices of all processes.
      num_replicas: size of the replica axis, such as the number of TPU slices; 1 for no such axis.
      explicit: whether the axes of the mesh are explicit, as `jax.make_mesh` makes them: shardings
        are then part of the types of the state, the batch and the metrics. A model that has the
        attribute `explicit_axes` gets such arrays in `loss_fn` and `eval_fn`; for others, and for
        the optimizer, the compiler shards what is in between.
    """
    if num_partitions is not None and model_parallel_submesh is not None:
      raise ValueError(
        f'Set num_partitions or model_parallel_submesh, not both: they are {num_partitions} and '
        f'{tuple(model_parallel_submesh)}.'
      )
    setting = f'num_partitions={num_partitions}'
    model = num_partitions
    if model_parallel_submesh is not None:
      setting = f'model_parallel_submesh={tuple(model_parallel_submesh)}'
      model = math.prod(model_parallel_submesh)
    model = 1 if model is None else model
    devices = list(jax.devices() if devices is None else devices)
    if num_replicas < 1 or len(devices) % num_replicas:
      raise ValueError(
        f'num_replicas={num_replicas} must be at least 1 and divide the number of devices, '
        f'{len(devices)}.'
      )
    if model < 1 or len(devices) % (num_replicas * model):
      hint = '; --gin.PjitPartitioner.num_partitions=1 suits any number'
      if devices[0].platform == 'cpu':
        hint += ', and XLA_FLAGS=--xla_force_host_platform_device_count=8 makes 8 devices of a CPU'
      of_replicas = f' of each of {num_replicas} replicas' if num_replicas > 1 else ''
      raise ValueError(
        f'{setting} asks for a model axis of {model}, which must be at least 1 and divide the '
        f'number of devices{of_replicas}, {len(devices) // num_replicas}{hint}.'
      )
    shape = (len(devices) // (num_replicas * model), model)
    names = ('data', 'model')
    rules = standard_logical_axis_rules() if logical_axis_rules is None else logical_axis_rules
    if num_replicas > 1:
      shape = (num_replicas, *shape)
      names = ('replica', *names)
      # Experts are split over 'data', so their tokens stay within a replica.
      replicated = {('batch', 'data'): ('replica', 'data'), ('expert_group', None): 'replica'}
      rules = [(name, replicated.get((name, axis), axis)) for name, axis in rules]
    kind = AxisType.Explicit if explicit else AxisType.Auto
    self._take(Mesh(_mesh_devices(devices, shape), names, axis_types=(kind,) * len(names)), rules)

  @classmethod
  def on_mesh(cls, mesh: Mesh, logical_axis_rules: LogicalAxisRules) -> 'PjitPartitioner':
    """A partitioner for an existing mesh, whose last axis is the model axis."""
    partitioner = cls.__new__(cls)
    partitioner._take(mesh, logical_axis_rules)
    return partitioner

  def _take(self, mesh: Mesh, rules: LogicalAxisRules) -> None:
    for name, axes in rules:
      for axis in axes if isinstance(axes, tuple) else (axes,):
        if axis is not None and axis not in mesh.axis_names:
          raise ValueError(
            f'logical_axis_rules maps {name!r} to {axis!r}; valid are '
            f'{", ".join(map(repr, mesh.axis_names))} and None.'
          )
    self.mesh = mesh
    self.is_explicit = AxisType.Explicit in mesh.axis_types
    self.logical_axis_rules = tuple(rules)
    # All axes but the last cut the batch. Devices along the model axis get the same rows and
    # compute different classes of them.
    batch_axes = mesh.axis_names[:-1]
    self.data_partition_spec = PartitionSpec(batch_axes if len(batch_axes) > 1 else 'data')
    self._batch_sharding = NamedSharding(mesh, self.data_partition_spec)
    self.data_shards = math.prod(mesh.shape[axis] for axis in batch_axes)
    self.model_shards = mesh.shape['model']

  @contextlib.contextmanager
  def context(self) -> Iterator[None]:
    """Sets the mesh and the axis rules for flax's `with_sharding_constraint` inside models."""
    with jax.set_mesh(self.mesh), flax_partitioning.axis_rules(self.logical_axis_rules):
      yield

  def shardings(self, axis_resources: PyTree) -> PyTree:
    """Turns a tree of PartitionSpecs (None: replicated) into NamedShardings on the mesh."""
    return jax.tree.map(
      lambda spec: NamedSharding(self.mesh, PartitionSpec() if spec is None else spec),
      axis_resources,
      is_leaf=lambda x: x is None or isinstance(x, PartitionSpec),
    )

  def partition(
    self,
    fn: Callable[..., Any],
    in_axis_resources: PyTree,
    out_axis_resources: PyTree,
    donate_argnums: int | Sequence[int] = (),
  ) -> PartitionedFn:
    """Jits `fn` with the given PartitionSpecs or prefixes of trees of them (None: replicated)."""
    jitted = jax.jit(
      self._with_automatic_axes(fn, out_axis_resources),
      in_shardings=self.shardings(in_axis_resources),
      out_shardings=self.shardings(out_axis_resources),
      donate_argnums=donate_argnums,
    )
    return PartitionedFn(jitted, self.context)

  def _with_automatic_axes(
    self, fn: Callable[..., Any], out_axis_resources: PyTree
  ) -> Callable[..., Any]:
    """`fn` as it is, or on a mesh with explicit axes with its arrays sharded by the compiler."""
    if not self.is_explicit:
      return fn
    return jax.sharding.auto_axes(fn, out_sharding=self.shardings(out_axis_resources))

  def check_batch_size(self, batch_size: int, num_microbatches: int = 1) -> None:
    """Raises ValueError unless every microbatch spreads evenly over the data axis."""
    if batch_size < 1 or batch_size % (self.data_shards * num_microbatches):
      raise ValueError(
        f'batch_size={batch_size} must be a positive multiple of '
        f'{self.data_shards * num_microbatches}: the data axis has {self.data_shards} shards and '
        f'num_microbatches={num_microbatches}.'
      )

  def batch_rows(self, batch_size: int) -> np.ndarray:
    """Row numbers of the global batch that this process feeds, ascending, int64 [rows]."""
    self.check_batch_size(batch_size)
    # From the sharding, not from the process index: processes along the model axis feed the same
    # rows, and the rows of a process need not be contiguous.
    slices = self._batch_sharding.addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[index] for index in slices]))

  def shard_batch(self, batch: Mapping[str, np.ndarray], batch_size: int) -> dict[str, jax.Array]:
    """Places this process's rows [rows, ...], in the order of `batch_rows(batch_size)`, on its
    devices as part of the global batch [batch_size, ...], which is split over the data axis.
    """
    rows = self.batch_rows(batch_size)

    def place(name: str, local: np.ndarray) -> jax.Array:
      if len(local) != len(rows):
        raise ValueError(f'batch[{name!r}] has {len(local)} rows; this process feeds {len(rows)}.')

      # JAX asks for the rows start .. stop of the global batch that a device of this process holds.
      # `local` has them in ascending order, possibly with gaps between them in the global batch.
      def shard(index: tuple[slice, ...]) -> np.ndarray:
        start, stop, _ = index[0].indices(batch_size)
        first = np.searchsorted(rows, start)
        return local[first : first + stop - start]

      return jax.make_array_from_callback(
        (batch_size, *local.shape[1:]), self._batch_sharding, shard
      )

    return {name: place(name, np.asarray(local)) for name, local in batch.items()}

  def batch_spec(
    self, element_spec: Mapping[str, jax.ShapeDtypeStruct]
  ) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes with shardings of the global batch, for compiling before there is data."""
    return {
      name: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=self._batch_sharding)
      for name, spec in element_spec.items()
    }

  def get_mesh_axes(self, train_state: state_lib.TrainState) -> state_lib.TrainState:
    """The state, of arrays or shapes, with PartitionSpecs as leaves; optimizer state is placed as
    its parameter.
    """
    names = flax_partitioning.get_axis_names(train_state.params_axes)
    flat_names = traverse_util.flatten_dict(names, sep='/')
    flat_params = traverse_util.flatten_dict(train_state.params, sep='/')
    flat_specs = {
      path: self._parameter_spec(path, param.shape, flat_names[path])
      for path, param in flat_params.items()
    }
    param_specs = traverse_util.unflatten_dict(flat_specs, sep='/')
    return train_state.replace(
      step=PartitionSpec(),
      params=param_specs,
      opt_state=optimizers.state_specs(train_state.opt_state, train_state.params, param_specs),
    )

  def _parameter_spec(
    self, path: str, shape: tuple[int, ...], names: Sequence[str | None]
  ) -> PartitionSpec:
    known = {name for name, _ in self.logical_axis_rules}
    unknown = [name for name in names if name is not None and name not in known]
    if unknown:
      raise ValueError(
        f'Parameter {path} has the axis name {unknown[0]!r}, which no logical axis rule maps; '
        f'known names are {", ".join(sorted(known))}.'
      )
    if len(names) != len(shape):
      raise ValueError(
        f'Parameter {path} of shape {shape} has {len(names)} axis names, {tuple(names)}.'
      )
    spec = flax_partitioning.logical_to_mesh_axes(names, self.logical_axis_rules)
    for dim, name, axis in zip(shape, names, spec, strict=True):
      axes = axis if isinstance(axis, tuple) else (axis,)
      shards = math.prod(self.mesh.shape[x] for x in axes if x is not None)
      if dim % shards:
        raise ValueError(
          f'Parameter {path} of shape {shape} cannot be split: its axis {name!r} of size {dim} '
          f'does not divide by the {shards} shards of the mesh axis {axis!r}.'
        )
    return spec


def _mesh_devices(devices: Sequence[jax.Device], shape: tuple[int, ...]) -> np.ndarray:
  """The devices in the shape of the mesh."""
  if devices[0].platform != 'tpu':
    return np.asarray(devices).reshape(shape)
  # On TPUs mesh axes follow the physical torus, for nearest-neighbour links, and the replica axis
  # follows the slices.
  num_slices = len({getattr(device, 'slice_index', 0) for device in devices})
  if num_slices == 1:
    return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
  if num_slices != shape[0]:
    raise ValueError(
      f'num_replicas must be the number of TPU slices, {num_slices}; the mesh is {shape}.'
    )
  within = (1, *shape[1:])
  across = (num_slices, *(1,) * len(shape[1:]))
  return mesh_utils.create_hybrid_device_mesh(
    within, across, devices, allow_split_physical_axes=True
  )
