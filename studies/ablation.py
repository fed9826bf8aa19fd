"""Ablations: cells, each a configuration, trained with the same seeds, evaluated on the same
examples and compared.

The settings of a cell are gin files and bindings, which come after those that all cells share. If
hyperparameters are to be chosen, every cell gets those with the lowest validation NLL. The runs
that choose have separate seeds and are evaluated on separate examples, so reported results have not
chosen anything.
"""

import dataclasses
import itertools
import logging
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import gin
from het_plugin import data, reporting
from het_plugin.data import splits
from het_plugin.evaluation.names import naming
from het_plugin.experiments import trainings
from het_plugin.measures import comparison
from het_plugin.system import run_files
from het_plugin.training import nonfinite
from studies import analyses
from studies.study import Request, check_labels, check_settings

_log = logging.getLogger(__name__)

NLL = 'nll'
_OF_TRAINING = ('goodput', 'train')
_ANALYSIS = 'analysis.json'


@dataclasses.dataclass(frozen=True)
class Ablation:
  """A comparison of cells.

  Settings are gin files and bindings (`study`); the settings of a cell come after `shared`.

  Attributes:
    title: one line.
    paper: the table or figure of the paper that it mirrors, and what the paper found.
    shared: settings of all cells.
    cells: {label: settings}, in the order of the table.
    baseline: the label of the cell that the others are tested against; None for the first.
    seeds: values of RANDOM_SEED; every cell has a run per seed.
    metrics: metrics to report: names of the last train-eval ('nll'), or names with a slash as in
      metrics.jsonl ('zeroshot/glyphs_core/top1').
    choose: {macro or parameter: values}, chosen for every cell.
    choose_for: {label: {macro or parameter: values}}, additionally chosen for this cell.
    choose_seeds: seeds of the runs that choose; not among `seeds`.
    choose_split: EVAL_SPLIT of those runs.
    report_split: EVAL_SPLIT of the reported runs.
    measured: {label: {binding's name: (other label, metric)}}: bindings whose value is the final
      metric of the run of another cell with the same seed. The other cell comes earlier.
    analysis: maps the folder of a finished run to further metrics by name.

  Raises:
    ValueError: an attribute contradicts another one, or has the wrong form.
  """

  title: str
  paper: str
  shared: Sequence[str]
  cells: Mapping[str, Sequence[str]]
  baseline: str | None = None
  seeds: Sequence[int] = (0, 1, 2)
  metrics: Sequence[str] = (NLL, 'precision_at_1', 'ece', 'tau')
  choose: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
  choose_for: Mapping[str, Mapping[str, Sequence[Any]]] = dataclasses.field(default_factory=dict)
  choose_seeds: Sequence[int] = (100,)
  choose_split: str = 'validation[:50%]'
  report_split: str = 'validation[50%:]'
  measured: Mapping[str, Mapping[str, tuple[str, str]]] = dataclasses.field(default_factory=dict)
  analysis: Callable[[Path], Mapping[str, float]] | None = None

  def __post_init__(self):
    check_settings('Ablation', self.shared, self.cells)
    may_be_empty = {x: getattr(self, x) for x in ('metrics', 'choose_seeds')}
    lists = may_be_empty | {'seeds': self.seeds}
    for grid in (self.choose, *self.choose_for.values()):
      lists |= {f'choose: {name}': values for name, values in grid.items()}
    for name, values in lists.items():
      if not isinstance(values, tuple | list) or not (values or name in may_be_empty):
        raise ValueError(f'Ablation.{name}={values!r} must be one or more values in brackets')
    folders = [_folder_name(label) for label in self.cells]
    if unnamed := [x for x, name in zip(self.cells, folders, strict=True) if not name.strip('.')]:
      raise ValueError(f'Ablation.cells: the label {unnamed[0]!r} names no folder; use letters')
    if len(set(folders)) < len(folders):
      raise ValueError(f'Ablation.cells: the labels {", ".join(self.cells)} need names that differ')
    check_labels('Ablation', (self.first, *self.choose_for, *self.measured), self.cells)
    if len(set(self.seeds)) < len(self.seeds):
      raise ValueError(f'Ablation.seeds={tuple(self.seeds)} must be different numbers')
    reported = self.report_split
    analysis = self.analysis
    if isinstance(analysis, analyses.ExampleNLL) and analysis.split != reported:
      raise ValueError(
        f'ExampleNLL.split={analysis.split!r} must be Ablation.report_split={reported!r}, because '
        'its differences are reported beside the means of that split'
      )
    if common := set(self.seeds) & set(self.choose_seeds):
      raise ValueError(
        f'Ablation.choose_seeds and Ablation.seeds share {sorted(common)}; runs that choose '
        'hyperparameters must not be reported'
      )
    order = list(self.cells)
    for label, bindings in self.measured.items():
      for other, _ in bindings.values():
        if other not in order[: order.index(label)]:
          raise ValueError(
            f'Ablation.measured: {label!r} needs {other!r}, which must come before it in the cells'
          )
      if missing := {metric for _, metric in bindings.values()} - set(self.metrics):
        raise ValueError(
          f'Ablation.measured: {label!r} needs {min(missing)!r}, which must be one of '
          f'Ablation.metrics={tuple(self.metrics)}'
        )

  @property
  def first(self) -> str:
    """The label of the cell that the others are tested against."""
    return self.baseline or next(iter(self.cells))

  def only(self, labels: Sequence[str]) -> 'Ablation':
    """The ablation with some of its cells; ValueError if a cell is unknown or needs another."""
    check_labels('Ablation.cells', labels, self.cells)
    kept = {label: settings for label, settings in self.cells.items() if label in labels}
    return dataclasses.replace(
      self,
      cells=kept,
      baseline=self.baseline if self.baseline in kept else None,
      choose_for={k: v for k, v in self.choose_for.items() if k in kept},
      measured={k: v for k, v in self.measured.items() if k in kept},
    )

  def candidates(self, label: str) -> list[dict[str, Any]]:
    """Combinations of hyperparameters to choose from for a cell; one if there is no choice."""
    grid = {**self.choose, **self.choose_for.get(label, {})}
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]

  def training_run(
    self,
    label: str,
    seed: int,
    values: Mapping[str, Any],
    split: str,
    request: Request,
    *bindings: str,
  ) -> trainings.Training:
    """The run of a cell with a seed and chosen hyperparameters, evaluated on a split; `bindings`
    come after its own.
    """
    chosen = [f'{name} = {value!r}' for name, value in values.items()]
    run = request.run_of([*self.shared, *self.cells[label], *bindings])
    own = [*chosen, f'EVAL_SPLIT = {split!r}', f'RANDOM_SEED = {seed}']
    return dataclasses.replace(run, gin_bindings=[*run.gin_bindings, *own])

  def run(self, request: Request) -> Iterator[reporting.Report]:
    """Trains the runs that are not complete (`runs.complete`), and reports after every seed."""
    chosen = {name for label in self.cells for name in self.candidates(label)[0]}
    instead = {'RANDOM_SEED': 'give --seeds', 'MODEL_DIR': 'give --output_dir'}
    instead |= {'EVAL_SPLIT': 'bind Ablation.choose_split and Ablation.report_split'}
    instead |= dict.fromkeys(chosen, 'it is chosen; bind Ablation.choose instead')
    for binding in request.gin_bindings:
      if (name := binding.partition('=')[0].strip()) in instead:
        raise ValueError(f'--gin.{name} has no effect: {instead[name]}')
    ablation = self if request.seeds is None else dataclasses.replace(self, seeds=request.seeds)
    if request.cells is not None:
      ablation = ablation.only(request.cells)
    request.check_used(ablation.shared, ablation.cells)
    ablation._check_splits(request)
    yield from _Training(ablation, request).reports()

  def _check_splits(self, request: Request) -> None:
    """Raises ValueError if a task lacks a split; reported runs come after those that choose."""
    for label, settings in self.cells.items():
      request.run_of([*self.shared, *settings]).parse(request.output_dir)
      task = gin.query_parameter('%MIXTURE_OR_TASK_NAME')
      names = ['report_split'] + ['choose_split'] * (len(self.candidates(label)) > 1)
      for name in names:
        split = getattr(self, name)
        with naming(f'Ablation.{name}={split!r}'):
          splits.resolve(split, data.task_info(task).splits, task)


