"""The log of each process of a run as JSON lines, beside its checkpoints.

A line has time (Unix seconds), level, process, step, phase, logger, message and, with an error, its
traceback as exception. It takes what `het_plugin` logs, and warnings and errors of everything else.

On a file system, a process appends to logs/process-00000.jsonl; beyond a size the file becomes
process-00000.jsonl.1, in place of the one before. An object store (gs://) cannot append: there each
start writes parts, process-00000.20260131T120000.000.jsonl, of which it renews the last one.
"""

import contextlib
import json
import logging
import logging.handlers
import os
import sys
import time
from typing import Any

from etils import epath

from het_plugin.operations.run_clock import RunClock
from het_plugin.training import run_files

_log = logging.getLogger(__name__)

FOLDER = 'logs'
_OURS = 'het_plugin'
_FILE_BYTES = 16 * 2**20
_PART_BYTES = 2**20
_UPLOAD_SECONDS = 30.0


class JsonFormatter(logging.Formatter):
  """A record as one line of JSON."""

  def __init__(self, process: int, clock: RunClock):
    super().__init__()
    self._process = process
    self._clock = clock

  def format(self, record: logging.LogRecord) -> str:
    now = self._clock.snapshot()
    line = {
      'time': record.created,
      'level': record.levelname,
      'process': self._process,
      'step': now.step,
      'phase': now.phase,
      'logger': record.name,
      'message': record.getMessage(),
    }
    if record.exc_info:
      line['exception'] = self.formatException(record.exc_info)
    return json.dumps(line)


class _FileHandler(logging.handlers.RotatingFileHandler):
  """Appends to a file of a file system."""

  def __init__(self, path: str):
    if os.path.exists(path) and os.path.getsize(path):
      with open(path, 'rb+') as file:  # a crash may have cut the last line short
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b'\n':
          file.write(b'\n')
    super().__init__(path, maxBytes=_FILE_BYTES, backupCount=1, encoding='utf-8')
    self._failed = False

  def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
    """Says once that lines are lost: a full disk is no reason to end a run, nor to flood stderr."""
    if not self._failed:
      self._failed = True
      print(f'{self.baseFilename} cannot be written: {sys.exception()}', file=sys.stderr)


class _PartsHandler(logging.Handler):
  """Keeps the lines of a part, and writes the part as a whole from time to time."""

  def __init__(self, folder: epath.Path, name: str):
    super().__init__()
    self._stem = folder / f'{name}.{time.strftime("%Y%m%dT%H%M%S", time.gmtime())}'
    self._part = 0
    self._lines: list[str] = []
    self._num_written = 0  # of these lines
    self._uploaded = time.monotonic()

  def emit(self, record: logging.LogRecord) -> None:
    self._lines.append(self.format(record) + '\n')

  def upload(self, at_once: bool) -> None:
    """Writes what is new, unless that was done a short while ago."""
    if not at_once and time.monotonic() < self._uploaded + _UPLOAD_SECONDS:
      return
    self._uploaded = time.monotonic()
    with self.lock:  # only now: an upload may take longer than a step
      lines = list(self._lines)
    if len(lines) == self._num_written:
      return
    text = ''.join(lines)
    self._stem.with_name(f'{self._stem.name}.{self._part:03d}.jsonl').write_text(text)
    self._num_written = len(lines)
    if len(text) > _PART_BYTES:
      with self.lock:
        del self._lines[: len(lines)]
      self._part, self._num_written = self._part + 1, 0


class RunLog:
  """Takes down what a process logs, from `__enter__` to `__exit__`."""

  def __init__(self, model_dir: epath.PathLike, process: int, clock: RunClock):
    """Makes the folder and opens the file of this process."""
    folder = epath.Path(model_dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    name = f'process-{process:05d}'
    self._is_remote = run_files.is_remote(folder)
    if self._is_remote:
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
    with contextlib.suppress(OSError):  # of a full disk: it must not hide what ended the run
      self._handler.close()

  def upload(self, at_once: bool = False) -> None:
    """Called every few seconds: writes the lines that wait; `at_once` at the end.

    Raises:
      OSError: they cannot be written; they are kept.
    """
    if self._is_remote:
      self._handler.upload(at_once)

  def error(self, error: BaseException) -> None:
    """Takes down what ended the run; the main reports it on stderr."""
    exception = (type(error), error, error.__traceback__)
    arguments = (__file__, 0, 'The run ends: %s', (repr(error),))
    self._handler.handle(_log.makeRecord(_log.name, logging.ERROR, *arguments, exc_info=exception))


def _is_wanted(record: logging.LogRecord) -> bool:
  ours = record.name == _OURS or record.name.startswith(f'{_OURS}.')
  return ours or record.levelno >= logging.WARNING
