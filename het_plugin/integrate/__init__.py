"""Gaussian logits, and the expectation of their softmax or sigmoid."""

from het_plugin.integrate.classes import top_class
from het_plugin.integrate.cross_entropy import cross_entropy
from het_plugin.integrate.directions import Draws
from het_plugin.integrate.gaussian import (
  LINKS,
  REMAINDERS,
  GaussianLogits,
  Hashed,
  Linear,
  LowRank,
  Opaque,
  apply_projection,
  mirrored,
  project,
)
from het_plugin.integrate.integrator import AnyIntegrator, Integrator, Location, entropy
from het_plugin.integrate.samplers import SAMPLERS, example_keys, iid, shared_key, sobol

CONFIGURABLES = {'integrator': ('Integrator', 'Location')}
# Settings that may change between two starts of a run without changing its results
# (config/changes.py).
SAME_RESULTS = ('Integrator.max_bytes',)

__all__ = [
  'LINKS',
  'REMAINDERS',
  'SAMPLERS',
  'AnyIntegrator',
  'Draws',
  'GaussianLogits',
  'Hashed',
  'Integrator',
  'Linear',
  'Location',
  'LowRank',
  'Opaque',
  'apply_projection',
  'cross_entropy',
  'entropy',
  'example_keys',
  'iid',
  'mirrored',
  'project',
  'shared_key',
  'sobol',
  'top_class',
]
