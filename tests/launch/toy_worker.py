"""Training of the toy model as a worker of soak: `python -m tests.launch.toy_worker FOLDER ...`.

It starts in a third of the time that a run of gin takes, most of which TensorFlow needs: neither
its event files nor its data are wanted here.
"""

import ast
import sys
import types
from pathlib import Path

from absl import flags


class NoEventFiles:
  """In the place of clu's SummaryWriter, whose module imports TensorFlow."""

  def __init__(self, logdir):
    del logdir

  def __getattr__(self, name):
    if not name.startswith(('write', 'flush', 'close')):
      raise AttributeError(name)
    return lambda *args, **kwargs: None


NAME = 'clu.metric_writers.summary_writer'
sys.modules[NAME] = types.ModuleType(NAME)
sys.modules[NAME].SummaryWriter = NoEventFiles


def main(argv):
  del argv
  from het_plugin.training import checkpoints, partitioning
  from tests.training import toy_run

  pairs = (binding.split(' = ', 1) for binding in flags.FLAGS.gin_bindings)
  values = {name: ast.literal_eval(value) for name, value in pairs}
  distributed.initialize(watched=True)
  toy_run.run(
    Path(values['MODEL_DIR']),
    total_steps=values['TRAIN_STEPS'],
    eval_period=values['EVAL_PERIOD'],
    stats_period=values['STATS_PERIOD'],
    checkpoint_cfg=checkpoints.CheckpointConfig(
      checkpoints.SaveCheckpointConfig(period=values['SAVE_PERIOD'])
    ),
    partitioner=partitioning.PjitPartitioner(values['PjitPartitioner.num_partitions']),
  )


if __name__ == '__main__':
  from het_plugin.config import command_line, distributed
  from launch import recorder

  recorder.install(recorder.Recorder(Path(sys.argv.pop(1))))
  command_line.define_flags()
  distributed.define_flags()
  command_line.run(main)
