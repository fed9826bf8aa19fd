"""How well a proxy ranks candidates by an accuracy that costs more to measure."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def best_first(proxy: Sequence[float]) -> list[int]:
  """Candidates by descending proxy; equal ones keep their order."""
  return np.argsort(-np.asarray(proxy), kind='stable').tolist()


def rank_agreement(proxy: Sequence[float], accuracy: Sequence[float]) -> dict[str, Any]:
  """How well the order of `proxy` [C] matches that of `accuracy` [C], both finite, C >= 1.

      >>> from het_plugin.measures import ranking
      >>> ranking.rank_agreement([0.3, 0.2, 0.1], [0.5, 0.75, 0.25])['regret']
      [0.25, 0.0, 0.0]

  Returns:
    'kendall_tau': tau-b in [-1, 1]; None if it is undefined, with fewer than two candidates or if
    all are equal in the proxy or the accuracy. 'regret': by number of candidates kept, 1 .. C, the
    best accuracy of all minus the best of those kept.
  """
  import scipy.stats  # slow to import

  reached = np.asarray(accuracy)
  kept = np.maximum.accumulate(reached[best_first(proxy)])
  # scipy's tau of a constant is NaN
  tau = scipy.stats.kendalltau(proxy, reached).statistic if len(reached) > 1 else np.nan
  return {
    'kendall_tau': None if np.isnan(tau) else float(tau),
    'regret': (reached.max() - kept).tolist(),
  }
