"""Features as estimators take them: arrays, files, and data beyond the memory."""

import os
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from het_plugin.estimators import placement
from het_plugin.estimators.targets import Shares, as_array
from het_plugin.measures import votes
from het_plugin.rows import Rows, files

SOLVERS = ('auto', 'lbfgs', 'adam')
# Features of more bytes than this in float32 stay on disk under solver='auto'.
MEMORY_BYTES = 2**31
_PART_ROWS = 8192
_SPREAD_ROWS = 1000
_MOST = 0.9
FAR = 1000.0  # a mean this many distances away costs ten of the 24 bits of float32
_LIMIT = 64
_LEAST_LIMIT = 2.0**18
_LARGEST = 1e12
_LARGEST_SUM = 1e38  # of squares


def open_features(x: Any, y: Any = None) -> tuple[Any, Any]:
  """Features and labels; what is no file is returned as it is.

  Args:
    x: an array; the name of a file (`rows.read`), whose features stay on
      disk where its format allows that; or an open `safetensors.safe_open`.
    y: labels; None takes those of the file, the `Rows` themselves if they have weights.

  Raises:
    ValueError: the file is missing or damaged, has no features, or is open and has weights of its
      labels.
  """
  if isinstance(x, str | os.PathLike):
    read = files.read(str(x), mapped=True)
    labels = read.labels[:, 0] if read.labels.shape[1] == 1 else read.labels
    if votes.has_shares(read.labels, read.label_weight):
      labels = read  # shares [N, K] are made where they are needed (`labels_of_rows`)
    return read.features, labels if y is None else y
  if hasattr(x, 'get_tensor'):
    arrays = {name: np.asarray(x.get_tensor(name)) for name in x.keys()}
    features = files.find_features(arrays)
    if y is None and 'label_weight' in arrays:
      raise ValueError('the open file has label_weight: give its path, which reads weights too')
    labels = files.one_of(arrays, files.LABEL_NAMES)[1] if y is None else y
    return features, labels
  return x, y


def is_mapped(x: Any) -> bool:
  """Whether an array is a file of floating-point rows that is read where it is touched."""
  is_float = isinstance(x, np.memmap) and (x.dtype.kind == 'f' or x.dtype == ml_dtypes.bfloat16)
  return is_float and x.ndim == 2 and len(x) > 0


def read_rows(x: np.ndarray, rows: slice) -> np.ndarray:
  """Some rows of x [N, D], float32 or float64; those of a mapped file are checked now."""
  block = x[rows]
  if is_mapped(x):
    block = widened(np.asarray(block))
    check_finite(block)
  return block


