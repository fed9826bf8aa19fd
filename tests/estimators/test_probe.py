"""`probe`: a table of heads on files of representations, against numbers computed here."""

import dataclasses
import itertools
import json
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from het_plugin import reporting
from het_plugin.commands import probe
from het_plugin.estimators import DetClassifier, classifier, lbfgs, resuming, targets
from het_plugin.estimators import probe as grid
from het_plugin.estimators.probe import choose
from het_plugin.estimators.settings import GridSettings
from het_plugin.runs import sources
from het_plugin.system import exit_codes, stopping
from tests.waiting import wait_for


def write_files(folder, num_rows, num_classes):
  """Files of `num_rows` training rows and of 200 others, with 6 features."""
  rng = np.random.default_rng(0)
  n = num_rows + 200
  x = rng.normal(size=(n, 6)).astype(np.float32)
  y = (x @ rng.normal(size=(6, num_classes)) + rng.gumbel(size=(n, num_classes))).argmax(axis=1)
  for name, rows in (('train', slice(0, num_rows)), ('test', slice(num_rows, None))):
    np.savez(folder / f'{name}.npz', features=x[rows], label=y[rows])
  return str(folder / 'train.npz'), str(folder / 'test.npz')


@pytest.fixture(scope='module')
def files(tmp_path_factory):
  return write_files(tmp_path_factory.mktemp('representations'), 300, 3)


@pytest.fixture(scope='module')
def few(tmp_path_factory):
  """Of 100 rows and 4 classes, as in tests of the estimators, whose programs the fits share."""
  return write_files(tmp_path_factory.mktemp('few'), 100, 4)


def settings(**changes):
  return GridSettings(
    **{
      'heads': ('det',),
      'max_iter': 60,
      'num_factors': (2,),
      'num_samples': 16,
      'C_noise': (None,),
    }
    | changes
  )


@pytest.mark.slow
def test_numbers_are_those_of_logistic_regression(files, tmp_path):
  report = probe.probe(*files, settings(heads=('det', 'het')))
  det, het = report.json
  assert '; differences to det are paired by example. extreme: ' in report.text()
  train, test = (np.load(path) for path in files)
  expected = LogisticRegression(tol=1e-8, max_iter=1000).fit(train['features'], train['label'])
  p = expected.predict_proba(test['features'])
  assert det['nll'] == pytest.approx(-np.log(p[np.arange(200), test['label']]).mean(), abs=1e-4)
  assert det['precision_at_1'] == (p.argmax(axis=1) == test['label']).mean()
  brier = np.square(p - np.eye(3)[test['label']]).sum(axis=1)
  assert det['brier'] == pytest.approx(brier.mean(), abs=1e-4)
  assert {'ece', 'seconds'} <= set(det) and 'difference' not in det
  assert het['difference']['nll'] == pytest.approx(het['nll'] - det['nll'], abs=1e-6)
  noise = 2 * (6 * 3 + 3) + 2 * 3  # of v(x) and d(x), and J
  assert (det['price'], het['price']) == (0, pytest.approx(noise / (2 * 300)))
  report.write('het_plugin.probe', json=str(tmp_path / 'x.json'), html=str(tmp_path / 'x.html'))
  assert [row['head'] for row in json.loads((tmp_path / 'x.json').read_text())] == ['det', 'het']
  assert 'prec@1' in (tmp_path / 'x.html').read_text()


