"""Reads examples by position in the global order: shuffling, preprocessing, unreadable records.

The global order is the sequence of positions 0, 1, 2, ... With N records, position p shows record
p mod N in epoch p div N. If shuffled, a permutation keyed by (seed, epoch) is applied to p mod N
(order.py). For a slice, N is the number of its records, and the number of its first is added.
"""

import dataclasses
import functools
import logging
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from het_plugin.data import annotations as annotations_lib
from het_plugin.data import augment, counter_random, order, preprocess, splits
from het_plugin.data.sources import ExampleSource

Batch = dict[str, np.ndarray]

_PREPROCESS_STREAM = 2
_MIX_STREAM = 3
MAX_CORRUPT_FRACTION = 0.01  # the default, and the limit of tasks under seqio
_NAMED_RECORDS = 5  # how many unreadable records are named, in warnings and in the error


class CorruptRecords:
  """Counts the unreadable records of a split or slice; too many of them stop the run."""

  def __init__(self, num_records: int, max_fraction: float, noun: str = 'image'):
    self.noun = noun
    self.num_records = num_records
    self._max_fraction = max_fraction
    self._names: dict[Hashable, str] = {}

  @property
  def names(self) -> tuple[str, ...]:
    """Descriptions of the unreadable records found so far, each once, in the order of finding."""
    return tuple(self._names.values())

  def add(self, records: Mapping[Hashable, str]) -> None:
    """Counts records by number, each once; ValueError if they are more than max_fraction."""
    for record, name in records.items():
      if record not in self._names:
        self._names[record] = name
        number = len(self._names)
        if number <= _NAMED_RECORDS or str(number).strip('0') == '1':  # 10, 100, ...
          logging.getLogger(__name__).warning(
            'Unreadable %s %s: its row is masked (%d so far).', self.noun, name, number
          )
    count = len(self._names)
    if records and count > self._max_fraction * self.num_records:
      first = ', '.join(self.names[:_NAMED_RECORDS])
      raise ValueError(
        f'{count} of {self.num_records} {self.noun}s are unreadable, more than '
        f'DatasetConfig.max_corrupt_fraction = {self._max_fraction} allows; the first are: {first}.'
      )


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleReader:
  """Reads the examples at given positions of the global order, the same ones on every host.

  A record that cannot be read, or lacks a caption, keeps its position: its row has mask 0, labels
  -1 or text 0 and a black image, as a padding row. Every other example is therefore still read
  exactly once per epoch, and resuming needs no list of unreadable records. Positions after the last
  epoch are padding rows.

  The model takes square images of side `size`. `preprocessors` apply to each image, and `mixture`
  to pairs of images after that. With `blocks`, the order is of blocks, and not of all examples.
  Others are as in DatasetConfig; an endless split has no epochs.
  """

  source: ExampleSource
  split: str
  _: dataclasses.KW_ONLY
  size: int
  channels: int
  annotations: annotations_lib.Labels | annotations_lib.Captions
  preprocessors: Sequence[preprocess.Preprocessor] = ()
  mixture: augment.Mixup | None = None
  shuffle: bool
  seed: int
  num_epochs: int | None
  blocks: order.BlockOrder | None = None

  @functools.cached_property
  def part(self) -> splits.SplitPart:
    """The records of one epoch."""
    return splits.resolve(self.split, self.source.info.splits)

  @property
  def num_examples(self) -> int | None:
    """The number of positions before the end of the last epoch; None if there is no end."""
    endless = self.num_epochs is None or self.part.num_records is None
    return None if endless else self.num_epochs * self.part.num_records

  def read(self, positions: np.ndarray) -> tuple[Batch, dict[int, str]]:
    """Examples at `positions`, int64 [B]; safe to call from any thread.

    Returns:
      A batch, and the names of the unreadable records by number. The batch has
      image: float32 [B, H, H, C] in [-1, 1].
      label int32 [B, L], or text int32 [B, L], and what else annotations.py makes, with twice as
        many labels if images are mixed.
      index: int32 [B]. In one pass over a finite split or a slice, it is the number of the record
        in the whole split, so slices that do not overlap have no index in common. Otherwise it is
        the position mod 2^31.
      mask: float32 [B], 1 for examples, 0 for padding and unreadable records.

    Raises:
      ValueError: there is an example with too many labels, or an image has other channels.
    """
    if self.mixture is None:
      return self._read(positions)
    needed, rows = np.unique(np.concatenate([positions, positions ^ 1]), return_inverse=True)
    batch, names = self._read(needed)
    pairs = rows.reshape(2, -1).T  # [B, 2]
    mixed = {name: x[pairs[:, 0]] for name, x in batch.items()}
    for name in annotations_lib.OF_EACH_LABEL & batch.keys():
      mixed[name] = batch[name][pairs].reshape(len(positions), -1)
    base = counter_random.base_key(self.seed, _MIX_STREAM)
    keys = counter_random.fold(base, positions)
    half = mixed['label'].shape[1] // 2
    for i, (own, other) in enumerate(pairs):
      weight = 1.0
      if batch['mask'][own] and batch['mask'][other]:
        rng = np.random.default_rng(int(keys[i]))
        mixed['image'][i], weight = self.mixture.mix(*batch['image'][[own, other]], rng)
      shares = np.array([weight, 1 - weight])
      if 'weight' in batch:  # labels keep the weight of their own example in the loss
        shares *= batch['weight'][[own, other]]
        mixed['weight'][i] = shares.sum()
        shares /= max(shares.sum(), 1e-12)
      mixed['label_weight'][i, :half] *= float(shares[0])
      mixed['label_weight'][i, half:] *= float(shares[1])
    return mixed, names

  def _read(self, positions: np.ndarray) -> tuple[Batch, dict[int, str]]:
    """Reads as `read`, without mixing."""
    real = np.ones(len(positions), bool)
    if self.num_examples is not None:
      real = positions < self.num_examples
    records = self._records(positions[real])
    base = counter_random.base_key(self.seed, _PREPROCESS_STREAM)
    keys = counter_random.fold(base, positions[real])  # uint64 [B]
    images, annotated = self.source.read(self.part.split, records, self.size, self.seed)
    rows, problems = self.annotations.rows(annotated, keys)
    images, readable = self._levels(images, keys)
    names = {}
    readable &= np.array([problem is None for problem in problems], bool)
    for i in np.flatnonzero(~readable):
      name = self.source.describe(self.part.split, int(records[i]))
      names[int(records[i])] = f'{name} ({problems[i]})' if problems[i] else name

    index = positions.copy()
    if self.num_epochs == 1:
      index[real] = records
    batch = {
      'image': images,
      **rows,
      'index': (index % 2**31).astype(np.int32),
      'mask': readable.astype(np.float32),
    }
    if not readable.all() or not real.all():
      padding = {name: value for name, (*_, value) in self.annotations.features.items()}
      for name, value in {'image': -1, **padding, 'mask': 0}.items():
        whole = np.full((len(positions), *batch[name].shape[1:]), value, batch[name].dtype)
        whole[np.flatnonzero(real)[readable]] = batch[name][readable]
        batch[name] = whole
    return batch, names

  def _records(self, positions: np.ndarray) -> np.ndarray:
    first = self.part.start
    num_records = self.part.num_records
    if num_records is None:
      return positions
    epochs, offsets = np.divmod(positions, num_records)
    if not self.shuffle:
      return first + offsets
    if self.blocks is not None:
      return first + self.blocks(epochs, offsets)
    return first + order.of_examples(self.seed, num_records, epochs, offsets)

  def _levels(self, images: Sequence, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Preprocessed images float32 [B, H, H, C], and whether each is readable, bool [B]."""
    shape = self.size, self.size, self.channels
    readable = np.ones(len(images), bool)
    if isinstance(images, np.ndarray) and images.shape[1:] == shape and not self.preprocessors:
      return preprocess.to_levels(images), readable
    levels = np.empty((len(images), *shape), np.float32)
    for i, (image, key) in enumerate(zip(images, keys, strict=True)):
      if isinstance(image, bytes):
        image = preprocess.decode(image, self.source.info.channels)
      if image is None:
        readable[i] = False
        continue
      rng = np.random.default_rng(int(key))
      for preprocessor in self.preprocessors:
        image = preprocessor(image, rng, self.size)
      image = preprocess.resized(image, self.size, self.size)
      if image.shape != shape:
        raise ValueError(f'an image has the shape {image.shape}; it must be {shape}.')
      preprocess.to_levels(image, out=levels[i])
    return levels, readable