def parts(rows: np.ndarray, x: np.ndarray) -> Iterator[np.ndarray]:
  """Numbers of rows of x [N, D], int [n], in parts that are read one after the other."""
  for part in np.array_split(rows, -(-len(rows) // _PART_ROWS)):
    yield part
    placement.forget_pages(x)


def widened(x: np.ndarray) -> np.ndarray:
  """x itself, or as float32 if its numbers have two bytes."""
  return np.asarray(x).astype(np.float32) if x.dtype.name in ('bfloat16', 'float16') else x


def check_finite(x: np.ndarray) -> None:
  """Raises ValueError if a row of x [N, D] has NaN, infinity or what float32 cannot hold."""
  if not np.isfinite(x.sum(dtype=np.float64)):  # needs no second array [N, D]
    is_finite = np.isfinite(x).all(axis=1)
    if not is_finite.all():
      raise ValueError(f'Input X contains NaN or infinity, first in row {np.argmin(is_finite)}')
  if x.dtype == np.float64 and max(x.max(), -x.min()) > np.finfo(np.float32).max:
    raise ValueError('Input X contains a value too large for float32')


class Spread(NamedTuple):
  """Where most rows lie: `centre` and their mean `distance` from it (0 if unknown), float64 [D]."""

  centre: np.ndarray
  distance: np.ndarray

  def times(self, x: np.ndarray) -> np.ndarray:
    """How many distances each entry of x [n, D] is from the centre, 0 where that is unknown."""
    known = self.distance > 0
    return np.abs(x - self.centre) * np.where(known, 1 / np.where(known, self.distance, 1), 0.0)


def spread(x: np.ndarray, mean: np.ndarray) -> Spread:
  """Where most rows of x [N, D] lie, from about `_SPREAD_ROWS` of them and the mean [D] of all.

  The centre is what a fit subtracts from the features. It is the mean, but where a few rows are so
  large that the mean is far from all others: float32 would keep no digit of these, so there it is
  the median. The objective does not depend on it, because biases are not regularised.
  """
  some = x[:: max(1, len(x) // _SPREAD_ROWS)].astype(np.float64)
  median = np.median(some, axis=0)
  distance = np.sort(np.abs(some - median), axis=0)
  most = distance[: max(1, int(_MOST * len(some)))].mean(axis=0)
  centre = np.where(np.abs(mean - median) > FAR * most, median, mean)
  return Spread(centre, np.where(most > 0, most, distance.mean(axis=0)))


def moved_in(x: np.ndarray, where: Spread, size: np.ndarray) -> np.ndarray:
  """x [N, D] with rows that are too far for float32 moved towards the centre; x itself without any.

  A row S times as far as the others fixes W v for its direction v to about N / S. With S =
  `_LIMIT` N that is nearly 0, so rows that are farther have nearly the same optimum. But products
  of float32 with them are off by S / 2^24 nats. Warns of such rows. `size` is of `sizes`.

  Rows that share a far entry have one that stands for a missing value, which predictions see, too:
  they stay. W fits one such feature, but float32 cannot fit several at once.

  Raises:
    ValueError: rows share an entry whose square float32 cannot hold.
  """
  limit = max(_LIMIT * len(x), _LEAST_LIMIT)
  far = np.flatnonzero(size > limit)
  if not len(far):
    return x
  rows = x[far].astype(np.float64)
  times = where.times(rows)  # [f, D]
  column = times.argmax(axis=1)
  largest = rows[np.arange(len(far)), column]
  count = _sharing(rows, column)
  is_shared = count > 1
  is_wrong = is_shared & ((times > limit).sum(axis=1) > 1) | is_shared & (size[far] > _LARGEST)
  if is_wrong.any():
    i = int(np.argmax(is_wrong))
    message = (
      f'X has {largest[i]:g} in {count[i]} rows of feature {column[i]}, '
      f'{size[far[i]]:.0e} times as far from most rows as they are from each other, which float32 '
      'cannot fit: if it stands for missing values, take a number near the others'
    )
    if size[far[i]] > _LARGEST:
      raise ValueError(message)
    warnings.warn(message, stacklevel=2)
  if is_shared.all():
    return x
  alone = far[~is_shared]
  warnings.warn(
    f'{len(alone)} of the {len(x)} rows of X are much larger than the others, up to '
    f'{size[alone].max():.0e} times: float32 cannot hold both, and they are fitted as if they were '
    f'{limit:.0e} times as large',
    stacklevel=2,
  )
  x = np.array(x)
  factor = np.where(times > FAR, limit / size[far, None], 1.0)
  x[alone] = (where.centre + factor * (rows - where.centre))[~is_shared]
  return x


def sizes(x: np.ndarray, where: Spread) -> np.ndarray:
  """How many distances the farthest entry of each row is from the centre, float64 [N]."""
  parts = (slice(i, i + _PART_ROWS) for i in range(0, len(x), _PART_ROWS))
  return np.concatenate([where.times(x[i]).max(axis=1) for i in parts])


def _sharing(rows: np.ndarray, column: np.ndarray) -> np.ndarray:
  """How many of the rows [f, D] have the same entry in the same column, given int [f], int [f]."""
  entry = np.stack([column, rows[np.arange(len(rows)), column]], axis=1)
  _, of_row, count = np.unique(entry, axis=0, return_inverse=True, return_counts=True)
  return count[of_row.ravel()]


def far_alone(x: np.ndarray, where: Spread, size: np.ndarray) -> np.ndarray:
  """Numbers of the rows of x [N, D] that are more than `FAR` distances from the centre and share no
  far entry; `size` is of `sizes`.
  """
  far = np.flatnonzero(size > FAR)
  if not len(far):
    return far
  rows = x[far].astype(np.float64)
  return far[_sharing(rows, where.times(rows).argmax(axis=1)) == 1]


def check_squares(x: np.ndarray, centre: np.ndarray) -> None:
  """Raises ValueError if float32 cannot hold the sums of squares of x - centre [N, D]."""
  largest = max((x.max(axis=0) - centre).max(), (centre - x.min(axis=0)).max())
  if len(x) * float(largest) ** 2 > _LARGEST_SUM:
    raise ValueError(
      f'X has values {largest:.0e} from the centre, whose squares float32 cannot hold: standardise '
      f'X, or divide it by {largest:.0e}'
    )


def labels_of_rows(x: Any, y: Any) -> np.ndarray:
  """y as an array; raises ValueError if it is not one label or list of labels per row of x."""
  if isinstance(y, Rows):
    y = votes.shares(y.labels, y.num_classes, y.label_weight).view(Shares)
  if hasattr(y, 'toarray'):
    raise ValueError('y is sparse, but must be dense: give y.toarray()')
  y = as_array(y)
  if y.ndim not in (1, 2) or len(y) != len(x):
    raise ValueError(
      f'y has shape {y.shape}; it must be [{len(x)}] or [{len(x)}, ...], as X has {len(x)} rows: '
      'inconsistent numbers of samples'
    )
  return y


def streams(x: Any, solver: str) -> bool:
  """Whether a fit takes minibatches (the rule of docs/probe.md)."""
  return solver == 'adam' or (solver == 'auto' and 4 * np.size(x) > MEMORY_BYTES)


def merged(
  x: np.ndarray, values: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Distinct rows in ascending order, with the sums of their weights."""
  both = np.concatenate([x, values.astype(np.float64)], axis=1)
  _, first, which = np.unique(both, axis=0, return_index=True, return_inverse=True)
  return x[first], values[first], np.bincount(which.ravel(), weight)