def test_the_main(few, tmp_path, run_main):
  arguments = (f'--train={few[0]}', f'--test={few[1]}', '--heads=det', '--max_iter=60')
  run_main(probe, *arguments, f'--json={tmp_path}/x.json')
  (row,) = json.loads((tmp_path / 'x.json').read_text())
  alone = probe.probe(*few, settings())
  assert row['nll'] == alone.json[0]['nll']
  assert 'extreme' not in alone.text() and 'differences' not in alone.text()
  run_main(probe, *arguments, '--hidden_layers=8', f'--json={tmp_path}/x.json')
  (row,) = json.loads((tmp_path / 'x.json').read_text())
  (expected,) = probe.probe(*few, settings(hidden_layers=(8,))).json
  assert row['nll'] == expected['nll'] != probe.probe(*few, settings()).json[0]['nll']
  for flag, message in (
    ('--checkpoint=x', '--train and --checkpoint cannot go together'),
    ('--splits=a,b', '--splits is for --checkpoint'),
    ('--gin.C=3', '--gin_bindings is for --checkpoint'),
    ('--hidden_layers=x', '--hidden_layers=x must be'),
    ('--C=0', '--C=0 must be above 0'),
    ('--heads=', '--heads= must be a list that is not empty'),
    ('--mesh=2', '--mesh=2 must be a list of 2 (each a whole number, at least 1)'),
    ('--tau=cold', '--tau=cold must be a number, or learned, validation'),
    ('--C_noise=', '--C_noise= must be a list that is not empty'),
    ('--C_noise=0.5,-1', "--C_noise=0.5,-1 must each be at least 0 or 'auto'"),
    ('--C_noise=best', '--C_noise=best must be a number, or auto'),
    ('--C_noise=auto,0.1', '--C_noise=auto,0.1: auto chooses from values of its own'),
    ('--C_noise=0.1', '--C_noise has no effect on --heads=det, which has no noise'),
    ('--tol=0', '--tol=0 must be above 0'),
    ('--folds=3', '--folds has no effect on --test'),
  ):
    assert message in run_main(probe, *arguments, flag, code=2)


@pytest.mark.slow
def test_every_fit_says_how_far_it_is(files, monkeypatch):
  titles = []

  class Noted(reporting.Progress):
    def __init__(self, title, *args, **kwargs):
      titles.append(re.sub(r' \(all: ETA [0-9:]+\)', '', title))
      super().__init__(title, *args, **kwargs)

  monkeypatch.setattr(lbfgs, 'Progress', Noted)
  short = {'max_iter': 2, 'folds': 2}
  probe.probe(files[0], None, settings(C=(0.1, 1.0), **short))
  assert titles[:4] == [f'fit {i} of 6, fold {1 + (i > 3)} of 2: det' for i in (1, 2, 3, 4)]
  titles.clear()
  probe.probe(*files, settings(heads=('det', 'het'), **short))
  # The noise grows, and is then fitted.
  assert titles == ['fit 1 of 2: det', 'fit 2 of 2: het', 'fit 2 of 2: het']
  titles.clear()
  probe.probe(*files, settings(progress=False, **short))
  assert titles == ['det']  # and not shown


@pytest.mark.slow
def test_sigterm_ends_it_as_other_mains(files):
  command = [sys.executable, '-m', 'het_plugin.probe', f'--train={files[0]}', '--tol=1e-12']
  process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

  def listens():
    status = Path(f'/proc/{process.pid}/status').read_text()
    caught = int(status.partition('SigCgt:')[2].split()[0], 16)
    return caught >> (signal.SIGTERM - 1) & 1

  wait_for(listens)
  process.send_signal(signal.SIGTERM)
  assert 'SIGTERM: stopped' in process.communicate(timeout=300)[1]
  assert process.returncode == exit_codes.PREEMPTED


