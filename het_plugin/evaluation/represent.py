"""Represents the splits of a data set as files, and turns arrays made elsewhere into such files."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np

from het_plugin import data, reporting, runs
from het_plugin import rows as rows_lib
from het_plugin.rows import files
from het_plugin.runs import unfinished
from het_plugin.runs.opening import GinSettings
from het_plugin.runs.run import params_fingerprint
from het_plugin.runs.unfinished import SplitFiles
from het_plugin.system import processes, run_files

_PROGRAM = 'het_plugin.represent'
_ARRAYS_LAYER = 'features'
_ARRAYS_SPLIT = 'all'
_SHARDED = 'parquet', 'webdataset', 'array_record', 'tfrecord'  # PATH?SETTINGS


def represent(
  checkpoint: str,
  gin_settings: GinSettings,
  dataset: str,
  output_dir: str | None,
  *,
  splits: str | None = None,
  layers: Sequence[str] = ('pre_logits',),
  pool: str = 'mean',
  format: str = 'safetensors',
  dtype: str = 'float32',
  batch_size: int = 256,
  max_examples: int | None = None,
  image_size: int | None = None,
  overwrite: bool = False,
  program: str = _PROGRAM,
) -> dict[str, Any]:
  """Extracts layers of the splits of a data set.

  `gin_settings` go to `runs.open_run`, and `program` is the main, for the provenance; the others
  are flags of `het_plugin.represent`. Returns the checkpoint and, under 'files', a row per file, on
  all processes.
  """
  _check_output(output_dir)
  if not layers:
    raise ValueError('--layers= is empty: pre_logits, or others of the backbone')
  task = task_name(dataset)
  info = data.classification_info(task)
  names = choose_splits(task, info, splits)
  run = runs.open_run(checkpoint, *gin_settings)
  layers = tuple(dict.fromkeys(layers))

  def open_batches(split: str) -> contextlib.AbstractContextManager:
    return run.open_split(
      split,
      max_examples,
      task=task,
      name=f'--splits={split}: this split of {task}',
      bound='--max_examples',
      image_size=image_size or run.image_size,
      batch_size=batch_size,
    )

  num_examples = {}
  for split in names:
    with open_batches(split) as (batches, num_examples[split]):
      spec = batches.element_spec
  _check_fit(run, layers, pool, dtype, spec)
  made_from = {
    'step': run.step,
    'params': params_fingerprint(run.params),
    'dataset': task,
    'dataset_version': info.version,
    'pool': pool,
    'dtype': dtype,
    'image_size': spec['image'].shape[1],
    'max_examples': max_examples,
    'config': run.config.text,
  }
  folder = Path(output_dir) / folder_name(task)
  written = {x: SplitFiles(folder, x, f'.{format}', {**made_from, 'split': x}) for x in names}
  # All errors of settings are found before the first split is begun.
  pending = {split: written[split].pending(layers, overwrite) for split in names}
  provenance = {'checkpoint': run.checkpoint, **reporting.provenance(program)}
  rows = []
  for split, left in pending.items():
    speed = {}
    start = time.monotonic()
    if left.layers:
      progress = reporting.Progress(split, num_examples[split], left.num_rows)
      with written[split].held(), open_batches(split) as (batches, _), progress:
        # Another program may have written some of it meanwhile.
        now = written[split].pending(layers, overwrite)
        if now.layers:
          written[split].complete(
            now,
            run,
            batches,
            batch_size,
            num_examples[split],
            pool=pool,
            class_names=info.class_names,
            provenance=provenance,
            on_rows=progress.update,
          )
      seconds = time.monotonic() - start
      computed = progress.count - left.num_rows
      speed = {'seconds': seconds, 'images_per_second': computed / seconds}
    describe = functools.partial(_rows, written[split], layers, left.layers, speed)
    rows += json.loads(processes.in_the_first(describe))
  return {'checkpoint': run.checkpoint, 'step': run.step, 'dataset': task, 'files': rows}


def files_of(
  program: str,
  checkpoint: str,
  gin_settings: GinSettings,
  dataset: str,
  output_dir: str | None,
  splits: Sequence[str],
  layer: str,
) -> list[str]:
  """The files of a layer of splits, written by `represent` if they are not there."""
  where = {'splits': ','.join(splits), 'layers': [layer], 'program': program}
  made = represent(checkpoint, gin_settings, dataset, output_dir, **where)
  return [row['file'] for row in made['files']]


def _check_output(output_dir: str | None) -> None:
  if not output_dir:
    raise ValueError('--output_dir is needed: where the files are written')
  run_files.local_folder('output_dir', output_dir)


def task_name(dataset: str) -> str:
  """The task of --dataset, which may be a plain path; the name of a task wins over a folder."""
  if dataset.endswith('.npz') and not dataset.startswith(('npz:', 'features:')):
    return f'npz:{dataset}'
  if os.path.isdir(dataset):
    from het_plugin.data import tasks  # takes seconds to import

    return dataset if dataset in tasks.names() else f'image_folder:{dataset}'
  return dataset


def folder_name(task: str) -> str:
  """The folder of a task's representations: the name of its file or folder, without parents."""
  prefix, _, argument = task.partition(':')
  path, *settings = argument.split('?')
  stem = Path(path).resolve().name.removesuffix('.parquet').removesuffix('.tar')
  names = {
    'npz': Path(argument).stem,
    'image_folder': Path(argument).resolve().name,
    'tfds': argument,
    **dict.fromkeys(_SHARDED, '_'.join([stem, *settings])),
  }
  return unfinished.safe_name(names.get(prefix, task))


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
  _check_file_names(names, f'--splits={given}')
  return names


