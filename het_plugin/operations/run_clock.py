"""What a run is doing now, since when, and how long it has done what."""

import collections
import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from het_plugin.training.observer import END, PHASES, START


def process_start() -> float:
  """`time.monotonic()` when this process began; now, where the system does not tell (not Linux)."""
  now = time.monotonic()
  try:
    # Field 22 of proc(5)'s stat; the second one, a name in brackets, may contain spaces.
    ticks = int(Path('/proc/self/stat').read_text().rpartition(')')[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf('SC_CLK_TCK')
  except (OSError, AttributeError):
    return now
  return now - max(0.0, age)


@dataclasses.dataclass(frozen=True)
class Snapshot:
  """A clock at one moment.

  Attributes:
    step: number of training steps dispatched.
    start_step: the step that training goes on from; None until that is known.
    saved_step: of the last checkpoint whose writing began; None before the first.
    ticks: signs of progress so far. Processes of a run go through the same ones in the same order:
      one whose number is smaller than another's is behind it.
    phase: one of PHASES.
    idle_seconds: since the last sign of progress.
    seconds: by phase, so far; a phase inside another counts as itself only.
  """

  step: int
  start_step: int | None
  saved_step: int | None
  ticks: int
  phase: str
  idle_seconds: float
  seconds: Mapping[str, float]


class RunClock:
  """Follows one process of a run, which calls it from one thread; any thread may look."""

  def __init__(self, now: Callable[[], float] = time.monotonic, began: float | None = None):
    """Begins in the phase START.

    Args:
      now: seconds.
      began: when START began, as `now` counts; None for now.
    """
    self._now = now
    # Reentrant: a signal handler that logs may look while the same thread turns a page.
    self._lock = threading.RLock()
    self._phases = [START]
    self._seconds: dict[str, float] = collections.defaultdict(float)
    self._last_tick = now()
    self._since = self._last_tick if began is None else began
    self._step = 0
    self._start_step: int | None = None
    self._saved_step: int | None = None
    self._ticks = 0

  @contextlib.contextmanager
  def phase(self, name: str) -> Iterator[None]:
    """What happens inside is of this phase; afterwards the run is back in the one before.

    Raises:
      ValueError: no such phase.
    """
    if name not in PHASES:
      raise ValueError(f'phase={name!r} must be one of {", ".join(PHASES)}.')
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
    """A sign of progress inside a phase; `step`, where steps have been done.

    The first step given is the one that training goes on from.
    """
    with self._lock:
      self._turn_page()
      if step is not None:
        self._step = step
        self._start_step = step if self._start_step is None else self._start_step

  def saved(self, step: int) -> None:
    """A checkpoint of the step is on its way to disk."""
    with self._lock:
      self._saved_step = step

  def end(self) -> None:
    """Training is over, however: from now on the phase is END."""
    with self._lock:
      self._turn_page()
      self._phases.append(END)

  def snapshot(self) -> Snapshot:
    with self._lock:
      now = self._now()
      seconds = dict(self._seconds)
      phase = self._phases[-1]
      seconds[phase] = seconds.get(phase, 0.0) + now - self._since
      return Snapshot(
        step=self._step,
        start_step=self._start_step,
        saved_step=self._saved_step,
        ticks=self._ticks,
        phase=phase,
        idle_seconds=now - self._last_tick,
        seconds=seconds,
      )

  def _turn_page(self) -> None:
    now = self._now()
    self._seconds[self._phases[-1]] += now - self._since
    self._since = self._last_tick = now
    self._ticks += 1
