"""Each benchmark runs at a tiny size and its rows are consistent. Speed is not tested."""

import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from het_plugin.backbones import transformer
from het_plugin.integrate import integrator
from het_plugin.planning import step, topology, worker

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def call_main(monkeypatch):
  """Runs a script in this process, so that imports are shared."""
  monkeypatch.syspath_prepend(ROOT / 'benchmarks')  # as when the script is run
  monkeypatch.chdir(ROOT)

  def call(script, *flags):
    monkeypatch.setattr(sys, 'argv', [script, *flags])
    importlib.import_module(script.removesuffix('.py')).main()

  return call


@pytest.fixture
def run(call_main, tmp_path, capsys):
  """(rows, printed lines) of a benchmark."""

  def call(script, *flags):
    out = tmp_path / 'out.json'
    capsys.readouterr()
    call_main(script, *flags, f'--json={out}')
    return json.loads(out.read_text()), capsys.readouterr().out.splitlines()

  return call


# Script and flags, how many rows it writes, and what its last line says.
RUNS = {
  'fewshot_solver.py --classes=7,30 --shots=4 --d=40 --m=200 --turns=1': (2, 'differ by 0'),
  'integrator.py --dim=8 --classes=20 --factors=3 --batch=2 --repeats=1 --samples=5 '
  '--heads=het --links=softmax,sigmoid': (3, 'times as fast'),
  'integrator.py --dim=8 --classes=20 --factors=3 --batch=2 --repeats=1 --trials=1 '
  '--links=softmax,sigmoid --equal_accuracy': (2, 'times as fast'),
  'integrator.py --classes=1000,100000 --heads=het_xl --links=sigmoid --batch=2 --dim=4 '
  '--factors=2 --repeats=1': (4, 'least temporary memory'),
  'contrastive_loss.py --batch=32 --dim=8 --factors=3 --samples=3 --repeats=1 --model_shards=2': (
    2,
    'plain loss',
  ),
  'step_overhead.py --variant=Ti/16 --image_size=16 --classes=20 --factors=3 --dtype=float32 '
  '--heads=het_xl --samples=3 --batches=2 --repeats=1': (2, 'of DET'),
  'samplers.py --principal_factors=1 --classes=20 --dim=8 --factors=4 --batch=4 --steps=2': (
    2,
    'nats with m = 1',
  ),
  'known_truth.py --problem=sigmoid,5,3,2,3,60 --heads=het': (2, 'het'),
  'noise_default.py --problems=known --seeds=0 --heads=het --rows=100': (3, 'auto'),
  'noise_test.py --only=rate,0.4,2500,10,24,0.3 --folds=2': (3, 'times what the test predicted'),
  'probe.py --rows=300 --dim=6 --classes=3 --heads=det': (2, 'of LogisticRegression'),
  'probe.py --stream --rows=2000 --dim=6 --classes=3 --heads=det': (2, 'det'),
  'loop.py --sizes=tiny --pairs=2 --period=3': (1, 'of the steps/s of the bare step'),
}


@pytest.mark.slow
@pytest.mark.parametrize('command', RUNS)
def test_its_rows_are_consistent_and_its_last_line_concludes(run, command, monkeypatch):
  script, *flags = command.split()
  if '--equal_accuracy' not in flags:  # which ends sooner with samples that follow the label
    # Their fit takes most of the time to compile.
    monkeypatch.setattr(integrator, 'MIN_TILTED', 64)
  monkeypatch.setitem(transformer.SIZES['Ti'], 'depth', 1)
  # As many as there are held-out rows, for one program.
  known_truth = importlib.import_module('known_truth')
  monkeypatch.setattr(known_truth, 'NUM_TEST', 200)
  monkeypatch.setattr(known_truth, 'CS', (0.1, 1.0))
  monkeypatch.setattr(known_truth, 'NOISE_CS', (0.03, 0.1))
  rows, printed = run(script, *flags)
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


