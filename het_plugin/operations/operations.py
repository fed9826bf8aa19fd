"""Everything that watches a training, as one object: `train(observer=Operations())`."""

import contextlib
import functools
import gc
import logging
from collections.abc import Iterator
from typing import Any

import jax
from etils import epath

from het_plugin.operations import attempts, goodput, heartbeat, lock, logs, profiles, recorder
from het_plugin.system import exit_codes, stopping
from het_plugin.training import metric_writers, observer

_log = logging.getLogger(__name__)

# Seconds from the answer to a request for a profile to its first step, with a single process.
_ALONE_LEAD_SECONDS = 0.5


_collects_later = False


def collect_garbage_later() -> None:
  """Switches Python's garbage collector off until the first step of an `Operations`.

  A start makes little garbage, and looking for it takes time.
  """
  global _collects_later
  _collects_later = True
  gc.disable()


class Operations(observer.Observer):
  """Writes facts, logs and profiles of a run, and ends the run if it is stuck.

  It does not change the result of a training, and its errors do not end the training.
  """

  def __init__(self, stall_seconds: float = heartbeat.STALL_SECONDS, began: float | None = None):
    """Touches no file yet.

    Args:
      stall_seconds: time without progress after which the processes end with `exit_codes.LOST`. It
        must exceed the longest compilation, restore and action.
      began: `time.monotonic()` when the work for this run began, including imports; None for now.
    """
    self.recorder = recorder.Recorder(began=began)
    self._stall_seconds = stall_seconds

  @contextlib.contextmanager
  def observing(self, run: observer.ObservedRun) -> Iterator[None]:
    self.recorder.change(total_steps=run.total_steps)
    alone = jax.process_count() == 1
    lead = _ALONE_LEAD_SECONDS if alone else 3 * heartbeat.PERIOD_SECONDS
    self._run = run
    self._profiler = profiles.Profiler(run, self.recorder, lead)
    self._heartbeat = heartbeat.Heartbeat(self.recorder, self._stall_seconds, self._profiler.poll)
    try:
      with (
        stopping.handled(self._can_save, self._farewell),
        contextlib.ExitStack() as self._files,
        self._heartbeat,
      ):
        yield
    except OSError as error:
      file = error.filename or run.model_dir
      # Without a file there are also those of the network, and without a number those of images.
      is_other = error.errno is None or isinstance(error, (ConnectionError, TimeoutError))
      if is_other or not epath.Path(str(file)).is_relative_to(run.model_dir):
        raise
      raise ValueError(f'{file} cannot be written: {error.strerror}') from error

  def begin(self) -> None:
    model_dir = self._run.model_dir
    files = self._files
    attempt = files.enter_context(lock.held(model_dir))
    files.enter_context(profiles.server(self._run.profiler_port))
    files.enter_context(logs.written(model_dir, self.recorder))
    files.callback(self._heartbeat.attempt, 'profile', self._profiler.end)
    self._earlier = list(attempts.read_attempts(model_dir).values())
    self._heartbeat.begin(attempt)

  def _can_save(self) -> bool:
    return self.recorder.now().phase not in observer.BEFORE_TRAINING

  def _farewell(self) -> None:
    self._heartbeat.end(exit_codes.Preempted(self.recorder.now().step))

  def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
    return self.recorder.phase(name)

  def resumed(self, step: int) -> None:
    self.recorder.tick(step)

  def progressed(self) -> None:
    self.recorder.tick()

  def before_step(self, step: int) -> None:
    if _collects_later:
      gc.enable()
    self._profiler.before(step)

  def after_step(self, step: int, metrics: Any) -> None:
    self.recorder.tick(step)
    self._profiler.after(step, metrics)

  def saved(self, step: int) -> None:
    self.recorder.change(saved_step=step)

  def stop_asked(self) -> bool:
    return stopping.reached()

  def leaving(self, error: BaseException | None, writer: metric_writers.RunWriter) -> None:
    self._heartbeat.fail(error)
    self.recorder.end()
    now = self.recorder.now()
    # A run that was already complete and did no step has nothing to add.
    if jax.process_index() == 0 and now.step != now.start_step:
      self._heartbeat.attempt('goodput', functools.partial(self._report, now.step, writer))
    self._profiler.close()

  def _report(self, step: int, writer: metric_writers.RunWriter) -> None:
    """Writes where the time went, to the log and as scalars."""
    attempts = [*self._earlier, self.recorder.now()]
    found = goodput.goodput(attempts)
    _log.info('%s', goodput.describe(found, len(attempts)))
    scalars = {'share': found['share'], 'wall_seconds': found['wall_seconds']}
    scalars |= {f'{part}_seconds': value for part, value in found['seconds'].items()}
    writer.write_scalars(step, {f'goodput/{name}': value for name, value in scalars.items()})
