"""The benchmarks at a tiny size: that they run and that their rows are right, not how fast."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
SHARED = {'command_line.py', 'gaussian_problem.py'}
SCRIPTS = sorted({path.name for path in (ROOT / 'benchmarks').glob('*.py')} - SHARED)
SMALL = ['--batch=4', '--classes=20', '--dim=8', '--factors=4']


def run(script, tmp_path, *flags):
  """(rows, printed lines) of a benchmark."""
  out = tmp_path / 'out.json'
  command = [sys.executable, f'benchmarks/{script}', *flags, f'--json={out}']
  result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert result.returncode == 0, result.stderr
  return json.loads(out.read_text()), result.stdout.splitlines()


@pytest.mark.parametrize('script', SCRIPTS)
def test_every_script_has_help_and_json(script):
  command = [sys.executable, f'benchmarks/{script}', '--help']
  text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
  assert '--json' in text


@pytest.mark.parametrize('path', sorted((ROOT / 'benchmarks').glob('*.py')), ids=lambda p: p.name)
def test_help_explains_every_flag(path):
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Call) and getattr(node.func, 'attr', '') == 'add_argument':
      assert 'help' in {keyword.arg for keyword in node.keywords}, ast.unparse(node)


def test_fewshot_solver(tmp_path):
  flags = ['--classes=7,30', '--shots=4', '--d=40', '--m=200', '--turns=1']
  rows, printed = run('fewshot_solver.py', tmp_path, *flags)
  assert [(row['n'], row['d'], row['classes'], row['m']) for row in rows] == [
    (28, 40, 7, 200),  # fewer rows than features, and more
    (120, 40, 30, 200),
  ]
  for row in rows:
    assert row['max_accuracy_difference'] == 0
    assert row['best_accuracy'] > 2 / row['classes']
    assert row['eigh_ratio'] == row['eigh_seconds'] / row['seconds'] > 0
    assert row['ridge_classifier_ratio'] == row['ridge_classifier_seconds'] / row['seconds'] > 0
  assert printed[-1].startswith('ratios') and printed[-1].endswith('differ by 0')
  rows, _ = run('fewshot_solver.py', tmp_path, *flags, '--alone')
  assert 'eigh_seconds' not in rows[0]


def test_integrator(tmp_path):
  flags = ['--dim=8', '--classes=20', '--factors=3', '--batch=2', '--samples=1,5', '--repeats=1']
  heads, links = ['het', 'het_h', 'het_xl'], ['softmax', 'sigmoid']
  flags += [f'--heads={",".join(heads)}', f'--links={",".join(links)}']
  rows, printed = run('integrator.py', tmp_path, *flags)
  assert [(row['head'], row['link'], row['s']) for row in rows] == [
    (head, link, s) for head in heads for link in links for s in (1, 5)
  ]
  for row in rows:
    assert row['time_ratio'] == row['reference_seconds'] / row['seconds'] > 0
    assert row['memory_ratio'] == row['reference_temp_bytes'] / row['temp_bytes'] > 0
  assert 'times as fast' in printed[-1]


def test_integrator_by_kernels(tmp_path):
  flags = ['--dim=8', '--classes=20', '--factors=3', '--batch=2', '--samples=9', '--repeats=1']
  flags += ['--implementations=xla,pallas', '--shared_draws']
  rows, printed = run('integrator.py', tmp_path, *flags)
  assert [row['implementation'] for row in rows] == ['xla', 'pallas']
  assert 'times as fast as XLA' in printed[-2]


def test_parameter_counts(tmp_path):
  """All but the two that the paper rounds down (127.27 million)."""
  rows, printed = run('parameter_counts.py', tmp_path)
  assert len(rows) == 24
  differing = [(r['backbone'], r['head'], r['dataset']) for r in rows if not r['matches']]
  assert differing == [('ResNet152x1', head, 'JFT-4B') for head in ('HET-H', 'HET-XL')]
  assert '22 of 24' in printed[-3]


def test_paper_slice(tmp_path):
  tiny = ['BATCH_SIZE = 4', 'vit.width = 16', 'vit.depth = 1', 'vit.mlp_dim = 16']
  tiny += ['vit.num_heads = 2', 'vit.representation_size = 16', 'NUM_CLASSES = 100']
  flags = ['--topology=cpu:4', '--meshes=2x2', '--heads=det,het_xl']
  flags += [f'--gin={binding}' for binding in tiny]
  rows, printed = run('paper_slice.py', tmp_path, *flags)
  assert [(row['mesh'], row['head'], row['fits']) for row in rows] == [
    ('2x2', 'det', True),
    ('2x2', 'het_xl', True),
  ]
  assert rows[0]['peak_gib'] < rows[1]['peak_gib'] and rows[0]['tflop'] < rows[1]['tflop']
  assert 'of the memory of DET' in printed[-1]


def test_step_overhead(tmp_path):
  flags = ['--variant=Ti/16', '--image_size=16', '--classes=20', '--factors=3', '--dtype=float32']
  flags += ['--heads=het,het_xl', '--samples=2,9', '--batches=2,4', '--repeats=1']
  rows, printed = run('step_overhead.py', tmp_path, *flags, f'--png={tmp_path / "grid.png"}')
  assert [(row['b'], row['head'], row['s']) for row in rows] == [
    (b, head, s)
    for b in (2, 4)
    for head, s in [('det', 0), ('het', 2), ('het', 9), ('het_xl', 2), ('het_xl', 9)]
  ]
  assert all(row['time_ratio'] > 0 and row['memory_ratio'] > 0 for row in rows)
  assert Image.open(tmp_path / 'grid.png').size[0] > 1000
  assert 'of DET' in printed[-1]


def test_samplers(tmp_path):
  png = tmp_path / 'curves.png'
  result, printed = run('samplers.py', tmp_path, *SMALL, '--reference_samples=4000', f'--png={png}')
  assert Image.open(png).size == (990, 330)
  assert {row['sampler'] for row in result['rows']} == {'iid', 'antithetic', 'sobol'}
  assert all(row['rmse'] > 0 for row in result['rows'])
  assert any('ratio' in line for line in printed[-3:])


def test_analytic_bias(tmp_path):
  result, _ = run('analytic_bias.py', tmp_path, *SMALL, '--reference_samples=4000')
  rmse = {(r['link'], r['noise'], r['estimator']): r['rmse'] for r in result['rows']}
  for link in ('softmax', 'sigmoid'):
    assert rmse[link, 'small', 'taylor'] < rmse[link, 'small', 'location']


def test_initial_noise(tmp_path):
  tiny = ['BATCH_SIZE=8', 'EVAL_STEPS=1', 'STATS_PERIOD=1', 'eval/Integrator.num_samples=2']
  flags = ['--steps=2', '--heads=het_xl', *(f'--gin={binding}' for binding in tiny)]
  result, printed = run('initial_noise.py', tmp_path, *flags)
  assert [row['initial_noise_scale'] for row in result['rows']] == [1.0, 0.1]
  assert result['rows'][0]['nll'] != result['rows'][1]['nll']
  assert 'HET-XL' in printed[-1]


def test_knn(tmp_path):
  rows, printed = run('knn.py', tmp_path, '--rows=200', '--dim=8', '--ks=1,3', '--repeats=1')
  assert [row['k'] for row in rows] == [1, 3]
  for row in rows:
    assert row['time_ratio'] == row['sklearn_seconds'] / row['seconds'] > 0
    assert row['agreement'] == 1
  assert 'times as fast as scikit-learn' in printed[-1]
