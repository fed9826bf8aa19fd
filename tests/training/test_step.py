import contextlib
import functools
import re

import jax
import numpy as np
import pytest

from het_plugin import backbones, heads, integrate, models
from het_plugin.training import flops, optimizers, partitioning
from het_plugin.training import metrics as metrics_lib
from het_plugin.training import step as step_lib
from tests.training import toy

BATCH = 32
STEPS = 8


@functools.cache
def initial(num_partitions, dims):
  """(partitioner, PartitionSpecs, initial state on the host, its shardings) of a mesh."""
  partitioner = partitioning.PjitPartitioner(
    num_partitions=num_partitions,
    logical_axis_rules=partitioning.standard_logical_axis_rules(parameter_partitioning_dims=dims),
  )
  axes, state = toy.initial_state(toy.ToyModel(), partitioner, jax.random.key(1))
  return partitioner, axes, jax.device_get(state), partitioner.shardings(axes)


@functools.cache
def train(num_partitions, num_microbatches=None, dims=1, real_rows=BATCH, factor=None):
  """Final parameters (numpy), final state, metrics of the last step, after STEPS steps."""
  partitioner, axes, state, shardings = initial(num_partitions, dims)
  state = jax.device_put(state, shardings)
  model = toy.ToyModel(loss_normalizing_factor=factor)
  steps = step_lib.Trainer(model, partitioner, axes, jax.random.key(2), num_microbatches)
  steps.check_batch_size(BATCH)
  for step in range(STEPS):
    index = step * BATCH + np.arange(BATCH)
    batch = toy.make_batch(index, np.arange(BATCH) < real_rows)
    state, metrics = steps.train_step(state, partitioner.shard_batch(batch, BATCH))
    jax.block_until_ready(metrics)
  return jax.device_get(state.params), state, metrics_lib.compute_metrics(jax.device_get(metrics))


