"""Fused kernels: interpreted, against float64 and XLA, on one device and on a mesh; compiled for
TPUs ahead of time, lowered for NVIDIA GPUs.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from het_plugin.integrate import Integrator, fused, iid, kernels, shared_key, tpu_kernels
from het_plugin.integrate.draws import Draws
from het_plugin.integrate.gaussian import PADDED
from het_plugin.integrate.order import Plan
from het_plugin.integrate.placement import Placement
from tests.integrate.hlo import collectives, tpu_devices
from tests.integrate.test_integrator import KP, dyadic, gaussian, keys_of, make
from tests.meshes import make_mesh, on_mesh

SHAPES = [(2, 128, 12, 700), (1, 256, 3, 130), (3, 128, 2, 5)]  # B, S, T, K


def operands(batch, num_samples, num_rows, num_classes):
  """Arguments of the kernels; the last class is padded."""
  rng = np.random.default_rng(0)
  z = rng.normal(size=(batch, num_samples, num_rows))
  z[..., -1] = 1.0
  rows = 2.0 * rng.normal(size=(batch, num_rows, num_classes))
  shift = rng.normal(size=num_classes)
  shift[-1] = PADDED
  return [x.astype(np.float32) for x in (z, rows, shift)]


def exact_logits(z, rows, shift):
  z, rows, shift = (np.asarray(x, np.float64) for x in (z, rows, shift))
  return np.einsum('bst,btk->bsk', z, rows) + shift


def exact_log_z(u):
  top = u.max(-1)
  return np.log(np.exp(u - top[..., None]).sum(-1)) + top


def interpreted(name, backend):
  return functools.partial(getattr(kernels, name), backend=backend, interpret=True)


@pytest.mark.parametrize('shape', SHAPES, ids=str)
@pytest.mark.parametrize('backend', kernels.BACKENDS)
def test_log2_z(backend, shape):
  arguments = operands(*shape)
  num_classes = shape[-1]
  # The second is a class of the next device's, the third one of the device before.
  label = np.array([num_classes - 2, num_classes, -1][: shape[0]], np.int32)
  u = exact_logits(*arguments)
  log2_z, at_label = interpreted('log2_z', backend)(*arguments, label)
  np.testing.assert_allclose(log2_z, exact_log_z(u) / np.log(2), rtol=1e-6, atol=2e-6)
  inside = (label >= 0) & (label < num_classes)
  at = u[np.arange(shape[0]), :, np.where(inside, label, 0)]
  expected = np.where(inside[:, None], at, 0.0) / np.log(2)
  np.testing.assert_allclose(at_label, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('shape', SHAPES, ids=str)
@pytest.mark.parametrize('backend', kernels.BACKENDS)
def test_softmax_pull(backend, shape):
  z, rows, shift = operands(*shape)
  u = exact_logits(z, rows, shift)
  log_z = exact_log_z(u)
  log_scale = log_z + np.random.default_rng(1).exponential(size=shape[:2])
  log_scale[:, 1] = np.inf
  expected = np.einsum('bst,bsk->btk', np.float64(z), np.exp(u - log_scale[..., None]))
  log2_scale = np.float32(log_scale / np.log(2))
  got = interpreted('softmax_pull', backend)(z, rows, shift, log2_scale)
  assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()
  assert not got[..., -1].any()


@pytest.mark.parametrize('shape', SHAPES, ids=str)
@pytest.mark.parametrize('backend', kernels.BACKENDS)
def test_sigmoid_sums(backend, shape):
  batch, num_samples, _, num_classes = shape
  z, rows, shift = operands(*shape)
  sign = np.where(np.random.default_rng(1).random((batch, num_classes)) < 0.5, -1.0, 1.0)
  counts = np.arange(num_samples) < num_samples - 7
  x = (sign[:, None] * exact_logits(z, rows, shift))[:, counts]
  sigmoid = np.exp(-np.logaddexp(0.0, -x))
  slope = sigmoid * np.exp(-np.logaddexp(0.0, x))
  gradient = np.einsum('bst,bsk->btk', np.float64(z)[:, counts], slope)
  got = interpreted('sigmoid_sums', backend)(z, rows, shift, np.float32(sign), counts)
  top, *sums = (np.asarray(part, np.float64)[..., :-1] for part in got)
  total, got_gradient = np.exp2(top) * sums[0], np.exp2(top)[:, None] * sums[1]
  np.testing.assert_allclose(total, sigmoid.sum(1)[..., :-1], rtol=1e-5)
  gradient = gradient[..., :-1]
  assert np.abs(got_gradient - gradient).max() < 1e-5 * np.abs(gradient).max()


@pytest.mark.parametrize('at_most', [None, (512, 1)], ids=['one_group', 'groups'])
@pytest.mark.parametrize('dtype,rtol', [('float32', 1e-5), ('bfloat16', 1e-2)])
@pytest.mark.parametrize('shape', [(1, 3, 8, 130), (3, 12, 16, 300)], ids=str)  # B, T, D, K
def test_last_and_squares(shape, dtype, rtol, at_most, monkeypatch):
  if at_most is not None:
    monkeypatch.setattr(tpu_kernels, 'PROJECTED', at_most)
  batch, num_rows, dim, num_classes = shape
  rng = np.random.default_rng(0)
  shapes = [(batch, num_rows, dim), (dim, num_classes), *[(batch, num_classes)] * 2]
  rows, kernel, *g = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
  rows, kernel = rows.astype(dtype), kernel.astype(dtype)
  x, w, *h = (np.float64(y) for y in (rows, kernel, *g))
  u = x @ w
  du = np.concatenate([2 * u[:, :-1] * h[1][:, None], h[0][:, None]], axis=1)
  expected = u[:, -1], np.square(u[:, :-1]).sum(1), du @ w.T, np.einsum('btd,btk->dk', x, du)
  got = (
    *kernels.last_and_squares(rows, kernel, interpret=True),
    *kernels.squares_pull(rows, kernel, *g, interpret=True),
  )
  for one, other in zip(got, expected, strict=True):
    assert one.dtype == jnp.float32
    assert np.abs(one - other).max() < rtol * np.abs(other).max()


# Losses.

B = 4


def problem(kind):
  return make(kind, batch=B, dtype=jnp.float32)


def loss(arrays, kind, link, keys, method='sample', **settings):
  labels = jnp.array([[2], [12], [0], [7]])
  settings = {'order': 'project_then_sample', 'sampler': dyadic} | settings
  integrator = Integrator(method=method, **settings)
  nll = integrator.nll(gaussian(arrays, kind, link=link), labels, keys)
  return nll @ jnp.array([1.0, -2.0, 0.5, 1.0])


def value_and_grad(arrays, kind, link, shape=None, keys=None, **settings):
  """On a mesh of this shape, or one device."""
  keys = keys_of(B) if keys is None else keys
  step = jax.jit(jax.value_and_grad(lambda arrays: loss(arrays, kind, link, keys, **settings)))
  with on_mesh(make_mesh(*shape)) if shape else contextlib.nullcontext():
    return step(arrays)


def assert_agree(got, expected, rtol=1e-5):
  np.testing.assert_allclose(got[0], expected[0], rtol=rtol)
  for name, value in expected[1].items():
    error = np.abs(got[1][name] - value).max()
    least = 2.0 if name == 'tau' else 1e-3  # what tau's gradient sums is of this order
    assert error <= rtol * max(np.abs(value).max(), least), name


@pytest.mark.parametrize(
  'kind,link,num_samples',  # 600 are two kernel calls
  [
    *(('identity', 'softmax', 150), ('hash', 'sigmoid', 1)),
    *(('shared_w', 'softmax', 600), ('shared_w', 'sigmoid', 600)),
  ],
)
def test_losses_are_those_of_xla(kind, link, num_samples):
  arrays = problem(kind)
  expected = value_and_grad(arrays, kind, link, num_samples=num_samples)
  got = value_and_grad(arrays, kind, link, num_samples=num_samples, implementation='pallas')
  assert_agree(got, expected)


@pytest.mark.parametrize(
  'kind,link,shape',
  [
    *(('identity', 'sigmoid', (2, 4)), ('linear', 'softmax', (1, 8))),
    ('shared_w', 'softmax', (4, 1)),
  ],
)
def test_losses_on_a_mesh(kind, link, shape):
  arrays = problem(kind)
  expected = value_and_grad(arrays, kind, link, num_samples=20)
  got = value_and_grad(arrays, kind, link, shape, num_samples=20, implementation='pallas')
  assert_agree(got, expected)


@pytest.mark.parametrize('shape', [None, (2, 4), (1, 8), (4, 1)], ids=str)
@pytest.mark.parametrize('kind', ['linear', 'shared_w'])
def test_the_exact_sigmoid_is_that_of_xla(kind, shape):
  arrays = problem(kind)
  expected = value_and_grad(arrays, kind, 'sigmoid', method='exact')
  got = value_and_grad(arrays, kind, 'sigmoid', shape, method='exact', implementation='pallas')
  assert_agree(got, expected)


@pytest.mark.parametrize('link,shape', [('softmax', (2, 4)), ('sigmoid', None)])
def test_shared_draws(link, shape):
  arrays, key = problem('linear'), shared_key(jax.random.key(5))
  expected = value_and_grad(arrays, 'linear', link, keys=jnp.repeat(key, B), num_samples=20)
  for implementation in ('xla', 'pallas'):
    settings = {'num_samples': 20, 'implementation': implementation}
    assert_agree(value_and_grad(arrays, 'linear', link, shape, key, **settings), expected)


@pytest.mark.parametrize('link', ['softmax', 'sigmoid'])
def test_improbable_labels_keep_their_loss_and_gradient(link):
  arrays = problem('linear')
  location = jnp.zeros((B, KP)).at[:, 1].set(400.0).at[:, 0].set(-900.0)
  arrays |= {'location': location, 'tau': jnp.float32(1.0)}
  expected = value_and_grad(arrays, 'linear', link, num_samples=20)
  got = value_and_grad(arrays, 'linear', link, num_samples=20, implementation='pallas')
  assert np.abs(expected[0]) > 100.0
  assert_agree(got, expected, rtol=4e-5)  # half a last place of a logit of 900, in units of log 2
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))


@pytest.mark.parametrize(
  'link,method', [('softmax', 'sample'), ('sigmoid', 'sample'), ('sigmoid', 'exact')]
)
def test_second_derivatives_are_refused(link, method):
  arrays = problem('linear')

  def of_tau(tau):
    settings = {'method': method, 'num_samples': 20, 'implementation': 'pallas'}
    return loss(arrays | {'tau': tau}, 'linear', link, keys_of(B), **settings)

  with pytest.raises(NotImplementedError, match='first derivatives only'):
    jax.grad(jax.grad(of_tau))(arrays['tau'])


# The programs for real devices.


def arguments(name, batch, num_samples, num_rows, num_classes, sharding=None):
  def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  z, rows = array(batch, num_samples, num_rows), array(batch, num_rows, num_classes)
  others = {
    'log2_z': [array(batch, dtype=jnp.int32)],
    'softmax_pull': [array(batch, num_samples)],
    'sigmoid_sums': [array(batch, num_classes), array(num_samples, dtype=bool)],
  }[name]
  return z, rows, array(num_classes), *others


KERNELS = ('log2_z', 'softmax_pull', 'sigmoid_sums')
REAL_SHAPES = [(8, 256, 52, 7397), (1, 128, 2, 40), (2, 128, 102, 1024)]  # B, S, T, K


@pytest.mark.parametrize('name', KERNELS)
def test_lowers_for_an_nvidia_gpu(name):
  device = jax.sharding.AbstractDevice('NVIDIA H100', num_cores=None, platform='gpu')
  mesh = jax.sharding.AbstractMesh((1,), ('data',), abstract_device=device)
  for shape in REAL_SHAPES:
    kernel = functools.partial(getattr(kernels, name), backend='gpu')
    with jax.sharding.use_abstract_mesh(mesh):
      traced = jax.jit(kernel).trace(*arguments(name, *shape))
      lowered = traced.lower(lowering_platforms=('cuda',))
    assert '__gpu$xla.gpu.triton' in lowered.as_text()


# What the compiler wants to know of an H200.
SM_90 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132
  fpus_per_core: 128 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 150000000000 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA" device_description_str: "sm_90"
dnn_version_info { major: 9 minor: 8 patch: 0 } runtime_version { major: 12 minor: 9 patch: 0 }
"""


