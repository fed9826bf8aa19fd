"""Ablations: what is chosen, what follows from another cell, what is reported. Training is replaced
by a function of the configuration; test_ablate.py trains.
"""

import dataclasses
import json
import math

import numpy as np
import pytest
import scipy.stats

import gin
from het_plugin.config import registry
from het_plugin.experiments import trainings
from het_plugin.models.classification import ParamCounts
from het_plugin.training import nonfinite
from studies.ablation import Ablation
from studies.analyses import ExampleNLL
from studies.study import Request

RUN = 'het_plugin/gin/runs/digits_smoke.gin'
HEAD = 'het_plugin/gin/heads/{}.gin'.format


@pytest.fixture
def trained(monkeypatch):
  """Replaces training; gives what was trained: (folder, learning rate, seed, split)."""
  registry.register_trainer()
  calls = []

  def complete(run, folder, finish):
    run.parse(folder)
    rate, seed, split = (
      gin.query_parameter(f'%{name}') for name in ('LEARNING_RATE', 'RANDOM_SEED', 'EVAL_SPLIT')
    )
    calls.append((folder.name, rate, seed, split))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'config.gin').write_text(gin.config_str())
    if rate == 1.0:
      raise nonfinite.NonFiniteStop(3)
    tau = dict(gin.get_bindings('FixedTemperature')).get('tau', 2.0 + seed / 8)
    nll = abs(math.log(rate / 0.01)) + 0.1 * np.sin(seed + 1) + (tau if seed < 50 else 0)
    last = {'nll': nll, 'tau': tau}
    line = {'step': 4, 'train/loss': nll, 'train/tau': tau, 'zeroshot/x/top1': 0.5}
    line |= {f'training_eval/digits/{name}': value for name, value in last.items()}
    (folder / 'metrics.jsonl').write_text(json.dumps(line) + '\n')

  monkeypatch.setattr(trainings, 'complete', complete)
  monkeypatch.setattr(trainings, 'configured_model', lambda: (None, ParamCounts(5, 3, 1)))
  return calls


def ablation(**settings):
  settings = {
    'title': 'Tiny',
    'paper': 'Table 0.',
    'shared': (RUN, 'LEARNING_RATE = 0.003'),
    'cells': {'DET': (HEAD('det'),), 'learned': (HEAD('det_learned_tau'),)},
    'metrics': ('nll', 'tau'),
    'choose_split': 'test[:50%]',
    'report_split': 'test[50%:]',
  } | settings
  return Ablation(**settings)


def last_report(study, folder, **request):
  *_, report = study.run(Request(folder, **request))
  return report


def test_the_table_has_means_errors_and_p_over_seeds(tmp_path, trained):
  reports = list(ablation(metrics=('nll', 'tau', 'zeroshot/x/top1')).run(Request(tmp_path)))
  assert [len(report.json['seeds']) for report in reports] == [1, 2, 3]
  assert [seed for _, _, seed, _ in trained] == [0, 0, 1, 1, 2, 2]
  det, learned = reports[-1].rows
  for row in (det, learned):
    values = row['runs']['nll']
    assert len(values) == 3 and math.isclose(row['nll'], np.mean(values))
    assert math.isclose(row['stderr']['nll'], np.std(values, ddof=1) / math.sqrt(3))
  test = scipy.stats.ttest_ind(learned['runs']['nll'], det['runs']['nll'], equal_var=False)
  assert math.isclose(learned['p']['nll'], test.pvalue) and 'p' not in det
  assert learned['zeroshot/x/top1'] == 0.5 and learned['p']['zeroshot/x/top1'] is None
  assert reports[0].rows[0]['stderr']['nll'] is None and not reports[0].tables
  (tests,) = reports[-1].tables
  assert tests.lines == [['learned', f'{test.pvalue:.4f}', *tests.lines[0][2:]]]


