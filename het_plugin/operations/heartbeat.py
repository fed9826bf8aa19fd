"""Signs of life: every process of a run writes some, and ends when another's, or its own progress,
stop.

Process 0 watches all, and all watch process 0, whose verdict they follow: a run of 256 hosts reads
two files a host and beat. verdict.py judges, last_words.py ends.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import os
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from types import TracebackType

import jax
from etils import epath

from het_plugin.operations import last_words, run_clock, verdict
from het_plugin.operations.verdict import Beat, Limits, Peer, Verdict
from het_plugin.training import exit_codes, observer, run_files

_log = logging.getLogger(__name__)

FOLDER = 'heartbeats'
# Between beats; less where the timeout is short. Object stores allow one write a second.
PERIOD_SECONDS = 5
_BEATS_PER_TIMEOUT = 10
# Beats missed by one that does not answer any more either: it need not be waited for as long.
_BEATS_OF_A_LOST_CONNECTION = 3
# How long a machine may stand still for a process of several to be there afterwards.
_STANDSTILL_SECONDS = 300
_MESSAGE_LENGTH = 500
_READERS = 16


def read(model_dir: epath.PathLike) -> list[Beat]:
  """The last beats of the processes of a run, by their numbers; what cannot be read is left out.

  Those of an earlier start that had more processes are left out too.
  """
  paths = epath.Path(model_dir, FOLDER).glob('process-*.json')
  beats = {beat.process: beat for beat in map(_read, paths) if beat is not None}
  if 0 not in beats:
    return []
  return [beats[i] for i in range(beats[0].processes) if i in beats]


class Heartbeat:
  """Beats and watches in a thread, from when it is entered until it is left."""

  def __init__(
    self,
    model_dir: epath.PathLike,
    clock: run_clock.RunClock,
    total_steps: int,
    limits: Limits | None = None,
  ):
    """Touches no file yet.

    Args:
      model_dir: gets a folder `heartbeats`.
      clock: what the training thread does.
      total_steps: where the run ends.
      limits: how long to wait for others and for progress; None for the defaults.
    """
    self._folder = epath.Path(model_dir) / FOLDER
    self._clock = clock
    self._limits = limits or Limits()
    self._period = min(PERIOD_SECONDS, self._limits.heartbeat_timeout_seconds / _BEATS_PER_TIMEOUT)
    self._processes = jax.process_count()
    self._now = Beat(
      process=jax.process_index(),
      processes=self._processes,
      host=socket.gethostname(),
      pid=os.getpid(),
      run=secrets.token_hex(8),
      beat=0,
      time=0.0,
      step=0,
      total_steps=total_steps,
      ticks=0,
      phase=observer.START,
      idle_seconds=0.0,
      state=verdict.RUNNING,
      message='',
      exit_code=None,
    )
    self._lock = threading.Lock()  # of _now and the file
    self._error: BaseException | None = None
    self._lost_connection = threading.Event()
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._run, name='heartbeat', daemon=True)
    self._reported: set[str] = set()
    self._stack = contextlib.ExitStack()

  # In the training thread.

  def __enter__(self) -> 'Heartbeat':
    """Begins; one process alone writes its first sign a moment later."""
    self._deadline = self._stack.enter_context(last_words.Deadline())
    self._readers = self._stack.enter_context(
      concurrent.futures.ThreadPoolExecutor(_READERS, 'heartbeat_reader')
    )
    if self._processes > 1:
      self._stack.enter_context(last_words.on_abort(self._on_abort))
      others = range(1, self._processes) if self._now.process == 0 else [0]
      self._peers = {number: Peer() for number in others}
      self._look(self._peers, 0)
      self._beat()
    else:
      self._peers = {}
    self._move_deadline()
    self._thread.start()
    return self

  def __exit__(
    self,
    error_type: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    """Says how it ended; an exception that would leave one process alone has been told before."""
    self.failing(error_type, error, trace)
    self._stop.set()
    self._thread.join()  # which may be about to end the process
    if self._now.state == verdict.RUNNING:
      state = verdict.PREEMPTED if isinstance(error, exit_codes.Preempted) else verdict.DONE
      self._set(state=state, exit_code=exit_codes.of(error))
    if self._processes > 1 or self._now.beat or self._now.state != verdict.FAILED:
      self._beat()
    self._stack.close()

  def failing(
    self,
    error_type: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    """Tells the others of an exception, before what it leaves is closed, which can take long.

    Of one that comes of losing another process, it first waits for who that was.
    """
    del error_type, trace
    code = exit_codes.of(error)
    if code in (0, exit_codes.PREEMPTED) or self._now.state != verdict.RUNNING:
      return
    if self._processes > 1 and exit_codes.is_lost_connection(error):
      self._lost_connection.set()
      self._thread.join(self._patience_after_a_lost_connection)
    self._error = error
    text = ''.join(traceback.format_exception_only(error))
    text = ' '.join(text.split())[:_MESSAGE_LENGTH]
    message = f'{self._now.name} failed: {text}'
    self._set(state=verdict.FAILED, message=message, exit_code=code)
    if self._processes > 1:
      self._beat()

  # In the thread of the heartbeat.

  def _run(self) -> None:
    before, stalled, ticks, failing = time.monotonic(), 0.0, 0, 0.0
    while not self._stop.wait(self._period):
      # A machine that stood still has not watched meanwhile.
      now = time.monotonic()
      seconds, before = min(now - before, 2 * self._period), now
      self._move_deadline()
      self._beat()
      self._look(self._peers, seconds)
      moved = self._now.ticks != ticks
      stalled, ticks = 0.0 if moved else stalled + seconds, self._now.ticks
      if self._now.state == verdict.RUNNING:
        if found := self._judge(stalled):
          self._end(found)
      elif (failing := failing + seconds) >= self._time_to_leave:
        traceback.print_exception(self._error)
        self._end(Verdict(self._now.message, self._now.exit_code))

  def _judge(self, stalled: float) -> Verdict | None:
    if found := verdict.of_failed(self._peers):
      # An error that all raise alike is each one's own.
      self._stop.wait(min(1, self._period))
      return found if self._now.state == verdict.RUNNING else None
    if found := verdict.of_replaced(self._peers):
      return found
    timeout = self._limits.heartbeat_timeout_seconds
    if self._lost_connection.is_set():
      timeout = min(timeout, _BEATS_OF_A_LOST_CONNECTION * self._period)
      for number in {*range(self._processes)} - {self._now.process}:
        self._peers.setdefault(number, Peer(known_alive=True))
    if found := verdict.of_silent(self._peers, timeout):
      return found
    # All stall at about the same time, and process 0 knows of all.
    more = 0 if self._now.process == 0 else _BEATS_OF_A_LOST_CONNECTION * self._period
    if stalled >= self._limits.stall_timeout_seconds + more:
      return verdict.of_stalled(self._now, self._peers)
    return None

  def _end(self, found: Verdict) -> None:
    def record() -> None:
      self._set(state=verdict.FAILED, message=found.message, exit_code=found.exit_code)
      self._beat()

    stacks = found.exit_code == exit_codes.LOST
    last_words.end(found.message, found.exit_code, stacks, record)

  def _look(self, peers: Mapping[int, Peer], seconds: float) -> None:
    beats = self._readers.map(_read, map(self._path, peers))
    for peer, beat in zip(peers.values(), beats, strict=True):
      peer.look(beat, seconds)

  def _move_deadline(self) -> None:
    heartbeat, stall = dataclasses.astuple(self._limits)
    seconds = stall + heartbeat
    if self._processes > 1:  # the others do not wait for as long
      seconds = min(seconds, max(2 * heartbeat, _STANDSTILL_SECONDS))
    self._deadline.move(seconds)

  # In any thread.

  def _on_abort(self) -> None:
    """In a thread of C++ that has lost process 0, as a rule: leaves the verdict to that of the
    heartbeat, which then ends the process.
    """
    self._lost_connection.set()
    self._thread.join(self._patience_after_a_lost_connection)
    message = f'{self._now.name} failed: C++ code aborted it, see its log'
    self._set(state=verdict.FAILED, message=message, exit_code=exit_codes.LOST)
    self._beat()

  @property
  def _time_to_leave(self) -> float:
    """After a failure; what is being saved may be for ever without the others."""
    heartbeat, stall = dataclasses.astuple(self._limits)
    return heartbeat if self._processes > 1 else stall

  @property
  def _patience_after_a_lost_connection(self) -> float:
    return (2 * _BEATS_OF_A_LOST_CONNECTION + 2) * self._period

  def _path(self, process: int) -> epath.Path:
    return self._folder / f'process-{process:05}.json'

  def _set(self, **changes: object) -> None:
    with self._lock:
      self._now = dataclasses.replace(self._now, **changes)

  def _beat(self) -> None:
    snapshot = self._clock.snapshot()
    with self._lock:
      self._now = dataclasses.replace(
        self._now,
        beat=self._now.beat + 1,
        time=time.time(),
        step=snapshot.step,
        ticks=snapshot.ticks,
        phase=snapshot.phase,
        idle_seconds=round(snapshot.idle_seconds, 3),
      )
      with self._reporting_once('write a heartbeat'):
        path = self._path(self._now.process)
        path.parent.mkdir(parents=True, exist_ok=True)
        run_files.write_json(path, dataclasses.asdict(self._now))

  @contextlib.contextmanager
  def _reporting_once(self, what: str) -> Iterator[None]:
    """Goes on after an error: training does not depend on this."""
    try:
      yield
    except Exception:
      if what not in self._reported:
        self._reported.add(what)
        _log.exception('Cannot %s; said once.', what)


def _read(path: epath.Path) -> Beat | None:
  try:
    return Beat(**json.loads(path.read_text()))
  except Exception:  # not there, not ours, or an error of an object store, which has its own kinds
    return None
