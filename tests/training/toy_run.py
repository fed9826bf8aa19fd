"""A training run of the toy model."""

import functools
import json
from pathlib import Path

import jax
import numpy as np

from het_plugin.operations import operations
from het_plugin.training import checkpoints, partitioning
from het_plugin.training import step as step_lib
from het_plugin.training.train import train
from tests.training import toy

SEED = 3  # not the default, so that a test can tell it


@functools.cache
def model() -> toy.ToyModel:
  """That of all runs, see `Trainer`."""
  return toy.ToyModel()


@functools.cache  # when it is called: a process of several joins the others first
def partitioner() -> partitioning.PjitPartitioner:
  """4 x 2 devices."""
  return partitioning.PjitPartitioner(num_partitions=2)


class Trainer(step_lib.Trainer):
  """Has the programs of the first trainer of the same model, partitioner and settings.

  To make them again takes two thirds of a run's time. Tests of that have `step_lib.Trainer`.
  """

  _first: dict = {}

  def __init__(self, model, partitioner, train_state_axes, rng, **settings):
    super().__init__(model, partitioner, train_state_axes, rng, **settings)
    seed = jax.random.key_data(rng).tobytes()
    kind = (model, partitioner, seed, *sorted(settings.items()))
    self._traced, self._compiled, self._eval_step = self._first.setdefault(
      kind, ({}, {}, self._eval_step)
    )

  def trace_train(self, train_state, batch):
    shapes = str(jax.tree.map(lambda x: (x.shape, x.dtype), batch))
    if shapes not in self._traced:
      self._traced[shapes] = super().trace_train(train_state, batch)
    return self._traced[shapes]

  def compile_train(self, traced):
    if traced not in self._compiled:
      self._compiled[traced] = super().compile_train(traced), self._train_step
    num_flops, self._train_step = self._compiled[traced]
    return num_flops


def recording_trainer(path: Path):
  """A trainer class that appends the indices of every batch trained on, without padding, to a
  file.
  """

  class RecordingTrainer(Trainer):
    def train_step(self, train_state, batch):
      with path.open('a') as file:
        file.write(' '.join(map(str, np.asarray(batch['index'])[batch['mask'] > 0])) + '\n')
      return super().train_step(train_state, batch)

  return RecordingTrainer


def run(model_dir: Path, **overrides):
  """Trains 12 steps of 16 examples on a 4 x 2 mesh; keywords override arguments of `train`."""
  settings = {
    'model': model(),
    'trainer_cls': Trainer,
    'random_seed': SEED,
    'train_dataset_cfg': toy.ToyDatasetConfig(16),
    'train_eval_dataset_cfg': toy.ToyDatasetConfig(16, 'toy_eval', num_examples=20),
    'checkpoint_cfg': checkpoints.CheckpointConfig(checkpoints.SaveCheckpointConfig(period=4)),
    'partitioner': partitioner(),
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
