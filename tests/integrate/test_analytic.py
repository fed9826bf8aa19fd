"""Analytic estimators against quadrature in float64, against the exact integrator's conventions,
and where their formulas stop meaning anything.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from het_plugin.integrate import (
  ESTIMATORS,
  Analytic,
  GaussianLogits,
  Hashed,
  Integrator,
  Linear,
  LowRank,
  Opaque,
  mean_field,
  taylor,
)
from tests.meshes import make_mesh

B = 2
K = 5
KP = 8
D = 6
R = 1
KINDS = ('identity', 'hash', 'linear')
BUCKETS = np.arange(KP) * 7 % 3

both_links = pytest.mark.parametrize('link', ['softmax', 'sigmoid'])


def make(kind='identity', link='softmax', noise=1.0, *, full=False, remainder='rank_one'):
  """Gaussian logits of K classes in Kp; their padded entries are not zero, as in a real head."""
  rng = np.random.default_rng(0)
  noise_dim = {'identity': KP, 'hash': 3, 'linear': D}[kind]
  covariance = LowRank(
    None if full else jnp.asarray(noise * rng.normal(size=(B, noise_dim))),
    jnp.asarray(
      rng.normal(size=(B, R, noise_dim)) * noise if full else rng.normal(size=(R, noise_dim))
    ),
    jnp.asarray(noise * rng.uniform(0.2, 1.0, size=(B, noise_dim))),
    remainder,
  )
  projection = {
    'identity': None,
    'hash': Hashed(jnp.asarray(BUCKETS)),
    'linear': Linear(jnp.asarray(rng.normal(size=(D, KP))) / np.sqrt(D)),
  }[kind]
  location = jnp.asarray(1.5 * rng.normal(size=(B, KP)))
  return GaussianLogits(location, covariance, projection, jnp.asarray(0.8), K, link)


def quadrature(logits, factors):
  """E[link(u)], [B, K], by Gauss-Hermite over the R + 1 = 2 normals."""
  nodes, weights = np.polynomial.hermite_e.hermegauss(40)
  z = np.stack(np.meshgrid(nodes, nodes), -1).reshape(-1, 2)
  weight = np.outer(weights, weights).reshape(-1) / (2 * np.pi)
  u = np.asarray(logits.location)[:, None] + z @ np.asarray(factors)  # [B, N, Kp]
  u = u[..., :K] / np.asarray(logits.temperature)
  p = special.softmax(u, axis=-1) if logits.link == 'softmax' else special.expit(u)
  return np.einsum('n,bnk->bk', weight, p)


def found_and_expected(estimator, logits):
  """Probabilities [B, K], twice."""
  log_p, factors = jax.jit(lambda x: (estimator(x), x.factors()))(logits)
  return np.exp(log_p[:, :K]), quadrature(logits, factors)


@pytest.mark.parametrize('method', ESTIMATORS)
@both_links
def test_same_conventions_as_the_integrator(method, link):
  """Deterministic logits have one answer, whoever gives it: several labels, none, padding."""
  logits = make('identity', link).replace(covariance=None)
  labels = jnp.array([[2, 4], [-1, -1]], jnp.int32)
  keys = jax.random.split(jax.random.key(0), B)
  analytic = Analytic(method)
  exact = Integrator()
  find = jax.jit(
    lambda logits: [
      (x.nll(logits, labels, keys), x.log_prob(logits, keys)) for x in (analytic, exact)
    ]
  )
  for got, expected in zip(*find(logits), strict=True):
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('method', ESTIMATORS)
def test_the_mesh_may_have_explicit_axes(method):
  logits = make('identity', 'softmax')
  labels = jnp.arange(B)
  find = jax.jit(Analytic(method).nll)
  mesh = make_mesh(2, 2, kind=jax.sharding.AxisType.Explicit)
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data', 'model'))
  placed = logits.replace(location=jax.device_put(logits.location, sharding))
  with jax.set_mesh(mesh):
    got = find(placed, labels)
  np.testing.assert_allclose(got, find(logits, labels), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('method', ESTIMATORS)
@both_links
def test_nll_is_made_of_log_prob(method, link):
  with jax.enable_x64(True):
    logits = make('linear', link)
    log_p = Analytic(method).log_prob(logits)[:, :K]
    nll = Analytic(method).nll(logits, jnp.array([[2], [4]], jnp.int32))
    at_label = log_p[jnp.arange(B), jnp.array([2, 4])]
    if link == 'softmax':
      np.testing.assert_allclose(nll, -at_label, rtol=1e-12)
    else:
      off = jnp.log1p(-jnp.exp(log_p))
      off_label = off[jnp.arange(B), jnp.array([2, 4])]
      np.testing.assert_allclose(nll, -(off.sum(-1) - off_label + at_label), rtol=1e-9)


@both_links
@pytest.mark.parametrize('kind,full', [*((kind, False) for kind in KINDS), ('identity', True)])
def test_taylor_error_falls_with_the_fourth_power_of_the_noise(link, kind, full):
  with jax.enable_x64(True):
    errors = []
    for noise in (0.1, 0.05):
      found, expected = found_and_expected(taylor, make(kind, link, noise, full=full))
      errors.append(np.abs(found - expected).max())
    assert errors[0] < 1e-3
    assert 3.8 < np.log2(errors[0] / errors[1]) < 4.2, errors


@both_links
def test_taylor_with_a_diagonal_remainder_is_of_second_order_too(link):
  """The full covariance V^T V + diag(d^2), written out and put into the Hessian by autodiff."""
  with jax.enable_x64(True):
    logits = make('identity', link, 0.3, full=True, remainder='diag')
    f = jax.nn.softmax if link == 'softmax' else jax.nn.sigmoid

    @jax.jit
    def both(logits):
      tau = logits.temperature
      loading = logits.covariance.loading[..., :K] / tau
      diag = jnp.square(logits.covariance.diag[:, :K] / tau)
      sigma = jnp.einsum('bri,brj->bij', loading, loading) + jax.vmap(jnp.diag)(diag)
      mu = logits.location[:, :K] / tau
      second = jnp.einsum('bkij,bij->bk', jax.vmap(jax.hessian(f))(mu), sigma)
      return jnp.exp(taylor(logits)[:, :K]), f(mu) + second / 2

    np.testing.assert_allclose(*both(logits), rtol=1e-10)


@both_links
@pytest.mark.parametrize('kind', KINDS)
def test_mean_field_is_near_at_small_noise(link, kind):
  """Standard deviations of the logits up to about 0.5 over tau: within 0.02 of the probability."""
  with jax.enable_x64(True):
    np.testing.assert_allclose(*found_and_expected(mean_field, make(kind, link, 0.3)), atol=0.02)


def test_mean_field_is_the_published_one_where_all_variances_are_equal():
  """mf0, written out as the sum over rivals."""
  with jax.enable_x64(True):
    diag = jnp.full((B, KP), 1.7)
    noise = LowRank(None, jnp.zeros((B, 0, KP)), diag, 'diag')
    logits = make().replace(covariance=noise, temperature=jnp.ones(()))
    mu = np.asarray(logits.location)[:, :K]
    rivals = (mu[:, None, :] - mu[:, :, None]) / np.sqrt(1 + np.pi / 8 * 1.7**2)
    found = jax.jit(mean_field)(logits)[:, :K]
    np.testing.assert_allclose(found, -np.log(np.exp(rivals).sum(-1)), rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize('estimator', ESTIMATORS.values(), ids=ESTIMATORS)
@both_links
@pytest.mark.parametrize('noise', [1.0, 10.0, 1000.0])
def test_probabilities_and_gradients_stay_sane_at_any_noise(estimator, link, noise):
  logits = make('linear', link, noise)
  log_p = estimator(logits)
  p = np.exp(np.asarray(log_p, np.float64))[:, :K]
  assert (p > 0).all() and (p <= 1 + 1e-6).all()
  if link == 'softmax':
    np.testing.assert_allclose(p.sum(-1), 1.0, atol=1e-5)
  gradient = jax.grad(lambda g: estimator(g)[:, :K].sum(), allow_int=True)(logits)
  for x in jax.tree.leaves(gradient):
    assert np.isfinite(x).all()


def test_taylor_outside_its_range_is_floored_and_normalised():
  with jax.enable_x64(True):
    loading = jnp.array([[[12.0, 0.0, 0.0]]])
    logits = GaussianLogits(
      jnp.zeros((1, 3)), LowRank(None, loading, jnp.zeros((1, 3))), None, jnp.ones(()), 3
    )
    # p = 1/3 and sum p G = 4: q = (64, 16, 16), their mean is 32, the brackets are 17, -7, -7.
    floored = np.array([17.0, 0.01, 0.01])
    found = np.exp(jax.jit(taylor)(logits))[0]
    np.testing.assert_allclose(found, floored / floored.sum(), rtol=1e-12)


def test_what_cannot_be_computed_is_refused():
  opaque = Opaque(jnp.zeros((B, D)), None, lambda params, x: x)
  for estimator in ESTIMATORS.values():
    with pytest.raises(ValueError, match='opaque'):
      estimator(make('linear').replace(projection=opaque))
  with pytest.raises(ValueError, match="remainder='diag'.*Linear"):
    taylor(make('linear', remainder='diag'))
  with pytest.raises(ValueError, match="method='laplace'.*mean_field, taylor"):
    Analytic('laplace')
