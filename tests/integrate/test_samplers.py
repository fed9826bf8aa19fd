"""Samplers: their distribution, the Sobol points against scipy's, and what they are
worth inside the integrator.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special
from scipy.stats import kstest, norm, qmc

from het_plugin.integrate import (
  SAMPLERS,
  GaussianLogits,
  Integrator,
  Linear,
  LowRank,
  example_keys,
  iid,
  shared_key,
  sobol,
)
from het_plugin.integrate.directions import Draws, principal_directions, rotation_to, turned_to
from het_plugin.integrate.samplers import (
  DIRECTION_NUMBERS,
  MAX_DIMENSIONS,
  normal_quantile,
  sobol_points,
)
from tests.meshes import make_mesh, on_mesh

every_sampler = pytest.mark.parametrize('sampler', SAMPLERS.values(), ids=SAMPLERS)


def keys_of(num_examples, seed=3):
  return example_keys(jax.random.key(seed), jnp.arange(num_examples))


@every_sampler
def test_each_sample_is_standard_normal_over_keys(sampler):
  """Any fixed sample index, not only the average over the sequence: hence no bias at any S."""
  sample = jax.jit(lambda keys: sampler(keys, jnp.array([0, 1, 5, 1000]), 3))
  z = np.asarray(sample(keys_of(4000)))  # [4000, 4, 3]
  for index in range(4):
    for dimension in range(3):
      assert kstest(z[:, index, dimension], norm.cdf).pvalue > 1e-4
    correlation = np.corrcoef(z[:, index], rowvar=False) - np.eye(3)
    assert np.abs(correlation).max() < 5 / np.sqrt(4000)


@every_sampler
def test_a_draw_depends_on_key_and_index_alone(sampler):
  index = np.arange(11)

  @jax.jit
  def found(keys):
    return (
      sampler(keys, index, 6),
      [sampler(keys, x, 6) for x in np.split(index, [4, 8])],
      sampler(keys, jnp.array([9, 2]), 6),  # no constant, as indices of a chunk are
      sampler(keys[1:2], index, 6),
      jax.vmap(lambda key: sampler(key[None], index, 6)[0])(keys),
    )

  whole, chunks, some, of_one, mapped = jax.tree.map(np.asarray, found(keys_of(3)))
  np.testing.assert_array_equal(whole, np.concatenate(chunks, axis=1))
  np.testing.assert_array_equal(whole[:, [9, 2]], some)
  np.testing.assert_array_equal(whole[1:2], of_one)
  np.testing.assert_array_equal(whole, mapped)
  assert not np.array_equal(whole[0], whole[1])


@pytest.mark.parametrize('impl', ['threefry2x32', 'rbg', 'unsafe_rbg'])
def test_keys_of_any_kind_give_draws_that_do_not_depend_on_the_batch(impl):
  key = jax.random.key(3, impl=impl)
  keys = example_keys(key, jnp.arange(3))
  alone = example_keys(key, jnp.arange(1, 2))
  index = np.arange(2)
  np.testing.assert_array_equal(iid(keys, index, 3)[1:2], iid(alone, index, 3))


@pytest.mark.parametrize('keys_of_one', [shared_key, lambda key: example_keys(key, jnp.arange(4))])
def test_a_seed_is_no_key(keys_of_one):
  assert (keys_of_one(jax.random.PRNGKey(3)) == keys_of_one(jax.random.key(3))).all()
  keys = jax.random.split(jax.random.key(0), 4)
  for key, found in ((0, 'int'), (None, 'NoneType'), (jnp.arange(2), 'int32'), (keys, 'key<fry>')):
    with pytest.raises(ValueError, match=f'key must be one PRNG key, such as .*; got {found}'):
      keys_of_one(key)


def test_a_sampler_of_a_user_gets_jax_arrays():
  def sampler(keys, index, num_normals):
    return iid(keys, index.at[0].set(5), num_normals)

  noise = LowRank(None, jnp.ones((2, 1, 3)), jnp.ones((2, 3)))
  logits = GaussianLogits(jnp.zeros((2, 3)), noise, None, jnp.float32(1), 3)
  assert jnp.isfinite(Integrator(2, sampler).nll(logits, jnp.array([0, 2]), keys_of(2))).all()


def test_sobol_points_are_those_of_scipy():
  j = np.arange(2048)
  expected = qmc.Sobol(MAX_DIMENSIONS, scramble=False, bits=32).random(len(j)) * 2.0**32
  actual = sobol_points(jnp.asarray(j ^ (j >> 1)), DIRECTION_NUMBERS)
  np.testing.assert_array_equal(actual, expected.astype(np.uint32))


@functools.cache
def sobol_512():
  """Of two keys, in more dimensions than Sobol's."""
  return np.asarray(jax.jit(lambda keys: sobol(keys, np.arange(512), 80))(keys_of(2)))


