"""The audit of labels against known truth, and against an independent optimum."""

import numpy as np
import pytest
from scipy import optimize

from het_plugin.measures import audit as measure
from het_plugin.measures.audit import audit

T = np.array([[0.8, 0.2, 0.0], [0.0, 0.9, 0.1], [0.05, 0.05, 0.9]])


@pytest.fixture(scope='module')
def known():
  """p of the truth, truths drawn from it, and labels that people write for them."""
  rng = np.random.default_rng(0)
  p = rng.dirichlet([0.1, 0.1, 0.1], size=20_000)
  truth = drawn(rng, p)
  return p, truth, drawn(rng, T[truth])


def drawn(rng, p):
  """A class of each row of p [N, K]."""
  return np.minimum((rng.random((len(p), 1)) > p.cumsum(axis=1)).sum(axis=1), p.shape[1] - 1)


def test_the_share_and_the_confusions_of_people_are_found(known):
  p, truth, label = known
  found = audit(p, label)
  np.testing.assert_allclose(found.confusions, T, atol=0.02)
  assert abs(found.share - (label != truth).mean()) < 3 * found.share_error
  assert (label != truth)[found.kind == 'wrong'].mean() > 0.8
  assert (found.suggested == truth).mean() > (label == truth).mean() + 0.05
  bins = np.digitize(found.wrong, np.linspace(0, 1, 6))
  for i in np.unique(bins):  # calibrated
    chosen = bins == i
    gap = found.wrong[chosen].mean() - (label != truth)[chosen].mean()
    assert abs(gap) < 4 * 0.5 / np.sqrt(chosen.sum())
  (first, *_) = found.pairs(3)
  assert first[:2] == (0, 1) and first[2] == pytest.approx(0.2, abs=0.02)
  assert min(rate for *_, rate, _ in found.pairs(6)) >= 0.0005  # of those that are never confused
  assert audit(p, truth).pairs(6) == []
  assert set(found.kind) == {'wrong', 'ambiguous', 'fine'}
  assert (p.max(axis=1)[found.kind == 'ambiguous'] <= 0.5).all()


@pytest.mark.parametrize('concentration, given_t', [(0.1, 0.8), (0.5, 0.4)])
def test_the_error_of_the_share_is_its_spread_over_draws(concentration, given_t):
  """The error of the mean of `wrong`, which takes T as known, is `given_t` of it."""
  rng = np.random.default_rng(0)
  t = np.full((3, 3), 0.1) + 0.7 * np.eye(3)
  share = []
  error = []
  of_wrong = []
  for _ in range(150):
    p = rng.dirichlet([concentration] * 3, size=500)
    found = audit(p, drawn(rng, t[drawn(rng, p)]))
    share.append(found.share)
    error.append(found.share_error)
    of_wrong.append(found.wrong.std() / np.sqrt(500))
  assert np.mean(share) == pytest.approx(0.2, abs=4 * np.std(share) / np.sqrt(150))
  assert np.mean(error) == pytest.approx(np.std(share), rel=0.2)
  assert np.mean(of_wrong) == pytest.approx(given_t * np.mean(error), rel=0.1)


def test_where_p_tells_nothing_the_error_of_the_share_is_that_of_not_knowing():
  label = np.arange(200) % 10
  for p in np.full((200, 10), 0.1), np.random.default_rng(0).dirichlet([1e3] * 10, size=200):
    assert audit(p, label).share_error == 0.5


def test_the_confusions_are_the_maximum_of_the_likelihood():
  rng = np.random.default_rng(1)
  p = rng.dirichlet([0.3, 0.3], size=300)
  label = (rng.random(300) < 0.4).astype(int)

  def loss(x):
    t = np.array([[1 - x[0], x[0]], [x[1], 1 - x[1]]])
    return -np.log((p * t.T[label]).sum(axis=1)).mean()

  best = optimize.minimize(loss, [0.1, 0.1], bounds=[(0, 1)] * 2)
  found = audit(p, label).confusions
  assert loss([found[0, 1], found[1, 0]]) == pytest.approx(best.fun, abs=2e-5)


def test_blocks_of_a_mapped_file_give_the_same_as_one_block(known, tmp_path, monkeypatch):
  p, _, label = known
  p = p[:1003].astype(np.float32)
  label = label[:1003]
  np.save(tmp_path / 'p.npy', p)
  whole = audit(p, label)
  monkeypatch.setattr(measure, 'BLOCK_BYTES', 8 * 3 * 100)  # 100 rows
  blocked = audit(np.load(tmp_path / 'p.npy', mmap_mode='r'), label)
  for name in (
    'probability',
    'confidence',
    'wrong',
    'confusions',
    'classes',
    'share',
    'share_error',
  ):
    np.testing.assert_allclose(getattr(blocked, name), getattr(whole, name), atol=1e-12)
  for name in ('suggested', 'kind', 'ids'):
    np.testing.assert_array_equal(getattr(blocked, name), getattr(whole, name))
  np.testing.assert_array_equal(whole.confidence, p.max(axis=1))
  q = p * whole.confusions.T[label]  # what `wrong` says is the posterior under these confusions
  q /= q.sum(axis=1, keepdims=True)
  np.testing.assert_allclose(whole.wrong, 1 - q[np.arange(1003), label], atol=1e-12)


def test_extremes():
  p = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1e-40, 1.0, 0.0]])
  found = audit(p, np.array([0, 1, 0]))  # no one has the third class, and one label has no p
  assert np.isfinite(found.wrong).all() and found.kind[0] == 'fine'
  np.testing.assert_allclose(found.confusions.sum(axis=1), 1)
  assert audit(np.ones((1, 1)), np.array([0])).share == 0


@pytest.mark.parametrize(
  'p, label, message',
  [
    (np.ones((2, 2)) / 2, np.array([0]), r'got \(2, 2\) and \(1,\)'),
    (np.ones((2, 2)) / 2, np.array([0, 2]), 'classes 0 .. 1'),
    (np.ones((2, 2)) / 2, np.array([0.0, 1.0]), 'classes 0 .. 1'),
    (np.ones((0, 2)), np.array([], int), 'N > 0'),
  ],
)
def test_wrong_arguments(p, label, message):
  with pytest.raises(ValueError, match=message):
    audit(p, label)
