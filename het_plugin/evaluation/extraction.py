"""Representations of a data-set split, computed over the mesh and gathered on every host."""

import urllib.parse
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from het_plugin.evaluation.representations import Representations
from het_plugin.training import checksum
from het_plugin.training.partitioning import PjitPartitioner

PyTree = Any
Batches = Iterable[Mapping[str, np.ndarray]]
Rows = dict[str, np.ndarray]  # {column: [n, ...]}, a row per example
POOLS = ('mean', 'none')


def example_rows(
  outputs: Iterable[Mapping[str, jax.Array]], max_examples: int | None = None
) -> Iterator[Rows]:
  """Brings results per example to the host, batch by batch, in order.

  Asks for one batch more than it has given, so that the devices compute a batch while the host
  works on the batch before.

  Args:
    outputs: columns [B, ...] of each batch. Column 'mask' [B] is 0 for padding and for examples
      that could not be read; these rows are dropped.
    max_examples: stops after so many rows; None takes all.

  Yields:
    The columns without 'mask', [n, ...] with 0 <= n <= B.
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

  for output in outputs:
    in_flight.append(output)
    if len(in_flight) > 1:
      yield fetch()
      if left <= 0:
        return
  if in_flight:
    yield fetch()


class RepresentationExtractor:
  """Computes the representations of named layers, all in one forward pass.

  Compiles once per batch shape.
  """

  def __init__(
    self,
    model: Any,
    partitioner: PjitPartitioner,
    param_specs: PyTree,
    *,
    layers: Sequence[str] = ('pre_logits',),
    channels: int | None = None,
    pool: Literal['mean', 'none'] = 'none',
    dtype: Any = jnp.float32,
  ):
    """Sets the computation up; compiles nothing yet.

    Args:
      model: has `representations(params, batch, layers) -> {layer: [B, ...]}`.
      partitioner: places batches and results.
      param_specs: PartitionSpecs in the tree of the parameters.
      layers: names of representations.
      channels: image channels that the model takes; None leaves images unchanged.
      pool: how a layer [B, ..., D] with positions, such as tokens [B, N, D] or a feature map
        [B, H, W, D], becomes rows. 'mean' averages over all positions, a class token included, to
        [B, D]. 'none' puts them side by side, [B, N D].
      dtype: of the features. They are pooled in float32 first.
    """
    self.layers = tuple(layers)
    self.dtype = jnp.dtype(dtype)
    self._partitioner = partitioner

    def extract(params: PyTree, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
      image = batch['image'] if channels is None else match_channels(batch['image'], channels)
      outputs = model.representations(params, {**batch, 'image': image}, self.layers)
      features = {column(k): as_rows(x, pool).astype(self.dtype) for k, x in outputs.items()}
      return features | {name: batch[name] for name in ('label', 'index', 'mask')}

    # The results are replicated, so that each host reads whole batches, whichever rows it fed.
    self._extract = partitioner.partition(
      extract, (param_specs, partitioner.data_partition_spec), None
    )

  def widths(self, params: PyTree, batch: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, int]:
    """D of each layer, for parameters and a global batch of these shapes; compiles nothing.

    Raises:
      ValueError: the model lacks a layer, or cannot take the images' channels.
      flax.errors.ScopeParamShapeError: its parameters are for images of another size.
    """
    outputs = self._extract.trace(params, dict(batch)).out_info
    return {layer: outputs[column(layer)].shape[1] for layer in self.layers}

  def rows(
    self, params: PyTree, batches: Batches, batch_size: int, max_examples: int | None = None
  ) -> Iterator[Rows]:
    """Columns of each batch in order; every process must take the same number of batches.

    Args:
      params: the parameters, placed by `param_specs`.
      batches: this process's rows of each batch (image, label, index, mask).
      batch_size: rows of the global batch.
      max_examples: takes the first so many examples of the stream and reads no further.

    Yields:
      `column(layer)`: [n, D] in the extractor's dtype; label int32 [n, L]; index int32 [n].
    """
    outputs = (
      self._extract(params, self._partitioner.shard_batch(batch, batch_size)) for batch in batches
    )
    return example_rows(outputs, max_examples)

  def __call__(
    self, params: PyTree, batches: Batches, batch_size: int, max_examples: int | None = None
  ) -> dict[str, Representations]:
    """{layer: its representations} in memory; arguments as in `rows`.

    Raises:
      ValueError: there is no example, or an example id occurs twice.
    """
    whole = in_order(list(self.rows(params, batches, batch_size, max_examples)))
    return {
      layer: Representations(whole[column(layer)], whole['label'], whole['index'])
      for layer in self.layers
    }


def column(layer: str) -> str:
  """The column of a layer; it is a file name for any name of a layer."""
  return f'features.{urllib.parse.quote(layer, safe="")}'


def in_order(parts: Sequence[Rows]) -> Rows:
  """The parts of a split as one, ascending by example id (column 'index'); see `order_by_id`."""
  whole = {name: np.concatenate([part[name] for part in parts]) for name in (parts or [{}])[0]}
  order = order_by_id(whole.get('index', np.empty(0, int)))
  return {name: x[order] for name, x in whole.items()}


def order_by_id(index: np.ndarray) -> np.ndarray:
  """The order of rows, int64 [N], in which their example ids ascend.

  Raises:
    ValueError: there is no row, or an id occurs twice.
  """
  if not len(index):
    raise ValueError('The split has no examples to evaluate.')
  ids, order = np.unique(index, return_index=True)
  if len(ids) != len(index):
    raise ValueError(
      f'The split gives {len(index)} examples but only {len(ids)} distinct example ids; an '
      'evaluation split must give each example once.'
    )
  return order


def check_finite(layer: str, features: np.ndarray, index: np.ndarray) -> None:
  """Raises ValueError if a row of features [n, D] holds an infinity or a NaN."""
  finite = np.isfinite(features).all(axis=1)
  if not finite.all():
    hint = ', which float16 may be too narrow for' if features.dtype == np.float16 else ''
    raise ValueError(
      f'layer {layer!r} of example {int(index[~finite][0])} is not finite in '
      f'{features.dtype.name}{hint}'
    )


def as_rows(x: jax.Array, pool: str) -> jax.Array:
  """[B, ..., D] as float32 rows: [B, D] for pool 'mean', [B, ... D] for 'none'."""
  x = x.astype(jnp.float32)
  if pool == 'mean' and x.ndim > 2:
    x = x.mean(axis=range(1, x.ndim - 1))
  return x.reshape(len(x), -1)


def match_channels(image: jax.Array, channels: int) -> jax.Array:
  """Images [B, H, W, C] with `channels` channels: grey is repeated, colours are averaged to grey.

  Raises:
    ValueError: for any other change of channels.
  """
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
  leaves = jax.tree_util.tree_leaves_with_path(params)
  named = {jax.tree_util.keystr(path, simple=True, separator='/'): x for path, x in leaves}
  sums = checksum.array_checksums(named)
  described = {name: [str(x.dtype), x.shape, sums[name]] for name, x in named.items()}
  return checksum.json_digest(described)[:16]
