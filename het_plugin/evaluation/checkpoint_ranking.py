"""Candidates by a cheap proxy of their accuracy, and how far the proxy can be trusted."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Agreement:
  """A proxy against the accuracy that it stands for.

  Attributes:
    kendall_tau: tau-b over the candidates, in [-1, 1]; None where it is undefined: fewer than two
      candidates, or all equal in one of the two.
    regret: by number of candidates kept, 1 .. C: the best accuracy of all less the best of those
      kept.
  """

  kendall_tau: float | None
  regret: tuple[float, ...]


def best_first(proxy: Sequence[float]) -> list[int]:
  """Candidates from the highest proxy to the lowest; of equal ones, the first comes first."""
  return [int(i) for i in np.argsort(-np.asarray(proxy), kind='stable')]


def agreement(proxy: Sequence[float], accuracy: Sequence[float]) -> Agreement:
  """How well the order of `proxy` [C] is that of `accuracy` [C], both finite, C >= 1."""
  import scipy.stats  # takes a second or more

  accuracy = np.asarray(accuracy)
  kept = np.maximum.accumulate(accuracy[best_first(proxy)])
  # scipy has no tau for a constant either, and says NaN
  tau = scipy.stats.kendalltau(proxy, accuracy).statistic if len(accuracy) > 1 else np.nan
  return Agreement(
    kendall_tau=None if np.isnan(tau) else float(tau),
    regret=tuple(float(x) for x in accuracy.max() - kept),
  )
