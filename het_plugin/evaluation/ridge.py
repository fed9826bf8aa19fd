"""Ridge regression onto {-1, 1} class targets, in closed form, for many l2 strengths at once.

The fit is in float64. The class with the highest score is found in float32 where rounding cannot
change it, and in float64 elsewhere, so predictions are those of float64.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import scipy.linalg

BIAS_FEATURE = 100.0  # value of the constant feature; large, so that l2 hardly changes the bias
STD_OFFSET = 1e-5
_BLOCK_ROWS = 4096  # examples that are read at once
_SCORE_BYTES = 1 << 23  # float32 scores that are held at once; they should fit the cache
_SKELETON_ERROR = 1e-4  # relative; smaller needs more strengths, larger leaves more doubtful rows
_ROUNDING = 2.0**-20  # error of adding biases and own-class terms, which are at most 2

# Notation: N examples, D features, K classes, r = rank of X; c = BIAS_FEATURE; L strengths l2.
#
# X [N, D] holds the features standardised by their own mean and deviation. Y [N, K] is 1 where the
# row has the class and -1 elsewhere. A = [X, c 1] appends the constant feature. We want
#
#   argmin_W |A W - Y|^2 + l2 |W|^2 = (A^T A + l2 I)^{-1} A^T Y.
#
# The columns of X sum to zero, so A^T A = diag(X^T X, c^2 N) has two blocks: weights and bias are
# independent, and the eigenvalue c^2 N, which ruins the condition number, is never formed:
#
#   score(x) = x^T (X^T X + l2 I)^{-1} X^T Y  +  mean(Y) / (1 + l2 / (c^2 N)).
#
# With the singular value decomposition X = U E^{1/2} V^T the first term's weights are
#
#   W(l2) = V (E + l2)^{-1} V^T X^T Y,
#
# so another l2 needs no further decomposition. E and V come from the smaller Gram matrix: from
# X^T X = V E V^T, or from X X^T = U E U^T and V = X^T U E^{-1/2}. Since X^T 1 = 0 the -1 entries of
# Y drop out: X^T Y is twice the sums of the rows of each class, and Y itself is never formed.
#
# Leave-one-out. With the hat matrix H(l2) = A (A^T A + l2 I)^{-1} A^T and the fitted F = H Y, the
# model refitted without row i (the standardisation kept) misses row i by (Y_i - F_i) / (1 - H_ii),
# so its scores there are (F_i - H_ii Y_i) / (1 - H_ii), with
#
#   H_ii = sum_j (X V)_ij^2 / (E_j + l2) + 1 / (N + l2 / c^2).
#
# The class with the highest of these scores is that of F_i after 2 H_ii is subtracted from the own
# class; everything else that H_ii does is common to all classes.
#
# Many strengths. With p = V^T x [r] the scores are p^T (E + l2)^{-1} V^T X^T Y. The L vectors
# 1 / (E + l2) are nearly linear combinations of m < L of them, 1 / (E + l2) = sum_i a_i / (E +
# l2_i). So scores are computed in float32 at m strengths, which a pivoted QR decomposition picks,
# and combined for the others. The error is known: x and the weights are rounded to float32 and the
# combination misses the weights W_k by dW_k, so a score is off by at most
#
#   |x| (|dW_k| + u sum_i |a_i| |W_k(l2_i)|),    u = 2 (sqrt(D) + 4) 2^-24
#
# (sqrt(D) because D rounding errors add up like independent ones; Higham and Mary 2019,
# https://doi.org/10.1137/18M1226312). A row whose two best classes are closer than twice that is
# decided in float64 at its own strength.


@dataclasses.dataclass(frozen=True, eq=False)
class Ridge:
  """A decomposed set of examples: fits, predicts and leaves one out at any l2.

  Attributes:
    num_rows: N.
    classes: int64 [K], the labels seen, ascending.
    counts: int64 [K], number of examples of each class.
    mean, scale: float64 [D]; a feature is used as (x - mean) / scale. A feature that is constant
      over the set has scale infinity, so that it is 0 for every x and not an amplified rounding
      error.
    eigenvalues: float64 [r], E, the nonzero ones of the smaller Gram matrix, ascending.
    basis: float64 [D, r], V; orthonormal columns.
    rhs: float64 [r, K], V^T X^T Y.
  """

  num_rows: int
  classes: np.ndarray
  counts: np.ndarray
  mean: np.ndarray
  scale: np.ndarray
  eigenvalues: np.ndarray
  basis: np.ndarray
  rhs: np.ndarray

  def weights(self, l2: float) -> np.ndarray:
    """Weights of the standardised features, float64 [D, K]."""
    return self.basis @ (self.rhs / (self.eigenvalues + l2)[:, None])

  def bias(self, l2: float) -> np.ndarray:
    """Contribution of the constant feature to the scores, float64 [K]."""
    n = self.num_rows
    return (2 * self.counts / n - 1) / (1 + l2 / (BIAS_FEATURE**2 * n))

  def scores(self, x: np.ndarray, l2: float) -> np.ndarray:
    """Regression outputs for features x [M, D]: float64 [M, K], columns in order of `classes`."""
    return self._standardised(x) @ self.weights(l2) + self.bias(l2)

  def predict(self, x: np.ndarray, l2s: Sequence[float]) -> np.ndarray:
    """Labels with the highest score; among equal scores, the smallest label.

    Args:
      x: features [M, D].
      l2s: L strengths.

    Returns:
      int64 [L, M].
    """
    return self.classes[self._best_classes(x, l2s)]

  def leave_one_out(self, x: np.ndarray, y: np.ndarray, l2s: Sequence[float]) -> np.ndarray:
    """Predictions for examples of the set, each by the model refitted without it.

    Args:
      x: features [M, D] of some of the examples.
      y: their labels, int [M].
      l2s: L strengths.

    Returns:
      int64 [L, M].
    """
    own = np.searchsorted(self.classes, y)
    return self.classes[self._best_classes(x, l2s, own, self.leverage(x, l2s))]

  def leverage(self, x: np.ndarray, l2s: Sequence[float]) -> np.ndarray:
    """H_ii of examples x [M, D] of the set, float64 [L, M]."""
    squares = (self._standardised(x) @ self.basis) ** 2  # [M, r]
    l2s = np.asarray(l2s, np.float64)
    bias = 1 / (self.num_rows + l2s / BIAS_FEATURE**2)  # [L]
    return (1 / (self.eigenvalues + l2s[:, None])) @ squares.T + bias[:, None]

  def _standardised(self, x: np.ndarray) -> np.ndarray:
    z = x - self.mean
    z *= 1 / self.scale
    return z

  def _best_classes(
    self,
    x: np.ndarray,
    l2s: Sequence[float],
    own: np.ndarray | None = None,
    hat: np.ndarray | None = None,
  ) -> np.ndarray:
    """Positions in `classes` of the highest scores, int64 [L, M].

    Where they are given, 2 hat [L, M] is subtracted from the scores of the classes own [M].
    """
    l2s = np.asarray(l2s, np.float64)
    curves = 1 / (self.eigenvalues + l2s[:, None])  # [L, r]
    bias = np.stack([self.bias(l2) for l2 in l2s])  # [L, K]
    pivots, combine, missing = _skeleton(curves, np.linalg.norm(self.rhs, axis=1))
    weights = np.empty((len(self.mean), len(self.classes), len(pivots)), np.float32)  # [D, K, m]
    for j, l2 in enumerate(l2s[pivots]):
      weights[..., j] = self.weights(l2)
    # The largest error of a score, divided by |x|: [L].
    unit = 2 * (np.sqrt(len(self.mean)) + 4) * 2.0**-24
    norms, missed = (np.sqrt(c**2 @ self.rhs**2) for c in (curves[pivots], missing))  # [m|L, K]
    error = (missed + unit * (np.abs(combine) @ norms)).max(axis=1)

    best = np.empty((len(l2s), len(x)), np.int64)
    doubtful = np.empty(best.shape, bool)
    mix, bias32 = combine.astype(np.float32), bias.astype(np.float32)
    for rows in blocks(len(x), max(128, _SCORE_BYTES // (4 * bias.size))):
      z = self._standardised(x[rows])
      scores = z.astype(np.float32) @ weights.reshape(len(weights), -1)  # [rows, K m]
      scores = (mix @ scores.reshape(-1, len(pivots)).T).reshape(len(l2s), len(z), -1)
      scores += bias32[:, None]  # [L, rows, K]
      if own is not None:
        scores[:, np.arange(len(z)), own[rows]] -= 2 * hat[:, rows]
      best[:, rows], margin = _best_and_margin(scores)
      lengths = np.linalg.norm(z, axis=1)
      doubtful[:, rows] = margin <= 2 * (error[:, None] * lengths + _ROUNDING)

    # Float64 decides the doubtful rows.
    for part in blocks(len(x), _BLOCK_ROWS):
      here = part.start + np.flatnonzero(doubtful[:, part].any(axis=0))
      projected = self._standardised(x[here]) @ self.basis  # [rows, r]
      for i in np.flatnonzero(doubtful[:, here].any(axis=1)):
        some = np.flatnonzero(doubtful[i, here])
        scores = projected[some] @ (curves[i, :, None] * self.rhs) + bias[i]
        if own is not None:
          scores[np.arange(len(some)), own[here[some]]] -= 2 * hat[i, here[some]]
        best[i, here[some]] = scores.argmax(axis=1)
    return best


def decompose(x: np.ndarray, y: np.ndarray) -> Ridge:
  """Standardises and decomposes a set of examples.

  Args:
    x: any float [N, D], N >= 1. Where N >= D it is read in blocks and may be memory-mapped.
    y: labels, int [N].
  """
  classes, ids, counts = np.unique(y, return_inverse=True, return_counts=True)
  mean, constant = _moments(x)
  if x.shape[0] >= x.shape[1]:
    products, sums = _centred_sums(x, ids, len(classes), mean)
    scale = _scale(np.sqrt(np.diag(products) / len(x)), constant)
    eigenvalues, basis = _eigh_range(products / scale / scale[:, None])
    rhs = 2 * (basis.T @ (sums / scale).T)
  else:
    z = x - mean
    scale = _scale(z.std(axis=0), constant)
    z /= scale
    eigenvalues, u = _eigh_range(z @ z.T)
    basis = z.T @ (u / np.sqrt(eigenvalues))
    rhs = 2 * (np.sqrt(eigenvalues)[:, None] * _class_sums(u, ids, len(classes)).T)
  return Ridge(
    num_rows=len(x),
    classes=classes.astype(np.int64),
    counts=counts,
    mean=mean,
    scale=scale,
    eigenvalues=eigenvalues,
    basis=basis,
    rhs=rhs,
  )


def standardisation(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """`mean` and `scale` of `Ridge`, float64 [D], from examples x, any float [N, D]."""
  mean, constant = _moments(x)
  return mean, _scale((x - mean).std(axis=0), constant)


def _moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Mean, float64 [D], and which features are constant, bool [D], of x, any float [N, D]."""
  total = np.zeros(x.shape[1])
  low, high = x[0], x[0]
  for rows in blocks(len(x), _BLOCK_ROWS):
    total += x[rows].sum(axis=0, dtype=np.float64)
    low, high = np.minimum(low, x[rows].min(axis=0)), np.maximum(high, x[rows].max(axis=0))
  return total / len(x), low == high


