"""Features as a task: rows, splits, batches; and the trainer on them."""

import numpy as np
import pytest

from het_plugin import rows
from het_plugin.data import DatasetConfig, array_source, get_dataset


@pytest.fixture
def arrays():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(60, 7)).astype(np.float32)
  return x, rng.integers(0, 3, 60)


def config(name, **changes):
  settings = {'split': 'all', 'batch_size': 60, 'shuffle': False} | changes
  lengths = settings.pop('task_feature_lengths', {'image': 1, 'label': 1})
  return DatasetConfig(name, lengths, **settings)


def batch(name, **changes):
  data = get_dataset(config(name, **changes))
  found = next(data)
  data.close()
  return found


def test_files_of_every_kind_give_the_rows(tmp_path, arrays):
  x, y = arrays
  np.savez(tmp_path / 'a.npz', features=x, label=y)
  np.save(tmp_path / 'x.npy', x)
  np.save(tmp_path / 'y.npy', y)
  labels = y[:, None].astype(np.int32)
  written = rows.Rows({'features': x}, labels, np.arange(60), class_names=('a', 'b', 'c'))
  rows.write(tmp_path / 'a.safetensors', written)
  for name in ('a.npz', 'a.safetensors', f'x.npy,{tmp_path}/y.npy'):
    got = batch(f'features:{tmp_path}/{name}')
    np.testing.assert_array_equal(got['image'], x[:, None, None])
    np.testing.assert_array_equal(got['label'][:, 0], y)
  source = array_source.features_source(f'{tmp_path}/a.safetensors')
  assert source.info.class_names == ('a', 'b', 'c') and source.info.channels == 7
  assert source.info.splits == {'train': 54, 'validation': 6, 'all': 60}
  x[3] += 1
  np.savez(tmp_path / 'b.npz', features=x, label=y)
  other = array_source.features_source(f'{tmp_path}/b.npz')
  assert other.info.version != source.info.version


def test_soft_labels_keep_their_weights(tmp_path, arrays):
  x, _ = arrays
  label = np.tile([0, 1], (60, 1))
  weight = np.tile([0.9, 0.1], (60, 1)).astype(np.float32)
  np.savez(tmp_path / 'a.npz', features=x, label=label, label_weight=weight)
  lengths = {'image': 1, 'label': 2}
  got = batch(f'features:{tmp_path}/a.npz', task_feature_lengths=lengths)
  np.testing.assert_array_equal(got['label_weight'], weight)


def test_splits_of_a_file(tmp_path, arrays):
  x, y = arrays
  split = np.where(np.arange(60) % 3 == 0, 'test', 'train')
  np.savez(tmp_path / 'a.npz', features=x, label=y, split=split)
  got = batch(f'features:{tmp_path}/a.npz', split='test', batch_size=20)
  np.testing.assert_array_equal(got['image'][:, 0, 0], x[::3])
  with pytest.raises(ValueError, match="split='all' is not a split of"):
    batch(f'features:{tmp_path}/a.npz', split='all')
