"""README, docs/ and the pages of studies/: lines are short, what they name exists (links, paths,
flags, bindings), and examples run.
"""

import dataclasses
import functools
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gin
import studies
from het_plugin import __main__ as front
from het_plugin.config import registry
from studies import study

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
  [ROOT / 'README.md', *(ROOT / 'docs').glob('*.md'), *(ROOT / 'studies').rglob('*.md')]
)
TREES = ('het_plugin', 'gin', 'launch', 'tests', 'benchmarks', 'docs', 'examples', 'studies')
STUDIES = [f'studies/{path.name}' for path in (ROOT / 'studies').iterdir() if path.is_dir()]
# Made by a run or a reader, not part of the tree.
EXAMPLES = {'het_plugin/gin/heads/NAME.gin', 'gin/heads/NAME.gin', 'het_plugin.gin'}

pages = pytest.mark.parametrize('page', PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def blocks(page, language):
  """The fenced blocks of a language, without their indentation in lists."""
  found = re.findall(rf'^( *)```{language}\n(.*?)^\1```', page.read_text(), re.M | re.S)
  return [re.sub(f'^{indent}', '', text, flags=re.M) for indent, text in found]


@pages
def test_lines_of_prose_are_short(page):
  """So that changes are readable line by line. Targets of links cannot be broken."""
  text = re.sub(r'^ *```.*?^ *```$', '', page.read_text(), flags=re.M | re.S)
  text = re.sub(r'^( *\||    ).*', '', text, flags=re.M)  # tables, indented code
  assert not [line for line in text.splitlines() if len(re.sub(r'\]\(\S+\)', ']', line)) > 120]


@pages
def test_links_resolve(page):
  for target in re.findall(r'\]\(([^)#]+)\)', page.read_text()):
    if not target.startswith('http'):
      assert (page.parent / target).exists(), target


@pages
def test_paths_exist(page):
  text = page.read_text()
  names = re.findall(r'`([\w./-]+)`', text) + re.findall(r"'(het_plugin/gin/[\w./-]+)'", text)
  names += re.findall(
    r'(?:=|bash |python )((?:gin|launch|tests|benchmarks|studies)/[\w./-]+)', text
  )
  for name in set(names) - EXAMPLES:
    if name.split('/')[0] in TREES and '/' in name:
      path = name.removeprefix('het_plugin/') if name.startswith('het_plugin/gin/') else name
      assert (ROOT / path).exists(), name


@functools.cache
def defined_flags(main):
  """Flags of a command; of a script those that it and what it imports define, by their text."""
  text = (ROOT / main).read_text()
  if main.endswith('.sh'):  # whose arguments after -- are training's
    own = re.findall(r'--(\w+)(?:=\*)?(?: \||\))', text)
    return {*own} | defined_flags('het_plugin/train.py')
  flags = {'verbosity', 'verbose', 'help'}
  if main.startswith('het_plugin/'):
    return flags | flags_of(f'het_plugin.commands.{Path(main).stem}', 'Settings')
  if 'class Settings(' in text:
    return flags | flags_of(main.removesuffix('.py').replace('/', '.'), 'Settings')
  flags |= set(re.findall(r"\.add_argument\(\s*'(?:--)?(\w+)'", text))
  for module, names in re.findall(r'^from ([\w.]+) import (\([^)]*\)|.*)', text, re.M):
    for name in ('', *re.findall(r'\w+', names)):
      path = '/'.join(filter(None, (*module.split('.'), name))) + '.py'
      is_script = (ROOT / path).is_file() and not path.startswith('het_plugin/')
      if is_script and 'add_argument' in (ROOT / path).read_text():
        flags |= defined_flags(path)
  return flags


def flags_of(module, name):
  """Flags of a dataclass of settings: its fields, noNAME of those that are true or false."""
  settings = getattr(importlib.import_module(module), name)
  fields = {field.name: field.default for field in dataclasses.fields(settings)}
  return {*fields, *settings.aliases, *(f'no{x}' for x, value in fields.items() if value is True)}


def main_of(command):
  """The file of the main that a shell line starts; None where it is none of ours."""
  if 'launch/quickstart.sh' in command:  # hands its arguments on
    return 'het_plugin/quickstart.py'
  if module := re.search(r'python -m ((?:het_plugin|launch|benchmarks|studies)\.[\w.]+)', command):
    return module[1].replace('.', '/') + '.py'
  if 'launch/tpu_vm.sh' in command:
    return 'launch/tpu_vm.sh'
  script = re.search(r'python ((?:benchmarks|studies)/[\w/]+\.py)', command)
  return script and script[1]


@pages
def test_commands_exist(page):
  text = page.read_text()
  for name in re.findall(r'`(?:het-plugin |python -m het_plugin\.)(\w+)', text):
    assert (ROOT / 'het_plugin' / f'{name}.py').is_file(), name
  for name in re.findall(r'python -m ((?:benchmarks|launch|studies)\.[\w.]*\w)', text):
    assert (ROOT / f'{name.replace(".", "/")}.py').is_file(), name
  for name in re.findall(r'python -m studies\.ablate (\w+)(?![\w./])', text):
    assert name == 'NAME' or name in study.names(), name


@pages
def test_flags_exist(page):
  for block in blocks(page, 'bash'):
    for command in re.sub(r'\\\n', ' ', block).splitlines():
      for part in re.split(r' -- (?=python )', command):  # a launcher, and what it starts
        if main := main_of(part):
          unknown = set(re.findall(r'--(\w+)(?![\w.])', part)) - defined_flags(main)
          assert not unknown, f'{main} has no flag {unknown}: {part}'


@pages
def test_flags_in_the_text_are_flags_of_a_main(page):
  folders = ('benchmarks', 'launch', 'launch/gke', 'studies', *STUDIES)
  mains = [f'{name}/{path.name}' for name in folders for path in (ROOT / name).glob('*.py')]
  mains += [f'het_plugin/{name}.py' for name in front.commands()]
  mains.append('launch/tpu_vm.sh')
  unknown = set(re.findall(r'`--(\w+)(?![\w.-])', page.read_text()))
  unknown -= set().union(*map(defined_flags, mains))
  assert not unknown, f'no main has a flag {unknown}'


def gin_names(page):
  """(configurable, parameter or None) that the page binds, macros as (None, name)."""
  lines = [line for block in blocks(page, 'gin') for line in block.splitlines()]
  lines += re.findall(r'--gin\.([\w./]+ ?=)', page.read_text())
  section = None
  for line in lines:
    if match := re.match(r'([\w/]+):\s*(#.*)?$', line):
      section = match[1].split('/')[-1]
    elif match := re.match(r'(\s*)(?:(\w+)/)?(\w+)(?:\.(\w+))? ?=', line):
      indent, _, name, parameter = match.groups()
      if parameter:
        yield name, parameter
      elif indent and section:
        yield section, name
      else:
        yield None, name


@pages
def test_bindings_name_what_exists(page):
  registry.register_trainer()
  for block in blocks(page, 'python'):
    if '@gin.configurable' in block:  # a module of the reader
      exec(block, {'__name__': 'my_module'})
  register_studies()
  files = [*(ROOT / 'gin').rglob('*.gin'), *(ROOT / 'studies').rglob('*.gin')]
  gin_files = '\n'.join(path.read_text() for path in files)
  macros = {name for pair in re.findall(r'^(\w+) =|%(\w+)', gin_files, re.M) for name in pair}
  of_t5x = '\n'.join(path.read_text() for path in (ROOT / 'gin/t5x').glob('*.gin'))
  for configurable, name in gin_names(page):
    if configurable is None:
      assert name in macros | {'NAME', 'USE_CACHED_TASKS'}, f'no gin file has a macro {name}'
    elif f'{configurable}.{name} =' not in of_t5x:  # whose Trainer has other parameters than ours
      gin.parse_config(f'{configurable}.{name} = None')  # an error where there is no such parameter


def register_studies():
  registry.register_table('studies', studies.CONFIGURABLES)
  importlib.import_module('studies.narrow_layers.mixture')
  importlib.import_module('studies.temperature.held_out')


def configurable(name):
  """What gin knows by this name; None where it knows nothing."""
  try:
    return gin.get_configurable(name)
  except ValueError:
    return None


@pages
def test_parameters_in_the_text_exist(page):
  registry.register_trainer()
  register_studies()
  for name, parameter in re.findall(r'`(?:\w+/)?(\w+)\.(\w+)`', page.read_text()):
    is_file = parameter in ('gin', 'py')
    if not is_file and (known := configurable(name)) and not hasattr(known, parameter):
      gin.parse_config(f'{name}.{parameter} = None')  # an error where there is no such parameter


def examples(page):
  """The Python of a page in its order, without blocks that are files of a reader's own."""
  return '\n'.join(block for block in blocks(page, 'python') if not block.startswith('# my_'))


# test_wheel.py runs the example of the README.
@pytest.mark.slow
@pytest.mark.parametrize(
  'page', [page for page in PAGES[1:] if examples(page)], ids=lambda page: page.name
)
def test_python_examples_run(page):
  exec(compile(examples(page), page.name, 'exec'), {'__name__': page.name})


@pytest.mark.slow
def test_the_site_is_built_strictly(tmp_path):
  """No link is broken, and what it shows comes from itself: API, formulas and scripts."""
  build = [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--site-dir', tmp_path]
  environment = os.environ | {'NO_MKDOCS_2_WARNING': '1'}
  result = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True)
  assert result.returncode == 0, result.stderr
  heads, api = ((tmp_path / page / 'index.html').read_text() for page in ('heads', 'api/heads'))
  assert '<math' in heads and 'id="het_plugin.heads.classifiers.HetXL"' in api
  from_elsewhere = re.compile(r'<(?:script|img|link rel="stylesheet")[^>]* (?:src|href)="http')
  for page in tmp_path.rglob('*.html'):
    assert not from_elsewhere.search(page.read_text()), page
