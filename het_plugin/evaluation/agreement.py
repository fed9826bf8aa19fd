"""Metrics of predictions on the labels of several people, from log-probabilities [N, K].

soft-label NLL   -sum_k t_k log p_k, with t the shares of annotators (Peterson et al. 2019,
                 https://arxiv.org/abs/1908.07086, CIFAR-10H)
disagreement     Spearman's rank correlation of the entropy of p and the entropy of t
selective        accuracy of the share `COVERAGE` of examples with the largest confidence
                 (Geifman and El-Yaniv 2017, https://arxiv.org/abs/1705.08500); equal confidences
                 count as in a random order
class-wise ECE   mean over classes k of the ECE of p_k for the event y = k, 15 bins of equal width
                 (Kull et al. 2019, https://arxiv.org/abs/1910.12656)
"""

import numpy as np
from scipy import special, stats

from het_plugin.evaluation import uncertainty
from het_plugin.evaluation.predictions import Predictions

COVERAGE = 0.8


def summarize(predictions: Predictions, ood_log_prob: np.ndarray | None = None) -> dict[str, float]:
  """All metrics of this file by name, of a file of predictions or of an estimator's.

  Args:
    predictions: predictions of a softmax; an example's labels are the votes of its annotators.
    ood_log_prob: [M, K] of examples from another distribution; None leaves out `ood_auroc`.

  Returns:
    'soft_label_nll', 'disagreement_correlation' (only where an example has several labels),
    'correctness_auroc' (that a right answer is more confident than a wrong one),
    'selective_accuracy' at coverage 0.8, 'classwise_ece', and 'ood_auroc' (that an example is more
    confident than one of another distribution). Right is the class with the most votes. An AUROC is
    NaN if there is nothing to tell apart, as where every answer is right.
  """
  if predictions.link != 'softmax':
    raise ValueError('metrics on the votes of annotators need predictions of a softmax')
  log_prob, parts = predictions.log_prob, []
  for block in uncertainty.blocks(predictions):  # counts are twice as large as predictions
    counts = vote_counts(block)
    nll = soft_label_nll(block.log_prob, counts)
    parts.append((nll, counts.argmax(axis=1), *_entropies(block.log_prob, counts)))
  nll, label, *entropies = map(np.concatenate, zip(*parts, strict=True))
  top, correct = log_prob.max(axis=1), log_prob.argmax(axis=1) == label
  found = {'soft_label_nll': float(nll.mean())}
  if predictions.labels.shape[1] > 1:
    found['disagreement_correlation'] = float(stats.spearmanr(*entropies).statistic)
  found['correctness_auroc'] = uncertainty.auroc(top[correct], top[~correct])
  risk = uncertainty.risk_coverage(top, correct)
  found['selective_accuracy'] = float(1.0 - risk[int(np.ceil(COVERAGE * len(risk))) - 1])
  found['classwise_ece'] = classwise_ece(log_prob, label)
  if ood_log_prob is not None:
    found['ood_auroc'] = uncertainty.auroc(top, ood_log_prob.max(axis=1))
  return {name: np.nan if value is None else value for name, value in found.items()}


def vote_counts(predictions: Predictions) -> np.ndarray:
  """Votes for each class, float64 [N, K]."""
  counts = np.zeros(predictions.log_prob.shape)
  row, column = np.nonzero(predictions.labels >= 0)
  np.add.at(counts, (row, predictions.labels[row, column]), 1.0)
  return counts


def soft_label_nll(log_prob: np.ndarray, shares: np.ndarray) -> np.ndarray:
  """Cross-entropy of each example in nats, float64 [N], from log p and shares or counts [N, K]."""
  shares = shares / shares.sum(axis=1, keepdims=True)
  return -np.where(shares > 0, shares * log_prob.astype(np.float64), 0.0).sum(axis=1)


def _entropies(log_prob: np.ndarray, shares: np.ndarray) -> list[np.ndarray]:
  """Entropies [N] of the model and of the people."""
  shares = shares / shares.sum(axis=1, keepdims=True)
  probability = np.exp(log_prob.astype(np.float64))
  # People with the same votes for other classes have ties, which rounding would break at random.
  return [special.entr(x).sum(axis=1).round(9) for x in (probability, shares)]


def classwise_ece(log_prob: np.ndarray, label: np.ndarray) -> float:
  """Class-wise expected calibration error, from log_prob [N, K] and label int [N]."""
  columns = (np.exp(column.astype(np.float64)) for column in log_prob.T)
  return float(np.mean([uncertainty.reliability(p, label == k).ece for k, p in enumerate(columns)]))