def _centred_sums(
  x: np.ndarray, ids: np.ndarray, num_classes: int, mean: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """X^T X and the class sums of X = x - mean: float64 [D, D] and [K, D]."""
  products, sums = np.zeros((len(mean), len(mean))), np.zeros((num_classes, len(mean)))
  for rows in blocks(len(x), _BLOCK_ROWS):
    z = x[rows] - mean
    products += z.T @ z
    sums += _class_sums(z, ids[rows], num_classes)
  return products, sums


def _class_sums(z: np.ndarray, ids: np.ndarray, num_classes: int) -> np.ndarray:
  """Sums of the rows z [N, D] of each class, float64 [K, D]."""
  sums = np.zeros((num_classes, z.shape[1]))
  order = np.argsort(ids, kind='stable')
  present, starts = np.unique(ids[order], return_index=True)
  sums[present] = np.add.reduceat(z[order], starts, axis=0)
  return sums


def _scale(deviation: np.ndarray, constant: np.ndarray) -> np.ndarray:
  return np.where(constant, np.inf, deviation + STD_OFFSET)


def _eigh_range(products: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Eigenvalues [r] that are not 0 but for rounding, ascending, and their vectors [n, r].

  Null directions (there is one if N < D, as X is centred) add nothing to exact scores, but their
  rounding errors, divided by a small l2, would exceed the residuals of well fitted examples.
  """
  eigenvalues, vectors = np.linalg.eigh(products)
  kept = eigenvalues > eigenvalues[-1] * len(products) * np.finfo(np.float64).eps
  return eigenvalues[kept], vectors[:, kept]


def _skeleton(
  curves: np.ndarray, importance: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Curves of which all others are nearly linear combinations.

  Args:
    curves: 1 / (E + l2), float64 [L, r].
    importance: what each entry of a curve is multiplied with, float64 [r].

  Returns:
    m rows of curves, int [m]; coefficients a, float64 [L, m]; and the errors of the combined
    curves, float64 [L, r].
  """
  lengths = np.linalg.norm(curves * importance, axis=1)  # [L]
  if not lengths.all():  # all features are constant, or all classes have the same mean
    return np.zeros(1, int), np.ones((len(curves), 1)), np.zeros_like(curves)
  scaled = (curves * importance).T / lengths
  triangle, order = scipy.linalg.qr(scaled, mode='r', pivoting=True)
  steps = np.abs(np.diag(triangle))
  m = int((steps > _SKELETON_ERROR * steps[0]).sum())
  combine = np.empty((len(curves), m))
  combine[order] = scipy.linalg.solve_triangular(triangle[:m, :m], triangle[:m]).T
  combine *= lengths[:, None] / lengths[order[:m]]
  return order[:m], combine, combine @ curves[order[:m]] - curves


def _best_and_margin(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Position of the highest of scores [L, M, K] and its lead, both [L, M]; overwrites scores."""
  best = scores.argmax(axis=-1)[..., None]
  first = np.take_along_axis(scores, best, -1)
  np.put_along_axis(scores, best, -np.inf, -1)
  # argmax and take, because max is several times as slow over a short last axis
  second = np.take_along_axis(scores, scores.argmax(axis=-1)[..., None], -1)
  return best[..., 0], (first - second)[..., 0]


def blocks(length: int, step: int) -> Iterator[slice]:
  """Slices of at most `step`, at least 1, that cover 0 .. length."""
  step = max(1, step)
  return (slice(start, min(start + step, length)) for start in range(0, length, step))
