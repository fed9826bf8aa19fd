"""Which labels are wrong, from probabilities of the true classes and the labels.

The truth k of an example has the probability p_k that a model gives it. People write label y for it
with probability T_ky (the confusions, Dawid and Skene 1979, https://doi.org/10.2307/2346806, with
one annotator). T maximises sum_i log sum_k p_ik T_k,y_i. This objective is concave in T, and
expectation-maximisation finds its maximum. The posterior of the truth given the label is then

    q_ik ~ p_ik T_k,y_i

and an example's label is wrong with probability 1 - q_i,y_i. Ambiguity that the model knows is in p
and not in T. The model must say what the classes are, not what the labels are: the location of a
head, or the mean of an ensemble, fitted to other rows. Where p is the probability of the label, T
is near the identity, and few labels seem wrong.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy import sparse

from het_plugin.measures import uncertainty

KINDS = ('wrong', 'ambiguous', 'fine')
UNSURE = 0.5  # the location is unsure of a row if no class is more probable than this
BLOCK_BYTES = 2**24  # of the rows whose posteriors are in memory at one time
_LEAST_RATE, _LEAST_ROWS = 0.0005, 0.5  # of a pair of classes; less comes of rounding
_MAX_ROUNDS = 500
_TOLERANCE = 1e-6  # nats per example


@dataclasses.dataclass(frozen=True, eq=False)
class Audit:
  """N labels of K classes, each with its probability of being wrong.

  Attributes:
    probability: float64 [N], p of the label.
    confidence: float64 [N], p of the most probable class.
    wrong: float64 [N], the probability that the label is wrong, given the label.
    suggested: int or text [N], the most probable truth given the label.
    kind: [N], of `KINDS`: 'wrong' if that is more probable than not; else 'ambiguous' if no class
      has p above one half; else 'fine'.
    confusions: float64 [K, K], T: the share of people who write y for the truth k.
    classes: float64 [K], the share of examples whose truth is k.
    ids: int or text [K], the classes, in the order of the columns.
    share: the share of wrong labels, with its standard error over examples, given T.
    share_error: that standard error; None for one example.
  """

  probability: np.ndarray
  confidence: np.ndarray
  wrong: np.ndarray
  suggested: np.ndarray
  kind: np.ndarray
  confusions: np.ndarray
  classes: np.ndarray
  ids: np.ndarray
  share: float
  share_error: float | None

  def pairs(self, count: int) -> list[tuple[Any, Any, float, float]]:
    """The most frequent confusions: (truth k, label y, T_ky, share of all examples).

    Pairs with T_ky below 0.05%, or of less than half an example, are left out.
    """
    joint = self.classes[:, None] * self.confusions
    joint[(self.confusions < _LEAST_RATE) | (joint * len(self.wrong) < _LEAST_ROWS)] = 0.0
    np.fill_diagonal(joint, 0.0)
    order = np.argsort(joint, axis=None)[::-1][:count]
    truths, labels = np.unravel_index(order, joint.shape)
    ids = self.ids.tolist()
    return [
      (ids[k], ids[y], float(self.confusions[k, y]), float(joint[k, y]))
      for k, y in zip(truths, labels, strict=True)
      if joint[k, y] > 0
    ]


def audit(p: np.ndarray, label: np.ndarray) -> Audit:
  """Audits the labels.

      >>> import numpy as np
      >>> p = np.array([[0.98, 0.02], [0.97, 0.03], [0.01, 0.99], [0.02, 0.98], [0.99, 0.01]] * 20)
      >>> label = np.array([0, 0, 1, 1, 1] * 20)  # the last of five is wrong
      >>> found = audit(p, label)
      >>> found.kind[:5].tolist()
      ['fine', 'fine', 'fine', 'fine', 'wrong']
      >>> round(found.share, 2)
      0.2

  Args:
    p: float [N, K], probabilities of the true classes, by a model that has not seen the label. It
      may be a mapped file: blocks of rows are read, once in each round of the maximisation.
    label: int [N], classes.

  Raises:
    ValueError: shapes do not fit, or a label is no class.
  """
  p, label = np.asarray(p), np.asarray(label)
  if p.ndim != 2 or label.shape != p.shape[:1] or not len(label):
    raise ValueError(f'p must be [N, K] and label [N], N > 0; got {p.shape} and {label.shape}')
  num_rows, num_classes = p.shape
  if label.dtype.kind not in 'iu' or not ((label >= 0) & (label < num_classes)).all():
    raise ValueError(f'labels must be classes 0 .. {num_classes - 1}')
  confusions = _confusions(p, label)
  probability, confidence, wrong = np.empty((3, num_rows))
  suggested, kind = np.empty(num_rows, np.int64), np.empty(num_rows, f'<U{max(map(len, KINDS))}')
  classes = np.zeros(num_classes)
  for rows, part, q, _ in _posteriors(p, label, confusions):
    each = np.arange(len(part)), label[rows]
    probability[rows], confidence[rows] = part[each], part.max(axis=1)
    wrong[rows], suggested[rows] = 1.0 - q[each], q.argmax(axis=1)
    kind[rows] = np.where(confidence[rows] > UNSURE, 'fine', 'ambiguous')
    kind[rows][wrong[rows] > 0.5] = 'wrong'
    classes += q.sum(axis=0) / num_rows
  return Audit(
    probability=probability,
    confidence=confidence,
    wrong=wrong,
    suggested=suggested,
    kind=kind,
    confusions=confusions,
    classes=classes,
    ids=np.arange(num_classes),
    share=float(wrong.mean()),
    share_error=uncertainty.stderr(wrong),
  )


def _posteriors(
  p: np.ndarray, label: np.ndarray, t: np.ndarray
) -> Iterator[tuple[slice, np.ndarray, np.ndarray, np.ndarray]]:
  """Blocks of b rows: which, their p and posterior q [b, K], and the likelihood of labels [b]."""
  size = max(1, BLOCK_BYTES // (8 * p.shape[1]))
  for start in range(0, len(p), size):
    rows = slice(start, start + size)
    part = np.asarray(p[rows], np.float64)
    q = part * t.T[label[rows]]
    likelihood = np.maximum(q.sum(axis=1), np.finfo(np.float64).tiny)
    q /= likelihood[:, None]
    yield rows, part, q, likelihood


def _confusions(p: np.ndarray, label: np.ndarray) -> np.ndarray:
  """T [K, K]."""
  num_classes = p.shape[1]
  t = np.full((num_classes, num_classes), 0.1 / max(num_classes - 1, 1))
  np.fill_diagonal(t, 0.9)
  before = -np.inf
  for _ in range(_MAX_ROUNDS):
    joint, now = np.zeros_like(t), 0.0  # [label, truth], and the mean log-likelihood
    for rows, _, q, likelihood in _posteriors(p, label, t):
      one = np.ones(len(q)), label[rows], np.arange(len(q) + 1)
      joint += sparse.csc_array(one, shape=(num_classes, len(q))) @ q
      now += np.log(likelihood).sum() / len(p)
    total = joint.sum(axis=0)
    t = np.where(total > 0, joint / np.where(total > 0, total, 1.0), t.T).T
    if now - before < _TOLERANCE:
      break
    before = now
  return t
