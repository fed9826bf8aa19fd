"""Ways to choose the temperature, compared as in table 13 of Collier et al. 2023 (section 4 and
appendix G).

The data have three parts: a training set, a validation set on which tau is chosen, and a test set.
Results are measured on the test set:

  grid search, Bayesian optimization   one training per tau; the best validation NLL wins
    (2 folds)    the test set chooses, and the validation data are trained on too
    (+ retrain)  the tau of the best validation NLL, trained once more on training and validation
                 data
  Luketina et al. (2016), simple gradient   one training in which tau follows held-out examples
                 (`held_out`): of the validation set, or a share of each batch of training and
                 validation data; a share of 1/n makes the run longer by 1/n
  simple training   one training on both in which tau is trained like the other parameters

All trainings except those with a share have the same number of steps.
"""

import dataclasses
import json
import logging
import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import scipy.stats

import gin
from het_plugin import data, reporting
from het_plugin.data import splits
from het_plugin.evaluation.names import naming
from het_plugin.experiments import trainings
from het_plugin.measures import comparison
from het_plugin.system import run_files
from het_plugin.training import nonfinite
from studies.temperature import held_out

_log = logging.getLogger(__name__)

GRID = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 5.0)  # appendix G.1
BOUNDS = (0.05, 5.0)
Temperature = Annotated[float, f'[{BOUNDS[0]}, {BOUNDS[1]}]']
# A fixed tau is a parameter that does not move, so all such trainings share one compiled program.
# Its range is wider than BOUNDS, because eq. 16 reaches the ends at infinity only.
_FIXED_RANGE = (0.025, 10.0)
_SHARES = {'12.5%': 8, '25%': 4}  # one of this many rows is held out
BASELINE = 'simple_training'


@dataclasses.dataclass(frozen=True)
class Row:
  """A line of the table: its title and its last two columns."""

  title: str
  single_training: bool
  no_validation_set: bool


ROWS = {
  'grid:validation': Row('Grid search', False, False),
  'grid:2folds': Row('Grid search (2 folds)', False, False),
  'grid:retrain': Row('Grid search (+ retrain)', False, False),
  'bayesian:validation': Row('Bayesian optimization', False, False),
  'bayesian:2folds': Row('Bayesian optimization (2 folds)', False, False),
  'bayesian:retrain': Row('Bayesian optimization (+ retrain)', False, False),
  'luketina:validation': Row('Luketina et al. (2016)', True, False),
  'luketina:12.5%': Row('Luketina et al. (2016) (12.5%)', True, True),
  'luketina:25%': Row('Luketina et al. (2016) (25%)', True, True),
  'simple_gradient:validation': Row('Simple gradient (val)', True, False),
  'simple_gradient:12.5%': Row('Simple gradient (12.5%)', True, True),
  'simple_gradient:25%': Row('Simple gradient (25%)', True, True),
  BASELINE: Row('Simple training', True, True),
}
METHODS = tuple(dict.fromkeys(name.partition(':')[0] for name in ROWS))


def parse_methods(names: Sequence[str]) -> list[str]:
  """Rows of the table in its order, from names of rows, of methods, or 'all'; else ValueError."""
  chosen = set()
  for name in names or ['']:
    found = [row for row in ROWS if name in ('all', row, row.partition(':')[0])]
    if not found:
      raise ValueError(
        f'--method={name} is unknown: choose from all, {", ".join(METHODS)}, or single rows '
        f'{", ".join(row for row in ROWS if ":" in row)}'
      )
    chosen |= set(found)
  return [row for row in ROWS if row in chosen]


def check_grid(grid: Sequence[float]) -> None:
  """Raises ValueError if a temperature is repeated."""
  names = [f'{tau:g}' for tau in grid]  # as in the folders of the trainings
  if repeated := [name for name in names if names.count(name) > 1]:
    raise ValueError(f'--grid={",".join(names)} has {repeated[0]} twice')


