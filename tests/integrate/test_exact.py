"""The exact sigmoid link against float64 quadrature, for every covariance, and on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import entr, expit

from het_plugin.integrate import Integrator, Opaque
from het_plugin.integrate.sigmoid import expected_entropy, log_expected_sigmoid
from tests.integrate import quadrature
from tests.integrate.hlo import collectives
from tests.integrate.test_integrator import (
  LABELS,
  MULTI_LABELS,
  K,
  compile_sharded_loss,
  gaussian,
  keys_of,
  make,
  pad,
  relative_error,
  sharded,
)
from tests.meshes import make_mesh

EXACT = Integrator(num_samples=1)
STREAMED = Integrator(num_samples=1, max_bytes=1)  # every class is a tile of its own


def test_log_probability_and_derivatives_in_float32():
  """|mu| up to 100, s up to 50: the targets, plus half a unit in the last place of log p."""
  near_zero = [0.0, 1e-3, -1e-2, 0.05, -0.3]
  mean = np.concatenate([np.linspace(-100, 100, 41), near_zero, np.linspace(-9, 9, 30)])
  std = [0.0, 1e-3, 0.1, 0.3, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 14.0, 20.0, 30.0, 50.0]
  mean, std = (x.ravel().astype(np.float32) for x in np.meshgrid(mean, std))
  expected = np.array([
    quadrature.log_expected_sigmoid(*pair) for pair in zip(*np.float64((mean, std)), strict=True)
  ])  # fmt: skip

  def log_p(mean, std):
    return log_expected_sigmoid(mean, jnp.square(std))

  got = jax.jit(jax.vmap(jax.value_and_grad(log_p, (0, 1))))(mean, std)
  value, by_mean, by_std = (np.asarray(x) for x in jax.tree.leaves(got))
  assert value.dtype == np.float32
  error = np.abs(value - expected[:, 0])
  assert (error <= 1e-6 + 6e-8 * np.abs(expected[:, 0])).all()
  # Below 1e-35 float32 has no digits left.
  np.testing.assert_allclose(by_mean, expected[:, 1], rtol=1e-5, atol=1e-35)
  np.testing.assert_allclose(by_std, expected[:, 2], rtol=1e-5, atol=1e-35)


def test_entropy_given_the_noise():
  nodes, weights = np.polynomial.hermite_e.hermegauss(200)
  mean = np.linspace(-15, 15, 31)
  for std in (0.0, 0.3, 1.0, 4.0):
    p = expit(mean[:, None] + std * nodes)
    expected = (entr(p) + entr(1 - p)) @ weights / weights.sum()
    got = jax.jit(expected_entropy)(mean.astype(np.float32), np.float32(std**2))
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def dense_marginals(logits):
  """Mean and standard deviation [B, K] from samples' covariance, written out."""
  covariance = logits.covariance
  projection = logits.projection
  loading = covariance.dense_loading()
  diag = covariance.diag[:, None]
  if covariance.remainder == 'diag':
    diag = jax.vmap(jnp.diag)(covariance.diag)
  rows = jnp.concatenate([loading, jnp.broadcast_to(diag, (len(diag), *diag.shape[1:]))], axis=1)
  if hasattr(projection, 'kernel'):
    rows = rows @ projection.kernel
  elif projection is not None:
    rows = rows[..., projection.buckets]
  std = jnp.sqrt(jnp.square(rows).sum(1)) / logits.temperature
  return logits.location[:, :K] / logits.temperature, std[:, :K]


def materialised_nll(logits, labels):
  mean, std = dense_marginals(logits)
  on = np.zeros(mean.shape, bool)
  for row, ids in zip(on, labels, strict=True):
    row[ids] = True
  return -log_expected_sigmoid(jnp.where(on, mean, -mean), jnp.square(std)).sum(-1)


CASES = [
  ('identity', False, 'rank_one'),
  ('hash', True, 'diag'),
  ('linear', False, 'rank_one'),
  ('shared_w', False, 'rank_one'),
  ('shared_w', True, 'diag'),
]


