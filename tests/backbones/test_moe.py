import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import traverse_util
from flax.linen import partitioning as flax_partitioning

from het_plugin.backbones import SoftMoe, SparseMoe, ViT, moe, vit
from het_plugin.backbones.transformer import BlockSettings, Mlp
from het_plugin.heads import Det
from het_plugin.integrate import Integrator
from het_plugin.models import ClassificationModel
from het_plugin.planning import hlo
from het_plugin.training import optimizers, partitioning, step
from tests.backbones import stacking
from tests.params import drawn, perturbed

SETTINGS = BlockSettings(num_heads=2, mlp_dim=12)
B = 4
N = 6
D = 8
E = 5


def layer_of(settings):
  return settings.layer(
    lambda: moe.stack_experts(Mlp)(SETTINGS, ('expert_group', 'length'), name='experts'), 'moe'
  )


def make(settings):
  """The layer, perturbed parameters, with experts that differ, and an input [B, N, D]."""
  layer = layer_of(settings)
  x = jax.random.normal(jax.random.key(0), (B, N, D))
  params = jax.jit(layer.init)(jax.random.key(1), x)['params']
  return layer, perturbed(params, 0.3), x


def expert(params, e, x, numpy=np):
  """Output of expert e for x [..., D]."""
  wi = params['experts']['wi']
  wo = params['experts']['wo']
  hidden = x @ wi['kernel'][e] + wi['bias'][e]
  gelu = 0.5 * hidden * (1 + numpy.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
  return gelu @ wo['kernel'][e] + wo['bias'][e]


def float64(tree):
  return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


def by_loops(settings, params, x, capacity, images):
  """V-MoE's algorithms 1 and 2 one token at a time, without noise."""
  params = float64(params)
  x = float64(x)
  y = np.zeros_like(x)
  for group in range(B // images):
    tokens = x[group * images : (group + 1) * images].reshape(-1, D)
    logits = tokens @ params['router']
    gates = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    order = np.arange(len(tokens))
    if settings.batch_priority:
      order = np.argsort(-gates.max(-1), kind='stable')
    used = np.zeros(E, int)
    out = np.zeros_like(tokens)
    for choice in range(settings.num_selected):
      for t in order:
        e = np.argsort(-gates[t], kind='stable')[choice]
        if used[e] < capacity:
          used[e] += 1
          out[t] += gates[t, e] * expert(params, e, tokens[t])
    y[group * images : (group + 1) * images] = out.reshape(images, N, D)
  return y


@pytest.mark.slow
@pytest.mark.parametrize('batch_priority', [True, False])
@pytest.mark.parametrize('num_selected', [1, 2])
def test_tokens_go_where_the_papers_algorithms_send_them(batch_priority, num_selected):
  settings = SparseMoe(
    E, 'every_2', num_selected, capacity=0.5, group_size=2, noise=0.0, batch_priority=batch_priority
  )
  layer, params, x = make(settings)
  route = jax.jit(
    lambda x: layer.apply({'params': params}, x, False, mutable=['losses', 'metrics'])
  )
  y, sown = route(x)
  capacity = int(np.ceil(0.5 * num_selected * 2 * N / E))
  np.testing.assert_allclose(y, by_loops(settings, params, x, capacity, 2), atol=1e-5)
  assert 0 < sown['metrics']['router'][0]['router_dropped'] < 1
  # Elsewhere each image is routed by itself, with more places.
  capacity = int(np.ceil(4.0 * num_selected * N / E))
  alone = by_loops(settings, params, x, capacity, 1)
  infer = jax.jit(lambda x: layer.apply({'params': params}, x))
  np.testing.assert_allclose(infer(x), alone, atol=1e-5)
  np.testing.assert_allclose(infer(x[1:2]), alone[1:2], atol=1e-5)


@pytest.mark.slow
def test_gradients_are_those_of_all_experts_for_all_tokens():
  settings = SparseMoe(E, capacity=100.0, noise=0.0, group_size=B)
  layer, params, x = make(settings)

  def routed(params, x):
    y, _ = layer.apply({'params': params}, x, False, mutable='losses')
    return jnp.sin(y).sum()

  def dense(params, x):
    gates = jax.nn.softmax(x @ params['router'])  # [B, N, E]
    least = jax.lax.top_k(gates, 2)[0][..., -1:]
    outputs = jnp.stack([expert(params, e, x, jnp) for e in range(E)], axis=-1)  # [B, N, D, E]
    return jnp.sin(jnp.einsum('bnde,bne->bnd', outputs, gates * (gates >= least))).sum()

  got, want = (jax.jit(jax.grad(f, argnums=(0, 1)))(params, x) for f in (routed, dense))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, want)


@pytest.mark.slow
def test_balance_losses():
  settings = SparseMoe(E, group_size=2, importance_weight=2.0, load_weight=3.0)
  layer, params, x = make(settings)
  rngs = {'dropout': jax.random.key(5)}
  route = jax.jit(
    lambda x: layer.apply({'params': params}, x, False, mutable=['losses', 'metrics'], rngs=rngs)
  )
  _, sown = route(x)
  metrics = sown['metrics']['router'][0]
  logits = float64(x).reshape(2, 2 * N, D) @ float64(params['router'])
  gates = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  importance = [(g.sum(0).std() / g.sum(0).mean()) ** 2 for g in gates]
  np.testing.assert_allclose(metrics['router_importance_loss'], np.mean(importance), rtol=1e-4)
  total = 2 * metrics['router_importance_loss'] + 3 * metrics['router_load_loss']
  np.testing.assert_allclose(sown['losses']['balance'][0], total, rtol=1e-6)

  noisy = logits + 0.2 * np.random.default_rng(0).normal(size=logits.shape)
  chosen = np.argsort(-noisy, axis=-1)[..., :2]
  got = jax.jit(moe.load_per_expert)(*(jnp.asarray(a) for a in (logits, noisy, chosen)), 0.2)
  threshold = np.sort(noisy, axis=-1)[..., -2:-1]
  np.testing.assert_allclose(
    got, scipy.stats.norm.sf((threshold - logits) / 0.2).mean(1), rtol=1e-4
  )


@pytest.mark.slow
def test_soft_moe():
  layer, params, x = make(SoftMoe(E, num_slots=2))
  got = jax.jit(lambda x: layer.apply({'params': params}, x))(x)
  params = float64(params)
  x = float64(x)
  for b in range(B):
    unit = x[b] / np.linalg.norm(x[b], axis=-1, keepdims=True)
    phi = params['router'] / np.linalg.norm(params['router'], axis=0)
    weights = np.exp(params['scale'] * np.einsum('nd,des->nes', unit, phi))  # [N, E, slots]
    places = np.einsum('nd,nes->esd', x[b], weights / weights.sum(0))
    out = np.stack([expert(params, e, places[e]) for e in range(E)])
    combine = weights / weights.sum((1, 2), keepdims=True)
    np.testing.assert_allclose(got[b], np.einsum('esd,nes->nd', out, combine), atol=2e-5)


def classification(moe):
  """A model with these experts, variables and a batch."""
  backbone = ViT(patch_size=8, width=16, depth=1, mlp_dim=32, num_heads=4, moe=moe)
  optimizer = optimizers.adamw(1e-2)
  integrator = Integrator(2)
  model = ClassificationModel(backbone, Det(num_classes=10), optimizer, integrator, integrator)
  image = jax.random.normal(jax.random.key(0), (16, 16, 16, 3))
  batch = {'image': image, 'label': np.arange(16)[:, None] % 10, 'index': np.arange(16)}
  init = functools.partial(model.get_initial_variables, input_shapes={'image': (1, 16, 16, 3)})
  shapes = jax.eval_shape(init, jax.random.key(1))
  zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes['params'])
  return model, shapes | {'params': perturbed(zeros, 0.2)}, batch  # saves the program of `init`


