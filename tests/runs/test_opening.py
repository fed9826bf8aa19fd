"""Runs opened for evaluation: ours, one checkpoint of ours, and published files."""

import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import traverse_util

import gin
from het_plugin import estimators, heads, runs, weights
from het_plugin.commands import finetune
from het_plugin.config import parsing, registry
from het_plugin.hosts.t5x import conversion
from het_plugin.runs import opening
from het_plugin.runs.starting import train_from_gin
from het_plugin.training import checkpoint_reader
from tests.params import drawn

NAME = 'PjitPartitioner.num_partitions'
TINY = ['vit.width = 16', 'vit.depth = 1', 'vit.mlp_dim = 16', 'vit.num_heads = 2']


def assert_equal(got, want):
  """`got` is a tree, `want` flat."""
  flat = traverse_util.flatten_dict(got, sep='/')
  assert set(flat) == set(want)
  for name, x in flat.items():
    np.testing.assert_array_equal(np.asarray(x), want[name])


def test_the_newest_checkpoint_on_another_mesh(digits_run):
  digits_run, params = digits_run
  run = runs.open_run(digits_run, bindings=['PjitPartitioner.num_partitions = 2'])
  assert (run.step, run.image_size, run.channels, run.max_labels) == (2, 8, 1, 1)
  assert run.task == 'digits' and run.checkpoint == str(digits_run / 'checkpoint_2')
  assert run.partitioner.model_shards == 2 and 'digits' in run.config.text
  assert_equal(run.params, traverse_util.flatten_dict(params, sep='/'))


def test_opening_leaves_the_configuration_of_the_program_as_it_was(digits_run):
  folder, _ = digits_run
  registry.register_trainer()
  gin.parse_config("MODEL_DIR = 'mine'\nHetXL.num_factors = 3")
  before = gin.config_str()
  config = runs.configuration(folder)
  assert gin.config_str() == before and not gin.config_is_locked()
  assert config.argument('model') is config.argument('model')
  assert config.bindings('HetXL')['num_factors'] != 3 and config.task == 'digits'
  with config.active():
    assert str(folder) in gin.config_str()
  with pytest.raises(ValueError, match='no_such_file.gin'):
    runs.configuration(folder, ['no_such_file.gin'])
  assert gin.config_str() == before


def test_a_typed_binding_that_nothing_uses_is_an_error(digits_run):
  with pytest.raises(ValueError, match='Integrator.num_samples.*eval/Integrator.num_samples'):
    runs.configuration(digits_run[0], bindings=['Integrator.num_samples = 8'])
  runs.configuration(digits_run[0], bindings=['eval/Integrator.num_samples = 8'])


@pytest.mark.parametrize(
  'content,message',
  [
    (b'\xff\xfe\n', 'class_names.txt is damaged'),
    (b'1\n0\n2\n3\n4\n5\n6\n7\n8\n9\n', 'that checkpoint_2 was trained with'),
    (b'a\nb', '2 names.* 10 classes'),
  ],
)
def test_names_that_are_not_those_of_the_head(digits_run, tmp_path, content, message):
  (tmp_path / 'checkpoint_2').mkdir()
  for name in ('checkpoint_2/state', 'checkpoint_2/dataset', 'checkpoint_2/record', 'config.gin'):
    (tmp_path / name).symlink_to(digits_run[0] / name)
  if 'classes' in message:  # as under t5x, which keeps no record
    (tmp_path / 'checkpoint_2' / 'record').unlink()
  (tmp_path / 'class_names.txt').write_bytes(content)
  with pytest.raises(ValueError, match=message):
    runs.open_run(tmp_path)


