"""PredictiveLogits, linen and nnx: a host's own loss of its logits is the heteroscedastic loss."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import export
from scipy import special

import het_plugin.nnx
from het_plugin.heads import Det, Het, HetH, HetXL, LearnedTemperature, PredictiveLogits
from het_plugin.integrate import Integrator, Location, example_keys
from het_plugin.integrate.sigmoid import expected_log_odds
from tests.integrate import quadrature
from tests.params import drawn

B = 4
D = 6
K = 5
PHI = jax.random.normal(jax.random.key(0), (B, D))
LABELS = jnp.array([0, 1, 2, 4])
HEADS = [Det, Het, HetH, HetXL]


def make(head, link='softmax', **settings):
  factors = {} if head is Det else {'num_factors': 2}
  return head(K, link=link, temperature=LearnedTemperature(), **factors, **settings)


def layer_of(head, link='softmax', **settings):
  layer = PredictiveLogits(make(head, link), **settings)
  return layer, drawn(layer.init, PHI)


def both(of_host, ours, params):
  """Values and gradients of two losses, of one program."""
  return jax.jit(lambda p: tuple(jax.value_and_grad(f)(p) for f in (of_host, ours)))(params)


def keys_of(key, size=B):
  return example_keys(key, jnp.arange(size))


def test_log_odds_and_derivatives_against_quadrature():
  """Also where p rounds to 0 or 1: |mu| up to 100."""
  mean, std = np.meshgrid([-100, -60.0, -51, -9, -0.3, 0, 1e-3, 2, 30, 55, 100], [0.0, 0.1, 1, 4])
  mean = mean.ravel()
  std = std.ravel()
  on, off = (
    np.array([quadrature.log_expected_sigmoid(s * m, v) for m, v in zip(mean, std, strict=True)])
    for s in (1, -1)
  )

  def log_odds(mean, std):
    return expected_log_odds(mean, jnp.square(std))

  arguments = jnp.float32(mean), jnp.float32(std)
  value, (by_mean, by_std) = jax.jit(jax.vmap(jax.value_and_grad(log_odds, (0, 1))))(*arguments)
  np.testing.assert_allclose(value, on[:, 0] - off[:, 0], rtol=3e-6, atol=2e-6)
  np.testing.assert_allclose(by_mean, on[:, 1] + off[:, 1], rtol=1e-5)
  np.testing.assert_allclose(by_std, on[:, 2] - off[:, 2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('head', [Det, HetXL, pytest.param(HetH, marks=pytest.mark.slow)])
def test_the_sigmoid_cross_entropy_of_a_host_is_our_loss(head):
  layer, params = layer_of(head, 'sigmoid')
  target = jax.nn.one_hot(LABELS, K)

  def of_host(params):
    logits = layer.apply({'params': params}, PHI)
    assert logits.shape == (B, K) and logits.dtype == jnp.float32
    return optax.sigmoid_binary_cross_entropy(logits, target).sum(-1).mean()

  def ours(params):
    return Integrator().nll(layer.head.apply({'params': params['head']}, PHI), LABELS).mean()

  got, expected = both(of_host, ours, params)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, expected)


@pytest.mark.slow
@pytest.mark.parametrize('head', [Det, HetXL])
def test_the_softmax_cross_entropy_of_a_host_is_our_loss(head):
  """Of soft labels, with the host's own rng."""
  layer, params = layer_of(head, integrator=Integrator(num_samples=16, tilt=False))
  target = optax.smooth_labels(jax.nn.one_hot(LABELS, K), 0.1)
  rng = jax.random.key(3)

  class Keys(nn.Module):  # what linen makes of the stream inside a module
    def __call__(self):
      return self.make_rng('noise')

  def of_host(params):
    logits = layer.apply({'params': params}, PHI, rngs={'noise': rng})
    return optax.softmax_cross_entropy(logits, target).mean()

  def ours(params):
    keys = keys_of(Keys().apply({}, rngs={'noise': rng}))
    logits = layer.head.apply({'params': params['head']}, PHI)
    return -(target * layer.integrator.log_prob(logits, keys)[:, :K]).sum(-1).mean()

  got, expected = both(of_host, ours, params)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)


