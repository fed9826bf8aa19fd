"""Each benchmark runs at a tiny size and its rows are consistent. Speed is not tested."""

import importlib.util
import os
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from het_plugin.backbones import transformer
from het_plugin.planning import step, topology, worker

# Script and flags, how many rows it writes, and what its last line says.
RUNS = {
  'benchmarks.fewshot_solver --classes=7,30 --shots=4 --d=40 --m=200 --turns=1': (2, 'differ by 0'),
  'benchmarks.integrator --dim=8 --classes=20 --factors=3 --batch=2 --repeats=1 --samples=5 '
  '--heads=het --links=softmax,sigmoid': (3, 'times as fast'),
  'benchmarks.integrator --dim=8 --classes=20 --factors=3 --batch=2 --repeats=1 --trials=1 '
  '--links=softmax,sigmoid --equal_accuracy': (2, 'times as fast'),
  'benchmarks.integrator --classes=1000,100000 --heads=het_xl --links=sigmoid --batch=2 --dim=4 '
  '--factors=2 --repeats=1': (4, 'least temporary memory'),
  'benchmarks.contrastive_loss --batch=32 --dim=8 --factors=3 --samples=3 --repeats=1 '
  '--model_shards=2': (
    2,
    'plain loss',
  ),
  'benchmarks.step_overhead --variant=Ti/16 --image_size=16 --classes=20 --factors=3 '
  '--dtype=float32 --heads=het_xl --samples=3 --batches=2 --repeats=1': (2, 'of DET'),
  'benchmarks.kernel_weight --sizes=64x8x8x2 --samples=2 --repeats=1': (4, 'of DET'),
  'benchmarks.probe --rows=300 --dim=6 --classes=3 --heads=det': (2, 'of LogisticRegression'),
  'benchmarks.probe --stream --rows=2000 --dim=6 --classes=3 --heads=det': (2, 'det'),
  'benchmarks.loop --sizes=tiny --pairs=2 --period=3': (1, 'of the steps/s of the bare step'),
}


@pytest.mark.slow
@pytest.mark.parametrize('command', RUNS)
def test_its_rows_are_consistent_and_its_last_line_concludes(run_script, command, monkeypatch):
  script, *flags = command.split()
  monkeypatch.setitem(transformer.SIZES['Ti'], 'depth', 1)
  rows, printed = run_script(script, *flags)
  num_rows, conclusion = RUNS[command]
  assert len(rows) == num_rows and conclusion in printed[-1]
  for row in rows:
    assert all(value > 0 for name, value in row.items() if name.endswith(('seconds', '_ratio')))
    if 'reference_seconds' in row:
      assert row['time_ratio'] == row['reference_seconds'] / row['seconds']
    if row.get('method') == 'exact':
      assert row['rmse'] < 1e-6
    if '--equal_accuracy' in flags:
      assert row['rmse'] <= row['reference_rmse']
    assert row.get('max_accuracy_difference', 0) == 0 and row.get('agreement', 1) == 1


@pytest.mark.slow
def test_the_cost_of_an_error_is_measured_and_drawn(run_script, tmp_path):
  sizes = ('--classes=20', '--dim=8', '--factors=2', '--samples=4', '--trials=1', '--repeats=1')
  of_memory = ('--memory_classes=30', '--memory_samples=2')
  rows, _ = run_script('benchmarks.cost', f'{tmp_path}/cost.svg', *sizes, *of_memory)
  memory, rows = rows[:2], rows[2:]
  assert all(row['temp_bytes'] > 0 and row['k'] == 30 for row in memory)
  assert [row['s'] for row in rows] == [4, 4] and len({row['way'] for row in rows}) == 2
  assert all(row['cost'] > 0 and row['rmse'] > 0 for row in rows)
  assert '<svg' in (tmp_path / 'cost.svg').read_text()


def test_cross_entropy_beside_its_peers(run_script, call_script, monkeypatch, capsys):
  flags = ['--sizes=2048x4x8', '--repeats=1', '--cpu_time']
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  rows, printed = run_script('benchmarks.cross_entropy', *flags)
  assert [row['implementation'] for row in rows] == ['ours', 'plain']
  assert 'tokamax is left out: pip install tokamax' in printed[0]

  def loss(x, labels, weights, reduction, implementation):
    assert (reduction, implementation) == ('mean', 'chunked_xla')
    log_p = jax.nn.log_softmax(x @ weights)
    return -jnp.take_along_axis(log_p, labels[:, None], axis=-1).mean()

  fake = types.SimpleNamespace(linear_softmax_cross_entropy_loss=loss)
  monkeypatch.setitem(sys.modules, 'tokamax', fake)
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: fake)
  rows, printed = run_script('benchmarks.cross_entropy', *flags)
  assert [(row['implementation'], row['k'], row['d'], row['b']) for row in rows] == [
    (name, 2048, 4, 8) for name in ('ours', 'plain', 'tokamax')
  ]
  assert all(row['seconds'] > 0 and row['temp_bytes'] > 0 for row in rows)
  assert "of tokamax's time" in printed[-1]
  with pytest.raises(SystemExit):
    call_script('benchmarks.cross_entropy', '--sizes=5000x4x8')
  assert 'K a multiple of 2048' in capsys.readouterr().err


