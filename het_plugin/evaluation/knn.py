"""k-nearest-neighbour accuracy of representations, exact.

With k = 1, Euclidean distances and each training example left out in turn, this is the proxy by
which Puigcerver et al. 2020, "Scalable transfer learning with expert models"
(https://arxiv.org/abs/2009.13239), choose a network for a task before any training.

Neighbours are ordered by the distances |a - b| of the given rows in float64; of equal distances the
lower row comes first.
"""

from collections.abc import Sequence

import numpy as np

from het_plugin.evaluation.fewshot import check_arrays
from het_plugin.evaluation.ridge import blocks

METRICS = ('euclidean', 'cosine')
_BLOCK_ELEMENTS = 1 << 24  # float32 scores held at once: 64 MiB
_EXACT_ELEMENTS = 1 << 20  # float64 differences held at once: 8 MiB

# One matrix product per block of queries a gives, for all training examples b,
#
#   score(a, b) = |b|^2 / 2 - a^T b  =  (|a - b|^2 - |a|^2) / 2.
#
# Rows are centred by the mean of the training examples, which changes no distance and makes the
# products small. For the cosine they are divided by their norms first: |a - b|^2 = 2 (1 - cos).
# The product is in float32, with the rows scaled so that no square overflows. Rounding puts a score
# off by less than u (D + 16) (|a| |b| + |b|^2), u = 2^-24. All rows within twice that of the k-th
# smallest score are candidates. These few are ordered by |a - b| in float64.


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

  Args:
    train_x: finite float [N, D].
    train_y: int [N], of at least two classes.
    test_x, test_y: float [M, D] and int [M]. None for the training set itself, each row without its
      own entry; other rows with the same features count.
    ks: numbers of neighbours, each in 1 .. N - 1.
    metric: one of METRICS.

  Returns:
    {k: accuracy in [0, 1]}. Test examples of a class without a training example are wrong by
    necessity, as are left-out ones that were the only one of their class.

  Raises:
    ValueError: arrays that do not fit together or are empty, a single class, settings out of range,
      a row of zeros with 'cosine'.
  """
  check_arrays('train', train_x, train_y)
  if len(np.unique(train_y)) < 2:
    raise ValueError(f'all {len(train_y)} training examples have label {train_y[0]}; kNN needs two')
  if test_x is not None:
    check_arrays('test', test_x, test_y)
  check_settings(ks, metric, len(train_x))
  neighbors = nearest_neighbors(train_x, test_x, k=max(ks), metric=metric)
  wanted = train_y if test_x is None else test_y
  labels = train_y[neighbors]
  return {k: float(np.mean(vote(labels[:, :k]) == wanted)) for k in ks}


def nearest_neighbors(
  train_x: np.ndarray,
  queries: np.ndarray | None = None,
  *,
  k: int = 1,
  metric: str = 'euclidean',
) -> np.ndarray:
  """The k nearest rows of train_x [N, D] of queries [M, D], or of its own rows, each left out.

  Memory beside the arguments: copies of both, 12 bytes per value, and a block of 2^24 scores. The
  time is that of the matrix product of all pairs, unless a large part of the rows are equally near.

  Returns:
    Rows of train_x, int64 [M, k], ascending by distance and then row.

  Raises:
    ValueError: as `knn_accuracy`.
  """
  check_settings((k,), metric, len(train_x))
  leave_one_out = queries is None
  if not leave_one_out and queries.shape[1] != train_x.shape[1]:
    raise ValueError(
      f'training examples have {train_x.shape[1]} features and queries {queries.shape[1]}; they '
      'must be equal'
    )
  train = _points(train_x, metric)
  points = train if leave_one_out else _points(queries, metric)
  mean = train.mean(axis=0)
  scale = max(np.abs(train - mean).max(), np.abs(points - mean).max()) or 1.0
  centred = ((train - mean) / scale).astype(np.float32)  # [N, D]
  norms = np.linalg.norm(centred, axis=1)
  half_squares = norms**2 / 2
  unit = 2.0**-24 * (train.shape[1] + 16)
  underflow = 4 * train.shape[1] * np.finfo(np.float32).tiny

  rows = np.empty((len(points), k), np.int64)
  for block in blocks(len(points), min(1024, _BLOCK_ELEMENTS // len(train))):
    some = points[block]
    query = ((some - mean) / scale).astype(np.float32)
    scores = query @ centred.T  # [B, N]
    np.subtract(half_squares, scores, out=scores)
    if leave_one_out:
      scores[np.arange(len(some)), np.arange(block.start, block.stop)] = np.inf
    margin = unit * norms.max() * (np.linalg.norm(query, axis=1) + norms.max()) + underflow
    bound = np.partition(scores, k - 1, axis=1)[:, k - 1] + 2 * margin
    of, row = np.nonzero(scores <= bound[:, None])  # candidates, ascending by query
    square = _squared_distances(some, of, train, row)
    order = np.lexsort((row, square, of))
    nearest = order[np.searchsorted(of, np.arange(len(some)))[:, None] + np.arange(k)]
    rows[block] = row[nearest]
  return rows


def vote(labels: np.ndarray) -> np.ndarray:
  """Most frequent label of each row of labels [M, k], which are nearest first: [M]. Of equally
  frequent labels, the one whose nearest example is nearer.
  """
  winners = np.empty(len(labels), labels.dtype)
  for rows in blocks(len(labels), _EXACT_ELEMENTS // labels.shape[1] ** 2):
    block = labels[rows]
    counts = (block[:, :, None] == block[:, None, :]).sum(axis=2)  # [M, k], of each one's label
    winners[rows] = block[np.arange(len(block)), counts.argmax(axis=1)]
  return winners


def check_settings(ks: Sequence[int], metric: str, num_train: int) -> None:
  """Raises ValueError, in one sentence, for settings that `knn_accuracy` cannot use."""
  if metric not in METRICS:
    raise ValueError(f'metric={metric!r} is unknown: choose from {", ".join(METRICS)}')
  if not ks or min(ks) < 1 or max(ks) >= num_train:
    raise ValueError(
      f'k={",".join(map(str, ks))} must be in 1 .. {num_train - 1}, less than the {num_train} '
      'training examples'
    )


def _points(x: np.ndarray, metric: str) -> np.ndarray:
  """Rows x [N, D] in float64, for the cosine divided by their norms."""
  points = x.astype(np.float64)
  if metric == 'cosine':
    norms = np.linalg.norm(points, axis=1, keepdims=True)
    if not norms.all():
      raise ValueError(
        f'row {int(np.flatnonzero(norms == 0)[0])} of {len(x)} is all zeros and has no cosine; use '
        "the metric 'euclidean'"
      )
    points /= norms
  return points


def _squared_distances(
  queries: np.ndarray, of: np.ndarray, train: np.ndarray, row: np.ndarray
) -> np.ndarray:
  """|a - b|^2 of the pairs queries[of], train[row]: float64 [P]."""
  squares = np.empty(len(of))
  for pairs in blocks(len(of), _EXACT_ELEMENTS // train.shape[1]):
    squares[pairs] = np.square(queries[of[pairs]] - train[row[pairs]]).sum(axis=1)
  return squares
