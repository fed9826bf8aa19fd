"""k-nearest-neighbour accuracy of representations, by scikit-learn's exhaustive search.

With k = 1, Euclidean distances and each training example left out in turn, this is the proxy by
which Puigcerver et al. 2020, "Scalable transfer learning with expert models"
(https://arxiv.org/abs/2009.13239), choose a network for a task before any training.
"""

from collections.abc import Sequence

import numpy as np

from het_plugin.measures.fewshot import Split, check_splits

METRICS = ('euclidean', 'cosine')


def knn_accuracy(
  train_x: np.ndarray,
  train_y: np.ndarray,
  test_x: np.ndarray | None = None,
  test_y: np.ndarray | None = None,
  *,
  ks: Sequence[int] = (1,),
  metric: str = 'euclidean',
) -> dict[int, float]:
  """Accuracy of the vote of the k nearest training examples (`vote`).

      >>> from sklearn.datasets import load_iris
      >>> from het_plugin.measures import knn
      >>> accuracy = knn.knn_accuracy(*load_iris(return_X_y=True), ks=(1, 5))
      >>> round(accuracy[5], 3)
      0.967

  Args:
    train_x: finite float [N, D].
    train_y: int [N].
    test_x, test_y: float [M, D] and int [M]. None uses the training set itself, where a row is not
      its own neighbour, but other rows with the same features are.
    ks: numbers of neighbours, each in 1 .. N - 1.
    metric: one of METRICS.

  Returns:
    {k: accuracy in [0, 1]}. Test examples of a class without a training example are wrong.
  """
  from sklearn.neighbors import NearestNeighbors  # takes a second

  train = test = Split(train_x, train_y)
  if test_x is not None and test_y is not None:
    test = Split(test_x, test_y)
  elif test_x is not None or test_y is not None:
    raise ValueError('test_x and test_y belong together: give both, or neither')
  check_splits(train, test)
  if metric not in METRICS:
    raise ValueError(f'metric={metric!r} is unknown: choose from {", ".join(METRICS)}')
  if not ks or min(ks) < 1 or max(ks) >= len(train_x):
    raise ValueError(
      f'k={",".join(map(str, ks))} must be in 1 .. {len(train_x) - 1}, less than the '
      f'{len(train_x)} training examples'
    )
  x = train_x.astype(np.float64)
  mean = 0.0
  queries = None
  if metric == 'euclidean':
    mean = x.mean(axis=0)  # the search multiplies out |a - b|^2, which is exact near 0
  if test is not train:
    queries = test.x.astype(np.float64) - mean
  search = NearestNeighbors(algorithm='brute', metric=metric).fit(x - mean)
  # Without queries, these are the neighbours of each training row, which is not its own.
  labels = train_y[search.kneighbors(queries, max(ks), return_distance=False)]
  return {k: float(np.mean(vote(labels[:, :k]) == test.y)) for k in ks}


def vote(labels: np.ndarray) -> np.ndarray:
  """The most frequent label [M] of each row of labels [M, k], which are ordered by distance.

  Of equally frequent labels, the one with the nearer example wins.
  """
  counts = np.stack([(labels == column[:, None]).sum(axis=1) for column in labels.T], axis=1)
  return labels[np.arange(len(labels)), counts.argmax(axis=1)]
