"""Which labels are wrong, from probabilities of the true classes and the labels.

The truth k of an example has the probability p_k that a model gives it. People write label y for it
with probability T_ky (the confusions, Dawid and Skene 1979, https://doi.org/10.2307/2346806, with
one annotator). T maximises sum_i log sum_k p_ik T_k,y_i. This objective is concave in T, and
expectation-maximisation finds its maximum. The posterior of the truth given the label is then

    q_ik ~ p_ik T_k,y_i

and an example's label is wrong with probability 1 - q_i,y_i. Where it is known who gave which vote,
each annotator has confusions (`truths`). Ambiguity that the model knows is in p and not in T. The
model must say what the classes are, not what the labels are: the location of a head, or the mean of
an ensemble, fitted to other rows. Where p is the probability of the label, T is near the identity,
and few labels seem wrong.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import linalg

from het_plugin.measures.truths import Confusions, Votes

KINDS = ('wrong', 'ambiguous', 'fine')
UNSURE = 0.5  # the location is unsure of a row if no class is more probable than this
LEAST_AGREEMENT = 0.45
_LEAST_RATE = 0.0005
_LEAST_ROWS = 0.5  # of a pair of classes; less comes of rounding
_LEAST_FREE = 1e-12  # lower rates are at their bound, 0
_RIDGE = 1e-6  # of F: where p tells nothing of T, the error of the share is large and not 0 / 0
_MAX_STEPS = 20  # of conjugate gradients; 300 changed the error by 1%
_PART_BYTES = 2**26  # of p that is read at a time


class Annotators(NamedTuple):
  """Those who gave votes, [A].

  Attributes:
    ids: int, their numbers among the votes.
    num_votes: int.
    quality: float64, the share of their votes that is right (`Confusions.annotators`). It is too
      high where people make the same mistakes, which the features do not tell: by 0.011 where one
      row in ten had a wrong class that all wrote in six of ten cases, and by less than 0.001 where
      mistakes were independent.
    stderr: float64, the standard error of that share over votes.
  """

  ids: np.ndarray
  num_votes: np.ndarray
  quality: np.ndarray
  stderr: np.ndarray


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
    truth, label, rate: [V], T_ky of each pair of a truth k and a label y that may be one; others
      are 0.
    classes: float64 [K], the share of examples whose truth is k and one of those that are kept.
    ids: int or text [K], the classes, in the order of the columns.
    share: the share of wrong labels.
    share_error: its standard error over examples, which T is estimated from as well (the delta
      method). It takes p as it is. 1/2 if p tells nothing of T; None for one example, and where it
      was not asked for.
    nll: mean of -log sum_k p_ik T_k,y_i, the negative log-likelihood of the labels, in nats.
    annotators: those who gave the votes; None where they are not known.
  """

  probability: np.ndarray
  confidence: np.ndarray
  wrong: np.ndarray
  suggested: np.ndarray
  kind: np.ndarray
  truth: np.ndarray
  label: np.ndarray
  rate: np.ndarray
  classes: np.ndarray
  ids: np.ndarray
  share: float
  share_error: float | None
  nll: float
  annotators: Annotators | None = None

  @property
  def confusions(self) -> np.ndarray:
    """T, float64 [K, K]: the share of people who write y for the truth k."""
    t = np.zeros((len(self.ids), len(self.ids)))
    t[self.truth, self.label] = self.rate
    return t + np.diag(1.0 - t.sum(axis=1))  # of truths that no row has

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
    joint = self.classes[self.truth] * self.rate
    joint[(self.rate < _LEAST_RATE) | (joint * len(self.wrong) < _LEAST_ROWS)] = 0.0
    joint[self.truth == self.label] = 0.0
    order = np.argsort(joint, kind='stable')[::-1][:count]
    ids = self.ids.tolist()
    return [
      (ids[self.truth[i]], ids[self.label[i]], float(self.rate[i]), float(joint[i]))
      for i in order
      if joint[i] > 0
    ]


