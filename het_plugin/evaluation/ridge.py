"""Ridge regression onto {-1, 1} class targets, in closed form, for many l2 strengths at once.

Fitted in float64 (LAPACK through numpy; `gram.py` sums up examples). Which class scores highest
is decided in float32 where that is certain, and in float64 where it is not.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import scipy.linalg
from jax.sharding import Mesh

from het_plugin.evaluation import gram

BIAS_FEATURE = 100.0  # value of the constant feature; large, so that l2 hardly touches the bias
STD_OFFSET = 1e-5
_SCORE_BYTES = 1 << 26  # of scores held at once
_WEIGHT_BYTES = 1 << 28  # of float32 weights held at once
_SKELETON_ERROR = (
  1e-4  # relative; a smaller one means more strengths, a larger one more doubtful rows
)
_ROUNDING = 2.0**-20  # of what is added to a score: biases and own-class terms, at most 2

# Notation: N examples, D features, K classes, r = rank of X; c = BIAS_FEATURE; L strengths l2.
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
# With the singular value decomposition X = U E^{1/2} V^T the first term's weights are
#
#   W(l2) = V (E + l2)^{-1} V^T X^T Y,
#
# so a further l2 costs no further decomposition. E and V come from the smaller Gram matrix: from
# X^T X = V E V^T, or from X X^T = U E U^T and V = X^T U E^{-1/2}. Since X^T 1 = 0 the -1 entries of
# Y drop out: X^T Y is twice the sums of the rows of each class, and Y itself is never formed.
#
# Leave-one-out. With the hat matrix H(l2) = A (A^T A + l2 I)^{-1} A^T and the fitted F = H Y, the
# model refitted without row i (the standardisation kept) misses row i by (Y_i - F_i) / (1 - H_ii),
# so its scores there are (F_i - H_ii Y_i) / (1 - H_ii), and
#
#   H_ii = sum_j (X V)_ij^2 / (E_j + l2) + 1 / (N + l2 / c^2).
#
# The class that scores highest is that of F_i with 2 H_ii taken off the own class: what else H_ii
# does is common to all classes.
#
# Many strengths. With p = V^T x [r] the scores are p^T (E + l2)^{-1} rhs: as functions of l2 they
# move along the L vectors 1 / (E + l2), and m < L of those combine to the rest nearly enough,
# 1 / (E + l2) = sum_i a_i / (E + l2_i). So scores are computed at m strengths, which a pivoted QR
# decomposition picks, and combined for the others. How far a score can be off is known: p and the
# weights are rounded to float32, and the combination misses the weights W_k by dW_k, so it is
#
#   |x| (|dW_k| + u sum_i |a_i| |W_k(l2_i)|),    u = 2 (sqrt(D) + 4) 2^-24,
#
# V being orthonormal (sqrt(D): errors of D roundings add up like independent ones; Higham and Mary
# 2019, https://doi.org/10.1137/18M1226312). A row whose two best classes are nearer than twice that
# is decided in float64 at its own strength.


@dataclasses.dataclass(frozen=True, eq=False)
class Ridge:
  """A set of examples, decomposed: what is needed to fit, predict and leave one out at any l2.

  Attributes:
    num_rows: N.
    classes: int64 [K], the labels seen, ascending.
    counts: int64 [K], examples of each.
    mean, scale: float64 [D]; a feature is used as (x - mean) / scale. A feature that is constant
      over the set has scale infinity, so it is 0 for every x instead of a rounding error enlarged.
    eigenvalues: float64 [r], E, those of the smaller Gram matrix that are not 0, ascending.
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

  def weights(self, l2: float, classes: slice = slice(None)) -> np.ndarray:
    """Weights of the standardised features, float64 [D, K], of all or some classes."""
    return self.basis @ (self.rhs[:, classes] / (self.eigenvalues + l2)[:, None])

  def bias(self, l2: float) -> np.ndarray:
    """Contribution of the constant feature to the scores, float64 [K]."""
    n = self.num_rows
    return (2 * self.counts / n - 1) / (1 + l2 / (BIAS_FEATURE**2 * n))

  def scores(self, x: np.ndarray, l2: float) -> np.ndarray:
    """Regression outputs for features x [M, D]: float64 [M, K], columns in order of `classes`."""
    return self._standardised(x) @ self.weights(l2) + self.bias(l2)

  def predict(self, x: np.ndarray, l2s: Sequence[float]) -> np.ndarray:
    """Labels with the largest score, the smallest of equal ones.

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
    """Positions in `classes` of the highest scores, int64 [L, M], where 2 hat [L, M] is taken off
    the scores of the classes `own` [M].
    """
    l2s = np.asarray(l2s, np.float64)
    pivots, combine, missing = _skeleton(self.eigenvalues, np.linalg.norm(self.rhs, axis=1), l2s)
    curves = 1 / (self.eigenvalues + l2s[:, None])  # [L, r]
    unit = 2 * (np.sqrt(len(self.mean)) + 4) * 2.0**-24
    # Rows are standardised in float32, but for what rounding the mean shifts all of them by.
    mean, inverse_scale = self.mean.astype(np.float32), (1 / self.scale).astype(np.float32)
    shift = (mean - self.mean) / self.scale
    basis, mix = self.basis.astype(np.float32), combine.astype(np.float32)
    # Multiply the rows by V, or the weights: whichever are fewer.
    project = len(x) < 2 * len(pivots) * len(self.classes)

    leaders = _Leaders.empty(len(l2s), len(x))
    lengths = np.empty(len(x))  # |x|
    reach = np.zeros(len(l2s))  # the largest error of a score, over |x|
    for tile in gram.blocks(len(self.classes), _WEIGHT_BYTES // (4 * len(mean) * len(pivots))):
      rhs = self.rhs[:, tile]  # [r, k]
      weights = rhs[:, :, None] * curves[pivots].T[:, None]  # [r, k, m]
      weights = weights.reshape(len(rhs), weights.shape[1] * weights.shape[2])
      weights = (weights if project else self.basis @ weights).astype(np.float32)  # [r or D, k m]
      bias = np.stack([self.bias(l2)[tile] - self.bias(l2).mean() for l2 in l2s])  # [L, k]
      bias = (bias + (curves * (shift @ self.basis)) @ rhs).astype(np.float32)
      norms, missed = (np.sqrt(c**2 @ rhs**2) for c in (curves[pivots], missing))  # [m, k], [L, k]
      reach = np.maximum(reach, (missed + unit * (np.abs(combine) @ norms)).max(axis=1))
      for rows in gram.blocks(len(x), _SCORE_BYTES // (4 * bias.size)):
        z = ((x[rows] - mean) * inverse_scale).astype(np.float32, copy=False)
        lengths[rows] = np.sqrt(np.einsum('md,md->m', z, z)) + np.linalg.norm(shift)
        scores = (z @ basis if project else z) @ weights  # [rows, k m]
        scores = mix @ scores.reshape(-1, len(pivots)).T
        scores = scores.reshape(len(l2s), len(z), rhs.shape[1])  # [L, rows, k]
        scores += bias[:, None]
        if own is not None:
          _subtract_own(scores, own[rows] - tile.start, 2 * hat[:, rows])
        leaders.update(scores, tile.start, rows)
    doubtful = leaders.margin() <= 2 * (reach[:, None] * lengths + _ROUNDING)  # [L, M]
    self._decide(leaders.best, doubtful, x, curves, l2s, own, hat)
    return leaders.best

  def _decide(
    self,
    best: np.ndarray,
    doubtful: np.ndarray,
    x: np.ndarray,
    curves: np.ndarray,
    l2s: np.ndarray,
    own: np.ndarray | None,
    hat: np.ndarray | None,
  ) -> None:
    """Sets `best` [L, M] where `doubtful` [L, M], by scores in float64; see `_best_classes`."""
    for part in gram.blocks(len(x), _SCORE_BYTES // (8 * len(self.classes))):
      here = part.start + np.flatnonzero(doubtful[:, part].any(axis=0))
      projected = self._standardised(x[here]) @ self.basis  # [rows, r]
      for i in np.flatnonzero(doubtful[:, here].any(axis=1)):
        some = np.flatnonzero(doubtful[i, here])
        scores = projected[some] @ (curves[i, :, None] * self.rhs) + self.bias(l2s[i])
        if own is not None:
          scores[np.arange(len(some)), own[here[some]]] -= 2 * hat[i, here[some]]
        best[i, here[some]] = scores.argmax(axis=1)


def decompose(x: np.ndarray, y: np.ndarray, mesh: Mesh | None = None) -> Ridge:
  """Standardises and decomposes a set of examples.

  Args:
    x: any float [N, D], N >= 1; where N >= D it is read in blocks and may be memory-mapped.
    y: labels, int [N].
    mesh: where N >= D, devices that sum up the Gram matrix, in float32 with compensated sums:
      directions of X with less than `gram.FLOAT32_CUT` of the largest eigenvalue are left out. None
      for the host and float64.
  """
  classes, ids, counts = np.unique(y, return_inverse=True, return_counts=True)
  mean, constant = gram.moments(x)
  if x.shape[0] >= x.shape[1]:
    products, sums = gram.centred_sums(x, ids, len(classes), mean, mesh)
    scale = _scale(np.sqrt(np.diag(products) / len(x)), constant)
    cut = len(mean) * np.finfo(np.float64).eps if mesh is None else gram.FLOAT32_CUT
    eigenvalues, basis = _eigh_range(products / scale / scale[:, None], cut)
    rhs = 2 * (basis.T @ (sums / scale).T)
  else:
    z = x - mean
    scale = _scale(z.std(axis=0), constant)
    z /= scale
    eigenvalues, u = _eigh_range(z @ z.T, len(z) * np.finfo(np.float64).eps)
    basis = z.T @ (u / np.sqrt(eigenvalues))
    by_class = np.argsort(ids, kind='stable')
    sums = np.add.reduceat(u[by_class], np.cumsum(counts) - counts, axis=0)  # [K, r]
    rhs = 2 * (np.sqrt(eigenvalues)[:, None] * sums.T)
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
  mean, constant = gram.moments(x)
  return mean, _scale((x - mean).std(axis=0), constant)


def _scale(deviation: np.ndarray, constant: np.ndarray) -> np.ndarray:
  return np.where(constant, np.inf, deviation + STD_OFFSET)


def _eigh_range(products: np.ndarray, cut: float) -> tuple[np.ndarray, np.ndarray]:
  """Eigenvalues [r] above `cut` of the largest, ascending, and their vectors [n, r].

  Null directions (one for sure if N < D, as X is centred) add nothing to exact scores, but their
  rounding errors, divided by a small l2, would swamp the residuals of well fitted examples.
  """
  eigenvalues, vectors = np.linalg.eigh(products)
  kept = eigenvalues > eigenvalues[-1] * cut
  return eigenvalues[kept], vectors[:, kept]


def _skeleton(
  eigenvalues: np.ndarray, importance: np.ndarray, l2s: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Strengths whose curves 1 / (E + l2) combine to those of all.

  Args:
    eigenvalues: E, float64 [r].
    importance: what each entry of a curve is multiplied with, float64 [r].
    l2s: float64 [L].

  Returns:
    m positions in l2s, int [m]; coefficients a, float64 [L, m]; and what is missing, the errors of
    the combined curves, float64 [L, r].
  """
  curves = 1 / (eigenvalues + l2s[:, None])  # [L, r]
  lengths = np.linalg.norm(curves * importance, axis=1)  # [L]
  if not lengths.all():  # all features constant, or all classes alike
    return np.zeros(1, int), np.ones((len(l2s), 1)), np.zeros_like(curves)
  scaled = (curves * importance).T / lengths
  triangle, order = scipy.linalg.qr(scaled, mode='r', pivoting=True)
  steps = np.abs(np.diag(triangle))
  m = int((steps > _SKELETON_ERROR * steps[0]).sum())
  combine = np.empty((len(l2s), m))
  combine[order] = scipy.linalg.solve_triangular(triangle[:m, :m], triangle[:m]).T
  combine *= lengths[:, None] / lengths[order[:m]]
  return order[:m], combine, combine @ curves[order[:m]] - curves


