"""Files written whole. Files of a run can be read while they are written."""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import IO, Any

from etils import epath

_log = logging.getLogger(__name__)

# This many bytes at the end of a file of lines show the progress of a run.
TAIL_BYTES = 8 * 2**20


def is_remote(path: epath.PathLike) -> bool:
  """Whether the path is in an object store such as gs://, where nothing can be appended."""
  return '://' in os.fspath(path)


def local_folder(flag: str, value: str | None) -> Path:
  """The folder of a flag; ValueError for none, or one in an object store (gs://)."""
  if not value:
    raise ValueError(f'--{flag} is needed: the folder to write to')
  if is_remote(value):
    raise ValueError(f'--{flag}={value} must be a local directory')
  return Path(value)


def check_links(folder: epath.PathLike) -> None:
  """Raises ValueError if a link in a folder leads out of it: a run would write where it points.

  The folder may be a link itself, be missing, or be in an object store, which has no links.
  """
  if is_remote(folder):
    return
  root = os.path.realpath(folder)
  for link in _links(root):
    target = os.path.realpath(link)
    if os.path.commonpath([root, target]) != root:
      raise ValueError(
        f'{link} is a link to {target}, outside the folder of the run, which would be written to: '
        'put a copy in its place, or remove it'
      )


def mounted_bucket(folder: epath.PathLike, mounts: str = '/proc/self/mounts') -> str | None:
  """The bucket that holds a local folder by GCSFuse; None if none does, or if nothing tells.

  Args:
    folder: it may be missing.
    mounts: the file of mounts, on Linux (fstab(5)).
  """
  if is_remote(folder) or not os.path.exists(mounts):
    return None
  path = os.path.realpath(folder)
  mounted: dict[str, tuple[str, str]] = {}
  for line in Path(mounts).read_text(encoding='utf-8', errors='replace').splitlines():
    source, point, kind = (x.replace('\\040', ' ') for x in line.split(' ')[:3])
    mounted[point] = source, kind  # the last one covers those before
  inner = [x for x in mounted if os.path.commonpath([x, path]) == x]
  source, kind = mounted[max(inner, key=len)] if inner else ('', '')
  return source if kind == 'fuse.gcsfuse' else None


def _links(folder: str) -> Iterator[str]:
  try:
    with os.scandir(folder) as entries:
      for entry in entries:
        if entry.is_symlink():
          yield entry.path
        elif entry.is_dir():
          yield from _links(entry.path)
  except FileNotFoundError:
    pass  # another training removes what it no longer needs
  except PermissionError:  # such as lost+found, where nothing can be opened either
    if os.access(folder, os.X_OK):
      raise


def open_lock(path: epath.PathLike) -> IO[str]:
  """Opens a file to lock it, and creates it if it is missing; its content stays.

  Raises:
    OSError: it is a link, or cannot be written.
  """
  flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
  return open(path, 'r+', opener=lambda name, _: os.open(name, flags, 0o666))


def is_written_to(path: epath.PathLike) -> bool:
  """Whether what is there is a link or a device, such as /dev/stdout, which no file replaces."""
  return os.path.islink(path) or (os.path.exists(path) and not os.path.isfile(path))


@contextlib.contextmanager
def replacing(path: epath.PathLike) -> Generator[epath.Path]:
  """Yields a temporary path to write to, and renames the file when it is complete.

  After an error, such as a full disk, the old file is still there. An OSError names the file. What
  `is_written_to` is not replaced.
  """
  path = epath.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  if is_written_to(path):
    yield path
    return
  unfinished = path.with_name(f'.unfinished.{path.name}')
  unfinished.unlink(missing_ok=True)  # it may be a link, of another person's folder
  try:
    yield unfinished
    unfinished.replace(path)
  except OSError as error:
    if error.errno is None or error.filename not in (None, os.fspath(unfinished)):
      raise  # it is about another file
    raise OSError(error.errno, error.strerror, os.fspath(path)) from error
  finally:
    unfinished.unlink(missing_ok=True)


def write_text(path: epath.PathLike, text: str) -> None:
  """Replaces a file as a whole.

  Readers always see either the old or the new content, and after a crash or an OSError, such as on
  a full disk, the old file is still there.
  """
  path = epath.Path(path)
  if is_remote(path):  # an object appears when it is complete
    path.write_text(text)
    return
  with replacing(path) as unfinished:
    unfinished.write_text(text)


def append_text(path: epath.PathLike, text: str) -> None:
  """Appends all of a text to a file or nothing, because half a line would spoil the next one.

  An object in a store is written anew with the text at its end.
  """
  path = epath.Path(path)
  if is_remote(path):
    path.write_text((path.read_text() if path.exists() else '') + text)
    return
  size = path.stat().length if path.exists() else 0
  try:
    with path.open('a') as file:
      file.write(text)
  except OSError as error:
    if path.exists():
      os.truncate(path, size)
    # Errors of write() do not name the file.
    raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def write_json(path: epath.PathLike, value: Any) -> None:
  """`write_text` of the JSON of `value`."""
  write_text(path, json.dumps(value) + '\n')


def read_json(path: epath.PathLike) -> dict[str, Any] | None:
  """The JSON object in a file; None if there is no such file or no such object."""
  try:
    value = json.loads(epath.Path(path).read_text())
  except (OSError, ValueError, RecursionError):  # the last one of brackets in brackets
    return None
  return value if isinstance(value, dict) else None


def read_lines(
  path: epath.PathLike,
  damaged: Callable[[str], None] = _log.warning,
  max_bytes: int | None = None,
) -> list[dict[str, Any]]:
  """The rows of a file of JSON lines, each with its step; none if there is no file.

  A last line without an end is still being written and left out; if other lines are damaged, they
  are left out and `damaged` gets a sentence. `max_bytes` are read from the end; None for all.
  """
  path = epath.Path(path)
  try:
    with path.open('rb') as file:
      size = path.stat().length
      skipped = 0 if max_bytes is None else max(0, size - max_bytes)
      file.seek(skipped)
      lines = file.read().split(b'\n')
  except FileNotFoundError:
    return []
  del lines[-1]  # being written, or empty
  rows = [_row(line) for line in lines]
  if skipped:  # the first line is not complete
    del rows[:1]
  if bad := [number for number, row in enumerate(rows, 1) if row is None]:
    more = f' and {len(bad) - 1} more are' if len(bad) > 1 else ' is'
    place = f'line {bad[0]}' + (' of what was read' if skipped else '')
    damaged(f'{path}: {place}{more} damaged and left out.')
  return [row for row in rows if row is not None]


def _row(line: bytes) -> dict[str, Any] | None:
  try:
    row = json.loads(line)
  except (ValueError, RecursionError):  # no JSON, no UTF-8, or brackets in brackets
    return None
  return row if isinstance(row, dict) and is_count(row.get('step')) else None


def is_count(value: Any) -> bool:
  """Whether a JSON value may be a number of steps: whole, and not too large for a float."""
  return type(value) is int and 0 <= value < 2**63


def numbered(folder: epath.PathLike, prefix: str, suffix: str = '') -> dict[int, epath.Path]:
  """{n: path} of the files PREFIX n SUFFIX in a folder, sorted by n; empty without the folder."""
  try:
    names = [path.name for path in epath.Path(folder).iterdir()]
  except OSError:
    return {}
  found = {}
  for name in names:
    number = name.removeprefix(prefix).removesuffix(suffix)
    if name == f'{prefix}{number}{suffix}' and number.isdecimal():
      found[int(number)] = epath.Path(folder) / name
  return dict(sorted(found.items()))
