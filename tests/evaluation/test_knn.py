"""Exact neighbours and votes, against scikit-learn and float64 by brute force."""

from collections import Counter

import numpy as np
import pytest
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors

from het_plugin.evaluation import knn


def make(n=300, m=50, d=20, k=5, dtype=np.float32, offset=0.0):
  rng = np.random.default_rng(0)
  labels = rng.integers(0, k, n + m)
  x = (rng.normal(size=(n + m, d)) + rng.normal(size=(k, d))[labels] + offset).astype(dtype)
  return x[:n], labels[:n], x[n:], labels[n:]


def brute_force(train, queries, k, metric='euclidean', leave_one_out=False):
  """Rows and distances in float64, of equal distances the lower row first."""
  train, queries = train.astype(np.float64), queries.astype(np.float64)
  if metric == 'cosine':
    train = train / np.linalg.norm(train, axis=1, keepdims=True)
    queries = queries / np.linalg.norm(queries, axis=1, keepdims=True)
  distances = np.square(queries[:, None] - train[None]).sum(axis=2)
  distances = distances / 2 if metric == 'cosine' else np.sqrt(distances)
  if leave_one_out:
    np.fill_diagonal(distances, np.inf)
  rows = np.argsort(distances, axis=1, kind='stable')[:, :k]
  return rows, np.take_along_axis(distances, rows, axis=1)


@pytest.mark.parametrize('metric', knn.METRICS)
@pytest.mark.parametrize('left_out', [False, True])
@pytest.mark.parametrize('n,k', [(300, 7), (997, 1), (6, 5), (2, 1)])
def test_neighbors_are_those_of_float64(metric, left_out, n, k):
  train, _, queries, _ = make(n=n)
  found = knn.nearest_neighbors(train, None if left_out else queries, k=k, metric=metric)
  rows, distances = brute_force(train, train if left_out else queries, k, metric, left_out)
  np.testing.assert_array_equal(found.rows, rows)
  np.testing.assert_allclose(found.distances, distances, rtol=1e-12)


@pytest.mark.parametrize('metric', knn.METRICS)
def test_neighbors_are_those_of_scikit_learn(metric):
  train, _, queries, _ = make()
  ours = knn.nearest_neighbors(train, queries, k=10, metric=metric)
  theirs = NearestNeighbors(n_neighbors=10, algorithm='brute', metric=metric)
  distances, rows = theirs.fit(train.astype(np.float64)).kneighbors(queries.astype(np.float64))
  np.testing.assert_array_equal(ours.rows, rows)
  np.testing.assert_allclose(ours.distances, distances, rtol=1e-6)


@pytest.mark.parametrize('metric', knn.METRICS)
def test_accuracy_is_that_of_scikit_learn(metric):
  """For k = 1 and two classes with odd k, where no vote is tied."""
  train_x, train_y, test_x, test_y = make(k=2, d=4)
  ours = knn.knn_accuracy(train_x, train_y, test_x, test_y, ks=(1, 5, 31), metric=metric)
  for k, accuracy in ours.items():
    theirs = KNeighborsClassifier(k, algorithm='brute', metric=metric).fit(train_x, train_y)
    assert accuracy == theirs.score(test_x, test_y)
  assert len(set(ours.values())) > 1


@pytest.mark.parametrize('offset', [1e4, 1e6])
def test_far_from_the_origin(offset):
  """There |x|^2 - 2 x^T t in float32 has errors far above the differences of distances."""
  train, _, queries, _ = make(n=600, d=16, offset=offset)
  rows, distances = brute_force(train, queries, 5)
  found = knn.nearest_neighbors(train, queries, k=5)
  np.testing.assert_array_equal(found.rows, rows)
  np.testing.assert_allclose(found.distances, distances, rtol=1e-12)


@pytest.mark.parametrize('exponent', [-100, 120])
def test_squares_that_float32_does_not_hold(exponent):
  train, _, queries, _ = make(n=600, d=16)
  scale = np.float32(2.0**exponent)
  rows, distances = brute_force(train, queries, 5)
  found = knn.nearest_neighbors(train * scale, queries * scale, k=5)
  np.testing.assert_array_equal(found.rows, rows)
  np.testing.assert_allclose(found.distances, distances * scale, rtol=1e-12)


def test_neighbors_closer_to_each_other_than_float32_of_their_products():
  """Distances from the query that differ by 1e-7 of themselves."""
  rng = np.random.default_rng(1)
  direction = rng.normal(size=64)
  steps = rng.permutation(500)
  train = (1 + 1e-7 * steps)[:, None] * direction
  found = knn.nearest_neighbors(train, np.zeros((1, 64)), k=20)
  np.testing.assert_array_equal(steps[found.rows[0]], np.arange(20))


