"""Turns SIGTERM and Ctrl-C into a checkpoint and a clean exit, in all processes at one step."""

import concurrent.futures
import enum
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from het_plugin.operations import ending

_log = logging.getLogger(__name__)

T = TypeVar('T')

_POLL_SECONDS = 0.2


class PreemptionNotice:
  """Watches for SIGTERM and SIGINT (Ctrl-C) while it is entered.

  With jax.distributed, its preemption service receives SIGTERM on any process and agrees with the
  others in `reached`; a Python handler would take the signal away from it. Without, a handler sets
  a flag. SIGINT counts as SIGTERM the first time; the second time the process ends at once.

  Python can set handlers in the main thread only, so a training in another thread is not watched.
  Where notices are nested, the inner one passes the request on to the outer when it is left: a
  study learns what was asked for at the end of a run, before it starts the next one.
  """

  def __init__(self):
    self._received = False
    self._num_calls = 0
    self._previous: dict[int, Any] = {}

  def __enter__(self) -> 'PreemptionNotice':
    if threading.current_thread() is threading.main_thread():
      numbers = [signal.SIGINT]
      if not jax.distributed.is_initialized():
        numbers.append(signal.SIGTERM)
      self._previous = {number: signal.signal(number, self._on_signal) for number in numbers}
    return self

  def __exit__(self, *exc_info) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)
      outer = getattr(handler, '__self__', None)
      if self._received and isinstance(outer, PreemptionNotice):
        outer.request()

  def _on_signal(self, signum: int, frame: object) -> None:
    del frame
    if signum == signal.SIGINT:
      if self._received:
        ending.flush()
        os._exit(128 + signum)
      _log.warning('Ctrl-C: saving and exiting after this step. Once more leaves at once, unsaved.')
      self.request()
    else:
      _log.warning('SIGTERM: saving and exiting after this step.')
    self._received = True

  def request(self) -> None:
    """Asks all processes to stop together, as SIGTERM to this one does; once is enough."""
    if jax.distributed.is_initialized() and not self._received:
      os.kill(os.getpid(), signal.SIGTERM)  # the service has no other way in
    self._received = True

  def reached(self) -> bool:
    """Whether to save and exit now; all processes call it equally often, and agree."""
    if not jax.distributed.is_initialized():
      return self._received
    # The service announces the highest count so far plus one, and is true at that count alone. Step
    # numbers would not do: those of a resumed run begin above one, so that it would never stop for
    # a signal before its first step, and they stand still in an evaluation.
    self._num_calls += 1
    return multihost_utils.reached_preemption_sync_point(self._num_calls)


class Interrupted(Exception):  # noqa: N818 (it is a notice, not an error)
  """The notice came before the end of the call, which goes on in its thread."""


class _State(enum.IntEnum):
  RUNNING = 0
  DONE = 1
  FAILED = 2


def call(fn: Callable[[], T], interrupted: Callable[[], bool]) -> T:
  """Calls `fn` in a thread and asks every 0.2 s whether to leave it.

  All processes call it, each with its `fn`, and return together. They ask `interrupted` equally
  often, and it must give all of them the same answer.

  Nothing can end the thread, which is a daemon. Where it is in C++ when Python ends, the process
  aborts: only `os._exit` ends it in good order.

  Args:
    fn: must not communicate with other processes on the devices: its thread does not keep to their
      order.
    interrupted: asked in the caller's thread, at least once.

  Returns:
    What `fn` returns.

  Raises:
    Interrupted: `interrupted` said so.
    RuntimeError: `fn` failed in another process. What it raises here is raised here.
  """
  if interrupted():
    raise Interrupted
  future = concurrent.futures.Future()
  # Python waits for the threads of an executor before it ends.
  threading.Thread(target=_fulfil, args=(future, fn), daemon=True).start()
  while True:
    concurrent.futures.wait([future], timeout=_POLL_SECONDS)
    state = _state(future)
    states = multihost_utils.process_allgather(np.int32(state))  # [processes]
    if state is _State.FAILED or (states == _State.DONE).all():
      return future.result()
    if (failed := states == _State.FAILED).any():
      raise RuntimeError(f'Process {np.argmax(failed)} failed; see its log.')
    if interrupted():
      raise Interrupted
    if state is _State.DONE:
      time.sleep(_POLL_SECONDS)  # others are not


def _fulfil(future: concurrent.futures.Future, fn: Callable[[], Any]) -> None:
  try:
    future.set_result(fn())
  except BaseException as error:
    future.set_exception(error)


def _state(future: concurrent.futures.Future) -> _State:
  if not future.done():
    return _State.RUNNING
  return _State.FAILED if future.exception() else _State.DONE
