"""A barrier at which no process waits for one that has failed."""

import itertools
from typing import Any

_numbers = itertools.count()


class PeerFailed(RuntimeError):  # noqa: N818 (it says what happened elsewhere)
  """Another process cannot come."""


class Barrier:
  """The barrier of the threads that write a checkpoint on several processes.

  A process whose write fails passes over the barriers of a complete write and goes on to a later
  one. With barriers that go by name, the others wait for it at the earlier one until they time out,
  in orbax after 20 minutes. Here all processes meet, wherever they are, and all fail if they are
  not at the same place.
  """

  def __init__(self, client: Any, process: int):
    """All processes make theirs in the same order; no two threads wait at one at the same time.

    Args:
      client: of jax.distributed, as `orbax.checkpoint.multihost.get_jax_distributed_client` has it.
      process: index of this one.
    """
    self._client = client
    self._process = process
    self._folder = f'het_plugin/barrier/{next(_numbers)}'
    self._meetings = 0
    self._failed = False

  def __call__(self, *, key: str, timeout_ms: int) -> None:
    """Waits until all processes have come.

    Args:
      key: the place.
      timeout_ms: how long to wait, milliseconds.

    Raises:
      PeerFailed: a process came to another place, now or before.
      jax.errors.JaxRuntimeError: a process did not come in time.
    """
    if self._failed:
      raise PeerFailed(f'A process has failed before {key}.')
    folder = f'{self._folder}/{self._meetings}'
    self._meetings += 1
    self._client.key_value_set(f'{folder}/{self._process}', key)
    self._client.wait_at_barrier(folder, timeout_ms)
    places = {place for _, place in self._client.key_value_dir_get(folder)}
    if self._process == 0 and self._meetings > 1:
      # All have read it: they are past the barrier that follows.
      self._client.key_value_delete(f'{self._folder}/{self._meetings - 2}')
    if places != {key}:
      self._failed = True
      raise PeerFailed(f'A process has failed: they are at {", ".join(sorted(places))}.')
