"""Few-shot results of several runs as tables, a JSON file and a page."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from het_plugin import reporting
from het_plugin.evaluation import comparison
from het_plugin.evaluation.fewshot import FewShotResult

# {run: {data set: {shots: result}}}
Results = Mapping[str, Mapping[str, Mapping[int, FewShotResult]]]
Row = Mapping[str, Any]


class Report:
  """All that is known about some runs.

  Attributes:
    protocol: its settings.
    rows: one per run, data set and number of shots.
    averages: see `averages`.
    differences: see `differences`.
  """

  def __init__(self, protocol: Mapping[str, Any], earlier: Sequence[Row], results: Results):
    """Compares runs.

    Args:
      protocol: settings of the protocol, by name.
      earlier: rows of an earlier report, shown first; they have no part in the differences.
      results: of the runs.
    """
    self.protocol = dict(protocol)
    self.rows = [
      *earlier,
      *(
        {'run': run, 'dataset': dataset, **result.record()}
        for run, by_dataset in results.items()
        for dataset, by_shots in by_dataset.items()
        for result in by_shots.values()
      ),
    ]
    self.averages = averages(self.rows)
    self.differences = differences(results)

  def write(self, program: str, *, json: str | None, html: str | None) -> None:
    """Prints the tables and writes the files whose paths are given."""
    tables = [reporting.text_table(self._by_run(), row_title='run')]
    tables += [f'{t.caption}\n{reporting.aligned([t.header, *t.lines])}' for t in self._tables()]
    print('\n' + '\n\n'.join([*tables, *self._warnings()]))
    if json:
      reporting.write_json(vars(self), json)
    if html:
      Path(html).parent.mkdir(parents=True, exist_ok=True)
      Path(html).write_text(self._page(program))

  def _by_run(self) -> list[dict[str, Any]]:
    """One row per run, as `reporting` lays them out."""
    runs = {}
    for row in self.rows:
      table = runs.setdefault(row['run'], {'head': row['run'], 'fewshot': {}, 'fewshot_stderr': {}})
      for name, value in (('fewshot', row['mean']), ('fewshot_stderr', row['stderr'])):
        table[name].setdefault(row['dataset'], {})[row['shots']] = value
    return list(runs.values())

  def _tables(self) -> list[reporting.Table]:
    """The averages and the differences, where there are any."""
    found = []
    if self.averages:
      lines = [
        (
          row['method'],
          str(row['shots']),
          _with_error(row['mean'], row['stderr']),
          str(row['num_cells']),
        )
        for row in self.averages
      ]
      header = ('method', 'shots', 'accuracy', 'cells')
      found.append(reporting.Table('Average over data sets and settings', header, lines))
    if self.differences:
      lines = [
        (
          f'{row["run"]} - {row["baseline"]}',
          row['dataset'],
          str(row['shots']),
          _with_error(row['mean'], row.get('stderr_rows'), '+'),
          *(_p(row.get(name)) for name in ('p_draws', 'p_rows', 'p_datasets')),
        )
        for row in self.differences
      ]
      header = ('runs', 'data set', 'shots', 'accuracy', 'p draws', 'p rows', 'p data sets')
      found.append(reporting.Table('Paired differences', header, lines))
    return found

  def _warnings(self) -> list[str]:
    """Classes with too few examples and test rows without a class, which lower an accuracy."""
    short, unseen = {}, {}
    for row in self.rows:
      if row['classes_short']:
        short[f'{row["dataset"]} {row["shots"]} shots'] = row['classes_short']
      if row['test_unseen']:
        unseen[row['dataset']] = row['test_unseen']
    found = {
      'Classes with fewer examples than shots, of which all are used': short,
      'Test rows of classes without any training example, which count as wrong': unseen,
    }
    return [
      f'{what}: {", ".join(f"{name} {number}" for name, number in numbers.items())}.'
      for what, numbers in found.items()
      if numbers
    ]

  def _page(self, program: str) -> str:
    accuracies = {}
    for row in self.rows:
      by_shots = accuracies.setdefault(row['run'], {}).setdefault(row['dataset'], {})
      by_shots[row['shots']] = row['mean'], row['stderr']
    protocol = ', '.join(f'{name} {value}' for name, value in self.protocol.items())
    return reporting.html_page(
      title='Few-shot linear evaluation',
      introduction='Accuracy of a linear classifier fitted to a few examples per class.',
      rows=self._by_run(),
      row_title='run',
      tables=self._tables(),
      notes=[
        f'Mean and standard error over draws of the examples. Protocol: {protocol}.',
        'Differences are paired, with the standard error over test rows. p draws: t-test over '
        'draws; p rows: t-test over test rows; p data sets: signed-rank test over data sets.',
        *self._warnings(),
      ],
      figures=[
        reporting.Figure(
          reporting.shots_png(accuracies),
          'Accuracy by shots.',
          'Few-shot accuracy by number of shots: one panel per data set, one line per run.',
        )
      ],
      provenance=reporting.Provenance.of_this_process(program, {}),
    )


def averages(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """One row per method and number of shots, over all data sets and settings (table 22).

  Methods are averaged over the same cells (data set, setting): those that all of them have.
  """
  methods = {}
  for row in rows:
    method, _, setting = row['run'].partition('/')
    methods.setdefault((row['shots'], method), {})[row['dataset'], setting] = row
  averaged = []
  for shots in sorted({shots for shots, _ in methods}):
    of_shots = {m: cells_of for (n, m), cells_of in methods.items() if n == shots}
    common = set.intersection(*map(set, of_shots.values()))
    for method, cells_of in of_shots.items():
      if len(common) > 1:
        chosen = [cells_of[key] for key in common]
        mean = comparison.average([c['mean'] for c in chosen], [c['stderr'] for c in chosen])
        averaged.append({'method': method, 'shots': shots, **dataclasses.asdict(mean)})
  return averaged


def differences(results: Results) -> list[dict[str, Any]]:
  """Differences of each run to the first, per data set and number of shots, and over data sets."""
  if not results:
    return []
  (first, baseline), *others = results.items()
  rows = []
  for run, by_dataset in others:
    common = [name for name in by_dataset if name in baseline]
    for name in common:
      for shots in sorted(set(by_dataset[name]) & set(baseline[name])):
        found = comparison.difference(by_dataset[name][shots], baseline[name][shots])
        rows.append(
          {'run': run, 'baseline': first, 'dataset': name, 'shots': shots}
          | dataclasses.asdict(found)
        )
    shared = set.intersection(*(set(r[n]) for r in (by_dataset, baseline) for n in common))
    for shots in sorted(shared) if len(common) > 1 else ():
      ours, theirs = ({n: r[n][shots] for n in common} for r in (by_dataset, baseline))
      rows.append(
        {
          'run': run,
          'baseline': first,
          'dataset': f'all {len(common)}',
          'shots': shots,
          'mean': float(np.mean([ours[n].mean - theirs[n].mean for n in common])),
          'p_datasets': comparison.signed_rank_p(ours, theirs),
        }
      )
  return rows


def _with_error(mean: float, stderr: float | None, sign: str = '') -> str:
  return f'{mean:{sign}.4f}' + (f' ±{stderr:.4f}' if stderr is not None else '')


def _p(p: float | None) -> str:
  return '–' if p is None else f'{p:.3g}'
