"""The audit of rows that stay in a file."""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
from pyarrow import parquet
from sklearn.metrics import average_precision_score

from het_plugin import reporting
from het_plugin import rows as rows_lib
from het_plugin.commands import audit as audit_report
from het_plugin.commands import probe
from het_plugin.estimators import DetClassifier, inputs, noise_gain, objective, stream, whitening
from het_plugin.estimators import audit as audit_lib
from het_plugin.estimators import probe as grid
from het_plugin.estimators.settings import GridSettings
from het_plugin.evaluation.examples import Examples
from het_plugin.measures import audit as measure


def problem(num_rows):
  """Features, and labels 3, 7 and 9. Three labels in ten are moved to the next class."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(num_rows, 6)).astype(np.float32)
  truth = x[:, :3].argmax(axis=1)
  label = np.where(rng.random(num_rows) < 0.3, (truth + 1) % 3, truth)
  return x, np.array([3, 7, 9])[truth], np.array([3, 7, 9])[label]


SETTINGS = {'heads': ['det'], 'C': [10.0], 'folds': 3, 'progress': False}


class Watched(np.memmap):
  """A mapped file that knows how many rows were read of it at one time."""

  most = 0

  def __getitem__(self, rows):
    found = super().__getitem__(rows)
    if isinstance(rows, np.ndarray):
      Watched.most = max(Watched.most, len(found))
    return found


@pytest.mark.slow
@pytest.mark.parametrize('grid', [[10.0], [0.01, 10.0]])
def test_rows_of_a_file_are_read_in_parts(grid, tmp_path, monkeypatch):
  x, truth, label = problem(1200)
  x.tofile(tmp_path / 'x')
  mapped = Watched(tmp_path / 'x', np.float32, 'r', shape=x.shape)
  monkeypatch.setattr(inputs, '_PART_ROWS', 100)
  monkeypatch.setattr(inputs, '_SPREAD_ROWS', 100)
  monkeypatch.setattr(whitening, 'LEAST_ROWS', 64)
  monkeypatch.setattr(stream, 'HELD_BYTES', 0)
  monkeypatch.setattr(stream, 'CHUNK_BYTES', 0)
  monkeypatch.setattr(objective, 'CACHE_BYTES', 0)
  monkeypatch.setattr(Watched, 'most', 0)
  settings = GridSettings(**SETTINGS | {'C': grid}, solver='streamed', max_iter=10)
  found = audit_lib.audit(mapped, label, settings)
  assert 0 < Watched.most < 300  # a copy of two folds would be 800
  if len(grid) == 1:
    (row,) = probe.probe((mapped, label), None, settings).json
    assert row['num_examples'] == 1200 and Watched.most < 300  # a copy of one fold would be 400
  assert found.wrong[label != truth].mean() > 3 * found.wrong[label == truth].mean()


def test_rows_without_weight_are_as_if_they_were_not_there(tmp_path):
  x, _, label = problem(900)
  np.save(tmp_path / 'x.npy', x)
  mapped = np.load(tmp_path / 'x.npy', mmap_mode='r')
  rows = np.arange(0, 900, 3)
  settings = GridSettings(**SETTINGS, solver='streamed', max_iter=20)
  found, *_ = grid.fit_best('det', mapped, label, rows, settings, {}, iter(()))
  alone = DetClassifier(C=10.0, solver='streamed', max_iter=20).fit(x[rows], label[rows])
  np.testing.assert_allclose(found.predict_proba(x), alone.predict_proba(x), atol=1e-3)


def test_suggested_labels_of_padded_votes_can_be_read(tmp_path):
  x, truth, label = problem(60)
  padded = np.stack([label, np.full(60, -1)], axis=1).astype(np.int32)
  votes = {'annotator': np.minimum(padded, 0), 'label_weight': np.float32(padded >= 0)}
  rows = rows_lib.Rows({'features': x}, padded, np.arange(60), **votes)
  p = (np.arange(10) == truth[:, None]) * 0.9 + 0.01
  listed = audit_report.Listed(rows, label, measure.audit(p, label))
  audit_report.write_suggested(listed, tmp_path / 'fixed.npz')
  fixed = rows_lib.read(str(tmp_path / 'fixed.npz'))
  assert fixed.annotator is None and (fixed.label == truth).mean() > (label == truth).mean()


def test_pairs_and_suggestions_are_ids_of_classes():
  x, truth, label = problem(600)
  found = audit_lib.audit(x, label, GridSettings(**SETTINGS))
  assert {pair[:2] for pair in found.pairs(3)} == {(3, 7), (7, 9), (9, 3)}
  assert found.ids.tolist() == [3, 7, 9] and set(found.suggested) == {3, 7, 9}
  assert (found.suggested == truth).mean() > (label == truth).mean()
  by_name = audit_lib.audit(x, label.astype(str), GridSettings(**SETTINGS))
  assert {pair[:2] for pair in by_name.pairs(3)} == {('3', '7'), ('7', '9'), ('9', '3')}


def test_rounds_find_what_a_fit_to_the_labels_does_not():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(1200, 12))
  truth = (x @ rng.normal(size=(12, 5))).argmax(axis=1)
  is_wrong = rng.random(1200) < 0.3
  label = np.where(is_wrong, (truth + 1) % 5, truth)
  settings = GridSettings(**SETTINGS | {'C': [1.0]}, tau=[0.5, 1.0])
  one, all_ = (audit_lib.audit(x, label, settings, rounds) for rounds in (1, 10))
  precision = [average_precision_score(is_wrong, found.wrong) for found in (one, all_)]
  assert precision[0] < 0.95 and precision[1] > 0.99
  share = is_wrong.mean()
  assert abs(all_.share - share) < 0.03 < 0.08 < share - one.share
  assert all_.nll < one.nll - 0.1


def test_a_worse_round_is_not_taken(monkeypatch):
  x, _, label = problem(300)
  rough = 1.0, 0.9, 0.8995  # the last one has gained less than 0.05 nats
  nll = iter([*rough, 0.8995, 0.95, 0.9, *rough, 0.8995])
  of_votes = measure.of_votes

  def audited(fitted, error):
    return dataclasses.replace(of_votes(fitted, error), nll=next(nll))

  monkeypatch.setattr(measure, 'of_votes', audited)
  found, _, chosen = audit_lib.in_rounds(x, label, GridSettings(**SETTINGS), 10)
  assert chosen == 3 and found.nll == 0.8995  # two rounds have gained less than 0.002 nats
  third, _, _ = audit_lib.in_rounds(x, label, GridSettings(**SETTINGS), 3)
  assert found.share_error == third.share_error


def test_annotators_are_in_the_report():
  x, truth, _ = problem(400)
  rng = np.random.default_rng(1)
  annotator = np.stack([rng.permutation(6)[:3] for _ in truth]) + 10
  is_wrong = rng.random(annotator.shape) < np.where(annotator == 12, 0.7, 0.1)
  votes = np.where(is_wrong, rng.choice([3, 7, 9], annotator.shape), truth[:, None])
  votes[:50, 2] = -1
  rows = rows_lib.Rows({'features': x}, votes, np.arange(400), annotator=annotator)
  report = audit_report.report(rows, GridSettings(**SETTINGS))
  found = {row['annotator']: row for row in report.json['annotators']}
  assert sorted(found) == [10, 11, 12, 13, 14, 15]
  assert min(found, key=lambda x: found[x]['quality']) == 12
  right = (
    np.where(annotator == 12, votes == truth[:, None], False).sum()
    / ((annotator == 12) & (votes >= 0)).sum()
  )
  assert abs(found[12]['quality'] - right) < 3 * found[12]['stderr']
  assert sum(row['votes'] for row in found.values()) == (votes >= 0).sum()
  assert 'Annotators whose votes are most often wrong, of 6' in report.text()
  suggested = np.array(
    [row['suggested'] for row in sorted(report.json['rows'], key=lambda x: x['index'])]
  )
  consensus = rows.consensus
  assert (suggested != truth).mean() < 0.5 * (consensus != truth).mean()


def test_wrong_labels_are_one_sentence():
  x, _, label = problem(60)
  for wrong, message in (
    (label[:50], r'y has shape \(50,\); it must be \[60\]'),
    (np.where(label == 3, np.nan, label), 'y contains NaN'),
    (np.stack([label, label], axis=1), 'y should be a 1d array'),
  ):
    with pytest.raises(ValueError, match=message):
      audit_lib.audit(x, wrong, GridSettings(**SETTINGS))
  with pytest.raises(ValueError, match='audit.rounds=0 must be at least 1'):
    audit_lib.audit(x, label, GridSettings(**SETTINGS), rounds=0)
  with pytest.raises(ValueError, match=r'y has shape \(60,\); it must be \[50\]'):
    noise_gain.noise_test(x[:50], label, progress=False)


PEAK = """
import sys
from het_plugin.commands import audit
from het_plugin.estimators import audit as rounds, inputs, stream
from het_plugin.estimators.settings import GridSettings
sys.path.insert(0, 'benchmarks')
from probe import memory_watched
settings = GridSettings(['det'], folds=2, solver='streamed', max_iter=1, progress=False)
stream.HELD_BYTES = 0  # of a part of the rows, at most
# Several parts are in flight at a time: with larger ones the peak was 20 MiB either way.
stream.CHUNK_BYTES = 2**20
inputs._PART_ROWS = rounds._PART_ROWS = 1024
for path in sys.argv[1:]:
  with memory_watched() as found:
    report = audit.report(path, settings, rounds=2)
    report.write('audit', json=path + '.json')
    report.writers['csv'](path + '.csv')
    report.writers['suggest'](path + '.corrected.safetensors')
  del report
  print('peak', max(found))
