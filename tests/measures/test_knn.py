"""Neighbours and votes against scikit-learn's classifier and brute force."""

import typing
from collections import Counter

import numpy as np
import pytest
from sklearn.neighbors import KNeighborsClassifier

from het_plugin.measures import knn


def make(n=300, m=50, d=20, k=5, offset=0.0):
  rng = np.random.default_rng(0)
  labels = rng.integers(0, k, n + m)
  x = rng.normal(size=(n + m, d)) + rng.normal(size=(k, d))[labels] + offset
  x = x.astype(np.float32)
  return x[:n], labels[:n], x[n:], labels[n:]


@pytest.mark.parametrize('metric', typing.get_args(knn.Metric))
@pytest.mark.parametrize('block_bytes', [knn.BLOCK_BYTES, 2**10])
def test_accuracy_is_that_of_scikit_learn(metric, block_bytes, monkeypatch):
  """For k = 1 and two classes with odd k, where no vote is tied; in blocks of 32 rows, too."""
  train_x, train_y, test_x, test_y = make(k=2, d=4)
  left_out = knn.knn_accuracy(train_x, train_y, ks=(1, 31), metric=metric)
  monkeypatch.setattr(knn, 'BLOCK_BYTES', block_bytes)
  assert knn.knn_accuracy(train_x, train_y, ks=(1, 31), metric=metric) == left_out
  ours = knn.knn_accuracy(train_x, train_y, test_x, test_y, ks=(1, 5, 31), metric=metric)
  for k, accuracy in ours.items():
    theirs = KNeighborsClassifier(k, algorithm='brute', metric=metric).fit(train_x, train_y)
    assert accuracy == theirs.score(test_x, test_y)
  assert len(set(ours.values())) > 1


def test_far_from_the_origin_and_left_out():
  x, y, *_ = make(offset=1e4)
  distances = np.square(x[:, None].astype(float) - x[None]).sum(axis=2)
  np.fill_diagonal(distances, np.inf)
  expected = np.mean(y[distances.argmin(axis=1)] == y)
  assert knn.knn_accuracy(x, y) == {1: expected}


def test_leaving_out_is_by_row_and_duplicates_count():
  x = np.array([[0.0], [0.0], [4.0], [5.0], [6.5]])
  # Rows 0 and 1 find each other; 2 finds 3, 3 finds 2, and 4 finds 3.
  assert knn.knn_accuracy(x, np.array([0, 0, 1, 1, 2])) == {1: 0.8}


def test_votes():
  labels = np.array([[3, 1, 1, 3, 2], [2, 1, 1, 3, 3], [7, 8, 9, 4, 5], [0, 1, 1, 1, 0]])
  np.testing.assert_array_equal(knn.vote(labels), [3, 1, 7, 1])
  many = np.random.default_rng(0).integers(0, 4, (500, 9))
  for row, winner in zip(many, knn.vote(many), strict=True):
    counts = Counter(row.tolist())
    assert winner == next(label for label in row if counts[label] == max(counts.values()))


@pytest.mark.parametrize(
  'change,words',
  [
    (dict(ks=(1, 300)), r'k=1,300 must be in 1 \.\. 299, less than the 300'),
    (dict(metric='l1'), "metric='l1' must be one of 'euclidean', 'cosine'"),
  ],
)
def test_wrong_input_is_one_sentence(change, words):
  names = ('train_x', 'train_y', 'test_x', 'test_y')
  arguments = dict(zip(names, make(), strict=True)) | change
  with pytest.raises(ValueError, match=words):
    knn.knn_accuracy(**arguments)
