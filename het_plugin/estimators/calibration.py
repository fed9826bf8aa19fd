"""Calibration of a fitted head on rows that it has not seen, and conformal sets of classes.

    temperature  log p' = log_softmax(a log p)         one a > 0 (Guo et al. 2017,
                                                       https://arxiv.org/abs/1706.04599)
    vector       log p' = log_softmax(a_k log p_k + b_k)
    sets         all classes with 1 - p <= q, with q the quantile of 1 - p(y) over n rows that gives
                 coverage of at least 1 - alpha over exchangeable rows (split conformal prediction,
                 Sadinle et al. 2019, https://arxiv.org/abs/1609.00451)

For an indicator, the log odds of each class replace log p, and the logistic function the softmax.
"""

import dataclasses
from typing import Literal

import numpy as np
from scipy import optimize, special

Method = Literal['temperature', 'vector', 'none']


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
  """Scale and shift of the scores, and the scores for conformal sets.

  Attributes:
    scale: float64 [1] or [K].
    shift: float64 [1] or [K].
    scores: 1 - p(y) of the rows kept for sets, ascending, float64 [n]; empty for an indicator.
  """

  scale: np.ndarray
  shift: np.ndarray
  scores: np.ndarray

  def apply(self, scores: np.ndarray, link: str) -> np.ndarray:
    """log p (softmax) or log odds (sigmoid) [N, K], calibrated; of the same type as `scores`."""
    scaled = scores * self.scale + self.shift
    if link == 'softmax':
      scaled = special.log_softmax(scaled, axis=1)
    return scaled.astype(scores.dtype)


def fit_scaling(scores: np.ndarray, shares: np.ndarray, link: str, method: Method):
  """Scale and shift that minimise the NLL, from scores [N, K] (log p or log odds) and the
  distribution of labels [N, K] (`Targets.distribution`).
  """
  width = scores.shape[1] if method == 'vector' else 1
  if method == 'none':
    return np.ones(1), np.zeros(1)
  scores = scores.astype(np.float64)

  def unpack(theta):
    return np.exp(theta[:width]), theta[width:] if method == 'vector' else np.zeros(1)

  def loss(theta):
    scale, shift = unpack(theta)
    u = scores * scale + shift
    if link == 'softmax':
      gap = special.softmax(u, axis=1) - shares  # [N, K]
      value = -(shares * special.log_softmax(u, axis=1)).sum() / len(u)
    else:
      gap = special.expit(u) - shares
      value = (np.logaddexp(0, u) - shares * u).sum() / len(u)
    by_scale = (gap * scores * scale).sum(axis=0) / len(u)
    if method == 'temperature':
      return value, by_scale.sum(keepdims=True)
    return value, np.concatenate([by_scale, gap.sum(axis=0) / len(u)])

  start = np.zeros(2 * width if method == 'vector' else 1)
  return unpack(optimize.minimize(loss, start, jac=True, method='L-BFGS-B').x)


def threshold(calibration: Calibration, alpha: float) -> float:
  """The largest 1 - p of a class in a set."""
  count = len(calibration.scores)
  rank = int(np.ceil((count + 1) * (1 - alpha)))
  if rank > count:
    raise ValueError(
      f'alpha={alpha} needs at least {int(np.ceil(1 / alpha)) - 1} rows kept for sets; calibrate '
      f'has kept {count}'
    )
  return calibration.scores[rank - 1]
