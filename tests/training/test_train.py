import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from het_plugin.training import (
  actions,
  checkpoints,
  optimizers,
  partitioning,
  preemption,
  trainer,
)
from tests.training import toy, toy_run

ROOT = Path(__file__).resolve().parents[2]


def lines(model_dir):
  return [json.loads(line) for line in (model_dir / 'metrics.jsonl').read_text().splitlines()]


def series(model_dir, name):
  return {row['step']: row[name] for row in lines(model_dir) if name in row}


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
  """(directory, final state) of a run nothing happens to."""
  directory = tmp_path_factory.mktemp('uninterrupted')
  step, state = toy_run.run(directory)
  assert step == int(state.step) == 12
  return directory, state


def test_it_learns_and_writes(tmp_path):
  toy_run.run(
    tmp_path,
    total_steps=60,
    eval_period=30,
    stats_period=20,
    infer_eval_dataset_cfg=toy.ToyDatasetConfig(8, 'toy_infer', num_examples=30),
  )
  loss = series(tmp_path, 'train/loss')
  assert list(loss) == [20, 40, 60]
  assert loss[60] < 0.8 * loss[20]
  assert list(series(tmp_path, 'training_eval/toy_eval/loss')) == [30, 60]
  assert list(series(tmp_path, 'infer_eval/toy_infer/precision_at_1')) == [30, 60]
  assert all(value > 0 for value in series(tmp_path, 'train/timing/examples_per_second').values())
  assert any(path.name.startswith('events.out') for path in tmp_path.iterdir())


def test_evaluation_leaves_padding_rows_out(uninterrupted):
  """20 examples in two batches of 16: the mean over exactly these."""
  directory, state = uninterrupted
  batch = toy.make_batch(np.arange(20), np.ones(20, bool))
  loss, _ = toy.ToyModel().eval_fn(jax.device_get(state.params), batch)
  written = series(directory, 'training_eval/toy_eval/loss')[12]
  np.testing.assert_allclose(written, loss, rtol=1e-5)


def test_eval_steps_bounds_the_batches(tmp_path):
  _, state = toy_run.run(tmp_path, total_steps=1, eval_steps=1)
  batch = toy.make_batch(np.arange(16), np.ones(16, bool))
  loss, _ = toy.ToyModel().eval_fn(jax.device_get(state.params), batch)
  written = series(tmp_path, 'training_eval/toy_eval/loss')[1]
  np.testing.assert_allclose(written, loss, rtol=1e-5)


def test_sigterm_saves_and_a_relaunch_goes_on_as_if_nothing_had_happened(tmp_path, uninterrupted):
  """SIGTERM at step 6, off the checkpoint period of 4, with an evaluation due."""
  command = [sys.executable, '-m', 'tests.training.toy_run', str(tmp_path), '6']
  assert subprocess.run(command, cwd=ROOT).returncode == preemption.EXIT_CODE == 42
  assert (tmp_path / 'checkpoint_6').exists()
  assert 'training_eval/toy_eval/loss' not in lines(tmp_path)[-1]

  seen = tmp_path / 'seen.txt'
  assert len(seen.read_text().split()) == 6 * 16
  step, state = toy_run.run(tmp_path, trainer_cls=toy_run.recording_trainer(seen))

  directory, want = uninterrupted
  assert step == 12
  assert_equal(state.params, want.params)
  assert_equal(jax.tree.leaves(state.opt_state), jax.tree.leaves(want.opt_state))
  assert [int(i) for i in seen.read_text().split()] == list(range(12 * 16))
  for name in ('train/loss', 'train/gradient_norm', 'training_eval/toy_eval/loss'):
    assert series(tmp_path, name) == series(directory, name)
    assert len([row for row in lines(tmp_path) if name in row]) == len(series(tmp_path, name))


