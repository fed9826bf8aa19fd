import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats
from sklearn import metrics as sklearn_metrics

from het_plugin.integrate import GaussianLogits
from het_plugin.models import metrics, soft_labels
from het_plugin.training.metrics import compute_metrics


def random_batch(seed, rows=40, classes=7, num_labels=1):
  """log_prob, labels padded with -1, mask; about a quarter of the rows is padding."""
  rng = np.random.default_rng(seed)
  log_prob = jax.nn.log_softmax(3 * rng.standard_normal((rows, classes)).astype(np.float32))
  labels = np.stack([rng.permutation(classes)[:num_labels] for _ in range(rows)])
  labels[:, 1:][rng.random((rows, num_labels - 1)) < 0.5] = -1
  mask = (rng.random(rows) < 0.75).astype(np.float32)
  return np.asarray(log_prob), labels.astype(np.int32), mask


@jax.jit
def batch_metrics(log_prob, labels, mask, tau=1.0):
  top = jnp.argmax(log_prob, -1)
  correct = soft_labels.correct(top, {'label': labels}, 'softmax')
  logits = GaussianLogits(log_prob, None, None, 1.0, num_classes=log_prob.shape[-1])
  nll = -(soft_labels.targets({'label': labels}, logits) * log_prob).sum(-1)
  result = metrics.base_metrics(nll, correct, jnp.asarray(tau, jnp.float32), jnp.asarray(mask))
  confidence = jnp.exp(log_prob.max(-1))
  result['ece'] = metrics.ExpectedCalibrationError.from_model_output(confidence, correct, mask=mask)
  return result


def compute(result):
  return {name: float(metric.compute()) for name, metric in result.items()}


def reference_ece(confidence, correct, bins=15):
  edges = np.linspace(0, 1, bins + 1)
  total = 0.0
  for low, high in zip(edges[:-1], edges[1:], strict=True):
    inside = (confidence > low) & (confidence <= high)
    if inside.any():
      total += inside.sum() * abs(correct[inside].mean() - confidence[inside].mean())
  return total / len(confidence)


def test_single_label_metrics_are_those_of_scikit_learn():
  log_prob, labels, mask = random_batch(0, rows=300)
  real = mask > 0
  probs = np.exp(log_prob[real].astype(np.float64))
  y = labels[real, 0]
  result = batch_metrics(log_prob, labels, mask, tau=0.7)
  values = compute(result)
  top = probs.argmax(-1)
  expected_nll = sklearn_metrics.log_loss(y, probs / probs.sum(-1, keepdims=True), labels=range(7))
  np.testing.assert_allclose(values['nll'], expected_nll, rtol=1e-5)
  np.testing.assert_allclose(values['loss'], expected_nll, rtol=1e-5)
  np.testing.assert_allclose(
    values['precision_at_1'], sklearn_metrics.accuracy_score(y, top), rtol=1e-6
  )
  np.testing.assert_allclose(values['ece'], reference_ece(probs.max(-1), top == y), rtol=1e-5)
  np.testing.assert_allclose(values['tau'], 0.7, rtol=1e-6)
  assert int(result['loss'].count) == real.sum()


def test_several_labels_are_votes():
  log_prob, labels, mask = random_batch(1, rows=200, num_labels=3)
  values = compute(batch_metrics(log_prob, labels, mask))
  nll = []
  correct = []
  confidence = []
  for row, listed, real in zip(log_prob.astype(np.float64), labels, mask, strict=True):
    if real:
      listed = listed[listed >= 0]
      nll.append(-row[listed].mean())
      correct.append((row.argmax() == listed).mean())
      confidence.append(np.exp(row.max()))
  np.testing.assert_allclose(values['nll'], np.mean(nll), rtol=1e-5)
  np.testing.assert_allclose(values['precision_at_1'], np.mean(correct), rtol=1e-6)
  expected_ece = reference_ece(np.array(confidence), np.array(correct))
  np.testing.assert_allclose(values['ece'], expected_ece, rtol=1e-5)


@pytest.mark.parametrize(
  ('confidence', 'correct', 'expected'),
  [
    ([1.0, 1.0], [0, 0], 1.0),
    ([0.5, 0.5], [1, 0], 0.0),  # one bin: the gaps cancel
    ([0.1, 0.9], [1, 0], 0.9),  # two bins: they do not
    ([0.2, 0.15], [1, 0], 0.325),  # 3 / 15 still belongs to the bin below it
    ([1.0000001], [1], 0.0),  # exp(log p) may round above 1
  ],
)
def test_ece_by_hand(confidence, correct, expected):
  metric = metrics.ExpectedCalibrationError.from_model_output(
    jnp.array(confidence, jnp.float32), jnp.array(correct, jnp.float32)
  )
  np.testing.assert_allclose(metric.compute(), expected, atol=1e-6)
  merged = metrics.ExpectedCalibrationError.empty().merge(metric)
  np.testing.assert_allclose(merged.compute(), expected, atol=1e-6)
  rows = jnp.array([*confidence, jnp.nan]), jnp.array([*correct, 0.0])  # a masked one more
  mask = jnp.array([1.0] * len(correct) + [0.0])
  masked = metrics.ExpectedCalibrationError.from_model_output(*rows, mask)
  np.testing.assert_allclose(masked.compute(), expected, atol=1e-6)


def test_disagreement_is_the_rank_correlation_of_entropies():
  rng = np.random.default_rng(0)
  votes = rng.multinomial(5, rng.dirichlet(np.full(4, 0.3), 2000)) / 5
  noisy = np.log(0.9 * votes + 0.1 * rng.dirichlet(np.full(4, 0.2), 2000) + 1e-9)
  log_prob = np.pad(special.log_softmax(noisy, axis=1), ((0, 0), (0, 4)), constant_values=-np.inf)
  target = np.pad(votes, ((0, 0), (0, 4)))
  mask = rng.integers(0, 2, 2000).astype(np.float32)
  real = mask > 0
  entropies = (stats.entropy(x[real], axis=1) for x in (np.exp(log_prob[:, :4]), votes))
  expected = stats.spearmanr(*entropies).statistic
  assert 0.3 < expected < 0.98
  make = jax.jit(metrics.DisagreementCorrelation.from_model_output, static_argnums=2)
  parts = [
    make(log_prob[rows], target[rows], 4, mask[rows]) for rows in np.split(range(2000), [500])
  ]
  merged = functools.reduce(lambda a, b: a.merge(b), parts)
  assert float(merged.compute()) == pytest.approx(expected, abs=5e-3)
  unlabelled = make(log_prob[:9], 0 * target[:9], 4, mask[:9])
  assert np.isnan(unlabelled.compute()) and compute_metrics({'disagreement': unlabelled}) == {}
  assert float(merged.merge(unlabelled).compute()) == float(merged.compute())
