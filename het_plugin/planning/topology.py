"""Devices that are not here: TPU slices by name, and virtual CPU devices."""

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from het_plugin.planning import slices

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Topology:
  """Devices to compile for.

  The devices are of all slices, and programs may use `hbm_bytes` of each one's memory.
  """

  name: str
  devices: Sequence[jax.Device]
  hbm_bytes: int

  @property
  def device_kind(self) -> str:
    return self.devices[0].device_kind


def parse(name: str) -> tuple[str, str]:
  """(generation, shape) of 'v3:8x8', or ('cpu', number) of 'cpu:8'; ValueError for others."""
  generation, _, shape = name.partition(':')
  if generation == 'cpu' and re.fullmatch(r'[1-9]\d*', shape):
    return generation, shape
  try:
    return slices.parse(name)
  except ValueError as error:
    others = '' if generation in slices.GENERATIONS else ', or cpu:N for N virtual CPU devices'
    raise ValueError(f'{error}{others}') from error


def check(name: str, num_slices: int = 1, mesh: Sequence[int] | None = None) -> None:
  """Raises ValueError for an impossible topology, or a mesh with another number of devices."""
  generation, shape = parse(name)
  if generation == 'cpu' and num_slices > 1:
    raise ValueError(f'--num_slices={num_slices} is for TPU topologies; {name} has no slices')
  devices = slices.num_chips(shape) * num_slices
  if generation != 'cpu':
    devices *= slices.GENERATIONS[generation].devices
  if mesh and math.prod(mesh) != devices:
    raise ValueError(
      f'--mesh={",".join(map(str, mesh))} has {math.prod(mesh)} devices; '
      f'{f"{num_slices} slices of " if num_slices > 1 else ""}{name} has {devices}'
    )


def environment(name: str) -> Mapping[str, str]:
  """Environment variables that a process which compiles for the topology must start with."""
  variables = {
    'JAX_PLATFORMS': 'cpu',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # else two such processes wait for one lock file
    'TPU_SKIP_MDS_QUERY': '1',  # this machine has no metadata server
  }
  generation, shape = parse(name)
  if generation == 'cpu':
    count = f'--xla_force_host_platform_device_count={shape}'  # the last one counts
    variables['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {count}'.strip()
  return variables


def get(name: str, num_slices: int = 1) -> Topology:
  """The devices of a topology, in a process with the `environment` of its name.

  Raises:
    ValueError: the name is unknown, the generation does not have this shape, or libtpu is missing.
  """
  generation, shape = parse(name)
  if generation == 'cpu':
    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    return Topology(name, jax.devices()[: int(shape)], memory // int(shape))

  from jax.experimental import topologies

  if importlib.util.find_spec('libtpu') is None:
    raise ValueError(
      'ahead-of-time compilation for TPUs needs libtpu (no TPU): pip install '
      "'het_plugin[plan]', or use --topology=cpu:N"
    )
  options = {'num_slices': num_slices} if num_slices > 1 else {}
  if generation == 'v4':
    options['chip_config_name'] = 'megacore'
  try:
    description = topologies.get_topology_desc(
      platform='tpu', topology_name=f'{generation}:{shape}', **options
    )
  except Exception as error:  # its type depends on the version of libtpu
    raise ValueError(f'--topology={name}: libtpu refuses it: {error}') from error
  return Topology(name, description.devices, int(slices.GENERATIONS[generation].hbm_gib * GIB))


def step_seconds(
  name: str,
  flops: float,
  hbm_bytes: float,
  collectives: Sequence[Mapping[str, Any]],
) -> dict[str, float] | None:
  """Seconds per step at the peak rates of the chips, from the work of one device; None for CPUs.

  An estimate: the longest of the three times if they overlap, and their sum if not. Only the time
  of the compute is a bound, for all FLOPs count as bfloat16. `hbm_bytes` is what XLA counts as read
  and written, which includes the chip's fast memory, and the body of a loop once. A collective is a
  ring over links of both directions, and passes all its bytes, an all-reduce twice; a ring of n
  devices passes (n - 1) / n of them. The network between slices is left out. `collectives` are
  those of `hlo.collectives` as dicts.
  """
  chip = slices.GENERATIONS.get(parse(name)[0])
  if chip is None:
    return None
  passed = sum(c['bytes'] * (2 if c['kind'] == 'all-reduce' else 1) for c in collectives)
  parts = {
    'compute': flops / (chip.flops / chip.devices),
    'memory': hbm_bytes / (chip.hbm_bytes / chip.devices),
    'collectives': passed / (2 * chip.link_bytes / chip.devices),
  }
  return parts | {'with_overlap': max(parts.values()), 'without_overlap': sum(parts.values())}
