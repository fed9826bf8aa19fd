"""Small files of a run's directory: written whole, read also while somebody writes them."""

import json
import os
from collections.abc import Iterator
from typing import Any

from etils import epath

# What is read of a file of lines, from its end.
_TAIL_BYTES = 8 * 2**20


def is_remote(path: epath.PathLike) -> bool:
  """Whether the path is of an object store such as gs://, where nothing can be appended."""
  return '://' in os.fspath(path)


def write_text(path: epath.PathLike, text: str) -> None:
  """Replaces a file as a whole: readers see the old or the new one, whenever they look, and after a
  crash or on a full disk the old one is still there.
  """
  path = epath.Path(path)
  if is_remote(path):  # an object appears when it is complete
    path.write_text(text)
    return
  temporary = path.with_name(path.name + '.tmp')
  try:
    temporary.write_text(text)
    temporary.replace(path)
  except OSError:
    temporary.unlink(missing_ok=True)
    raise


def append_text(path: epath.PathLike, text: str) -> None:
  """Appends to a file all or nothing: half a line would spoil the next one. An object is written
  anew with the text at its end, which is for what comes rarely.

  Raises:
    OSError: it cannot be written, with its path; what was in it is still there.
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
    raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def write_json(path: epath.PathLike, value: Any) -> None:
  """`write_text` of the JSON of `value`."""
  write_text(path, json.dumps(value) + '\n')


def read_json(path: epath.PathLike) -> dict[str, Any] | None:
  """The object in a file; None where there is no such file, or something else in it."""
  try:
    value = json.loads(epath.Path(path).read_text())
  except (OSError, ValueError):
    return None
  return value if isinstance(value, dict) else None


def read_jsonl(path: epath.PathLike) -> list[dict[str, Any]]:
  """All lines of a file that nobody is writing; none where there is no file."""
  path = epath.Path(path)
  return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_lines(path: epath.PathLike, max_bytes: int = _TAIL_BYTES) -> Iterator[dict[str, Any]]:
  """The objects in a file of JSON lines, or in its last `max_bytes`.

  Lines that are none, such as the one that is being written, are passed over; so is a file that is
  not there.
  """
  path = epath.Path(path)
  try:
    with path.open('rb') as file:
      skipped = max(0, path.stat().length - max_bytes)
      file.seek(skipped)
      lines = file.read().split(b'\n')
  except OSError:
    return
  for line in lines[1 if skipped else 0 :]:
    try:
      value = json.loads(line)
    except ValueError:
      continue
    if isinstance(value, dict):
      yield value


def numbered(folder: epath.PathLike, prefix: str, suffix: str = '') -> dict[int, epath.Path]:
  """{n: path} of what is named PREFIX n SUFFIX in a folder, by n; empty where it does not exist."""
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