def _folder_name(text: str) -> str:
  return re.sub(r'[^\w.=+-]+', '_', text).strip('_')


class _Training:
  """The runs of an ablation in an output directory, and what came out so far."""

  def __init__(self, ablation: Ablation, request: Request):
    self._ablation = ablation
    self._request = request
    self._counts = {}  # {label: ParamCounts}
    self._chosen = {}  # {label: (the best candidate, all with their NLL)}
    self._found = {label: [] for label in ablation.cells}  # [seed]{metric: value}
    self._folders = {label: [] for label in ablation.cells}
    self._failed = []  # a sentence for each run that is not finite
    self._finished = 0
    sizes = [len(ablation.candidates(label)) for label in ablation.cells]
    self._total = len(sizes) * len(ablation.seeds)
    self._total += len(ablation.choose_seeds) * sum(size for size in sizes if size > 1)

  def reports(self) -> Iterator[reporting.Report]:
    ablation = self._ablation
    self._chosen = {label: self._choose(label) for label in ablation.cells}
    for seed in ablation.seeds:
      for label in ablation.cells:
        measured = {
          k: self._found[other][-1][name]
          for k, (other, name) in ablation.measured.get(label, {}).items()
        }
        if wrong := [k for k, value in measured.items() if not math.isfinite(value)]:
          raise ValueError(
            f'{label!r} needs a {wrong[0]} that is not finite. {" ".join(self._failed)}'
          )
        bindings = [f'{k} = {value!r}' for k, value in measured.items()]
        values = self._chosen[label][0]
        folder, stop = self._complete(label, seed, values, ablation.report_split, *bindings)
        if stop:
          self._failed.append(f'{label}, seed {seed}, is not finite at step {stop.step}.')
          _log.warning('%s Its metrics are NaN.', self._failed[-1])
          found = dict.fromkeys(ablation.metrics, math.nan)
        else:
          found = _final_values(folder, ablation.metrics)
          if ablation.analysis is not None:
            found |= self._analyse(folder)
        self._folders[label].append(folder)
        self._found[label].append(found)
      yield self._report()

  def _analyse(self, folder: Path) -> dict[str, float]:
    """What the analysis finds in a run; kept in a file for the next start."""
    file = folder / _ANALYSIS
    settings = repr(self._ablation.analysis)
    kept = run_files.read_json(file)  # None: missing, or damaged
    if kept is None or kept.get('analysis', settings) != settings:
      reporting.write_json({'analysis': settings, **self._ablation.analysis(folder)}, file)
      kept = run_files.read_json(file)
    return _with_nans({name: value for name, value in kept.items() if name != 'analysis'})

  def _choose(self, label: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    candidates = self._ablation.candidates(label)
    if len(candidates) == 1:
      return candidates[0], []
    tried = [values | {NLL: self._mean_nll(label, values)} for values in candidates]
    best = min(range(len(tried)), key=lambda i: tried[i][NLL])
    if not math.isfinite(tried[best][NLL]):
      raise ValueError(
        f'Ablation: every run of {label!r} failed, with all values of {", ".join(candidates[0])}'
      )
    for name, value in candidates[best].items():
      values = [x[name] for x in candidates if isinstance(x[name], int | float)]
      if len(set(values)) > 2 and value in (min(values), max(values)):
        _log.warning('%s: the best %s, %s, is at an end of the values tried.', label, name, value)
    return candidates[best], tried

  def _mean_nll(self, label: str, values: Mapping[str, Any]) -> float:
    """Mean over the seeds that choose; infinite if a run is not finite."""
    found = []
    for seed in self._ablation.choose_seeds:
      folder, stop = self._complete(label, seed, values, self._ablation.choose_split)
      if stop:
        _log.warning('%s: not finite at step %d, so not chosen.', label, stop.step)
        return math.inf
      # With the names to be reported, so that a wrong one is found in the first run.
      found.append(_final_values(folder, [NLL, *self._ablation.metrics])[NLL])
    mean = statistics.fmean(found)
    return mean if math.isfinite(mean) else math.inf

  def _complete(
    self, label: str, seed: int, values: Mapping[str, Any], split: str, *bindings: str
  ) -> tuple[Path, nonfinite.NonFiniteStop | None]:
    """The folder of a run of a cell, trained, and what stopped it if a step was not finite."""
    self._finished += 1
    words = ', '.join([label, *(f'{k} {v}' for k, v in values.items()), f'seed {seed}'])
    _log.info('=== run %d of %d: %s', self._finished, self._total, words)
    run = self._ablation.training_run(label, seed, values, split, self._request, *bindings)
    name = ','.join([f'seed={seed}', *(_folder_name(f'{k}={v}') for k, v in values.items())])
    folder = self._request.output_dir / _folder_name(label) / name

    def forget_analysis(_: Any) -> None:
      for file in (_ANALYSIS, analyses.NLL_FILE):
        (folder / file).unlink(missing_ok=True)

    stopped = None
    try:
      trainings.complete(run, folder, forget_analysis)
    except nonfinite.NonFiniteStop as stop:
      forget_analysis(stop)  # of fewer steps, if the run was complete with them
      stopped = stop
    if label not in self._counts:
      self._counts[label] = trainings.configured_model()[1]
    return folder, stopped

  def _report(self) -> reporting.Report:
    ablation = self._ablation
    rows = [self._row(label) for label in ablation.cells]
    seeds = ablation.seeds[: len(self._found[ablation.first])]
    first = {label: folders[0] for label, folders in self._folders.items()}
    tables = self._differences(rows), self._tests(rows), self._choices()
    return reporting.Report(
      title=ablation.title,
      introduction=f'{ablation.paper} Here: mean and standard error of '
      f'{reporting.counted(len(seeds), "seed")} '
      f'({", ".join(map(str, seeds))}) on {ablation.report_split}.',
      row_title='cell',
      rows=[{'name': row['head']} | {k: v for k, v in row.items() if k != 'head'} for row in rows],
      tables=[table for table in tables if table.lines],
      notes=[
        'extra: parameters beyond the deterministic head. Parameters are counted without the '
        'padding of the classes.',
        *self._failed,
      ],
      draw=lambda: trainings.draw_curves(first, f'Training loss and temperature, seed {seeds[0]}.'),
      configs={label: (folder / 'config.gin').read_text() for label, folder in first.items()},
      json={
        'title': ablation.title,
        'paper': ablation.paper,
        'seeds': list(seeds),
        'choices': {label: tried for label, (_, tried) in self._chosen.items() if tried},
        'rows': rows,
      },
    )

  def _row(self, label: str) -> dict[str, Any]:
    runs = self._found[label]
    against = self._found[self._ablation.first]
    # Of all cells, so that their rows have the same columns.
    names = dict.fromkeys(name for cell in self._found.values() for run in cell for name in run)
    values = {name: [run.get(name, math.nan) for run in runs] for name in names}
    means = {name: comparison.group_mean(of_name) for name, of_name in values.items()}
    row = {'head': label} | {name: mean for name, (mean, _) in means.items()}
    row['stderr'] = {name: stderr for name, (_, stderr) in means.items()}
    if runs is not against:
      row['p'] = {
        name: comparison.welch_p(of_name, [run.get(name, math.nan) for run in against])
        for name, of_name in values.items()
      }
    counts = self._counts[label]
    if runs is not against and (differences := self._differences_of(label)):
      row['difference'] = differences
    row |= {'num_params': counts.total, 'extra_params': counts.extra}
    return row | {'runs': values, 'chosen': dict(self._chosen[label][0])}

  def _differences_of(self, label: str) -> dict[str, dict[str, float | None]]:
    """Differences per example to the first cell, from what the analysis wrote; {} if nothing."""
    files = [
      [folder / analyses.NLL_FILE for folder in self._folders[name]]
      for name in (label, self._ablation.first)
    ]
    if not all(path.exists() for path in itertools.chain(*files)):
      return {}
    values, baseline = ([dict(np.load(path)) for path in of_cell] for of_cell in files)
    ids = [run.pop(analyses.INDEX) for run in (*values, *baseline) if analyses.INDEX in run]
    sizes = {len(x) for run in (*values, *baseline) for x in run.values()}
    if len(sizes) > 1 or not all(np.array_equal(ids[0], others) for others in ids):
      _log.warning(
        '%s and %s are not paired: their runs have different examples.', label, self._ablation.first
      )
      return {}
    stacked = {
      name: [np.stack([run[name] for run in runs]) for runs in (values, baseline)]
      for name in values[0]
    }
    return {name: comparison.paired(*pair) for name, pair in stacked.items()}

  def _differences(self, rows: Sequence[Mapping[str, Any]]) -> reporting.Table:
    lines = [
      [
        row['head'],
        name,
        f'{gap["mean"]:+.4f}',
        *(reporting.cell(gap[f'stderr_{of}'], spec='.4f') for of in ('seeds', 'examples')),
        reporting.p_text(gap['p_seeds']),
        reporting.cell(gap['extreme'], spec='.0%'),
      ]
      for row in rows
      for name, gap in row.get('difference', {}).items()
    ]
    return reporting.Table(
      f'Minus {self._ablation.first}, paired by seed and example',
      ['cell', 'value', 'mean', '± seeds', '± examples', 'p (seeds)', 'extreme 1%'],
      lines,
    )

  def _tests(self, rows: Sequence[Mapping[str, Any]]) -> reporting.Table:
    """p of each cell and metric, where something can be tested."""
    lines = [
      [row['head'], *(reporting.p_text(p) for p in row['p'].values())] for row in rows if 'p' in row
    ]
    return reporting.Table(
      f"p of Welch's t-test against {self._ablation.first}",
      ['cell', *rows[0]['stderr']],
      lines if len(self._found[self._ablation.first]) > 1 else [],
    )

  def _choices(self) -> reporting.Table:
    return reporting.Table(
      f'Chosen by NLL on {self._ablation.choose_split}, seeds '
      f'{", ".join(map(str, self._ablation.choose_seeds))}',
      ['cell', 'values', 'NLL'],
      [
        [
          label,
          ', '.join(f'{name} {value}' for name, value in x.items() if name != NLL),
          f'{x[NLL]:.3f}' + ('*' if all(x[k] == v for k, v in best.items()) else ''),
        ]
        for label, (best, tried) in self._chosen.items()
        for x in tried
      ],
    )


def _with_nans(values: Mapping[str, float | None]) -> dict[str, float]:
  """Values of a JSON file, in which a NaN is null."""
  return {k: math.nan if v is None else v for k, v in values.items()}


def _final_values(run_dir: Path, names: Sequence[str]) -> dict[str, float]:
  """The last values of metrics, from the files of a run; ValueError if a metric is missing."""
  metrics = run_files.read_lines(run_dir / 'metrics.jsonl')
  found = {}
  for line in metrics:
    found |= _with_nans(line)
  for group, values in trainings.final_evaluations(metrics).items():
    found |= values if group.startswith('training_eval/') else {}
  if missing := [name for name in names if name not in found]:
    evaluated = sorted(name for name in found if name.partition('/')[0] not in _OF_TRAINING)
    raise ValueError(
      f'Ablation.metrics has {missing[0]!r}; the run in {run_dir} has {", ".join(evaluated)}'
    )
  return {name: found[name] for name in names}
