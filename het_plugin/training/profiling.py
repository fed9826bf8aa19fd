"""A profile of a bound range of steps, for TensorBoard's profile plugin or Perfetto."""

import os
from typing import Any

import jax


class StepProfiler:
  """Traces the steps first..last (counted from 1, both inclusive) into a directory."""

  def __init__(self, log_dir: os.PathLike | str, steps: tuple[int, int] | None):
    """Args: log_dir, where the trace goes; steps, (first, last), or None for no profile."""
    if steps is not None and not 1 <= steps[0] <= steps[1]:
      raise ValueError(f'profile_steps={steps} must be (first, last) with 1 <= first <= last.')
    self._log_dir = os.fspath(log_dir)
    self._steps = steps
    self._running = False

  def before(self, step: int) -> None:
    """Called before the step is dispatched."""
    if self._steps is not None and step == self._steps[0]:
      jax.profiler.start_trace(self._log_dir)
      self._running = True

  def after(self, step: int, result: Any) -> None:
    """Called after the step is dispatched, with something it computes."""
    if self._running and step == self._steps[1]:
      jax.block_until_ready(result)
      self.close()

  def close(self) -> None:
    """Ends a trace that is still running."""
    if self._running:
      jax.profiler.stop_trace()
      self._running = False
