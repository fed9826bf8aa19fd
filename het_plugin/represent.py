"""Computes representations of a data set and saves them, one file a layer and split.

    python -m het_plugin.represent --checkpoint=runs/het_xl --dataset=digits \\
      --layers=pre_logits,block00 --output_dir=representations

writes representations/digits/pre_logits/train.safetensors and so on. Run it again to go on where it
stopped; files that are complete stay. The checkpoint is a run's directory, one checkpoint in it, or
a published ViT or BiT file, whose model --gin_file gives. Arrays made elsewhere become such files
with --arrays=FILE in place of --checkpoint and --dataset.

Exit codes: 0 done; 2 a setting is wrong.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
from absl import app, flags

from het_plugin import data, reporting
from het_plugin.config import command_line, distributed, trained_run
from het_plugin.evaluation import extraction, extraction_files, fingerprint
from het_plugin.evaluation import representations as representations_lib
from het_plugin.evaluation.extraction_files import Plan, SplitFiles, from_process_0

_MODULE = 'het_plugin.represent'
_ARRAYS_LAYER = 'features'
_ARRAYS_SPLIT = 'all'
_FROM_A_MODEL = ('checkpoint', 'dataset', 'splits', 'layers', 'pool', 'max_examples', 'image_size')


def define_flags() -> None:
  command_line.define_flags()
  distributed.define_flags()
  flags.DEFINE_string('checkpoint', None, "A run's directory, a checkpoint, .npz or .safetensors.")
  flags.DEFINE_string(
    'dataset', None, 'A task (digits, npz:PATH, image_folder:PATH, tfds:NAME ...), .npz or folder.'
  )
  flags.DEFINE_string(
    'splits', None, 'Splits, by comma; all that are finite by default. Slices: train[:2000].'
  )
  flags.DEFINE_list('layers', ['pre_logits'], 'Representations of the backbone.')
  flags.DEFINE_enum(
    'pool', 'mean', extraction.POOLS, 'Positions of a layer are averaged, or put side by side.'
  )
  flags.DEFINE_string(
    'arrays', None, 'F.npz, F.safetensors or X.npy,Y.npy: features made elsewhere, and labels.'
  )
  flags.DEFINE_string('output_dir', None, 'Where DATASET/LAYER/SPLIT files are written.')
  flags.DEFINE_enum('format', 'safetensors', ['safetensors', 'npz'], 'Of the files.')
  flags.DEFINE_enum('dtype', 'float32', representations_lib.DTYPES, 'Of the features in the files.')
  flags.DEFINE_integer('batch_size', 256, 'Of the global batch.', lower_bound=1)
  flags.DEFINE_integer(
    'max_examples', None, 'At most so many examples a split, a fixed random choice.', lower_bound=1
  )
  flags.DEFINE_integer(
    'image_size', None, 'Side in pixels; what the run was trained on by default.', lower_bound=1
  )
  flags.DEFINE_bool(
    'overwrite', False, 'Replaces files, and unfinished ones, that have other settings.'
  )
  flags.DEFINE_string('json', None, 'Where the table is written as JSON.')


@dataclasses.dataclass(frozen=True)
class Split:
  """A split to do.

  Attributes:
    config: what to read.
    num_examples: at most.
    files: where its representations lie.
    settings: all that they depend on, but for the layer.
    plan: what is there already.
  """

  config: data.DatasetConfig
  num_examples: int
  files: SplitFiles
  settings: Mapping[str, Any]
  plan: Plan


def represent() -> dict[str, Any]:
  """Extracts what the flags ask for; a row for each file is under 'files'."""
  task = task_name(flags.FLAGS.dataset)
  info = data.classification_info(task)
  names = choose_splits(task, info, flags.FLAGS.splits)
  run = trained_run.open_run(
    flags.FLAGS.checkpoint,
    flags.FLAGS.gin_file,
    flags.FLAGS.gin_bindings,
    flags.FLAGS.gin_search_paths,
  )
  configs = [dataset_config(task, info, name, run) for name in names]
  num_examples = [max_num_examples(config, run) for config in configs]
  layers = tuple(dict.fromkeys(flags.FLAGS.layers))
  extractor_of = functools.cache(functools.partial(make_extractor, run))
  spec = data.element_spec(configs[0], info.channels)
  widths = layer_widths(extractor_of(layers), run, spec)

  settings = {
    'step': run.step,
    'params': fingerprint.params_fingerprint(run.params),
    'dataset': task,
    'dataset_version': info.version,
    'pool': flags.FLAGS.pool,
    'dtype': flags.FLAGS.dtype,
    'image_size': spec['image'].shape[1],
    'max_examples': flags.FLAGS.max_examples,
    'config': run.config,
  }
  folder = Path(flags.FLAGS.output_dir) / folder_name(task)
  splits = plan_splits(folder, configs, num_examples, layers, settings)
  from_process_0(lambda: check_space(splits, widths))
  provenance = {'checkpoint': run.checkpoint, **how_and_when()}
  rows = []
  for split in splits:
    speed = {}
    if layers_left := split.plan.layers:
      extractor = extractor_of(layers_left)
      speed = run_split(run, extractor, split, widths, info.class_names, provenance)
    if jax.process_index() == 0:
      for layer in layers:
        rows.append(file_row(split.files, layer, speed if layer in layers_left else None))
        if layer not in layers_left:
          tell_complete(split.files.path(layer))
  return {'checkpoint': run.checkpoint, 'step': run.step, 'dataset': task, 'files': rows}


def task_name(dataset: str) -> str:
  """The task of --dataset, which may be a plain path too; a task goes before a folder."""
  if dataset.endswith('.npz') and not dataset.startswith('npz:'):
    return f'npz:{dataset}'
  if os.path.isdir(dataset):
    from het_plugin.data import tasks  # takes seconds to import

    return dataset if tasks.is_image_task(dataset) else f'image_folder:{dataset}'
  return dataset


def folder_name(task: str) -> str:
  """Of the task's representations: the name of a file or folder without those above it."""
  prefix, _, argument = task.partition(':')
  if prefix == 'npz':
    return extraction_files.safe_name(Path(argument).stem)
  if prefix == 'image_folder':
    return extraction_files.safe_name(Path(argument).resolve().name)
  return extraction_files.safe_name(argument if prefix == 'tfds' else task)


