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

from het_plugin import reporting
from het_plugin.evaluation import comparison
from het_plugin.experiments import runs as runs_lib
from het_plugin.experiments.study import Outcome, Request, check_label, check_settings
from het_plugin.training import nonfinite, run_files

_log = logging.getLogger(__name__)

NLL = 'nll'
_OF_TRAINING = ('goodput', 'train')


@dataclasses.dataclass(frozen=True)
class Ablation:
  """A comparison of cells.

  Settings are gin files and bindings (`study`); those of a cell come after `shared`.

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
    for where in ('choose_for', 'measured'):
      if not isinstance(getattr(self, where), Mapping):
        raise ValueError(f'Ablation.{where}={getattr(self, where)!r} must be {{label: settings}}')
    _check_grid('choose', self.choose)
    for label, grid in self.choose_for.items():
      _check_grid(f'choose_for, of {label!r},', grid)
    folders = [_folder_name(label) for label in self.cells]
    if len(set(folders)) < len(folders):
      raise ValueError(f'Ablation.cells: the labels {", ".join(self.cells)} need names that differ')
    for where, labels in {
      'baseline': [self.baseline or next(iter(self.cells))],
      'choose_for': self.choose_for,
      'measured': self.measured,
    }.items():
      for label in labels:
        check_label(f'Ablation.{where}', label, self.cells)
    if not self.metrics:
      raise ValueError('Ablation.metrics is empty')
    if not self.seeds or len(set(self.seeds)) < len(self.seeds):
      raise ValueError(f'Ablation.seeds={tuple(self.seeds)} must be different numbers')
    if common := set(self.seeds) & set(self.choose_seeds):
      raise ValueError(
        f'Ablation.choose_seeds has {sorted(common)}, which seeds has too: a run that chooses is '
        'none that is reported'
      )
    order = list(self.cells)
    for label, bindings in self.measured.items():
      for other, _ in bindings.values():
        if other not in order[: order.index(label)]:
          raise ValueError(
            f'Ablation.measured: {label!r} needs {other!r}, which must come before it in the cells'
          )

  def only(self, labels: Sequence[str]) -> 'Ablation':
    """The ablation with some of its cells, in their order.

    Raises:
      ValueError: there is no such cell, or a cell needs another one.
    """
    check_settings('Ablation', self.shared, self.cells, labels)
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
    self, label: str, seed: int, values: Mapping[str, Any], request: Request, *bindings: str
  ) -> runs_lib.Run:
    """The run of a cell with a seed and chosen hyperparameters; `bindings` come after its own."""
    chosen = [f'{name} = {value!r}' for name, value in values.items()]
    settings = [*self.shared, *self.cells[label], *bindings]
    run = request.run_of(settings)
    return dataclasses.replace(
      run, gin_bindings=[*run.gin_bindings, *chosen, f'RANDOM_SEED = {seed}']
    )

  def run(self, request: Request) -> Iterator[Outcome]:
    """Trains the runs that are not complete, and reports after every seed.

    Leaves the gin configuration of a run parsed.

    Raises:
      ValueError: a setting is wrong.
      exit_codes.Preempted, nonfinite.NonFiniteStop: as `runs.complete`.
    """
    chosen = {name for label in self.cells for name in self.candidates(label)[0]}
    for binding in request.gin_bindings:
      if (name := binding.partition('=')[0].strip()) in chosen:
        raise ValueError(f'--gin.{name} has no effect: it is chosen; bind Ablation.choose instead')
    ablation = self if request.seeds is None else dataclasses.replace(self, seeds=request.seeds)
    if request.cells is not None:
      ablation = ablation.only(request.cells)
    yield from _Training(ablation, request).outcomes()


def _check_grid(where: str, grid: Any) -> None:
  """Raises ValueError unless it is {name: values} with at least one value each."""
  if not isinstance(grid, Mapping) or not all(
    isinstance(values, Sequence) and not isinstance(values, str) and len(values)
    for values in grid.values()
  ):
    raise ValueError(
      f'Ablation.{where} is {grid!r}; it must be {{macro or parameter: (value, ...)}}'
    )


@dataclasses.dataclass(frozen=True)
class _Cell:
  """A run of a cell."""

  label: str
  seed: int
  values: Mapping[str, Any]  # of chosen hyperparameters

  def folder(self, output_dir: Path) -> Path:
    values = ''.join(f',{_folder_name(f"{k}={v}")}' for k, v in self.values.items())
    return output_dir / _folder_name(self.label) / f'seed={self.seed}{values}'

  def __str__(self) -> str:
    return ', '.join(
      [self.label, *(f'{k} {v}' for k, v in self.values.items()), f'seed {self.seed}']
    )


def _folder_name(text: str) -> str:
  return re.sub(r'[^\w.=+-]+', '_', text).strip('_')


class _Training:
  """The runs of an ablation in an output directory."""

  def __init__(self, ablation: Ablation, request: Request):
    self._ablation, self._request = ablation, request
    self._counts = {}  # {label: ParamCounts}
    self._finished = 0
    to_choose = sum(len(ablation.candidates(label)) for label in self._with_choice())
    self._total = to_choose * len(ablation.choose_seeds) + len(ablation.cells) * len(ablation.seeds)

  def outcomes(self) -> Iterator[Outcome]:
    chosen = {label: self._choose(label) for label in self._ablation.cells}
    found = {label: [] for label in self._ablation.cells}  # [seed]{metric: value}
    folders = {label: [] for label in self._ablation.cells}
    for seed in self._ablation.seeds:
      for label in self._ablation.cells:
        cell = _Cell(label, seed, chosen[label][0])
        others = self._ablation.measured.get(label, {})
        bindings = [f'{k} = {found[other][-1][name]!r}' for k, (other, name) in others.items()]
        folders[label].append(self._complete(cell, self._ablation.report_split, bindings))
        found[label].append(self._values(folders[label][-1]))
      yield _Results(self._ablation, found, folders, chosen, self._counts).outcome()

  def _with_choice(self) -> list[str]:
    return [x for x in self._ablation.cells if len(self._ablation.candidates(x)) > 1]

  def _choose(self, label: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The best candidate; and if there are several, all of them with their mean NLL."""
    candidates = self._ablation.candidates(label)
    if len(candidates) == 1:
      return candidates[0], []
    tried = [values | {NLL: self._mean_nll(label, values)} for values in candidates]
    best = min(range(len(tried)), key=lambda i: tried[i][NLL])
    if not math.isfinite(tried[best][NLL]):
      raise ValueError(f'Ablation: no values of {", ".join(candidates[0])} let {label!r} train')
    for name, value in candidates[best].items():
      values = sorted({x[name] for x in candidates}) if _are_numbers(candidates, name) else []
      if len(values) > 2 and value in (values[0], values[-1]):
        _log.warning('%s: the best %s, %s, is at the end of those tried.', label, name, value)
    return candidates[best], tried

  def _mean_nll(self, label: str, values: Mapping[str, Any]) -> float:
    """Mean over the seeds that choose; infinite if a run is not finite."""
    found = []
    for seed in self._ablation.choose_seeds:
      cell = _Cell(label, seed, values)
      try:
        folder = self._complete(cell, self._ablation.choose_split, [])
      except nonfinite.NonFiniteStop as stop:
        _log.warning('%s: not finite at step %d, so not chosen.', cell, stop.step)
        return math.inf
      found.append(_final_values(folder, [NLL])[NLL])
    mean = statistics.fmean(found)
    return mean if math.isfinite(mean) else math.inf

  def _complete(self, cell: _Cell, split: str, bindings: Sequence[str]) -> Path:
    """The folder of the run, trained."""
    self._finished += 1
    _log.info('=== run %d of %d: %s', self._finished, self._total, cell)
    run = self._ablation.training_run(
      cell.label, cell.seed, cell.values, self._request, f'EVAL_SPLIT = {split!r}', *bindings
    )
    folder = cell.folder(self._request.output_dir)
    runs_lib.complete(run, folder)
    if cell.label not in self._counts:
      self._counts[cell.label] = runs_lib.configured_model()[1]
    return folder

  def _values(self, folder: Path) -> dict[str, float]:
    values = _final_values(folder, self._ablation.metrics)
    if self._ablation.analysis is not None:
      values |= _kept(folder / 'analysis.json', lambda: self._ablation.analysis(folder))
    return values


