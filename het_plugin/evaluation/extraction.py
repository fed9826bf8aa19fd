"""Representations of a data-set split, computed over the mesh and gathered on every host."""

import dataclasses
import urllib.parse
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from het_plugin.evaluation.representations import Representations
from het_plugin.evaluation.row_store import Rows
from het_plugin.training.partitioning import PjitPartitioner

PyTree = Any
Batches = Iterable[Mapping[str, np.ndarray]]
POOLS = ('mean', 'none')


@dataclasses.dataclass(frozen=True, eq=False)
class Chunk:
  """The real rows of one batch, n of them, in the batch's order.

  Attributes:
    features: {layer: [n, D]} in the extractor's dtype.
    labels: int32 [n, L], padded with -1.
    index: int32 [n], example ids.
  """

  features: Mapping[str, np.ndarray]
  labels: np.ndarray
  index: np.ndarray

  def first(self, num_rows: int) -> 'Chunk':
    features = {layer: x[:num_rows] for layer, x in self.features.items()}
    return Chunk(features, self.labels[:num_rows], self.index[:num_rows])


class RepresentationExtractor:
  """Maps batches to the representations of named layers, all from one forward pass; compiled once
  for each batch shape.
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
    """Sets the computation up; nothing is compiled yet.

    Args:
      model: has `representations(params, batch, layers) -> {layer: [B, ...]}`.
      partitioner: places batches and results.
      param_specs: PartitionSpecs in the tree of the parameters.
      layers: names of representations.
      channels: image channels that the model takes; None leaves images as they come.
      pool: how a layer [B, ..., D] with positions, such as tokens [B, N, D] or a feature map
        [B, H, W, D], becomes rows. 'mean': their average over all positions, [B, D], a class
        token being one of them. 'none': side by side, [B, N D].
      dtype: of the features; they are pooled in float32 before.
    """
    self.layers = tuple(layers)
    self.dtype = jnp.dtype(dtype)
    self._partitioner = partitioner

    def extract(params: PyTree, batch: Mapping[str, jax.Array]) -> dict[str, Any]:
      image = batch['image'] if channels is None else match_channels(batch['image'], channels)
      outputs = model.representations(params, {**batch, 'image': image}, self.layers)
      return {
        'features': {layer: as_rows(x, pool).astype(self.dtype) for layer, x in outputs.items()},
        **{name: batch[name] for name in ('label', 'index', 'mask')},
      }

    # Results replicated: so each host reads whole batches, whichever rows it fed.
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
    return {layer: x.shape[1] for layer, x in outputs['features'].items()}

  def chunks(self, params: PyTree, batches: Batches, batch_size: int) -> Iterator[Chunk]:
    """A chunk for each batch, in order; every process must take as many. Reads one batch ahead.

    Args:
      params: the parameters, placed by `param_specs`.
      batches: this process's rows of each batch (image, label, index, mask); rows of mask 0,
        padding or unreadable, are left out.
      batch_size: rows of the global batch.
    """
    outputs = (
      self._extract(params, self._partitioner.shard_batch(batch, batch_size)) for batch in batches
    )
    return map(_real_rows, fetched(outputs))

  def __call__(
    self,
    params: PyTree,
    batches: Batches,
    batch_size: int,
    max_examples: int | None = None,
  ) -> dict[str, Representations]:
    """{layer: its representations}, in memory; every process must call it, with as many batches.

    Args:
      params, batches, batch_size: as in `chunks`.
      max_examples: keeps the first so many examples of the stream and reads no further.

    Raises:
      ValueError: there is no example, or an example id comes twice.
    """
    chunks = list(bounded(self.chunks(params, batches, batch_size), max_examples))
    index = np.concatenate([chunk.index for chunk in chunks] or [np.empty(0, np.int32)])
    order = order_by_id(index)
    labels = np.concatenate([chunk.labels for chunk in chunks])[order]
    return {
      layer: Representations(
        np.concatenate([chunk.features[layer] for chunk in chunks])[order], labels, index[order]
      )
      for layer in self.layers
    }


def extract_to(
  append: Callable[[Rows, Mapping[str, int]], None],
  extractor: RepresentationExtractor,
  params: PyTree,
  batches: Any,
  batch_size: int,
  max_examples: int | None = None,
) -> None:
  """Hands the rows of `batches` on as they come; every process calls it.

  Args:
    append: takes the rows of a batch by column (`columns`) and the state with which `batches` goes
      on behind it.
    extractor, params, batch_size: as in `RepresentationExtractor.chunks`.
    batches: as there, with `get_state()`.
    max_examples: rows that are still wanted; None for all.

  Raises:
    ValueError: a feature is not finite.
  """
  states = deque()  # the extractor reads ahead of what it returns

  def recorded() -> Iterator[Mapping[str, np.ndarray]]:
    for batch in batches:
      states.append(batches.get_state())
      yield batch

  for chunk in bounded(extractor.chunks(params, recorded(), batch_size), max_examples):
    for layer, x in chunk.features.items():
      check_finite(layer, x, chunk.index)
    features = {feature_column(layer): x for layer, x in chunk.features.items()}
    append({**features, 'label': chunk.labels, 'index': chunk.index}, states.popleft())


def columns(
  widths: Mapping[str, int], dtype: Any, max_labels: int
) -> dict[str, tuple[str, tuple[int, ...]]]:
  """{column: (dtype, shape of a row)} of what `extract_to` hands on."""
  return {
    **{feature_column(layer): (str(dtype), (width,)) for layer, width in widths.items()},
    'label': ('int32', (max_labels,)),
    'index': ('int32', ()),
  }


def feature_column(layer: str) -> str:
  """The column of a layer, which is a file name for any name of a layer."""
  return f'features.{urllib.parse.quote(layer, safe="")}'


def bounded(chunks: Iterable[Chunk], max_examples: int | None) -> Iterator[Chunk]:
  """The chunks of the first so many rows; takes none behind them."""
  num_rows = 0
  for chunk in chunks:
    if max_examples is not None:
      chunk = chunk.first(max_examples - num_rows)
    num_rows += len(chunk.index)
    yield chunk
    if max_examples is not None and num_rows >= max_examples:
      break


def order_by_id(index: np.ndarray) -> np.ndarray:
  """The order of rows, int64 [N], that makes their example ids ascend.

  Raises:
    ValueError: there is no row, or an id comes twice.
  """
  if not len(index):
    raise ValueError('The split has no examples to compute representations of.')
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


def fetched(outputs: Iterable[PyTree]) -> Iterator[PyTree]:
  """Device values on the host, in order. The device works on one while the host takes the one
  before: one more of `outputs` is asked for than is returned.
  """
  in_flight = deque()
  for output in outputs:
    in_flight.append(output)
    if len(in_flight) > 1:
      yield jax.device_get(in_flight.popleft())
  while in_flight:
    yield jax.device_get(in_flight.popleft())


def _real_rows(outputs: Mapping[str, Any]) -> Chunk:
  real = outputs['mask'] > 0
  features = {layer: x[real] for layer, x in outputs['features'].items()}
  return Chunk(features, outputs['label'][real], outputs['index'][real])
