"""`python -m het_plugin.select`: what it finds, prints and writes, and what it refuses."""

import json

import numpy as np
import pytest
from PIL import Image
from scipy import special
from sklearn.datasets import load_digits

from het_plugin import rows as rows_lib
from het_plugin.commands import select
from het_plugin.measures import few_shot, rankme

NOISE = {'good': 0.0, 'fair': 4.0, 'poor': 12.0}  # of pixels, in 0 .. 16


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """Representations and predictions of three candidates: digits under noise."""
  folder = tmp_path_factory.mktemp('runs')
  rng = np.random.default_rng(0)
  x, y = load_digits(return_X_y=True)
  x = x[:500]
  y = y[:500].astype(np.int32)
  for name, noise in NOISE.items():
    (folder / name).mkdir()
    noisy = (x + noise * rng.normal(size=x.shape)).astype(np.float32)
    log_prob = special.log_softmax(
      rng.normal(size=(500, 10)) * (2 + noise / 8) + 4 * np.eye(10)[y], axis=1
    )
    for split, rows in (('train', slice(0, 300)), ('test', slice(300, 500))):
      index = np.arange(500)[rows]
      np.savez(folder / name / f'{split}.npz', features=noisy[rows], label=y[rows], index=index)
      columns = {'log_prob': log_prob[rows].astype(np.float32)}
      of = {'checkpoint': f'runs/{name}'}
      predicted = rows_lib.Rows(columns, y[rows, None], index, provenance=of)
      rows_lib.write(folder / name / f'log_prob_{split}.npz', predicted)
  return folder


def files(runs, flag, file, names=NOISE):
  return f'--{flag}=' + ','.join(str(runs / name / file) for name in names)


@pytest.fixture
def run(run_main, tmp_path):
  """Runs the main: (text, JSON); with code=2, the line of its error."""

  def call(*arguments, code=0):
    out = tmp_path / 'out.json'
    printed = run_main(select, *arguments, f'--json={out}', code=code)
    return printed if code else (printed, json.loads(out.read_text()))

  return call


def load(path):
  arrays = np.load(path)
  return arrays['features'], arrays['label']


def test_knn_table_plot_and_page(runs, run, tmp_path):
  png, html = (tmp_path / 'deep' / f'knn.{kind}' for kind in ('png', 'html'))
  text, found = run(
    'knn',
    '--k=1,5',
    f'--png={png}',
    f'--html={html}',
    *(f'--train={runs / name / "train.npz"}' for name in NOISE),
  )
  lines = text.splitlines()
  assert lines[0] == 'pre-logits D 64' and lines[2].split()[0] == 'candidate'
  assert lines[2].split()[1:] == ['k', '=', '1', 'k', '=', '5', 'RankMe']
  assert [line.split()[0] for line in lines[4:7]] == list(NOISE)
  assert Image.open(png).size == (880, 495)
  page = html.read_text()
  assert '<th scope="col">candidate</th>' in page and 'data:image/png' in page
  assert 'python -m het_plugin.select' in page and '>head<' not in page
  assert found['leave_one_out'] is True


def test_rank_keeps_the_best(runs, run):
  _, found = run(
    'rank',
    files(runs, 'train', 'train.npz', reversed(NOISE)),
    '--shots=1,5',
    '--seeds=0,1',
    files(runs, 'test', 'test.npz', reversed(NOISE)),
    '--keep=2',
  )
  rows = found['rows']
  assert [row['candidate'] for row in rows] == list(NOISE)
  assert [sorted(row['few_shot']) for row in rows] == [['1', '5'], ['1', '5'], []]
  train, test = (load(runs / 'good' / f'{split}.npz') for split in ('train', 'test'))
  expected = few_shot(*train, *test, shots=(1, 5), seeds=(0, 1))
  assert rows[0]['few_shot']['5']['accuracies'] == list(expected[5].accuracies)
  assert found['agreement'] == {}
  _, proxy = run('knn', files(runs, 'train', 'train.npz'))
  assert [row['accuracy'] for row in rows] == [row['accuracy'] for row in proxy['rows']]


def test_rank_keeping_all_measures_the_proxy(runs, run, tmp_path):
  text, found = run(
    'rank',
    '--keep=all',
    '--shots=5',
    '--seeds=0',
    f'--png={tmp_path / "rank.png"}',
    files(runs, 'train', 'train.npz'),
    files(runs, 'test', 'test.npz'),
  )
  assert found['agreement'] == {'5': {'kendall_tau': 1.0, 'regret': [0.0, 0.0, 0.0]}}
  assert "5 shots: Kendall's tau 1.000; regret of keeping the best 1, 2, ...: 0.000" in text
  assert Image.open(tmp_path / 'rank.png').size == (880, 495)


