"""Evaluates the predictive uncertainty of trained heads.

    python -m het_plugin.evaluate --checkpoint=runs/het_xl --checkpoint=runs/det \\
      --split=validation --ood_dataset=glyphs_heldout --ood_split=test --output_dir=runs/uncertainty

Prints a row a checkpoint: likelihood, calibration, selective prediction, and how well its scores
tell the inputs of another data set from known ones; against the first checkpoint, paired. Also
takes predictions that were saved, here or elsewhere (--predictions). The configuration is the
run's own config.gin; gin files and bindings go before it, such as
--gin.eval/Integrator.num_samples=1000.

In the output directory: results.json, results.txt, index.html, its plots as .png files, and with
--save_predictions predictions/NAME.npz.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from het_plugin import data, reporting, weights
from het_plugin.config import command_line, distributed, flag_values, trained_run
from het_plugin.evaluation import class_covariance, predictions, uncertainty, uncertainty_report
from het_plugin.evaluation.names import short_names
from het_plugin.evaluation.uncertainty_report import Evaluation


def define_flags() -> None:
  command_line.define_flags()
  distributed.define_flags()
  flags.DEFINE_multi_string(
    'checkpoint', [], "A run's directory (its newest checkpoint) or one checkpoint; repeatable."
  )
  flags.DEFINE_multi_string('predictions', [], 'An .npz file of predictions; repeatable.')
  flags.DEFINE_string('dataset', None, 'A task; what the run trained on where it is not given.')
  flags.DEFINE_string('split', 'validation', 'Of the task.')
  flags.DEFINE_string('ood_dataset', None, 'A task of inputs that are to be told from known ones.')
  flags.DEFINE_string('ood_split', None, 'Of that task.')
  flags.DEFINE_integer(
    'max_examples',
    None,
    'At most so many of each split: a fixed random choice, if endless the first.',
  )
  flags.DEFINE_integer('batch_size', 256, 'Global batch.')
  flags.DEFINE_list('precision_at', None, 'The k of precision@k; 1 and 5, or K if that is less.')
  flags.DEFINE_bool('save_predictions', False, 'Keeps log p in OUTPUT_DIR/predictions/NAME.npz.')
  flags.DEFINE_integer(
    'covariance_images', 4, 'Draws the class correlations of so many images, the first ones.'
  )
  flags.DEFINE_list('covariance_index', [], 'Draws those of the examples of these ids instead.')
  flags.DEFINE_integer(
    'homoglyph_examples', 512, 'Images for the homoglyph rate; of glyph tasks only, 0 for none.'
  )
  flags.DEFINE_string('output_dir', None, 'Where the report goes.')
  flags.DEFINE_string('json', None, 'Another place for results.json.')


@dataclasses.dataclass(frozen=True)
class Settings:
  """The flags, checked."""

  dataset: str | None
  split: str
  ood_dataset: str | None
  ood_split: str | None
  max_examples: int | None
  batch_size: int
  precision_at: tuple[int, ...] | None
  covariance_images: int
  covariance_index: tuple[int, ...]
  homoglyph_examples: int
  save_to: Path | None


def make_settings() -> Settings:
  """The settings of the flags.

  Raises:
    ValueError: naming the flag that is wrong.
  """
  F = flags.FLAGS
  if not F.checkpoint and not F.predictions:
    raise ValueError('--checkpoint is not set (nor is --predictions)')
  for checkpoint in F.checkpoint:
    if weights.is_weights_file(checkpoint):
      raise ValueError(
        f'--checkpoint={checkpoint} is a published file, whose head is not trained here: give the '
        'directory of a run'
      )
  if (F.ood_dataset is None) != (F.ood_split is None):
    raise ValueError('--ood_dataset and --ood_split belong together: set both')
  if F.ood_dataset and not F.checkpoint:
    raise ValueError('--ood_dataset needs a --checkpoint to make its predictions with')
  if F.save_predictions and not F.output_dir:
    raise ValueError('--save_predictions needs --output_dir')
  for name, least in (
    ('max_examples', 1),
    ('batch_size', 1),
    ('covariance_images', 0),
    ('homoglyph_examples', 0),
  ):
    if F[name].value is not None and F[name].value < least:
      raise ValueError(f'--{name}={F[name].value} must be at least {least}')
  return Settings(
    dataset=F.dataset,
    split=F.split,
    ood_dataset=F.ood_dataset,
    ood_split=F.ood_split,
    max_examples=F.max_examples,
    batch_size=F.batch_size,
    precision_at=None if F.precision_at is None else _distinct('precision_at', least=1),
    covariance_images=F.covariance_images,
    covariance_index=_distinct('covariance_index', least=0) if F.covariance_index else (),
    homoglyph_examples=F.homoglyph_examples,
    save_to=Path(F.output_dir) / 'predictions' if F.save_predictions else None,
  )


def _distinct(flag: str, least: int) -> tuple[int, ...]:
  return tuple(dict.fromkeys(flag_values.integers(flag, flags.FLAGS[flag].value, least)))


def check_checkpoint(checkpoint: str, settings: Settings) -> None:
  """Raises ValueError where a run does not fit the task, before any run is opened."""
  F = flags.FLAGS
  config = trained_run.parse_run_config(
    checkpoint, F.gin_file, F.gin_bindings, F.gin_search_paths, without=['partitioner']
  )
  task = settings.dataset or config['train_dataset_cfg'].mixture_or_task_name
  with _named('--dataset', task):
    info = data.classification_info(task)
    config['model'].validate(info)
  _check_ks(settings.precision_at or (), info.num_classes)


def evaluate_checkpoint(name: str, checkpoint: str, settings: Settings) -> Evaluation:
  """Predicts both splits and looks at the covariance.

  Raises:
    ValueError: the data do not fit the model or the settings; nothing has been compiled then.
  """
  F = flags.FLAGS
  run = trained_run.open_run(checkpoint, F.gin_file, F.gin_bindings, F.gin_search_paths)
  task = settings.dataset or run.task
  info = data.classification_info(task)
  ks = default_ks(info.num_classes) if settings.precision_at is None else settings.precision_at
  predictor = predictions.Predictor(run.model, run.partitioner, run.param_specs, run.channels)
  with contextlib.ExitStack() as stack:
    streams = [stack.enter_context(_stream('', task, settings.split, run, settings))]
    if settings.ood_dataset:
      streams.append(
        stack.enter_context(
          _stream('ood_', settings.ood_dataset, settings.ood_split, run, settings)
        )
      )
    looked_at = _read_looked_at(run, task, settings)
    parts = _predict(name, predictor, run, streams[0], settings)
    scores, kept = [], []
    for part in parts:
      scores.append(uncertainty.score_examples(part, ks))
      if settings.save_to:
        kept.append(part)
    scores = uncertainty.concatenate(scores)
    if settings.save_to:
      provenance = {'checkpoint': run.checkpoint, 'task': task, 'split': settings.split}
      whole = dataclasses.replace(
        predictions.concatenate(kept), class_names=info.class_names, provenance=provenance
      )
      if jax.process_index() == 0:
        predictions.write_predictions(
          settings.save_to / f'{uncertainty_report.file_name(name)}.npz', whole
        )
    unknown = None
    if settings.ood_dataset:
      parts = _predict(f'{name}, unknown inputs', predictor, run, streams[1], settings)
      unknown = uncertainty.concatenate_uncertainty([uncertainty.uncertainty(p) for p in parts])
  return Evaluation(
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
    scores,
    unknown,
    class_names=shown_names(task, info),
    config=run.config,
    **_look(run, task, settings, *looked_at),
  )


def evaluate_file(name: str, path: str, settings: Settings) -> Evaluation:
  """Scores saved predictions, at most --max_examples of them."""
  read = predictions.read_predictions(path)
  num_classes = read.log_prob.shape[1]
  ks = default_ks(num_classes) if settings.precision_at is None else settings.precision_at
  with _named('--predictions', path):
    scores = uncertainty.score_examples(read.rows(slice(settings.max_examples)), ks)
  return Evaluation(
    name,
    path,
    {'num_classes': num_classes},
    scores,
    class_names=read.class_names,
  )


def default_ks(num_classes: int) -> tuple[int, ...]:
  return tuple(dict.fromkeys((1, min(5, num_classes))))


def _check_ks(ks: Sequence[int], num_classes: int) -> None:
  if wrong := [k for k in ks if k > num_classes]:
    raise ValueError(
      f'--precision_at={wrong[0]} must be at most the number of classes, {num_classes}'
    )


@contextlib.contextmanager
def _named(flag: str, value: Any) -> Iterator[None]:
  """Puts the flag before the message of a ValueError."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f'{flag}={value}: {error}') from error


