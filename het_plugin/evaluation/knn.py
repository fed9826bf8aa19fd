"""k-nearest-neighbour accuracy of representations, exact.

With k = 1, Euclidean distances and each training example left out in turn, this is the proxy by
which Puigcerver et al. 2020, "Scalable transfer learning with expert models"
(https://arxiv.org/abs/2009.13239), choose a network for a task before any training.

What is guaranteed: the neighbours are those of the exact distances of the given rows, ordered by
these distances in float64 (of the differences, relative error D 2^-53); of equal ones the lower row
comes first.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

METRICS = ('euclidean', 'cosine')
_BLOCK_ELEMENTS = 1 << 25  # scores held at once in float32: 128 MiB
_EXACT_ELEMENTS = 1 << 20  # differences held at once in float64: 8 MiB
_TILE = 64  # most columns that share one minimum
_ROUNDING = 2.0**-24  # of float32

# Notation: N training examples, M queries, D features; a query and b training example.
#
# Points are x / 2^e (Euclidean) or x / |x| (cosine: |a - b|^2 = 2 (1 - cos), so both metrics are
# one), less the mean of the training points, which moves no distance and shortens all vectors. In
# float32, by one matrix product a block of queries,
#
#   score(a, b) = |b|^2 / 2 - a^T b  =  (|a - b|^2 - |a|^2) / 2,
#
# whose error is at most  margin(a, b) = u (D + c) |a| |b| + u c |b|^2  in any order of summation
# (u = 2^-24; c covers the rounding of points, |b|^2 and sums). The training examples lie in tiles;
# with the largest |b| of a tile its smallest score is known within margin(a, tile). The k-th
# smallest of (smallest score + margin) over the tiles bounds the k-th smallest exact score, so
# every neighbour has (score - margin) below that bound. The few candidates so found are computed
# again as |a - b| from the original rows in float64.


@dataclasses.dataclass(frozen=True, eq=False)
class Neighbors:
  """The k nearest training examples of each query, ascending by distance and then row.

  Attributes:
    rows: int64 [M, k], rows of the training set.
    distances: float64 [M, k]: |a - b|, or 1 - cos(a, b).
  """

  rows: np.ndarray
  distances: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class _Points:
  """Rows x [N, D] over their divisors [N, 1], in float64, a few at a time."""

  x: np.ndarray
  divisors: np.ndarray

  def __getitem__(self, rows) -> np.ndarray:
    points = self.x[rows].astype(np.float64)
    points /= self.divisors[rows]
    return points

  def blocks(self) -> Iterator[tuple[slice, np.ndarray]]:
    step = max(1, _EXACT_ELEMENTS // self.x.shape[1])
    for start in range(0, len(self.x), step):
      rows = slice(start, min(start + step, len(self.x)))
      yield rows, self[rows]

  def centred(self, mean: np.ndarray, num_rows: int) -> np.ndarray:
    """Points less the mean, float32 [num_rows, D]; rows past the last are zero."""
    centred = np.zeros((num_rows, self.x.shape[1]), np.float32)
    for rows, points in self.blocks():
      centred[rows] = points - mean
    return centred


@dataclasses.dataclass(frozen=True, eq=False)
class _Tiles:
  """Training points for float32 scores; row i is in tile i % num_tiles.

  Attributes:
    centred: float32 [N', D], N' = tile * num_tiles >= N.
    half_squares: float32 [N'], |b|^2 / 2; infinity where there is no example.
    slope, offset: float32 [num_tiles]; margin(a, tile) = slope |a| + offset.
    mean: float64 [D] of the points.
  """

  centred: np.ndarray
  half_squares: np.ndarray
  slope: np.ndarray
  offset: np.ndarray
  mean: np.ndarray


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
    train_y: int [N], of two classes at least.
    test_x, test_y: float [M, D] and int [M]; None for the training set itself, each row without its
      own entry. Other rows with the same features count: an example that is there twice has itself
      as neighbour.
    ks: numbers of neighbours, each in 1 .. N - 1.
    metric: one of METRICS.

  Returns:
    {k: accuracy in [0, 1]}. Test examples of a class without a training example, and left-out ones
    that were their class's only one, are wrong by necessity.

  Raises:
    ValueError: arrays that do not fit together or are empty, one class only, settings out of range,
      a row of zeros with 'cosine'.
  """
  _check_labels('train', train_x, train_y)
  if len(np.unique(train_y)) < 2:
    raise ValueError(f'all {len(train_y)} training examples have label {train_y[0]}; kNN needs two')
  if test_x is not None:
    _check_labels('test', test_x, test_y)
  check_settings(ks, metric, len(train_x))
  neighbors = nearest_neighbors(train_x, test_x, k=max(ks), metric=metric)
  wanted = train_y if test_x is None else test_y
  labels = train_y[neighbors.rows]
  return {k: float(np.mean(vote(labels[:, :k]) == wanted)) for k in ks}


def nearest_neighbors(
  train_x: np.ndarray,
  queries: np.ndarray | None = None,
  *,
  k: int = 1,
  metric: str = 'euclidean',
) -> Neighbors:
  """The k nearest rows of train_x [N, D] of queries [M, D], or of its own rows, each left out.

  Memory beside the arguments: N D float32 and a block of 2^25 scores. The time is that of the
  float32 matrix product of all pairs, unless very many rows are equally near.

  Raises:
    ValueError: as `knn_accuracy`.
  """
  check_settings((k,), metric, len(train_x))
  leave_one_out = queries is None
  queries = train_x if leave_one_out else queries
  if queries.shape[1] != train_x.shape[1]:
    raise ValueError(
      f'training examples have {train_x.shape[1]} features and queries {queries.shape[1]}; they '
      'must be equal'
    )
  train, queries = _points((train_x, queries), metric)
  tiles = _make_tiles(train, k)
  rows = np.empty((len(queries.x), k), np.int64)
  squares = np.empty((len(queries.x), k))
  step = min(1024, max(1, _BLOCK_ELEMENTS // len(tiles.centred)))
  for start in range(0, len(rows), step):
    block = np.arange(start, min(start + step, len(rows)))
    points = queries[block]
    query, candidate = _candidates(tiles, points, k, block if leave_one_out else None)
    square = _squared_distances(points, query, train, candidate)
    order = np.lexsort((candidate, square, query))
    nearest = order[np.searchsorted(query, np.arange(len(block)))[:, None] + np.arange(k)]
    rows[block], squares[block] = candidate[nearest], square[nearest]
  if metric == 'cosine':
    return Neighbors(rows, squares / 2)
  return Neighbors(rows, np.sqrt(squares) * train.divisors[0])


def vote(labels: np.ndarray) -> np.ndarray:
  """Most frequent label of each row of labels [M, k], which are nearest first: [M]. Of equally
  frequent labels, the one whose nearest example is nearer.
  """
  step = max(1, _EXACT_ELEMENTS // labels.shape[1] ** 2)
  winners = []
  for start in range(0, len(labels), step):
    block = labels[start : start + step]
    counts = (block[:, :, None] == block[:, None, :]).sum(axis=2)  # [M, k], of each one's label
    winners.append(block[np.arange(len(block)), counts.argmax(axis=1)])
  return np.concatenate(winners)


def check_settings(ks: Sequence[int], metric: str, num_train: int) -> None:
  """Raises ValueError, in one sentence, for settings that `knn_accuracy` cannot use."""
  if metric not in METRICS:
    raise ValueError(f'metric={metric!r} is unknown: choose from {", ".join(METRICS)}')
  if not ks or min(ks) < 1 or max(ks) >= num_train:
    raise ValueError(
      f'k={",".join(map(str, ks))} must be in 1 .. {num_train - 1}, less than the {num_train} '
      'training examples'
    )


def _points(arrays: Sequence[np.ndarray], metric: str) -> list[_Points]:
  if metric == 'euclidean':
    # A power of two: no row changes, and squares can neither overflow nor all be zero.
    largest = max(float(max(x.max(), -x.min())) for x in arrays)
    scale = 2.0 ** np.frexp(largest)[1] if largest else 1.0
    return [_Points(x, np.full((len(x), 1), scale)) for x in arrays]
  return [_Points(x, _norms(x)) for x in arrays]


def _norms(x: np.ndarray) -> np.ndarray:
  """Norms of the rows, float64 [N, 1]."""
  largest = np.maximum(x.max(axis=1, keepdims=True), -x.min(axis=1, keepdims=True))
  if (largest == 0).any():
    raise ValueError(
      f'row {int(np.flatnonzero(largest == 0)[0])} of {len(x)} is all zeros and has no cosine; '
      "use the metric 'euclidean'"
    )
  largest = largest.astype(np.float64)
  scaled = _Points(x, largest)
  squares = [np.square(points).sum(axis=1, keepdims=True) for _, points in scaled.blocks()]
  return largest * np.sqrt(np.concatenate(squares))


def _make_tiles(train: _Points, k: int) -> _Tiles:
  num_rows, dim = train.x.shape
  tile = int(np.clip(num_rows // (8 * k), 1, _TILE))  # more tiles than neighbours, by far
  num_tiles = -(-num_rows // tile)
  mean = sum(points.sum(axis=0) for _, points in train.blocks()) / num_rows
  centred = train.centred(mean, tile * num_tiles)
  squares = np.einsum('nd,nd->n', centred, centred, dtype=np.float64)
  largest = squares.reshape(tile, num_tiles).max(axis=0)  # |b|^2 of a tile
  half_squares = np.full(len(centred), np.inf, np.float32)
  half_squares[:num_rows] = squares[:num_rows] / 2
  unit = 1.01 * _ROUNDING
  underflow = 4 * dim * np.finfo(np.float32).tiny
  return _Tiles(
    centred=centred,
    half_squares=half_squares,
    slope=(unit * (dim + 16) * np.sqrt(largest)).astype(np.float32),
    offset=(unit * 8 * largest + underflow).astype(np.float32),
    mean=mean,
  )


def _candidates(
  tiles: _Tiles, points: np.ndarray, k: int, own: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
  """(query, training row) pairs that hold the k nearest of each query, ascending by query.

  Args:
    tiles: the training points.
    points: queries, float64 [B, D].
    k: neighbours.
    own: row [B] that a query must not find; None for none.
  """
  centred = (points - tiles.mean).astype(np.float32)
  scores = centred @ tiles.centred.T  # [B, N']
  np.subtract(tiles.half_squares, scores, out=scores)
  if own is not None:
    scores[np.arange(len(own)), own] = np.inf
  num_tiles = len(tiles.slope)
  scores = scores.reshape(len(centred), -1, num_tiles)
  smallest = scores.min(axis=1)
  margins = np.linalg.norm(centred, axis=1)[:, None] * tiles.slope + tiles.offset  # [B, num_tiles]
  bound = np.partition(smallest + margins, k - 1, axis=1)[:, k - 1]
  query, tile = np.nonzero(smallest - margins <= bound[:, None])
  near = scores[query, :, tile] - margins[query, tile][:, None] <= bound[query][:, None]
  pair, place = np.nonzero(near)
  return query[pair], place * num_tiles + tile[pair]


def _squared_distances(
  points: np.ndarray, query: np.ndarray, train: _Points, row: np.ndarray
) -> np.ndarray:
  """|a - b|^2 of pairs of a query, out of points [B, D], and a training row: float64 [P]."""
  step = max(1, _EXACT_ELEMENTS // train.x.shape[1])
  squares = np.empty(len(query))
  for start in range(0, len(query), step):
    chunk = slice(start, start + step)
    difference = train[row[chunk]]
    difference -= points[query[chunk]]
    squares[chunk] = np.square(difference, out=difference).sum(axis=1)
  return squares


def _check_labels(split: str, x: np.ndarray, y: np.ndarray) -> None:
  if x.ndim != 2 or not x.size or y.shape != x.shape[:1]:
    raise ValueError(
      f'{split}_x must be [N, D], not empty, and {split}_y [N]; they are {list(x.shape)} and '
      f'{list(y.shape)}'
    )
  if not np.isfinite(x).all():
    raise ValueError(
      f'{split}_x has {int((~np.isfinite(x).all(axis=1)).sum())} rows that are not finite'
    )
