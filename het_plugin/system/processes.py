"""Operations that all processes of a run call, in the training thread and in the same order."""

import itertools
from collections.abc import Callable, Mapping

import jax
import orbax.checkpoint as ocp

from het_plugin.system import exit_codes

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

  They go through the coordination service. A collective operation of the devices would leave
  threads behind that a process waits for when it ends, on CPU for ever if the other has ended.
  """
  if jax.process_count() == 1:
    return {0: text} if text else {}
  return exchange(f'het_plugin/texts/{next(_meetings)}', text, 1000 * _MEET_SECONDS)


def exchange(place: str, text: str, timeout_ms: int) -> dict[int, str]:
  """`gather` of several processes at a place that no others use, from any thread."""
  client = ocp.multihost.get_jax_distributed_client()
  if text:
    client.key_value_set(f'{place}/{jax.process_index()}', text)
  client.wait_at_barrier(place, timeout_ms)
  texts = {int(key.rpartition('/')[2]): x for key, x in client.key_value_dir_get(place)}
  return dict(sorted(texts.items()))


def as_one(texts: Mapping[int, str]) -> str:
  """Gathered texts in one line, without repetitions."""
  first: dict[str, int] = {}
  for index, text in texts.items():
    first.setdefault(text, index)
  if len(first) == 1:
    return next(iter(first))
  return '; '.join(f'process {index}: {text}' for text, index in first.items())
