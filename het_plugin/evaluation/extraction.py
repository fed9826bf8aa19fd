"""Results per example of a split, such as representations, computed over the mesh."""

import contextlib
import urllib.parse
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from het_plugin import data
from het_plugin.data.representations import Representations
from het_plugin.training import checkpoint_reader, checksum
from het_plugin.training.partitioning import PjitPartitioner

PyTree = Any
Batches = Iterable[Mapping[str, np.ndarray]]
Rows = dict[str, np.ndarray]  # {column: [n, ...]}, a row per example
POOLS = ('mean', 'none')
TEST_SPLITS = ('test', 'validation')
_KEPT = ('label', 'index', 'mask')


class PlacedModel(NamedTuple):
  """A model whose parameters are on a mesh: what evaluators need of a `TrainedRun`."""

  model: Any
  partitioner: PjitPartitioner
  param_specs: PyTree  # PartitionSpecs in the tree of the parameters
  image_size: int  # side of the square images that the model takes, in pixels
  channels: int  # of these images
  max_corrupt_fraction: float | None = None  # as in DatasetConfig; None for its default


def default_split(task: str) -> str:
  """The split of a task to evaluate on: the first of `TEST_SPLITS` that it has, else ValueError."""
  splits = data.task_info(task).splits
  if not (usual := [split for split in TEST_SPLITS if split in splits]):
    raise ValueError(f'--split is needed: {task} has {", ".join(sorted(splits))}')
  return usual[0]


@contextlib.contextmanager
def open_split(
  run: PlacedModel,
  task: str,
  split: str,
  max_examples: int | None = None,
  *,
  name: str | None = None,
  bound: str = 'max_examples',
  whole: bool = False,
  **settings: Any,
) -> Iterator[tuple['data.BatchIterator', int]]:
  """Opens a split and closes it at the end of the block; reads no image yet.

  Args:
    run: takes the images, and says which rows of a batch this process reads.
    task, split: what is read.
    max_examples: largest number of examples that will be read; None for all.
    name, bound: the split, and the setting that limits its examples, for the error.
    whole: reads all rows of each batch on every process.
    **settings: batch_size and others of `data.one_pass`.

  Yields:
    The batches, and their number of examples, at most `max_examples`.
  """
  of_run = {x: getattr(run, x) for x in ('image_size', 'max_corrupt_fraction')}
  settings = of_run | settings
  config = data.one_pass(task, split, bounded=max_examples is not None, **settings)
  rows = None if whole else run.partitioner.batch_rows(config.batch_size)
  with contextlib.closing(data.get_dataset(config, rows)) as batches:
    sizes = [size for size in (batches.num_examples, max_examples) if size is not None]
    if not sizes:
      raise ValueError(f'{name or f"split {split!r} of {task!r}"} is endless: set {bound}')
    yield batches, min(sizes)


