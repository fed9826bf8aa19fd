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

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from het_plugin.system import ranges
from het_plugin.system.ranges import Count

MIN_IMPROVEMENT = 1e-9  # nats; smaller improvements are rounding
SCORE = 'precision_at_1'  # chooses the members of a soup


@ranges.checked
def greedy_ensemble(
  label_log_prob: np.ndarray, *, max_members: Count = 10, replacement: bool = True
) -> tuple[list[int], list[float]]:
  """Selects members until the NLL falls by less than `MIN_IMPROVEMENT`.

      >>> import numpy as np
      >>> from het_plugin.measures import greedy_ensemble
      >>> log_prob = np.log([[0.9, 0.2], [0.2, 0.9], [0.3, 0.3]])  # C = 3 candidates, N = 2
      >>> members, nll = greedy_ensemble.greedy_ensemble(log_prob)
      >>> members
      [0, 1]

  Args:
    label_log_prob: float [C, N], log p(y_n) of each candidate, without NaNs; -inf is p = 0.
    max_members: largest number of members, repetitions included.
    replacement: whether a candidate may be added again, which gives members weights.

  Returns:
    The candidates in the order in which they were added, at least one, and the validation NLL after
    each, in nats per example. Among equally good candidates, the first is taken.
  """
  label_log_prob = label_log_prob.astype(np.float64)
  total = np.full(label_log_prob.shape[1], -np.inf)
  members = []
  path = []
  while len(members) < max_members:
    nll = np.log(len(members) + 1) - np.logaddexp(total, label_log_prob).mean(axis=1)
    if not replacement:
      nll[members] = np.nan
      if np.isnan(nll).all():
        break
    best = int(np.nanargmin(nll))
    # `not <`, so that an NLL that stays infinite also ends the loop
    if path and not nll[best] < path[-1] - MIN_IMPROVEMENT:
      break
    total = np.logaddexp(total, label_log_prob[best])
    members.append(best)
    path.append(float(nll[best]))
  return members, path


def mixture_log_prob(log_probs: Iterable[np.ndarray], weights: np.ndarray) -> np.ndarray:
  """log sum_c w_c p_c, float64 [E, N, K], of mixtures with weights [E, C]; the candidates' log p
  [N, K] are read once, one after another.
  """
  mixtures = None  # until K is known
  for log_prob, shares in zip(log_probs, weights.T, strict=True):
    if mixtures is None:
      mixtures = np.full((len(weights), *log_prob.shape), -np.inf)
    for mixture, share in zip(mixtures, shares, strict=True):
      if share:
        np.logaddexp(mixture, log_prob + np.log(share), out=mixture)
  if mixtures is None:
    raise ValueError('a mixture needs at least one candidate')
  return mixtures


def greedy_soup(
  alone: Sequence[Mapping[str, float]], try_with: Callable[[list[int]], float]
) -> list[int]:
  """The members of a greedy soup, the best candidate first.

  Candidates are tried from the best to the worst by precision@1, equal ones by NLL. One stays in if
  the precision@1 of the average with it is at least as high as without. `alone` has both values of
  each candidate, and `try_with` maps candidates to the precision@1 of their average.
  """
  order = sorted(range(len(alone)), key=lambda i: (-alone[i][SCORE], alone[i]['nll']))
  members = order[:1]
  best = alone[order[0]][SCORE]
  for candidate in order[1:]:
    if (score := try_with([*members, candidate])) >= best:
      members = [*members, candidate]
      best = score
  return members
