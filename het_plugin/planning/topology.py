"""Devices that are not here: TPU slices by name, and virtual CPU devices."""

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
  """A TPU generation, from https://cloud.google.com/tpu/docs/system-architecture-tpu-vm.

  Attributes:
    hbm_gib: memory of a device, from the compiler's out-of-memory errors (libtpu 0.0.42).
    flops: peak bfloat16 FLOP/s of a chip.
    hbm_bytes: peak bytes/s of a chip's memory.
    link_bytes: bytes/s of one link between chips, in one direction.
    devices: number of devices that JAX shows per chip; v4 shows one, compiled as a 'megacore'.
    default_shape: the chips of one host, used if only the generation is given. A slice has as many
      dimensions.
  """

  hbm_gib: float
  flops: float
  hbm_bytes: float
  link_bytes: float
  devices: int = 1
  default_shape: str = '2x2'


CHIPS = {
  'v2': Chip(7.48, 45e12, 700e9, 62e9, devices=2),
  'v3': Chip(15.48, 123e12, 900e9, 82e9, devices=2),
  'v4': Chip(30.75, 275e12, 1228e9, 50e9, default_shape='2x2x1'),
  'v5e': Chip(15.75, 197e12, 819e9, 50e9),
  'v5p': Chip(95.74, 459e12, 2765e9, 100e9, default_shape='2x2x1'),
  'v6e': Chip(31.25, 918e12, 1640e9, 100e9),
  'tpu7x': Chip(94.75, 2307e12, 7380e9, 200e9, devices=2, default_shape='2x2x1'),
}


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
  if generation in CHIPS and (not shape or re.fullmatch(r'[1-9]\d*(x[1-9]\d*){1,2}', shape)):
    default = CHIPS[generation].default_shape
    dimensions = default.count('x') + 1
    if shape and shape.count('x') + 1 != dimensions:
      raise ValueError(
        f'--topology={name}: a slice of {generation} has {dimensions} dimensions, as {default}'
      )
    return generation, shape or default
  raise ValueError(
    f'--topology={name} is unknown: write cpu:N, or a TPU generation of '
    f'{", ".join(CHIPS)}, a colon and the shape of the slice in chips, such as v3:8x8, v4:4x4x8 '
    'or v5e:8x16'
  )


def check(name: str, num_slices: int = 1, mesh: Sequence[int] | None = None) -> None:
  """Raises ValueError for an impossible topology, or a mesh with another number of devices."""
  generation, shape = parse(name)
  if num_slices < 1:
    raise ValueError(f'--num_slices={num_slices} must be at least 1')
  if generation == 'cpu' and num_slices > 1:
    raise ValueError(f'--num_slices={num_slices} is for TPU topologies; {name} has no slices')
  devices = math.prod(map(int, shape.split('x'))) * num_slices
  devices *= CHIPS[generation].devices if generation in CHIPS else 1
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
  return Topology(name, description.devices, int(CHIPS[generation].hbm_gib * GIB))


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
  chip = CHIPS.get(parse(name)[0])
  if chip is None:
    return None
  passed = sum(c['bytes'] * (2 if c['kind'] == 'all-reduce' else 1) for c in collectives)
  parts = {
    'compute': flops / (chip.flops / chip.devices),
    'memory': hbm_bytes / (chip.hbm_bytes / chip.devices),
    'collectives': passed / (2 * chip.link_bytes / chip.devices),
  }
  return parts | {'with_overlap': max(parts.values()), 'without_overlap': sum(parts.values())}