@pytest.mark.parametrize('solver, every, most', [('lbfgs', 12, 2), ('streamed', 35, 10)])
def test_a_stopped_probe_goes_on(few, tmp_path, monkeypatch, capsys, solver, every, most):
  train, test = few
  fits = settings(heads=('det', 'het'), max_iter=40, solver=solver)
  whole = probe.probe(train, test, fits).json
  folder = tmp_path / 'probe.json.unfinished'
  begun = []
  minimise = lbfgs.minimise
  monkeypatch.setattr(lbfgs, 'minimise', lambda *x, **y: begun.append(1) or minimise(*x, **y))

  def stopped_after(count):  # of the iterations
    calls = itertools.count()
    monkeypatch.setattr(stopping, 'agreed', lambda: next(calls) >= count)
    return probe.probe(train, test, fits, unfinished=folder)

  stops = 0
  found = None
  while found is None and stops < 30:
    begun.clear()
    try:
      found = stopped_after(every)
    except exit_codes.Preempted:
      stops += 1
      assert 'the same command goes on from' in capsys.readouterr().out
    assert len(begun) <= most  # those that have ended are not made again
  assert 0 < stops < 30
  for one, other in zip(found.json, whole, strict=True):
    assert one['nll'] == pytest.approx(other['nll'], abs=2e-3)
  capsys.readouterr()
  with pytest.raises(exit_codes.Preempted):
    fits = settings(max_iter=41)
    stopped_after(3)
  assert 'is of other settings: this begins anew' in capsys.readouterr().out
  found.written()
  assert not folder.exists()
  folder.mkdir()
  (folder / '.unfinished.about.json').touch()  # as a kill leaves it
  with pytest.raises(exit_codes.Preempted):
    stopped_after(3)
  (folder / 'about.json').unlink()
  with pytest.raises(ValueError, match='no fit has written it'):
    stopped_after(3)
  found.written()
  assert folder.exists()


def test_the_time_left_is_not_of_fits_that_a_folder_has(monkeypatch):
  now = types.SimpleNamespace(seconds=0.0, searches=0)
  monkeypatch.setattr(grid, 'time', types.SimpleNamespace(monotonic=lambda: now.seconds))
  monkeypatch.setattr(resuming, 'num_made', lambda: now.searches)
  titles = grid.fit_titles(settings(heads=('det',), C=(1, 2, 3)), 1)
  assert next(titles) == 'fit 1 of 4'
  now.seconds += 0.1  # read
  assert next(titles) == 'fit 2 of 4'
  now.seconds += 10.0
  now.searches += 1
  assert next(titles) == 'fit 3 of 4 (all: ETA 0:00:20)'


def test_searches_of_another_program_are_not_taken(few, tmp_path, monkeypatch):
  folder = tmp_path / 'probe.json.unfinished'
  rows = probe.read(few[0], '')[0]
  votes = dataclasses.replace(rows, annotator=np.zeros_like(rows.labels))
  monkeypatch.setattr(resuming, '_SECONDS', -1.0)

  def searched(value):
    result = lbfgs.FitResult({'a': np.float32([value])}, value, 0.0, 1, 0.0)
    monkeypatch.setattr(lbfgs, 'minimise', lambda *_, **__: result)
    return resuming.minimise(None, {}, None, max_iter=3, stops=lambda: False).objective

  with resuming.kept(folder, settings(), rows):
    assert searched(1.0) == 1.0
    with resuming.kept(folder, settings(), votes):
      assert searched(2.0) == 2.0
    assert searched(3.0) == 3.0
  assert sorted(path.name for path in folder.iterdir()) == ['000001.npz', 'about.json']
  with resuming.kept(folder, settings(), rows):
    assert searched(4.0) == 4.0  # the other program has replaced it
    assert searched(5.0) == 3.0


@pytest.mark.parametrize('path', ['gs://bucket/a.json', '/dev/stdout', '/dev/null'])
def test_nothing_is_kept_beside_what_is_no_file(path):
  assert probe.Settings(json=path).unfinished is None
  assert probe.Settings(json=path, html='a.html').unfinished == Path('a.html.unfinished')


def test_marked_classes_are_no_class_numbers(few):
  x = np.load(few[0])['features']
  y = np.arange(400).reshape(100, 4) % 3 % 2
  with pytest.raises(ValueError, match=r'labels are \[100, 4\] of 0 and 1: classes that are mar'):
    probe.probe((x, y), None, settings())
  assert targets.of_rows(probe.read((x, y), '')[0], 'votes')[1].tolist() == [0, 1]


