"""Profiles of ranges of steps, for TensorBoard's profile plugin, xprof or Perfetto.

Ranges are bound before the run, or requested while it runs by a file in its directory:

    touch runs/digits/profile_request                  # or, with the number of steps:
    echo '{"steps": 20}' > runs/digits/profile_request

Process 0 answers by writing into the file which steps will be traced, far enough ahead for the
other processes to read it, and removes the file when its trace is written. A request for certain
steps is {"first": 1000, "last": 1010}.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import jax
from etils import epath

from het_plugin.operations.run_clock import RunClock
from het_plugin.training import observer, run_files

_log = logging.getLogger(__name__)

REQUEST = 'profile_request'
STEPS = 5  # of a request that does not say how many


@dataclasses.dataclass(frozen=True)
class Steps:
  """Steps to trace, both inclusive, counted from 1."""

  first: int
  last: int

  def __str__(self) -> str:
    return f'steps {self.first} to {self.last}'


def parse(text: str) -> int | Steps:
  """The number of steps, or the steps, that a request asks for.

  Raises:
    ValueError: it is no request.
  """
  try:
    value = json.loads(text) if text.strip() else {}
  except ValueError:
    value = None
  if value == {}:
    return STEPS
  if isinstance(value, dict) and all(type(x) is int and x >= 1 for x in value.values()):
    if value.keys() == {'steps'}:
      return value['steps']
    if value.keys() == {'first', 'last'} and value['first'] <= value['last']:
      return Steps(**value)
  raise ValueError(
    f'{REQUEST} holds {text.strip()[:80]!r}: it must be empty, {{"steps": N}} or '
    '{"first": FIRST, "last": LAST}.'
  )


def request(model_dir: epath.PathLike, steps: int) -> None:
  """Asks a run for a profile of its next steps.

  Raises:
    ValueError: there is a request already.
  """
  path = epath.Path(model_dir) / REQUEST
  if path.exists():
    raise ValueError(f'{path} exists: a profile is asked for already.')
  run_files.write_json(path, {'steps': steps})


@contextlib.contextmanager
def server(port: int | None) -> Iterator[None]:
  """Lets profilers ask this process for a trace: process i listens at port + i; None for nowhere.

  Raises:
    ValueError: it cannot listen there.
  """
  if port is None:
    yield
    return
  index = jax.process_index()
  try:
    # jax only logs that a port is taken, and goes on.
    with socket.create_server(('', port + index)):
      pass
  except (OSError, OverflowError) as error:
    raise ValueError(
      f'profiler_port={port}: process {index} cannot listen at {port + index}: {error}'
    ) from error
  jax.profiler.start_server(port + index)
  _log.info('Profilers find this process at port %d.', port + index)
  try:
    yield
  finally:
    jax.profiler.stop_server()


class Profiler:
  """Traces ranges of steps, each into profile/plugins/profile/step_FIRST of the run's directory.

  `before`, `after` and `close` are called by the training thread, `poll` by another. A trace that
  fails is logged, and training goes on.
  """

  def __init__(self, run: observer.ObservedRun, clock: RunClock, lead_seconds: float):
    """Starts nothing.

    Args:
      run: its profile_steps are the first range.
      clock: is told how long it took to write a trace.
      lead_seconds: from the answer to a request to the first step traced, at least. All processes
        must call `poll` within this time.

    Raises:
      ValueError: profile_steps is no range.
    """
    steps = run.profile_steps
    if steps is not None and not 1 <= steps[0] <= steps[1]:
      raise ValueError(f'profile_steps={steps} must be (first, last) with 1 <= first <= last.')
    self._folder = run.model_dir / 'profile' / 'plugins' / 'profile'
    self._request = run.model_dir / REQUEST
    self._last_step = run.total_steps
    self._clock = clock
    self._lead_seconds = lead_seconds
    self._is_first = jax.process_index() == 0
    self._lock = threading.Lock()  # of what follows
    self._planned: list[Steps] = [] if steps is None else [Steps(*steps)]
    self._running: Steps | None = None
    self._requested: Steps | None = None
    self._scratch: tempfile.TemporaryDirectory | None = None

  # Tracing.

  def before(self, step: int) -> None:
    """Called before the step is dispatched. Of a range that has begun, the rest is traced."""
    if not self._planned or self._running is not None:
      return
    with self._lock:
      self._planned = [steps for steps in self._planned if steps.last >= step]
      due = [steps for steps in self._planned if steps.first <= step]
      if not due:
        return
      self._running = due[0]
      self._planned.remove(due[0])
    try:
      # On the machine's own disk: a trace names its files by host and time only.
      self._scratch = tempfile.TemporaryDirectory()
      jax.profiler.start_trace(self._scratch.name)
    except (OSError, RuntimeError) as error:
      self._finish(error)

  def after(self, step: int, result: Any) -> None:
    """Called after the step is dispatched, with something it computes."""
    if self._running is not None and step >= self._running.last:
      jax.block_until_ready(result)
      self.close()

  def close(self) -> None:
    """Ends a trace that is still running."""
    if self._running is None:
      return
    with self._clock.phase(observer.ACTIONS):
      try:
        jax.profiler.stop_trace()
        _log.info('Traced %s: %s.', self._running, self._copy())
      except (OSError, RuntimeError) as error:
        self._finish(error)
      else:
        self._finish()

  def _copy(self) -> epath.Path:
    """Copies the trace to the run's directory."""
    folder = self._folder / f'step_{self._running.first}'
    folder.mkdir(parents=True, exist_ok=True)
    for root, _, names in os.walk(self._scratch.name):
      for name in names:
        target = folder / f'process-{jax.process_index():05d}.{name}'
        epath.Path(root, name).copy(target, overwrite=True)
    return folder

  def _finish(self, error: Exception | None = None) -> None:
    if error is not None:
      _log.error('Could not trace %s: %s', self._running, error)
    if self._scratch is not None:
      self._scratch.cleanup()
    with self._lock:
      self._running = self._scratch = None

  # Requests.

  def poll(self) -> None:
    """Looks for a request, plans it, and removes it when it is met; called every few seconds."""
    self._remove_if_met()
    try:
      asked = parse(self._request.read_text())
    except OSError:
      return
    except ValueError as error:
      self._drop(str(error))
      return
    if self._requested is not None:
      return
    now = self._clock.snapshot()
    if not self._is_first:
      if isinstance(asked, Steps) and asked.last > now.step:
        self._plan(asked)
    elif (pace := _seconds_per_step(now)) is not None:  # nothing can be planned before
      self._answer(asked, now.step, pace)

  def end(self, done: bool) -> None:
    """Called after the last step. `done`: nobody will answer a request any more."""
    self._remove_if_met()
    if done and self._request.exists():
      self._drop(f'{REQUEST} comes too late: the run is done.')

  def _answer(self, asked: int | Steps, step: int, seconds_per_step: float) -> None:
    if isinstance(asked, int) or asked.first <= step:
      count = asked if isinstance(asked, int) else asked.last - asked.first + 1
      first = step + 1 + math.ceil(self._lead_seconds / seconds_per_step)
      asked = Steps(first, first + count - 1)
    if asked.last > self._last_step:
      self._drop(f'{REQUEST} cannot be met: {asked} are beyond the end, {self._last_step}.')
      return
    run_files.write_json(self._request, dataclasses.asdict(asked))
    self._plan(asked)

  def _plan(self, steps: Steps) -> None:
    _log.info('A profile is asked for: %s will be traced.', steps)
    self._requested = steps
    with self._lock:
      self._planned.append(steps)

  def _remove_if_met(self) -> None:
    with self._lock:
      met = self._requested not in (None, self._running, *self._planned)
    if met:
      if self._is_first:
        self._request.unlink(missing_ok=True)
      self._requested = None

  def _drop(self, why: str) -> None:
    if self._is_first:
      _log.warning('%s The request is removed.', why)
      self._request.unlink(missing_ok=True)


def _seconds_per_step(now: Any) -> float | None:
  steps = now.step - (now.start_step or 0)
  stepping = sum(now.seconds.get(phase, 0.0) for phase in (observer.STEP, observer.DATA))
  return stepping / steps if steps else None
