"""Which changes of a configuration may change the results, and what a run that is resumed does."""

import importlib
import inspect
import shutil

import pytest
from etils import epath

import gin
from het_plugin import runs
from het_plugin.commands import train as main
from het_plugin.config import changes as config_changes
from het_plugin.config import parsing, registry, statements
from het_plugin.config.changes import changes
from het_plugin.system import screen
from het_plugin.training import partitioning


def config_text(*files):
  try:
    parsing.parse_config([f'het_plugin/gin/{file}.gin' for file in files], ["MODEL_DIR = 'runs/x'"])
    return gin.config_str()
  finally:
    gin.clear_config()


@pytest.fixture(scope='module')
def before():
  return config_text('runs/digits_smoke', 'heads/het_xl')


def split(found):
  """Keys of the changes that may change results, and of the others."""
  return [{x.key for x in found if x.changes_results is kind} for kind in (True, False)]


EARLY = "train.actions = {'TRAIN': [@EarlyStoppingAction()]}\nEarlyStoppingAction.patience = 1"


@pytest.mark.parametrize(
  ('binding', 'serious', 'harmless'),
  [
    ('HetXL.num_factors = 40', 'HetXL.num_factors', ''),
    (
      'BATCH_SIZE = 32',
      'train/DatasetConfig.batch_size',
      'train_eval/DatasetConfig.batch_size',
    ),
    ("SaveCheckpointConfig.dtype = 'bfloat16'", 'SaveCheckpointConfig.dtype', ''),
    ('TRAIN_STEPS = 800', 'total_steps.steps', ''),
    ("EVAL_SPLIT = 'train'", '', 'train_eval/DatasetConfig.split'),
    ('eval/Integrator.num_samples = 8', '', 'eval/Integrator.num_samples'),
    ("text_transformer.remat = 'full'", '', 'text_transformer.remat'),
    ('ContrastiveModel.eval_integrator = @x/Integrator()', '', 'ContrastiveModel.eval_integrator'),
    (EARLY, '', 'train.actions EarlyStoppingAction.patience'),
    ('OURS = 3', '', ''),
    ('Integrator.num_samples = 8', '', 'Integrator.num_samples'),  # hidden by those of two scopes
    ("Integrator.method = 'sample'", 'Integrator.method', ''),
    ('ours.remat = 3', 'ours.remat', ''),
  ],
)
def test_one_binding(before, binding, serious, harmless):
  assert split(changes(before, f'{before}\n{binding}')) == [{*serious.split()}, {*harmless.split()}]


def test_the_number_of_steps_of_a_constant_learning_rate(before):
  constant = f'{before}\nadamw.learning_rate = 1e-3\n'
  serious, harmless = split(changes(constant, constant + 'TRAIN_STEPS = 800'))
  assert not serious and harmless == {'total_steps.steps'}


def test_another_head(before):
  found = changes(before, config_text('runs/digits_smoke', 'heads/het'))
  serious, harmless = split(found)
  assert not harmless
  assert {key.split('.')[0] for key in serious} == {'ClassificationModel', 'HetXL', 'Het'}
  lines = [str(change) for change in found]
  assert 'HetXL.num_factors: 50 -> (not set)' in lines
  assert 'HEAD: @HetXL() -> @Het()' in lines


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


def test_what_is_not_ours_may_change_results_unless_only_actions_use_it():
  assert split(changes(own(), own(size=5))) == [
    {'MyModel.size'},
    {'MyAction.sizes', 'mine/Sizes.first', 'warmup_schedule.total_steps'},
  ]


def test_what_training_shares_with_evaluation_may_change_results():
  assert split(changes(own(), own(num_samples=3))) == [set(), {'eval/Integrator.num_samples'}]
  shared = '@eval/Integrator()'
  (change,) = changes(own(reference=shared), own(reference=shared, num_samples=3))
  assert change.changes_results and (change.before, change.after) == (2, 3)


@pytest.mark.parametrize(('decay', 'serious'), [('rsqrt', False), ('cosine', True), (None, True)])
def test_more_steps_change_results_where_the_learning_rate_ends_with_them(decay, serious):
  was = own(decay=decay).replace("warmup_schedule.decay = 'None'", '')  # which is linear
  (change,) = changes(was, was.replace('total_steps = 1', 'total_steps = 2'))
  assert change.changes_results is serious
  share = 'warmup_schedule.warmup_steps = 0.1\n'  # of more steps: another warm-up
  other = "a/warmup_schedule.decay = 'linear'\n"  # of a group of parameters
  for setting in (share, other):
    (change,) = changes(was + setting, was.replace('total_steps = 1', 'total_steps = 2') + setting)
    assert change.changes_results


def parameters(configurable):
  """Names of its parameters and, of a function that makes a module, of those of the module."""
  made = inspect.signature(configurable).return_annotation
  is_module = inspect.isclass(made) and made is not int  # whose constructor has no signature
  fields = inspect.signature(made).parameters if is_module else ()
  return {*inspect.signature(configurable).parameters, *fields}