def test_rows_of_another_distribution_have_the_same_columns(few, tmp_path):
  for name, columns in (('a', 'a,b'), ('b', 'b,a'), ('c', 'a')):
    row = ','.join('1' * len(columns.split(',')))
    (tmp_path / f'{name}.csv').write_text(f'{columns},label\n{row},0\n{row},1\n')
  train, other, narrow = (str(tmp_path / f'{name}.csv') for name in 'abc')
  fits = settings(folds=2)
  with pytest.raises(ValueError, match=f"feature 0 is 'b' in --ood={other} and 'a' in {train}"):
    probe.probe(train, None, fits, ood=other)
  with pytest.raises(ValueError, match=f'--ood={narrow} has D 1 and {train} D 2'):
    probe.probe(train, None, fits, ood=narrow)


def test_scores_of_many_classes_are_held_in_blocks(few, monkeypatch, tmp_path):
  train, test = few
  (expected,) = probe.probe(train, test, settings(), ood=train).json
  monkeypatch.setattr(probe, '_SCORES', 4 * 7)
  (row,) = probe.probe(train, test, settings(), ood=train).json
  for name in ('nll', 'ece', 'agreement', 'stderr'):
    assert row[name] == pytest.approx(expected[name], rel=1e-6), name
  x = np.load(test)['features']
  det = DetClassifier(max_iter=3).fit(train)
  predicted = det.predict(x)
  monkeypatch.setattr(classifier, '_SCORES', 4 * 7)
  np.testing.assert_array_equal(det.predict(x), predicted)
  x[50] = np.nan
  np.save(tmp_path / 'x.npy', x)
  with pytest.raises(ValueError, match='NaN or infinity, first in row 50$'):
    det.predict(np.load(tmp_path / 'x.npy', mmap_mode='r'))


def test_labels_may_be_names(few, tmp_path):
  (expected,) = probe.probe(*few, settings()).json
  paths = [str(tmp_path / Path(path).name) for path in few]
  for path, numbered in zip(paths, map(np.load, few), strict=True):
    np.savez(path, features=numbered['features'], label=np.array([*'abcd'])[numbered['label']])
  (row,) = probe.probe(*paths, settings()).json
  assert row | {'seconds': 0} == expected | {'seconds': 0}


def test_labels_beyond_int32_are_an_error(few):
  x = np.load(few[0])['features']
  with pytest.raises(ValueError, match=str(2**32 + 2)):
    probe.probe((x, np.arange(len(x)) % 3 + 2**32), None, settings())


def test_a_folder_of_represent(few, tmp_path):
  (expected,) = probe.probe(*few, settings()).json
  for name, source in zip(('train', 'test'), few, strict=True):
    for path in (tmp_path / f'pre_logits/{name}.npz', tmp_path / f'.unfinished.{name}/1.100.npz'):
      path.parent.mkdir(exist_ok=True)
      path.write_bytes(Path(source).read_bytes())
  (row,) = probe.probe(str(tmp_path), None, settings()).json
  assert row['nll'] == expected['nll']
  validation = tmp_path / 'pre_logits/validation.npz'  # of a folder of images
  (tmp_path / 'pre_logits/test.npz').rename(validation)
  found = str(tmp_path / 'pre_logits/train.npz'), str(validation)
  assert sources.halves(str(tmp_path)) == found
  validation.rename(tmp_path / 'pre_logits/test.npz')
  (tmp_path / 'pre_logits/train.npz').rename(validation)
  message = 'file named train; it has .*/test.npz, .*/validation.npz'
  with pytest.raises(ValueError, match=message):
    probe.probe(str(tmp_path), None, settings())
  (tmp_path / 'pre_logits/test.npz').unlink()
  (row,) = probe.probe(str(tmp_path), None, settings(folds=2)).json  # its only file
  assert row['num_examples'] == 100


