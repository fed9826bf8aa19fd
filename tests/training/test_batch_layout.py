"""How batches lie on more or fewer devices."""

import jax
import numpy as np
import pytest

from het_plugin.training import batch_layout, partitioning
from tests.training import toy

EIGHT = partitioning.PjitPartitioner()


def on(num_devices):
  return partitioning.PjitPartitioner(devices=jax.devices()[:num_devices])


@pytest.mark.parametrize(
  'num_devices, pieces, size',
  [(8, 2, 48), (4, 4, 48), (6, 3, 54), (5, 4, 60), (1, 16, 48)],
)
def test_no_device_gets_more_rows_than_before(num_devices, pieces, size):
  """48 rows in 2 microbatches: 3 on each of 8 devices."""
  kept = batch_layout.layout(48, EIGHT, None, False, 2).most_rows
  for bound in (None, 2):
    layout = batch_layout.layout(48, on(num_devices), kept, False, bound)
    assert (layout.num_microbatches, layout.size) == (pieces, size)
    assert layout.size <= 3 * pieces * num_devices and layout.most_rows == kept
  told = layout.change.endswith(f'has {size} rows, and num_microbatches is {pieces}.')
  assert told if num_devices < 8 else not layout.change


def test_what_is_set_anew_counts_anew():
  kept = batch_layout.layout(48, EIGHT, None, False, 2).most_rows
  layout = batch_layout.layout(48, on(4), kept, False, 1)
  assert (layout.num_microbatches, layout.most_rows['rows']) == (1, 12)
  assert batch_layout.layout(64, on(4), kept, False, 2).most_rows['rows'] == 8
  with pytest.raises(ValueError, match='batch_size=48 .* 5 shards'):
    batch_layout.layout(48, on(5), kept, False, 1)
  whole = batch_layout.layout(48, on(4), kept, True)
  assert whole.num_microbatches == 1
  assert 'each holds 12 rows at a time, and was meant to hold 3.' in whole.change


@pytest.mark.parametrize('size, rows', [(21, [12, 13, 14]), (21, [14, 15, 16]), (21, [18, 19, 20])])
def test_rows_that_do_not_count_fill_up_a_batch(size, rows):
  cfg = toy.ToyDatasetConfig(15)
  batches = batch_layout.FilledBatches(toy.get_dataset, cfg, np.array(rows), size)
  assert {len(spec.shape) and spec.shape[0] for spec in batches.element_spec.values()} == {size}
  batch = next(batches)
  assert {len(x) for x in batch.values()} == {3}
  assert batch['mask'].tolist() == [float(row < 15) for row in rows]
  own = [row for row in rows if row < 15]
  assert batch['index'][: len(own)].tolist() == own
  assert batches.get_state() == {'position': 15}
