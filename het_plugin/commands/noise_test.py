"""Estimates what heads with noise, and a hidden layer, would gain over DET; fits none of them.

    python -m het_plugin.noise_test --train=train.npz          # saved features and labels
    python -m het_plugin.noise_test --checkpoint=runs/det      # a trained DET

Of a run the head is taken as it is, and the test is on a split that it was not trained on. Of a
published file, or of a run with another head, give the representations: `het_plugin.represent`
writes them, and --train=RUN computes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import numpy as np

from het_plugin import estimators, measures, reporting, runs
from het_plugin.cli.settings import ReportFolder
from het_plugin.commands import evaluate
from het_plugin.commands._rows import have_learned, read
from het_plugin.evaluation.names import short_names
from het_plugin.measures import votes
from het_plugin.system.flag_values import NoisyHead
from het_plugin.system.ranges import NOT_EMPTY, Count, Positive

_FITS_OF_ROWS: dict[str, Any] = {'folds': 5, 'tol': 1e-4}
_OF_ROWS = ('target', 'C')
_OF_RUNS = ('dataset', 'split', 'batch_size', 'max_examples', 'gin_file', 'gin_bindings')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(ReportFolder, evaluate.OnTask):
  """What is tested, and how.

  Attributes:
    train: Rows: F.npz[:SPLIT], F.safetensors, X.npy,Y.npy, a folder of them, a run or a task.
    target: votes: the labels of a row are votes.
    checkpoint: A run's directory, or one checkpoint, whose head is Det; repeatable.
    heads: Heads to test, from het, het_h, het_xl.
    C: Inverse strength of the regularisation, as in scikit-learn.
    num_factors: R.
    folds: Folds of the rows. Default: 5, of a run 2.
    tol: A fit ends when its gradient is this small. Default: 0.0001, of a run 0.001.
    max_iter: Largest number of iterations of a fit.
    seed: Seed of the folds and of the directions.
    html: Where to write a page.
  """

  train: str | None = None
  target: Literal['auto', 'votes'] = 'auto'
  heads: Annotated[tuple[NoisyHead, ...], NOT_EMPTY] = get_args(NoisyHead)
  C: Positive = 1.0
  num_factors: Count = 8
  folds: Annotated[int, '[2, inf)'] | None = None
  tol: Positive | None = None
  max_iter: Count = 500
  seed: Annotated[int, '[0, inf)'] = 0
  html: str | None = None

  def __post_init__(self):
    if bool(self.train) == bool(self.checkpoint):
      raise ValueError('--train or --checkpoint is needed: one of them')
    if self.train:
      self.refuse(_OF_RUNS, '--train: it is for --checkpoint')
    else:
      self.refuse(_OF_ROWS, '--checkpoint: it is for --train')


def run(settings: Settings) -> reporting.Report:
  """Gains of heads over DET."""
  fits: dict[str, Any] = settings.chosen('heads', 'num_factors', 'max_iter', 'seed')
  fits |= {name: x for name, x in settings.chosen('folds', 'tol').items() if x is not None}
  if settings.checkpoint:
    settings.join()
    return of_runs(settings, fits)
  rows, name = read(settings.train or '', 'the rows', 'train')
  y, _, target = estimators.targets.of_rows(rows, settings.target)
  fits = {**_FITS_OF_ROWS, **fits, 'C': settings.C, 'target': target}
  report = make_report({'rows': estimators.noise_gain.noise_test(rows.features, y, **fits)}, name)
  if have_learned(rows):
    note = (
      'The features are of a run that was trained on these labels. The noise gains little on what '
      'it has learned: take a split that it was not trained on.'
    )
    return dataclasses.replace(report, notes=[*report.notes, note])
  return report


def of_run(run: runs.Run, task: str, split: str, **settings: Any) -> estimators.noise_gain.Result:
  """`noise_test` of a trained DET, on a split that it was not trained on; every process calls it.

  Args:
    run: of a `ClassificationModel` whose head is `Det`.
    task, split: whose examples are represented.
    **settings: batch_size and max_examples of `Run.rows`, and those of `noise_test`.

  Raises:
    ValueError: the labels do not fit.
  """
  from jax.experimental import multihost_utils

  limits = {name: settings.pop(name) for name in ('batch_size', 'max_examples') if name in settings}
  rows = run.rows(split, ('features',), task=task, **limits)
  head = run.model.head
  params = run.params['head']
  w, b = (multihost_utils.process_allgather(params[x], tiled=True) for x in ('kernel', 'bias'))
  tau = float(head.own_temperature.apply({'params': params.get('temperature', {})}))
  k = head.num_classes
  location = np.asarray(w[:, :k] / tau, np.float32), np.asarray(b[:k] / tau, np.float32)
  y = rows.labels
  target = 'votes'
  if head.link == 'sigmoid':
    y = votes.indicator(rows.labels, k).astype(int)
    target = 'indicator'
  labelled = (rows.labels >= 0).any(axis=1)
  given = rows.features[labelled], y[labelled]
  return estimators.noise_gain.noise_test(
    *given, C=estimators.noise_gain.REFIT_C, target=target, location=location, **settings
  )


def of_runs(settings: Settings, fits: Mapping[str, Any]) -> reporting.Report:
  """The report of the test of trained runs, all on one split; every process calls it.

  `fits` are settings of `noise_gain.noise_test`.

  Raises:
    ValueError: a run is none of DET, or the split does not fit.
  """
  configs = [runs.configuration(source, *settings.gin) for source in settings.checkpoint]
  for config in configs:
    config.checkpoint.check_trained(hint='--train takes its representations')
    model = config.argument('model')
    head = type(getattr(model, 'head', model)).__name__
    if head != 'Det':
      raise ValueError(
        'noise_test is for a model whose head is Det; '
        f'--checkpoint={config.checkpoint.path} has {head}: --train takes its representations'
      )
  task, split = evaluate.task_and_split(settings.dataset, settings.split, configs)
  limits = settings.chosen('batch_size', 'max_examples')
  found = {
    name: of_run(config.open(), task, split, **limits, **fits)
    for name, config in zip(short_names(settings.checkpoint), configs, strict=True)
  }
  return make_report(found, f'{task}, split {split}')


def make_report(found: Mapping[str, estimators.noise_gain.Result], where: str) -> reporting.Report:
  """A report of the tests of rows or of runs, by name; `where` says which examples they are of."""
  shown = []
  rows = []
  notes = []
  for name, result in found.items():
    of_all: dict[str, Any] = {'nll_det': result.nll, 'gradient': result.gradient}
    of_all |= {'seconds': result.seconds, 'num_rows': result.num_rows}
    if result.refit is not None:
      refit = float(result.refit.mean()), measures.uncertainty.stderr(result.refit)
      of_all |= {'refit': refit[0], 'refit_stderr': refit[1]}
      notes.append(
        f'{name}: fitting W of DET to such examples gains {_pm(*refit)}. All gains are over that.'
      )
    for tested in result.tested:
      row = tested.row()
      rows.append({'name': name, **row, **of_all})
      title = estimators.noise_gain.TITLES.get(tested.name, tested.name)
      errors = {'gain': row['stderr'], 'gain at constant noise': row.get('constant_stderr')}
      price = None if row['price'] is None else f'{row["price"]:.3g}'
      shown.append(
        {
          'name': title if len(found) == 1 else f'{name}: {title}',
          'gain': row['gain'],
          'gain at constant noise': row.get('constant'),
          'price': price,
          'chosen': row['chosen'][0],
          'stderr': errors,
        }
      )
    gains = {t.name: _pm(t.gain.mean(), measures.uncertainty.stderr(t.gain)) for t in result.tested}
    hidden = gains.pop(estimators.noise_gain.HIDDEN)
    lines = [
      f'{estimators.noise_gain.TITLES[x]} would gain {gain} nats; a hidden layer {hidden}.'
      for x, gain in gains.items()
    ]
    notes = [*(lines if len(found) == 1 else [f'{name}: {line}' for line in lines]), *notes]
    if result.num_rows < estimators.noise_gain.FEW:
      notes.append(
        f'{name}: {result.num_rows} rows are too few: gains and errors of them say nothing.'
      )
    if result.left_out:
      notes.append(f'{name}: left out, because no other fold has their class: {result.left_out}.')
    if result.gradient > result.tol:
      notes.append(
        f'{name}: the gradient of a fit of DET is {result.gradient:.1e}, above '
        f'tol={result.tol:g}: heads seem to gain what DET has yet to learn.'
      )
  some = next(iter(found.values()))
  notes.append(
    'gain: by how much the NLL of held-out folds would fall, to the first order in the noise. '
    'Fits gained two to eight times as much where both were measured (docs/when.md). ± is a '
    'standard error over examples. price: p / (2N) of the noise without regularisation. '
    'constant noise: the same for all x. chosen: what the other folds choose for the first one: '
    'none, constant noise, or C_noise / C, the strength of the noise or of the hidden layer. '
    f'{estimators.noise_gain.HIDDEN}: {estimators.noise_gain.NUM_HIDDEN} random units beside W.'
  )
  return reporting.Report(
    title='What noise would gain over DET',
    introduction=f'{some.num_rows:,} examples of {where}; NLL of DET {some.nll:.4f}, '
    f'{some.seconds:.0f} s.',
    rows=shown,
    row_title='head',
    notes=notes,
    json=rows,
  )


def _pm(mean, stderr):
  return f'{mean:.4f} ± {stderr or 0.0:.4f}'
