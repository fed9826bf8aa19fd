"""The exact sigmoid of a few principal factors: formula, gradient, tiles, meshes, extremes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from het_plugin import heads
from het_plugin.integrate import Integrator, directions
from het_plugin.integrate.sigmoid import marginals
from het_plugin.training.flops import count_flops
from tests.integrate.hlo import collectives
from tests.integrate.test_integrator import (
  KP,
  MULTI_LABELS,
  K,
  R,
  compile_sharded_loss,
  gaussian,
  make,
  pad,
  relative_error,
  sharded,
)
from tests.integrate.test_tiles import (
  LABELS,
  MAX_BYTES,
  B,
  assert_close,
  problem,
  temporary_bytes,
  value_and_gradient,
)
from tests.meshes import make_mesh, on_mesh

FORMS = [
  ('linear', False, 'rank_one'),
  ('shared_w', True, 'rank_one'),
  ('shared_w', False, 'diag'),
  ('linear', True, 'diag'),
]


def all_factors(logits):
  """F [B, T, Q] over tau, without d where that is noise of each dimension; and d."""
  noise = logits.covariance.scaled(1.0 / logits.temperature)
  rows = [noise.dense_loading()]
  if noise.remainder == 'rank_one':
    rows.append(noise.diag[:, None])
  return jnp.concatenate(rows, axis=1), noise.diag


@pytest.mark.parametrize('kind,full,remainder', FORMS)
def test_variances_are_those_of_the_formula(kind, full, remainder, monkeypatch):
  """And the directions leave hardly more than those of an eigendecomposition."""
  counts = (1, 2, R - 1)
  kept = []
  axes_of = directions.principal_axes

  def keep(*args):
    kept.append(axes_of(*args))
    return kept[-1]

  monkeypatch.setattr(directions, 'principal_axes', keep)

  @jax.jit
  def run(logits):
    noises = [directions.reduced(logits.covariance, count) for count in counts]
    variances = [marginals(logits.replace(covariance=x))[1] for x in noises]
    return variances, kept, all_factors(logits)

  with jax.enable_x64(True):
    logits = gaussian(make(kind, full=full), kind, remainder, 'sigmoid')
    variances, of_counts, (factors, diag) = jax.tree.map(np.asarray, run(logits))
  kernel = np.asarray(logits.projection.kernel)
  gram = factors @ np.swapaxes(factors, 1, 2)
  for count, variance, axes in zip(counts, variances, of_counts, strict=True):
    np.testing.assert_allclose(axes @ np.swapaxes(axes, 1, 2), [np.eye(count)] * 3, atol=1e-12)
    rows = axes @ factors
    rest = np.square(factors).sum(1) - np.square(rows).sum(1)
    if remainder == 'diag':
      rest += np.square(diag)
    expected = np.square(rows @ kernel).sum(1) + rest @ np.square(kernel)
    np.testing.assert_allclose(variance, expected, rtol=1e-10)

    best = np.linalg.eigvalsh(gram)[:, ::-1][:, :count].sum(1)
    held = np.einsum('bmt,bts,bms->b', axes, gram, axes)
    assert held.sum() > 0.9 * best.sum() and (held <= best * (1 + 1e-9)).all()


@pytest.mark.parametrize('kind,full,remainder', FORMS[::3])  # both loadings, both remainders
def test_as_many_as_there_are_is_exact(kind, full, remainder):
  logits = gaussian(make(kind, full=full, dtype=jnp.float32), kind, remainder, 'sigmoid')

  @jax.jit
  def losses(logits):
    counts = (None, R, R + 1, 10**6, R - 1)
    return [Integrator(principal_factors=m).nll(logits, pad(MULTI_LABELS)) for m in counts]

  expected, *found, fewer = losses(logits)
  for x in found:
    np.testing.assert_array_equal(x, expected)
  assert np.abs(fewer - expected).max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize('kind,full,remainder', FORMS[1:3])  # both loadings, both remainders
def test_gradient_is_that_of_the_objective_with_fixed_directions(
  kind, full, remainder, monkeypatch
):
  """Against differences in float64, in all parameters, along a random direction of each."""
  rng = np.random.default_rng(1)
  with jax.enable_x64(True):
    arrays = make(kind, full=full)

    def loss(arrays):
      logits = gaussian(arrays, kind, remainder, 'sigmoid')
      return Integrator(principal_factors=2).nll(logits, pad(MULTI_LABELS)).sum()

    @jax.jit
    def gradient_and_axes(arrays):
      factors, _ = all_factors(gaussian(arrays, kind, remainder, 'sigmoid'))
      return jax.grad(loss)(arrays), directions.principal_axes(factors, 2)

    gradient, axes = gradient_and_axes(arrays)
    monkeypatch.setattr(directions, 'principal_axes', lambda *_: axes)
    of_fixed = jax.jit(lambda arrays: loss(arrays))
    for name, x in arrays.items():
      step = 1e-5 * rng.normal(size=x.shape)
      above, below = (of_fixed(arrays | {name: np.asarray(x) + d}) for d in (step, -step))
      expected = (above - below) / 2
      found = (np.asarray(gradient[name]) * step).sum()
      np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.slow
def test_tiles_agree_with_all_classes_at_one_time():
  """Those of a W' are below; any other head has the noise of these, once it is reduced."""
  with jax.enable_x64(True):
    head, params, phi = problem('het_xl', 'sigmoid', jnp.float64)
    whole = Integrator(principal_factors=2)
    expected = value_and_gradient(whole, head, params, phi, LABELS)
    tiled = dataclasses.replace(whole, max_bytes=MAX_BYTES)
    assert_close(value_and_gradient(tiled, head, params, phi, LABELS), expected, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
  'name,settings', [('het_xl', {}), ('own_kernel', {'max_bytes': MAX_BYTES})], ids=str
)
def test_float32_and_bfloat16_agree_with_float64(name, settings):
  integrator = Integrator(principal_factors=2)
  with jax.enable_x64(True):
    head, params, phi = problem(name, 'sigmoid')
    wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), (params, phi))
    expected = value_and_gradient(integrator, head.clone(dtype=jnp.float64), *wide, LABELS)
    expected = jax.tree.map(np.asarray, expected)
  integrator = dataclasses.replace(integrator, **settings)
  assert_close(value_and_gradient(integrator, head, params, phi, LABELS), expected, 1e-4)
  found = value_and_gradient(integrator, head.clone(dtype=jnp.bfloat16), params, phi, LABELS)
  assert_close(found[0], expected[0], 1e-2)
  assert_close(found[1], expected[1], 5e-2)


