"""One pass over a split of a task."""

import contextlib
from collections.abc import Iterator
from typing import Any

from het_plugin.data import BatchIterator, get_dataset, one_pass
from het_plugin.training.partitioning import PjitPartitioner


@contextlib.contextmanager
def open_split(
  task: str,
  split: str,
  partitioner: PjitPartitioner,
  max_examples: int | None = None,
  *,
  name: str | None = None,
  bound: str = 'max_examples',
  whole: bool = False,
  **settings: Any,
) -> Iterator[tuple[BatchIterator, int]]:
  """Opens a split and closes it at the end of the block; reads no image yet.

  Args:
    task, split, partitioner: what is read, and which rows of a batch this process reads.
    max_examples: largest number of examples that will be read; None for all.
    name, bound: the split, and the setting that limits its examples, for the error.
    whole: reads all rows of each batch on every process.
    **settings: image_size, batch_size and others of `data.one_pass`.

  Yields:
    The batches, and their number of examples, at most `max_examples`.
  """
  config = one_pass(task, split, bounded=max_examples is not None, **settings)
  rows = None if whole else partitioner.batch_rows(config.batch_size)
  with contextlib.closing(get_dataset(config, rows)) as batches:
    sizes = [size for size in (batches.num_examples, max_examples) if size is not None]
    if not sizes:
      raise ValueError(f'{name or f"split {split!r} of {task!r}"} is endless: set {bound}')
    yield batches, min(sizes)
