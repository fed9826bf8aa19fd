"""Batches with held-out rows among the others."""

import numpy as np
import pytest

from het_plugin import data


def config(train_size=6, held_out_size=2, **held_out):
  def one(split, size, **settings):
    settings = {'augment': True, 'task_feature_lengths': {'image': 8, 'label': 1}} | settings
    return data.DatasetConfig('digits', split=split, batch_size=size, **settings)

  return data.HeldOutDatasetConfig(
    one('train[:100]', train_size), one('train[100:120]', held_out_size, **held_out)
  )


def test_every_nth_row_is_held_out():
  cfg = config()
  assert (cfg.batch_size, cfg.held_out_every) == (8, 4)
  got = data.get_dataset_with_held_out(cfg)
  assert got.element_spec['image'].shape == (8, 8, 8, 1) and got.num_batches is None
  assert got.element_spec == data.element_spec(cfg, 1)  # which `plan` reads without the data
  plain = data.get_dataset_with_held_out(cfg.train)
  held_out = data.get_dataset(cfg.held_out)
  for _ in range(3):
    batch = next(got)
    a = next(plain)
    b = next(held_out)
    for name in batch:
      np.testing.assert_array_equal(np.delete(batch[name], [3, 7], 0), a[name])
      np.testing.assert_array_equal(batch[name][[3, 7]], b[name])


def test_rows_and_position_are_those_of_the_global_batch():
  cfg = config()
  whole, part = (data.get_dataset_with_held_out(cfg, rows) for rows in (None, [2, 3, 4, 5]))
  for _ in range(2):
    expected = next(whole)
    np.testing.assert_array_equal(next(part)['image'], expected['image'][2:6])
  assert whole.get_state() == {'position': 16}
  again = data.get_dataset_with_held_out(cfg)
  again.set_state({'position': 8})
  np.testing.assert_array_equal(next(again)['image'], expected['image'])
  with pytest.raises(ValueError, match="'position': 6}.* 4"):
    again.set_state({'position': 6})


def test_settings_are_checked():
  with pytest.raises(ValueError, match='held_out.batch_size=4 .* 6'):
    config(held_out_size=4)
  with pytest.raises(ValueError, match='HeldOutDatasetConfig.held_out .* 20 '):
    data.get_dataset_with_held_out(config(augment=False))
  with pytest.raises(ValueError, match=r'held_out has label \[3\] and train \[1\]'):
    data.get_dataset_with_held_out(config(task_feature_lengths={'image': 8, 'label': 3}))
