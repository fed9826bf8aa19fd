"""The softmax over a batch against a float64 reference: values, gradients, meshes, chunks, masks,
memory.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from het_plugin.heads import symmetric_nll
from het_plugin.heads.noisy_batch import batch_nll
from het_plugin.integrate import Integrator, LowRank, example_keys, iid, shared_key
from tests.integrate.hlo import collectives
from tests.meshes import make_mesh, on_mesh

B = 16
D = 6
R = 3
KEY = jax.random.key(7)


@functools.partial(jax.jit, static_argnames=('batch', 'dim', 'full', 'scale'))
def make(batch=B, *, dim=D, full=True, scale=1.0):
  """Arrays that gradients flow to, float32: rows and columns of about unit length, noise, tau."""
  keys = iter(jax.random.split(jax.random.key(0), 8))
  rows, noise = (jax.random.normal(next(keys), (batch, dim)) * dim**-0.5 for _ in range(2))
  shape = (batch, R, dim) if full else (R, dim)
  return {
    'rows': rows,
    'columns': 0.5 * rows + noise,
    'covariance': LowRank(
      None if full else 0.5 * jax.random.normal(next(keys), (batch, dim)),
      0.5 * jax.random.normal(next(keys), shape),
      0.3 * jnp.abs(jax.random.normal(next(keys), (batch, dim))),
    ),
    'tau': jnp.float32(0.3 / scale),
  }


def weights_of(batch=B):
  """Cotangents, none like another, of both directions."""
  return jax.random.normal(jax.random.key(9), (2, batch))


def deterministic(arrays, weights, mask=None, **settings):
  both = symmetric_nll(arrays['rows'], arrays['columns'], arrays['tau'], mask, **settings)
  return sum(jnp.sum(w * x.nll) for w, x in zip(weights, both, strict=True))


def noisy(arrays, weights, mask=None, *, num_samples, keys=None, integrator=None, **settings):
  batch = len(arrays['rows'])
  keys = example_keys(KEY, jnp.arange(batch)) if keys is None else keys
  integrator = integrator or Integrator(num_samples=num_samples, sampler='iid')
  names = ('rows', 'covariance', 'columns', 'tau')
  return jnp.sum(
    weights[0] * batch_nll(integrator, *(arrays[n] for n in names), mask, keys, **settings)
  )


# The reference: float64, everything materialised, pairs that do not count taken out beforehand.


def log_softmax(u, axis):
  u = u - jax.lax.stop_gradient(u.max(axis, keepdims=True))
  return u - jnp.log(jnp.exp(u).sum(axis, keepdims=True))


def reference_deterministic(arrays, weights):
  u = arrays['rows'] @ arrays['columns'].T / arrays['tau']
  return -sum(
    jnp.sum(w * jnp.diag(log_softmax(u, axis))) for w, axis in zip(weights, (1, 0), strict=True)
  )


def reference_noisy(arrays, weights, *, z, post_normalization=False):
  c = arrays['covariance']
  loading = c.loading if c.scale is None else c.loading[None] * c.scale[:, None]
  eps = (
    jnp.stack([x[:, :R] @ v for x, v in zip(z, loading, strict=True)])
    + z[..., R:] * c.diag[:, None]
  )
  samples = arrays['rows'][:, None] + eps  # [B, S, D]
  if post_normalization:
    samples = samples / jnp.sqrt(jnp.sum(samples**2, -1, keepdims=True))
  u = jnp.stack([x @ arrays['columns'].T for x in samples]) / arrays['tau']
  own = jnp.einsum('isi->is', log_softmax(u, 2))
  log_p = jax.scipy.special.logsumexp(own, axis=1) - jnp.log(u.shape[1])
  return -jnp.sum(weights[0] * log_p)


def expected(reference, arrays, weights, mask=None, z=None, **settings):
  """(value, gradient) in float64; 0 for what belongs to pairs that do not count."""
  keep = np.arange(weights.shape[1]) if mask is None else np.flatnonzero(mask)
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (arrays, weights, z))
    return jax.tree.map(np.asarray, reference_step(reference, tuple(keep), **settings)(*wide))


@functools.cache
def reference_step(reference, keep, **settings):
  def loss(arrays, weights, z):
    pairs = np.array(keep)
    batched = functools.partial(is_batched, arrays)
    arrays = jax.tree.map_with_path(lambda p, x: x[pairs] if batched(p) else x, arrays)
    more = settings if z is None else {'z': z[pairs], **settings}
    return reference(arrays, weights[:, pairs], **more)

  return jax.jit(jax.value_and_grad(loss))


def is_batched(arrays, path):
  """Whether a leaf has a row a pair: all but tau and the J of the efficient form."""
  name = jax.tree_util.keystr(path)
  return name != "['tau']" and not (
    name.endswith('loading') and arrays['covariance'].loading.ndim < 3
  )


def assert_close(got, want, tolerance=2e-6):
  """Each leaf's error relative to its largest entry."""

  def check(path, x, y):
    error = np.abs(np.asarray(x, np.float64) - y).max() / max(np.abs(y).max(), 1e-3)
    assert error < tolerance, f'{jax.tree_util.keystr(path)}: {error}'

  jax.tree.map_with_path(check, got, want)