def test_scrambled_sobol_fills_every_interval_once():
  """Scrambling keeps the net: each of 256 equal intervals holds one of 256 points."""
  uniform = norm.cdf(np.asarray(sobol_512()[:, :256, :MAX_DIMENSIONS], np.float64))
  cells = np.sort(np.floor(uniform * 256).astype(int), axis=1)
  np.testing.assert_array_equal(cells, np.broadcast_to(np.arange(256)[:, None], cells.shape))


def test_sobol_tails_are_finite_and_symmetric(monkeypatch):
  """The extreme bit patterns, which no draw of a test would meet."""
  points = jnp.array([[0, 511, 2**32 - 1, 2**31, 2**31 - 1]], jnp.uint32)
  monkeypatch.setattr(sobol.__module__ + '.sobol_points', lambda index, directions: points)
  monkeypatch.setattr(jax.random, 'bits', lambda key, shape, dtype: jnp.zeros(shape, dtype))
  lowest, also_lowest, highest, above, below = np.asarray(sobol(keys_of(1), jnp.arange(1), 5))[0, 0]
  assert lowest == also_lowest == -highest and above == -below > 0
  np.testing.assert_allclose(highest, -norm.ppf(2.0**-24), rtol=1e-5)


def test_the_quantile_is_that_of_scipy_also_in_the_tails():
  """At every point of Sobol's tails, and at some of the others; `jax.lax.erf_inv` is 6e-6 off."""
  from_end = np.concatenate([np.arange(2**15), np.arange(2**15, 2**22, 101)])
  rest = (from_end + 0.5) * 2.0**-22  # 1 - |x|, exact in float32
  expected = -special.ndtri(rest / 2)
  for sign in (1, -1):
    found = np.asarray(normal_quantile(jnp.asarray(sign * (1 - rest), jnp.float32)))
    np.testing.assert_allclose(found, sign * expected, rtol=4e-7)
  draws = iid(keys_of(9), jnp.arange(50), 20)
  keys = jax.vmap(lambda key: jax.vmap(lambda s: jax.random.fold_in(key, s))(jnp.arange(50)))
  normal = jax.vmap(jax.vmap(lambda key: jax.random.normal(key, (20,))))
  np.testing.assert_allclose(draws, normal(keys(keys_of(9))), atol=3e-5)


def test_sobol_beyond_its_dimensions_goes_on_with_independent_normals():
  z = sobol_512()
  with_fewer = jax.jit(lambda keys: sobol(keys, np.arange(512), MAX_DIMENSIONS))(keys_of(2))
  np.testing.assert_array_equal(z[..., :MAX_DIMENSIONS], with_fewer)
  assert kstest(z[..., 64:].ravel(), norm.cdf).pvalue > 1e-4


# In the integrator.

B = 2
K = 10
R = 3


def noisy(scale):
  rng = np.random.default_rng(0)
  location = rng.normal(size=(B, K))
  v = scale * rng.normal(size=(B, K))
  loading = rng.normal(size=(R, K))
  diag = scale * rng.uniform(0.5, 1.0, size=(B, K))
  location, *noise = (jnp.asarray(x, jnp.float32) for x in (location, v, loading, diag))
  return GaussianLogits(location, LowRank(*noise), None, jnp.float32(1.0), K)


def all_factors(logits):
  """Factors in logit space in numpy, [B, T, K]."""
  covariance = logits.covariance
  projection = logits.projection
  scale, loading, diag = map(np.asarray, (covariance.scale, covariance.loading, covariance.diag))
  rest = (
    diag[:, None] if covariance.remainder == 'rank_one' else diag[:, None] * np.eye(diag.shape[1])
  )
  factors = np.concatenate([scale[:, None] * loading, rest], axis=1)
  return factors if projection is None else factors @ np.asarray(projection.kernel)