@pytest.mark.parametrize('link', ['softmax', 'sigmoid'])
def test_the_location_alone(link):
  rule = Location()
  layer, params = layer_of(HetXL, link, integrator=rule)

  @jax.jit
  def found(params):
    logits = layer.head.apply({'params': params['head']}, PHI)
    results = rule.log_prob(logits), rule.nll(logits, LABELS)
    return layer.apply({'params': params}, PHI), logits, *results

  got, logits, expected, nll = jax.tree.map(np.asarray, found(params))
  log_p = special.log_softmax(got, -1) if link == 'softmax' else special.log_expit(got)
  np.testing.assert_allclose(log_p, expected[:, :K], atol=2e-5)
  plain = (logits.location / logits.temperature)[:, :K]
  target = np.eye(K)[np.asarray(LABELS)]
  log_on = special.log_expit(plain)
  log_off = special.log_expit(-plain)
  plain = special.log_softmax(plain, -1)
  np.testing.assert_allclose(log_p, plain if link == 'softmax' else log_on, atol=1e-6)
  of_classes = target * plain
  if link == 'sigmoid':
    of_classes = target * log_on + (1 - target) * log_off
  np.testing.assert_allclose(nll, -of_classes.sum(-1), rtol=1e-5)


def test_sampled_odds_agree_with_exact_ones():
  layer, params = layer_of(HetXL, 'sigmoid')

  @jax.jit
  def found(params):
    logits = layer.head.apply({'params': params['head']}, PHI)
    sampled = Integrator(4096, method='sample').log_odds(logits, keys_of(jax.random.key(0)))
    return logits, sampled, Integrator().log_odds(logits)

  logits, sampled, exact = found(params)
  np.testing.assert_allclose(sampled[:, :K], exact[:, :K], atol=0.02)
  with pytest.raises(ValueError, match="log_odds needs the link 'sigmoid'"):
    Integrator().log_odds(logits.replace(link='softmax'))


def test_noise_comes_from_the_stream_or_is_fixed():
  layer, params = layer_of(HetXL, integrator=Integrator(num_samples=2))

  dropout = PredictiveLogits(layer.head, layer.integrator, rng_collection='dropout')

  @jax.jit
  def found(params):
    def run(phi=PHI, layer=layer, **rngs):
      return layer.apply({'params': params}, phi, rngs=rngs)

    return {
      'fixed': (run(), run()),
      'streams': [run(noise=jax.random.key(seed)) for seed in (1, 2)],
      'raw': run(noise=jax.random.PRNGKey(1)),  # a key of the old kind
      'same': run(jnp.broadcast_to(PHI[:1], PHI.shape)),
      'dropout': run(layer=dropout, dropout=jax.random.key(1)),
    }

  found = jax.tree.map(np.asarray, found(params))
  fixed, again = found['fixed']
  one, two = found['streams']
  same = found['same']
  np.testing.assert_array_equal(fixed, again)
  assert np.abs(one - two).max() > 1e-3
  np.testing.assert_array_equal(found['raw'], one)
  assert np.abs(same[0] - same[1]).max() > 1e-3  # each row has its own draws
  assert np.abs(found['dropout'] - fixed).max() > 1e-3


@pytest.mark.slow
def test_what_a_host_can_log():
  layer, params = layer_of(HetXL)
  apply = jax.jit(functools.partial(layer.apply, mutable=['intermediates']))
  logits, state = apply({'params': params}, PHI)
  (gaussian,), (entropy,) = (
    state['intermediates'][name] for name in ('gaussian_logits', 'expected_entropy')
  )
  assert jax.eval_shape(lambda: gaussian.factors()).shape == (B, 3, 128)
  total = -(np.exp(logits) * logits).sum(-1)
  assert ((entropy > 0) & (entropy < total)).all()
  variables = layer.init(jax.random.key(1), PHI)
  assert set(variables) == {'params', 'params_axes'}
  # As Keras's FlaxLayer calls a module: the collections are then those of `init`.
  of_keras = functools.partial(layer.apply, mutable=nn.DenyList('params'))
  assert set(jax.eval_shape(of_keras, variables, PHI)[1]) == {'params_axes'}