@pytest.mark.slow
@pytest.mark.parametrize(
  'settings',
  [
    SparseMoe(8, layers='every_1', group_size=2),
    SoftMoe(8, layers='every_1', num_slots=2),
  ],
)
def test_any_mesh_gives_the_same_and_moves_tokens_not_experts(settings):
  model, variables, batch = classification(settings)
  names = traverse_util.flatten_dict(flax_partitioning.get_axis_names(variables['params_axes']))
  results = []
  for model_axis, replicas in ((1, 1), (2, 2)):
    mesh = partitioning.PjitPartitioner(model_axis, num_replicas=replicas)
    params = traverse_util.flatten_dict(variables['params'])
    specs = {
      path: mesh._parameter_spec(str(path), x.shape, names[path]) for path, x in params.items()
    }
    specs = traverse_util.unflatten_dict(specs)
    assert specs['backbone']['block00']['moe']['experts']['wi']['kernel'][0] == 'data'

    def loss(params, batch):
      return model.loss_fn(params, batch, jax.random.key(3))

    gradient = mesh.partition(
      jax.value_and_grad(loss, has_aux=True),
      (specs, mesh.data_partition_spec),
      ((None, None), specs),
    )
    compiled = gradient.trace(variables['params'], batch).lower().compile()
    moved = {c.kind: c for c in hlo.collectives(compiled.as_text())}
    assert moved['all-to-all'].count == 4  # to experts and back, forward and backward
    assert 'all-gather' not in moved or moved['all-gather'].bytes < 1000
    arguments = jax.device_put((variables['params'], batch), compiled.input_shardings[0])
    results.append(jax.device_get(compiled(*arguments)))
  (value, metrics), grads = results[0]
  if isinstance(settings, SparseMoe):
    assert value == pytest.approx(
      metrics['loss'].compute() + metrics['auxiliary_loss'].compute(), rel=1e-5
    )
  for (other, _), other_grads in results[1:]:
    assert other == pytest.approx(value, rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), other_grads, grads)


