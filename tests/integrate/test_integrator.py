"""The streamed integrator against a materialised float64 reference: values, gradients, extremes,
memory, sharding.
"""

import dataclasses
import math
import re

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import partitioning
from scipy import special

from het_plugin import heads
from het_plugin.integrate import (
  SAMPLERS,
  GaussianLogits,
  Hashed,
  Integrator,
  Linear,
  LowRank,
  Opaque,
  example_keys,
  iid,
)
from het_plugin.integrate.integrator import MIN_ROTATED
from het_plugin.integrate.sampled_logits import projects_factors
from tests.integrate import reference
from tests.integrate.hlo import collectives, tpu_devices
from tests.meshes import make_mesh, on_mesh

B = 3
D = 6
K = 13
KP = 16
H = 5
R = 4
S = 11
LABELS = [[2], [12], [0]]
MULTI_LABELS = [[2, 7], [12], []]
KINDS = ('identity', 'hash', 'linear')


def pad(labels):
  width = max(1, *(len(ids) for ids in labels))
  return jnp.array([ids + [-1] * (width - len(ids)) for ids in labels], jnp.int32)


def keys_of(num_examples=B):
  return example_keys(jax.random.key(3), jnp.arange(num_examples))


def make(kind, *, full=False, batch=B, dtype=jnp.float64, scale=1.0):
  """Arrays {name: array} of a problem with padded classes."""
  rng = np.random.default_rng(0)
  noise_dim = {'identity': KP, 'hash': H, 'linear': D, 'shared_w': D}[kind]
  arrays = {
    'location': rng.normal(size=(batch, KP)) * scale,
    'loading': rng.normal(size=(batch, R, noise_dim) if full else (R, noise_dim)),
    'diag': rng.uniform(0.1, 1.0, size=(batch, noise_dim)),
    'tau': np.array(0.7),
  }
  if not full:
    arrays['scale'] = rng.normal(size=(batch, noise_dim))
  if kind in ('linear', 'shared_w'):
    arrays['kernel'] = rng.normal(size=(D, KP))
  if kind == 'shared_w':
    arrays['bias'] = arrays.pop('location')[0]
    arrays['phi'] = rng.normal(size=(batch, D)) * scale
  return {name: jnp.asarray(x, dtype) for name, x in arrays.items()}


BUCKETS = np.arange(KP) * 7 % H


def gaussian(arrays, kind, remainder='rank_one', link='softmax'):
  covariance = LowRank(arrays.get('scale'), arrays['loading'], arrays['diag'], remainder)
  projection = None
  if kind == 'hash':
    projection = Hashed(jnp.asarray(BUCKETS))
  elif kind in ('linear', 'shared_w'):
    projection = Linear(arrays['kernel'], arrays.get('phi'), arrays.get('bias'))
  return GaussianLogits(
    location_of(arrays), covariance, projection, arrays['tau'], num_classes=K, link=link
  )


def location_of(arrays):
  if 'phi' in arrays:
    return arrays['phi'] @ arrays['kernel'] + arrays['bias']
  return arrays['location']


def reference_logits(arrays, kind, z):
  covariance = (arrays.get('scale'), arrays['loading'], arrays['diag'])
  kind = 'linear' if kind == 'shared_w' else kind
  logits = reference.sample_logits(
    z, location_of(arrays), covariance, kind, BUCKETS, arrays.get('kernel')
  )
  return logits[:, :, :K]


def dyadic(keys, sample_index, number):
  """A sampler that never rounds: multiples of 2^-14 in [-2, 2), of variance 4/3.

  The last bit of `iid` depends on what its inverse error function is compiled with, so a draw of
  one program can differ from that of another by 1e-7. These cannot: what is left is the
  integrator's own error.
  """

  def one(key, s):
    integers = jax.random.randint(jax.random.fold_in(key, s), (number,), -(2**15), 2**15)
    return integers.astype(jnp.float32) / 2**14

  return jax.vmap(jax.vmap(one, (None, 0)), (0, None))(keys, sample_index)


def draws(arrays, remainder='rank_one', num_samples=S, sampler=dyadic):
  number = R + (1 if remainder == 'rank_one' else arrays['diag'].shape[-1])
  return sampler(keys_of(), jnp.arange(num_samples), number).astype(jnp.float64)


def relative_error(tree, expected):
  expected = jax.tree.map(np.asarray, expected)  # leaves jax before x64 is off again
  difference = jax.tree.map(
    lambda a, b: np.linalg.norm(np.asarray(a, np.float64) - b), tree, expected
  )
  size = jax.tree.map(np.linalg.norm, expected)
  return max(jax.tree.leaves(jax.tree.map(lambda d, s: d / max(s, 1e-12), difference, size)))


