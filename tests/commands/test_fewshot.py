"""`python -m het_plugin.fewshot`: files and checkpoints in, tables, JSON and a page out."""

import json
import shutil
import types

import ml_dtypes
import numpy as np
import pytest
from sklearn.datasets import load_digits

from het_plugin import measures, rows, runs
from het_plugin.commands import fewshot, select
from het_plugin.estimators import DetClassifier
from het_plugin.evaluation.fewshot import FewShotDataset, check
from het_plugin.measures import few_shot


@pytest.fixture(scope='module')
def files(tmp_path_factory):
  """{run: (train file, test file)}: pixels of digits, clean and noisy."""
  folder = tmp_path_factory.mktemp('files')
  x, y = load_digits(return_X_y=True)
  x = x[:600].astype(np.float32)
  y = y[:600]
  noisy = x + 6 * np.random.default_rng(0).normal(size=x.shape).astype(np.float32)
  paths = {}
  for run, features in (('clean', x), ('noisy', noisy)):
    paths[run] = tuple(str(folder / f'{run}_{split}.npz') for split in ('train', 'test'))
    for path, part in zip(paths[run], (slice(0, 400), slice(400, 600)), strict=True):
      np.savez(path, x=features[part], y=y[part])
  return paths


def pair(files, run):
  return f'--train={files[run][0]}', f'--test={files[run][1]}'


def arrays(files, run):
  loaded = [np.load(path) for path in files[run]]
  return loaded[0]['x'], loaded[0]['y'], loaded[1]['x'], loaded[1]['y']


def rows_of(path):
  return {(r['run'], r['dataset'], r['shots']): r for r in json.loads(path.read_text())['rows']}


def test_files(files, run_main, tmp_path):
  out = tmp_path / 'out.json'
  page = tmp_path / 'deep' / 'page.html'
  printed = run_main(
    fewshot,
    *pair(files, 'clean'),
    *pair(files, 'noisy'),
    '--names=clean,noisy',
    '--shots=1,5',
    f'--json={out}',
    f'--html={page}',
  )
  lines = printed.strip().splitlines()
  assert lines[0] == 'few-shot accuracy saved'
  assert lines[2].split() == ['run', '1', 'shot', '5', 'shots']
  assert [line.split()[0] for line in lines[4:6]] == ['clean', 'noisy']
  rows = rows_of(out)
  for run in ('clean', 'noisy'):
    expected = few_shot(*arrays(files, run), shots=(1, 5))
    for shots in (1, 5):
      row = rows[run, 'saved', shots]
      assert row['accuracies'] == list(expected[shots].accuracies)
      assert row['l2'] == list(expected[shots].l2) and row['mean'] == expected[shots].mean
  differences = json.loads(out.read_text())['differences']
  assert [(d['run'], d['baseline'], d['shots']) for d in differences] == [
    ('noisy', 'clean', 1),
    ('noisy', 'clean', 5),
  ]
  gap = rows['noisy', 'saved', 5]['mean'] - rows['clean', 'saved', 5]['mean']
  assert differences[1]['mean'] == pytest.approx(gap)
  assert differences[1]['p_rows'] < 1e-6 and 0 < differences[1]['p_draws'] < 0.05
  text = page.read_text()
  assert '<th scope="col">run</th>' in text and 'Paired differences' in text
  assert 'data:image/png' in text and 'het_plugin.fewshot' in text


