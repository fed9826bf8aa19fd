"""Data sets of many files, called shards: their settings, paths and splits."""

import logging
import os
import pathlib
import re
import urllib.parse
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from het_plugin.data import array_source, counter_random
from het_plugin.data.sources import TRAIN_SPLIT

_KEYWORDS = {
  'train': ('train', 'training'),
  'validation': ('validation', 'valid', 'val', 'dev'),
  'test': ('test', 'testing', 'eval', 'evaluation'),
}
_SPLIT_OF = {word: split for split, words in _KEYWORDS.items() for word in words}
_TENTH = np.uint64(2**64 // 10)
_HUB_NAME = re.compile(r'(\w[\w.]*)-\d+-of-\d+')  # train-00000-of-00042


def stat(file: pathlib.Path | int) -> tuple[int, int]:
  """Size and time of change of a path or an open file, which tell whether it is still the same."""
  found = os.stat(file)
  return found.st_size, found.st_mtime_ns


def check_unchanged(path: pathlib.Path, before: tuple[int, int], now: tuple[int, int]) -> None:
  """Raises ValueError if the `stat` of a file is another one now."""
  if now != before:
    raise ValueError(f'{path} changed since the start: start again.')


def class_numbers(where: str, names: Sequence[str], labels: Iterable[str]) -> dict[str, int]:
  """The number of each name of a class.

  Raises:
    ValueError: a label is no name, or two classes have the same name.
  """
  numbers = {name: k for k, name in enumerate(names)}
  if unknown := set(labels) - numbers.keys():
    raise ValueError(f'{where}: {min(unknown)!r} is no name of a class.')
  if len(numbers) < len(names):
    twice = next(name for k, name in enumerate(names) if numbers[name] != k)
    raise ValueError(f'{where}: two classes have the name {twice!r}, which labels use.')
  return numbers


def parse(name: str, argument: str, uses: Sequence[str]) -> tuple[str, dict[str, str]]:
  """The path, and {use: column} of what follows '?'.

  Raises:
    ValueError: a use is unknown; the message begins with `name`.
  """
  path, _, query = argument.partition('?')
  settings = {}
  for part in filter(None, query.split('&')):
    use, is_set, column = part.partition('=')
    if use not in uses or not is_set or not column:
      raise ValueError(f'{name}: {part!r} must be USE=COLUMN, with a use out of {", ".join(uses)}.')
    settings[use] = urllib.parse.unquote(column)
  return path, settings


def find(name: str, path: str, suffix: str) -> tuple[pathlib.Path, list[pathlib.Path]]:
  """The folder that names are relative to, and the sorted files of a file, folder or pattern.

  A pattern has `*`, which stands for any part of a name, or braces: `{a,b}` and `{000..099}`.

  Raises:
    ValueError: there is no such file; the message begins with `name`.
  """
  hidden = re.compile(r'(^|/)[._]')
  found = set()
  roots = []
  for one in expand(path):
    given = pathlib.Path(one)
    root, pattern = given.parent, given.name
    if given.is_dir():
      root, pattern = given, f'**/*{suffix}'
    elif '*' in one:
      at = next(i for i, part in enumerate(given.parts) if '*' in part)
      root = pathlib.Path(*given.parts[:at])
      pattern = '/'.join(given.parts[at:])
    elif not given.is_file():
      raise ValueError(
        f'{name}: there is no file {one}, and no folder or pattern with files that end in {suffix}.'
      )
    roots.append(root)
    if given.is_file():
      found.add(given)
      continue
    found |= {
      file
      for file in root.glob(pattern)
      if file.is_file() and not hidden.search(file.relative_to(root).as_posix())
    }
  if not found:
    raise ValueError(f'{name}: no file there ends in {suffix}.')
  return pathlib.Path(os.path.commonpath(roots)), sorted(found)


def expand(path: str) -> Iterator[str]:
  """Paths of a text with braces: `{a,b}` and `{000..099}`, as a shell expands them."""
  match = re.search(r'\{([^{}]*(?:,|\.\.)[^{}]*)\}', path)
  if match is None:
    yield path
    return
  first, between, last = match[1].partition('..')
  if between and first.isdecimal() and last.isdecimal():
    words = (str(i).zfill(len(first)) for i in range(int(first), int(last) + 1))
  else:
    words = match[1].split(',')
  before = path[: match.start()]
  after = path[match.end() :]
  for word in words:
    yield from expand(f'{before}{word}{after}')


def split_of(path: pathlib.Path, root: pathlib.Path) -> str:
  """The split that the name of a file or of its folders says; 'train' where none does."""
  if match := _HUB_NAME.match(path.name):
    return _SPLIT_OF.get(match[1], match[1])
  *folders, stem = path.relative_to(root).with_suffix('').parts
  for words in ([stem, *re.split(r'[\W_]+', stem)], reversed(folders)):
    for word in words:
      if word.lower() in _SPLIT_OF:
        return _SPLIT_OF[word.lower()]
  return TRAIN_SPLIT


def train_and_validation(held_out: np.ndarray) -> dict[str, np.ndarray]:
  """Row numbers of both splits, given the rows that were drawn; neither is empty if N > 1."""
  held_out = held_out.copy()
  if not held_out.any():
    held_out[1:2] = True
  if held_out.all():
    held_out[:1] = False
  splits = {TRAIN_SPLIT: np.flatnonzero(~held_out), 'validation': np.flatnonzero(held_out)}
  return {split: rows for split, rows in splits.items() if len(rows)}


def block_starts(block: np.ndarray) -> np.ndarray:
  """First positions of runs of equal numbers [N], and N, int64 [number of runs + 1]."""
  changes = np.flatnonzero(np.diff(block)) + 1
  return np.concatenate([[0], changes, [len(block)]])


def labelled(splits: Mapping[str, np.ndarray], has_label: np.ndarray) -> dict[str, np.ndarray]:
  """The splits that have labels; test splits of a competition have none."""
  kept = {split: rows for split, rows in splits.items() if has_label[rows].any()}
  for split in splits.keys() - kept.keys():
    logging.getLogger(__name__).warning('The split %r has no labels and is left out.', split)
  return kept or dict(splits)


def held_out_keys(keys: Iterable[str]) -> np.ndarray:
  """About a tenth of some names, bool [N], by hash: other names change nothing here."""
  hashes = np.array([zlib.crc32(key.encode(errors='surrogateescape')) for key in keys], np.uint64)
  return counter_random.fold(array_source.SPLIT_KEY, hashes) < _TENTH


def held_out_rows(name: str, num_rows: int) -> np.ndarray:
  """About a tenth of the rows of a file, bool [N], by hash: other files change nothing here."""
  key = counter_random.base_key(array_source.SPLIT_WORD, zlib.crc32(name.encode()))
  return counter_random.fold(key, np.arange(num_rows)) < _TENTH
