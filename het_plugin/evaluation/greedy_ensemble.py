"""Greedy selection of an ensemble's members on a validation set.

Caruana et al. 2004, "Ensemble selection from libraries of models" (ICML 2004), with cross-entropy
as the loss, as in Mustafa et al. 2020, "Deep ensembles for low-data transfer learning"
(https://arxiv.org/abs/2010.06866). An ensemble predicts the average of its members' probabilities;
starting with none, the candidate that makes the validation NLL smallest is added, repeatedly.

The NLL of an ensemble needs only each member's log-probability of the label, L [C, N]: with
T_n = log sum over the M members of p(y_n), the candidate c makes it

    NLL_c = log(M + 1) - mean_n logaddexp(T_n, L_cn),

so a step takes O(C N), independent of the number of classes.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np

MIN_IMPROVEMENT = 1e-9  # nats; less than this is rounding


@dataclasses.dataclass(frozen=True)
class GreedyEnsemble:
  """The selected members.

  Attributes:
    members: candidates in the order in which they were added; one may occur several times.
    nll: validation NLL after each was added, nats per example, descending.
  """

  members: tuple[int, ...]
  nll: tuple[float, ...]

  def weights(self, num_candidates: int) -> np.ndarray:
    """Shares of the candidates, float64 [C], which sum to 1."""
    return np.bincount(self.members, minlength=num_candidates) / len(self.members)


def greedy_ensemble(
  label_log_prob: np.ndarray, *, max_members: int = 10, replacement: bool = True
) -> GreedyEnsemble:
  """Selects members until the NLL falls by less than `MIN_IMPROVEMENT`.

  Args:
    label_log_prob: float [C, N], log p(y_n) of each candidate; -inf is p = 0.
    max_members: largest number of members, repetitions included; at least 1.
    replacement: whether a candidate may be added again, which gives members weights.

  Returns:
    The members; among equally good candidates, the first is taken. There is at least one member,
    even if the NLL of every candidate is infinite.

  Raises:
    ValueError: no candidates or examples, NaNs, or max_members < 1.
  """
  if label_log_prob.ndim != 2 or not label_log_prob.size:
    raise ValueError(
      f'label_log_prob must be [C, N], not empty; it is {list(label_log_prob.shape)}'
    )
  if np.isnan(label_log_prob).any():
    raise ValueError(f'label_log_prob has {int(np.isnan(label_log_prob).sum())} NaNs')
  if max_members < 1:
    raise ValueError(f'max_members={max_members} must be at least 1')
  label_log_prob = label_log_prob.astype(np.float64)
  total = np.full(label_log_prob.shape[1], -np.inf)
  allowed = np.ones(len(label_log_prob), bool)
  members, path = [], []
  while len(members) < max_members and allowed.any():
    candidates = np.flatnonzero(allowed)
    nll = [np.log(len(members) + 1) - _mean_log_sum(total, label_log_prob[c]) for c in candidates]
    best = int(np.argmin(nll))
    # `not <`, so that an NLL that stays infinite stops too
    if path and not nll[best] < path[-1] - MIN_IMPROVEMENT:
      break
    member = int(candidates[best])
    total = np.logaddexp(total, label_log_prob[member])
    allowed[member] = replacement
    members.append(member)
    path.append(float(nll[best]))
  return GreedyEnsemble(tuple(members), tuple(path))


def mixture_log_prob(log_probs: Iterable[np.ndarray], weights: np.ndarray) -> np.ndarray:
  """log sum_c w_c p_c for several mixtures of the candidates' probabilities.

  Args:
    log_probs: float [N, K] of each candidate; read once, one after another.
    weights: float [E, C], one row per mixture.

  Returns:
    float64 [E, N, K].
  """
  mixtures = None
  for log_prob, shares in zip(log_probs, weights.T, strict=True):
    if mixtures is None:
      mixtures = np.full((len(weights), *log_prob.shape), -np.inf)
    for mixture, share in zip(mixtures, shares, strict=True):
      if share:
        np.logaddexp(mixture, log_prob + np.log(share), out=mixture)
  return mixtures


def _mean_log_sum(total: np.ndarray, log_prob: np.ndarray) -> float:
  return np.logaddexp(total, log_prob).mean()
