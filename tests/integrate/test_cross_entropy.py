"""The cross-entropy in tiles against that of all logits in float64: values, gradients, meshes."""

import dataclasses
import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from het_plugin import HetXL, Integrator, cross_entropy, example_keys
from het_plugin.integrate import LowRank
from tests.integrate.hlo import collectives
from tests.meshes import make_mesh, on_mesh

N = 8
D = 6
K = 40
IDS = np.array([3, 39, -1, 0, 7, 8, 15, 16], np.int32)
SEVERAL = np.array([[3, 4], [39, -1], [-1, -1], [0, 39], [7, 8], [9, 2], [1, -1], [5, 6]], np.int32)
WEIGHTS = np.linspace(0.1, 1, SEVERAL.size, dtype=np.float32).reshape(SEVERAL.shape)
COUNTS = np.linspace(1, 2, N, dtype=np.float32)  # of the examples in the loss


def soft(classes, sharpness):
  """Targets that need no sum over the classes."""
  return jnp.exp(-sharpness * jnp.abs(classes / 10 - 1))


SHARPNESS = jnp.linspace(0.5, 2, N)[:, None]


@dataclasses.dataclass(frozen=True)
class Case:
  """Arguments of `cross_entropy`, and the dense targets that they mean."""

  labels: np.ndarray | Callable
  targets: Callable[[np.ndarray], np.ndarray]  # of classes [K]
  settings: dict = dataclasses.field(default_factory=dict)

  @property
  def link(self):
    return self.settings.get('link', 'softmax')


def one_hot(ids, weights=None):
  def of(classes):
    hot = ids.reshape(N, -1, 1) == classes
    count = np.maximum((ids.reshape(N, -1) >= 0).sum(-1), 1)
    return (hot * (1 / count[:, None, None] if weights is None else weights[..., None])).sum(1)

  return of


def smooth(targets, link='softmax'):
  def of(classes):
    t = targets(classes)
    return 0.8 * t + 0.2 * (t.sum(-1, keepdims=True) / len(classes) if link == 'softmax' else 0.5)

  return of


def hot(classes):
  return np.asarray((SEVERAL[..., None] == classes).any(1), float)


CASES = {
  'ids': Case(IDS, one_hot(IDS)),
  'smooth': Case(IDS, smooth(one_hot(IDS)), {'label_smoothing': 0.2, 'tile': 16}),
  'several': Case(SEVERAL, one_hot(SEVERAL), {'tile': 7, 'z_loss': 0.01}),
  'weights': Case(
    SEVERAL,
    smooth(one_hot(SEVERAL, WEIGHTS)),
    {'weights': WEIGHTS, 'label_smoothing': 0.2, 'tile': 8},
  ),
  'function': Case(
    soft,
    lambda classes: np.asarray(soft(classes, np.asarray(SHARPNESS))),
    {'label_arrays': (SHARPNESS,), 'tile': 16, 'z_loss': 0.01},
  ),
  'padded': Case(IDS % 37, one_hot(IDS % 37), {'num_classes': 37, 'tile': 8, 'temperature': 0.5}),
  'sigmoid': Case(
    SEVERAL,
    smooth(hot, 'sigmoid'),
    {'link': 'sigmoid', 'tile': 16, 'label_smoothing': 0.2},
  ),
}


def arrays(dtype=jnp.float32, num_rows=N):
  rng = np.random.default_rng(0)
  shapes = (num_rows, D), (D, K), (K,)
  return tuple(jnp.asarray(2 * rng.normal(size=shape), dtype) for shape in shapes)


def loss_of(case, **settings):
  def loss(phi, kernel, bias, labels=case.labels):
    found = cross_entropy(phi, kernel, bias, labels, **case.settings | settings)
    return (COUNTS * found).sum()

  return loss


def value_and_gradient(case, args, argnums=(0, 1, 2), **settings):
  return jax.jit(jax.value_and_grad(loss_of(case, **settings), argnums))(*args)


