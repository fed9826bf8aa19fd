"""Puts the next batch on the device while the step works on the current one."""

import concurrent.futures
import time
from collections.abc import Mapping
from typing import Any

import jax

from het_plugin.training import partitioning


class DevicePrefetcher:
  """Iterates over global batches on the device and prepares one batch ahead.

  Attributes:
    state: the iterator's state after the last batch that `next` returned, not after the batch in
      preparation: a run that resumes from it continues with the next example.
    wait_seconds: total time that callers have waited for batches.
  """

  def __init__(self, iterator: Any, partitioner: partitioning.PjitPartitioner, batch_size: int):
    """Starts to prepare the first batch.

    `iterator` yields this process's rows of each batch; `batch_size` counts the rows of all
    processes.
    """
    self._iterator = iterator
    self._partitioner = partitioner
    self._batch_size = batch_size
    self.state: Mapping[str, int] = iterator.get_state()
    self.wait_seconds = 0.0
    self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='prefetch')
    self._next = self._executor.submit(self._prepare)

  def _prepare(self) -> tuple[dict[str, jax.Array], Mapping[str, int]] | None:
    # A future cannot carry StopIteration through a generator, so the end is a value.
    batch = next(self._iterator, None)
    if batch is None:
      return None
    return self._partitioner.shard_batch(batch, self._batch_size), self._iterator.get_state()

  @property
  def num_corrupt_records(self) -> int:
    """Number of records among this process's rows that could not be read."""
    return len(getattr(self._iterator, 'corrupt_records', ()))

  def __iter__(self) -> 'DevicePrefetcher':
    return self

  def __next__(self) -> dict[str, jax.Array]:
    start = time.monotonic()
    prepared = self._next.result()
    self.wait_seconds += time.monotonic() - start
    if prepared is None:
      raise StopIteration
    batch, self.state = prepared
    self._next = self._executor.submit(self._prepare)
    return batch

  def __enter__(self) -> 'DevicePrefetcher':
    return self

  def __exit__(self, *exc_info) -> None:
    self._executor.shutdown(wait=True)  # waits for the batch in preparation, which is dropped
