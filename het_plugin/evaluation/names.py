"""Names of runs, checkpoints, files and data sets, for tables, plots and errors."""

import contextlib
import os
import re
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

from het_plugin.rows import files

_CHECKPOINT = 'checkpoint_'


def short_names(sources: Sequence[str]) -> list[str]:
  """The parts in which sources differ: ['a', 'b'] for ['runs/a/x.npz', 'runs/b/x.npz'].

  A single source is named by its last part. checkpoint_N keeps the directory of its run, as
  'run/checkpoint_N'. Suffixes and splits of files are dropped. If the names are not distinct, the
  sources themselves are the names.
  """
  paths = [_parts(source) for source in sources]
  if len(paths) == 1:
    paths = [paths[0][-1:]]
  for end, rest in ((0, slice(1, None)), (-1, slice(-1))):
    while len(paths) > 1 and min(map(len, paths)) > 1 and len({path[end] for path in paths}) == 1:
      paths = [path[rest] for path in paths]
  names = ['/'.join(path) for path in paths]
  for suffix in files.SUFFIXES:
    names = [name.removesuffix(suffix) for name in names]
  return names if len(set(names)) == len(names) else list(sources)


def choose_names(
  names: Sequence[str] | None, paths: Sequence[str], distinct: bool = True
) -> list[str]:
  """`names`, or the parts in which the paths differ.

  Raises:
    ValueError: the number of names is wrong, or two names are equal and `distinct` is True.
  """
  if names is None:
    return short_names(paths) if paths else []
  is_repeated = len(set(names)) < len(names)
  if len(names) != len(paths) or not all(names) or (distinct and is_repeated):
    what = 'different names' if distinct else 'names'
    raise ValueError(f'--names={",".join(names)} must be {len(paths)} {what}')
  return list(names)


def named_task(text: str) -> tuple[str, str]:
  """Name and task of a data set given as NAME=TASK, or as TASK, which is named by its last part.

  A task may have a = in it: tfds:NAME/KEY=VALUE, or a path. What has a : or / is no NAME.
  """
  if match := re.fullmatch('([^=:/]+)=(.+)', text):
    return match[1], match[2]
  return Path(text).stem or text, text


def task_name(dataset: str) -> str:
  """The task of --dataset, which may be a plain path; the name of a task wins over a folder."""
  if dataset.endswith('.npz') and not dataset.startswith(('npz:', 'features:')):
    return f'npz:{dataset}'
  if os.path.isdir(dataset):
    from het_plugin.data import tasks  # takes seconds to import

    return dataset if dataset in tasks.names() else f'image_folder:{dataset}'
  return dataset


def check_names(datasets: Iterable[Any], setting: str) -> None:
  """Raises ValueError if there is no data set, or two have the same `name`."""
  names = [dataset.name for dataset in datasets]
  if not names or len(set(names)) != len(names):
    raise ValueError(f'{setting} must be data sets of distinct names; they are {names}.')


@contextlib.contextmanager
def naming(what: str) -> Generator[None]:
  """Puts `what`, such as a flag with its value, before the message of a ValueError."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f'{what}: {error}') from error


def _parts(source: str) -> list[str]:
  """The parts of a path. A split is left out, and so is the file of labels in 'X.npy,Y.npy'."""
  path = files.partition_source(source)[0].partition('.npy,')[0]
  parts = path.rstrip('/').split('/')
  if parts[-1].startswith(_CHECKPOINT):
    parts[-2:] = ['/'.join(parts[-2:])]
  return parts