def choose_splits(task: str, info: data.TaskInfo, given: str | None) -> list[str]:
  """Names of the splits.

  Raises:
    ValueError: there is none, or two would have one file.
  """
  if given is None:
    names = [name for name, num_examples in info.splits.items() if num_examples]
  else:
    names = re.split(r',(?![^\[]*\])', given)  # a comma in brackets is within a slice
  names = list(dict.fromkeys(name.strip() for name in names if name.strip()))
  if not names:
    raise ValueError(
      f'--splits is needed: {task} has no finite split; choose from {", ".join(info.splits)}'
    )
  if len({extraction_files.safe_name(name) for name in names}) != len(names):
    raise ValueError(f'--splits={given}: the names are too alike to be those of files')
  return names


def dataset_config(
  task: str, info: data.TaskInfo, split: str, run: trained_run.TrainedRun
) -> data.DatasetConfig:
  """What is read of a split."""
  return data.one_pass(
    task,
    split,
    image_size=flags.FLAGS.image_size or run.image_size,
    max_labels=max(run.max_labels, info.max_labels) if info.multi_label else 1,
    batch_size=flags.FLAGS.batch_size,
    bounded=flags.FLAGS.max_examples is not None,
  )


def max_num_examples(config: data.DatasetConfig, run: trained_run.TrainedRun) -> int:
  """How many examples there are at most; reads no image.

  Raises:
    ValueError: the split cannot be read, or has no end.
  """
  bound = flags.FLAGS.max_examples
  with contextlib.closing(open_batches(config, run)) as batches:
    if batches.num_examples is None:
      if bound is None:
        raise ValueError(
          f'--splits={config.split}: this split of {config.mixture_or_task_name} is endless: set '
          '--max_examples'
        )
      return bound
  return batches.num_examples if bound is None else min(batches.num_examples, bound)


def open_batches(config: data.DatasetConfig, run: trained_run.TrainedRun) -> data.BatchIterator:
  return data.get_dataset(config, run.partitioner.batch_rows(config.batch_size))