def sharded(shape, function, *args):
  with on_mesh(make_mesh(*shape)):
    return jax.jit(function)(*args)


# Deterministic.


@pytest.mark.slow
@pytest.mark.parametrize('chunk_bytes,masked', [(2**26, False), (4 * B * 7, True), (1, False)])
def test_symmetric_nll_and_its_gradient(chunk_bytes, masked):
  """In one block, in chunks that do not divide the batch, row by row."""
  arrays = make()
  weights = weights_of()
  mask = (jnp.arange(B) % 3 != 1).astype(jnp.float32) if masked else None
  want = expected(reference_deterministic, arrays, weights, mask)
  loss = functools.partial(deterministic, mask=mask, chunk_bytes=chunk_bytes)
  assert_close(jax.jit(jax.value_and_grad(loss))(arrays, weights), want)


@pytest.mark.parametrize('shape,chunk_bytes', [((8, 1), 1), ((2, 4), 2**26)])
def test_symmetric_nll_over_a_mesh(shape, chunk_bytes):
  arrays = make()
  weights = weights_of()
  mask = jnp.arange(B) != 5
  want = expected(reference_deterministic, arrays, weights, mask)
  loss = functools.partial(deterministic, mask=mask, chunk_bytes=chunk_bytes)
  assert_close(sharded(shape, jax.value_and_grad(loss), arrays, weights), want)


@pytest.mark.slow
@pytest.mark.parametrize('batch', [1, 6])
def test_batches_that_the_mesh_does_not_divide(batch):
  arrays = make(batch)
  weights = weights_of(batch)
  value, gradient = expected(reference_deterministic, arrays, weights)
  got = sharded((2, 4), jax.value_and_grad(deterministic), arrays, weights)
  if batch == 1:  # the only candidate
    assert got[0] == 0.0 and all((x == 0).all() for x in jax.tree.leaves(got[1]))
  assert_close(got, (value, gradient))


def test_a_replica_axis_cuts_the_batch_too():
  mesh = make_mesh(2, 2, 2, names=('replica', 'data', 'model'))
  arrays = make()
  weights = weights_of()
  with on_mesh(mesh, [('batch', ('replica', 'data'))]):
    compiled = jax.jit(jax.value_and_grad(deterministic)).lower(arrays, weights).compile()
    assert_close(compiled(arrays, weights), expected(reference_deterministic, arrays, weights))
  assert f'f32[{B // 8},{B}]' in compiled.as_text()


@pytest.mark.slow
def test_correct_is_the_argmax():
  arrays = make()
  u = np.asarray(arrays['rows']) @ np.asarray(arrays['columns']).T
  mask = np.arange(B) != 3

  @jax.jit
  def found(arrays):
    nll = functools.partial(symmetric_nll, arrays['rows'], arrays['columns'], 0.3, mask)
    return nll(), nll(chunk_bytes=4 * B * 3)

  got, chunked = found(arrays)
  for direction, logits in zip(got, (u, u.T), strict=True):
    best = np.where(mask, logits, -np.inf).argmax(1)
    np.testing.assert_array_equal(direction.correct, (best == np.arange(B)) & mask)
  assert 0 < got[0].correct.sum() < B
  for one, two in zip(got, chunked, strict=True):
    np.testing.assert_array_equal(one.correct, two.correct)


