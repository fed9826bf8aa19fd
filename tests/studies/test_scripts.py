"""The scripts of the studies at a tiny size: rows are consistent, and wrong flags are told."""

import importlib
import io

import numpy as np
import pytest
from PIL import Image

from studies.known_truth import known_truth
from studies.noisy_labels import noisy_labels
from studies.people import people
from studies.real_features import real_features

KNOWN_TRUTH = known_truth.__name__
NOISY_LABELS = noisy_labels.__name__
REAL_FEATURES = real_features.__name__
COLOURS = 'studies.colours.colour_names'
GLYPHS = 'studies.real_features.glyph_label_noise'
NOISE_TEST = 'studies.known_truth.noise_test'
SAMPLERS = 'studies.samples.samplers'

# Script and flags, how many rows it writes, and what its last line says.
RUNS = {
  f'{SAMPLERS} --principal_factors=1 --classes=20 --dim=8 --factors=4 --batch=4 --steps=2': (
    2,
    'nats with m = 1',
  ),
  f'{KNOWN_TRUTH} --problem=sigmoid,5,3,2,3,60 --heads=het': (2, 'het'),
  'studies.known_truth.many_rows --sizes=500 --classes=5 --dim=3 --test=200': (2, 'True'),
  'studies.noise_default.noise_default --problems=known --seeds=0 --heads=het --rows=100': (
    3,
    'auto',
  ),
  f'{NOISE_TEST} --only=rate,0.4,2500,10,24,0.3 --folds=2': (3, 'times what the test predicted'),
}


@pytest.mark.slow
@pytest.mark.parametrize('command', RUNS)
def test_its_last_line_concludes(run_script, command, monkeypatch):
  # As many as there are held-out rows, for one program.
  monkeypatch.setattr(known_truth, 'NUM_TEST', 200)
  monkeypatch.setattr(known_truth, 'CS', (0.1, 1.0))
  monkeypatch.setattr(known_truth, 'NOISE_CS', (0.03, 0.1))
  rows, printed = run_script(*command.split())
  num_rows, conclusion = RUNS[command]
  assert len(rows) == num_rows and conclusion in printed[-1]


@pytest.mark.slow
def test_glyph_label_noise(run_script):
  rows, printed = run_script(GLYPHS)
  assert [row['count'] for row in rows] == [4 * 2297, 2 * 2297]
  for row in rows:
    assert 0.3 < row['wrong'] < 0.5 and 0.5 < row['precision_at_1'] < 0.7
    assert row['entropy'] == pytest.approx(row['nll'], abs=0.05)  # of 4,594 draws
    # The product of 1 - p over the other classes is at least p(y), and below 1.
    assert row['nll'] < row['nll_sigmoid'] <= 2 * row['nll']
  assert printed[0].split()[-1] == 'precision_at_1'


@pytest.mark.slow
def test_real_features(run_script, run_main, monkeypatch, tmp_path):

  def run_here(main, *flags):
    sizes = ['--gin.BATCH_SIZE=8', '--gin.EVAL_STEPS=1'] if main == 'train' else []
    run_main(importlib.import_module(f'het_plugin.commands.{main}'), *flags, *sizes)

  monkeypatch.setattr(real_features, 'run_main', run_here)
  flags = ['--classes=5', '--rows_per_class=20', '--steps=2', '--samples=2']
  flags += ['--folds=2', '--fits=1', '--C=0.3', '--C_noise=0,0.1', '--dim=16']
  flags += ['--heads=het', f'--work_dir={tmp_path / "work"}']
  rows, _ = run_script(REAL_FEATURES, *flags)
  assert [(row['test'], row['head']) for row in rows] == [
    (test, head) for test in ('other images', 'known') for head in ('det', 'det_tau', 'het')
  ]
  det, det_tau, het, *_, known = rows
  assert det_tau['to_det'] == pytest.approx(0, abs=1e-3)  # at the optimum they are one model
  assert het['to_det'] == pytest.approx(het['nll'] - det['nll'])
  assert det['kl'] == det['nll'] and 0 < known['kl'] < known['nll']  # one label has no entropy
  again, printed = run_script(REAL_FEATURES, *flags)  # with the same --json
  assert again == rows and not any(', fold' in line for line in printed)