@pytest.mark.slow
def test_folds_score_every_training_row_and_a_grid_is_chosen_from(files):
  (row,) = probe.probe(files[0], None, settings(C=(1e-5, 1.0), folds=3)).json
  assert row['num_examples'] == 300 and len(row['chosen']) == 3
  assert {point['C'] for point in row['chosen']} == {1.0}
  report = probe.probe(*files, settings(C=(1e-5, 1.0)))
  assert 'det: C=1 was chosen at the end of --C: try larger ones.' in report.text()
  assert row['stderr_folds']['nll'] > 0


def test_rows_of_a_class_of_one_fold_are_left_out(few):
  test = np.load(few[1])
  arrays = {name: test[name][:168] for name in ('features', 'label')}  # 112 in two folds
  arrays['label'][7] = 9  # the only one
  report = probe.probe((arrays['features'], arrays['label']), None, settings(folds=3))
  assert report.json[0]['num_examples'] == 167
  assert 'Rows left out, because no other fold has their class: 1.' in report.text()
  report.json[0]['chosen'][1]['C'] = 0.1  # as if this fold had chosen it
  assert probe._shown(report.json[0])['C'] == '1, 0.1'
  few_rows = arrays['features'][:5], np.array([0, 0, 1, 1, 9])
  report = probe.probe(few_rows, None, settings(folds=5, max_iter=1))  # it is a whole fold
  assert report.json[0]['num_examples'] == 4 == len(report.json[0]['chosen'])
  # Nor can the row choose from a grid, where it is held out for that.
  y = arrays['label'][:, None]
  of_grid = settings(target='votes', C=(0.1, 1.0), max_iter=2, validation=0.5, seed=3)
  of_fold = arrays['features'], y, np.arange(30), of_grid, {}, itertools.repeat('')
  grid.fit_best('det', *of_fold)


def test_weights_of_labels_are_shares(files, tmp_path):
  """A file of `represent` has them where people or a task give probabilities."""
  x = np.load(files[0])['features']
  share = 1 / (1 + np.exp(-3 * x[:, 0]))
  labels = np.tile(np.array([0, 1], np.int32), (len(x), 1))
  weight = np.stack([share, 1 - share], axis=1).astype(np.float32)
  path = str(tmp_path / 'soft.npz')
  np.savez(path, features=x, label=labels, label_weight=weight)
  for target in ('auto', 'votes'):
    found = DetClassifier(target=target).fit(path)
    assert found.target_ == 'probabilities'
    np.testing.assert_allclose(found.predict_proba(x)[:, 0], share, atol=0.1)
    expected = -(weight * found.predict_log_proba(x)).sum(axis=1)
    np.testing.assert_allclose(found.nll(path), expected, rtol=1e-4)
  with pytest.raises(ValueError, match='and an indicator has several labels per row'):
    DetClassifier(target='indicator').fit(path)
  for target in ('auto', 'votes'):
    (row,) = probe.probe(path, path, settings(target=target)).json
    entropy = -(weight * np.log(weight)).sum(axis=1).mean()
    assert row['nll'] == pytest.approx(entropy, abs=0.02)
    assert row['agreement']['soft_label_nll'] == pytest.approx(row['nll'], abs=1e-5)
  with pytest.raises(ValueError, match="has the vote .* are target='probabilities'"):
    DetClassifier(target='votes').fit(x, weight)


def test_fits_that_have_not_converged_are_counted(few):
  """As they warn: not those that end by their gap, above tol."""
  report = probe.probe(*few, settings(max_iter=2))
  assert 'det: 1 of its fits have not converged; raise --max_iter.' in report.text()
  assert 'converged' not in probe.probe(*few, settings()).text()


