"""Heads inside other people's linen modules."""

import flax.linen as nn
import jax
import pytest

from het_plugin.heads import (
  ContrastiveHetXL,
  Det,
  Het,
  HetH,
  HetXL,
  LearnedTemperature,
  LogitScale,
)

PHI = jax.random.normal(jax.random.key(0), (4, 6))


class Network(nn.Module):
  head: type

  @nn.compact
  def __call__(self, x):
    # The temperature is made in the scope of this module too.
    return self.head(5, temperature=LearnedTemperature(), name='head')(nn.Dense(6)(x))


@pytest.mark.parametrize('head', [Det, Het, HetH, HetXL])
def test_tau_is_a_parameter_of_the_head_inside_a_compact_module(head):
  params = jax.eval_shape(Network(head).init, jax.random.key(1), PHI)['params']
  assert set(params) == {'Dense_0', 'head'}
  alone = head(5, temperature=LearnedTemperature())
  alone = jax.eval_shape(alone.init, jax.random.key(1), PHI)['params']
  assert jax.tree.structure(params['head']) == jax.tree.structure(alone)


def test_a_contrastive_head_keeps_tau_below_itself():
  class Towers(nn.Module):
    @nn.compact
    def __call__(self, x):
      head = ContrastiveHetXL(num_factors=2, temperature=LogitScale(3.0), name='head')
      return head(nn.Dense(6)(x), nn.Dense(6)(x))

  params = jax.eval_shape(Towers().init, jax.random.key(1), PHI)['params']
  assert set(params['head']) == {'image_to_text', 'text_to_image', 'temperature'}
  assert set(params) == {'Dense_0', 'Dense_1', 'head'}
