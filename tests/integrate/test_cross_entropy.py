"""The cross-entropy in tiles against that of all logits in float64: values, gradients, meshes."""

import dataclasses
import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from het_plugin import HetXL, Integrator, cross_entropy, example_keys
from het_plugin.integrate import multi_hot
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
  return np.asarray(multi_hot(SEVERAL, len(classes)), float)


CASES = {
  'ids': Case(IDS, one_hot(IDS)),
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
  'kinds,rtol', [(('bfloat16', 'bfloat16'), 0.02), (('bfloat16', 'float32'), 0.02)]
)
def test_products_in_bfloat16(kinds, rtol):
  phi, kernel, bias = arrays()
  args = phi.astype(kinds[0]), kernel.astype(kinds[1]), bias
  loss, gradient = value_and_gradient(CASES['several'], args)
  assert loss.dtype == jnp.float32
  assert [x.dtype for x in gradient] == [x.dtype for x in args]
  assert_close((loss, gradient), expected('several'), rtol)
  if kinds[1] == 'float32':  # sums are not rounded to bfloat16, in tiles and in one
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


@pytest.mark.parametrize(
  'change,words',
  [
    ({'kernel': jnp.ones((D + 1, K))}, r'phi must be \[..., D\]'),
    ({'bias': jnp.ones(1)}, r'bias \[K\] or None'),
    ({'labels': np.ones(N, np.float32)}, r'labels must be class ids'),
    ({'labels': IDS + 30}, 'labels hold 69: class ids are below K = 40'),
    ({'weights': WEIGHTS}, r'weights must be as many as labels, \(8,\)'),
    ({'labels': soft, 'label_smoothing': 0.1}, 'no effect on a function of classes'),
    ({'label_arrays': (SHARPNESS,)}, 'label_arrays need labels that are a function'),
    ({'link': 'probit'}, "link='probit' is unknown"),
    ({'link': 'sigmoid', 'z_loss': 0.1}, "z_loss=0.1 with the link 'sigmoid' must be 0"),
    ({'label_smoothing': 1.0}, 'label_smoothing=1.0 must be'),
    ({'num_classes': 41}, 'num_classes=41 must be from 1 to the 40 columns'),
    ({'tile': 0}, 'tile=0 must be a whole number'),
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
  assert_close(loss, expected('several')[0], 0.02)


def test_a_label_that_is_no_class_is_nan_under_jit():
  found = jax.jit(cross_entropy)(*arrays(), jnp.asarray(IDS).at[1].set(K))
  assert [bool(x) for x in jnp.isnan(found)] == [False, True, *[False] * 6]