def test_tokamax_takes_the_shapes_of_det_or_is_asked_for(run, call_main, monkeypatch, capsys):
  flags = ['--classes=50048', '--heads=det', '--batch=2', '--dim=4', '--repeats=1', '--tokamax']
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(SystemExit):
    call_main('integrator.py', *flags)
  assert '--tokamax needs the package tokamax: pip install tokamax' in capsys.readouterr().err
  with pytest.raises(SystemExit):
    call_main('integrator.py', '--classes=5000', '--limit_gb=1')
  assert '--limit_gb has no effect with these --classes' in capsys.readouterr().err

  def loss(x, labels, weights, reduction, implementation):
    assert (reduction, implementation) == ('mean', 'chunked_xla')
    log_p = jax.nn.log_softmax(x @ weights)
    return -jnp.take_along_axis(log_p, labels[:, None], axis=-1).mean()

  fake = types.SimpleNamespace(linear_softmax_cross_entropy_loss=loss)
  monkeypatch.setitem(sys.modules, 'tokamax', fake)
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: fake)
  rows, printed = run('integrator.py', *flags)
  assert [row['classes'] for row in rows] == ['at once', 'in tiles', 'tokamax']
  assert all(row['seconds'] > 0 for row in rows)
  assert rows[1]['temp_bytes'] < rows[0]['temp_bytes']
  assert 'classes in tiles' in printed[-1]


@pytest.mark.slow
def test_glyph_label_noise(run):
  rows, printed = run('glyph_label_noise.py')
  assert [row['count'] for row in rows] == [4 * 2297, 2 * 2297]
  for row in rows:
    assert 0.3 < row['wrong'] < 0.5 and 0.5 < row['precision_at_1'] < 0.7
    assert row['entropy'] == pytest.approx(row['nll'], abs=0.05)  # of 4,594 draws
    # The product of 1 - p over the other classes is at least p(y), and below 1.
    assert row['nll'] < row['nll_sigmoid'] <= 2 * row['nll']
  assert printed[0].split()[-1] == 'precision_at_1'


@pytest.mark.slow
def test_real_features(run, run_main, call_main, monkeypatch, tmp_path):
  script = importlib.import_module('real_features')

  def run_here(main, *flags):
    sizes = ['--gin.BATCH_SIZE=8', '--gin.EVAL_STEPS=1'] if main == 'train' else []
    run_main(importlib.import_module(f'het_plugin.{main}'), *flags, *sizes)

  monkeypatch.setattr(script, 'run_main', run_here)
  flags = ['--classes=5', '--rows_per_class=20', '--steps=2', '--samples=2']
  flags += ['--folds=2', '--fits=1', '--C=0.3', '--C_noise=0,0.1', '--dim=16']
  flags += ['--heads=het', f'--work_dir={tmp_path / "work"}']
  rows, _ = run('real_features.py', *flags)
  assert [(row['test'], row['head']) for row in rows] == [
    (test, head) for test in ('other images', 'known') for head in ('det', 'det_tau', 'het')
  ]
  det, det_tau, het, *_, known = rows
  assert det_tau['to_det'] == pytest.approx(0, abs=1e-3)  # at the optimum they are one model
  assert het['to_det'] == pytest.approx(het['nll'] - det['nll'])
  assert det['kl'] == det['nll'] and 0 < known['kl'] < known['nll']  # one label has no entropy
  again, printed = run('real_features.py', *flags)  # with the same --json
  assert again == rows and not any(', fold' in line for line in printed)


def test_real_features_without_data(call_main, capsys):
  with pytest.raises(SystemExit):
    call_main('real_features.py', '--parts=worse')
  assert '--data=None has no cifar10_human.npz' in capsys.readouterr().err


@pytest.mark.slow
def test_colour_names(run, tmp_path, call_main, capsys):
  rng = np.random.default_rng(0)
  lab = rng.uniform((20, -60, -60), (90, 60, 60), (80, 3)).astype(np.int16)
  name = np.array(['dark', 'grey', 'gray', 'light'])
  light = lab[:, :1] / 40.0
  p = np.exp(light * (-1, 0, 0, 1) + (1, 0, 0, -2))
  p /= p.sum(axis=1, keepdims=True)
  counts = np.stack([rng.multinomial(600, x) for x in p])
  row, name_id = np.nonzero(counts)
  file = {'row': row, 'name_id': name_id, 'count': counts[row, name_id]}
  np.savez(tmp_path / 'colour_names.npz', lab=lab, name=name, **file)
  flags = [f'--data={tmp_path}', '--heads=het_xl', '--dims=3', '--max_iter=20']
  rows, _ = run('colour_names.py', *flags)
  det, het_xl, answers = rows
  assert [row['head'] for row in rows] == ['det', 'het_xl', 'answers']
  assert det['difference'] == det['price'] == 0 and det['n'] == 48_000
  assert het_xl['difference'] == pytest.approx(het_xl['nll'] - det['nll'])
  assert het_xl['price'] == (2 * 3 * 4 + 4 * 3) / 48_000  # v, d and J; half of the answers
  # The entropy of 600 answers is less than that of the names, by about 3 / 1,200.
  entropy = -(p * np.log(p)).sum(axis=1).mean()
  assert answers['nll'] == pytest.approx(entropy - 3 / 1200, abs=0.01)
  assert answers['nll'] < det['nll']
  call_main('colour_names.py', *flags, f'--plot={tmp_path / "colours.png"}')
  assert (tmp_path / 'colours.png').read_bytes().startswith(b'\x89PNG')
  printed = capsys.readouterr().out
  assert printed.count('correlation') == 2 and 'nll' not in printed


