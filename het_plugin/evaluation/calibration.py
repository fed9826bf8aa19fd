"""Calibration of confidences: reliability diagrams and their expected calibration error.

The confidence of an example is the probability of its most probable class, which is right or not.
There are N >= 1 examples. Everything is computed in float64.
"""

import dataclasses

import numpy as np

NUM_BINS = 15  # as in `models.metrics`


@dataclasses.dataclass(frozen=True, eq=False)
class Reliability:
  """A reliability diagram: count, mean confidence and accuracy (both NaN where empty), [M]."""

  count: np.ndarray
  confidence: np.ndarray
  accuracy: np.ndarray

  @property
  def ece(self) -> float:
    """Expected calibration error: the gap of confidence and accuracy, averaged with the counts as
    weights (Guo et al. 2017, https://arxiv.org/abs/1706.04599, eq. 3).
    """
    gap = np.where(self.count > 0, np.abs(self.accuracy - self.confidence), 0.0)
    return float((self.count * gap).sum() / self.count.sum())


def reliability(
  confidence: np.ndarray, correct: np.ndarray, num_bins: int = NUM_BINS
) -> Reliability:
  """Bins of equal width: bin m holds the confidences in (m / M, (m + 1) / M], bin 0 also 0.

  Args:
    confidence: any float [N], in [0, 1].
    correct: bool [N].
    num_bins: M.
  """
  confidence = confidence.astype(np.float64)
  bins = np.clip(np.ceil(confidence * num_bins) - 1, 0, num_bins - 1).astype(int)
  return _binned(bins, confidence, correct, num_bins)


def adaptive_reliability(
  confidence: np.ndarray, correct: np.ndarray, num_bins: int = NUM_BINS
) -> Reliability:
  """At most `num_bins` bins, with numbers of examples as equal as ties allow.

  Bin m ends with the confidence of rank ceil(N (m + 1) / M); equal ends are one bin (Nixon et al.
  2019, https://arxiv.org/abs/1904.01685).
  """
  confidence = confidence.astype(np.float64)
  last = np.ceil(len(confidence) * np.arange(1, num_bins + 1) / num_bins).astype(int) - 1
  ends = np.unique(np.sort(confidence)[last])
  return _binned(np.searchsorted(ends, confidence), confidence, correct, len(ends))


def _binned(bins, confidence, correct, num_bins) -> Reliability:
  count = np.bincount(bins, minlength=num_bins)
  sums = (np.bincount(bins, weights=x, minlength=num_bins) for x in (confidence, correct))
  with np.errstate(invalid='ignore'):
    return Reliability(count, *(total / count for total in sums))
