"""Files of log-probabilities: what comes back, and wrong ones."""

import numpy as np
import pytest
from scipy import special

from het_plugin.evaluation.log_probs import read_log_probs


def arrays(**changes):
  log_prob = special.log_softmax(np.random.default_rng(0).normal(size=(4, 3)), axis=1)
  ours = dict(
    log_prob=log_prob.astype(np.float32),
    label=np.array([0, 2, 1, 1], np.int32),
    index=np.array([9, 3, 7, 5]),
  )
  return {name: x for name, x in (ours | changes).items() if x is not None}


def test_rows_come_by_index(tmp_path):
  np.savez(tmp_path / 'x.npz', **arrays(class_name=np.array(['a', 'b', 'c'])))
  read = read_log_probs(str(tmp_path / 'x.npz'))
  np.testing.assert_array_equal(read.index, [3, 5, 7, 9])
  np.testing.assert_array_equal(read.label, [2, 1, 1, 0])
  np.testing.assert_array_equal(read.log_prob, arrays()['log_prob'][[1, 3, 2, 0]])
  np.testing.assert_array_equal(read.label_log_prob, read.log_prob[range(4), read.label])


def test_without_an_index_rows_are_numbered(tmp_path):
  np.savez(tmp_path / 'x.npz', **arrays(index=None))
  np.testing.assert_array_equal(read_log_probs(str(tmp_path / 'x.npz')).index, range(4))


def test_probability_zero_and_half_precision_are_log_probabilities(tmp_path):
  log_prob = np.array(
    [[0, -np.inf, -np.inf], [-(2.0**-120), -80.0, -200.0], *[[0.0, -np.inf, -80]] * 2]
  )
  np.savez(tmp_path / 'x.npz', **arrays(log_prob=log_prob, index=None))
  np.testing.assert_array_equal(read_log_probs(str(tmp_path / 'x.npz')).log_prob, log_prob)
  np.savez(tmp_path / 'h.npz', **arrays(log_prob=arrays()['log_prob'].astype(np.float16)))
  assert read_log_probs(str(tmp_path / 'h.npz')).log_prob.dtype == np.float32


@pytest.mark.parametrize(
  'changes,words',
  [
    (dict(log_prob=None), 'has no array log_prob; it has label, index'),
    (dict(log_prob=np.zeros((0, 3))), 'must be floating point'),
    (dict(log_prob=np.zeros((4, 3), int)), 'must be floating point'),
    (dict(log_prob=np.full((4, 3), np.nan)), 'NaNs in 4 rows'),
    (dict(log_prob=np.full((4, 3), -np.inf)), r'row 0 sum to exp\(-inf\), not to 1'),
    (dict(log_prob=np.ones((4, 3))), r'row 0 sum to exp\(2.099\), not to 1'),
    (dict(log_prob=np.full((4, 3), np.inf)), r'row 0 sum to exp\(inf\)'),
    (dict(label=np.array([0, 1, 3, 0])), r'label 3 of row 2 is out of range; labels are 0 \.\. 2'),
    (dict(label=np.array([0, -1, 0, 0])), 'label -1 of row 1 is out of range'),
    (dict(label=np.zeros(4)), r'label is float32 \[4\]; it must be integers \[4\]'),
    (dict(label=np.zeros((4, 2), int)), r'label is int64 \[4, 2\]'),
    (dict(index=np.zeros(4, int)), 'an example id of its own'),
  ],
)
def test_wrong_files_are_one_sentence(tmp_path, changes, words):
  path = str(tmp_path / 'x.npz')
  np.savez(path, **arrays(**changes))
  with pytest.raises(ValueError, match=words) as error:
    read_log_probs(path)
  assert path in str(error.value) and '\n' not in str(error.value)