@pytest.mark.slow
def test_paper_slice(run, monkeypatch):
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
  rows, printed = run('paper_slice.py', *flags)
  assert [(row['mesh'], row['head'], row['fits']) for row in rows] == [
    ('2x2', 'det', True),
    ('2x2', 'het_xl', True),
  ]
  assert rows[0]['peak_gib'] < rows[1]['peak_gib'] and rows[0]['tflop'] < rows[1]['tflop']
  assert 'of the memory of DET' in printed[-1]


@pytest.mark.slow
def test_audit(run):
  flags = ['--data=linear', '--kinds=next', '--shares=0.3', '--seeds=2', '--rows=300']
  rows, _ = run('audit.py', *flags, '--heads=det', '--no-cleanlab')
  assert [row['method'] for row in rows] == ['det, one round', 'det']
  assert rows[1]['average_precision'] > rows[0]['average_precision'] + 0.02
  for row in rows:
    assert row['data'] == 'linear, next' and 0.25 < row['true_share'] < 0.35
    assert 0.5 < row['auroc'] < 1 and row['average_precision'] > row['true_share']
  rows, _ = run('audit.py', '--stream', '--rows=4000')
  assert [row['rows'] for row in rows] == [400, 4000] and rows[1]['peak_mib'] > 50


def test_audit_of_peoples_labels(run, tmp_path):
  rng = np.random.default_rng(0)
  truth = rng.integers(4, size=400)
  features = np.eye(4)[truth] @ rng.normal(size=(4, 80)) + 0.3 * rng.normal(size=(400, 80))
  index = rng.permutation(400)
  labels = np.where(rng.random(400) < 0.2, (truth + 1) % 4, truth)
  np.savez(tmp_path / 'features.npz', features=features[index], index=index)
  np.savez(tmp_path / 'people.npz', label=truth, worse=labels)
  flags = [f'--{name}={tmp_path / name}.npz' for name in ('features', 'people')]
  flags += ['--data=worse', '--seeds=2', '--rows=300', '--heads=det', '--no-cleanlab']
  rows, _ = run('audit.py', *flags)
  assert [row['data'] for row in rows] == ['worse'] * 2
  assert all(0.15 < row['true_share'] < 0.25 and row['average_precision'] > 0.5 for row in rows)


@pytest.mark.slow
def test_noisy_labels(run, monkeypatch):
  script = importlib.import_module('noisy_labels')
  for name, values in {'CS': (0.3, 1.0), 'NOISE_CS': (1.0,), 'NOISE_RATIOS': (0.1, 0.3)}.items():
    monkeypatch.setattr(script, name, values)
  flags = ['--problem=next,0.3,300,3,4,0.3,0', '--seeds=0', '--no-cleanlab']
  heads = ['det', 'smoothing', 'gce', 'forward_known', 'forward_estimated', 'het_xl']
  heads += ['forward_audit', 'audited']
  rows, printed = run('noisy_labels.py', *flags, f'--heads={",".join(heads)}')
  assert [(row['seed'], row['head']) for row in rows] == [(0, x) for x in heads]
  for row in rows:
    assert (row['kind'], row['share'], row['n'], row['k']) == ('next', 0.3, 300, 3)
    assert 0.9 < row['bayes'] < 1 and row['clean_accuracy_location'] <= row['best_accuracy'] + 1e-9
    assert 0.65 < row['clean_accuracy_location'] < row['bayes'] + 0.02
    assert row['average_precision'] > 0.3 and row['auroc'] > 0.6
    if row['head'] in ('det', 'smoothing', 'gce'):  # one distribution is both
      assert row['average_precision_predictive'] == pytest.approx(
        row['average_precision'], abs=1e-3
      )
    grid = row['grid']
    chosen = min(grid, key=lambda x: x['held_out'])
    assert row['chosen'].items() <= chosen.items() and row['auroc'] == chosen['auroc']
  by_head = {row['head']: row for row in rows}
  assert by_head['det']['clean_accuracy'] == by_head['det']['clean_accuracy_location']
  # With the noise known, a linear location tells both the truth and the labels better.
  known = by_head['forward_known']
  det = by_head['det']
  assert known['truth_nll_location'] < det['truth_nll_location']
  assert known['nll'] < det['nll'] - 0.1
  assert any('C_noise / C' in line for line in printed)
  again, printed = run('noisy_labels.py', *flags, f'--heads={",".join(heads)}')
  assert again == rows and not any('1/1 ' in line for line in printed)


