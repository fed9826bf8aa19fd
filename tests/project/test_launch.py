"""The shell scripts, as far as they can be tried without installing anything."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
  [*(ROOT / 'launch').glob('*.sh'), *(ROOT / 'tests').glob('*.sh'), ROOT / '.ci/run']
)


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script):
  subprocess.run(['bash', '-n', str(script)], check=True)


@pytest.mark.skipif(shutil.which('shellcheck') is None, reason='shellcheck is not installed')
def test_shellcheck():
  subprocess.run(['shellcheck', '-x', '-P', 'SCRIPTDIR', *map(str, SCRIPTS)], check=True, cwd=ROOT)


@pytest.mark.parametrize('script', ['launch/quickstart.sh', 'tests/run.sh'])
def test_without_a_suitable_python_one_sentence(script, tmp_path):
  shutil.copytree(ROOT / 'launch', tmp_path / 'launch')
  (tmp_path / 'tests').mkdir()
  shutil.copy(ROOT / 'tests' / 'run.sh', tmp_path / 'tests')
  result = subprocess.run(
    ['bash', str(tmp_path / script)],
    env={**os.environ, 'HET_PLUGIN_PYTHON': '/nonexistent/python'},
    capture_output=True,
    text=True,
  )
  assert result.returncode == 1
  assert 'HET_PLUGIN_PYTHON=/nonexistent/python' in result.stderr
  assert not (tmp_path / '.venv').exists()


# In the place of an environment's Python; the packages of 'two' cannot be installed.
STAND_IN = f"""#!/usr/bin/env bash
case "$*" in
  *'pip --version') ;;
  *uv*) exit 1 ;;
  *'pip install'*) grep -v two requirements.txt ;;
  *) exec {sys.executable} "$@" ;;
esac
"""


def test_an_installation_that_ended_half_way_is_not_reused(tmp_path):
  shutil.copytree(ROOT / 'launch', tmp_path / 'launch')
  python = tmp_path / '.venv/bin/python'
  python.parent.mkdir(parents=True)
  python.write_text(STAND_IN)
  python.chmod(0o755)
  (tmp_path / 'pyproject.toml').touch()

  def set_up(requirements):
    (tmp_path / 'requirements.txt').write_text(requirements)
    code = 'set -euo pipefail; source launch/setup_env.sh'
    return subprocess.run(['bash', '-c', code], cwd=tmp_path, capture_output=True, text=True)

  assert 'installed in' in set_up('one').stdout
  assert 'reusing .venv' in set_up('one').stdout
  assert set_up('two').returncode == 1
  assert 'installed in' in set_up('one').stdout  # not the packages of two that are there


def test_tools_and_pythons_are_the_same_everywhere():
  find_python, pyproject, workflow = (
    (ROOT / name).read_text()
    for name in ('launch/find_python.sh', 'pyproject.toml', '.github/workflows/tests.yml')
  )
  versions = re.search(r'^VERSIONS=\((.*?)\)', find_python, re.M)[1].split()[::-1]
  assert re.findall(r'Python :: (3\.\d+)', pyproject) == versions
  assert yaml.safe_load(workflow)['jobs']['tests']['strategy']['matrix']['python'] == versions
  (ruff,) = yaml.safe_load((ROOT / '.pre-commit-config.yaml').read_text())['repos']
  assert f'ruff=={ruff["rev"].removeprefix("v")}\n' in (ROOT / 'requirements.txt').read_text()
