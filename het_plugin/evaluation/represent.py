"""Represents the splits of a data set as files, and turns arrays made elsewhere into such files."""

import dataclasses
import functools
import hashlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np

from het_plugin import data, reporting
from het_plugin.evaluation import extraction, extraction_files
from het_plugin.evaluation import representations as representations_lib
from het_plugin.evaluation.extraction_files import Plan, SplitFiles
from het_plugin.evaluation.splits import open_split

_MODULE = 'het_plugin.represent'
_ARRAYS_LAYER = 'features'
_ARRAYS_SPLIT = 'all'


@dataclasses.dataclass(frozen=True)
class Settings:
  """The flags of the main, by name; see there."""

  dataset: str | None
  splits: str | None
  layers: Sequence[str]
  pool: str
  output_dir: str
  format: str
  dtype: str
  batch_size: int
  max_examples: int | None
  image_size: int | None
  overwrite: bool

  def __post_init__(self):
    if self.output_dir is None:
      raise ValueError('--output_dir is needed: where the files are written')
    if '://' in self.output_dir:
      raise ValueError(f'--output_dir={self.output_dir} must be a local directory')
    if not self.layers:
      raise ValueError('--layers= is empty: pre_logits, or others of the backbone')


def represent(settings: Settings, open_run: Callable[[], Any]) -> dict[str, Any]:
  """Extracts the layers of all splits of the run that `open_run` opens, once they are known.

  Returns the checkpoint and, under 'files', a row for each file (process 0).
  """
  task = task_name(settings.dataset)
  info = data.classification_info(task)
  names = choose_splits(task, info, settings.splits)
  run = open_run()
  configs = [
    data.one_pass(
      task,
      name,
      image_size=settings.image_size or run.image_size,
      max_labels=max(run.max_labels, info.max_labels) if info.multi_label else 1,
      batch_size=settings.batch_size,
      bounded=settings.max_examples is not None,
    )
    for name in names
  ]

  def open_batches(config):
    name = f'--splits={config.split}: this split of {task}'
    return open_split(
      config, run.partitioner, settings.max_examples, name=name, bound='--max_examples'
    )

  num_examples = []
  for config in configs:
    with open_batches(config) as (_, size):
      num_examples.append(size)
  layers = tuple(dict.fromkeys(settings.layers))
  extractor_of = functools.cache(functools.partial(_extractor, run, settings))
  spec = data.element_spec(configs[0], info.channels)
  widths = _widths(extractor_of(layers), run, spec)
  made_from = {
    'step': run.step,
    'params': extraction.params_fingerprint(run.params),
    'dataset': task,
    'dataset_version': info.version,
    'pool': settings.pool,
    'dtype': settings.dtype,
    'image_size': spec['image'].shape[1],
    'max_examples': settings.max_examples,
    'config': run.config,
  }
  folder = Path(settings.output_dir) / folder_name(task)
  files = [SplitFiles(folder, config.split, f'.{settings.format}') for config in configs]
  of_split = [{**made_from, 'split': config.split} for config in configs]
  # Whatever stands in the way is found before the first split is begun.
  plans = [
    extraction_files.make_plan(*split, layers, settings.overwrite)
    for split in zip(files, of_split, num_examples, strict=True)
  ]
  provenance = {'checkpoint': run.checkpoint, **_how_and_when()}
  rows = []
  for config, plan in zip(configs, plans, strict=True):
    speed = None
    if plan.layers:
      with open_batches(config) as (batches, _):
        extractor = extractor_of(plan.layers)
        speed = _run(run, extractor, batches, config, plan, widths, info, provenance)
    if jax.process_index() == 0:
      rows += [_row(plan.files, x, speed if x in plan.layers else None) for x in layers]
  return {'checkpoint': run.checkpoint, 'step': run.step, 'dataset': task, 'files': rows}


def task_name(dataset: str) -> str:
  """The task of --dataset, which may be a plain path; the name of a task wins over a folder."""
  if dataset.endswith('.npz') and not dataset.startswith('npz:'):
    return f'npz:{dataset}'
  if os.path.isdir(dataset):
    from het_plugin.data import tasks  # takes seconds to import

    return dataset if dataset in tasks.names() else f'image_folder:{dataset}'
  return dataset


def folder_name(task: str) -> str:
  """The folder of a task's representations: the name of its file or folder, without parents."""
  prefix, _, argument = task.partition(':')
  if prefix == 'npz':
    return extraction_files.safe_name(Path(argument).stem)
  if prefix == 'image_folder':
    return extraction_files.safe_name(Path(argument).resolve().name)
  return extraction_files.safe_name(argument if prefix == 'tfds' else task)


