"""What counts as a change of a run's meaning, and what a run that is resumed does about it."""

import hashlib
import inspect
import shutil

import pytest
from etils import epath

import gin
import het_plugin.data
from het_plugin import train as main
from het_plugin.backbones.resnet import ResNet
from het_plugin.backbones.vit import ViT
from het_plugin.config import changes as config_changes
from het_plugin.config import parsing, registry
from het_plugin.config.changes import UNSET, changes
from het_plugin.training import train as train_lib

FILES = ('runs/digits_smoke', 'heads/het_xl')


def text(*more, files=FILES):
  registry.register_trainer()
  try:
    parsing.parse_config(
      [f'het_plugin/gin/{file}.gin' for file in files], ["MODEL_DIR = 'runs/x'", *more]
    )
    return gin.config_str()
  finally:
    gin.clear_config()


@pytest.fixture(scope='module')
def before():
  return text()


def split(found):
  """Keys of the changes of meaning, and of the others."""
  return [{change.key for change in found if change.is_meaning is kind} for kind in (True, False)]


@pytest.mark.parametrize(
  ('binding', 'meaning', 'means'),
  [
    ('HetXL.num_factors = 40', {'HetXL.num_factors'}, set()),
    ('NUM_CLASSES = 11', {'HetXL.num_classes'}, set()),
    ('LearnedTemperature.tau_max = 3.0', {'LearnedTemperature.tau_max'}, set()),
    ("HetXL.link = 'sigmoid'", {'HetXL.link'}, set()),
    ('vit.width = 32', {'vit.width'}, set()),
    (
      'BATCH_SIZE = 32',
      {'train/DatasetConfig.batch_size'},
      {'train_eval/DatasetConfig.batch_size'},
    ),
    ('RANDOM_SEED = 1', {'train.random_seed', 'train/DatasetConfig.seed'}, set()),
    ('LEARNING_RATE = 1e-4', {'warmup_schedule.peak_value'}, set()),
    ('train/Integrator.num_samples = 8', {'train/Integrator.num_samples'}, set()),
    ('Integrator.num_samples = 8', {'Integrator.num_samples'}, set()),
    ("SaveCheckpointConfig.dtype = 'bfloat16'", {'SaveCheckpointConfig.dtype'}, set()),
    ('TRAIN_STEPS = 800', {'total_steps.steps'}, set()),
    ('SAVE_PERIOD = 7', set(), {'SaveCheckpointConfig.period'}),
    ('EVAL_PERIOD = 7', set(), {'train.eval_period'}),
    ("EVAL_SPLIT = 'train'", set(), {'train_eval/DatasetConfig.split'}),
    ('eval/Integrator.num_samples = 8', set(), {'eval/Integrator.num_samples'}),
    ('PjitPartitioner.num_partitions = 2', set(), {'PjitPartitioner.num_partitions'}),
    ("vit.remat = 'full'", set(), {'vit.remat'}),
    ("MODEL_DIR = 'runs/y'", set(), {'train.model_dir'}),
    (
      "ACTIONS = {'TRAIN': [@EarlyStoppingAction()]}\nEarlyStoppingAction.patience = 1",
      set(),
      {'train.actions', 'EarlyStoppingAction.patience'},
    ),
    ('NOBODYS = 3', set(), set()),
  ],
)
def test_one_binding(before, binding, meaning, means):
  assert split(changes(before, text(*binding.split('\n')))) == [meaning, means]


def test_another_head(before):
  found = changes(before, text(files=('runs/digits_smoke', 'heads/het')))
  meaning, means = split(found)
  assert not means and {key.split('.')[0] for key in meaning} == {
    *('ClassificationModel', 'HetXL', 'Het')
  }
  lines = [str(change) for change in found]
  assert 'ClassificationModel.head: @HetXL() -> @Het()' in lines
  assert 'HetXL.num_factors: 50 -> (not set)' in lines


