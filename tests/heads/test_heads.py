"""The heads: parameter counts, the paper's equations, padding, temperature, logical axes, dtypes,
exports, errors.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import partitioning
from jax import export

from het_plugin.heads import (
  Det,
  FixedTemperature,
  Het,
  HetH,
  HetXL,
  LearnedTemperature,
  class_buckets,
  least_noise,
  noise_in_directions,
)
from het_plugin.integrate import Integrator, example_keys, iid
from tests.params import drawn

B = 3
D = 6
K = 13
R = 4
H = 5
M = 7
S = 9
HEADS = {
  'det': Det(K, class_multiple=8),
  'het': Het(K, num_factors=R, class_multiple=8),
  'het_h': HetH(K, num_factors=R, num_buckets=H, class_multiple=8),
  'het_xl': HetXL(K, num_factors=R, class_multiple=8),
  'het_xl_own': HetXL(K, num_factors=R, noise_dim=M, class_multiple=8),
}
PHI = jax.random.normal(jax.random.key(0), (B, D))
INDEX = jnp.arange(B)


def size(tree):
  return sum(x.size for x in jax.tree.leaves(tree))


def init(head, *inputs):
  """Parameters with every bias away from zero, so that none of them can be forgotten."""
  return drawn(head.init, *(inputs or [PHI]))


def shapes_of(head):
  return jax.eval_shape(head.init, jax.random.key(0), PHI)


@pytest.mark.parametrize('factor_bias', [False, True])
def test_parameter_counts_are_the_papers(factor_bias):
  temperature = LearnedTemperature()
  learned = 1
  bias = factor_bias
  expected = {
    'het': 2 * (D + 1) * K + R * K + bias * K,
    'het_h': 2 * (D + 1) * H + R * H + bias * H,
    'het_xl': 2 * D * (D + 1) + R * D + bias * D,
    'het_xl_own': 2 * (D + 1) * M + R * M + bias * M + M * K,
  }
  det = HEADS['det'].clone(temperature=temperature, class_multiple=1)
  assert det.extra_params(D) == learned
  assert size(shapes_of(det)['params']) == det.num_params(D) == (D + 1) * K + learned
  for name, extra in expected.items():
    head = HEADS[name].clone(temperature=temperature, class_multiple=1, factor_bias=factor_bias)
    assert head.extra_params(D) == extra + learned, name
    assert size(shapes_of(head)['params']) == head.num_params(D), name


def test_het_xl_of_the_paper_adds_what_table_3_says():
  """ResNet152x1 on ImageNet-21k: 102.9M -> 111.4M with HET-XL, -> 193.5M with HET (with the
  reference's factor bias).
  """
  classes = 21_843
  dim = 2048
  assert round(HetXL(classes, factor_bias=True).extra_params(dim) / 1e6, 1) == 8.5
  assert round((102.9e6 + Het(classes, factor_bias=True).extra_params(dim)) / 1e6, 1) == 193.5


def numpy_forward(name, params, z, factor_bias):
  """Logits [B, S, K] in float64 from the equations, one example at a time."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  phi = np.asarray(PHI, np.float64)
  z = np.asarray(z, np.float64)
  c = p['covariance']
  v = phi @ c['v_kernel'] + c['v_bias']
  d = np.log1p(np.exp(phi @ c['d_kernel'] + c['d_bias'])) + 1e-3
  loading = c['J']
  logits = []
  for b in range(B):
    low_rank = z[b, :, :R] @ loading + (c['J_bias'] if factor_bias else 0.0)
    eps = v[b] * low_rank + d[b] * z[b, :, R:]  # [S, Q]
    if name == 'het_xl':
      logits.append((phi[b] + eps) @ p['kernel'] + p['bias'])
    elif name == 'het_xl_own':
      logits.append(phi[b] @ p['kernel'] + p['bias'] + eps @ p['noise_kernel'])
    elif name == 'het_h':
      logits.append(phi[b] @ p['kernel'] + p['bias'] + eps[:, class_buckets(16, H)])
    else:
      logits.append(phi[b] @ p['kernel'] + p['bias'] + eps)
  return np.stack(logits)[:, :, :K]


@pytest.mark.parametrize(
  'name, factor_bias',
  [('het', True), ('het_h', False), ('het_xl', False), ('het_xl_own', False)],
)
def test_heads_follow_their_equations(name, factor_bias):
  head = HEADS[name].clone(factor_bias=factor_bias, temperature=FixedTemperature(0.6))
  params = init(head)
  keys = example_keys(jax.random.key(5), jnp.arange(B))

  @jax.jit
  def found(params):
    logits = head.apply({'params': params}, PHI)
    of_budgets = [Integrator(S, 'iid', max_bytes=x).log_prob(logits, keys) for x in (2**26, 999)]
    return iid(keys, jnp.arange(S), R + 1), of_budgets

  z, of_budgets = found(params)
  logits = numpy_forward(name, params, z, factor_bias) / 0.6
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  expected = np.log(np.exp(log_p).mean(axis=1))
  for got in of_budgets:
    np.testing.assert_allclose(got[:, :K], expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
  'name, link',
  [('det', 'softmax'), ('het', 'sigmoid'), ('het_h', 'softmax'), ('het_xl', 'sigmoid')],
)
def test_padding_gets_no_gradient_and_every_real_parameter_does(name, link):
  head = HEADS[name].clone(link=link, temperature=LearnedTemperature())
  params = init(head)
  keys = example_keys(jax.random.key(5), jnp.arange(B))

  def loss(params):
    logits = head.apply({'params': params}, PHI)
    return Integrator(S, sampler='iid').nll(logits, jnp.array([[0], [7], [12]]), keys).mean()

  gradient = jax.jit(jax.grad(loss))(params)
  for path, g in jax.tree_util.tree_leaves_with_path(gradient):
    assert np.isfinite(g).all(), path
    assert np.abs(g).max() > 0, path
    if g.ndim and g.shape[-1] == 16:
      np.testing.assert_array_equal(g[..., K:], 0.0)


def test_learned_temperature_follows_eq_16():
  head = Det(K, temperature=LearnedTemperature())
  params = head.init(jax.random.key(0), PHI)['params']
  assert params['temperature']['t'] == 0.0
  np.testing.assert_allclose(head.apply({'params': params}, PHI).temperature, 2.525, rtol=1e-6)
  for tau_0 in (0.06, 1.25, 4.9):
    head = Det(K, temperature=LearnedTemperature(initial_tau=tau_0))
    params = head.init(jax.random.key(0), PHI)['params']
    np.testing.assert_allclose(head.apply({'params': params}, PHI).temperature, tau_0, rtol=1e-5)
  for t, bound in ((-40.0, 0.05), (40.0, 5.0)):
    got = head.apply({'params': {**params, 'temperature': {'t': jnp.float32(t)}}}, PHI).temperature
    np.testing.assert_allclose(got, bound, rtol=1e-6)


def test_initial_bias_makes_the_first_loss_independent_of_tau():
  """With sigmoid and -10 the loss of a wide multi-label head starts near 10 for its one label,
  whatever tau_0.
  """
  labels = np.zeros((B, 1), np.int32)
  keys = example_keys(jax.random.key(0), jnp.arange(B))

  def loss_of(phi, tau_0):
    temperature = LearnedTemperature(initial_tau=tau_0)
    head = Det(5000, link='sigmoid', initial_bias=-10.0, temperature=temperature)
    logits, _ = head.init_with_output(jax.random.key(0), phi)
    return Integrator().nll(logits, labels, keys)

  losses = jax.jit(lambda phi: [loss_of(phi, tau_0) for tau_0 in (0.5, 2.525, 4.5)])
  for loss in losses(np.zeros(PHI.shape, np.float32)):
    np.testing.assert_allclose(loss, 10 + 5000 * np.exp(-10), rtol=1e-2)


def test_hash_is_fixed_and_even():
  """A checkpoint of HET-H means something only with the same hash."""
  buckets = class_buckets(30_000, 128)
  np.testing.assert_array_equal(class_buckets(8, 5), [0, 0, 0, 3, 3, 3, 2, 2])
  counts = np.bincount(buckets, minlength=128)
  assert counts.min() > 150 and counts.max() < 320  # 234 expected, standard deviation 15


def test_buckets_without_a_class_change_no_logit():
  head = HetH(K, num_factors=R, num_buckets=40, class_multiple=8)
  params = init(head)
  short = head.clone(empty_buckets=False)
  used = head.used_buckets(D)
  assert set(used) == set(class_buckets(K, 40)) and short.extra_params(D) < head.extra_params(D)
  cut = {name: np.asarray(x)[..., used] for name, x in params['covariance'].items()}

  @jax.jit
  def both(params, cut):
    logits = short.apply({'params': params | {'covariance': cut}}, PHI)
    return logits.factors(), head.apply({'params': params}, PHI).factors()

  found, expected = both(params, cut)
  np.testing.assert_allclose(found[..., :K], expected[..., :K], rtol=1e-6)


@pytest.mark.slow
def test_het_xl_with_its_affine_loading_is_the_same():
  head = HEADS['het_xl']
  labels = jnp.arange(B)
  integrator = Integrator(2)
  params = init(head)
  keys = example_keys(jax.random.key(2), labels)

  def loss(params, loading):
    logits = head.apply({'params': params}, PHI, *loading(params))
    return integrator.nll(logits, labels, keys).sum()

  step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
  plain = step(params, lambda params: ())
  once = step(params, lambda params: (head.affine_loading(params),))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), plain, once)
  for change in ({'parametrization': 'full'}, {'factor_bias': True}, {'noise_dim': M}):
    assert head.clone(**change).affine_loading(params) is None