@contextlib.contextmanager
def _stream(
  prefix: str,
  task: str,
  split: str,
  run: trained_run.TrainedRun,
  settings: Settings,
  *,
  whole: bool = False,
) -> Iterator[data.BatchIterator]:
  """Batches of a split in the model's size: this process's rows, or `whole` ones."""
  with _named(f'--{prefix}dataset', task):
    info = data.classification_info(task)
    # The rule of channels, without an image.
    shape = (1, run.image_size, run.image_size, info.channels)
    jax.eval_shape(
      lambda x: class_covariance.match_channels(x, run.channels),
      jax.ShapeDtypeStruct(shape, jnp.float32),
    )
    if info.splits.get(split, 0) is None and settings.max_examples is None:
      raise ValueError(f'--{prefix}split={split} is endless: set --max_examples')
    batches = data.get_dataset(
      data.one_pass(
        task,
        split,
        image_size=run.image_size,
        max_labels=max(info.max_labels, run.max_labels),
        batch_size=settings.batch_size,
        bounded=settings.max_examples is not None,
      ),
      None if whole else run.partitioner.batch_rows(settings.batch_size),
    )
  with contextlib.closing(batches):
    yield batches


def _predict(name, predictor, run, batches, settings) -> Iterator[predictions.Predictions]:
  known, bound = batches.num_examples, settings.max_examples
  total = min(n for n in (known, bound) if n is not None)
  with reporting.Progress(name, total, shown=jax.process_index() == 0) as progress:
    for part in predictor(run.params, batches, settings.batch_size, bound):
      progress.update(len(part))
      yield part