def test_a_mesh_that_the_devices_do_not_divide_into_gets_smaller():
  for bound, bindings, expected in [(3, [], 1), (12, [], 4), (2, [], 2), (3, [f'{NAME} = 3'], 3)]:
    registry.register_trainer()
    gin.bind_parameter(NAME, bound)
    opening._fit_mesh(bindings)
    assert gin.query_parameter(NAME) == expected
    gin.clear_config()
  replicas = 'PjitPartitioner.num_replicas'  # as launch/ binds them for several slices
  for bound, expected in (((3, 4), (1, 4)), ((2, 8), (1, 8)), ((2, 4), (2, 4))):
    registry.register_trainer()
    for name, size in zip((replicas, NAME), bound, strict=True):
      gin.bind_parameter(name, size)
    opening._fit_mesh([])
    assert (gin.query_parameter(replicas), gin.query_parameter(NAME)) == expected
    gin.clear_config()
  submesh = 'PjitPartitioner.model_parallel_submesh'
  for bound, typed, model in (
    ((2, 2, 1, 1), None, 4),
    ((4, 4, 1, 1), None, 8),
    ((2, 2, 1, 1), f'{NAME} = 2', 2),
    (None, f'{submesh} = (1, 2, 1, 1)', 2),
  ):
    registry.register_trainer()
    gin.bind_parameter(submesh, bound)
    if typed:
      gin.parse_config(typed)
    opening._fit_mesh([typed or ''])
    assert gin.get_configurable('PjitPartitioner')().model_shards == model
    gin.clear_config()


@pytest.mark.slow
def test_one_checkpoint(digits_run):
  digits_run, _ = digits_run
  run = runs.open_run(digits_run / 'checkpoint_1')
  assert run.step == 1
  assert_equal(run.params, checkpoint_reader.read_params(digits_run / 'checkpoint_1'))
  absent = ["MIXTURE_OR_TASK_NAME = 'image_folder:/nowhere'", 'TRAIN_STEPS = None']
  runs.open_run(digits_run, bindings=[*absent, 'TRAIN_EPOCHS = 1'])  # data elsewhere
  first, last = (checkpoint_reader.read_params(digits_run / f'checkpoint_{n}') for n in (1, 2))
  assert any((first[name] != last[name]).any() for name in first)


@pytest.mark.slow
def test_the_average_of_the_parameters_is_opened_unless_told_otherwise(digits_run, tmp_path):
  files = [str(digits_run[0] / 'config.gin')]
  ema = ['OPTIMIZER = @with_ema()', 'with_ema.optimizer_def = @adamw()', 'with_ema.decay = 0.9']
  once = 'train.train_eval_dataset_cfg = None', f"MODEL_DIR = '{tmp_path}'"
  parsing.parse_config(files, [*ema, *once])
  train_from_gin()
  gin.clear_config()
  average, params = (checkpoint_reader.read_params(tmp_path, ema) for ema in (True, False))
  assert any((average[name] != params[name]).any() for name in params)
  assert_equal(runs.open_run(tmp_path).params, average)
  exported = runs.configuration(tmp_path).published_params()
  for name, x in weights.export_params(average, 10, 2).items():
    np.testing.assert_array_equal(exported[name], x)
  study = finetune._training(([], [], ['.']), runs.Checkpoint.find(tmp_path))
  assert 'RestoreCheckpointConfig.ema = True' in study.gin_bindings
  head = heads.Det(10)
  det = estimators.from_head(head, drawn(head.init, np.zeros((1, 16), np.float32)))
  estimators.to_checkpoint(det, tmp_path / 'start.npz', runs.configuration(tmp_path))
  norm = 'backbone/encoder_norm/scale'
  np.testing.assert_array_equal(weights.read_arrays(tmp_path / 'start.npz')[norm], average[norm])
  gin.clear_config()
  without = ['with_ema.evaluate = False']
  assert_equal(runs.open_run(tmp_path, bindings=without).params, params)
  read = runs.configuration(tmp_path, [], without).read_params()
  np.testing.assert_array_equal(read[norm], params[norm])


