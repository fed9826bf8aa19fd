"""Exact neighbours and votes, against scikit-learn and float64 by brute force."""

from collections import Counter

import numpy as np
import pytest
from sklearn.neighbors import KNeighborsClassifier

from het_plugin.evaluation import knn


def make(n=300, m=50, d=20, k=5, offset=0.0):
  rng = np.random.default_rng(0)
  labels = rng.integers(0, k, n + m)
  x = rng.normal(size=(n + m, d)) + rng.normal(size=(k, d))[labels] + offset
  x = x.astype(np.float32)
  return x[:n], labels[:n], x[n:], labels[n:]


def check(train, queries=None, k=5, metric='euclidean'):
  """Against all distances in float64; of equal distances the lower row is first."""
  a, b = (x.astype(np.float64) for x in (train if queries is None else queries, train))
  if metric == 'cosine':
    a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b))
  distances = np.square(a[:, None] - b[None]).sum(axis=2)
  distances = distances / 2 if metric == 'cosine' else np.sqrt(distances)
  if queries is None:
    np.fill_diagonal(distances, np.inf)
  rows = np.argsort(distances, axis=1, kind='stable')[:, :k]
  found = knn.nearest_neighbors(train, queries, k=k, metric=metric)
  np.testing.assert_array_equal(found, rows)


@pytest.mark.parametrize('metric', knn.METRICS)
@pytest.mark.parametrize('n,k', [(300, 7), (997, 1), (2, 1)])
def test_neighbors_are_those_of_float64(metric, n, k):
  train, _, queries, _ = make(n=n)
  check(train, queries, k, metric)
  check(train, None, k, metric)


@pytest.mark.parametrize('metric', knn.METRICS)
def test_accuracy_is_that_of_scikit_learn(metric):
  """For k = 1 and two classes with odd k, where no vote is tied."""
  train_x, train_y, test_x, test_y = make(k=2, d=4)
  ours = knn.knn_accuracy(train_x, train_y, test_x, test_y, ks=(1, 5, 31), metric=metric)
  for k, accuracy in ours.items():
    theirs = KNeighborsClassifier(k, algorithm='brute', metric=metric).fit(train_x, train_y)
    assert accuracy == theirs.score(test_x, test_y)
  assert len(set(ours.values())) > 1


def test_wherever_and_however_large_the_features_are():
  train, _, queries, _ = make(n=600, d=16, offset=1e6)
  check(train, queries)
  train, _, queries, _ = make(n=600, d=16)
  for exponent in (-100, 120):  # float32 does not hold the squares
    check(train * np.float32(2.0**exponent), queries * np.float32(2.0**exponent))
  train[17] = 1e12  # an outlier
  check(train, queries)


def test_neighbors_closer_to_each_other_than_rounding_of_their_products():
  """Distances from the query that differ by 1e-12 of themselves."""
  rng = np.random.default_rng(1)
  steps = rng.permutation(500)
  train = (1 + 1e-12 * steps)[:, None] * rng.normal(size=64)
  found = knn.nearest_neighbors(train, np.zeros((1, 64)), k=20)
  np.testing.assert_array_equal(steps[found[0]], np.arange(20))


@pytest.mark.parametrize('leave_one_out', [True, False])
def test_blocks_change_nothing(monkeypatch, leave_one_out):
  train, _, queries, _ = make()
  monkeypatch.setattr(knn, '_BLOCK_ELEMENTS', 4 * len(train))
  monkeypatch.setattr(knn, '_EXACT_ELEMENTS', 7 * train.shape[1])
  check(train, None if leave_one_out else queries)


def test_leaving_out_is_by_row_and_duplicates_count():
  x = np.array([[0.0], [0.0], [0.0], [5.0], [6.0]])
  found = knn.nearest_neighbors(x, k=2)
  np.testing.assert_array_equal(found, [[1, 2], [0, 2], [0, 1], [4, 0], [3, 0]])
  # Rows 0 and 1 find each other; 2 a row of class 0; 3 class 2; 4 class 1.
  assert knn.knn_accuracy(x, np.array([0, 0, 1, 1, 2])) == {1: 0.4}


def test_collapsed_representations_take_the_lowest_rows():
  found = knn.nearest_neighbors(np.full((700, 3), 0.1, np.float32), k=2)
  np.testing.assert_array_equal(found[:3], [[1, 2], [0, 2], [0, 1]])
  np.testing.assert_array_equal(found[3:], np.tile([0, 1], (697, 1)))


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
    (dict(train_y=np.zeros(300, int)), 'all 300 training examples have label 0; kNN needs two'),
    (dict(ks=(1, 300)), r'k=1,300 must be in 1 \.\. 299, less than the 300'),
    (dict(metric='l1'), "metric='l1' is unknown: choose from euclidean, cosine"),
    (dict(test_x=np.ones((50, 3), np.float32)), 'have 20 features and queries 3'),
    (dict(test_y=np.zeros(3, int)), r'test_y \[N\]; they are \[50, 20\] and \[3\]'),
    (dict(test_x=np.full((50, 20), np.nan)), 'test_x has 50 rows that are not finite'),
    (dict(train_x=np.zeros((300, 20)), metric='cosine'), 'row 0 of 300 is all zeros'),
  ],
)
def test_wrong_input_is_one_sentence(change, words):
  names = ('train_x', 'train_y', 'test_x', 'test_y')
  arguments = dict(zip(names, make(), strict=True)) | change
  with pytest.raises(ValueError, match=words):
    knn.knn_accuracy(**arguments)
