"""The quick start at a tiny size: its files, its fields, its rerun."""

import json
import re
import types

import numpy as np
import pytest

import gin
from het_plugin.commands import quickstart
from het_plugin.experiments import head_comparison

FIELDS = {
  'head', 'num_classes', 'pre_logits_dim', 'num_factors', 'mesh', 'nll', 'precision_at_1', 'ece',
  'tau', 'num_params', 'extra_params', 'ms_per_step', 'fewshot',
}  # fmt: skip
SIZES = [
  'TRAIN_STEPS=4', 'EVAL_PERIOD=4', 'SAVE_PERIOD=4', 'STATS_PERIOD=2', 'WARMUP_STEPS=1',
  'EVAL_STEPS=2', 'BATCH_SIZE=32', 'vit.width=16', 'vit.mlp_dim=16', 'vit.num_heads=2',
  'digits/FewShotDataset.max_train=300', 'glyphs/FewShotDataset.max_train=300',
  'glyphs/FewShotDataset.max_test=100', 'FewShotAction.shots=(1,5)',
  'train/Integrator.num_samples=2', 'eval/Integrator.num_samples=2',
]  # fmt: skip


def run(run_main, output_dir, *arguments, **kwargs):
  sizes = [f'--gin_bindings={size}' for size in SIZES]
  return run_main(
    quickstart, f'--output_dir={output_dir}', '--heads=det,het_xl', *sizes, *arguments, **kwargs
  )


@pytest.mark.slow
def test_quickstart_makes_the_table_and_reuses_finished_runs(run_main, tmp_path):
  printed = run(run_main, tmp_path, f'--json={tmp_path / "copy.json"}')
  rows = json.loads((tmp_path / 'results.json').read_text())
  assert rows == json.loads((tmp_path / 'copy.json').read_text())
  det, het_xl = rows
  for row in rows:
    assert row.keys() >= FIELDS
    assert row['num_classes'] == 316 and row['mesh'] == '4x2' and row['steps'] == 4
    assert 0 < row['nll'] < 20 and 0 <= row['precision_at_1'] <= 1 and row['ms_per_step'] > 0
    assert row['fewshot'].keys() == {'1', '5'}
    assert row['fewshot_by_dataset'].keys() == {'digits', 'glyphs_heldout'}
  assert (det['head'], het_xl['head']) == ('DET', 'HET-XL')
  assert det['extra_params'] == 0 and det['num_factors'] is None
  assert het_xl['extra_params'] == 2 * 8 * 9 + 50 * 8 + 1
  assert het_xl['num_params'] - det['num_params'] == het_xl['extra_params']
  text = (tmp_path / 'results.txt').read_text()
  assert text.strip() in printed and 'best possible' in text and 'chance' in text
  assert head_comparison.sentences(rows)[2] in text
  page = (tmp_path / 'index.html').read_text()
  assert 'HET-XL' in page and 'HetXL.num_factors = 50' in page and page.count('<figure') == 2

  before = (tmp_path / 'het_xl' / 'metrics.jsonl').read_text()
  run(run_main, tmp_path)
  assert (tmp_path / 'het_xl' / 'metrics.jsonl').read_text() == before
  assert json.loads((tmp_path / 'results.json').read_text()) == rows


def test_the_pictures_of_a_small_split_are_its_examples(monkeypatch, tmp_path):
  def predict(params, batch):
    first = np.zeros((len(batch['index']), 1), int)
    return first, {'log_prob': np.zeros(first.shape)}

  model = types.SimpleNamespace(predict_batch_with_aux=predict)
  settings = {'MIXTURE_OR_TASK_NAME': 'digits', 'EVAL_SPLIT': 'test[:10]'}
  settings |= {'TASK_FEATURE_LENGTHS': {'image': 8}}
  monkeypatch.setattr(gin, 'query_parameter', lambda macro: settings[macro[1:]])
  monkeypatch.setattr(head_comparison.trainings, 'called', lambda macro: model)
  head_comparison._write_examples({}, tmp_path)
  labels = np.load(tmp_path / 'examples.npz')['label']
  assert len(labels) == 10 and labels.min() >= 0


def test_unknown_head_is_named(run_main, tmp_path):
  message = run(run_main, tmp_path, '--heads=het_xxl', code=2)
  assert "--heads=het_xxl must be one of 'det', 'det_learned_tau'" in message
  assert '--heads= ' in run(run_main, tmp_path, '--heads=', code=2)
  assert '--output_dir=gs://b/x must be' in run(run_main, 'gs://b/x', code=2)


def result(head, nll, factors=None, extra=0, pace=100.0):
  return {
    'head': head, 'nll': nll, 'num_factors': factors, 'num_classes': 2297, 'steps': 600,
    'precision_at_1': 0.65, 'num_params': 1000 + extra, 'extra_params': extra, 'ms_per_step': pace,
  }  # fmt: skip


def test_sentences_follow_from_the_numbers():
  rows = [
    result('DET', 1.1),
    result('DET, learned tau', 1.05),
    result('HET', 0.95, 50, 500, 200.0),
  ]
  best, cause, cost = head_comparison.sentences(rows)
  assert 'HET ' in best and ' 0.950 nats' in best and '65.0%' in best
  assert re.search(r'DET by -0.050.*\bHET, .* -0.100: .*noise lowers', cause)
  close = head_comparison.sentences([*rows[:2], result('HET', 1.04, 50, 500)])[1]
  assert re.search(r' -0.010: one seed .* 0.04 over seeds', close)
  assert re.search(r'HET .* 1,500; 500 .*\bHET took 2.0 times .* DET\.', cost)
  without = head_comparison.sentences(rows[:2])[1]
  assert re.search(r' 0.050 nats, from DET, learned tau to DET,', without)
