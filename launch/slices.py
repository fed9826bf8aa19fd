"""TPU slices on GKE: accelerator names, topologies and numbers of hosts.

The table follows "TPU availability in GKE", see DOCUMENTED; names and machine types agree with
xpk's system_characteristics.py.
"""

import math
from typing import NamedTuple

from het_plugin.planning import topology as topology_lib

DOCUMENTED = 'https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus'
CHIPS_PER_HOST = 4
# Values of the node label cloud.google.com/gke-tpu-accelerator.
ACCELERATORS = {
  'v3': 'tpu-v3-slice',
  'v4': 'tpu-v4-podslice',
  'v5e': 'tpu-v5-lite-podslice',
  'v5p': 'tpu-v5p-slice',
  'v6e': 'tpu-v6e-slice',
  'tpu7x': 'tpu7x',
}
_PLANE = ('2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16')
_PLANES = {
  'v3': ('4x4', '4x8', '8x8', '8x16', '16x16', '16x32', '32x32'),
  'v5e': _PLANE,
  'v6e': _PLANE,
}
_SMALL_BOXES = ('2x2x1', '2x2x2', '2x2x4', '2x4x4')


class Slice(NamedTuple):
  """TPU chips that are connected to each other: a node label, the shape in chips, hosts."""

  accelerator: str
  shape: str
  hosts: int


def parse(topology: str, num_slices: int = 1) -> Slice:
  """The slice that is called 'v5e:4x4', for example.

  A 2x4 slice of v5e or v6e has two hosts here. The machine type with eight chips per host is not
  supported.

  Raises:
    ValueError: GKE does not have the topology, or cannot combine several slices of it.
  """
  generation, shape = topology_lib.parse(topology)
  if generation not in ACCELERATORS:
    known = ', '.join(ACCELERATORS)
    raise ValueError(f'--topology={topology}: GKE has no {generation} slices: choose from {known}')
  if generation in _PLANES and shape not in _PLANES[generation]:
    known = ', '.join(_PLANES[generation])
    raise ValueError(f'--topology={topology}: {generation} has {known} ({DOCUMENTED})')
  sides = [int(side) for side in shape.split('x')]
  is_box = len(sides) == 3 and sides == sorted(sides) and not any(side % 4 for side in sides)
  if generation not in _PLANES and shape not in _SMALL_BOXES and not is_box:
    raise ValueError(
      f'--topology={topology}: {generation} has {", ".join(_SMALL_BOXES)} and AxBxC of multiples '
      f'of 4, A <= B <= C ({DOCUMENTED})'
    )
  hosts = math.prod(sides) // CHIPS_PER_HOST
  if num_slices > 1 and (generation == 'v3' or hosts == 1):
    raise ValueError(
      f'--num_slices={num_slices} needs slices of several hosts, and not of v3; {topology} cannot '
      'be combined'
    )
  return Slice(ACCELERATORS[generation], shape, hosts)
