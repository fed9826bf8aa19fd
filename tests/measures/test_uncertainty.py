"""Uncertainty metrics against scikit-learn and brute force; extremes; files of predictions."""

import math
import types

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats
from sklearn import metrics

from het_plugin.measures import uncertainty, votes
from het_plugin.models import soft_labels
from het_plugin.models.metrics import ExpectedCalibrationError
from het_plugin.rows import Rows, concatenate

N = 200
K = 7


def predicted(log_prob, labels, index, link='softmax', **others):
  """Rows of predictions; `others` are columns, or attributes of the rows."""
  columns = {x: others.pop(x) for x in ('expected_entropy', 'nll') if x in others}
  return Rows({'log_prob': log_prob, **columns}, labels, index, link=link, **others)


def score(predictions, ks=(1, 5)):
  return uncertainty.score_examples(**predictions.labelled, ks=ks)


def make(n=N, k=K, seed=0, scale=2.0, **changes):
  """Softmax predictions with informative but imperfect confidences."""
  rng = np.random.default_rng(seed)
  logits = scale * rng.normal(size=(n, k))
  labels = np.array([rng.choice(k, p=p) for p in special.softmax(logits / 2, axis=1)])
  arguments = dict(
    log_prob=special.log_softmax(logits, axis=1).astype(np.float32),
    labels=labels[:, None].astype(np.int32),
    index=rng.permutation(10 * n)[:n].astype(np.int64),
  )
  return predicted(**arguments | changes)


def make_sigmoid(n=50, seed=0):
  rng = np.random.default_rng(seed)
  on = rng.random((n, K)) < 0.3
  labels = np.full((n, K), -1, np.int32)
  for row, classes in enumerate(on):
    labels[row, : classes.sum()] = np.flatnonzero(classes)
  log_prob = special.log_expit(2 * rng.normal(size=(n, K)) + on)
  predictions = predicted(log_prob, labels, np.arange(n), link='sigmoid')
  return predictions, on


def summary(predictions, ks=(1, 5)):
  return uncertainty.summarize(score(predictions, ks))


def test_likelihood_precision_brier_and_entropy_as_scikit_learn_has_them():
  predictions = make()
  p = np.exp(predictions.log_prob.astype(float))
  y = predictions.labels[:, 0]
  found = summary(predictions, (1, 3, K))
  assert found['nll'] == pytest.approx(-np.log(p[np.arange(N), y]).mean())
  assert found[f'precision_at_{K}'] == 1
  for k in (1, 3):
    accuracy = metrics.top_k_accuracy_score(y, p, k=k, labels=range(K))
    assert found[f'precision_at_{k}'] == pytest.approx(accuracy)
  assert found['brier'] == pytest.approx(((p - np.eye(K)[y]) ** 2).sum(axis=1).mean(), rel=1e-6)
  assert found['entropy'] == pytest.approx(stats.entropy(p, axis=1).mean(), rel=1e-6)
  assert found['stderr']['nll'] == pytest.approx(stats.sem(-np.log(p[np.arange(N), y])), rel=1e-6)
  assert found['num_examples'] == N


def test_ece_is_that_of_training():
  predictions = make(seed=1)
  confidence = np.exp(predictions.log_prob).max(axis=1)
  correct = predictions.log_prob.argmax(axis=1) == predictions.labels[:, 0]
  metric = ExpectedCalibrationError.from_model_output(jnp.asarray(confidence), jnp.asarray(correct))
  assert summary(predictions)['ece'] == pytest.approx(float(metric.compute()), rel=1e-4)


def test_equal_confidences_count_as_if_in_random_order():
  confidence = np.array([0.9, 0.5, 0.5, 0.5])
  correct = np.array([True, False, True, True])
  expected = np.arange(4) / 3 / np.arange(1, 5)  # a third of an error with each of the equal ones
  np.testing.assert_allclose(uncertainty.risk_coverage(confidence, correct), expected)


def test_risk_and_coverage():
  predictions = make(seed=2)
  scores = score(predictions)
  confidence = scores.uncertainty.log_confidence
  order = np.argsort(-confidence)
  wrong = scores.correct[order] == 0
  risk = [wrong[:n].mean() for n in range(1, N + 1)]
  np.testing.assert_allclose(uncertainty.risk_coverage(confidence, scores.correct), risk)
  best = np.sort(wrong)  # errors last
  best = [best[:n].mean() for n in range(1, N + 1)]
  found = uncertainty.summarize(scores)
  assert found['aurc'] == pytest.approx(np.mean(risk))
  assert found['e_aurc'] == pytest.approx(np.mean(risk) - np.mean(best))
  auroc = metrics.roc_auc_score(scores.correct == 0, -confidence)
  assert found['auroc_errors'] == pytest.approx(auroc)