def test_an_outlier_spoils_no_bound():
  train, _, queries, _ = make(n=2000)
  train[17] = 1e12
  rows, _ = brute_force(train, queries, 3)
  np.testing.assert_array_equal(knn.nearest_neighbors(train, queries, k=3).rows, rows)


@pytest.mark.parametrize('leave_one_out', [True, False])
def test_blocks_and_chunks_change_nothing(monkeypatch, leave_one_out):
  train, _, queries, _ = make()
  queries = None if leave_one_out else queries
  whole = knn.nearest_neighbors(train, queries, k=3)
  monkeypatch.setattr(knn, '_BLOCK_ELEMENTS', 4 * len(train))
  monkeypatch.setattr(knn, '_EXACT_ELEMENTS', 7 * train.shape[1])
  split = knn.nearest_neighbors(train, queries, k=3)
  np.testing.assert_array_equal(split.rows, whole.rows)
  np.testing.assert_array_equal(split.distances, whole.distances)


def test_leaving_out_is_by_row_and_duplicates_count():
  x = np.array([[0.0], [0.0], [0.0], [5.0], [6.0]])
  found = knn.nearest_neighbors(x, k=2)
  np.testing.assert_array_equal(found.rows, [[1, 2], [0, 2], [0, 1], [4, 0], [3, 0]])
  np.testing.assert_array_equal(found.distances[:3], 0)
  y = np.array([0, 0, 1, 1, 2])
  # Rows 0 and 1 find each other; 2 a row of class 0; 3 class 2; 4 class 1.
  assert knn.knn_accuracy(x, y) == {1: 0.4}


def test_collapsed_representations_take_the_lowest_rows():
  x = np.full((700, 3), 0.1, np.float32)
  found = knn.nearest_neighbors(x, k=2)
  np.testing.assert_array_equal(found.rows[:3], [[1, 2], [0, 2], [0, 1]])
  np.testing.assert_array_equal(found.rows[3:], np.tile([0, 1], (697, 1)))


def test_the_cosine_does_not_see_lengths():
  train, _, queries, _ = make()
  stretched = (train * np.geomspace(1e-12, 1e12, len(train))[:, None]).astype(np.float64)
  want = knn.nearest_neighbors(train, queries, k=4, metric='cosine').rows
  got = knn.nearest_neighbors(stretched, queries, k=4, metric='cosine').rows
  np.testing.assert_array_equal(got, want)


def test_votes():
  labels = np.array([[3, 1, 1, 3, 2], [2, 1, 1, 3, 3], [7, 8, 9, 4, 5], [0, 1, 1, 1, 0]])
  np.testing.assert_array_equal(knn.vote(labels), [3, 1, 7, 1])
  rng = np.random.default_rng(0)
  many = rng.integers(0, 4, (500, 9))
  for row, winner in zip(many, knn.vote(many), strict=True):
    counts = Counter(row.tolist())
    tied = [label for label in row if counts[label] == max(counts.values())]
    assert winner == tied[0]


@pytest.mark.parametrize(
  'change,words',
  [
    (dict(train_y=np.zeros(300, int)), 'all 300 training examples have label 0; kNN needs two'),
    (dict(ks=(1, 300)), r'k=1,300 must be in 1 \.\. 299, less than the 300'),
    (dict(ks=(0,)), 'k=0 must be in'),
    (dict(ks=()), 'k= must be in'),
    (dict(metric='l1'), "metric='l1' is unknown: choose from euclidean, cosine"),
    (dict(test_x=np.ones((50, 3), np.float32)), 'have 20 features and queries 3'),
    (dict(test_y=np.zeros(3, int)), r'test_y \[N\]; they are \[50, 20\] and \[3\]'),
    (dict(train_x=np.ones((0, 20)), train_y=np.ones(0, int)), 'not empty'),
    (dict(test_x=np.full((50, 20), np.nan)), 'test_x has 50 rows that are not finite'),
    (dict(train_x=np.zeros((300, 20)), metric='cosine'), 'row 0 of 300 is all zeros'),
  ],
)
def test_wrong_input_is_one_sentence(change, words):
  names = ('train_x', 'train_y', 'test_x', 'test_y')
  arguments = dict(zip(names, make(), strict=True)) | change
  with pytest.raises(ValueError, match=words):
    knn.knn_accuracy(**arguments)
