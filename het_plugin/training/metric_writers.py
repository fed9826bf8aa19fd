"""Writers of metrics: the log, TensorBoard event files and metrics.jsonl.

A full disk does not end training by itself. Lines of metrics.jsonl that cannot be written wait in
memory, and `flush` fails while there are any. A run flushes before it saves a checkpoint, so no
checkpoint is ahead of its metrics. Event files are for display only: lines that cannot be written
there are lost.
"""

import functools
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from clu import metric_writers
from etils import epath

from het_plugin.training import run_files

_log = logging.getLogger(__name__)

# Nothing can be appended to objects of an object store. They are rewritten, at most this often.
_REMOTE_SECONDS = 30.0


class JsonlWriter(metric_writers.MultiWriter):
  """Appends scalars to a file, one JSON object with its step per line; ignores other values.

  Values that are not finite become null, because JSON has no NaN.
  """

  def __init__(self, path: epath.PathLike, resume_step: int, evaluated: bool = True):
    """Opens the file, and drops the lines of steps after `resume_step`, which the run repeats.

    `evaluated`: whether the evaluations of resume_step are done. If not, the run repeats them, and
    only the training lines of that step are kept.
    """
    super().__init__([])
    drop_later_lines(path, resume_step, evaluated)
    self._path = epath.Path(path)
    self._remote = run_files.is_remote(path)
    if not self._path.exists():
      if resume_step:
        _log.warning('%s is missing: the metrics up to step %d are lost.', path, resume_step)
      run_files.write_text(self._path, '')
    self._written = self._path.read_text() if self._remote else ''  # content of the object
    self._pending = ''
    self._last_write = time.monotonic()
    self._failing = False

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    values = {name: float(value) for name, value in scalars.items()}
    row = {'step': int(step), **{k: v if math.isfinite(v) else None for k, v in values.items()}}
    self._pending += json.dumps(row) + '\n'
    if self._remote and time.monotonic() < self._last_write + _REMOTE_SECONDS:
      return
    try:
      self.flush()
    except Exception as error:  # OSError, or an error of the object store's client
      if not self._failing:
        _log.warning('%s cannot be written, its lines wait in memory: %s', self._path, error)
      self._failing = True
    else:
      self._failing = False

  def flush(self) -> None:
    """Writes the lines that wait.

    Raises:
      Exception: OSError or another: the lines cannot be written and go on waiting.
    """
    if not self._pending:
      return
    self._last_write = time.monotonic()
    if self._remote:
      self._path.write_text(self._written + self._pending)
      self._written += self._pending
    else:
      run_files.append_text(self._path, self._pending)
    self._pending = ''

  def close(self) -> None:
    self.flush()


def drop_later_lines(path: epath.PathLike, step: int, evaluated: bool = True) -> None:
  """Removes lines of later steps, and with a warning damaged ones, from a file of JSON lines.

  `evaluated` is as in `JsonlWriter`. The file need not exist.
  """
  path = epath.Path(path)
  if path.exists():
    limit = (step, evaluated)
    kept = [row for row in run_files.read_lines(path) if _position(row) <= limit]
    run_files.write_text(path, ''.join(json.dumps(row) + '\n' for row in kept))


def _position(row: Mapping[str, Any]) -> tuple[int, bool]:
  """(step, whether the row has more than training metrics), the order in which a run writes."""
  return row['step'], not all(name == 'step' or name.startswith('train/') for name in row)


class _Lenient:
  """A writer whose first failure is a warning and whose later failures are silent."""

  def __init__(self, writer: metric_writers.MetricWriter):
    self._writer = writer
    self._failed = False

  def __getattr__(self, name: str) -> Callable[..., Any]:
    method = getattr(self._writer, name)

    @functools.wraps(method)
    def call(*args, **kwargs):
      try:
        return method(*args, **kwargs)
      except Exception as error:  # TensorFlow's own types
        if not self._failed:
          _log.warning('%s has failed: %s', type(self._writer).__name__, error)
        self._failed = True

    return call


class _RunWriter(metric_writers.AsyncMultiWriter):
  def close(self) -> None:
    try:
      super().close()
    except Exception as error:  # must not replace the exception that ends the run
      _log.error('Metrics are lost: %s', error)


def create_writer(
  model_dir: epath.PathLike, resume_step: int, evaluated: bool = True
) -> metric_writers.MetricWriter:
  """Writers of process 0, in background threads; other processes get one that writes nothing."""
  if jax.process_index() != 0:
    return metric_writers.MultiWriter([])
  return _RunWriter(
    [
      metric_writers.LoggingWriter(),
      _Lenient(metric_writers.SummaryWriter(os.fspath(model_dir))),
      JsonlWriter(epath.Path(model_dir) / 'metrics.jsonl', resume_step, evaluated),
    ]
  )
