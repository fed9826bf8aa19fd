"""One pass over a split of a task."""

import contextlib
from collections.abc import Iterator

from het_plugin.data import BatchIterator, DatasetConfig, get_dataset
from het_plugin.training.partitioning import PjitPartitioner


@contextlib.contextmanager
def open_split(
  config: DatasetConfig,
  partitioner: PjitPartitioner,
  max_examples: int | None = None,
  *,
  name: str | None = None,
  bound: str = 'max_examples',
  whole: bool = False,
) -> Iterator[tuple[BatchIterator, int]]:
  """Opens a split and closes it at the end of the block.

  Args:
    config: made by `data.one_pass`.
    partitioner: says which rows of a batch this process reads.
    max_examples: largest number of examples that will be read; None for all.
    name: of the split, for the error.
    bound: the setting that limits the number of examples, for the error.
    whole: reads all rows of each batch on every process.

  Yields:
    The batches, and how many examples they have, at most `max_examples`.

  Raises:
    ValueError: the split does not exist, or is endless and `max_examples` is None.
  """
  rows = None if whole else partitioner.batch_rows(config.batch_size)
  with contextlib.closing(get_dataset(config, rows)) as batches:
    sizes = [size for size in (batches.num_examples, max_examples) if size is not None]
    if not sizes:
      name = name or f'split {config.split!r} of {config.mixture_or_task_name!r}'
      raise ValueError(f'{name} is endless: set {bound}')
    yield batches, min(sizes)
