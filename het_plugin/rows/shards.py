"""Several files of rows as one."""

import dataclasses
import glob
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from het_plugin.rows.rows import Rows, concatenate

_NUMBERED = re.compile(r'-(\d+)-of-(\d+)\.\w+$')


class Joined:
  """Arrays [N_i, ...] as one array [N, ...]. Rows are read when they are taken.

      >>> import numpy as np
      >>> both = Joined([np.arange(3), np.arange(3, 5)])
      >>> both.shape, both[1:4].tolist(), both[np.array([4, 0])].tolist()
      ((5,), [1, 2, 3], [4, 0])

  Attributes:
    parts: the arrays.
    shape, dtype: those of the whole.
  """

  def __init__(self, parts: Sequence[np.ndarray]):
    self.parts = tuple(parts)
    self._ends = np.cumsum([len(x) for x in parts])
    self.shape = (int(self._ends[-1]), *parts[0].shape[1:])
    self.dtype = parts[0].dtype

  @property
  def ndim(self) -> int:
    return len(self.shape)

  @property
  def size(self) -> int:
    return int(np.prod(self.shape))

  @property
  def nbytes(self) -> int:
    return self.size * self.dtype.itemsize

  def __len__(self) -> int:
    return self.shape[0]

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    del copy  # the parts are never one array
    return np.asarray(np.concatenate(self.parts), dtype)

  def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
    """Rows of a slice without a step, or of numbers or booleans [n]."""
    if isinstance(rows, slice):
      start, stop, _ = rows.indices(len(self))
      begins = self._ends - [len(x) for x in self.parts]
      both = zip(self.parts, begins, self._ends, strict=True)
      found = [x[max(start - a, 0) : stop - a] for x, a, b in both if start < b and stop > a]
      return found[0] if len(found) == 1 else np.concatenate(found or [self.parts[0][:0]])
    rows = np.asarray(rows)
    rows = np.flatnonzero(rows) if rows.dtype == bool else rows
    found = np.empty((len(rows), *self.shape[1:]), self.dtype)
    of_part = np.searchsorted(self._ends, rows, side='right')
    for number in np.unique(of_part):
      here = of_part == number
      part = self.parts[number]
      found[here] = part[rows[here] - self._ends[number] + len(part)]
    return found

  def astype(self, dtype: Any) -> np.ndarray:
    return self.__array__().astype(dtype)


class Reordered:
  """Some rows of features [N, D], or all in another order; they are read when they are taken.

      >>> import numpy as np
      >>> found = Reordered(np.arange(6, dtype=np.float16).reshape(3, 2), np.array([2, 0, 1]))
      >>> found.shape, found[:2].tolist()
      ((3, 2), [[4.0, 5.0], [0.0, 1.0]])

  Attributes:
    parts: x itself.
    shape, dtype: [N, D], float32 or wider.
  """

  ndim = 2

  def __init__(self, x: 'np.ndarray | Joined', order: np.ndarray):
    self.parts = (x,)
    self._order = order
    self.dtype = np.result_type(x.dtype, np.float32)
    self.shape = (len(order), x.shape[1])
    self.size = len(order) * x.shape[1]

  def __len__(self) -> int:
    return len(self._order)

  def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
    return np.asarray(self.parts[0][self._order[rows]]).astype(self.dtype, copy=False)


def names(pattern: str) -> list[str]:
  """The files that a pattern with a * names, sorted.

  Raises:
    ValueError: there is none, or of NAME-00000-of-00004.SUFFIX one is missing.
  """
  found = sorted(glob.glob(pattern))
  if not found:
    raise ValueError(f'{pattern} names no file')
  numbered = [match for match in map(_NUMBERED.search, found) if match]
  if numbered:
    there = {int(match[1]) for match in numbered}
    totals = {int(match[2]) for match in numbered}
    missing = sorted(set(range(max(totals))) - there)
    if len(totals) > 1 or missing or len(numbered) < len(found):
      what = f'number {missing[0]} of {max(totals)} is missing' if missing else 'some are of others'
      raise ValueError(f'{pattern} must name all shards of one set: {what}')
  return found


def join(parts: Sequence[Rows], files: Sequence[str], mapped: bool) -> Rows:
  """Rows of several files as one.

  Raises:
    ValueError: a file has other columns, another width or type of features, or other classes than
      the first one, or two have the same example.
  """
  width = max(part.labels.shape[1] for part in parts)
  first = parts[0]
  classes = {part.class_names for part in parts}
  if len(classes) > 1 and all(part.by_name for part in parts) and 'log_prob' not in first.columns:
    names = sorted({name for of_part in classes for name in of_part or ()})
    parts = [part.named(names) for part in parts]
    first = parts[0]
  for part, file in zip(parts[1:], files[1:], strict=True):
    for what, ours, theirs in (
      ('columns', _columns(first), _columns(part)),
      ('classes', first.class_names, part.class_names),
      ('link', first.link, part.link),
      ('feature names', *(x.provenance.get('feature_names') for x in (first, part))),
    ):
      if ours != theirs:
        raise ValueError(
          f'{file} has {what} {_shown(theirs)} and {files[0]} has {_shown(ours)}: all files of one '
          'set of rows must have the same'
        )
  features = [part.features for part in parts if 'features' in part.columns]
  joined = concatenate([_padded(part.without('features'), width) for part in parts])
  index, count = np.unique(joined.index, return_counts=True)
  if len(index) < len(joined):
    raise ValueError(f'the example {index[count > 1][0]} is there twice')
  if features:
    whole = Joined(features) if mapped else np.concatenate(features)
    joined = dataclasses.replace(joined, columns={**joined.columns, 'features': whole})
  return joined


def _columns(rows: Rows) -> dict[str, Any]:
  """Types and widths of what rows have."""
  beside = {'label_weight': rows.label_weight, 'annotator': rows.annotator}
  found: dict[str, Any] = {name: 'yes' for name, x in beside.items() if x is not None}
  return {name: f'{x.dtype} {list(x.shape[1:])}' for name, x in rows.columns.items()} | found


def _shown(x: Any) -> str:
  text = str(x)
  return text if len(text) < 80 else f'{text[:77]}...'


def _padded(rows: Rows, width: int) -> Rows:
  """Rows whose labels are `width` columns."""

  def wide(x, value):
    more = width - rows.labels.shape[1]
    return None if x is None else np.pad(x, ((0, 0), (0, more)), constant_values=value)

  return dataclasses.replace(
    rows,
    labels=wide(rows.labels, -1),
    label_weight=wide(rows.label_weight, 0),
    annotator=wide(rows.annotator, -1),
  )
