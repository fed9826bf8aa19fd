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
from scipy.sparse import linalg

KINDS = ('wrong', 'ambiguous', 'fine')
UNSURE = 0.5  # the location is unsure of a row if no class is more probable than this
LEAST_AGREEMENT = 0.45
BLOCK_BYTES = 2**24  # of the rows whose posteriors are in memory at one time
_LEAST_RATE = 0.0005
_LEAST_ROWS = 0.5  # of a pair of classes; less comes of rounding
_LEAST_FREE = 1e-30  # lower rates are at their bound, 0, and their scores may overflow
_RIDGE = 1e-6  # of F: where p tells nothing of T, the error of the share is large and not 0 / 0
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
    share: the share of wrong labels.
    share_error: its standard error over examples, which T is estimated from as well (the delta
      method). It takes p as it is. 1/2 if p tells nothing of T; None for one example, and where it
      was not asked for.
    nll: mean of -log sum_k p_ik T_k,y_i, the negative log-likelihood of the labels, in nats.
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
  nll: float

  @property
  def agreement(self) -> float:
    """The share of labels that are the most probable class."""
    return float(np.mean(self.probability == self.confidence))

  @property
  def is_supported(self) -> bool:
    """Whether `share` and `confusions` say something of the labels.

    p and T together fit labels that are hard to tell as well as wrong ones, and only a p that is
    nearly sure tells them apart. With 1,500 rows whose classes no model tells apart in more than
    0.3 of all cases, the share was 0.43 where no label was wrong, and the agreement 0.35. With up
    to 0.4 of the labels moved and features that tell the class, the agreement was 0.5 to 0.9.
    """
    return self.agreement >= LEAST_AGREEMENT

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