@pytest.mark.parametrize(
  'kind,link,full,remainder,labels',
  [
    ('identity', 'softmax', False, 'diag', LABELS),
    ('hash', 'sigmoid', False, 'rank_one', LABELS),
    ('shared_w', 'softmax', False, 'rank_one', LABELS),
    ('linear', 'softmax', True, 'rank_one', MULTI_LABELS),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in (
        ('shared_w', 'sigmoid', True, 'rank_one', MULTI_LABELS),
        ('shared_w', 'softmax', False, 'diag', LABELS),
        ('hash', 'sigmoid', False, 'diag', LABELS),
      )
    ),
  ],
)
def test_nll_and_its_gradient_match_the_float64_reference(kind, link, full, remainder, labels):
  with jax.enable_x64(True):
    arrays = make(kind, full=full)
    weights = np.array([1.0, -2.0, 0.5])

    def expected(arrays):
      logits = reference_logits(arrays, kind, draws(arrays, remainder))
      return reference.nll(logits, arrays['tau'], link, labels) @ weights

    def actual(arrays, max_bytes):
      integrator = Integrator(S, dyadic, max_bytes=max_bytes, method='sample')
      nll = integrator.nll(gaussian(arrays, kind, remainder, link), pad(labels), keys_of())
      return nll @ weights

    budgets = (2**26, 2000)  # at one time, and in tiles of classes and chunks of samples

    @jax.jit
    def found(arrays):
      of_budgets = [jax.value_and_grad(actual)(arrays, budget) for budget in budgets]
      return jax.value_and_grad(expected)(arrays), of_budgets

    (value, gradient), of_budgets = found(arrays)
    for budget, (got, got_gradient) in zip(budgets, of_budgets, strict=True):
      np.testing.assert_allclose(got, value, rtol=1e-10)
      assert relative_error(got_gradient, gradient) < 1e-9, budget


@pytest.mark.slow
@pytest.mark.parametrize(
  'kind,link', [('identity', 'softmax'), ('hash', 'sigmoid'), ('linear', 'softmax')]
)
def test_log_prob_and_its_gradient_match_the_float64_reference(kind, link):
  with jax.enable_x64(True):
    arrays = make(kind)
    z = draws(arrays)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(B, K)))

    def expected(arrays):
      log_p = reference.log_prob(reference_logits(arrays, kind, z), arrays['tau'], link)
      return (weight * log_p).sum(), log_p

    def actual(arrays):
      integrator = Integrator(S, dyadic, max_bytes=2000, method='sample')
      log_p = integrator.log_prob(gaussian(arrays, kind, link=link), keys_of())
      return (weight * log_p[:, :K]).sum(), log_p

    (_, log_p), gradient = jax.jit(jax.value_and_grad(expected, has_aux=True))(arrays)
    (_, got), got_gradient = jax.jit(jax.value_and_grad(actual, has_aux=True))(arrays)
    np.testing.assert_allclose(got[:, :K], log_p, rtol=1e-10)
    assert (got[:, K:] <= -1e29).all()
    assert relative_error(got_gradient, gradient) < 1e-9


@pytest.mark.parametrize(
  'kind,link',
  [
    ('hash', 'softmax'),
    ('hash', 'sigmoid'),
    pytest.param('shared_w', 'softmax', marks=pytest.mark.slow),
  ],
)
def test_expected_entropy_is_that_of_the_samples(kind, link):
  with jax.enable_x64(True):
    arrays = make(kind, scale=3.0)
    logits = gaussian(arrays, kind, link=link)
    budgets = (2**26, 2000)

    @jax.jit
    def found(arrays, logits):
      z = draws(arrays, sampler=iid)
      keys = keys_of()
      of_budgets = [Integrator(S, max_bytes=budget, **settings) for budget in budgets]
      entropies = [integrator.expected_entropy(logits, keys) for integrator in of_budgets]
      alone = logits.replace(covariance=None, projection=None)
      log_p, mean = (of_budgets[-1].log_prob(x, keys)[:, :K] for x in (logits, alone))
      of_alone = of_budgets[-1].expected_entropy(alone, keys)
      return reference_logits(arrays, kind, z), entropies, log_p, mean, of_alone

    settings = {'sampler': 'iid', 'method': 'sample'}
    u, entropies, log_p, mean, of_alone = jax.tree.map(np.asarray, found(arrays, logits))
    u = u / float(arrays['tau'])  # [B, S, K]
    p = special.softmax(u, axis=-1) if link == 'softmax' else special.expit(u)
    entropy = special.entr(p).sum(-1)
    if link == 'sigmoid':
      entropy += special.entr(1 - p).sum(-1)
    for got in entropies:
      np.testing.assert_allclose(got, entropy.mean(axis=1), rtol=1e-5)
    if link == 'softmax':  # the mutual information
      assert (-(np.exp(log_p) * log_p).sum(-1) > got).all()
      np.testing.assert_allclose(of_alone, -(np.exp(mean) * mean).sum(-1), rtol=1e-6)


