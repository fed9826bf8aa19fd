"""k-nearest-neighbour accuracy of representations, by scikit-learn's exhaustive search of blocks.

With k = 1, Euclidean distances and each training example left out in turn, this is the proxy by
which Puigcerver et al. 2020, "Scalable transfer learning with expert models"
(https://arxiv.org/abs/2009.13239), choose a network for a task before any training.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from het_plugin.measures.fewshot import Split, check_splits
from het_plugin.system import ranges

Metric = Literal['euclidean', 'cosine']
BLOCK_BYTES = 2**26  # of rows in float64
_MEBIBYTES = 64  # of distances


@ranges.checked
def knn_accuracy(
  train_x: Any,
  train_y: np.ndarray,
  test_x: Any = None,
  test_y: np.ndarray | None = None,
  *,
  ks: Sequence[int] = (1,),
  metric: Metric = 'euclidean',
) -> dict[int, float]:
  """Accuracy of the vote of the k nearest training examples (`vote`).

      >>> from sklearn.datasets import load_iris
      >>> from het_plugin.measures import knn
      >>> accuracy = knn.knn_accuracy(*load_iris(return_X_y=True), ks=(1, 5))
      >>> round(accuracy[5], 3)
      0.967

  Args:
    train_x: finite float [N, D]. A mapped file stays on disk, here and of test_x.
    train_y: int [N].
    test_x, test_y: float [M, D] and int [M]. None uses the training set itself, where a row is not
      its own neighbour, but other rows with the same features are.
    ks: numbers of neighbours, each in 1 .. N - 1.
    metric: distance.

  Returns:
    {k: accuracy in [0, 1]}. Test examples of a class without a training example are wrong.
  """
  train = test = Split(train_x, train_y)
  if test_x is not None and test_y is not None:
    test = Split(test_x, test_y)
  elif test_x is not None or test_y is not None:
    raise ValueError('test_x and test_y belong together: give both, or neither')
  check_splits(train, test)
  if not ks or min(ks) < 1 or max(ks) >= len(train_x):
    raise ValueError(
      f'k={",".join(map(str, ks))} must be in 1 .. {len(train_x) - 1}, less than the '
      f'{len(train_x)} training examples'
    )
  mean = np.zeros(train_x.shape[1])
  if metric == 'euclidean':  # the search multiplies out |a - b|^2, which is exact near 0
    mean = np.sum([x.sum(axis=0) for _, x in _blocks(train_x, mean)], axis=0) / len(train_x)
  num_right = np.zeros(len(ks))
  for rows, queries in _blocks(test.x, mean):
    own = np.full(len(queries), -1) if test is not train else rows
    labels = train_y[_nearest(queries, own, train_x, mean, max(ks), metric)]
    num_right += [(vote(labels[:, :k]) == test.y[rows]).sum() for k in ks]
  return dict(zip(ks, (num_right / len(test.y)).tolist(), strict=True))


def _blocks(x: Any, mean: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Numbers [b] of rows of x [N, D], and these rows less the mean, float64 [b, D]."""
  size = max(1, BLOCK_BYTES // (8 * x.shape[1]))
  for start in range(0, len(x), size):
    block = x[start : start + size].astype(np.float64)
    block -= mean
    yield np.arange(start, start + len(block)), block


def _nearest(
  queries: np.ndarray, own: np.ndarray, x: Any, mean: np.ndarray, count: int, metric: str
) -> np.ndarray:
  """The nearest rows of x [N, D] for queries [b, D], ascending by distance: numbers [b, count].

  `own` [b] are the rows that are left out, one for each query.
  """
  import sklearn
  from sklearn.neighbors import NearestNeighbors  # takes a second

  numbers = np.zeros((len(queries), 0), np.int64)
  distances = np.zeros(numbers.shape)
  for rows, block in _blocks(x, mean):
    search = NearestNeighbors(algorithm='brute', metric=metric).fit(block)
    with sklearn.config_context(working_memory=_MEBIBYTES):
      distance, place = search.kneighbors(queries, min(count + 1, len(block)))
    numbers = np.concatenate([numbers, rows[place]], axis=1)
    distances = np.concatenate([distances, distance], axis=1)
    distances[numbers == own[:, None]] = np.inf
    order = np.argsort(distances, axis=1, kind='stable')[:, :count]
    numbers = np.take_along_axis(numbers, order, axis=1)
    distances = np.take_along_axis(distances, order, axis=1)
  return numbers


def vote(labels: np.ndarray) -> np.ndarray:
  """The most frequent label [M] of each row of labels [M, k], which are ordered by distance.

  Of equally frequent labels, the one with the nearer example wins.
  """
  counts = np.stack([(labels == column[:, None]).sum(axis=1) for column in labels.T], axis=1)
  return labels[np.arange(len(labels)), counts.argmax(axis=1)]