@functools.cache
def expected(name):
  """Value and gradient from all logits in float64."""
  case = CASES[name]

  def loss(phi, kernel, bias):
    num_classes = case.settings.get('num_classes', K)
    u = ((phi @ kernel + bias) / case.settings.get('temperature', 1.0))[:, :num_classes]
    t = jnp.asarray(case.targets(np.arange(num_classes)), u.dtype)
    if case.link == 'sigmoid':
      of_each = (jax.nn.softplus(u) - t * u).sum(-1)
    else:
      log_z = jax.nn.logsumexp(u, axis=-1)
      of_each = t.sum(-1) * log_z - (t * u).sum(-1)
      of_each += jnp.where(t.sum(-1) > 0, case.settings.get('z_loss', 0.0) * log_z**2, 0.0)
    return (COUNTS * of_each).sum()

  with jax.enable_x64(True):
    found = jax.value_and_grad(loss, (0, 1, 2))(*(np.asarray(x, np.float64) for x in arrays()))
    return jax.tree.map(np.asarray, found)


def assert_close(found, expected, rtol=1e-5):
  for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    x = np.asarray(x, np.float64)
    assert np.linalg.norm(x - y) <= rtol * np.linalg.norm(y)


@pytest.mark.parametrize('name', CASES)
def test_value_and_gradient_are_those_of_all_logits(name):
  assert_close(value_and_gradient(CASES[name], arrays()), expected(name))


@pytest.mark.parametrize(
  'kinds,rtol',
  [
    (('bfloat16', 'bfloat16'), 0.02),
    (('bfloat16', 'float32'), 0.02),
    (('float32', 'bfloat16'), 0.02),
    (('float16', 'float16'), 0.002),
  ],
)
def test_products_in_narrow_types(kinds, rtol):
  phi, kernel, bias = arrays()
  args = phi.astype(kinds[0]), kernel.astype(kinds[1]), bias
  loss, gradient = value_and_gradient(CASES['several'], args)
  assert loss.dtype == jnp.float32
  assert [x.dtype for x in gradient] == [x.dtype for x in args]
  assert_close((loss, gradient), expected('several'), rtol)
  if kinds == ('bfloat16', 'float32'):  # sums are not rounded to bfloat16, in tiles and in one
    for tile in (7, K):
      _, of_kernel, _ = value_and_gradient(CASES['several'], args, tile=tile)[1]
      assert (of_kernel != of_kernel.astype(jnp.bfloat16)).any()


def placed(mesh, of_phi, of_kernel, of_bias):
  """The arrays on a mesh."""
  specs = of_phi, of_kernel, of_bias
  return tuple(
    jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays(), specs, strict=True)
  )


def with_named_axes(case):
  """Automatic axes, which the call names."""
  mesh = make_mesh(2, 4)
  with jax.set_mesh(mesh):
    args = placed(mesh, P('data'), P(None, 'model'), P('model'))
    return value_and_gradient(case, args, batch_axes='data', class_axes='model')


def with_rules(case):
  with on_mesh(make_mesh(2, 2)):
    return value_and_gradient(case, arrays())


def on_one_axis(case):
  """The axes that cut the examples cut K, too, and W is gathered from those that cut D."""
  mesh = make_mesh(2, 2, kind=AxisType.Explicit)
  with jax.set_mesh(mesh):
    args = placed(mesh, P(('data', 'model')), P('data', 'model'), P())
    return value_and_gradient(case, args)


def on_an_explicit_mesh(case):
  mesh = make_mesh(2, 2, 2, names=('data', 'replica', 'model'), kind=AxisType.Explicit)
  with jax.set_mesh(mesh):
    return value_and_gradient(case, placed(mesh, P('data'), P(None, 'model'), P('model')))


