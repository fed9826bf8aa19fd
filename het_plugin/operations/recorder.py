"""The facts of this process, which the training thread changes."""

import collections
import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from het_plugin.operations.attempts import Facts
from het_plugin.training.observer import END, START


class Recorder:
  """Records facts. One thread changes them; any thread may read them."""

  def __init__(self, began: float | None = None, clock: Callable[[], float] = time.monotonic):
    """Begins in the phase START, which `began` at a time of the clock; None for now."""
    self._clock = clock
    # Reentrant, because a signal handler that logs may read while the same thread changes phase.
    self._lock = threading.RLock()
    self._phases = [START]
    self._seconds: dict[str, float] = collections.defaultdict(float)
    self._last_tick = clock()
    self._since = self._last_tick if began is None else began
    self._facts = Facts(
      process=jax.process_index(),
      processes=jax.process_count(),
      host=socket.gethostname(),
      pid=os.getpid(),
      began=time.time() - (self._last_tick - self._since),
      time=time.time(),
      total_steps=0,
    )

  @contextlib.contextmanager
  def phase(self, name: str) -> Iterator[None]:
    """Encloses one of `observer.PHASES`; afterwards the run is in the previous one again."""
    with self._lock:
      self._turn_page()
      self._phases.append(name)
    try:
      yield
    finally:
      with self._lock:
        self._turn_page()
        self._phases.pop()

  def tick(self, step: int | None = None) -> None:
    """Records progress inside a phase; `step` is the number of steps done, if it is known.

    The first `step` is the one from which training continues.
    """
    with self._lock:
      self._turn_page()
      if step is not None:
        start = self._facts.start_step
        self.change(step=step, start_step=step if start is None else start)

  def end(self) -> None:
    """Training has ended, with or without an error: the phase is END from now on."""
    with self._lock:
      self._turn_page()
      self._phases.append(END)

  def change(self, **changes: Any) -> None:
    """Sets attributes of the facts."""
    with self._lock:
      self._facts = dataclasses.replace(self._facts, **changes)

  def now(self) -> Facts:
    """The facts at this moment."""
    with self._lock:
      now = self._clock()
      phase = self._phases[-1]
      seconds = dict(self._seconds)
      seconds[phase] = seconds.get(phase, 0.0) + now - self._since
      idle = now - self._last_tick
      self.change(time=time.time(), phase=phase, seconds=seconds, idle_seconds=idle)
      return self._facts

  def _turn_page(self) -> None:
    now = self._clock()
    self._seconds[self._phases[-1]] += now - self._since
    self._since = self._last_tick = now
    self.change(ticks=self._facts.ticks + 1)
