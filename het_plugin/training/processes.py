"""Collective operations of the processes of a run, in the training thread."""

import itertools
from collections.abc import Callable, Mapping

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from het_plugin.training import exit_codes

_MAX_BYTES = 4096  # per message: all processes must know its size before they receive it
# JAX ends a wait for a lost process, and the observer of a run a wait for one that is stuck.
_MEET_SECONDS = 24 * 3600
_meetings = itertools.count()
_RETURNED = 'returned '  # prefix of a text that is not an error


def meet() -> None:
  """Waits until all processes are here, however long the others take.

  On CPU, a collective operation fails if a process comes to it 30 seconds after another one. After
  a compilation they may well be further apart: process 0 alone finds the program in the cache.
  """
  if jax.process_count() > 1:
    client = ocp.multihost.get_jax_distributed_client()
    client.wait_at_barrier(f'het_plugin/meeting/{next(_meetings)}', 1000 * _MEET_SECONDS)


def in_the_first(fn: Callable[[], str | None]) -> str:
  """Calls `fn` on process 0; all processes call this, and get the text that it returns, or ''.

  An error of a setting (`exit_codes.SETTING_ERRORS`) becomes a ValueError on all of them.
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
  """The texts of all processes by their index, without empty ones.

  Texts are cut to 4096 bytes.
  """
  if jax.process_count() == 1:
    return {0: text} if text else {}
  meet()
  content = text.encode()[:_MAX_BYTES].ljust(_MAX_BYTES, b'\0')
  rows = np.asarray(multihost_utils.process_allgather(np.frombuffer(content, np.uint8)))
  texts = (row.tobytes().rstrip(b'\0').decode(errors='ignore') for row in rows)
  return {index: text for index, text in enumerate(texts) if text}


def as_one(texts: Mapping[int, str]) -> str:
  """Gathered texts in one line, without repetitions."""
  first: dict[str, int] = {}
  for index, text in texts.items():
    first.setdefault(text, index)
  if len(first) == 1:
    return next(iter(first))
  return '; '.join(f'process {index}: {text}' for text, index in first.items())