def test_points_that_are_no_problem(call_main, capsys):
  for script, point, words in (
    ('known_truth.py', 'softmax,10', "--problem: invalid as_problem value: 'softmax,10'"),
    ('known_truth.py', 'softmx,10,8,2,3,50', "['softmx'] unknown: choose from softmax, sigmoid"),
    ('noisy_labels.py', 'unifrom,0.3,300,3,4,0.3,0', "['unifrom'] unknown: choose from next, rate"),
  ):
    with pytest.raises(SystemExit):
      call_main(script, f'--problem={point}')
    assert words in capsys.readouterr().err
  for script in ('known_truth.py', 'noisy_labels.py'):
    with pytest.raises(SystemExit):
      call_main(script, '--plot=map.png')
    assert '--plot draws the rows of --json=None, which has none' in capsys.readouterr().err


def test_settings_that_do_not_fit_together(call_main, capsys):
  for command, words in (
    ('known_truth.py --heads=det', "['det'] unknown: choose from het, het_h, het_xl"),
    ('noise_test.py --only=none', '--only=none and --max_size=300000 leave no problem'),
    (
      'glyph_label_noise.py --class_set=latin --split=shift',
      '--class_set=latin has no split shift: choose validation',
    ),
    ('contrastive_loss.py --batch=30', '--batch=30 must be a multiple of 8'),
    ('audit.py --data=worse', '--data=worse needs --people and --features'),
  ):
    with pytest.raises(SystemExit):
      call_main(*command.split())
    assert words in capsys.readouterr().err


def test_noisy_labels_without_data(call_main, capsys, monkeypatch, tmp_path):
  with pytest.raises(SystemExit):
    call_main('noisy_labels.py', f'--data={tmp_path}', '--features', 'a.npz', 'b.npz')
  assert 'has no cifar10_human.npz, which --people=aggre reads' in capsys.readouterr().err
  with pytest.raises(SystemExit):
    call_main('noisy_labels.py', f'--data={tmp_path}')
  assert '--data and --features belong together' in capsys.readouterr().err
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  for script in ('noisy_labels.py', 'audit.py'):
    with pytest.raises(SystemExit):
      call_main(script)
    assert '--no-cleanlab leaves it out' in capsys.readouterr().err


@pytest.mark.slow
def test_samplers(run):
  flags = ['--heads=het_xl', '--noises=0.5', '--steps=5', '--reference_samples=4096', '--trials=2']
  flags += ['--batch=4', '--classes=20', '--dim=8', '--factors=4', '--samplers=iid,taylor,sobol']
  flags += ['--samples=64']
  result, printed = run('samplers.py', *flags)
  rows = {(row['weights'], row['sampler'], row['s']): row['rmse'] for row in result['rows']}
  assert len(rows) == 6 and all(error > 0 for error in rows.values())
  assert rows['trained', 'sobol', 64] < rows['trained', 'iid', 64]
  assert f'in {result["better"]} of 2' in printed[-1]


@pytest.mark.slow
def test_input(run):
  flags = ['--files=48', '--size=48', '--image_size=16', '--batch=8', '--turn=32', '--turns=1']
  rows, printed = run('input.py', *flags, '--workers=1')
  assert [row['source'] for row in rows] == ['image_folder', 'tfds']
  for row in rows:
    rates = row['ours_images_per_second'], row['theirs_images_per_second']
    assert row['workers'] == 1 and row['ratio'] == pytest.approx(rates[0] / rates[1])
  assert 'times the rate of tf.data' in printed[-1]


def test_towers(run):
  pytest.importorskip('torch')
  pytest.importorskip('transformers')
  (row,), _ = run('towers.py', '--width=64', '--depth=1', '--batch=2', '--turns=1')
  assert row['ratio'] > 0 and row['max_difference'] < 1e-4
