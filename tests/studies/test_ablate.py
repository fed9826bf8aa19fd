"""The command that runs ablations: a tiny one to its table, and again; every gin file of ours."""

import functools
import json
import re

import jax
import pytest

import gin
from het_plugin.config import registry, uses
from het_plugin.experiments import trainings
from het_plugin.system import run_files
from het_plugin.training import train
from studies import CONFIGURABLES, ablate, tune
from studies import study as study_lib
from studies.ablation import Ablation

STUDY = """
import het_plugin.config
STUDY = @Ablation()
Ablation:
  title = 'Tiny'
  paper = 'Table 0.'
  shared = (
    'het_plugin/gin/runs/digits_smoke.gin',
    'TRAIN_STEPS = 4', 'EVAL_PERIOD = 4', 'STATS_PERIOD = 2', 'SAVE_PERIOD = 4', 'EVAL_STEPS = 4',
    'WARMUP_STEPS = 1', 'vit.width = 16', 'vit.depth = 1', 'vit.mlp_dim = 16',
    'PjitPartitioner.devices = @one_device()',  # 8 take longer to compile for
  )
  cells = {
    'tau 1': ('het_plugin/gin/heads/det.gin',),
    'learned': ('het_plugin/gin/heads/det_learned_tau.gin',),
  }
  seeds = (0, 1)
  report_split = 'test[50%:]'
"""


@functools.cache  # pytest-xdist comes back to a file, and a fixture would run again
def register():
  with gin.unlock_config():
    registry.register_trainer()
    registry.register_table('studies', CONFIGURABLES)
    gin.external_configurable(lambda: jax.devices()[:1], name='one_device')


@pytest.fixture(autouse=True)
def registered():
  register()


@pytest.mark.slow
def test_a_study_is_trained_once_and_makes_its_table(tmp_path, run_main, monkeypatch, caplog):
  study = tmp_path / 'tiny.gin'
  out = tmp_path / 'out'
  copy = tmp_path / 'copy.json'
  study.write_text(STUDY)
  caplog.set_level('INFO')
  printed = run_main(ablate, study, f'--output_dir={out}', f'--json={copy}')
  assert 'run 4 of 4: learned, seed 1' in caplog.text

  results = json.loads((out / 'results.json').read_text())
  assert results == json.loads(copy.read_text())
  assert results['title'] == 'Tiny' and results['paper'] == 'Table 0.'
  fixed, learned = results['rows']
  assert {path.name for path in (out / 'tau_1').iterdir()} == {'seed=0', 'seed=1'}
  assert fixed['runs']['nll'][0] != fixed['runs']['nll'][1] and 0 < fixed['nll'] < 20
  assert learned['num_params'] == fixed['num_params'] + 1 and learned['extra_params'] == 1
  last = trainings.final_evaluations(run_files.read_lines(out / 'learned/seed=1/metrics.jsonl'))
  assert learned['runs']['nll'][1] == last['training_eval/digits']['nll']

  config = (out / 'learned/seed=1/config.gin').read_text()
  assert "EVAL_SPLIT = 'test[50%:]'" in config and 'RANDOM_SEED = 1' in config
  assert 'Ablation' not in config  # a run of its own, as any other
  table, page = ((out / name).read_text() for name in ('results.txt', 'index.html'))
  assert table.strip() in printed and '±' in table and "Welch's t-test against tau 1" in table
  assert 'data:image/png' in page and 'learned/seed=0' in page
  assert {x.name for x in out.glob('*.png')} == {'curves_1.png', 'curves_2.png'}

  with monkeypatch.context() as patch:  # again: nothing is trained
    patch.setattr(train, 'train', None)
    assert run_main(ablate, study, f'--output_dir={out}') == printed
    run_main(ablate, study, f'--output_dir={out}', '--cell=learned', '--seeds=1')
  (row,) = json.loads((out / 'results.json').read_text())['rows']
  assert row['nll'] == learned['runs']['nll'][1] and row['stderr']['nll'] is None


_built = {}  # numbers of parameters by the text of a model, for cells that train the same one


