"""One strength for many data sets: V-MoE's rule of the best mean rank, and its variant that leaves
the data set itself out.

The rule (V-MoE's evaluate/fewshot.py, `_find_best_l2_reg`; uncertainty-baselines' fewshot_utils.py,
`select_best_l2_reg` with 'all' and 'leave-self-out') ranks the strengths of each data set by test
accuracy and takes the strength of the highest mean rank. It looks at test splits; the variant for a
data set looks at those of the others only. Theirs ranks equal accuracies by position, so that
larger strengths win ties; here equal accuracies share their mean rank, and of strengths with equal
mean ranks the middle one is taken.
"""

from collections.abc import Hashable, Mapping

import numpy as np


def mean_rank(
  accuracies: Mapping[tuple[str, Hashable], np.ndarray], others: bool
) -> dict[tuple[str, Hashable], int]:
  """Positions of the strengths to take.

  Args:
    accuracies: {(data set, draw): test accuracy at each strength [L]}.
    others: rank by the draws of other data sets only, of which there must be one.

  Returns:
    {(data set, draw): position}, the same for all draws of a data set.
  """
  import scipy.stats  # takes a second, which training without few-shot does not need

  ranks = {key: scipy.stats.rankdata(values) for key, values in accuracies.items()}

  def best(name: str) -> int:
    used = [rank for (other, _), rank in ranks.items() if not (others and other == name)]
    mean = np.mean(used, axis=0)
    leaders = np.flatnonzero(mean == mean.max())
    return int(leaders[len(leaders) // 2])

  chosen = {name: best(name) for name in dict.fromkeys(name for name, _ in accuracies)}
  return {key: chosen[key[0]] for key in accuracies}
