"""Metrics of predictions on the labels of several people, from log-probabilities [N, K].

soft-label NLL   -sum_k t_k log p_k, with t the shares of annotators (Peterson et al. 2019,
                 https://arxiv.org/abs/1908.07086, CIFAR-10H)
disagreement     Spearman's rank correlation of the entropy of p and the entropy of t
selective        accuracy of the share `coverage` of examples with the largest confidence
                 (Geifman and El-Yaniv 2017, https://arxiv.org/abs/1705.08500)
class-wise ECE   mean over classes k of the ECE of p_k for the event y = k, 15 bins of equal width
                 (Kull et al. 2019, https://arxiv.org/abs/1910.12656)
"""

import numpy as np
from scipy import special, stats

from het_plugin.evaluation import uncertainty


def soft_label_nll(log_prob: np.ndarray, shares: np.ndarray) -> np.ndarray:
  """Cross-entropy of each example, float64 [N], nats.

  Args:
    log_prob: [N, K].
    shares: [N, K] shares of the annotators, or their counts.
  """
  shares = shares / shares.sum(axis=1, keepdims=True)
  return -np.where(shares > 0, shares * log_prob.astype(np.float64), 0.0).sum(axis=1)


def disagreement_correlation(log_prob: np.ndarray, shares: np.ndarray) -> float:
  """Rank correlation of the entropies of model and people; NaN if one of them is constant."""
  shares = shares / shares.sum(axis=1, keepdims=True)
  entropy = special.entr(np.exp(log_prob.astype(np.float64))).sum(axis=1)
  return float(stats.spearmanr(entropy, special.entr(shares).sum(axis=1)).statistic)


def selective_accuracy(log_prob: np.ndarray, label: np.ndarray, coverage: float) -> float:
  """Accuracy of the most confident examples; equal confidences count as in a random order.

  Args:
    log_prob: [N, K].
    label: int [N].
    coverage: share of the examples that are answered, in (0, 1].

  Raises:
    ValueError: coverage is out of range.
  """
  if not 0 < coverage <= 1:
    raise ValueError(f'coverage={coverage} must be in (0, 1]')
  risk = uncertainty.risk_coverage(log_prob.max(axis=1), log_prob.argmax(axis=1) == label)
  return float(1.0 - risk[int(np.ceil(coverage * len(risk))) - 1])


def classwise_ece(log_prob: np.ndarray, label: np.ndarray) -> float:
  """Class-wise expected calibration error."""
  p = np.exp(log_prob.astype(np.float64))
  return float(
    np.mean([uncertainty.reliability(p[:, k], label == k).ece for k in range(p.shape[1])])
  )
