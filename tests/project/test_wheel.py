"""The wheel and the sdist: what a user who only pip-installed one of them can do."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import het_plugin

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope='module')
def distributions(tmp_path_factory):
  """[sdist, wheel]; the wheel is built from the sdist, so the checkout stays clean."""
  folder = tmp_path_factory.mktemp('dist')
  build = [sys.executable, '-m', 'build', '--no-isolation', '--outdir', str(folder), str(ROOT)]
  subprocess.run(build, check=True, capture_output=True)
  return [*folder.glob('*.tar.gz'), *folder.glob('*.whl')]


@pytest.fixture(scope='module')
def site(distributions, tmp_path_factory):
  """The unpacked wheel."""
  site = tmp_path_factory.mktemp('site')
  zipfile.ZipFile(distributions[1]).extractall(site)
  return site


def test_their_metadata_are_those_of_an_index(distributions):
  name = f'het_plugin-{het_plugin.__version__}'
  assert [path.name for path in distributions] == [f'{name}.tar.gz', f'{name}-py3-none-any.whl']
  check = [sys.executable, '-m', 'twine', 'check', '--strict', *map(str, distributions)]
  result = subprocess.run(check, capture_output=True, text=True)
  assert result.returncode == 0, result.stdout
  citation = (ROOT / 'CITATION.cff').read_text()
  assert f'\nversion: {het_plugin.__version__}\n' in citation


ESTIMATOR = """
import numpy as np
from het_plugin.estimators import HetXLClassifier
x = np.random.default_rng(0).normal(size=(60, 4))
head = HetXLClassifier(C_noise=1.0, num_factors=2, num_samples=4, tol=0.1)
assert head.fit(x, np.arange(60) % 3).predict_proba(x).shape == (60, 3)
"""


@pytest.mark.slow
def test_readme_and_an_estimator_run_in_a_fresh_environment(distributions, tmp_path):
  """The sdist with the pinned versions and nothing else, then the wheel with the extra `probe`."""
  subprocess.run([sys.executable, '-m', 'venv', '--without-pip', str(tmp_path)], check=True)
  python = str(tmp_path / 'bin' / 'python')
  install = [sys.executable, '-m', 'uv', 'pip', 'install', '--quiet', '--python', python]
  install += ['--constraint', str(ROOT / 'requirements.txt')]
  (readme,) = re.findall('^```python\n(.*?)^```', (ROOT / 'README.md').read_text(), re.M | re.S)
  sdist, wheel = map(str, distributions)
  for package, code in ((sdist, readme), (f'{wheel}[probe]', ESTIMATOR)):
    subprocess.run([*install, package], check=True, cwd=tmp_path)
    command = [python, '-I', '-c', code]  # -I: without PYTHONPATH
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, '')


def test_all_code_and_gin_files_are_inside(site):
  for folder, prefix in ((ROOT / 'het_plugin', ''), (ROOT / 'gin', 'gin')):
    for path in folder.rglob('*'):
      if path.is_file() and '__pycache__' not in path.parts:
        assert (site / 'het_plugin' / prefix / path.relative_to(folder)).is_file(), path
  assert {path.name for path in site.iterdir() if path.suffix != '.dist-info'} == {'het_plugin'}


def run(code, site, folder):
  """What a program in `folder` prints that has the wheel, and not the checkout, on its path."""
  start = f"""
import sys
sys.path = [{str(site)!r}, *(path for path in sys.path if path not in ('', {str(ROOT)!r}))]
# An editable installation of the checkout may have a finder of its own.
sys.meta_path = [finder for finder in sys.meta_path if 'editable' not in str(finder).lower()]
import het_plugin
assert het_plugin.__file__.startswith({str(site)!r}), het_plugin.__file__
"""
  command = [sys.executable, '-c', start + code]
  result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
  assert result.returncode == 0, result.stderr
  return result.stdout.split()


def test_a_host_that_knows_only_gin_takes_the_include_too(site, tmp_path):
  """As t5x does: nothing of ours is imported before gin meets the include."""
  (tmp_path / 'mine.gin').write_text(
    "include 'het_plugin/gin/heads/het_xl.gin'\nNUM_CLASSES = 7\nHetXL.num_factors = 3\n"
  )
  code = """
import importlib.util  # which gin 0.5 uses and leaves to others to import
import gin
gin.parse_config_file('mine.gin')
head = gin.query_parameter('%HEAD').scoped_configurable_fn()
print(type(head).__name__, head.num_classes, head.num_factors, gin.__file__)
"""
  *head, gin_file = run(code, site, tmp_path)
  assert head == ['HetXL', '7', '3']
  assert not gin_file.startswith((str(site), str(ROOT / 'gin')))