@pytest.mark.filterwarnings('ignore:Error reading persistent compilation cache')
@pytest.mark.parametrize('name', KERNELS)
@pytest.mark.parametrize('device', ['v4:2x2x1', 'v5e:2x4', 'v6e:2x4', 'sm_90'])
def test_compiles_for_a_device_that_is_not_here(device, name):
  if device == 'sm_90':
    pytest.importorskip('jax_cuda12_plugin', reason="the extra 'gpu' is not installed")
    from jax.experimental import topologies

    target = {'platform': 'cuda', 'target_config': SM_90, 'topology': '1x1x1'}
    backend, call, devices = 'gpu', 'triton', topologies.get_topology_desc(**target).devices
  else:
    backend, call, devices = 'tpu', 'tpu_custom_call', tpu_devices(device)
  sharding = jax.sharding.SingleDeviceSharding(devices[0])
  for shape in REAL_SHAPES:
    kernel = functools.partial(getattr(kernels, name), backend=backend)
    compiled = jax.jit(kernel).lower(*arguments(name, *shape, sharding)).compile()
    assert call in compiled.as_text()


@pytest.mark.parametrize('shape', [(8, 52, 1024, 7397), (20, 102, 2048, 600), (1, 4, 64, 40)])
@pytest.mark.parametrize('device', ['v4:2x2x1', 'v5e:2x4', 'v6e:2x4'])
def test_exact_kernels_compile_for_a_tpu_that_is_not_here(device, shape):
  sharding = jax.sharding.SingleDeviceSharding(tpu_devices(device)[0])
  batch, num_rows, dim, num_classes = shape
  shapes = [(batch, num_rows, dim), (dim, num_classes), *[(batch, num_classes)] * 2]
  x = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for shape in shapes]
  for kernel, arrays in ((kernels.last_and_squares, x[:2]), (kernels.squares_pull, x)):
    assert 'tpu_custom_call' in jax.jit(kernel).lower(*arrays).compile().as_text()


