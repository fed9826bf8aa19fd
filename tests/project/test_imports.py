"""The house: who may import whom (docs/design.md), and what lies where."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import het_plugin
from het_plugin import reporting

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / 'het_plugin'
# room: the rooms below it that it imports.
BELOW = {
  'system': set(),
  'integrate': {'system'},
  'heads': {'integrate', 'system'},
  'backbones': {'system'},
  'measures': {'system'},
  'weights': {'system'},
  'reporting': {'system'},
  'cli': {'config', 'reporting', 'system'},
  'rows': {'measures', 'system', 'weights'},
  'estimators': {'heads', 'integrate', 'measures', 'reporting', 'rows', 'system', 'weights'},
  'data': {'reporting', 'rows', 'system'},  # of reporting, the progress
  'models': {'backbones', 'data', 'heads', 'integrate', 'system'},  # of data, feature converters
  'training': {'data', 'system', 'weights'},
  'operations': {'reporting', 'system', 'training'},
  'config': {'data', 'system'},
  'runs': {
    'config',
    'data',
    'estimators',
    'operations',
    'reporting',
    'rows',
    'system',
    'training',
    'weights',
  },
  'evaluation': {
    'data',
    'estimators',
    'measures',
    'reporting',
    'rows',
    'runs',
    'system',
    'training',
    'weights',
  },
  'planning': {'cli', 'config', 'data', 'reporting', 'system', 'training'},
  'hosts': {
    'config',
    'data',
    'evaluation',
    'heads',
    'integrate',
    'measures',
    'system',
    'training',
  },
  'experiments': {
    'config',
    'data',
    'evaluation',
    'measures',
    'operations',
    'reporting',
    'rows',
    'runs',
    'system',
    'training',
    'weights',
  },
}
PORTABLE = {'integrate', 'heads', 'backbones'}  # need jax, flax and numpy only
KNOW_GIN = {'commands', 'config', 'runs', 'planning', 'hosts', 'experiments'}

FILES = sorted(PACKAGE.rglob('*.py'))


def room_of(path):
  parts = path.relative_to(PACKAGE).parts
  return parts[0] if len(parts) > 1 else 'mains'


def imports(path):
  """Full names of what a file imports, anywhere in it."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}: a relative import'
      yield from (f'{node.module}.{alias.name}' for alias in node.names)


def file_of(name):
  """The file of a module of ours, or of the module of an object of ours."""
  parts = name.split('.')
  for length in range(len(parts), 0, -1):
    stem = ROOT.joinpath(*parts[:length])
    for path in (stem.with_suffix('.py'), stem / '__init__.py'):
      if path.is_file():
        return path
  raise AssertionError(f'no module {name}')


IMPORTED = {path: set(imports(path)) for path in FILES}
OURS = {
  path: {file_of(name) for name in names if name.split('.')[0] == 'het_plugin'}
  for path, names in IMPORTED.items()
}


def users(package):
  """Files that import a package of others."""
  return {p for p, names in IMPORTED.items() if any(n.split('.')[0] == package for n in names)}


def test_rooms_import_those_below_only():
  assert {path.parent.name for path in PACKAGE.glob('*/__init__.py')} - {'gin'} == {
    *BELOW,
    'commands',
  }
  for path, imported in OURS.items():
    room = room_of(path)
    for other in {room_of(file) for file in imported if file != PACKAGE / '__init__.py'}:
      is_below = room in ('commands', 'mains') or other in BELOW[room]
      assert other == room or is_below, f'{path} imports {other}'


def test_no_file_imports_itself_through_others():
  left = dict(OURS)
  while free := [path for path, imported in left.items() if not (imported - {path}) & set(left)]:
    for path in free:
      del left[path]
  assert not left, f'a circle is among {sorted(str(p.relative_to(PACKAGE)) for p in left)}'


def test_studies_take_the_public_interface_only():
  assert not users('studies') | users('benchmarks')
  for path in (ROOT / 'studies').rglob('*.py'):
    text = path.read_text()
    ours = [name for name in imports(path) if name.split('.')[0] in ('benchmarks', 'het_plugin')]
    assert not [name for name in ours if '._' in name], path
    assert not re.search(r'\b(?!self\b|ablation\b)\w+\._[a-z]', text), path


def test_measures_know_neither_jax_nor_files():
  for path in FILES:
    if room_of(path) == 'measures':
      others = {name.split('.')[0] for name in IMPORTED[path]} - sys.stdlib_module_names
      assert others <= {'het_plugin', 'numpy', 'scipy', 'sklearn'}, path


