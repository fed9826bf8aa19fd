"""python -m het_plugin.tune at a tiny size: its files, its rerun, its errors."""

import json

import pytest
from absl import flags
from absl.testing import flagsaver

from het_plugin import tune

RUN = """
include 'het_plugin/gin/runs/digits_smoke.gin'
include 'het_plugin/gin/heads/het_xl.gin'
include 'het_plugin/gin/runs/temperature.gin'
CheckpointConfig.save = None
TRAIN_STEPS = 3
STATS_PERIOD = 1
EVAL_PERIOD = 3
WARMUP_STEPS = 1
BATCH_SIZE = 32
EVAL_BATCH_SIZE = 64
HELD_OUT_BATCH_SIZE = 32
vit.width = 16
vit.depth = 1
vit.mlp_dim = 16
HetXL.num_factors = 2
train/Integrator.num_samples = 2
eval/Integrator.num_samples = 2
"""


@pytest.fixture(scope='module', autouse=True)
def defined():
  if 'trials_per_round' not in flags.FLAGS:
    tune.define_flags()
  flags.FLAGS.mark_as_parsed()


def run(output_dir, **settings):
  (output_dir / 'run.gin').write_text(RUN)
  with flagsaver.flagsaver(
    run=str(output_dir / 'run.gin'), output_dir=str(output_dir / 'study'), **settings
  ):
    tune.main(['tune'])


def test_the_table_and_its_rerun(tmp_path, capsys, monkeypatch):
  methods = ['grid:validation', 'luketina:validation']
  settings = {'method': methods, 'grid': ['0.2'], 'replications': 1}
  run(tmp_path, json=str(tmp_path / 'copy.json'), **settings)
  folder = tmp_path / 'study'
  rows = json.loads((folder / 'results.json').read_text())
  assert rows == json.loads((tmp_path / 'copy.json').read_text())
  assert [row['row'] for row in rows] == methods
  grid, luketina = rows
  metrics = (folder / 'seed_0/train_split_tau_0.2/metrics.jsonl').read_text().splitlines()
  written = {name: x for line in map(json.loads, metrics) for name, x in line.items()}
  assert grid['validation_nll'] == written['training_eval/digits/nll']
  assert grid['nll'] == written['infer_eval/digits/nll'] and grid['tau'] == 0.2
  assert written['train/tau'] == pytest.approx(0.2)
  for row in rows:
    assert (row['trainings'], row['steps'], row['replications'][0]['steps']) == (1, 3, 3)
  for row in rows:
    assert 0 < row['nll'] < 20 and 0 <= row['precision_at_1'] <= 1 and row['ms_per_step'] > 0
  assert luketina['tau'] != 2.525
  table = (folder / 'results.txt').read_text()
  assert table.strip() in capsys.readouterr().out and 'Luketina et al. (2016)' in table
  for plot in ('tau_nll.png', 'curves.png'):
    assert (folder / plot).read_bytes().startswith(b'\x89PNG')
  assert 'Luketina' in (folder / 'index.html').read_text()

  monkeypatch.setattr('het_plugin.train.train_from_gin', None)  # nothing is trained again
  run(tmp_path, **settings)
  assert json.loads((folder / 'results.json').read_text()) == rows


def test_wrong_settings_are_one_sentence(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr('het_plugin.studies.vizier_suggestions._NEEDED', ('no_such_module',))
  for settings, message in (
    ({'method': ['newton']}, '--method=newton is unknown: choose from all, grid, bayesian'),
    ({'grid': ['0.01']}, '--grid=0.01 must be temperatures in [0.05, 5.0]'),
    ({'grid': ['x']}, '--grid=x must be numbers'),
    ({'method': ['bayesian']}, "pip install 'het_plugin[tune]'"),
  ):
    with pytest.raises(SystemExit) as stop:
      run(tmp_path, **settings)
    assert stop.value.code == 2 and message in capsys.readouterr().err