def test_labels_of_files_may_be_names(files, run_main, tmp_path):
  """A test file lacks classes; names are sorted, so that their numbers are those of the digits."""
  for i, path in enumerate(files['clean']):
    loaded = np.load(path)
    some = loaded['y'] >= 3 * i
    y = loaded['y'][some]
    np.savez(tmp_path / f'numbers_{i}.npz', x=loaded['x'][some], y=y)
    np.savez(
      tmp_path / f'names_{i}.npz', x=loaded['x'][some], y=np.char.add('digit ', y.astype(str))
    )
    stated = {'class_name': [f'digit {k}' for k in range(10)]}
    np.savez(tmp_path / f'stated_{i}.npz', x=loaded['x'][some], y=y, **stated)
    written = rows.read(f'{tmp_path}/names_{i}.npz')
    rows.write(tmp_path / f'written_{i}.npz', written)
    rows.write(tmp_path / f'turned_{i}.npz', written.named((written.class_names or ())[::-1]))
  for command, flags in ((fewshot, ['--shots=5']), (select, ['rank', '--k=3', '--shots=5'])):
    found = []
    for kind in ('numbers', 'names', 'written'):
      pair = [f'--{x}={tmp_path}/{kind}_{i}.npz' for i, x in enumerate(('train', 'test'))]
      run_main(command, *flags, *pair, '--names=a', f'--json={tmp_path}/out.json')
      found.append(json.loads((tmp_path / 'out.json').read_text())['rows'])
    assert found[0] == found[1] == found[2]
  candidates = [
    f'--{x}=' + ','.join(f'{tmp_path}/{kind}_{i}.npz' for kind in ('names', 'stated'))
    for i, x in enumerate(('train', 'test'))
  ]
  run_main(select, 'knn', *candidates, f'--json={tmp_path}/out.json')
  by_names, by_numbers = json.loads((tmp_path / 'out.json').read_text())['rows']
  assert by_names['accuracy'] == by_numbers['accuracy']
  files = [
    f'--{x}={tmp_path}/{kind}_{i}.npz'
    for kind in ('names', 'turned')
    for i, x in enumerate(('train', 'test'))
  ]
  run_main(fewshot, '--shots=5', *files, '--names=a,b', f'--json={tmp_path}/out.json')
  one, other = json.loads((tmp_path / 'out.json').read_text())['rows']
  assert one['accuracies'] == other['accuracies']
  estimator = DetClassifier(max_iter=2).fit(f'{tmp_path}/names_0.npz')
  assert list(estimator.classes_) == [f'digit {k}' for k in range(10)]
  assert 0.5 < estimator.score(f'{tmp_path}/names_1.npz', None) <= 1


def test_data_sets_of_a_run_and_settings_of_a_method(files, run_main, tmp_path):
  """Table 22: methods averaged over data sets and settings."""
  out = tmp_path / 'out.json'
  names = ['a/s:one', 'a/s:two', 'a/t:one', 'b/s:one', 'b/s:two']
  sources = [pair(files, run) for run in ('clean', 'noisy', 'noisy', 'noisy', 'clean')]
  flags = [flag for source in sources for flag in source]
  printed = run_main(
    fewshot, *flags, f'--names={",".join(names)}', '--shots=5', '--l2=10', f'--json={out}'
  )
  rows = rows_of(out)
  assert set(rows) == {(*name.split(':'), 5) for name in names}
  averages = {row['method']: row for row in json.loads(out.read_text())['averages']}
  # b lacks the setting t: it does not count for a either
  cells = [rows['a/s', 'one', 5], rows['a/s', 'two', 5]]
  assert averages['a']['mean'] == pytest.approx(np.mean([c['mean'] for c in cells]))
  assert averages['a']['stderr'] == pytest.approx(np.hypot(*(c['stderr'] for c in cells)) / 2)
  assert averages['a']['num_cells'] == averages['b']['num_cells'] == 2
  assert averages['a']['mean'] == pytest.approx(averages['b']['mean'])
  assert 'Average over data sets and settings' in printed


def test_earlier_results_side_by_side(files, run_main, tmp_path):
  for run in ('clean', 'noisy'):
    run_main(
      fewshot, *pair(files, run), f'--names={run}', '--shots=5', f'--json={tmp_path / run}.json'
    )
  results = [f'--results={tmp_path / run}.json' for run in ('clean', 'noisy')]
  printed = run_main(fewshot, *results, f'--json={tmp_path / "both.json"}')
  one, other = (rows_of(tmp_path / f'{run}.json') for run in ('clean', 'noisy'))
  assert rows_of(tmp_path / 'both.json') == one | other
  assert 'clean' in printed and 'noisy' in printed
  assert 'noisy.json has a result of run' in run_main(fewshot, *results, results[1], code=2)
  again = (*pair(files, 'noisy'), '--names=clean', '--shots=5', '--l2=1')
  printed = run_main(fewshot, *results, *again, f'--json={tmp_path / "new.json"}')
  assert '--results: clean on saved, 5 shots.' in printed
  assert 'Protocol of noisy: loo, ' in printed and 'Protocol of clean: loo, ' in printed
  rows = json.loads((tmp_path / 'new.json').read_text())['rows']
  assert [(row['run'], row['protocol']['l2']) for row in rows] == [('noisy', 'loo'), ('clean', 1.0)]
  printed = run_main(fewshot, f'--results={tmp_path / "new.json"}')
  assert 'Protocol of noisy: loo, ' in printed and 'Protocol of clean: loo, ' in printed


