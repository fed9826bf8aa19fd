"""HET-H's softmax over its buckets, against the same logits with the noise of every class."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from het_plugin import heads
from het_plugin.integrate import Integrator, Linear, example_keys
from tests.integrate.test_tiles import LABELS, MULTI_LABELS, B, D, K, arrays, assert_close
from tests.meshes import make_mesh, on_mesh

KEYS = example_keys(jax.random.key(2), jnp.arange(B))


def problem(remainder='rank_one', **fields):
  """HET-H with parameters that are not zero, and phi [B, D]."""
  head = heads.HetH(K, num_factors=3, num_buckets=40, remainder=remainder, **fields)
  return head, *arrays(head, seed=0)


def of_classes(logits):
  """The same logits, whose hash is a matrix [H, Kp] of ones and zeros."""
  buckets = logits.projection.buckets
  one_hot = jax.nn.one_hot(
    buckets, logits.noise.diag.shape[-1], axis=0, dtype=logits.location.dtype
  )
  return dataclasses.replace(logits, projection=Linear(one_hot), location_from=None)


def results(integrator, head, params, phi, change):
  """nll of one label and of several, log_prob, expected entropy, and their gradients."""

  def total(params, phi):
    logits = change(head.apply({'params': params}, phi))
    log_p = integrator.log_prob(logits, KEYS)[:, :K]
    values = (
      integrator.nll(logits, jnp.asarray(LABELS), KEYS),
      integrator.nll(logits, jnp.asarray(MULTI_LABELS), KEYS),
      log_p,
      integrator.expected_entropy(logits, KEYS),
    )
    weight = jnp.cos(jnp.arange(K))
    return sum(x.sum() for x in values[:2]) + (weight * log_p).sum() + values[3].sum(), values

  (_, values), gradient = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(params, phi)
  return values, gradient


@pytest.mark.slow
@pytest.mark.parametrize(
  'num_samples,remainder',
  [(4, 'diag'), (33, 'rank_one')],
)
def test_buckets_agree_with_classes_in_float64(num_samples, remainder):
  with jax.enable_x64(True):
    head, params, phi = problem(remainder, dtype=jnp.float64)
    params, phi = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (params, phi))
    # The draws that follow the label are chosen over buckets, so there are others over classes.
    integrator = Integrator(num_samples, tilt=False, rotate=False)
    expected = results(integrator, head, params, phi, of_classes)
    assert_close(results(integrator, head, params, phi, lambda x: x), expected, 1e-9)


@pytest.mark.slow
def test_float32_buckets_over_a_mesh_agree_with_float64_classes():
  head, params, phi = problem()
  integrator = Integrator(33, sampler='iid')
  with on_mesh(make_mesh(2, 4)):
    found = results(integrator, head, params, phi, lambda x: x)
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), (params, phi))
    expected = results(integrator, head.clone(dtype=jnp.float64), *wide, of_classes)
    assert_close(found, expected, 3e-5)


def test_draws_are_those_of_the_buckets_that_a_mesh_pads():
  head, params, phi = problem('diag')
  integrator = Integrator(32)

  def log_prob(params):
    logits = head.apply({'params': params}, phi)
    return integrator.log_prob(logits, integrator.draws(logits, KEYS))

  with on_mesh(make_mesh(1, 3)):  # 3 does not divide H
    assert jax.eval_shape(log_prob, params).shape == (B, head.padded_classes)


@pytest.mark.slow
def test_a_bucket_far_below_the_others_keeps_its_loss():
  head, params, phi = problem()
  is_low = head.buckets(D) == head.buckets(D)[3]
  params = params | {'bias': jnp.where(is_low, -200.0, 0.0)}
  logits = jax.jit(head.apply)({'params': params}, phi)
  labels = jnp.full(B, 3, jnp.int32)
  nll = jax.jit(Integrator(33, tilt=False, rotate=False).nll)
  found = nll(logits, labels, KEYS)
  assert found.min() > 190
  np.testing.assert_allclose(found, nll(of_classes(logits), labels, KEYS), rtol=1e-5)


@pytest.mark.slow
def test_more_buckets_than_classes():
  head = heads.HetH(5, num_factors=2, num_buckets=40, class_multiple=8)
  phi = jax.random.normal(jax.random.key(1), (B, D))
  logits, _ = jax.jit(head.init_with_output)(jax.random.key(0), phi)
  labels = jnp.arange(B, dtype=jnp.int32)
  nll = jax.jit(Integrator(4).nll)
  np.testing.assert_allclose(
    nll(logits, labels, KEYS), nll(of_classes(logits), labels, KEYS), rtol=1e-4
  )