def test_expected_entropy_of_a_diagonal_remainder_over_a_mesh():
  logits = gaussian(make('identity', dtype=jnp.float32), 'identity', 'diag')
  find = Integrator(num_samples=2, sampler='iid').expected_entropy
  expected = jax.jit(find)(logits, keys_of())
  np.testing.assert_allclose(sharded(find, make_mesh(2, 4))(logits, keys_of()), expected, 1e-5)


def test_expected_entropy_at_the_ends():
  location = np.array([[1e4, 0.0, -1e4, 0.0], [0.0, 0.0, 0.0, 0.0]], np.float32)
  covariance = LowRank(None, np.zeros((2, 1, 4), 'f4'), np.full((2, 4), 1e-3, 'f4'))
  for link in ('softmax', 'sigmoid'):
    logits = GaussianLogits(location, covariance, None, jnp.float32(1.0), 3, link)
    got = jax.jit(Integrator(num_samples=5, sampler='iid').expected_entropy)(logits, keys_of(2))
    certain = 0.0 if link == 'softmax' else np.log(2)  # one class at 0
    even = np.log(3) if link == 'softmax' else 3 * np.log(2)
    np.testing.assert_allclose(got, [certain, even], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('max_bytes,link', [(1000, 'softmax'), (2**26, 'sigmoid')])
def test_opaque_get_logits_agrees_with_shared_w(max_bytes, link):
  """On a mesh too, which 13 classes do not divide over."""
  with jax.enable_x64(True):
    arrays = make('linear')
    phi = jnp.asarray(np.random.default_rng(2).normal(size=(B, D)))
    kernel = arrays['kernel'][:, :K]

    def shared(kernel, phi, covariance):
      location = jnp.pad(phi @ kernel, ((0, 0), (0, KP - K)))
      padded = jnp.pad(kernel, ((0, 0), (0, KP - K)))
      return GaussianLogits(location, covariance, Linear(padded), arrays['tau'], K, link)

    def opaque(kernel, phi, covariance):
      projection = Opaque(phi, kernel, lambda kernel, x: x @ kernel)
      return GaussianLogits(phi @ kernel, covariance, projection, arrays['tau'], K, link)

    def loss(build, *args):
      settings = {'max_bytes': max_bytes, 'sampler': dyadic, 'method': 'sample'}
      integrator = Integrator(num_samples=S, **settings)
      return integrator.nll(build(*args), pad(LABELS), keys_of()).sum()

    covariance = LowRank(arrays['scale'], arrays['loading'], arrays['diag'])
    args = (kernel, phi, covariance)
    step = jax.jit(jax.value_and_grad(loss, (1, 2, 3)), static_argnums=0)
    values = [step(build, *args) for build in (shared, opaque)]
    np.testing.assert_allclose(values[0][0], values[1][0], rtol=1e-12)
    assert relative_error(values[1][1], values[0][1]) < 1e-10
    mesh = make_mesh(1, 8)
    cut = sharded(jax.value_and_grad(lambda *a: loss(opaque, *a), (0, 1, 2)), mesh)(*args)
    np.testing.assert_allclose(cut[0], values[0][0], rtol=1e-12)
    assert relative_error(cut[1], values[0][1]) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize('link', ['softmax', 'sigmoid'])
def test_improbable_labels_keep_their_loss_and_gradient(link):
  """Where averaged probabilities underflow (p below 1e-30) the loss is still exact and still
  pulls.
  """
  location = jnp.zeros((2, KP)).at[:, 1].set(400.0).at[1, 0].set(-900.0)
  arrays = make('identity', dtype=jnp.float32) | {'location': location, 'tau': jnp.float32(1.0)}

  def loss(arrays):
    logits = gaussian(
      jax.tree.map(lambda x: x[:2] if x.shape[:1] == (B,) else x, arrays), 'identity', link=link
    )
    integrator = Integrator(num_samples=S, method='sample', sampler='iid')
    return integrator.nll(logits, jnp.array([[0], [0]]), keys_of(2)).sum()

  value, gradient = jax.jit(jax.value_and_grad(loss))(arrays)
  assert 400.0 + 1300.0 - 30.0 < value < 1800.0 if link == 'softmax' else value > 1200.0
  at_label = np.asarray(gradient['location'][:, 0])
  np.testing.assert_allclose(at_label[0] if link == 'softmax' else at_label[1], -1.0, atol=1e-3)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


def test_probabilities_sum_to_one_at_30k_classes():
  rng = np.random.default_rng(0)
  classes = 29_593
  covariance = LowRank(
    jnp.asarray(rng.normal(size=(1, 8)), jnp.float32),
    jnp.asarray(rng.normal(size=(4, 8)), jnp.float32),
    jnp.ones((1, 8), jnp.float32),
  )
  kernel = jnp.asarray(rng.normal(size=(8, classes)), jnp.float32)
  logits = GaussianLogits(
    jnp.zeros((1, classes)), covariance, Linear(kernel), jnp.float32(1.0), num_classes=classes
  )
  log_p = jax.jit(Integrator(num_samples=32, sampler='iid').log_prob)(logits, keys_of(1))
  np.testing.assert_allclose(np.exp(np.asarray(log_p, np.float64)).sum(), 1.0, atol=1e-5)


def test_deterministic_logits_take_the_closed_form():
  location = np.random.default_rng(0).normal(size=(B, KP)).astype(np.float32)
  for link, expected in (
    ('softmax', special.log_softmax(location[:, :K] / 2.0, axis=-1)),
    ('sigmoid', special.log_expit(location[:, :K] / 2.0)),
  ):
    logits = GaussianLogits(location, None, None, jnp.float32(2.0), num_classes=K, link=link)
    find = jax.jit(Integrator().log_prob)
    np.testing.assert_allclose(find(logits, keys_of())[:, :K], expected, rtol=1e-5)
  nll = jax.jit(Integrator().nll)(logits, pad(LABELS), keys_of())
  off = special.log_expit(-location[:, :K] / 2.0)
  on = expected[np.arange(B), [2, 12, 0]] - off[np.arange(B), [2, 12, 0]]
  np.testing.assert_allclose(nll, -(off.sum(-1) + on), rtol=1e-5)


def test_a_softmax_of_noise_without_factors_is_that_of_its_remainder():
  logits = gaussian(make('identity', full=True, dtype=jnp.float32), 'identity')
  loading = logits.covariance.loading
  labels = pad(LABELS)

  def alike(keys, sample_index, num_normals):
    return jnp.repeat(iid(keys, sample_index, 1), num_normals, axis=-1)

  integrator = Integrator(num_samples=4, sampler=alike)

  @jax.jit
  @jax.value_and_grad
  def found(location, loading):
    covariance = logits.covariance.replace(loading=loading)
    changed = logits.replace(location=location, covariance=covariance)
    return integrator.nll(changed, labels, keys_of()).sum()

  for a, b in zip(
    found(logits.location, loading[:, :0]), found(logits.location, 0.0 * loading), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
  'kind,link,result',
  [
    ('identity', 'softmax', 'nll'),
    ('linear', 'sigmoid', 'nll'),
    ('linear', 'softmax', 'expected_entropy'),
  ],
)
def test_memory_is_that_of_the_budget(kind, link, result):
  """XLA's own account of temporaries of value and gradient; whole, 1,000 take 65 MiB or more."""
  batch = 4
  max_bytes = 2**23
  classes = 1024
  noise_dim = {'identity': 1024, 'linear': 32}[kind]

  def loss(location, scale, loading, diag, kernel, num_samples):
    projection = {'identity': None, 'linear': Linear(kernel)}[kind]
    covariance = LowRank(scale, loading, diag)
    tau = jnp.float32(1.0)
    logits = GaussianLogits(location, covariance, projection, tau, classes, link)
    integrator = Integrator(
      num_samples=num_samples, method='sample', sampler='iid', max_bytes=max_bytes
    )
    if result == 'expected_entropy':
      return integrator.expected_entropy(logits, keys_of(batch)).mean()
    return integrator.nll(logits, jnp.zeros((batch, 1), jnp.int32), keys_of(batch)).mean()

  rows = (batch, noise_dim)
  shapes = [(batch, classes), rows, (50, noise_dim), rows, (32, classes)]
  args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
  step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4)), static_argnums=5)
  for num_samples in (128, 1000):
    memory = step.lower(*args, num_samples).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1.5 * max_bytes, num_samples


