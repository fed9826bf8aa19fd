"""het-plugin COMMAND: every command by its name, with complete help; settings as flags."""

import dataclasses
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Literal

import pytest
from absl import flags
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from het_plugin import __main__ as front
from het_plugin.cli import command_line
from het_plugin.cli import settings as cli
from het_plugin.system.ranges import Count, Positive

ROOT = Path(__file__).resolve().parents[2]


def command(*arguments):
  return subprocess.run(
    [sys.executable, '-m', 'het_plugin', *arguments], cwd=ROOT, capture_output=True, text=True
  )


@pytest.mark.parametrize('name', front.commands())
def test_help_has_every_flag_of_a_command(name, parsed_flags):
  chosen = importlib.import_module(f'het_plugin.commands.{name}')
  before = set(flags.FLAGS)
  with parsed_flags(chosen):
    text = command_line.help_text(chosen.__doc__)
    defined = set(flags.FLAGS) - before
    assert all(flags.FLAGS[flag].help for flag in defined)
  assert chosen.__doc__ in text
  assert defined and defined <= set(re.findall(r'^  --(?:\[no\])?(\w+)$', text, re.M))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfEachKind(cli.CommandSettings):
  """One flag of each kind.

  Attributes:
    name: Some text,
      over two lines.
    kind: One of some words.
    top: A number: at least 1.
    share: Any number.
    strength: A number or a word.
    deep: True or false.
    mesh: Two or three numbers.
    shots: Numbers or a word.
    files: One each.
  """

  aliases = {'path': 'files'}

  name: str | None = None
  kind: Annotated[str, cli.OneOf(('a', 'b'))] = 'a'
  top: Count = 5
  share: float = 0.5
  strength: Positive | Literal['auto'] = 'auto'
  deep: bool = True
  mesh: tuple[Count, Count] | tuple[Count, Count, Count] | None = None
  shots: tuple[Count | Literal['all'], ...] = (1, 5)
  files: cli.Repeated[str] = ()


def test_fields_of_settings_are_flags(parsed_flags):
  with parsed_flags(OfEachKind):
    assert OfEachKind.parsed() == OfEachKind()  # the defaults go through text and back
    assert flags.FLAGS['name'].help == 'Some text, over two lines.'
  given = ['--name', 'x', '--kind=b', '--top=2', '--share=1', '--strength=3', '--nodeep']
  given += ['--mesh=2,1', '--shots=3,all', '--files=a,b', '--path=c']
  with parsed_flags(OfEachKind, *given) as words:
    found = OfEachKind.parsed(words[1:])
  assert dataclasses.asdict(found) == {
    'given': {
      'name': 'x',
      'kind': 'b',
      'top': '2',
      'share': '1.0',
      'strength': '3',
      'deep': 'False',
      'mesh': '2,1',
      'shots': '3,all',
      'files': 'a,b,c',
    },
    'words': (),
    'name': 'x',
    'kind': 'b',
    'top': 2,
    'share': 1.0,
    'strength': 3.0,
    'deep': False,
    'mesh': (2, 1),
    'shots': (3, 'all'),
    'files': ('a,b', 'c'),
  }
  with pytest.raises(ValueError, match='--top has no effect on words'):
    found.refuse(['top'], 'words')
  for wrong, must in (
    ('--mesh=2', 'be a list of 2'),
    ('--mesh=0,2', 'be a list of 2'),
    ('--shots=0,05', 'each be at least 1'),  # as it is typed
    ('--strength=-1', 'be'),
    ('--strength=none', 'be'),
    ('--top=0', 'be'),
  ):
    with parsed_flags(OfEachKind, wrong), pytest.raises(ValueError, match=f'{wrong} must {must}'):
      OfEachKind.parsed()
  for wrong in ('--kind=c', '--share=x'):
    with pytest.raises(flags.IllegalFlagValueError), parsed_flags(OfEachKind, wrong):
      pass


def test_commands_are_listed_and_dispatched():
  listed = command()
  assert listed.returncode == 0 and all(
    f'\n  {name} ' in listed.stdout for name in front.commands()
  )
  found = command('plan', '--help')
  assert found.returncode == 0 and '--gin.NAME=VALUE' in found.stdout and '--mesh' in found.stdout
  wrong = command('trian')
  assert (wrong.returncode, wrong.stderr) == (
    2,
    'Error: trian is not a command: did you mean train?\n',
  )


def test_gin_files_import_modules_of_the_folder_where_a_command_runs(tmp_path):
  script = tmp_path / 'bin' / 'het-plugin'
  own = tmp_path / 'own'
  for file, text in {
    script: 'from het_plugin.__main__ import main\nmain()\n',  # as pip writes it
    own / 'own.gin': 'import my_tasks\n',
    own / 'my_tasks.py': "raise ValueError('found')\n",
  }.items():
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
  arguments = [sys.executable, str(script), 'train', '--gin_file=own.gin']
  environment = os.environ | {'PYTHONPATH': str(ROOT)}
  found = subprocess.run(arguments, cwd=own, env=environment, capture_output=True, text=True)
  assert found.returncode == 2 and found.stderr.startswith('Error: found ')


def test_help_into_a_closed_pipe_ends_quietly():
  read, write = os.pipe()
  os.close(read)
  arguments = [sys.executable, '-m', 'het_plugin', 'status', '--help']
  found = subprocess.run(arguments, cwd=ROOT, stdout=write, stderr=subprocess.PIPE)
  os.close(write)
  assert (found.returncode, found.stderr) == (0, b'')