def audit(
  p: np.ndarray,
  label: np.ndarray,
  error: bool = True,
  votes: np.ndarray | None = None,
  annotator: np.ndarray | None = None,
) -> Audit:
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
    p: float [N, K], probabilities of the true classes, by a model that has not seen the label. A
      mapped file is read in blocks of rows.
    label: int [N], classes.
    error: as in `of_votes`.
    votes, annotator: int [N, L], classes and those who gave them, -1 for none, where `label` is a
      consensus; None for the labels of one annotator.

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
  rows = Votes(label.astype(np.int64), num_classes, votes, annotator)
  size = max(1, _PART_BYTES // (8 * num_classes))
  for start in range(0, num_rows, size):
    rows.put(slice(start, start + size), p[start : start + size])
  return of_votes(rows.close().fit(), error)


def of_votes(fitted: Confusions, error: bool = True) -> Audit:
  """The audit of the labels of rows whose confusions are known.

  Args:
    fitted: the confusions.
    error: whether `share_error` is computed, which takes most of the time; else it is None.
  """
  votes = fitted.votes
  label = votes.label
  num_rows = len(votes)
  probability, confidence, wrong = np.empty((3, num_rows))
  suggested = np.empty(num_rows, np.int64)
  kind = np.empty(num_rows, f'<U{max(map(len, KINDS))}')
  classes = np.zeros(votes.num_classes + 1)
  nll = 0.0
  for rows, p, q, log_likelihood in votes.posteriors(fitted.rates):
    truth = votes.truths(rows)
    each = np.arange(len(p)), np.argmax(truth == label[rows][:, None], axis=1)
    is_class = truth < votes.num_classes
    probability[rows] = p[each]
    confidence[rows] = np.where(is_class, p, 0.0).max(axis=1)
    wrong[rows] = 1.0 - q[each]
    best = np.where(is_class, q, -1.0).argmax(axis=1)
    suggested[rows] = truth[each[0], best]
    kind[rows] = np.where(confidence[rows] > UNSURE, 'fine', 'ambiguous')
    kind[rows][wrong[rows] > 0.5] = 'wrong'
    classes += np.bincount(truth.ravel(), q.ravel(), len(classes)) / num_rows
    nll -= float(log_likelihood.sum()) / num_rows
  truth, written, rate = fitted.shared
  annotators = None
  if votes.num_annotators > 1:
    count, quality = fitted.annotators()
    given = np.flatnonzero(count)
    spread = quality * (1.0 - quality) / np.maximum(count, 1)
    annotators = Annotators(given, count[given], quality[given], np.sqrt(spread)[given])
  return Audit(
    probability=probability,
    confidence=confidence,
    wrong=wrong,
    suggested=suggested,
    kind=kind,
    truth=truth,
    label=written,
    rate=rate,
    classes=classes[:-1],
    ids=np.arange(votes.num_classes),
    share=float(wrong.mean()),
    share_error=share_error(fitted, wrong) if error else None,
    nll=nll,
    annotators=annotators,
  )


def share_error(fitted: Confusions, wrong: np.ndarray) -> float | None:
  """The standard error of the mean of `wrong`, at most 1/2; None for one row.

  Row i moves T by F^-1 s_i / N, where s_i is the gradient of its log-likelihood and F, in blocks of
  one label, the mean of s_i s_i'. The share moves by its gradient g times that: with
  m_i = g' F^-1 s_i the variance is that of wrong + m, over N, and that of m is g' F^-1 g. How
  annotators depart from T is taken as it is.
  """
  votes = fitted.votes
  num_rows = len(votes)
  if num_rows == 1:
    return None
  of_pool = fitted.groups.of_pool
  truth = fitted.groups.truth
  t = fitted.rates.shared
  shares = np.bincount(truth, fitted.groups.pooled(fitted.joint))[truth] / num_rows
  free = np.flatnonzero(t > _LEAST_FREE)
  root = np.zeros(len(t))
  root[free] = np.sqrt(t[free])
  # With sure p, F is near the identity in units of the standard errors of rates.
  unit = root / np.sqrt(np.maximum(shares, 1.0 / num_rows))
  inverse = np.zeros(len(t))
  inverse[free] = 1.0 / t[free]
  inverse = inverse[of_pool]
  inverse[0] = 0.0  # of no vote

  def tangent(z):  # the rates of a truth sum to 1, which the squares of `root` do, too
    whole = np.zeros(len(t))
    whole[free] = z
    return whole - root * np.bincount(truth, root * whole)[truth]

  def scores():  # s_i at the pairs of row i, [b, L, W]
    for part in votes.posteriors(fitted.rates):
      yield part, part.q[:, None] * votes.at(inverse, part.rows)

  def summed(weight):  # sum_i weight(part, s)_i s_i / N, [V]
    total = np.zeros(len(inverse))
    for part, s in scores():
      total += votes.sums(weight(part, s) * s, part.rows)
    return np.bincount(of_pool, total, len(t)) / num_rows

  def along(z):  # gives s_i' v of the direction v of T that z is in these units
    v = (unit * tangent(z))[of_pool]
    return lambda part, s: np.einsum('blw,blw->b', s, votes.at(v, part.rows))[:, None, None]

  def times_fisher(z):
    return tangent((unit * summed(along(z)))[free])[free] + _RIDGE * z

  def moves(part, s):  # the gradient of 1 - q_iy by T is s_i q_iy, and for the rates of y s_i less
    del s
    is_label = votes.truths(part.rows) == votes.label[part.rows][:, None]  # [b, W]
    right = (part.q * is_label).sum(axis=1)
    return right[:, None, None] - is_label[:, None]

  g = tangent((unit * summed(moves))[free])[free]
  # The stub has the arguments of LinearOperator's subclasses.
  fisher = linalg.LinearOperator((g.size, g.size), times_fisher, dtype=np.float64)  # ty: ignore[parameter-already-assigned]
  z, _ = linalg.cg(fisher, g, rtol=1e-3, maxiter=_MAX_STEPS)
  moved = along(z)
  covariance = sum(wrong[part.rows] @ moved(part, s).ravel() for part, s in scores()) / num_rows
  # The mean of m is 0.
  return float(min(np.sqrt((wrong.var() + 2 * covariance + g @ z) / num_rows), 0.5))