def suggest(taus: Sequence[float], nlls: Sequence[float], count: int, seed: int) -> list[float]:
  """Temperatures to try at the same time, by a Gaussian process on log tau.

  The first ones are spread over BOUNDS. Each of the others has the largest expected improvement,
  given the trials and assuming that earlier suggestions turn out as predicted (Ginsbourger et al.
  2010, "kriging believer"). None is as near to an earlier one as two points of the grid of 401.

  Args:
    taus, nlls: temperatures tried so far, and their NLLs; infinite if training failed, which counts
      as the worst.
    count: number of suggestions, which are rounded to four digits.
    seed: seed of the first ones.
  """
  from sklearn import exceptions, gaussian_process
  from sklearn.gaussian_process import kernels

  low, high = np.log(BOUNDS)
  finite = [nll for nll in nlls if math.isfinite(nll)]
  if not finite:
    offset = np.random.default_rng([seed, len(taus)]).uniform()
    chosen = low + (high - low) * (np.arange(count) + offset) / count
  else:
    x = list(np.log(taus))
    y = [nll if math.isfinite(nll) else max(finite) for nll in nlls]
    kernel = kernels.Matern((high - low) / 4, (0.1, 10.0), nu=2.5)
    kernel += kernels.WhiteKernel(1e-3, (1e-6, 1.0))
    model = gaussian_process.GaussianProcessRegressor(kernel, normalize_y=True)
    candidates = np.linspace(low, high, 401)
    with warnings.catch_warnings(category=exceptions.ConvergenceWarning, action='ignore'):
      model.fit(np.array(x)[:, None], y)
    model = gaussian_process.GaussianProcessRegressor(
      model.kernel_, optimizer=None, normalize_y=True
    )
    for _ in range(count):
      mean, std = model.fit(np.array(x)[:, None], y).predict(candidates[:, None], return_std=True)
      gain = min(y) - mean
      z = gain / np.maximum(std, 1e-12)
      improvement = gain * scipy.stats.norm.cdf(z) + std * scipy.stats.norm.pdf(z)
      nearest = abs(candidates[:, None] - x).min(axis=1)
      # A training would only repeat what an earlier one found.
      best = np.argmax(np.where(nearest > 0.9 * (candidates[1] - low), improvement, -np.inf))
      x.append(candidates[best])
      y.append(mean[best])
    chosen = x[-count:]
  return [min(max(float(f'{tau:.4g}'), BOUNDS[0]), BOUNDS[1]) for tau in np.exp(chosen)]


@dataclasses.dataclass(frozen=True)
class Trained:
  """A finished training: its folder's name, tau at its end, and metrics of the test set.

  NLLs are infinite if it failed, `steps` are those planned, `ms_per_step` is the median.
  """

  name: str
  tau: float
  validation_nll: float
  nll: float
  precision_at_1: float
  steps: int
  ms_per_step: float | None


