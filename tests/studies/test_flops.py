"""FLOPs of heads: parts against the whole model."""

import jax
import jax.numpy as jnp
import pytest

from het_plugin.backbones import vit
from het_plugin.heads import HetXL
from het_plugin.integrate import Integrator
from het_plugin.models import ClassificationModel
from het_plugin.training.flops import count_flops
from studies import flops

K = 90
D = 16
R = 5


def integrator(samples):
  return Integrator(num_samples=samples)


@pytest.mark.slow
def test_backbone_and_head_make_the_model():
  encoder = vit('Ti/4', width=D, depth=1, mlp_dim=24, num_heads=2)
  head = HetXL(K, num_factors=R, class_multiple=1)
  model = ClassificationModel(encoder, head, None, integrator(4), integrator(6))
  batch = {'image': jnp.zeros((1, 8, 8, 3)), 'label': jnp.zeros((1, 1), jnp.int32)}
  key = jax.random.key(0)
  shapes = {'image': (1, 8, 8, 3)}
  params = jax.eval_shape(lambda: model.get_initial_variables(key, shapes)['params'])
  train = jax.make_jaxpr(jax.grad(lambda p: model.loss_fn(p, batch, key)[0]))(params)
  body = flops.backbone_flops(encoder, (1, 8, 8, 3))
  cost = flops.head_flops(head, D, integrator(4), integrator(6))
  assert body.train + cost.train == count_flops(train.jaxpr)
  assert body.evaluation + cost.evaluation == pytest.approx(
    count_flops(jax.make_jaxpr(lambda p: model.score_batch(p, batch))(params).jaxpr)
  )
  assert 0 < body.evaluation < body.train and 0 < cost.evaluation < cost.train
