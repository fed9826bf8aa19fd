"""Writers of metrics: TensorBoard event files and metrics.jsonl.

A full disk does not end training by itself. Lines of metrics.jsonl that cannot be written wait in
memory, and `flush` fails while there are any. A run flushes before it saves a checkpoint, so no
checkpoint is ahead of its metrics. Event files are for display only: lines that cannot be written
there are lost.
"""

import functools
import itertools
import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from clu import asynclib
from etils import epath

from het_plugin.system import run_files

_log = logging.getLogger(__name__)

# Nothing can be appended to objects of an object store. They are rewritten, at most this often.
_REMOTE_SECONDS = 30.0


class JsonlWriter:
  """Appends scalars to a file, one JSON object with its step per line.

  Values that are not finite become null, because JSON has no NaN.
  """

  def __init__(self, path: epath.PathLike, resume_step: int, evaluated: bool = True):
    """Opens the file, and drops the lines of steps after `resume_step`, which the run repeats.

    `evaluated`: whether the evaluations of resume_step are done. If not, the run repeats them, and
    only the training lines of that step are kept.
    """
    self._path = epath.Path(path)
    self._remote = run_files.is_remote(path)
    rows = []
    if self._path.exists():
      rows = run_files.read_lines(path)
    elif resume_step:
      _log.warning('%s is missing: the metrics up to step %d are lost.', path, resume_step)
    kept = [row for row in rows if _position(row) <= (resume_step, evaluated)]
    run_files.write_text(self._path, ''.join(json.dumps(row) + '\n' for row in kept))
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
    """Writes the lines that wait; after an OSError or another exception they still wait."""
    if self._pending:
      self._last_write = time.monotonic()
      run_files.append_text(self._path, self._pending)
      self._pending = ''


def _position(row: Mapping[str, Any]) -> tuple[int, bool]:
  """(step, whether the row follows an evaluation), the order in which a run writes."""
  return row['step'], not all(
    name == 'step' or name.startswith(('train/', 'data/', 'goodput/')) for name in row
  )


class EventWriter:
  """Scalars and texts as a TensorBoard event file, written without TensorFlow, whose import takes
  longer than the rest of a start.

  The first failure is a warning, and later ones are silent.
  """

  def __init__(self, model_dir: epath.PathLike, resume_step: int):
    """Creates the file, a new one at each start.

    TensorBoard drops what earlier files have of steps after `resume_step`, which the run repeats.
    """
    suffix = f'{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}'
    self._path = epath.Path(model_dir) / f'events.out.tfevents.{suffix}'
    self._failed = False
    self._write(0, [], file_version='brain.Event:2')
    self._write(resume_step + 1, [], session_log={'status': 'START'})

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    from tensorboard.plugins.scalar.summary_v2 import scalar_pb

    self._write(step, [scalar_pb(name, float(x)) for name, x in scalars.items()])

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    from tensorboard.plugins.text.summary_v2 import text_pb

    self._write(step, [text_pb(name, x) for name, x in texts.items()])

  def _write(self, step: int, summaries: Sequence[Any], **fields: Any) -> None:
    from tensorboard.compat.proto import event_pb2
    from tensorboard.summary.writer import record_writer

    event = event_pb2.Event(wall_time=time.time(), step=int(step), **fields)
    for summary in summaries:
      event.summary.MergeFrom(summary)
    try:
      with open(self._path, 'ab') as file:
        record_writer.RecordWriter(file).write(event.SerializeToString())
    except OSError as error:
      if not self._failed:
        _log.warning('%s cannot be written: %s', self._path, error)
      self._failed = True


_numbers = itertools.count()  # of the event files of this process


class RunWriter:
  """The writers of a run, in a background thread; has the methods of clu's MetricWriter.

  Process 0 writes, and the others do nothing. The first line opens the files.
  """

  def __init__(self, model_dir: epath.PathLike, resume_step: int, evaluated: bool = True):
    """Touches no file yet; arguments as of `JsonlWriter`."""
    self._model_dir = os.fspath(model_dir)
    self._resume_step = resume_step
    self._evaluated = evaluated
    self._writes = jax.process_index() == 0
    self._pool = asynclib.Pool('metrics', max_workers=1)

  @functools.cached_property
  def _writers(self) -> tuple[JsonlWriter, Any]:
    """The writers of metrics.jsonl and of event files."""
    path = epath.Path(self._model_dir) / 'metrics.jsonl'
    jsonl = JsonlWriter(path, self._resume_step, self._evaluated)
    # TensorFlow's writer appends to the files of object stores.
    if run_files.is_remote(self._model_dir):
      return jsonl, self._summary_writer
    return jsonl, EventWriter(self._model_dir, self._resume_step)

  @functools.cached_property
  def _summary_writer(self) -> Any:
    from clu import metric_writers  # imports TensorFlow

    return metric_writers.SummaryWriter(self._model_dir)

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    if self._writes:
      for writer in self._writers:
        self._pool(writer.write_scalars)(step, scalars)

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    if self._writes:
      _, events = self._writers
      self._pool(events.write_texts)(step, texts)

  def __getattr__(self, name: str) -> Callable[..., None]:
    """Writes pictures, and what else clu's SummaryWriter takes, to a separate event file."""
    if not name.startswith('write_'):
      raise AttributeError(name)
    if not self._writes:
      return lambda *args, **kwargs: None
    return self._pool(getattr(self._summary_writer, name))

  def flush(self) -> None:
    """Waits until everything is written; an exception if lines of metrics.jsonl cannot be."""
    self._pool.join()
    if '_writers' in vars(self):
      jsonl, _ = self._writers
      jsonl.flush()

  def close(self) -> None:
    """Flushes and closes; logs a failure, which must not hide the exception that ends the run."""
    try:
      self.flush()
      if '_summary_writer' in vars(self):
        self._summary_writer.close()
    except Exception as error:
      _log.error('Metrics are lost: %s', error)
    self._pool.close()
