"""What the processes of a run do together, in the training thread and at the same time."""

from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

from het_plugin.training import exit_codes

_MAX_BYTES = 4096  # of a message: all processes must know its size before they get it
_RETURNED = 'returned '  # begins a text that is no error


def in_the_first(fn: Callable[[], str | None]) -> str:
  """Calls `fn` in process 0. All processes call this, and return once `fn` has returned.

  Returns:
    The text that `fn` returned, in all processes; '' where it returned None.

  Raises:
    ValueError: in all processes, with its message, where `fn` raised an error of a setting
      (`exit_codes.SETTING_ERRORS`).
  """
  text = ''
  if jax.process_index() == 0:
    try:
      text = _RETURNED + (fn() or '')
    except exit_codes.SETTING_ERRORS as error:
      if jax.process_count() == 1:
        raise
      text = str(error) or type(error).__name__
  text = gather(text)[0]
  if not text.startswith(_RETURNED):
    raise ValueError(text)
  return text.removeprefix(_RETURNED)


def gather(text: str) -> dict[int, str]:
  """The texts of all processes by their index, without the empty ones.

  Of a longer text the first 4096 bytes arrive.
  """
  if jax.process_count() == 1:
    return {0: text} if text else {}
  content = text.encode()[:_MAX_BYTES].ljust(_MAX_BYTES, b'\0')
  rows = np.asarray(multihost_utils.process_allgather(np.frombuffer(content, np.uint8)))
  texts = (row.tobytes().rstrip(b'\0').decode(errors='ignore') for row in rows)
  return {index: text for index, text in enumerate(texts) if text}


def as_one(texts: Mapping[int, str]) -> str:
  """Gathered texts in one line, each once."""
  first: dict[str, int] = {}
  for index, text in texts.items():
    first.setdefault(text, index)
  if len(first) == 1:
    return next(iter(first))
  return '; '.join(f'process {index}: {text}' for text, index in first.items())