@pytest.mark.parametrize('room', [*registry.MODEL_ROOMS, *registry.TRAINER_ROOMS])
def test_rooms_state_parameters_that_exist(room):
  package = importlib.import_module(f'het_plugin.{room}')
  modules = {
    name: importlib.import_module(f'het_plugin.{room}.{key}')
    for key, names in package.CONFIGURABLES.items()
    for name in names
  }
  for entry in getattr(package, 'SAME_RESULTS', ()):
    name, parameter = entry.split('.')
    known = [parameters(getattr(modules[n], n)) for n in (modules if name == '*' else [name])]
    assert any(parameter in names for names in known), entry


# Runs that are resumed.


def test_a_checkpoint_belongs_to_the_configuration_of_its_time(tmp_path):
  folder = epath.Path(tmp_path)
  for step, was, now in ((4, 'A.x = 1', 'A.x = 2'), (8, 'A.x = 2', 'A.x = 3')):
    config = config_changes.RunConfig(now, accept_changes=True)
    config.check(step, {'config': was}, folder)
    config.write(folder, step)
  (folder / 'config_until_4 (copy).gin').write_text('')  # of nobody here
  wanted = {2: 'A.x = 1', 4: 'A.x = 1', 6: 'A.x = 2', 8: 'A.x = 2', 9: 'A.x = 3'}
  for step, want in wanted.items():
    assert config_changes.config_file(folder / f'checkpoint_{step}', step).read_text() == want


def test_a_run_that_goes_on_shows_and_keeps_what_changed(tmp_path, caplog):
  caplog.set_level('INFO')
  before, after = (f'train.eval_period = {n}\ntrain.stats_period = {n}' for n in (20, 10))
  config = config_changes.RunConfig(after)
  config.check(40, {'config': before}, epath.Path(tmp_path))
  assert not caplog.records  # the run has no log file yet
  config.write(epath.Path(tmp_path), 40)
  lines = [x.getMessage() for x in caplog.records if screen.is_shown(x)]
  names = 'eval_period', 'stats_period'
  want = [f'The configuration changed since step 40: train.{name}: 20 -> 10' for name in names]
  assert lines[:2] == want


def test_a_checkpoint_of_another_run_is_named(digits_run, tmp_path, caplog):
  config = (digits_run[0] / 'config.gin').read_text()
  checkpoint = next(digits_run[0].glob('checkpoint_*'))
  shutil.copytree(checkpoint, tmp_path / checkpoint.name)
  other = config.replace('RANDOM_SEED = ', 'RANDOM_SEED = 7')
  for text, warned in ((config, False), (other, True)):
    (tmp_path / 'config.gin').write_text(text)
    runs.configuration(tmp_path / checkpoint.name)
    assert ('RANDOM_SEED' in caplog.text or 'random_seed' in caplog.text) == warned


@pytest.mark.slow
def test_a_run_goes_on_with_another_configuration_once_that_is_accepted(
  digits_run, tmp_path, run_main, caplog
):
  folder = tmp_path / 'run'
  shutil.copytree(digits_run[0], folder)
  files = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
  old = (folder / 'config.gin').read_text()
  same = [f'--gin_file={digits_run[0] / "config.gin"}', f"--gin.MODEL_DIR='{folder}'"]
  changed = ['--gin.LEARNING_RATE=5e-3', '--gin.EVAL_STEPS=2', '--gin.RANDOM_SEED=1']
  caplog.set_level('INFO')
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(partitioning.PjitPartitioner, 'batch_rows', lambda *_: pytest.fail('read data'))
    message = run_main(main, *same, *changed, code=2)
  assert 'step 2 on): RANDOM_SEED, LEARNING_RATE changed' in message
  assert message.endswith('--accept_config_changes (--verbosity=1 shows where)')
  assert 'since step 2: LEARNING_RATE: 0.003 -> 0.005' in caplog.text
  assert 'since step 2: EVAL_STEPS: 1 -> 2' in caplog.text
  assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == files

  run_main(main, *same, '--gin.SAVE_PERIOD=7')  # harmless
  assert 'SAVE_PERIOD = 7' in (folder / 'config.gin').read_text()
  assert not list(folder.glob('config_until*'))

  run_main(main, *same, *changed, '--accept_config_changes')  # complete: nothing is trained
  kept = (folder / 'config_until_2.gin').read_text()
  assert changes(kept, old) == []
  assert {change.key for change in changes(old, (folder / 'config.gin').read_text())} == {
    'train.random_seed',
    'train/DatasetConfig.seed',
    'warmup_schedule.peak_value',
    'train.eval_steps',
    'train.model_dir',
  }


def test_a_configuration_without_what_a_host_knows():
  text = (
    'import het_plugin.config\n'
    'import het_plugin.hosts.t5x.engine\n'
    'ACTIONS = None\n'
    "train.actions = {'TRAIN': [@a/EarlyStoppingAction()], 'x': (%ACTIONS, 'it\\'s', -1e-3)}\n"
    'train.get_dataset_fn = @get_dataset\n'
    'eval/Integrator.num_samples = 4\n'
    'Integrator.num_samples = 3\n'
  )
  dropped = {'train.get_dataset_fn', 'Integrator.num_samples'}
  kept = statements.without(text, dropped, 'het_plugin.hosts.t5x.engine')
  assert 'hosts.t5x' not in kept and 'import het_plugin.config' in kept and 'ACTIONS = None' in kept
  want = statements.bindings(text)
  assert statements.bindings(kept) == {k: x for k, x in want.items() if k not in dropped}
