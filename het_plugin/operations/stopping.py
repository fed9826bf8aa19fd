"""SIGTERM and Ctrl-C end a program with exit code 42, after a checkpoint where there is something
to save; a second Ctrl-C ends it at once with 130.

Python runs its handlers only when the main thread is back in Python, which a compilation takes
minutes for. Here a thread reads the signals from the pipe that Python's handler in C writes them to
(`signal.set_wakeup_fd`). Imports little: a main calls `install` before its other imports.

Of several processes, JAX's preemption service receives SIGTERM and lets all agree on a step.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from het_plugin.training import exit_codes

_log = logging.getLogger(__name__)

BEGAN = time.monotonic()  # the process, nearly: a main imports this first
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LEAVE_SECONDS = 10  # the last record may hang too

_requested = threading.Event()
_leaving = threading.Lock()
_installed = False
_num_calls = 0  # of `reached`
# Of the training in progress: whether it has something to save, and what to do before the end.
_training: tuple[Callable[[], bool], Callable[[], None]] | None = None


def install() -> None:
  """From now on a signal ends this program; for a main, in the main thread."""
  global _installed
  if not _installed:
    _installed = True
    _listen()


@contextlib.contextmanager
def handled(saves: Callable[[], bool], farewell: Callable[[], None]) -> Iterator[None]:
  """Lets a training notice signals, in `reached`.

  Without `install`, as in a notebook, the training alone ends and the handlers are put back.

  Args:
    saves: whether the training would save now. If not, a main that has installed ends at once.
    farewell: called before that.
  """
  global _training
  restore = None
  if not _installed:
    _requested.clear()
    if threading.current_thread() is threading.main_thread():  # others cannot set handlers
      restore = _listen()
  _training = saves, farewell
  try:
    yield
  finally:
    _training = None
    if restore is not None:
      restore()


def requested() -> bool:
  """Whether a signal has come to this process."""
  return _requested.is_set()


def reached() -> bool:
  """Whether to save and exit now; all processes call it equally often, and agree."""
  global _num_calls
  if not _is_distributed():
    return _requested.is_set()
  from jax.experimental import multihost_utils

  # The service announces the highest count so far plus one, and is true at that count alone. Step
  # numbers would not do: those of a resumed run begin above one, so that it would never stop for a
  # signal before its first step, and they stand still in an evaluation.
  _num_calls += 1
  return multihost_utils.reached_preemption_sync_point(_num_calls)


def leave(line: str, code: int, record: Callable[[], None] = lambda: None) -> NoReturn:
  """Ends the process at once: the main thread may be in C++ and never come back.

  Args:
    line: for people, on stderr.
    code: the exit code.
    record: called before the end. If it hangs or fails, the process ends all the same.
  """
  _leaving.acquire()  # and never released: another thread that wants to end waits for this one
  timer = threading.Timer(_LEAVE_SECONDS, os._exit, (code,))
  timer.daemon = True
  timer.start()
  flush()
  with contextlib.suppress(OSError):  # its reader has gone
    print(line, file=sys.stderr, flush=True)
  try:
    record()
  finally:
    os._exit(code)


def flush() -> None:
  """Writes what has been logged and printed, which `os._exit` would lose."""
  with contextlib.suppress(OSError):  # a full disk, or its reader has gone
    for handler in logging.getLogger().handlers:
      handler.flush()
    sys.stdout.flush()


def _listen() -> Callable[[], None]:
  """Takes the signals; returns what gives them back."""
  read, write = os.pipe()
  os.set_blocking(write, False)
  numbers = _SIGNALS[1:] if _is_distributed() else _SIGNALS  # the service has SIGTERM
  handlers = {number: signal.signal(number, lambda *_: _requested.set()) for number in numbers}
  wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
  thread = threading.Thread(target=_watch, args=(read,), name='signals', daemon=True)
  thread.start()

  def restore() -> None:
    signal.set_wakeup_fd(wakeup)
    for number, handler in handlers.items():
      signal.signal(number, handler)
    os.close(write)  # ends the thread
    thread.join()

  return restore


def _leave_to_parent() -> None:
  # A forked data worker must not write to the pipe of its parent, and must end when it is told to.
  if signal.set_wakeup_fd(-1) != -1:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


os.register_at_fork(after_in_child=_leave_to_parent)


def _watch(read: int) -> None:
  again = False
  with open(read, 'rb', buffering=0) as pipe:
    while numbers := pipe.read(1):
      if numbers[0] in _SIGNALS:
        _receive(numbers[0], again)
        again = True


def _receive(number: int, again: bool) -> None:
  is_interrupt = number == signal.SIGINT
  name = 'Ctrl-C' if is_interrupt else 'SIGTERM'
  if is_interrupt and again:
    leave('Ctrl-C again: leaving at once, unsaved.', 128 + number)
  saves, farewell = _training or (lambda: False, lambda: None)
  if _installed and not saves() and not _is_distributed():
    line = f'{name}: stopped. There was nothing new to save; the same command goes on.'
    leave(line, exit_codes.PREEMPTED, farewell)
  hint = ' Once more leaves at once, unsaved.' if is_interrupt else ''
  _log.warning('%s: saving and exiting after this step.%s', name, hint)
  _requested.set()
  if is_interrupt and _is_distributed():
    os.kill(os.getpid(), signal.SIGTERM)  # the service has no other way in


def _is_distributed() -> bool:
  jax = sys.modules.get('jax')
  return jax is not None and hasattr(jax, 'distributed') and jax.distributed.is_initialized()