def audit(p: np.ndarray, label: np.ndarray, error: bool = True) -> Audit:
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
    error: whether `share_error` is computed, which takes most of the time; else it is None.

  Raises:
    ValueError: shapes do not fit, or a label is no class.
  """
  p = np.asarray(p)
  label = np.asarray(label)
  if p.ndim != 2 or label.shape != p.shape[:1] or not len(label):
    raise ValueError(f'p must be [N, K] and label [N], N > 0; got {p.shape} and {label.shape}')
  num_rows, num_classes = p.shape
  if label.dtype.kind not in 'iu' or not ((label >= 0) & (label < num_classes)).all():
    raise ValueError(f'labels must be classes 0 .. {num_classes - 1}')
  confusions = _confusions(p, label)
  probability, confidence, wrong = np.empty((3, num_rows))
  suggested = np.empty(num_rows, np.int64)
  kind = np.empty(num_rows, f'<U{max(map(len, KINDS))}')
  classes = np.zeros(num_classes)
  nll = 0.0
  for rows, part, q, likelihood in posteriors(p, label, confusions):
    each = np.arange(len(part)), label[rows]
    probability[rows] = part[each]
    confidence[rows] = part.max(axis=1)
    wrong[rows] = 1.0 - q[each]
    suggested[rows] = q.argmax(axis=1)
    kind[rows] = np.where(confidence[rows] > UNSURE, 'fine', 'ambiguous')
    kind[rows][wrong[rows] > 0.5] = 'wrong'
    classes += q.sum(axis=0) / num_rows
    nll -= float(np.log(likelihood).sum()) / num_rows
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
    share_error=share_error(p, label, confusions, classes, wrong) if error else None,
    nll=nll,
  )


def posteriors(
  p: np.ndarray, label: np.ndarray, t: np.ndarray
) -> Iterator[tuple[slice, np.ndarray, np.ndarray, np.ndarray]]:
  """The posteriors of the truth given the labels, in blocks of b rows.

  Args:
    p, label: as in `audit`.
    t: float [K, K], the confusions T.

  Yields:
    Which rows, their p and posteriors q, float64 [b, K] each, and the likelihood of their labels,
    float64 [b].
  """
  size = max(1, BLOCK_BYTES // (8 * p.shape[1]))
  for start in range(0, len(p), size):
    rows = slice(start, start + size)
    part = np.asarray(p[rows], np.float64)
    q = part * t.T[label[rows]]
    likelihood = np.maximum(q.sum(axis=1), np.finfo(np.float64).tiny)
    q /= likelihood[:, None]
    yield rows, part, q, likelihood


def share_error(
  p: np.ndarray, label: np.ndarray, t: np.ndarray, classes: np.ndarray, wrong: np.ndarray
) -> float | None:
  """The standard error of the mean of `wrong`, at most 1/2; None for one row.

  Row i moves T by F^-1 s_i / N, where s_i is the gradient of its log-likelihood and F, in blocks of
  one label, the mean of s_i s_i'. The share moves by its gradient g times that: with
  m_i = g' F^-1 s_i the variance is that of wrong + m, over N, and that of m is g' F^-1 g.
  """
  num_rows, num_classes = p.shape
  if num_rows == 1:
    return None
  free = t > _LEAST_FREE
  root = np.where(free, np.sqrt(t), 0.0)
  # With sure p, F is near the identity in units of the standard errors of rates.
  unit = root / np.sqrt(np.maximum(classes, 1.0 / num_rows))[:, None]

  def tangent(z):  # the rates of a truth sum to 1, which the squares of `root` do, too
    return np.where(free, z - root * (root * z).sum(axis=1, keepdims=True), 0.0)

  def scores():
    for rows, part, _, likelihood in posteriors(p, label, t):
      y = label[rows]
      yield rows, y, np.where(free.T[y], part / likelihood[:, None], 0.0)

  def summed(weight):  # sum_i weight(y, s)_i s_i / N, [K, K]
    total = np.zeros_like(t)  # [label, truth]
    for _, y, s in scores():
      one = weight(y, s), y, np.arange(len(y) + 1)
      total += sparse.csc_array(one, shape=(num_classes, len(y))) @ s
    return total.T / num_rows

  def along(z):  # gives s_i' v of the direction v of T that z is in these units
    v = (unit * tangent(z.reshape(t.shape))).T  # [label, truth]
    return lambda y, s: (s * v[y]).sum(axis=1)

  def times_fisher(z):
    return tangent(unit * summed(along(z))).ravel() + _RIDGE * z

  def right(y, s):  # the probability that a label is right, q_iy = T_yy s_iy
    return np.diagonal(t)[y] * s[np.arange(len(y)), y]

  # The gradient of 1 - q_iy is q_iy s_i, and -s_iy more for T_yy. Where the likelihood is largest,
  # the mean of s_iy is the share of the truth y.
  gradient = summed(right) - np.diag(classes)
  g = tangent(unit * gradient).ravel()
  # The stub has the arguments of LinearOperator's subclasses.
  fisher = linalg.LinearOperator((g.size, g.size), times_fisher, dtype=np.float64)  # ty: ignore[parameter-already-assigned]
  z, _ = linalg.cg(fisher, g, rtol=1e-3, maxiter=100)
  moved = along(z)
  covariance = sum(wrong[rows] @ moved(y, s) for rows, y, s in scores()) / num_rows
  # The mean of m is 0.
  return float(min(np.sqrt((wrong.var() + 2 * covariance + g @ z) / num_rows), 0.5))


def _confusions(p: np.ndarray, label: np.ndarray) -> np.ndarray:
  """T [K, K]."""
  num_classes = p.shape[1]
  t = np.full((num_classes, num_classes), 0.1 / max(num_classes - 1, 1))
  np.fill_diagonal(t, 0.9)
  before = -np.inf
  for _ in range(_MAX_ROUNDS):
    joint = np.zeros_like(t)
    now = 0.0  # [label, truth], and the mean log-likelihood
    for rows, _, q, likelihood in posteriors(p, label, t):
      one = np.ones(len(q)), label[rows], np.arange(len(q) + 1)
      joint += sparse.csc_array(one, shape=(num_classes, len(q))) @ q
      now += np.log(likelihood).sum() / len(p)
    total = joint.sum(axis=0)
    t = np.where(total > 0, joint / np.where(total > 0, total, 1.0), t.T).T
    if now - before < _TOLERANCE:
      break
    before = now
  return t
