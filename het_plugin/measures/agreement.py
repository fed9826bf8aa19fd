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

import dataclasses
from typing import Any

import numpy as np
from scipy import special, stats

from het_plugin.measures import uncertainty, votes

COVERAGE = 0.8


@dataclasses.dataclass(frozen=True, eq=False)
class AgreementScores:
  """What `summarize` needs of N examples. The parts of a split are joined by `Parts`."""

  soft_label_nll: np.ndarray  # float64 [N], nats
  confidence: np.ndarray  # float [N], log p of the most probable class
  right: np.ndarray  # float64 [N], whether that class has the most votes; less where there are ties
  entropy: np.ndarray  # float64 [N], nats, of the model
  entropy_of_people: np.ndarray  # the same of the votes
  bins: np.ndarray  # float64 [3, K, 15]: number, sum of p_k and number of y = k, by bins of p_k


def score_examples(
  log_prob: np.ndarray, labels: np.ndarray, label_weight: np.ndarray | None = None
) -> AgreementScores:
  """The scores of examples.

  Args:
    log_prob: float [N, K], log p(k | x) of a softmax, at most 0.
    labels: int [N, L], the votes of an example's annotators, padded with -1.
    label_weight: float [N, L], the share of each label; None for equal ones.
  """
  num_classes = log_prob.shape[1]
  parts = []
  bins = np.zeros((3, num_classes, uncertainty.NUM_BINS))
  for rows, log_p in uncertainty.blocks(log_prob):
    weight = None if label_weight is None else label_weight[rows]
    t = votes.shares(labels[rows], num_classes, weight)  # [n, K]
    majority = votes.majority_shares(t)  # [n, K]
    p = np.exp(log_p)
    # People with the same votes for other classes have ties, which rounding would break at random.
    entropies = [special.entr(x).sum(axis=1).round(9) for x in (p, t)]
    right = (votes.top_shares(log_p) * majority).sum(axis=1)
    parts.append((soft_label_nll(log_p, t), log_p.max(axis=1), right, *entropies))
    bins += _class_bins(p, majority)
  nll, confidence, right, entropy, of_people = map(np.concatenate, zip(*parts, strict=True))
  return AgreementScores(nll, confidence, right, entropy, of_people, bins)


class Parts:
  """Joins the scores of the parts of a split; their bins are added as they come."""

  def __init__(self):
    self._columns: list[list[Any]] = []
    self._bins: Any = 0.0

  def add(self, part: AgreementScores) -> None:
    *columns, bins = (getattr(part, field.name) for field in dataclasses.fields(part))
    self._columns.append(columns)
    self._bins += bins

  def joined(self) -> AgreementScores | None:
    """The scores of all examples, or None if nothing was added."""
    if not self._columns:
      return None
    columns = zip(*self._columns, strict=True)
    return AgreementScores(*map(np.concatenate, columns), self._bins)


def summarize(scores: AgreementScores, ood_log_prob: np.ndarray | None = None) -> dict[str, float]:
  """All metrics of this file by name.

      >>> import numpy as np
      >>> from het_plugin.measures import agreement
      >>> log_prob, people = np.log([[0.8, 0.2], [0.4, 0.6]]), np.array([[0, 0, 0], [0, 1, 1]])
      >>> scores = agreement.score_examples(log_prob, people)
      >>> round(agreement.summarize(scores)['soft_label_nll'], 3)
      0.435

  Args:
    scores: scores of the examples.
    ood_log_prob: [M, K] of examples from another distribution; None leaves out `ood_auroc`.

  Returns:
    'soft_label_nll', 'disagreement_correlation' (only where people differ on an example),
    'correctness_auroc' (that a right answer is more confident than a wrong one),
    'selective_accuracy' at coverage 0.8, 'classwise_ece', and 'ood_auroc' (that an example is more
    confident than one of another distribution). Right is the class with the most votes; of classes
    with equally many, and of equally probable ones, each counts its share. An AUROC is
    NaN if there is nothing to tell apart, as where every answer is right, and the correlation where
    the model is equally certain of every example.
  """
  top = scores.confidence
  right = scores.right
  found = {'soft_label_nll': float(scores.soft_label_nll.mean())}
  if scores.entropy_of_people.any():
    both = scores.entropy, scores.entropy_of_people
    varies = all(np.ptp(x) > 0 for x in both)  # else scipy warns
    found['disagreement_correlation'] = (
      float(stats.spearmanr(*both).statistic) if varies else np.nan
    )
  found['correctness_auroc'] = uncertainty.auroc(top, top, right, 1.0 - right)
  risk = uncertainty.risk_coverage(top, right)
  found['selective_accuracy'] = float(1.0 - risk[int(np.ceil(COVERAGE * len(risk))) - 1])
  found['classwise_ece'] = _classwise_ece(scores.bins)
  if ood_log_prob is not None:
    found['ood_auroc'] = uncertainty.auroc(top, ood_log_prob.max(axis=1))
  return {name: np.nan if value is None else value for name, value in found.items()}


def soft_label_nll(log_prob: np.ndarray, shares: np.ndarray) -> np.ndarray:
  """Cross-entropy of each example in nats, float64 [N], from log p and `votes.shares` [N, K]."""
  return -(shares * np.where(shares > 0, log_prob.astype(np.float64), 0.0)).sum(axis=1)


def classwise_ece(log_prob: np.ndarray, label: np.ndarray) -> float:
  """Class-wise expected calibration error, from log_prob [N, K] and label int [N]."""
  return _classwise_ece(score_examples(log_prob, label[:, None]).bins)


def _class_bins(p: np.ndarray, majority: np.ndarray) -> np.ndarray:
  """Number, sum of p_k and number of y = k for each class and bin of p [n, K], [3, K, 15].

  `majority` [n, K] is `votes.majority_shares`.
  """
  num_classes = p.shape[1]
  size = num_classes * uncertainty.NUM_BINS
  place = uncertainty.bin_numbers(p) + np.arange(num_classes) * uncertainty.NUM_BINS  # [n, K]
  found = [
    np.bincount(place.ravel(), minlength=size),
    np.bincount(place.ravel(), weights=p.ravel(), minlength=size),
    np.bincount(place.ravel(), weights=majority.ravel(), minlength=size),
  ]
  return np.stack(found).reshape(3, num_classes, uncertainty.NUM_BINS)


def _classwise_ece(bins: np.ndarray) -> float:
  count, confidence, hits = bins
  return float((np.abs(hits - confidence).sum(axis=1) / count.sum(axis=1)).mean())
