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

import numpy as np
from scipy import sparse

from het_plugin.measures import uncertainty

KINDS = ('wrong', 'ambiguous', 'fine')
UNSURE = 0.5  # the location is unsure of a row if no class is more probable than this
_MAX_ROUNDS = 500
_TOLERANCE = 1e-6  # nats per example


@dataclasses.dataclass(frozen=True, eq=False)
class Audit:
  """N labels of K classes, each with its probability of being wrong.

  Attributes:
    probability: float64 [N], p of the label.
    wrong: float64 [N], the probability that the label is wrong, given the label.
    suggested: int [N], the most probable truth given the label.
    kind: [N], of `KINDS`: 'wrong' if that is more probable than not; else 'ambiguous' if no class
      has p above one half; else 'fine'.
    confusions: float64 [K, K], T: the share of people who write y for the truth k.
    classes: float64 [K], the share of examples whose truth is k.
    share: the share of wrong labels, with its standard error over examples, given T.
    share_error: that standard error; None for one example.
  """

  probability: np.ndarray
  wrong: np.ndarray
  suggested: np.ndarray
  kind: np.ndarray
  confusions: np.ndarray
  classes: np.ndarray
  share: float
  share_error: float | None

  def pairs(self, count: int) -> list[tuple[int, int, float, float]]:
    """The most frequent confusions: (truth k, label y, T_ky, share of all examples)."""
    joint = self.classes[:, None] * self.confusions
    np.fill_diagonal(joint, 0.0)
    order = np.argsort(joint, axis=None)[::-1][:count]
    truths, labels = np.unravel_index(order, joint.shape)
    return [
      (int(k), int(y), float(self.confusions[k, y]), float(joint[k, y]))
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
    p: float [N, K], probabilities of the true classes, by a model that has not seen the label.
    label: int [N], classes.

  Raises:
    ValueError: shapes do not fit, or a label is no class.
  """
  p, label = np.asarray(p, np.float64), np.asarray(label)
  if p.ndim != 2 or label.shape != p.shape[:1] or not len(label):
    raise ValueError(f'p must be [N, K] and label [N], N > 0; got {p.shape} and {label.shape}')
  if label.dtype.kind not in 'iu' or not ((label >= 0) & (label < p.shape[1])).all():
    raise ValueError(f'labels must be classes 0 .. {p.shape[1] - 1}')
  confusions, q = _confusions(p, label)
  rows = np.arange(len(label))
  wrong = 1.0 - q[rows, label]
  kind = np.where(p.max(axis=1) > UNSURE, 'fine', 'ambiguous')
  kind = np.where(wrong > 0.5, 'wrong', kind)
  return Audit(
    probability=p[rows, label],
    wrong=wrong,
    suggested=q.argmax(axis=1),
    kind=kind,
    confusions=confusions,
    classes=q.mean(axis=0),
    share=float(wrong.mean()),
    share_error=uncertainty.stderr(wrong),
  )


def _confusions(p, label):
  """T [K, K] and the posterior q [N, K]."""
  num_rows, num_classes = p.shape
  by_label = sparse.csr_array(
    (np.ones(num_rows), (label, np.arange(num_rows))), shape=(num_classes, num_rows)
  )
  t = np.full((num_classes, num_classes), 0.1 / max(num_classes - 1, 1))
  np.fill_diagonal(t, 0.9)
  before = -np.inf
  for _ in range(_MAX_ROUNDS):
    q = p * t.T[label]  # [N, K]
    likelihood = np.maximum(q.sum(axis=1), np.finfo(np.float64).tiny)
    q /= likelihood[:, None]
    joint = by_label @ q  # [label, truth]
    total = joint.sum(axis=0)
    t = np.where(total > 0, joint / np.where(total > 0, total, 1.0), t.T).T
    now = np.log(likelihood).mean()
    if now - before < _TOLERANCE:
      break
    before = now
  return t, q