COMPLETE = """
source <("{python}" -m het_plugin completion)
COMP_WORDS=(het-plugin {words}); COMP_CWORD={last}
_het_plugin 2>/dev/null  # no compopt outside of a completion
echo "${{COMPREPLY[@]}}"
"""


@pytest.mark.slow
def test_bash_completes_flags():
  script = COMPLETE.format(python=sys.executable, words='fewshot --check', last=2)
  result = subprocess.run(['bash', '-c', script], cwd=ROOT, capture_output=True, text=True)
  assert result.stdout.strip() == '--checkpoint=', result.stderr


MISSING = """
import sys
sys.argv = ['het-plugin', 'fewshot']
from het_plugin.__main__ import main
main()
"""


def modules_beyond(extra):
  """What is installed here but not by `pip install het_plugin[extra]`: names of modules."""
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
  pending = [*project['dependencies'], *project['optional-dependencies'].get(extra, ())]
  pending = [Requirement(text) for text in pending]
  brought = {'het-plugin': {''}}  # package: its extras
  while pending:
    requirement = pending.pop()
    package = canonicalize_name(requirement.name)
    extras = {'', *requirement.extras} - brought.setdefault(package, set())
    brought[package] |= extras
    for needed in map(Requirement, importlib.metadata.requires(package) or ()):
      if any(needed.marker is None or needed.marker.evaluate({'extra': x}) for x in extras):
        pending.append(needed)
  packages = importlib.metadata.packages_distributions()
  return [name for name, of in packages.items() if not brought.keys() & map(canonicalize_name, of)]


def run_with(extra, code, *arguments):
  """Runs Python where imports fail of what an extra does not bring."""
  start = f'import sys\nsys.modules |= dict.fromkeys({modules_beyond(extra)})\n'
  command = [sys.executable, '-c', start + code, *arguments]
  result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert result.returncode == 0, result.stderr
  return result.stdout


@pytest.mark.parametrize(
  ('extra', 'absent', 'code'),
  [
    (None, 'sklearn', 'import het_plugin.heads, het_plugin.backbones, het_plugin.nnx'),
    ('probe', 'gin', 'import het_plugin.commands.probe'),
  ],
)
def test_what_an_extra_brings_is_enough(extra, absent, code):
  assert absent in modules_beyond(extra)
  run_with(extra, code)


@pytest.mark.parametrize('name', [None, *front.commands()])
def test_a_missing_extra_is_one_sentence(name, tmp_path):
  start = ['-c', MISSING] if name is None else ['-m', f'het_plugin.{name}']
  absent = ('etils', 'gin', 'optax', 'orbax', 'safetensors', 'tensorflow')
  (tmp_path / 'sitecustomize.py').write_text(
    f'import sys\nsys.modules |= dict.fromkeys({absent})\n'
  )
  environment = os.environ | {'PYTHONPATH': f'{tmp_path}:{ROOT}'}
  result = subprocess.run(
    [sys.executable, *start], cwd=tmp_path, env=environment, capture_output=True, text=True
  )
  assert result.returncode == 2 and result.stderr.count('\n') == 1
  assert result.stderr.endswith("pip install 'het_plugin[train]'\n")


@pytest.mark.parametrize('version', ['0.9.1', '0.13.0'])
@pytest.mark.parametrize('name', [None, 'train'])
def test_an_unsupported_version_is_one_sentence(name, version, tmp_path):
  start = ['-c', MISSING] if name is None else ['-m', f'het_plugin.{name}']
  requires = ('jax<0.13,>=0.10.2', "flax>=0.1; extra == 'train'", "numpy<1; extra == 'launch'")
  packages = {'het_plugin': ('0.1.0', requires), 'jax': (version, ())}
  for package, (its_version, requires) in packages.items():
    folder = tmp_path / f'{package}-{its_version}.dist-info'
    folder.mkdir()
    lines = [
      f'Name: {package}',
      f'Version: {its_version}',
      *map('Requires-Dist: {}'.format, requires),
    ]
    (folder / 'METADATA').write_text('\n'.join(lines))
  environment = os.environ | {'PYTHONPATH': f'{tmp_path}:{ROOT}'}
  result = subprocess.run(
    [sys.executable, *start], cwd=tmp_path, env=environment, capture_output=True, text=True
  )
  message = f"jax {version}: pip install 'jax<0.13,>=0.10.2'\n"
  assert result.returncode == 2 and result.stderr.endswith(message)
  assert result.stderr.count('\n') == 1


TRAINING = """
import numpy as np
from het_plugin.data import tasks
reader = tasks.get_task('glyph_names').reader(
  'validation[:1%]', {'image': 16, 'text': 8}, augment=False, shuffle=False, seed=0, num_epochs=1
)
batch, _ = reader.read(np.arange(2))
print(batch['text'].shape)
try:
  tasks.get_task('tfds:mnist')
except ValueError as error:
  print(error)
sys.argv = ['train', *sys.argv[1:]]
from het_plugin.commands import train
from het_plugin.cli import command_line
command_line.run_command(train)
"""


@pytest.mark.slow
def test_training_and_captions_need_the_extra_train_only(tmp_path):
  assert {'tensorflow', 'tensorflow_datasets', 'seqio'} <= set(modules_beyond('train'))
  arguments = ['--gin_file=gin/runs/digits_smoke.gin', '--gin_file=gin/heads/het_xl.gin']
  arguments += ['--gin.TRAIN_STEPS=3', '--gin.WARMUP_STEPS=0', f'--gin.MODEL_DIR="{tmp_path}"']
  said = run_with('train', TRAINING, *arguments)
  assert said.startswith("(2, 8)\ntfds:mnist needs TensorFlow Datasets: pip install 'het")
  assert (tmp_path / 'checkpoint_3').is_dir()
