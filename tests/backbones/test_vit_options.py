"""The options of ViT against plain numpy in float64, with parameters away from their start."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from flax import linen as nn

import gin
from het_plugin.backbones import Mlp, ViT, transformer, vit
from het_plugin.backbones.vit import resize_kernel
from het_plugin.config import parsing
from het_plugin.heads import HetXL
from het_plugin.integrate import Integrator
from het_plugin.models import ClassificationModel
from het_plugin.training import optimizers, partitioning, step
from het_plugin.training.state import TrainState
from tests.backbones.stacking import stack
from tests.params import drawn

TINY = ViT(patch_size=4, width=16, depth=1, mlp_dim=24, num_heads=2)
OPTIONS = {
  '22B': {
    'parallel': True,
    'qk_norm': True,
    'qkv_bias': False,
    'norm': 'rms_norm',
    'pooling': 'map',
  },
  'DINOv2': {'layer_scale': 0.1, 'num_registers': 3, 'mlp': 'gelu_exact'},
  'DINOv3': {'layer_scale': 0.1, 'num_registers': 2, 'mlp': 'swiglu', 'position': 'rope'},
  'sincos': {'position': 'sincos2d', 'pooling': 'gap', 'mlp': 'quick_gelu', 'norm_epsilon': 1e-2},
  'adapters and gap with registers': {
    'pooling': 'gap',
    'num_registers': 1,
    'qk_norm': True,
    'adapter_dim': 5,
  },
}


def softmax(x):
  return scipy.special.softmax(x, axis=-1)


ACTIVATIONS = {
  'gelu': lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
  'gelu_exact': lambda x: x * scipy.special.ndtr(x),
  'quick_gelu': lambda x: x * scipy.special.expit(1.702 * x),
}


class Reference:
  def __init__(self, model):
    self.m = model

  def norm(self, p, x):
    if self.m.norm == 'layer_norm':
      x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + self.m.norm_epsilon) * p['scale']
    return x + p['bias'] if 'bias' in p else x

  def dense(self, p, x):
    return x @ p['kernel'] + p.get('bias', 0.0)

  def rotate(self, x, grid, prefix):
    """Each pair (i, i + d / 2) turns by an angle of its own."""
    d = x.shape[-1]
    out = x.copy()
    for n in range(grid * grid):
      for i in range(d // 2):
        place = (divmod(n, grid)[i // (d // 4)] + 0.5) / grid * 2 - 1
        angle = 2 * math.pi * place * 100.0 ** (-(i % (d // 4)) * 4 / d)
        a = x[:, prefix + n, :, i]
        b = x[:, prefix + n, :, i + d // 2]
        out[:, prefix + n, :, i] = a * math.cos(angle) - b * math.sin(angle)
        out[:, prefix + n, :, i + d // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out

  def attention(self, p, x, queries, turn=lambda x: x):
    def heads(y):
      return y.reshape(*y.shape[:2], self.m.num_heads, -1)

    q = heads(self.dense(p['query'], queries))
    k = heads(self.dense(p['key'], x))
    if 'query_norm' in p:
      q = self.norm(p['query_norm'], q)
      k = self.norm(p['key_norm'], k)
    v = heads(self.dense(p['value'], x))
    logits = np.einsum('bqhd,bkhd->bhqk', turn(q), turn(k)) / math.sqrt(q.shape[-1])
    y = np.einsum('bhqk,bkhd->bqhd', softmax(logits), v)
    return self.dense(p['out'], y.reshape(*y.shape[:2], -1))

  def mlp(self, p, x):
    y = self.dense(p['wi'], x)
    if self.m.mlp == 'swiglu':
      gate = self.dense(p['wi_gate'], x)
      return self.dense(p['wo'], gate * scipy.special.expit(gate) * y)
    return self.dense(p['wo'], ACTIVATIONS[self.m.mlp](y))

  def __call__(self, p, image):
    m = self.m
    size = self.m.patch_size
    grid = image.shape[1] // size
    patches = [
      image[:, i * size : (i + 1) * size, j * size : (j + 1) * size].reshape(len(image), -1)
      for i in range(grid)
      for j in range(grid)
    ]
    x = np.stack(patches, 1) @ p['embedding']['kernel'].reshape(-1, m.width)
    x = x + p['embedding']['bias']
    if m.position == 'sincos2d':
      quarter = m.width // 4
      omega = [10_000.0 ** (-i / (quarter - 1)) for i in range(quarter)]
      angles = [[place[1] * w for w in omega] + [place[0] * w for w in omega]
                for place in np.ndindex(grid, grid)]  # fmt: skip
      for n, (column, row) in enumerate(np.reshape(angles, (-1, 2, quarter))):
        x[:, n] += np.concatenate([np.sin(column), np.cos(column), np.sin(row), np.cos(row)])

    def repeat(tokens):
      return np.repeat(tokens[None], len(image), axis=0)

    if m.pooling == 'token':
      x = np.concatenate([repeat(p['class_token'][None]), x], 1)
    if m.position == 'learned':
      x = x + p['position_embedding']
    if m.num_registers:
      first = int(m.pooling == 'token')
      x = np.concatenate([x[:, :first], repeat(p['registers']), x[:, first:]], 1)
    prefix = x.shape[1] - grid * grid

    def turn(y):
      return self.rotate(y, grid, prefix) if m.position == 'rope' else y

    for i in range(m.depth):
      b = p[f'block{i:02d}']
      y = self.norm(b['attention_norm'], x)
      y = self.attention(b['attention'], y, y, turn) * b.get('attention_scale', 1.0)
      z = self.norm(b['attention_norm'], x) if m.parallel else self.norm(b['mlp_norm'], x + y)
      x = x + y + self.mlp(b['mlp'], z) * b.get('mlp_scale', 1.0)
      if 'adapter' in b:
        hidden = ACTIVATIONS['gelu'](self.dense(b['adapter']['wi'], x))
        x = x + self.dense(b['adapter']['wo'], hidden)
    x = self.norm(p['encoder_norm'], x)
    if m.pooling != 'map':
      return x[:, 0] if m.pooling == 'token' else x[:, prefix:].mean(1)
    pool = p['pooling']
    y = self.attention(pool['attention'], x, repeat(pool['probe'][None]))
    return (y + self.mlp(pool['mlp'], self.norm(pool['mlp_norm'], y)))[:, 0]


@pytest.mark.parametrize('name', OPTIONS)
def test_options_are_those_of_the_reference(name):
  scan_layers = name == 'DINOv2'  # the same block, in a loop
  model = dataclasses.replace(TINY, **OPTIONS[name], depth=1 + scan_layers)
  image = np.random.default_rng(1).normal(size=(2, 12, 12, 3))
  params = jax.tree.map(np.float64, drawn(model.init, image))
  expected = Reference(model)(params, image)
  if scan_layers:
    params = stack(model, params, image)
    model = dataclasses.replace(model, scan_layers=True)
  phi, _ = jax.jit(model.apply)({'params': params}, jnp.asarray(image, jnp.float32))
  np.testing.assert_allclose(phi, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
  'settings',
  [
    {'position': 'rope', 'num_registers': 2, 'num_pooled': 2, 'layer_scale': 0.1},
    {'position': 'relative', 'parallel': True, 'qk_norm': True},
    {'pooling': 'distilled', 'num_registers': 1, 'norm_pooled': True, 'sub_norm': 'both'},
  ],
)
def test_the_last_block_computes_what_is_pooled(settings):
  tower = ViT(4, 16, 2, 32, 2, **settings)
  image = np.random.default_rng(0).normal(size=(3, 16, 16, 3)).astype(np.float32)
  params = {'params': drawn(tower.init, image)}
  whole = jax.jit(lambda p, x: tower.apply(p, x, train=True)[0]).lower(params, image).compile()
  phi = jax.jit(lambda p, x: tower.apply(p, x)[0]).lower(params, image).compile()
  np.testing.assert_allclose(phi(params, image), whole(params, image), atol=2e-6)
  assert phi.cost_analysis()['flops'] < 0.75 * whole.cost_analysis()['flops']
  # Without jit no result is dropped, and each block runs once.
  blocks = []

  def counted(call, args, kwargs, context):
    if isinstance(context.module, transformer.Block):
      blocks.append(context.module.name)
    return call(*args, **kwargs)

  with nn.intercept_methods(counted):
    eager, _ = tower.apply(params, image)
  assert blocks == ['block00', 'block01']
  np.testing.assert_allclose(eager, phi(params, image), atol=2e-6)


def test_22b_has_the_parameters_of_the_paper():
  parsing.parse_config(['het_plugin/gin/models/vit_22b.gin'], [])
  model = gin.query_parameter('%BACKBONE').scoped_configurable_fn()
  image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
  params = jax.eval_shape(model.init, jax.random.key(0), image)['params']
  matrices = [x for path, x in jax.tree.leaves_with_path(params['blocks']) if 'kernel' in str(path)]
  assert round(sum(math.prod(x.shape) for x in matrices) / 1e6) == 21_743


def test_resized_kernel_keeps_products_with_resized_patches():
  random = np.random.default_rng(0)
  kernel = random.normal(size=(4, 4, 3, 5))
  patch = random.normal(size=(4, 4, 3))
  larger = jax.image.resize(patch, (7, 7, 3), 'bilinear')
  actual = np.einsum('ijc,ijcd->d', larger, resize_kernel(jnp.asarray(kernel, jnp.float32), 7))
  np.testing.assert_allclose(actual, np.einsum('ijc,ijcd->d', patch, kernel), atol=1e-4)


@pytest.mark.parametrize('patch_size', [3, 5, 11])
def test_a_kernel_is_resized_without_antialiasing(patch_size):
  """As in big_vision, where TensorFlow reads two pixels of a row however small the result is."""
  kernel = np.random.default_rng(0).normal(size=(8, 8, 3, 5))
  place = ((np.arange(patch_size) + 0.5) * 8 / patch_size - 0.5).clip(0, 7)
  weights = (1 - abs(place[:, None] - np.arange(8))).clip(0)  # [P, 8]
  inverse = np.linalg.pinv(np.kron(weights, weights).T)
  expected = (inverse @ kernel.reshape(64, -1)).reshape(patch_size, patch_size, 3, 5)
  resize = functools.partial(resize_kernel, patch_size=patch_size)
  kernel = kernel.astype(np.float32)
  traced = jax.jit(resize).trace(kernel)
  np.testing.assert_allclose(traced.lower().compile()(kernel), expected, atol=1e-4)
  assert 'svd' not in str(traced.jaxpr)  # every step would repeat it


@pytest.mark.slow
def test_one_checkpoint_serves_other_patch_and_image_sizes():
  stored = dataclasses.replace(TINY, stored_patch_size=4, stored_grid=3)
  image = jax.random.normal(jax.random.key(1), (2, 12, 12, 3))
  params = {'params': drawn(stored.init, image)}
  others = [dataclasses.replace(stored, patch_size=size) for size in (6, 2)]

  @jax.jit
  def found(params, image, larger):
    of_size = [model.apply(params, image)[0] for model in (TINY, stored, *others)]
    return *of_size, stored.apply(params, larger)[0]

  plain, same, *resized = found(params, image, np.ones((2, 20, 20, 3), np.float32))
  np.testing.assert_allclose(same, plain, atol=1e-6)
  for phi in resized:
    assert np.isfinite(phi).all() and phi.shape == (2, 16)


def test_unknown_options_are_named():
  with pytest.raises(ValueError, match="ViT.mlp='relu' .*gelu"):
    vit('B/16', mlp='relu')
  with pytest.raises(ValueError, match="stored_grid=4 needs position='learned'"):
    vit('B/16', position='sincos2d', stored_grid=4)
  with pytest.raises(ValueError, match='num_registers=-1 must be at least 0'):
    vit('B/16', num_registers=-1)
  with pytest.raises(ValueError, match='Mlp.dropout_rate=1.5 '):
    Mlp((4,), dropout_rate=1.5)
  with pytest.raises(ValueError, match=r'Mlp.hidden_layers=\(4, 0\) '):
    Mlp((4, 0))
  with pytest.raises(ValueError, match="ViT.position='rope' .*ViT.width="):
    dataclasses.replace(TINY, position='rope', width=12)


@pytest.mark.slow
def test_a_small_22b_trains_alike_on_every_mesh():
  options = OPTIONS['22B'] | {'scan_layers': True, 'remat': 'full'}
  backbone = ViT(patch_size=4, width=64, depth=2, mlp_dim=64, num_heads=8, **options)
  integrator = Integrator(8, sampler='iid')  # points of a fit magnify the rounding of a mesh
  optimizer = optimizers.adamw(1e-2)
  model = ClassificationModel(backbone, HetXL(num_classes=16), optimizer, integrator, integrator)
  image = jax.random.normal(jax.random.key(0), (16, 8, 8, 3))
  batch = {'image': image, 'label': jnp.arange(16)[:, None]}
  rules = partitioning.standard_logical_axis_rules(parameter_partitioning_dims=2)
  variables = model.get_initial_variables(jax.random.key(1), {'image': (1, 8, 8, 3)})
  losses = []
  for model_axis in (1, 4):
    mesh = partitioning.PjitPartitioner(model_axis, logical_axis_rules=rules)
    state = TrainState.create(optimizer, variables)
    axes = mesh.get_mesh_axes(state)
    trainer = step.Trainer(model, mesh, axes, jax.random.key(2))
    state = jax.device_put(jax.device_get(state), mesh.shardings(axes))  # steps donate it
    losses.append([])
    for _ in range(2):
      state, metrics = trainer.train_step(state, mesh.shard_batch(batch, 16))
      losses[-1].append(float(metrics['loss'].compute()))
  assert losses[0][1] < losses[0][0]
  np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
