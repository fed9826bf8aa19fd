"""Few-shot evaluation of runs: of their files of representations, or of their checkpoints."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from het_plugin import reporting
from het_plugin.evaluation import fewshot
from het_plugin.evaluation.fewshot_report import Results
from het_plugin.evaluation.names import choose_names
from het_plugin.evaluation.representations import read_representations

# Flags of `het_plugin.fewshot` that belong to --checkpoint.
OF_CHECKPOINTS = ('datasets', 'splits', 'layer', 'batch_size', 'max_train', 'max_test')


@dataclasses.dataclass(frozen=True)
class Settings:
  """How runs are evaluated: `fewshot.Protocol`, examples per class or 'all', seeds of the draws."""

  protocol: fewshot.Protocol
  shots: tuple[int | str, ...]
  seeds: tuple[int, ...]


def check_flags(
  train: Sequence[str],
  test: Sequence[str],
  checkpoint: Sequence[str],
  results: Sequence[str],
  splits: Sequence[str],
  given: Sequence[str],
) -> None:
  """Raises ValueError for flags that do not go together; `given` are those of `OF_CHECKPOINTS`."""
  if len(train) != len(test):
    raise ValueError(
      f'--train is given {len(train)} times and --test {len(test)} times; each run needs both'
    )
  if train and checkpoint:
    raise ValueError('--train and --checkpoint cannot go together: represent the checkpoints first')
  if not (train or checkpoint or results):
    raise ValueError('--train and --test, --checkpoint, or --results are needed')
  if given and not checkpoint:
    raise ValueError(f'--{given[0]} is for --checkpoint, whose representations are computed here')
  if len(splits) != 2:
    raise ValueError(f'--splits={",".join(splits)} must be a training and a test split')


def from_files(
  names: Sequence[str] | None, train: Sequence[str], test: Sequence[str], settings: Settings
) -> Results:
  """Evaluates representations; each pair of a training and a test file is a data set of a run.

  `names` are RUN or RUN:DATASET of each pair; None takes what the paths differ in.
  """
  runs = {}
  for name, *pair in zip(choose_names(names, train), train, test, strict=True):
    halves = [read_representations(source) for source in pair]
    run, colon, dataset = name.partition(':')
    dataset = dataset if colon else halves[0].provenance.get('dataset', 'saved')
    datasets = runs.setdefault(run, {})
    if dataset in datasets:
      raise ValueError(
        f'--train={pair[0]}: run {run!r} has the data set {dataset!r} twice: tell them apart with '
        '--names=RUN:DATASET,...'
      )
    datasets[dataset] = tuple(fewshot.Split(x.features, x.label, x.index) for x in halves)
  return {run: _evaluate(run, datasets, settings) for run, datasets in runs.items()}


def from_checkpoints(
  names: Sequence[str] | None,
  checkpoints: Sequence[str],
  settings: Settings,
  *,
  open_run: Callable[[str], Any],
  bound_datasets: Callable[[], Sequence[Any] | None],
  layer: str,
  batch_size: int,
  **chosen: Any,
) -> Results:
  """Evaluates checkpoints; the representations of their data sets are kept in memory.

  Args:
    names: of the runs; None for what the paths differ in.
    checkpoints: paths, one per run.
    settings: how.
    open_run: opens a path as a `config.trained_run.TrainedRun`.
    bound_datasets: the `FewShotDataset`s that the configuration of the opened run binds, or None.
    layer, batch_size, **chosen: the flags of `OF_CHECKPOINTS`.
  """
  # They import TensorFlow, which files do not need.
  from het_plugin.evaluation import extraction, fewshot_datasets

  names = choose_names(names, checkpoints)
  if len(set(names)) != len(names):
    raise ValueError(f'--names={",".join(names)} must be distinct: each checkpoint is a run')
  results = {}
  for name, checkpoint in zip(names, checkpoints, strict=True):
    run = open_run(checkpoint)
    datasets = fewshot_datasets.choose(bound=bound_datasets(), **chosen)
    fewshot.check_settings((1,), settings.seeds, settings.protocol.l2, len(datasets))
    extractor = extraction.RepresentationExtractor(
      *(run.model, run.partitioner, run.param_specs),
      layers=(layer,),
      channels=run.channels,
      pool='mean',
    )
    read = fewshot_datasets.FewShotReader(extractor, run.partitioner, run.image_size, batch_size)
    for dataset in datasets:
      read.check(dataset)
    data = {}
    with reporting.Progress(f'{name}: data', len(datasets), unit='data sets') as progress:
      for dataset in datasets:
        data[dataset.name] = read(dataset, run.params)
        progress.update(1)
    results[name] = _evaluate(name, data, settings)
  return results


def _evaluate(
  run: str, data: Mapping[str, tuple[fewshot.Split, fewshot.Split]], settings: Settings
) -> dict[str, dict[int, fewshot.FewShotResult]]:
  """{data set: {shots: result}} of a run."""
  most = max(int(np.bincount(train.y).max()) for train, _ in data.values())
  shots = tuple(dict.fromkeys(most if n == 'all' else n for n in settings.shots))
  fits = len(data) * len(shots) * len(fewshot.used_seeds(settings.protocol, settings.seeds))
  with reporting.Progress(run, fits, unit='fits') as progress:
    return fewshot.few_shot_all(
      data,
      settings.protocol,
      shots=shots,
      seeds=settings.seeds,
      on_trial=lambda: progress.update(1),
    )


def read_rows(path: str) -> list[dict[str, Any]]:
  """Rows of the --json of an earlier call."""
  try:
    rows = json.loads(Path(path).read_text())['rows']
    return [dict(row) for row in rows if row['run'] and row['dataset'] and row['shots'] > 0]
  except (OSError, KeyError, TypeError, ValueError) as error:
    raise ValueError(f'--results={path} is no --json of this program: {error}') from error