def test_unknown_inputs():
  rng = np.random.default_rng(0)
  known = rng.normal(size=101)
  unknown = rng.normal(1.0, size=70).round(1)
  is_unknown = np.repeat([0, 1], [101, 70])
  expected = metrics.roc_auc_score(is_unknown, np.concatenate([known, unknown]))
  assert uncertainty.auroc(unknown, known) == pytest.approx(expected)
  pairs = unknown[:, None] - known
  assert uncertainty.auroc(unknown, known) == pytest.approx(
    ((pairs > 0) + 0.5 * (pairs == 0)).mean()
  )
  # scikit-learn: accepting means calling it known
  accepted_unknown, accepted_known, _ = metrics.roc_curve(
    1 - is_unknown, -np.concatenate([known, unknown]), drop_intermediate=False
  )
  fpr = accepted_unknown[np.argmax(accepted_known >= 0.95)]
  assert uncertainty.fpr_at_95(unknown, known) == pytest.approx(fpr)
  assert uncertainty.fpr_at_95(np.ones(3), np.zeros(20)) == 0
  assert uncertainty.fpr_at_95(np.zeros(3), np.zeros(20)) == 1
  false_positive, true_positive = uncertainty.roc(unknown, known)
  assert metrics.auc(false_positive, true_positive) == pytest.approx(expected)
  assert uncertainty.auroc(np.array([]), known) is None
  assert uncertainty.auroc(np.array([np.inf]), np.array([0.0, -np.inf])) == 1


def test_probabilities_at_the_ends():
  log_prob = np.array([[0.0, -200.0, -np.inf], [-1e-9, -20.72326585, -80.0]])
  predictions = predicted(log_prob, np.array([[1], [0]], np.int32), np.arange(2))
  scores = score(predictions, (1, 2))
  np.testing.assert_allclose(scores.nll, [200.0, 1e-9])
  np.testing.assert_allclose(scores.brier, [2.0, 2e-18], rtol=1e-6)
  assert scores.precision[1].tolist() == [0, 1] and scores.precision[2].tolist() == [1, 1]
  assert scores.uncertainty.entropy[0] == pytest.approx(0, abs=1e-80)
  impossible = predicted(log_prob[:1], np.array([[2]], np.int32), np.arange(1))
  found = summary(impossible, (1,))
  assert found['nll'] == math.inf and found['stderr']['nll'] is None and found['brier'] == 2
  assert found['auroc_errors'] is None and found['aurc'] == 1 and found['e_aurc'] == 0


def test_one_class_and_one_row():
  only = predicted(np.zeros((1, 1)), np.zeros((1, 1), np.int32), np.arange(1))
  found = summary(only, (1,))
  assert found['nll'] == found['brier'] == found['ece'] == found['entropy'] == found['aurc'] == 0
  assert found['precision_at_1'] == 1 and math.copysign(1, found['nll']) == 1
  assert found['stderr'] == dict.fromkeys(found['stderr'])


def test_several_labels():
  predictions, on = make_sigmoid()
  p = np.exp(predictions.log_prob)
  found = summary(predictions, (1, 3))
  cross_entropy = metrics.log_loss(on.ravel(), p.ravel(), normalize=False)
  assert found['nll'] == pytest.approx(cross_entropy / len(p))
  top = np.argsort(-p, axis=1)[:, :3]
  assert found['precision_at_3'] == pytest.approx(np.take_along_axis(on, top, axis=1).mean())
  assert found['ranking_ap'] == pytest.approx(metrics.label_ranking_average_precision_score(on, p))
  assert found['brier'] == pytest.approx(((p - on) ** 2).sum(axis=1).mean())
  assert found['entropy'] == pytest.approx(stats.entropy(np.stack([p, 1 - p])).sum(axis=1).mean())
  rare = predicted(np.full((1, 1), -70.0), np.full((1, 1), -1), np.arange(1), 'sigmoid')
  entropy = score(rare, (1,)).uncertainty.entropy
  assert entropy == pytest.approx([71 * math.exp(-70)], rel=1e-6, abs=0)  # of both outcomes


