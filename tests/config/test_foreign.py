"""Configurations of foreign runs that would run code."""

import sys

import numpy as np
import pytest

import gin
from het_plugin import runs
from het_plugin.commands import export, predict
from het_plugin.config import foreign, parsing, registry

IMPORT = 'import het_plugin.config\n'
DYNAMIC = 'from __gin__ import dynamic_registration\n'
OF_PACKAGES = (
  DYNAMIC + 'import optax\nfrom het_plugin import heads\nfrom het_plugin.training import train\n'
  'heads.HetXL.x = @optax.adam()\ntrain.train.seed = @x/heads.Det\nA/gin.macro.value = 3\n'
)
HARMLESS = {
  'ours': (IMPORT + 'MODEL = @heads.HetXL()\nHetXL.num_factors = %R\ntrain.model = %MODEL\n', ''),
  'unknown': ('import het_plugin.config.registry\nimport os\nx.y = @os.system\n', ''),  # to gin
  'packages': (OF_PACKAGES, 'optax'),
  'data sets': (
    IMPORT
    + "A = ('tfds:mnist', 'mnist:3.0.1', 'coco/2017:1.*.*', 'npz:a:b', 'http://a', 'digits')\n",
    '',
  ),
  'data set of a given namespace': (IMPORT + "A = 'kaggle:birds'\n", 'kaggle'),
  'any function of ours': (
    DYNAMIC + 'from het_plugin.system import run_files\nrun_files.write_text.path = 1\n',
    'het_plugin',
  ),
}
WRITE = (
  'from het_plugin.system import run_files\nfrom het_plugin.training import train\n'
  'train.train.model_dir = @a/run_files.write_text()\n'
  "a/run_files.write_text.path = {file!r}\na/run_files.write_text.text = 'x'\n"
)
PARSE = (
  'from het_plugin.config import parsing\nfrom het_plugin.training import train\n'
  'train.train.model = @parsing.parse_config()\n'
  'parsing.parse_config.gin_files = [{file!r}]\nparsing.parse_config.bindings = []\n'
)
CALLS = {
  'write_text': WRITE,
  'parse_config': PARSE,
  'leave': 'from het_plugin.system import stopping\nA = @stopping.leave()\n',
  'write_arrays': 'import het_plugin.weights\nA = [{{1: @x/het_plugin.weights.write_arrays}}]\n',
  'system': 'import os\nA = @os.system()\n',
  'inside': 'import seqio\nA = [@x/seqio.utils.os.system()]\n',
  'inside ours': 'import het_plugin.config.parsing\nhet_plugin.config.parsing.os.system.x = 1\n',
  'alias': 'import os as het_plugin\nA = @het_plugin.system\n',
  'alias of two': 'import os as optax\nA = @optax.system\nimport optax\n',
  'builtins': 'import optax\nA = @gin.macro.__globals__.clear()\n',
  'attribute': 'import optax\nA = @optax.adam.__globals__.clear()\n',
}
CODE = {
  'import': 'import turtle\n',
  'train': IMPORT + "A = @x/train()\nx/train.model_dir = '/tmp'\n",
  **{
    f'data set {name}': IMPORT + f"A = {{1: ('{name}', 2)}}\n"
    for name in (
      'tfds:kaggle:birds',
      'tfds_captions:huggingface:birds/en',
      'kaggle:birds',
      'huggingface:birds/en:1.0.0',
      'my-space:birds/a=1,b=2',
    )
  },
  'include': "include '/tmp/other.gin'\n",
  'syntax': 'A = (\n',
}


@pytest.fixture(autouse=True)
def registered():
  registry.register_trainer()


@pytest.mark.parametrize('kind', HARMLESS)
def test_ordinary_configurations(kind, parsed_flags):
  text, given = HARMLESS[kind]
  with parsed_flags(predict, f'--allow_imports={given}'):
    foreign.check(text, 'config.gin')


GIN_FILES = [x for x in parsing.gin_root().rglob('*.gin') if 't5x' not in x.parts]


@pytest.mark.parametrize('path', GIN_FILES, ids=lambda path: f'{path.parent.name}/{path.stem}')
def test_what_our_gin_files_name(path):
  lines = path.read_text().splitlines(keepends=True)
  foreign.check(''.join(line for line in lines if not line.startswith('include')), path.name)