def test_all_examples_and_warnings(files, run_main, tmp_path):
  train_x, train_y, test_x, test_y = arrays(files, 'clean')
  keep = (train_y != 3) & ~((train_y == 4) & (np.cumsum(train_y == 4) > 2))
  np.savez(tmp_path / 'few.npz', x=train_x[keep], y=train_y[keep])
  printed = run_main(
    fewshot,
    f'--train={tmp_path / "few.npz"}',
    f'--test={files["clean"][1]}',
    '--shots=all,5',
    '--l2=heldout',
    f'--json={tmp_path / "out.json"}',
  )
  most = int(np.bincount(train_y[keep]).max())
  rows = rows_of(tmp_path / 'out.json')
  assert sorted(shots for _, _, shots in rows) == [5, most]
  assert rows['few', 'saved', 5]['classes_short'] == 1
  assert rows['few', 'saved', 5]['test_unseen'] == int((test_y == 3).sum())
  assert f'): {int((test_y == 3).sum())} of saved.' in printed
  assert 'Classes with fewer examples than shots' in printed
  assert rows['few', 'saved', most]['stderr'] is None and '0.000' not in printed


def test_other_test_rows_are_found_before_a_fit(files, run_main, monkeypatch):
  monkeypatch.setattr(fewshot, '_evaluate', None)
  train, test = files['clean']
  other_train, _ = files['noisy']
  given = f'--train={train}', f'--test={test}', f'--train={other_train}', f'--test={train}'
  message = run_main(fewshot, *given, '--names=a,b', code=2)
  assert f"--test={train} has other rows than the test file of 'a'" in message


def test_the_splits_of_a_file(files, run_main, tmp_path):
  train_x, train_y, test_x, test_y = arrays(files, 'clean')
  split = np.repeat(['train', 'test'], [len(train_y), len(test_y)])
  both = {'x': np.concatenate([train_x, test_x]), 'y': np.concatenate([train_y, test_y])}
  np.savez(tmp_path / 'both.npz', **both, split=split)
  source = tmp_path / 'both.npz'
  out = tmp_path / 'out.json'
  run_main(
    fewshot,
    f'--train={source}:train',
    f'--test={source}:test',
    '--shots=1',
    '--seeds=0',
    '--l2=1',
    f'--json={out}',
  )
  assert list(rows_of(out)) == [('both', 'saved', 1)]


def test_protocols_by_name_and_by_part(files, run_main, tmp_path):
  for flags, expected in [
    (['--protocol=big_vision'], {'name': 'big_vision', 'classifier': 'ridge', 'l2': 1024.0}),
    (
      ['--protocol=uncertainty_baselines', '--l2=4'],
      {'classifier': 'logistic', 'draw': 'first', 'l2': 4.0},
    ),
    (['--draw=first'], {'name': 'loo', 'draw': 'first', 'l2': 'loo'}),
  ]:
    out = tmp_path / 'out.json'
    run_main(fewshot, *pair(files, 'clean'), '--shots=2', *flags, f'--json={out}')
    assert expected.items() <= json.loads(out.read_text())['protocol'].items()
  (row,) = rows_of(out).values()
  assert len(row['accuracies']) == 1  # one draw of the first ones


