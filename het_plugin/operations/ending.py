"""How a process ends from a thread other than the one that hangs: with stacks and one line."""

import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

_STDERR = 2  # the file: C functions cannot write to every sys.stderr
_END_SECONDS = 10  # the last record may hang too
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)

_ending = threading.Lock()


class Deadline:
  """Ends the process when nothing has moved the deadline for too long, even when no Python code can
  run because a C function holds the interpreter.

  It is the kernel's timer: SIGALRM writes the stacks of all threads to stderr and ends the process,
  with exit code 142. There is no deadline where SIGALRM is in use already.
  """

  def __init__(self):
    taken = signal.getsignal(signal.SIGALRM) != signal.SIG_DFL
    self._active = not taken and not signal.getitimer(signal.ITIMER_REAL)[0]
    if self._active:
      faulthandler.register(signal.SIGALRM, file=_STDERR, all_threads=True, chain=True)

  def move(self, seconds: float) -> None:
    """The process ends in so many seconds, unless this is called again before."""
    if self._active:
      signal.setitimer(signal.ITIMER_REAL, seconds)

  def cancel(self) -> None:
    if self._active:
      signal.setitimer(signal.ITIMER_REAL, 0)
      faulthandler.unregister(signal.SIGALRM)


def on_abort(callback: Callable[[], None]) -> Callable[[], None]:
  """Calls back when C++ code aborts, in its thread, before SIGABRT ends the process.

  JAX aborts a process that has lost the coordinator, and gives Python no other notice that works.
  A handler of abort() may do anything (C11, 7.14.1.1), unlike those of other signals.

  Returns:
    A function that restores the handler before.
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

  def restore(_handler: object = handler) -> None:  # keeps the handler alive until then
    set_handler(signal.SIGABRT, previous)

  return restore


def end(
  line: str, code: int, stacks: bool = False, record: Callable[[], None] = lambda: None
) -> NoReturn:
  """Ends the process at once: the main thread may be in C++ and never come back.

  Args:
    line: for people, on stderr.
    code: the exit code.
    stacks: whether to write the stacks of all threads first.
    record: called before the end. If it hangs or fails, the process ends all the same.
  """
  _ending.acquire()  # and never released: another thread that wants to end waits for this one
  timer = threading.Timer(_END_SECONDS, os._exit, (code,))
  timer.daemon = True
  timer.start()
  flush()
  if stacks:
    faulthandler.dump_traceback(_STDERR)
  with contextlib.suppress(OSError):  # its reader has gone
    print(line, file=sys.stderr, flush=True)
  try:
    record()
  finally:
    os._exit(code)


def flush() -> None:
  """Writes what has been logged and printed, which `os._exit` would lose."""
  for handler in logging.getLogger().handlers:
    with contextlib.suppress(OSError):  # a full disk
      handler.flush()
  with contextlib.suppress(OSError):  # its reader has gone
    sys.stdout.flush()
