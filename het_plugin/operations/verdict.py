"""Which process of a run is dead, has failed or is stuck, judged by their beats alone.

Clocks of different hosts are never compared: a process is silent while the counter in its file
stands still by the clock of who looks.
"""

import dataclasses
from collections.abc import Mapping

from het_plugin.training import exit_codes

RUNNING = 'running'
DONE = 'done'
PREEMPTED = 'preempted'
FAILED = 'failed'


@dataclasses.dataclass(frozen=True)
class Limits:
  """How long to wait.

  Attributes:
    heartbeat_timeout_seconds: for a process that gives no sign of life.
    stall_timeout_seconds: for one that lives, but gets no further. More than the longest compile,
      restore and action take.
  """

  heartbeat_timeout_seconds: float = 100
  stall_timeout_seconds: float = 1800


@dataclasses.dataclass(frozen=True)
class Beat:
  """A sign of life of one process.

  Attributes:
    process: its number.
    processes: how many there are.
    host: its name.
    pid: of the process there.
    run: different for each start of each process.
    beat: counts the signs.
    time: when, in Unix seconds by its own clock; for people.
    step: number of training steps dispatched.
    total_steps: where the run ends.
    ticks: `run_clock.Snapshot.ticks`: of two processes the one with fewer is behind.
    phase: one of `observer.PHASES`.
    idle_seconds: since the last tick.
    state: RUNNING, DONE, PREEMPTED or FAILED.
    message: why it failed, in a sentence that names the process at fault; else empty.
    exit_code: what it ends with; None while it runs.
  """

  process: int
  processes: int
  host: str
  pid: int
  run: str
  beat: int
  time: float
  step: int
  total_steps: int
  ticks: int
  phase: str
  idle_seconds: float
  state: str
  message: str
  exit_code: int | None

  @property
  def name(self) -> str:
    return f'process {self.process} (host {self.host}, pid {self.pid})'

  @property
  def place(self) -> str:
    return f'in phase {self.phase} at step {self.step}'


class Peer:
  """What this process has seen of another.

  Attributes:
    last: its last beat; None before the first that is certainly of this start.
    silent_seconds: how long that has been the last, as far as this process was there to see it.
    successor: the first beat of another start of it; None, as it should be.
  """

  def __init__(self, known_alive: bool = False):
    """
    Args:
      known_alive: the beat found at the first look is of this start. Else it may be what an earlier
        one left, and the second beat is the first that counts.
    """
    self.last: Beat | None = None
    self.silent_seconds = 0.0
    self.successor: Beat | None = None
    self._looked = known_alive
    self._known = None

  def look(self, beat: Beat | None, seconds: float) -> None:
    """Takes what its file holds now; None, where that cannot be read, says nothing.

    Args:
      beat: the last.
      seconds: since the look before.
    """
    known = None if beat is None else (beat.run, beat.beat)
    if not self._looked:
      self._looked, self._known = True, known
    elif beat is not None and self.last is not None and beat.run != self.last.run:
      self.successor = beat
    elif beat is not None and known != self._known:
      self.last, self._known, self.silent_seconds = beat, known, 0.0
    elif beat is not None:
      self.silent_seconds += seconds


@dataclasses.dataclass(frozen=True)
class Verdict:
  """Why to end.

  Attributes:
    message: a sentence that names the process at fault.
    exit_code: to end with.
  """

  message: str
  exit_code: int


def of_failed(peers: Mapping[int, Peer]) -> Verdict | None:
  """Of one that says itself that it has failed; the others end as it does."""
  for peer in peers.values():
    if peer.last is not None and peer.last.state == FAILED:
      return Verdict(peer.last.message, peer.last.exit_code or exit_codes.FAILED)
  return None


def of_replaced(peers: Mapping[int, Peer]) -> Verdict | None:
  """Of one that was started again while the others went on: it has forgotten them."""
  for peer in peers.values():
    if peer.successor is not None:
      message = f'{peer.last.name} is gone: it was started again as {peer.successor.name}'
      return Verdict(message, exit_codes.LOST)
  return None


def of_silent(peers: Mapping[int, Peer], timeout_seconds: float) -> Verdict | None:
  """Of those that give no more signs of life; one that never gave any is nobody's concern here:
  its files may be where they are not seen.
  """
  silent = [
    peer
    for peer in peers.values()
    if peer.last is not None
    and peer.last.state == RUNNING
    and peer.silent_seconds >= timeout_seconds
  ]
  if not silent:
    return None
  names = '; '.join(f'{peer.last.name}, last seen {peer.last.place}' for peer in silent)
  seconds = max(peer.silent_seconds for peer in silent)
  return Verdict(f'no sign of life for {seconds:.0f} s of {names}', exit_codes.LOST)


def of_stalled(own: Beat, peers: Mapping[int, Peer]) -> Verdict:
  """Of who is behind, where nothing has moved for too long.

  Args:
    own: the beat of the process that judges; its idle_seconds say for how long.
    peers: what it knows of others, by their numbers.
  """
  seen = [own, *(peer.last for peer in peers.values() if peer.last is not None)]
  running = [beat for beat in seen if beat.state == RUNNING]
  fewest = min(beat.ticks for beat in running)
  behind = [beat for beat in running if beat.ticks == fewest]
  names = ', '.join(beat.name for beat in behind)
  since = f'{behind[0].place} for {own.idle_seconds:.0f} s'
  if own.processes == 1:
    text = f'this process has been {since}'
  elif len(behind) < len(running):
    text = f'{names} {"has" if len(behind) == 1 else "have"} been {since}; the others wait for it'
  else:
    text = f'all have been {since}: {names}'
  for beat in seen:
    if beat.state != RUNNING:
      text += f'; {beat.name} has left as {beat.state}, {beat.place}'
  if unseen := [str(number) for number, peer in peers.items() if peer.last is None]:
    text += f'; never seen: process {", ".join(unseen)}'
  return Verdict(text, exit_codes.LOST)