def _check_file_names(splits: Sequence[str], given: str) -> None:
  if len({unfinished.safe_name(name) for name in splits}) != len(splits):
    raise ValueError(f'{given}: two of the splits {", ".join(splits)} give the same file name')


def _check_fit(
  run: runs.Run,
  layers: Sequence[str],
  pool: str,
  dtype: str,
  spec: Mapping[str, jax.ShapeDtypeStruct],
) -> None:
  """Raises ValueError for layers or image sizes that do not fit the model; compiles nothing."""
  shape = list(spec['image'].shape[1:])
  try:
    columns = [rows_lib.column(layer) for layer in layers]
    run.computing(columns, pool=pool, dtype=dtype).compiled.trace(run.params, dict(spec))
  except ValueError as error:
    raise ValueError(f'--layers={",".join(layers)}, images {shape}: {error}') from error
  except flax.errors.ScopeParamShapeError as error:
    raise ValueError(
      f'--image_size={shape[0]} does not fit the parameters of {run.checkpoint}, which are for '
      f'{run.image_size}'
    ) from error


def convert(
  source: str,
  output_dir: str | None,
  *,
  format: str = 'safetensors',
  dtype: str = 'float32',
  overwrite: bool = False,
) -> dict[str, Any]:
  """Writes arrays made elsewhere in our format, with one file per split if they name splits.

  Returns the source and, under 'files', a row per file.
  """
  _check_output(output_dir)
  path, split = files.partition_source(source)
  names = (split,) if split else files.split_names(path)
  _check_file_names(names, f'--arrays={source}')
  wanted = {name: f'{path}:{name}' for name in names} or {_ARRAYS_SPLIT: source}
  paths = path.split(',') if path.endswith('.npy') else [path]
  folder = Path(output_dir) / unfinished.safe_name(Path(paths[0]).stem)
  rows = []
  digests = None
  for name, part in wanted.items():
    read = rows_lib.read(part)
    digests = digests or [_sha256(path) for path in paths]
    with np.errstate(over='ignore'):  # the next line raises
      features = read.features.astype(jax.numpy.dtype(dtype))
    unfinished.check_finite(_ARRAYS_LAYER, features, read.index)
    made_from = {'source': part, 'sha256': digests, 'dtype': dtype, 'split': name}
    target = SplitFiles(folder, name, f'.{format}', made_from)
    pending = target.pending([_ARRAYS_LAYER], overwrite).layers
    if pending:
      about = {'layer': _ARRAYS_LAYER, 'num_examples': len(features), 'dim': features.shape[1]}
      provenance = {**read.provenance, **reporting.provenance(_PROGRAM), **made_from, **about}
      columns = {'features': features}
      converted = dataclasses.replace(read, columns=columns, provenance=provenance)
      files.write(target.path(_ARRAYS_LAYER), converted)
    rows.append(_row(target, _ARRAYS_LAYER, {} if pending else None))
  return {'arrays': source, 'files': rows}


def _sha256(path: str) -> str:
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def _rows(
  target: SplitFiles, layers: Sequence[str], new: Sequence[str], speed: Mapping[str, float]
) -> str:
  """The rows of a split's files as JSON; `speed` is of the `new` layers."""
  return json.dumps([_row(target, layer, speed if layer in new else None) for layer in layers])


def _row(target: SplitFiles, layer: str, speed: Mapping[str, float] | None) -> dict[str, Any]:
  """The row of a file; speed is None if the file was already complete."""
  path = target.path(layer)
  if speed is None:
    print(f'{path} is complete already.', flush=True)
  provenance = files.read_provenance(path)
  return {
    'split': target.split,
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
      row['split'],
      row['layer'],
      f'{row["num_examples"]:,}',
      f'{row["dim"]:,}',
      *(reporting.cell(row[x], spec=',.1f') for x in ('seconds', 'images_per_second')),
      row['file'],
    )
    for row in rows
  ]
  header = ('split', 'layer', 'N', 'D', 'seconds', 'images/s', 'file')
  return reporting.aligned([header, *cells])
