"""Data sets of many files, called shards: their settings, paths and splits."""

import contextlib
import dataclasses
import io
import logging
import os
import pathlib
import re
import urllib.parse
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from het_plugin.data import array_source, counter_random, remote
from het_plugin.data.sources import TRAIN_SPLIT

_KEYWORDS = {
  'train': ('train', 'training'),
  'validation': ('validation', 'valid', 'val', 'dev'),
  'test': ('test', 'testing', 'eval', 'evaluation'),
}
_SPLIT_OF = {word: split for split, words in _KEYWORDS.items() for word in words}
_TENTH = np.uint64(2**64 // 10)
# train-00000-of-00042, train.tfrecord-00000-of-00042
_HUB_NAME = re.compile(r'(\w[\w.]*?)(?:\.tfrecord|\.array_record)?-\d+-of-\d+')


@dataclasses.dataclass(frozen=True)
class LocalFile:
  """A file of this machine; `remote.RemoteFile` has the same methods.

  relative: its path below what the user named.
  """

  path: pathlib.Path
  relative: str

  is_remote = False

  def __str__(self) -> str:
    return str(self.path)

  def stat(self) -> tuple[int, int]:
    """Size and time of change, which tell whether it is still the same file."""
    return _stat(self.path)

  def check_unchanged(self, stat: tuple[int, int]) -> None:
    """Raises ValueError if `stat` is another one now."""
    if self.stat() != stat:
      raise ValueError(f'{self} changed since the start: start again.')

  @contextlib.contextmanager
  def reader(self, stat: tuple[int, int]) -> Iterator[Callable[..., bytes]]:
    """A function that reads parts, given offset and size.

    Raises:
      ValueError: the file changed since it had this `stat`.
      OSError: it cannot be opened.
    """
    with open(self.path, 'rb') as file:
      if _stat(file.fileno()) != stat:
        raise ValueError(f'{self} changed since the start: start again.')
      yield lambda offset, size, block: os.pread(file.fileno(), size, offset)

  def open(self) -> io.BufferedReader:
    """The file for reading from its start to its end."""
    return open(self.path, 'rb')

  def open_blocks(self, stat: tuple[int, int]) -> io.BufferedReader:
    """The file for reading parts of it; ValueError as `reader`."""
    self.check_unchanged(stat)
    return self.open()


File = LocalFile | remote.RemoteFile


def _stat(file: pathlib.Path | int) -> tuple[int, int]:
  found = os.stat(file)
  return found.st_size, found.st_mtime_ns


def text_beside(root: str, name: str) -> tuple[str, bytes | None]:
  """The path of a file below `root`, and its content; None if there is none."""
  if not remote.is_remote(root):
    file = pathlib.Path(root, name)
    return str(file), file.read_bytes() if file.is_file() else None
  file = remote.RemoteFile(f'{root}/{name}', name, remote.store_of(root))
  try:
    size, _ = file.stat()
  except ValueError:
    return str(file), None
  return str(file), file.fetch(0, size)


def locate(starts: np.ndarray, row: int) -> tuple[int, int]:
  """The number of a row's file, and of the row in it; `starts` are the files' first rows, and N."""
  i = int(np.searchsorted(starts, row, side='right')) - 1
  return i, row - int(starts[i])


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


def find(name: str, path: str, *patterns: str) -> tuple[str, list[File]]:
  """The folder that names are relative to, and the sorted files of a file, folder or pattern.

  A pattern has `*`, which stands for any part of a name, or braces: `{a,b}` and `{000..099}`. In a
  folder, the files are those that match the first of `patterns`, such as `**/*.tar`, that any does.

  Raises:
    ValueError: there is no such file; the message begins with `name`.
  """
  ends = patterns[0].removeprefix('**/')
  roots = []
  found: set[str] = set()
  for one in expand(path):
    root, some = _find_remote(one, patterns) if remote.is_remote(one) else _find(one, patterns)
    if not some and not os.path.isdir(one) and '*' not in one:
      raise ValueError(
        f'{name}: there is no file {one}, and no folder or pattern with files {ends}.'
      )
    roots.append(root)
    found |= some
  if not found:
    raise ValueError(f'{name}: no file there is named {ends}.')
  if not remote.is_remote(path):
    root = os.path.commonpath(roots)
    paths = sorted(map(pathlib.Path, found))
    return root, [LocalFile(file, os.path.relpath(file, root)) for file in paths]
  if len({address.partition('://')[0] for address in found}) > 1:
    raise ValueError(f'{name}: the files must have addresses of one kind.')
  root = os.path.commonprefix([f'{root}/' for root in roots]).rpartition('/')[0]
  store = remote.store_of(root)
  return root, [
    remote.RemoteFile(address, address[len(root) + 1 :], store) for address in sorted(found)
  ]


def _find(path: str, patterns: Sequence[str]) -> tuple[str, set[str]]:
  """The root, and the files of a path without braces on this machine."""
  hidden = re.compile(r'(^|/)[._]')
  given = pathlib.Path(path)
  if given.is_file():
    return str(given.parent), {str(given)}
  root = given
  if '*' in path:
    at = next(i for i, part in enumerate(given.parts) if '*' in part)
    root = pathlib.Path(*given.parts[:at])
    patterns = ['/'.join(given.parts[at:])]
  for pattern in patterns:
    found = {
      str(file)
      for file in root.glob(pattern)
      if file.is_file() and not hidden.search(file.relative_to(root).as_posix())
    }
    if found:
      return str(root), found
  return str(root), set()


def _find_remote(address: str, patterns: Sequence[str]) -> tuple[str, set[str]]:
  """The root, and the files of an address without braces."""
  store = remote.store_of(address)
  for pattern in patterns:
    if found := store.find(address, pattern):
      is_file = found == [address]
      root = address.partition('*')[0].rpartition('/')[0] if is_file or '*' in address else address
      return root.rstrip('/'), set(found)
  return address.rpartition('/')[0], set()


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


def split_of(relative: str) -> str:
  """The split that the name of a file or of its folders says; 'train' where none does."""
  path = pathlib.PurePosixPath(relative)
  if match := _HUB_NAME.match(path.name):
    return _SPLIT_OF.get(match[1], match[1])
  *folders, stem = path.with_suffix('').parts
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
  splits = {TRAIN_SPLIT: row_numbers(~held_out), 'validation': row_numbers(held_out)}
  return {split: rows for split, rows in splits.items() if len(rows)}


def row_numbers(mask: np.ndarray) -> np.ndarray:
  """Rows of a mask, bool [N]: int32 where that is enough, for half of the memory."""
  return np.flatnonzero(mask).astype(np.int32 if len(mask) < 2**31 else np.int64)


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
