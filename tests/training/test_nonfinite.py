"""Steps whose loss, gradient or update is not finite: what they change, leave and end."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from het_plugin.training import checkpoints, nonfinite, optimizers
from het_plugin.training import metrics as metrics_lib
from het_plugin.training import step as step_lib
from tests.training import toy, toy_run
from tests.training.toy_run import assert_equal

BAD = {3, 7}  # steps
NAN_ROWS = toy.ToyDatasetConfig(16, nan_rows=(37, 100))  # of steps 3 and 7


def run(model_dir, action, max_skipped=10, **settings):
  """12 steps; steps 3 and 7 are bad, and every second step has a checkpoint."""
  defaults = {
    'train_dataset_cfg': NAN_ROWS,
    'checkpoint_cfg': checkpoints.CheckpointConfig(checkpoints.SaveCheckpointConfig(period=2)),
    'nonfinite': nonfinite.NonFinitePolicy(action, max_skipped),
  }
  return toy_run.run(model_dir, **(defaults | settings))


def stopped(model_dir, *args, **settings):
  """Runs to the step that ends it, and returns that step."""
  with pytest.raises(nonfinite.NonFiniteStop) as error:
    run(model_dir, *args, **settings)
  assert error.value.code == nonfinite.EXIT_CODE == 3
  return error.value.step


def train_lines(model_dir):
  """{step: training metrics}, without the timings."""
  lines = [line for line in toy_run.lines(model_dir) if 'train/loss' in line]
  return {
    line['step']: {k: v for k, v in line.items() if not k.startswith('train/timing')}
    for line in lines
  }


def dump(model_dir, step):
  return json.loads((model_dir / 'nonfinite' / f'step_{step}.json').read_text())


def saved_steps(model_dir):
  return sorted(int(path.name.split('_')[1]) for path in model_dir.glob('checkpoint_*'))


def make_trainer(model, **settings):
  """(trainer that halts at no step, initial state as `train` makes it), on the mesh of toy_run."""
  init_rng, rng = jax.random.split(jax.random.key(toy_run.SEED))
  axes, state = toy.initial_state(model, toy_run.partitioner(), init_rng)
  settings['halt_at_nonfinite'] = False
  return toy_run.Trainer(model, toy_run.partitioner(), axes, rng, **settings), state


def shard(batch):
  return toy_run.partitioner().shard_batch(batch, 16)


@pytest.fixture(scope='module')
def skipped(tmp_path_factory):
  """(directory, final state) of a run that skips both steps, one step in flight as on a GPU."""
  directory = tmp_path_factory.mktemp('skipped')
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(metrics_lib, 'MAX_STEPS_IN_FLIGHT_CPU', 1)
    return directory, run(directory, 'skip', max_skipped=2)[1]


@pytest.fixture(scope='module')
def stopped_run(tmp_path_factory):
  directory = tmp_path_factory.mktemp('stopped')
  assert stopped(directory, 'stop', stats_period=5) == 3
  return directory


def test_skipping_is_as_if_the_batch_had_never_been(skipped):
  steps, state = make_trainer(toy_run.model())
  for step in range(1, 13):
    if step in BAD:
      state = state.replace(step=state.step + 1)
      continue
    index = np.arange(16 * (step - 1), 16 * step)
    batch = shard(toy.make_batch(index, np.ones(16)))
    if step == 1:
      steps.compile_train(steps.trace_train(state, batch))  # as a run does
    state, metrics = steps.train_step(state, batch)
    jax.block_until_ready(metrics)
  directory, got = skipped
  assert int(got.step) == 12 and int(got.opt_state[1][0].count) == 10
  assert_equal((got.params, got.opt_state), (state.params, state.opt_state))
  lines = train_lines(directory)
  assert {step for step, line in lines.items() if line['train/nonfinite_steps']} == BAD
  assert {step for step, line in lines.items() if line['train/loss'] is None} == BAD


def test_resuming_after_a_skip_changes_nothing_and_the_bound_is_of_the_whole_run(
  tmp_path, skipped, caplog
):
  run(tmp_path, 'skip', max_skipped=1, total_steps=4)
  assert '1 of at most 1 steps' in caplog.text
  assert stopped(tmp_path, 'skip', max_skipped=1) == 7
  assert 'NonFinitePolicy.max_skipped=1 ' in caplog.text
  assert saved_steps(tmp_path) == [2, 4, 6]
  _, state = run(tmp_path, 'skip', max_skipped=2)
  directory, want = skipped
  assert_equal((state.params, state.opt_state), (want.params, want.opt_state))
  assert train_lines(tmp_path) == train_lines(directory)
  assert dump(tmp_path, 7) == dump(directory, 7)


def test_what_a_stop_leaves(stopped_run):
  row = dump(stopped_run, 3)
  assert (row['step'], row['loss'], row['gradient_norm']) == (3, 'nan', 'nan')
  assert row['index'] == list(range(32, 48))
  assert {'loss', 'gradient_norm/head_kernel', 'update_norm'} <= set(row['not_finite'])
  assert row['param_norm'] > 0 and 'param_norm' not in row['not_finite']
  # Nothing of step 3 is saved or applied, and the metrics of the steps before are written.
  assert saved_steps(stopped_run) == [2]
  (line,) = train_lines(stopped_run).values()
  assert (line['step'], line['train/nonfinite_steps']) == (3, 1) and line['train/loss'] > 0


class BrokenModel(toy.ToyModel):
  """A pixel of 9 breaks the gradient for the bias, not the loss: sqrt has no derivative at 0."""

  def loss_fn(self, params, batch, dropout_rng):
    loss, metrics = super().loss_fn(params, batch, dropout_rng)
    is_broken = jnp.any(batch['image'] == 9)
    return loss + jnp.sqrt(
      jnp.where(is_broken, 0.0, 1.0) + 0.0 * params['head_bias'].sum()
    ), metrics


def test_only_the_step_number_changes():
  """A loss that is not finite, then a gradient and an update (the second, of a rate of NaN)."""
  rate = optimizers.adamw(lambda step: jnp.where(step == 1, jnp.nan, 1e-2))
  steps, state = make_trainer(BrokenModel(optimizer_def=rate), num_microbatches=2)
  cases = (
    (np.nan, ['param_norm', 'param_norm/head_bias']),
    (9.0, ['loss', 'gradient_norm/head_kernel', 'param_norm']),
    (None, None),  # a good step
    (None, ['loss', 'gradient_norm', 'param_norm']),
  )
  for step, (pixel, finite) in enumerate(cases, start=1):
    before = jax.device_get((state.params, state.opt_state))
    batch = toy.make_batch(np.arange(16), np.ones(16))
    if pixel is not None:
      batch['image'][5, 0, 0] = pixel
    state, metrics = steps.train_step(state, shard(batch))
    values = metrics_lib.compute_metrics(jax.device_get(metrics))
    assert int(state.step) == step
    assert metrics_lib.is_finite(metrics) == (finite is None)
    if finite is None:
      assert int(step_lib.num_updates(state)) == 1
      assert np.any(state.params['head_bias'] != before[0]['head_bias'])
    else:
      assert np.isnan(values['update_norm']) and all(np.isfinite(values[name]) for name in finite)
      assert_equal((state.params, state.opt_state), before)