class Host(nn.Module):
  """A backbone with BatchNorm under somebody's own classifier."""

  classifier: nn.Module

  @nn.compact
  def __call__(self, x, train):
    x = nn.BatchNorm(use_running_average=not train)(nn.Dense(D)(x))
    return self.classifier(nn.Dropout(0.1, deterministic=not train)(nn.relu(x)))


@pytest.mark.slow
def test_a_host_with_batch_norm_and_dropout_learns():
  host = Host(PredictiveLogits(make(HetXL)))
  init = jax.jit(functools.partial(host.init, train=False))
  variables = init(jax.random.key(0), PHI)
  params = variables['params']
  stats = variables['batch_stats']
  optimizer = optax.adam(1e-2)

  @jax.jit
  def step(params, stats, state, key):
    def loss(params):
      rngs = {'dropout': key, 'noise': jax.random.fold_in(key, 1)}
      logits, new = host.apply(
        {'params': params, 'batch_stats': stats}, PHI, True, rngs=rngs, mutable=['batch_stats']
      )
      value = optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean()
      return value, new['batch_stats']

    (value, stats), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), stats, state, value

  state = optimizer.init(params)
  losses = []
  before = stats
  for i in range(60):
    params, stats, state, value = step(params, stats, state, jax.random.key(i))
    losses.append(value)
  assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5])
  assert np.abs(stats['BatchNorm_0']['mean'] - before['BatchNorm_0']['mean']).max() > 0


@pytest.mark.slow
@pytest.mark.parametrize('link', ['softmax', 'sigmoid'])
def test_export_with_a_symbolic_batch(link):
  layer, params = layer_of(HetXL, link, integrator=Integrator(num_samples=2))
  (batch,) = export.symbolic_shape('b')
  phi = jax.ShapeDtypeStruct((batch, D), jnp.float32)
  apply = jax.jit(lambda phi: layer.apply({'params': params}, phi))
  program = export.export(apply)(phi)
  for size in (1, 4):
    expected = apply(PHI[:size])
    np.testing.assert_allclose(program.call(PHI[:size]), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  'make_layer, message',
  [
    (lambda: PredictiveLogits(HetXL), 'head=.*must be a linen module: HetXL'),
    (lambda: PredictiveLogits(make(Det), 64), 'integrator=64 must be an Integrator'),
    (lambda: PredictiveLogits(nn.Dense(3)).init(jax.random.key(0), PHI), 'returned ArrayImpl'),
    (lambda: het_plugin.nnx.PredictiveLogits(make(Det)), 'must be an nnx module'),
    (
      lambda: het_plugin.nnx.PredictiveLogits(het_plugin.nnx.Det(D, K, rngs=nnx.Rngs(0)), 64),
      'integrator=64 must be an Integrator',
    ),
    (
      lambda: het_plugin.nnx.PredictiveLogits(nnx.Linear(D, K, rngs=nnx.Rngs(0)))(PHI),
      'returned ArrayImpl',
    ),
    (
      lambda: het_plugin.nnx.Det(D, K, rngs=nnx.Rngs(0), sharding_rules={'classes': 'model'}),
      'sharding_rules has classes: the logical axes are',
    ),
    (lambda: het_plugin.nnx.Det(D, 0, rngs=nnx.Rngs(0)), 'num_classes=0'),
    (lambda: het_plugin.nnx.Det(0, K, rngs=nnx.Rngs(0)), 'Det.in_features=0 must be D'),
    (lambda: het_plugin.nnx.Det(D, K, rngs=None), 'Det.rngs is .*NoneType.*must be nnx.Rngs'),
    (
      lambda: het_plugin.nnx.PredictiveLogits(
        het_plugin.nnx.Det(D, K, rngs=nnx.Rngs(0)), rngs=jax.random.key(0)
      ),
      'PredictiveLogits.rngs is .*must be nnx.Rngs',
    ),
    (lambda: het_plugin.nnx.Det(D + 1, K, rngs=nnx.Rngs(0))(PHI), f'Det.in_features={D + 1} must'),
  ],
)
def test_wrong_arguments_are_one_sentence(make_layer, message):
  with pytest.raises(ValueError, match=message):
    make_layer()