@pytest.mark.slow
def test_checkpoints_on_data_sets(digits_run, run_main, tmp_path):
  """A task and an NPZ file, by two checkpoints of a run."""
  run_dir, _ = digits_run
  x, y = load_digits(return_X_y=True)
  images = (x[:300].reshape(-1, 8, 8) / 16 * 255).astype(np.uint8)
  split = np.where(np.arange(300) < 200, 'train', 'test')
  np.savez(tmp_path / 'mine.npz', image=images, label=y[:300], split=split)
  out = tmp_path / 'out.json'
  printed = run_main(
    fewshot,
    f'--checkpoint={run_dir / "checkpoint_1"}',
    f'--checkpoint={run_dir}',
    f'--datasets=digits,mine={tmp_path / "mine.npz"}',
    '--names=one,two',
    '--splits=train[:150],test',
    '--shots=5',
    '--seeds=0,1',
    '--protocol=vmoe',
    f'--json={out}',
  )
  rows = rows_of(out)
  assert set(rows) == {(run, name, 5) for run in ('one', 'two') for name in ('digits', 'mine')}
  for run in ('one', 'two'):
    assert len({l2 for name in ('digits', 'mine') for l2 in rows[run, name, 5]['l2']}) == 1
  assert {row['dataset'] for row in json.loads(out.read_text())['differences']} == {
    'digits',
    'mine',
    'all 2',
  }
  assert 'two - one' in printed


@pytest.mark.parametrize(
  'flags,message',
  [
    ([], '--train and --test, --checkpoint, or --results are needed'),
    (['--train=a.npz'], '--train is given 1 times and --test 0 times'),
    (['--train=a.npz', '--test=b.npz', '--datasets=digits'], '--datasets is for --checkpoint'),
    (['--train=a.npz', '--test=b.npz', '--gin.K=5'], '--gin_bindings is for --checkpoint'),
    (['--results=x', '--shots=5'], '--shots has no effect on --results alone'),
    (['--l2=much', '--results=x'], '--l2=much must be a number, or loo'),
    (
      ['--train=nope.npz', '--test=nope.npz', '--seeds=0,-1'],
      '--seeds=0,-1 must each be at least 0',
    ),
  ],
)
def test_wrong_flags_are_one_sentence(flags, message, run_main):
  assert message in run_main(fewshot, *flags, code=2)


def test_a_data_set_that_is_unknown_is_found_before_a_run_is_opened(run_main, monkeypatch):
  config = types.SimpleNamespace(bindings=lambda _: {})  # cannot be opened
  monkeypatch.setattr(runs, 'configuration', lambda *_: config)
  error = run_main(fewshot, '--checkpoint=run', '--datasets=digits,bird', code=2)
  assert "--datasets=bird: mixture_or_task_name is 'bird'" in error


def test_votes_count_as_the_most_frequent_one(tmp_path):
  rng = np.random.default_rng(0)
  y = np.arange(60) % 3
  x = (np.eye(3)[y] + rng.normal(size=(60, 3))).astype(np.float32)
  people = np.stack([(y + 1) % 3, y, y], axis=1)
  files = {'one': y[:, None], 'votes': people, 'classes': people[:, :2]}
  found = {}
  for name, labels in files.items():
    path = str(tmp_path / f'{name}.npz')
    rows.write(path, rows.Rows({'features': x}, labels.astype(np.int32), np.arange(60)))
    test = shutil.copy(path, tmp_path / f'{name}_test.npz')
    settings = fewshot.Settings(train=(path,), test=(str(test),), shots=(5,), seeds=(0,))
    if name == 'classes':
      with pytest.raises(
        ValueError, match='classes.npz: example 0 has 2 labels, and none is there t'
      ):
        fewshot.from_files(settings)
    else:
      (of_run,) = fewshot.from_files(settings).values()
      found[name] = of_run['saved'][5].mean
  assert found['votes'] == found['one'] > 0.4  # chance is a third


def test_several_classes_of_an_image_are_refused(tmp_path):
  image = np.zeros((4, 6, 6, 1), np.uint8)
  label = np.tile([0, 1], (4, 1))
  np.savez(tmp_path / 'votes.npz', image=image, label=label)
  dataset = FewShotDataset('x', str(tmp_path / 'votes.npz'))
  with pytest.raises(ValueError, match='few-shot needs one label per image'):
    check(None, dataset, 4)


