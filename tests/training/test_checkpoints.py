import dataclasses
import errno
import functools
import json
import os
import shutil
import types

import jax
import numpy as np
import pytest
from orbax.checkpoint._src.path import atomicity_defaults

from het_plugin import weights
from het_plugin.training import (
  checkpoint_reader,
  checkpoints,
  class_names,
  partitioning,
  warm_start,
)
from het_plugin.training.state import TrainState
from tests.training import faulty_run, toy
from tests.training.toy_run import assert_equal

SAVE = checkpoints.SaveCheckpointConfig(period=1)
RECORD = {'evaluated': True}
OPTIMIZER = (
  toy.ToyModel().optimizer_def
)  # One for all states: trees of different ones do not compare.


@functools.cache
def partitioner(num_partitions: int) -> partitioning.PjitPartitioner:
  return partitioning.PjitPartitioner(num_partitions=num_partitions)


@functools.cache
def make_state(num_partitions=2, seed=0, num_classes=toy.NUM_CLASSES) -> TrainState:
  """Random parameters and zeros, placed as a run's initial state; nothing is compiled."""
  rng = np.random.default_rng(seed)
  model = toy.ToyModel(toy.Mlp(num_classes), OPTIMIZER)
  _, target = toy.placed_state(model, partitioner(num_partitions), jax.random.key(0))

  def place(x, value):
    return jax.device_put(value.astype(x.dtype), x.sharding)

  state = jax.tree.map(lambda x: place(x, np.zeros(x.shape)), target)
  params = {k: place(x, rng.normal(size=x.shape)) for k, x in target.params.items()}
  return state.replace(params=params)


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


def restore(model_dir, target) -> checkpoints.RunState | None:
  checkpointer = checkpoints.Checkpointer(model_dir, SAVE)
  restored = checkpointer.restore(abstract(target))
  checkpointer.close()
  return restored


def truncate_arrays(checkpoint):
  """Damages the array data, as a full disk would."""
  files = [f for f in (checkpoint / 'state').rglob('d/*') if f.is_file()]
  assert files
  for file in files:
    file.write_bytes(file.read_bytes()[:10])


@pytest.mark.parametrize('num_partitions', [2, 8])
def test_state_position_and_record_come_back_on_any_mesh(tmp_path, num_partitions):
  save(tmp_path, 3)
  target = make_state(num_partitions, seed=99)
  restored = restore(tmp_path, target)
  assert_equal(restored.train_state, at_step(make_state(seed=3), 3))
  jax.tree.map(lambda x, y: x.sharding == y.sharding or pytest.fail(), restored.train_state, target)
  assert restored.dataset_state == {'position': 300}
  assert restored.record == RECORD


def test_a_save_of_small_arrays_compiles_no_slices(tmp_path, caplog):
  """Of every shape on every device, as orbax would for equal shards."""
  with jax.log_compiles():
    save(tmp_path, 1)
  assert 'slice' not in caplog.text


@pytest.mark.slow
def test_arrays_of_half_the_size_without_the_input_position_of_the_newest_alone(tmp_path):
  save(tmp_path, 0, 1, cfg=dataclasses.replace(SAVE, keep=1, dtype='bfloat16', save_dataset=False))
  assert [path.name for path in tmp_path.iterdir()] == ['checkpoint_1']
  restored = restore(tmp_path, make_state())
  params = restored.train_state.params
  assert params['head_kernel'].dtype == np.float32
  want = np.asarray(make_state(seed=1).params['head_kernel'])
  np.testing.assert_array_equal(params['head_kernel'], want.astype(jax.numpy.bfloat16))
  assert restored.dataset_state is None


def change_record(checkpoint, change):
  path = checkpoint / 'record' / 'metadata'
  record = json.loads(path.read_text())
  change(record)
  path.write_text(json.dumps(record))


DAMAGES = {
  'no record': lambda checkpoint: shutil.rmtree(checkpoint / 'record'),
  'no checksums': lambda checkpoint: change_record(checkpoint, lambda r: r.pop('checksums')),
}


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_damaged_newest_checkpoint_is_reported_and_skipped(tmp_path, caplog, damage):
  save(tmp_path, 1, 2)
  DAMAGES[damage](tmp_path / 'checkpoint_2')
  restored = restore(tmp_path, make_state())
  assert restored.dataset_state == {'position': 100}
  assert_equal(restored.train_state.params, make_state(seed=1).params)
  assert 'Skipping' in caplog.text and 'checkpoint_2' in caplog.text


