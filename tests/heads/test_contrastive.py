"""The contrastive heads against float64 numpy: representations, noise, loss, counts, zero-shot."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from het_plugin.heads import (
  ContrastiveDet,
  ContrastiveHetXL,
  LogitScale,
  class_log_prob,
  contrastive_nll,
)
from het_plugin.integrate import Integrator, example_keys, iid
from tests.heads import test_heads
from tests.heads.test_heads import size
from tests.meshes import make_mesh, on_mesh

B = 5
D = 6
K = 4
R = 3
S = 7
ALPHA, BETA = 3.0 * jax.random.normal(jax.random.key(0), (2, B, D))
KEYS = example_keys(jax.random.key(5), jnp.arange(B))


def init(head):
  return test_heads.init(head, ALPHA, BETA)


def pairs_of(head, params, alpha=ALPHA, beta=BETA):
  return head.apply({'params': params}, alpha, beta)


def unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def log_softmax(u):
  u = u - u.max(-1, keepdims=True)
  return u - np.log(np.exp(u).sum(-1, keepdims=True))


def numpy_noise(params, phi, z, head):
  """eps [B, S, D] in float64 from eq. 4 and 18, in units of the representation's entries."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  root = np.sqrt(D) if head.pre_normalization else 1.0
  phi = phi * root
  d = np.log1p(np.exp(phi @ p['d_kernel'] + p['d_bias'])) + 1e-3
  if head.parametrization == 'full':
    loading = np.einsum('bd,drq->brq', phi, p['V_kernel']) + p['V_bias']
  else:
    loading = p['J'][None] * (phi @ p['v_kernel'] + p['v_bias'])[:, None]
  z = np.asarray(z, np.float64)
  return (np.einsum('bsr,brq->bsq', z[..., :R], loading) + d[:, None] * z[..., R:]) / root


def numpy_nll(head, params, direction, z):
  """-log E[p] [B] of one direction, an example, a sample and a class at a time."""
  rows, columns = [np.asarray(x, np.float64) for x in (ALPHA, BETA)]
  name = ('image_to_text', 'text_to_image')[direction]
  if direction:
    rows, columns = columns, rows
  if head.pre_normalization:
    rows = unit(rows)
    columns = unit(columns)
  samples = rows[:, None] + numpy_noise(params[name], rows, z, head)
  if head.post_normalization:
    samples = unit(samples)
    columns = unit(columns)
  scale = np.exp(np.float64(params['temperature']['t']))
  p = np.exp(log_softmax(samples @ columns.T * scale))  # [B, S, B]
  return -np.log(p.mean(1)[np.arange(B), np.arange(B)])


@pytest.mark.parametrize(
  'settings',
  [
    {},
    {'pre_normalization': False, 'parametrization': 'efficient'},
    {'pre_normalization': False, 'post_normalization': True},
  ],
  ids=['pre', 'neither', 'post'],
)
def test_het_xl_follows_eq_8(settings):
  head = ContrastiveHetXL(num_factors=R, initial_noise_scale=1.0, **settings)
  num_samples = 1 if head.post_normalization else S
  params = init(head)
  integrator = Integrator(num_samples=num_samples, sampler='iid')

  @jax.jit
  def found(params):
    keys = [jax.vmap(jax.random.fold_in, (0, None))(KEYS, direction) for direction in (0, 1)]
    z = [iid(x, jnp.arange(num_samples), R + 1) for x in keys]
    return contrastive_nll(pairs_of(head, params), integrator, KEYS), z

  for direction, (got, z) in enumerate(zip(*found(params), strict=True)):
    expected = numpy_nll(head, params, direction, z)
    np.testing.assert_allclose(got.nll, expected, rtol=3e-5, atol=3e-6)


