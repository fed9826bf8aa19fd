"""Files of predictions: what comes back, other people's, wrong ones."""

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from scipy import special

from het_plugin import data, rows
from het_plugin.rows import Rows

LOG_PROB = special.log_softmax(np.random.default_rng(0).normal(size=(4, 3)), axis=1)
SOFTMAX = Rows(
  {'log_prob': LOG_PROB.astype(np.float32), 'expected_entropy': np.ones(4, np.float32)},
  np.array([[0], [2], [1], [1]], np.int32),
  np.array([9, 3, 7, 5]),
  class_names=('a', 'b', 'c'),
  provenance={'task': 'x'},
)
SIGMOID = Rows(
  {
    'log_prob': np.array([[-1e-7, -0.5, -90.0], [-0.1, -2.0, -3.0]], np.float32),
    'nll': np.array([0.5, 2.5], np.float32),
  },
  np.array([[0, 2], [-1, -1]], np.int32),
  np.array([1, 0]),
  link='sigmoid',
)
VOTES = dataclasses.replace(
  SOFTMAX,
  labels=np.array([[0, 1], [2, -1], [1, 0], [1, 2]], np.int32),
  label_weight=np.array([[0.5, 0.5], [1, 0], [0.25, 0.75], [0.1, 0.9]], np.float32),
  annotator=np.array([[4, 7], [7, -1], [4, 5], [5, 7]], np.int32),
)


def read_predictions(path):
  return rows.read(path, 'log_prob')


def assert_same(got, want):
  assert set(got.columns) == set(want.columns)
  pairs = [(got[name], want[name]) for name in want.columns]
  pairs += [(getattr(got, x.name), getattr(want, x.name)) for x in dataclasses.fields(Rows)[1:]]
  for ours, theirs in pairs:
    np.testing.assert_array_equal(ours, theirs)
    assert getattr(ours, 'dtype', None) == getattr(theirs, 'dtype', None)


@pytest.mark.parametrize('suffix', ['npz', 'safetensors'])
@pytest.mark.parametrize('written', [SOFTMAX, SIGMOID, VOTES])
def test_files_round_trip(tmp_path, written, suffix):
  path = tmp_path / 'new' / f'p.{suffix}'
  rows.write(path, written)
  assert_same(read_predictions(str(path)), written)
  assert [x.name for x in path.parent.iterdir()] == [path.name]
  assert_same(rows.read(str(path), 'log_prob').ordered().chosen(9), written.ordered())


def test_a_choice_of_examples_is_that_of_a_run(tmp_path):
  index = np.random.default_rng(0).permutation(359)
  labels = np.sort(index % 10)[:, None].astype(np.int32)
  whole = Rows({'log_prob': np.full((359, 10), -np.log(10))}, labels, index)
  rows.write(tmp_path / 'p.npz', whole)
  few = rows.read(f'{tmp_path}/p.npz', 'log_prob').ordered().chosen(20)
  bounded = {'batch_size': 20, 'bounded': True, 'image_size': 8, 'max_labels': 1}
  batch = next(data.get_dataset(data.one_pass('digits', 'test', **bounded)))
  assert few.index.tolist() == sorted(batch['index'])
  np.testing.assert_array_equal(few.labels, whole.ordered().labels[few.index])


def test_features_and_predictions_in_one_file(tmp_path):
  both = dataclasses.replace(SOFTMAX, columns={**SOFTMAX.columns, 'features': np.eye(4, 2)})
  rows.write(tmp_path / 'p.npz', both)
  read = rows.read(str(tmp_path / 'p.npz'))
  assert set(read.columns) == {'log_prob', 'expected_entropy', 'features'}
  rows.write(tmp_path / 'q.npz', SOFTMAX)
  with pytest.raises(ValueError, match='q.npz.*features'):
    rows.read(str(tmp_path / 'q.npz'))
  others = {'logits': np.ones((4, 2)), 'prob': np.ones((4, 3))}  # of another model, say
  np.savez(tmp_path / 'r.npz', features=np.eye(4, 2), label=np.arange(4), **others)
  assert set(rows.read(str(tmp_path / 'r.npz')).columns) == {'features'}


def test_one_label_is_a_column_of_the_file(tmp_path):
  rows.write(tmp_path / 'p.npz', SOFTMAX)
  with np.load(tmp_path / 'p.npz') as arrays:
    assert arrays['log_prob'].dtype == np.float32 and arrays['label'].shape == (4,)


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


def test_half_precision(tmp_path):
  logits = np.array([[2.0, 0.0, -3.0], [0.0, 1.0, 1.0]])
  for dtype in (np.float16, ml_dtypes.bfloat16):
    prob = special.softmax(logits, axis=1)
    for name, values in {'logits': logits, 'prob': prob, 'log_prob': np.log(prob)}.items():
      arrays = {name: values.astype(dtype), 'label': np.array([2, 1])}
      safetensors.numpy.save_file(arrays, tmp_path / 'p.safetensors')
      read = read_predictions(str(tmp_path / 'p.safetensors'))
      assert read.log_prob.dtype.itemsize >= 4
      np.testing.assert_allclose(read.log_prob, np.log(prob), rtol=2e-2)


def test_votes_of_as_many_people_as_classes_are_no_marks(tmp_path):
  votes = np.array([[0, 1, 1], [0, 0, 1], [1, 0, 0]])
  np.savez(tmp_path / 'p.npz', logits=np.ones((3, 3)), label=votes)
  np.testing.assert_array_equal(read_predictions(str(tmp_path / 'p.npz')).labels, votes)


BAD_FILES = {
  'exactly one of the arrays log_prob, prob, logits': {'prob': [[1.0]], 'logits': [[1.0]]},
  'sum to 3 instead of 1: if they are rounded, divide': {'prob': np.ones((2, 3)), 'label': [0, 1]},
  'outside .0, 1., or NaNs': {'prob': [[np.nan, 1.0]], 'label': [0]},
  'label 3 of example 1': {'logits': np.ones((2, 3)), 'label': [0, 3]},
  'example 7 has no label': {'logits': np.ones((1, 3)), 'label': [-1], 'index': [7]},
  'which mark classes; they must be the numbers': {
    'prob': np.eye(3),
    'label': np.eye(3, dtype=int),
  },
  r'labels are \[1, 4\] of 0 and 1': {'logits': np.ones((1, 4)), 'label': [[0, 1, 1, 0]]}
  | {'link': 'sigmoid'},
  r'there are: y int64 \[1\], .* a6 int64 \[1\] and 2 more$': {'y': [0]}
  | {f'a{i}': [0] for i in range(9)},
  'nll has values': {'logits': np.ones((1, 2)), 'label': [0], 'nll': [np.nan], 'link': 'sigmoid'},
}


@pytest.mark.parametrize('message', BAD_FILES)
def test_wrong_files(tmp_path, message):
  path = str(tmp_path / 'p.npz')
  np.savez(path, **BAD_FILES[message])
  with pytest.raises(ValueError, match=message) as error:
    read_predictions(path)
  assert str(error.value).startswith(path) and '\n' not in str(error.value)