"""


@pytest.mark.slow
def test_the_memory_is_that_of_results_per_row(tmp_path):
  """80,000 rows more have 61 MiB of probabilities, 39 MiB of features and 20 MiB of dicts."""
  paths = []
  for num_rows in (20_000, 100_000):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_rows, 128)).astype(np.float32)
    labels = (np.arange(num_rows) % 200).astype(np.int32)[:, None]
    path = tmp_path / f'{num_rows}.safetensors'
    rows_lib.write(path, rows_lib.Rows({'features': x}, labels, np.arange(num_rows)))
    paths.append(str(path))
  # Arenas of other threads keep pages: up to 61 MiB.
  environment = os.environ | {'MALLOC_ARENA_MAX': '1'}
  command = [sys.executable, '-c', PEAK, *paths, paths[1]]
  done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
  peaks = [float(x.split()[1]) for x in done.stdout.splitlines() if x.startswith('peak ')]
  # What is held is there both times; what threads have in flight together differs by 40 MiB.
  assert min(peaks[1:]) - peaks[0] < 60, peaks  # 1 to 45 were seen of one


def test_where_the_task_knows_the_truth_the_report_counts_wrong_labels(tmp_path):
  examples = Examples.of('glyphs_noisy_latin', 'finite')
  index = np.arange(8000)
  truth = examples.info.true_classes('finite', index)
  label = examples.read(index, size=8).labels
  most = np.bincount(truth[truth != label[:, 0]]).argmax()  # the class that is confused most
  group = np.unique(label[truth == most])
  kept = np.isin(truth, group) & np.isin(label[:, 0], group)
  index = index[kept]
  truth = truth[kept]
  label = label[kept]
  features = np.float32(truth[:, None] == group)
  rows = rows_lib.Rows({'features': features}, label, index)
  rows_lib.write(tmp_path / 'rows.npz', rows)
  report = audit_report.report(
    str(tmp_path / 'rows.npz'), GridSettings(**SETTINGS, max_iter=30), examples
  )
  found = report.json['truth']
  is_wrong = label[:, 0] != truth
  assert found['wrong'] == is_wrong.sum() > 5
  by_index = dict(zip(index, is_wrong, strict=True))
  listed = report.json['rows']
  kinds = [by_index[row['index']] for row in listed if row['kind'] == 'wrong']
  assert found['wrong_of_listed'] == sum(kinds)
  worst = min(100, len(index))
  assert found['wrong_of_worst'] == sum(by_index[row['index']] for row in listed[:worst])
  (note,) = (note for note in report.notes if 'true classes' in note)
  assert f'{is_wrong.sum()} labels are wrong: {sum(kinds)} of the {len(kinds)} ' in note


def test_where_features_tell_little_no_share_is_printed(tmp_path):
  """No label is wrong, and no model is right more often than in three of ten cases."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(600, 16)).astype(np.float32)
  logits = x @ rng.normal(size=(16, 8)) * 0.75 + 3 * rng.gumbel(size=(600, 8))
  rows = rows_lib.Rows({'features': x}, logits.argmax(axis=1)[:, None], np.arange(600))
  settings = GridSettings(['det'], folds=2, max_iter=30, progress=False)
  report = audit_report.report(rows, settings, rounds=4)
  assert (report.json['share'], report.json['share_error'], report.json['pairs']) == (
    None,
    None,
    [],
  )
  assert report.introduction.endswith('their features do not tell what share is wrong.')
  assert report.tables[0].header == ['index', 'label', 'suggested']
  assert f'Only {report.json["agreement"]:.0%} of the labels' in report.text()
  report.writers['csv'](str(tmp_path / 'found.parquet'))
  table = parquet.read_table(tmp_path / 'found.parquet')
  assert table.to_pylist() == list(report.json['rows'])
  assert reporting.written_here('csv', tmp_path / 'found.parquet')
