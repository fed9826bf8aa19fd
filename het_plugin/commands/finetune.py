"""Fine-tunes the candidates that suit a task and builds an ensemble of the results.

    python -m het_plugin.finetune --checkpoint=runs/a,runs/b --gin_file=task.gin \\
      --keep=1 --sweep=LEARNING_RATE=1e-4,1e-3 --output_dir=runs/finetuned

The recipe of Mustafa et al. 2020 (https://arxiv.org/abs/2010.06866): rank pre-trained checkpoints
by the leave-one-out k-nearest-neighbour accuracy of their representations of the training examples,
fine-tune the best ones with a small sweep, and add members greedily by the validation NLL. Data
set, head and length of the fine-tuning are gin settings, after a candidate's own configuration.

Every part is a file in the output directory, so an interrupted study continues:

    representations/NAME/...   of each candidate
    runs/NAME/SETTING/         a training run of a candidate that was kept
    predictions/SPLIT/...npz   the candidates for the ensemble
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import itertools
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from het_plugin import data, evaluation, experiments, reporting, runs, system, weights
from het_plugin.cli.settings import Batches, Repeated
from het_plugin.commands import evaluate, represent, select
from het_plugin.data import splits
from het_plugin.evaluation.names import naming
from het_plugin.measures import knn, votes
from het_plugin.measures.ranking import best_first
from het_plugin.rows import Rows
from het_plugin.system import run_files
from het_plugin.system.flag_values import parse_sweep

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(select.Choice, Batches):
  """What is fine-tuned, and how the members are chosen.

  Attributes:
    checkpoint: Runs, checkpoints or published files, separated by commas; repeatable.
    k: Number of neighbours of the proxy.
    keep: Number of candidates to train, or 'all'.
    sweep: NAME=VALUE,VALUE: values of a gin setting. Every combination is trained. Repeatable.
    split: Split that chooses the members.
    test_split: Split that scores the ensemble.
    output_dir: Where representations, trained runs and predictions go.
  """

  checkpoint: Repeated[str] = ()
  sweep: Repeated[str] = ()
  split: str = 'validation'
  test_split: str | None = None
  output_dir: str | None = None


def run(settings: Settings) -> reporting.Report:
  """Ranks, fine-tunes and selects; all processes call it.

  Raises:
    ValueError: a setting is wrong.
    exit_codes.Preempted: a SystemExit, after SIGTERM; the same call continues.
  """
  checkpoint = evaluation.candidates.split_sources(settings.checkpoint)
  k = settings.k
  names = evaluation.candidates.candidate_names(settings.names, checkpoint, flag='checkpoint')
  outside = [x for x in names if Path(x).is_absolute() or '..' in Path(x).parts]
  if outside or len(set(map(_file_name, names))) < len(names):
    raise ValueError(
      f'the names of the candidates, {",".join(names)}, must be different names of folders inside '
      '--output_dir: give --names'
    )
  if len(k) != 1:
    raise ValueError(f'--k={",".join(map(str, k))} must be one number, the k of the proxy')
  num_kept = evaluation.candidates.number_to_keep(settings.keep, names)
  combined = combinations(settings.sweep)
  folder = run_files.local_folder('output_dir', settings.output_dir)
  settings.join()
  import jax

  import gin

  candidates = []
  are_published = []
  for source in checkpoint:  # one file is in memory at a time
    found = runs.Checkpoint.find(source)
    candidates.append(_training(settings.gin, found))
    are_published.append(found.step is None)
  _check_runs(settings.gin_bindings, candidates, combined, folder)
  dataset = gin.query_parameter('%MIXTURE_OR_TASK_NAME')
  split, test_split = settings.split, settings.test_split
  _check_splits(dataset, split=split, test_split=test_split or split)

  proxy = {}
  for name, source, training, is_published in zip(
    names, checkpoint, candidates, are_published, strict=True
  ):
    where = str(folder / 'representations' / name)
    what = represent.Settings(
      checkpoint=source,
      dataset=dataset,
      splits='train',
      output_dir=where,
      format='npz',
      batch_size=settings.batch_size,
    )
    if is_published:  # the configuration of its training describes it
      what = dataclasses.replace(
        what,
        gin_file=tuple(training.gin_files),
        gin_bindings=(*training.gin_bindings, f'MODEL_DIR = {where!r}'),
        gin_search_paths=tuple(training.gin_search_paths),
      )
    (made,) = represent.represent(what)['files']
    jax.clear_caches()  # the next model shares no program
    rows = runs.sources.open_source(made['file']).rows()
    proxy[name] = _accuracy(rows, k, settings.metric)
  order = best_first(list(proxy.values()))
  kept = [names[i] for i in order[:num_kept]]
  _log.info('kNN accuracy: %s; fine-tuning %s.', proxy, ', '.join(kept))
  trained = {}
  for name, setting in itertools.product(kept, combined):
    training = candidates[names.index(name)]
    of_setting = dataclasses.replace(
      training, gin_bindings=[*training.gin_bindings, *combined[setting]]
    )
    run_dir = trained[f'{name}/{setting}'] = folder / 'runs' / name / setting

    def forget_predictions(_: Any, of_run: str = f'{name}/{setting}') -> None:
      for of_earlier in _predicted(folder, of_run):
        shutil.rmtree(of_earlier)

    experiments.trainings.complete(of_setting, run_dir, forget_predictions)
  predict = functools.partial(_predictions, trained, folder, settings.batch_size)
  report = select.ensemble(
    select.Settings(
      validation=predict(split),
      test=predict(test_split) if test_split else (),
      names=tuple(trained),
      **settings.chosen('max_members', 'replacement'),
    )
  )
  ranking = [f'{names[i]}: {proxy[names[i]]:.4f}' for i in order]
  return dataclasses.replace(
    report,
    title='Fine-tuned ensemble',
    introduction=f'{reporting.counted(len(trained), "run")}: the {len(kept)} of {len(names)} '
    f'candidates with the best kNN accuracy (k = {k[0]}), '
    f'{reporting.counted(len(combined), "setting")} each. {report.introduction}',
    notes=[f'leave-one-out kNN accuracy, k = {k[0]}: {", ".join(ranking)}', *report.notes],
    json=report.json | {'proxy': proxy, 'kept': kept},
  )


def combinations(sweep: Sequence[str]) -> dict[str, list[str]]:
  """{'LEARNING_RATE=0.001': bindings} of all combinations of 'NAME=VALUE,VALUE' (`parse_sweep`)."""
  axes = [itertools.product([name], values) for name, values in map(parse_sweep, sweep)]
  found = {}
  for combination in itertools.product(*axes):
    label = ','.join(f'{name}={value}' for name, value in combination).replace('/', '_')
    found[label or 'default'] = [f'{name} = {value}' for name, value in combination]
  return found


def _check_runs(
  typed: Sequence[str],
  candidates: Sequence[experiments.trainings.Training],
  settings: Mapping[str, Sequence[str]],
  folder: Path,
) -> None:
  """Raises ValueError if no run uses a binding of the command line or of the sweep, if the runs
  have several tasks, or if the model of a run does not fit the task or is no softmax, as the
  ensemble needs; leaves the configuration of the first candidate parsed.
  """
  import gin

  trainings = [
    dataclasses.replace(training, gin_bindings=[*training.gin_bindings, *bindings])
    for training, bindings in itertools.product(reversed(candidates), settings.values())
  ]
  tasks = {}
  for each in trainings:
    each.parse(folder)
    task = gin.query_parameter('%MIXTURE_OR_TASK_NAME')
    tasks[task] = None
    if len(tasks) > 1:
      raise ValueError(
        f'the candidates would be trained on {" and ".join(map(repr, tasks))}, each on the task of '
        'its own configuration: give one by --gin.MIXTURE_OR_TASK_NAME'
      )
    model = runs.Configuration(runs.Checkpoint(str(folder))).argument('model')
    model.validate(data.classification_info(task))
    link = getattr(getattr(model, 'head', None), 'link', 'softmax')
    if link != 'softmax':
      name = f'{type(model.head).__name__}.link'
      raise ValueError(
        f"{name} = '{link}' in a run, and an ensemble needs a softmax: give --gin.{name}="
        '"\'softmax\'"'
      )
  swept = itertools.chain.from_iterable(settings.values())
  experiments.trainings.check_used([*typed, *swept], trainings, folder)


def _check_splits(dataset: str, **chosen: str) -> None:
  """Raises ValueError if the task has no such splits, which are read after all trainings."""
  sizes = data.classification_info(dataset).splits
  for flag, split in chosen.items():
    with naming(f'--{flag}={split}'):
      splits.resolve(split, sizes, dataset)


def _training(
  gin_settings: runs.opening.GinSettings, found: runs.Checkpoint
) -> experiments.trainings.Training:
  """A fine-tuning from a candidate: its own configuration, then the task's."""
  gin_files, gin_bindings, search_paths = gin_settings
  # The task has other classes, even if their number is the same.
  restore: dict[str, Any] = {'path': found.path, 'head': 'init'}
  if found.arrays is not None:
    files = []
    bindings = weights.tower_bindings(found.path, found.arrays)
  else:
    files = [str(found.config)]
    bindings = []
    restore['ema'] = runs.configuration(found).evaluates_ema  # as when it is ranked
    restore |= {'mode': 'specific', 'fallback_to_scratch': True}
  bindings = [
    *bindings,
    'CheckpointConfig.restore = @RestoreCheckpointConfig()',
    *(f'RestoreCheckpointConfig.{name} = {value!r}' for name, value in restore.items()),
    *gin_bindings,
  ]
  return experiments.trainings.Training([*files, *gin_files], bindings, search_paths)


