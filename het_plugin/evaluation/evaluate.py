"""Evaluates the predictive uncertainty of checkpoints and of saved predictions."""

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from het_plugin import data, reporting
from het_plugin.evaluation import agreement, class_covariance, predictions, uncertainty
from het_plugin.evaluation.extraction import match_channels, open_split
from het_plugin.evaluation.names import short_names
from het_plugin.evaluation.uncertainty_report import Evaluation
from het_plugin.training import class_names

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Settings:
  """The flags of the main `het_plugin.evaluate`, by name."""

  checkpoint: Sequence[str]
  split: str
  batch_size: int
  predictions: Sequence[str] = ()
  dataset: str | None = None
  ood_dataset: str | None = None
  ood_split: str | None = None
  max_examples: int | None = None
  covariance_images: int = 0
  covariance_index: tuple[int, ...] = ()
  homoglyph_examples: int = 0
  save_to: Path | None = None  # folder of the predictions; None does not keep them

  def __post_init__(self):
    if not self.checkpoint and not self.predictions:
      raise ValueError('--checkpoint is not set (nor is --predictions)')
    for checkpoint in self.checkpoint:
      predictions.check_has_head(checkpoint)
    if (self.ood_dataset is None) != (self.ood_split is None):
      raise ValueError('--ood_dataset and --ood_split belong together: set both')
    if self.ood_dataset and not self.checkpoint:
      raise ValueError('--ood_dataset needs a --checkpoint to make its predictions with')


def check_model(model: Any, task: str, names: Sequence[str] | None) -> None:
  """Raises ValueError if a model of classes of these names does not fit a task."""
  info = data.classification_info(task)
  with _named('--dataset', task):
    model.validate(info)
  class_names.check(f'--dataset={task}', info.class_names, names)


def evaluate(settings: Settings, open_run: Callable[[str], Any]) -> list[Evaluation]:
  """Evaluates all checkpoints, each opened by `open_run`, then all files of predictions; a
  ValueError about files, data or settings comes before the model is compiled.
  """
  names = short_names([*settings.checkpoint, *settings.predictions])
  num_runs = len(settings.checkpoint)
  pairs = zip(names[num_runs:], settings.predictions, strict=True)
  files = [evaluate_file(name, path, settings) for name, path in pairs]
  evaluations = []
  for name, checkpoint in zip(names[:num_runs], settings.checkpoint, strict=True):
    evaluations.append(evaluate_run(name, open_run(checkpoint), settings))
    jax.clear_caches()  # the next model shares no programs
  return evaluations + files


def evaluate_file(name: str, path: str, settings: Settings) -> Evaluation:
  """Scores the first max_examples of saved predictions."""
  read = predictions.read_predictions(path)
  num_classes = read.log_prob.shape[1]
  with _named('--predictions', path):
    kept = read.rows(slice(settings.max_examples))
    scores = uncertainty.score_examples(kept, _ks(num_classes))
    people = agreement.summarize(kept) if kept.link == 'softmax' else None
  details = {'num_classes': num_classes}
  return Evaluation(name, path, details, scores, agreement=people, class_names=read.class_names)


def evaluate_run(name: str, run: Any, settings: Settings) -> Evaluation:
  """Evaluates a `TrainedRun` on the split and the out-of-distribution split, and its covariance."""
  task = settings.dataset or run.task
  info = data.classification_info(task)
  predictor = predictions.Predictor(run)

  def predict(title, stream):
    batches, total = stream
    with reporting.Progress(title, total) as progress:
      for part in predictor(run.params, batches, settings.batch_size, settings.max_examples):
        progress.update(len(part))
        yield part

  with contextlib.ExitStack() as stack:
    known = _open(stack, '', task, settings.split, run, settings)
    if settings.ood_dataset:
      ood = settings.ood_dataset, settings.ood_split
      unknown = _open(stack, 'ood_', *ood, run, settings)
    covariance = _covariance(run, task, settings)
    scores, kept, of_unknown = [], [], None
    for part in predict(name, known):
      scores.append(uncertainty.score_examples(part, _ks(info.num_classes)))
      if settings.save_to:
        kept.append(part)
    if settings.ood_dataset:
      parts = predict(f'{name}, unknown inputs', unknown)
      of_unknown = uncertainty.concatenate([uncertainty.uncertainty(part) for part in parts])
  evaluation = Evaluation(
    name,
    run.checkpoint,
    {
      'num_classes': info.num_classes,
      'mesh': f'{run.partitioner.data_shards}x{run.partitioner.model_shards}',
      'step': run.step,
      'num_samples': getattr(run.model.eval_integrator, 'num_samples', None),
      'dataset': task,
      'split': settings.split,
      'ood_dataset': settings.ood_dataset,
      'ood_split': settings.ood_split,
    },
    uncertainty.concatenate(scores),
    of_unknown,
    class_names=shown_names(task, info),
    config=run.config,
    **covariance,
  )
  if settings.save_to and jax.process_index() == 0:
    provenance = {'checkpoint': run.checkpoint, 'task': task, 'split': settings.split}
    whole = dataclasses.replace(
      predictions.concatenate(kept), class_names=info.class_names, provenance=provenance
    )
    predictions.write_predictions(settings.save_to / f'{evaluation.file_name}.npz', whole)
  return evaluation


