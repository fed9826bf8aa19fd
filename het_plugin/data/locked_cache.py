"""A cache that computes each result once, also with many threads."""

import functools
import threading
from collections.abc import Callable


def locked_cache(function: Callable) -> Callable:
  """functools.cache with a lock: without it, simultaneous calls would all compute the result."""
  cached = functools.cache(function)
  lock = threading.Lock()

  @functools.wraps(function)
  def call(*args):
    with lock:
      return cached(*args)

  return call