def log_p_of_all(logits, num_draws):
  """log p of every class [B, K] in numpy: Sobol points along the principal directions of the noise,
  and independent normals beyond Sobol's dimensions.
  """
  location = np.asarray(logits.location)
  factors = np.asarray(all_factors(logits))
  log_p = []
  for u, f in zip(location, factors, strict=True):
    f = np.linalg.svd(f, full_matrices=False)
    f = f[1][:, None] * f[2]
    rng = np.random.default_rng(0)
    dim = min(len(f), MAX_DIMENSIONS)
    points = qmc.Sobol(dim, rng=rng).random(num_draws)
    z = np.concatenate([norm.ppf(points), rng.normal(size=(num_draws, len(f) - dim))], axis=1)
    of_draws = special.log_softmax(u + z.astype(np.float32) @ f, axis=1)
    log_p.append(special.logsumexp(of_draws, axis=0) - np.log(num_draws))
  return np.array(log_p)


def log_p_of_label(location, factors, labels):
  """log p of one label per example [B] in numpy: Sobol points around the mode of the noise that
  explains the label, which Newton's method finds.
  """
  log_p = []
  for u, f, label in zip(np.float64(location), np.float64(factors), labels, strict=True):
    mode = np.zeros(len(f))
    eye = np.eye(len(f))

    def value(z, u=u, f=f, label=label):
      return special.log_softmax(u + z @ f, axis=-1)[..., label] - np.square(z).sum(-1) / 2

    for _ in range(30):
      p = special.softmax(u + mode @ f)
      precision = eye + (f * p) @ f.T - np.outer(f @ p, f @ p)
      step = np.linalg.solve(precision, f[:, label] - f @ p - mode)
      while value(mode + step) < value(mode) - 1e-9:
        step = step / 2
      mode = mode + step
    root = np.linalg.cholesky(0.4 * precision + 0.6 * eye)  # wider than the posterior
    points = norm.ppf(qmc.Sobol(len(f), rng=np.random.default_rng(0)).random(2**13))
    weight = np.square(points).sum(-1) / 2 - np.log(np.diag(root)).sum()
    at = value(mode + np.linalg.solve(root.T, points.T).T)
    log_p.append(special.logsumexp(at + weight) - np.log(len(points)))
  return np.array(log_p)


@pytest.mark.slow
def test_variance_is_reduced():
  """Mean squared error of p at S = 64, over many keys: none above iid's, and far below it on a
  smooth integrand (small noise).
  """

  @jax.jit
  def found(logits):
    keys = jax.vmap(lambda seed: keys_of(B, seed))(jnp.arange(200))
    integrators = {name: Integrator(num_samples=64, sampler=name) for name in SAMPLERS}
    return {
      name: jax.vmap(integrator.log_prob, (None, 0))(logits, keys)
      for name, integrator in integrators.items()
    }

  for scale, gain in ((0.3, 8.0), (2.0, 1.0)):
    logits = noisy(scale)
    exact = np.exp(log_p_of_all(logits, 2**16))
    errors = {}
    for name, log_p in found(logits).items():
      p = np.exp(log_p)
      np.testing.assert_allclose(p.mean(axis=0), exact, atol=5e-3)  # all of them, without bias
      errors[name] = np.square(p - exact).mean()
    assert errors['sobol'] * gain < errors['iid'], scale


# Rotation.


def make_rotated(std=0.5, remainder='rank_one'):
  """Logits of 300 classes whose noise has a few strong directions, none along a coordinate."""
  rng = np.random.default_rng(0)
  loading = rng.normal(size=(50, 8)) @ rng.normal(size=(8, 300)) / np.sqrt(8)
  loading += 0.05 * rng.normal(size=loading.shape)
  scale = std / np.sqrt(np.square(loading).sum(0).mean())
  covariance = LowRank(
    jnp.asarray(np.full((B, 300), scale, np.float32)),
    jnp.asarray(loading, jnp.float32),
    jnp.asarray(np.full((B, 300), 0.05, np.float32)),
    remainder,
  )
  location = jnp.asarray(2 * rng.normal(size=(B, 300)), jnp.float32)
  return GaussianLogits(location, covariance, None, jnp.float32(1.0), 300)