@pytest.mark.parametrize('parametrization', ['efficient', 'full'])
def test_noise_starts_in_given_directions(parametrization):
  head = HEADS['het'].clone(parametrization=parametrization)
  params = init(head)
  directions = np.random.default_rng(0).normal(size=(R + 1, head.padded_classes))

  @jax.jit
  def factors(noise):
    return head.apply({'params': params | {'covariance': noise}}, PHI).factors()

  noise = noise_in_directions(params['covariance'], directions)
  assert jax.tree.map(np.shape, noise) == jax.tree.map(np.shape, dict(params['covariance']))
  found = factors(noise)[:, :R]
  expected = directions[:R] / np.sqrt(R)
  for row in found:
    assert np.vdot(row, expected) / np.linalg.norm(row) / np.linalg.norm(expected) > 0.8
  small = noise_in_directions(params['covariance'], directions, phi_size=1e6)  # of much larger phi
  np.testing.assert_allclose(factors(small)[:, :R], np.stack([expected] * B), rtol=1e-3, atol=1e-5)
  assert np.abs(factors(least_noise(params['covariance']))).max() < 2e-3


class OwnLogits(nn.Module):
  features: int

  @nn.compact
  def __call__(self, phi):
    return nn.Dense(self.features)(jnp.tanh(phi))