def make_extractor(
  run: trained_run.TrainedRun, layers: tuple[str, ...]
) -> extraction.RepresentationExtractor:
  return extraction.RepresentationExtractor(
    run.model,
    run.partitioner,
    run.param_specs,
    layers=layers,
    channels=run.channels,
    pool=flags.FLAGS.pool,
    dtype=jax.numpy.dtype(flags.FLAGS.dtype),
  )


def layer_widths(
  extractor: extraction.RepresentationExtractor,
  run: trained_run.TrainedRun,
  spec: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, int]:
  """D of each layer; compiles nothing.

  Raises:
    ValueError: the backbone lacks a layer, or does not take these images.
  """
  shape = list(spec['image'].shape[1:])
  try:
    return extractor.widths(run.params, spec)
  except ValueError as error:
    raise ValueError(
      f'--layers={",".join(extractor.layers)} of images {shape} cannot be had: {error}'
    ) from error
  except flax.errors.ScopeParamShapeError as error:
    raise ValueError(
      f'--image_size={shape[0]} does not fit the parameters of {run.checkpoint}, which are for '
      f'{run.image_size}'
    ) from error


def plan_splits(
  folder: Path,
  configs: Sequence[data.DatasetConfig],
  num_examples: Sequence[int],
  layers: Sequence[str],
  settings: Mapping[str, Any],
) -> list[Split]:
  """What there is to do; whatever stands against it is found before the first split is begun."""
  files = [SplitFiles(folder, config.split, f'.{flags.FLAGS.format}') for config in configs]
  of_split = [{**settings, 'split': config.split} for config in configs]
  plans = from_process_0(
    lambda: [
      extraction_files.make_plan(f, layers, s, flags.FLAGS.overwrite)
      for f, s in zip(files, of_split, strict=True)
    ]
  )
  return [Split(*x) for x in zip(configs, num_examples, files, of_split, plans, strict=True)]


def check_space(splits: Sequence[Split], widths: Mapping[str, int]) -> None:
  """Raises ValueError unless the disk has the space: rows of a split lie twice for a moment."""
  itemsize = jax.numpy.dtype(flags.FLAGS.dtype).itemsize
  sizes = [
    split.num_examples * itemsize * sum(widths[layer] for layer in split.plan.layers)
    for split in splits
  ]
  started = sum(
    file.stat().st_size for split in splits for file in split.files.unfinished.glob('*.rows')
  )
  existing = next(path for path in splits[0].files.folder.absolute().parents if path.exists())
  needed, free = sum(sizes) + max(sizes) - started, shutil.disk_usage(existing).free
  if needed > free:
    raise ValueError(
      f'--output_dir={flags.FLAGS.output_dir} has {free / 2**30:.1f} GiB of space, and '
      f'{needed / 2**30:.1f} GiB are needed'
    )


def run_split(
  run: trained_run.TrainedRun,
  extractor: extraction.RepresentationExtractor,
  split: Split,
  widths: Mapping[str, int],
  class_names: tuple[str, ...] | None,
  provenance: Mapping[str, Any],
) -> dict[str, float]:
  """Writes the files of a split; returns seconds, and images_per_second of those computed now."""
  start = time.monotonic()
  num_before = 0 if split.plan.progress is None else split.plan.progress.num_rows
  with contextlib.ExitStack() as stack:
    batches = stack.enter_context(contextlib.closing(open_batches(split.config, run)))
    progress = reporting.Progress(
      split.config.split, split.num_examples, num_before, shown=jax.process_index() == 0
    )
    extraction_files.run_plan(
      split.files,
      split.plan,
      split.settings,
      extractor,
      run.params,
      batches,
      batch_size=split.config.batch_size,
      widths=widths,
      max_examples=flags.FLAGS.max_examples,
      class_names=class_names,
      provenance=provenance,
      on_rows=stack.enter_context(progress).update,
    )
  seconds = time.monotonic() - start
  return {'seconds': seconds, 'images_per_second': (progress.count - num_before) / seconds}