def test_rotation_is_orthogonal_and_leads_with_the_principal_directions():
  logits = make_rotated()

  @jax.jit
  def found(logits):
    directions = principal_directions(logits.location, logits.factors())
    draws = Draws(None, rotation_to(directions))
    eye = jnp.eye(51)[None]
    turned = turned_to(draws.rotation, jnp.broadcast_to(eye, (B, 51, 51)))
    return draws.normals(lambda *_: eye, None, 51), turned, logits.factors()

  u, turned, factors = map(np.asarray, found(logits))  # rows are U's columns
  np.testing.assert_allclose(turned, u, atol=1e-5)
  p = special.softmax(np.asarray(logits.location), axis=-1)
  np.testing.assert_allclose(u @ np.swapaxes(u, 1, 2), np.tile(np.eye(51), (B, 1, 1)), atol=1e-5)
  centred = factors - np.einsum('btk,bk->bt', factors, p)[..., None]
  a = np.einsum('btk,bk,buk->btu', centred, p, centred)
  captured = np.einsum('bmt,btu,bmu->b', u[:, :8], a, u[:, :8])
  best = np.linalg.eigvalsh(a)[:, -8:].sum(-1)
  assert (captured > 0.98 * best).all()


@pytest.mark.slow
@pytest.mark.parametrize('remainder', ['rank_one', 'diag'])
def test_rotated_sobol_of_64_samples_is_better_than_1000_independent_ones(remainder):
  logits = make_rotated(remainder=remainder)

  @jax.jit
  def found(logits):
    keys = jax.vmap(lambda seed: keys_of(B, seed))(jnp.arange(8))
    plain = Integrator(64, sampler='sobol', rotate=False)
    integrators = Integrator(64, sampler='sobol'), Integrator(1000, sampler='iid'), plain
    return [jax.vmap(x.log_prob, (None, 0))(logits, keys) for x in integrators]

  expected = log_p_of_all(logits, 2**14)
  p = np.exp(expected)
  squares = [np.square(log_p - expected) for log_p in found(logits)]
  rotated, independent, plain = (np.sqrt((p * x).sum(-1).mean()) for x in squares)
  assert rotated < independent
  assert rotated < 0.8 * plain


# Tilt.


@pytest.mark.slow
def test_tilted_loss_of_64_samples_is_better_than_1000_independent_ones():
  """Of a diagonal remainder; that of rank one is below."""
  logits = make_rotated(remainder='diag')
  expected = log_p_of_all(logits, 2**14)
  draws = expected[:, None] + np.random.default_rng(0).gumbel(size=(B, 8, 300))
  labels = draws.argmax(axis=-1).T  # [8, B]

  @jax.jit
  def found(logits):
    keys = jax.vmap(lambda seed: keys_of(B, seed))(jnp.arange(8))
    plain = Integrator(64, sampler='sobol', tilt=False)
    integrators = Integrator(64, sampler='sobol'), Integrator(1000, sampler='iid'), plain
    return [jax.vmap(x.nll, (None, 0, 0))(logits, labels, keys) for x in integrators]

  at_label = expected[np.arange(B), labels]
  tilted, independent, plain = (np.sqrt(np.square(x + at_label).mean()) for x in found(logits))
  assert tilted < 0.7 * independent
  assert tilted < 0.7 * plain


@pytest.mark.slow
@pytest.mark.parametrize('num_samples', [4, 17])  # no quarter of the points of 17 is a whole number
def test_tilt_is_unbiased_also_for_the_least_probable_label(num_samples):
  logits = make_rotated(std=2.0)
  label = log_p_of_all(logits, 2**14).argmin(axis=-1)
  expected = log_p_of_label(logits.location, all_factors(logits), label)

  @jax.jit
  def found(logits, label):
    keys = jax.vmap(lambda seed: keys_of(B, seed))(jnp.arange(512))
    nll = Integrator(num_samples, sampler='sobol').nll
    return jax.vmap(nll, (None, None, 0))(logits, label, keys)

  ratio = np.exp(-np.asarray(found(logits, label), np.float64) - expected)
  error = ratio.std(axis=0) / np.sqrt(len(ratio))
  assert (np.abs(ratio.mean(axis=0) - 1) < 4 * error + 0.03).all()
  assert (error < 0.1).all()