def test_the_core_needs_jax_flax_and_numpy_only():
  core = {path for path in FILES if room_of(path) in PORTABLE} | {PACKAGE / 'nnx.py'}
  while more := {file for path in core for file in OURS[path]} - core:
    core |= more
  for path in core:
    others = {name.split('.')[0] for name in IMPORTED[path]} - sys.stdlib_module_names
    assert others <= {'het_plugin', 'jax', 'flax', 'numpy'}, path


def test_gin_and_orbax_stay_where_they_belong():
  assert {room_of(path) for path in users('gin')} <= KNOW_GIN
  knows_orbax = {'checkpoints.py', 'checkpoint_reader.py', 'conversion.py', 'processes.py'}
  assert {path.name for path in users('orbax')} == knows_orbax


def test_hosts_alone_know_a_host():
  for package in ('big_vision', 'kauldron', 't5x'):
    assert {room_of(path) for path in users(package)} <= {'hosts'}, package
  assert users('kauldron') and users('t5x')


def test_the_root_holds_names_of_commands():
  names = {path.stem for path in PACKAGE.glob('commands/[a-z]*.py')}
  assert {path.stem for path in PACKAGE.glob('*.py')} == names | {'__init__', '__main__', 'nnx'}
  for name in names:
    assert f"alias(__name__, '{name}')" in (PACKAGE / f'{name}.py').read_text()


def test_the_gin_tree_is_no_package():
  assert not list((ROOT / 'gin').rglob('*.py'))


@pytest.mark.parametrize('room', [*BELOW, 'hosts.t5x'])
def test_configurables_exist(room):
  """Those of hosts.t5x need t5x, apart from ours."""
  package = f'het_plugin.{room}'
  for key, names in getattr(importlib.import_module(package), 'CONFIGURABLES', {}).items():
    if room == 'hosts.t5x' and not key.startswith('het_plugin.'):
      continue
    module = importlib.import_module(key if '.' in key else f'{package}.{key}')
    for name in names:
      assert callable(getattr(module, name)), f'{package} states {key}.{name}'


def run(code):
  """What a program prints."""
  result = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=True
  )
  return result.stdout.split()


def test_few_shot_and_reading_of_data_bring_no_jax_and_the_core_brings_no_tensorflow():
  others = '{"tensorflow", "gin", "seqio", "clu", "orbax"} & set(sys.modules)'
  assert not run(
    'import sys, numpy\n'
    'from het_plugin.measures import few_shot\n'
    'x, y = numpy.eye(4), numpy.arange(4) // 2\n'
    'few_shot(x, y, x, y, shots=(1, 2))\n'
    'import het_plugin.data.tasks\n'  # which workers that read images import
    f'print(*{others} | ({{"jax"}} & set(sys.modules)))\n'
    'import het_plugin.backbones, het_plugin.estimators\n'
    f'print(*{others})'
  )


def test_the_package_itself_is_imported_at_once():
  seconds, *brought = run(
    'import sys, time\n'
    'start = time.process_time()\n'
    'import het_plugin\n'
    'print(time.process_time() - start, *{"jax", "numpy", "tensorflow"} & set(sys.modules))\n'
    'het_plugin.data, het_plugin.measures, het_plugin.rows, het_plugin.runs'  # without an import
  )
  assert float(seconds) < 0.3 and not brought


def test_flags_of_commands_and_the_state_of_a_run_need_no_heavy_package():
  """So --help and a wrong flag take a fraction of a second."""
  assert not run(
    'import sys\n'
    'from het_plugin.__main__ import commands\n'
    'from het_plugin.cli import command_line, completion\n'
    'from het_plugin.operations import status_report\n'
    'from het_plugin.reporting import Report\n'
    'completion.script(commands())\n'  # defines the flags of every command
    'print(*{"flax", "gin", "jax", "scipy.linalg", "sklearn", "tensorflow"} & set(sys.modules))'
  )


def test_names_of_the_package_are_those_of_its_rooms():
  for name in set(het_plugin.__all__) - {'__version__'}:
    assert getattr(het_plugin, name).__module__.startswith('het_plugin.'), name
  for package in (het_plugin, reporting):
    assert set(package.__all__) <= set(dir(package))
  assert {'HetXL', '__version__'} <= set(het_plugin.__all__) and 'Table' in reporting.__all__
  with pytest.raises(AttributeError, match="no attribute 'HetXXL'"):
    het_plugin.HetXXL  # noqa: B018