def _read_looked_at(run, task: str, settings: Settings) -> tuple[Any, Any]:
  """The examples whose covariance is looked at: the first ones, and those asked for by id; None
  where there are none.
  """
  first, asked = None, None
  number = settings.homoglyph_examples if glyph_class_set(task) else 0
  if not settings.covariance_index:
    number = max(number, settings.covariance_images)
  if number and not class_covariance.why_none(run.model.head):
    first = _examples(run, task, settings, number=number)
  if settings.covariance_index:
    with _named('--covariance_index', ','.join(map(str, settings.covariance_index))):
      asked = _examples(run, task, settings, index=settings.covariance_index)
  return first, asked


def _look(run, task: str, settings: Settings, first: Any, asked: Any) -> dict[str, Any]:
  """The covariance fields of an `Evaluation`."""
  if not (settings.covariance_images or settings.covariance_index or settings.homoglyph_examples):
    return {}
  if reason := class_covariance.why_none(run.model.head):
    return {'no_covariance': reason}
  look = class_covariance.CovarianceLook(run.model, run.partitioner, run.param_specs, run.channels)
  result = {}
  if first is not None:
    looks = list(look(run.params, first))
    result['looks'] = looks[: settings.covariance_images]
    if (class_set := glyph_class_set(task)) and settings.homoglyph_examples:
      counted = looks[: settings.homoglyph_examples]
      result['homoglyphs'] = class_covariance.homoglyph_rate(
        [x.label for x in counted],
        [x.with_label for x in counted],
        homoglyphs(class_set, settings.split, run.image_size),
      )
  if asked is not None:
    result['looks'] = list(look(run.params, asked))
  return result


def _examples(run, task, settings, **which) -> dict[str, np.ndarray]:
  with _stream('', task, settings.split, run, settings, whole=True) as batches:
    bound = settings.max_examples
    bounded = itertools.islice(batches, None if bound is None else -(-bound // settings.batch_size))
    return class_covariance.take_examples(bounded, **which)


def glyph_class_set(task: str) -> str | None:
  """'core' of 'glyphs_core' and 'glyphs_noisy'; None for a task of no glyphs."""
  from het_plugin.data import glyphs

  return glyphs.SOURCES[task].class_set if task in glyphs.SOURCES else None


def homoglyphs(class_set: str, split: str, image_size: int) -> tuple[frozenset[int], ...]:
  """Of each class the classes that look the same in some typeface of the split."""
  from het_plugin.data import glyph_bank, glyphs

  whole, _, _ = split.partition('[')  # of a slice
  return glyph_bank.homoglyphs(class_set, glyphs.SPLITS[class_set][whole].faces, image_size)


def shown_names(task: str, info: data.TaskInfo) -> Sequence[str] | None:
  """Names of the classes, with the characters themselves for glyphs."""
  from het_plugin.data import glyph_bank

  if class_set := glyph_class_set(task):
    classes = glyph_bank.glyph_classes(class_set)
    return [f'{chr(c)}  {n}' for c, n in zip(classes.code_points, classes.names, strict=True)]
  return info.class_names


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments: {" ".join(argv[1:])}')
  F = flags.FLAGS
  with command_line.one_sentence_errors():
    settings = make_settings()
    distributed.initialize()
    for checkpoint in F.checkpoint:
      check_checkpoint(checkpoint, settings)
    names = short_names([*F.checkpoint, *F.predictions])
    num_runs = len(F.checkpoint)
    files = [evaluate_file(*x, settings) for x in zip(names[num_runs:], F.predictions, strict=True)]
    evaluations = []
    for name, checkpoint in zip(names[:num_runs], F.checkpoint, strict=True):
      evaluations.append(evaluate_checkpoint(name, checkpoint, settings))
      jax.clear_caches()  # the next model compiles everything anew
    evaluations += files
    rows = uncertainty_report.results(evaluations)
    if jax.process_index() == 0:
      if F.output_dir:
        uncertainty_report.write(evaluations, rows, Path(F.output_dir))
      if F.json:
        reporting.write_json(rows, F.json)
      print(f'{uncertainty_report.introduction(rows)}\n{uncertainty_report.table(rows)}')
      for row in rows:
        if 'no_covariance' in row:
          print(f'{row["name"]}: {row["no_covariance"]}')
      if F.output_dir:
        print(f'\nThe same with curves and pictures: {Path(F.output_dir) / "index.html"}')


if __name__ == '__main__':
  define_flags()
  command_line.run(main)
