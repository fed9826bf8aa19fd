"""Reads examples by position in the global order: shuffling, padding, unreadable records.

The global order is the sequence of positions 0, 1, 2, ... With N records, position p shows record
p mod N in epoch p div N. If shuffled, a permutation keyed by (seed, epoch) is applied to p mod N.
For a slice, N is the number of its records, and the number of its first record is added.
"""

import logging
import threading

import numpy as np

from het_plugin.data import annotations as annotations_lib
from het_plugin.data import counter_random, decode, splits
from het_plugin.data.sources import ExampleSource

_SHUFFLE_STREAM, _PREPROCESS_STREAM = 1, 2
MAX_CORRUPT_FRACTION = 0.01  # the default, and what seqio.get_dataset allows
_NAMED_RECORDS = 5  # how many unreadable records an error names


class CorruptRecords:
  """Counts the unreadable records of a split or slice; too many of them stop the run.

  Any thread may use it.
  """

  def __init__(self, num_records: int, max_fraction: float, noun: str = 'image'):
    """`noun` is the word for a record in messages."""
    self._noun = noun
    self._num_records = num_records
    self._max_fraction = max_fraction
    self._names: dict[int, str] = {}
    self._lock = threading.Lock()

  @property
  def names(self) -> tuple[str, ...]:
    """Descriptions of the unreadable records found so far, each once, in the order of finding."""
    with self._lock:
      return tuple(self._names.values())

  def __contains__(self, record: int) -> bool:
    return record in self._names

  def add(self, record: int, name: str) -> None:
    """Counts a record once, also if it is added again.

    Raises:
      ValueError: more than max_fraction of the split's records are unreadable; also raised if this
        record was counted before, by another thread or before a retry.
    """
    with self._lock:
      new = record not in self._names
      self._names[record] = name
      count = len(self._names)
    if new:
      logging.getLogger(__name__).warning(
        'Unreadable %s %s: its row is masked (%d so far).', self._noun, name, count
      )
    if count > self._max_fraction * self._num_records:
      first = ', '.join(self.names[:_NAMED_RECORDS])
      raise ValueError(
        f'{count} of {self._num_records} {self._noun}s are unreadable, more than '
        f'max_corrupt_fraction = {self._max_fraction} allows; the first are: {first}.'
      )


class ExampleReader:
  """Reads the examples at given positions of the global order, the same ones on every host.

  A record that cannot be read, or lacks a caption, keeps its position: its row has mask 0, labels
  -1 or text 0 and a black image, as a padding row. Every other example is therefore still read
  exactly once per epoch, and resuming needs no list of unreadable records. Positions after the last
  epoch are padding rows.
  """

  def __init__(
    self,
    source: ExampleSource,
    split: str,
    *,
    size: int,
    annotations: annotations_lib.Labels | annotations_lib.Captions,
    shuffle: bool,
    seed: int,
    num_epochs: int | None,
    max_corrupt_fraction: float,
  ):
    """Reads nothing yet.

    Args:
      source: the examples.
      split: a split or a slice of one.
      size: side of the square images the model takes.
      annotations: makes rows of the source's labels or captions.
      shuffle, seed, max_corrupt_fraction: as in DatasetConfig.
      num_epochs: None for endless; an endless split has no epochs.

    Raises:
      ValueError: the split or slice does not exist.
    """
    part = splits.resolve(split, source.info.splits)
    self._source = source
    self._split = part.split
    self._first_record = part.start
    self._size = size
    self._annotations = annotations
    self._shuffle = shuffle
    self._seed = seed
    self._num_records = part.num_records
    endless = num_epochs is None or self._num_records is None
    self.num_examples = None if endless else num_epochs * self._num_records
    self._one_pass = num_epochs == 1
    self.corrupt = CorruptRecords(self._num_records or 0, max_corrupt_fraction, annotations.noun)

  def read(
    self, positions: np.ndarray, keep_jpegs: bool = False
  ) -> dict[str, np.ndarray | list[np.ndarray | bytes]]:
    """Examples at `positions`, int64 [B].

    Args:
      positions: in the global order.
      keep_jpegs: True leaves JPEG files to the caller, who finds out which are damaged.

    Returns:
      image: [B] images [h, w, C] of the source's dtype: an array, or a list if sides differ. With
        keep_jpegs, JPEG files are bytes unless they are known to be unreadable.
      label or text: int32 [B, L], see the `annotations`.
      index: int32 [B]; in one pass over a finite split or a slice of one, the record's number in
        the whole split, so that slices that do not overlap have no index in common; else the
        position mod 2^31.
      mask: float32 [B], 1 for examples, 0 for padding and unreadable records.
      key: int32 [B, 2], the random key of the example's preprocessing, from (seed, position).

    Raises:
      ValueError: too many records are unreadable, or there is an example with too many labels.
    """
    real = np.ones(len(positions), bool)
    if self.num_examples is not None:
      real = positions < self.num_examples
    records = self._records(positions[real])
    keys = self._keys(positions)
    images, annotated = self._source.read(self._split, records, self._size, self._seed)
    rows, problems = self._annotations.rows(annotated, keys[real])
    if not isinstance(images, np.ndarray):
      known = (
        None if record in self.corrupt else image
        for record, image in zip(records.tolist(), images, strict=True)
      )
      images = decode.decode_all(list(known), keep_jpegs)
    readable = np.array(
      [i is not None and p is None for i, p in zip(images, problems, strict=True)], bool
    )
    for i in np.flatnonzero(~readable):
      name = self._source.describe(self._split, int(records[i]))
      self.corrupt.add(int(records[i]), f'{name} ({problems[i]})' if problems[i] else name)

    padding = self._annotations.padding
    padded = np.full((len(positions), self._annotations.length), padding, np.int32)
    padded[real] = np.where(readable[:, None], rows, padding)
    index = positions.copy()
    if self._one_pass:
      index[real] = records
    mask = np.zeros(len(positions), np.float32)
    mask[real] = readable
    return {
      'image': images if mask.all() else self._with_blanks(images, real, readable),
      self._annotations.feature: padded,
      'index': (index % 2**31).astype(np.int32),
      'mask': mask,
      'key': keys.view(np.int32).reshape(-1, 2),
    }

  def _records(self, positions: np.ndarray) -> np.ndarray:
    if self._num_records is None:
      return positions
    epochs, offsets = np.divmod(positions, self._num_records)
    if not self._shuffle or self._num_records == 1:
      return self._first_record + offsets
    from grain.experimental import index_shuffle  # slow to import; a background thread does it

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
    return counter_random.fold(base, positions)  # uint64 [B]

  def _with_blanks(
    self, images, real: np.ndarray, readable: np.ndarray
  ) -> list[np.ndarray] | np.ndarray:
    """Inserts black images for padding and for unreadable records."""
    dtype = np.dtype(self._source.image_dtype)
    side = self._source.image_size or self._size
    black = -1 if dtype.kind == 'f' else 0
    blank = np.full((side, side, self._source.info.channels), black, dtype)
    filled = [blank] * len(real)
    for row, image, is_readable in zip(np.flatnonzero(real), images, readable, strict=True):
      filled[row] = image if is_readable else blank
    return np.stack(filled) if isinstance(images, np.ndarray) else filled
