import numpy as np
import pytest

from het_plugin.training import partitioning, prefetch
from tests.training import toy


@pytest.fixture(scope='module')
def partitioner():
  return partitioning.PjitPartitioner(num_partitions=2)


def test_state_is_that_of_the_batch_handed_out_not_of_the_one_ahead(partitioner):
  iterator = toy.get_dataset(toy.ToyDatasetConfig(8))
  iterator.set_state({'position': 80})
  with prefetch.DevicePrefetcher(iterator, partitioner, 8) as batches:
    assert batches.state == {'position': 80}
    for start in (80, 88, 96):
      np.testing.assert_array_equal(next(batches)['index'], np.arange(start, start + 8))
      assert batches.state == {'position': start + 8}


def test_it_ends_with_its_data_set(partitioner):
  iterator = toy.get_dataset(toy.ToyDatasetConfig(8, num_examples=9))
  with prefetch.DevicePrefetcher(iterator, partitioner, 8) as batches:
    masks = [np.asarray(batch['mask']) for batch in batches]
  assert [mask.sum() for mask in masks] == [8, 1]


def test_errors_of_the_data_set_reach_the_caller(partitioner):
  class Broken(toy.ToyIterator):
    def __next__(self):
      raise OSError('disk gone')

  with prefetch.DevicePrefetcher(Broken(toy.ToyDatasetConfig(8)), partitioner, 8) as batches:
    with pytest.raises(OSError, match='disk gone'):
      next(batches)
