"""A process of a run whose steps take a tenth of a second, as `launch.local` starts it."""

import os
import sys
import time
from pathlib import Path

import jax

from het_plugin.system import distributed
from het_plugin.training import actions, partitioning
from tests.training import toy_run

TOTAL_STEPS = 60


class Slow(actions.BaseAction):
  def run(self, train_state, metrics_by_task):
    time.sleep(0.1)
    return False


def main(model_dir: str) -> None:
  jax.distributed.initialize(**distributed.explicit_settings(os.environ))
  with distributed.leaving():  # as the mains do
    toy_run.run(
      Path(model_dir),
      total_steps=TOTAL_STEPS,
      eval_period=TOTAL_STEPS,
      partitioner=partitioning.PjitPartitioner(num_partitions=2),
      actions={'TRAIN': [Slow()]},
    )


if __name__ == '__main__':
  main(*sys.argv[1:])
