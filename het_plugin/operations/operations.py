"""Everything that watches a training, as one object: `train(observer=Operations())`."""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from clu import metric_writers

from het_plugin.operations import (
  goodput,
  heartbeat,
  interruptible,
  loss_spikes,
  preemption,
  profile_requests,
  profiling,
  resources,
  run_clock,
  run_lock,
  run_logs,
)
from het_plugin.operations.verdict import Limits
from het_plugin.training import exit_codes, observer

_log = logging.getLogger(__name__)

T = TypeVar('T')

BEAT_SECONDS = 5.0
_MESSAGE_LENGTH = 500
# From the answer to a profile's request to its first step, where no other process must read it.
_ALONE_LEAD_SECONDS = 0.5


class Operations(observer.Observer):
  """Keeps the run's files up to date from a thread of its own, and notices lost processes.

  Nothing of it changes the result of the training, and an error in it does not end the training.

  Attributes:
    clock: what the run is doing, and for how long it has done what.
  """

  def __init__(self, limits: Limits | None = None, began: float | None = None):
    """Touches no file yet.

    Args:
      limits: how long to wait for a process that is dead or stuck, until this one ends with
        `exit_codes.LOST`; None for the defaults.
      began: `time.monotonic()` when the work for this run began, imports included; None for now.
    """
    self._limits = limits
    self.clock = run_clock.RunClock(began=began)
    self._notice = preemption.PreemptionNotice()
    self._is_first = jax.process_index() == 0
    self._failing: set[str] = set()
    self._attempt: goodput.AttemptFile | None = None
    self._spikes: loss_spikes.SpikeReport | None = None
    self._over = threading.Event()

  # The protocol of training.observer.

  @contextlib.contextmanager
  def observing(self, run: observer.ObservedRun) -> Iterator[None]:
    self._run = run
    self._profiler = profiling.StepProfiler(
      run.model_dir / 'profile', run.profile_steps, self.clock
    )
    lead = _ALONE_LEAD_SECONDS if jax.process_count() == 1 else 3 * BEAT_SECONDS
    self._requests = profile_requests.Requests(
      run.model_dir,
      self._profiler,
      is_first=self._is_first,
      lead_seconds=lead,
      last_step=run.total_steps,
    )
    with contextlib.ExitStack() as stack:
      stack.enter_context(self._notice)
      stack.enter_context(run_lock.locked(run.model_dir))
      if run.profiler_port is not None:
        stack.enter_context(profiling.server(run.profiler_port))
      stack.enter_context(self._files())
      self._beat = stack.enter_context(
        heartbeat.Heartbeat(run.model_dir, self.clock, run.total_steps, self._limits)
      )
      yield

  def check_room(self, state: Any, save_cfg: Any) -> None:
    resources.check(state, save_cfg, self._run.model_dir, self._run.total_steps)

  def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
    return self.clock.phase(name)

  def interruptible(self, fn: Callable[[], T]) -> T:
    try:
      return interruptible.call(fn, self._notice.reached)
    except interruptible.Interrupted:
      step = self.clock.snapshot().step
      _log.warning('Preempted while compiling: nothing new to save at step %d.', step)
      raise exit_codes.Preempted(step, compiling=True) from None

  def resumed(self, step: int) -> None:
    self.clock.tick(step)
    if self._run.loss_spikes is not None:
      path = self._run.model_dir / 'loss_spikes.jsonl'
      self._spikes = loss_spikes.SpikeReport(self._run.loss_spikes, path, step)

  def progressed(self) -> None:
    self.clock.tick()

  def before_step(self, step: int) -> None:
    self._profiler.before(step)

  def after_step(self, step: int, metrics: Any) -> None:
    self.clock.tick(step)
    self._profiler.after(step, metrics)

  def step_finished(
    self, step: int, metrics: Any, rows: Callable[[], Sequence[int] | None]
  ) -> None:
    if self._spikes is None:
      return

    def details() -> dict[str, Any]:
      norm = float(metrics['update'].compute()['gradient_norm'])
      return {'gradient_norm': norm, 'index': rows()}

    self._spikes.add(step, float(metrics['loss'].compute()), details)

  def saved(self, step: int) -> None:
    self.clock.saved(step)

  def ask_to_stop(self) -> None:
    self._notice.request()

  def stop_asked(self) -> bool:
    return self._notice.reached()

  def leaving(self, error: BaseException | None, writer: metric_writers.MetricWriter) -> None:
    self._beat.failing(type(error), error, None)
    self.clock.end()
    snapshot = self.clock.snapshot()
    # A run that was complete, and did no step, has nothing to add.
    if self._attempt is not None and snapshot.step != snapshot.start_step:
      self._try('goodput', lambda: self._report(writer))
    self._profiler.close()

  # Its files.

  @contextlib.contextmanager
  def _files(self) -> Iterator[None]:
    if self._is_first:
      self._attempt = goodput.AttemptFile(
        self._run.model_dir, self.clock, self._run.total_steps, jax.process_count()
      )
    self._run_log = run_logs.RunLog(self._run.model_dir, jax.process_index(), self.clock)
    thread = threading.Thread(target=self._beats, name='operations', daemon=True)
    with self._run_log:
      thread.start()
      ended, message = goodput.DONE, ''
      try:
        yield
      except BaseException as error:
        ended, message = _outcome(error)
        if ended == goodput.FAILED:
          self._run_log.error(error)
        raise
      finally:
        self._over.set()
        thread.join()
        self._try('request', lambda: self._requests.close(done=ended == goodput.DONE))
        if self._attempt is not None:
          self._try('attempt', lambda: self._attempt.write(ended, message))
        self._try('log', lambda: self._run_log.upload(at_once=True))

  def _report(self, writer: metric_writers.MetricWriter) -> None:
    """Says where the time went, to the log and as scalars."""
    found, num_attempts = self._attempt.goodput()
    _log.info('%s', goodput.describe(found, num_attempts))
    scalars = {'goodput/share': found.share, 'goodput/wall_seconds': found.wall_seconds}
    scalars |= {f'goodput/{part}_seconds': value for part, value in found.seconds.items()}
    writer.write_scalars(self.clock.snapshot().step, scalars)

  def _beats(self) -> None:
    while not self._over.wait(BEAT_SECONDS):
      if self._attempt is not None:
        self._try('attempt', self._attempt.write)
      snapshot = self.clock.snapshot()
      phases = (observer.STEP, observer.DATA)
      stepping = sum(snapshot.seconds.get(phase, 0.0) for phase in phases)
      steps = snapshot.step - (snapshot.start_step or 0)
      pace = stepping / steps if steps else None
      self._try('request', functools.partial(self._requests.poll, snapshot.step, pace))
      self._try('log', self._run_log.upload)

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


def _outcome(error: BaseException) -> tuple[str, str]:
  """(how an attempt ended, why)."""
  if isinstance(error, exit_codes.Preempted):
    return goodput.PREEMPTED, f'SIGTERM; step {error.step} is saved'
  message = ': '.join(filter(None, (type(error).__name__, ' '.join(str(error).split()))))
  return goodput.FAILED, message[:_MESSAGE_LENGTH]
