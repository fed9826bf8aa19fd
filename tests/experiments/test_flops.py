"""FLOPs of heads: parts against the whole model, table 11's formulas against what is counted."""

import jax
import jax.numpy as jnp
import pytest

from het_plugin.backbones import vit
from het_plugin.experiments import flops
from het_plugin.heads import Det, Het, HetXL
from het_plugin.integrate import Integrator
from het_plugin.models import ClassificationModel
from het_plugin.training.flops import count_flops

K, D, R = 90, 16, 5
ORDER = 'sample_then_project'


def integrator(samples, order='auto'):
  return Integrator(num_samples=samples, order=order, chunk_size=2)


def test_backbone_and_head_make_the_model():
  encoder = vit('Ti/4', width=D, depth=1, mlp_dim=24, num_heads=2)
  head = HetXL(K, num_factors=R, class_multiple=1)
  model = ClassificationModel(encoder, head, None, integrator(4), integrator(6))
  batch = {'image': jnp.zeros((1, 8, 8, 3)), 'label': jnp.zeros((1, 1), jnp.int32)}
  params = model.get_initial_variables(jax.random.key(0), {'image': (1, 8, 8, 3)})['params']
  key = jax.random.key(0)
  train = jax.make_jaxpr(jax.grad(lambda p: model.loss_fn(p, batch, key)[0]))(params)
  body = flops.backbone_flops(encoder, (1, 8, 8, 3))
  cost = flops.head_flops(head, D, integrator(4), integrator(6))
  assert body.train + cost.train == count_flops(train.jaxpr)
  assert body.evaluation + cost.evaluation == pytest.approx(
    count_flops(jax.make_jaxpr(lambda p: model.score_batch(p, batch))(params).jaxpr)
  )
  assert 0 < body.evaluation < body.train and 0 < cost.evaluation < cost.train


@pytest.mark.parametrize('samples', [2, 8])
def test_the_formulas_are_what_is_counted(samples):
  """Their products of matrices; the rest is products and sums of vectors, which are not counted.
  HET-XL here also has the location W^T phi, D K, that the paper folds into the samples.
  """
  s = integrator(samples, ORDER)

  def products(head):
    return flops.head_flops(head, D, s, s).evaluation / 2

  vectors = 3 * samples
  het = flops.het_operations(K, D, R, samples) - vectors * K
  het_xl = flops.het_xl_operations(K, D, R, samples) - vectors * D
  assert products(Het(K, num_factors=R, class_multiple=1)) == het
  assert products(HetXL(K, num_factors=R, class_multiple=1)) == het_xl + D * K
  assert products(Det(K, class_multiple=1)) == D * K


def test_het_xl_takes_fewer_operations_up_to_the_crossing():
  k, d, r = 21_843, 2048, 50  # table 11's
  s = flops.crossing(k, d, r)
  assert 2 < s < 3
  for sign, samples in ((1, 2), (-1, 3)):
    gain = flops.het_operations(k, d, r, samples) - flops.het_xl_operations(k, d, r, samples)
    assert sign * gain > 0
  # at K = D both are of one size, and HET's samples take no W
  assert flops.crossing(50, 2, 60) is None
