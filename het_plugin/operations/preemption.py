"""Turns SIGTERM into a checkpoint and a clean exit, on all processes at the same step."""

import logging
import os
import signal
import threading

import jax
from jax.experimental import multihost_utils

_log = logging.getLogger(__name__)


class PreemptionNotice:
  """Watches for SIGTERM while it is entered.

  With jax.distributed, its preemption service receives the signal on any process and agrees with
  the others on a call of `reached`; a Python handler would take the signal away from it. Without, a
  handler sets a flag. Python can set handlers in the main thread only; training in another one is
  not watched. Of notices one in another the inner one passes the signal on to the outer when it is
  left: what was asked for at the end of a run is known to what would start the next.
  """

  def __init__(self):
    self._received = False
    self._num_calls = 0
    self._previous = None

  def __enter__(self) -> 'PreemptionNotice':
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not jax.distributed.is_initialized() and in_main_thread:
      self._previous = signal.signal(signal.SIGTERM, self._on_signal)
    return self

  def __exit__(self, *exc_info) -> None:
    if self._previous is not None:
      signal.signal(signal.SIGTERM, self._previous)
      outer = getattr(self._previous, '__self__', None)
      if self._received and isinstance(outer, PreemptionNotice):
        outer.request()

  def _on_signal(self, signum: int, frame: object) -> None:
    del signum, frame
    _log.warning('SIGTERM: saving and exiting after this step.')
    self._received = True

  def request(self) -> None:
    """Asks all processes to stop together, as a signal to this one does; once is enough."""
    if jax.distributed.is_initialized() and not self._received:
      os.kill(os.getpid(), signal.SIGTERM)  # the service has no other way in
    self._received = True

  def reached(self) -> bool:
    """Whether to save and exit now; all processes call it equally often, and agree."""
    if not jax.distributed.is_initialized():
      return self._received
    # The service announces the highest count so far plus one, and is true at that count alone. The
    # numbers of steps would not do: they begin above one in a resumed run, which then would never
    # stop for a signal that came before its first step, and stand still in an evaluation.
    self._num_calls += 1
    return multihost_utils.reached_preemption_sync_point(self._num_calls)
