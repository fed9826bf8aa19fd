"""Metrics on people's labels, against implementations of their own."""

import numpy as np
import pytest
import sklearn.metrics
from scipy import stats

from het_plugin.evaluation import agreement, uncertainty
from het_plugin.evaluation.predictions import Predictions


@pytest.fixture(scope='module')
def data():
  rng = np.random.default_rng(0)
  p = rng.dirichlet(np.full(4, 0.4), size=150)
  counts = np.stack([rng.multinomial(10, row) for row in rng.dirichlet(np.ones(4), size=150)])
  return np.log(p), counts, rng.integers(0, 4, 150)


def test_soft_label_nll_is_the_mean_over_the_annotators(data):
  log_p, counts, _ = data
  votes = [np.repeat(np.arange(4), row) for row in counts]
  expected = [-row[vote].mean() for row, vote in zip(log_p, votes, strict=True)]
  np.testing.assert_allclose(agreement.soft_label_nll(log_p, counts), expected)


def test_disagreement_is_the_correlation_of_ranks(data):
  log_p, counts, _ = data
  # Rounded: the same votes for other classes are a tie.
  ours = stats.rankdata([round(stats.entropy(np.exp(row)), 9) for row in log_p])
  theirs = stats.rankdata([round(stats.entropy(row), 9) for row in counts])
  expected = np.corrcoef(ours, theirs)[0, 1]
  assert agreement.disagreement_correlation(log_p, counts) == pytest.approx(expected)
  assert agreement.disagreement_correlation(np.log(counts + 1e-9), counts) > 0.99


def test_selective_accuracy_keeps_the_most_confident(data):
  log_p, _, label = data
  best = np.argsort(-log_p.max(axis=1))[:30]
  expected = sklearn.metrics.accuracy_score(label[best], log_p[best].argmax(axis=1))
  assert agreement.selective_accuracy(log_p, label, 0.2) == pytest.approx(expected)
  with pytest.raises(ValueError, match='coverage=0 must be'):
    agreement.selective_accuracy(log_p, label, 0)


def test_classwise_ece_by_hand(data):
  log_p, _, label = data
  p, total = np.exp(log_p), 0.0
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
  found = agreement.summarize(Predictions(log_p, votes, np.arange(150)), ood)
  label = counts.argmax(axis=1)
  confidence, right = log_p.max(axis=1), log_p.argmax(axis=1) == label
  assert found['correctness_auroc'] == pytest.approx(
    sklearn.metrics.roc_auc_score(right, confidence)
  )
  is_in = np.repeat([1, 0], [150, 80])
  scores = np.concatenate([confidence, ood.max(axis=1)])
  assert found['ood_auroc'] == pytest.approx(sklearn.metrics.roc_auc_score(is_in, scores))
  assert found['soft_label_nll'] == pytest.approx(agreement.soft_label_nll(log_p, counts).mean())
  assert found['selective_accuracy'] == agreement.selective_accuracy(log_p, label, 0.8)
  monkeypatch.setattr(uncertainty, '_BLOCK', 4 * 7)
  assert agreement.summarize(Predictions(log_p, votes, np.arange(150)), ood) == found
  one = agreement.summarize(Predictions(log_p, label[:, None].astype(np.int32), np.arange(150)))
  assert 'disagreement_correlation' not in one and 'ood_auroc' not in one
  nll = sklearn.metrics.log_loss(label, np.exp(log_p), labels=range(4))
  assert one['soft_label_nll'] == pytest.approx(nll)
  right = Predictions(log_p, log_p.argmax(axis=1)[:, None], np.arange(150))
  assert np.isnan(agreement.summarize(right)['correctness_auroc'])  # there is no wrong answer