def _ks(num_classes: int) -> tuple[int, ...]:
  """The k of precision@k."""
  return (1, 5) if num_classes > 5 else (1,)


@contextlib.contextmanager
def _named(flag: str, value: Any) -> Iterator[None]:
  """Puts the flag before the message of a ValueError."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f'{flag}={value}: {error}') from error


def _open(stack, prefix, task, split, run, settings, **changes) -> tuple[data.BatchIterator, int]:
  """The result of `open_split` with images of the model's size; open until the stack is closed."""
  with _named(f'--{prefix}dataset', task):
    info = data.classification_info(task)
    # Checks the channels without reading an image.
    image = jax.ShapeDtypeStruct((1, run.image_size, run.image_size, info.channels), jnp.float32)
    jax.eval_shape(lambda x: match_channels(x, run.channels), image)
    given = {
      'name': f'--{prefix}split={split}',
      'bound': '--max_examples',
      'max_labels': max(info.max_labels, run.max_labels),
      'batch_size': settings.batch_size,
    }
    stream = open_split(run, task, split, settings.max_examples, **{**given, **changes})
    return stack.enter_context(stream)


def _covariance(run: Any, task: str, settings: Settings) -> dict[str, Any]:
  """The covariance fields of an `Evaluation`."""
  index, images = settings.covariance_index, settings.covariance_images
  class_set = glyph_class_set(task)
  counted = settings.homoglyph_examples if class_set else 0
  if not (index or images or counted):
    return {}
  if reason := class_covariance.why_none(run.model.head):
    return {'no_covariance': reason}
  batch_size = 8 * run.partitioner.data_shards

  def look_at(**which):
    with contextlib.ExitStack() as stack:
      few = {'whole': True, 'batch_size': batch_size}
      batches, total = _open(stack, '', task, settings.split, run, settings, **few)
      batches = itertools.islice(batches, -(-total // batch_size))
      return class_covariance.look(run, batches, batch_size, **which)

  result = {}
  if number := max(counted, 0 if index else images):
    looks = look_at(number=number)
    result['looks'] = looks[:images]
    if counted:
      result['homoglyphs'] = class_covariance.homoglyph_rate(
        [x.label for x in looks[:counted]],
        [x.with_anchor for x in looks[:counted]],
        homoglyphs(class_set, settings.split, run.image_size),
      )
  if index:
    with _named('--covariance_index', ','.join(map(str, index))):
      result['looks'] = look_at(index=index)
  return result


def glyph_class_set(task: str) -> str | None:
  """'core' for 'glyphs_core' and 'glyphs_noisy'; None for a task without glyphs."""
  from het_plugin.data import glyphs

  return glyphs.SOURCES[task].class_set if task in glyphs.SOURCES else None


def homoglyphs(class_set: str, split: str, image_size: int) -> tuple[frozenset[int], ...]:
  """For each class, the classes that look the same in some typeface of the split."""
  from het_plugin.data import glyph_bank, glyphs

  whole, _, _ = split.partition('[')  # of a slice
  return glyph_bank.homoglyphs(class_set, glyphs.SPLITS[class_set][whole].faces, image_size)


def shown_names(task: str, info: data.TaskInfo) -> Sequence[str] | None:
  """Names of the classes; for glyphs with the characters themselves."""
  from het_plugin.data import glyph_bank

  if class_set := glyph_class_set(task):
    classes = glyph_bank.glyph_classes(class_set)
    return [f'{chr(c)}  {n}' for c, n in zip(classes.code_points, classes.names, strict=True)]
  return info.class_names
