"""Reading compiled programs, and devices that are not here to compile them for."""

import re

import pytest

COLLECTIVE = re.compile(
  r' (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\('
)


def tpu_devices(name='v5e:2x4'):
  """Devices of a TPU topology, for compiling ahead of time; skips the test without libtpu."""
  pytest.importorskip('libtpu', reason="libtpu, the extra 'plan', is not installed")
  from jax.experimental import topologies

  return topologies.get_topology_desc(platform='tpu', topology_name=name).devices


def collectives(hlo):
  """Names of the collectives of a compiled program: (inside loops, outside)."""
  computations = dict(re.findall(r'^(?:ENTRY )?%?([\w.-]+) \(.*?\{\n(.*?)^\}', hlo, re.M | re.S))
  inside = set()
  pending = re.findall(r'body=%?([\w.-]+)', hlo)
  while pending:
    name = pending.pop()
    if name in computations and name not in inside:
      inside.add(name)
      pending += re.findall(r'(?:body|calls|to_apply)=%?([\w.-]+)', computations[name])
  found = {name: COLLECTIVE.findall(text) for name, text in computations.items()}
  return (
    [op for name in inside for op in found[name]],
    [op for name in found.keys() - inside for op in found[name]],
  )
