"""Evaluates the predictive uncertainty of trained heads.

    python -m het_plugin.evaluate --checkpoint=runs/het_xl --checkpoint=runs/det \\
      --split=validation --ood_dataset=glyphs_heldout --ood_split=test --output_dir=runs/uncertainty

Prints a row per checkpoint: likelihood, calibration, selective prediction, and detection of inputs
from another data set. Differences are to the first checkpoint, paired by example. --checkpoint also
takes a file of predictions; --predictions adds further files. The configuration is the run's own
config.gin. Gin files and bindings override it, such as --gin.eval/Integrator.num_samples=1000.

The output directory gets results.json, results.txt, index.html and its plots as .png files. With
--save_predictions it also gets predictions/NAME.npz.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from het_plugin import data, evaluation, measures, reporting, runs, training
from het_plugin import rows as rows_lib
from het_plugin.cli.settings import Batches, Gin, Repeated, ReportFolder
from het_plugin.evaluation.names import naming, short_names
from het_plugin.measures import votes
from het_plugin.rows import Rows, files
from het_plugin.system import run_files
from het_plugin.system.ranges import Count


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnTask(Gin, Batches):
  """Runs, and the examples that they are evaluated on.

  Attributes:
    checkpoint: A run's directory, or one checkpoint; repeatable.
    dataset: A task. Default: the task that the run was trained on.
    split: A split of the task. Default: the split that the run was evaluated on.
    max_examples: Largest number of examples per split, chosen at random.
  """

  checkpoint: Repeated[str] = ()
  dataset: str | None = None
  split: str | None = None
  max_examples: Count | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(ReportFolder, OnTask):
  """What is evaluated, and on what.

  Attributes:
    checkpoint: A run's directory (its newest checkpoint), one checkpoint, or a file of predictions;
      repeatable.
    predictions: A file of predictions, or RUN:SPLIT; repeatable.
    ood_dataset: A task with unknown inputs.
    ood_split: Split of --ood_dataset.
    save_predictions: Writes OUTPUT_DIR/predictions/NAME.npz.
    covariance_images: Number of images to draw class correlations of.
    covariance_index: Example ids to draw instead.
    homoglyph_examples: Images for the homoglyph rate of glyph tasks.
  """

  predictions: Repeated[str] = ()
  ood_dataset: str | None = None
  ood_split: str | None = None
  save_predictions: bool = False
  covariance_images: Annotated[int, '[0, inf)'] = 4
  covariance_index: tuple[Annotated[int, '[0, inf)'], ...] = ()
  homoglyph_examples: Annotated[int, '[0, inf)'] = 512

  @functools.cached_property
  def sources(self) -> list[tuple[str, runs.sources.Source | None]]:
    """--checkpoint and --predictions as typed, with their rows; None of a run to evaluate."""
    typed = [('--checkpoint', x, files.is_file(x)) for x in self.checkpoint]
    typed += [('--predictions', x, True) for x in self.predictions]
    found = []
    for flag, text, has_rows in typed:
      with naming(f'{flag}={text}'):
        of = runs.sources.open_source(text, self.gin, self.batch_size) if has_rows else None
      found.append((f'{flag}={text}', of))
    return found

  def __post_init__(self):
    if self.save_predictions and not self.output_dir:
      raise ValueError('--save_predictions needs --output_dir')
    if not self.checkpoint and not self.predictions:
      raise ValueError('--checkpoint or --predictions is needed')
    if (self.ood_dataset is None) != (self.ood_split is None):
      raise ValueError('--ood_dataset and --ood_split belong together: set both')
    if all(map(files.is_file, self.checkpoint)):  # no run is evaluated
      if self.ood_dataset:
        raise ValueError('--ood_dataset needs a --checkpoint to make its predictions with')
      of_run = 'dataset', 'split', 'save_predictions', 'covariance_index'
      of_files = 'a --checkpoint: it has no effect on files of predictions'
      self.refuse(of_run, of_files, 'needs')
      self.refuse(['covariance_images', 'homoglyph_examples'], 'files of predictions')
      if not any(runs.sources.is_run(source) for _, source in self.sources):
        self.refuse(['gin_file', 'gin_bindings', 'batch_size'], 'files of predictions')


def run(settings: Settings) -> reporting.Report:
  """A row per checkpoint."""
  settings.join()
  return evaluation.uncertainty_report.make_report(evaluate(settings))


def evaluate(settings: Settings, save_to: Path | None = None) -> list[evaluation.Evaluation]:
  """Evaluates all checkpoints, then all files of predictions.

  A checkpoint may be a file of predictions itself. A ValueError about files, data or settings comes
  before the first model is compiled. `save_to` is the folder of the predictions, which the settings
  may also name.
  """
  import jax

  if settings.save_predictions:
    save_to = run_files.local_folder('output_dir', settings.output_dir) / 'predictions'
  texts = (*settings.checkpoint, *settings.predictions)
  names = short_names(texts)
  if save_to:
    own = [name for name, (_, rows) in zip(names, settings.sources, strict=True) if rows is None]
    of_files = [evaluation.uncertainty_report.file_name(name) for name in own]
    if twice := [name for name, x in zip(own, of_files, strict=True) if of_files.count(x) > 1]:
      raise ValueError(
        f'--save_predictions would write those of {" and ".join(twice)} to one file: evaluate them '
        'one by one, each with its own --output_dir'
      )
  configs: dict[str, runs.Configuration] = {}
  for text, (_, source) in zip(texts, settings.sources, strict=True):
    if source is None:
      checkpoint = runs.Checkpoint.find(text)
      checkpoint.check_trained(hint='give a run, or a file of predictions')
      configs[text] = runs.configuration(checkpoint, *settings.gin)
  classes = next((config.class_names for config in configs.values()), None)
  opened: list[runs.Configuration | evaluation.Evaluation] = []
  for name, text, (flag, source) in zip(names, texts, settings.sources, strict=True):
    if source is None:
      opened.append(configs[text])
      continue
    with naming(flag):  # scored at once: one file is in memory at a time
      rows = source.rows(columns=('log_prob',)).chosen(settings.max_examples).in_order(classes)
      classes = classes or rows.class_names
      details = {'num_classes': rows.log_prob.shape[1]}
      found = _scored([rows], **details)
      opened.append(
        evaluation.Evaluation(name, text, details, class_names=rows.class_names, **found)
      )
  if configs:
    task, split = task_and_split(settings.dataset, settings.split, [*configs.values()])
    settings = dataclasses.replace(settings, dataset=task, split=split)
    if settings.ood_dataset:
      with naming(f'--ood_dataset={settings.ood_dataset}'):
        data.classification_info(settings.ood_dataset)
  evaluations = []
  for name, of in zip(names, opened, strict=True):
    if isinstance(of, runs.Configuration):
      of = evaluate_run(name, of.open(), settings, save_to)
      jax.clear_caches()  # the next model shares no programs
    evaluations.append(of)
  return evaluations


def task_and_split(
  dataset: str | None, split: str | None, configs: Sequence[runs.Configuration]
) -> tuple[str, str]:
  """What all runs are evaluated on; ValueError if the models do not fit it."""
  chosen: list[tuple[str, str]] = []
  for config in configs:
    task = str(dataset or config.task)
    eval_cfg = config.argument('train_eval_dataset_cfg')
    with naming(f'--dataset={task}'):
      info = data.classification_info(task)
      config.argument('model').validate(info)
    training.class_names.check(f'--dataset={task}', info.class_names, config.class_names)
    chosen.append((task, split or getattr(eval_cfg, 'split', 'validation')))
    if chosen[0] != chosen[-1]:
      raise ValueError(
        f'--checkpoint={config.checkpoint.path} would be evaluated on {task}, split '
        f'{chosen[-1][1]}, and {configs[0].checkpoint.path} on {chosen[0][0]}, split '
        f'{chosen[0][1]}: set --dataset and --split'
      )
  return chosen[0]


def evaluate_run(
  name: str, run: runs.Run, settings: Settings, save_to: Path | None = None
) -> evaluation.Evaluation:
  """Evaluates a run on the two splits of the settings, and its covariance."""
  import jax

  info = data.classification_info(settings.dataset or '')
  whole_split = str(settings.split).partition('[')[0]  # of a slice
  true_classes = None
  if info.true_classes and info.knows_truth(whole_split):
    true_classes = functools.partial(info.true_classes, whole_split)
  others = ('location_top',) if true_classes else ()
  of_truth = []
  kept = []

  def predict(title: str, stream: tuple[data.BatchIterator, int], *others: str) -> Iterator[Rows]:
    batches, total = stream
    with reporting.Progress(title, total) as progress:
      limits = settings.batch_size, settings.max_examples
      for part in run.stream(batches, ('log_prob', *others), *limits):
        progress.update(len(part))
        yield part

  def keeping(parts: Iterable[Rows]) -> Iterator[Rows]:
    for part in parts:
      if true_classes:
        truth = true_classes(part.index)
        columns = {
          'clean_accuracy': votes.top_shares(part.log_prob)[np.arange(len(truth)), truth],
          'clean_accuracy_location': part['location_top'] == truth,
          'wrong_labels': part.label != truth,
        }
        of_truth.append(columns)
      if save_to:
        kept.append(part.without('location_top'))
      yield part

  with contextlib.ExitStack() as stack:
    known = _open(stack, '', run, settings)
    if settings.ood_dataset:
      unknown = _open(stack, 'ood_', run, settings)
    found = _covariance(run, settings)
    found |= _scored(keeping(predict(name, known, *others)), info.num_classes)
    if settings.ood_dataset:
      parts = predict(f'{name}, unknown inputs', unknown)
      scored = [measures.uncertainty.uncertainty(**part.predictive) for part in parts]
      found['unknown'] = measures.uncertainty.concatenate(scored)
  if of_truth:
    columns = {name: np.concatenate([x[name] for x in of_truth]) for name in of_truth[0]}
    errors = {name: measures.uncertainty.stderr(x) for name, x in columns.items()}
    found['truth'] = {name: float(x.mean()) for name, x in columns.items()} | {'stderr': errors}
  sampled = found['scores'].uncertainty.mutual_information is not None
  details = {
    'num_classes': info.num_classes,
    'mesh': f'{run.partitioner.data_shards}x{run.partitioner.model_shards}',
    'step': run.step,
    'num_samples': run.model.eval_integrator.num_samples if sampled else None,
    **settings.chosen('dataset', 'split', 'ood_dataset', 'ood_split'),
  }
  found |= {'class_names': info.shown_names or info.class_names, 'config': run.config.text}
  if save_to and jax.process_index() == 0:
    about = {'checkpoint': run.checkpoint, 'task': settings.dataset, 'split': settings.split}
    whole = rows_lib.concatenate(kept)
    whole = dataclasses.replace(whole, class_names=info.class_names, provenance=about)
    rows_lib.write(save_to / f'{evaluation.uncertainty_report.file_name(name)}.npz', whole)
  return evaluation.Evaluation(name, run.checkpoint, details, **found)


def _scored(parts: Iterable[Rows], num_classes: int) -> dict[str, Any]:
  """The fields of an `Evaluation` that the parts of a split give."""
  ks = (1, 5) if num_classes > 5 else (1,)
  scores, people = evaluation.uncertainty_report.scored(parts, ks)
  summary = None if people is None else measures.agreement.summarize(people)
  return {'scores': scores, 'agreement': summary}


def _open(
  stack: contextlib.ExitStack,
  prefix: str,
  run: runs.Run,
  settings: Settings,
  **changes: Any,
) -> tuple[data.BatchIterator, int]:
  """`open_split` of the settings with this prefix, '' or 'ood_', until the stack is closed."""
  task, split = (getattr(settings, f'{prefix}{name}') for name in ('dataset', 'split'))
  changes.setdefault('batch_size', settings.batch_size)
  with naming(f'--{prefix}dataset={task}'):
    opened = run.open_split(
      split,
      settings.max_examples,
      task=task,
      name=f'--{prefix}split={split}',
      bound='--max_examples',
      **changes,
    )
    return stack.enter_context(opened)


def _covariance(run: runs.Run, settings: Settings) -> dict[str, Any]:
  """The covariance fields of an `Evaluation`; a defect, which leaves the tables, becomes a note.

  Raises:
    ValueError: an id of `covariance_index` does not exist.
  """
  index = tuple(dict.fromkeys(settings.covariance_index))
  images = settings.covariance_images
  look_alikes = data.classification_info(str(settings.dataset)).look_alikes
  counted = settings.homoglyph_examples if look_alikes else 0
  if not (index or images or counted):
    return {}
  if reason := evaluation.class_covariance.why_none(run.model.head):
    return {'no_covariance': reason}
  batch_size = 8 * run.partitioner.data_shards

  def look(**which: Any) -> list[evaluation.class_covariance.ClassCovariance]:
    with contextlib.ExitStack() as stack:
      batches, total = _open(stack, '', run, settings, whole=True, batch_size=batch_size)
      batches = itertools.islice(batches, -(-total // batch_size))
      return evaluation.class_covariance.look(run, batches, batch_size, **which)

  result = {}
  try:
    if number := max(counted, 0 if index else images):
      looks = look(number=number)
      result['looks'] = looks[:images]
      if counted and look_alikes:
        result['homoglyphs'] = measures.look_alikes.look_alike_rate(
          [x.label for x in looks[:counted]],
          [x.with_anchor for x in looks[:counted]],
          look_alikes(str(settings.split), run.image_size),
        )
    if index:
      with naming(f'--covariance_index={",".join(map(str, index))}'):
        result['looks'] = look(index=index)
  except Exception as error:
    if index and isinstance(error, ValueError):
      raise
    logging.getLogger(__name__).exception('There are no correlations of classes.')
    reason = ' '.join(f'{type(error).__name__}: {error}'.split())
    return {'no_covariance': f'its class correlations could not be computed ({reason}).'}
  return result
