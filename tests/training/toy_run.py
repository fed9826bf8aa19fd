"""A training run of the toy model."""

import json
from pathlib import Path

import jax
import numpy as np

from het_plugin.operations import operations
from het_plugin.training import checkpoints, partitioning
from het_plugin.training import step as step_lib
from het_plugin.training.train import train
from tests.training import toy


def recording_trainer(path: Path):
  """A trainer class that appends the indices of every batch trained on, without padding, to a
  file.
  """

  class RecordingTrainer(step_lib.Trainer):
    def train_step(self, train_state, batch):
      with path.open('a') as file:
        file.write(' '.join(map(str, np.asarray(batch['index'])[batch['mask'] > 0])) + '\n')
      return super().train_step(train_state, batch)

  return RecordingTrainer


def run(model_dir: Path, **overrides):
  """Trains 12 steps of 16 examples on a 4 x 2 mesh; keywords override arguments of `train`."""
  settings = {
    'model': toy.ToyModel(),
    'train_dataset_cfg': toy.ToyDatasetConfig(16),
    'train_eval_dataset_cfg': toy.ToyDatasetConfig(16, 'toy_eval', num_examples=20),
    'checkpoint_cfg': checkpoints.CheckpointConfig(checkpoints.SaveCheckpointConfig(period=4)),
    'partitioner': partitioning.PjitPartitioner(num_partitions=2),
    'model_dir': model_dir,
    'total_steps': 12,
    'eval_steps': 10,
    'eval_period': 6,
    'stats_period': 1,
    'get_dataset_fn': toy.get_dataset,
    'observer': operations.Operations(),
  }
  return train(**(settings | overrides))


def lines(path: Path) -> list[dict]:
  """The rows of a file of JSON lines; of a run's directory, its metrics."""
  path = path / 'metrics.jsonl' if path.is_dir() else path
  return [json.loads(line) for line in path.read_text().splitlines()]


def series(model_dir: Path, name: str) -> dict[int, float]:
  """{step: value} of a metric."""
  return {row['step']: row[name] for row in lines(model_dir) if name in row}


def assert_equal(a, b):
  """Two trees of arrays are the same bit for bit."""
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))
