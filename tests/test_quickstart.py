"""The quick start at a tiny size: its files, its fields, its rerun."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from het_plugin import quickstart

ROOT = pathlib.Path(__file__).parents[1]
FIELDS = {
  'head', 'num_classes', 'pre_logits_dim', 'num_factors', 'mesh', 'nll', 'precision_at_1', 'ece',
  'tau', 'num_params', 'extra_params', 'ms_per_step', 'fewshot',
}  # fmt: skip


def run(output_dir, *arguments):
  sizes = [
    'TRAIN_STEPS=4', 'EVAL_PERIOD=4', 'STATS_PERIOD=2', 'WARMUP_STEPS=1', 'EVAL_STEPS=2',
    'BATCH_SIZE=32', 'vit.width=16', 'vit.depth=1', 'vit.mlp_dim=16', 'vit.num_heads=2',
    'digits/FewShotDataset.max_train=300', 'glyphs/FewShotDataset.max_train=300',
    'glyphs/FewShotDataset.max_test=100', 'FewShotAction.shots=(1,5)',
  ]  # fmt: skip
  return subprocess.run(
    [
      sys.executable, '-m', 'het_plugin.quickstart', f'--output_dir={output_dir}',
      '--heads=det,het_xl', *(f'--gin.{size}' for size in sizes), *arguments,
    ],
    cwd=ROOT,
    env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
  )  # fmt: skip


def test_quickstart_makes_the_table_and_reuses_finished_runs(tmp_path):
  done = run(tmp_path, f'--json={tmp_path / "copy.json"}')
  assert done.returncode == 0, done.stderr[-3000:]
  rows = json.loads((tmp_path / 'results.json').read_text())
  assert rows == json.loads((tmp_path / 'copy.json').read_text())
  det, het_xl = rows
  for row in rows:
    assert row.keys() >= FIELDS
    assert row['num_classes'] == 2297 and row['mesh'] == '4x2' and row['steps'] == 4
    assert 0 < row['nll'] < 20 and 0 <= row['precision_at_1'] <= 1 and row['ms_per_step'] > 0
    assert row['fewshot'].keys() == {'1', '5'}
    assert row['fewshot_by_dataset'].keys() == {'digits', 'glyphs_heldout'}
  assert (det['head'], het_xl['head']) == ('DET', 'HET-XL')
  assert det['extra_params'] == 0 and det['num_factors'] is None
  assert het_xl['extra_params'] == 2 * 16 * 17 + 50 * 16 + 1
  assert het_xl['num_params'] - det['num_params'] == het_xl['extra_params']
  table = (tmp_path / 'results.txt').read_text()
  assert table.strip() in done.stdout and 'ceiling' in table and 'chance' in table
  assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')
  page = (tmp_path / 'index.html').read_text()
  assert 'HET-XL' in page and 'HetXL.num_factors = 50' in page

  before = (tmp_path / 'het_xl' / 'metrics.jsonl').read_text()
  again = run(tmp_path)
  assert again.returncode == 0, again.stderr[-3000:]
  assert (tmp_path / 'het_xl' / 'metrics.jsonl').read_text() == before
  assert json.loads((tmp_path / 'results.json').read_text()) == rows


def test_unknown_head_is_named(tmp_path):
  done = run(tmp_path, '--heads=het_xxl')
  assert done.returncode == 2
  assert '--heads=het_xxl is unknown: choose from det, det_learned_tau' in done.stderr


def test_average_over_datasets_is_by_shots():
  got = quickstart.average_over_datasets({'a': {1: 0.2, 5: 0.4}, 'b': {1: 0.4}})
  assert got == {1: pytest.approx(0.3), 5: pytest.approx(0.4)}
