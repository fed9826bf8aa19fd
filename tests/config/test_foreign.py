"""Configurations of foreign runs that would run code."""

import sys

import pytest

from het_plugin import runs
from het_plugin.config import foreign

DYNAMIC = 'from __gin__ import dynamic_registration\n'
HARMLESS = [
  'import het_plugin.config\nMODEL = @heads.HetXL()\nHetXL.num_factors = %R\n',
  'import het_plugin.config.registry\nimport os\nx.y = @os.system\n',  # gin knows no such name
  DYNAMIC + 'from het_plugin import heads\nheads.HetXL.dtype = 1\n',
  DYNAMIC + 'import optax\nimport het_plugin.heads\n'
  'het_plugin.heads.HetXL.x = @optax.adam()\nA/gin.macro.value = 3\n',
]
CODE = {
  'import': 'import turtle\n',
  'call': DYNAMIC + 'import os\nA = @os.system()\nos.system.x = 1\n',
  'inside': DYNAMIC + 'import seqio\nA = [@x/seqio.utils.os.system()]',
  'alias': DYNAMIC + 'import os as het_plugin\nA = @het_plugin.system',
  'include': "include '/tmp/other.gin'\n",
  'syntax': 'A = (\n',
}


@pytest.mark.parametrize('text', HARMLESS)
def test_ordinary_configurations(text):
  foreign.check(text, 'config.gin')


@pytest.mark.parametrize('kind', CODE)
def test_what_runs_code(kind):
  assert 'turtle' not in sys.modules
  with pytest.raises(ValueError, match='^config.gin '):
    foreign.check(CODE[kind], 'config.gin')
  assert 'turtle' not in sys.modules


def test_a_run_is_opened_without_its_code(digits_run, tmp_path, monkeypatch):
  """Until the package is allowed."""
  folder = tmp_path / 'run'
  folder.mkdir()
  (folder / 'checkpoint_1').symlink_to(digits_run[0] / 'checkpoint_1')
  config = (digits_run[0] / 'config.gin').read_text()
  (folder / 'config.gin').write_text(f'import evil_code\n{config}')
  (tmp_path / 'evil_code.py').write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ValueError, match='imports evil_code, .* --allow_imports=evil_code permits'):
    runs.open_run(folder)
  assert not (tmp_path / 'ran').exists()
  monkeypatch.setattr(foreign, 'ALLOWED', (*foreign.ALLOWED, 'evil_code'))
  assert runs.open_run(folder).step == 1
  assert (tmp_path / 'ran').exists()
