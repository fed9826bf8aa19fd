"""The closed forms against quadrature in float64, and against what was published."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from het_plugin.integrate import GaussianLogits, Linear, LowRank
from studies.samples.analytic import Analytic, mean_field, taylor

B = 2
K = 5
D = 6


def make(noise, projected=False):
  """Gaussian logits with two factors in all, of K classes in 8."""
  rng = np.random.default_rng(0)
  dim = D if projected else 8
  covariance = LowRank(
    jnp.asarray(noise * rng.normal(size=(B, dim))),
    jnp.asarray(rng.normal(size=(1, dim))),
    jnp.asarray(noise * rng.uniform(0.2, 1.0, size=(B, dim))),
  )
  projection = Linear(jnp.asarray(rng.normal(size=(D, 8))) / np.sqrt(D)) if projected else None
  location = jnp.asarray(1.5 * rng.normal(size=(B, 8)))
  return GaussianLogits(location, covariance, projection, jnp.asarray(0.8), K)


def quadrature(logits):
  """E[softmax(u)], [B, K], by Gauss-Hermite over the two normals."""
  nodes, weights = np.polynomial.hermite_e.hermegauss(40)
  z = np.stack(np.meshgrid(nodes, nodes), -1).reshape(-1, 2)
  weight = np.outer(weights, weights).reshape(-1) / (2 * np.pi)
  u = np.asarray(logits.location)[:, None] + z @ np.asarray(logits.factors())  # [B, N, Kp]
  return np.einsum('n,bnk->bk', weight, special.softmax(u[..., :K] / 0.8, axis=-1))


@pytest.mark.parametrize('projected', [False, True])
def test_errors_at_small_noise(projected):
  with jax.enable_x64(True):
    errors = []
    for noise in (0.1, 0.05):
      logits = make(noise, projected)
      errors.append(np.abs(np.exp(taylor(logits)) - quadrature(logits)).max())
    assert errors[0] < 1e-3 and 3.8 < np.log2(errors[0] / errors[1]) < 4.2
    logits = make(0.3, projected)
    np.testing.assert_allclose(np.exp(mean_field(logits)), quadrature(logits), atol=0.02)
    nll = Analytic('taylor').nll(logits, jnp.array([2, 4]), None)
    np.testing.assert_allclose(nll, -taylor(logits)[jnp.arange(B), jnp.array([2, 4])])


def test_mean_field_is_the_published_one_where_all_variances_are_equal():
  """mf0, written out as the sum over rivals."""
  with jax.enable_x64(True):
    noise = LowRank(None, jnp.zeros((B, 0, 8)), jnp.full((B, 8), 1.7))
    logits = make(1.0).replace(covariance=noise, temperature=jnp.ones(()))
    mu = np.asarray(logits.location)[:, :K]
    rivals = (mu[:, None, :] - mu[:, :, None]) / np.sqrt(1 + np.pi / 8 * 1.7**2)
    found = mean_field(logits)
    np.testing.assert_allclose(found, -np.log(np.exp(rivals).sum(-1)), rtol=1e-12)


def test_taylor_outside_its_range_is_floored_and_normalised():
  with jax.enable_x64(True):
    noise = LowRank(None, jnp.array([[[12.0, 0.0, 0.0]]]), jnp.zeros((1, 3)))
    logits = GaussianLogits(jnp.zeros((1, 3)), noise, None, jnp.ones(()), 3)
    # p = 1/3 and sum p G = 4: q = (64, 16, 16), their mean is 32, the brackets are 17, -7, -7.
    floored = np.array([17.0, 0.01, 0.01])
    np.testing.assert_allclose(np.exp(taylor(logits))[0], floored / floored.sum(), rtol=1e-12)