# Sharded classes.


@pytest.mark.slow
@pytest.mark.parametrize('link', ['softmax', 'sigmoid'])
def test_the_mesh_may_be_a_callers(link):
  """One with explicit axes, the default of `jax.make_mesh`, or that of a `jax.shard_map`."""
  spec = jax.sharding.PartitionSpec
  args = make('linear', batch=4, dtype=jnp.float32), jnp.arange(4), keys_of(4)
  per_example = ('location', 'diag', 'scale')
  specs = {name: spec('data') if name in per_example else spec() for name in args[0]}
  specs = specs, spec('data'), spec('data')
  integrator = Integrator(MIN_ROTATED, max_bytes=10_000)

  def loss(arrays, labels, keys):
    logits = gaussian(arrays, 'linear', link=link)
    few = dataclasses.replace(integrator, num_samples=3)
    losses = integrator.nll(logits, labels, keys) + few.expected_entropy(logits, keys)
    return losses.mean() - few.log_prob(logits, keys)[:, :K].mean()

  expected = jax.jit(jax.value_and_grad(loss))(*args)
  mesh = make_mesh(2, names=('data',), kind=jax.sharding.AxisType.Explicit)
  placed = jax.device_put(args, jax.tree.map(lambda x: jax.sharding.NamedSharding(mesh, x), specs))
  of_part = jax.shard_map(
    lambda *args: jax.lax.pmean(loss(*args), 'data'),
    mesh=make_mesh(2, names=('data',)),
    in_specs=specs,
    out_specs=spec(),
  )
  for function, given in ((loss, placed), (of_part, args)):
    got = jax.jit(jax.value_and_grad(function))(*given)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), got, expected)