@pytest.mark.parametrize('link', ['softmax', 'sigmoid'])
@pytest.mark.parametrize('platform', ['cpu', 'tpu'])
def test_one_gathering_after_the_last_sample(platform, link):
  """And none but the batch's sums in the backward pass."""
  devices = tpu_devices() if platform == 'tpu' else jax.devices()
  mesh = jax.sharding.Mesh(np.array(devices).reshape(2, 4), ('data', 'model'))
  placement = Placement(mesh, batch='data', vocab='model')
  plan = fused.plan_calls(Plan(1300, 32, iid, project_first=True, placement=placement))

  def step(rows, shift, keys, of_label):
    draws = Draws(jax.random.wrap_key_data(keys))
    return fused.LOSSES[link](plan, rows, shift, draws, of_label).sum()

  def array(spec, *shape, dtype=jnp.float32):
    spec = jax.sharding.PartitionSpec(*spec)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.NamedSharding(mesh, spec))

  of_label = array(('data',), 8, 1, dtype=jnp.int32)
  if link == 'sigmoid':
    of_label = array(('data', 'model'), 8, 400)
  rows, shift = array(('data', None, 'model'), 8, 5, 400), array(('model',), 400)
  keys = array(('data',), 8, 2, dtype=jnp.uint32)
  lowered = jax.jit(jax.value_and_grad(step, (0, 1))).lower(rows, shift, keys, of_label)
  inside, outside = collectives(lowered.compile().as_text())
  assert not inside
  gathered = ['all-gather'] if link == 'softmax' else []
  assert [op for op in outside if op != 'all-reduce'] == gathered
