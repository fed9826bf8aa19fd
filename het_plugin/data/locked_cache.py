"""Results that are computed once, whichever threads ask for them first."""

import functools
import threading
from collections.abc import Callable


def locked_cache(function: Callable) -> Callable:
  """As functools.cache, under which threads that ask at the same time would all compute."""
  cached, lock = functools.cache(function), threading.Lock()

  @functools.wraps(function)
  def call(*args):
    with lock:
      return cached(*args)

  return call