def nnx_head(head, seed=0, **settings):
  factors = {} if head is Det else {'num_factors': 2}
  of_nnx = getattr(het_plugin.nnx, head.__name__)
  temperature = LearnedTemperature()
  return of_nnx(D, K, rngs=nnx.Rngs(seed), temperature=temperature, **factors, **settings)


@pytest.mark.slow
@pytest.mark.parametrize('head', HEADS)
def test_nnx_heads_are_the_linen_heads(head):
  """The same parameters by name, logits and gradients."""
  ours = nnx_head(head)
  definition = make(head)
  params = nnx.to_pure_dict(nnx.state(ours, nnx.Param))
  shapes = jax.eval_shape(definition.init, jax.random.key(0), PHI)['params']
  assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, dict(shapes))

  def loss(logits):
    return Integrator(num_samples=2).nll(logits, LABELS, keys_of(jax.random.key(2))).mean()

  got = nnx.jit(nnx.grad(lambda head: loss(head(PHI))))(ours)
  expected = jax.jit(jax.grad(lambda p: loss(definition.apply({'params': p}, PHI))))(params)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
    nnx.to_pure_dict(got),
    expected,
  )


@pytest.mark.slow
def test_an_nnx_classifier_in_the_place_of_w():
  head = het_plugin.nnx.HetXL(
    D, K, num_factors=2, get_logits=nnx.Linear(D, K, rngs=nnx.Rngs(1)), rngs=nnx.Rngs(0)
  )
  integrator = Integrator(num_samples=2, max_bytes=1)
  keys = keys_of(jax.random.key(2))
  grad = nnx.jit(nnx.grad(lambda head: integrator.nll(head(PHI), LABELS, keys).mean()))
  gradient = nnx.to_pure_dict(grad(head))
  assert set(gradient) == {'covariance', 'get_logits'}
  assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_nnx_trains_without_new_traces_and_evaluates_with_fixed_noise():
  rngs = nnx.Rngs(0)
  head = het_plugin.nnx.HetXL(D, K, num_factors=2, rngs=rngs)
  layer = het_plugin.nnx.PredictiveLogits(head, Integrator(num_samples=2), rngs=rngs)
  optimizer = nnx.Optimizer(layer, optax.adam(0.1), wrt=nnx.Param)
  traces = []

  @nnx.jit
  def step(layer, optimizer):
    traces.append(1)

    def loss(layer):
      return optax.softmax_cross_entropy_with_integer_labels(layer(PHI), LABELS).mean()

    value, gradient = nnx.value_and_grad(loss)(layer)
    optimizer.update(layer, gradient)
    return value

  losses = [float(step(layer, optimizer)) for _ in range(10)]
  assert losses[-1] < 0.5 * losses[0] and len(traces) == 1
  assert np.abs(layer(PHI) - layer(PHI)).max() > 0
  np.testing.assert_array_equal(layer(PHI, deterministic=True), layer(PHI, deterministic=True))
  fixed = nnx.view(layer, deterministic=True)
  np.testing.assert_array_equal(fixed(PHI), fixed(PHI))
  given = [layer(PHI, rngs=nnx.Rngs(noise=1)) for _ in range(2)]
  np.testing.assert_array_equal(*given)

  forward = nnx.capture(lambda layer, phi: layer(phi), nnx.Intermediate)
  _, found = forward(layer, PHI)
  assert set(nnx.to_pure_dict(found)) == {'gaussian_logits', 'expected_entropy'}


@pytest.mark.slow
def test_nnx_parameters_lie_on_the_mesh_that_rules_name():
  mesh = jax.make_mesh((2, 4), ('data', 'model'))
  with jax.set_mesh(mesh):
    head = nnx_head(HetXL, sharding_rules=[('vocab', 'model'), ('embed', 'data')], class_multiple=8)
    spec = head.kernel.get_value().sharding.spec
    assert tuple(spec) == ('data', 'model')
    assert head.covariance.J.get_value().sharding.is_fully_replicated

    @nnx.jit
    def loss(head, phi):
      return Integrator(num_samples=2).nll(head(phi), LABELS, keys_of(jax.random.key(2)))

    got = loss(head, PHI)
  alone = loss(nnx_head(HetXL, class_multiple=8), PHI)
  np.testing.assert_allclose(got, alone, rtol=1e-4)