def test_damaged_checkpoints_are_set_aside_under_free_names(tmp_path):
  for _ in range(2):
    save(tmp_path, 1, 2)  # the run goes on and saves step 2 again
    assert restore(tmp_path, make_state()).dataset_state == {'position': 200}
    truncate_arrays(tmp_path / 'checkpoint_2')
    restore(tmp_path, make_state())
  aside = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith('unreadable'))
  assert aside == ['unreadable_checkpoint_2', 'unreadable_checkpoint_2.2']


WIDE = 1024  # classes, so many that tensorstore keeps arrays in files of their own, as in practice


@pytest.fixture(scope='module')
def two_wide(tmp_path_factory):
  """A directory with two checkpoints of arrays of 128 kB."""
  directory = tmp_path_factory.mktemp('wide')
  for step in (1, 2):
    save(directory, step, state=make_state(seed=step, num_classes=WIDE))
  return directory


def flip(path, bit):
  content = bytearray(path.read_bytes())
  content[bit // 8] ^= 1 << bit % 8
  path.write_bytes(content)


def assert_first_or_second(directory, caplog):
  """What is read is one of the checkpoints to the last bit: no damage goes unnoticed."""
  caplog.clear()
  restored = restore(directory, make_state(num_classes=WIDE))
  step = int(restored.train_state.step)
  assert restored.dataset_state == {'position': 100 * step}
  assert restored.record == RECORD
  assert_equal(restored.train_state, at_step(make_state(seed=step, num_classes=WIDE), step))
  assert ('Skipping' in caplog.text) == (step == 1)
  return step


@pytest.mark.slow
def test_a_flipped_bit_in_any_file_is_harmless_or_noticed(two_wide, tmp_path, caplog):
  random = np.random.default_rng(0)
  noticed = set()
  for path in sorted((two_wide / 'checkpoint_2').rglob('*')):
    if not path.is_file() or not path.stat().st_size:
      continue
    name = path.relative_to(two_wide)
    directory = shutil.copytree(two_wide, tmp_path / 'copy')
    flip(directory / name, random.integers(8 * path.stat().st_size))
    if assert_first_or_second(directory, caplog) == 1:
      noticed.add(name.parts[1])
    shutil.rmtree(directory)
  assert {'dataset', 'record', 'state'} <= noticed


def test_damage_that_every_reader_takes_for_data_is_named(two_wide, tmp_path, caplog):
  """Bits of the largest file, which holds the kernels' values as they are."""
  directory = shutil.copytree(two_wide, tmp_path / 'copy')
  files = [path for path in (directory / 'checkpoint_2').rglob('*') if path.is_file()]
  flip(max(files, key=lambda path: path.stat().st_size), 8 * 20_000)
  assert assert_first_or_second(directory, caplog) == 1
  assert '_kernel' in caplog.text
  aside = directory / 'unreadable_checkpoint_2'
  with pytest.raises(ValueError, match='unreadable_checkpoint_2 .*params/.*_kernel'):
    checkpoint_reader.read_params(aside)
  with pytest.raises(ValueError, match='checkpoint_2 .*params/.*_kernel'):
    warm(make_state(num_classes=WIDE).params, aside, mode='specific')
  checkpoint_reader.read_params(directory)
  whole = warm(make_state(num_classes=WIDE).params, two_wide / 'checkpoint_2')  # as errors advise
  assert whole.keys() == warm(make_state(num_classes=WIDE).params, two_wide).keys()
  renamed = two_wide.with_name('best')
  with pytest.raises(ValueError, match='best is a checkpoint, so its folder must be named check'):
    checkpoint_reader.step_of(renamed)


@pytest.fixture
def full_disk(monkeypatch):
  """Called, it lets what is saved from then on fail in the background."""
  return lambda: faulty_run.fill_disk(monkeypatch.setattr)


def test_a_save_that_fails_says_what_is_left(tmp_path, full_disk):
  save(tmp_path, 1)
  checkpointer = checkpoints.Checkpointer(tmp_path, SAVE)
  full_disk()
  checkpointer.save(2, at_step(make_state(seed=2), 2), {'position': 200}, RECORD)
  words = r'step 2 .*No space left on device\); .*checkpoint_1,'
  with pytest.raises(checkpoints.SaveFailed, match=words) as failure:
    checkpointer.wait_until_finished()
  assert failure.value.code == str(failure.value)  # which Python prints, and exits with code 1
  checkpointer.raise_failure()  # it has been said
  checkpointer.close()
  assert checkpoint_reader.find(tmp_path).name == 'checkpoint_1'
  assert restore(tmp_path, make_state()).dataset_state == {'position': 100}


def test_what_must_be_on_disk_first_comes_first(tmp_path):
  def flush():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), 'metrics.jsonl')

  checkpointer = checkpoints.Checkpointer(tmp_path, SAVE)
  with pytest.raises(checkpoints.SaveFailed, match="No space left on device: 'metrics.jsonl'"):
    checkpointer.save(2, at_step(make_state(), 2), {'position': 200}, RECORD, flush=flush)
  checkpointer.close()
  assert not list(tmp_path.iterdir())