@pytest.mark.slow
def test_microbatches_change_nothing_where_images_are_routed_alone():
  model, variables, batch = classification(SparseMoe(4, 'every_1', noise=0.0, group_size=1))
  params = variables['params']
  mesh = partitioning.PjitPartitioner()
  whole, parts = (
    mesh.partition(
      lambda params, batch, n=n: step.accumulate_grads_microbatched(
        model,
        types.SimpleNamespace(params=params, optimizer_def=None),
        batch,
        jax.random.key(2),
        n,
      ),
      (None, mesh.data_partition_spec),
      None,
    )(params, batch)
    for n in (1, 2)
  )
  assert whole[1]['auxiliary_loss'].compute() > 0
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), parts[0], whole[0])


@pytest.mark.slow
def test_dense_blocks_before_the_experts_run_in_a_loop():
  model = ViT(8, 16, 4, 32, 2, moe=SparseMoe(4, layers='last_1'), layer_scale=0.1)
  image = jax.random.normal(jax.random.key(0), (2, 16, 16, 3))
  params = drawn(model.init, image)
  looped = stacking.stack(model, params, image)
  assert looped.keys() & {'blocks', 'block02', 'block03'} == {'blocks', 'block03'}
  loop = dataclasses.replace(model, scan_layers=True)
  phi, outputs = jax.jit(loop.apply)({'params': looped}, image)
  expected, names = jax.jit(model.apply)({'params': params}, image)
  np.testing.assert_allclose(phi, expected, atol=1e-5)
  assert outputs.keys() == names.keys()


@pytest.mark.parametrize(
  ('layers', 'billions'), [('last_5', 2.66), pytest.param('every_2', 7.14, marks=pytest.mark.slow)]
)
def test_the_papers_sizes(layers, billions):
  """Riquelme et al. 2021, table 2: V-MoE-H/14 has 2.7B and 7.2B with its head of 18,291 classes."""
  backbone = vit('H/14', moe=SparseMoe(32, layers=layers))
  shapes = jax.eval_shape(backbone.init, jax.random.key(0), jnp.zeros((1, 224, 224, 3)))['params']
  count = sum(x.size for x in jax.tree.leaves(shapes))
  assert count / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'num_experts': 4, 'num_selected': 5}, r'SparseMoe.num_selected=5 .* num_experts=4'),
    ({'num_experts': 4, 'layers': 'all'}, r"SparseMoe.layers='all' .*'every_n'"),
    ({'num_experts': 4, 'layers': (0, 7)}, r'SparseMoe.layers=\(0, 7\) .* depth=2'),
    ({'num_experts': 4, 'layers': 1}, r'SparseMoe.layers=1 .* numbers of blocks such as \(1, 3\)'),
    ({'num_experts': 4, 'layers': ()}, r'SparseMoe.layers=\(\) must be'),
    ({'num_experts': 4, 'capacity': 0.0}, 'SparseMoe.capacity=0.0 '),
    ({'num_experts': 4, 'noise': -1.0}, 'SparseMoe.noise=-1.0 must be at least 0'),
  ],
)
def test_wrong_settings(settings, message):
  with pytest.raises(ValueError, match=message):
    ViT(patch_size=8, width=16, depth=2, mlp_dim=32, num_heads=4, moe=SparseMoe(**settings))


def test_odd_groups_are_refused():
  layer = layer_of(SparseMoe(E, group_size=3))
  x = jnp.zeros((B, N, D))
  params = jax.eval_shape(layer.init, jax.random.key(1), x)['params']
  with pytest.raises(ValueError, match='SparseMoe.group_size=3 .* 4'):
    jax.eval_shape(lambda params: layer.apply({'params': params}, x, False), params)