def test_sigmoid_extremes_and_the_likelihood_of_the_model():
  log_prob = np.array([[-1e-12, -1e-12, -np.inf]])
  labels = np.array([[0, 0, -1]], np.int32)  # once, however often it is listed
  predictions = predicted(log_prob, labels, np.arange(1), link='sigmoid')
  found = summary(predictions, (1, 2))
  assert found['nll'] == pytest.approx(-math.log(1e-12), rel=1e-6)
  assert found['precision_at_1'] == 0.5 and found['precision_at_2'] == 0.5
  given = predicted(log_prob, labels, np.arange(1), link='sigmoid', nll=np.array([3.5]))
  assert summary(given, (1,))['nll'] == 3.5
  without = predicted(log_prob, np.full((1, 1), -1, np.int32), np.arange(1), link='sigmoid')
  assert summary(without, (1,))['precision_at_1'] == 0


def test_parts_and_blocks_make_the_whole(monkeypatch):
  predictions = make(expected_entropy=np.zeros(N, np.float32))
  whole = summary(predictions)
  parts = [predictions.take(slice(start, start + 64)) for start in range(0, N, 64)]
  scored = [score(part) for part in parts]
  assert uncertainty.summarize(uncertainty.concatenate(scored)) == whole
  monkeypatch.setattr(uncertainty, '_BLOCK', 10)
  assert summary(predictions) == whole
  joined = concatenate(parts)
  np.testing.assert_array_equal(joined.log_prob, predictions.log_prob)


def test_paired_differences():
  first = make(seed=3)
  second = make(seed=4)
  order = np.random.default_rng(0).permutation(N)
  second = predicted(second.log_prob[order], first.labels[order], first.index[order])
  a, b = (score(x) for x in (first, second))
  found = uncertainty.difference(b, a)
  test = stats.ttest_rel(b.nll, a.nll[order])
  assert found['nll'] == pytest.approx((b.nll - a.nll[order]).mean())
  assert found['nll'] / found['stderr']['nll'] == pytest.approx(test.statistic)
  assert uncertainty.difference(a, a)['stderr'] == {'nll': 0, 'brier': 0, 'precision_at_1': 0}
  with pytest.raises(ValueError, match='the ids differ, 263 are in one of the two only'):
    uncertainty.difference(score(make(n=N - 1, seed=3)), a)
  votes_of = np.tile([[0, 1]], (N, 1))
  equal, unequal = (
    score(make(labels=votes_of, label_weight=np.tile(np.float32(w), (N, 1))))
    for w in ([0.5, 0.5], [0.9, 0.1])
  )
  assert uncertainty.difference(equal, score(make(labels=votes_of)))['nll'] == 0
  with pytest.raises(ValueError, match='label_weight of example .* differs'):
    uncertainty.difference(unequal, equal)
  one = predicted(special.log_expit(first.log_prob), first.labels, first.index, 'sigmoid')
  assert uncertainty.difference(score(one), a).keys() == {'precision_at_1', 'stderr'}
  # A column per person: who has not voted leaves a gap before the labels of others.
  gaps = [score(make(labels=np.tile([[0, -1, k]], (N, 1)))) for k in (1, 2)]
  with pytest.raises(ValueError, match='the same ids have other labels: .* ids and labels of'):
    uncertainty.difference(*gaps)


def test_unsigned_labels_are_class_ids():
  predictions = make()
  labels = predictions.labels.astype(np.uint8)  # no -1 fits into them
  scores = uncertainty.score_examples(predictions.log_prob, labels)
  np.testing.assert_array_equal(scores.nll, score(predictions).nll)
  np.testing.assert_array_equal(scores.correct, score(predictions).correct)


def test_k_labels_and_ids_that_do_not_fit():
  for k in (0, K + 1):
    with pytest.raises(ValueError, match=f'k = {k} does not exist'):
      score(make(), (1, k))
  with pytest.raises(ValueError, match='has no label; under a softmax'):
    score(make(labels=np.full((N, 1), -1, np.int32)))
  with pytest.raises(ValueError, match='only 1 distinct'):
    score(make(index=np.zeros(N, int)))
  with pytest.raises(ValueError, match='probabilities of example 0 are NaN'):  # it had precision 1
    uncertainty.score_examples(np.full((1, 3), np.nan), np.zeros((1, 1), int), (1,))
  with pytest.raises(ValueError, match='no examples'):
    uncertainty.concatenate([])


# Bins of confidence.


def test_ends_of_bins_and_empty_ones():
  edges = uncertainty.reliability(np.array([0.0, 1 / 15, 1.0]), np.array([True, True, True]))
  assert edges.count.tolist() == [2, *[0] * 13, 1]
  assert np.isnan(edges.accuracy[1:14]).all()
  assert edges.ece == pytest.approx((1 + 14 / 15) / 3)


