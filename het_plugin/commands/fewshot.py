"""Few-shot linear evaluation of saved representations, or of checkpoints.

    python -m het_plugin.fewshot --train=det/train.npz --test=det/test.npz --shots=1,5,10,25
    python -m het_plugin.fewshot --checkpoint=runs/det --checkpoint=runs/het_xl --datasets=digits

--train, --test and --checkpoint may be repeated; every run is compared with the first, paired.
Prints accuracies with standard errors over draws, their averages over data sets and settings (table
22 of Collier et al. 2023), and differences; --json and --html write them too. --results=A.json
shows results of earlier calls next to them.

A run's name is METHOD or METHOD/SETTING; averages are over data sets and the settings of a method.
Several labels of an example are votes. The most frequent one counts.

Files of several data sets make one run under --names=RUN:DATASET,RUN:DATASET.
"""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from het_plugin import evaluation, reporting, runs
from het_plugin import rows as rows_lib
from het_plugin.cli.settings import Batches, Gin, OneOf, Repeated, ResultFiles
from het_plugin.commands._rows import OF_CHECKPOINT
from het_plugin.evaluation.names import choose_names, naming
from het_plugin.measures import comparison, fewshot
from het_plugin.system.ranges import Count, Seeds

Row = Mapping[str, Any]
_KEY = operator.itemgetter('run', 'dataset', 'shots')
_SHOWN = ('run', 'dataset', 'shots', 'mean', 'stderr', 'classes_short', 'test_unseen')
_OF_CHECKPOINTS = ('datasets', 'splits', 'layer', 'batch_size', 'gin_file', 'gin_bindings')
# Flags of --train or --checkpoint.
_OF_FITS = ('protocol', 'classifier', 'draw', 'l2', 'shots', 'fractions', 'seeds')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Gin, Batches, ResultFiles):
  """What is compared, and how.

  Attributes:
    train: Rows that shots are drawn from: F.npz[:SPLIT], F.safetensors, X.npy,Y.npy, a folder of
      them, a run or a task; repeatable.
    test: Rows to measure accuracies on, as --train; repeatable.
    checkpoint: A run's directory, a checkpoint in it, .npz or .safetensors; repeatable.
    datasets: For checkpoints: tasks, .npz files or folders, TASK or NAME=TASK; by default those
      that gin files bind to FewShotAction.datasets, else digits and glyphs_heldout.
    splits: Training and test split of --datasets; by default train, and test or else validation.
    names: Names of the runs: METHOD or METHOD/SETTING; for files also RUN:DATASET.
    results: A --json file of an earlier call, shown in the same tables; repeatable.
    protocol: A named combination of the following three.
    classifier: By default from the protocol.
    draw: By default from the protocol.
    l2: A number or loo, heldout, mean_rank, mean_rank_others; by default from the protocol.
    shots: Examples per class; 'all' takes every one.
    fractions: Shares of the examples of each class, beside --shots or, if that is not given, alone.
    seeds: One subset is drawn for each.
    layer: The checkpoints' representation.
  """

  aliases: ClassVar = {'dataset': 'datasets', 'split': 'splits'}

  train: Repeated[str] = ()
  test: Repeated[str] = ()
  checkpoint: Repeated[str] = ()
  datasets: tuple[str, ...] | None = None
  splits: tuple[str, ...] | None = None
  names: tuple[str, ...] | None = None
  results: Repeated[str] = ()
  protocol: Annotated[str, OneOf(tuple(fewshot.PROTOCOLS))] = 'loo'
  classifier: fewshot.Classifier | None = None
  draw: fewshot.Draw | None = None
  l2: fewshot.L2 | None = None
  shots: tuple[Count | Literal['all'], ...] = (1, 5, 10, 25)
  fractions: tuple[Annotated[float, '(0, 1)'], ...] = ()
  seeds: Seeds = (0, 1, 2)
  layer: str = 'pre_logits'

  def __post_init__(self):
    num_train = len(self.train)
    num_test = len(self.test)
    if num_train != num_test:
      raise ValueError(
        f'--train is given {num_train} times and --test {num_test} times; each run needs both'
      )
    if self.train and self.checkpoint:
      raise ValueError(
        '--train and --checkpoint cannot go together: represent the checkpoints first'
      )
    if not (self.train or self.checkpoint or self.results):
      raise ValueError('--train and --test, --checkpoint, or --results are needed')
    if not self.checkpoint:
      self.refuse(_OF_CHECKPOINTS, OF_CHECKPOINT, 'is for')
    if not (self.train or self.checkpoint):
      self.refuse(_OF_FITS, '--results alone, which are shown as they are')
    if self.splits is not None and len(self.splits) != 2:
      raise ValueError(f'--splits={",".join(self.splits)} must be a training and a test split')

  @property
  def fits(self) -> dict[str, Any]:
    """Protocol, shots and seeds."""
    parts = {name: x for name, x in self.chosen('classifier', 'draw', 'l2').items() if x}
    protocol = dataclasses.replace(fewshot.PROTOCOLS[self.protocol], **parts)
    shots = self.shots if 'shots' in self.given or not self.fractions else ()
    return {'protocol': protocol, 'shots': (*shots, *self.fractions), 'seeds': self.seeds}