def test_each_cell_gets_its_best_values_from_runs_that_are_not_reported(tmp_path, trained):
  study = ablation(
    choose={'LEARNING_RATE': (0.003, 0.011, 1.0)},
    choose_for={'learned': {'LearnedTemperature.tau_max': (4.0, 5.0)}},
    choose_seeds=(100, 101),
    choose_split='test[:50%]',
    report_split='test[50%:]',
    seeds=(0,),
  )
  report = last_report(study, tmp_path)
  choosing = [(rate, seed) for _, rate, seed, split in trained if split == 'test[:50%]']
  assert len(choosing) == 3 * 2 + 6 * 2 - 3  # after one that is not finite no other of its kind
  assert {seed for _, seed in choosing} == {100, 101}
  assert [(rate, seed) for _, rate, seed, split in trained if split == 'test[50%:]'] == [
    (0.011, 0),
    (0.011, 0),
  ]
  det, learned = report.rows
  assert det['chosen'] == {'LEARNING_RATE': 0.011}
  assert learned['chosen'] == {'LEARNING_RATE': 0.011, 'LearnedTemperature.tau_max': 4.0}
  assert math.isinf(report.json['choices']['DET'][-1]['nll'])
  assert trained[-1][0] == 'seed=0,LEARNING_RATE=0.011,LearnedTemperature.tau_max=4.0'
  table = report.tables[-1]
  assert [line[2] for line in table.lines[:3]][1].endswith('*') and len(table.lines) == 9


def test_a_cell_can_follow_from_the_same_seed_of_another(tmp_path, trained):
  study = ablation(
    measured={'DET': {'FixedTemperature.tau': ('learned', 'tau')}},
    cells={'learned': (HEAD('det_learned_tau'),), 'DET': (HEAD('det'),)},
  )
  learned, det = last_report(study, tmp_path).rows
  assert det['runs']['tau'] == learned['runs']['tau'] == [2.0, 2.125, 2.25]


def test_an_analysis_adds_metrics_once(tmp_path, trained):
  @dataclasses.dataclass
  class Analysis:
    seen = []
    split: str

    def __call__(self, folder):
      self.seen.append(folder)
      return {'depth': len(self.seen), 'undefined': math.nan}

  for split, depths in (('a', [2, 4]), ('a', [2, 4]), ('b', [6, 8])):
    report = last_report(ablation(seeds=(0, 1), analysis=Analysis(split)), tmp_path)
    assert report.rows[1]['runs']['depth'] == depths
    assert math.isnan(report.rows[1]['undefined'])


def test_errors_over_examples_of_what_an_analysis_wrote(tmp_path, trained):
  def analysis(folder):
    learned = folder.parent.name == 'learned'
    seed = int(folder.name[-1])
    nll = np.arange(100.0) * (1.01 if learned else 1) + seed * learned
    np.savez(folder / 'nll.npz', NLL=nll, index=np.arange(100) + shift * learned)
    return {}

  shift = 0

  report = last_report(ablation(seeds=(0, 1), analysis=analysis), tmp_path)
  det, learned = report.rows
  found = learned['difference']['NLL']
  gaps = np.arange(100.0) / 100 + 0.5
  assert 'difference' not in det and math.isclose(found['mean'], gaps.mean())
  assert math.isclose(found['stderr_seeds'], 0.5)
  assert math.isclose(found['stderr_examples'], scipy.stats.sem(gaps))
  assert math.isclose(found['extreme'], gaps[-1] / gaps.sum())
  assert report.tables[0].lines[0][2:5] == [f'{gaps.mean():+.4f}', '0.5000', '0.0290']
  shift = 1  # other examples, though as many
  assert 'difference' not in last_report(ablation(analysis=analysis), tmp_path / 'other').rows[1]


def test_bindings_of_the_command_line_win(tmp_path, trained):
  request = {'gin_bindings': ['LEARNING_RATE = 0.02'], 'seeds': [7], 'cells': ['learned']}
  report = last_report(ablation(), tmp_path, **request)
  assert trained == [('seed=7', 0.02, 7, 'test[50%:]')]
  assert [row['name'] for row in report.rows] == ['learned']
  with pytest.raises(ValueError, match='gin.LEARNING_RATE .*Ablation.choose'):
    last_report(ablation(choose={'LEARNING_RATE': (1, 2)}), tmp_path, **request)


