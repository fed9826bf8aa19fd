"""Where rows and parameters lie: a mesh of (data, model) devices, and mapped files.

As in a training run, rows are cut over `data`, and over `model` all that has K columns and the
parameters of the noise. K is padded to a multiple of the mesh's model axis. Several processes make
the same calls with the same arguments, and cut rows only.
"""

import contextlib
import dataclasses
import json
import mmap
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from flax.linen import partitioning
from jax.sharding import NamedSharding, PartitionSpec

from het_plugin.estimators import objective
from het_plugin.estimators.model import ROW_MULTIPLE, Model
from het_plugin.system import exit_codes

AXES = ('data', 'model')
RULES = (('batch', 'data'), ('vocab', 'model'))
_CUT = 'x', 'target', 'weight'  # of blocks


def make_mesh(mesh: Sequence[int]) -> jax.sharding.Mesh:
  """A mesh of (data, model) devices; a ValueError if the shape is no pair or they are too few."""
  mesh = tuple(np.ravel(mesh).tolist())
  if jax.process_count() > 1 and mesh != (jax.device_count(), 1):
    raise ValueError(
      f'mesh={mesh} must be ({jax.device_count()}, 1): {jax.process_count()} processes cut the '
      f'rows over all of their {jax.device_count()} devices'
    )
  wrong = len(mesh) != 2 or min(mesh) < 1 or mesh[0] * mesh[1] > jax.device_count()
  if wrong or ROW_MULTIPLE % mesh[0]:
    raise ValueError(
      f'mesh={mesh} must be (data, model), positive numbers of devices, where data divides '
      f'{ROW_MULTIPLE} and the product is at most {jax.device_count()}, the number of devices'
    )
  devices = np.array(jax.devices()[: mesh[0] * mesh[1]]).reshape(mesh)
  return jax.sharding.Mesh(devices, AXES)


@contextlib.contextmanager
def on(mesh: Sequence[int] | None) -> Generator[None]:
  """Inside, computations are on the mesh, or on one device for None, and products are in float32.

  Without that JAX multiplies float32 with 11 bits on a GPU (TF32) and with 8 on a TPU. On an H100
  a fit of HET then met no step that lowers its objective, at a gradient above `tol`. Where
  `jax_enable_x64` is set, types would differ.
  """
  with contextlib.ExitStack() as stack:
    stack.enter_context(jax.default_matmul_precision('highest'))
    stack.enter_context(jax.enable_x64(False))
    if mesh is not None:
      stack.enter_context(jax.set_mesh(make_mesh(mesh)))
      stack.enter_context(partitioning.axis_rules(RULES))
    yield


def place_params(model: Model, params: dict, mesh: Sequence[int] | None) -> dict:
  """Parameters on the mesh; a dimension that the mesh does not divide is whole."""
  if mesh is None:
    return params
  devices = make_mesh(mesh)
  flat = traverse_util.flatten_dict(params)
  num_features = len(flat.get(('hidden_0', 'kernel'), flat['head', 'kernel']))
  names = model.axes(num_features)

  def sharding(path, x):
    axes = names.get(path) or (None,) * x.ndim
    spec = partitioning.logical_to_mesh_axes(axes, (*RULES, ('noise', 'model'))) or ()
    divides = (a is None or x.shape[i] % devices.shape[a] == 0 for i, a in enumerate(spec))
    whole = [a if fits else None for a, fits in zip(spec, divides, strict=True)]
    return NamedSharding(devices, PartitionSpec(*whole))

  placed = {path: _put(x, sharding(path, x)) for path, x in flat.items()}
  return traverse_util.unflatten_dict(placed)


def _put(x: Any, sharding: NamedSharding) -> jax.Array:
  """x, which all processes have, on the devices."""
  if jax.process_count() == 1:
    return jax.device_put(x, sharding)
  x = np.asarray(x)
  return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def whole(tree: Any) -> Any:
  """The arrays of a tree in NumPy. What only other processes have comes from them."""

  def of(x):
    is_here = isinstance(x, np.ndarray) or x.is_fully_addressable or x.is_fully_replicated
    if not is_here:
      everywhere = NamedSharding(x.sharding.mesh, PartitionSpec())
      x = jax.jit(lambda x: x, out_shardings=everywhere)(x)
    return np.asarray(x)

  return jax.tree.map(of, tree)