@dataclasses.dataclass(frozen=True)
class Study:
  """One replication: runs each training that its methods need once, in its own folder.

  `base` is the run whose temperature is tuned, with gin/temperature.gin, and `seed` the
  RANDOM_SEED of all trainings. Bayesian optimization chooses the trials of a round together.
  """

  base: trainings.Training
  folder: Path
  seed: int
  grid: Sequence[float] = GRID
  rounds: int = 6
  trials_per_round: int = 5

  def outcome(self, row: str) -> dict[str, Any]:
    """One row of the table in this replication: the chosen training, and the cost of all."""
    method, _, variant = row.partition(':')
    if method in ('grid', 'bayesian'):
      trainings = self._searched(row, self._grid if method == 'grid' else self._bayesian, variant)
    elif method == BASELINE:
      trainings = [self._train('simple_training', *_SIMPLE)]
    else:
      trainings = [self._train(row.replace(':', '_').rstrip('%'), *self._online(method, variant))]
    chosen = trainings[0]
    return {
      **{name: getattr(chosen, name) for name in ('nll', 'precision_at_1', 'tau', 'ms_per_step')},
      # Elsewhere the chosen training saw what would be validation data.
      'validation_nll': chosen.validation_nll if variant == 'validation' else None,
      'trainings': len(trainings),
      'steps': sum(training.steps for training in trainings),
      'chosen': chosen.name,
      'trials': [{'tau': t.tau, 'nll': t.nll} for t in trainings],
    }

  def _searched(
    self, row: str, search: Callable[[str, str], Iterator[Trained]], variant: str
  ) -> list[Trained]:
    """The chosen training, then the others."""
    if variant == '2folds':
      trainings = list(search('FULL_SPLIT', 'nll'))
      criterion = 'nll'
    else:
      trainings = list(search('TRAIN_SPLIT', 'validation_nll'))
      criterion = 'validation_nll'
    trainings.sort(key=lambda training: getattr(training, criterion))
    if not math.isfinite(getattr(trainings[0], criterion)):
      raise ValueError(
        f'All {len(trainings)} trainings of {ROWS[row].title} failed: see {self.folder}/*/nonfinite'
      )
    if variant == 'retrain':
      trainings.insert(0, self._fixed(trainings[0].tau, 'FULL_SPLIT'))
    return trainings

  def _grid(self, split: str, criterion: str) -> Iterator[Trained]:
    for number, tau in enumerate(self.grid, 1):
      _log.info('Grid search: trial %d of %d, tau %g', number, len(self.grid), tau)
      yield self._fixed(tau, split)

  def _bayesian(self, split: str, criterion: str) -> Iterator[Trained]:
    """Trainings of Bayesian optimization.

    Temperatures are written to a file before they are tried, so a resumed study tries the same.
    """
    path = self.folder / f'bayesian_{split.lower()}.json'
    suggested = json.loads(path.read_text()) if path.exists() else []
    total = self.rounds * self.trials_per_round
    trials = []
    for number in range(total):
      if number == len(suggested):
        nlls = [getattr(trial, criterion) for trial in trials]
        suggested += suggest(suggested, nlls, self.trials_per_round, self.seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        run_files.write_json(path, suggested)
      tau = suggested[number]
      _log.info('Bayesian optimization: trial %d of %d, tau %g', number + 1, total, tau)
      trials.append(self._fixed(tau, split))
      yield trials[-1]

  def check_used(self, rows: Sequence[str]) -> None:
    """Raises ValueError if no training of these rows uses a binding of the command line, or if the
    task lacks a split.
    """
    runs = []
    for row in rows:
      method, _, variant = row.partition(':')
      macros = {'2folds': ['FULL_SPLIT'], 'retrain': ['TRAIN_SPLIT', 'FULL_SPLIT']}
      if method in ('grid', 'bayesian'):
        found = [(_fixed(1.0, split), 1.0) for split in macros.get(variant, ['TRAIN_SPLIT'])]
      else:
        found = [_SIMPLE if method == BASELINE else self._online(method, variant)]
      runs += [self._run(bindings, length)[0] for bindings, length in found]
    trainings.check_used(self.base.gin_bindings, runs, self.folder, _READ)
    _configured(check_splits)

  def _fixed(self, tau: float, split: str) -> Trained:
    """A training with a constant tau on the split that a macro names."""
    trained = self._train(f'{split.lower()}_tau_{tau:g}', _fixed(tau, split))
    return dataclasses.replace(trained, tau=tau)

  def _online(self, method: str, variant: str) -> tuple[list[str], float]:
    """Bindings and length of a training whose tau follows held-out rows, a share of the batch or of
    the validation set.
    """
    held_out_every = _SHARES.get(variant)
    of_a_share = ['train/DatasetConfig.split = %FULL_SPLIT']
    length = 1 + 1 / held_out_every if held_out_every else 1.0
    if held_out_every is None:
      self.base.parse(self.folder)
      held_out_every = _configured(held_out.HeldOutDatasetConfig).held_out_every
      of_a_share = [
        'train/DatasetConfig.split = %TRAIN_SPLIT',
        'train.train_dataset_cfg = @HeldOutDatasetConfig()',
        'train.get_dataset_fn = @get_dataset_with_held_out',
      ]
    estimator = 'luketina' if method == 'luketina' else 'simple'
    bindings = [
      'train.trainer_cls = @HeldOutTemperatureTrainer',
      f'HeldOutTemperatureTrainer.estimator = {estimator!r}',
      _OWN_OPTIMIZER,
      f'HeldOutTemperatureTrainer.held_out_every = {held_out_every}',
      *of_a_share,
    ]
    return bindings, length

  def _run(self, bindings: Sequence[str], length: float) -> tuple[trainings.Training, int, str]:
    """A training, its steps and its task; `length` multiplies the steps of the base run."""
    self.base.parse(self.folder)
    head = gin.query_parameter('%HEAD').selector.rpartition('.')[2]
    optimizer = gin.query_parameter('%OPTIMIZER')
    steps = round(length * _configured(data.total_steps))
    task = gin.query_parameter('%MIXTURE_OR_TASK_NAME')
    if _OWN_OPTIMIZER in bindings:
      bindings = [f'temperature_optimizer.optimizer_def = {optimizer!r}', *bindings]
    run = dataclasses.replace(
      self.base,
      gin_bindings=[
        *self.base.gin_bindings,
        f'{head}.temperature = @LearnedTemperature()',
        *(f'TRAIN_{unit} = None' for unit in ('EXAMPLES', 'EPOCHS')),
        f'TRAIN_STEPS = {steps}',
        f'RANDOM_SEED = {self.seed}',
        *bindings,
      ],
    )
    return run, steps, task

  def _train(self, name: str, bindings: Sequence[str], length: float = 1.0) -> Trained:
    """Trains and reads back."""
    run, steps, task = self._run(bindings, length)
    try:
      trainings.complete(run, self.folder / name)
    except nonfinite.NonFiniteStop as stop:
      _log.warning('%s: step %d was not finite; the training counts as failed.', name, stop.step)
      return Trained(name, math.nan, math.inf, math.inf, math.nan, steps, None)
    metrics = run_files.read_lines(self.folder / name / 'metrics.jsonl')
    final = trainings.final_evaluations(metrics)
    validation = final[f'training_eval/{task}']
    test = final[f'infer_eval/{task}']
    return Trained(
      name,
      test['tau'],
      _infinite(validation['nll']),
      _infinite(test['nll']),
      test['precision_at_1'],
      steps,
      trainings.ms_per_step(metrics),
    )


# What `_run` makes the steps and the optimizer of a training from.
_READ = ('TRAIN_STEPS', 'TRAIN_EXAMPLES', 'TRAIN_EPOCHS', 'OPTIMIZER')
_OWN_OPTIMIZER = 'OPTIMIZER = @temperature_optimizer()'  # of the temperature
_SIMPLE = ['train/DatasetConfig.split = %FULL_SPLIT'], 1.0


def _fixed(tau: float, split: str) -> list[str]:
  """Bindings of a training with a constant tau."""
  low, high = _FIXED_RANGE
  return [
    f'train/DatasetConfig.split = %{split}',
    f'LearnedTemperature.tau_min = {low}',
    f'LearnedTemperature.tau_max = {high}',
    f'LearnedTemperature.initial_tau = {tau}',
    _OWN_OPTIMIZER,
    'TEMPERATURE_LEARNING_RATE = 0.0',
  ]


def _configured(configurable: Any) -> Any:
  return gin.get_configurable(configurable)()


def _infinite(value: float) -> float:
  return math.inf if math.isnan(value) else value


def check_splits(task: str, **named: str) -> None:
  """Raises ValueError if the task lacks a split; `named` are the macros of gin/temperature.gin."""
  for name, split in named.items():
    with naming(f'{name}={split!r}'):
      splits.resolve(split, data.task_info(task).splits, task)


gin.external_configurable(check_splits, module=__name__)


_AVERAGED = ('nll', 'precision_at_1', 'tau', 'validation_nll')


def table(outcomes: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
  """The rows of the table, from `Study.outcome` of each row and replication: means, standard errors
  and `welch_p`, p of Welch's test of a row's test NLL against simple training.
  """
  nlls = {row: [outcome['nll'] for outcome in found] for row, found in outcomes.items()}
  rows = []
  for name, found in outcomes.items():
    means = {}
    for key in _AVERAGED:
      values = [outcome[key] for outcome in found]
      means[key] = (None, None) if None in values else comparison.group_mean(values)
    speeds = [x['ms_per_step'] for x in found if x['ms_per_step'] is not None]
    row = {
      'head': ROWS[name].title,
      'row': name,
      **{key: mean for key, (mean, _) in means.items()},
      'stderr': {key: stderr for key, (_, stderr) in means.items()},
      'single training': 'yes' if ROWS[name].single_training else 'no',
      'no validation set': 'yes' if ROWS[name].no_validation_set else 'no',
      'trainings': found[0]['trainings'],
      'steps': round(statistics.fmean(outcome['steps'] for outcome in found)),
      'ms_per_step': statistics.median(speeds or [math.nan]),
      'replications': list(found),
    }
    if BASELINE in nlls:
      other = name != BASELINE
      row['welch_p'] = comparison.welch_p(nlls[name], nlls[BASELINE]) if other else None
    rows.append(row)
  return rows


def make_report(rows: Sequence[Mapping[str, Any]], folder: Path) -> reporting.Report:
  """The table of `rows`, whose trainings are in `folder`."""
  seed_0 = {row['head']: folder / 'seed_0' / row['replications'][0]['chosen'] for row in rows}
  single = {r['head']: seed_0[r['head']] for r in rows if r['single training'] == 'yes'}
  last = rows[-1]['head']

  def draw():
    png = reporting.lines_png(
      _tau_nll(rows), xlabel='temperature tau', ylabel='test NLL (nats per example)', log_x=True
    )
    figures = {
      'tau': reporting.Figure(
        png,
        'Test NLL by tau, means over replications: trials of a search, or the end of a training.',
        'Test NLL of every training against its temperature.',
      )
    }
    if single:
      caption = 'Training loss and temperature of the methods of a single training, with seed 0.'
      figures |= trainings.draw_curves(single, caption)
    return figures

  return reporting.Report(
    title='Ways to choose the temperature',
    introduction='Mean and standard error over '
    f'{reporting.counted(len(rows[0]["replications"]), "replication")}, as table 13 of Collier et '
    'al. 2023.',
    json=rows,
    row_title='method',
    rows=[
      {'name': row['head']}
      | {k: v for k, v in row.items() if k not in ('head', 'replications', 'row', 'welch_p')}
      | ({'p': reporting.p_text(row['welch_p'])} if 'welch_p' in row else {})
      for row in rows
    ],
    notes=[
      'NLL and prec@1 are on the test set. Except with (2 folds), the test set chooses nothing. '
      'Validation NLL is on the set that chose tau.',
      'trainings and steps: the cost of one replication. ms/step: the chosen training.',
      "p: Welch's test of the NLL against simple training.",
    ],
    draw=draw,
    configs={last: (seed_0[last] / 'config.gin').read_text()},
  )


def _tau_nll(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[list[float], list[float]]]:
  """{title: (tau, test NLL)}, means over replications. A search has a point per tau; another
  training has the point where it ended. A retrained one, the first of its trials, is in no line.
  """
  lines = {}
  names = {row['row'] for row in rows}
  for row in rows:
    if row['single training'] == 'yes':
      lines[row['head']] = [row['tau']], [row['nll']]
    elif row['row'].replace(':retrain', ':validation') not in names - {row['row']}:
      by_tau = {}
      for outcome in row['replications']:
        for trial in outcome['trials'][row['row'].endswith(':retrain') :]:
          by_tau.setdefault(trial['tau'], []).append(trial['nll'])
      taus = sorted(by_tau)
      lines[row['head']] = taus, [statistics.fmean(by_tau[tau]) for tau in taus]
  return lines
