"""What analyses of a trained run share: a function of some examples of a split."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from het_plugin import data
from het_plugin.config import trained_run

PyTree = Any


def per_example(
  run: trained_run.TrainedRun,
  compute: Callable[[PyTree, PyTree], PyTree],
  split: str,
  num_examples: int,
  batch_size: int,
) -> Iterator[PyTree]:
  """Results of the examples of a split of the run's task, a fixed random choice of them.

  Args:
    run: whose parameters and mesh are used.
    compute: (params, batch) -> arrays with a row an example; compiled.
    split: a split or a slice of one.
    num_examples: at most.
    batch_size: of the global batch; a multiple of the mesh's data axis.

  Yields:
    For each batch, numpy arrays [N, ...] of its examples.
  """
  partitioner = run.partitioner
  compute = partitioner.partition(compute, (run.param_specs, partitioner.data_partition_spec), None)
  cfg = data.one_pass(
    run.task,
    split,
    image_size=run.image_size,
    max_labels=run.max_labels,
    batch_size=batch_size,
    bounded=True,
  )
  left = num_examples
  for batch in data.get_dataset(cfg, partitioner.batch_rows(batch_size)):
    real = np.flatnonzero(batch['mask'] > 0)[:left]
    found = jax.device_get(compute(run.params, partitioner.shard_batch(batch, batch_size)))
    yield jax.tree.map(lambda x, real=real: x[real], found)
    left -= len(real)
    if not left:
      return
