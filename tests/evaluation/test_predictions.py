"""Files of predictions: what comes back, other people's, wrong ones."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import special

from het_plugin.evaluation.predictions import Predictions, read_predictions, write_predictions

LOG_PROB = special.log_softmax(np.random.default_rng(0).normal(size=(4, 3)), axis=1)
SOFTMAX = Predictions(
  LOG_PROB.astype(np.float32),
  np.array([[0], [2], [1], [1]], np.int32),
  np.array([9, 3, 7, 5]),
  class_names=('a', 'b', 'c'),
  expected_entropy=np.ones(4, np.float32),
  provenance={'task': 'x'},
)
SIGMOID = Predictions(
  np.array([[-1e-7, -0.5, -90.0], [-0.1, -2.0, -3.0]], np.float32),
  np.array([[0, 2], [-1, -1]], np.int32),
  np.array([1, 0]),
  link='sigmoid',
  nll=np.array([0.5, 2.5], np.float32),
)


@pytest.mark.parametrize('written', [SOFTMAX, SIGMOID])
def test_files_round_trip(tmp_path, written):
  path = tmp_path / 'new' / 'p.npz'
  write_predictions(path, written)
  read = read_predictions(str(path))
  for field in dataclasses.fields(Predictions):
    got, want = getattr(read, field.name), getattr(written, field.name)
    np.testing.assert_array_equal(got, want)
    assert getattr(got, 'dtype', None) == getattr(want, 'dtype', None)
  assert [x.name for x in path.parent.iterdir()] == ['p.npz']


def test_one_label_is_a_column_of_the_file(tmp_path):
  write_predictions(tmp_path / 'p.npz', SOFTMAX)
  with np.load(tmp_path / 'p.npz') as arrays:
    assert arrays['log_prob'].dtype == np.float32 and arrays['label'].shape == (4,)
  with pytest.raises(ValueError, match='must end in .npz'):
    write_predictions(tmp_path / 'p.npy', SOFTMAX)


def test_probability_zero_and_far_tails_are_kept(tmp_path):
  log_prob = np.array([[0, -np.inf, -np.inf], [-(2.0**-120), -80.0, -200.0]])
  np.savez(tmp_path / 'x.npz', log_prob=log_prob, label=[0, 2])
  read = read_predictions(str(tmp_path / 'x.npz'))
  np.testing.assert_array_equal(read.log_prob, log_prob)


def test_other_peoples_files(tmp_path):
  path = str(tmp_path / 'p.npz')
  logits = np.array([[2.0, 0.0, -300.0], [0.0, 1.0, 1.0]])
  labels = np.array([2, 1])
  np.savez(path, logits=logits, labels=labels)
  read = read_predictions(path)
  np.testing.assert_allclose(read.log_prob, special.log_softmax(logits, axis=1))
  assert read.index.tolist() == [0, 1]
  np.savez(path, prob=special.softmax(logits, axis=1).astype(np.float16), label=labels)
  assert read_predictions(path).log_prob[0, 2] == -np.inf
  np.savez(path, prob=[[1.0, 1e-300]], label=[1])
  np.testing.assert_allclose(read_predictions(path).label_log_prob, -300 * math.log(10))
  np.savez(path, logits=logits, label=np.array([[0, 2], [1, -1]]), link='sigmoid')
  read = read_predictions(path)
  np.testing.assert_allclose(read.log_prob, special.log_expit(logits))
  assert read.labels.tolist() == [[0, 2], [1, -1]]


BAD_FILES = {
  'exactly one of the arrays log_prob, prob, logits': {'prob': [[1.0]], 'logits': [[1.0]]},
  'sum to 3 instead of 1': {'prob': np.ones((2, 3)), 'label': [0, 1]},
  'label 3 of example 1': {'logits': np.ones((2, 3)), 'label': [0, 3]},
  'example 7 has no label': {'logits': np.ones((1, 3)), 'label': [-1], 'index': [7]},
  'nll has values': {'logits': np.ones((1, 2)), 'label': [0], 'nll': [np.nan], 'link': 'sigmoid'},
}


@pytest.mark.parametrize('message', BAD_FILES)
def test_wrong_files(tmp_path, message):
  path = str(tmp_path / 'p.npz')
  np.savez(path, **BAD_FILES[message])
  with pytest.raises(ValueError, match=message) as error:
    read_predictions(path)
  assert str(error.value).startswith(path) and '\n' not in str(error.value)
