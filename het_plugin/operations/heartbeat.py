"""A thread that writes every few seconds what this process does, and ends it if it is stuck.

JAX itself notices when another process is lost (`system.distributed`).
"""

import faulthandler
import functools
import logging
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
from etils import epath

from het_plugin.operations import attempts
from het_plugin.operations.recorder import Recorder
from het_plugin.system import exit_codes, stopping

_log = logging.getLogger(__name__)

PERIOD_SECONDS = 5.0  # object stores allow one write per second
STALL_SECONDS = 1800.0
# A failed process of several may wait for the others while it closes its files.
_LEAVE_SECONDS = 60.0
_MESSAGE_LENGTH = 500


class Heartbeat:
  """Beats in a thread while the context lasts, and writes how the process ended.

  Nothing is written before `begin`. A start that ends with an error of a setting, before the step
  to continue from is known, leaves no attempt.
  """

  def __init__(self, recorder: Recorder, stall_seconds: float, poll: Callable[[], None]):
    """Touches no file yet.

    The process ends after `stall_seconds` without progress. `poll` is called at each beat after
    `begin`, when the facts are written.
    """
    self._attempt: epath.PathLike | None = None  # the folder of this start; None before `begin`
    self._recorder = recorder
    self._stall_seconds = stall_seconds
    self._poll = poll
    self._failing: set[str] = set()  # tasks
    self._failure: BaseException | None = None
    self._writing = threading.Lock()
    self._over = threading.Event()
    self._thread = threading.Thread(target=self._run, name='heartbeat', daemon=True)

  def __enter__(self) -> None:
    self._thread.start()

  def begin(self, attempt: epath.PathLike) -> None:
    """Writes facts from now on, in the folder of this start of the run; OSError if it cannot."""
    with self._writing:  # two writes at once would take each other's unfinished file
      self._attempt = attempt
      attempts.write(attempt, self._recorder.now())

  def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
    self.end(error)

  def end(self, error: BaseException | None) -> None:
    """Stops, and writes how the process ended."""
    refused = (
      exit_codes.of(error) == exit_codes.WRONG_SETTING and self._recorder.now().start_step is None
    )
    if not refused:
      self.fail(error)
    self._over.set()
    self._thread.join()
    if refused:
      if self._attempt is not None:
        attempts.remove(self._attempt, self._recorder.now().process)
      return
    if self._recorder.now().state == attempts.RUNNING:
      state = attempts.DONE
      message = ''
      if isinstance(error, exit_codes.Preempted):
        state = attempts.PREEMPTED
        message = f'SIGTERM; step {error.step} is saved' if error.step else 'SIGTERM'
      self._recorder.change(state=state, message=message, exit_code=exit_codes.of(error))
    self._beat()

  def fail(self, error: BaseException | None) -> None:
    """Writes why the run ends, before files are closed, which can take long."""
    code = exit_codes.of(error)
    if code in (0, exit_codes.PREEMPTED) or self._recorder.now().state != attempts.RUNNING:
      return
    self._failure = error
    text = ' '.join(''.join(traceback.format_exception_only(error)).split())[:_MESSAGE_LENGTH]
    if jax.process_count() > 1:
      text = f'{self._recorder.now().name} failed: {text}'
      self._stall_seconds = min(self._stall_seconds, _LEAVE_SECONDS)
    self._failed(text, code)

  def attempt(self, name: str, task: Callable[[], None]) -> None:
    """Calls a task that training does not depend on.

    Only the first of several errors in a row is logged, because a full disk stays full.
    """
    try:
      task()
    except Exception as error:
      if name not in self._failing:
        _log.warning('Training continues without its %s: %s', name, error)
      self._failing.add(name)
    else:
      self._failing.discard(name)

  def _run(self) -> None:
    before = time.monotonic()
    stalled = 0.0
    ticks = 0
    while not self._over.wait(PERIOD_SECONDS):
      # If the machine was suspended, nothing was watched meanwhile.
      now = time.monotonic()
      seconds = min(now - before, 2 * PERIOD_SECONDS)
      before = now
      self._beat()
      own = self._recorder.now()
      stalled = 0.0 if own.ticks != ticks else stalled + seconds
      ticks = own.ticks
      if stalled >= self._stall_seconds:
        self._end_process(own, stalled)
      if self._attempt is not None:
        self.attempt('profile', self._poll)

  def _end_process(self, own: attempts.Facts, stalled: float) -> None:
    message = own.message
    code = own.exit_code
    if own.state == attempts.RUNNING:
      message = f'{own.name} has been {own.place} for {stalled:.0f} s'
      code = exit_codes.LOST
    else:  # it has failed, and something does not let it close
      traceback.print_exception(self._failure)
    faulthandler.dump_traceback(2)  # file 2: sys.stderr may be something else
    record = functools.partial(self._failed, message, code)
    stopping.leave(f'Error: {message}', code, record)

  def _failed(self, message: str, exit_code: int) -> None:
    self._recorder.change(state=attempts.FAILED, message=message, exit_code=exit_code)
    self._beat()

  def _beat(self) -> None:
    with self._writing:
      if self._attempt is None:
        return
      self._recorder.change(beat=self._recorder.now().beat + 1)
      write = functools.partial(attempts.write, self._attempt, self._recorder.now())
      self.attempt('signs of life', write)