def test_of_the_noise_the_least_within_a_standard_error_is_chosen():
  grid = [{'C': 1.0, 'C_noise': c, 'num_factors': r} for c in (0.0, 0.1, 3.0) for r in (2, 4)]
  rng = np.random.default_rng(0)
  base = rng.normal(size=400)
  spread = rng.normal(size=400)
  spread = (spread - spread.mean()) / spread.std(ddof=1)  # its standard error is 0.05

  def nll(gains):
    return np.stack([base - gain + (gain > 0) * spread for gain in gains])

  # R is that of the best point, at 0.1 beyond and at 0.04 within a standard error of no noise.
  assert choose(grid, nll([0, 0, 0.1, 0, 0, 0])) == 2
  assert choose(grid, nll([0, 0, 0.04, 0, 0, 0])) == 0
  # The error is that of the paired difference, which is 0 between points that err alike.
  assert choose(grid, nll([0, 0, 0, 0.1, 0, 0.11])) == 5
  # C_noise=None is 0.03 C.
  assert choose([{'C': 1.0, 'C_noise': None}, {'C': 1.0, 'C_noise': 0.01}], nll([0, 0])) == 1


@pytest.mark.slow
def test_several_c_noise_include_no_noise(files):
  assert [x['C_noise'] for x in settings(C_noise=(0.1, 1.0)).grid('het')] == [0.0, 0.1, 1.0]
  assert [x['C_noise'] for x in settings(C_noise=(0.1,)).grid('het')] == [0.1]
  # The labels have no noise beside that of the link, so the noise is not taken.
  det, het = probe.probe(*files, settings(heads=('det', 'het'), C_noise=(0.1, 3.0))).json
  assert het['chosen'][0]['C_noise'] == 0.0
  assert het['nll'] == pytest.approx(det['nll'], abs=1e-5)


@pytest.mark.slow
def test_auto_is_the_default_and_no_grid(files, tmp_path, run_main):
  assert [x['C_noise'] for x in GridSettings().grid('het')] == ['auto']
  arguments = (f'--train={files[0]}', f'--test={files[1]}', '--heads=det,het', '--max_iter=60')
  small = ('--num_factors=2', '--num_samples=16')
  run_main(probe, *arguments, *small, f'--json={tmp_path}/x.json')
  det, het = json.loads((tmp_path / 'x.json').read_text())
  assert het['chosen'] == [{**het['chosen'][0], 'C_noise': 0.0}]  # these labels have no noise
  assert het['nll'] == pytest.approx(det['nll'], abs=1e-5)


def test_several_labels_where_the_last_class_is_in_training_only(tmp_path):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(150, 6)).astype(np.float32)
  on = x @ rng.normal(size=(6, 3)) + rng.logistic(size=(150, 3)) > 0
  on[100:, 2] = False
  labels = np.where(on, np.arange(3), -1)
  for name, rows in (('a', slice(0, 100)), ('b', slice(100, None))):
    np.savez(tmp_path / f'{name}.npz', features=x[rows], label=labels[rows])
  (row,) = probe.probe(str(tmp_path / 'a.npz'), str(tmp_path / 'b.npz'), settings()).json
  expected = DetClassifier(max_iter=60).fit(x[:100], on[:100].astype(int))
  nll = expected.nll(x[100:], on[100:].astype(int)).mean()
  assert row['nll'] == pytest.approx(nll, abs=1e-5)


def test_the_extreme_share():
  differences = np.concatenate([np.full(99, 0.01), [-5.0]])
  assert probe.extreme_share(differences) == pytest.approx(-5 / (0.99 - 5))
  assert probe.extreme_share(np.ones(200)) == pytest.approx(0.01)