@pytest.mark.slow
def test_paper_slice(run_script, monkeypatch):
  tiny = ['BATCH_SIZE = 4', 'vit.width = 16', 'vit.depth = 1', 'vit.mlp_dim = 16']
  tiny += [
    'train/Integrator.num_samples = 2',
    'vit.num_heads = 2',
    'vit.representation_size = 16',
    'NUM_CLASSES = 100',
  ]
  flags = ['--topology=cpu:4', '--meshes=2x2', '--heads=det,het_xl']
  flags += [f'--gin={binding}' for binding in tiny]
  place = topology.Topology('cpu:4', jax.devices()[:4], 2**34)
  monkeypatch.setattr(topology, 'get', lambda *_: place)
  monkeypatch.setattr(worker, 'compile_in_process', step.plan)  # tests/planning has the process
  rows, printed = run_script('benchmarks.paper_slice', *flags)
  assert [(row['mesh'], row['head'], row['fits']) for row in rows] == [
    ('2x2', 'det', True),
    ('2x2', 'het_xl', True),
  ]
  assert rows[0]['peak_gib'] < rows[1]['peak_gib'] and rows[0]['tflop'] < rows[1]['tflop']
  assert 'of the memory of DET' in printed[-1]


@pytest.mark.slow
def test_audit(run_script):
  flags = ['--data=linear', '--kinds=next', '--shares=0.3', '--seeds=2', '--rows=300']
  rows, _ = run_script('benchmarks.audit', *flags, '--heads=det', '--no-cleanlab')
  assert [row['method'] for row in rows] == ['det, one round', 'det']
  assert rows[1]['average_precision'] > rows[0]['average_precision'] + 0.02
  for row in rows:
    assert row['data'] == 'linear, next' and 0.25 < row['true_share'] < 0.35
    assert 0.5 < row['auroc'] < 1 and row['average_precision'] > row['true_share']
  rows, _ = run_script('benchmarks.audit', '--stream', '--rows=4000')
  assert [row['rows'] for row in rows] == [400, 4000] and rows[1]['peak_mib'] > 50


def test_audit_of_peoples_labels(run_script, tmp_path):
  rng = np.random.default_rng(0)
  truth = rng.integers(4, size=400)
  features = np.eye(4)[truth] @ rng.normal(size=(4, 80)) + 0.3 * rng.normal(size=(400, 80))
  index = rng.permutation(400)
  labels = np.where(rng.random(400) < 0.2, (truth + 1) % 4, truth)
  np.savez(tmp_path / 'features.npz', features=features[index], index=index)
  np.savez(tmp_path / 'people.npz', label=truth, worse=labels)
  flags = [f'--{name}={tmp_path / name}.npz' for name in ('features', 'people')]
  flags += ['--data=worse', '--seeds=2', '--rows=300', '--heads=det', '--no-cleanlab']
  rows, _ = run_script('benchmarks.audit', *flags)
  assert [row['data'] for row in rows] == ['worse'] * 2
  assert all(0.15 < row['true_share'] < 0.25 and row['average_precision'] > 0.5 for row in rows)


def test_settings_that_do_not_fit_together(call_script, capsys):
  for command, words in (
    ('benchmarks.contrastive_loss --batch=30', '--batch=30 must be a multiple of 8'),
    ('benchmarks.integrator --classes=5000 --limit_gb=1', '--limit_gb has no effect with these'),
    ('benchmarks.kernel_weight --sizes=64x8x8', 'must be KxDxBxR'),
    ('benchmarks.audit --data=worse', '--data=worse needs --people and --features'),
  ):
    with pytest.raises(SystemExit):
      call_script(*command.split())
    assert words in capsys.readouterr().err


def test_audit_without_cleanlab(call_script, capsys, monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(SystemExit):
    call_script('benchmarks.audit')
  assert '--no-cleanlab leaves it out' in capsys.readouterr().err


@pytest.mark.slow
def test_input(run_script):
  flags = ['--files=48', '--size=48', '--image_size=16', '--batch=8', '--turn=32', '--turns=1']
  rows, _ = run_script('benchmarks.input', *flags)
  assert {row['data'] for row in rows} == {
    'image_folder',
    'parquet',
    'webdataset',
    'tfrecord',
    'array_record',
  }
  assert all(
    row['ratio'] == pytest.approx(row['ours'] / row['peer']) for row in rows if row['peer']
  )
  assert all(row['peer'] for row in rows if row['peer_library'] in ('image_folder', 'tensorflow'))


def test_towers(run_script, monkeypatch):
  """Without the peers ours runs alone; where they are, the features are theirs."""
  monkeypatch.setattr(os, 'sched_setaffinity', lambda process, cores: None)
  flags = ('--towers=test', '--batches=8', '--images=3', '--turns=1')
  rows, _ = run_script('benchmarks.towers', *flags, '--peers=timm')
  (row,) = rows
  assert row['ours_images_per_second'] > 0
  assert row['peer'] is None or row['min_cosine'] > 0.9999
