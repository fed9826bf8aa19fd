"""The shell scripts, as far as they can be tried without installing anything."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

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
