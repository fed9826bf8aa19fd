"""Everything that watches a training, as one object: `train(observer=Operations())`."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from clu import metric_writers

from het_plugin.operations import (
  facts,
  goodput,
  heartbeat,
  lock,
  logs,
  loss_spikes,
  preemption,
  profiles,
  resources,
  run_clock,
)
from het_plugin.operations.peers import Limits
from het_plugin.training import exit_codes, observer

_log = logging.getLogger(__name__)

T = TypeVar('T')

# From the answer to a profile's request to its first step, for a process that is alone.
_ALONE_LEAD_SECONDS = 0.5


class Operations(observer.Observer):
  """Writes facts, logs and profiles of a run, and ends it where a process is lost or stuck.

  Nothing of it changes the result of a training, and an error in it does not end the training.

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
    self.clock = run_clock.RunClock(began=began)
    self._limits = limits or Limits()
    self._notice = preemption.PreemptionNotice()
    self._spikes: loss_spikes.SpikeReport | None = None

  @contextlib.contextmanager
  def observing(self, run: observer.ObservedRun) -> Iterator[None]:
    self._run = run
    alone = jax.process_count() == 1
    lead = _ALONE_LEAD_SECONDS if alone else 3 * heartbeat.PERIOD_SECONDS
    self._profiler = profiles.Profiler(run, self.clock, lead)
    with (
      self._notice,
      lock.held(run.model_dir) as (held, attempt),
      profiles.server(run.profiler_port),
      logs.RunLog(run.model_dir, jax.process_index(), self.clock) as log,
    ):
      tasks = {'lock': functools.partial(held.check, attempt), 'log': log.upload}
      tasks['profile'] = self._profiler.poll
      self._heartbeat = heartbeat.Heartbeat(
        attempt, self.clock, run.total_steps, self._limits, tasks
      )
      self._earlier = list(facts.read_attempts(run.model_dir).values())
      try:
        self._heartbeat.start()
      except OSError as raised:
        reason = raised.strerror or raised
        raise ValueError(f'model_dir={run.model_dir} cannot be written: {reason}') from raised
      error = None
      try:
        yield
      except BaseException as raised:
        error = raised
        raise
      finally:
        if exit_codes.of(error) not in (0, exit_codes.PREEMPTED):
          log.error(error)
        self._heartbeat.end(error)
        self._heartbeat.attempt('profile', lambda: self._profiler.end(done=error is None))
        self._heartbeat.attempt('log', lambda: log.upload(at_once=True))

  def check_room(self, state: Any, save_cfg: Any) -> None:
    resources.check(state, save_cfg, self._run.model_dir, self._run.total_steps)

  def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
    return self.clock.phase(name)

  def interruptible(self, fn: Callable[[], T]) -> T:
    try:
      return preemption.call(fn, self._notice.reached)
    except preemption.Interrupted:
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

    loss = float(metrics['loss'].compute())
    self._heartbeat.attempt('loss spikes', lambda: self._spikes.add(step, loss, details))

  def saved(self, step: int) -> None:
    self.clock.saved(step)

  def ask_to_stop(self) -> None:
    self._notice.request()

  def stop_asked(self) -> bool:
    return self._notice.reached()

  def leaving(self, error: BaseException | None, writer: metric_writers.MetricWriter) -> None:
    self._heartbeat.fail(error)
    self.clock.end()
    now = self.clock.snapshot()
    # A run that was complete, and did no step, has nothing to add.
    if jax.process_index() == 0 and now.step != now.start_step:
      self._heartbeat.attempt('goodput', functools.partial(self._report, now.step, writer))
    self._profiler.close()

  def _report(self, step: int, writer: metric_writers.MetricWriter) -> None:
    """Says where the time went, to the log and as scalars."""
    attempts = [*self._earlier, self._heartbeat.now()]
    found = goodput.goodput(attempts)
    _log.info('%s', goodput.describe(found, len(attempts)))
    scalars = {'share': found.share, 'wall_seconds': found.wall_seconds}
    scalars |= {f'{part}_seconds': value for part, value in found.seconds.items()}
    writer.write_scalars(step, {f'goodput/{name}': value for name, value in scalars.items()})