def place_rows(rows: objective.Blocks, mesh: Sequence[int] | None) -> objective.Blocks:
  """Rows on the mesh, cut over `data`."""
  if mesh is None:
    return rows
  sharding = NamedSharding(make_mesh(mesh), PartitionSpec(None, 'data'))
  return dataclasses.replace(rows, **{x: _put(getattr(rows, x), sharding) for x in _CUT})


def cut(
  read: Callable[[slice], np.ndarray], shape: tuple[int, ...], mesh: Sequence[int] | None
) -> Any:
  """An array of a shape [n, ...], cut over `data`: each process reads slices of its own devices."""
  if mesh is None:
    return read(slice(0, shape[0]))
  sharding = NamedSharding(make_mesh(mesh), PartitionSpec('data'))

  def here(index):
    first, last, _ = index[0].indices(shape[0])
    found = read(slice(first, last))
    return found.astype(np.float32) if found.dtype.kind == 'f' else found

  return jax.make_array_from_callback(shape, sharding, here)


def cut_rows(
  read: Callable[[np.ndarray], objective.Blocks],
  num_rows: int,
  num_blocks: int,
  size: int,
  mesh: Sequence[int],
) -> objective.Blocks:
  """Rows on the mesh, cut over `data`. Each process reads those of its own devices.

  Args:
    read: from places [n] among the rows to blocks of size / data rows, the last ones filled up.
    num_rows: all rows.
    num_blocks, size: of the blocks of all processes.
    mesh: (data, model) numbers of devices.
  """
  sharding = NamedSharding(make_mesh(mesh), PartitionSpec(None, 'data'))
  places = np.arange(num_blocks * size).reshape(num_blocks, size)
  of_device = sharding.addressable_devices_indices_map(places.shape)
  found = {}
  for index in of_device.values():
    if str(index) not in found:
      here = places[index].ravel()
      found[str(index)] = read(here[here < num_rows])

  def joined(name):
    parts = [jax.device_put(getattr(found[str(i)], name), d) for d, i in of_device.items()]
    shape = (num_blocks, size, *parts[0].shape[2:])
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)

  first = next(iter(found.values()))
  return dataclasses.replace(first, **{name: joined(name) for name in _CUT})


def in_turn(make: Callable[[int], np.ndarray], count: int) -> list[np.ndarray]:
  """make(0), make(1), ..., float64 arrays; each is made by one process, and all get all of them.

  Raises:
    ValueError: `make` has raised one of `exit_codes.SETTING_ERRORS`, in any process.
  """
  if jax.process_count() == 1:
    return [make(number) for number in range(count)]
  from het_plugin.system import processes  # imports orbax, which one process does without

  made = {}
  wrong = ''
  try:
    for number in range(jax.process_index(), count, jax.process_count()):
      made[number] = make(number).tolist()
  except exit_codes.SETTING_ERRORS as error:
    wrong = str(error) or type(error).__name__
  if said := processes.gather(wrong):
    raise ValueError(processes.as_one(said))
  for text in processes.gather(json.dumps(made)).values():
    made |= {int(number): value for number, value in json.loads(text).items()}
  return [np.array(made[number]) for number in range(count)]


def forget_pages(x: np.ndarray) -> None:
  """Takes the pages of a mapped file that have been read out of this process' memory.

  Not those of mode 'c', where changes of the rows are in these pages only.
  """
  for part in getattr(x, 'parts', ()):
    forget_pages(part)
  owner: Any = x
  while isinstance(owner, np.ndarray) and not isinstance(owner, np.memmap):
    owner = owner.base
  file = getattr(owner, '_mmap', None)  # of np.memmap
  if isinstance(file, mmap.mmap) and owner.mode != 'c':
    file.madvise(mmap.MADV_DONTNEED)
