"""What noise would gain over DET, as a report, of saved representations or of a trained run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.experimental import multihost_utils

from het_plugin import reporting
from het_plugin.estimators.noise_gain import (
  HIDDEN,
  NUM_HIDDEN,
  REFIT_C,
  TITLES,
  Result,
  noise_test,
)
from het_plugin.evaluation import probe
from het_plugin.evaluation.names import short_names
from het_plugin.measures import uncertainty, votes

if TYPE_CHECKING:
  from het_plugin.runs import Run
  from het_plugin.runs.opening import GinSettings


def of_rows(source: probe.FileOrArrays, target: str, **settings: Any) -> reporting.Report:
  """The report of the test on saved representations.

  Args:
    source: as in `probe.probe`; of a folder of `represent` the file train.
    target: as in `probe.Settings`.
    **settings: those of `noise_test`.

  Raises:
    ValueError: a file or a setting is wrong.
  """
  if isinstance(source, str) and Path(source).is_dir():
    source = probe.files_of(Path(source))[0]
  rows, name = probe.read(source, 'the rows')
  y, _, target = probe.targets_of(rows, target)
  return make_report({'rows': noise_test(rows.features, y, target=target, **settings)}, name)


def of_run(run: 'Run', task: str, split: str, **settings: Any) -> Result:
  """`noise_test` of a trained DET, on a split that it was not trained on; every process calls it.

  Args:
    run: of a `ClassificationModel` whose head is `Det`, see `check_run`.
    task, split: whose examples are represented.
    **settings: batch_size and max_examples of `Run.rows`, and those of `noise_test`.

  Raises:
    ValueError: the head has noise, or the labels do not fit.
  """
  check_run(run.checkpoint, run.model)
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
  return noise_test(*given, C=REFIT_C, target=target, location=location, **settings)


def of_runs(
  checkpoints: Sequence[str],
  gin_settings: 'GinSettings',
  fits: Mapping[str, Any],
  *,
  dataset: str | None,
  split: str | None,
  **limits: Any,
) -> reporting.Report:
  """The report of the test of trained runs, all on one split; every process calls it.

  Args:
    checkpoints: directories of runs, or checkpoints in them.
    gin_settings: go after the configuration of each run.
    fits: settings of `noise_test`.
    dataset, split: as in `evaluate.EvaluateSettings`.
    **limits: batch_size and max_examples of `Run.rows`.

  Raises:
    ValueError: a run is none of DET, or the split does not fit.
  """
  from het_plugin.evaluation import evaluate  # imports what files do not need
  from het_plugin.runs import configuration

  configs = [configuration(source, *gin_settings) for source in checkpoints]
  for config in configs:
    path = config.checkpoint.path
    if config.checkpoint.step is None:
      raise ValueError(
        f'--checkpoint={path} is a published file, whose head is not trained: give its '
        'representations with --train'
      )
    check_run(path, config.argument('model'))
  task, split = evaluate.task_and_split(dataset, split, configs)
  found = {
    name: of_run(config.open(), task, split, **limits, **fits)
    for name, config in zip(short_names(checkpoints), configs, strict=True)
  }
  return make_report(found, f'{task}, split {split}')


def check_run(checkpoint: str, model: Any) -> None:
  """Raises a ValueError if the model of a checkpoint is no DET."""
  head = type(getattr(model, 'head', model)).__name__
  if head != 'Det':
    raise ValueError(
      f'noise_test is for a model whose head is Det; --checkpoint={checkpoint} has {head}: --train '
      'takes its representations'
    )


def make_report(found: Mapping[str, Result], where: str) -> reporting.Report:
  """A report of the tests of rows or of runs, by name; `where` says which examples they are of."""
  shown = []
  rows = []
  notes = []
  for name, result in found.items():
    of_all: dict[str, Any] = {'nll_det': result.nll, 'gradient': result.gradient}
    of_all |= {'seconds': result.seconds, 'num_rows': result.num_rows}
    if result.refit is not None:
      refit = float(result.refit.mean()), uncertainty.stderr(result.refit)
      of_all |= {'refit': refit[0], 'refit_stderr': refit[1]}
      notes.append(
        f'{name}: fitting W of DET to such examples gains {_pm(*refit)}. All gains are over that.'
      )
    for tested in result.tested:
      row = tested.row()
      rows.append({'name': name, **row, **of_all})
      title = TITLES.get(tested.name, tested.name)
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
    gains = {t.name: _pm(t.gain.mean(), uncertainty.stderr(t.gain)) for t in result.tested}
    hidden = gains.pop(HIDDEN)
    lines = [
      f'{TITLES[x]} would gain {gain} nats; a hidden layer {hidden}.' for x, gain in gains.items()
    ]
    notes = [*(lines if len(found) == 1 else [f'{name}: {line}' for line in lines]), *notes]
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
    f'{HIDDEN}: {NUM_HIDDEN} random units beside W.'
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
