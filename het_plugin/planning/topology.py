"""Devices that are not here: TPU slices by name, and virtual CPU devices."""

import dataclasses
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence

import jax

GIB = 2**30
# GiB per device, from the compiler's out-of-memory errors (libtpu 0.0.42). v2, v3 and tpu7x show
# two devices per chip; v4 shows one, compiled as a 'megacore'.
HBM_GIB = {
  'v2': 7.48,
  'v3': 15.48,
  'v4': 30.75,
  'v5e': 15.75,
  'v5p': 95.74,
  'v6e': 31.25,
  'tpu7x': 94.75,
}
# The chips of one host, where only the generation is given.
DEFAULT_SHAPE = {'v4': '2x2x1', 'v5p': '2x2x1', 'tpu7x': '2x2x1'}
GET_LIBTPU = (
  "ahead-of-time compilation for TPUs needs libtpu (no TPU): pip install 'het_plugin[plan]', or "
  'use --topology=cpu:N'
)


@dataclasses.dataclass(frozen=True)
class Topology:
  """Devices to compile for.

  Attributes:
    name: as given, such as 'v3:8x8' or 'cpu:8'.
    devices: of all slices.
    hbm_bytes: memory of one device that programs may use.
    num_slices: TPU slices, joined by the data-center network.
  """

  name: str
  devices: Sequence[jax.Device]
  hbm_bytes: int
  num_slices: int = 1

  @property
  def device_kind(self) -> str:
    return self.devices[0].device_kind


def parse(name: str) -> tuple[str, str]:
  """(generation, shape) of 'v3:8x8', or ('cpu', number of devices) of 'cpu:8'.

  Raises:
    ValueError: for any other form.
  """
  generation, _, shape = name.partition(':')
  if generation == 'cpu' and re.fullmatch(r'[1-9]\d*', shape):
    return generation, shape
  if generation in HBM_GIB and (not shape or re.fullmatch(r'\d+(x\d+){1,2}', shape)):
    return generation, shape or DEFAULT_SHAPE.get(generation, '2x2')
  raise ValueError(
    f'--topology={name} is unknown: write cpu:N, or a TPU generation of '
    f'{", ".join(HBM_GIB)}, a colon and the shape of the slice in chips, such as v3:8x8, v4:4x4x8 '
    'or v5e:8x16'
  )


def check(name: str, num_slices: int) -> None:
  """Checks what can be checked without the compiler.

  Raises:
    ValueError: for a topology or a number of slices that cannot be.
  """
  generation, _ = parse(name)
  if num_slices < 1:
    raise ValueError(f'--num_slices={num_slices} must be at least 1')
  if generation == 'cpu' and num_slices > 1:
    raise ValueError(f'--num_slices={num_slices} is for TPU topologies; {name} has no slices')


def environment(name: str) -> Mapping[str, str]:
  """Environment variables that a process which compiles for the topology must start with."""
  variables = {
    'JAX_PLATFORMS': 'cpu',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # else two such processes wait for one lock file
    'TPU_SKIP_MDS_QUERY': '1',  # this machine has no metadata server
  }
  generation, shape = parse(name)
  if generation == 'cpu':
    variables['XLA_FLAGS'] = f'--xla_force_host_platform_device_count={shape}'
  return variables


def get(name: str, num_slices: int = 1) -> Topology:
  """The devices of a topology, in a process with the `environment` of its name.

  Raises:
    ValueError: for an unknown name or a shape that the generation does not have, or where libtpu is
      missing.
  """
  check(name, num_slices)
  generation, shape = parse(name)
  if generation == 'cpu':
    devices = jax.devices()[: int(shape)]
    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    return Topology(name, devices, memory // int(shape))

  from jax.experimental import topologies

  options = {'num_slices': num_slices} if num_slices > 1 else {}
  if generation == 'v4':
    options['chip_config_name'] = 'megacore'
  if importlib.util.find_spec('libtpu') is None:
    raise ValueError(GET_LIBTPU)
  try:
    description = topologies.get_topology_desc(
      platform='tpu', topology_name=f'{generation}:{shape}', **options
    )
  except Exception as error:  # its type depends on the version of libtpu
    raise ValueError(f'--topology={name}: libtpu does not take it: {error}') from error
  return Topology(name, description.devices, int(HBM_GIB[generation] * GIB), num_slices)
