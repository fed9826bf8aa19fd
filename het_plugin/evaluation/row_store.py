"""Rows of several columns on disk, appended as they come, which survive being killed.

A directory with a file of raw rows for each column and progress.json, which is replaced as a whole
once the rows before it are on the disk. What was written behind the last commit is dropped when the
store is opened again.
"""

import dataclasses
import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401, makes 'bfloat16' a dtype of numpy
import numpy as np

Rows = Mapping[str, np.ndarray]
Columns = Mapping[str, tuple[str, tuple[int, ...]]]
_RECORD = 'progress.json'


@dataclasses.dataclass(frozen=True)
class Progress:
  """What is on the disk for sure.

  Attributes:
    settings: what the rows were computed from and how; JSON-able.
    columns: {name: (dtype, shape of a row)}.
    num_rows: complete rows.
    state: of the input behind them; None before the first.
    done: whether there are no more to come.
  """

  settings: Mapping[str, Any]
  columns: Columns
  num_rows: int = 0
  state: Mapping[str, int] | None = None
  done: bool = False


def read_progress(directory: Path) -> Progress | None:
  """The last commit of a store; None where there is none.

  Raises:
    ValueError: the record is not ours.
  """
  path = directory / _RECORD
  if not path.exists():
    return None
  try:
    record = json.loads(path.read_text())
    columns = {name: (dtype, tuple(shape)) for name, (dtype, shape) in record['columns'].items()}
    return Progress(**{**record, 'columns': columns})
  except (TypeError, KeyError, ValueError) as error:
    raise ValueError(f'{path} is no record of progress: {error}') from error


class RowStore:
  """Appends rows to a directory; one process at a time."""

  def __init__(self, directory: Path, start: Progress, commit_seconds: float = 10.0):
    """Opens the store at a commit of it, or makes a new one.

    Args:
      directory: made when missing.
      start: what `read_progress` returned; for a new store, settings and columns.
      commit_seconds: time between commits, at least. 0 commits after each chunk.

    Raises:
      ValueError: a file holds fewer rows than were committed.
    """
    self._directory = Path(directory)
    self._commit_seconds = commit_seconds
    self.progress = start
    self._directory.mkdir(parents=True, exist_ok=True)
    self._files = {}
    for name in start.columns:
      size = start.num_rows * self._row_bytes(name)
      with self._path(name).open('ab') as file:
        if file.tell() < size:
          raise ValueError(
            f'{self._path(name)} has {file.tell()} bytes of the {size} that were written: remove '
            f'{self._directory} to start afresh'
          )
        file.truncate(size)
      self._files[name] = self._path(name).open('ab')
    self._head = (start.num_rows, start.state)
    self._commit(done=start.done)

  def append(self, rows: Rows, state: Mapping[str, int]) -> None:
    """Adds rows {column: [n, ...]} and the input's state behind them; commits if it is time."""
    number = {len(x) for x in rows.values()}
    assert set(rows) == set(self._files) and len(number) == 1, (sorted(rows), number)
    for name, x in rows.items():
      dtype, shape = self.progress.columns[name]
      assert (x.dtype, x.shape[1:]) == (np.dtype(dtype), shape), (name, x.dtype, x.shape)
      self._files[name].write(x.tobytes())
    # Both at once: an interruption leaves rows that no head counts, never a head without its rows.
    self._head = (self._head[0] + number.pop(), state)
    if time.monotonic() >= self._committed + self._commit_seconds:
      self._commit(done=False)

  def finish(self) -> None:
    """Commits the last rows: there are no more."""
    self._commit(done=True)

  def close(self) -> None:
    """Commits what was appended and closes the files; nothing can be appended any more."""
    self._commit(done=self.progress.done)
    for file in self._files.values():
      file.close()

  def read(self) -> dict[str, np.ndarray]:
    """The committed rows by column, as read-only arrays over the files."""
    return {
      name: self._read(name, dtype, (self.progress.num_rows, *shape))
      for name, (dtype, shape) in self.progress.columns.items()
    }

  def remove(self) -> None:
    """Deletes a closed store."""
    shutil.rmtree(self._directory)

  def _commit(self, done: bool) -> None:
    for file in self._files.values():
      file.flush()
      os.fsync(file.fileno())
    num_rows, state = self._head
    self.progress = dataclasses.replace(self.progress, num_rows=num_rows, state=state, done=done)
    unfinished = self._directory / f'{_RECORD}.tmp'
    with unfinished.open('w') as file:
      json.dump(dataclasses.asdict(self.progress), file)
      file.flush()
      os.fsync(file.fileno())
    unfinished.replace(self._directory / _RECORD)
    self._committed = time.monotonic()

  def _read(self, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    if not math.prod(shape):  # nothing can be mapped
      return np.empty(shape, dtype)
    return np.memmap(self._path(name), dtype, mode='r', shape=shape)

  def _path(self, name: str) -> Path:
    return self._directory / f'{name}.rows'

  def _row_bytes(self, name: str) -> int:
    dtype, shape = self.progress.columns[name]
    return np.dtype(dtype).itemsize * math.prod(shape)