def test_rank_of_one_candidate_has_no_agreement(runs, run):
  good = [files(runs, split, f'{split}.npz', ['good']) for split in ('train', 'test')]
  text, found = run('rank', *good, '--shots=5', '--seeds=0')
  assert found['agreement'] == {} and found['rows'][0]['few_shot']
  assert 'Kendall' not in text and '--keep' not in text


def test_rankme_is_a_column_of_at_most_so_many_examples(runs, run):
  _, found = run('knn', files(runs, 'train', 'train.npz'), '--max_examples=40')
  for row in found['rows']:
    sigma = rankme.singular_values(load(runs / row['candidate'] / 'train.npz')[0], 40)
    assert row['rankme'] == rankme.rankme(sigma) < 40


def test_several_files_are_one_split(runs, run, tmp_path):
  whole = rows_lib.read(str(runs / 'good' / 'train.npz'))
  for number in range(2):
    path = tmp_path / f'train-{number}-of-2.safetensors'
    rows_lib.write(path, whole.take(np.arange(150 * number, 150 * number + 150)))
  expected = run('knn', files(runs, 'train', 'train.npz', ['good']), '--names=a')[1]['rows']
  train = str(tmp_path / 'train-*-of-2.safetensors')
  assert run('knn', f'--train={train}', '--names=a')[1]['rows'] == expected


def test_ensemble_beside_the_best_and_the_average(runs, run):
  text, found = run(
    'ensemble',
    files(runs, 'validation', 'log_prob_train.npz'),
    files(runs, 'test', 'log_prob_test.npz'),
  )
  weights = {member['candidate']: member['weight'] for member in found['members']}
  assert sum(weights.values()) == pytest.approx(1) and len(weights) > 1
  mixtures = [weights, {'good': 1.0}, dict.fromkeys(NOISE, 1 / 3)]
  for row, mixture in zip(found['rows'], mixtures, strict=True):
    for split, file in (('validation', 'train'), ('test', 'test')):
      arrays = {name: np.load(runs / name / f'log_prob_{file}.npz') for name in mixture}
      p = sum(w * np.exp(arrays[name]['log_prob'].astype(float)) for name, w in mixture.items())
      label = arrays['good']['label']
      nll = -np.log(p[np.arange(len(p)), label]).mean()
      assert row[f'{split}_nll'] == pytest.approx(nll, rel=1e-6)
      assert row[f'{split}_accuracy'] == np.mean(p.argmax(axis=1) == label)
  steps = [step['validation_nll'] for step in found['steps']]
  assert steps[-1] == pytest.approx(found['rows'][0]['validation_nll'])
  assert steps[0] == pytest.approx(found['rows'][1]['validation_nll'])
  assert '1. good: validation NLL' in text and 'best single: good' in text


@pytest.mark.parametrize(
  'arguments,words',
  [
    ([], 'knn, rank, ensemble'),
    (['knn'], '--train is not set'),
    (['knn', '--shots=1'], '--shots has no effect on knn: rank'),
    (['soup'], 'soup and finetune are commands of their own'),
    (['knn', '--train=GOOD', '--gin.K=5'], '--gin_bindings has no effect on knn'),
    (['knn', '--train=x.npz'], 'x.npz does not exist'),
    (['knn', '--train=GOOD', '--test=GOOD'], 'train.npz are one file, '),
    (['rank', '--train=GOOD', '--test=GOOD'], 'train.npz are one file, '),
    (['knn', '--train=x.npz', '--names=a,b'], '--names=a,b must be 1 '),
    (['rank', '--train=GOOD', '--test=TEST', '--keep=2'], '--keep=2 must be in 1 .. 1'),
    (['rank', '--train=x.npz', '--l2=-1'], "--l2=-1 must be above 0 or one of 'loo', 'heldout'"),
    (['ensemble', '--validation=P,Q'], 'log_prob_test.npz and '),
    (['ensemble', '--validation=P', '--test=P'], 'log_prob_train.npz are one file, '),
    (
      ['ensemble', '--validation=P', '--test=POOR'],
      'has checkpoint runs/poor and ',
    ),
  ],
)
def test_what_is_wrong_is_one_sentence(runs, run, monkeypatch, arguments, words):
  monkeypatch.setattr(select, '_measured', None)  # it is found before anything is computed
  good = runs / 'good'
  arguments = [x.replace('=POOR', f'={runs / "poor" / "log_prob_test"}.npz') for x in arguments]
  for short, file in (('GOOD', 'train'), ('TEST', 'test'), ('P', 'log_prob_train')):
    arguments = [x.replace(f'={short}', f'={good / file}.npz') for x in arguments]
  arguments = [x.replace(',Q', f',{good / "log_prob_test"}.npz') for x in arguments]
  assert words in run(*arguments, code=2)
