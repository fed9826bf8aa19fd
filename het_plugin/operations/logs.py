"""The log of each process of a run as JSON lines, beside its checkpoints.

A line has time (Unix seconds), level, process, step, phase, logger, message and, for an error, the
traceback as exception. All messages of `het_plugin` are logged, and the warnings and errors
of all other libraries.

A process appends to logs/process-00000.jsonl; beyond a size the file becomes process-00000.jsonl.1.
Nothing can be appended in an object store (gs://), where the launcher keeps the output.
"""

import contextlib
import json
import logging
import logging.handlers
import os
from collections.abc import Iterator

from etils import epath

from het_plugin.operations.recorder import Recorder
from het_plugin.system import exit_codes, run_files

_log = logging.getLogger(__name__)

FOLDER = 'logs'
_FILE_BYTES = 16 * 2**20


class _FileHandler(logging.handlers.RotatingFileHandler):
  """Leaves out what cannot be written, instead of a traceback for each line on a full disk."""

  def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the name of logging)
    del record


class _JsonFormatter(logging.Formatter):
  """A record as one line of JSON."""

  def __init__(self, recorder: Recorder):
    super().__init__()
    self._recorder = recorder

  def format(self, record: logging.LogRecord) -> str:
    now = self._recorder.now()
    line = {
      'time': record.created,
      'level': record.levelname,
      'process': now.process,
      'step': now.step,
      'phase': now.phase,
      'logger': record.name,
      'message': record.getMessage(),
    }
    if record.exc_info:
      line['exception'] = self.formatException(record.exc_info)
    return json.dumps(line)


@contextlib.contextmanager
def written(model_dir: epath.PathLike, recorder: Recorder) -> Iterator[None]:
  """Writes what this process logs, and the error that ends the run."""
  if run_files.is_remote(model_dir):
    yield
    return
  folder = epath.Path(model_dir) / FOLDER
  folder.mkdir(parents=True, exist_ok=True)
  handler = _FileHandler(
    os.fspath(folder / f'process-{recorder.now().process:05d}.jsonl'),
    maxBytes=_FILE_BYTES,
    backupCount=1,
    encoding='utf-8',
  )
  handler.setFormatter(_JsonFormatter(recorder))
  handler.addFilter(_is_wanted)
  logging.getLogger().addHandler(handler)
  try:
    yield
  except BaseException as error:
    if exit_codes.of(error) not in (0, exit_codes.PREEMPTED):
      exception = (type(error), error, error.__traceback__)
      arguments = (__file__, 0, 'The run ends: %s', (repr(error),))
      record = _log.makeRecord(_log.name, logging.ERROR, *arguments, exc_info=exception)
      handler.handle(record)  # not to the screen, where the main reports it
    raise
  finally:
    logging.getLogger().removeHandler(handler)
    with contextlib.suppress(OSError):  # a full disk must not hide the error that ended the run
      handler.close()


def _is_wanted(record: logging.LogRecord) -> bool:
  return record.name.split('.')[0] == 'het_plugin' or record.levelno >= logging.WARNING
