"""Few-shot linear evaluation: how well a linear map of a representation separates few examples.

The protocol, in full. Each step has a setting; `PROTOCOLS` has the combinations of public
evaluators by name. Differences from theirs are marked *.

1. Draw (`draw`). For each class c of the training split, sort its examples by example id (*); so a
   subset depends on ids, not on the order in which hosts or batches delivered the rows.
   'random': the j-th example gets the j-th raw 64-bit output of
   `np.random.PCG64(np.random.SeedSequence([seed, c]))`; the class contributes the `shots` examples
   of smallest output, or all it has if fewer. For one seed the 1-shot subset lies within the 5-shot
   one, and the draw of a class does not depend on the other classes. `shots` in (0, 1) are that
   share of each class (*), at least one example: a stratified fraction of the labels.
   'first': the first `shots` examples of each class. The seeds have no effect.
2. Fit (`classifier`). Features are standardised by the mean and (population deviation + 1e-5) of
   the subset; a feature constant over the subset is dropped (*). Over the classes that have at
   least one example (*), and for one or many strengths l2:
   'ridge': regression onto targets 1 (own class) and -1 with a constant feature of value 100, in
   float64 (*) (`ridge.py`);
   'logistic': multinomial logistic regression, scikit-learn's with C = 1 / l2 and at most 150
   iterations of L-BFGS (`logistic.py`).
3. Choose (`l2`). Of `L2_GRID` = 2^-10 .. 2^19
   'loo' (*): the strength of the highest leave-one-out accuracy on the subset, of equal ones the
   largest. Ridge only. The standardisation is not redone per left-out row. A row that is the
   only example of its class is not left out: no model would know the class. If more than
   `MAX_LEFT_OUT` rows remain, ordered by class and then as drawn, every n-th is left out, with the
   smallest n that respects the limit.
   'heldout': the highest accuracy on held-out rows of the training split, of equal ones the
   largest. These are the rows drawn next, as many per class as shots, limited in the same way. They
   use labels beyond the shots.
   'mean_rank': the best mean rank by test accuracy over the draws of all data sets, V-MoE's rule;
   'mean_rank_others': the same over the other data sets only (uncertainty-baselines'
   'leave-self-out'). Both need `few_shot_all`, and both look at test splits. Theirs rank equal
   accuracies by position, so that larger strengths win ties; here equal accuracies share their mean
   rank (*), and of strengths with equal mean ranks the middle one is taken.
   If there is nothing to choose by (1 shot), l2 = 2^10, big_vision's constant. A number is used
   as it is. No other rule looks at test splits.
4. Score. The class of the largest output (of equal ones the smallest label); accuracy over all test
   rows, where rows of a class without any training example are wrong by necessity.

Sources: big_vision's evaluators/fewshot_lsr.py (https://github.com/google-research/big_vision),
V-MoE's evaluate/fewshot.py (https://github.com/google-research/vmoe), uncertainty-baselines'
baselines/jft/fewshot_utils.py (https://github.com/google/uncertainty-baselines).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from het_plugin.measures import logistic, ridge
from het_plugin.system import ranges
from het_plugin.system.ranges import Positive

L2_GRID = tuple(2.0**k for k in range(-10, 20))
BIG_VISION_L2 = 2.0**10
MAX_LEFT_OUT = 4096  # gives an accuracy a standard error of at most 0.008
_BLOCK_ROWS = 8192
MEAN_RANKS = ('mean_rank', 'mean_rank_others')

Classifier = Literal['ridge', 'logistic']
Draw = Literal['random', 'first']
L2 = Positive | Literal['loo', 'heldout', 'mean_rank', 'mean_rank_others']


@dataclasses.dataclass(frozen=True)
class Protocol:
  """Settings of steps 1 to 3."""

  classifier: Classifier = 'ridge'
  draw: Draw = 'random'
  l2: L2 = 'loo'

  def __post_init__(self):
    ranges.check(self)
    if self.classifier == 'logistic' and self.l2 == 'loo':
      raise ValueError(
        "l2='loo' needs classifier='ridge': a logistic regression would be refitted for every row; "
        "choose 'heldout'."
      )


PROTOCOLS = {
  'loo': Protocol(),
  'big_vision': Protocol(l2=BIG_VISION_L2),
  'vmoe': Protocol(l2='mean_rank'),
  'uncertainty_baselines': Protocol('logistic', 'first', 'mean_rank_others'),
}


@dataclasses.dataclass(frozen=True)
class FewShotResult:
  """Accuracies at one number of shots."""

  shots: float  # examples per class, or their share below 1
  accuracies: tuple[float, ...]  # of the test split, in [0, 1], for each draw
  l2: tuple[float, ...]  # strength used for each draw
  classes_short: int  # classes of the training split with fewer examples than `shots`
  test_unseen: int  # test rows whose class has no training example at all
  # bool [draws, M], whether a test row is classified correctly
  correct: np.ndarray = dataclasses.field(compare=False, repr=False)
  # int [M], ids of the test rows, if they have any, and their labels
  test_index: np.ndarray | None = dataclasses.field(default=None, compare=False, repr=False)
  test_y: np.ndarray | None = dataclasses.field(default=None, compare=False, repr=False)

  @property
  def mean(self) -> float:
    """Mean accuracy over draws."""
    return float(np.mean(self.accuracies))

  @property
  def stderr(self) -> float | None:
    """Standard error of `mean` over draws (deviation with n - 1); None for a single draw."""
    n = len(self.accuracies)
    return float(np.std(self.accuracies, ddof=1) / np.sqrt(n)) if n > 1 else None

  def record(self) -> dict[str, Any]:
    """The result for JSON: without `correct`, with mean and standard error."""
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.compare}
    return {'mean': self.mean, 'stderr': self.stderr, **fields}

  def scalars(self) -> dict[str, float]:
    """The metrics of `FewShotAction`: '5shot', and '5shot_stderr' if there is one."""
    found = {f'{self.shots}shot': self.mean, f'{self.shots}shot_stderr': self.stderr}
    return {name: value for name, value in found.items() if value is not None}


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
  """Labelled features."""

  x: Any  # float [N, D], or what gives rows of it when it is indexed
  y: np.ndarray  # int [N], labels >= 0; they need be neither dense nor all present
  index: np.ndarray | None = None  # int [N], distinct ids >= 0; None stands for row numbers


def few_shot(
  train_x: np.ndarray,
  train_y: np.ndarray,
  test_x: np.ndarray,
  test_y: np.ndarray,
  *,
  train_index: np.ndarray | None = None,
  shots: Sequence[float] = (1, 5, 10, 25),
  seeds: Sequence[int] = (0, 1, 2),
  l2: L2 = 'loo',
  classifier: Classifier = 'ridge',
  draw: Draw = 'random',
) -> dict[float, FewShotResult]:
  """Runs the protocol above on one data set.

      >>> from sklearn.datasets import load_iris
      >>> from het_plugin.measures import few_shot
      >>> x, y = load_iris(return_X_y=True)
      >>> results = few_shot(x[::2], y[::2], x[1::2], y[1::2], shots=(10,))
      >>> len(results[10].accuracies), results[10].mean > 0.8
      (3, True)

  Args:
    train_x, train_y, train_index: the split that subsets are drawn from, see `Split`.
    test_x, test_y: float [M, D] and int [M].
    shots: examples per class, each a whole number, or the share of each class in (0, 1).
    seeds: one subset is drawn for each; distinct, each >= 0. If every subset would have all
      examples, there is one.
    l2, classifier, draw: see `Protocol`; l2 is no rule over several data sets.

  Returns:
    {shots: FewShotResult}.

  Raises:
    ValueError: arrays that do not fit together, are empty or not finite, or settings out of range.
  """
  protocol = Protocol(classifier, draw, l2)
  if l2 in MEAN_RANKS:
    raise ValueError(f'l2={l2!r} ranks strengths over several data sets: call few_shot_all.')
  data = {'': (Split(train_x, train_y, train_index), Split(test_x, test_y))}
  return few_shot_all(data, protocol, shots=shots, seeds=seeds)['']


def few_shot_all(
  datasets: Mapping[str, tuple[Split, Split]],
  protocol: Protocol,
  *,
  shots: Sequence[float] = (1, 5, 10, 25),
  seeds: Sequence[int] = (0, 1, 2),
  on_trial: Callable[[], None] = lambda: None,
) -> dict[str, dict[float, FewShotResult]]:
  """Runs the protocol on data sets {name: (training split, test split)}, as `few_shot`; gives
  {name: {shots: FewShotResult}} and calls `on_trial` after each fit.
  """
  check_settings(shots, seeds, protocol.l2, num_datasets=len(datasets))
  for name, (train, test) in datasets.items():
    check_splits(train, test, name)
  used = {
    (name, num_shots): used_seeds(protocol, seeds, num_shots, train.y)
    for name, (train, _) in datasets.items()
    for num_shots in shots
  }
  trials = {}
  for name, (train, test) in datasets.items():
    for seed in seeds:
      drawn = draw_order(train.y, _index(train), seed, protocol.draw)
      for num_shots in shots:
        if seed in used[name, num_shots]:
          trials[name, num_shots, seed] = _trial(train, test, protocol, num_shots, drawn)
          on_trial()
        else:  # in a mean rank all data sets have as many draws
          trials[name, num_shots, seed] = trials[name, num_shots, seeds[0]]
  if protocol.l2 in MEAN_RANKS:
    for num_shots in shots:
      accuracies = {
        (name, seed): trials[name, num_shots, seed].correct.mean(axis=1)
        for name in datasets
        for seed in seeds
      }
      chosen = mean_rank(accuracies, others=protocol.l2 == 'mean_rank_others')
      for (name, seed), i in chosen.items():
        l2s, correct = trials[name, num_shots, seed]
        trials[name, num_shots, seed] = _Trial(l2s[i : i + 1], correct[i : i + 1])
  return {
    name: {
      n: _result(n, [trials[name, n, s] for s in used[name, n]], *datasets[name]) for n in shots
    }
    for name in datasets
  }


class _Trial(NamedTuple):
  """One draw, fitted at some strengths."""

  l2: np.ndarray  # [L]
  correct: np.ndarray  # bool [L, M]


def count_of(shots: float, num_examples: Any) -> Any:
  """How many of the examples of a class, or of each [K], are drawn, where there are enough."""
  if shots >= 1:
    return int(shots)
  return np.maximum(np.rint(shots * np.asarray(num_examples)), 1).astype(int)


def used_seeds(
  protocol: Protocol, seeds: Sequence[int], num_shots: float, y: np.ndarray
) -> Sequence[int]:
  """The seeds that make a difference for the labels of a training split.

  All of them give the same subset with `draw` 'first', or if it has all examples.
  """
  _, counts = np.unique(y, return_counts=True)
  takes_all = (counts <= count_of(num_shots, counts)).all()
  return seeds[:1] if protocol.draw == 'first' or takes_all else seeds


def _trial(
  train: Split,
  test: Split,
  protocol: Protocol,
  num_shots: float,
  drawn: Sequence[np.ndarray],
) -> _Trial:
  subset = np.concatenate([rows[: count_of(num_shots, len(rows))] for rows in drawn])
  x = train.x[subset]
  y = train.y[subset]
  model = ridge.decompose(x, y) if protocol.classifier == 'ridge' else logistic.Logistic(x, y)
  if protocol.l2 in MEAN_RANKS:
    l2s = np.array(L2_GRID)
  elif protocol.l2 == 'loo' and isinstance(model, ridge.Ridge):  # `Protocol` has no other
    l2s = np.array([leave_one_out_l2(model, x, y)])
  elif protocol.l2 == 'heldout':
    counts = [count_of(num_shots, len(rows)) for rows in drawn]
    after = [rows[n : 2 * n] for rows, n in zip(drawn, counts, strict=True)]
    rows = _limited(np.concatenate(after))
    predict = functools.partial(model.predict, train.x[rows], L2_GRID)
    l2s = np.array([_best_l2(predict, train.y[rows], L2_GRID)])
  else:
    l2s = np.array([float(protocol.l2)])
  return _Trial(l2s, model.predict(test.x, l2s) == test.y)


def _result(num_shots: float, trials: Sequence[_Trial], train: Split, test: Split) -> FewShotResult:
  classes, counts = np.unique(train.y, return_counts=True)
  correct = np.concatenate([trial.correct for trial in trials])  # [draws, M]
  return FewShotResult(
    shots=num_shots,
    accuracies=tuple(map(float, correct.mean(axis=1))),
    l2=tuple(float(trial.l2[0]) for trial in trials),
    classes_short=int(np.sum(counts < count_of(num_shots, counts))),
    test_unseen=int(np.sum(~np.isin(test.y, classes))),
    correct=correct,
    test_index=test.index,
    test_y=test.y,
  )


def draw_order(
  labels: np.ndarray, index: np.ndarray, seed: int, draw: str = 'random'
) -> list[np.ndarray]:
  """Rows of each class, ascending by label, in the order in which they are drawn (step 1)."""
  by_class = np.lexsort((index, labels))
  starts = np.flatnonzero(np.diff(labels[by_class])) + 1
  orders = np.split(by_class, starts)
  if draw == 'random':
    # The raw stream: numpy keeps it across versions, which it does not promise for permutation().
    for i, rows in enumerate(orders):
      bits = np.random.PCG64(np.random.SeedSequence([seed, int(labels[rows[0]])]))
      orders[i] = rows[np.argsort(bits.random_raw(len(rows)), kind='stable')]
  return orders


def leave_one_out_l2(
  model: ridge.Ridge, x: np.ndarray, y: np.ndarray, grid: Sequence[float] = L2_GRID
) -> float:
  """The strength with the highest leave-one-out accuracy (step 3) on the model's examples x, y."""
  rows = _limited(np.flatnonzero(model.counts[np.searchsorted(model.classes, y)] > 1))
  return _best_l2(lambda: model.leave_one_out(x[rows], y[rows], grid), y[rows], grid)


