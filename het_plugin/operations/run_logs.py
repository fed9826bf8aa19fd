"""The log of each process of a run as JSON lines, beside its checkpoints.

A line has time (unix seconds), level, process, step, phase, logger, message and, with an error, its
traceback as exception. In it is what `het_plugin` logs, and warnings and errors of everything else.

On a file system, a process appends line by line to logs/process-00000.jsonl; beyond a size the
file becomes process-00000.jsonl.1 in place of the one before. An object store (gs://) cannot
append: there the lines of a start are in parts, process-00000.20260131T120000.000.jsonl, of which
the last is written anew from time to time.
"""

import json
import logging
import logging.handlers
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from etils import epath

from het_plugin.operations import run_clock
from het_plugin.training import run_files

_log = logging.getLogger(__name__)

FOLDER = 'logs'
_OURS = 'het_plugin'
_FILE_BYTES = 16 * 2**20
_PART_BYTES = 2**20
_UPLOAD_SECONDS = 30.0


class JsonFormatter(logging.Formatter):
  """A record as one line of JSON."""

  def __init__(self, process: int, clock: run_clock.RunClock):
    super().__init__()
    self._process = process
    self._clock = clock

  def format(self, record: logging.LogRecord) -> str:
    snapshot = self._clock.snapshot()
    line = {
      'time': record.created,
      'level': record.levelname,
      'process': self._process,
      'step': snapshot.step,
      'phase': snapshot.phase,
      'logger': record.name,
      'message': record.getMessage(),
    }
    if record.exc_info:
      line['exception'] = self.formatException(record.exc_info)
    return json.dumps(line)


class _FileHandler(logging.handlers.RotatingFileHandler):
  """Appends to a file of a file system."""

  def __init__(self, path: str, max_bytes: int = _FILE_BYTES):
    _end_last_line(path)
    super().__init__(path, maxBytes=max_bytes, backupCount=1, encoding='utf-8')
    self._failed = False

  def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
    """Says once that lines are lost; a full disk is no reason to end a run, nor to flood stderr."""
    if not self._failed:
      self._failed = True
      print(f'{self.baseFilename} cannot be written: {sys.exception()}', file=sys.stderr)

  def upload(self, at_once: bool) -> None:
    """Nothing is kept back."""


class _PartsHandler(logging.Handler):
  """Keeps the lines of a part, and writes the part as a whole."""

  def __init__(
    self,
    folder: epath.Path,
    name: str,
    part_bytes: int = _PART_BYTES,
    upload_seconds: float = _UPLOAD_SECONDS,
    now: Callable[[], float] = time.monotonic,
  ):
    super().__init__()
    self._stem = folder / f'{name}.{time.strftime("%Y%m%dT%H%M%S", time.gmtime())}'
    self._part_bytes = part_bytes
    self._upload_seconds = upload_seconds
    self._now = now
    self._uploaded = now()
    self._full: list[str] = []  # parts that are complete, but not written
    self._num_full = 0
    self._lines: list[str] = []  # of the last part
    self._size = 0
    self._num_emitted = self._num_written = 0  # lines

  def emit(self, record: logging.LogRecord) -> None:
    try:
      line = self.format(record) + '\n'
    except Exception:
      self.handleError(record)
      return
    if self._lines and self._size + len(line) > self._part_bytes:
      self._full.append(''.join(self._lines))
      self._num_full += 1
      self._lines, self._size = [], 0
    self._lines.append(line)
    self._size += len(line)
    self._num_emitted += 1

  def upload(self, at_once: bool) -> None:
    """Writes what is new, unless that was done a short while ago.

    The handler is free meanwhile: an upload may take longer than a step.
    """
    if not at_once and self._now() < self._uploaded + self._upload_seconds:
      return
    self._uploaded = self._now()
    with self.lock:
      full, number = list(self._full), self._num_full
      last, num_emitted = ''.join(self._lines), self._num_emitted
    if num_emitted == self._num_written:
      return
    for i, text in enumerate(full):
      self._write(number - len(full) + i, text)
      with self.lock:
        self._full.pop(0)
    self._write(number, last)
    self._num_written = num_emitted

  def _write(self, part: int, text: str) -> None:
    self._stem.with_name(f'{self._stem.name}.{part:03d}.jsonl').write_text(text)


def _end_last_line(path: str) -> None:
  """Ends a line that a crash cut short, so that the next one is a line of its own."""
  if not os.path.exists(path) or not os.path.getsize(path):
    return
  with open(path, 'rb+') as file:
    file.seek(-1, os.SEEK_END)
    if file.read(1) != b'\n':
      file.write(b'\n')


class RunLog:
  """Takes down what the run logs, from `__enter__` to `__exit__`."""

  def __init__(self, model_dir: epath.PathLike, process: int, clock: run_clock.RunClock):
    """Makes the folder and opens the file of this process."""
    folder = epath.Path(model_dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    name = f'process-{process:05d}'
    if run_files.is_remote(folder):
      self._handler = _PartsHandler(folder, name)
    else:
      self._handler = _FileHandler(os.fspath(folder / f'{name}.jsonl'))
    self._handler.setFormatter(JsonFormatter(process, clock))
    self._handler.addFilter(_is_wanted)

  def __enter__(self) -> 'RunLog':
    logging.getLogger().addHandler(self._handler)
    return self

  def __exit__(self, exc_type, error: BaseException | None, traceback: Any) -> None:
    logging.getLogger().removeHandler(self._handler)
    self._handler.close()

  def upload(self, at_once: bool = False) -> None:
    """Called every few seconds: writes what waits to be written; `at_once` at the end.

    Raises:
      OSError: it cannot be written; it is kept.
    """
    self._handler.upload(at_once)

  def error(self, error: BaseException) -> None:
    """Takes down what ended the run; whoever catches it says so on stderr."""
    record = _log.makeRecord(
      _log.name,
      logging.ERROR,
      *(__file__, 0, 'The run ends: %s', (repr(error),)),
      exc_info=(type(error), error, error.__traceback__),
    )
    self._handler.handle(record)


def _is_wanted(record: logging.LogRecord) -> bool:
  ours = record.name == _OURS or record.name.startswith(f'{_OURS}.')
  return ours or record.levelno >= logging.WARNING