def test_det_follows_eq_6():
  head = ContrastiveDet(temperature=LogitScale(7.0))

  @jax.jit
  def found(alpha, beta):
    pairs, _ = head.init_with_output(jax.random.key(0), alpha, beta)
    return pairs, contrastive_nll(pairs)

  pairs, of_directions = found(ALPHA, BETA)
  assert pairs.image_to_text is None and pairs.text_to_image is None
  alpha, beta = (np.asarray(x, np.float64) for x in (ALPHA, BETA))
  u = 7.0 * unit(alpha) @ unit(beta).T
  for got, logits in zip(of_directions, (u, u.T), strict=True):
    np.testing.assert_allclose(got.nll, -np.diag(log_softmax(logits)), rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(got.correct, logits.argmax(1) == np.arange(B))


@functools.cache
def loss_and_gradient():
  """Of one sample: (params, alpha, beta) -> loss of all pairs, gradient in all arguments."""
  head = ContrastiveHetXL(num_factors=R)

  def loss(params, alpha, beta):
    pairs = pairs_of(head, params, alpha, beta)
    return sum(x.nll.mean() for x in contrastive_nll(pairs, Integrator(1, sampler='iid'), KEYS))

  return init(head), jax.jit(jax.value_and_grad(loss, (0, 1, 2)))


def test_gradient_reaches_every_parameter_and_both_towers():
  params, step = loss_and_gradient()
  _, gradient = step(params, ALPHA, BETA)
  gradient = jax.tree.map(np.asarray, gradient)
  assert all(np.abs(x).max() > 1e-5 for x in jax.tree.leaves(gradient))
  # Scaling a representation of unit length changes nothing, so gradients are tangents.
  for x, g in zip((ALPHA, BETA), gradient[1:], strict=True):
    np.testing.assert_allclose(np.sum(np.asarray(x) * g, axis=-1), 0.0, atol=1e-5)


def test_parameter_counts():
  temperature = LogitScale(3.0)
  learned = temperature.num_params()
  det = ContrastiveDet(temperature=temperature)
  assert size(init(det)) == det.num_params(D) == det.extra_params(D) == learned
  for parametrization, expected in (
    ('full', 2 * (R + 1) * (D + 1) * D),
    ('efficient', 2 * (2 * (D + 1) + R) * D),
  ):
    head = ContrastiveHetXL(num_factors=R, temperature=temperature, parametrization=parametrization)
    assert size(init(head)) == head.num_params(D) == head.extra_params(D) == expected + learned


@pytest.mark.slow
def test_noise_starts_with_a_length_that_does_not_depend_on_the_dimension(dim=512):
  """About s sqrt(R + 1/2) times that of the representation, as the module says."""
  alpha, beta = jax.random.normal(jax.random.key(0), (2, 20, dim))
  head = ContrastiveHetXL(num_factors=15, initial_noise_scale=0.1)
  pairs, _ = jax.jit(head.init_with_output)(jax.random.key(1), alpha, beta)
  keys = example_keys(jax.random.key(2), jnp.arange(20))
  for phi, covariance in (
    (pairs.alpha, pairs.image_to_text),
    (pairs.beta, pairs.text_to_image),
  ):
    np.testing.assert_allclose(jnp.linalg.norm(phi, axis=-1), 1.0, rtol=1e-5)
    eps = jax.jit(lambda c: c.noise(iid(keys, jnp.arange(200), 16)))(covariance)
    length = np.sqrt(np.square(eps).sum(-1).mean())
    assert float(length) == pytest.approx(0.1 * 15.5**0.5, rel=0.1)


@pytest.mark.parametrize('post_normalization', [False, True])
def test_class_log_prob(post_normalization):
  head = ContrastiveHetXL(
    num_factors=R, initial_noise_scale=1.0, post_normalization=post_normalization
  )
  params = init(head)
  classes = unit(np.random.default_rng(0).normal(size=(K, D)))
  integrator = Integrator(S, sampler='iid')
  embeddings = np.float32(classes)

  @jax.jit
  def found(params):
    pairs = pairs_of(head, params)
    covariance = pairs.image_to_text
    tau = pairs.temperature
    noise = {'covariance': covariance, 'integrator': integrator, 'keys': KEYS}
    without = ({**noise, 'integrator': None}, {**noise, 'covariance': None}, {})
    log_p = [
      class_log_prob(pairs.alpha, embeddings, tau, **x, post_normalization=post_normalization)
      for x in (noise, *without)
    ]
    return pairs, covariance.noise(iid(KEYS, jnp.arange(S), R + 1)), log_p

  pairs, eps, (got, *without) = found(params)
  alpha = np.asarray(pairs.alpha, np.float64)
  tau = pairs.temperature
  samples = alpha[:, None] + np.asarray(eps, np.float64)
  samples = unit(samples) if post_normalization else samples
  p = np.exp(log_softmax(samples @ classes.T / float(tau)))
  np.testing.assert_allclose(got, np.log(p.mean(1)), rtol=2e-5, atol=2e-6)
  expected = log_softmax(alpha @ classes.T / float(tau))
  for x in without:
    np.testing.assert_allclose(x, expected, rtol=2e-5, atol=2e-6)
  with pytest.raises(ValueError, match=r'need typed keys \[.*got none'):
    class_log_prob(pairs.alpha, embeddings, tau, pairs.image_to_text, integrator)


def test_class_log_prob_of_classes_that_a_mesh_does_not_divide():
  head = ContrastiveHetXL(num_factors=R)
  params = init(head)
  classes = np.random.default_rng(0).normal(size=(K + 1, D)).astype('f4')
  integrator = Integrator(num_samples=40, sampler='iid')

  def find(params):
    pairs = pairs_of(head, params)
    arguments = pairs.alpha, classes, pairs.temperature, pairs.image_to_text
    return class_log_prob(*arguments, integrator, KEYS)

  expected = jax.jit(find)(params)
  with on_mesh(make_mesh(2, 4)):
    got = jax.jit(find)(params)
  np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.slow
def test_bfloat16_products_give_float32_losses():
  head = ContrastiveHetXL(num_factors=R, dtype=jnp.bfloat16)

  @jax.jit
  def found(params):
    narrow = pairs_of(head, params, ALPHA.astype(jnp.bfloat16), BETA.astype(jnp.bfloat16))
    wide = pairs_of(head.clone(dtype=jnp.float32), params)
    integrator = Integrator(S, sampler='iid')
    return narrow, *(contrastive_nll(pairs, integrator, KEYS) for pairs in (narrow, wide))

  pairs, got, exact = found(init(head))
  assert {x.dtype for x in jax.tree.leaves(pairs)} == {jnp.dtype(jnp.float32)}
  for x, y in zip(got, exact, strict=True):
    assert x.nll.dtype == jnp.float32
    np.testing.assert_allclose(x.nll, y.nll, rtol=0.03, atol=0.03)


def test_a_zero_representation_is_finite():
  params, step = loss_and_gradient()
  alpha = np.array(ALPHA)
  alpha[0] = 0.0
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(step(params, alpha, BETA)))