def test_the_form_of_a_configuration_is_no_change(before):
  """Comments, order, line breaks, and macros in place of their values."""
  settings = before.replace('%BATCH_SIZE', '64').replace("{'image': 8, ", "{\n  'image': 8,\n  ")
  assert settings.count('64') > before.count('64')
  lines = [line for line in settings.splitlines() if not line.startswith('#')]
  imports, rest = lines[:1], '\n'.join(lines[1:])
  assert imports == ['import het_plugin.config']
  assert changes(before, f'{rest}\n{imports[0]}\n') == []


OWN = """
train.model = @MyModel()
MyModel.size = {size}
train/Integrator.num_samples = 8
eval/Integrator.num_samples = {num_samples}
MyModel.integrators = {{'metrics': {reference}}}
ClassificationModel.eval_integrator = @eval/Integrator()
train.actions = {{'TRAIN': [@MyAction()]}}
MyAction.sizes = (%SIZE, @mine/Sizes())
mine/Sizes.first = {size}
SIZE = {size}
warmup_schedule.decay = '{decay}'
warmup_schedule.total_steps = {size}
"""


def own(size=1, num_samples=2, reference='None', decay='constant'):
  return OWN.format(size=size, num_samples=num_samples, reference=reference, decay=decay)


def test_what_is_not_ours_is_meaning_but_for_actions():
  meaning, means = split(changes(own(), own(size=5)))
  assert meaning == {'MyModel.size'}
  assert means == {'MyAction.sizes', 'mine/Sizes.first', 'warmup_schedule.total_steps'}


def test_what_training_shares_with_evaluation_is_meaning():
  assert split(changes(own(), own(num_samples=3))) == [set(), {'eval/Integrator.num_samples'}]
  shared = '@eval/Integrator()'
  (change,) = changes(own(reference=shared), own(reference=shared, num_samples=3))
  assert change.is_meaning and (change.before, change.after) == (2, 3)


@pytest.mark.parametrize(('decay', 'is_meaning'), [('rsqrt', False), ('cosine', True)])
def test_more_steps_are_meaning_where_the_learning_rate_ends_with_them(decay, is_meaning):
  was = own(decay=decay)
  now = was.replace('total_steps = 1', 'total_steps = 2')
  (change,) = changes(was, now)
  assert change.is_meaning is is_meaning
  unbound = was.replace(f"warmup_schedule.decay = '{decay}'", '')  # linear
  (change,) = changes(unbound, unbound.replace('total_steps = 1', 'total_steps = 2'))
  assert change.is_meaning


def test_a_constant_stays_a_name():
  (change,) = changes('A.x = %my.CONSTANT', 'B.x = 1\nA.x = %my.CONSTANT')
  assert (change.key, change.before, change.after) == ('B.x', UNSET, 1)


def parameters(name):
  if name in ('vit', 'resnet'):  # of the module that these make
    return set(inspect.signature({'vit': ViT, 'resnet': ResNet}[name]).parameters)
  configurable = gin.get_configurable(name)
  if inspect.isclass(configurable):
    configurable = configurable.__mro__[1]  # gin's is a subclass
  return set(inspect.signature(configurable).parameters)


def test_means_are_parameters_that_exist():
  registry.register_trainer()
  for name, means in config_changes.MEANS.items():
    assert set(means or ()) <= parameters(name), name


def test_every_parameter_of_train_is_decided_on():
  """One that is new belongs into MEANS, or here."""
  given_by_the_main = {'summarize_config_fn', 'config', 'check_config_fn', 'limits', 'began'}
  assert set(inspect.signature(train_lib.train).parameters) == given_by_the_main | {
    *config_changes.MEANS['train'],
    *('model', 'train_dataset_cfg', 'trainer_cls', 'random_seed', 'get_dataset_fn', 'task_info_fn'),
  }


# Runs that are resumed.


def test_configurations_of_older_runs_are_compared_as_a_whole(caplog):
  fingerprint = hashlib.sha256(b'A.x = 1').hexdigest()
  config_changes.RunConfig('A.x = 1').check(4, {'config_fingerprint': fingerprint})
  assert not caplog.text
  config_changes.RunConfig('A.x = 2').check(4, {'config_fingerprint': fingerprint})
  assert 'not the one that the checkpoint was saved with' in caplog.text