@pytest.mark.parametrize('kind', CODE)
def test_what_runs_code(kind):
  assert 'turtle' not in sys.modules
  with pytest.raises(ValueError, match='^config.gin '):
    foreign.check(CODE[kind], 'config.gin')
  assert 'turtle' not in sys.modules


@pytest.mark.parametrize('kind', CALLS)
def test_dynamic_registration_is_for_given_packages(kind, parsed_flags):
  text = DYNAMIC + CALLS[kind].format(file='x')
  with pytest.raises(ValueError, match='dynamic_registration, .*--allow_imports=[a-z_,]+ permits'):
    foreign.check(text, 'config.gin')
  with parsed_flags(predict, '--allow_imports=optax'):
    with pytest.raises(ValueError, match='which may run any code|which it does not import'):
      foreign.check(text, 'config.gin')


def test_a_configuration_of_t5x_is_told_from_ours(parsed_flags):
  text = DYNAMIC + 'import __main__ as train_script\ntrain_script.train.model = %MODEL\n'
  with parsed_flags(predict, '--allow_imports=__main__'):
    with pytest.raises(ValueError, match='import __main__.* with gin/t5x/train.gin'):
      foreign.check(text, 'config.gin')


@pytest.mark.parametrize('given', [[], ['--allow_imports=optax']])
@pytest.mark.parametrize('call', [WRITE, PARSE], ids=['write', 'parse'])
@pytest.mark.parametrize('main', [predict, export], ids=['predict', 'export'])
def test_mains_call_no_function(main, call, given, digits_run, tmp_path, run_main):
  folder = tmp_path / 'run'
  file = tmp_path / 'file.gin'
  folder.mkdir()
  (folder / 'checkpoint_1').symlink_to(digits_run[0] / 'checkpoint_1')
  if call is PARSE:
    (tmp_path / 'evil_module.py').write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    file.write_text('import evil_module\n')
  (folder / 'config.gin').write_text(DYNAMIC + call.format(file=str(file)))
  images = tmp_path / 'images.npz'
  np.savez(images, image=np.zeros((1, 8, 8), np.uint8))
  other = f'--dataset={images}' if main is predict else f'--output={tmp_path / "out.npz"}'
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(tmp_path)
    message = run_main(main, f'--checkpoint={folder}', other, *given, code=2)
  assert 'config.gin' in message and 'permits' in message
  assert not (tmp_path / 'ran').exists() and file.exists() == (call is PARSE)


def test_a_run_is_opened_without_its_code(digits_run, tmp_path, monkeypatch, parsed_flags):
  """Until the package is allowed."""
  folder = tmp_path / 'run'
  folder.mkdir()
  (folder / 'checkpoint_1').symlink_to(digits_run[0] / 'checkpoint_1')
  config = (digits_run[0] / 'config.gin').read_text()
  (folder / 'config.gin').write_text(f'import evil_code\n{config}own_head.tau = 2.0\n')
  (tmp_path / 'evil_code.py').write_text(
    f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    'import gin\n'
    "gin.external_configurable(lambda tau: tau, 'own_head', 'evil_code')\n"
  )
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ValueError, match='imports evil_code, .* --allow_imports=evil_code permits'):
    runs.open_run(folder)
  assert not (tmp_path / 'ran').exists()
  with parsed_flags(predict, '--allow_imports=evil_code'):
    assert runs.open_run(folder).step == 1
  assert (tmp_path / 'ran').exists()


def test_a_run_with_dynamic_registration_opens_once_its_packages_are_given(
  digits_run, tmp_path, parsed_flags
):
  """Such a run is trained with gin files of one's own that have this line."""
  frame = tmp_path / 'mine.gin'
  frame.write_text(
    DYNAMIC + 'from het_plugin.training import optimizers\nimport optax\n'
    'optimizers.adamw.learning_rate = @optax.constant_schedule()\n'
    'optax.constant_schedule.value = 0.1\n'
  )
  parsing.parse_config([str(digits_run[0] / 'config.gin'), str(frame)], [])
  folder = tmp_path / 'run'
  folder.mkdir()
  (folder / 'checkpoint_1').symlink_to(digits_run[0] / 'checkpoint_1')
  (folder / 'config.gin').write_text(gin.config_str())
  assert (
    '@optax.constant_schedule()' in gin.config_str() and 'train.train.model' in gin.config_str()
  )
  with pytest.raises(ValueError, match='--allow_imports=.*optax.* permits'):
    runs.open_run(folder)
  with parsed_flags(predict, '--allow_imports=optax'):
    assert runs.open_run(folder).step == 1
