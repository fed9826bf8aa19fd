"""Features as estimators take them: arrays, files, and data beyond the memory."""

import dataclasses
import functools
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from het_plugin.estimators import placement
from het_plugin.estimators.targets import Shares, as_array
from het_plugin.measures import votes
from het_plugin.rows import Rows, files
from het_plugin.rows.shards import Joined, Reordered

HALVES = ('bfloat16', 'float16')  # types of two bytes
# Features of more bytes than this in float32 stay on disk under solver='auto'.
MEMORY_BYTES = 2**31
_PART_ROWS = 8192
_GROUPS = 16  # of rows that one process sums up
_SPREAD_ROWS = 1000
_MOST = 0.9
FAR = 1000.0  # a mean this many distances away costs ten of the 24 bits of float32
_LIMIT = 64
_LEAST_LIMIT = 2.0**18
_LARGEST = 1e12
_LARGEST_SUM = 1e38  # of squares


def open_features(x: Any, y: Any = None) -> tuple[Any, Any, list[str] | None]:
  """Features, labels, and the names of a file's columns if it has any (`Rows.meaning`); what is no
  file is returned as it is.

  Args:
    x: an array; the name of a file (`rows.read`), whose features stay on
      disk where its format allows that; `Rows`; or an open `safetensors.safe_open`.
    y: labels; None takes those of the file, the `Rows` themselves if they have weights.

  Raises:
    ValueError: the file is missing or damaged, has no features, or is open and has weights of its
      labels; or x is a mapping.
  """
  if isinstance(x, str | os.PathLike | Rows):
    read = x if isinstance(x, Rows) else files.read(str(x), mapped=True)
    labels = read.labels[:, 0] if read.labels.shape[1] == 1 else read.labels
    if read.by_name:
      labels = np.array([*(read.class_names or ()), ''], object)[labels]
    if votes.has_shares(read.labels, read.label_weight):
      labels = read  # shares [N, K] are made where they are needed (`labels_of_rows`)
    return read.features, labels if y is None else y, read.meaning['feature_names']
  if hasattr(x, 'get_tensor'):
    arrays = {name: np.asarray(x.get_tensor(name)) for name in x.keys()}
    features = files.find_features(arrays)
    if y is None and 'label_weight' in arrays:
      raise ValueError('the open file has label_weight: give its path, which reads weights too')
    labels = files.one_of(arrays, files.LABEL_NAMES)[1] if y is None else y
    return features, labels, None
  if isinstance(x, Mapping) and not hasattr(x, 'shape'):  # of np.load; sparse ones have a shape
    raise ValueError(f'X has several arrays, {", ".join(x)}: give the features, or a path')
  return x, y, None


def is_mapped(x: Any) -> bool:
  """Whether an array is a file of floating-point rows that is read where it is touched."""
  on_disk = isinstance(x, np.memmap | Joined | Reordered)
  is_float = on_disk and (x.dtype.kind == 'f' or x.dtype == ml_dtypes.bfloat16)
  return is_float and x.ndim == 2 and len(x) > 0


def stamp(path: str) -> tuple[int, int]:
  """When a file was changed last, and its length."""
  found = os.stat(path)
  return found.st_mtime_ns, found.st_size


def stamps(x: Any) -> list[tuple[str, int, int]]:
  """Names and stamps of the files whose rows a mapped array has."""
  files_of = [getattr(part, 'filename', None) for part in getattr(x, 'parts', [x])]
  return [(str(path), *stamp(str(path))) for path in files_of if path]


def widened(x: np.ndarray) -> np.ndarray:
  """x itself, or as float32 if its numbers have two bytes."""
  return np.asarray(x).astype(np.float32) if x.dtype.name in HALVES else x


def check_finite(x: np.ndarray, start: int = 0) -> None:
  """Raises ValueError if a row of x [n, D] has NaN, infinity or what float32 cannot hold.

  The first row has the number `start`.
  """
  if not np.isfinite(x.sum(dtype=np.float64)):  # needs no second array [N, D]
    is_finite = np.isfinite(x).all(axis=1)
    if not is_finite.all():
      row = start + int(np.argmin(is_finite))
      raise ValueError(f'Input X contains NaN or infinity, first in row {row}')
  if x.dtype == np.float64 and max(x.max(), -x.min()) > np.finfo(np.float32).max:
    raise ValueError('Input X contains a value too large for float32')


class Spread(NamedTuple):
  """Where most rows lie: `centre` and their mean `distance` from it (0 if unknown), [D].

  `largest` is the largest distance of any row from the centre, [D].
  """

  centre: np.ndarray
  distance: np.ndarray
  largest: np.ndarray

  def times(self, x: np.ndarray) -> np.ndarray:
    """How many distances each entry of x [n, D] is from the centre, 0 where that is unknown."""
    known = self.distance > 0
    return np.abs(x - self.centre) * np.where(known, 1 / np.where(known, self.distance, 1), 0.0)


