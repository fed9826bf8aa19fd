"""Metrics for seqio's evaluator, which t5x.eval and t5x's infer-eval run on the host.

N examples; targets are their labels, int32 [L] each, padded with -1. Rows without a label, such as
unreadable images, do not count.
"""

from collections.abc import Mapping, Sequence

import numpy as np


def precision(
  targets: Sequence[np.ndarray],
  predictions: Sequence[np.ndarray],
  aux_values: Mapping[str, Sequence[np.ndarray]],
) -> dict[str, float]:
  """How often the most probable class, or one of the five most probable, is among the labels.

  Args:
    targets: N times [L].
    predictions: unused.
    aux_values: from `predict_batch_with_aux`; 'top5' is read, N times [min(5, K)].
  """
  del predictions
  labels, top = np.asarray(targets), np.asarray(aux_values['top5'])
  right = (labels[:, :, None] == top[:, None, :]).any(1)[_counts(labels)]  # [n, 5]
  return {
    'precision_at_1': float(right[:, 0].mean()),
    'precision_in_5': float(right.any(1).mean()),
  }


def likelihood(targets: Sequence[np.ndarray], scores: Sequence[float]) -> dict[str, float]:
  """The mean of -log p(labels | x), from the N scores of `score_batch`."""
  return {'nll': float(-np.asarray(scores)[_counts(np.asarray(targets))].mean())}


def _counts(labels: np.ndarray) -> np.ndarray:
  return (labels >= 0).any(1)