def test_labels_may_be_a_list_on_the_mesh_of_a_caller():
  data = jax.sharding.PartitionSpec('data')
  location = np.arange(4.0 * K, dtype=np.float32).reshape(4, K) % 5

  def loss(location):
    logits = GaussianLogits(location, None, None, jnp.float32(1), K)
    return Integrator().nll(logits, [K - 1] * len(location))

  expected = loss(location)
  mesh = make_mesh(2, names=('data',), kind=jax.sharding.AxisType.Explicit)
  placed = jax.device_put(location, jax.sharding.NamedSharding(mesh, data))
  of_part = jax.shard_map(loss, mesh=mesh, in_specs=data, out_specs=data)
  for function in (loss, of_part):
    np.testing.assert_allclose(jax.jit(function)(placed), expected, rtol=1e-6)


def sharded(function, mesh):
  def run(*args):
    with on_mesh(mesh):
      return jax.jit(function)(*args)

  return run


@pytest.mark.slow
@pytest.mark.parametrize(
  'kind,link,max_bytes',
  [
    ('identity', 'softmax', 500),
    ('hash', 'sigmoid', 2**26),  # the softmax: see test_hashed.py
    ('linear', 'softmax', 500),
    ('shared_w', 'softmax', 2**26),
    ('shared_w', 'sigmoid', 500),
  ],
)
def test_sharded_classes_match_the_float64_reference(kind, link, max_bytes):
  with jax.enable_x64(True):
    arrays = make(kind, batch=4)
    labels = [*LABELS, [7]]
    keys = keys_of(4)
    z = dyadic(keys, jnp.arange(S), R + 1).astype(jnp.float64)

    def expected(arrays):
      return reference.nll(reference_logits(arrays, kind, z), arrays['tau'], link, labels).mean()

    value, gradient = jax.jit(jax.value_and_grad(expected))(arrays)

    def loss(arrays):
      integrator = Integrator(S, dyadic, max_bytes=max_bytes, method='sample')
      return integrator.nll(gaussian(arrays, kind, link=link), pad(labels), keys).mean()

    step = sharded(jax.value_and_grad(loss), make_mesh(2, 4))
    got, got_gradient = step(arrays)
    np.testing.assert_allclose(got, value, rtol=1e-10)
    assert relative_error(got_gradient, gradient) < 1e-9


@pytest.mark.slow
def test_a_diagonal_remainder_of_sharded_classes_has_a_normal_for_each():
  with jax.enable_x64(True):
    arrays = make('identity', batch=4)
    keys = keys_of(4)
    labels = pad([*LABELS, [7]])
    z = np.asarray(jax.jit(dyadic, static_argnums=2)(keys, np.arange(S), R + KP), np.float64)
    location, loading, scale, diag, tau = (
      np.asarray(arrays[name]) for name in ('location', 'loading', 'scale', 'diag', 'tau')
    )
    u = location[:, None] + z[..., :R] @ loading * scale[:, None] + z[..., R:] * diag[:, None]
    p = special.softmax(u[..., :K] / tau, axis=-1).mean(axis=1)
    integrator = Integrator(S, dyadic, max_bytes=2000)
    logits = gaussian(arrays, 'identity', 'diag')
    run = sharded(
      lambda x: (integrator.log_prob(x, keys), integrator.nll(x, labels, keys)), make_mesh(2, 4)
    )
    log_p, nll = map(np.asarray, run(logits))
    np.testing.assert_allclose(np.exp(log_p[:, :K]), p, rtol=1e-10)
    np.testing.assert_allclose(nll, -np.log(p[np.arange(4), np.asarray(labels)[:, 0]]), rtol=1e-10)

  @jax.value_and_grad
  def loss(logits):  # tilted, with draws of its own
    return Integrator(4).nll(logits, labels, keys).mean()

  with jax.enable_x64(False):
    logits = gaussian(make('identity', batch=4, dtype=jnp.float32), 'identity', 'diag')
    one, gradient = jax.jit(loss)(logits)
    many, of_many = sharded(loss, make_mesh(2, 4))(logits)
    np.testing.assert_allclose(one, many, rtol=1e-4)
    assert relative_error(of_many.covariance, gradient.covariance) < 1e-2