@pytest.mark.parametrize('chunk_bytes', [2**26, 1])
def test_representations_that_are_all_alike(chunk_bytes):
  """log B, right one time in B, and nowhere to go but together."""
  same = jnp.broadcast_to(make()['rows'][:1], (B, D))

  def loss(x):
    one, two = symmetric_nll(x, x, 0.01, chunk_bytes=chunk_bytes)
    return one.nll.sum() + two.nll.sum(), (one, two)

  gradient, both = jax.jit(jax.grad(loss, has_aux=True))(same)
  for direction in both:
    np.testing.assert_allclose(direction.nll, np.log(B), rtol=1e-6)
    np.testing.assert_allclose(direction.correct, 1 / B, rtol=1e-6)
  assert jnp.isfinite(gradient).all()


@functools.cache
def deterministic_step():
  return jax.jit(jax.value_and_grad(deterministic))


@pytest.mark.parametrize('scale', [1e4, 1e-4])
def test_extreme_temperatures(scale):
  arrays = make(scale=scale)
  weights = weights_of()
  want = expected(reference_deterministic, arrays, weights)
  # A logit of 1e4 is known to 1e-3 only, hence a probability to about as much of itself.
  assert_close(deterministic_step()(arrays, weights), want, 5e-3 if scale > 1 else 1e-5)


@pytest.mark.slow
def test_near_certain_pairs_keep_the_digits_of_their_loss():
  rows = jnp.eye(4)
  tau = 1 / 12.0
  one, two = jax.jit(symmetric_nll)(rows, rows, tau)
  for direction in (one, two):
    np.testing.assert_allclose(direction.nll, np.log1p(3 * np.exp(-12.0)), rtol=1e-2)


@pytest.mark.slow
def test_what_does_not_count_may_hold_anything():
  arrays = make()
  weights = weights_of()
  mask = jnp.arange(B) != 2
  broken = jax.tree.map(lambda x: x.at[2].set(jnp.nan) if x.ndim else x, arrays)
  z = normals(B, 1)
  for loss, want in (
    (deterministic, expected(reference_deterministic, arrays, weights, mask)),
    (
      functools.partial(noisy, num_samples=1),
      expected(reference_noisy, arrays, weights, mask, z),
    ),
  ):
    masked = functools.partial(loss, mask=mask)
    assert_close(jax.jit(jax.value_and_grad(masked))(broken, weights), want, 5e-6)


def test_a_batch_in_which_nothing_counts():
  arrays = make()
  weights = weights_of()
  losses = (deterministic, functools.partial(noisy, num_samples=1))
  masked = [jax.value_and_grad(functools.partial(loss, mask=jnp.zeros(B))) for loss in losses]
  for value, gradient in jax.jit(lambda *args: [step(*args) for step in masked])(arrays, weights):
    assert value == 0
    assert all((x == 0).all() for x in jax.tree.leaves(gradient))


def test_bfloat16_products():
  arrays = make()
  weights = weights_of()
  want = expected(reference_deterministic, arrays, weights)
  loss = functools.partial(deterministic, dtype=jnp.bfloat16)
  lowered = jax.jit(jax.value_and_grad(loss)).lower(arrays, weights)
  value, gradient = lowered.compile()(arrays, weights)
  assert {x.dtype for x in jax.tree.leaves((value, gradient))} == {jnp.dtype(jnp.float32)}
  assert_close((value, gradient), want, 0.03)
  products = re.findall(r'dot_general.*: \((.*?)\) -> (\S+)', lowered.as_text())
  assert len(products) == 3
  for operands, result in products:
    assert operands.count('bf16') == 2 and result.endswith('xf32>')
  half = {n: np.asarray(arrays[n], jnp.bfloat16) for n in ('rows', 'columns')}
  got = jax.eval_shape(jax.grad(loss), {**arrays, **half}, weights)
  assert got['rows'].dtype == got['columns'].dtype == jnp.bfloat16


# Noisy.


def normals(batch, num_samples, sampler=iid, keys=None):
  keys = example_keys(KEY, jnp.arange(batch)) if keys is None else keys
  return normals_of(keys, num_samples, sampler)


