"""SIGTERM and Ctrl-C end a program with exit code 42, after a checkpoint if there is something to
save. A second Ctrl-C ends it at once with 130.

Python runs its handlers only when the main thread returns to Python, which takes minutes during a
compilation. Here a thread reads the signals from the pipe to which Python's C handler writes them
(`signal.set_wakeup_fd`). This module imports little, because a command calls `install` before its
other imports.

With several processes, JAX's preemption service lets all agree on a step to save. It hears of a
signal only if there is something to save: it answers at steps, and the first compilation may take
longer than a host that is drained has.
"""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import NoReturn

from het_plugin.system import exit_codes

_log = logging.getLogger(__name__)

BEGAN = time.monotonic()  # about the start of the process: a command imports this first
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LEAVE_SECONDS = 10  # writing the last record may hang as well

_requested = threading.Event()
_leaving = threading.Lock()
_installed = False
_num_calls = 0  # number of calls of `reached`
_agreed = False  # whether it has been true
# Of the training in progress: whether it has something to save, and a function to call before exit.
_training: tuple[Callable[[], bool], Callable[[], None]] | None = None
_tell_service: Callable[[int], None] | None = None  # its own handler of SIGTERM


def install() -> None:
  """Makes signals end this program; to be called by a main, in the main thread."""
  global _installed
  if not _installed:
    _installed = True
    _listen()


@contextlib.contextmanager
def before_service() -> Generator[None]:
  """Encloses `jax.distributed.initialize`, which replaces the handler of SIGTERM.

  A program that called `install` keeps its own, and tells the service.
  """
  global _tell_service
  before = _address_of_handler()
  yield
  address = _address_of_handler()
  if _installed and address != before:  # otherwise it is switched off
    _tell_service = ctypes.CFUNCTYPE(None, ctypes.c_int)(address)
    signal.signal(signal.SIGTERM, lambda *_: _requested.set())


def _address_of_handler() -> int:
  # A handler in C has no Python object. On Linux and macOS its address comes first in the struct.
  action = ctypes.create_string_buffer(512)
  ctypes.CDLL(None).sigaction(signal.SIGTERM, None, action)
  return ctypes.c_size_t.from_buffer(action).value


@contextlib.contextmanager
def handled(saves: Callable[[], bool], farewell: Callable[[], None]) -> Generator[None]:
  """Lets a training notice signals with `reached`.

  Without `install`, as in a notebook, only the training ends and the handlers are restored. A
  program that called `install` ends at once, after `farewell`, unless the training `saves` now.
  """
  global _training, _agreed
  restore = None
  if not _installed:
    _requested.clear()
    _agreed = False
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
  """Whether this process has received a signal."""
  return _requested.is_set()


def reached() -> bool:
  """Whether to save and exit now. All processes call it equally often and get the same answer."""
  global _num_calls
  if not exit_codes.is_distributed():
    return _requested.is_set()
  from jax.experimental import multihost_utils

  # The service announces the highest count so far plus one, and is true at that count only. Step
  # numbers cannot be used. A resumed run begins above one, so it would never stop for a signal
  # before its first step. And step numbers do not advance in an evaluation.
  _num_calls += 1
  return multihost_utils.reached_preemption_sync_point(_num_calls)


def agreed() -> bool:
  """`reached`, and true from then on."""
  global _agreed
  _agreed = _agreed or reached()
  return _agreed


def leave(line: str, code: int, record: Callable[[], None] = lambda: None) -> NoReturn:
  """Ends the process at once, because the main thread may never return from C++.

  `line` goes to stderr, and `record` is called. If it hangs or fails, the process ends as well.
  """
  _leaving.acquire()  # never released: another thread that wants to end waits for this one
  timer = threading.Timer(_LEAVE_SECONDS, os._exit, (code,))
  timer.daemon = True
  timer.start()
  flush()
  with contextlib.suppress(OSError):  # the reader has gone
    print(line, file=sys.stderr, flush=True)
  try:
    record()
  finally:
    os._exit(code)


def flush() -> None:
  """Writes what has been logged and printed, which `os._exit` would lose."""
  with contextlib.suppress(OSError):  # the disk is full, or the reader has gone
    for handler in logging.getLogger().handlers:
      handler.flush()
    sys.stdout.flush()


def _listen() -> Callable[[], None]:
  """Installs the handlers; returns a function that restores the old ones."""
  read, write = os.pipe()
  os.set_blocking(write, False)
  numbers = _SIGNALS[1:] if exit_codes.is_distributed() else _SIGNALS  # the service has SIGTERM
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
  # A forked data worker must not write to the pipe of its parent, and must end on a signal.
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
  if _installed and not saves():
    line = f'{name}: stopped. There was nothing new to save; the same command continues.'
    leave(line, exit_codes.PREEMPTED, farewell)
  hint = ' Once more leaves at once, unsaved.' if is_interrupt else ''
  _log.warning('%s: saving and exiting after this step.%s', name, hint)
  _requested.set()
  if _tell_service is not None:
    _tell_service(signal.SIGTERM)
  elif is_interrupt and exit_codes.is_distributed():
    os.kill(os.getpid(), signal.SIGTERM)  # the service has no other interface