def compile_sharded_loss(name, link, integrator, mesh):
  """The compiled loss and gradient of a head: K over 'model', the batch over 'data'."""
  head_class = {'het': heads.Het, 'het_h': heads.HetH, 'het_xl': heads.HetXL}[name]
  head = head_class(1000, num_factors=8, link=link)
  rules = [
    ('batch', 'data'),
    ('vocab', 'model'),
    ('embed', None),
    ('noise', None),
    ('factors', None),
  ]

  def place(x, axes):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, axes))

  def loss(params, phi):
    logits = head.apply({'params': params}, phi)
    labels = jnp.arange(len(phi))[:, None]
    return integrator.nll(logits, labels, keys_of(len(phi))).mean()

  with on_mesh(mesh, rules):
    phi = jax.ShapeDtypeStruct((16, 128), jnp.float32)
    variables = jax.eval_shape(lambda phi: head.init(jax.random.key(0), phi), phi)
    axes = partitioning.get_axis_names(variables['params_axes'])
    axes = jax.tree.map(
      lambda names: partitioning.logical_to_mesh_axes(names),
      axes,
      is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec),
    )
    params = jax.tree.map(place, variables['params'], flax.core.unfreeze(axes))
    phi = place(phi, jax.sharding.PartitionSpec('data'))
    return jax.jit(jax.value_and_grad(loss)).lower(params, phi).compile().as_text()


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:Error reading persistent compilation cache')
@pytest.mark.parametrize(
  'name,link,num_samples',
  [
    *((name, 'softmax', 200) for name in ('het', 'het_h', 'het_xl')),
    ('het_xl', 'softmax', 64),
    ('het', 'softmax', 3),
    ('het_xl', 'sigmoid', 200),
  ],
)
@pytest.mark.parametrize('platform', ['cpu', pytest.param('tpu', marks=pytest.mark.slow)])
def test_shards_do_not_talk_inside_the_sample_loop(platform, name, link, num_samples):
  """On a CPU; and on 8 TPU v5e, compiled for ahead of time. 64 samples are rotated and tilted."""
  devices = tpu_devices() if platform == 'tpu' else jax.devices()
  mesh = jax.sharding.Mesh(np.array(devices).reshape(2, 4), ('data', 'model'))
  sampler = 'sobol' if num_samples == 64 else 'iid'
  integrator = Integrator(num_samples, sampler=sampler, method='sample')
  program = compile_sharded_loss(name, link, integrator, mesh)
  inside, outside = collectives(program)
  assert not inside
  if name == 'het_h' or sampler == 'sobol':
    # H = 128 buckets, and 127 classes of each of 4 shards, may be gathered, 1,000 classes never.
    gathered = re.findall(r'= \w+\[([\d,]+)\]\S* all-gather', program)
    assert all(int(size) <= 4 * 127 for shape in gathered for size in shape.split(','))
    outside = [op for op in outside if op != 'all-gather']
  assert set(outside) == {'all-reduce'}  # nothing else is gathered
  if sampler == 'sobol':
    # The columns of W of few classes [128, 8, 127] stay where they are.
    reduced = re.findall(r'= (.*?) all-reduce(?:-start)?\(', program)
    shapes = [shape for types in reduced for shape in re.findall(r'\[([\d,]+)\]', types)]
    assert max(math.prod(map(int, shape.split(','))) for shape in shapes) < 128 * 8 * 127


def test_cost_model_picks_the_cheaper_order(batch=2, noise_dim=64, classes=512, factors=10):
  v = jnp.zeros((batch, noise_dim))
  covariance = LowRank(v, jnp.zeros((factors, noise_dim)), v)
  kernel = Linear(jnp.zeros((noise_dim, classes)))
  tau = jnp.float32(1)
  wide = GaussianLogits(jnp.zeros((batch, classes)), covariance, kernel, tau, num_classes=classes)
  assert not projects_factors(wide, 4)
  assert projects_factors(wide, 1000)


@pytest.mark.slow
def test_log_prob_over_a_mesh():
  """The only value at all classes that needs two loops there; a batch that the mesh cannot cut."""
  mesh = make_mesh(2, 4)
  with jax.enable_x64(True):
    arrays = make('shared_w')
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(B, K)))

    def loss(arrays):
      integrator = Integrator(S, dyadic, max_bytes=2000)
      return (weight * integrator.log_prob(gaussian(arrays, 'shared_w'), keys_of())[:, :K]).sum()

    value, gradient = jax.jit(jax.value_and_grad(loss))(arrays)
    got, got_gradient = sharded(jax.value_and_grad(loss), mesh)(arrays)
    np.testing.assert_allclose(got, value, rtol=1e-11)
    assert relative_error(got_gradient, gradient) < 1e-10


# Errors.