def test_sigterm_to_one_process_saves_on_all(tmp_path, uninterrupted):
  """2 processes of 4 devices; one process of 8 then finishes the run."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  env = os.environ | {'XLA_FLAGS': '--xla_force_host_platform_device_count=4'}
  command = [sys.executable, '-m', 'tests.training.toy_run', str(tmp_path), '3', address]
  processes = [subprocess.Popen([*command, str(i)], cwd=ROOT, env=env) for i in range(2)]
  try:
    assert [process.wait(timeout=120) for process in processes] == [42, 42]
  finally:
    for process in processes:
      process.kill()
  saved = max(int(path.name.split('_')[1]) for path in tmp_path.glob('checkpoint_*'))
  assert 3 < saved < 12
  _, state = toy_run.run(tmp_path)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), state.params, uninterrupted[1].params
  )
  assert list(series(tmp_path, 'train/loss')) == list(range(1, 13))


def test_a_crash_goes_back_to_the_last_checkpoint_without_repeating_lines(tmp_path, uninterrupted):
  class Crash(actions.BaseAction):
    def run(self, train_state, metrics_by_task):
      if int(train_state.step) == 7:
        raise RuntimeError('crash')
      return False

  with pytest.raises(RuntimeError, match='crash'):
    toy_run.run(tmp_path, actions={'TRAIN': [Crash()]})
  assert lines(tmp_path)[-1]['step'] == 7
  _, state = toy_run.run(tmp_path)
  assert_equal(state.params, uninterrupted[1].params)
  assert series(tmp_path, 'train/loss') == series(uninterrupted[0], 'train/loss')
  assert len([row for row in lines(tmp_path) if 'train/loss' in row]) == 12


def test_resuming_on_another_mesh(tmp_path, uninterrupted):
  toy_run.run(tmp_path, total_steps=6)
  four = partitioning.PjitPartitioner(num_partitions=4)
  _, state = toy_run.run(tmp_path, partitioner=four)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), state.params, uninterrupted[1].params
  )


def test_a_finished_run_does_nothing(tmp_path):
  _, first = toy_run.run(tmp_path, total_steps=4)
  before = lines(tmp_path)
  step, again = toy_run.run(tmp_path, total_steps=4)
  assert step == 4
  assert_equal(first.params, again.params)
  assert lines(tmp_path) == before
  with pytest.raises(ValueError, match='total_steps=3 is below the step of the checkpoint, 4'):
    toy_run.run(tmp_path, total_steps=3)


def test_a_configuration_that_changed_is_reported(tmp_path, caplog):
  toy_run.run(tmp_path, total_steps=4, config_fingerprint='a')
  toy_run.run(tmp_path, total_steps=4, config_fingerprint='a')
  assert 'configuration is not' not in caplog.text
  toy_run.run(tmp_path, total_steps=4, config_fingerprint='b')
  assert 'configuration is not' in caplog.text


def test_warm_start_takes_parameters_only(tmp_path, uninterrupted):
  directory, want = uninterrupted
  restore = checkpoints.RestoreCheckpointConfig(str(directory))
  model = toy.ToyModel()

  class Probe(actions.BaseAction):
    def run(self, train_state, metrics_by_task):
      self.change = metrics_by_task['train']['update_norm']
      return True

  probe = Probe()
  step, state = toy_run.run(
    tmp_path,
    model=model,
    checkpoint_cfg=checkpoints.CheckpointConfig(restore=restore),
    actions={'TRAIN': [probe]},
  )
  assert step == 1
  moved = jax.tree.map(lambda a, b: np.sum((np.asarray(a) - b) ** 2), state.params, want.params)
  np.testing.assert_allclose(np.sqrt(sum(jax.tree.leaves(moved))), probe.change, rtol=1e-3)
  assert int(state.opt_state[1][0].count) == 1


def test_nothing_is_saved_without_a_save_config(tmp_path):
  toy_run.run(tmp_path, total_steps=2, checkpoint_cfg=checkpoints.CheckpointConfig())
  assert not list(tmp_path.glob('checkpoint_*'))


class Stop(actions.BaseAction):
  """Stops at once and notes what it was given."""

  def setup(self, context):
    self.context = context

  def run(self, train_state, metrics_by_task):
    self.seen = metrics_by_task
    self.context.writer.write_scalars(int(train_state.step), {'stop/seen': 1.0})
    return True


@pytest.mark.parametrize(
  'mode, task, step',
  [('TRAIN', 'train', 1), ('TRAIN_EVAL', 'toy_eval', 6), ('INFER_EVAL', 'toy_infer', 6)],
)
def test_an_action_stops_the_run_which_is_saved(tmp_path, mode, task, step):
  action = Stop()
  last, _ = toy_run.run(
    tmp_path,
    actions={mode: [action]},
    infer_eval_dataset_cfg=toy.ToyDatasetConfig(8, 'toy_infer', num_examples=8),
    random_seed=3,
  )
  assert last == step
  assert list(action.seen) == [task]
  assert isinstance(action.seen[task]['loss'], float)
  assert (action.context.random_seed, action.context.model_dir) == (3, str(tmp_path))
  assert series(tmp_path, 'stop/seen') == {step: 1.0}
  assert (tmp_path / f'checkpoint_{step}').exists()


def test_parameters_that_are_not_finite_are_not_saved(tmp_path, caplog):
  def schedule(step):
    return jnp.where(step < 5, 1e-2, jnp.nan)

  last, _ = toy_run.run(
    tmp_path,
    model=toy.ToyModel(optimizer_def=optimizers.adamw(schedule)),
    actions={'TRAIN': [actions.TerminateOnNanAction()]},
  )
  assert last == 7  # The update of step 6 spoils the parameters, the loss of step 7 shows it.
  assert series(tmp_path, 'train/loss')[7] is None
  assert [path.name for path in tmp_path.glob('checkpoint_*')] == ['checkpoint_4']
  assert 'Step 7 is not saved' in caplog.text


def test_a_profile_of_the_steps_asked_for(tmp_path):
  toy_run.run(tmp_path, total_steps=3, profile_steps=(2, 3))
  assert list((tmp_path / 'profile').rglob('*.xplane.pb'))


def test_parameters_and_compile_time_are_logged(tmp_path, caplog):
  caplog.set_level('INFO')
  written = []
  model = toy.ToyModel()
  model.count_params = lambda params: 'exactly 1,073'
  toy_run.run(
    tmp_path,
    model=model,
    total_steps=1,
    summarize_config_fn=lambda directory, writer, step: written.append((directory, step)),
  )
  assert "head_kernel   | (32, 16) | float32 | 512  | (None, 'model')" in caplog.text
  assert 'exactly 1,073' in caplog.text
  assert 'Compiled the train step in' in caplog.text
  assert 'step 1/1 (100%)' in caplog.text
  assert written == [(str(tmp_path), 0)]


def _refuse(task):
  raise ValueError(f'K does not match {task}')


def _refusing_model():
  model = toy.ToyModel()
  model.validate = _refuse
  return model


ENDLESS = toy.ToyDatasetConfig(16, 'endless')


@pytest.mark.parametrize(
  'settings, words',
  [
    ({'total_steps': 0}, 'total_steps=0 must be at least 1'),
    ({'eval_steps': 0}, 'eval_steps=0'),
    ({'stats_period': 0}, 'stats_period=0'),
    ({'train_dataset_cfg': toy.ToyDatasetConfig(18)}, 'batch_size=18'),
    ({'train_eval_dataset_cfg': toy.ToyDatasetConfig(6)}, 'batch_size=6'),
    (
      {'trainer_cls': functools.partial(trainer.Trainer, num_microbatches=8)},
      'batch_size=16 must be a positive multiple of 32',
    ),
    ({'model': toy.ToyModel(toy.Mlp(num_classes=15))}, 'head_bias of shape'),
    ({'model': _refusing_model(), 'task_info_fn': lambda name: name}, 'K does not match toy'),
    ({'actions': {'EVAL': []}}, "'EVAL'"),
    ({'profile_steps': (3, 2)}, r'profile_steps=\(3, 2\)'),
    ({'infer_eval_dataset_cfg': ENDLESS}, "'endless' is endless"),
    ({'train_eval_dataset_cfg': toy.ToyDatasetConfig(16, 'empty', 0)}, "'empty' has no batch"),
  ],
)
def test_bad_settings_are_named_before_anything_is_compiled(tmp_path, monkeypatch, settings, words):
  monkeypatch.setattr(trainer.Trainer, 'compile_train', lambda *args: pytest.fail('compiled'))
  monkeypatch.setattr(checkpoints, 'Checkpointer', lambda *args: pytest.fail('opened model_dir'))
  with pytest.raises(ValueError, match=words):
    toy_run.run(tmp_path, **settings)
  assert not list(tmp_path.iterdir())


def test_a_training_set_that_ends_is_named(tmp_path):
  with pytest.raises(ValueError, match='ended after 2 of total_steps=12'):
    toy_run.run(tmp_path, train_dataset_cfg=toy.ToyDatasetConfig(16, num_examples=32))
