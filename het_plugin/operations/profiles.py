"""Profiles of ranges of steps, for TensorBoard's profile plugin, xprof or Perfetto.

A range is bound before the run, or requested while it runs by a file in its directory:

    touch runs/digits/profile_request                  # or, with the number of steps:
    echo '{"steps": 20}' > runs/digits/profile_request

Process 0 answers by writing the steps that will be traced into the file, far enough ahead for the
other processes to read them, and removes the file afterwards.
"""

import contextlib
import logging
import math
import os
import socket
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
from etils import epath

from het_plugin.operations.recorder import Recorder
from het_plugin.system import run_files
from het_plugin.training import observer

_log = logging.getLogger(__name__)

REQUEST = 'profile_request'
STEPS = 5  # of a request without a number


def request(model_dir: epath.PathLike, steps: int) -> None:
  """Asks a run for a profile of its next steps.

  Raises:
    ValueError: there is a request already, or a link leads out of the folder.
  """
  run_files.check_links(model_dir)
  path = epath.Path(model_dir) / REQUEST
  if path.exists():
    raise ValueError(f'{path} exists: a profile was requested already.')
  run_files.write_json(path, {'steps': steps})


@contextlib.contextmanager
def server(port: int | None) -> Iterator[None]:
  """Lets profilers request a trace: process i listens at port + i; None to listen nowhere."""
  if port is None:
    yield
    return
  index = jax.process_index()
  try:
    # If a port is taken, jax only logs this.
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
  fails is logged, and training continues.
  """

  def __init__(self, run: observer.ObservedRun, recorder: Recorder, lead_seconds: float):
    """Starts nothing.

    Args:
      run: the run; its profile_steps, (first, last) counted from 1, are the first range.
      recorder: records the time that it takes to write a trace.
      lead_seconds: least time from the answer to a request to the first traced step. All processes
        must call `poll` within this time.
    """
    steps = run.profile_steps
    if steps is not None and not 1 <= steps[0] <= steps[1]:
      raise ValueError(f'profile_steps={steps} must be (first, last) with 1 <= first <= last.')
    if steps is not None and steps[0] > run.total_steps:
      raise ValueError(f'profile_steps={steps} begin after the last step, {run.total_steps}.')
    self._folder = run.model_dir / 'profile' / 'plugins' / 'profile'
    self._request = run.model_dir / REQUEST
    self._recorder = recorder
    self._lead_seconds = lead_seconds
    self._is_first = jax.process_index() == 0
    self._planned = set() if steps is None else {tuple(steps)}
    self._running: tuple[int, int] | None = None
    self._scratch: tempfile.TemporaryDirectory | None = None

  def before(self, step: int) -> None:
    """Called before the step is dispatched. If a range has already begun, its rest is traced."""
    due = [steps for steps in self._planned.copy() if steps[0] <= step <= steps[1]]
    if not due or self._running is not None:
      return
    self._running = due[0]
    self._planned.discard(due[0])
    # On a local disk, because a trace names its files by host and time only.
    self._scratch = tempfile.TemporaryDirectory()
    try:
      jax.profiler.start_trace(self._scratch.name)
    except (OSError, RuntimeError) as error:
      self._finish(error)

  def after(self, step: int, result: Any) -> None:
    """Called after the step is dispatched, with one of its results."""
    if self._running is not None and step >= self._running[1]:
      jax.block_until_ready(result)
      self.close()

  def close(self) -> None:
    """Ends a trace that is still running."""
    if self._running is None:
      return
    with self._recorder.phase(observer.ACTIONS):
      try:
        jax.profiler.stop_trace()
        _log.info('Traced steps %d to %d: %s.', *self._running, self._copy())
        error = None
      except (OSError, RuntimeError) as raised:
        error = raised
      self._finish(error)

  def _finish(self, error: Exception | None) -> None:
    if error is not None:
      _log.error('Could not trace steps %d to %d: %s', *self._running, error)
    self._scratch.cleanup()
    self._running = None

  def _copy(self) -> epath.Path:
    """Copies the trace to the run's directory."""
    folder = self._folder / f'step_{self._running[0]}'
    folder.mkdir(parents=True, exist_ok=True)
    for root, _, names in os.walk(self._scratch.name):
      for name in names:
        target = folder / f'process-{jax.process_index():05d}.{name}'
        epath.Path(root, name).copy(target, overwrite=True)
    return folder

  def poll(self) -> None:
    """Looks for a request, plans it, and removes it when it is past; called every few seconds."""
    if not self._request.exists():
      return
    asked = run_files.read_json(self._request) or {}
    now = self._recorder.now()
    if 'first' not in asked:
      if not (self._is_first and now.steps):  # the time per step is not known yet
        return
      seconds = sum(now.seconds.get(x, 0.0) for x in (observer.STEP, observer.DATA))
      ahead = math.ceil(self._lead_seconds * now.steps / max(seconds, 1e-9))
      first = now.step + 1 + ahead
      if first > now.total_steps:
        _log.warning('Profile requested too late: the run ends at step %d.', now.total_steps)
        self.end()
        return
      last = min(first + asked.get('steps', STEPS) - 1, now.total_steps)
      asked = {'first': first, 'last': last}
      run_files.write_json(self._request, asked)
      _log.info('Profile requested: steps %(first)d to %(last)d will be traced.', asked)
    if asked['last'] > now.step:
      self._planned.add((asked['first'], asked['last']))
    else:
      self.end()

  def end(self) -> None:
    """Removes a request that can no longer be answered."""
    if self._is_first:
      self._request.unlink(missing_ok=True)
