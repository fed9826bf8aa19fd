"""Profiles of ranges of steps, for TensorBoard's profile plugin, xprof or Perfetto."""

import contextlib
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import jax
from etils import epath

from het_plugin.operations import run_clock
from het_plugin.operations.profile_requests import Steps
from het_plugin.training import observer

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def server(port: int) -> Iterator[None]:
  """Lets profilers ask this process for a trace: process i listens at port + i.

  Raises:
    ValueError: it cannot listen there.
  """
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


class StepProfiler:
  """Traces ranges of steps, each into plugins/profile/step_FIRST of a directory.

  A trace that fails is reported; training goes on.
  """

  def __init__(
    self,
    log_dir: epath.PathLike,
    steps: tuple[int, int] | None,
    clock: run_clock.RunClock,
  ):
    """Starts nothing.

    Args:
      log_dir: where traces go.
      steps: (first, last), counted from 1, both inclusive; None for none.
      clock: is told how long it took to write a trace.

    Raises:
      ValueError: `steps` is no range.
    """
    if steps is not None and not 1 <= steps[0] <= steps[1]:
      raise ValueError(f'profile_steps={steps} must be (first, last) with 1 <= first <= last.')
    self._folder = epath.Path(log_dir) / 'plugins' / 'profile'
    self._clock = clock
    self._lock = threading.Lock()
    self._planned: list[Steps] = [] if steps is None else [Steps(*steps)]
    self._running: Steps | None = None
    self._scratch: tempfile.TemporaryDirectory | None = None

  def plan(self, steps: Steps) -> None:
    """Adds a range; of one that has begun, what is still ahead is traced. From any thread."""
    with self._lock:
      self._planned.append(steps)

  def is_done(self, steps: Steps) -> bool:
    """Whether a range planned is over. From any thread."""
    with self._lock:
      return steps not in self._planned and steps != self._running

  def before(self, step: int) -> None:
    """Called before the step is dispatched."""
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
      self._give_up(error)

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
        self._give_up(error)
        return
    self._end()

  def _copy(self) -> epath.Path:
    """Copies the trace to where it belongs."""
    folder = self._folder / f'step_{self._running.first}'
    folder.mkdir(parents=True, exist_ok=True)
    for root, _, names in os.walk(self._scratch.name):
      for name in names:
        target = folder / f'process-{jax.process_index():05d}.{name}'
        epath.Path(root, name).copy(target, overwrite=True)
    return folder

  def _give_up(self, error: Exception) -> None:
    _log.error('Could not trace %s: %s', self._running, error)
    self._end()

  def _end(self) -> None:
    if self._scratch is not None:
      self._scratch.cleanup()
    with self._lock:
      self._running = self._scratch = None
