import dataclasses
import functools

import jax
import numpy as np
import pytest

from het_plugin.training import checkpoints, partitioning
from het_plugin.training.train_state import TrainState
from tests.training import toy

SAVE = checkpoints.SaveCheckpointConfig(period=1)
RECORD = {'evaluated': True}
OPTIMIZER = (
  toy.ToyModel().optimizer_def
)  # One for all states: trees of different ones do not compare.


@functools.cache
def partitioner(num_partitions: int) -> partitioning.PjitPartitioner:
  return partitioning.PjitPartitioner(num_partitions=num_partitions)


def make_state(num_partitions=2, seed=0, num_classes=toy.NUM_CLASSES) -> TrainState:
  model = toy.ToyModel(toy.Mlp(num_classes=num_classes), OPTIMIZER)

  def init():
    shapes = {'image': (8, toy.SIDE, toy.SIDE, 1)}
    variables = model.get_initial_variables(jax.random.key(seed), shapes)
    return TrainState.create(model.optimizer_def, variables)

  axes = partitioner(num_partitions).get_mesh_axes(jax.eval_shape(init))
  return partitioner(num_partitions).partition(init, (), axes)()


def abstract(state: TrainState) -> TrainState:
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def at_step(state: TrainState, step: int) -> TrainState:
  return state.replace(step=jax.device_put(np.int32(step), state.step.sharding))


def save(model_dir, *steps, state=None, cfg=SAVE):
  checkpointer = checkpoints.Checkpointer(model_dir, cfg)
  for step in steps:
    checkpointer.save(
      step, at_step(state or make_state(seed=step), step), {'position': 100 * step}, RECORD
    )
  checkpointer.close()


def restore(model_dir, target) -> checkpoints.Restored | None:
  checkpointer = checkpoints.Checkpointer(model_dir, SAVE)
  restored = checkpointer.restore(abstract(target))
  checkpointer.close()
  return restored


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


def truncate_arrays(checkpoint):
  """Damages the array data, as a full disk would."""
  files = [f for f in (checkpoint / 'state').rglob('d/*') if f.is_file()]
  assert files
  for file in files:
    file.write_bytes(file.read_bytes()[:10])


@pytest.mark.parametrize('num_partitions', [1, 2, 8])
def test_state_position_and_record_come_back_on_any_mesh(tmp_path, num_partitions):
  save(tmp_path, 3)
  target = make_state(num_partitions, seed=99)
  restored = restore(tmp_path, target)
  assert_equal(restored.train_state, at_step(make_state(seed=3), 3))
  jax.tree.map(lambda x, y: x.sharding == y.sharding or pytest.fail(), restored.train_state, target)
  assert restored.dataset_state == {'position': 300}
  assert restored.record == RECORD


def test_a_directory_without_checkpoints_starts_from_scratch(tmp_path):
  (tmp_path / 'metrics.jsonl').write_text('')
  assert restore(tmp_path, make_state()) is None


def test_keep(tmp_path):
  save(tmp_path, 1, 2, 3, cfg=dataclasses.replace(SAVE, keep=2))
  assert sorted(path.name for path in tmp_path.iterdir()) == ['checkpoint_2', 'checkpoint_3']


def test_saving_a_step_again_keeps_the_first(tmp_path):
  save(tmp_path, 1)
  save(tmp_path, 1, state=make_state(seed=5))
  assert_equal(restore(tmp_path, make_state()).train_state.params, make_state(seed=1).params)


def test_bfloat16_comes_back_as_float32(tmp_path):
  save(tmp_path, 1, cfg=dataclasses.replace(SAVE, dtype='bfloat16'))
  params = restore(tmp_path, make_state()).train_state.params
  assert params['head_kernel'].dtype == np.float32
  want = np.asarray(make_state(seed=1).params['head_kernel'])
  np.testing.assert_array_equal(params['head_kernel'], want.astype(jax.numpy.bfloat16))


def test_position_can_be_left_out(tmp_path):
  save(tmp_path, 1, cfg=dataclasses.replace(SAVE, save_dataset=False))
  assert restore(tmp_path, make_state()).dataset_state is None


@pytest.mark.parametrize(
  'damage',
  [
    truncate_arrays,
    lambda checkpoint: (checkpoint / 'record' / 'metadata').unlink(),
    lambda checkpoint: (checkpoint / 'state' / '_METADATA').write_text('{'),
  ],
  ids=['arrays', 'record', 'metadata'],
)
def test_unreadable_newest_is_reported_set_aside_and_passed_over(tmp_path, caplog, damage):
  save(tmp_path, 1, 2)
  damage(tmp_path / 'checkpoint_2')
  restored = restore(tmp_path, make_state())
  assert restored.dataset_state == {'position': 100}
  assert_equal(restored.train_state.params, make_state(seed=1).params)
  assert 'checkpoint_2, which cannot be read' in caplog.text
  assert (tmp_path / 'unreadable_checkpoint_2').exists()
  save(tmp_path, 2)  # The run goes on and saves this step again.
  assert restore(tmp_path, make_state()).dataset_state == {'position': 200}