@pytest.mark.slow
def test_a_mesh_changes_nothing():
  """Of 13 classes, to which the mesh pads 3 with a W that is not 0."""
  with jax.enable_x64(True):
    arrays = make('shared_w', batch=4)

    def loss(arrays):
      logits = gaussian(arrays, 'shared_w', link='sigmoid')
      return Integrator(principal_factors=2).nll(logits, np.array([2, 12, 0, -1])).sum()

    value, gradient = jax.jit(jax.value_and_grad(loss))(arrays)
    got, got_gradient = sharded(jax.value_and_grad(loss), make_mesh(2, 4))(arrays)
    np.testing.assert_allclose(got, value, rtol=1e-10)
    assert relative_error(got_gradient, gradient) < 1e-9


def test_padded_classes_do_not_count():
  arrays = make('shared_w', dtype=jnp.float32)
  scale = np.where(np.arange(KP) < K, np.float32(1), np.float32(100))
  other = arrays | {'kernel': np.asarray(arrays['kernel']) * scale}

  @jax.jit
  def nll(arrays):
    logits = gaussian(arrays, 'shared_w', link='sigmoid')
    return Integrator(principal_factors=2).nll(logits, pad(MULTI_LABELS))

  np.testing.assert_array_equal(nll(arrays), nll(other))


@pytest.mark.slow
def test_tiles_on_a_mesh():
  head, params, phi = problem('het_xl', 'sigmoid')
  integrator = Integrator(principal_factors=2, max_bytes=MAX_BYTES)
  expected = value_and_gradient(integrator, head, params, phi, LABELS)
  with on_mesh(make_mesh(2, 4)):
    assert_close(value_and_gradient(integrator, head, params, phi, LABELS), expected, 1e-4)