def assert_same(a, b):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), a[0], b[0])
  assert a[2].keys() == b[2].keys()
  for name, value in a[2].items():
    np.testing.assert_allclose(value, b[2][name], atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_meshes_agree():
  assert_same(train(4), train(1))


@pytest.mark.slow
def test_parameters_split_over_data_agree():
  split = train(4, dims=2)
  assert_same(split, train(1))
  kernel = split[1].params['head_kernel']
  assert kernel.addressable_shards[0].data.size == kernel.size // 8


@pytest.mark.slow
def test_microbatches_change_nothing(real_rows=5):
  """The microbatches have 4, 1, 0 and 0 real rows."""
  assert_same(train(4, 4, real_rows=real_rows), train(4, real_rows=real_rows))


class TypedHead(heads.HetXL):
  """Makes logits of explicit shardings, without a word between devices about classes."""

  def __call__(self, phi):
    forbidden = getattr(jax.sharding, 'no_collectives', lambda axes: contextlib.nullcontext())
    with forbidden({'model'}):
      logits = super().__call__(phi)
    sharding = jax.typeof(logits.location).sharding
    if 'model' in sharding.mesh.explicit_axes:
      assert sharding.spec == jax.sharding.PartitionSpec('data', 'model')
      TYPED.append(logits)
    return logits


TYPED = []


def explicit_step(model, explicit):
  """(parameters after two steps, loss, loss of an evaluation, compiled step) on 4 x 2 devices."""
  partitioner = partitioning.PjitPartitioner(
    2,
    logical_axis_rules=partitioning.standard_logical_axis_rules(parameter_partitioning_dims=2),
    explicit=explicit,
  )
  axes, state = toy.initial_state(model, partitioner, jax.random.key(1))
  steps = step_lib.Trainer(model, partitioner, axes, jax.random.key(2), num_microbatches=2)
  batch = toy.make_batch(np.arange(BATCH), np.arange(BATCH) < BATCH - 3)
  batch = partitioner.shard_batch(batch, BATCH)
  text = steps.trace_train(state, batch).lower().compile().as_text()
  for _ in range(2):
    state, metrics = steps.train_step(state, batch)
  losses = metrics, steps.eval_step(state, batch)
  values = [metrics_lib.compute_metrics(jax.device_get(x))['loss'] for x in losses]
  return jax.device_get(state.params), *values, text


@pytest.mark.parametrize('kind', ['automatic', pytest.param('explicit', marks=pytest.mark.slow)])
def test_a_mesh_of_explicit_axes_changes_rounding_at_most(kind):
  """With a model that knows nothing of them, and one of 512 classes whose logits have types; the
  parameters are split over both axes.
  """
  model = toy.ToyModel()
  if kind == 'explicit':
    rule = integrate.Integrator(num_samples=2)
    head = TypedHead(num_classes=512, num_factors=2)
    model = models.ClassificationModel(backbones.Mlp((12,)), head, model.optimizer_def, rule, rule)
  TYPED.clear()
  *expected, _ = explicit_step(model, False)
  assert not TYPED
  *found, text = explicit_step(model, True)
  rounding = {'automatic': 0.0, 'explicit': 1e-6}[kind]
  same = functools.partial(np.testing.assert_allclose, rtol=rounding, atol=rounding)
  jax.tree.map(same, found, expected)
  assert bool(TYPED) == (kind == 'explicit')
  gathered = re.findall(r'\[([\d,]+)\]\S* all-gather\(', text)
  assert gathered and not [shape for shape in gathered if '512' in shape.split(',')]


def test_frozen_parameters_cost_no_backward_pass():
  partitioner = partitioning.PjitPartitioner(num_partitions=4)
  batch = partitioner.shard_batch(toy.make_batch(np.arange(8), np.ones(8)), 8)
  counts = []
  for pattern in (None, '^hidden'):
    model = toy.ToyModel(optimizer_def=optimizers.adamw(0.1, frozen_params=pattern))
    axes, state = toy.initial_state(model, partitioner, jax.random.key(1))
    steps = step_lib.Trainer(model, partitioner, axes, jax.random.key(2), num_microbatches=2)
    counts.append(flops.count_flops(steps.trace_train(state, batch).jaxpr.jaxpr))
  matmul = 2 * 8 * toy.WIDTH
  assert counts[0] - counts[1] == pytest.approx(matmul * (toy.SIDE**2 + toy.NUM_CLASSES), rel=0.1)
  before = jax.device_get(state.params)
  state, metrics = steps.train_step(state, batch)
  assert metrics['update'].compute()['gradient_norm'] > 0
  moved = jax.tree.map(lambda x, y: bool((x != y).any()), before, jax.device_get(state.params))
  assert moved == {name: not name.startswith('hidden') for name in before}


@pytest.mark.slow
def test_microbatches_of_a_loss_with_a_constant_factor_are_summed():
  assert_same(train(4, 4, factor=BATCH), train(4))


def test_microbatches_are_spread_over_the_data_axis_without_communication():
  partitioner = partitioning.PjitPartitioner(num_partitions=2)
  batch = partitioner.shard_batch({'index': np.arange(BATCH)}, BATCH)
  split = partitioner.partition(
    functools.partial(step_lib.split_microbatches, num_microbatches=4),
    (partitioner.data_partition_spec,),
    jax.sharding.PartitionSpec(None, 'data'),
  )
  pieces = split(batch)['index']
  assert pieces.shape == (4, BATCH // 4)
  assert sorted(np.asarray(pieces).ravel()) == list(range(BATCH))
  text = split.trace(batch).lower().compile().as_text()
  assert not any(word in text for word in ('all-to-all', 'all-gather', 'collective-permute'))


def test_metrics():
  values = train(1)[2]
  assert values['learning_rate'] == pytest.approx(1e-2)
  norm = np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(train(1)[0])))
  assert values['param_norm'] == pytest.approx(norm, rel=1e-5)
  assert 0 < values['update_norm'] < values['param_norm']
  assert values['gradient_norm'] > 0


@pytest.mark.parametrize(
  'num_microbatches, needs_whole_batch, words',
  [
    (4, False, 'batch_size=36 .* 16.*num_microbatches=4'),
    (2, True, 'num_microbatches=2 .*ToyModel'),
  ],
)
def test_bad_settings_are_named(num_microbatches, needs_whole_batch, words):
  partitioner = partitioning.PjitPartitioner(num_partitions=2)
  axes = partitioner.get_mesh_axes(train(1)[1])
  model = toy.ToyModel()
  model.needs_whole_batch = needs_whole_batch
  with pytest.raises(ValueError, match=words):
    steps = step_lib.Trainer(model, partitioner, axes, jax.random.key(0), num_microbatches)
    steps.check_batch_size(BATCH + 4)
