"""BUILD against the tree. What it uses of Starlark is Python too, so it is read without Bazel."""

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def glob(include, exclude=(), allow_empty=False):
  found = {
    str(path.relative_to(ROOT))
    for pattern in include
    for path in ROOT.glob(f'{pattern}/*' if pattern.endswith('**') else pattern)
    if path.is_file()
  }
  # Not by a search: patterns such as **/*.py would go through the environments, for minutes.
  excluded = [re.compile(regex(pattern)) for pattern in exclude]
  found = sorted(x for x in found if not any(pattern.fullmatch(x) for pattern in excluded))
  assert found or allow_empty, f'BUILD: no file is like {include}'
  return found


def regex(pattern):
  """The regular expression of paths that are like the pattern."""
  parts = {'**/': '(?:.*/)?', '**': '.*', '*': '[^/]*'}
  return ''.join(parts.get(x) or re.escape(x) for x in re.split(r'(\*\*/|\*\*|\*)', pattern))


def read_build():
  """{name: {kind, srcs, deps, ...}} of BUILD's targets."""
  targets = {}

  def rule(kind):
    def add(name, **attributes):
      assert name not in targets, f'BUILD: two targets are called {name}'
      targets[name] = {'kind': kind, **attributes}

    return add

  rules = {kind: rule(kind) for kind in ('filegroup', 'py_binary', 'py_library', 'py_test')}
  ignored = {'load': lambda *_: None, 'package': lambda **_: None}
  exec((ROOT / 'BUILD').read_text(), rules | ignored | {'glob': glob})
  return targets


TARGETS = read_build()


def test_every_python_file_is_in_a_target():
  found = {file for target in TARGETS.values() for file in target.get('srcs', ())}
  folders = ('het_plugin', 'benchmarks', 'launch', 'studies', 'tests')
  wanted = {str(p.relative_to(ROOT)) for folder in folders for p in (ROOT / folder).rglob('*.py')}
  assert wanted <= found, f'BUILD lacks {sorted(wanted - found)}'


def test_labels_name_targets_and_there_is_no_circle():
  left = {name: {*target.get('deps', ())} for name, target in TARGETS.items()}
  for name, target in TARGETS.items():
    labels = {*target.get('deps', ()), *target.get('data', ())}
    unknown = {label[1:] for label in labels if label.startswith(':')} - set(TARGETS)
    assert not unknown, f'BUILD: {name} depends on {sorted(unknown)}, which is no target'
  while free := [name for name, deps in left.items() if not {d[1:] for d in deps} & set(left)]:
    for name in free:
      del left[name]
  assert not left, f'BUILD: a circle is among {sorted(left)}'


def reached(name):
  """The names of the targets that a target depends on, directly or not, and its own."""
  labels = [label[1:] for label in TARGETS[name].get('deps', ()) if label.startswith(':')]
  return {name}.union(*map(reached, labels))


def test_rooms_depend_on_what_they_import():
  for path in (ROOT / 'het_plugin').glob('*/**/*.py'):
    room = path.relative_to(ROOT / 'het_plugin').parts[0]
    imported = set(re.findall(r'^ *(?:from|import) het_plugin\.(\w+)', path.read_text(), re.M))
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.ImportFrom) and node.module == 'het_plugin':
        imported |= {alias.name for alias in node.names}
    assert imported <= reached(room), f'{path} imports {sorted(imported - reached(room))}'


def test_the_packages_are_those_of_the_wheel():
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
  extras = project['optional-dependencies']
  lines = [*project['dependencies'], *extras['train'], *extras['tfds'], *extras['seqio']]
  names = {re.match(r'[\w-]+', line)[0].replace('-', '_') for line in lines} - {'het_plugin'}
  assert {label.removeprefix('@pypi//') for label in TARGETS['packages']['deps']} == names
