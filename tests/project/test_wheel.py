"""The wheel: what somebody who only pip-installed it can do."""

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


def test_a_config_elsewhere_binds_a_head_with_one_include(site, tmp_path):
  (tmp_path / 'mine.gin').write_text(
    "include 'het_plugin/gin/runs/digits_smoke.gin'\n"
    "include 'het_plugin/gin/heads/het_xl.gin'\n"
    'HetXL.num_factors = 3\n'
  )
  code = f"""
import sys
sys.path = [{str(site)!r}, *(p for p in sys.path if p and {str(ROOT)!r} + '/het_plugin' != p)]
# An editable installation of the checkout would come before the path.
sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f).lower()]
import gin, het_plugin
assert het_plugin.__file__.startswith({str(site)!r}), het_plugin.__file__
from het_plugin import configurables, gin_utils, models
configurables.register_trainer()
gin_utils.parse_config(['mine.gin'], ["MODEL_DIR = 'unused'"])
print(gin.get_configurable(models.ClassificationModel)().head.num_factors, gin.__name__)
"""
  result = subprocess.run(
    [sys.executable, '-c', code], cwd=tmp_path, capture_output=True, text=True
  )
  assert result.stdout.split() == ['3', 'gin'], result.stderr
