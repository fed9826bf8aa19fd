"""Metrics on people's labels, against implementations of their own."""

import tracemalloc
import warnings

import numpy as np
import pytest
import sklearn.metrics
from scipy import stats

from het_plugin.measures import agreement, uncertainty


@pytest.fixture(scope='module')
def data():
  rng = np.random.default_rng(0)
  p = rng.dirichlet(np.full(4, 0.4), size=150)
  counts = np.stack([rng.multinomial(10, row) for row in rng.dirichlet(np.ones(4), size=150)])
  return np.log(p), counts, rng.integers(0, 4, 150)


def summarize(log_p, labels, ood=None):
  """From two parts, as of a stream."""
  parts = agreement.Parts()
  for rows in (slice(70), slice(70, None)):
    parts.add(agreement.score_examples(log_p[rows], labels[rows]))
  return agreement.summarize(parts.joined(), ood)


def test_classwise_ece_by_hand(data):
  log_p, _, label = data
  p = np.exp(log_p)
  total = 0.0
  for k in range(4):
    for m in range(15):
      rows = (p[:, k] > m / 15) & (p[:, k] <= (m + 1) / 15)
      if rows.any():
        total += rows.mean() * abs(p[rows, k].mean() - (label[rows] == k).mean())
  assert agreement.classwise_ece(log_p, label) == pytest.approx(total / 4)


def test_the_summary_of_predictions(data, monkeypatch):
  log_p, counts, _ = data
  votes = np.stack([np.repeat(np.arange(4), row) for row in counts])
  ood = np.log(np.random.default_rng(1).dirichlet(np.full(4, 5.0), size=80))
  found = summarize(log_p, votes, ood)
  label = counts.argmax(axis=1)
  nll = [-row[vote].mean() for row, vote in zip(log_p, votes, strict=True)]
  assert found['soft_label_nll'] == pytest.approx(np.mean(nll))
  # Rounded: the same votes for other classes are a tie.
  entropies = [stats.entropy(x, axis=1).round(9) for x in (np.exp(log_p), counts)]
  correlation = np.corrcoef(*map(stats.rankdata, entropies))[0, 1]
  assert found['disagreement_correlation'] == pytest.approx(correlation)
  confidence = log_p.max(axis=1)
  # Where classes have equally many votes, the majority is each of them with the same probability.
  most_votes = counts == counts.max(axis=1, keepdims=True)
  right = most_votes[np.arange(150), log_p.argmax(axis=1)] / most_votes.sum(axis=1)
  most = np.argsort(-confidence)[: int(0.8 * 150)]
  assert found['selective_accuracy'] == pytest.approx(right[most].mean())
  both = np.concatenate([np.ones(150), np.zeros(150)])
  weight = np.concatenate([right, 1 - right])
  auroc = sklearn.metrics.roc_auc_score(both, np.tile(confidence, 2), sample_weight=weight)
  assert found['correctness_auroc'] == pytest.approx(auroc)
  is_in = np.repeat([1, 0], [150, 80])
  scores = np.concatenate([confidence, ood.max(axis=1)])
  assert found['ood_auroc'] == pytest.approx(sklearn.metrics.roc_auc_score(is_in, scores))
  monkeypatch.setattr(uncertainty, '_BLOCK', 4 * 7)
  assert summarize(log_p, votes, ood) == pytest.approx(found, rel=1e-12)
  one = summarize(log_p, label[:, None].astype(np.int32))
  assert one['classwise_ece'] == pytest.approx(agreement.classwise_ece(log_p, label), rel=1e-12)
  assert 'disagreement_correlation' not in one and 'ood_auroc' not in one
  nll = sklearn.metrics.log_loss(label, np.exp(log_p), labels=range(4))
  assert one['soft_label_nll'] == pytest.approx(nll)
  right = summarize(log_p, log_p.argmax(axis=1)[:, None])
  assert np.isnan(right['correctness_auroc'])  # there is no wrong answer
  for people in ([label, label], [label, -1 + 0 * label]):  # who agree, and one each
    assert 'disagreement_correlation' not in summarize(log_p, np.stack(people, axis=1))
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    even = summarize(np.log(np.full((80, 4), 0.25)), np.array([[0, 1], [0, 0]] * 40))
  assert np.isnan(even['disagreement_correlation'])


def test_ties_do_not_depend_on_the_numbers_of_the_classes():
  """Equally many votes, and equally probable classes, count as in a random order."""
  log_p = np.log([[0.9, 0.1], [0.1, 0.9], [0.5, 0.5], [0.7, 0.3], [0.4, 0.6]])
  people = np.array([[0, 0], [1, 1], [0, 0], [0, 1], [0, 1]])
  scores = agreement.score_examples(log_p, people)
  found = agreement.summarize(scores)
  mirrored = agreement.summarize(agreement.score_examples(log_p[:, ::-1], 1 - people))
  assert mirrored == pytest.approx(found, rel=1e-12)
  assert found['selective_accuracy'] == 1 - (0.5 + 0.5) / 4  # of the four most confident rows
  rng = np.random.default_rng(0)
  draws = []  # of one majority and one most probable class of each row
  for _ in range(4000):
    label = [rng.choice(row) for row in people]
    top = [rng.choice(np.flatnonzero(row == row.max())) for row in log_p]
    right = np.equal(label, top)
    draws.append(right[[0, 1, 3, 4]].mean())
  assert found['selective_accuracy'] == pytest.approx(np.mean(draws), abs=0.01)
  np.testing.assert_allclose(scores.right, [1, 1, 0.5, 0.5, 0.5])
  # The class-wise bins hold half a label of each class of a tie.
  assert scores.bins[2].sum(axis=1).tolist() == [3, 2]


def test_the_bins_of_many_parts_take_the_memory_of_one():
  log_p = np.full((2, 500), -np.log(500))
  parts = agreement.Parts()
  tracemalloc.start()
  for _ in range(100):
    parts.add(agreement.score_examples(log_p, np.zeros((2, 1), np.int32)))
  kept, _ = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert kept < 4 * parts.joined().bins.nbytes
  assert parts.joined().bins[0].sum() == 100 * 2 * 500 and agreement.Parts().joined() is None
