"""The one thread that watches a run: every process has one, and ends when another process is lost
or its own progress stops.

The thread writes the facts of its process. Process 0 watches all, and all watch process 0, whose
verdict they follow: a run of 256 hosts reads two files per host and beat.
"""

import concurrent.futures
import dataclasses
import functools
import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping

from etils import epath

from het_plugin.operations import ending, facts, peers
from het_plugin.operations.facts import DONE, FAILED, PREEMPTED, RUNNING
from het_plugin.operations.peers import Limits, Peer, Verdict
from het_plugin.operations.recorder import Recorder
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
    recorder: Recorder,
    limits: Limits,
    tasks: Mapping[str, Callable[[], None]],
  ):
    """Touches no file yet.

    Args:
      attempt: the folder of this start of the run.
      recorder: what the training thread does.
      limits: how long to wait for other processes and for progress.
      tasks: called at each beat after the facts are written, by what a failure would take away.
    """
    self.failure: BaseException | None = None
    self._attempt = attempt
    self._recorder = recorder
    self._limits = limits
    self._tasks = tasks
    self._period = min(PERIOD_SECONDS, limits.heartbeat_timeout_seconds / _BEATS_PER_TIMEOUT)
    self._patience = (2 * _BEATS_OF_A_LOST_CONNECTION + 2) * self._period
    self._writing = threading.Lock()
    self._failing: set[str] = set()  # tasks
    now = recorder.now()
    self._alone = now.processes == 1
    watched = range(1, now.processes) if now.process == 0 else [0]
    self._peers = {} if self._alone else {number: Peer() for number in watched}
    self._lost_connection = threading.Event()
    self._over = threading.Event()
    self._thread = threading.Thread(target=self._run, name='heartbeat', daemon=True)

  # In the training thread.

  def start(self) -> None:
    """Writes the first facts and begins to watch.

    Raises:
      OSError: they cannot be written.
    """
    facts.write(self._attempt, self._recorder.now())
    self._readers = concurrent.futures.ThreadPoolExecutor(_READERS, 'heartbeat_reader')
    self._deadline = ending.Deadline()
    self._move_deadline()
    if not self._alone:
      self._restore_abort = ending.on_abort(self._on_abort)
    self._thread.start()

  def end(self, error: BaseException | None) -> None:
    """Stops, and says how the process ended."""
    self.fail(error)
    self._over.set()
    self._thread.join()  # which may be about to end the process
    if self._recorder.now().state == RUNNING:
      state, message = DONE, ''
      if isinstance(error, exit_codes.Preempted):
        state = PREEMPTED
        message = f'SIGTERM; step {error.step} is saved' if error.step else 'SIGTERM'
      self._recorder.change(state=state, message=message, exit_code=exit_codes.of(error))
    self._beat()
    self._readers.shutdown()
    self._deadline.cancel()
    if not self._alone:
      self._restore_abort()

  def fail(self, error: BaseException | None) -> None:
    """Tells the others of an exception, before anything is closed, which can take long.

    Where the exception comes of losing another process, it first waits for who that was.
    """
    code = exit_codes.of(error)
    if code in (0, exit_codes.PREEMPTED) or self._recorder.now().state != RUNNING:
      return
    if not self._alone and exit_codes.is_lost_connection(error):
      self._lost_connection.set()
      self._thread.join(self._patience)
    self.failure = error
    text = ' '.join(''.join(traceback.format_exception_only(error)).split())[:_MESSAGE_LENGTH]
    self._failed(text if self._alone else f'{self._recorder.now().name} failed: {text}', code)

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
      own = self._recorder.now()
      stalled, ticks = 0.0 if own.ticks != ticks else stalled + seconds, own.ticks
      if own.state == RUNNING:
        if found := self._judge(own, stalled):
          self._end_process(found)
      elif (failing := failing + seconds) >= self._time_to_leave:
        traceback.print_exception(self.failure)
        self._end_process(Verdict(own.message, own.exit_code))
      for name, task in self._tasks.items():
        self.attempt(name, task)

  def _look(self, seconds: float) -> None:
    found = self._readers.map(facts.read, [facts.file(self._attempt, n) for n in self._peers])
    for peer, theirs in zip(self._peers.values(), found, strict=True):
      peer.look(theirs, seconds)

  def _judge(self, own: facts.Facts, stalled: float) -> Verdict | None:
    if found := peers.failed(self._peers):
      # An error that all raise alike: each process reports its own.
      self._over.wait(min(1, self._period))
      return found if self._recorder.now().state == RUNNING else None
    timeout = self._limits.heartbeat_timeout_seconds
    if self._lost_connection.is_set():
      timeout = min(timeout, _BEATS_OF_A_LOST_CONNECTION * self._period)
      for number in {*range(own.processes)} - {own.process}:
        self._peers.setdefault(number, Peer())
    if found := peers.silent(self._peers, timeout):
      return found
    # All stall at about the same time, and process 0 knows all of them.
    more = 0 if own.process == 0 else _BEATS_OF_A_LOST_CONNECTION * self._period
    if stalled >= self._limits.stall_timeout_seconds + more:
      return peers.stalled(own, self._peers)
    return None

  def _end_process(self, found: Verdict) -> None:
    record = functools.partial(self._failed, found.message, found.exit_code)
    stacks = found.exit_code == exit_codes.LOST
    ending.end(f'Error: {found.message}', found.exit_code, stacks, record)

  def _move_deadline(self) -> None:
    heartbeat, stall = dataclasses.astuple(self._limits)
    seconds = stall + heartbeat
    if not self._alone:  # the others do not wait for as long
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
    self._thread.join(self._patience)
    name = self._recorder.now().name
    self._failed(f'{name} failed: C++ code aborted it, see its log', exit_codes.LOST)

  @property
  def _time_to_leave(self) -> float:
    """After a failure. A checkpoint that is being saved may wait for the others for ever."""
    heartbeat, stall = dataclasses.astuple(self._limits)
    return stall if self._alone else heartbeat

  def _failed(self, message: str, exit_code: int) -> None:
    self._recorder.change(state=FAILED, message=message, exit_code=exit_code)
    self._beat()

  def _beat(self) -> None:
    with self._writing:
      self._recorder.change(beat=self._recorder.now().beat + 1)
      now = self._recorder.now()
      self.attempt('signs of life', functools.partial(facts.write, self._attempt, now))
