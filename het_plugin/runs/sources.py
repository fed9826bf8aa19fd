"""What a user names with one text, as rows.

    open_source('train.npz').rows()
    open_source('runs/det').rows('train')
    open_source('runs/det:test[:100]').rows(columns=('log_prob',))
    open_source('digits').rows('train')

A text is one of these, and :SPLIT may follow it:

    a file of rows         .npz, .safetensors, .parquet, .csv, or FEATURES.npy,LABELS.npy
    representations        a folder of `represent`: its file of the split
    a run, a checkpoint    a folder, also one of t5x; the rows are of the task that it trained on
    a task                 its images, as a baseline: their pixels are the features
"""

import contextlib
import dataclasses
import functools
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from het_plugin import data, reporting
from het_plugin import rows as rows_lib
from het_plugin.data import tasks
from het_plugin.rows import Rows, files
from het_plugin.runs.opening import GinSettings, configuration
from het_plugin.runs.run import TEST_SPLITS, default_split
from het_plugin.system import temporary
from het_plugin.training import checkpoint_reader

NO_GIN: GinSettings = ((), (), ('.',))
MAX_SIDE = 32  # pixels of the images of a task
_SPLIT = re.compile(r'(?P<path>.+):(?P<split>\w+(\[.*\])?)')
_SHARD = re.compile(r'-\d+-of-(\d+)')
_WRITTEN = ('.safetensors', '.npz')  # by `represent`
_BATCH_SIZE = 256


class Source(Protocol):
  """Rows that one text names; features of files stay there, with their type, where they can."""

  def rows(self, split: str | None = None, columns: Sequence[str] = ('features',)) -> Rows:
    """The rows of a split, of a model ascending by example id; every process calls it.

    Args:
      split: which split, where the text names none; None for the whole file, and for the split of a
        folder, a run or a task that is evaluated on.
      columns: see `Run.rows`; of a file the first one is what it must have.

    Raises:
      ValueError: the source has no such split or column, or cannot be read.
    """


def open_source(
  text: str, gin_settings: GinSettings = NO_GIN, batch_size: int = _BATCH_SIZE
) -> Source:
  """Decides what a text names; reads no rows yet.

  `gin_settings` are of a run: files, bindings and search paths. `batch_size` is for its rows.

  Raises:
    ValueError: it names nothing, or a published file, which says no task.
  """
  if files.is_file(text):
    return _File(text)
  path, split = text, None
  if not os.path.exists(text) and (found := _SPLIT.fullmatch(text)):
    path, split = found['path'], found['split']
  if path.endswith(files.SUFFIXES) and os.path.exists(path):
    raise ValueError(
      f'{path} is a published file, which has no rows and names no task: give --checkpoint={path} '
      'and --dataset=TASK'
    )
  if os.path.isdir(f'{path}/state') or (os.path.isdir(path) and checkpoint_reader.steps(path)):
    gin_files, bindings, search_paths = map(tuple, gin_settings)
    return _OfRun(path, split, (gin_files, bindings, search_paths), batch_size)
  if (folder := _Folder(path, split)).paths:
    return folder
  # A task such as tfds:NAME has a colon itself.
  for name, part in ((text, None), (path, split)):
    with contextlib.suppress(ValueError):
      tasks.get_task(name)
      return _OfTask(text, name, part)
  raise ValueError(
    f'{text} is neither a file of rows ({", ".join(files.SUFFIXES)}), nor the folder of '
    'representations, of a run or a checkpoint, nor a task'
  )


def is_run(source: Source | None) -> bool:
  """Whether a text named a run or a checkpoint."""
  return isinstance(source, _OfRun)


@dataclasses.dataclass(frozen=True)
class _File:
  text: str

  def rows(self, split: str | None = None, columns: Sequence[str] = ('features',)) -> Rows:
    file = self.file(split)
    found = files.read(file, columns[0], mapped=True)
    _warn_of_splits(file)
    return found

  def file(self, split: str | None) -> str:
    del split  # the text has it
    return self.text


@functools.cache  # once a file
def _warn_of_splits(text: str) -> None:
  """Warns if a text names a whole file whose rows are of several splits."""
  path, split = files.partition_source(text)
  of_rows = files.split_of_rows(path) if split is None and os.path.exists(path) else None
  names = [] if of_rows is None else np.unique(of_rows).tolist()
  if len(names) > 1:
    logging.getLogger(__name__).warning(
      'All rows of %s are taken, of the splits %s: %s:%s has those of one.',
      *(text, ', '.join(names), text, names[-1]),
    )


@dataclasses.dataclass(frozen=True)
class _Folder(_File):
  split: str | None

  def file(self, split: str | None) -> str:
    """The file of a split, by default test or else validation; or the only one, of no split."""
    found = self.paths
    splits = [x for x in (self.split, split) if x][:1] or TEST_SPLITS
    if len(found) == 1 and not self.split and _name(found[0]) not in ('train', *TEST_SPLITS):
      return found[0]
    named = {x: [file for file in found if _name(file) == x] for x in splits}
    if len(chosen := next(filter(None, named.values()), [])) != 1:
      raise ValueError(
        f'{self.text} must have one .safetensors or .npz file named {" or ".join(splits)}; it has '
        f'{", ".join(found) or "none"}: name a file, or a split as in {self.text}:train'
      )
    return chosen[0]

  @functools.cached_property
  def paths(self) -> list[str]:
    """All but those of an unfinished split; several files that are one split have one name."""
    paths = (x for suffix in _WRITTEN for x in Path(self.text).rglob(f'[!.]*{suffix}'))
    paths = (x for x in paths if not x.parent.name.startswith('.'))
    return sorted({str(x.with_name(_SHARD.sub(r'-*-of-\1', x.name))) for x in paths})


