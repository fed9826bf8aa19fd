"""Greedy selection against trying every ensemble out with all classes."""

import numpy as np
import pytest
from scipy import special

from het_plugin.evaluation.greedy_ensemble import greedy_ensemble, mixture_log_prob


def make(candidates=5, n=80, k=4, seed=0):
  """log_prob [C, N, K] and label [N]."""
  rng = np.random.default_rng(seed)
  label = rng.integers(0, k, n)
  logits = 2 * rng.normal(size=(candidates, n, k)) + 1.5 * np.eye(k)[label]
  return special.log_softmax(logits, axis=-1), label


def of_label(log_prob, label):
  return log_prob[:, np.arange(len(label)), label]


def plain_nll(log_prob, label, members):
  p = np.exp(log_prob[list(members)]).mean(axis=0)
  return -np.log(p[np.arange(len(label)), label]).mean()


@pytest.mark.parametrize('replacement', [True, False])
def test_each_step_is_the_best_one(replacement):
  log_prob, label = make()
  found = greedy_ensemble(of_label(log_prob, label), max_members=8, replacement=replacement)
  members, expected = [], []
  for _ in range(8):
    options = [c for c in range(5) if replacement or c not in members]
    if not options:
      break
    nll = [plain_nll(log_prob, label, [*members, c]) for c in options]
    if expected and min(nll) >= expected[-1]:
      break
    members.append(options[int(np.argmin(nll))])
    expected.append(min(nll))
  assert found.members == tuple(members) and len(members) > 2
  np.testing.assert_allclose(found.nll, expected, rtol=1e-12)
  assert np.all(np.diff(found.nll) < 0)


def test_weights_are_shares():
  log_prob, label = make(candidates=3)
  found = greedy_ensemble(of_label(log_prob, label), max_members=7)
  weights = found.weights(3)
  assert weights.sum() == pytest.approx(1) and len(weights) == 3
  np.testing.assert_allclose(weights * len(found.members), np.bincount(found.members, minlength=3))


@pytest.mark.parametrize('candidates', [1, 3])
def test_the_same_predictions_again_are_no_improvement(candidates):
  log_prob, label = make(candidates=1, seed=4)
  same = np.repeat(of_label(log_prob, label), candidates, axis=0)
  assert greedy_ensemble(same).members == (0,)


def test_probabilities_below_what_float64_holds():
  """e^-1000 is 0 in float64. Two candidates, each wrong on its half, are better together."""
  low, high = -1000.0, -1e-3
  found = greedy_ensemble(np.array([[low, low, high, high], [high, high, low, low], [low] * 4]))
  assert found.members == (0, 1)
  np.testing.assert_allclose(found.nll, [500.0005, np.log(2) + 1e-3])


def test_probability_zero():
  never = np.full(3, -np.inf)
  assert greedy_ensemble(np.array([never, [-1.0, -np.inf, -1], [-2.0, -2, -2]])).members[0] == 2
  hopeless = greedy_ensemble(np.array([never, never]))
  assert hopeless.members == (0,) and hopeless.nll == (np.inf,)


def test_mixtures_are_averages_of_probabilities():
  log_prob, _ = make(candidates=3)
  weights = np.array([[1, 0, 0], [0.25, 0.5, 0.25], [0, 0.5, 0.5]])
  got = mixture_log_prob(iter(log_prob), weights)
  np.testing.assert_allclose(np.exp(got), np.einsum('ec,cnk->enk', weights, np.exp(log_prob)))
  tiny = mixture_log_prob([np.array([[-900.0]]), np.array([[-np.inf]])], np.array([[0.5, 0.5]]))
  np.testing.assert_allclose(tiny, [[[-900 - np.log(2)]]])


@pytest.mark.parametrize(
  'log_prob,max_members,words',
  [
    (np.zeros((0, 3)), 1, 'not empty'),
    (np.array([[0.0, np.nan]]), 1, 'has 1 NaNs'),
    (np.zeros((1, 3)), 0, 'max_members=0 must be at least 1'),
  ],
)
def test_wrong_input_is_one_sentence(log_prob, max_members, words):
  with pytest.raises(ValueError, match=words):
    greedy_ensemble(log_prob, max_members=max_members)