@pytest.mark.slow
def test_opaque_get_logits_as_module_and_as_function():
  keys = example_keys(jax.random.key(5), jnp.arange(B))
  labels = jnp.array([[1], [2], [3]])
  integrator = Integrator(num_samples=S, max_bytes=1000, sampler='iid')
  head = HetXL(K, num_factors=R, get_logits=OwnLogits(K))
  params = init(head)
  assert set(params) == {'covariance', 'get_logits'}
  assert head.extra_params(D) == size(params['covariance'])

  def with_module(params):
    return integrator.nll(head.apply({'params': params}, PHI), labels, keys).mean()

  def with_function(params):
    own = {'params': params['get_logits']}
    head = HetXL(K, num_factors=R, get_logits=lambda x: OwnLogits(K).apply(own, x))
    rest = {'params': {'covariance': params['covariance']}}
    return integrator.nll(head.apply(rest, PHI), labels, keys).mean()

  value, gradient = jax.jit(jax.value_and_grad(with_module))(params)
  other, other_gradient = jax.jit(jax.value_and_grad(with_function))(params)
  np.testing.assert_allclose(value, other, rtol=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradient, other_gradient
  )
  assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(gradient))
  once, again = (
    jax.tree.structure(jax.eval_shape(head.apply, {'params': params}, PHI)) for _ in range(2)
  )
  assert once == again  # a jitted nll does not compile again
  first = HetXL(2, num_factors=R, get_logits=lambda phi: phi[:, :2])  # whose trace knows its shape

  @jax.jit
  def nll(covariance):
    logits = first.apply({'params': {'covariance': covariance}}, PHI)
    return integrator.nll(logits, labels % 2, keys)

  assert np.isfinite(nll(params['covariance'])).all()


def test_every_parameter_carries_logical_axes():
  for name, head in HEADS.items():
    variables = shapes_of(head.clone(temperature=LearnedTemperature()))
    axes = partitioning.get_axis_names(variables['params_axes'])
    assert jax.tree.structure(axes, is_leaf=lambda x: isinstance(x, tuple)).num_leaves == len(
      jax.tree.leaves(variables['params'])
    ), name
    assert axes['kernel'] == jax.sharding.PartitionSpec('embed', 'vocab')
  axes = partitioning.get_axis_names(shapes_of(HEADS['het'])['params_axes'])
  assert axes['covariance']['J'] == jax.sharding.PartitionSpec('factors', 'vocab')