def _are_numbers(candidates, name) -> bool:
  return all(isinstance(x[name], int | float) for x in candidates)


def _kept(path: Path, compute: Callable[[], Mapping[str, float]]) -> dict[str, float]:
  if run_files.read_json(path) is None:  # missing, or damaged
    reporting.write_json(compute(), path)
  return run_files.read_json(path)


def _final_values(run_dir: Path, names: Sequence[str]) -> dict[str, float]:
  """The last values of metrics, from the files of a run.

  Raises:
    ValueError: the run has no such metric.
  """
  metrics = run_files.read_lines(run_dir / 'metrics.jsonl')
  found = {}
  for line in metrics:
    found |= {k: math.nan if v is None else v for k, v in line.items()}
  for group, values in runs_lib.final_evaluations(metrics).items():
    found |= values if group.startswith('training_eval/') else {}
  if missing := [name for name in names if name not in found]:
    evaluated = sorted(name for name in found if name.partition('/')[0] not in _OF_TRAINING)
    raise ValueError(
      f'Ablation.metrics has {missing[0]!r}; the run in {run_dir} has {", ".join(evaluated)}'
    )
  return {name: found[name] for name in names}


@dataclasses.dataclass(frozen=True)
class _Results:
  """All results so far."""

  ablation: Ablation
  found: Mapping[str, Sequence[Mapping[str, float]]]  # by label and seed
  folders: Mapping[str, Sequence[Path]]
  chosen: Mapping[str, tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]]
  counts: Mapping[str, Any]

  def outcome(self) -> Outcome:
    rows = [self._row(label) for label in self.ablation.cells]
    num_seeds = len(self.found[self._baseline])
    seeds = self.ablation.seeds[:num_seeds]
    curves = {
      label: runs_lib.curves(run_files.read_lines(folders[0] / 'metrics.jsonl'))
      for label, folders in self.folders.items()
    }
    return Outcome(
      title=self.ablation.title,
      introduction=f'{self.ablation.paper} Here: mean and standard error of {num_seeds} seeds '
      f'({", ".join(map(str, seeds))}) on {self.ablation.report_split}.',
      rows=rows,
      tables=[t for t in (self._tests(rows), self._choices()) if t is not None],
      notes=[
        'extra: parameters beyond the deterministic head. Parameters are counted without the '
        'padding of the classes.',
      ],
      figures=[
        reporting.Figure(
          reporting.curve_pngs(curves),
          f'Training loss and temperature, seed {seeds[0]}.',
          'Training loss and temperature tau of every cell by step.',
        )
      ],
      configs={
        label: (folders[0] / 'config.gin').read_text() for label, folders in self.folders.items()
      },
      details={
        'paper': self.ablation.paper,
        'seeds': list(seeds),
        'choices': {label: tried for label, (_, tried) in self.chosen.items() if tried},
      },
    )

  @property
  def _baseline(self) -> str:
    return self.ablation.baseline or next(iter(self.ablation.cells))

  def _row(self, label: str) -> dict[str, Any]:
    runs = self.found[label]
    values = {name: [run[name] for run in runs] for name in runs[0]}
    against = self.found[self._baseline]
    groups = {name: comparison.group_mean(of_name) for name, of_name in values.items()}
    row = {'head': label} | {name: group.mean for name, group in groups.items()}
    row['stderr'] = {name: group.stderr for name, group in groups.items()}
    if label != self._baseline:
      row['p'] = {
        name: comparison.welch_p(of_name, [run[name] for run in against])
        for name, of_name in values.items()
      }
    counts = self.counts[label]
    row |= {'num_params': counts.total, 'extra_params': counts.extra}
    row['runs'] = values
    return row | {'chosen': dict(self.chosen[label][0])}

  def _tests(self, rows: Sequence[Mapping[str, Any]]) -> reporting.Table | None:
    """p of each cell and metric; None if nothing can be tested."""
    lines = [
      [row['head'], *(reporting.p_text(p) for p in row['p'].values())] for row in rows if 'p' in row
    ]
    if len(self.found[self._baseline]) < 2 or not lines:
      return None
    return reporting.Table(
      f"p of Welch's t-test against {self._baseline}",
      ['cell', *rows[0]['stderr']],
      lines,
    )

  def _choices(self) -> reporting.Table | None:
    lines = [
      [
        label,
        _values_text({k: v for k, v in x.items() if k != NLL}),
        f'{x[NLL]:.3f}' + ('*' if all(x[k] == v for k, v in best.items()) else ''),
      ]
      for label, (best, tried) in self.chosen.items()
      for x in tried
    ]
    if not lines:
      return None
    return reporting.Table(
      f'Chosen by NLL on {self.ablation.choose_split}, seeds '
      f'{", ".join(map(str, self.ablation.choose_seeds))}',
      ['cell', 'values', 'NLL'],
      lines,
    )


def _values_text(values: Mapping[str, Any]) -> str:
  return ', '.join(f'{name} {value}' for name, value in values.items())