@dataclasses.dataclass(frozen=True, eq=False)
class _Leaders:
  """For each strength and row the class that leads, its score and that of the next: [L, M] each."""

  best: np.ndarray
  first: np.ndarray
  second: np.ndarray

  @classmethod
  def empty(cls, num_strengths: int, num_rows: int) -> '_Leaders':
    lowest = np.full((num_strengths, num_rows), -np.inf, np.float32)
    return cls(np.zeros(lowest.shape, np.int64), lowest, lowest.copy())

  def update(self, scores: np.ndarray, start: int, rows: slice) -> None:
    """Enters scores [L, rows, k] of the classes from `start` on; overwrites them."""
    best = scores.argmax(axis=-1)[..., None]
    first = np.take_along_axis(scores, best, -1)[..., 0]
    np.put_along_axis(scores, best, -np.inf, -1)
    second = np.take_along_axis(scores, scores.argmax(axis=-1)[..., None], -1)[..., 0]
    before = self.first[:, rows].copy()
    self.best[:, rows] = np.where(first > before, best[..., 0] + start, self.best[:, rows])
    self.first[:, rows] = np.maximum(first, before)
    runner_up = np.maximum(np.minimum(first, before), second)
    self.second[:, rows] = np.maximum(self.second[:, rows], runner_up)

  def margin(self) -> np.ndarray:
    return self.first.astype(np.float64) - self.second


def _subtract_own(scores: np.ndarray, own: np.ndarray, amount: np.ndarray) -> None:
  """Takes amount [L, rows] off scores [L, rows, k] at the positions own [rows] that there are."""
  rows = np.flatnonzero((own >= 0) & (own < scores.shape[-1]))
  scores[:, rows, own[rows]] -= amount[:, rows].astype(scores.dtype)
