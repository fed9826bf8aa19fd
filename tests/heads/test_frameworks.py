"""Heads inside other people's flax: linen parents, tabulate and nnx."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from het_plugin.heads import (
  ContrastiveHetXL,
  Det,
  Het,
  HetH,
  HetXL,
  LearnedTemperature,
  LogitScale,
)
from het_plugin.integrate import Integrator, example_keys

PHI = jax.random.normal(jax.random.key(0), (4, 6))
LABELS = jnp.array([[0], [1], [2], [3]])
HEADS = {
  'det': lambda **names: Det(5, temperature=LearnedTemperature(), **names),
  'het': lambda **names: Het(5, num_factors=2, temperature=LearnedTemperature(), **names),
  'het_h': lambda **names: HetH(5, num_factors=2, temperature=LearnedTemperature(), **names),
  'het_xl': lambda **names: HetXL(5, num_factors=2, temperature=LearnedTemperature(), **names),
}
heads = pytest.mark.parametrize('make', HEADS.values(), ids=HEADS)


class Network(nn.Module):
  make: object

  @nn.compact
  def __call__(self, x):
    # The temperature is made in the scope of this module too.
    return self.make(name='head')(nn.Dense(6)(x))


@heads
def test_tau_is_a_parameter_of_the_head_inside_a_compact_module(make):
  params = Network(make).init(jax.random.key(1), PHI)['params']
  assert set(params) == {'Dense_0', 'head'}
  alone = make().init(jax.random.key(1), PHI)['params']
  assert jax.tree.structure(params['head']) == jax.tree.structure(alone)


@heads
def test_a_head_trains_in_nnx(make):
  head = nnx.bridge.ToNNX(make(), rngs=nnx.Rngs(0)).lazy_init(PHI)
  optimizer = nnx.Optimizer(head, optax.adam(1e-1), wrt=nnx.Param)
  integrator = Integrator(num_samples=8)
  before = head.temperature['t'].get_value()

  def loss(head):
    return integrator.nll(head(PHI), LABELS, example_keys(jax.random.key(2), jnp.arange(4))).mean()

  losses = []
  for _ in range(5):
    value, gradients = nnx.value_and_grad(loss)(head)
    optimizer.update(head, gradients)
    losses.append(float(value))
  assert losses[-1] < losses[0]
  assert head.temperature['t'].get_value() != before


def test_a_contrastive_head_keeps_tau_below_itself():
  class Towers(nn.Module):
    @nn.compact
    def __call__(self, x):
      head = ContrastiveHetXL(num_factors=2, temperature=LogitScale(3.0), name='head')
      return head(nn.Dense(6)(x), nn.Dense(6)(x))

  params = Towers().init(jax.random.key(1), PHI)['params']
  assert set(params['head']) == {'image_to_text', 'text_to_image', 'temperature'}
  assert set(params) == {'Dense_0', 'Dense_1', 'head'}
