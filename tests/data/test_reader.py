import numpy as np
import pytest

from het_plugin.data.annotations import Labels
from het_plugin.data.reader import CorruptRecords, ExampleReader
from het_plugin.data.sources import TaskInfo


class CountingSource:
  """Picture i is i everywhere and has label i; records in `bad` are unreadable."""

  def __init__(self, num_examples, bad=()):
    self.info = TaskInfo(100, False, 1, None, {'train': num_examples})
    self._bad = bad

  def read(self, split, ids, size, seed):
    images = [None if i in self._bad else np.full((size, 3, 1), i, np.uint8) for i in ids]
    return images, ids.astype(np.int32)[:, None]

  def describe(self, split, example_id):
    return f'picture {example_id}'


def make_reader(num_examples=10, bad=(), split='train', **kwargs):
  settings = {
    'size': 4,
    'channels': 1,
    'annotations': Labels(2),
    'shuffle': True,
    'seed': 0,
    'num_epochs': None,
  }
  return ExampleReader(CountingSource(num_examples, bad), split, **(settings | kwargs))


def test_index_is_the_record_in_one_pass_and_the_position_otherwise():
  one_pass = make_reader(num_epochs=1).read(np.arange(10))[0]
  np.testing.assert_array_equal(one_pass['index'], one_pass['label'][:, 0])
  endless = make_reader().read(np.arange(15))[0]
  np.testing.assert_array_equal(endless['index'], np.arange(15))
  assert make_reader().read(np.array([2**31 + 5]))[0]['index'] == [5]
  assert endless['index'].dtype == np.int32


def test_a_slice_is_shuffled_within_itself_and_repeats():
  epochs = make_reader(20, split='train[5:15]').read(np.arange(30))[0]['label'][:, 0].reshape(3, 10)
  assert len({epoch.tobytes() for epoch in epochs}) == 3
  for epoch in epochs:
    np.testing.assert_array_equal(np.sort(epoch), np.arange(5, 15))
  assert make_reader(split='train[-1:]').read(np.arange(3))[0]['label'][:, 0].tolist() == [9, 9, 9]


def test_randomness_follows_seed_and_position():
  def draws(**kwargs):
    def noise(image, rng, size):
      return rng.integers(0, 256, (size, size, 1), np.uint8)

    reader = make_reader(preprocessors=[noise], **kwargs)
    positions = np.arange(20)
    return np.concatenate(
      [reader.read(part)[0]['image'] for part in (positions[:3], positions[3:])]
    )

  images = draws()
  assert len({image.tobytes() for image in images}) == 20  # the second epoch is augmented anew
  np.testing.assert_array_equal(images, draws())
  assert not np.array_equal(images, draws(seed=1))


def test_unreadable_records_keep_their_position_and_are_named():
  examples, names = make_reader(bad=(3, 7), shuffle=False).read(np.arange(20))
  np.testing.assert_array_equal(np.flatnonzero(examples['mask'] == 0), [3, 7, 13, 17])
  np.testing.assert_array_equal(examples['label'][[3, 7, 13, 17]], -1)
  good = np.flatnonzero(examples['mask'])
  np.testing.assert_array_equal(examples['label'][good, 0], good % 10)
  np.testing.assert_array_equal(np.round((examples['image'][good, 0, 0, 0] + 1) * 127.5), good % 10)
  assert names == {3: 'picture 3', 7: 'picture 7'}


def test_too_many_unreadable_records():
  corrupt = CorruptRecords(10, 0.1)
  for _ in range(2):  # a record counts once
    corrupt.add({3: 'picture 3'})
  corrupt.add({})
  message = '2 of 10 .*DatasetConfig.max_corrupt_fraction = 0.1 .*: picture 3, picture 7'
  with pytest.raises(ValueError, match=message):
    corrupt.add({7: 'picture 7'})