def _limited(rows: np.ndarray) -> np.ndarray:
  return rows[:: max(1, -(-len(rows) // MAX_LEFT_OUT))]


def _best_l2(predict: Callable[[], np.ndarray], y: np.ndarray, grid: Sequence[float]) -> float:
  """From predictions [L, M] of labels y [M]; without any, big_vision's constant."""
  if not y.size:
    return BIG_VISION_L2
  num_correct = (predict() == y).sum(axis=1)
  return max(zip(num_correct, grid, strict=True))[1]


def mean_rank(
  accuracies: Mapping[tuple[str, int], np.ndarray], others: bool
) -> dict[tuple[str, int], int]:
  """One strength for many data sets (step 3): V-MoE's `_find_best_l2_reg`, uncertainty-baselines'
  `select_best_l2_reg` with 'all' and 'leave-self-out' (`others`).

  Args:
    accuracies: {(data set, draw): test accuracy at each strength [L]}.
    others: rank by the draws of other data sets only; there must be at least one.

  Returns:
    {(data set, draw): position of the strength}, the same for all draws of a data set.
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


def _index(split: Split) -> np.ndarray:
  return np.arange(len(split.y)) if split.index is None else split.index


def check_settings(
  shots: Sequence[float], seeds: Sequence[int], l2: L2, num_datasets: int = 1
) -> None:
  """Raises ValueError, in one sentence, for settings that `few_shot_all` cannot use."""
  if not shots or not all(n > 0 and (n < 1 or n == int(n)) for n in shots):
    raise ValueError(
      f'shots={tuple(shots)} must be one or more whole numbers >= 1, or shares in (0, 1).'
    )
  if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
    raise ValueError(f'seeds={tuple(seeds)} must be one or more distinct numbers >= 0.')
  Protocol(l2=l2)
  if l2 == 'mean_rank_others' and num_datasets < 2:
    raise ValueError(
      "l2='mean_rank_others' chooses by the other data sets, and there is only one: choose 'loo', "
      "'heldout' or a number, or give more data sets."
    )


def check_splits(train: Split, test: Split, name: str = '') -> None:
  """Raises ValueError, in one sentence, for arrays that `few_shot` cannot use."""
  prefix = f'{name}: ' if name else ''
  _check_arrays(f'{prefix}train', train.x, train.y)
  _check_arrays(f'{prefix}test', test.x, test.y)
  if train.x.shape[1] != test.x.shape[1]:
    raise ValueError(
      f'{prefix}train_x has {train.x.shape[1]} features and test_x {test.x.shape[1]}; they must be '
      'equal.'
    )
  index = _index(train)
  if index.shape != train.y.shape or len(np.unique(index)) != len(train.y):
    raise ValueError(f'{prefix}train_index must give {len(train.y)} distinct example ids.')


def _check_arrays(split: str, x: np.ndarray, y: np.ndarray) -> None:
  """Raises ValueError unless x is finite float [N, D] and y integers >= 0 [N], with N, D >= 1."""
  if x.ndim != 2 or not x.size or y.shape != x.shape[:1]:
    raise ValueError(
      f'{split}_x must be [N, D] and {split}_y [N], N and D at least 1; they are {list(x.shape)} '
      f'and {list(y.shape)}.'
    )
  if not np.issubdtype(y.dtype, np.integer) or y.min() < 0:
    raise ValueError(
      f'{split}_y must hold integer labels >= 0; it has dtype {y.dtype}, min {y.min()}.'
    )
  parts = ridge.blocks(len(x), _BLOCK_ROWS)
  if bad := sum(int((~np.isfinite(x[part]).all(axis=1)).sum()) for part in parts):
    raise ValueError(f'{split}_x has {bad} rows that are not finite.')
