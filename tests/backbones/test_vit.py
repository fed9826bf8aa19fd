import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from flax.linen import partitioning

from het_plugin.backbones import ViT, vit
from tests.meshes import make_mesh, on_mesh
from tests.params import drawn

TINY = ViT(patch_size=4, width=16, depth=1, mlp_dim=32, num_heads=2)
RULES = (
  ('batch', 'data'),
  *((name, 'model') for name in ('vocab', 'mlp', 'heads', 'joined_kv')),
  *((name, None) for name in ('kv', 'embed', 'length')),
)


def images(batch=4):
  return jax.random.normal(jax.random.key(7), (batch, 8, 8, 3))


def shapes(model, size=224):
  image = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
  return jax.eval_shape(model.init, jax.random.key(0), image)


def num_params(model):
  return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes(model)['params']))


def test_b16_has_the_published_number_of_parameters():
  assert num_params(vit('B/16')) + 1000 * (768 + 1) == 86_567_656


def test_g14_has_about_the_parameters_of_table_2_of_zhai_et_al():
  assert num_params(vit('G/14', scan_layers=True)) == pytest.approx(1843e6, rel=2e-3)


def test_l32_with_representation_layer_has_the_parameters_of_table_3():
  backbone = num_params(vit('L/32', representation_size=1024))
  assert round((backbone + 1025 * 21_843) / 1e6, 1) == 328.9


@pytest.mark.parametrize(
  ('pooling', 'tokens', 'dtype'), [('token', 5, 'bfloat16'), ('gap', 4, 'float32')]
)
def test_representations(pooling, tokens, dtype):
  model = dataclasses.replace(TINY, pooling=pooling, dtype=dtype)
  params = drawn(model.init, images())
  phi, intermediates = jax.jit(model.apply)({'params': params}, images())
  dtype = jnp.dtype(dtype)
  assert {name: (x.shape, x.dtype) for name, x in intermediates.items()} == {
    'patches': ((4, 4, 16), dtype),
    'block00': ((4, tokens, 16), dtype),
    'encoder_norm': ((4, tokens, 16), jnp.float32),
    'pre_logits': ((4, 16), jnp.float32),
  }
  pooled = intermediates['encoder_norm']
  pooled = pooled[:, 0] if pooling == 'token' else pooled.mean(1)
  np.testing.assert_array_equal(phi, intermediates['pre_logits'])
  np.testing.assert_allclose(phi, pooled, rtol=1e-6)
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype('float32')}


def test_representation_layer_is_a_biased_tanh_layer():
  model = dataclasses.replace(TINY, representation_size=6)
  params = drawn(model.init, images())
  phi, intermediates = jax.jit(model.apply)({'params': params}, images())
  layer = params['representation']
  pooled = intermediates['encoder_norm'][:, 0]
  expected = np.tanh(pooled @ layer['kernel'] + layer['bias'])
  assert model.pre_logits_dim == 6
  np.testing.assert_allclose(phi, expected, atol=1e-6)


def test_every_parameter_has_axes_of_its_rank_that_shard_heads_and_mlp():
  model = dataclasses.replace(TINY, representation_size=6)
  variables = shapes(model, size=8)
  params = traverse_util.flatten_dict(variables['params'], sep='/')
  axes = traverse_util.flatten_dict(partitioning.get_axis_names(variables['params_axes']), sep='/')
  assert params.keys() == axes.keys()
  assert all(len(axes[name]) == x.ndim for name, x in params.items())

  split = {
    name
    for name, names in axes.items()
    if 'model' in partitioning.logical_to_mesh_axes(names, RULES)
  }
  in_block = {f'attention/{n}/{p}' for n in ('query', 'key', 'value') for p in ('kernel', 'bias')}
  in_block |= {'attention/out/kernel', 'mlp/wi/kernel', 'mlp/wi/bias', 'mlp/wo/kernel'}
  assert split == {f'block00/{name}' for name in in_block}


@pytest.mark.slow
def test_sharded_values_and_gradients_are_those_of_one_device():
  image = images(batch=8)
  params = drawn(TINY.init, image)

  def loss(params, image):
    phi, _ = TINY.apply({'params': params}, image)
    return jnp.square(phi).sum(-1).mean(), phi

  step = jax.value_and_grad(loss, has_aux=True)
  expected = jax.jit(step)(params, image)
  with on_mesh(make_mesh(2, 4), RULES):  # 4 does not divide the 2 attention heads
    compiled = jax.jit(step).lower(params, image).compile()
    actual = compiled(params, image)
  assert 'all-reduce' in compiled.as_text()
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4), actual, expected
  )


@pytest.mark.parametrize(
  ('overrides', 'message'),
  [
    ({'widht': 8}, 'widht: .*width'),
    ({'dtype': 'bf16'}, "ViT.dtype='bf16' must be a floating type"),
    ({'dtype': 'float64'}, "ViT.dtype='float64' would be float32, because jax_enable_x64 is off"),
    ({'dtype': 'int32'}, "ViT.dtype='int32' must be a floating type"),
    ({'norm_epsilon': -1e-6}, r'ViT.norm_epsilon=-1e-06 must be in \[0, 1\)'),
    ({'num_heads': 5}, 'width=768 .*num_heads=5'),
  ],
)
def test_bad_settings_are_named(overrides, message):
  with pytest.raises(ValueError, match=message):
    vit('B/16', **overrides)
