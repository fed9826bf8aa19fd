"""From positions in the global order to examples: shuffling by epoch, padding, unreadable records.

The global order is one sequence of positions 0, 1, 2, ... Position p shows record p mod N in epoch
p div N or, shuffled, the record to which a permutation keyed by (seed, epoch) sends p mod N. In a
slice of a split N is the number of its own records, and its first one is added to the result.
"""

import logging
import threading

import numpy as np

from het_plugin.data import counter_random, decode, splits
from het_plugin.data.sources import ExampleSource

_SHUFFLE_STREAM, _PREPROCESS_STREAM = 1, 2
MAX_CORRUPT_FRACTION = 0.01  # the default, and what seqio.get_dataset allows
_NAMED_RECORDS = 5  # how many unreadable records an error names


class CorruptRecords:
  """Counts the unreadable records of a split or slice; too many of them stop the run.

  Any thread may use it.
  """

  def __init__(self, num_records: int, max_fraction: float):
    self._num_records = num_records
    self._max_fraction = max_fraction
    self._names: dict[int, str] = {}
    self._lock = threading.Lock()

  @property
  def names(self) -> tuple[str, ...]:
    """Descriptions of the unreadable records met so far, each once, in the order they were met."""
    with self._lock:
      return tuple(self._names.values())

  def __contains__(self, record: int) -> bool:
    return record in self._names

  def add(self, record: int, name: str) -> None:
    """Counts a record once, however often it is met.

    Raises:
      ValueError: more than max_fraction of the split's records are unreadable; also where this
        record was counted already, by another thread or before a retry.
    """
    with self._lock:
      new = record not in self._names
      self._names[record] = name
      count = len(self._names)
    if new:
      logging.getLogger(__name__).warning(
        'Unreadable image %s: its row is masked (%d so far).', name, count
      )
    if count > self._max_fraction * self._num_records:
      first = ', '.join(self.names[:_NAMED_RECORDS])
      raise ValueError(
        f'{count} of {self._num_records} images are unreadable, more than '
        f'max_corrupt_fraction = {self._max_fraction} allows; the first are: {first}.'
      )


class ExampleReader:
  """Reads the examples at given positions of the global order, the same ones on every host.

  A record that cannot be read keeps its position: its row has mask 0, labels -1 and a black image,
  exactly as a padding row. So every other example is still met exactly once an epoch, and resuming
  needs no memory of which records were bad. Positions past the last epoch are padding rows.
  """

  def __init__(
    self,
    source: ExampleSource,
    split: str,
    *,
    size: int,
    max_labels: int,
    shuffle: bool,
    seed: int,
    num_epochs: int | None,
    max_corrupt_fraction: float,
  ):
    """Arguments as in DatasetConfig; num_epochs None: endless. An endless split has no epochs.

    Raises:
      ValueError: no such split or slice.
    """
    part = splits.resolve(split, source.info.splits)
    self._source = source
    self._split = part.split
    self._first_record = part.start
    self._size = size
    self._max_labels = max_labels
    self._shuffle = shuffle
    self._seed = seed
    self._num_records = part.num_records
    endless = num_epochs is None or self._num_records is None
    self.num_examples = None if endless else num_epochs * self._num_records
    self._one_pass = num_epochs == 1
    self.corrupt = CorruptRecords(self._num_records or 0, max_corrupt_fraction)

  def read(
    self, positions: np.ndarray, keep_jpegs: bool = False
  ) -> dict[str, np.ndarray | list[np.ndarray | bytes]]:
    """Examples at `positions`, int64 [B].

    Args:
      positions: in the global order.
      keep_jpegs: leaves it to the caller to decode JPEG files and to find out which are damaged.

    Returns:
      image: [B] images [h, w, C] of the source's dtype: an array, or a list if sides differ; with
        keep_jpegs the bytes of those in JPEG files, but for the ones known to be unreadable.
      label: int32 [B, max_labels], padded with -1.
      index: int32 [B]; in one pass over a finite split or a slice of one, the record's number in
        the whole split, so that slices that do not overlap have no index in common; else the
        position mod 2^31.
      mask: float32 [B], 1 for an example, 0 for padding and for an unreadable record.
      key: int32 [B, 2], the random key of the example's preprocessing, from (seed, position).

    Raises:
      ValueError: too many records are unreadable, or an example has more than max_labels labels.
    """
    real = np.ones(len(positions), bool)
    if self.num_examples is not None:
      real = positions < self.num_examples
    records = self._records(positions[real])
    images, labels = self._source.read(self._split, records, self._size, self._seed)
    if labels.shape[1] > self._max_labels:
      raise ValueError(
        f"task_feature_lengths['label'] is {self._max_labels}; there is an example with "
        f'{labels.shape[1]} labels.'
      )
    if not isinstance(images, np.ndarray):
      known = (
        None if record in self.corrupt else image
        for record, image in zip(records.tolist(), images, strict=True)
      )
      images = decode.decode_all(list(known), keep_jpegs)
    readable = np.array([image is not None for image in images], bool)
    for record in records[~readable]:
      self.corrupt.add(int(record), self._source.describe(self._split, int(record)))

    label = np.full((len(positions), self._max_labels), -1, np.int32)
    label[real, : labels.shape[1]] = np.where(readable[:, None], labels, -1)
    index = positions.copy()
    if self._one_pass:
      index[real] = records
    mask = np.zeros(len(positions), np.float32)
    mask[real] = readable
    return {
      'image': images if mask.all() else self._with_blanks(images, real),
      'label': label,
      'index': (index % 2**31).astype(np.int32),
      'mask': mask,
      'key': self._keys(positions),
    }

  def _records(self, positions: np.ndarray) -> np.ndarray:
    if self._num_records is None:
      return positions
    epochs, offsets = np.divmod(positions, self._num_records)
    if not self._shuffle or self._num_records == 1:
      return self._first_record + offsets
    from grain.experimental import index_shuffle  # takes a second; a thread has it, training not

    seeds = {int(e): self._epoch_seed(int(e)) for e in np.unique(epochs)}
    last = self._num_records - 1
    shuffled = [
      index_shuffle(int(offset), max_index=last, seed=seeds[int(epoch)], rounds=4)
      for epoch, offset in zip(epochs, offsets, strict=True)
    ]
    return self._first_record + np.array(shuffled, np.int64)

  def _epoch_seed(self, epoch: int) -> int:
    return int(counter_random.base_key(self._seed, _SHUFFLE_STREAM, epoch)[0] >> np.uint64(32))

  def _keys(self, positions: np.ndarray) -> np.ndarray:
    base = counter_random.base_key(self._seed, _PREPROCESS_STREAM)
    return counter_random.fold(base, positions).view(np.int32).reshape(-1, 2)

  def _with_blanks(self, images, real: np.ndarray) -> list[np.ndarray] | np.ndarray:
    """Puts black images where there is no example and for the unreadable ones."""
    dtype = np.dtype(self._source.image_dtype)
    side = self._source.image_size or self._size
    black = -1 if dtype.kind == 'f' else 0
    blank = np.full((side, side, self._source.info.channels), black, dtype)
    rows = iter(images)
    filled = [next(rows) if is_real else None for is_real in real]
    filled = [blank if image is None else image for image in filled]
    return np.stack(filled) if isinstance(images, np.ndarray) else filled