def test_a_published_file_has_a_backbone_and_a_fresh_head(digits_run, tmp_path):
  params = checkpoint_reader.read_params(digits_run[0])
  path = tmp_path / 'vit.npz'
  weights.write_arrays(path, weights.export_params(params, 10, 2))
  model = ['BACKBONE = @vit()', "vit.variant = 'Ti/4'", "vit.pooling = 'gap'", *TINY]
  run = runs.open_run(path, bindings=[*model, 'IMAGE_SIZE = 8'])
  assert (run.step, run.task, run.channels) == (None, None, 1)
  backbone = {
    name.removeprefix('backbone/'): x for name, x in params.items() if name.startswith('backbone/')
  }
  assert_equal(run.params['backbone'], backbone)
  with pytest.raises(ValueError, match='vit.npz'):
    runs.open_run(path, bindings=[*model, 'IMAGE_SIZE = 8', 'vit.mlp_dim = 32'])


def test_what_is_no_run(digits_run, tmp_path):
  digits_run, _ = digits_run
  with pytest.raises(ValueError, match='holds no checkpoint'):
    runs.open_run(tmp_path)
  (tmp_path / 'checkpoint_2').symlink_to(digits_run / 'checkpoint_2')
  with pytest.raises(ValueError, match='config.gin does not exist'):
    runs.open_run(tmp_path)
  with pytest.raises(ValueError, match='checkpoint_2 holds backbone/.*mlp'):
    runs.open_run(digits_run, bindings=['vit.mlp_dim = 32'])


@pytest.mark.slow
def test_a_run_of_t5x(digits_run, tmp_path):
  """Its checkpoint, as t5x lays it out, beside the configuration that it leaves for our mains."""
  folder, params = digits_run
  theirs = tmp_path / 'theirs'
  assert conversion.write_t5x(folder, theirs) == str(theirs / 'checkpoint_2')
  (theirs / 'config.gin').write_text((folder / 'config.gin').read_text())
  ours = checkpoint_reader.read_state(folder)
  arrays = checkpoint_reader.read_state(theirs)
  roots = ('params/', 'target/'), ('opt_state/', 'state/param_states/'), ('step', 'state/step')
  renamed = {
    new + name.removeprefix(old): x
    for name, x in ours.items()
    for old, new in roots
    if name.startswith(old)
  }
  assert set(renamed) == set(arrays)
  for name, x in renamed.items():
    np.testing.assert_array_equal(arrays[name], x, err_msg=name)
  assert (theirs / 'checkpoint_2/dataset/train_ds-000-of-001').read_text() == '{"position": 16}'
  run = runs.open_run(theirs)
  assert run.step == 2
  assert_equal(run.params, traverse_util.flatten_dict(params, sep='/'))
  with pytest.raises(ValueError, match='checkpoint_2 exists already'):
    conversion.write_t5x(folder, theirs)
  with pytest.raises(ValueError, match='is a checkpoint of t5x already'):
    conversion.write_t5x(theirs, tmp_path / 'again')


@pytest.mark.parametrize('channels', [1, 2, 3, 5])
def test_any_number_of_channels_is_seen_in_the_shapes(channels, monkeypatch):
  def shapes_of(channels):
    return {'backbone/embedding': (4, 4, channels, 16), 'head/kernel': (16, 7)}

  monkeypatch.setattr(checkpoint_reader, 'params_shapes', lambda _: shapes_of(channels))
  assert runs.Checkpoint('run', 1).channels(shapes_of) == channels
  assert runs.Checkpoint('run', 1, {'image': (8, 8, 4)}).channels(shapes_of) == 4


@pytest.mark.filterwarnings('ignore::DeprecationWarning')  # of orbax's own code
def test_orbax_alone_reads_a_run(digits_run):
  """By both of its interfaces."""
  from orbax.checkpoint.experimental import v1

  folder, params = digits_run
  checkpoint = f'{folder}/checkpoint_2'
  for state in (
    ocp.PyTreeCheckpointer().restore(f'{checkpoint}/state'),
    v1.load_pytree(checkpoint, checkpointable_name='state'),
  ):
    assert_equal(state['params'], traverse_util.flatten_dict(params, sep='/'))
