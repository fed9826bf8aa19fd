"""Meshes of the virtual devices of the tests."""

import contextlib
import math

import jax
import pytest
from flax.linen import partitioning


def make_mesh(*shape, names=('data', 'model'), kind=jax.sharding.AxisType.Auto):
  """A mesh over the first devices; skips the test where there are fewer."""
  number = math.prod(shape)
  if jax.device_count() < number:
    pytest.skip(f'needs {number} devices')
  axis_types = (kind,) * len(shape)
  return jax.make_mesh(shape, names, axis_types=axis_types, devices=jax.devices()[:number])


@contextlib.contextmanager
def on_mesh(mesh, rules=(('batch', 'data'), ('vocab', 'model'))):
  """Sets a mesh and logical axis rules."""
  with jax.set_mesh(mesh), partitioning.axis_rules(rules):
    yield
