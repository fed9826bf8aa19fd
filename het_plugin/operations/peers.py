"""Which process of a run is dead, has failed or is stuck, judged by their facts alone.

Clocks of different hosts are never compared. A process is silent while the counter in its file
stands still by the clock of the process that looks.
"""

import dataclasses
from collections.abc import Mapping

from het_plugin.operations.facts import FAILED, RUNNING, Facts
from het_plugin.training import exit_codes


@dataclasses.dataclass(frozen=True)
class Limits:
  """How long to wait.

  Attributes:
    heartbeat_timeout_seconds: for a process that gives no sign of life.
    stall_timeout_seconds: for a process that lives but makes no progress. It must exceed the
      longest compilation, restore and action.
  """

  heartbeat_timeout_seconds: float = 100
  stall_timeout_seconds: float = 1800


class Peer:
  """What this process has seen of another.

  Attributes:
    last: its last facts; None before the first.
    silent_seconds: how long these have been the last, while this process was there to see it.
  """

  def __init__(self):
    self.last: Facts | None = None
    self.silent_seconds = 0.0

  def look(self, facts: Facts | None, seconds: float) -> None:
    """Takes what its file holds now, `seconds` after the last look. None, a file that cannot be
    read, says nothing.
    """
    if facts is None:
      return
    if self.last is None or facts.beat != self.last.beat:
      self.last, self.silent_seconds = facts, 0.0
    else:
      self.silent_seconds += seconds


@dataclasses.dataclass(frozen=True)
class Verdict:
  """Why to end: a sentence that names the process at fault, and the exit code."""

  message: str
  exit_code: int


def failed(peers: Mapping[int, Peer]) -> Verdict | None:
  """The verdict of a process that says that it has failed; the others end as it does."""
  for peer in peers.values():
    if peer.last is not None and peer.last.state == FAILED:
      return Verdict(peer.last.message, peer.last.exit_code or exit_codes.FAILED)
  return None


def silent(peers: Mapping[int, Peer], timeout_seconds: float) -> Verdict | None:
  """The verdict on processes that give no more signs of life. One that never gave any is not
  judged: its files may be where they cannot be seen.
  """
  running = (p for p in peers.values() if p.last is not None and p.last.state == RUNNING)
  found = [peer for peer in running if peer.silent_seconds >= timeout_seconds]
  if not found:
    return None
  names = '; '.join(f'{peer.last.name}, last seen {peer.last.place}' for peer in found)
  seconds = max(peer.silent_seconds for peer in found)
  return Verdict(f'no sign of life for {seconds:.0f} s of {names}', exit_codes.LOST)


def stalled(own: Facts, peers: Mapping[int, Peer]) -> Verdict:
  """The verdict on the processes that are behind, where nothing has moved for too long.

  Args:
    own: the facts of the process that judges; its idle_seconds say for how long.
    peers: what it knows of others, by their numbers.
  """
  seen = [own, *(peer.last for peer in peers.values() if peer.last is not None)]
  running = [facts for facts in seen if facts.state == RUNNING]
  fewest = min(facts.ticks for facts in running)
  behind = [facts for facts in running if facts.ticks == fewest]
  names = ', '.join(facts.name for facts in behind)
  since = f'{behind[0].place} for {own.idle_seconds:.0f} s'
  if own.processes == 1:
    text = f'this process has been {since}'
  elif len(behind) < len(running):
    text = f'{names} {"has" if len(behind) == 1 else "have"} been {since}; the others wait for it'
  else:
    text = f'all have been {since}: {names}'
  return Verdict(text, exit_codes.LOST)