@functools.cache
def losses_of(*settings):
  integrators = [Integrator(number, sampler=sampler) for number, sampler in settings]

  def found(logits, labels, seeds):
    keys = jax.vmap(lambda seed: keys_of(len(labels), seed))(seeds)
    # Fewer of many samples, which take most of the time.
    counts = [len(seeds) if x.num_samples < 1000 else 8 for x in integrators]
    nll = [jax.vmap(x.nll, (None, None, 0)) for x in integrators]
    return [f(logits, labels, keys[:count]) for f, count in zip(nll, counts, strict=True)]

  return jax.jit(found)


@pytest.mark.slow
@pytest.mark.parametrize(
  'kind,factors,classes',
  [
    ('het', 4, 700),
    ('het', 50, 700),
    ('het_xl', 4, 700),
    ('het_xl', 50, 700),
    ('het_xl', 12, 20_000),
  ],
)
def test_few_samples_beside_1000_independent_ones(kind, factors, classes):
  """On heads drawn anew, with labels of the head, for noise from 0.1 to 4. Only HET
  errs more than 1,000 independent ones, at 4. With 20,000 classes, one size is enough for a test.
  """
  rng = np.random.default_rng(factors)
  batch = 8
  dim = 48
  width = classes if kind == 'het' else dim
  noise = rng.normal(size=(batch, width)), rng.normal(size=(factors, width))
  noise = *noise, np.logaddexp(rng.normal(size=(batch, width)), 0.0)
  covariance = LowRank(*(jnp.asarray(x, jnp.float32) for x in noise))
  kernel = jnp.asarray(rng.normal(size=(dim, classes)), jnp.float32)
  logits = GaussianLogits(
    jnp.asarray(rng.normal(size=(batch, classes)) * 2, jnp.float32),
    covariance,
    None if kind == 'het' else Linear(kernel),
    jnp.float32(1.0),
    classes,
  )
  size = np.sqrt(np.square(all_factors(logits)).sum(1).mean())
  for std in (0.1, 0.5, 1.0, 2.0, 4.0) if classes < 20_000 else (1.0,):
    of_size = logits.replace(covariance=covariance.scaled(std / size))
    factors_of_all = np.asarray(all_factors(of_size))
    drawn = (rng.normal(size=(batch, 1, factors + 1)) @ factors_of_all)[:, 0]
    labels = (np.asarray(logits.location) + drawn + rng.gumbel(size=drawn.shape)).argmax(axis=1)
    expected = log_p_of_label(logits.location, factors_of_all, labels)
    settings = (4, 'sobol'), (8, 'sobol'), (16, 'sobol'), (1000, 'iid')
    nll = losses_of(*settings)(of_size, labels, jnp.arange(32))
    few, eight, more, independent = (np.sqrt(np.square(x + expected).mean()) for x in nll)
    assert few < (0.9 if std <= 2 else 1.6) * independent, (std, few, independent)
    assert more < 1.1 * eight < 1.21 * few, (std, few, eight, more)  # within their own error


