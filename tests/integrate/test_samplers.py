"""Samplers: their distribution, their pairing, the Sobol points against scipy's, and what they are
worth inside the integrator.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import kstest, norm, qmc

from het_plugin.integrate import (
  SAMPLERS,
  GaussianLogits,
  Integrator,
  LowRank,
  antithetic,
  example_keys,
  iid,
  sobol,
)
from het_plugin.integrate.sobol_sequence import MAX_DIMENSIONS, sobol_points
from tests.integrate import reference

every_sampler = pytest.mark.parametrize('sampler', SAMPLERS.values(), ids=SAMPLERS)


def keys_of(num_examples, seed=3):
  return example_keys(jax.random.key(seed), jnp.arange(num_examples))


@every_sampler
@pytest.mark.parametrize(
  'num_examples,num_samples,num_normals', [(1, 1, 1), (2, 100, 5), (1, 7, 64)]
)
def test_shape_and_dtype(sampler, num_examples, num_samples, num_normals):
  z = jax.jit(sampler, static_argnums=2)(
    keys_of(num_examples), jnp.arange(num_samples), num_normals
  )
  assert z.shape == (num_examples, num_samples, num_normals)
  assert z.dtype == jnp.float32
  assert np.isfinite(z).all()


@every_sampler
def test_each_sample_is_standard_normal_over_keys(sampler):
  """Any fixed sample index, not only the average over the sequence: hence no bias at any S."""
  z = np.asarray(sampler(keys_of(4000), jnp.array([0, 1, 5, 1000]), 3))  # [4000, 4, 3]
  for index in range(4):
    for dimension in range(3):
      assert kstest(z[:, index, dimension], norm.cdf).pvalue > 1e-4
    correlation = np.corrcoef(z[:, index], rowvar=False) - np.eye(3)
    assert np.abs(correlation).max() < 5 / np.sqrt(4000)


@every_sampler
def test_moments_of_a_long_stream(sampler):
  z = np.asarray(sampler(keys_of(4), jnp.arange(2000), 64), np.float64)
  assert np.abs(z.mean(axis=1)).max() < 5 / np.sqrt(2000)
  assert np.abs(z.var(axis=1) - 1).max() < 5 * np.sqrt(2 / 2000)


@every_sampler
def test_a_draw_depends_on_key_and_index_alone(sampler):
  keys = keys_of(3)
  whole = np.asarray(sampler(keys, jnp.arange(11), 6))
  chunks = [sampler(keys, jnp.arange(i, min(i + 4, 11)), 6) for i in (0, 4, 8)]
  np.testing.assert_array_equal(whole, np.concatenate(chunks, axis=1))
  np.testing.assert_array_equal(whole[:, [9, 2]], sampler(keys, jnp.array([9, 2]), 6))
  np.testing.assert_array_equal(whole[1:2], sampler(keys[1:2], jnp.arange(11), 6))
  mapped = jax.vmap(lambda key: sampler(key[None], jnp.arange(11), 6)[0])(keys)
  np.testing.assert_array_equal(whole, mapped)
  assert not np.array_equal(whole[0], whole[1])


def test_antithetic_pairs_are_exact_and_their_heads_independent():
  keys, index = keys_of(2), jnp.arange(10)
  z = np.asarray(antithetic(keys, index, 3))
  np.testing.assert_array_equal(z[:, 1::2], -z[:, ::2])
  np.testing.assert_array_equal(z[:, ::2], iid(keys, jnp.arange(5), 3))


def test_sobol_points_are_those_of_scipy():
  j = np.arange(2048)
  expected = qmc.Sobol(MAX_DIMENSIONS, scramble=False, bits=32).random(len(j)) * 2.0**32
  actual = sobol_points(jnp.asarray(j ^ (j >> 1)), MAX_DIMENSIONS)
  np.testing.assert_array_equal(actual, expected.astype(np.uint32))


def test_sobol_points_far_out_come_without_their_predecessors():
  start = 2**20 - 8
  generator = qmc.Sobol(3, scramble=False, bits=32).fast_forward(start)
  j = np.arange(start, start + 16)
  actual = sobol_points(jnp.asarray(j ^ (j >> 1)), 3)
  np.testing.assert_array_equal(actual, (generator.random(16) * 2.0**32).astype(np.uint32))


def test_shifted_sobol_fills_every_interval_once():
  """A digital shift keeps the net: each of 256 equal intervals holds one of 256 points."""
  uniform = norm.cdf(np.asarray(sobol(keys_of(2), jnp.arange(256), MAX_DIMENSIONS), np.float64))
  cells = np.sort(np.floor(uniform * 256).astype(int), axis=1)
  np.testing.assert_array_equal(cells, np.broadcast_to(np.arange(256)[:, None], cells.shape))


def test_sobol_tails_are_finite_and_symmetric(monkeypatch):
  """The extreme bit patterns, which no draw of a test would meet."""
  points = jnp.array([[0, 511, 2**32 - 1, 2**31, 2**31 - 1]], jnp.uint32)
  monkeypatch.setattr(sobol.__module__ + '.sobol_points', lambda index, dimensions: points)
  monkeypatch.setattr(jax.random, 'bits', lambda key, shape, dtype: jnp.zeros(shape, dtype))
  lowest, also_lowest, highest, above, below = np.asarray(sobol(keys_of(1), jnp.arange(1), 5))[0, 0]
  assert lowest == also_lowest == -highest and above == -below > 0
  np.testing.assert_allclose(highest, -norm.ppf(2.0**-24), rtol=1e-5)


def test_sobol_says_what_to_do_beyond_its_dimensions():
  with pytest.raises(ValueError, match='64 dimensions.*65 normals.*num_factors.*63'):
    sobol(keys_of(1), jnp.arange(2), 65)


# In the integrator.

B, K, R = 2, 10, 3


def noisy(scale, dtype=jnp.float32):
  rng = np.random.default_rng(0)
  arrays = {
    'location': rng.normal(size=(B, K)),
    'scale': scale * rng.normal(size=(B, K)),
    'loading': rng.normal(size=(R, K)),
    'diag': scale * rng.uniform(0.5, 1.0, size=(B, K)),
  }
  return {name: jnp.asarray(x, dtype) for name, x in arrays.items()}


def gaussian(arrays, link='softmax'):
  covariance = LowRank(arrays['scale'], arrays['loading'], arrays['diag'])
  tau = jnp.ones((), arrays['location'].dtype)
  return GaussianLogits(arrays['location'], covariance, None, tau, num_classes=K, link=link)


@pytest.mark.parametrize('name', ['antithetic', 'sobol'])
def test_variance_is_reduced(name):
  """Mean squared error of p at S = 64, over many keys: none above iid's, and far below it on a
  smooth integrand (small noise).
  """

  def error(name, logits, exact):
    integrator = Integrator(num_samples=64, sampler=name)
    p = jax.jit(jax.vmap(lambda keys: jnp.exp(integrator.log_prob(logits, keys))))(
      jax.vmap(lambda seed: keys_of(B, seed))(jnp.arange(200))
    )
    np.testing.assert_allclose(p.mean(axis=0), exact, atol=5e-3)  # all of them, without bias
    return float(jnp.mean(jnp.square(p - exact)))

  for scale, gain in ((0.3, 8.0), (2.0, 1.0)):
    logits = gaussian(noisy(scale))
    exact = jnp.exp(Integrator(num_samples=100_000).log_prob(logits, keys_of(B, 7)))
    assert error(name, logits, exact) * gain < error('iid', logits, exact), scale


@every_sampler
@pytest.mark.parametrize('link', ['softmax', 'sigmoid'])
@pytest.mark.parametrize('num_samples', [1, 13])
def test_gradients_match_the_materialised_reference(sampler, link, num_samples):
  with jax.enable_x64(True):
    arrays = noisy(1.0, jnp.float64)
    labels = jnp.array([[1], [4]])
    z = sampler(keys_of(B), jnp.arange(num_samples), R + 1).astype(jnp.float64)

    def expected(arrays):
      covariance = (arrays['scale'], arrays['loading'], arrays['diag'])
      logits = reference.sample_logits(z, arrays['location'], covariance, 'identity')
      return reference.nll(logits, 1.0, link, [[1], [4]]).sum()

    def actual(arrays):
      integrator = Integrator(num_samples=num_samples, chunk_size=4, sampler=sampler)
      return integrator.nll(gaussian(arrays, link), labels, keys_of(B)).sum()

    value, gradient = jax.value_and_grad(expected)(arrays)
    got, got_gradient = jax.jit(jax.value_and_grad(actual))(arrays)
    np.testing.assert_allclose(got, value, rtol=1e-10)
    for name in arrays:
      np.testing.assert_allclose(got_gradient[name], gradient[name], rtol=1e-8, atol=1e-10)


def test_integrator_takes_a_name_or_a_function():
  logits = gaussian(noisy(1.0))
  for name, sampler in SAMPLERS.items():
    by_name, by_function = (
      Integrator(num_samples=5, sampler=s).log_prob(logits, keys_of(B)) for s in (name, sampler)
    )
    np.testing.assert_array_equal(by_name, by_function)
  with pytest.raises(ValueError, match="sampler='halton'.*iid, antithetic, sobol"):
    Integrator(sampler='halton')
