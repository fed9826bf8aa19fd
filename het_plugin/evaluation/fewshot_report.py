"""Few-shot results of several runs: averages, differences, and the report of them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from het_plugin import reporting
from het_plugin.evaluation import comparison
from het_plugin.evaluation.fewshot import FewShotResult
from het_plugin.evaluation.report import Report

# {run: {data set: {shots: result}}}
Results = Mapping[str, Mapping[str, Mapping[int, FewShotResult]]]
Row = Mapping[str, Any]


def make_report(protocol: Mapping[str, Any], earlier: Sequence[Row], results: Results) -> Report:
  """Compares runs.

  Args:
    protocol: settings of the protocol, by name.
    earlier: rows of an earlier --json, shown first; they have no part in the differences.
    results: of the runs.
  """
  rows = [
    *earlier,
    *(
      {'run': run, 'dataset': dataset, **result.record()}
      for run, by_dataset in results.items()
      for dataset, by_shots in by_dataset.items()
      for result in by_shots.values()
    ),
  ]
  runs, accuracies = {}, {}
  for row in rows:
    shown = runs.setdefault(row['run'], {'head': row['run'], 'fewshot': {}, 'fewshot_stderr': {}})
    for name, value in (('fewshot', row['mean']), ('fewshot_stderr', row['stderr'])):
      shown[name].setdefault(row['dataset'], {})[row['shots']] = value
    by_shots = accuracies.setdefault(row['run'], {}).setdefault(row['dataset'], {})
    by_shots[row['shots']] = row['mean'], row['stderr']
  of_methods, of_pairs = averages(rows), differences(results)
  tables = []
  if of_methods:
    lines = [
      (row['method'], str(row['shots']), _with_error(row), str(row['num_cells']))
      for row in of_methods
    ]
    header = ('method', 'shots', 'accuracy', 'cells')
    tables.append(reporting.Table('Average over data sets and settings', header, lines))
  if of_pairs:
    lines = [
      (
        f'{row["run"]} - {row["baseline"]}',
        row['dataset'],
        str(row['shots']),
        _with_error(row, 'stderr_rows', '+'),
        *(reporting.p_text(row.get(name)) for name in ('p_draws', 'p_rows', 'p_datasets')),
      )
      for row in of_pairs
    ]
    header = ('runs', 'data set', 'shots', 'accuracy', 'p draws', 'p rows', 'p data sets')
    tables.append(reporting.Table('Paired differences', header, lines))
  notes = [
    'Mean and standard error over draws of the examples. Protocol: '
    + ', '.join(f'{name} {value}' for name, value in protocol.items())
    + '.'
  ]
  if of_pairs:
    notes.append(
      'Differences are paired, with the standard error over test rows. p draws: t-test over draws; '
      'p rows: t-test over test rows; p data sets: signed-rank test over data sets.'
    )
  text = 'Accuracy by shots.'
  return Report(
    title='Few-shot linear evaluation',
    introduction='Accuracy of a linear classifier fitted to a few examples per class.',
    rows=list(runs.values()),
    tables=tables,
    notes=[*notes, *_warnings(rows)],
    draw=lambda: {'shots': reporting.Figure(reporting.shots_png(accuracies), text, text)},
    json={
      'protocol': dict(protocol),
      'rows': rows,
      'averages': of_methods,
      'differences': of_pairs,
    },
  )


def _warnings(rows: Sequence[Row]) -> list[str]:
  """Classes with too few examples and test rows without a class, which lower an accuracy."""
  short = {f'{r["dataset"]} {r["shots"]} shots': r['classes_short'] for r in rows}
  unseen = {row['dataset']: row['test_unseen'] for row in rows}
  found = {
    'Classes with fewer examples than shots, of which all are used': short,
    'Test rows of classes without any training example, which count as wrong': unseen,
  }
  return [
    f'{what}: {", ".join(f"{name} {number}" for name, number in numbers.items() if number)}.'
    for what, numbers in found.items()
    if any(numbers.values())
  ]


def averages(rows: Sequence[Row]) -> list[dict[str, Any]]:
  """One row per method and number of shots, over all data sets and settings (Collier et al. 2023,
  table 22).

  Methods are averaged over the same cells (data set, setting): those that all of them have. The
  data sets and settings are fixed and only the draws are random, so the standard error of n cells
  is sqrt(sum of their squared standard errors) / n.
  """
  methods = {}
  for row in rows:
    method, _, setting = row['run'].partition('/')
    methods.setdefault((row['shots'], method), {})[row['dataset'], setting] = row
  averaged = []
  for shots in sorted({shots for shots, _ in methods}):
    of_shots = {m: cells for (n, m), cells in methods.items() if n == shots}
    common = set.intersection(*map(set, of_shots.values()))
    for method, cells in of_shots.items() if len(common) > 1 else ():
      means, errors = ([cells[key][name] for key in common] for name in ('mean', 'stderr'))
      stderr = None if None in errors else float(np.linalg.norm(errors) / len(errors))
      averaged.append(
        {'method': method, 'shots': shots, 'mean': float(np.mean(means)), 'stderr': stderr}
        | {'num_cells': len(common)}
      )
  return averaged


def differences(results: Results) -> list[dict[str, Any]]:
  """Differences of each run to the first, per data set and number of shots, and over data sets."""
  rows = []
  (first, baseline), *others = results.items() or [(None, None)]
  for run, by_dataset in others:
    about = {'run': run, 'baseline': first}
    common = [name for name in by_dataset if name in baseline]
    shared = {name: sorted({*by_dataset[name]} & {*baseline[name]}) for name in common}
    for name in common:
      for n in shared[name]:
        found = comparison.difference(by_dataset[name][n], baseline[name][n])
        rows.append({**about, 'dataset': name, 'shots': n, **dataclasses.asdict(found)})
    for n in sorted(set.intersection(*map(set, shared.values()))) if len(common) > 1 else ():
      ours, theirs = ({name: r[name][n] for name in common} for r in (by_dataset, baseline))
      mean = float(np.mean([ours[name].mean - theirs[name].mean for name in common]))
      p = comparison.signed_rank_p(ours, theirs)
      over_all = {'dataset': f'all {len(common)}', 'shots': n, 'mean': mean, 'p_datasets': p}
      rows.append(about | over_all)
  return rows


def _with_error(row: Row, stderr: str = 'stderr', sign: str = '') -> str:
  error = row.get(stderr)
  return f'{row["mean"]:{sign}.4f}' + ('' if error is None else f' ±{error:.4f}')
