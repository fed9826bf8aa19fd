"""The wheel: what a user who only pip-installed it can do."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ('pyproject.toml', 'hatch_build.py', 'README.md', 'het_plugin', 'gin')


@pytest.fixture(scope='module')
def site(tmp_path_factory):
  """The unpacked wheel of a copy of the checkout, which stays clean so."""
  copy, site = tmp_path_factory.mktemp('copy'), tmp_path_factory.mktemp('site')
  for name in SOURCES:
    source = ROOT / name
    if source.is_dir():
      shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns('__pycache__'))
    else:
      shutil.copy(source, copy)
  build = [sys.executable, '-m', 'build', '--wheel', '--no-isolation', '--outdir', str(copy)]
  subprocess.run([*build, str(copy)], check=True, capture_output=True)
  (wheel,) = copy.glob('*.whl')
  zipfile.ZipFile(wheel).extractall(site)
  return site


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