def test_an_unfinished_save_is_no_checkpoint(tmp_path):
  assert restore(tmp_path, make_state()) is None
  save(tmp_path, 1)
  (tmp_path / 'checkpoint_2.orbax-checkpoint-tmp-7' / 'state').mkdir(parents=True)
  assert int(restore(tmp_path, make_state()).train_state.step) == 1


def test_a_copy_in_an_object_store_is_read_without_the_file_that_ends_a_save(
  tmp_path, monkeypatch, caplog
):
  save(tmp_path, 3, 4, 7)
  for file in tmp_path.rglob('commit_success.txt'):
    file.unlink()
  (tmp_path / 'checkpoint_7' / 'state' / 'manifest.ocdbt').unlink()  # which is written last
  object_store = types.SimpleNamespace(is_gcs_path=lambda path: True)
  monkeypatch.setattr(atomicity_defaults, 'gcs_utils', object_store)
  assert sorted(checkpoint_reader.steps(tmp_path)) == [3, 4]
  assert checkpoint_reader.find(tmp_path).name == 'checkpoint_4'
  shutil.copytree(tmp_path / 'checkpoint_7', tmp_path / 'other' / 'checkpoint_7')
  with pytest.raises(ValueError, match='no checkpoint: checkpoint_7 has no commit_success.txt'):
    checkpoint_reader.find(tmp_path / 'other')
  assert int(restore(tmp_path, make_state()).train_state.step) == 4
  assert 'checkpoint_4 is complete, but had no commit_success.txt' in caplog.text
  save(tmp_path, 9)
  assert sorted(checkpoint_reader.steps(tmp_path)) == [3, 4, 9]


def test_a_checkpoint_under_the_name_of_another_step_is_not_read(tmp_path):
  save(tmp_path, 4, 8)
  (tmp_path / 'checkpoint_8').rename(tmp_path / 'checkpoint_12')
  with pytest.raises(checkpoint_reader.Unreadable, match='checkpoint_12 .*checkpoint_8'):
    checkpoint_reader.read_params(tmp_path)
  shutil.copytree(tmp_path / 'checkpoint_12', tmp_path / 'best')  # says nothing of a step
  assert checkpoint_reader.read_params(tmp_path / 'best')
  assert int(restore(tmp_path, make_state()).train_state.step) == 4
  assert (tmp_path / 'unreadable_checkpoint_12').exists()


def test_a_run_without_a_usable_checkpoint_does_not_start_over(tmp_path):
  save(tmp_path, 1)
  words = r'params/head_bias .*\(16,\), .* \(32,\).*RestoreCheckpointConfig.path'
  with pytest.raises(ValueError, match=words):
    restore(tmp_path, make_state(num_classes=32))
  truncate_arrays(tmp_path / 'checkpoint_1')
  with pytest.raises(ValueError, match=r'no checkpoint in model_dir=.* \(newest of 1: .*model_dir'):
    restore(tmp_path, make_state())
  assert (tmp_path / 'checkpoint_1').exists()


def warm(params, path, **settings):
  cfg = checkpoints.RestoreCheckpointConfig(path=str(path), **settings)
  return params | warm_start.restore_params(cfg, abstract(params))