def test_wrong_settings_are_one_sentence(files, tmp_path):
  with pytest.raises(ValueError, match="--heads=svm must be one of 'det'"):
    settings(heads=('svm',))
  with pytest.raises(ValueError, match=r'^C=0.1 must be a list: \[0.1\]'):
    settings(C=0.1)
  assert settings(num_factors=range(1, 3)).num_factors == range(1, 3)
  with pytest.raises(ValueError, match='--baseline=het must be one of'):
    settings(baseline='het')
  with pytest.raises(ValueError, match='--heads=det,det must name each head once'):
    settings(heads=('det', 'det'))
  with pytest.raises(ValueError, match='are one file'):
    probe.run(probe.Settings(train=files[0], test=files[0]))
  np.savez(tmp_path / 'other.npz', features=np.ones((4, 5), np.float32), label=np.arange(4))
  with pytest.raises(ValueError, match='other.npz has D 5 and'):
    probe.probe(files[0], str(tmp_path / 'other.npz'), settings())
  with pytest.raises(ValueError, match='--folds=5 must be at most 4, the rows of'):
    probe.probe(str(tmp_path / 'other.npz'), None, settings())
  for name, classes in (('a', ['ant', 'cat', 'dog']), ('b', ['ant', 'elk'])):  # no elks in a
    rows = {'features': np.ones((2, 6), np.float32), 'label': np.array([0, 1])}
    np.savez(tmp_path / f'{name}.npz', class_name=np.array(classes), **rows)
  with pytest.raises(ValueError, match="label 1 is 'elk' in .*b.npz and 'cat' in .*a.npz: both"):
    probe.probe(str(tmp_path / 'a.npz'), str(tmp_path / 'b.npz'), settings())
  for labels in (np.array(list('abab')), np.array([0.5, 1, 0, 1])):
    with pytest.raises(ValueError, match='they must be integers'):
      probe.probe((np.ones((4, 5), np.float32), labels), None, settings())
  (tmp_path / 'empty').mkdir()
  with pytest.raises(ValueError, match='empty is neither a file of rows'):
    probe.probe(str(tmp_path / 'empty'), None, settings())
  np.savez(tmp_path / 'more.npz', features=np.ones((2, 6), np.float32), label=np.array([0, 7]))
  with pytest.raises(ValueError, match='1 test rows have classes .* such as 7'):
    probe.probe(files[0], str(tmp_path / 'more.npz'), settings())


def test_votes_and_rows_of_another_distribution(tmp_path):
  """Three annotators per row, of whom the last agrees less often where the features are small."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(300, 4)).astype(np.float32)
  u = 2 * x @ rng.normal(size=(4, 3))
  votes = np.stack([(u + rng.gumbel(size=u.shape)).argmax(axis=1) for _ in range(3)], axis=1)
  votes[::7, 2] = -1
  np.savez(tmp_path / 'a.npz', features=x[:200], label=votes[:200])
  np.savez(tmp_path / 'b.npz', features=x[200:], label=votes[200:])
  np.savez(tmp_path / 'ood.npz', features=x[:50] / 5, label=votes[:50, 0])
  paths = (str(tmp_path / name) for name in ('a.npz', 'b.npz'))
  report = probe.probe(*paths, settings(target='votes'), str(tmp_path / 'ood.npz'))
  found = report.json[0]['agreement']
  estimator = DetClassifier(target='votes', max_iter=60).fit(x[:200], votes[:200])
  log_p = estimator.predict_log_proba(x[200:])
  expected = [log_p[i, row[row >= 0]].mean() for i, row in enumerate(votes[200:])]
  assert found['soft_label_nll'] == pytest.approx(-np.mean(expected), abs=1e-5)
  assert found['disagreement_correlation'] > 0.2 and found['ood_auroc'] > 0.6
  assert 'ood_auroc' in report.text()
  who = np.where(votes >= 0, np.arange(3), -1).astype(np.int32)
  np.savez(tmp_path / 'who.npz', features=x[:200], label=votes[:200], annotator=who[:200])
  (row,) = probe.probe(*(str(tmp_path / x) for x in ('who.npz', 'b.npz')), settings()).json
  assert row['nll'] == pytest.approx(report.json[0]['nll'], rel=1e-6)
  with pytest.raises(ValueError, match='ood.npz needs one label a row, or --target=votes'):
    probe.probe(str(tmp_path / 'a.npz'), None, settings(), str(tmp_path / 'ood.npz'))
