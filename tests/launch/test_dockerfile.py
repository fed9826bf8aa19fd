"""The container, as far as it can be checked without building it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / 'launch' / 'Dockerfile').read_text()


def test_what_is_copied_exists_and_is_not_ignored():
  ignore = (ROOT / 'launch' / 'Dockerfile.dockerignore').read_text().splitlines()
  assert ignore[0] == '*'
  allowed = {line.removeprefix('!') for line in ignore if line.startswith('!')}
  copied = {name for line in re.findall(r'^COPY (.+) \S+$', TEXT, re.M) for name in line.split()}
  assert copied == allowed
  assert all((ROOT / name).exists() for name in copied)
  # What the wheel is made of, see tests/project/test_wheel.py.
  assert {'pyproject.toml', 'hatch_build.py', 'README.md', 'het_plugin', 'gin'} <= copied


def test_the_layer_of_the_dependencies_is_a_package(tmp_path):
  before, _ = TEXT.split('&& pip install', 1)
  (copied,) = re.findall(r'^COPY (.+) \./$', before, re.M)
  for name in copied.split():
    shutil.copy(ROOT / name, tmp_path)
  commands = before.rpartition('\nRUN ')[2].replace('\\\n', ' ')
  subprocess.run(['bash', '-c', commands], cwd=tmp_path, check=True)
  build = 'import hatchling.build; print(hatchling.build.build_wheel("."))'
  done = subprocess.run(
    [sys.executable, '-c', build], cwd=tmp_path, check=True, capture_output=True, text=True
  )
  assert done.stdout.startswith('het_plugin-0-')


def test_it_installs_an_extra_of_the_project():
  extra = re.search(r'^ARG ACCELERATOR=(\w+)$', TEXT, re.M)[1]
  assert f'\n{extra} = [' in (ROOT / 'pyproject.toml').read_text()
