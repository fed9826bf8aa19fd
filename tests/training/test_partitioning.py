import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec

from het_plugin.training import optimizers, partitioning
from het_plugin.training.state import TrainState
from tests.training import toy

P = PartitionSpec


def make_state(model: toy.ToyModel) -> TrainState:
  """Shapes only."""
  return jax.eval_shape(
    lambda: TrainState.create(
      model.optimizer_def,
      model.get_initial_variables(jax.random.key(0), {'image': (8, toy.SIDE, toy.SIDE, 1)}),
    )
  )


@pytest.mark.parametrize(
  'setting, shape',
  [
    ({}, (8, 1)),
    ({'num_partitions': 4}, (2, 4)),
    ({'model_parallel_submesh': (1, 2, 1, 1)}, (4, 2)),
  ],
)
def test_mesh_shape(setting, shape):
  partitioner = partitioning.PjitPartitioner(**setting)
  assert partitioner.mesh.axis_names == ('data', 'model')
  assert (partitioner.data_shards, partitioner.model_shards) == shape


@pytest.mark.parametrize(
  'setting, words',
  [
    ({'num_partitions': 3}, 'num_partitions=3.* 8'),
    ({'num_partitions': 2, 'model_parallel_submesh': (1, 2)}, r'num_partitions .* 2 and \(1, 2\)'),
    ({'num_replicas': 4, 'num_partitions': 4}, 'num_partitions=4?.* 4 replicas, 2'),
    ({'logical_axis_rules': [('embed', 'modle')]}, "'modle'; .*'data', 'model'"),
  ],
)
def test_bad_settings_are_named(setting, words):
  with pytest.raises(ValueError, match=words):
    partitioning.PjitPartitioner(**setting)


def test_a_replica_axis_shares_the_batch_with_data():
  partitioner = partitioning.PjitPartitioner(num_partitions=2, num_replicas=2)
  assert dict(partitioner.mesh.shape) == {'replica': 2, 'data': 2, 'model': 2}
  assert (partitioner.data_shards, partitioner.model_shards) == (4, 2)
  assert partitioner.data_partition_spec == P(('replica', 'data'))
  assert ('batch', ('replica', 'data')) in partitioner.logical_axis_rules
  assert ('vocab', 'model') in partitioner.logical_axis_rules
  with pytest.raises(ValueError, match='batch_size=6 .* 4'):
    partitioner.check_batch_size(6)


@pytest.mark.parametrize('dims, embed', [(1, None), (2, 'data')])
def test_parameters_and_optimizer_state_are_split(dims, embed):
  rules = partitioning.standard_logical_axis_rules(parameter_partitioning_dims=dims)
  partitioner = partitioning.PjitPartitioner(num_partitions=4, logical_axis_rules=rules)
  axes = partitioner.get_mesh_axes(make_state(toy.ToyModel()))
  for tree in (axes.params, axes.opt_state[1][0].mu, axes.opt_state[1][0].nu):
    assert tree['head_kernel'] == P(embed, 'model')  # W [D, K]
    assert tree['head_bias'] == P('model')
    assert tree['hidden_kernel'] == P(None, embed)
    assert tree['temperature'] == P()
  assert axes.step == P()
  assert axes.opt_state[1][0].count == P()


def test_state_of_masked_optimizers_follows_the_parameters():
  optimizer = optax.multi_transform(
    {'head': optax.adam(1e-2), 'rest': optax.sgd(1e-2, momentum=0.9)},
    lambda params: {k: 'head' if k.startswith('head') else 'rest' for k in params},
  )
  state = make_state(toy.ToyModel(optimizer_def=optimizers.OptaxWrapper(optimizer)))
  axes = partitioning.PjitPartitioner(num_partitions=4).get_mesh_axes(state)
  adam = axes.opt_state.inner_states['head'].inner_state[0]
  assert adam.mu['head_kernel'] == adam.nu['head_kernel'] == P(None, 'model')


def test_factored_moments_are_split_along_the_dimension_that_they_keep():
  optimizer = optimizers.adamw(1e-2, factored_params='^head_kernel$')
  rules = partitioning.standard_logical_axis_rules(parameter_partitioning_dims=2)
  partitioner = partitioning.PjitPartitioner(num_partitions=4, logical_axis_rules=rules)
  axes = partitioner.get_mesh_axes(make_state(toy.ToyModel(optimizer_def=optimizer)))
  moments = axes.opt_state[0][0].inner_states['factored'].inner_state[0]
  kept = {moments.v_row['head_kernel'], moments.v_col['head_kernel']}
  assert kept == {P('data'), P('model')}  # of W [D, K]
  assert moments.v['head_kernel'] == P()


def test_indivisible_parameter_is_named():
  partitioner = partitioning.PjitPartitioner(num_partitions=4)
  with pytest.raises(ValueError, match=r"head_bias .*\(10,\).*'vocab' .* 10 .*4 shards"):
    partitioner.get_mesh_axes(make_state(toy.ToyModel(toy.Mlp(num_classes=10))))


@pytest.mark.parametrize(
  'layer, words',
  [
    (nn.Dense(3), 'bias .*param_with_axes'),
    (nn.BatchNorm(use_running_average=False), 'batch_stats'),
  ],
)
def test_layers_that_cannot_be_trained_are_named(layer, words):
  with pytest.raises(ValueError, match=words):
    make_state(toy.ToyModel(layer))


def test_batch_that_does_not_divide_is_named():
  partitioner = partitioning.PjitPartitioner()
  with pytest.raises(ValueError, match='batch_size=12.*8 shards'):
    partitioner.batch_rows(12)
  with pytest.raises(ValueError, match=r"batch\['index'\] .* 4 .* 8"):
    partitioner.shard_batch({'index': np.arange(4)}, 8)


def test_a_mesh_that_is_there_already():
  given = partitioning.PjitPartitioner(num_partitions=4)
  taken = partitioning.PjitPartitioner.on_mesh(given.mesh, given.logical_axis_rules)
  assert taken.mesh is given.mesh and (taken.data_shards, taken.model_shards) == (2, 4)
  state = make_state(toy.ToyModel())
  assert taken.get_mesh_axes(state) == given.get_mesh_axes(state)
  with pytest.raises(ValueError, match="'batch' to 'replica'; .*'data', 'model'"):
    partitioning.PjitPartitioner.on_mesh(given.mesh, [('batch', 'replica')])
