"""Gaussian logits and the expectation of their softmax or sigmoid."""

from het_plugin.integrate.gaussian import (
  LINKS,
  REMAINDERS,
  GaussianLogits,
  Hashed,
  Linear,
  LowRank,
  Opaque,
  apply_projection,
  project,
)
from het_plugin.integrate.integrator import (
  ORDERS,
  Integrator,
  multi_hot,
  num_class_shards,
  pick_order,
)
from het_plugin.integrate.samplers import example_keys, iid

__all__ = [
  'LINKS',
  'ORDERS',
  'REMAINDERS',
  'GaussianLogits',
  'Hashed',
  'Integrator',
  'Linear',
  'LowRank',
  'Opaque',
  'apply_projection',
  'example_keys',
  'iid',
  'multi_hot',
  'num_class_shards',
  'pick_order',
  'project',
]
