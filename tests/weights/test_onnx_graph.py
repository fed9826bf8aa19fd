"""`onnx_graph`: our backbones and heads in onnxruntime."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from het_plugin import backbones, heads
from het_plugin.integrate import Integrator
from het_plugin.weights import onnx_graph
from tests.params import drawn

onnxruntime = pytest.importorskip('onnxruntime')


def tolerance(output):
  """Entropies are larger than probabilities, and so is what rounding does to the samples."""
  return 1e-4 if 'entropy' in output else 1e-5


def run_onnx(function, x):
  """The outputs of the converted function for batches of 1, 7 and all rows; x [B, ...]."""
  model = onnx_graph.convert(function, 'x', x.shape[1:], {'about': json.dumps('text')})
  assert model.metadata_props[0].value == '"text"'
  session = onnxruntime.InferenceSession(model.SerializeToString())
  names = [output.name for output in session.get_outputs()]
  found = [session.run(names, {'x': x[:size]}) for size in (1, 7, len(x))]
  for size, outputs in zip((1, 7), found, strict=False):
    for name, part, whole in zip(names, outputs, found[-1], strict=True):
      np.testing.assert_allclose(part, whole[:size], atol=tolerance(name))
  return dict(zip(names, found[-1], strict=True))


def vit(**settings):
  return backbones.ViT(patch_size=4, width=16, depth=2, mlp_dim=32, num_heads=2, **settings)


BACKBONES = {
  'vit': vit(representation_size=8),
  'vit_scanned': vit(pooling='map', position='rope', norm='rms_norm', mlp='swiglu',
                     scan_layers=True, remat='full'),
  'vit_soft_moe': vit(moe=backbones.SoftMoe(num_experts=2)),
  'vit_bfloat16': vit(pooling='gap', dtype=jnp.bfloat16),
  'resnet': backbones.ResNet(stages=(1, 1), width=32),
  'resnet_v1': backbones.ResNet(stages=(1, 1), width=32, version='v1.5'),
  'wide_resnet': backbones.WideResNet(units=1, factor=1),
  'convnext': backbones.ConvNeXt(depths=(1, 1), width=8),
  'convnext_v2': backbones.ConvNeXt(depths=(1, 1), width=8, version='v2'),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize('name', BACKBONES)
def test_backbones(name):
  x = np.random.default_rng(0).uniform(-1, 1, (9, 16, 16, 3)).astype(np.float32)
  backbone = BACKBONES[name]
  params = {'params': drawn(backbone.init, x[:2])}
  apply = jax.jit(lambda x: {'phi': backbone.apply(params, x)[0]})
  found = run_onnx(apply, x)['phi']
  expected = np.asarray(apply(x)['phi'])
  # What is bfloat16 here is float32 there.
  relative = 0.05 if name == 'vit_bfloat16' else 1e-5
  assert np.abs(found - expected).max() < relative * max(1.0, np.abs(expected).max())


HEADS = {
  'det': (heads.Det(10), Integrator()),
  'het': (heads.Het(10, num_factors=3), Integrator(num_samples=64)),
  'het_in_tiles': (heads.Het(10, num_factors=3), Integrator(num_samples=50, max_bytes=4000)),
  'het_full': (heads.Het(10, num_factors=3, parametrization='full'), Integrator(num_samples=8)),
  'het_diag': (heads.Het(10, num_factors=3, remainder='diag'), Integrator(num_samples=64)),
  'het_h': (heads.HetH(10, num_factors=3, num_buckets=6), Integrator(num_samples=64)),
  'het_xl': (heads.HetXL(10, num_factors=3), Integrator(num_samples=64)),
  'het_xl_factors_first': (
    heads.HetXL(10, num_factors=3, noise_dim=6),
    Integrator(num_samples=40),
  ),
  'het_xl_samples_first': (
    heads.HetXL(10, num_factors=3),
    Integrator(num_samples=3, sampler='iid'),
  ),
  'het_xl_iid': (heads.HetXL(10, num_factors=70), Integrator(num_samples=8, sampler='iid')),
  'het_sigmoid': (heads.Het(10, num_factors=3, link='sigmoid'), Integrator()),
  'het_h_sigmoid': (heads.HetH(10, num_factors=3, num_buckets=6, link='sigmoid'), Integrator()),
  'het_xl_sigmoid': (heads.HetXL(10, num_factors=3, link='sigmoid'), Integrator()),
  'het_xl_sigmoid_in_tiles': (
    heads.HetXL(10, num_factors=5, link='sigmoid', class_multiple=1),
    Integrator(max_bytes=2 * 8 * 40),
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', HEADS)
def test_heads(name):
  head, integrator = HEADS[name]
  x = np.random.default_rng(0).normal(size=(20, 12)).astype(np.float32)
  params = {'params': drawn(head.init, x[:2])}
  serve = jax.jit(lambda x: heads.served(head.apply(params, x), integrator, entropies=True))
  found = run_onnx(serve, x)
  expected = serve(x)
  assert set(found) == set(expected)
  for output, value in expected.items():
    np.testing.assert_allclose(found[output], value, atol=tolerance(output), err_msg=output)


def test_other_operations():
  """Those that our models do not need today, against jax."""

  def function(x):  # [B, 6]
    order = jax.lax.rev(x, (1,))
    start = jnp.argmax(x.sum(axis=0)) + 3
    return {
      'cumsum': jnp.cumsum(x, axis=1),
      'order': jnp.argsort(jnp.floor(x), axis=1),
      'reversed_cumsum': jax.lax.cumsum(order, 1, reverse=True),
      'expm1': jnp.expm1(x * 1e-4),
      'log1p': jnp.log1p(jnp.square(x) * 1e-6),
      'logistic': jax.nn.sigmoid(8 * x),
      'power': jnp.power(jnp.abs(x), 1.5) + x**3,
      'remainder': jnp.fmod(x, 0.3),
      'any': (x > 1).any(axis=1) ^ (x < -1).all(axis=1),
      'pad': jnp.pad(x, ((0, 0), (1, 2)), constant_values=3.0),
      'slice': jax.lax.dynamic_slice_in_dim(x, start, 2, axis=1),
      'rows': jnp.arange(x.shape[0], dtype=jnp.int32),
      'size': jnp.ones(x.shape[0]) * x.shape[0],
      'argmin': jnp.argmin(x, axis=1),
      'finite': jnp.isfinite(jnp.exp(100 * x)),
      'clip': jnp.clip(jnp.ceil(x), -1, 1),
      'halves': jnp.concatenate(jnp.split(x, 2, axis=1)[::-1], axis=1),
      'scan': jax.lax.map(lambda row: 2 * row, x[:, :3].T).T,
      'unstack': jnp.unstack(x, axis=1)[2],
      'table': jnp.arange(5.0)[jnp.argmax(x[:, :5], axis=1)],
    }

  x = np.random.default_rng(0).normal(size=(9, 6)).astype(np.float32)
  model = onnx_graph.convert(function, 'x', (6,), {})
  session = onnxruntime.InferenceSession(model.SerializeToString())
  names = [output.name for output in session.get_outputs()]
  wanted = jax.jit(function)(x)
  for name, found in zip(names, session.run(names, {'x': x}), strict=True):
    expected = np.asarray(wanted[name])
    assert found.dtype == expected.dtype, name
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-12, err_msg=name)
