"""python -m studies.tune at a tiny size: its files, its rerun, its errors."""

import json

import pytest

from studies import tune

RUN = """
include 'het_plugin/gin/runs/digits_smoke.gin'
include 'het_plugin/gin/heads/het_xl.gin'
include 'studies/temperature/gin/temperature.gin'
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


@pytest.fixture
def run(tmp_path, run_main):
  """Runs the main with flags by name; what it printed, or with code=2 its error."""
  (tmp_path / 'run.gin').write_text(RUN)

  def call(code=0, **settings):
    given = {'run': tmp_path / 'run.gin', 'output_dir': tmp_path / 'study'} | settings
    return run_main(tune, *(f'--{name}={value}' for name, value in given.items()), code=code)

  return call


@pytest.mark.slow
def test_the_table_and_its_rerun(run, tmp_path, monkeypatch):
  methods = ['grid:validation', 'luketina:validation']
  settings = {'method': ','.join(methods), 'grid': '0.2', 'replications': 1}
  printed = run(json=tmp_path / 'copy.json', **settings)
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
  assert table.strip() in printed and 'Luketina et al. (2016)' in table
  page = (folder / 'index.html').read_text()
  assert 'Luketina' in page and page.count('<figure') == 2

  monkeypatch.setattr('het_plugin.runs.starting.train_from_gin', None)  # nothing is trained again
  assert run(**settings) == printed
  assert json.loads((folder / 'results.json').read_text()) == rows


def test_wrong_settings_are_one_sentence(run, caplog):
  for settings, message in (
    ({'method': 'newton'}, '--method=newton is unknown'),
    ({'grid': '0.2'}, '--grid has no effect on --method=simple_training: add grid'),
    ({'method': 'grid', 'rounds': 2}, '--rounds has no effect on --method=grid:validation,'),
    ({'method': 'grid', 'grid': '0.2,0.1,0.20'}, '--grid=0.2,0.1,0.2 has 0.2 twice'),
    ({'gin.FULL_SPLIT': "'all'"}, "FULL_SPLIT='all': "),
    ({'gin.RANDOM_SEED': 7}, 'RANDOM_SEED = 7 has no effect: the study binds it for every run'),
    (
      {'method': 'grid:validation', 'gin.LearnedTemperature.tau_max': 3.0},
      'LearnedTemperature.tau_max = 3.0 has no effect',
    ),
    ({'method': 'all', 'gin.LR': 5.0}, 'LR = 5.0 is used by nothing: did you mean LEARNING_RATE?'),
    ({'method': 'grid', 'grid': 'x'}, '--grid=x must be '),
    ({'output_dir': 'gs://b/x'}, '--output_dir=gs://b/x must be a local directory'),
  ):
    assert message in run(code=2, **settings)
  assert 'is used by nothing' not in caplog.text  # what the study binds itself
