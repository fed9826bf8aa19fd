"""Labels of estimators: class ids, strings, several labels, votes, probabilities."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from het_plugin.measures import votes
from het_plugin.rows import Rows
from het_plugin.rows.labels import are_marks
from het_plugin.system import ranges

_NUMBERED = (
  "scikit-learn's cross_val_predict makes such numbers of the values of each column of shares: set "
  "target='probabilities' and call estimators.cross_val_predict"
)

Target = Literal['auto', 'classes', 'indicator', 'votes', 'probabilities']
_SUM_TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True, eq=False)
class Targets:
  """Encoded labels of N examples.

  Attributes:
    kind: 'classes', 'indicator', 'votes' or 'probabilities'.
    classes: [K] names of the classes, or their numbers.
    values: int32 [N, L] class numbers, padded with -1 (classes, votes), or float32 [N, K]: shares
      of the classes (probabilities), or whether each is on (indicator). Where shares are of few
      classes, float32 [N, 2, m]: numbers of classes, and their shares.
  """

  kind: str
  classes: np.ndarray
  values: np.ndarray

  @property
  def link(self) -> str:
    return 'sigmoid' if self.kind == 'indicator' else 'softmax'

  def __getitem__(self, rows: np.ndarray | slice) -> 'Targets':
    return dataclasses.replace(self, values=self.values[rows])

  def main_class(self) -> np.ndarray:
    """One class of each example, int [N]: the first one of several, or the most probable one."""
    if self.values.ndim == 3:
      best = self.values[:, 1].argmax(axis=1)
      return self.values[np.arange(len(best)), 0, best].astype(np.int64)
    return self.values[:, 0] if self.values.dtype.kind == 'i' else self.values.argmax(axis=1)

  def distribution(self) -> np.ndarray:
    """Share of each class for each example, float64 [N, K]; the indicator itself if y is one."""
    return shares_of(self.values, len(self.classes))

  def class_factors(
    self, class_weight: str | Mapping[Any, float], weight: np.ndarray
  ) -> np.ndarray:
    """What the weights [N] of the examples are multiplied by, float64 [N].

    Args:
      class_weight: factors by class, 1 where one is missing; or 'balanced', which gives all classes
        the same sum of weights.
      weight: [N].

    Raises:
      ValueError: an example has no single class, or a class is unknown or its factor negative.
    """
    if self.kind != 'classes':
      raise ValueError(
        f'class_weight={class_weight!r} needs one class per row; y is of the kind {self.kind!r}'
      )
    ids = self.values[:, 0]
    names = self.classes.tolist()
    if isinstance(class_weight, str):
      totals = np.bincount(ids, weight, len(names))
      return (weight.sum() / (len(names) * np.where(totals > 0, totals, 1.0)))[ids]
    if unknown := [name for name in class_weight if name not in names]:
      raise ValueError(
        f'class_weight has {unknown[0]!r}, which is not one of the {len(names)} classes of y'
      )
    factors = np.array([class_weight.get(name, 1.0) for name in names], np.float64)
    if not (factors >= 0).all():
      raise ValueError(f'class_weight={class_weight!r} must have factors of at least 0')
    return factors[ids]

  def class_shares(self, weight: np.ndarray) -> np.ndarray:
    """Share of each class over the examples with weights [N], float64 [K]."""
    if self.values.ndim == 3:
      each = self.values[:, 1] * weight[:, None]
      totals = np.bincount(self.values[:, 0].astype(int).ravel(), each.ravel(), len(self.classes))
      return totals / weight.sum()
    if self.values.dtype.kind == 'f':  # einsum makes no copy of a mapped file in float64
      return np.einsum('n,nk->k', weight, self.values) / weight.sum()
    listed = self.values >= 0
    each = np.where(listed, (weight / listed.sum(axis=1))[:, None], 0.0)
    totals = np.bincount(
      np.maximum(self.values, 0).ravel(), each.ravel(), minlength=len(self.classes)
    )
    return totals / weight.sum()


def shares_of(values: np.ndarray, num_classes: int) -> np.ndarray:
  """The share of each class, float64 [N, K], of `Targets.values`; the indicator itself."""
  if values.dtype.kind == 'f' and values.ndim == 2:
    return values.astype(np.float64)
  shares = np.zeros((len(values), num_classes))
  if values.ndim == 3:
    rows = np.arange(len(values))[:, None]
    np.add.at(shares, (rows, values[:, 0].astype(int)), values[:, 1])
    return shares
  row, column = np.nonzero(values >= 0)
  np.add.at(shares, (row, values[row, column]), 1.0)
  return shares / np.maximum(shares.sum(axis=1, keepdims=True), 1.0)


@ranges.checked
def encode(
  y: np.ndarray,
  target: Target = 'auto',
  classes: np.ndarray | None = None,
  like: str | None = None,
) -> Targets:
  """Labels as `Targets`.

  Args:
    y: class ids or strings [N]; zeros and ones [N, K], several labels per example; votes [N, L],
      with -1, NaN or an empty string for a missing one; or float probabilities [N, K], rows of
      which add up to one.
    target: which of these y is. 'auto' decides by type and shape: one column is classes, zeros and
      ones are an indicator, floats are probabilities, and strings or integers are votes if some
      are missing. Other integers need a target: they may be shares that scikit-learn has
      numbered.
    classes: classes of a fitted estimator; None finds them in y.
    like: the kind of labels that a fitted estimator has seen. One that has not seen an indicator
      takes zeros and ones for probabilities.

  Raises:
    ValueError: y is none of these, or contains a class that `classes` lacks.
  """
  if isinstance(y, Shares):
    if 'indicator' in (target, like):
      raise ValueError(
        'label_weight of the file gives shares of one label per row, and an indicator has several '
        'labels per row: leave label_weight out'
      )
    target = 'probabilities'
    num_more = 0 if classes is None else max(0, len(classes) - y.shape[1])
    y = np.pad(y, ((0, 0), (0, num_more)))
  y = np.asarray(as_array(y))
  if y.dtype.kind == 'S' and classes is not None and classes.dtype.kind == 'U':
    y = y.astype(str)
  if y.dtype.kind == 'O' and y.ndim == 2:  # as of pandas
    y = _of_objects(y, target)
  if y.dtype.kind == 'f' or y.dtype.name == 'bfloat16':
    y = y.astype(np.float64)
    if np.isinf(y).any() or (target != 'votes' and np.isnan(y).any()):
      raise ValueError(
        'Input y contains NaN or infinity: labels must be finite; NaN is a missing vote with '
        "target='votes' only"
      )
  kind = target if target != 'auto' else _kind(y, like)
  if kind == 'votes' and (target, like) == ('auto', None) and y.dtype.kind in 'iu' and y.min() >= 0:
    raise ValueError(
      f"y has whole numbers {list(y.shape)}: set target='votes' if they are votes. {_NUMBERED}"
    )
  if kind == 'classes':
    y = column_or_1d(y, warn=True)
    if y.dtype.kind == 'O' and any(_is_none(x) for x in y):
      raise ValueError('y must be all numbers or all strings, none missing')
    try:
      check_classification_targets(y)
    except TypeError as error:  # it cannot sort them
      raise ValueError(f'y must be all numbers or all strings, none missing: {error}') from error
    values = y[:, None]
  elif y.ndim != 2:
    raise ValueError(f'target={kind!r} needs y of two dimensions; y has shape {y.shape}')
  elif kind in ('indicator', 'probabilities'):
    return _matrix(y, kind, classes)
  else:
    values = y
    if y.dtype.kind == 'f' and (wrong := (y != np.floor(y)) & ~np.isnan(y)).any():
      raise ValueError(
        f'y has the vote {y[wrong][0]:g}: votes must be class ids or strings; shares of the '
        "classes are target='probabilities'"
      )
  missing = _missing(values) if kind == 'votes' else np.zeros(values.shape, bool)
  if missing.all(axis=1).any():
    raise ValueError(f'row {int(np.argmax(missing.all(axis=1)))} of y has no vote: leave it out')
  if classes is None:
    classes = np.unique(values[~missing])
  order = np.argsort(classes)  # those of a run need not be sorted
  place = np.searchsorted(classes, values[~missing], sorter=order)
  number = order[np.minimum(place, len(classes) - 1)]
  unseen = classes[number] != values[~missing]
  if unseen.any():
    label = values[~missing][unseen].tolist()[0]
    raise ValueError(f'the label {label!r} is not one of the {len(classes)} classes seen by fit')
  ids = np.full(values.shape, -1, np.int32)
  ids[~missing] = number
  return Targets(kind, classes, ids)


def of_rows(rows: Rows, target: str) -> tuple[np.ndarray, np.ndarray, str]:
  """y of fits to rows, its classes, and which `target` it is: ids [N]; with several labels a row
  votes [N, L], also of rows that say who gave them, an indicator [N, K], or, where they have
  weights, shares of the classes [N, K].

  Raises:
    ValueError: an example has not one label, or labels mark classes.
  """
  labels = rows.labels
  num_classes = rows.num_classes
  if votes.has_shares(labels, rows.label_weight):
    shares = votes.shares(labels, num_classes, rows.label_weight)
    return shares, np.arange(num_classes), 'probabilities'
  if rows.annotator is not None and labels.shape[1] > 1:
    target = 'votes'
  if target == 'votes' or labels.shape[1] == 1:
    y = labels if target == 'votes' else rows.label
    return y, np.unique(labels[labels >= 0]), target
  if are_marks(labels, labels.shape[1]):
    raise ValueError(
      f'labels are {list(labels.shape)} of 0 and 1: classes that are marked must be their numbers, '
      'padded with -1; for votes set --target=votes'
    )
  return votes.indicator(labels, num_classes).astype(int), np.arange(num_classes), target


def places(labels: np.ndarray, classes: np.ndarray) -> np.ndarray:
  """The number of each label among the sorted classes; -1 for what is none of them."""
  found = np.minimum(np.searchsorted(classes, labels), len(classes) - 1)
  return np.where(classes[found] == labels, found, -1)


def _kind(y, like):
  if like == 'indicator':
    return like
  if y.ndim == 1 or y.shape[1] == 1:
    return 'classes'
  if like is not None and like != 'classes':
    return like
  if y.ndim == 2 and y.dtype.kind in 'iubf' and np.isin(y, (0, 1)).all():
    return 'indicator' if like is None else 'probabilities'
  return 'probabilities' if y.dtype.kind == 'f' else 'votes'


class Shares(np.ndarray):
  """Shares of the classes [N, K] that a file has as labels with weights."""


def as_array(y: Any) -> np.ndarray:
  """y as an array. Votes that are bytes become strings.

  numpy makes the string 'nan' of a missing name in a list of names: a list of votes becomes
  objects, and ValueError is raised for one of classes.
  """
  try:
    array = np.asanyarray(y)
  except ValueError as error:
    lacking = 'y has rows of different lengths: fill those of missing votes with None, or -1'
    raise ValueError(lacking) from error
  if array.dtype.kind == 'U' and not isinstance(y, np.ndarray):
    objects = np.asarray(y, object)
    if array.ndim == 2:
      return objects
    if any(_is_none(x) for x in objects.ravel()):
      raise ValueError('y must be all numbers or all strings, none missing')
  return array.astype(str) if array.dtype.kind == 'S' and array.ndim == 2 else array


def _of_objects(y, target):
  """Objects [N, L] as numbers or strings, with NaN or '' where a vote is missing."""
  decoded = [[x.decode() if isinstance(x, bytes) else x for x in row] for row in y.tolist()]
  y = np.array(decoded, object)
  is_missing = np.array([[_is_none(x) for x in row] for row in decoded])
  if is_missing.any() and (target == 'classes' or y.shape[1] == 1):
    raise ValueError('y must be all numbers or all strings, none missing')
  has_names = any(isinstance(x, str) for x in y.ravel())
  return np.array(np.where(is_missing, '' if has_names else np.nan, y).tolist())


def _is_none(value):
  """Whether an object is None, or NaN or NA of pandas, which does not compare."""
  return value is None or type(value).__name__ == 'NAType' or value != value


def _missing(values):
  return ~(values >= 0) if values.dtype.kind in 'iuf' else np.isin(values, ('', '-1'))


def _matrix(y, kind, classes):
  if y.dtype.kind not in 'iubf':
    raise ValueError(f'target={kind!r} needs numbers; y has {y.dtype}')
  values = y.astype(np.float32)
  numbered = f'. {_NUMBERED}' if y.dtype.kind in 'iu' else ''
  if (values < 0).any() or (values > 1).any():
    raise ValueError(f'target={kind!r} needs values between 0 and 1{numbered}')
  if kind == 'indicator' and (wrong := values[(values != 0) & (values != 1)]).size:
    raise ValueError(
      f'the indicator y has {wrong[0]:g}, and must have zeros and ones; rows that add up to 1 may '
      "be target='probabilities'"
    )
  if kind == 'probabilities':
    sums = values.sum(axis=1)
    if (np.abs(sums - 1) > _SUM_TOLERANCE).any():
      row = int(np.abs(sums - 1).argmax())
      raise ValueError(
        f'the probabilities in row {row} of y add up to {sums[row]:g}, not to 1{numbered}'
      )
    values = values / sums[:, None]
  if classes is None:
    classes = np.arange(y.shape[1])
  if y.shape[1] != len(classes):
    raise ValueError(f'y has {y.shape[1]} columns; fit has seen {len(classes)} classes')
  return Targets(kind, classes, values)
