"""Random orders of an epoch: functions of the seed, the epoch and the place in the epoch.

`of_examples` is one permutation of all examples. `BlockOrder` is for examples that are read in
blocks, such as the row groups of a file far away: examples of a block are read at about the same
time, and a process of many reads few of the blocks. Both have each example once per epoch.
"""

import dataclasses
import functools
import math

import numpy as np

from het_plugin.data import counter_random

_EXAMPLES_STREAM = 1  # of random numbers; the reader has others
_BLOCKS_STREAM = 4
_GROUPS_STREAM = 5
_MAX_LANES = 32
_POOL = 12288  # examples that are mixed at a time, in all lanes together


def of_examples(seed: int, num_records: int, epochs: np.ndarray, offsets: np.ndarray) -> np.ndarray:
  """Numbers of records [B] at the places `offsets` of epochs, both int64 [B]."""
  if num_records == 1:
    return offsets
  from grain.experimental import index_shuffle  # imported by `get_dataset` before

  keys = counter_random.fold(counter_random.base_key(seed, _EXAMPLES_STREAM), epochs)
  seeds = (keys >> np.uint64(32)).tolist()
  shuffled = [
    index_shuffle(offset, max_index=num_records - 1, seed=seed, rounds=4)
    for offset, seed in zip(offsets.tolist(), seeds, strict=True)
  ]
  return np.array(shuffled, np.int64)


@dataclasses.dataclass(frozen=True, eq=False)
class BlockOrder:
  """A permutation of blocks, and one of the examples in each group of blocks that follow.

  The rows of a batch are cut into up to 32 lanes. Each lane has its own part of the sequence of
  groups, so a process reads the groups of its own rows only, and a batch has examples of as many
  groups as there are lanes.

  starts: the first record of each block, and the number of all, int64 [number of blocks + 1].
  batch_size: of the global batch.
  """

  seed: int
  starts: np.ndarray
  batch_size: int

  def __call__(self, epochs: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Numbers of records [B] at the places `offsets` of epochs, both int64 [B]."""
    records = np.empty(len(offsets), np.int64)
    places = self._places(offsets)
    for epoch in np.unique(epochs).tolist():
      of_epoch = epochs == epoch
      records[of_epoch] = self._records(epoch, places[of_epoch])
    return records

  @property
  def num_lanes(self) -> int:
    """A power of two that divides the batch."""
    return math.gcd(self.batch_size, _MAX_LANES)

  @property
  def group(self) -> int:
    """Number of blocks whose examples are mixed."""
    mean = self.starts[-1] / (len(self.starts) - 1)
    return max(round(_POOL / (self.num_lanes * mean)), 1)

  def _places(self, offsets: np.ndarray) -> np.ndarray:
    """Places in the sequence of groups: each lane goes through a part of its own."""
    num_steps = self.starts[-1] // self.batch_size
    step, row = np.divmod(offsets, self.batch_size)
    lane, row = np.divmod(row, self.batch_size // self.num_lanes)
    places = (lane * num_steps + step) * (self.batch_size // self.num_lanes) + row
    return np.where(step < num_steps, places, offsets)  # what is left for the last batch

  def _records(self, epoch: int, places: np.ndarray) -> np.ndarray:
    blocks, ends = _arrangement(self, epoch)
    last = np.minimum(np.arange(self.group, len(ends) + self.group, self.group), len(ends)) - 1
    bounds = np.concatenate([[0], ends[last]])
    groups = np.searchsorted(bounds, places, side='right') - 1
    shuffled = np.empty_like(places)
    for group in np.unique(groups).tolist():
      first = bounds[group]
      of_group = groups == group
      size = int(bounds[group + 1] - first)
      permutation = _permutation(size, self.seed, _GROUPS_STREAM, epoch, group)
      shuffled[of_group] = first + permutation[places[of_group] - first]
    at = np.searchsorted(ends, shuffled, side='right')
    block = blocks[at]
    return self.starts[block + 1] - (ends[at] - shuffled)


@functools.lru_cache(maxsize=4)
def _arrangement(order: BlockOrder, epoch: int) -> tuple[np.ndarray, np.ndarray]:
  """The blocks of an epoch in their order, and the places where each ends, int64 [n] both."""
  blocks = _permutation(len(order.starts) - 1, order.seed, _BLOCKS_STREAM, epoch)
  return blocks, np.cumsum(np.diff(order.starts)[blocks])


@functools.lru_cache(maxsize=2 * _MAX_LANES)
def _permutation(size: int, *words: int) -> np.ndarray:
  # grain's index_shuffle, which needs no array, takes 0.1 ms for a place among 300.
  return counter_random.permutation(counter_random.base_key(*words), size)