@pytest.mark.parametrize(
  'arguments,words',
  [
    ({'num_samples': 0}, 'num_samples=0 must be at least 1$'),
    ({'num_samples': 4.0}, 'num_samples=4.0 must be a whole number'),
    ({'max_bytes': 1e9}, 'max_bytes=1000000000.0 must be a whole number, at least 1 or None'),
    ({'principal_factors': 0}, 'principal_factors=0 must be at least 1 or None'),
    ({'method': 'cuda'}, "method='cuda' must be one of 'auto', 'exact', 'sample'"),
    ({'sampler': None}, 'sampler=None must be one of .* or a function'),
    ({'sampler': 'halton'}, "sampler='halton' must be one of 'iid', 'sobol' or a function"),
  ],
)
def test_bad_settings_are_named(arguments, words):
  with pytest.raises(ValueError, match=words):
    Integrator(**arguments)


def test_a_sampler_may_be_added(monkeypatch):
  monkeypatch.setitem(SAMPLERS, 'dyadic', dyadic)
  logits = gaussian(make('linear', dtype=jnp.float32), 'linear')
  named, given = (Integrator(4, sampler=x).log_prob(logits, keys_of()) for x in ('dyadic', dyadic))
  np.testing.assert_array_equal(named, given)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('link', 'max_bytes', 'method'),
  [('softmax', 500, 'nll'), ('softmax', 2**26, 'log_prob'), ('sigmoid', 500, 'nll')],
)
def test_second_derivatives(link, max_bytes, method):
  integrator = Integrator(S, 'iid', 'sample', max_bytes=max_bytes)
  arrays = make('linear', dtype=jnp.float32)

  def loss(tau):
    logits = gaussian(arrays | {'tau': tau}, 'linear', link=link)
    if method == 'nll':
      return integrator.nll(logits, pad(LABELS), keys_of()).sum()
    return integrator.log_prob(logits, keys_of())[:, :K].sum()

  @jax.jit
  def derivatives(tau):
    gradient = jax.grad(loss)
    return *jax.jvp(gradient, (tau,), (jnp.ones_like(tau),)), jax.grad(gradient)(tau)

  tau = np.asarray(arrays['tau'])
  eps = 3e-3 * tau
  (_, forward, reverse), (above, *_), (below, *_) = map(derivatives, (tau, tau + eps, tau - eps))
  np.testing.assert_allclose(forward, (above - below) / (2 * eps), rtol=2e-2)
  np.testing.assert_allclose(reverse, forward, rtol=1e-4)


@pytest.mark.parametrize('link', ['softmax', 'sigmoid'])
def test_one_label_per_example_needs_no_second_dimension(link):
  logits = gaussian(make('linear', dtype=jnp.float32), 'linear', link=link)
  integrator = Integrator(2)
  labels = np.array(LABELS)
  flat = np.array(LABELS)[:, 0]
  given = (labels, jnp.asarray(flat), flat, flat.astype(np.uint8))

  @jax.jit
  def losses(logits):
    return [integrator.nll(logits, x, keys_of()) for x in given]

  expected, *found = losses(logits)
  for x in found:
    np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize('link', ['softmax', 'sigmoid'])
def test_a_label_not_below_k_that_jit_hides_gives_nan(link):
  logits = gaussian(make('linear', dtype=jnp.float32), 'linear', link=link)

  @jax.jit
  def losses(logits, labels):
    return Integrator(2).nll(logits, labels, keys_of())

  for label in (K, KP, 5000):
    found = losses(logits, np.array([2, label, 0]))
    np.testing.assert_array_equal(np.isnan(found), [False, True, False])


def test_fixed_points_of_fixed_points_are_those_of_the_sampler():
  logits = gaussian(make('linear', dtype=jnp.float32), 'linear')
  once = Integrator(8).with_fixed_points(5)
  twice = Integrator(8).with_fixed_points(0)
  twice = twice.with_fixed_points(5)
  find = jax.jit(lambda logits: [x.log_prob(logits, keys_of()) for x in (once, twice)])
  np.testing.assert_array_equal(*find(logits))


def test_fixed_points_may_be_made_first_where_classes_are_sharded():
  logits = gaussian(make('linear', batch=4, dtype=jnp.float32), 'linear')
  fixed = Integrator(2, sampler='sobol').with_fixed_points(11)
  keys = keys_of(4)
  with on_mesh(make_mesh(2, 4)):
    assert jax.eval_shape(lambda x: fixed.nll(x, jnp.arange(4), keys), logits).shape == (4,)


@pytest.mark.parametrize('dtype', [np.int8, np.uint8, np.int64])
def test_labels_may_be_narrow(dtype):
  logits = GaussianLogits(jnp.zeros((2, 300)), None, None, jnp.float32(1.0), num_classes=300)
  nll = jax.jit(Integrator(S).nll)(logits, np.array([1, 100], dtype), keys_of(2))
  np.testing.assert_allclose(nll, np.log(300), rtol=1e-6)