def test_a_checkpoint_belongs_to_the_configuration_of_its_time(tmp_path):
  folder = epath.Path(tmp_path)
  for step, was, now in ((4, 'A.x = 1', 'A.x = 2'), (8, 'A.x = 2', 'A.x = 3')):
    config = config_changes.RunConfig(now, accept_changes=True)
    config.check(step, {'config': was})
    config.write(folder, step)
  wanted = {2: 'A.x = 1', 4: 'A.x = 1', 6: 'A.x = 2', 8: 'A.x = 2', 9: 'A.x = 3'}
  for step, want in wanted.items():
    assert config_changes.config_file(folder / f'checkpoint_{step}', step).read_text() == want
  assert sorted(path.name for path in folder.iterdir()) == [
    *('config.gin', 'config_until_4.gin', 'config_until_8.gin')
  ]


@pytest.fixture
def resumed(digits_run, tmp_path, run_main):
  """resumed(*flags): the run of two steps once more, from its own configuration."""
  folder = tmp_path / 'run'
  shutil.copytree(digits_run[0], folder)

  def run(*arguments, code=0):
    config = f'--gin_file={digits_run[0] / "config.gin"}'
    return run_main(main, config, f"--gin.MODEL_DIR='{folder}'", *arguments, code=code)

  return folder, run


def test_a_change_of_meaning_is_confirmed(resumed, caplog):
  folder, run = resumed
  files = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
  caplog.set_level('INFO')
  changed = ['--gin.LEARNING_RATE=5e-3', '--gin.EVAL_STEPS=2', '--gin.RANDOM_SEED=1']
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(het_plugin.data, 'get_dataset', lambda *_: pytest.fail('read data'))
    message = run(*changed, code=2)
  assert 'its step 2: train.random_seed, train/DatasetConfig.seed, warmup_schedule.p' in message
  assert message.endswith('go on with --accept_config_changes (--verbosity=1 shows where)')
  assert '\n  warmup_schedule.peak_value: 0.003 -> 0.005' in caplog.text
  assert '\n  train.eval_steps: 1 -> 2' in caplog.text
  assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == files

  old = (folder / 'config.gin').read_text()
  run(*changed, '--accept_config_changes')  # complete: nothing is trained
  assert (folder / 'config_until_2.gin').read_text() == old
  assert {change.key for change in changes(old, (folder / 'config.gin').read_text())} == {
    *('train.random_seed', 'train/DatasetConfig.seed', 'warmup_schedule.peak_value'),
    *('train.eval_steps', 'train.model_dir'),
  }


def test_other_changes_are_logged(resumed, digits_run, caplog):
  folder, run = resumed
  caplog.set_level('INFO')
  run('--gin.SAVE_PERIOD=7', '--gin.UNUSED=3')
  (message,) = [record.message for record in caplog.records if 'changed since' in record.message]
  assert {line.strip() for line in message.splitlines()} == {
    'The configuration changed since step 2:',
    'SaveCheckpointConfig.period: 1 -> 7',
    f"train.model_dir: '{digits_run[0]}' -> '{folder}'",
  }
  assert 'SAVE_PERIOD = 7' in (folder / 'config.gin').read_text()
  assert not list(folder.glob('config_until*'))


def test_a_configuration_without_what_a_host_knows():
  text = (
    'import het_plugin.config\n'
    'import het_plugin.t5x_host.engine\n'
    'ACTIONS = None\n'
    "train.actions = {'TRAIN': [@a/EarlyStoppingAction()], 'x': (%ACTIONS, 'it\\'s', -1e-3)}\n"
    'train.get_dataset_fn = @get_dataset\n'
    'eval/Integrator.num_samples = 4\n'
    'Integrator.num_samples = 3\n'
  )
  kept = config_changes.without(
    text, {'train.get_dataset_fn', 'Integrator.num_samples'}, 'het_plugin.t5x_host.engine'
  )
  assert 't5x_engine' not in kept and 'import het_plugin.config' in kept
  assert config_changes.bindings(kept) == {
    key: value
    for key, value in config_changes.bindings(text).items()
    if key not in ('train.get_dataset_fn', 'Integrator.num_samples')
  }
  assert 'ACTIONS = None' in kept