@pytest.mark.slow
@pytest.mark.parametrize('name', ['het', 'het_h', 'het_xl_own'])  # have all that the others have
def test_parameters_may_be_cast_to_bfloat16(name):
  """As in mixed precision that casts all parameters of a model."""
  head = HEADS[name].clone(temperature=LearnedTemperature())
  keys = example_keys(jax.random.key(2), jnp.arange(B))

  @jax.jit
  @jax.value_and_grad
  def loss(params):
    logits = head.apply({'params': params}, PHI)
    return Integrator(S, sampler='iid').nll(logits, jnp.arange(B), keys).mean()

  params = init(head)
  narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  value, gradients = loss(narrow)
  assert value.dtype == jnp.float32 and abs(value - loss(params)[0]) < 0.02
  assert {x.dtype for x in jax.tree.leaves(gradients)} == {jnp.dtype(jnp.bfloat16)}


def test_bfloat16_products_give_float32_logits(name='het_xl'):
  head = HEADS[name].clone(dtype=jnp.bfloat16)
  params = init(head)
  keys = example_keys(jax.random.key(5), jnp.arange(B))

  @jax.jit
  def found(params):
    both = (x.apply({'params': params}, PHI) for x in (head, HEADS[name]))
    return [Integrator(S, sampler='iid').log_prob(logits, keys) for logits in both]

  got, exact = found(params)
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got[:, :K], exact[:, :K], atol=0.2)


# For a softmax 64 points share 8 draws; 40 are drawn around the fit, in chunks.
INTEGRALS = [('softmax', 'sample', 8), ('softmax', 'sample', 40), ('sigmoid', 'sample', 8)]
INTEGRALS.append(('sigmoid', 'exact', 1))


def make_integrator(name, method, num_samples):
  sampled = {'sampler': 'sobol', 'method': method}
  return Integrator(num_samples, **({} if name == 'det' else sampled))


@pytest.mark.slow
@pytest.mark.parametrize(
  'name,link,method,num_samples',
  [
    ('het_h', *INTEGRALS[0]),
    *((name, *INTEGRALS[1]) for name in ('det', 'het_xl')),
    ('het_xl', *INTEGRALS[2]),
    *((name, *INTEGRALS[3]) for name in ('het', 'het_xl_own')),  # HET-H's: test_exact, test_hashed
  ],
)
def test_float64_and_any_mix_of_dtypes(name, link, method, num_samples):
  """Types for each dtype of phi and of the head, values and gradients where they are the same."""
  integrator = make_integrator(name, method, num_samples)
  weight = np.random.default_rng(0).normal(size=(B, K))

  def run(phi_dtype, dtype, params):
    head = HEADS[name].clone(link=link, dtype=dtype)

    @functools.partial(jax.value_and_grad, argnums=(1, 2), has_aux=True)
    def losses(integrator, params, phi):
      logits = head.apply({'params': params}, phi)
      keys = example_keys(jax.random.key(2), INDEX)
      log_prob = integrator.log_prob(logits, keys)[:, :K]
      nll = integrator.nll(logits, INDEX, keys)
      entropy = integrator.expected_entropy(logits, keys)
      return (weight * log_prob).sum() + (nll - 2.0 * entropy).sum(), (log_prob, nll, entropy)

    arguments = params, jnp.asarray(PHI, phi_dtype)
    (_, values), gradients = jax.eval_shape(functools.partial(losses, integrator), *arguments)
    assert {x.dtype for x in values} == {jnp.dtype(dtype)}
    types = jax.tree.map(lambda x: x.dtype, (arguments, gradients))
    assert types[0] == types[1]
    if phi_dtype != dtype:
      return None
    # Rotations magnify the rounding of float32 in directions with hardly any noise.
    steady = dataclasses.replace(integrator, rotate=False, tilt=num_samples == 40)
    return jax.jit(functools.partial(losses, steady))(*arguments)

  params = init(HEADS[name])
  with jax.enable_x64(True):
    run(jnp.float32, jnp.float64, params)
    run(jnp.float64, jnp.float32, params)
    expected, got = (run(dtype, dtype, params) for dtype in (jnp.float64, jnp.float32))
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * (1e-3 + np.abs(y).max()))