@pytest.mark.parametrize('link', ['softmax', 'sigmoid'])
def test_batches_and_lists_of_labels_may_be_empty(link):
  logits = gaussian(make('linear', dtype=jnp.float32), 'linear', link=link)
  no_labels = np.zeros((B, 0), np.int32)
  none_listed = np.full((B, 1), -1)
  empty = gaussian(make('linear', full=True, batch=0, dtype=jnp.float32), 'linear', link=link)

  @jax.jit
  def of_labels(logits):
    rule = Integrator(2, sampler='iid')
    return [rule.nll(logits, y, keys_of()) for y in (no_labels, none_listed)]

  @jax.jit
  def of_nothing(empty):
    keys = keys_of(0)
    label = none_listed[:0, 0]
    return Integrator(2).nll(empty, label, keys), Integrator(2).log_prob(empty, keys)

  np.testing.assert_array_equal(*of_labels(logits))
  nll, log_p = of_nothing(empty)
  assert (nll.shape, log_p.shape) == ((0,), (0, KP))


@pytest.mark.parametrize(
  'labels,words',
  [
    (
      jnp.array([2.0, 12.0, 0.0]),
      r'labels must be class ids of an integer type; got float32 \(3,\)',
    ),
    (jnp.array([2, 12]), r"labels must be \(3,\) or \(3, 'L'\); got \(2,\)"),
    (jnp.array([2, K, 0]), f'labels hold {K}: class ids are below K = {K}'),
    (np.eye(B, K, dtype=int), rf'labels are \(3, {K}\) of 0 and 1, not class ids: jnp.where'),
    (np.eye(B, K), rf'got float64 \(3, {K}\): jnp.where'),
  ],
)
def test_wrong_labels_are_one_sentence(labels, words):
  logits = gaussian(make('linear', dtype=jnp.float32), 'linear')
  with pytest.raises(ValueError, match=words):
    Integrator(2).nll(logits, labels, keys_of())


def test_zeros_and_ones_are_votes_of_a_softmax_and_refused_of_a_sigmoid():
  logits = gaussian(make('linear', dtype=jnp.float32), 'linear')
  hot = np.tile([1, 1, 0], (B, 5))[:, :K]
  assert Integrator(2).nll(logits, hot, keys_of()).shape == (B,)
  with pytest.raises(ValueError, match='of 0 and 1, not class ids'):
    Integrator(2).nll(logits.replace(link='sigmoid'), hot, keys_of())


def test_impossible_requests_are_named():
  arrays = make('linear', dtype=jnp.float32)
  with pytest.raises(ValueError, match='GaussianLogits.*got ArrayImpl'):
    Integrator().nll(arrays['location'], pad(LABELS))
  for keys in (None, jax.random.key(0), keys_of()[:2], jnp.arange(B)):
    with pytest.raises(ValueError, match=r'need typed keys \[3\], one per example'):
      Integrator(2).log_prob(gaussian(arrays, 'linear'), keys)
  for index in (B, jnp.zeros((B, 1), jnp.int32), jnp.arange(B, dtype=jnp.float32)):
    with pytest.raises(ValueError, match='index must be integers \\[B\\], one per example; got'):
      example_keys(jax.random.key(0), index)
  with pytest.raises(TypeError, match='GaussianLogits.*for an Integrator'):
    jnp.asarray(gaussian(arrays, 'linear'))
  mesh = make_mesh(1, 3)
  with pytest.raises(ValueError, match='class_multiple'):
    sharded(Integrator(2).log_prob, mesh)(gaussian(arrays, 'linear'), keys_of())
  with pytest.raises(ValueError, match='rank_one'):
    gaussian(arrays, 'linear', 'diag').factors()


@pytest.mark.slow
def test_an_exported_loss_of_few_fitted_samples_takes_any_batch_size():
  """Whose draws take the covariance of the noise that explains the label."""
  head = heads.HetXL(K, num_factors=R)
  phi = np.random.default_rng(0).normal(size=(7, D))
  phi = phi.astype(np.float32)
  label = np.arange(7, dtype=np.int32)
  params = jax.jit(head.init)(jax.random.key(0), phi)

  @jax.jit
  def nll(phi, label):
    keys = example_keys(jax.random.key(0), jnp.arange(phi.shape[0]))
    return Integrator(4).nll(head.apply(params, phi), label, keys)

  exported = jax.export.export(nll)(*jax.export.symbolic_args_specs((phi, label), ('b, ...', 'b')))
  program = jax.export.deserialize(exported.serialize())
  # The keys of an example, and so its loss, are the same in a batch of 7.
  np.testing.assert_allclose(program.call(phi[:3], label[:3]), nll(phi, label)[:3], rtol=1e-5)