def choose_splits(task: str, info: data.TaskInfo, given: str | None) -> list[str]:
  """Names of the splits: those given, or all that are finite."""
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


def _extractor(run, settings, layers: tuple[str, ...]) -> extraction.RepresentationExtractor:
  return extraction.RepresentationExtractor(
    run.model,
    run.partitioner,
    run.param_specs,
    layers=layers,
    channels=run.channels,
    pool=settings.pool,
    dtype=jax.numpy.dtype(settings.dtype),
  )


def _widths(extractor, run, spec: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, int]:
  """D of each layer; compiles nothing."""
  shape = list(spec['image'].shape[1:])
  try:
    return extractor.widths(run.params, spec)
  except ValueError as error:
    raise ValueError(f'--layers={",".join(extractor.layers)}, images {shape}: {error}') from error
  except flax.errors.ScopeParamShapeError as error:
    raise ValueError(
      f'--image_size={shape[0]} does not fit the parameters of {run.checkpoint}, which are for '
      f'{run.image_size}'
    ) from error


def _run(run, extractor, batches, config, plan: Plan, widths, info, provenance) -> dict[str, float]:
  """Writes the files of a split; returns seconds, and images_per_second of those computed now."""
  start = time.monotonic()
  shown = jax.process_index() == 0
  with reporting.Progress(config.split, plan.num_examples, plan.num_rows, shown=shown) as progress:
    extraction_files.run_plan(
      plan,
      extractor,
      run.params,
      batches,
      config.batch_size,
      widths,
      class_names=info.class_names,
      provenance=provenance,
      on_rows=progress.update,
    )
  seconds = time.monotonic() - start
  return {'seconds': seconds, 'images_per_second': (progress.count - plan.num_rows) / seconds}


def convert(source: str, settings: Settings) -> dict[str, Any]:
  """Writes arrays made elsewhere as files of ours, one per split if they name splits.

  Returns the source and, under 'files', a row for each file.
  """
  path, split = representations_lib.partition_source(source)
  names = (split,) if split else representations_lib.split_names(path)
  wanted = {name: f'{path}:{name}' for name in names} or {_ARRAYS_SPLIT: source}
  dtype = jax.numpy.dtype(settings.dtype)
  paths = path.split(',') if path.endswith('.npy') else [path]
  folder = Path(settings.output_dir) / extraction_files.safe_name(Path(paths[0]).stem)
  rows, digests = [], None
  for name, part in wanted.items():
    files = SplitFiles(folder, name, f'.{settings.format}')
    read = representations_lib.read_representations(part)
    digests = digests or [_sha256(path) for path in paths]
    with np.errstate(over='ignore'):  # the next line raises
      features = read.features.astype(dtype)
    extraction.check_finite(_ARRAYS_LAYER, features, read.index)
    made_from = {'source': part, 'sha256': digests, 'dtype': dtype.name, 'split': name}
    plan = extraction_files.make_plan(
      files, made_from, len(features), [_ARRAYS_LAYER], settings.overwrite
    )
    if plan.layers:
      about = {'layer': _ARRAYS_LAYER, 'num_examples': len(features), 'dim': features.shape[1]}
      provenance = {**read.provenance, **_how_and_when(), **made_from, **about}
      converted = dataclasses.replace(read, features=features, provenance=provenance)
      representations_lib.write_representations(files.path(_ARRAYS_LAYER), converted)
    rows.append(_row(files, _ARRAYS_LAYER, {} if plan.layers else None))
  return {'arrays': source, 'files': rows}


def _sha256(path: str) -> str:
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def _how_and_when() -> dict[str, Any]:
  made = dataclasses.asdict(reporting.Provenance.of_this_process(_MODULE, {}))
  return {name: made[name] for name in ('command', 'created', 'versions')}


def _row(files: SplitFiles, layer: str, speed: Mapping[str, float] | None) -> dict[str, Any]:
  """The row of a file; speed None says that the file was complete already."""
  path = files.path(layer)
  if speed is None:
    print(f'{path} is complete already.', flush=True)
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


def table(rows: Sequence[Mapping[str, Any]]) -> str:
  """The rows of files as text."""
  cells = [
    (
      *(row['split'], row['layer'], f'{row["num_examples"]:,}', f'{row["dim"]:,}'),
      *('–' if row[x] is None else f'{row[x]:,.1f}' for x in ('seconds', 'images_per_second')),
      row['file'],
    )
    for row in rows
  ]
  header = ('split', 'layer', 'N', 'D', 'seconds', 'images/s', 'file')
  return reporting.aligned([header, *cells])