@pytest.mark.slow
@pytest.mark.parametrize(
  'name,link,method,num_samples',
  [
    ('het_xl', *INTEGRALS[1]),
    *((name, *INTEGRALS[3]) for name in ('het_h', 'het_xl_own')),
  ],
)
def test_an_export_takes_any_batch_size(name, link, method, num_samples):
  """`jax.export` with a symbolic B, of what a served model computes, and of the loss.

  tests/commands/test_serve.py has predictions by samples.
  """
  head = HEADS[name].clone(link=link, temperature=LearnedTemperature())
  params = init(head)
  integrator = make_integrator(name, method, num_samples)

  @jax.jit
  def predict(params, phi, labels):
    logits = head.apply({'params': params}, phi)
    keys = example_keys(jax.random.key(2), jnp.arange(phi.shape[0]))
    nll = integrator.nll(logits, labels, keys[:1])
    if method == 'sample':
      return (nll,)
    return integrator.log_prob(logits, keys), integrator.expected_entropy(logits, keys), nll

  shapes = export.symbolic_args_specs((PHI, INDEX), ('b, ...', 'b'))
  program = export.export(predict)(params, *shapes)
  got = program.call(params, PHI, INDEX)
  expected = predict(params, PHI, INDEX)
  for x, y in zip(got, expected, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  'head,words',
  [
    (Det(K, link='probit'), "link='probit'"),
    (Det(6.0), r'Det\.num_classes=6\.0 must be a whole number, at least 1'),
    (Det('6'), r"Det\.num_classes='6' must be a whole number"),
    (Det(K, class_multiple=4.0), r'Det\.class_multiple=4\.0 must be a whole number'),
    (Het(K, num_factors=2.0), r'Het\.num_factors=2\.0 must be a whole number'),
    (
      HetH(K, num_buckets=3.0),
      r'HetH\.num_buckets=3\.0 must be a whole number, at least 1 or None',
    ),
    (HetXL(K, noise_dim=3.0), r'HetXL\.noise_dim=3\.0 must be a whole number, at least 1 or None'),
    (HetXL(K, dtype='bf16'), r"HetXL\.dtype='bf16' must be a floating type such as 'float32'"),
    (Det(K, dtype='float64'), r"Det\.dtype='float64' would be float32, because jax_enable_x64 is"),
    (Det(K, dtype=jnp.int8), r'Det\.dtype=.*int8.* must be a floating type'),
    (Het(K, parametrization='dense'), "one of 'efficient', 'full'"),
    (Het(K, parametrization='full', factor_bias=True), 'factor_bias'),
    (HetXL(K, noise_dim=4, get_logits=len), 'noise_dim or HetXL.get_logits'),
    (HetXL(K, get_logits=lambda phi: phi), 'get_logits returned'),
    (
      Det(K, temperature=LearnedTemperature(tau_min=5.0, tau_max=0.05)),
      'tau_min=5.0 and tau_max=0.05',
    ),
    (
      Det(K, temperature=LearnedTemperature(tau_max=float('inf'), initial_tau=1.0)),
      'tau_max=inf must satisfy 0 < tau_min < tau_max, both finite',
    ),
    (Det(K, temperature=FixedTemperature(float('inf'))), r'tau=inf must be in \(0, inf\)'),
  ],
)
def test_bad_settings_are_one_sentence(head, words):
  with pytest.raises(ValueError, match=words) as error:
    head.init(jax.random.key(0), PHI)
  assert '\n' not in str(error.value)


def test_a_temperature_is_a_module():
  with pytest.raises(TypeError, match='positional'):
    LearnedTemperature(1.0)  # no initial_tau, which is not its first field
  with pytest.raises(ValueError, match='temperature=0.5 must be a module: FixedTemperature'):
    Det(K, temperature=0.5)


def test_initial_noise_scale_scales_the_noise_at_the_start():
  phi = jax.random.normal(jax.random.key(3), (256, D))

  def factors(scale):
    head = HEADS['het_xl'].clone(initial_noise_scale=scale)
    logits, _ = head.init_with_output(jax.random.key(1), phi)
    return np.asarray(logits.factors())  # [B, R + 1, Kp]

  reference = factors(1.0)
  small = factors(0.1)
  np.testing.assert_allclose(small[:, :R], 0.1 * reference[:, :R], rtol=1e-5, atol=1e-7)
  remainder = np.abs(small[:, R]).mean() / np.abs(reference[:, R]).mean()
  assert 0.05 < remainder < 0.25  # a softplus is not homogeneous
