"""How a process ends from another thread than the one that hangs: with its stacks and one line."""

import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

_STDERR = 2  # the file: sys.stderr may be something that a C function cannot write to
_END_SECONDS = 10  # what is done last may hang too
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)

_ending = threading.Lock()


class Deadline:
  """Ends the process when nobody has moved the deadline for too long, even when no Python code can
  run because something holds the interpreter.

  The kernel's timer does it: SIGALRM writes the stacks of all threads to stderr and ends the
  process as that signal does, with exit code 142. Where somebody else uses SIGALRM there is no
  deadline.
  """

  def __init__(self):
    self._active = False

  def __enter__(self) -> 'Deadline':
    taken = signal.getsignal(signal.SIGALRM) != signal.SIG_DFL
    self._active = not taken and not signal.getitimer(signal.ITIMER_REAL)[0]
    if self._active:
      faulthandler.register(signal.SIGALRM, file=_STDERR, all_threads=True, chain=True)
    return self

  def __exit__(self, *exc_info) -> None:
    if self._active:
      signal.setitimer(signal.ITIMER_REAL, 0)
      faulthandler.unregister(signal.SIGALRM)

  def move(self, seconds: float) -> None:
    """The process ends in so many seconds, unless this is called again before."""
    if self._active:
      signal.setitimer(signal.ITIMER_REAL, seconds)


@contextlib.contextmanager
def on_abort(callback: Callable[[], None]) -> Iterator[None]:
  """Calls back when C++ code aborts, in its thread, before the process ends as SIGABRT does.

  JAX aborts a process that has lost the coordinator, and has no other notice for Python that works.
  A handler of abort() may do anything (C11, 7.14.1.1), unlike those of other signals.
  """

  own_pid = os.getpid()

  @_HANDLER
  def handler(_: int) -> None:
    try:
      if os.getpid() == own_pid:  # not in a data worker forked from this process
        callback()
    finally:
      faulthandler.dump_traceback(_STDERR)

  set_handler = ctypes.pythonapi.PyOS_setsig
  set_handler.restype, set_handler.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
  previous = set_handler(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
  try:
    yield
  finally:
    set_handler(signal.SIGABRT, previous)


def end(line: str, code: int, stacks: bool, record: Callable[[], None]) -> NoReturn:
  """Ends the process at once: the main thread may be in C++ and never come back.

  Args:
    line: for people, on stderr.
    code: the exit code.
    stacks: whether to write the stacks of all threads first.
    record: called before the end, which comes after a while even if it does not return.
  """
  _ending.acquire()  # and never released: another thread that wants to end waits for this one
  timer = threading.Timer(_END_SECONDS, os._exit, (code,))
  timer.daemon = True
  timer.start()
  flush()
  if stacks:
    faulthandler.dump_traceback(_STDERR)
  with contextlib.suppress(OSError):  # its reader has gone
    print(f'Error: {line}', file=sys.stderr, flush=True)
  record()
  os._exit(code)


def flush() -> None:
  """Writes out what has been logged and printed, which `os._exit` would lose."""
  for handler in logging.getLogger().handlers:
    handler.flush()
  with contextlib.suppress(OSError):  # its reader has gone
    sys.stdout.flush()
