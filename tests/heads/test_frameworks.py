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


class Network(nn.Module):
  head: type

  @nn.compact
  def __call__(self, x):
    # The temperature is made in the scope of this module too.
    return self.head(5, temperature=LearnedTemperature(), name='head')(nn.Dense(6)(x))


@pytest.mark.parametrize('head', [Det, Het, HetH, HetXL])
def test_tau_is_a_parameter_of_the_head_inside_a_compact_module(head):
  params = Network(head).init(jax.random.key(1), PHI)['params']
  assert set(params) == {'Dense_0', 'head'}
  alone = head(5, temperature=LearnedTemperature()).init(jax.random.key(1), PHI)['params']
  assert jax.tree.structure(params['head']) == jax.tree.structure(alone)


def test_a_head_trains_in_nnx():
  head = HetXL(5, num_factors=2, temperature=LearnedTemperature())
  head = nnx.bridge.ToNNX(head, rngs=nnx.Rngs(0)).lazy_init(PHI)
  optimizer = nnx.Optimizer(head, optax.adam(1e-1), wrt=nnx.Param)
  integrator = Integrator(num_samples=8)
  before = head.temperature['t'].get_value()

  def loss(head):
    return integrator.nll(head(PHI), LABELS, example_keys(jax.random.key(2), jnp.arange(4))).mean()

  @nnx.jit
  def step(head, optimizer):
    value, gradients = nnx.value_and_grad(loss)(head)
    optimizer.update(head, gradients)
    return value

  losses = [float(step(head, optimizer)) for _ in range(5)]
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
