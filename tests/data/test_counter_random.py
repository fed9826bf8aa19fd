import numpy as np

from het_plugin.data import counter_random


def test_uniform_moments_and_range():
  keys = counter_random.fold(counter_random.base_key(0), np.arange(2000))
  draws = counter_random.uniform(keys, 50)
  assert draws.dtype == np.float32
  assert draws.min() >= 0 and draws.max() < 1
  assert abs(draws.mean() - 1 / 2) < 5 / np.sqrt(12 * draws.size)
  assert abs(draws.var() - 1 / 12) < 1e-3
  # neighbouring counters and neighbouring keys are uncorrelated
  centred = draws - draws.mean()
  assert abs((centred[:, 1:] * centred[:, :-1]).mean()) < 1e-3
  assert abs((centred[1:] * centred[:-1]).mean()) < 1e-3


def test_standard_normal_moments():
  keys = counter_random.fold(counter_random.base_key(0), np.arange(2000))
  draws = counter_random.standard_normal(keys, 101)  # not a multiple of the four draws in a word
  assert draws.shape == (2000, 101) and draws.dtype == np.float32
  assert abs(draws.mean()) < 0.01
  assert abs(draws.var() - 1) < 0.01
  assert abs((draws**4).mean() - 3) < 0.1


def test_permutation_is_one_and_depends_on_the_key():
  a = counter_random.permutation(counter_random.base_key(0, 0), 1000)
  b = counter_random.permutation(counter_random.base_key(0, 1), 1000)
  np.testing.assert_array_equal(np.sort(a), np.arange(1000))
  assert (a != b).mean() > 0.9
