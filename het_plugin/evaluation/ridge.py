"""Ridge regression onto {-1, 1} class targets, in closed form, for many l2 strengths at once.

Everything is float64 on the host (LAPACK through numpy): the sets are small, the spectrum is not.
"""

import dataclasses

import numpy as np

BIAS_FEATURE = 100.0  # value of the constant feature; large, so that l2 hardly touches the bias
STD_OFFSET = 1e-5
_BLOCK_ELEMENTS = 1 << 20  # of features and scores held at once in float64: 8 MiB

# Notation: N examples, D features, K classes, r = rank of X; c = BIAS_FEATURE.
#
# X [N, D] holds the features standardised by their own mean and deviation, Y [N, K] is 1 where the
# row has the class and -1 elsewhere, and A = [X, c 1] appends the constant feature. We want
#
#   argmin_W |A W - Y|^2 + l2 |W|^2 = (A^T A + l2 I)^{-1} A^T Y.
#
# The columns of X sum to zero, so A^T A = diag(X^T X, c^2 N) falls into two blocks: weights and
# bias do not see each other, and the eigenvalue c^2 N, which ruins the spectrum, is never formed:
#
#   score(x) = x^T (X^T X + l2 I)^{-1} X^T Y  +  mean(Y) / (1 + l2 / (c^2 N)).
#
# For the first term we decompose the smaller Gram matrix once, E being its eigenvalues:
#
#   N >= D   X^T X = V E V^T   W(l2) = V      (E + l2)^{-1} V^T X^T Y
#   N <  D   X X^T = U E U^T   W(l2) = X^T U  (E + l2)^{-1} U^T Y
#
# Both read  lhs (E + l2)^{-1} rhs,  so a further l2 costs no further decomposition. Since X^T 1 = 0
# the -1 entries of Y drop out of W: rhs needs sums over the rows of each class, never Y itself.
#
# Leave-one-out. With the hat matrix H(l2) = A (A^T A + l2 I)^{-1} A^T and the fitted F = H Y, the
# model refitted without row i (the standardisation kept) misses row i by (Y_i - F_i) / (1 - H_ii),
# so its scores there are (F_i - H_ii Y_i) / (1 - H_ii). On the two blocks
#
#   H_ii = sum_j leverage_ij / (E_j + l2) + 1 / (N + l2 / c^2),
#
# where leverage = (X V)^2 for N >= D and U^2 E for N < D.


@dataclasses.dataclass(frozen=True, eq=False)
class Ridge:
  """A set of examples, decomposed: what is needed to fit, predict and leave one out at any l2.

  Attributes:
    classes: int64 [K], the labels seen, ascending.
    counts: int64 [K], examples of each.
    label_ids: int64 [N], position of each example's label in `classes`.
    mean, scale: float64 [D]; a feature is used as (x - mean) / scale. A feature that is constant
      over the set has scale infinity, so it is 0 for every x instead of a rounding error enlarged.
    eigenvalues: float64 [r], those of the smaller Gram matrix that are not 0, ascending.
    lhs: float64 [D, r] and rhs: float64 [r, K]; weights are lhs / (eigenvalues + l2) @ rhs.
    projected: float64 [N, r], the standardised examples times lhs.
    leverage: float64 [N, r].
  """

  classes: np.ndarray
  counts: np.ndarray
  label_ids: np.ndarray
  mean: np.ndarray
  scale: np.ndarray
  eigenvalues: np.ndarray
  lhs: np.ndarray
  rhs: np.ndarray
  projected: np.ndarray
  leverage: np.ndarray

  def bias(self, l2: float) -> np.ndarray:
    """Contribution of the constant feature to the scores, float64 [K]."""
    n = len(self.label_ids)
    return (2 * self.counts / n - 1) / (1 + l2 / (BIAS_FEATURE**2 * n))

  def scores(self, x: np.ndarray, l2: float) -> np.ndarray:
    """Regression outputs for features x [M, D]: float64 [M, K], columns in order of `classes`."""
    weights = (self.lhs / (self.eigenvalues + l2)) @ self.rhs  # [D, K]
    return ((x - self.mean) / self.scale) @ weights + self.bias(l2)

  def predict(self, x: np.ndarray, l2: float) -> np.ndarray:
    """Label with the largest score (the smallest label of equal ones) for x [M, D]: int64 [M]."""
    step = max(1, _BLOCK_ELEMENTS // (len(self.classes) + len(self.mean)))
    blocks = [x[start : start + step] for start in range(0, len(x), step)]
    return self.classes[np.concatenate([self.scores(b, l2).argmax(axis=1) for b in blocks])]

  def leave_one_out(self, l2: float, rows: np.ndarray) -> np.ndarray:
    """Scores of examples `rows`, each under the model refitted without it: float64 [rows, K]."""
    hat = self.leverage[rows] @ (1 / (self.eigenvalues + l2))
    hat += 1 / (len(self.label_ids) + l2 / BIAS_FEATURE**2)
    scores = self.projected[rows] @ (self.rhs / (self.eigenvalues + l2)[:, None])
    scores += self.bias(l2)
    scores += hat[:, None]  # - hat Y, where Y = -1 but for the own class
    scores[np.arange(len(rows)), self.label_ids[rows]] -= 2 * hat
    scores /= (1 - hat)[:, None]
    return scores


def decompose(x: np.ndarray, y: np.ndarray) -> Ridge:
  """Standardises and decomposes examples x, any float [N, D], with labels y, int [N]; N >= 1."""
  classes, label_ids, counts = np.unique(y, return_inverse=True, return_counts=True)
  x = x.astype(np.float64)
  mean = x.mean(axis=0)
  scale = np.where(np.ptp(x, axis=0) > 0, x.std(axis=0) + STD_OFFSET, np.inf)
  x = (x - mean) / scale

  if x.shape[0] >= x.shape[1]:
    eigenvalues, v = _eigh_range(x.T @ x)
    lhs = v
    projected = x @ v
    rhs = 2 * _sum_by_class(projected, label_ids, len(classes)).T
    leverage = projected**2
  else:
    eigenvalues, u = _eigh_range(x @ x.T)
    lhs = x.T @ u
    projected = u * eigenvalues
    rhs = 2 * _sum_by_class(u, label_ids, len(classes)).T
    leverage = u**2 * eigenvalues
  return Ridge(
    classes=classes.astype(np.int64),
    counts=counts,
    label_ids=label_ids,
    mean=mean,
    scale=scale,
    eigenvalues=eigenvalues,
    lhs=lhs,
    rhs=rhs,
    projected=projected,
    leverage=leverage,
  )


def _eigh_range(gram: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Eigenvalues [r] and vectors [n, r] of gram [n, n], without its numerical null space.

  Null directions (one for sure if N < D, as X is centred) add nothing to exact scores, but their
  rounding errors, divided by a small l2, would swamp the residuals of well fitted examples.
  """
  eigenvalues, vectors = np.linalg.eigh(gram)
  kept = eigenvalues > eigenvalues[-1] * len(gram) * np.finfo(np.float64).eps
  return eigenvalues[kept], vectors[:, kept]


def _sum_by_class(rows: np.ndarray, label_ids: np.ndarray, num_classes: int) -> np.ndarray:
  """Sums rows [N, r] of equal label: [K, r]."""
  order = np.argsort(label_ids, kind='stable')
  starts = np.searchsorted(label_ids[order], np.arange(num_classes))
  return np.add.reduceat(rows[order], starts, axis=0)
