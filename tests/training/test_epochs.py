"""Runs whose length is a number of epochs: each example equally often, a last batch that is not
full.
"""

import jax
import numpy as np

from het_plugin import data
from het_plugin.training import actions, checkpoint_reader, checkpoints
from tests.training import toy, toy_run

DIGITS = data.DatasetConfig('digits', {'image': 8, 'label': 1}, 'train', 256, num_epochs=1)


class Record(actions.BaseAction):
  """Keeps the training metrics of every step."""

  def __init__(self):
    self.values = []

  def run(self, train_state, metrics_by_task):
    self.values.append(metrics_by_task['train'])
    return False


def run(folder, cfg, get_dataset_fn, **overrides):
  """Trains to the end of `cfg` without evaluation; the metrics by step, and the last state."""
  record = Record()
  settings = {
    'train_dataset_cfg': cfg,
    'train_eval_dataset_cfg': None,
    'get_dataset_fn': get_dataset_fn,
    'trainer_cls': toy_run.recording_trainer(folder / 'seen.txt'),
    'actions': {'TRAIN': [record]},
  }
  _, state = toy_run.run(folder, **(settings | overrides))
  return record.values, state


def seen(folder):
  return [int(index) for index in (folder / 'seen.txt').read_text().split()]


def test_the_last_batch_weighs_its_real_rows(tmp_path):
  """20 examples in batches of 16: the second step's loss is the mean over four."""
  cfg = toy.ToyDatasetConfig(16, num_examples=20)
  model = toy.ToyModel()
  save = checkpoints.CheckpointConfig(checkpoints.SaveCheckpointConfig(period=1))
  run(tmp_path, cfg, toy.get_dataset, total_steps=1, checkpoint_cfg=save)
  params = checkpoint_reader.read_params(str(tmp_path))
  (values,), _ = run(tmp_path, cfg, toy.get_dataset, total_steps=2, checkpoint_cfg=save)
  assert seen(tmp_path) == list(range(20))

  rows = toy.make_batch(np.arange(16, 20), np.ones(4, bool))
  _, trainer_rng = jax.random.split(jax.random.key(0))
  loss, _ = model.loss_fn(params, rows, jax.random.fold_in(trainer_rng, 1))
  np.testing.assert_allclose(values['loss'], loss, rtol=1e-5)


def test_one_epoch_resumed_before_the_last_batch(tmp_path):
  """Of the last batch of 256 158 rows are real. In one pass the index is the record's number."""
  steps = data.total_steps(DIGITS)
  assert steps == 6
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  whole.mkdir()
  parts.mkdir()
  _, want = run(whole, DIGITS, data.get_dataset, total_steps=steps)
  for stop in (steps - 1, steps):
    _, resumed = run(parts, DIGITS, data.get_dataset, total_steps=stop)
  assert seen(whole) == seen(parts)
  assert sorted(seen(whole)) == list(range(1438))
  jax.tree.map(np.testing.assert_array_equal, resumed.params, want.params)
