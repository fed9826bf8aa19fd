"""Computes representations of a data set and saves them, one file per layer and split.

    python -m het_plugin.represent --checkpoint=runs/het_xl --dataset=digits \\
      --layers=pre_logits,block00 --output_dir=representations

writes representations/digits/pre_logits/train.safetensors and so on. Run it again to continue where
it stopped, also after SIGTERM or Ctrl-C (exit code 42); complete files stay. The checkpoint is a
run's directory, one checkpoint in it, a file of timm, transformers or open_clip, or another
published file, whose model --gin_file gives.
--arrays=FILE in place of --checkpoint and --dataset turns arrays made elsewhere into such files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np

from het_plugin import data, reporting, runs, system
from het_plugin import rows as rows_lib
from het_plugin.cli.settings import Batches, Gin, JsonFile, OneOf
from het_plugin.evaluation.names import naming, task_name
from het_plugin.rows import files
from het_plugin.system import run_files
from het_plugin.system.ranges import Count

if TYPE_CHECKING:
  import jax

_PROGRAM = 'het_plugin.represent'
_ARRAYS_LAYER = 'features'
_ARRAYS_SPLIT = 'all'
_SHARDED = 'parquet', 'webdataset', 'array_record', 'tfrecord'  # PATH?SETTINGS
_OF_RUNS = (
  'checkpoint',
  'dataset',
  'gin_file',
  'gin_bindings',
  'splits',
  'layers',
  'pool',
  'batch_size',
  'max_examples',
  'image_size',
)  # flags that cannot go with --arrays


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Gin, Batches, JsonFile):
  """What is represented, and where it is written.

  Attributes:
    checkpoint: A run's directory, a checkpoint, .npz or .safetensors.
    dataset: A task (digits, npz:PATH, image_folder:PATH, tfds:NAME ...), .npz or folder.
    splits: Splits, by comma; all that are finite by default. Slices: train[:2000].
    layers: Representations of the backbone.
    pool: Positions of a layer are averaged, or put side by side.
    arrays: F.npz, F.safetensors or X.npy,Y.npy: features made elsewhere, and labels.
    output_dir: Where DATASET/LAYER/SPLIT files are written.
    format: Format of the files.
    dtype: Type of the features.
    max_examples: At most so many examples per split, chosen at random.
    image_size: Side in pixels; what the run was trained on by default.
    overwrite: Replaces files that were made with other settings.
  """

  aliases: ClassVar = {'split': 'splits'}

  checkpoint: str | None = None
  dataset: str | None = None
  splits: str | None = None
  layers: tuple[str, ...] = ('pre_logits',)
  pool: Literal['mean', 'none'] = 'mean'
  arrays: str | None = None
  output_dir: str | None = None
  format: Annotated[str, OneOf(('safetensors', 'npz'))] = 'safetensors'
  dtype: Annotated[str, OneOf(files.DTYPES)] = 'float32'
  max_examples: Count | None = None
  image_size: Count | None = None
  overwrite: bool = False


def run(settings: Settings) -> reporting.Report:
  """The files, with their sizes."""
  if settings.arrays is None and not (settings.checkpoint and settings.dataset):
    raise ValueError('--checkpoint and --dataset are needed, or --arrays')
  if settings.arrays:
    features = f'--arrays={settings.arrays}, which are features'
    settings.refuse(_OF_RUNS, features, 'cannot go with')
  settings.join()
  result = convert(settings) if settings.arrays else represent(settings)
  return reporting.Report(title='Representations', introduction=table(result['files']), json=result)


def represent(settings: Settings, program: str = _PROGRAM) -> dict[str, Any]:
  """Extracts layers of the splits of a data set.

  `program` is the command, for the provenance. Returns the checkpoint and, under 'files', a row per
  file, on all processes.
  """
  output_dir = run_files.local_folder('output_dir', settings.output_dir)
  if not settings.layers:
    raise ValueError('--layers= is empty: pre_logits, or others of the backbone')
  task = task_name(settings.dataset or '')
  with naming(f'--dataset={settings.dataset}'):
    info = data.classification_info(task)
  names = choose_splits(task, info, settings.splits)
  opened = runs.open_run(settings.checkpoint or '', *settings.gin)
  layers = tuple(dict.fromkeys(settings.layers))

  def open_batches(split: str) -> contextlib.AbstractContextManager:
    return opened.open_split(
      split,
      settings.max_examples,
      task=task,
      name=f'--splits={split}: this split of {task}',
      bound='--max_examples',
      image_size=settings.image_size or opened.image_size,
      batch_size=settings.batch_size,
    )

  num_examples = {}
  for split in names:
    with open_batches(split) as (batches, num_examples[split]):
      spec = batches.element_spec
  _check_fit(opened, layers, settings.pool, settings.dtype, spec)
  made_from = {
    'step': opened.step,
    'params': runs.run.params_fingerprint(opened.params),
    'dataset': task,
    'dataset_version': info.version,
    'pool': settings.pool,
    'dtype': settings.dtype,
    'image_size': spec['image'].shape[1],
    'max_examples': settings.max_examples,
    'config': opened.config.text,
  }
  folder = output_dir / folder_name(task)
  suffix = f'.{settings.format}'
  written = {
    x: runs.unfinished.SplitFiles(folder, x, suffix, {**made_from, 'split': x}) for x in names
  }
  # All errors of settings are found before the first split is begun.
  pending = {split: written[split].pending(layers, settings.overwrite) for split in names}
  provenance = {'checkpoint': opened.checkpoint, **reporting.provenance(program)}
  rows = []
  for split, left in pending.items():
    speed = {}
    start = time.monotonic()
    if left.layers:
      progress = reporting.Progress(split, num_examples[split], left.num_rows)
      with written[split].held(), open_batches(split) as (batches, _), progress:
        # Another program may have written some of it meanwhile.
        now = written[split].pending(layers, settings.overwrite)
        if now.layers:
          written[split].complete(
            now,
            opened,
            batches,
            settings.batch_size,
            num_examples[split],
            pool=settings.pool,
            class_names=info.class_names,
            provenance=provenance,
            on_rows=progress.update,
          )
      seconds = time.monotonic() - start
      computed = progress.count - left.num_rows
      speed = {'seconds': seconds, 'images_per_second': computed / seconds}
    describe = functools.partial(_rows, written[split], layers, left.layers, speed)
    rows += json.loads(system.processes.in_the_first(lambda of=describe: json.dumps(of())))
  return {'checkpoint': opened.checkpoint, 'step': opened.step, 'dataset': task, 'files': rows}


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
  return runs.unfinished.safe_name(names.get(prefix, task))


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
  if len({runs.unfinished.safe_name(name) for name in splits}) != len(splits):
    raise ValueError(f'{given}: two of the splits {", ".join(splits)} give the same file name')


def _check_fit(
  run: runs.Run,
  layers: Sequence[str],
  pool: str,
  dtype: str,
  spec: Mapping[str, jax.ShapeDtypeStruct],
) -> None:
  """Raises ValueError for layers or image sizes that do not fit the model; compiles nothing."""
  from flax import errors

  shape = list(spec['image'].shape[1:])
  try:
    columns = [rows_lib.column(layer) for layer in layers]
    run.computing(columns, pool=pool, dtype=dtype, is_shared=True).compiled.trace(
      run.params, dict(spec)
    )
  except ValueError as error:
    raise ValueError(f'--layers={",".join(layers)}, images {shape}: {error}') from error
  except errors.ScopeParamShapeError as error:
    raise ValueError(
      f'--image_size={shape[0]} does not fit the parameters of {run.checkpoint}, which are for '
      f'{run.image_size}'
    ) from error


def convert(settings: Settings) -> dict[str, Any]:
  """Writes arrays made elsewhere in our format, with one file per split if they name splits.

  Returns the source and, under 'files', a row per file.
  """
  import jax

  source = settings.arrays or ''
  output_dir = run_files.local_folder('output_dir', settings.output_dir)
  path, split = files.partition_source(source)
  of_rows = None if split else files.split_of_rows(path)
  names = [split] if split else [] if of_rows is None else np.unique(of_rows).tolist()
  _check_file_names(names, f'--arrays={source}')
  wanted = {name: f'{path}:{name}' for name in names} or {_ARRAYS_SPLIT: source}
  paths = path.split(',') if path.endswith('.npy') else [path]
  folder = output_dir / runs.unfinished.safe_name(Path(paths[0]).stem)
  rows = []
  digests = None
  for name, part in wanted.items():
    read = rows_lib.read(part)
    digests = digests or [_sha256(path) for path in paths]
    with np.errstate(over='ignore'):  # the next line raises
      features = read.features.astype(jax.numpy.dtype(settings.dtype))
    if wrong := runs.unfinished.not_finite(_ARRAYS_LAYER, features, read.index):
      raise ValueError(wrong)
    made_from = {'source': part, 'sha256': digests, 'dtype': settings.dtype, 'split': name}
    target = runs.unfinished.SplitFiles(folder, name, f'.{settings.format}', made_from)
    pending = target.pending([_ARRAYS_LAYER], settings.overwrite).layers
    if pending:
      about = {'layer': _ARRAYS_LAYER, 'num_examples': len(features), 'dim': features.shape[1]}
      provenance = {**read.provenance, **reporting.provenance(_PROGRAM), **made_from, **about}
      columns = {'features': features}
      converted = dataclasses.replace(read, columns=columns, provenance=provenance)
      files.write(target.path(_ARRAYS_LAYER), converted)
    rows += _rows(target, [_ARRAYS_LAYER], pending, {})
  return {'arrays': source, 'files': rows}


def _sha256(path: str) -> str:
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def _rows(
  target: runs.unfinished.SplitFiles,
  layers: Sequence[str],
  new: Sequence[str],
  speed: Mapping[str, float],
) -> list[dict[str, Any]]:
  """The rows of a split's files; `speed` is of the `new` layers, others were complete."""
  rows = []
  for layer in layers:
    source = target.source(layer)
    if layer not in new:
      print(f'{source} is complete already.', flush=True)
    provenance = files.read_provenance(target.written(layer)[0])
    row: dict[str, Any] = {
      'split': target.split,
      'layer': layer,
      'num_examples': provenance['num_examples'],
      'dim': provenance['dim'],
      'file': source,
      'seconds': None,
      'images_per_second': None,
    }
    rows.append({**row, **speed} if layer in new else row)
  return rows


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
