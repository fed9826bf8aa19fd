"""BUILD against the tree: every file has one target, and dependencies are what files import.

BUILD is read without Bazel: what it uses of Starlark is Python too.
"""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON_DIRS = ('het_plugin', 'benchmarks', 'launch', 'tests')
# Import name: name on PyPI, where they differ.
PYPI_NAMES = {
  'PIL': 'pillow',
  'absl': 'absl_py',
  'gin': 'gin_config',
  'orbax': 'orbax_checkpoint',
  'sklearn': 'scikit_learn',
  'vizier': 'google_vizier',
  'yaml': 'pyyaml',
}
# What is not on PyPI, and found on the path where somebody has it (docs/t5x.md).
NOT_ON_PYPI = {'t5x'}


def glob(patterns):
  files = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
  return sorted(str(path.relative_to(ROOT)) for path in files)


def read_build():
  """[{kind, name, srcs, deps, ...}] of BUILD's targets."""
  targets = []

  def rule(kind):
    return lambda **attributes: targets.append({'kind': kind, **attributes})

  rules = ('filegroup', 'py_binary', 'py_library', 'py_test')
  ignored = {'load': lambda *_: None, 'package': lambda **_: None}
  exec(
    (ROOT / 'BUILD').read_text(), {kind: rule(kind) for kind in rules} | ignored | {'glob': glob}
  )
  return targets


TARGETS = read_build()
# pytest_main.py is the main of every test, and a library that carries what it needs.
PYTHON = [target for target in TARGETS if target['kind'] != 'filegroup']


def sources(target):
  """The target's own files."""
  shared = {target['main']} if target['kind'] == 'py_test' else set()
  return [src for src in target['srcs'] if src not in shared]


FILEGROUPS = {f':{t["name"]}': t['srcs'] for t in TARGETS if t['kind'] == 'filegroup'}
OWNER = {src: target['name'] for target in PYTHON for src in sources(target)}


def imported_modules(source):
  """Full names of what a file imports, anywhere in it."""
  names = set()
  for node in ast.walk(ast.parse((ROOT / source).read_text())):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      names |= {f'{node.module}.{alias.name}' for alias in node.names}
  others = sys.stdlib_module_names | NOT_ON_PYPI
  return {name for name in names if name.split('.')[0] not in others}


def file_of(module):
  """The file of a module of ours, or of an object in one; None for other people's."""
  parts = module.split('.')
  for length in range(len(parts), 0, -1):
    stem = '/'.join(parts[:length])
    for path in (f'{stem}.py', f'{stem}/__init__.py', f'benchmarks/{stem}.py'):
      if (ROOT / path).is_file():
        return path
  return None


def label_of(module):
  source = file_of(module)
  if source is None:
    top = module.split('.')[0]
    return f'@pypi//{PYPI_NAMES.get(top, top)}'
  assert source in OWNER, f'BUILD has no target for {source}'
  return f':{OWNER[source]}'


def python_files():
  return {
    str(path.relative_to(ROOT)) for folder in PYTHON_DIRS for path in (ROOT / folder).rglob('*.py')
  }


def is_main(source):
  return (
    source.startswith(('het_plugin/', 'benchmarks/', 'launch/'))
    and "if __name__ == '__main__'" in (ROOT / source).read_text()
  )


def test_every_python_file_is_in_one_target():
  owned = [src for target in PYTHON for src in sources(target)]
  twice = sorted({src for src in owned if owned.count(src) > 1})
  assert not twice, f'in more than one target: {twice}'
  # conftest.py beside tests is found by pytest in the tests' data
  missing = {f for f in python_files() if f not in owned and Path(f).name != 'conftest.py'}
  assert not missing, f'BUILD lacks {sorted(missing)}'


def test_every_file_of_a_target_exists():
  for target in TARGETS:
    files = [*target.get('srcs', ()), *target.get('data', ())]
    missing = [file for file in files if not file.startswith(':') and not (ROOT / file).is_file()]
    assert not missing, f'{target["name"]} lists {missing}'


def test_kinds():
  kinds = {src: target['kind'] for target in PYTHON for src in sources(target)}
  for source in python_files() & set(OWNER):
    wanted = (
      'py_test'
      if Path(source).name.startswith('test_')
      else 'py_binary'
      if is_main(source)
      else 'py_library'
    )
    assert kinds[source] == wanted, f'{source} should be in a {wanted}'


def test_a_binary_is_its_main():
  for target in PYTHON:
    if target['kind'] == 'py_binary':
      assert target['srcs'] == [target['main']], f'BUILD: srcs and main of {target["name"]} differ'


def test_files_read_at_run_time_are_data():
  """Of libraries and binaries: tests see the whole checkout anyway."""
  labels = [label for t in PYTHON if t['kind'] != 'py_test' for label in t.get('data', ())]
  given = {file for label in labels for file in FILEGROUPS.get(label, [label])}
  missing = {
    file
    for file in glob(['het_plugin/**/*', 'gin/**/*'])
    if not file.endswith(('.py', '.pyc')) and file not in given
  }
  assert not missing, f'BUILD: {sorted(missing)} should be data of the library that reads them'


@pytest.mark.parametrize('target', PYTHON, ids=lambda target: target['name'])
def test_dependencies_are_the_imports(target):
  wanted = {label_of(module) for src in sources(target) for module in imported_modules(src)}
  wanted -= {f':{target["name"]}'}
  if target['kind'] == 'py_test':  # pytest comes with the main of tests
    wanted = (wanted - {'@pypi//pytest'}) | {':pytest_main'}
  deps = target.get('deps', ())
  lacking, needless = sorted(wanted - set(deps)), sorted(set(deps) - wanted)
  assert sorted(deps) == sorted(wanted), (
    f'BUILD, deps of {target["name"]}: add {lacking}, remove {needless} and repetitions'
  )


def test_labels_name_targets():
  names = {target['name'] for target in TARGETS}
  used = {label for t in TARGETS for key in ('deps', 'data') for label in t.get(key, ())}
  unknown = {label for label in used if label.startswith(':') and label[1:] not in names}
  assert not unknown, f'BUILD has no targets {sorted(unknown)}'


def test_third_party_packages_are_declared():
  """Whatever is imported is a dependency of the wheel or of an extra, by its own name."""
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
  extras = project['optional-dependencies']
  requirements = [*project['dependencies'], *extras['test'], *extras['launch'], *extras['tune']]
  declared = {re.match(r'[\w-]+', line)[0].replace('-', '_') for line in requirements}
  used = {label for target in PYTHON for label in target.get('deps', ()) if label[0] == '@'}
  missing = {label.removeprefix('@pypi//') for label in used} - declared
  assert not missing, f'pyproject.toml lacks {sorted(missing)}'
