"""The one thread that watches a run: every process has one, and ends when another process is lost
or its own progress stops.

The thread writes the facts of its process. Process 0 watches all, and all watch process 0, whose
verdict they follow: a run of 256 hosts reads two files per host and beat.
"""

import concurrent.futures
import dataclasses
import functools
import logging
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping

import jax
from etils import epath

from het_plugin.operations import ending, facts, peers
from het_plugin.operations.facts import DONE, FAILED, PREEMPTED, RUNNING
from het_plugin.operations.peers import Limits, Peer, Verdict
from het_plugin.operations.run_clock import RunClock
from het_plugin.training import exit_codes

_log = logging.getLogger(__name__)

# Between beats; less where the timeout is short. Object stores allow one write per second.
PERIOD_SECONDS = 5.0
_BEATS_PER_TIMEOUT = 10
# A process whose connection broke too is lost after this many missed beats.
_BEATS_OF_A_LOST_CONNECTION = 3
# A machine of a run of several processes may stand still for this long and go on.
_STANDSTILL_SECONDS = 300
_MESSAGE_LENGTH = 500
_READERS = 16


class Heartbeat:
  """Beats and watches in a thread, from `start` to `end`.

  Attributes:
    failure: the error that this process has failed with; None as long as it has not.
  """

  def __init__(
    self,
    attempt: epath.PathLike,
    clock: RunClock,
    total_steps: int,
    limits: Limits,
    tasks: Mapping[str, Callable[[], None]],
  ):
    """Touches no file yet.

    Args:
      attempt: the folder of this start of the run.
      clock: what the training thread does.
      total_steps: where the run ends.
      limits: how long to wait for other processes and for progress.
      tasks: called at each beat after the facts are written, by what a failure would take away.
    """
    self.failure: BaseException | None = None
    self._attempt = attempt
    self._clock = clock
    self._limits = limits
    self._tasks = tasks
    self._period = min(PERIOD_SECONDS, limits.heartbeat_timeout_seconds / _BEATS_PER_TIMEOUT)
    now = time.time()
    self._now = facts.Facts(
      process=jax.process_index(),
      processes=jax.process_count(),
      host=socket.gethostname(),
      pid=os.getpid(),
      began=now - sum(clock.snapshot().seconds.values()),
      time=now,
      total_steps=total_steps,
    )
    self._lock = threading.Lock()  # of _now and the file
    self._failing: set[str] = set()  # tasks
    self._peers: dict[int, Peer] = {}
    if self._now.processes > 1:
      numbers = range(1, self._now.processes) if self._now.process == 0 else [0]
      self._peers = {number: Peer() for number in numbers}
    self._lost_connection = threading.Event()
    self._over = threading.Event()
    self._thread = threading.Thread(target=self._run, name='heartbeat', daemon=True)

  def now(self) -> facts.Facts:
    """The facts as they are now."""
    return self._update()

  # In the training thread.

  def start(self) -> None:
    """Writes the first facts and begins to watch.

    Raises:
      OSError: they cannot be written.
    """
    facts.write(self._attempt, self._update())
    self._readers = concurrent.futures.ThreadPoolExecutor(_READERS, 'heartbeat_reader')
    self._deadline = ending.Deadline()
    self._move_deadline()
    if self._now.processes > 1:
      self._restore_abort = ending.on_abort(self._on_abort)
    self._thread.start()

  def end(self, error: BaseException | None) -> None:
    """Stops, and says how the process ended."""
    self.fail(error)
    self._over.set()
    self._thread.join()  # which may be about to end the process
    if self._now.state == RUNNING:
      preempted = isinstance(error, exit_codes.Preempted)
      self._set(
        state=PREEMPTED if preempted else DONE,
        message=f'SIGTERM; step {error.step} is saved' if preempted else '',
        exit_code=exit_codes.of(error),
      )
    self._beat()
    self._readers.shutdown()
    self._deadline.cancel()
    if self._now.processes > 1:
      self._restore_abort()

  def fail(self, error: BaseException | None) -> None:
    """Tells the others of an exception, before anything is closed, which can take long.

    Where the exception comes of losing another process, it first waits for who that was.
    """
    code = exit_codes.of(error)
    if code in (0, exit_codes.PREEMPTED) or self._now.state != RUNNING:
      return
    if self._now.processes > 1 and exit_codes.is_lost_connection(error):
      self._lost_connection.set()
      self._thread.join(self._patience_after_a_lost_connection)
    self.failure = error
    text = ' '.join(''.join(traceback.format_exception_only(error)).split())[:_MESSAGE_LENGTH]
    if self._now.processes > 1:
      text = f'{self._now.name} failed: {text}'
    self._set(state=FAILED, message=text, exit_code=code)
    self._beat()

  # In the thread of the heartbeat.

  def _run(self) -> None:
    before, stalled, ticks, failing = time.monotonic(), 0.0, 0, 0.0
    while not self._over.wait(self._period):
      # A machine that stood still has not watched meanwhile.
      now = time.monotonic()
      seconds, before = min(now - before, 2 * self._period), now
      self._move_deadline()
      self._beat()
      self._look(seconds)
      moved = self._now.ticks != ticks
      stalled, ticks = 0.0 if moved else stalled + seconds, self._now.ticks
      if self._now.state == RUNNING:
        if found := self._judge(stalled):
          self._end_process(found)
      elif (failing := failing + seconds) >= self._time_to_leave:
        traceback.print_exception(self.failure)
        self._end_process(Verdict(self._now.message, self._now.exit_code))
      for name, task in self._tasks.items():
        self.attempt(name, task)

  def _look(self, seconds: float) -> None:
    paths = [facts.file(self._attempt, number) for number in self._peers]
    found = self._readers.map(facts.read, paths)
    for peer, theirs in zip(self._peers.values(), found, strict=True):
      peer.look(theirs, seconds)

  def _judge(self, stalled: float) -> Verdict | None:
    if found := peers.failed(self._peers):
      # An error that all raise alike: each process reports its own.
      self._over.wait(min(1, self._period))
      return found if self._now.state == RUNNING else None
    timeout = self._limits.heartbeat_timeout_seconds
    if self._lost_connection.is_set():
      timeout = min(timeout, _BEATS_OF_A_LOST_CONNECTION * self._period)
      for number in {*range(self._now.processes)} - {self._now.process}:
        self._peers.setdefault(number, Peer())
    if found := peers.silent(self._peers, timeout):
      return found
    # All stall at about the same time, and process 0 knows all of them.
    more = 0 if self._now.process == 0 else _BEATS_OF_A_LOST_CONNECTION * self._period
    if stalled >= self._limits.stall_timeout_seconds + more:
      return peers.stalled(self._now, self._peers)
    return None

  def _end_process(self, found: Verdict) -> None:
    def record() -> None:
      self._set(state=FAILED, message=found.message, exit_code=found.exit_code)
      self._beat()

    stacks = found.exit_code == exit_codes.LOST
    ending.end(found.message, found.exit_code, stacks, record)

  def _move_deadline(self) -> None:
    heartbeat, stall = dataclasses.astuple(self._limits)
    seconds = stall + heartbeat
    if self._now.processes > 1:  # the others do not wait for as long
      seconds = min(seconds, max(2 * heartbeat, _STANDSTILL_SECONDS))
    self._deadline.move(seconds)

  # In any thread.

  def attempt(self, name: str, task: Callable[[], None]) -> None:
    """Calls a task on which training does not depend. An error is logged the first time in a row
    only: a full disk stays full.
    """
    try:
      task()
    except Exception as error:
      if name not in self._failing:
        _log.warning('Training goes on without its %s: %s', name, error)
      self._failing.add(name)
    else:
      self._failing.discard(name)

  def _on_abort(self) -> None:
    """Called in a thread of C++, which usually has lost process 0. Leaves the verdict to the thread
    of the heartbeat, which then ends the process.
    """
    self._lost_connection.set()
    self._thread.join(self._patience_after_a_lost_connection)
    message = f'{self._now.name} failed: C++ code aborted it, see its log'
    self._set(state=FAILED, message=message, exit_code=exit_codes.LOST)
    self._beat()

  @property
  def _time_to_leave(self) -> float:
    """After a failure. A checkpoint that is being saved may wait for the others for ever."""
    heartbeat, stall = dataclasses.astuple(self._limits)
    return heartbeat if self._now.processes > 1 else stall

  @property
  def _patience_after_a_lost_connection(self) -> float:
    return (2 * _BEATS_OF_A_LOST_CONNECTION + 2) * self._period

  def _set(self, **changes: object) -> None:
    with self._lock:
      self._now = dataclasses.replace(self._now, **changes)

  def _update(self) -> facts.Facts:
    snapshot = dataclasses.asdict(self._clock.snapshot())
    self._set(time=time.time(), **snapshot)
    return self._now

  def _beat(self) -> None:
    self._update()
    with self._lock:
      self._now = dataclasses.replace(self._now, beat=self._now.beat + 1)
      self.attempt('signs of life', functools.partial(facts.write, self._attempt, self._now))