def in_shard_map(case, kind, manual, check_vma=True, **settings):
  """Some axes manual, and the others automatic or explicit."""
  mesh = make_mesh(2, 2, kind=kind)
  kept = lambda *names: [x if x in manual else None for x in names]  # noqa: E731
  specs = P(*kept('data')), P(None, *kept('model')), P(*kept('model'))
  rows = P(*kept('data'))

  def local(phi, kernel, bias, labels, weights):
    return cross_entropy(phi, kernel, bias, labels, **case.settings | weights | settings)

  weights = {'weights': case.settings['weights']} if 'weights' in case.settings else {}
  run = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(*specs, rows, rows),
    out_specs=rows,
    axis_names={*manual},
    check_vma=check_vma,
  )
  with jax.set_mesh(mesh):
    args = placed(mesh, P('data'), P(None, 'model'), P('model'))
    labels, weights = jax.device_put((case.labels, weights), NamedSharding(mesh, P('data')))

    def loss(phi, kernel, bias):
      return (COUNTS * run(phi, kernel, bias, labels, weights)).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*args)


MESHES = {
  'named_axes': with_named_axes,
  'rules': with_rules,
  'explicit': on_an_explicit_mesh,
  'one_axis': on_one_axis,
  'manual': functools.partial(
    in_shard_map, kind=AxisType.Auto, manual=('data', 'model'), class_axes='model'
  ),
  'manual_unchecked': functools.partial(
    in_shard_map,
    kind=AxisType.Auto,
    manual=('data', 'model'),
    check_vma=False,
    class_axes='model',
  ),
  'manual_model_auto_data': functools.partial(
    in_shard_map, kind=AxisType.Auto, manual=('model',), class_axes='model', batch_axes='data'
  ),
  'manual_data_auto_model': functools.partial(
    in_shard_map, kind=AxisType.Auto, manual=('data',), class_axes='model'
  ),
  'manual_data_explicit_model': functools.partial(
    in_shard_map, kind=AxisType.Explicit, manual=('data',)
  ),
  'manual_model_explicit_data': functools.partial(
    in_shard_map, kind=AxisType.Explicit, manual=('model',), class_axes='model'
  ),
}


@pytest.mark.parametrize(
  'place,name',
  [*((place, 'weights') for place in MESHES), ('named_axes', 'function'), ('explicit', 'sigmoid')],
)
def test_value_and_gradient_on_a_mesh(place, name):
  assert_close(MESHES[place](CASES[name]), expected(name))


