"""How a batch lies on the devices of a run, which may go on with fewer of them, or more.

The global batch stays as it is. Its microbatches are made so small that no device holds more rows
at a time than before, and rows that do not count fill it up where the devices do not divide it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from het_plugin.training import partitioning


@dataclasses.dataclass(frozen=True)
class BatchLayout:
  """The pieces of a training batch.

  Attributes:
    num_microbatches: pieces that are computed one after the other.
    size: rows of the batch with those that do not count.
    rows: of a microbatch on a device.
    most_rows: JSON values for the record of a checkpoint: the most `rows` that a device may hold
      of a microbatch, and the settings that this number belongs to.
  """

  num_microbatches: int
  size: int
  rows: int
  most_rows: Mapping[str, Any]

  @property
  def change(self) -> str:
    """A line for when the number of devices has changed, otherwise empty."""
    names = 'num_microbatches', 'batch_size', 'rows'
    bound, batch_size, most = (self.most_rows[name] for name in names)
    if (self.num_microbatches, self.size, self.rows) == (bound, batch_size, most):
      return ''
    return (
      f'The number of devices has changed: each holds {self.rows} rows at a time, and was meant to '
      f'hold {most}. A batch of {batch_size} examples has {self.size} rows, and num_microbatches '
      f'is {self.num_microbatches}.'
    )


def layout(
  batch_size: int,
  partitioner: partitioning.PjitPartitioner,
  kept: Mapping[str, Any] | None,
  needs_whole_batch: bool,
  num_microbatches: int | None = None,
) -> BatchLayout:
  """The layout of a start.

  Args:
    batch_size: of the global batch.
    partitioner: of the run.
    kept: `most_rows` of the checkpoint that the run goes on from; None for a new run. It counts
      while batch size, bound microbatches, model axis and kind of device are as they were.
    needs_whole_batch: whether the loss cannot be computed in microbatches, so that a device may
      have to hold more rows.
    num_microbatches: as bound; None takes what was bound when `kept` was saved, or 1.

  Raises:
    ValueError: the batch of a run that is new, or has other settings, cannot be divided.
  """
  kept = kept or {}
  settings = {
    'batch_size': batch_size,
    'num_microbatches': num_microbatches or kept.get('num_microbatches', 1),
    'model_shards': partitioner.model_shards,
    'device': partitioner.mesh.devices.flat[0].device_kind,
  }
  shards = partitioner.data_shards
  if any(kept.get(name) != value for name, value in settings.items()):
    pieces = settings['num_microbatches']
    partitioner.check_batch_size(batch_size, pieces)
    rows = batch_size // (shards * pieces)
    return BatchLayout(pieces, batch_size, rows, {'rows': rows, **settings})
  pieces = 1 if needs_whole_batch else -(-batch_size // (shards * kept['rows']))
  size = filled(batch_size, shards * pieces)
  return BatchLayout(pieces, size, size // (shards * pieces), kept)


def filled(batch_size: int, unit: int) -> int:
  """The next multiple of `unit`: the number of rows with those that do not count."""
  return -(-batch_size // unit) * unit


class FilledBatches:
  """Batches of a data set, as `data.BatchIterator`, with rows of mask 0 up to another size."""

  def __init__(
    self, get_dataset_fn: Callable[[Any, Any], Any], cfg: Any, rows: np.ndarray, size: int
  ):
    """Opens the data set.

    Args:
      get_dataset_fn: (dataset config, row numbers of the global batch) -> iterator.
      cfg: the dataset config, whose batch_size is smaller than `size`.
      rows: row numbers of this process, ascending, in the batch of `size` rows.
      size: rows of the global batch with those that do not count.

    Raises:
      ValueError: batches have no mask.
    """
    own = rows[rows < cfg.batch_size]
    self._count = len(own)
    self._added = len(rows) - max(self._count, 1)
    self._iterator = get_dataset_fn(cfg, own if self._count else np.zeros(1, np.int64))
    self.element_spec = {
      name: jax.ShapeDtypeStruct((size, *spec.shape[1:]), spec.dtype)
      for name, spec in self._iterator.element_spec.items()
    }
    if 'mask' not in self.element_spec:
      raise ValueError(
        f'batch_size={cfg.batch_size} cannot be filled up to {size} rows, a multiple of the '
        'shards of the data axis: batches of this data set have no mask'
      )

  def __getattr__(self, name: str) -> Any:
    return getattr(self._iterator, name)

  def __iter__(self) -> 'FilledBatches':
    return self

  def __next__(self) -> dict[str, np.ndarray]:
    batch = next(self._iterator)
    # Copies of the last row, whose values are valid in all columns.
    batch = {name: np.concatenate([x, x[-1:].repeat(self._added, 0)]) for name, x in batch.items()}
    batch['mask'][self._count :] = 0
    return batch