@pytest.mark.slow
def test_people(run_script, run_main, digits_run, monkeypatch, tmp_path):
  """Of a run of ours and of features made elsewhere: 60 images with votes, 60 with many answers."""
  rng = np.random.default_rng(0)
  label = rng.integers(3, size=120)
  jpeg = []
  for k in label:
    file = io.BytesIO()
    image = np.clip(80 * k + rng.normal(size=(8, 8)), 0, 255).astype(np.uint8)
    Image.fromarray(image).save(file, 'JPEG')
    jpeg.append(np.frombuffer(file.getvalue(), np.uint8))
  votes = np.where(rng.random((60, 3)) < 0.3, rng.integers(3, size=(60, 3)), label[:60, None])
  p = 0.1 + 0.7 * np.eye(3)[label[60:]]
  counts = np.stack([rng.multinomial(51, of_row) for of_row in p])
  arrays = {'jpeg': np.concatenate(jpeg), 'label': label, 'annotators': votes}
  arrays['jpeg_offset'] = np.cumsum([0, *map(len, jpeg)])
  np.savez(tmp_path / 'cifar10_human.npz', human_counts=counts, **arrays)
  features = np.eye(3)[label] + 0.3 * rng.normal(size=(120, 3))
  np.savez(tmp_path / 'made.npz', features=features, index=np.arange(120))
  monkeypatch.setattr(people, 'NUM_TRAIN', 60)
  represent = importlib.import_module('het_plugin.commands.represent')
  monkeypatch.setattr(people, 'run_represent', lambda flags: run_main(represent, *flags))
  flags = [f'--data={tmp_path}', f'--towers={digits_run[0]},made={tmp_path / "made.npz"}']
  flags += ['--folds=2', '--dim=2', '--C=0.1,1', '--heads=het', '--max_iter=20']
  flags += [f'--work_dir={tmp_path / "work"}']
  rows, _ = run_script(people.__name__, *flags)
  tests = ['cifar10h', 'cifar10n', 'cifar10n, 51 people']
  assert len(rows) == 2 * 3 * 3 and {row['test'] for row in rows} == {*tests}
  made = {(row['test'], row['head']): row for row in rows if row['tower'] == 'made'}
  for test in tests:
    det, det_tau, het = (made[test, head] for head in ('det', 'det_tau', 'het'))
    assert det['to_det'] == 0 and det_tau['to_det'] == pytest.approx(0, abs=1e-3)
    assert het['to_det'] == pytest.approx(het['nll'] - det['nll'], abs=1e-6)
    assert 0.6 < det['nll'] < 1.1 and det['accuracy'] > 0.8  # of 3 classes, ln 3 is 1.099
    assert het['price'] > 0 and het['predicted'] is not None
  again, printed = run_script(people.__name__, *flags)  # with the same --json
  assert again == rows and not any(': fold' in line for line in printed)


@pytest.mark.slow
def test_colour_names(run_script, tmp_path, call_script, capsys):
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
  rows, _ = run_script(COLOURS, *flags)
  det, het_xl, answers = rows
  assert [row['head'] for row in rows] == ['det', 'het_xl', 'answers']
  assert det['difference'] == det['price'] == 0 and det['n'] == 48_000
  assert het_xl['difference'] == pytest.approx(het_xl['nll'] - det['nll'])
  assert het_xl['price'] == (2 * 3 * 4 + 4 * 3) / 48_000  # v, d and J; half of the answers
  # The entropy of 600 answers is less than that of the names, by about 3 / 1,200.
  entropy = -(p * np.log(p)).sum(axis=1).mean()
  assert answers['nll'] == pytest.approx(entropy - 3 / 1200, abs=0.01)
  assert answers['nll'] < det['nll']
  call_script(COLOURS, *flags, f'--plot={tmp_path / "colours.png"}')
  assert (tmp_path / 'colours.png').read_bytes().startswith(b'\x89PNG')
  printed = capsys.readouterr().out
  assert printed.count('correlation') == 2 and 'nll' not in printed


