"""Sums in blocks and over meshes against float64 in one piece."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from het_plugin.evaluation import gram, ridge


def make_examples(n, d=12, num_classes=5, seed=0):
  rng = np.random.default_rng(seed)
  y = rng.integers(0, num_classes, n)
  x = 0.5 * rng.normal(size=(num_classes, d))[y] + rng.normal(size=(n, d))
  # Offsets and scales that float32 sums of squares would not survive uncentred.
  return (x * np.logspace(-3, 3, d) + 1e3).astype(np.float32), y


@pytest.fixture
def mesh():
  return Mesh(np.array(jax.devices()).reshape(4, 2), ('data', 'model'))


def expected_sums(x, y, num_classes=5):
  mean = x.mean(axis=0, dtype=np.float64)
  z = x - mean
  return mean, z.T @ z, np.stack([z[y == k].sum(axis=0) for k in range(num_classes)])


@pytest.mark.parametrize('n', [1, 7, 64, 1000])
def test_blocks_on_the_host(n, monkeypatch):
  monkeypatch.setattr(gram, 'HOST_ROWS', 7)
  x, y = make_examples(n)
  mean, products, sums = expected_sums(x, y)
  got_mean, constant = gram.moments(x)
  np.testing.assert_allclose(got_mean, mean, rtol=1e-14)
  assert constant.all() == (n == 1)
  got = gram.centred_sums(x, y, 5, mean)
  np.testing.assert_allclose(got[0], products, rtol=1e-10, atol=1e-10)
  np.testing.assert_allclose(got[1], sums, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('n', [1, 100, 3001])
def test_blocks_over_a_mesh(n, mesh, monkeypatch):
  monkeypatch.setattr(gram, 'DEVICE_ROWS', 16)  # 128 a block: the last is padded
  x, y = make_examples(n)
  mean, products, sums = expected_sums(x, y)
  got = gram.centred_sums(x, y, 5, mean, mesh)
  scale = np.sqrt(np.maximum(np.diag(products), 1e-30))
  np.testing.assert_allclose(
    got[0] / scale / scale[:, None], products / scale / scale[:, None], atol=3e-7
  )
  np.testing.assert_allclose(got[1] / scale, sums / scale, atol=3e-7)


def test_sums_are_compensated(mesh, monkeypatch):
  """Many blocks onto a large sum: plain float32 loses a thousand times as much."""
  monkeypatch.setattr(gram, 'DEVICE_ROWS', 1)
  x = np.random.default_rng(0).uniform(0.9, 1.1, size=(8 * 4000, 2)).astype(np.float32)
  x[:8] = 3e3  # a large first summand on every device
  exact = (x.astype(np.float64) ** 2).sum(axis=0)
  products, _ = gram.centred_sums(x, np.zeros(len(x), int), 1, np.zeros(2), mesh)
  plain = np.zeros(2, np.float32)
  for row in x[::8]:
    plain += row**2
  error = np.abs(np.diag(products) / exact - 1).max()
  assert error < 1e-8
  assert np.abs(plain * 8 / exact - 1).max() > 1000 * error


def test_a_fit_over_the_mesh_predicts_the_same(mesh):
  x, y = make_examples(4000, d=30)
  new, _ = make_examples(1000, d=30, seed=1)
  one, other = ridge.decompose(x, y), ridge.decompose(x, y, mesh)
  np.testing.assert_allclose(other.eigenvalues, one.eigenvalues, rtol=1e-5)
  l2s = [2.0**-10, 1.0, 2.0**10, 2.0**19]
  assert (one.predict(new, l2s) != other.predict(new, l2s)).mean() < 1e-3
  assert len(np.unique(one.predict(new, l2s))) == 5


def test_the_mesh_leaves_out_what_is_rounding_error(mesh):
  x, y = make_examples(500, d=6)
  x = np.concatenate([x, x[:, :3] * 2], axis=1)  # rank 6 of 9
  model = ridge.decompose(x, y, mesh)
  assert len(model.eigenvalues) == 6
  (predicted,) = model.predict(x, [2.0**-10])
  (expected,) = ridge.decompose(x, y).predict(x, [2.0**-10])
  assert np.mean(predicted != expected) < 0.01
