"""The text tower."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from flax.linen import partitioning as flax_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from het_plugin.backbones import TextTransformer, text_transformer
from het_plugin.training.partitioning import PjitPartitioner
from tests.backbones.stacking import stack
from tests.params import drawn

TINY = TextTransformer(vocab_size=50, width=16, depth=1, mlp_dim=32, num_heads=2)
TEXT = np.array([[5, 9, 2, 7, 1, 0, 0], [3, 1, 0, 0, 0, 0, 0], [8, 8, 8, 4, 40, 49, 1]], np.int32)


def tower(pooling, depth=1):
  model = dataclasses.replace(TINY, pooling=pooling, depth=depth)
  return model, drawn(model.init, TEXT)


@pytest.mark.slow
@pytest.mark.parametrize('pooling', ['last', 'token', 'mean'])
def test_padding_and_neighbours_change_nothing(pooling):
  model, params = tower(pooling)
  phi, intermediates = jax.jit(model.apply)({'params': params}, TEXT)
  assert phi.shape == (3, model.pre_logits_dim)
  assert phi.dtype == jnp.float32
  np.testing.assert_array_equal(phi, intermediates['pre_logits'])
  extra = 1 if pooling == 'token' else 0
  assert intermediates['block00'].shape == (3, 7 + extra, 16)
  # As if the text ended where the padding begins.
  shorter = params | {'position_embedding': params['position_embedding'][: 5 + extra]}
  alone, _ = jax.jit(model.apply)({'params': shorter}, TEXT[:1, :5])
  np.testing.assert_allclose(alone[0], phi[0], atol=1e-5)
  # The pooling takes what it says.
  x = np.asarray(intermediates['encoder_norm'])
  expected = {
    'last': [x[0, 4], x[1, 1], x[2, 6]],
    'token': x[:, 0],
    'mean': [x[0, :5].mean(0), x[1, :2].mean(0), x[2].mean(0)],
  }[pooling]
  np.testing.assert_allclose(phi, np.stack(expected), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('pooling', ['last', 'token', 'mean'])
def test_an_empty_text_is_finite(pooling):
  model, params = tower(pooling)

  def loss(params):
    return model.apply({'params': params}, np.zeros((2, 7), np.int32))[0].sum()

  result = jax.jit(jax.value_and_grad(loss))(params)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(result))


@pytest.mark.slow
def test_bfloat16_and_scanned_blocks():
  model, params = tower('last', depth=2)
  phi, intermediates = jax.jit(model.apply)({'params': params}, TEXT)
  looped = dataclasses.replace(model, scan_layers=True, remat='full')
  scanned, scanned_intermediates = jax.jit(looped.apply)(
    {'params': stack(model, params, TEXT)}, TEXT
  )
  np.testing.assert_allclose(scanned, phi, atol=1e-5)
  assert scanned_intermediates.keys() == intermediates.keys()
  short = dataclasses.replace(model, dtype=jnp.bfloat16)
  half, intermediates = jax.jit(short.apply)({'params': params}, TEXT)
  assert half.dtype == jnp.float32
  assert intermediates['block00'].dtype == jnp.bfloat16
  np.testing.assert_allclose(half, phi, atol=0.1)


@pytest.mark.slow
def test_on_a_mesh():
  model, params = tower('mean')
  axes = jax.eval_shape(model.init, jax.random.key(0), TEXT)['params_axes']
  assert traverse_util.flatten_dict(axes, sep='/')['embedding_axes'].names == ('vocab', 'embed')
  assert params['embedding'].shape == (128, 16)  # padded, so that meshes divide it
  text = np.tile(TEXT, (8, 1))
  phi, _ = jax.jit(model.apply)({'params': params}, text)
  partitioner = PjitPartitioner(num_partitions=2)
  with jax.set_mesh(partitioner.mesh), flax_partitioning.axis_rules(partitioner.logical_axis_rules):
    placed = jax.device_put(
      params['embedding'], NamedSharding(partitioner.mesh, PartitionSpec('model', None))
    )
    sharded, _ = jax.jit(model.apply)({'params': params | {'embedding': placed}}, text)
  np.testing.assert_allclose(sharded, phi, atol=1e-5)


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: text_transformer('S/16'), "variant='S/16' .*Ti, S, B"),
    (lambda: dataclasses.replace(TINY, pooling='gap'), "pooling='gap' must be one of 'last', "),
    (
      lambda: dataclasses.replace(TINY, pooling='token', causal=True),
      "pooling='token' with causal=True sees no text",
    ),
    (lambda: TINY.init(jax.random.key(0), np.ones((2, 3))), 'text .*float64; .*int32'),
  ],
)
def test_wrong_settings(make, message):
  with pytest.raises(ValueError, match=message):
    make()
