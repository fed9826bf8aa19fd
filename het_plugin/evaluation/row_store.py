"""Rows of several columns on disk that survive a kill.

A directory with one mapped file per column, allocated for all rows that may come, and
progress.json. That record is replaced as a whole after the rows it counts are on disk; rows behind
it are computed again.
"""

import dataclasses
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401, makes 'bfloat16' a dtype of numpy
import numpy as np

from het_plugin.training import run_files

_RECORD = 'progress.json'


@dataclasses.dataclass(frozen=True)
class Progress:
  """What is safely on disk.

  Attributes:
    settings: what the rows are computed from and how, as JSON values.
    columns: {name: (dtype, shape)}; the first dimension is the number of rows that may come.
    num_rows: complete rows.
    state: of the input behind these rows; None before the first.
  """

  settings: Mapping[str, Any]
  columns: Mapping[str, tuple[str, tuple[int, ...]]]
  num_rows: int = 0
  state: Mapping[str, int] | None = None


def read_progress(directory: Path) -> Progress | None:
  """The record of a store; None if there is no store.

  Raises:
    ValueError: the record is damaged.
  """
  path = directory / _RECORD
  if not path.exists():
    return None
  try:
    return Progress(**json.loads(path.read_text()))
  except (TypeError, ValueError) as error:
    raise ValueError(f'{path} is no record of progress: {error}') from error


class RowStore:
  """Appends rows to a directory; one process at a time."""

  def __init__(self, directory: Path, start: Progress, commit_seconds: float = 10.0):
    """Opens a store, or makes one where the directory does not exist.

    Args:
      directory: of the store.
      start: what `read_progress` returned; for a new store its settings and columns.
      commit_seconds: least time between commits; 0 commits after each batch.

    Raises:
      ValueError: a column's file is shorter than the record says.
      OSError: the disk has too little space for a new store.
    """
    self.progress = start
    self._directory = directory
    self._commit_seconds = commit_seconds
    directory.mkdir(parents=True, exist_ok=True)
    self._committed = 0.0  # time of the last commit
    self._columns = {name: self._map(name, *column) for name, column in start.columns.items()}
    self.commit()

  def append(self, rows: Mapping[str, np.ndarray], state: Mapping[str, int]) -> None:
    """Adds rows {column: [n, ...]} and the input's state behind them; commits if it is time."""
    start, end = self.progress.num_rows, self.progress.num_rows + len(rows['index'])
    for name, column in self._columns.items():
      assert rows[name].dtype == column.dtype, (name, rows[name].dtype, column.dtype)
      column[start:end] = rows[name]
    self.progress = dataclasses.replace(self.progress, num_rows=end, state=state)
    if time.monotonic() >= self._committed + self._commit_seconds:
      self.commit()

  def commit(self) -> None:
    """Puts all rows on disk, then the record of them."""
    for column in self._columns.values():
      column.flush()
    run_files.write_json(self._directory / _RECORD, dataclasses.asdict(self.progress))
    self._committed = time.monotonic()

  def rows(self) -> dict[str, np.ndarray]:
    """All rows by column, as arrays over the files."""
    return {name: column[: self.progress.num_rows] for name, column in self._columns.items()}

  def _map(self, name: str, dtype: str, shape: tuple[int, ...]) -> np.memmap:
    path, size = self._directory / f'{name}.rows', np.dtype(dtype).itemsize * int(np.prod(shape))
    if self.progress.state is None:
      with path.open('wb') as file:
        file.truncate(size)
        if hasattr(os, 'posix_fallocate'):
          # Writing to a mapped file on a full disk kills the process, so take the space now.
          os.posix_fallocate(file.fileno(), 0, size)
    elif path.stat().st_size != size:
      raise ValueError(
        f'{path} has {path.stat().st_size} bytes instead of {size}: remove {self._directory} to '
        'start afresh'
      )
    return np.memmap(path, dtype, mode='r+', shape=tuple(shape))
