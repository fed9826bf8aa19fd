"""The command that runs ablations: a tiny one to its table, and again; every gin file of ours."""

import json
import math

import pytest
import scipy.stats

from het_plugin import ablate, configurables
from het_plugin.training import train

TINY = (
  *('TRAIN_STEPS = 4', 'EVAL_PERIOD = 4', 'STATS_PERIOD = 2', 'SAVE_PERIOD = 4'),
  *('WARMUP_STEPS = 1', 'EVAL_STEPS = 3', 'BATCH_SIZE = 64', 'vit.width = 16', 'vit.depth = 1'),
  *('vit.mlp_dim = 16', 'eval/Integrator.num_samples = 4'),
)


@pytest.fixture(autouse=True)
def registered():
  configurables.register_trainer()
  configurables.register_studies()


def write_study(folder, **settings):
  """A file of an ablation on digits: DET with two learning rates, and two temperatures."""
  settings = {
    'cells': {
      'DET': ('het_plugin/gin/heads/det.gin',),
      'learned tau': ('het_plugin/gin/heads/det_learned_tau.gin',),
      'tau kept': ('het_plugin/gin/heads/det.gin',),
    },
    'seeds': (0, 1),
    'choose_for': {'DET': {'LEARNING_RATE': (1e-7, 1e-2)}},
    'choose_split': 'test[:50%]',
    'report_split': 'test[50%:]',
    'measured': {'tau kept': {'FixedTemperature.tau': ('learned tau', 'tau')}},
  } | settings
  shared = ('het_plugin/gin/runs/digits_smoke.gin', *TINY)
  lines = [f'  {name} = {value!r}' for name, value in {'shared': shared, **settings}.items()]
  path = folder / 'tiny.gin'
  head = "import het_plugin.configurables\nSTUDY = @Ablation()\nAblation:\n  title = 'Tiny'\n"
  path.write_text(head + "  paper = 'Table 0.'\n" + '\n'.join(lines) + '\n')
  return path


def test_a_study_is_trained_once_and_makes_its_table(tmp_path, run_main, monkeypatch, caplog):
  study, out = write_study(tmp_path), tmp_path / 'out'
  caplog.set_level('INFO')
  copy = tmp_path / 'copy.json'
  printed = run_main(ablate, study, f'--output_dir={out}', f'--json={copy}')
  assert 'run 8 of 8: tau kept, seed 1' in caplog.text

  results = json.loads((out / 'results.json').read_text())
  assert results == json.loads(copy.read_text())
  assert results['paper'] == 'Table 0.' and results['seeds'] == [0, 1]
  det, learned, kept = results['rows']
  # each mean and error is that of the runs, and p that of scipy
  for row in (det, learned, kept):
    for name, values in row['runs'].items():
      assert len(values) == 2 and math.isclose(row[name], sum(values) / 2)
      assert math.isclose(row['stderr'][name], scipy.stats.sem(values))
  test = scipy.stats.ttest_ind(learned['runs']['nll'], det['runs']['nll'], equal_var=False)
  assert 'p' not in det and math.isclose(learned['p']['nll'], test.pvalue)
  assert det['runs']['nll'][0] != det['runs']['nll'][1]
  # what another cell's run of the same seed came to
  assert kept['runs']['tau'] == pytest.approx(learned['runs']['tau'], rel=1e-6)
  assert len(set(learned['runs']['tau'])) == 2
  assert learned['num_params'] == det['num_params'] + 1 and learned['extra_params'] == 1

  # chosen on one half of the split, with a seed of its own; reported on the other
  tried = results['choices']['DET']
  assert [x['LEARNING_RATE'] for x in tried] == [1e-7, 1e-2]
  best = min(tried, key=lambda x: x['nll'])['LEARNING_RATE']
  assert det['chosen'] == {'LEARNING_RATE': best} and not learned['chosen']
  folders = sorted(path.name for path in (out / 'DET').iterdir())
  assert folders == sorted(
    f'seed={seed},LEARNING_RATE={rate}'
    for seed, rate in [(100, 1e-7), (100, 0.01), (0, best), (1, best)]
  )
  config = (out / 'DET' / f'seed=1,LEARNING_RATE={best}' / 'config.gin').read_text()
  assert "EVAL_SPLIT = 'test[50%:]'" in config and 'RANDOM_SEED = 1' in config
  assert 'Ablation' not in config
  choosing = (out / 'DET' / 'seed=100,LEARNING_RATE=0.01' / 'config.gin').read_text()
  assert "EVAL_SPLIT = 'test[:50%]'" in choosing

  table = (out / 'results.txt').read_text()
  assert table.strip() in printed and '±' in table and "Welch's t-test against DET" in table
  assert f'LEARNING_RATE {best}' in table and 'test[:50%]' in table
  page = (out / 'index.html').read_text()
  assert 'Table 0.' in page and 'data:image/png' in page and 'FixedTemperature.tau' in page

  # Again: nothing is trained; another seed alone is, and fewer cells are compared.
  with monkeypatch.context() as patch:
    patch.setattr(train, 'train', None)
    assert run_main(ablate, study, f'--output_dir={out}') == printed
    run_main(ablate, study, f'--output_dir={out}', '--cells=DET,learned tau', '--seeds=1')
  results = json.loads((out / 'results.json').read_text())
  assert [row['head'] for row in results['rows']] == ['DET', 'learned tau']
  assert results['seeds'] == [1] and results['rows'][1]['stderr']['nll'] is None
  assert results['rows'][0]['nll'] == det['runs']['nll'][1]