def test_nothing_is_gathered_on_a_mesh():
  integrator = Integrator(principal_factors=2)
  mesh = make_mesh(2, 4)
  inside, outside = collectives(compile_sharded_loss('het_xl', 'sigmoid', integrator, mesh))
  assert not inside and set(outside) == {'all-reduce'}


@pytest.mark.slow
def test_memory_does_not_grow_with_classes():
  small, large = (
    temporary_bytes('het_xl', 'sigmoid', k, max_bytes=2**20, principal_factors=1)
    for k in (2**12, 2**17)
  )
  assert large <= 1.05 * small + 2**15


def test_flops_of_a_factor():
  """6 B D K in the loss and its gradient; m factors cost as much as an exact head of m factors."""
  phi = jax.ShapeDtypeStruct((8, 64), jnp.float32)

  def flops(num_factors, m=None):
    head = heads.HetXL(5000, class_multiple=1, link='sigmoid', num_factors=num_factors)
    params = jax.eval_shape(head.init, jax.random.key(0), phi)

    def loss(params, phi):
      labels = jnp.zeros(8, jnp.int32)
      return Integrator(principal_factors=m).nll(head.apply(params, phi), labels).sum()

    return count_flops(jax.make_jaxpr(jax.grad(loss, (0, 1)))(params, phi).jaxpr)

  few = flops(20, 4)
  more = flops(20, 8)
  assert more - few == pytest.approx(6 * 8 * 4 * 64 * 5000, rel=0.01)
  assert few == pytest.approx(flops(4), rel=0.02)
  assert few < 0.35 * flops(20)


@pytest.mark.parametrize('max_bytes', [2**26, MAX_BYTES])
def test_noise_of_zero_is_det(max_bytes):
  head, params, phi = problem('het_xl', 'sigmoid')
  integrator = Integrator(principal_factors=2, max_bytes=max_bytes)

  def loss(params, scale):
    logits = head.apply({'params': params}, phi)
    noise = logits.covariance
    noise = dataclasses.replace(noise, scale=scale * noise.scale, diag=scale * noise.diag)
    return integrator.nll(dataclasses.replace(logits, covariance=noise), LABELS).sum()

  def loss_of_det(params):
    logits = dataclasses.replace(head.apply({'params': params}, phi), covariance=None)
    return Integrator().nll(logits, LABELS).sum()

  @jax.jit
  def both(params, scale):
    return *jax.value_and_grad(loss)(params, scale), loss_of_det(params)

  value, gradient, expected = both(params, 0.0)
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_one_result_takes_the_same_variances_as_another():
  head, params, phi = problem('het_xl', 'sigmoid')

  @jax.jit
  def found(params):
    logits = head.apply({'params': params}, phi)
    few = Integrator(principal_factors=1)
    nll = few.nll(logits, LABELS)
    entropies = [x.expected_entropy(logits) for x in (few, whole)]
    return few.log_prob(logits)[:, :300], few.log_odds(logits)[:, :300], nll, entropies

  whole = Integrator()
  log_p, log_odds, nll, (entropy, of_whole) = jax.tree.map(np.asarray, found(params))
  p = np.exp(log_p, dtype=np.float64)
  np.testing.assert_allclose(log_odds, np.log(p / (1 - p)), rtol=1e-3, atol=1e-4)
  on = np.zeros((B, 300))
  on[[0, 1, 3], [3, 299, 0]] = 1.0
  expected = -np.log(np.where(on, p, 1 - p)).sum(-1)
  np.testing.assert_allclose(nll, expected, rtol=1e-4)
  assert (entropy != of_whole).all()


@pytest.mark.parametrize('name', ['het_h', 'det'])
def test_other_heads_ignore_it(name):
  head, params, phi = problem(name, 'sigmoid')

  @jax.jit
  def losses(params):
    logits = head.apply({'params': params}, phi)
    return [Integrator(principal_factors=m).nll(logits, jnp.asarray(LABELS)) for m in (1, None)]

  np.testing.assert_array_equal(*losses(params))


@pytest.mark.parametrize('count', [0, -3, 0.5, 8.0, '8'])
def test_factors_are_whole_numbers(count):
  message = f'Integrator.principal_factors={count!r} must be .*at least 1'
  with pytest.raises(ValueError, match=message):
    Integrator(principal_factors=count)