def test_warm_start_takes_the_parameters_on_their_shardings(tmp_path):
  save(tmp_path, 1, 2)
  params = make_state(4, seed=7).params
  read = warm(params, tmp_path)
  assert_equal(read, make_state(seed=2).params)
  assert read['head_kernel'].sharding == params['head_kernel'].sharding


def test_a_warm_start_keeps_no_head_of_other_classes(tmp_path):
  save(tmp_path, 1)
  class_names.write(tmp_path, ('ant', 'bee', 'wasp'))
  target = abstract({'head/kernel': make_state().params['head_kernel']})
  renamed = [('head/kernel', 'head_kernel')]
  cfg = checkpoints.RestoreCheckpointConfig(str(tmp_path), 'latest', renamed, True)
  for names, message in (
    (('bee', 'wasp'), "path=.* \\(head = 'init' .* has 3 classes, and the task has 2"),
    (('bee', 'ant', 'wasp'), "head = 'init' .*: 'bee' is class 0 here and class 1 "),
  ):
    with pytest.raises(ValueError, match=message):
      warm_start.restore_params(cfg, target, names=names)
  assert warm_start.restore_params(cfg, target, names=('ant', 'bee', 'wasp'))


def test_warm_start_of_a_model_with_other_parameters(tmp_path):
  save(tmp_path, 1)
  saved = make_state(seed=1).params
  params = make_state(seed=7).params
  more = params | {'factors': params['head_bias']}
  with pytest.raises(ValueError, match=r'no factors, .*\(16,\)'):
    warm(more, tmp_path)
  read = warm(more, tmp_path, fallback_to_scratch=True)
  assert_equal(read, saved | {'factors': params['head_bias']})
  fewer = {'head_kernel': params['head_kernel']}
  with pytest.raises(ValueError, match='holds head_bias, '):
    warm(fewer, tmp_path)
  assert_equal(warm(fewer, tmp_path, fallback_to_scratch=True)['head_kernel'], saved['head_kernel'])
  with pytest.raises(ValueError, match=r'checkpoint_1: it holds no average of'):
    warm(params, tmp_path, ema=True)
  with pytest.raises(ValueError, match=r'has none of .* \(factors, \.\.\.\), but head_bias, '):
    warm({'factors': params['head_bias']}, tmp_path, fallback_to_scratch=True)


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
  with pytest.raises(ValueError, match=r"'haed_\.\*', which matches no parameter .* head_bias, "):
    warm(params, tmp_path, assignment_map=(('haed_.*', None),))
  with pytest.raises(ValueError, match='skip=.* is for a published file; .* is a checkpoint'):
    warm(params, tmp_path, skip=('head_.*',))
  both = (('.*_kernel', 'hidden_kernel'),)
  with pytest.raises(
    ValueError, match='reads head_kernel and trunk_kernel from hidden_kernel: one'
  ):
    warm(params, tmp_path, fallback_to_scratch=True, assignment_map=both)


def test_warm_start_from_a_published_file_takes_no_setting_of_a_checkpoint(tmp_path):
  params = make_state().params
  arrays = {'head/kernel': params['head_kernel'], 'head/bias': params['head_bias']}
  path = str(tmp_path / 'published.npz')
  weights.write_arrays(path, jax.tree.map(np.asarray, arrays))

  def names(**settings):
    cfg = checkpoints.RestoreCheckpointConfig(path, **settings)
    return {*warm_start.restore_params(cfg, abstract(arrays))}

  assert names() == {*arrays}
  assert names(assignment_map=(('.*/bias', None),)) == {'head/kernel'}  # the bias starts afresh
  for settings, words in (
    ({'ema': True}, r'ema=True is for a checkpoint; .*published\.npz is'),
    ({'assignment_map': (('head/(.*)', r'\1'),)}, 'assignment_map=.* is for a checkpoint'),
    ({'assignment_map': (('haed/.*', None),)}, 'matches no parameter'),
  ):
    with pytest.raises(ValueError, match=words):
      names(**settings)


def test_a_missing_checkpoint_is_named(tmp_path):
  with pytest.raises(ValueError, match="absent .*mode='latest'"):
    warm(make_state().params, tmp_path / 'absent')
