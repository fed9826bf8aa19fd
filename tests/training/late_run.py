"""Two processes run one program, and the second takes longer to compile it."""

import json
import time
from pathlib import Path

import jax
import numpy as np

from het_plugin.training import partitioning

# On CPU, Gloo ends a program that processes begin 30 seconds apart. With less, it is the order that
# tells whether they waited.
LATE_SECONDS = 5


def main(folder: Path) -> None:
  """Writes when this process had compiled the program, when it ran it, and its result."""
  process = jax.process_index()
  times = {}

  def mean(x: jax.Array) -> jax.Array:
    if process == 1:
      time.sleep(LATE_SECONDS)  # for tracing, as for a compilation that process 0 has in its cache
    times['compiled'] = time.time()
    return x.mean()

  partitioner = partitioning.PjitPartitioner(num_partitions=2)
  rows = partitioner.batch_rows(8)
  x = partitioner.shard_batch({'x': rows.astype(np.float32)}, 8)['x']
  program = partitioner.partition(mean, partitioner.data_partition_spec, None)
  jitted = program._jitted

  def run(*args):
    times['run'] = time.time()
    return jitted(*args)

  run.trace = jitted.trace
  program._jitted = run
  times['mean'] = float(program(x))
  (folder / f'late_{process}.json').write_text(json.dumps(times))