@pytest.mark.slow
def test_gradient_of_tilted_loss_is_that_of_the_integral():
  """Of a probability of about 1e-33; the reference is a sum over a grid in float64."""
  location = np.array([0.0, -78.0, 1.0])
  factor = np.array([[0.5, 1.5, -0.5]])
  z = np.linspace(-14, 14, 20001)[:, None]

  def log_p(location, factor):
    u = location + z * factor
    log_p = u[:, 1] - np.logaddexp.reduce(u, axis=1) - z[:, 0] ** 2 / 2
    return np.logaddexp.reduce(log_p) - np.log(np.exp(-(z**2) / 2).sum())

  def loss(location, factor):
    covariance = LowRank(jnp.ones((1, 3)), factor, jnp.zeros((1, 3)))
    logits = GaussianLogits(location[None], covariance, None, jnp.float32(1.0), 3)
    return Integrator(4096, sampler='sobol').nll(logits, jnp.array([1]), keys_of(1)).sum()

  args = jnp.asarray(location, jnp.float32), jnp.asarray(factor, jnp.float32)
  value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(*args)
  np.testing.assert_allclose(value, -log_p(location, factor), rtol=1e-3)
  point = np.stack([location, factor[0]])
  for i, k in np.ndindex(2, 3):
    step = np.zeros_like(point)
    step[i, k] = 1e-4
    up, down = (log_p(x[0], x[1:]) for x in (point + step, point - step))
    np.testing.assert_allclose(gradients[i].ravel()[k], (down - up) / 2e-4, rtol=0.02, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize('num_samples,factors', [(32, 5), (4, 30)])  # 32 points share 4 draws
def test_tiles_and_a_mesh_take_the_same_samples(num_samples, factors):
  rng = np.random.default_rng(1)
  location, scale = (jnp.asarray(rng.normal(size=(B, n)), jnp.float32) for n in (300, 20))
  loading, kernel = (
    jnp.asarray(rng.normal(size=n), jnp.float32) for n in ((factors, 20), (20, 300))
  )

  def loss(max_bytes, location, kernel):
    covariance = LowRank(scale, loading / 10, jnp.ones((B, 20)))
    logits = GaussianLogits(location, covariance, Linear(kernel), jnp.float32(1.0), 300)
    integrator = Integrator(num_samples, max_bytes=max_bytes)
    return integrator.nll(logits, jnp.arange(B) * 100, keys_of(B)).sum()

  step = jax.value_and_grad(loss, (1, 2))
  expected = jax.jit(functools.partial(step, 2**26))(location, kernel)
  with on_mesh(make_mesh(2, 4)):
    found = jax.jit(functools.partial(step, 3000))(location, kernel)
  for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


@functools.cache
def tilted_and_plain(num_samples):
  integrators = [Integrator(num_samples, tilt=tilt) for tilt in (True, False)]
  return jax.jit(lambda *args: [x.nll(*args, keys_of(len(args[1]))) for x in integrators])


@pytest.mark.slow
@pytest.mark.parametrize('num_samples', [8, 64])
@pytest.mark.parametrize(
  'std, label_at', [(30.0, 0.0), (100.0, 0.0), (30.0, -10.0), (100.0, -10.0)]
)
def test_noise_of_many_taus_does_not_collapse_the_tilted_loss(num_samples, std, label_at):
  """Beside a sum over 200,000 draws in float64: without the mixture p is 0.003 to 0.9 of it."""
  rng = np.random.default_rng(0)
  classes = 10
  factors = 5
  keys = 256
  location = rng.normal(size=classes)
  location[0] = label_at
  noise = rng.normal(size=(factors + 1, classes)) * std / np.sqrt(factors + 1)
  z = rng.normal(size=(200_000, factors + 1))
  expected = special.softmax(location + z @ noise, axis=1)[:, 0].mean()

  def many(x):
    return np.broadcast_to(x, (keys, *x.shape)).astype(np.float32)

  covariance = LowRank(None, many(noise[:-1]), many(noise[-1]))
  logits = GaussianLogits(many(location), covariance, None, np.float32(1.0), classes)
  losses = tilted_and_plain(num_samples)(logits, np.zeros(keys, np.int32))
  ratios = [np.exp(-np.asarray(nll, np.float64)) / expected for nll in losses]
  found = ratios[0]
  rmse = [np.sqrt(np.square(np.log(x)).mean()) for x in ratios]
  assert abs(found.mean() - 1) < 4 * found.std() / np.sqrt(keys) + 0.02
  assert rmse[0] < 2 * rmse[1] + 0.1


def test_huge_noise_is_finite():
  """Also where all classes share most of it, which changes no softmax."""

  def loss(location, covariance):
    of = dataclasses.replace(make_rotated(), location=location, covariance=covariance)
    return Integrator(8).nll(of, jnp.zeros(B, jnp.int32), keys_of(B)).sum()

  step = jax.jit(jax.value_and_grad(loss, (0, 1)))
  for std, common in ((1e4, 0.0), (1e6, 0.0), (100.0, 1e4)):
    logits = make_rotated(std=std)
    loading = np.asarray(logits.covariance.loading) + np.float32(common)
    found = step(logits.location, dataclasses.replace(logits.covariance, loading=loading))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