def num_params():
  """Builds the model of the parsed configuration."""
  text = repr(trainings.called('MODEL').module)
  if text not in _built:
    _built[text] = trainings.configured_model()[1].total
  return _built[text]


@pytest.mark.slow
@pytest.mark.parametrize('name', study_lib.names())
def test_every_cell_uses_its_settings_and_builds_its_model(name, tmp_path):
  study = study_lib.load(name)
  text = (study_lib.CHECKOUT / study_lib.gin_file(name)).read_text()
  assert study.paper and re.search(rf'^#   python -m studies.ablate {name}\b', text, re.M)
  trains = isinstance(study, Ablation)
  assert (len(study.seeds) >= 3 or study.analysis) if trains else study.samples[0] == 1
  # The user names Omniglot's file.
  task = ["MIXTURE_OR_TASK_NAME = 'digits'"] if name == 'heads_omniglot' else []
  texts = []
  sizes = {}
  for label, settings in study.cells.items():
    chosen = study.candidates(label)[0].items() if trains else ()
    tried = [f'{key} = {value!r}' for key, value in chosen]
    request = study_lib.Request(tmp_path, [*tried, *task])
    request.run_of([*study.shared, *settings]).parse(tmp_path)
    texts.append(gin.config_str())
    uses.check([*tried, *(setting for setting in settings if '=' in setting)], texts[-1])
    sizes[label] = num_params() if trains else None
  uses.check([setting for setting in study.shared if '=' in setting], *texts)
  if name == 'det_equal_params':
    assert abs(sizes['DET, wider MLP'] / sizes['HET-XL'] - 1) < 0.001


def test_studies_run_in_their_checkout(run_main, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for main in (ablate, tune):
    assert run_main(main, code=2).startswith('Error: studies run in their checkout: cd /')


def test_names(run_main, tmp_path):
  listed = run_main(ablate, '--list')
  assert all(f'\n{name} ' in listed for name in study_lib.names())
  assert f': {", ".join(study_lib.names())}' in run_main(ablate, code=2)
  assert "'heads x'" in run_main(ablate, 'heads', 'x', code=2)
  message = run_main(ablate, 'head', code=2)
  assert "'head' " in message and 'heads, heads_noisy' in message
  assert 'mine.gin' in run_main(ablate, tmp_path / 'mine.gin', code=2)
  (tmp_path / 'mine.gin').write_text('import het_plugin.config\n')
  assert 'binds no STUDY' in run_main(ablate, tmp_path / 'mine.gin', code=2)
  message = run_main(ablate, 'heads', '--gin.LEARNING_RATE=1', code=2)
  assert '--gin.LEARNING_RATE has no effect' in message
  for setting, words in {
    'RANDOM_SEED=7': 'has no effect: give --seeds',
    "EVAL_SPLIT='shift'": 'has no effect: bind Ablation.choose_split and Ablation.report_split',
  }.items():
    assert words in run_main(ablate, 'heads', f'--gin.{setting}', code=2), setting
  split = "'validation[6000:]'"  # the splits pass, and the cell is wrong
  both = [f'--gin.{name}={split}' for name in ('Ablation.report_split', 'ExampleNLL.split')]
  message = run_main(ablate, 'end_to_end', '--cell=HET-L', *both, code=2)
  assert "cells names the cell 'HET-L'" in message
  for setting in ('NoiseEffect.num_examples=8', 'Flops.samples=(1,)'):
    message = run_main(ablate, 'end_to_end', f'--gin.{setting}', code=2)
    assert f'end_to_end has no {setting.partition(".")[0]}' in message
  assert '--seeds has no effect' in run_main(ablate, 'flops_vit_l_32', '--seeds=0', code=2)
  assert "cells names the cell 'HET-L'" in run_main(ablate, 'heads', '--cell=HET-L', code=2)
  assert '--seeds=-1 must be ' in run_main(ablate, 'heads', '--seeds=-1', code=2)
  message = run_main(ablate, 'heads', '--output_dir=gs://b/x', code=2)
  assert '--output_dir=gs://b/x must be a local directory' in message