class PerExample:
  """A function of parameters and a batch, compiled for a mesh, whose rows come to every host.

  Compiles once per batch shape.
  """

  def __init__(
    self,
    compute: Callable[[PyTree, Mapping[str, jax.Array]], dict[str, jax.Array]],
    run: PlacedModel,
    specs: PyTree | None = None,
  ):
    """Compiles nothing yet.

    `compute` maps (params, batch) to columns [B, ...]. Images get the number of channels that the
    model takes. `specs` are the PartitionSpecs of params, by default those of the run.
    """

    def columns(params: PyTree, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
      if 'image' in batch:
        batch = {**batch, 'image': match_channels(batch['image'], run.channels)}
      kept = {name: batch[name] for name in _KEPT if name in batch}
      return {**compute(params, batch), **kept}

    self._partitioner = run.partitioner
    inputs = run.param_specs if specs is None else specs, run.partitioner.data_partition_spec
    # The results are replicated, so that each host reads whole batches, whichever rows it fed.
    self.compiled = run.partitioner.partition(columns, inputs, None)

  def __call__(
    self, params: PyTree, batches: Batches, batch_size: int, max_examples: int | None = None
  ) -> Iterator[Rows]:
    """Rows of each batch in order; every process must take the same number of batches.

    Reads one batch ahead, so that the devices compute a batch while the host processes the one
    before, but no more than `max_examples` from the start of the stream.

    Args:
      params: parameters, placed by their PartitionSpecs.
      batches: this process's rows of each batch (image, label or text, index, mask). Rows with mask
        0 (padding, and examples that could not be read) are dropped.
      batch_size: rows of the global batch.
      max_examples: None for all.

    Yields:
      The columns of `compute`, label and index, [n, ...] with 0 <= n <= B.
    """
    left = np.inf if max_examples is None else max_examples
    in_flight = deque()

    def fetch() -> Rows:
      nonlocal left
      columns = dict(jax.device_get(in_flight.popleft()))
      rows = np.flatnonzero(columns.pop('mask') > 0)
      rows = rows[: int(min(left, len(rows)))]
      left -= len(rows)
      return {name: x[rows] for name, x in columns.items()}

    for batch in batches:
      in_flight.append(self.compiled(params, self._partitioner.shard_batch(batch, batch_size)))
      if len(in_flight) > 1:
        yield fetch()
        if left <= 0:
          return
    if in_flight:
      yield fetch()


class RepresentationExtractor(PerExample):
  """Representations of named layers, all in one forward pass.

  The rows have `column(layer)`: [n, D] in `dtype`; label int32 [n, L]; index int32 [n].
  """

  def __init__(
    self,
    run: PlacedModel,
    *,
    layers: Sequence[str] = ('pre_logits',),
    pool: Literal['mean', 'none'] = 'none',
    dtype: Any = jnp.float32,
  ):
    """Compiles nothing yet.

    Args:
      run: its model has `representations(params, batch, layers) -> {layer: [B, ...]}`.
      pool: how a layer [B, ..., D] with positions, such as tokens [B, N, D] or a feature map
        [B, H, W, D], becomes rows. 'mean' averages over all positions, a class token included, to
        [B, D]. 'none' puts them side by side, [B, N D].
      dtype: type of the features, which are pooled in float32 first.
    """
    self.layers = tuple(layers)
    self.dtype = jnp.dtype(dtype)

    def extract(params: PyTree, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
      outputs = run.model.representations(params, batch, self.layers)
      return {column(layer): as_rows(x, pool).astype(self.dtype) for layer, x in outputs.items()}

    super().__init__(extract, run)

  def read(
    self, params: PyTree, batches: Batches, batch_size: int, max_examples: int | None = None
  ) -> dict[str, Representations]:
    """{layer: its representations} in memory; arguments as in `PerExample.__call__`."""
    whole = in_order(list(self(params, batches, batch_size, max_examples)))
    return {
      layer: Representations(whole[column(layer)], whole['label'], whole['index'])
      for layer in self.layers
    }


def column(layer: str) -> str:
  """The column of a layer, which is a valid file name for any layer name."""
  return f'features.{urllib.parse.quote(layer, safe="")}'


def in_order(parts: Sequence[Mapping[str, np.ndarray]]) -> Rows:
  """Joins the parts of a split, ascending by example id (column 'index'), each of which is once."""
  index = np.concatenate([part['index'] for part in parts] or [[]])
  if not len(index):
    raise ValueError('The split has no examples to evaluate.')
  ids, order = np.unique(index, return_index=True)
  if len(ids) != len(index):
    raise ValueError(
      f'The split gives {len(index)} examples but only {len(ids)} distinct example ids; an '
      'evaluation split must give each example once.'
    )
  return {name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]}


def as_rows(x: jax.Array, pool: str) -> jax.Array:
  """[B, ..., D] as float32 rows: [B, D] for pool 'mean', [B, ... D] for 'none'."""
  x = x.astype(jnp.float32)
  if pool == 'mean' and x.ndim > 2:
    x = x.mean(axis=range(1, x.ndim - 1))
  return x.reshape(len(x), -1)


def match_channels(image: jax.Array, channels: int) -> jax.Array:
  """Images [B, H, W, C] with other channels: grey is repeated, colours are averaged to grey."""
  given = image.shape[-1]
  if given == channels:
    return image
  if given == 1:
    return jnp.repeat(image, channels, axis=-1)
  if channels == 1:
    return image.mean(axis=-1, keepdims=True)
  raise ValueError(
    f'Images with {given} channels cannot be turned into {channels}; 1 or equal can.'
  )


def params_fingerprint(params: PyTree) -> str:
  """16 hex digits of the names, types, shapes and bits of parameters; every process calls it.

  It does not depend on the mesh (`checksum.array_checksums`).
  """
  named = checkpoint_reader.named(params)
  sums = checksum.array_checksums(named)
  described = {name: [str(x.dtype), x.shape, sums[name]] for name, x in named.items()}
  return checksum.json_digest(described)[:16]
