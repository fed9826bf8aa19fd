import numpy as np
import pytest

from het_plugin.data import DatasetConfig, get_dataset, total_steps

LENGTHS = {'image': 8, 'label': 1}


def digits(split='train', **settings):
  return DatasetConfig('digits', LENGTHS, split, 100, augment=True, **settings)


def test_examples_are_rounded_up_to_whole_batches():
  assert [total_steps(digits(), examples=n) for n in (100, 101)] == [1, 2]


@pytest.mark.parametrize(
  'split, num_records, num_epochs', [('train', 1438, 1), ('train[:250]', 250, 3)]
)
def test_epochs_meet_each_example_equally_often(split, num_records, num_epochs):
  """Also where a batch spans two epochs and the last one is not full, on hosts of their own."""
  cfg = digits(split, num_epochs=num_epochs)
  hosts = [get_dataset(cfg, rows) for rows in (np.arange(0, 100, 2), np.arange(1, 100, 2))]
  steps = total_steps(cfg)
  assert steps == hosts[0].num_batches == -(-num_epochs * num_records // 100)
  batches = [next(host) for _ in range(steps) for host in hosts]
  images, index, mask = (
    np.concatenate([batch[name] for batch in batches]) for name in ('image', 'index', 'mask')
  )
  assert mask.sum() == num_epochs * num_records
  assert len(set(index[mask == 1])) == mask.sum()
  _, counts = np.unique(images[mask == 1], axis=0, return_counts=True)
  assert set(counts) == {num_epochs}
  for host in hosts:
    with pytest.raises(StopIteration):
      next(host)


def test_one_length_must_be_set():
  with pytest.raises(ValueError, match='steps=5 and num_epochs=2; '):
    total_steps(digits(num_epochs=2), steps=5)


def test_an_endless_split_has_no_epochs():
  cfg = DatasetConfig('glyphs_core', LENGTHS, 'train', 100, num_epochs=2)
  with pytest.raises(ValueError, match="num_epochs=2, .*'train' of glyphs_core .*endless"):
    total_steps(cfg)
  assert total_steps(DatasetConfig('glyphs_core', LENGTHS, 'train', 100), examples=1000) == 10