class Far(NamedTuple):
  """Rows that are more than `FAR` distances from the centre.

  Attributes:
    alone: int [f], those that share no far entry with another.
    moved: int [m], those that are too far for float32.
    values: float64 [m, D], what is fitted in their place.
  """

  alone: np.ndarray
  moved: np.ndarray
  values: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Features:
  """Features of N rows that have been checked, or of a file, whose rows are checked when read.

  Attributes:
    x: [N, D], in memory or mapped (`is_mapped`).
    first: the number of its first row, for sentences on rows.
  """

  x: Any
  first: int = 0

  def __len__(self) -> int:
    return len(self.x)

  def __getitem__(self, rows: slice | np.ndarray) -> 'Features':
    start = rows.indices(len(self))[0] if isinstance(rows, slice) else 0
    return Features(self.x[rows], self.first + start)

  def some(self, rows: np.ndarray) -> 'Features':
    """Some rows [n], which are read when they are taken."""
    return Features(Reordered(self.x, rows))

  @property
  def width(self) -> int:
    """D."""
    return self.x.shape[1]

  @functools.cached_property
  def is_mapped(self) -> bool:
    return is_mapped(self.x)

  def read(self, rows: slice) -> np.ndarray:
    """Some rows, float32 or float64; those of a mapped file are checked now."""
    block = self.x[rows]
    if self.is_mapped:
      block = widened(np.asarray(block))
      check_finite(block, self.first + rows.start)
    return block

  def blocks(self, begin: int = 0, end: int | None = None) -> Iterator[tuple[slice, np.ndarray]]:
    """Rows in parts, one after the other. No end is N."""
    end = len(self) if end is None else end
    for start in range(begin, end, _PART_ROWS):
      part = slice(start, min(start + _PART_ROWS, end))
      yield part, self.read(part)
      if self.is_mapped:
        placement.forget_pages(self.x)

  def spread(self, weight: np.ndarray) -> Spread:
    """Where most of the rows with weights [N] above 0 lie, in one pass.

    The centre is what a fit subtracts from the features. It is the mean, but where a few rows are
    so large that the mean is far from all others: float32 would keep no digit of these, so there it
    is the median. The objective does not depend on it, because biases are not regularised. The
    median and the distance are of about `_SPREAD_ROWS` rows.

    Raises:
      ValueError: a row of a mapped file is not finite.
    """
    num_rows = _PART_ROWS * -(-len(self) // (_PART_ROWS * _GROUPS))

    def of_group(number):
      group = slice(number * num_rows, min(len(self), (number + 1) * num_rows))
      return self._sum_and_ends(weight, group)

    first, low, high = np.stack(placement.in_turn(of_group, -(-len(self) // num_rows)), axis=1)
    first = functools.reduce(np.add, first)  # in the order of the rows
    low = low.min(axis=0)
    high = high.max(axis=0)
    numbers = np.flatnonzero(weight > 0)
    some = np.asarray(self.x[numbers[:: max(1, len(numbers) // _SPREAD_ROWS)]]).astype(np.float64)
    mean = first / weight.sum()
    median = np.median(some, axis=0)
    distance = np.sort(np.abs(some - median), axis=0)
    most = distance[: max(1, int(_MOST * len(some)))].mean(axis=0)
    centre = np.where(np.abs(mean - median) > FAR * most, median, mean)
    if self.x.dtype != np.float64:
      centre = centre.astype(np.float32)  # so that a difference needs no wider type
    distance = np.where(most > 0, most, distance.mean(axis=0))
    return Spread(centre, distance, np.maximum(high - centre, centre - low))

  def _sum_and_ends(self, weight: np.ndarray, rows: slice) -> np.ndarray:
    """The weighted sum, and the least and the largest entries, of some rows: [3, D]."""
    first = np.zeros(self.width)
    low = np.full(self.width, np.inf)
    high = -low
    for part, block in self.blocks(rows.start, rows.stop):
      first += weight[part] @ block
      is_kept = weight[part] > 0
      if is_kept.any():
        kept = block if is_kept.all() else block[is_kept]
        low = np.minimum(low, kept.min(axis=0))
        high = np.maximum(high, kept.max(axis=0))
    return np.stack([first, low, high])

  def far(self, weight: np.ndarray, where: Spread) -> Far:
    """The far ones of the rows with weights above 0; warns of those that are moved.

    A row S times as far as the others fixes W v for its direction v to about N / S. With S =
    `_LIMIT` N that is nearly 0, so rows that are farther have nearly the same optimum, and are
    moved there: products of float32 with them would be off by S / 2^24 nats.

    Rows that share a far entry have one that stands for a missing value, which predictions see,
    too: they stay. W fits one such feature, but float32 cannot fit several at once.

    Raises:
      ValueError: float32 cannot hold the square of an entry that rows share, or the sums of
        squares.
    """
    none = np.zeros(0, np.int64)
    if (where.times(where.centre + where.largest) <= FAR).all():
      check_squares(len(self), where.largest)
      return Far(none, none, np.zeros((0, self.width)))
    numbers = []
    sizes = []
    for part, block in self.blocks():
      size = where.times(block).max(axis=1)
      chosen = np.flatnonzero((size > FAR) & (weight[part] > 0))
      numbers.append(part.start + chosen)
      sizes.append(size[chosen])
    far = np.concatenate(numbers)
    size = np.concatenate(sizes)
    rows = np.asarray(self.x[far]).astype(np.float64)
    alone = far[_sharing(rows, where.times(rows).argmax(axis=1)) == 1]
    limit = max(_LIMIT * int((weight > 0).sum()), _LEAST_LIMIT)
    is_moved = size > limit
    is_moved[is_moved] = _is_alone(rows[is_moved], size[is_moved], where, limit)
    if is_moved.any():
      warnings.warn(
        f'{int(is_moved.sum())} of the {len(self)} rows of X are much larger than the others, up '
        f'to {size[is_moved].max():.0e} times: float32 cannot hold both, and they are fitted as if '
        f'they were {limit:.0e} times as large',
        stacklevel=2,
      )
      factor = np.where(where.times(rows) > FAR, limit / size[:, None], 1.0)
      moved = where.centre + factor * (rows - where.centre)
      rows = np.where(is_moved[:, None], moved, rows)
    others = np.where(where.distance > 0, FAR * where.distance, where.largest)
    check_squares(len(self), np.maximum(np.abs(rows - where.centre).max(axis=0, initial=0), others))
    return Far(alone, far[is_moved], rows[is_moved])

  def distinct(
    self, values: np.ndarray, weight: np.ndarray
  ) -> tuple['Features', np.ndarray, np.ndarray]:
    """Distinct rows and values [N, ...] in ascending order, with the sums of their weights [N]."""
    both = np.concatenate([self.x, values.reshape(len(self), -1).astype(np.float64)], axis=1)
    _, first, which = np.unique(both, axis=0, return_index=True, return_inverse=True)
    return self[first], values[first], np.bincount(which.ravel(), weight)


def _is_alone(rows: np.ndarray, size: np.ndarray, where: Spread, limit: float) -> np.ndarray:
  """Whether each of the rows [f, D] beyond the limit shares no far entry; warns or raises."""
  times = where.times(rows)
  column = times.argmax(axis=1)
  count = _sharing(rows, column)
  is_shared = count > 1
  is_wrong = is_shared & (((times > limit).sum(axis=1) > 1) | (size > _LARGEST))
  if is_wrong.any():
    i = int(np.argmax(is_wrong))
    message = (
      f'X has {rows[i, column[i]]:g} in {count[i]} rows of feature {column[i]}, {size[i]:.0e} '
      'times as far from most rows as they are from each other, which float32 cannot fit: if it '
      'stands for missing values, take a number near the others'
    )
    if size[i] > _LARGEST:
      raise ValueError(message)
    warnings.warn(message, stacklevel=3)
  return ~is_shared


def _sharing(rows: np.ndarray, column: np.ndarray) -> np.ndarray:
  """How many of the rows [f, D] have the same entry in the same column, given int [f], int [f]."""
  entry = np.stack([column, rows[np.arange(len(rows)), column]], axis=1)
  _, of_row, count = np.unique(entry, axis=0, return_inverse=True, return_counts=True)
  return count[of_row.ravel()]


def check_squares(num_rows: int, distances: np.ndarray) -> None:
  """Raises ValueError if float32 cannot hold sums of squares of distances [D] from the centre."""
  largest = float(distances.max())
  if num_rows * largest**2 > _LARGEST_SUM:
    raise ValueError(
      f'X has values {largest:.0e} from the centre, whose squares float32 cannot hold: standardise '
      f'X, or divide it by {largest:.0e}'
    )


def labels_of_rows(num_rows: int, y: Any) -> np.ndarray:
  """y as an array; raises ValueError if it is not one label or list of labels per row."""
  if y is None:
    raise ValueError('y is None, but there must be labels')
  if isinstance(y, Rows):
    y = votes.shares(y.labels, y.num_classes, y.label_weight).view(Shares)
  if hasattr(y, 'toarray'):
    raise ValueError('y is sparse, but must be dense: give y.toarray()')
  y = as_array(y)
  if y.ndim not in (1, 2) or len(y) != num_rows:
    raise ValueError(
      f'y has shape {y.shape}; it must be [{num_rows}] or [{num_rows}, ...], as X has {num_rows} '
      'rows: inconsistent numbers of samples'
    )
  return y


def streams(x: Any, solver: str) -> bool:
  """Whether the rows of a fit stay on disk (the rule of docs/probe.md)."""
  return solver == 'streamed' or (solver == 'auto' and 4 * np.size(x) > MEMORY_BYTES)
