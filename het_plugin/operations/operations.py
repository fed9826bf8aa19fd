"""What a run tells those who look after it, beside metrics: its log, its attempts, its profiles."""

import logging
import threading
from collections.abc import Callable
from typing import Any

import jax
from clu import metric_writers
from etils import epath

from het_plugin.operations import (
  goodput,
  preemption,
  profile_requests,
  profiling,
  run_clock,
  run_logs,
)

_log = logging.getLogger(__name__)

BEAT_SECONDS = 5.0
_MESSAGE_LENGTH = 500
# From the answer to a profile's request to its first step, where no other process must read it.
_ALONE_LEAD_SECONDS = 0.5


class Operations:
  """Keeps the run's files up to date from a thread of its own, while it is entered.

  Nothing of it ends a run: what fails there is logged.
  """

  def __init__(
    self,
    model_dir: epath.PathLike,
    clock: run_clock.RunClock,
    profiler: profiling.StepProfiler,
    total_steps: int,
  ):
    """Takes what it looks at; nothing is written before `__enter__`.

    Args:
      model_dir: of the run.
      clock: of the run.
      profiler: of the run.
      total_steps: of the run.
    """
    self._model_dir = epath.Path(model_dir)
    self._clock = clock
    self._total_steps = total_steps
    self._is_first = jax.process_index() == 0
    lead = _ALONE_LEAD_SECONDS if jax.process_count() == 1 else 3 * BEAT_SECONDS
    self._requests = profile_requests.Requests(
      model_dir, profiler, is_first=self._is_first, lead_seconds=lead, last_step=total_steps
    )
    self._failing: set[str] = set()
    self._attempt: goodput.AttemptFile | None = None
    self._over = threading.Event()
    self._thread = threading.Thread(target=self._beats, name='operations', daemon=True)

  def __enter__(self) -> 'Operations':
    """Raises OSError where the directory cannot be written."""
    if self._is_first:
      self._attempt = goodput.AttemptFile(
        self._model_dir, self._clock, self._total_steps, jax.process_count()
      )
    self._run_log = run_logs.RunLog(self._model_dir, jax.process_index(), self._clock)
    self._run_log.__enter__()
    self._thread.start()
    return self

  def __exit__(self, exc_type, error: BaseException | None, traceback: Any) -> None:
    self._over.set()
    self._thread.join()
    ended, message = _outcome(error)
    if ended == goodput.FAILED:
      self._run_log.error(error)
    self._try('request', lambda: self._requests.close(done=ended == goodput.DONE))
    if self._attempt is not None:
      self._try('attempt', lambda: self._attempt.write(ended, message))
    self._try('log', lambda: self._run_log.upload(at_once=True))
    self._run_log.__exit__(exc_type, error, traceback)

  def report(self, writer: metric_writers.MetricWriter) -> None:
    """Says where the time went, to the log and as scalars; called when training is over.

    A run that was complete, and did no step, has nothing to add.
    """
    self._clock.end()
    snapshot = self._clock.snapshot()
    if self._attempt is not None and snapshot.step != snapshot.start_step:
      self._try('goodput', lambda: self._report(writer))

  def _report(self, writer: metric_writers.MetricWriter) -> None:
    found, num_attempts = self._attempt.goodput()
    _log.info('%s', goodput.describe(found, num_attempts))
    scalars = {'goodput/share': found.share, 'goodput/wall_seconds': found.wall_seconds}
    scalars |= {f'goodput/{part}_seconds': value for part, value in found.seconds.items()}
    writer.write_scalars(self._clock.snapshot().step, scalars)

  def beat(self) -> None:
    """One update of all files."""
    if self._attempt is not None:
      self._try('attempt', self._attempt.write)
    snapshot = self._clock.snapshot()
    stepping = sum(snapshot.seconds.get(phase, 0.0) for phase in (run_clock.STEP, run_clock.DATA))
    steps = snapshot.step - (snapshot.start_step or 0)
    pace = stepping / steps if steps else None
    self._try('request', lambda: self._requests.poll(snapshot.step, pace))
    self._try('log', self._run_log.upload)

  def _beats(self) -> None:
    while not self._over.wait(BEAT_SECONDS):
      self.beat()

  def _try(self, name: str, update: Callable[[], None]) -> None:
    """Logs an error the first time in a row only: a full disk stays full."""
    try:
      update()
    except Exception as error:
      if name not in self._failing:
        _log.warning('Training goes on without its %s: %s', name, error)
      self._failing.add(name)
    else:
      self._failing.discard(name)


def _outcome(error: BaseException | None) -> tuple[str, str]:
  """(how an attempt ended, why)."""
  if error is None:
    return goodput.DONE, ''
  if isinstance(error, preemption.Preempted):
    return goodput.PREEMPTED, f'SIGTERM; step {error.step} is saved'
  message = ': '.join(filter(None, (type(error).__name__, ' '.join(str(error).split()))))
  return goodput.FAILED, message[:_MESSAGE_LENGTH]
