"""Blocks in a loop and recomputed activations: the same function of the same parameters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from het_plugin.backbones import ResNet, ViT, WideResNet
from het_plugin.backbones.layers import drop_path
from tests.backbones.stacking import stack, unstack
from tests.params import drawn

CASES = {
  'vit': ViT(8, 16, 2, 32, 2),
  'resnet': ResNet(stages=(3,), width=32),
  'wide_resnet': WideResNet(units=2, factor=1),
}
IMAGE = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype(np.float32)


@functools.cache
def params_of(case):
  return drawn(CASES[case].init, IMAGE)


def value_and_grad(model, params):
  def loss(params):
    phi, intermediates = model.apply({'params': params}, IMAGE)
    return jnp.sin(3 * phi).sum(), intermediates

  return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


@functools.cache
def plain_outputs(case):
  return jax.jit(CASES[case].apply)({'params': params_of(case)}, IMAGE)[1]


@functools.cache
def plain(case):
  """Value and gradient without loops or recomputation."""
  return value_and_grad(CASES[case], params_of(case))


def assert_close(got, expected):
  got, expected = (traverse_util.flatten_dict(tree, sep='/') for tree in (got, expected))
  assert got.keys() == expected.keys()
  for name, value in expected.items():
    if not name.endswith('key/bias'):  # its gradient is rounding error around zero
      scale = max(np.abs(value).max(), 1e-3)
      np.testing.assert_allclose(got[name], value, rtol=0, atol=2e-5 * scale, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('case', 'remat', 'scan'),
  [('vit', 'full', False), ('vit', 'dots', True), ('resnet', 'full', True)],
)
def test_loops_and_recomputation_change_nothing(case, remat, scan):
  model = CASES[case]
  params = params_of(case)
  (value, intermediates), gradient = plain(case)
  other = dataclasses.replace(model, remat=remat, scan_layers=scan)
  other_params = stack(model, params, IMAGE) if scan else params
  shapes = jax.eval_shape(other.init, jax.random.key(1), IMAGE)
  assert jax.tree.map(jnp.shape, shapes['params']) == jax.tree.map(jnp.shape, other_params)
  (got, got_intermediates), got_gradient = value_and_grad(other, other_params)
  np.testing.assert_allclose(got, value, rtol=1e-5)
  assert_close(got_intermediates, intermediates)
  assert_close(got_gradient, stack(model, gradient, IMAGE) if scan else gradient)


@pytest.mark.parametrize('case', CASES)
def test_stacking_has_an_inverse(case):
  params = params_of(case)
  back = unstack(stack(CASES[case], params, IMAGE))
  assert jax.tree.structure(back) == jax.tree.structure(params)
  jax.tree.map(np.testing.assert_array_equal, back, params)


def test_stacked_parameters_name_their_layers():
  model = dataclasses.replace(CASES['vit'], scan_layers=True)
  axes = jax.eval_shape(model.init, jax.random.key(0), IMAGE)['params_axes']
  names = traverse_util.flatten_dict(axes, sep='/')
  assert names['blocks/mlp/wi/kernel_axes'].names == ('layers', 'embed', 'mlp')


@pytest.mark.slow
def test_dropout_differs_between_looped_blocks():
  model = dataclasses.replace(CASES['vit'], scan_layers=True, dropout=0.5)
  params = stack(CASES['vit'], params_of('vit'), IMAGE)
  rngs = {'dropout': jax.random.key(2)}
  apply = jax.jit(functools.partial(model.apply, train=True))
  _, outputs = apply({'params': params}, IMAGE, rngs=rngs)
  same = params | {'blocks': jax.tree.map(lambda x: jnp.zeros_like(x), params['blocks'])}
  _, still = apply({'params': same}, IMAGE, rngs=rngs)
  np.testing.assert_array_equal(still['block00'], still['block01'])  # blocks of zeros pass through
  assert not np.allclose(outputs['block00'], outputs['block01'])


def test_stochastic_depth_drops_a_branch_or_scales_it():
  x = jnp.ones((4000, 2, 3))
  dropped = np.asarray(drop_path(x, 0.25, jax.random.key(0)))
  assert set(np.unique(dropped)) == {0.0, np.float32(1 / 0.75)}
  assert (dropped == dropped[:, :1, :1]).all()  # the whole branch of an example
  np.testing.assert_allclose(dropped.mean(), 1.0, atol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('case', 'scan'), [('vit', False), ('vit', True), ('resnet', True), ('wide_resnet', True)]
)
def test_stochastic_depth_spares_the_first_layer_and_evaluation(case, scan):
  params = params_of(case)
  expected = plain_outputs(case)
  params = stack(CASES[case], params, IMAGE) if scan else params
  image = np.repeat(IMAGE[:1], 32, axis=0)
  model = dataclasses.replace(CASES[case], stochastic_depth=0.9, scan_layers=scan)

  def layers(train):
    rngs = {'dropout': jax.random.key(2)} if train else None
    apply = jax.jit(model.apply, static_argnames='train')
    outputs = apply({'params': params}, image, train=train, rngs=rngs)[1]
    return [x for name, x in outputs.items() if name.startswith(('block', 'stage'))]

  names = [name for name in expected if name.startswith(('block', 'stage'))]
  got = {name: x[0] for name, x in zip(names, layers(train=False), strict=True)}
  assert_close(got, {name: expected[name][0] for name in names})
  trained = layers(train=True)
  distinct = [len(np.unique(np.asarray(x).reshape(32, -1).round(3), axis=0)) for x in trained]
  assert distinct[-1] > 1
  if case == 'vit':  # of the others, the first output has passed several units
    assert distinct[0] == 1


@pytest.mark.slow
def test_full_recomputation_keeps_less():
  """XLA's account of the temporaries of value and gradient at a size where activations count."""
  model = dataclasses.replace(CASES['vit'], scan_layers=True)
  params = jax.eval_shape(model.init, jax.random.key(0), IMAGE)['params']
  image = jax.ShapeDtypeStruct((16, 32, 32, 3), jnp.float32)

  def temporaries(remat):
    def loss(params, image):
      other = dataclasses.replace(model, remat=remat)
      return other.apply({'params': params}, image)[0].sum()

    step = jax.jit(jax.grad(loss)).lower(params, image).compile()
    return step.memory_analysis().temp_size_in_bytes

  assert temporaries('full') < temporaries('none')
