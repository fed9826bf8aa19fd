"""Representations of a data-set split, computed over the mesh and gathered on every host."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from het_plugin.evaluation.representations import Representations
from het_plugin.training.partitioning import PjitPartitioner

PyTree = Any


class RepresentationExtractor:
  """Maps batches to one named layer's representations; compiled once for each batch shape."""

  def __init__(
    self,
    model: Any,
    partitioner: PjitPartitioner,
    param_specs: PyTree,
    *,
    layer: str = 'pre_logits',
    channels: int | None = None,
  ):
    """Sets the computation up; nothing is compiled yet.

    Args:
      model: has `representations(params, batch, layers) -> {layer: [B, ...]}`.
      partitioner: places batches and results.
      param_specs: PartitionSpecs in the tree of the parameters.
      layer: name of a representation; dimensions beyond the second are flattened.
      channels: image channels that the model takes; None leaves images as they come.
    """
    self._partitioner = partitioner

    def extract(params: PyTree, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
      image = batch['image'] if channels is None else match_channels(batch['image'], channels)
      layers = model.representations(params, {**batch, 'image': image}, (layer,))
      features = layers[layer].astype(jnp.float32)
      return {
        'features': features.reshape(len(features), -1),
        **{name: batch[name] for name in ('label', 'index', 'mask')},
      }

    # Results replicated: so each host reads whole batches, whichever rows it fed.
    self._extract = partitioner.partition(
      extract, (param_specs, partitioner.data_partition_spec), None
    )

  def __call__(
    self,
    params: PyTree,
    batches: Iterable[Mapping[str, np.ndarray]],
    batch_size: int,
    max_examples: int | None = None,
  ) -> Representations:
    """Runs over `batches`; every process must call it, with as many batches.

    Args:
      params: the parameters, placed by `param_specs`.
      batches: this process's rows of each batch (image, label, index, mask); mask 0 marks padding.
      batch_size: rows of the global batch.
      max_examples: keeps the first so many examples of the stream and reads no further.

    Raises:
      ValueError: there is no example, or an example id comes twice.
    """
    chunks, in_flight, num_examples = [], deque(), 0

    def collect() -> int:
      chunk = jax.device_get(in_flight.popleft())
      real = chunk.pop('mask') > 0
      chunks.append({name: rows[real] for name, rows in chunk.items()})
      return int(real.sum())

    for batch in batches:
      in_flight.append(self._extract(params, self._partitioner.shard_batch(batch, batch_size)))
      if len(in_flight) > 1:  # the device works on one batch while the host reads the one before
        num_examples += collect()
      if max_examples is not None and num_examples >= max_examples:
        break
    while in_flight:
      num_examples += collect()
    if not num_examples:
      raise ValueError('The split has no examples to compute representations of.')

    rows = {
      name: np.concatenate([chunk[name] for chunk in chunks])[:max_examples] for name in chunks[0]
    }
    index, order = np.unique(rows['index'], return_index=True)
    if len(index) != len(rows['index']):
      raise ValueError(
        f'The split gives {len(rows["index"])} examples but only {len(index)} distinct example '
        'ids; an evaluation split must give each example once.'
      )
    return Representations(rows['features'][order], rows['label'][order], index)


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
