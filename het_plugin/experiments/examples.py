"""What analyses of a trained run share: a function of some examples of a split."""

from collections.abc import Callable, Iterator
from typing import Any

import jax

from het_plugin import data
from het_plugin.config import trained_run
from het_plugin.evaluation.extraction import Rows, example_rows
from het_plugin.evaluation.splits import open_split

PyTree = Any


def per_example(
  run: trained_run.TrainedRun,
  compute: Callable[[PyTree, PyTree], dict[str, jax.Array]],
  split: str,
  num_examples: int,
  batch_size: int,
) -> Iterator[Rows]:
  """Results of the examples of a split of the run's task, a fixed random choice of them.

  Args:
    run: whose parameters and mesh are used.
    compute: (params, batch) -> {name: array with a row per example}; compiled.
    split: a split or a slice of one.
    num_examples: at most.
    batch_size: of the global batch; a multiple of the mesh's data axis.

  Yields:
    For each batch, numpy arrays [N, ...] of its examples.
  """
  partitioner = run.partitioner

  def columns(params, batch):
    return {'mask': batch['mask'], **compute(params, batch)}

  columns = partitioner.partition(columns, (run.param_specs, partitioner.data_partition_spec), None)
  config = data.one_pass(
    run.task,
    split,
    image_size=run.image_size,
    max_labels=run.max_labels,
    batch_size=batch_size,
    bounded=True,
  )
  with open_split(config, partitioner, num_examples) as (batches, _):
    outputs = (columns(run.params, partitioner.shard_batch(x, batch_size)) for x in batches)
    yield from example_rows(outputs, num_examples)