@functools.partial(jax.jit, static_argnums=(1, 2))
def normals_of(keys, num_samples, sampler):
  return sampler(keys, np.arange(num_samples), R + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
  'full, num_samples, alike',
  [(True, 1, True), (True, 1, False), (False, 3, False), (True, 40, True)],
)
def test_batch_nll_and_its_gradient(full, num_samples, alike):
  """A mean takes the gradient of the forward pass, any other loss runs the chunks again."""
  arrays = make(full=full)
  weights = jnp.full((2, B), -0.7) if alike else weights_of()
  mask = jnp.arange(B) % 5 != 1
  want = expected(reference_noisy, arrays, weights, mask, normals(B, num_samples))
  for chunk_bytes in (2**26, 4 * B * 5):
    loss = functools.partial(noisy, mask=mask, num_samples=num_samples, chunk_bytes=chunk_bytes)
    assert_close(jax.jit(jax.value_and_grad(loss))(arrays, weights), want, 5e-6)


@pytest.mark.slow
@pytest.mark.parametrize('shape, full', [((8, 1), True), ((2, 4), False)])
def test_batch_nll_over_a_mesh(shape, full):
  arrays = make(full=full)
  weights = weights_of()
  mask = jnp.arange(B) != 5
  want = expected(reference_noisy, arrays, weights, mask, normals(B, 1))
  loss = functools.partial(noisy, mask=mask, num_samples=1)
  assert_close(sharded(shape, jax.value_and_grad(loss), arrays, weights), want, 5e-6)


@pytest.mark.slow
@pytest.mark.parametrize('num_samples, chunk_bytes', [(1, 2**26), (3, 4 * B * 5)])
def test_post_normalization(num_samples, chunk_bytes):
  arrays = make()
  weights = weights_of()
  z = normals(B, num_samples)
  want = expected(reference_noisy, arrays, weights, None, z, post_normalization=True)
  settings = {'num_samples': num_samples, 'post_normalization': True}
  loss = functools.partial(noisy, chunk_bytes=chunk_bytes, **settings)
  assert_close(jax.jit(jax.value_and_grad(loss))(arrays, weights), want, 5e-6)
  if num_samples == 1:
    assert_close(sharded((4, 2), jax.value_and_grad(loss), arrays, weights), want, 5e-6)


@pytest.mark.slow
def test_the_integrator_is_that_of_the_caller():
  """Its sampler, and a remainder that fills the noise space; shared draws."""

  def paired(keys, sample_index, num_normals):
    z = iid(keys, sample_index // 2, num_normals)
    return z * (1 - 2 * (sample_index % 2))[:, None]

  arrays = make()
  weights = weights_of()
  want = expected(reference_noisy, arrays, weights, None, normals(B, 4, paired))
  loss = functools.partial(noisy, num_samples=4, integrator=Integrator(4, sampler=paired))
  assert_close(jax.jit(jax.value_and_grad(loss))(arrays, weights), want, 5e-6)
  keys = shared_key(KEY)
  z = jnp.broadcast_to(normals(1, 2, keys=keys), (B, 2, R + 1))
  want = expected(reference_noisy, arrays, weights, None, z)
  loss = functools.partial(noisy, num_samples=2, keys=keys)
  assert_close(jax.jit(jax.value_and_grad(loss))(arrays, weights), want, 5e-6)


# What the compiled program holds and sends.


def compiled_loss(loss, shape, batch, dim):
  """The compiled loss and gradient with pairs over 'data'."""
  mesh = make_mesh(*shape)
  cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))

  def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=cut)

  arrays = {
    'rows': array(batch, dim),
    'columns': array(batch, dim),
    'covariance': LowRank(None, array(batch, R, dim), array(batch, dim)),
    'tau': jax.ShapeDtypeStruct((), jnp.float32),
  }
  with on_mesh(mesh):
    step = jax.jit(jax.value_and_grad(lambda arrays: loss(arrays, jnp.ones((2, batch)) / batch)))
    return step.lower(arrays).compile()


LOSSES = {
  'det': deterministic,
  'one_sample': functools.partial(noisy, num_samples=1),
  'post_normalized': functools.partial(noisy, num_samples=1, post_normalization=True),
  'samples': functools.partial(noisy, num_samples=20),
}