def test_single_precision_is_summed_in_double():
  confidence = np.full(300_000, 0.1, np.float32)
  found = uncertainty.reliability(confidence, np.zeros(300_000, bool))
  assert found.ece == pytest.approx(float(np.float32(0.1)), rel=1e-10)


def test_adaptive_bins_are_of_equal_numbers_and_never_part_ties():
  confidence = np.random.default_rng(0).random(150)
  correct = np.arange(150) % 3 > 0
  even = uncertainty.adaptive_reliability(confidence, correct)
  assert even.count.tolist() == [10] * 15
  order = np.argsort(confidence)
  gaps = np.abs((confidence - correct)[order].reshape(15, 10).mean(axis=1))
  assert even.ece == pytest.approx(gaps.mean())
  tied = uncertainty.adaptive_reliability(np.full(150, 0.5), correct)
  assert tied.count.tolist() == [150] and tied.ece == pytest.approx(abs(0.5 - correct.mean()))
  assert uncertainty.adaptive_reliability(np.array([0.3]), np.array([True])).ece == 0.7


# Several labels of an example.


def test_votes_are_scored_as_in_the_evaluation_of_a_training():
  """The mean over a label drawn from the votes, whether they are listed or have weights."""
  predictions = make()
  rng = np.random.default_rng(1)
  labels = rng.integers(0, K, (N, 5)).astype(np.int32)
  labels[::3, 3:] = -1
  shares = votes.shares(labels, K)
  listed = score(make(labels=labels), (1, 3))
  p = np.exp(predictions.log_prob.astype(float))
  np.testing.assert_allclose(listed.nll, -(shares * predictions.log_prob).sum(axis=1), rtol=1e-6)
  np.testing.assert_allclose(listed.brier, np.square(p - shares).sum(axis=1), rtol=1e-6)
  top = np.argsort(-p, axis=1)
  for k in (1, 3):
    share = np.take_along_axis(shares, top[:, :k], axis=1).sum(axis=1)
    np.testing.assert_allclose(listed.precision[k], share)
  np.testing.assert_allclose(listed.correct, shares[np.arange(N), top[:, 0]])

  every = np.broadcast_to(np.arange(K, dtype=np.int32), (N, K))
  weighted = score(make(labels=every, label_weight=shares.astype(np.float32)), (1, 3))
  np.testing.assert_allclose(weighted.nll, listed.nll, rtol=1e-5)
  np.testing.assert_allclose(weighted.precision[3], listed.precision[3], rtol=1e-5)

  model = types.SimpleNamespace(location=jnp.zeros((N, K)), link='softmax', num_classes=K)
  batch = {'label': jnp.asarray(labels)}
  np.testing.assert_allclose(soft_labels.targets(batch, model), shares, rtol=1e-6)
  found = soft_labels.correct(jnp.asarray(top[:, 0]), batch, 'softmax')
  np.testing.assert_allclose(found, listed.correct, rtol=1e-6)


def test_equal_probabilities_count_as_in_a_random_order():
  log_p = np.log([[0.25, 0.25, 0.25, 0.25], [0.4, 0.4, 0.1, 0.1]])
  found = {}
  for name, order in {'given': [0, 1, 2, 3], 'mirrored': [3, 2, 1, 0]}.items():
    labels = np.array(order)[np.array([[0], [1]])]
    scores = uncertainty.score_examples(log_p[:, order], labels, ks=(1, 3))
    shown = [scores.correct, scores.precision[1], scores.precision[3]]
    found[name] = np.stack(shown)
    np.testing.assert_allclose(found[name], [[0.25, 0.5], [0.25, 0.5], [0.75, 1.0]])
    batch = {'label': jnp.asarray(labels)}
    model = types.SimpleNamespace(location=jnp.zeros((2, 4)), link='softmax', num_classes=4)
    target = soft_labels.targets(batch, model)
    right = soft_labels.right(jnp.asarray(log_p[:, order]), target)
    np.testing.assert_allclose(right, scores.correct)
  on = uncertainty.score_examples(log_p, np.array([[0, 2], [0, 1]]), ks=(1,), link='sigmoid')
  np.testing.assert_allclose(on.correct, [0.5, 1.0])


def test_the_majority_of_votes():
  labels = np.array([[2, 1, 2], [3, 1, -1], [-1, -1, -1]], np.int32)
  assert votes.majority(labels).tolist() == [2, 3, -1]  # of equal ones the first in the row
  assert votes.majority(
    labels, np.array([[0.2, 0.7, 0.1], [0.6, 0.4, 0.0], [0, 0, 0]])
  ).tolist() == [
    1,
    3,
    -1,
  ]
