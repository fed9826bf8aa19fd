"""The audit of labels against known truth, and against an independent optimum."""

import numpy as np
import pytest
from scipy import optimize, special, stats

from het_plugin.measures import truths
from het_plugin.measures.audit import audit, of_votes

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
  monkeypatch.setattr(truths, 'BLOCK_BYTES', 8 * 3 * 2 * 100)  # 100 rows
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


@pytest.mark.parametrize('moved', ['next', 'any'])
def test_few_of_many_classes_give_the_same_findings(moved, monkeypatch):
  rng = np.random.default_rng(0)
  num_rows = 2000
  num_classes = 60
  p = rng.dirichlet([0.03] * num_classes, size=num_rows)
  truth = drawn(rng, p)
  to = {'next': truth + 1, 'any': rng.integers(num_classes, size=num_rows)}[moved] % num_classes
  label = np.where(rng.random(num_rows) < 0.3, to, truth)
  whole = audit(p, label)
  monkeypatch.setattr(truths, 'FULL', 0)
  monkeypatch.setattr(truths, 'TOP', 15)
  before = None
  for _ in range(2):
    votes = truths.Votes(label, num_classes, before=before)
    votes.put(slice(0, 1000), p[:1000])
    votes.put(np.arange(num_rows)[:999:-1], p[:999:-1])
    before = votes.close().fit()
  few = of_votes(before)
  seen = [np.maximum(found.wrong, 1e-4) for found in (few, whole)]
  assert stats.spearmanr(*seen).statistic > 0.999
  assert (few.suggested == whole.suggested).mean() > 0.98
  np.testing.assert_allclose(few.share, whole.share, atol=0.005)
  np.testing.assert_allclose(few.share_error, whole.share_error, rtol=0.2)
  np.testing.assert_array_equal(few.probability, p[np.arange(num_rows), label].astype(np.float32))
  np.testing.assert_array_equal(few.confidence, p.max(axis=1).astype(np.float32))
  assert [x[:2] for x in few.pairs(5)] == [x[:2] for x in whole.pairs(5)] or moved == 'any'


@pytest.mark.parametrize('has_patterns', [False, True])
def test_annotators_and_their_votes_are_told_apart(has_patterns):
  """crowd-kit 1.4.2 has 0.866 (Dawid and Skene) and 0.886 (one coin) on the first data."""
  rng = np.random.default_rng(0)
  num_rows = 3000
  num_classes = 5
  num_annotators = 60
  truth = rng.integers(num_classes, size=num_rows)
  quality = np.where(np.arange(num_annotators) < 6, 0.2, rng.beta(6, 2, size=num_annotators))
  t = np.broadcast_to((1 - quality[:, None, None]) / (num_classes - 1), (num_annotators, 5, 5))
  t = np.where(np.eye(num_classes), quality[:, None, None], t)
  if has_patterns:
    t = 0.5 * rng.dirichlet([0.3] * 5, size=(num_annotators, 5)) + 0.5 * np.eye(num_classes)
    quality = t.trace(axis1=1, axis2=2) / num_classes
  annotator = np.stack([rng.permutation(num_annotators)[:3] for _ in truth])
  votes = np.stack([drawn(rng, t[by, k]) for by, k in zip(annotator, truth, strict=True)])
  votes[:500, 2] = -1  # and the second is then as good as the first
  label = np.array([np.bincount(x[x >= 0]).argmax() for x in votes])
  found = audit(np.full((num_rows, num_classes), 0.2), label, True, votes, annotator)
  accuracy = (found.suggested == truth).mean()
  assert accuracy > (label == truth).mean() + 0.04
  assert abs(found.share - (label != truth).mean()) < 0.04
  by = found.annotators
  assert by.ids.tolist() == list(range(num_annotators))
  assert by.num_votes.sum() == (votes >= 0).sum()
  assert np.sqrt(np.mean(((by.quality - quality) / by.stderr) ** 2)) < 1.5
  # What features tell counts as well.
  p = np.where(np.eye(num_classes)[truth] > 0, 0.6, 0.1)
  assert (audit(p, label, False, votes, annotator).suggested == truth).mean() > accuracy + 0.03
  alone = audit(p, label, True, label[:, None], np.zeros((num_rows, 1), int))
  np.testing.assert_allclose(alone.wrong, audit(p, label).wrong)
  assert alone.annotators is None


def test_rates_that_vanish_say_nothing_of_annotators():
  """Annotators differ by a factor of their errors alone, which many votes of the prior say."""
  rng = np.random.default_rng(0)
  p = special.softmax(4 * rng.normal(size=(1000, 10)), axis=1)
  truth = drawn(rng, p)
  annotator = np.tile([0, 1], (1000, 1))
  wrong = (truth[:, None] + rng.integers(1, 3, annotator.shape)) % 10
  votes = np.where(rng.random(annotator.shape) < [0.05, 0.5], wrong, truth[:, None])
  rows = truths.Votes(votes[:, 0], 10, votes, annotator)
  rows.put(slice(None), p)
  fitted = rows.close().fit()
  assert fitted.joint[fitted.joint > 0].min() < 1e-300
  assert fitted.prior_votes == 1000
  right = (votes == truth[:, None]).mean(axis=0)
  np.testing.assert_allclose(fitted.annotators()[1], right, atol=0.02)


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