def _name(file: str) -> str:
  """The name of a split from that of its file, or of its shards."""
  return Path(file).stem.partition('-*')[0]


@dataclasses.dataclass(frozen=True)
class _OfRun:
  path: str
  split: str | None
  gin_settings: GinSettings
  batch_size: int

  def rows(self, split: str | None = None, columns: Sequence[str] = ('features',)) -> Rows:
    split = self.split or split
    return _computed(self.path, self.gin_settings, split, tuple(columns), self.batch_size)


@functools.lru_cache(maxsize=32)  # a comparison first checks all candidates, which may be many
def _computed(
  path: str,
  gin_settings: GinSettings,
  split: str | None,
  columns: tuple[str, ...],
  batch_size: int,
) -> Rows:
  run = configuration(path, *gin_settings).open()
  task = str(run.task)  # a run has one, unlike a published file
  split = split or default_split(task)
  found = run.rows(split, columns, batch_size=batch_size)
  on_disk = {name: temporary.array(x.shape, x.dtype) for name, x in found.columns.items()}
  for name, x in found.columns.items():
    on_disk[name][:] = x
    on_disk[name].flags.writeable = False  # others get the same rows
  found = dataclasses.replace(found, columns=on_disk)
  about = {'checkpoint': run.checkpoint, 'layer': 'pre_logits', 'source': f'{path}:{split}'}
  about['config'] = run.config.text
  return _described(found, task, split, about)


@dataclasses.dataclass(frozen=True)
class _OfTask:
  text: str
  task: str
  split: str | None

  def rows(self, split: str | None = None, columns: Sequence[str] = ('features',)) -> Rows:
    if tuple(columns) != ('features',):
      raise ValueError(
        f'{self.text} is a task, whose images have no {columns[0]}: give a run or a file of rows'
      )
    split = self.split or split or default_split(self.task)
    info = data.classification_info(self.task)
    whole = split.partition('[')[0]
    examples = tasks.get_task(self.task).examples
    (first, *_), _ = examples.read(whole, np.zeros(1, np.int64), MAX_SIDE, 0)
    side = min(MAX_SIDE, first.shape[0]) if isinstance(first, np.ndarray) else MAX_SIDE
    settings: dict[str, Any] = {
      'image_size': side,
      'max_labels': info.max_labels,
      'batch_size': _BATCH_SIZE,
    }
    config = data.one_pass(self.task, split, bounded=False, **settings)
    parts = []
    with contextlib.closing(data.get_dataset(config)) as batches:
      if batches.num_examples is None:
        raise ValueError(f'split {split!r} of {self.task!r} is endless: name another')
      with reporting.Progress(self.text, batches.num_examples) as progress:
        for batch in batches:
          real = batch.get('mask', np.ones(len(batch['index']))) > 0
          columns_of = {name: np.asarray(x)[real] for name, x in batch.items() if name != 'mask'}
          image = columns_of.pop('image')
          columns_of['features'] = image.reshape(len(image), -1)
          parts.append(rows_lib.of_batch(columns_of))
          progress.update(len(image))
    about = {'source': f'{self.task}:{split}'}
    return _described(rows_lib.ordered(parts), self.task, split, about)


def _described(rows: Rows, task: str, split: str, about: Mapping[str, Any]) -> Rows:
  """Rows with class names and their origin, as files of them have it."""
  names = data.classification_info(task).class_names
  about = {'dataset': task, 'split': split, **about}
  return dataclasses.replace(rows, class_names=names, provenance=about)


def halves(text: str) -> tuple[str, str | None]:
  """The files train and test of a folder of representations, or its only one; else the text."""
  source = open_source(text)
  if not isinstance(source, _Folder) or source.split:
    return text, None
  return (
    (source.paths[0], None) if len(source.paths) == 1 else (source.file('train'), source.file(None))
  )


def different(texts: Sequence[str], flag: str = 'train') -> list[Source]:
  """A source of training, or of another flag, and a test source if there is one.

  Raises:
    ValueError: as `open_source` does, or both are one file.
  """
  found = list(map(open_source, texts))
  of_train, *of_test = map(file_of, found, (flag, None)[: len(texts)])
  if of_train and any(x and _absolute(x) == _absolute(of_train) for x in of_test):
    raise ValueError(f'--{flag}={texts[0]} and --test={texts[1]} are one file, {of_train}')
  return found


def _absolute(file: str) -> tuple[list[str], str | None]:
  """The paths that `rows.read` reads, whatever their spelling, and the split."""
  path, split = files.partition_source(file)
  return [os.path.realpath(x) for x in path.split(',')], split


def read_pair(texts: Sequence[str]) -> list[Rows]:
  """Rows with features of a training source, and of a test source if there is one (`rows.paired`).

  Raises:
    ValueError: as `different` and `rows.paired` do.
  """
  splits = ('train', None)[: len(texts)]
  found = [source.rows(split) for source, split in zip(different(texts), splits, strict=True)]
  if len(found) == 2:
    found[1] = rows_lib.paired(texts, found[0].meaning, found[1])
  return found


def file_of(source: Source, split: str | None) -> str | None:
  """The file, as `rows.read` takes it, that has the rows; None if they are computed."""
  return source.file(split) if isinstance(source, _File) else None
