"""Who may import whom (docs/design.md)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PORTABLE = {'jax', 'flax', 'numpy'}
# package: what it may import of the project
ALLOWED = {
  'integrate': {'integrate'},
  'heads': {'heads', 'integrate'},
  'backbones': {'backbones'},
  'models': {'models', 'backbones', 'heads', 'integrate', 'data'},
  'data': {'data'},
  'training': {'training', 'data', 'weights'},
  'weights': {'weights'},
  'planning': {'planning', 'training', 'data', 'configurables', 'gin_utils', 'reporting'},
  'evaluation': {'evaluation', 'training', 'data', 'weights'},
  'reporting': {'reporting'},
  't5x_host': {
    'integrate',
    't5x_host',
    'config_changes',
    'gin_utils',
    'data',
    'evaluation',
    'training',
  },
  'studies': {
    'studies',
    'training',
    'evaluation',
    'data',
    'models',
    'reporting',
    'gin_utils',
    'train',
    'trained_run',
    'heads',
    'integrate',
  },
}
GIN_USERS = {
  'config_changes.py',
  'configurables.py',
  'command_line.py',
  'train.py',
  'quickstart.py',
  'ablate.py',
  'trained_run.py',
  'fewshot.py',
  'zeroshot.py',
  'planning/step.py',
  'studies/runs.py',
  'studies/temperature.py',
  't5x_host/config.py',
  'studies/flops.py',
}


def imports(path):
  """Names of the modules that a file imports, with the names taken from them."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}: a relative import'
      yield from (f'{node.module}.{alias.name}' for alias in node.names)


def files(package):
  found = sorted((ROOT / 'het_plugin' / package).rglob('*.py'))
  assert found
  return found


def test_every_package_has_a_rule():
  packages = {path.parent.name for path in (ROOT / 'het_plugin').glob('*/__init__.py')}
  assert packages == set(ALLOWED)


@pytest.mark.parametrize('package', ALLOWED)
def test_packages_import_in_one_direction(package):
  for path in files(package):
    for name in imports(path):
      if name.startswith('het_plugin.'):
        assert name.split('.')[1] in ALLOWED[package], f'{path} imports {name}'


@pytest.mark.parametrize('package', ['integrate', 'heads', 'backbones'])
def test_the_core_needs_jax_flax_and_numpy_only(package):
  for path in files(package):
    tops = {name.split('.')[0] for name in imports(path)} - {'het_plugin'}
    assert tops - sys.stdlib_module_names <= PORTABLE, path


def test_the_core_brings_no_tensorflow():
  code = (
    'import sys, het_plugin.heads, het_plugin.integrate, het_plugin.backbones\n'
    'print([m for m in ("tensorflow", "gin", "seqio", "clu", "orbax") if m in sys.modules])'
  )
  result = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=True
  )
  assert result.stdout.strip() == '[]'


def test_gin_is_imported_in_few_places():
  users = {
    str(path.relative_to(ROOT / 'het_plugin'))
    for path in (ROOT / 'het_plugin').rglob('*.py')
    if any(name.split('.')[0] == 'gin' for name in imports(path))
  }
  assert users == GIN_USERS


def test_one_module_knows_orbax():
  users = {
    path.name
    for path in (ROOT / 'het_plugin').rglob('*.py')
    if any(name.split('.')[0] == 'orbax' for name in imports(path))
  }
  assert users == {'checkpoints.py'}


def test_the_gin_tree_is_no_package():
  assert not list((ROOT / 'gin').rglob('*.py'))
