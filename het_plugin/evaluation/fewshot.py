"""Few-shot linear evaluation: how well a linear map of a representation separates few examples.

The protocol, in full (that of big_vision's evaluators/fewshot_lsr.py; what differs is marked *):

1. Draw. For each class c of the training split, sort its examples by example id and give the j-th
   the j-th raw 64-bit output of `np.random.PCG64(np.random.SeedSequence([seed, c]))`; the class
   contributes the `shots` examples of smallest output, or all it has if fewer. So a subset depends
   on seed, class and ids alone (*), not on the order in which hosts or batches delivered the rows,
   and for one seed the 1-shot subset lies within the 5-shot one.
2. Fit. Features are standardised by the mean and (population deviation + 1e-5) of the subset; a
   feature constant over the subset is dropped (*). Ridge regression onto targets 1 (own class) and
   -1 with a constant feature of value 100 (`ridge.py`), in float64 (*), over the classes that have
   at least one example (*).
3. l2. 'loo' (*): the value of `L2_GRID` = 2^-10 .. 2^19 with the highest leave-one-out accuracy on
   the subset, of equal ones the largest. The standardisation is not redone per left-out row. Rows
   that are their class's only example are not left out: without it no model knows the class. If
   no others remain (1 shot), l2 = 2^10, big_vision's constant. Of more than `MAX_LEFT_OUT`
   remaining rows, ordered by class and then as drawn, every n-th is left out, n the least that
   keeps within. A number is used as given. The test split is never looked at to choose.
4. Score. argmax of the regression outputs (of equal ones the smallest label); accuracy over all
   test rows, where rows of a class without any training example are wrong by necessity.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from het_plugin.evaluation import ridge

L2_GRID = tuple(2.0**k for k in range(-10, 20))
BIG_VISION_L2 = 2.0**10
MAX_LEFT_OUT = 4096  # an accuracy over as many is known to 0.008; N x K x r x 30 is long for all


@dataclasses.dataclass(frozen=True)
class FewShotResult:
  """Accuracies at one number of shots.

  Attributes:
    shots: examples a class.
    accuracies: test accuracy in [0, 1] for each seed.
    l2: strength used for each seed.
    classes_short: classes of the training split with fewer examples than `shots`.
    test_unseen: test rows whose class has no training example at all.
  """

  shots: int
  accuracies: tuple[float, ...]
  l2: tuple[float, ...]
  classes_short: int
  test_unseen: int

  @property
  def mean(self) -> float:
    """Mean accuracy over seeds."""
    return float(np.mean(self.accuracies))

  @property
  def stderr(self) -> float | None:
    """Standard error of `mean` over seeds (deviation with n - 1); None for a single seed."""
    n = len(self.accuracies)
    return float(np.std(self.accuracies, ddof=1) / np.sqrt(n)) if n > 1 else None


def few_shot(
  train_x: np.ndarray,
  train_y: np.ndarray,
  test_x: np.ndarray,
  test_y: np.ndarray,
  *,
  train_index: np.ndarray | None = None,
  shots: Sequence[int] = (1, 5, 10, 25),
  seeds: Sequence[int] = (0, 1, 2),
  l2: float | Literal['loo'] = 'loo',
) -> dict[int, FewShotResult]:
  """Runs the protocol above.

  Args:
    train_x: float [N, D], the split that subsets are drawn from.
    train_y: int [N], labels >= 0; they need be neither dense nor all present.
    test_x: float [M, D].
    test_y: int [M].
    train_index: int [N], distinct example ids >= 0; default, the row numbers.
    shots: examples a class, each >= 1.
    seeds: one subset is drawn for each, each >= 0.
    l2: 'loo' or a strength > 0.

  Returns:
    {shots: FewShotResult}.

  Raises:
    ValueError: arrays that do not fit together, are empty or not finite, or settings out of range.
  """
  _check_arrays('train', train_x, train_y)
  _check_arrays('test', test_x, test_y)
  if train_x.shape[1] != test_x.shape[1]:
    raise ValueError(
      f'train_x has {train_x.shape[1]} features and test_x {test_x.shape[1]}; they must be equal.'
    )
  if train_index is None:
    train_index = np.arange(len(train_y))
  if len(np.unique(train_index)) != len(train_y):
    raise ValueError(
      f'train_index must give {len(train_y)} distinct example ids, one a row of train_x; '
      f'it has {len(np.unique(train_index))}.'
    )
  check_settings(shots, seeds, l2)

  classes, counts = np.unique(train_y, return_counts=True)
  draws = {seed: draw_order(train_y, train_index, seed) for seed in seeds}
  results = {}
  for num_shots in shots:
    accuracies, strengths = [], []
    for seed in seeds:
      subset = np.concatenate([rows[:num_shots] for rows in draws[seed]])
      model = ridge.decompose(train_x[subset], train_y[subset])
      strength = leave_one_out_l2(model) if l2 == 'loo' else float(l2)
      accuracies.append(float(np.mean(model.predict(test_x, strength) == test_y)))
      strengths.append(strength)
    results[num_shots] = FewShotResult(
      shots=num_shots,
      accuracies=tuple(accuracies),
      l2=tuple(strengths),
      classes_short=int(np.sum(counts < num_shots)),
      test_unseen=int(np.sum(~np.isin(test_y, classes))),
    )
  return results


def draw_order(labels: np.ndarray, index: np.ndarray, seed: int) -> list[np.ndarray]:
  """Rows of each class (ascending by label) in the order in which `seed` draws them (step 1)."""
  by_class = np.lexsort((index, labels))
  starts = np.flatnonzero(np.diff(labels[by_class])) + 1
  orders = []
  for rows in np.split(by_class, starts):
    # The raw stream: numpy keeps it across versions, which it does not promise for permutation().
    bits = np.random.PCG64(np.random.SeedSequence([seed, int(labels[rows[0]])]))
    orders.append(rows[np.argsort(bits.random_raw(len(rows)), kind='stable')])
  return orders


def leave_one_out_l2(model: ridge.Ridge, grid: Sequence[float] = L2_GRID) -> float:
  """The strength of the highest leave-one-out accuracy; see step 3 of the protocol."""
  rows = np.flatnonzero(model.counts[model.label_ids] > 1)
  if not rows.size:
    return BIG_VISION_L2
  rows = rows[:: -(-len(rows) // MAX_LEFT_OUT)]

  def num_correct(l2: float) -> int:
    predicted = model.leave_one_out(l2, rows).argmax(axis=1)
    return int(np.sum(predicted == model.label_ids[rows]))

  return max(grid, key=lambda l2: (num_correct(l2), l2))


def check_settings(shots: Sequence[int], seeds: Sequence[int], l2: float | str) -> None:
  """Raises ValueError, in one sentence, for settings that `few_shot` cannot use."""
  if not shots or min(shots) < 1:
    raise ValueError(f'shots={tuple(shots)} must be one or more numbers >= 1.')
  if not seeds or min(seeds) < 0:
    raise ValueError(f'seeds={tuple(seeds)} must be one or more numbers >= 0.')
  if l2 != 'loo' and (isinstance(l2, str) or not 0 < l2 < np.inf):
    raise ValueError(f"l2={l2!r} must be 'loo' or a finite number > 0.")


def _check_arrays(split: str, x: np.ndarray, y: np.ndarray) -> None:
  if x.ndim != 2 or y.shape != x.shape[:1]:
    raise ValueError(
      f'{split}_x must be [N, D] and {split}_y [N]; they are {list(x.shape)} and {list(y.shape)}.'
    )
  if not x.size:
    raise ValueError(f'{split}_x is empty: {list(x.shape)}.')
  if not np.issubdtype(y.dtype, np.integer) or y.min() < 0:
    raise ValueError(
      f'{split}_y must hold integer labels >= 0; it has dtype {y.dtype}, min {y.min()}.'
    )
  if not np.isfinite(x).all():
    bad = int(np.sum(~np.isfinite(x).all(axis=1)))
    raise ValueError(
      f'{split}_x has {bad} rows that are not finite; few-shot needs finite features.'
    )
