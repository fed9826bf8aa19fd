"""Checks of the labels of examples: class numbers [N, L], padded with -1, and their weights."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

_SUM_TOLERANCE = 1e-3
_BLOCK = 2**16  # names that are looked at together


def number_names(
  labels: np.ndarray, names: Sequence[str] | None = None
) -> tuple[np.ndarray, tuple[str, ...]]:
  """Labels that are names of classes as numbers of the classes, int32 [N, ...], -1 for ''.

      >>> number_names(np.array(['dog', 'cat', 'dog']))
      (array([1, 0, 1], dtype=int32), ('cat', 'dog'))

  Args:
    labels: strings, or objects that are.
    names: those of the classes; None takes the sorted names in the labels, as scikit-learn does.

  Raises:
    ValueError: a label is no text or none of the names, or two classes have the same name.
  """
  flat = labels.reshape(-1)

  def blocks() -> Iterator[list[str]]:
    for start in range(0, len(flat), _BLOCK):
      block = flat[start : start + _BLOCK].tolist()
      yield [x.decode() if isinstance(x, bytes) else x for x in block]

  distinct = set()
  for block in blocks():
    distinct.update(block)
  if others := [x for x in distinct if not isinstance(x, str)]:
    raise ValueError(f'labels are names, but one is {others[0]!r}')
  if '' in distinct and len(flat) == len(labels):  # one label each
    place = next(i for i, x in enumerate(flat.tolist()) if not x)
    raise ValueError(f'example {place} has no label: its name is empty')
  distinct.discard('')
  names = tuple(sorted(distinct) if names is None else names)
  number = class_numbers('', names, distinct) | {'': -1}
  found = np.empty(len(flat), np.int32)
  for i, block in enumerate(blocks()):
    found[i * _BLOCK : (i + 1) * _BLOCK] = [number[name] for name in block]
  return found.reshape(labels.shape), names


def class_numbers(where: str, names: Sequence[str], labels: Iterable[str]) -> dict[str, int]:
  """The number of each name of a class.

  Raises:
    ValueError: a label is no name, or two classes have the same name; it begins with `where`.
  """
  numbers = {name: k for k, name in enumerate(names)}
  if unknown := set(labels) - numbers.keys():
    some = f', such as {names[0]!r}' if names else ''
    raise ValueError(f'{where}{min(unknown)!r} is no name of a class; there are {len(names)}{some}')
  if len(numbers) < len(names):
    twice = next(name for k, name in enumerate(names) if numbers[name] != k)
    raise ValueError(f'{where}two classes have the name {twice!r}, which labels use')
  return numbers


def label_rows(labels: np.ndarray, num_examples: int) -> np.ndarray:
  """Labels [N] or [N, L] of any integer type as int32 [N, L].

  Raises:
    ValueError: they are not integers of this shape, or int32 cannot hold one.
  """
  if labels.dtype.kind not in 'iu' or labels.ndim not in (1, 2) or len(labels) != num_examples:
    raise ValueError(
      f'labels are {labels.dtype} {list(labels.shape)}; they must be integers [N] or [N, L] with '
      f'N = {num_examples}, the number of examples{_hint(labels)}'
    )
  largest = np.iinfo(np.int32).max
  if labels.size and (labels.max() > largest or labels.min() < -largest):
    wrong = labels.max() if labels.max() > largest else labels.min()
    raise ValueError(f'there is the label {int(wrong)}; labels must be at most {largest}')
  return (labels[:, None] if labels.ndim == 1 else labels).astype(np.int32)


def _hint(labels: np.ndarray) -> str:
  """What makes class numbers of labels of another type, without a loss."""
  if labels.dtype.kind in 'USO':
    return '; numpy.unique(names, return_inverse=True) numbers names'
  if labels.dtype.kind != 'f':
    return ''
  is_given = ~np.isnan(labels)
  if not (labels[is_given] == np.round(labels[is_given])).all():
    return '; these have fractions: of soft labels, take the class with the largest share'
  if not is_given.all() and labels.ndim == 1:
    return f'; {np.count_nonzero(~is_given)} are NaN: leave out the rows without a label'
  if not is_given.all():
    return '; numpy.nan_to_num(labels, nan=-1).astype(int) makes them so'
  return '; labels.astype(int) makes them so'


def are_marks(labels: np.ndarray, num_classes: int) -> bool:
  """Whether labels [N, ...] are 0 and 1 for each of three or more classes, not class numbers."""
  is_wide = num_classes >= 3 and labels.shape[1:] == (num_classes,)
  return is_wide and bool(np.isin(labels, (0, 1)).all())


def check_range(where: str, labels: np.ndarray, num_classes: int | None) -> None:
  """Raises ValueError if a label of [N, L] is not below K, or negative; -1 is none where L > 1.

  K is None where the labels do not say it, and less than 1 if all of them are negative.
  """
  lowest = 0 if labels.shape[1] == 1 else -1
  highest = np.inf if num_classes is None else num_classes - 1
  wrong = (labels < lowest) | (labels > max(highest, lowest))
  if not wrong.any() and highest < 0:
    raise ValueError(f'{where}no example has a label.')
  if wrong.any():
    last = 'K - 1' if num_classes is None or highest < 0 else highest
    i = int(np.flatnonzero(wrong.any(axis=1))[0])
    none = ', or -1 for none' if lowest else ''
    if labels.shape[1] == 1 and labels[i] == -1:
      none = f'; leave out the {np.count_nonzero(labels == -1):,} rows with -1, which have no label'
    raise ValueError(
      f'{where}label {int(labels[i][wrong[i]][0])} of example {i} is out of range; labels are 0 .. '
      f'{last}{none}.'
    )


def check_weights(
  where: str, label_weight: np.ndarray | None, weight: np.ndarray | None, listed: np.ndarray
) -> None:
  """Checks the weights of labels and of examples.

  Args:
    where: what the error names.
    label_weight: float [N, L]; None is not checked.
    weight: float [N], of the examples; None is not checked.
    listed: bool [N, L], where there is a label.

  Raises:
    ValueError: a weight is negative or not finite, the weights of an example's labels do not sum to
      1, or every example has the weight 0.
  """
  if label_weight is not None:
    shares = np.where(listed, label_weight, 0)
    sums = shares.sum(1)
    wrong = ~(np.abs(sums - 1) <= _SUM_TOLERANCE) | (shares < 0).any(1)
    if wrong.any():
      i = int(np.flatnonzero(wrong)[0])
      raise ValueError(
        f'{where}: the label weights of example {i} sum to {sums[i]:.4g}; weights must be at least '
        '0 and sum to 1.'
      )
  if weight is not None and (wrong := ~(np.isfinite(weight) & (weight >= 0))).any():
    i = int(np.flatnonzero(wrong)[0])
    raise ValueError(f'{where}: weight of example {i} is {weight[i]}; it must be at least 0.')
  if weight is not None and weight.size and not weight.any():
    raise ValueError(f'{where}: weight of all examples is 0; it must be above 0 for at least one.')