@pytest.mark.parametrize(
  'name,shape',
  [
    ('det', (8, 1)),
    ('one_sample', (2, 4)),
    *(
      pytest.param(name, (8, 1), marks=pytest.mark.slow)
      for name in ('one_sample', 'post_normalized', 'samples')
    ),
  ],
)
def test_no_device_holds_all_similarities(name, shape):
  batch = 992
  dim = 24  # no other dimension is 992 x 992 / 8
  compiled = compiled_loss(LOSSES[name], shape, batch, dim)
  text = compiled.as_text()
  assert not re.search(rf'\[(?:\d+,)*{batch},(?:\d+,)*{batch}[,\]]', text)
  assert not re.search(rf'\[(?:\d+,)*{batch * batch}[,\]]', text)
  if name != 'samples':  # every device has an eighth, on a model axis too
    assert f'[{batch // 8},{batch}]' in text or f'[{batch // 8},1,{batch}]' in text
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * batch * batch
  inside, _ = collectives(text)
  assert not inside  # nor does a chunk talk
  found = re.findall(r'= \(?\w+\[([\d,]*)\]\S* all-gather', text)
  # The columns go around once, and once more where the backward pass may have to run again.
  of_columns = [x for x in found if x == f'{batch},{dim}']
  on_model_axis = 3 if shape[1] > 1 else 0  # gradients, from an eighth to all rows of 'data'
  assert 1 <= len(of_columns) <= (1 if name == 'det' else 2) + on_model_axis


def test_memory_does_not_grow_with_the_batch_beyond_the_budget():
  batch = 2048
  dim = 8
  budget = 2**18
  loss = functools.partial(deterministic, chunk_bytes=budget)
  block = 4 * batch * batch // 8
  temp = compiled_loss(loss, (8, 1), batch, dim).memory_analysis().temp_size_in_bytes
  assert temp < 4 * budget + 10 * 4 * batch * dim < block
  whole = compiled_loss(deterministic, (8, 1), batch, dim)
  assert block < whole.memory_analysis().temp_size_in_bytes < 2.5 * block


@pytest.mark.parametrize(
  'loss, products, chunks',
  [
    (deterministic, 3, 1),
    (functools.partial(deterministic, chunk_bytes=4 * 64 * 16), 4, 4),
    pytest.param(functools.partial(noisy, num_samples=1), 3, 1, marks=pytest.mark.slow),
    (functools.partial(noisy, num_samples=1, chunk_bytes=4 * 64 * 16), 3, 4),
  ],
  ids=['block', 'chunks', 'noisy_block', 'noisy_chunks'],
)
def test_products_of_a_mean_loss(loss, products, chunks):
  """Of all rows with all columns: forward, and to both; once more where blocks are not kept."""
  batch = 64
  dim = 256
  arrays = jax.eval_shape(functools.partial(make, batch, dim=dim))
  step = jax.jit(jax.value_and_grad(lambda arrays: loss(arrays, jnp.ones((2, batch)))))
  flops = step.lower(arrays).compile().cost_analysis()['flops']  # of one round of a loop
  assert flops * chunks / (2 * batch * batch * dim) == pytest.approx(products, abs=0.5)


@pytest.mark.parametrize(
  'change, words',
  [
    ({'columns': jnp.zeros((4, D))}, r'rows \(16, 6\) and columns \(4, 6\) must be of one shape'),
    (
      {'rows': jnp.zeros((0, D)), 'columns': jnp.zeros((0, D))},
      r'must be .* \[B, D\], with B at least',
    ),
    ({'chunk_bytes': 0}, 'chunk_bytes=0 must be at least 1'),
  ],
)
def test_bad_arguments_are_one_sentence(change, words):
  settings = {n: x for n, x in change.items() if n == 'chunk_bytes'}
  arrays = {**make(), **{n: x for n, x in change.items() if n not in settings}}
  with pytest.raises(ValueError, match=f'symmetric_nll: .*{words}'):
    deterministic(arrays, weights_of(), **settings)
  with pytest.raises(ValueError, match=f'batch_nll: .*{words}'):
    noisy(arrays, weights_of(), num_samples=1, **settings)