def test_an_unfinished_save_is_no_checkpoint(tmp_path):
  save(tmp_path, 1)
  (tmp_path / 'checkpoint_2.orbax-checkpoint-tmp-7' / 'state').mkdir(parents=True)
  assert int(restore(tmp_path, make_state()).train_state.step) == 1


def test_a_run_whose_checkpoints_are_all_unreadable_does_not_start_over(tmp_path):
  save(tmp_path, 1)
  truncate_arrays(tmp_path / 'checkpoint_1')
  with pytest.raises(RuntimeError, match='None of the checkpoints'):
    restore(tmp_path, make_state())
  assert (tmp_path / 'checkpoint_1').exists()


def test_other_shapes_are_named_and_nothing_is_set_aside(tmp_path):
  save(tmp_path, 1)
  with pytest.raises(ValueError, match=r'params/head_bias with shape \(16,\), but .* \(32,\)'):
    restore(tmp_path, make_state(num_classes=32))
  assert (tmp_path / 'checkpoint_1').exists()


def warm(params, path, **settings):
  cfg = checkpoints.RestoreCheckpointConfig(path=str(path), **settings)
  return params | checkpoints.restore_params(cfg, abstract(params))


@pytest.mark.parametrize('mode, name', [('latest', ''), ('specific', 'checkpoint_2')])
def test_warm_start_takes_the_parameters_on_their_shardings(tmp_path, mode, name):
  save(tmp_path, 1, 2)
  params = make_state(4, seed=7).params
  read = warm(params, tmp_path / name, mode=mode)
  assert_equal(read, make_state(seed=2).params)
  assert read['head_kernel'].sharding == params['head_kernel'].sharding


def test_warm_start_with_new_parameters(tmp_path):
  save(tmp_path, 1)
  params = make_state(seed=7).params
  with pytest.raises(ValueError, match=r'has no factors, which this run has with shape \(16,\)'):
    warm(params | {'factors': params['head_bias']}, tmp_path)
  read = warm(params | {'factors': params['head_bias']}, tmp_path, fallback_to_scratch=True)
  assert_equal(read, make_state(seed=1).params | {'factors': params['head_bias']})


def test_warm_start_with_fewer_parameters(tmp_path):
  save(tmp_path, 1)
  params = {'head_kernel': make_state(seed=7).params['head_kernel']}
  with pytest.raises(ValueError, match='holds head_bias, which this run does not have'):
    warm(params, tmp_path)
  read = warm(params, tmp_path, fallback_to_scratch=True)
  assert_equal(read['head_kernel'], make_state(seed=1).params['head_kernel'])


def test_warm_start_for_other_classes_maps_names(tmp_path):
  save(tmp_path, 1)
  params = make_state(seed=7, num_classes=32).params
  params['trunk_kernel'] = params.pop('hidden_kernel')
  with pytest.raises(ValueError, match='head_bias with shape'):
    warm(params, tmp_path, fallback_to_scratch=True)
  mapping = ((r'head_.*', None), (r'trunk_(\w+)', r'hidden_\1'))
  read = warm(params, tmp_path, fallback_to_scratch=True, assignment_map=mapping)
  assert_equal(read['trunk_kernel'], make_state(seed=1).params['hidden_kernel'])
  assert_equal(read['head_kernel'], params['head_kernel'])


@pytest.mark.parametrize('mode', ['latest', 'specific'])
def test_warm_start_from_nothing_is_named(tmp_path, mode):
  with pytest.raises(ValueError, match=f"no checkpoint .*mode='{mode}'"):
    warm(make_state().params, tmp_path / 'absent', mode=mode)


@pytest.mark.parametrize(
  'make, words',
  [
    (lambda: checkpoints.SaveCheckpointConfig(period=0), 'period=0'),
    (lambda: checkpoints.SaveCheckpointConfig(period=1, keep=0), 'keep=0'),
    (lambda: checkpoints.SaveCheckpointConfig(period=1, dtype='int8'), "dtype='int8'"),
    (lambda: checkpoints.RestoreCheckpointConfig('x', mode='all'), "mode='all'"),
  ],
)
def test_bad_settings_are_named(make, words):
  with pytest.raises(ValueError, match=words):
    make()