@pytest.mark.parametrize(
  'head, rows, words',
  [
    (ContrastiveHetXL(num_factors=0), B, 'ContrastiveHetXL.num_factors=0'),
    (ContrastiveDet(dtype='bf16'), B, "ContrastiveDet.dtype='bf16' must be a floating type"),
    (ContrastiveDet(temperature=LogitScale(-1.0)), B, 'LogitScale.initial_scale=-1.0'),
    (ContrastiveDet(), 4, r'ContrastiveDet: .* images \(5, 6\) and texts \(4, 6\)'),
  ],
)
def test_bad_settings_are_one_sentence(head, rows, words):
  with pytest.raises(ValueError, match=words) as error:
    head.init(jax.random.key(0), ALPHA, BETA[:rows])
  assert '\n' not in str(error.value)


def test_noise_without_keys_is_refused():
  head = ContrastiveHetXL(num_factors=R)
  pairs = jax.jit(pairs_of, static_argnums=0)(head, init(head))
  raw = jax.random.split(jax.random.PRNGKey(0), B)
  for keys in (None, 0, raw, raw[0], jax.random.key(0), example_keys(raw[0], jnp.arange(B - 1))):
    with pytest.raises(ValueError, match=r'contrastive_nll: samples need typed keys \[5\]'):
      contrastive_nll(pairs, Integrator(1, sampler='iid'), keys)
