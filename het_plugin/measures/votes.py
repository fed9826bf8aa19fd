"""The distribution of an example's labels: one label, the votes of several people, or shares.

The twin for batches in JAX is `models.soft_labels.targets`.
"""

import numpy as np

LINKS = ('softmax', 'sigmoid')


def shares(
  labels: np.ndarray, num_classes: int, label_weight: np.ndarray | None = None
) -> np.ndarray:
  """The share of each class among the labels of each example, float64 [N, K].

      >>> import numpy as np
      >>> from het_plugin.measures import votes
      >>> votes.shares(np.array([[0, 0, 1, 2], [1, 1, -1, -1]]), num_classes=3)
      array([[0.5 , 0.25, 0.25],
             [0.  , 1.  , 0.  ]])

  Args:
    labels: int [N, L], class numbers below K; a negative number is no label. A class counts as
      often as it is listed.
    num_classes: K.
    label_weight: float [N, L], the weight of each label >= 0; None gives all labels of an example
      the same weight.

  Returns:
    Rows that sum to one; a row without labels, or with weights of 0 only, is NaN.
  """
  totals = np.zeros((len(labels), num_classes))
  row, column = np.nonzero(labels >= 0)
  weight = 1.0 if label_weight is None else label_weight[row, column]
  np.add.at(totals, (row, labels[row, column]), weight)
  with np.errstate(invalid='ignore'):
    return totals / totals.sum(axis=1, keepdims=True)


def indicator(labels: np.ndarray, num_classes: int) -> np.ndarray:
  """Whether each class is among the labels int [N, L] of each example, bool [N, K]."""
  on = np.zeros((len(labels), num_classes), bool)
  row, column = np.nonzero(labels >= 0)
  on[row, labels[row, column]] = True
  return on


def top_shares(scores: np.ndarray) -> np.ndarray:
  """How surely each class is the one with the largest score, float64 [N, K].

  The one rule for equal scores, and for classes with equally many votes: m of them share the first
  place, each with 1 / m. So no measure depends on the numbering of the classes.

      >>> import numpy as np
      >>> from het_plugin.measures import votes
      >>> votes.top_shares(np.array([[0.2, 0.4, 0.4], [0.1, 0.7, 0.2]]))
      array([[0. , 0.5, 0.5],
             [0. , 1. , 0. ]])

  Args:
    scores: float [N, K], such as log-probabilities or `shares`. Those of a row with NaN are NaN.
  """
  is_top = scores == scores.max(axis=1, keepdims=True)
  with np.errstate(invalid='ignore'):
    return is_top / is_top.sum(axis=1, keepdims=True)


def majority_shares(shares: np.ndarray) -> np.ndarray:
  """How surely each class has the most votes, float64 [N, K], from `shares`; see `top_shares`."""
  return top_shares(shares.round(6))  # sums of float32 weights differ by rounding


def has_shares(labels: np.ndarray, label_weight: np.ndarray | None) -> bool:
  """Whether an example has several labels of different weights; arguments as in `shares`."""
  if label_weight is None or labels.shape[1] < 2:
    return False
  listed = labels >= 0
  most = np.where(listed, label_weight, -np.inf).max(axis=1)
  least = np.where(listed, label_weight, np.inf).min(axis=1)
  return bool((most > least + 1e-6).any())


def majority(labels: np.ndarray, label_weight: np.ndarray | None = None) -> np.ndarray:
  """The label with the largest share of each example, int [N]; of equal ones the first in its row.

  Labels and weights [N, L] are as in `shares`; examples without labels have -1. It is for what
  needs one class; a measure takes `majority_shares`.
  """
  if labels.shape[1] == 1:
    return labels[:, 0]
  weight = np.ones(labels.shape) if label_weight is None else label_weight
  same = labels[:, :, None] == labels[:, None, :]  # [N, L, L]
  total = np.where(labels >= 0, (same * weight[:, None, :]).sum(axis=2), -np.inf)
  return labels[np.arange(len(labels)), total.round(6).argmax(axis=1)]


def check_labels(labels: np.ndarray, num_classes: int, link: str, index: np.ndarray) -> None:
  """Raises ValueError if a label of [N, L] is out of range or a softmax example has none.

  `index` [N] names the examples in the error.
  """
  for row in np.flatnonzero(labels.max(axis=1, initial=0) >= num_classes)[:1]:
    raise ValueError(
      f'label {int(labels[row].max())} of example {int(index[row])} is out of range; labels are '
      f'0 .. {num_classes - 1}'
    )
  has_none = (labels < 0).all(axis=1)
  for row in np.flatnonzero(has_none)[: link == 'softmax']:
    raise ValueError(f'example {int(index[row])} has no label; under a softmax each must have one')
