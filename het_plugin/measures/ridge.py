"""Ridge regression onto {-1, 1} class targets, in closed form, for many l2 strengths at once.

The fit is in float64. The class with the highest score is found in float32, and in float64 where
rounding could change it.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

Strengths = Sequence[float] | np.ndarray  # [L], of l2

BIAS_FEATURE = 100.0  # value of the constant feature; large, so that l2 hardly changes the bias
STD_OFFSET = 1e-5
_BLOCK_ROWS = 4096  # examples that are read at once
_SCORES = 1 << 21  # float32 scores that are held at once; 8 MiB should fit the cache
_SKELETON_ERROR = 1e-5  # of a combined curve, relative
_ROUNDING = 2.0**-17  # of a float32 score, relative to its terms; D may be up to 10^5

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
# 1 / (E + l2) are nearly linear combinations of m of them, sum_i a_i / (E + l2_i), with m about
# half of L; a pivoted QR decomposition picks these. Scores are computed in float32 at m strengths
# and combined for the others. They are off by about u |x| sum_i |a_i| |W(l2_i)|, u = sqrt(D) 2^-24
# (rounding errors add up like independent ones; Higham and Mary 2019,
# https://doi.org/10.1137/18M1226312). Where the two best classes are closer, float64 decides.


@dataclasses.dataclass(frozen=True, eq=False)
class Ridge:
  """A decomposed set of examples: fits, predicts and leaves one out at any l2."""

  num_rows: int  # N
  classes: np.ndarray  # int64 [K], the labels seen, ascending
  counts: np.ndarray  # int64 [K], number of examples of each class
  # float64 [D]; a feature is used as (x - mean) / scale. A feature that is constant over the
  # set has scale infinity, so that it is 0 for every x and not an amplified rounding error
  mean: np.ndarray
  scale: np.ndarray
  eigenvalues: np.ndarray  # float64 [r], E, the nonzero ones of the smaller Gram matrix, ascending
  basis: np.ndarray  # float64 [D, r], V; orthonormal columns
  rhs: np.ndarray  # float64 [r, K], V^T X^T Y

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

  def predict(self, x: np.ndarray, l2s: Strengths) -> np.ndarray:
    """Labels with the highest score at L strengths, int64 [L, M], for features x [M, D]; among
    equal scores, the smallest label.
    """
    return self.classes[self._best_classes(x, l2s)]

  def leave_one_out(self, x: np.ndarray, y: np.ndarray, l2s: Strengths) -> np.ndarray:
    """Predictions for examples x [M, D] of the set with labels y [M], each by the model refitted
    without it, int64 [L, M].
    """
    own = np.searchsorted(self.classes, y)
    return self.classes[self._best_classes(x, l2s, (own, self.leverage(x, l2s)))]

  def leverage(self, x: np.ndarray, l2s: Strengths) -> np.ndarray:
    """H_ii of examples x [M, D] of the set, float64 [L, M]."""
    squares = (self._standardised(x) @ self.basis) ** 2  # [M, r]
    strengths = np.asarray(l2s, np.float64)
    bias = 1 / (self.num_rows + strengths / BIAS_FEATURE**2)  # [L]
    return (1 / (self.eigenvalues + strengths[:, None])) @ squares.T + bias[:, None]

  def _standardised(self, x: np.ndarray) -> np.ndarray:
    z = x - self.mean
    z *= 1 / self.scale
    return z

  def _best_classes(
    self,
    x: np.ndarray,
    l2s: Strengths,
    left_out: tuple[np.ndarray, np.ndarray] | None = None,
  ) -> np.ndarray:
    """Positions in `classes` of the highest scores, int64 [L, M].

    With `left_out`, (own [M], hat [L, M]), 2 hat is subtracted from the scores of the classes own.
    """
    strengths = np.asarray(l2s, np.float64)
    curves = 1 / (self.eigenvalues + strengths[:, None])  # [L, r]
    bias = np.stack([self.bias(l2) for l2 in strengths])  # [L, K]
    picked, combine = _skeleton(curves * np.linalg.norm(self.rhs, axis=1))
    weights = np.stack([self.weights(l2).astype(np.float32) for l2 in strengths[picked]], axis=-1)
    norms = np.linalg.norm(weights, axis=0).max(axis=0)  # [m], of weights [D, K, m]
    error = _ROUNDING * (np.abs(combine) @ norms)  # [L], of a score where |x| = 1
    mix = combine.astype(np.float32)
    bias32 = bias.astype(np.float32)
    best = np.empty((len(strengths), len(x)), np.int64)
    doubtful = np.empty(best.shape, bool)
    for rows in blocks(len(x), max(128, _SCORES // bias.size)):
      z = self._standardised(x[rows])
      scores = z.astype(np.float32) @ weights.reshape(len(weights), -1)  # [rows, K m]
      scores = (mix @ scores.reshape(-1, len(picked)).T).reshape(len(strengths), len(z), -1)
      scores += bias32[:, None]  # [L, rows, K]
      if left_out is not None:
        own, hat = left_out
        scores[:, np.arange(len(z)), own[rows]] -= 2 * hat[:, rows]
      best[:, rows], lead = _best_and_lead(scores)
      doubtful[:, rows] = lead <= error[:, None] * np.linalg.norm(z, axis=1) + _ROUNDING

    for part in blocks(len(x), _BLOCK_ROWS):
      here = part.start + np.flatnonzero(doubtful[:, part].any(axis=0))
      projected = self._standardised(x[here]) @ self.basis  # [rows, r]
      for i in np.flatnonzero(doubtful[:, here].any(axis=1)):
        some = np.flatnonzero(doubtful[i, here])
        scores = projected[some] @ (curves[i, :, None] * self.rhs) + bias[i]
        if left_out is not None:
          own, hat = left_out
          scores[np.arange(len(some)), own[here[some]]] -= 2 * hat[i, here[some]]
        best[i, here[some]] = scores.argmax(axis=1)
    return best


def decompose(x: np.ndarray, y: np.ndarray) -> Ridge:
  """Standardises and decomposes examples x, any float [N, D], N >= 1, with labels y, int [N].

  Where N >= D, x is read in blocks and may be memory-mapped.
  """
  import scipy.sparse  # here, so that a training starts sooner

  classes, ids, counts = np.unique(y, return_inverse=True, return_counts=True)
  one_hot = scipy.sparse.csc_array((np.ones(len(y)), (ids, np.arange(len(y)))))  # [K, N]
  if x.shape[0] >= x.shape[1]:
    mean, constant = _moments(x)
    products = np.zeros((len(mean), len(mean)))
    sums = np.zeros((len(classes), len(mean)))
    for rows in blocks(len(x), _BLOCK_ROWS):
      z = x[rows] - mean
      products += z.T @ z
      sums += one_hot[:, rows] @ z
    scale = _scale(np.sqrt(np.diag(products) / len(x)), constant)
    eigenvalues, basis = _eigh_range(products / scale / scale[:, None])
    rhs = 2 * (basis.T @ (sums / scale).T)
  else:
    mean, scale = standardisation(x)
    z = (x - mean) / scale
    eigenvalues, u = _eigh_range(z @ z.T)
    basis = z.T @ (u / np.sqrt(eigenvalues))
    rhs = 2 * np.sqrt(eigenvalues)[:, None] * (one_hot @ u).T
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
  """Mean, float64 [D], and which features are constant, bool [D]."""
  return x.mean(axis=0, dtype=np.float64), x.min(axis=0) == x.max(axis=0)


def _scale(deviation: np.ndarray, constant: np.ndarray) -> np.ndarray:
  return np.where(constant, np.inf, deviation + STD_OFFSET)


def _eigh_range(products: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Eigenvalues [r] that are not 0 up to rounding, ascending, and their vectors [n, r].

  Null directions (there is one if N < D, as X is centred) add nothing to exact scores, but their
  rounding errors, divided by a small l2, would exceed the residuals of well fitted examples.
  """
  eigenvalues, vectors = np.linalg.eigh(products)
  kept = eigenvalues > eigenvalues[-1] * len(products) * np.finfo(np.float64).eps
  return eigenvalues[kept], vectors[:, kept]


def _skeleton(curves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """m rows of curves [L, r], int [m], and coefficients [L, m] that combine them to all rows."""
  import scipy.linalg.interpolative  # here, so that a training starts sooner

  lengths = np.linalg.norm(curves, axis=1)  # [L]
  if not lengths.all():  # all features are constant, or all classes have the same mean
    return np.zeros(1, int), np.ones((len(curves), 1))
  scaled = np.asfortranarray((curves / lengths[:, None]).T)
  m, order, rest = scipy.linalg.interpolative.interp_decomp(scaled, _SKELETON_ERROR, rand=False)
  combine = scipy.linalg.interpolative.reconstruct_interp_matrix(order, rest).T  # [L, m]
  return order[:m], combine * lengths[:, None] / lengths[order[:m]]


def _best_and_lead(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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