def run(settings: Settings) -> reporting.Report:
  """Accuracies of all runs, and their differences."""
  settings.join()
  earlier = read_results(settings.results)
  protocol = {'name': settings.protocol, **dataclasses.asdict(settings.fits['protocol'])}
  evaluate = from_checkpoints if settings.checkpoint else from_files
  return make_report(protocol, earlier, evaluate(settings))


def from_files(settings: Settings) -> comparison.Results:
  """Evaluates representations; each pair of a training and a test file is a data set of a run."""
  names = settings.names
  train = settings.train
  of_runs = {}
  classes = {}  # of each data set, in the order of the first run
  chosen = choose_names(names, train, distinct=False)
  for name, *pair in zip(chosen, train, settings.test, strict=True):
    halves = runs.sources.read_pair(pair)
    run, colon, dataset = name.partition(':') if names else (name, '', '')
    dataset = dataset if colon else halves[0].provenance.get('dataset', 'saved')
    datasets = of_runs.setdefault(run, {})
    if dataset in datasets:
      raise ValueError(
        f'--train={pair[0]}: run {run!r} has the data set {dataset!r} twice: tell them apart with '
        '--names=RUN:DATASET,...'
      )
    order = classes.setdefault(dataset, halves[0].class_names)
    datasets[dataset] = tuple(map(_split, pair, [half.in_order(order) for half in halves]))
    first = next(iter(of_runs.values())).get(dataset, datasets[dataset])[1]
    test_rows = datasets[dataset][1]
    if not all(np.array_equal(getattr(first, x), getattr(test_rows, x)) for x in ('index', 'y')):
      raise ValueError(
        f'--test={pair[1]} has other rows than the test file of {next(iter(of_runs))!r}, with '
        f'which run {run!r} is compared on {dataset!r}: give the same examples, or different data '
        'sets in --names=RUN:DATASET,...'
      )
  return {run: _evaluate(run, datasets, **settings.fits) for run, datasets in of_runs.items()}


def from_checkpoints(settings: Settings) -> comparison.Results:
  """Evaluates checkpoints; the representations of their data sets are kept in memory."""
  results = {}
  opened = {}
  names = choose_names(settings.names, settings.checkpoint)
  # All checkpoints are found before the first one is evaluated.
  for name, checkpoint in zip(names, settings.checkpoint, strict=True):
    config = runs.configuration(checkpoint, *settings.gin)
    bound = config.bindings('FewShotAction').get('datasets')
    chosen = evaluation.fewshot.choose(settings.datasets, settings.splits, bound)
    protocol = settings.fits['protocol']
    fewshot.check_settings((1,), settings.seeds, protocol.l2, len(chosen))
    opened[name] = config, chosen
  for name, (config, chosen) in opened.items():
    run = config.open()
    for dataset in chosen:
      evaluation.fewshot.check(run, dataset, settings.batch_size)
    data = {}
    with reporting.Progress(f'{name}: data', len(chosen), unit='data sets') as progress:
      for dataset in chosen:
        data[dataset.name] = evaluation.fewshot.read(
          run, dataset, settings.layer, settings.batch_size
        )
        progress.update(1)
    results[name] = _evaluate(name, data, **settings.fits)
  return results


def _split(source: str, rows: rows_lib.Rows) -> fewshot.Split:
  order = np.argsort(rows.index, kind='stable')  # files of two runs may have two orders
  with naming(source):
    x = rows_lib.Reordered(rows.features, order)
    return fewshot.Split(x, rows.consensus[order], rows.index[order])


def _evaluate(
  run: str,
  data: Mapping[str, tuple[fewshot.Split, fewshot.Split]],
  protocol: fewshot.Protocol,
  shots: Sequence[float | str],
  seeds: Sequence[int],
) -> dict[str, dict[float, fewshot.FewShotResult]]:
  """{data set: {shots: result}} of a run."""
  most = max(int(max(np.unique(train.y, return_counts=True)[1])) for train, _ in data.values())
  numbers = [*dict.fromkeys(most if isinstance(n, str) else n for n in shots)]
  fits = sum(
    len(fewshot.used_seeds(protocol, seeds, n, train.y))
    for train, _ in data.values()
    for n in numbers
  )
  with reporting.Progress(run, fits, unit='fits') as progress:
    return fewshot.few_shot_all(
      data, protocol, shots=numbers, seeds=seeds, on_trial=lambda: progress.update(1)
    )


