"""The closed form against explicit float64 solves of the regression it stands for."""

import numpy as np
import pytest

from het_plugin.measures import ridge

L2S = [2.0**-10, 1.0, 2.0**10, 2.0**19]
GRID = [2.0**k for k in range(-10, 20)]
SHAPES = {'tall': (60, 7), 'square': (20, 20), 'wide': (12, 50)}


def make_examples(n, d, num_classes=4, seed=0):
  rng = np.random.default_rng(seed)
  y = np.concatenate([np.arange(num_classes), rng.integers(0, num_classes, n - num_classes)])
  x = rng.normal(size=(num_classes, d))[y] + rng.normal(size=(n, d)) * rng.uniform(0.1, 9, d) + 5
  return x, y


def design(x, mean, std):
  return np.concatenate([(x - mean) / (std + 1e-5), np.full((len(x), 1), 100.0)], axis=1)


def one_hot_pm1(y, num_classes):
  return 2 * np.eye(num_classes)[y] - 1


def solve(a, targets, l2):
  """argmin |A W - Y|^2 + l2 |W|^2 as a least-squares problem: condition number not squared."""
  stacked = np.concatenate([a, np.sqrt(l2) * np.eye(a.shape[1])])
  padded = np.concatenate([targets, np.zeros((a.shape[1], targets.shape[1]))])
  return np.linalg.lstsq(stacked, padded, rcond=None)[0]


@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('l2', L2S)
def test_scores_match_dense_solve_with_explicit_bias_column(shape, l2):
  x, y = make_examples(*SHAPES[shape])
  new, _ = make_examples(33, x.shape[1], seed=1)
  a = design(x, x.mean(0), x.std(0))
  targets = one_hot_pm1(y, 4)
  expected = design(new, x.mean(0), x.std(0)) @ solve(a, targets, l2)
  actual = ridge.decompose(x, y).scores(new, l2)
  np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('l2', L2S)
def test_leave_one_out_matches_refitting_without_the_row(shape, l2):
  x, y = make_examples(*SHAPES[shape])
  a = design(x, x.mean(0), x.std(0))
  targets = one_hot_pm1(y, 4)
  keep = ~np.eye(len(y), dtype=bool)
  expected = [a[i] @ solve(a[keep[i]], targets[keep[i]], l2) for i in range(len(y))]
  rows = np.arange(len(y))[::-1]
  model = ridge.decompose(x, y)
  (hat,) = model.leverage(x, [l2])
  actual = (model.scores(x, l2) - hat[:, None] * targets) / (1 - hat[:, None])
  np.testing.assert_allclose(actual, np.array(expected), rtol=1e-9, atol=1e-9)
  (predicted,) = model.leave_one_out(x[rows], y[rows], [l2])
  np.testing.assert_array_equal(predicted, np.array(expected)[rows].argmax(axis=1))


def overlapping(n, d, num_classes, decades, seed=0):
  """Classes that overlap, in rotated features whose spectrum spans `decades`."""
  rng = np.random.default_rng(seed)
  rotation, _ = np.linalg.qr(rng.normal(size=(d, d)))
  y = np.arange(n) % num_classes
  x = 0.3 * rng.normal(size=(num_classes, d))[y] + rng.normal(size=(n, d))
  return x * np.logspace(0, -decades / 2, d) @ rotation, y


@pytest.mark.parametrize('own', [False, True])
@pytest.mark.parametrize('shape,decades', [((300, 40, 7), 2), ((300, 40, 7), 14), ((60, 90, 5), 4)])
def test_many_strengths_at_once_decide_as_one_by_one(shape, decades, own):
  x, y = overlapping(*shape, decades)
  model = ridge.decompose(x, y)
  new = x if own else overlapping(500, *shape[1:], decades, seed=1)[0]
  scores = np.stack([model.scores(new, l2) for l2 in GRID])
  if own:
    scores[:, np.arange(len(y)), y] -= 2 * model.leverage(x, GRID)
  got = model.leave_one_out(x, y, GRID) if own else model.predict(new, GRID)
  ordered = np.sort(scores, axis=-1)
  sure = ordered[..., -1] - ordered[..., -2] > 1e-9
  assert sure.mean() > 0.99
  np.testing.assert_array_equal(got[sure], scores.argmax(axis=-1)[sure])


def test_doubtful_rows_are_decided_in_float64():
  """Two best scores 1e-9 apart, which float32 cannot tell."""
  x, y = overlapping(60, 20, 2, 2)
  model = ridge.decompose(x, y)
  rng = np.random.default_rng(0)
  a, b = model.weights(1.0).T
  bias_a, bias_b = model.bias(1.0)
  z = rng.normal(size=(200, 20))
  apart = z @ (a - b) + bias_a - bias_b
  z -= ((apart - 1e-9 * rng.choice([-1, 1], 200)) / ((a - b) @ (a - b)))[:, None] * (a - b)
  new = z * model.scale + model.mean
  expected = model.scores(new, 1.0).argmax(axis=1)
  assert 50 < expected.sum() < 150
  np.testing.assert_array_equal(model.predict(new, [1.0])[0], expected)


def test_blocks_change_nothing(monkeypatch):
  x, y = overlapping(500, 7, 11, 3)
  # Sums over blocks of examples, with offsets and scales that uncentred sums would not survive.
  x = x * np.logspace(-3, 3, 7) + 1e3
  model = ridge.decompose(x, y)
  expected = model.predict(x, GRID)
  left_out = model.leave_one_out(x, y, GRID)
  monkeypatch.setattr(ridge, '_SCORES', 1)  # the smallest block, 128 rows
  np.testing.assert_array_equal(model.predict(x, GRID), expected)
  np.testing.assert_array_equal(model.leave_one_out(x, y, GRID), left_out)
  monkeypatch.setattr(ridge, '_BLOCK_ROWS', 13)
  np.testing.assert_allclose(ridge.decompose(x, y).scores(x, 1.0), model.scores(x, 1.0), atol=1e-6)


@pytest.mark.parametrize('shape', [(30, 6), (5, 40)])
def test_constant_features_are_ignored(shape):
  x, y = make_examples(*shape)
  constant = np.concatenate([x, np.full((len(x), 2), 0.1)], axis=1)
  moved = np.concatenate([x, np.full((len(x), 2), 7e3)], axis=1)  # only at test time it moves
  expected = ridge.decompose(x, y).scores(x, 2.0**-10)
  actual = ridge.decompose(constant, y).scores(moved, 2.0**-10)
  np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)


def test_dependent_features_leave_it_finite_and_exact():
  x, y = make_examples(30, 6)
  x = np.concatenate([x, x, x[:, :1] - x[:, 1:2]], axis=1)  # 13 features of rank 6
  model = ridge.decompose(x, y)
  assert len(model.eigenvalues) == 6
  a = design(x, x.mean(0), x.std(0))
  expected = a @ solve(a, one_hot_pm1(y, 4), 2.0**-10)
  np.testing.assert_allclose(model.scores(x, 2.0**-10), expected, rtol=1e-9, atol=1e-9)


def test_all_features_constant_predicts_the_most_frequent_class():
  model = ridge.decompose(np.ones((5, 3)), np.array([2, 7, 7, 2, 7]))
  np.testing.assert_array_equal(model.predict(np.zeros((4, 3)), [1.0, 9.0]), [[7] * 4] * 2)
