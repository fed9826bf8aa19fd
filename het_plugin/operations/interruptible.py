"""A long call that a preemption need not wait for."""

import concurrent.futures
import enum
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from jax.experimental import multihost_utils

_POLL_SECONDS = 0.2

T = TypeVar('T')


class Interrupted(Exception):  # noqa: N818 (it is a notice, not an error)
  """The notice came before the end of the call, which goes on in its thread."""


class _State(enum.IntEnum):
  RUNNING = 0
  DONE = 1
  FAILED = 2


def call(fn: Callable[[], T], interrupted: Callable[[], bool]) -> T:
  """Calls `fn` in a thread and asks every 0.2 s whether to leave it.

  All processes call it, each with its `fn`, and return together. `interrupted` is asked equally
  often by all of them, and must give all of them the same answer.

  The thread is a daemon that nothing can end. Where it is in C++ when Python ends, the process
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
  # Not an executor's thread, for whose end Python waits before it ends itself.
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