def read_results(paths: Sequence[str]) -> dict[str, dict[str, Any]]:
  """The --json of earlier calls, by path.

  Raises:
    ValueError: a file is something else, or a run has two results for a data set and shots.
  """
  found = {}
  of_key = {}
  for path in paths:
    try:
      found[path] = json.loads(Path(path).read_text())
      for row in found[path]['rows']:
        operator.itemgetter(*_SHOWN)(row)
      dict(found[path]['protocol'])
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
      raise ValueError(f'--results={path} is not a --json of this program: {error!r}') from error
    for key in map(_KEY, found[path]['rows']):
      if key in of_key:
        run, dataset, shots = key
        raise ValueError(
          f'--results={path} has a result of run {run!r} for {dataset}, '
          f'{reporting.shots_text(shots)}, and so has '
          f'{of_key[key]}: leave one out, or repeat one call with other --names'
        )
      of_key[key] = path
  return found


def make_report(
  protocol: Mapping[str, Any], earlier: Mapping[str, Mapping[str, Any]], results: comparison.Results
) -> reporting.Report:
  """Compares runs; rows of `earlier`, of `read_results`, are shown first, without differences."""
  rows = []
  for run, by_dataset in results.items():
    for dataset, by_shots in by_dataset.items():
      about = {'run': run, 'dataset': dataset, 'protocol': dict(protocol)}
      rows += [{**about, **x.record()} for x in by_shots.values()]
  # A file may itself have results of earlier calls, with protocols of their own.
  before = [{'protocol': x['protocol'], **row} for x in earlier.values() for row in x['rows']]
  replaced = {*map(_KEY, before)} & {*map(_KEY, rows)}
  rows = [row for row in before if _KEY(row) not in replaced] + rows
  of_runs = {}
  for row in rows:
    of_runs.setdefault(row['run'], []).append(row)
  shown = [{'name': run, **reporting.fewshot_fields(x)} for run, x in of_runs.items()]
  of_methods = comparison.averages(rows)
  of_pairs = comparison.differences(results)
  notes = ['Mean and standard error over draws of the examples.']
  runs_of: dict[str, dict[str, None]] = {}  # by protocol
  for row in rows:
    parts = (f'{name} {value}' for name, value in row['protocol'].items())
    runs_of.setdefault(', '.join(parts).removeprefix('name '), {})[row['run']] = None
  for used, names in runs_of.items():
    of = f' of {", ".join(names)}' if len(runs_of) > 1 else ''
    notes.append(f'Protocol{of}: {used}.')
  if replaced:
    names = ', '.join(
      f'{run} on {dataset}, {reporting.shots_text(n)}' for run, dataset, n in sorted(replaced)
    )
    notes.append(f'Results of this call replace results of --results: {names}.')
  tables = []
  if of_methods:
    lines = [
      (
        x['method'],
        reporting.shots_text(x['shots'], ''),
        reporting.cell(x['mean'], x['stderr'], spec='.4f'),
        str(x['num_cells']),
      )
      for x in of_methods
    ]
    header = ('method', 'shots', 'accuracy', 'cells')
    tables.append(reporting.Table('Average over data sets and settings', header, lines))
  if of_pairs:
    lines = [
      (f'{x["run"]} - {x["baseline"]}', x['dataset'], reporting.shots_text(x['shots'], ''))
      + (reporting.cell(x['mean'], x.get('stderr_rows'), spec='+.4f'),)
      + tuple(reporting.p_text(x.get(name)) for name in ('p_draws', 'p_rows', 'p_datasets'))
      for x in of_pairs
    ]
    header = ('runs', 'data set', 'shots', 'accuracy', 'p draws', 'p rows', 'p data sets')
    tables.append(reporting.Table('Paired differences', header, lines))
    notes.append(
      'Differences are paired, with the standard error over test rows. p draws: t-test over draws; '
      'p rows: t-test over test rows; p data sets: signed-rank test over data sets.'
    )
  lowered = {  # what lowers an accuracy
    'Classes with fewer examples than shots (all their examples are used)': {
      f'{x["dataset"]} with {reporting.shots_text(x["shots"])}': x['classes_short'] for x in rows
    },
    'Test rows of classes without a training example (they count as wrong)': {
      x['dataset']: x['test_unseen'] for x in rows
    },
  }
  for what, numbers in lowered.items():
    if found := [f'{number} of {name}' for name, number in numbers.items() if number]:
      notes.append(f'{what}: {", ".join(found)}.')
  return reporting.Report(
    title='Few-shot linear evaluation',
    introduction='Accuracy of a linear classifier fitted to a few examples of each class.',
    rows=shown,
    tables=tables,
    notes=notes,
    draw=lambda: {'shots': reporting.Figure(reporting.shots_png(shown), 'Accuracy by shots.')},
    json={
      'protocol': dict(protocol) if results else [*earlier.values()][-1]['protocol'],
      'rows': rows,
      'averages': of_methods,
      'differences': of_pairs,
    },
  )