def convert() -> dict[str, Any]:
  """Writes the arrays of --arrays as our files, a split each where they name splits."""
  source = flags.FLAGS.arrays
  given = [name for name in _FROM_A_MODEL if flags.FLAGS[name].present]
  if given:
    raise ValueError(f'--{given[0]} cannot go with --arrays={source}, which are features already')
  path, split = representations_lib.partition_source(source)
  names = (split,) if split else representations_lib.split_names(path)
  wanted = {name: f'{path}:{name}' for name in names} or {_ARRAYS_SPLIT: source}
  dtype = jax.numpy.dtype(flags.FLAGS.dtype)
  paths = path.split(',') if path.endswith('.npy') else [path]
  folder = Path(flags.FLAGS.output_dir) / extraction_files.safe_name(Path(paths[0]).stem)
  rows, digests = [], None
  for name, part in wanted.items():
    files = SplitFiles(folder, name, f'.{flags.FLAGS.format}')
    read = representations_lib.read_representations(part)
    digests = digests or file_digests(paths)
    with np.errstate(over='ignore'):  # an error, two lines down
      features = read.features.astype(dtype)
    extraction.check_finite(_ARRAYS_LAYER, features, read.index)
    settings = {'source': part, 'sha256': digests, 'dtype': dtype.name, 'split': name}
    plan = extraction_files.make_plan(files, [_ARRAYS_LAYER], settings, flags.FLAGS.overwrite)
    if plan.layers:
      about = {'layer': _ARRAYS_LAYER, 'num_examples': len(features), 'dim': features.shape[1]}
      provenance = {**read.provenance, **how_and_when(), **settings, **about}
      converted = dataclasses.replace(read, features=features, provenance=provenance)
      representations_lib.write_representations(files.path(_ARRAYS_LAYER), converted)
    else:
      tell_complete(files.path(_ARRAYS_LAYER))
    rows.append(file_row(files, _ARRAYS_LAYER))
  return {'arrays': source, 'files': rows}


def file_digests(paths: Sequence[str]) -> list[str]:
  """SHA-256 of each file."""
  digests = []
  for path in paths:
    with open(path, 'rb') as file:
      digests.append(hashlib.file_digest(file, 'sha256').hexdigest())
  return digests


def how_and_when() -> dict[str, Any]:
  made = dataclasses.asdict(reporting.Provenance.of_this_process(_MODULE, {}))
  return {name: made[name] for name in ('command', 'created', 'versions')}


def tell_complete(path: Path) -> None:
  print(f'{path} is complete already.', flush=True)


def file_row(
  files: SplitFiles, layer: str, speed: Mapping[str, float] | None = None
) -> dict[str, Any]:
  path = files.path(layer)
  provenance = representations_lib.read_provenance(path)
  return {
    'split': files.split,
    'layer': layer,
    'num_examples': provenance['num_examples'],
    'dim': provenance['dim'],
    'file': str(path),
    'seconds': None,
    'images_per_second': None,
    **(speed or {}),
  }


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
  header = ('split', 'layer', 'N', 'D', 'seconds', 'images/s', 'file')
  cells = [
    (
      row['split'],
      row['layer'],
      f'{row["num_examples"]:,}',
      f'{row["dim"]:,}',
      *('–' if row[x] is None else f'{row[x]:,.1f}' for x in ('seconds', 'images_per_second')),
      row['file'],
    )
    for row in rows
  ]
  print(reporting.aligned([header, *cells]), flush=True)


def check_flags() -> None:
  """Raises ValueError for flags that lack something, before anything heavy is imported."""
  if flags.FLAGS.output_dir is None:
    raise ValueError('--output_dir is needed: where the files are written')
  if '://' in flags.FLAGS.output_dir:
    raise ValueError(f'--output_dir={flags.FLAGS.output_dir} must be a local directory')
  if flags.FLAGS.arrays is None and not (flags.FLAGS.checkpoint and flags.FLAGS.dataset):
    raise ValueError('--checkpoint and --dataset are needed, or --arrays')
  if not flags.FLAGS.layers:
    raise ValueError('--layers= is empty: pre_logits, or others of the backbone')


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments: {" ".join(argv[1:])}')
  with command_line.one_sentence_errors():
    check_flags()
    distributed.initialize()
    result = convert() if flags.FLAGS.arrays else represent()
    if jax.process_index() == 0:
      print_table(result['files'])
      if flags.FLAGS.json:
        reporting.write_json(result, flags.FLAGS.json)


if __name__ == '__main__':
  define_flags()
  command_line.run(main)