def test_no_device_has_all_logits():
  """The compiled program has no array of all logits of a device, and no loop sends anything. Over
  the devices of the examples nothing is summed but the gradient of W.
  """
  mesh = make_mesh(2, 2, kind=AxisType.Explicit)
  num_classes = 4096

  def like(shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

  def loss(phi, kernel, labels):
    return cross_entropy(phi, kernel, None, labels, tile=256)

  def step(phi, kernel, labels):
    return jax.value_and_grad(lambda *args: loss(*args, labels).sum(), (0, 1))(phi, kernel)

  def to_phi(phi, kernel, labels, g):
    return jax.vjp(lambda phi: loss(phi, kernel, labels), phi)[1](g)

  with jax.set_mesh(mesh):
    args = (
      like((64, D), 'data'),
      like((D, num_classes), None, 'model'),
      like((64,), 'data', dtype=jnp.int32),
    )
    hlo = jax.jit(step).lower(*args).compile().as_text()
    in_loops, outside = collectives(hlo)
    assert not in_loops and set(outside) == {'all-reduce'}
    assert not re.search(rf'\[(32|64),({num_classes}|{num_classes // 2})\]', hlo)
    if hasattr(jax.sharding, 'no_collectives'):
      with jax.sharding.no_collectives({'data'}):
        jax.jit(to_phi).lower(*args, like((64,), 'data'))


def test_noise_is_that_of_het_xl():
  phi, _, _ = arrays()
  head = HetXL(K, num_factors=2, class_multiple=1)
  params = jax.jit(head.init)(jax.random.key(0), phi)['params']
  logits = head.apply({'params': params}, phi)
  keys = example_keys(jax.random.key(1), jnp.arange(N))
  integrator = Integrator(2)
  found = cross_entropy(
    phi,
    params['kernel'],
    params['bias'],
    IDS,
    temperature=logits.temperature,
    noise=logits.covariance,
    keys=keys,
    integrator=integrator,
  )
  np.testing.assert_allclose(found, integrator.nll(logits, IDS, keys), rtol=1e-5)


def noisy(phi, kernel, bias, labels, scale, loading, tiles):
  """The loss of 4 samples of HET-XL."""
  noise = LowRank(scale, loading, jnp.abs(scale))
  keys = example_keys(jax.random.key(1), jnp.arange(N))
  integrator = Integrator(4, max_bytes=2000 if tiles else None)
  return cross_entropy(phi, kernel, bias, labels, noise=noise, keys=keys, integrator=integrator)


def plain(phi, kernel, bias, labels, scale, loading, tiles):
  return cross_entropy(phi, kernel, bias, labels, tile=7 if tiles else None)


def heads_and_batches():
  """Arguments of `noisy` and `plain`, three of each."""
  rng = np.random.default_rng(3)
  shapes = (N, D), (D, K), (K,), (N, D), (2, D)
  phi, kernel, bias, scale, loading = (
    jnp.asarray(rng.normal(size=(3, *shape)), jnp.float32) for shape in shapes
  )
  labels = jnp.stack([jnp.asarray(IDS + i) for i in (-3, -2, -1)])
  return phi, kernel, bias, labels, scale, loading


@pytest.mark.parametrize('tiles', [False, True])
@pytest.mark.parametrize('loss', [plain, pytest.param(noisy, marks=pytest.mark.slow)])
def test_transformations_give_what_a_loop_does(loss, tiles):
  args = heads_and_batches()
  step = jax.value_and_grad(lambda *x: loss(*x, tiles).sum(), (0, 1, 2))
  of_each = [jax.jit(step)(*jax.tree.map(lambda x, i=i: x[i], args)) for i in range(3)]
  expected = jax.tree.map(lambda *x: np.stack(x), *of_each)

  def in_scan(*args):
    def body(total, args):
      return total + loss(*args, tiles).sum(), None

    return jax.lax.scan(jax.checkpoint(body), 0.0, args)[0]

  assert_close(jax.jit(jax.vmap(step))(*args), expected)
  total, gradient = jax.jit(jax.value_and_grad(in_scan, (0, 1, 2)))(*args)
  assert_close((total, gradient), (expected[0].sum(), expected[1]))


@pytest.mark.parametrize('link', ['softmax', 'sigmoid'])
@pytest.mark.parametrize('tile', [7, K])
def test_forward_mode_over_the_gradient(link, tile):
  args = arrays()
  step = tuple(jnp.cos(x) for x in args)
  hot = (IDS[:, None] == np.arange(K)).astype(np.float32)

  def dense(phi, kernel, bias):
    u = phi @ kernel + bias
    sums = jax.nn.softplus(u).sum() if link == 'sigmoid' else hot.sum(-1) @ jax.nn.logsumexp(u, -1)
    return sums - (hot * u).sum()

  def ours(phi, kernel, bias):
    return cross_entropy(phi, kernel, bias, IDS, link, tile=tile).sum()

  expected, found = (
    jax.jit(lambda *x, f=f: jax.jvp(jax.grad(f, (0, 1, 2)), x, step))(*args) for f in (dense, ours)
  )
  assert_close(found, expected)


@pytest.mark.parametrize('name', ['ids', 'weights', 'function'])
def test_examples_may_have_two_dimensions(name):
  case = CASES[name]
  phi, kernel, bias = arrays()

  def in_twos(x):
    return x.reshape(2, N // 2, *x.shape[1:]) if hasattr(x, 'shape') and x.shape else x

  labels, settings = jax.tree.map(in_twos, (case.labels, case.settings))
  found = cross_entropy(in_twos(phi), kernel, bias, labels, **settings)
  expected = cross_entropy(phi, kernel, bias, case.labels, **case.settings)
  np.testing.assert_array_equal(found, in_twos(expected))


def test_a_host_may_map_the_loss_of_one_example():
  phi, kernel, bias = arrays()
  of_one = functools.partial(cross_entropy, kernel=kernel, bias=bias)
  found = jax.vmap(lambda phi, label: of_one(phi, labels=label))(phi, IDS)
  np.testing.assert_allclose(found, cross_entropy(phi, kernel, bias, IDS), rtol=1e-6)


@pytest.mark.parametrize('tau', [jnp.float32(2), nnx.Param(jnp.float32(2)), np.array([2.0])])
def test_a_jitted_loss_may_close_over_its_temperature(tau):
  phi, kernel, bias = arrays()
  loss = jax.jit(lambda phi: cross_entropy(phi, kernel, bias, IDS, temperature=tau))
  np.testing.assert_array_equal(loss(phi), cross_entropy(phi / 2, kernel, bias / 2, IDS))


@pytest.mark.parametrize('name', ['smooth', 'several', 'weights', 'function', 'sigmoid'])
def test_label_smoothing_and_z_loss_may_follow_a_schedule(name):
  case = CASES[name]
  names = {'label_smoothing', 'z_loss'} & case.settings.keys()

  @jax.jit
  def step(args, settings):
    loss = lambda args: loss_of(case, **settings)(*args)  # noqa: E731
    return jax.value_and_grad(loss)(args)

  for kind in (np.float32, np.array, jnp.float32):
    settings = {x: kind(case.settings[x]) for x in names}
    assert_close(value_and_gradient(case, arrays(), **settings), expected(name))
  assert_close(step(arrays(), settings), expected(name))
  zeros = dict.fromkeys(names, jnp.float32(0))
  losses = jax.vmap(lambda x: loss_of(case, **x)(*arrays()))(
    {x: jnp.stack([zeros[x], settings[x]]) for x in names}
  )
  plain = loss_of(case, **dict.fromkeys(names, 0.0))(*arrays())
  assert_close(losses, jnp.stack([plain, expected(name)[0]]))


@pytest.mark.parametrize('manual', [(), ('data',), ('data', 'model')])
def test_a_schedule_on_a_mesh(manual):
  case = CASES['several']
  mesh = make_mesh(2, 2)

  @jax.jit
  def step(args, z_loss):
    run = functools.partial(
      cross_entropy,
      batch_axes=None if manual else 'data',
      class_axes='model',
      z_loss=z_loss,
      tile=7,
    )
    if manual:
      kept = lambda name: name if name in manual else None  # noqa: E731
      rows = P(kept('data'))
      specs = rows, P(None, kept('model')), P(kept('model')), rows
      run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=rows, axis_names={*manual})
    loss = lambda args: (COUNTS * run(*args, jnp.asarray(case.labels))).sum()  # noqa: E731
    return jax.value_and_grad(loss)(args)

  with jax.set_mesh(mesh):
    args = placed(mesh, P('data'), P(None, 'model'), P('model'))
    assert_close(step(args, case.settings['z_loss']), expected('several'))


@pytest.mark.parametrize('dtype', [np.int8, np.uint8, np.int64, list])
def test_labels_may_be_narrow_or_a_list(dtype):
  phi, kernel, bias = arrays()
  labels = IDS.clip(0)
  given = labels.tolist() if dtype is list else labels.astype(dtype)
  expected = cross_entropy(phi, kernel, bias, labels)
  np.testing.assert_array_equal(cross_entropy(phi, kernel, bias, given), expected)


NOISE = LowRank(jnp.ones((N, D)), jnp.ones((2, D)), jnp.ones((N, D)))


@pytest.mark.parametrize(
  'change,words',
  [
    ({'kernel': jnp.ones(())}, r'phi must be \[..., D\]'),
    ({'phi': jnp.ones((N, D), int)}, r'of floating types; got int32 \(8, 6\), float32'),
    ({'labels': np.eye(N, K, dtype=int)}, r'labels are \(8, 40\) of 0 and 1, not class ids'),
    ({'labels': IDS > 0}, 'labels must be class ids of an integer type.*; got bool'),
    ({'labels': IDS[:3]}, r"labels must be \(8,\) or \(8, 'L'\); got \(3,\)"),
    ({'labels': lambda classes: 0}, r'labels must return \(8, 40\) for 40 classes; got \(\)'),
    ({'labels': soft, 'label_arrays': jnp.ones((N, 1))}, 'label_arrays must be a tuple of arrays'),
    ({'labels': soft, 'label_arrays': [jnp.ones(1)]}, r"of arrays \(8, 'n'\); got \[\(1,\)\]"),
    ({'labels': soft, 'label_arrays': (jnp.ones(1),)}, r"of arrays \(8, 'n'\); got \(\(1,\),\)"),
    *(
      ({'temperature': tau}, 'temperature=.* must be one positive number')
      for tau in (0.0, -1, float('nan'), jnp.float32(0), jnp.ones(N), '1')
    ),
    ({'noise': 4}, r'noise must be a LowRank with diag \(8, 6\) as phi; got int'),
    (
      {'noise': NOISE, 'phi': jnp.ones((4, D)), 'labels': IDS[:4]},
      r'\(4, 6\) as phi; got \(8, 6\)',
    ),
    ({'noise': NOISE, 'integrator': 4}, 'integrator=4 must be an Integrator or None'),
    ({'noise': NOISE, 'tile': 8}, 'with noise, labels are ids.*tile=8.*leave them out'),
    ({'tile': True}, 'tile=True must be a whole number'),
    ({'label_smoothing': None}, 'label_smoothing=None must be a number'),
    ({'z_loss': -0.1}, 'z_loss=-0.1 must be at least 0'),
    ({'z_loss': jnp.float32(-0.5)}, 'z_loss=-0.5 must be at least 0'),
    ({'z_loss': jnp.ones(1)}, 'z_loss=.* must be a number, at least 0'),
    ({'num_classes': 0}, 'num_classes=0 must be at least 1'),
    ({'kernel': jnp.ones((D + 1, K))}, r'phi must be \[..., D\]'),
    ({'bias': jnp.ones(1)}, r'bias \[K\] or None'),
    ({'labels': np.ones(N, np.float32)}, 'labels must be class ids .* or a function of a range of'),
    ({'labels': IDS + 30}, 'labels hold 69: class ids are below K = 40'),
    ({'weights': WEIGHTS}, r'weights must be as many as labels, \(8,\)'),
    ({'labels': soft, 'label_smoothing': 0.1}, 'no effect on a function of classes'),
    ({'label_arrays': (SHARPNESS,)}, 'label_arrays need labels that are a function'),
    ({'link': 'probit'}, "link='probit' must be one of 'softmax', 'sigmoid'"),
    ({'link': 'sigmoid', 'z_loss': 0.1}, "z_loss=0.1 needs the link 'softmax'"),
    ({'label_smoothing': 1.0}, 'label_smoothing=1.0 must be'),
    ({'num_classes': 41}, 'num_classes=41 must be from 1 to the 40 columns'),
    ({'tile': 0}, 'tile=0 must be at least 1'),
    ({'batch_axes': 3}, 'batch_axes=3 names 3, which is no axis of the active mesh'),
    ({'class_axes': 'model'}, "class_axes='model' names 'model', which is no axis of the active"),
    ({'integrator': Integrator()}, 'no effect without noise'),
  ],
)
def test_what_does_not_fit_is_said(change, words):
  phi, kernel, bias = arrays()
  args = {'phi': phi, 'kernel': kernel, 'bias': bias, 'labels': IDS} | change
  with pytest.raises(ValueError, match=words):
    cross_entropy(**args)


def test_no_examples_and_no_promotion_of_types():
  phi, kernel, bias = arrays()
  with jax.numpy_dtype_promotion('strict'):
    args = phi.astype(jnp.bfloat16), kernel, bias
    loss, _ = value_and_gradient(CASES['several'], args, temperature=1.0)
    assert cross_entropy(phi[:0], kernel, bias, IDS[:0]).shape == (0,)
    assert not cross_entropy(phi, kernel, bias, np.full((N, 2), -1), z_loss=0.1).any()
    assert not cross_entropy(phi, kernel, bias, SEVERAL[:, :0], weights=WEIGHTS[:, :0]).any()
  assert_close(loss, expected('several')[0], 0.02)


def test_a_label_that_is_no_class_is_nan_under_jit():
  found = jax.jit(cross_entropy)(*arrays(), jnp.asarray(IDS).at[1].set(K))
  assert [bool(x) for x in jnp.isnan(found)] == [False, True, *[False] * 6]