@pytest.mark.parametrize(
  'settings, message',
  [
    ({'cells': {'DET': 'det.gin'}}, "'DET' .*'det.gin'"),
    ({'cells': {'a b': (), 'a/b': ()}}, 'cells.* a b, a/b '),
    ({'cells': {'DET': (), '..': ()}}, "'..' names no folder"),
    ({'analysis': ExampleNLL('test')}, "ExampleNLL.split='test' .*report_split='test\\["),
    ({'seeds': 3}, 'Ablation.seeds=3 must be one or more values in brackets'),
    ({'metrics': 'nll'}, "Ablation.metrics='nll' must be one or more"),
    ({'choose': {'LEARNING_RATE': 0.1}}, r'choose: LEARNING_RATE=0.1 must be one or more'),
    ({'choose_for': {'DET': {'TAU': ()}}}, r'choose: TAU=\(\) must be one or more'),
    ({'seeds': (0, 100)}, r'choose_seeds .*\[100\]'),
    ({'measured': {'DET': {'x': ('learned', 'tau')}}}, "measured.*'DET' .*'learned'"),
    ({'measured': {'learned': {'x': ('DET', 'top')}}}, "'learned' needs 'top', .*metrics=\\('nll'"),
  ],
)
def test_settings_that_contradict_each_other(settings, message):
  with pytest.raises(ValueError, match=message):
    ablation(**settings)


def test_a_run_that_is_not_finite_is_reported_and_ends_no_other(tmp_path, trained):
  cells = {'DET': (HEAD('det'),), 'diverges': (HEAD('det'), 'LEARNING_RATE = 1.0')}
  study = ablation(cells=cells, seeds=(0, 1), analysis=lambda folder: {'depth': 1.0})
  (tmp_path / 'diverges' / 'seed=0').mkdir(parents=True)
  np.savez(tmp_path / 'diverges' / 'seed=0' / 'nll.npz', NLL=np.ones(3))  # of fewer steps
  det, diverges = last_report(study, tmp_path).rows
  assert not list(tmp_path.rglob('nll.npz'))
  assert det['depth'] == 1.0 and math.isfinite(det['nll']) and len(trained) == 4
  assert all(math.isnan(diverges[name]) for name in ('nll', 'tau', 'depth'))
  assert 'diverges, seed 1, is not finite at step 3.' in last_report(study, tmp_path).text()
  reverse = dataclasses.replace(study, cells={name: cells[name] for name in ('diverges', 'DET')})
  (of_tests,) = (t for t in last_report(reverse, tmp_path).tables if t.caption.startswith('p of'))
  assert {len(line) for line in of_tests.lines} == {len(of_tests.header)}
  with pytest.raises(ValueError, match='FixedTemperature.tau that is not finite. diverges, seed 0'):
    cells = {'diverges': cells['diverges'], 'DET': cells['DET']}
    measured = {'DET': {'FixedTemperature.tau': ('diverges', 'tau')}}
    last_report(ablation(cells=cells, measured=measured), tmp_path)


def test_unknown_metrics_and_cells(tmp_path, trained):
  with pytest.raises(ValueError, match="'top2'.* nll, step, tau"):
    last_report(ablation(metrics=('top2',), choose={'LEARNING_RATE': (0.003, 0.01)}), tmp_path)
  assert len(trained) == 1
  with pytest.raises(ValueError, match="cells .*'HET'.* DET, learned"):
    last_report(ablation(), tmp_path, cells=['HET'])
  with pytest.raises(
    ValueError, match="Ablation.report_split='validation': .* digits; choose from"
  ):
    last_report(ablation(report_split='validation', choose={'LEARNING_RATE': (1, 2)}), tmp_path)
  study = ablation(measured={'learned': {'x': ('DET', 'tau')}})
  with pytest.raises(ValueError, match="measured.*'learned' .*'DET'"):
    last_report(study, tmp_path, cells=['learned'])
