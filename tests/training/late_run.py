"""A process of two that come to their collective operations further apart than Gloo allows."""

import sys
import time

import jax
import numpy as np

from het_plugin.training import partitioning, processes

LATE_SECONDS = 32  # Gloo waits 30


def main(address: str, process: str) -> None:
  jax.distributed.initialize(address, num_processes=2, process_id=int(process))
  partitioner = partitioning.PjitPartitioner(num_partitions=2)

  def mean(x: jax.Array) -> jax.Array:
    if process == '1':
      time.sleep(LATE_SECONDS)  # for tracing, as for a compilation that process 0 has in its cache
    return x.mean()

  rows = partitioner.batch_rows(8)
  x = partitioner.shard_batch({'x': rows.astype(np.float32)}, 8)['x']
  found = partitioner.partition(mean, partitioner.data_partition_spec, None)(x)
  texts = processes.gather(f'mean {found}')
  print(texts, file=sys.stderr)


if __name__ == '__main__':
  main(*sys.argv[1:])