@pytest.mark.slow
@pytest.mark.parametrize('kind,full,remainder', CASES)
def test_every_covariance_has_its_variances_and_gradients(kind, full, remainder):
  with jax.enable_x64(True):
    arrays = make(kind, full=full)
    weights = jnp.array([1.0, -2.0, 0.5])

    def expected(arrays):
      logits = gaussian(arrays, kind, remainder, 'sigmoid')
      return materialised_nll(logits, MULTI_LABELS) @ weights

    def actual(integrator, arrays):
      logits = gaussian(arrays, kind, remainder, 'sigmoid')
      return integrator.nll(logits, pad(MULTI_LABELS)) @ weights

    value, gradient = jax.jit(jax.value_and_grad(expected))(arrays)
    for integrator in (EXACT, STREAMED):
      step = jax.jit(jax.value_and_grad(actual, 1), static_argnums=0)
      got, got_gradient = step(integrator, arrays)
      np.testing.assert_allclose(got, value, rtol=1e-10)
      assert relative_error(got_gradient, gradient) < 1e-9


@pytest.mark.slow
def test_second_derivatives():
  def loss(tau):
    logits = gaussian(arrays | {'tau': tau}, 'linear', link='sigmoid')
    return EXACT.nll(logits, pad(LABELS)).sum()

  with jax.enable_x64(True):
    arrays = make('linear')
    second = jax.jit(jax.grad(jax.grad(loss)))(arrays['tau'])
    first = jax.jit(jax.grad(loss))
    above, below = (first(arrays['tau'] + d) for d in (1e-4, -1e-4))
    np.testing.assert_allclose(second, (above - below) / 2e-4, rtol=1e-4)


@pytest.mark.parametrize(
  'name,integrator',
  [
    ('het', EXACT),
    pytest.param('het_h', STREAMED, marks=pytest.mark.slow),
    ('het_xl', STREAMED),
  ],
)
def test_shards_add_up_once(name, integrator):
  mesh = make_mesh(2, 4)
  inside, outside = collectives(compile_sharded_loss(name, 'sigmoid', integrator, mesh))
  assert not inside
  assert set(outside) == {'all-reduce'}  # nothing is gathered


@pytest.mark.slow
def test_a_mesh_changes_nothing():
  mesh = make_mesh(1, 8)
  with jax.enable_x64(True):
    arrays = make('shared_w')

    def loss(arrays):
      logits = gaussian(arrays, 'shared_w', link='sigmoid')
      return STREAMED.nll(logits, pad(LABELS)).sum()

    value, gradient = jax.jit(jax.value_and_grad(loss))(arrays)
    got, got_gradient = sharded(jax.value_and_grad(loss), mesh)(arrays)
    np.testing.assert_allclose(got, value, rtol=1e-12)
    assert relative_error(got_gradient, gradient) < 1e-12


def test_memory_of_the_streamed_form_is_a_few_classes():
  """Of [B, K] arrays, where the factors in logit space would be fifty."""
  arrays = {
    'scale': (64, 16),
    'loading': (50, 16),
    'diag': (64, 16),
    'kernel': (16, 4096),
    'phi': (64, 16),
    'bias': (4096,),
    'tau': (),
  }
  arrays = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in arrays.items()}

  def loss(arrays):
    logits = gaussian(arrays, 'shared_w', link='sigmoid')
    return STREAMED.nll(logits.replace(num_classes=4096), jnp.zeros((64, 1), jnp.int32)).sum()

  compiled = jax.jit(jax.value_and_grad(loss)).lower(arrays).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < 20 * 64 * 4096 * 4


def test_what_is_not_exact_is_refused_or_sampled():
  logits = gaussian(make('linear', dtype=jnp.float32), 'linear')
  with pytest.raises(ValueError, match="method='exact'.*softmax"):
    Integrator(method='exact').nll(logits, pad(LABELS))
  opaque = Opaque(jnp.zeros((3, 6)), logits.projection.kernel, lambda kernel, x: x @ kernel)
  integrators = [Integrator(num_samples=3, method=method) for method in ('auto', 'sample')]
  sampled = jax.jit(lambda logits: [x.log_prob(logits, keys_of()) for x in integrators])
  np.testing.assert_array_equal(*sampled(logits.replace(projection=opaque, link='sigmoid')))
  with pytest.raises(ValueError, match='keys'):
    Integrator(num_samples=3).nll(logits, pad(LABELS))


def test_noise_without_factors_is_that_of_its_remainder():
  logits = gaussian(make('shared_w', full=True, dtype=jnp.float32), 'shared_w', link='sigmoid')
  loading = logits.covariance.loading

  @jax.jit
  def found(loading):
    covariance = logits.covariance.replace(loading=loading)
    return EXACT.log_prob(logits.replace(covariance=covariance))

  np.testing.assert_allclose(found(loading[:, :0]), found(0.0 * loading), rtol=1e-5)