def _accuracy(read: Rows, k: Sequence[int], metric: knn.Metric) -> float:
  """The proxy; of several labels it takes the most frequent one, as the ensemble does."""
  label = votes.majority(read.labels, read.label_weight)
  return knn.knn_accuracy(read.features, label, ks=k, metric=metric)[k[0]]


def _predictions(
  trained: Mapping[str, Path], folder: Path, batch_size: int, split: str
) -> tuple[str, ...]:
  """Files of what the runs predict for a split; those that exist are of a complete run."""
  files = []
  for name, run in trained.items():
    target = folder / 'predictions' / split / _file_name(name)
    settings = evaluate.Settings(
      checkpoint=(str(run),),
      split=split,
      batch_size=batch_size,
      covariance_images=0,
      homoglyph_examples=0,
    )
    find = functools.partial(_file_in, target)
    if not (found := system.processes.in_the_first(find)):
      evaluate.evaluate(settings, target)
      found = system.processes.in_the_first(find)  # which has written it
    files.append(found)
  return tuple(files)


def _file_in(folder: Path) -> str:
  return next(map(str, folder.glob('*.npz')), '')


def _predicted(folder: Path, run: str) -> list[Path]:
  """The folders of what a run predicted, one per split."""
  return list(folder.glob(f'predictions/*/{glob.escape(_file_name(run))}'))


def _file_name(run: str) -> str:
  return run.replace('/', '_')
