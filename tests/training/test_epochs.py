"""A run whose length is a number of epochs: each example equally often, a last batch that is not
full.
"""

import jax
import numpy as np

from het_plugin import data
from tests.training import toy_run

DIGITS = data.DatasetConfig('digits', {'image': 8, 'label': 1}, 'train', 256, num_epochs=1)


def run(folder, total_steps):
  """Trains without evaluation; the last state."""
  _, state = toy_run.run(
    folder,
    train_dataset_cfg=DIGITS,
    train_eval_dataset_cfg=None,
    get_dataset_fn=data.get_dataset,
    trainer_cls=toy_run.recording_trainer(folder / 'seen.txt'),
    total_steps=total_steps,
  )
  return state


def seen(folder):
  return [int(index) for index in (folder / 'seen.txt').read_text().split()]


def test_one_epoch_resumed_before_the_last_batch(tmp_path):
  """Of the last batch of 256 158 rows are real. In one pass the index is the record's number."""
  steps = data.total_steps(DIGITS)
  assert steps == 6
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  whole.mkdir()
  parts.mkdir()
  want = run(whole, steps)
  for stop in (steps - 1, steps):
    resumed = run(parts, stop)
  assert seen(whole) == seen(parts)
  assert sorted(seen(whole)) == list(range(1438))
  jax.tree.map(np.testing.assert_array_equal, resumed.params, want.params)