@pytest.mark.slow
def test_noisy_labels(run_script, monkeypatch):
  for name, values in {'CS': (0.3, 1.0), 'NOISE_CS': (1.0,), 'NOISE_RATIOS': (0.1, 0.3)}.items():
    monkeypatch.setattr(noisy_labels, name, values)
  flags = ['--problem=next,0.3,300,3,4,0.3,0', '--seeds=0', '--no-cleanlab']
  heads = ['det', 'smoothing', 'gce', 'forward_known', 'forward_estimated', 'het_xl']
  heads += ['forward_audit', 'audited']
  rows, printed = run_script(NOISY_LABELS, *flags, f'--heads={",".join(heads)}')
  assert [(row['seed'], row['head']) for row in rows] == [(0, x) for x in heads]
  for row in rows:
    assert (row['kind'], row['share'], row['n'], row['k']) == ('next', 0.3, 300, 3)
    assert 0.9 < row['bayes'] < 1 and row['clean_accuracy_location'] <= row['best_accuracy'] + 1e-9
    assert 0.6 < row['clean_accuracy_location'] < row['bayes'] + 0.02
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
  again, printed = run_script(NOISY_LABELS, *flags, f'--heads={",".join(heads)}')
  assert again == rows and not any('1/1 ' in line for line in printed)


@pytest.mark.slow
def test_samplers(run_script):
  flags = ['--heads=het_xl', '--noises=0.5', '--steps=5', '--reference_samples=4096', '--trials=2']
  flags += ['--batch=4', '--classes=20', '--dim=8', '--factors=4', '--samplers=iid,taylor,sobol']
  flags += ['--samples=64']
  result, printed = run_script(SAMPLERS, *flags)
  rows = {(row['weights'], row['sampler'], row['s']): row['rmse'] for row in result['rows']}
  assert len(rows) == 6 and all(error > 0 for error in rows.values())
  assert rows['trained', 'sobol', 64] < rows['trained', 'iid', 64]
  assert f'in {result["better"]} of 2' in printed[-1]


WRONG = {
  f'{KNOWN_TRUTH} --heads=det': "['det'] unknown: choose from het, het_h, het_xl",
  f'{KNOWN_TRUTH} --problem=softmax,10': "--problem: invalid as_problem value: 'softmax,10'",
  f'{KNOWN_TRUTH} --problem=softmx,10,8,2,3,50': "['softmx'] unknown: choose from softmax, sig",
  f'{KNOWN_TRUTH} --plot=map.png': '--plot draws the rows of --json=None, which has none',
  f'{NOISY_LABELS} --problem=unifrom,0.3,300,3,4,0.3,0': "['unifrom'] unknown: choose from next",
  f'{NOISY_LABELS} --plot=map.png': '--plot draws the rows of --json=None, which has none',
  f'{NOISY_LABELS} --data=none --features a.npz b.npz': 'has no cifar10_human.npz, which --people=',
  f'{NOISY_LABELS} --data=none': '--data and --features belong together',
  NOISY_LABELS: '--no-cleanlab leaves it out',
  f'{NOISE_TEST} --only=none': '--only=none and --max_size=300000 leave no problem',
  f'{GLYPHS} --class_set=latin --split=shift': 'has no split shift: choose validation',
  f'{people.__name__} --data=none --towers=a': '--data=none has no cifar10_human.npz',
  f'{REAL_FEATURES} --parts=worse': '--data=None has no cifar10_human.npz',
}


def test_wrong_flags(call_script, capsys, monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)  # no cleanlab
  for command, words in WRONG.items():
    with pytest.raises(SystemExit):
      call_script(*command.split())
    assert words in capsys.readouterr().err