@pytest.mark.slow
def test_wrong_data_are_one_sentence(files, digits_run, run_main, tmp_path):
  two = [*pair(files, 'clean'), *pair(files, 'clean')]
  assert "run 'a' has the data set 'saved' twice" in run_main(fewshot, *two, '--names=a,a', code=2)
  run = f'--checkpoint={digits_run[0]}'
  others = '--protocol=uncertainty_baselines'
  assert 'there is only one' in run_main(fewshot, run, '--datasets=digits', others, code=2)
  assert 'distinct names' in run_main(fewshot, run, '--datasets=digits,digits', code=2)
  assert 'batch_size=6' in run_main(fewshot, run, '--datasets=digits', '--batch_size=6', code=2)
  earlier = tmp_path / 'earlier.json'
  earlier.write_text('{"rows": [{"run": "a", "dataset": "b", "shots": 1}]}')
  assert "of this program: KeyError('mean')" in run_main(fewshot, f'--results={earlier}', code=2)
  earlier.write_text('[' * 100_000)
  assert 'of this program: RecursionError' in run_main(fewshot, f'--results={earlier}', code=2)


@pytest.mark.parametrize('protocol', ['loo', 'vmoe', 'uncertainty_baselines'])
def test_rows_of_files_are_read_in_parts_and_in_any_order(files, tmp_path, protocol, monkeypatch):
  """Shards in half precision give what their values give as an array in the order of the ids."""
  x, y, *test = arrays(files, 'clean')
  halves = {'train': (x, y), 'test': tuple(test)}
  for half, (features, label) in halves.items():
    order = np.random.default_rng(0).permutation(len(label))
    for number, part in enumerate(np.array_split(order, 2)):
      columns = {'features': features[part].astype(ml_dtypes.bfloat16)}
      some = rows.Rows(columns, label[part][:, None], part)
      rows.write(tmp_path / f'{half}-0000{number}-of-00002.safetensors', some)
  counts = []
  take = rows.Reordered.__getitem__

  def counted(self, which):
    found = take(self, which)
    counts.append(len(found))
    return found

  monkeypatch.setattr(rows.Reordered, '__getitem__', counted)
  for module in (measures.fewshot, measures.logistic, measures.ridge):
    monkeypatch.setattr(module, '_BLOCK_ROWS', 16)
  monkeypatch.setattr(measures.ridge, '_SCORES', 0)  # 128 rows
  train, tests = ((str(tmp_path / f'{half}-*.safetensors'),) for half in halves)
  l2 = 1.0 if protocol == 'uncertainty_baselines' else None
  chosen = fewshot.Settings(
    train=train, test=tests, protocol=protocol, l2=l2, shots=(2,), given={'shots': '2'}
  )
  (found,) = fewshot.run(chosen).json['rows']
  assert max(counts) <= 128
  whole = {half: measures.fewshot.Split(rounded(x), y) for half, (x, y) in halves.items()}
  fits = chosen.fits
  wanted = measures.fewshot.few_shot_all(
    {'': (whole['train'], whole['test'])}, fits['protocol'], shots=(2,), seeds=fits['seeds']
  )
  assert found['accuracies'] == wanted[''][2].accuracies


def rounded(x):
  return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def test_fractions_are_shares_of_each_class(files, run_main, tmp_path):
  out = tmp_path / 'out.json'
  both = *pair(files, 'clean'), *pair(files, 'noisy'), '--names=clean,noisy'
  printed = run_main(
    fewshot, *both, '--fractions=0.05,0.25', f'--json={out}', f'--html={tmp_path / "page.html"}'
  )
  assert printed.splitlines()[2].split() == ['run', '5%', '25%']
  rows = rows_of(out)
  assert {shots for *_, shots in rows} == {0.05, 0.25}
  x, y, *test = arrays(files, 'clean')
  rare = np.concatenate([np.flatnonzero(y == 3)[:3], np.flatnonzero(y != 3)])  # 3 of a class
  result = few_shot(x[rare], y[rare], *test, shots=(0.25, 1))
  assert result[0.25].mean > result[1].mean and result[0.25].classes_short == 0
  one_each = few_shot(x[rare], y[rare], *test, shots=(0.001,))[0.001]
  assert one_each.accuracies == result[1].accuracies
  found = json.loads(out.read_text())['differences']
  assert [d['shots'] for d in found] == [0.05, 0.25] and found[1]['stderr_rows'] > 0
  run_main(fewshot, *both, '--fractions=0.5', '--shots=1', f'--json={out}')
  assert {shots for *_, shots in rows_of(out)} == {1, 0.5}
