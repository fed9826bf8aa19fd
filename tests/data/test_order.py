"""The order of blocks: each example once, whatever the sizes, and few blocks at a time."""

import numpy as np
import pytest

from het_plugin.data.order import BlockOrder


def epoch_of(order, epoch=0):
  offsets = np.arange(order.starts[-1])
  return order(np.full_like(offsets, epoch), offsets)


def equal_blocks(num_blocks, size):
  return np.arange(num_blocks + 1) * size


@pytest.mark.parametrize('batch_size', [1, 6, 64, 1000])
@pytest.mark.parametrize(
  'starts', [[0, 1], [0, 3], [0, 1, 2, 300, 301, 999], equal_blocks(40, 25), equal_blocks(999, 1)]
)
def test_each_example_is_there_once(starts, batch_size):
  order = BlockOrder(3, np.array(starts), batch_size)
  epochs = [epoch_of(order, epoch) for epoch in range(2)]
  for records in epochs:
    np.testing.assert_array_equal(np.sort(records), np.arange(starts[-1]))
  assert starts[-1] < 10 or (epochs[0] != epochs[1]).any()


def test_a_place_has_its_record_whatever_is_asked_with_it():
  order = BlockOrder(0, equal_blocks(50, 17), 32)
  whole = np.concatenate([epoch_of(order, 0), epoch_of(order, 1)])
  places = np.random.default_rng(0).permutation(len(whole))[:200]
  epochs, offsets = np.divmod(places, order.starts[-1])
  np.testing.assert_array_equal(order(epochs, offsets), whole[places])
  other = BlockOrder(1, order.starts, 32)
  assert (epoch_of(other) != epoch_of(order)).mean() > 0.9


def test_a_process_reads_the_blocks_of_its_rows():
  order = BlockOrder(0, equal_blocks(6400, 10), 64)
  records = epoch_of(order).reshape(-1, 64)
  blocks_of = [np.unique(records[:, rows] // 10) for rows in np.split(np.arange(64), 8)]
  assert sum(map(len, blocks_of)) < 1.1 * 6400  # of 8 processes together; 6,400 blocks exist
  at_a_time = np.unique(records[:20] // 10)  # whose examples are read in 20 batches
  assert len(at_a_time) <= 2 * order.group * order.num_lanes < 6400 / 2


def buffered(num_records, size, rng):
  """The order of a shuffle buffer over records that come in sequence."""
  buffer = list(range(size))
  for record in range(size, num_records):
    at = rng.integers(size)
    yield buffer[at]
    buffer[at] = record
  yield from rng.permutation(buffer).tolist()


def test_batches_are_mixed_better_than_by_a_buffer_of_10_000():
  num_records, batch_size, per_class = 200_000, 256, 200
  order = BlockOrder(0, equal_blocks(num_records // 100, 100), batch_size)
  orders = {
    'blocks': epoch_of(order),
    'buffer': np.array(list(buffered(num_records, 10_000, np.random.default_rng(0)))),
    'permutation': np.random.default_rng(0).permutation(num_records),
  }
  distances = {}  # of neighbours, over the number of records
  classes = {}  # in a batch of records that are sorted by class
  for name, records in orders.items():
    distances[name] = np.abs(np.diff(records)).mean() / num_records
    batches = records[: num_records // batch_size * batch_size].reshape(-1, batch_size)
    classes[name] = np.mean([len(np.unique(batch // per_class)) for batch in batches])
  assert distances['blocks'] > 4 * distances['buffer']  # 0.23 and 0.05; of a permutation 0.33
  assert classes['blocks'] > classes['buffer']
