"""TPU slices as GKE knows them: accelerator names, topologies, hosts.

The table is that of https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus#availability
("TPU availability in GKE"); names and machine types agree with xpk's system_characteristics.py.
"""

import dataclasses
import math

from het_plugin.planning import topology as topology_lib

DOCUMENTED = 'https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus'
CHIPS_PER_HOST = 4
_PLANE = ('2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16')


@dataclasses.dataclass(frozen=True)
class Generation:
  """A TPU generation on GKE.

  Attributes:
    accelerator: value of the node label cloud.google.com/gke-tpu-accelerator.
    machine_type: of node pools with four chips a host.
    topologies: all that there are, for generations with two dimensions.
    max_chips: of a slice, for generations with three, whose topologies follow a rule.
  """

  accelerator: str
  machine_type: str
  topologies: tuple[str, ...] = ()
  max_chips: int = 0


GENERATIONS = {
  'v3': Generation(
    'tpu-v3-slice',
    'ct3p-hightpu-4t',
    ('4x4', '4x8', '8x8', '8x16', '16x16', '16x32', '32x32'),
  ),
  'v4': Generation('tpu-v4-podslice', 'ct4p-hightpu-4t', max_chips=16 * 16 * 16),
  'v5e': Generation('tpu-v5-lite-podslice', 'ct5lp-hightpu-4t', _PLANE),
  'v5p': Generation('tpu-v5p-slice', 'ct5p-hightpu-4t', max_chips=16 * 16 * 24),
  'v6e': Generation('tpu-v6e-slice', 'ct6e-standard-4t', _PLANE),
  'tpu7x': Generation('tpu7x', 'tpu7x-standard-4t', max_chips=16 * 16 * 36),
}


@dataclasses.dataclass(frozen=True)
class Slice:
  """A slice of TPU chips that are wired together.

  Attributes:
    generation: key of GENERATIONS.
    shape: '4x8', the topology in chips.
  """

  generation: str
  shape: str

  @property
  def chips(self) -> int:
    return math.prod(map(int, self.shape.split('x')))

  @property
  def hosts(self) -> int:
    return self.chips // CHIPS_PER_HOST

  @property
  def accelerator(self) -> str:
    return GENERATIONS[self.generation].accelerator

  @property
  def machine_type(self) -> str:
    return GENERATIONS[self.generation].machine_type


def parse(topology: str, num_slices: int = 1) -> Slice:
  """The slice of 'v5e:4x4'.

  A v5e or v6e slice of 2x4 has two hosts here; GKE's machine type with all eight chips in one host
  is left out.

  Raises:
    ValueError: the topology is none that GKE has, or has too few hosts to be one of several slices.
  """
  generation, shape = topology_lib.parse(topology)
  if generation not in GENERATIONS:
    raise ValueError(
      f'--topology={topology}: GKE has no {generation} slices: choose from {", ".join(GENERATIONS)}'
    )
  known = GENERATIONS[generation]
  if known.topologies and shape not in known.topologies:
    raise ValueError(
      f'--topology={topology}: {generation} has the topologies {", ".join(known.topologies)} '
      f'({DOCUMENTED})'
    )
  if known.max_chips and not _is_box(shape, known.max_chips):
    raise ValueError(
      f'--topology={topology}: {generation} has 2x2x1, 2x2x2, 2x2x4, 2x4x4 and AxBxC of '
      f'multiples of 4, A <= B <= C, of up to {known.max_chips} chips ({DOCUMENTED})'
    )
  found = Slice(generation, shape)
  if num_slices < 1:
    raise ValueError(f'--num_slices={num_slices} must be at least 1')
  if num_slices > 1 and generation == 'v3':
    raise ValueError(f'--num_slices={num_slices}: several slices of v3 cannot work together')
  if num_slices > 1 and found.hosts == 1:
    raise ValueError(f'--num_slices={num_slices} needs slices of several hosts; {topology} has one')
  return found


def _is_box(shape: str, max_chips: int) -> bool:
  sides = [int(side) for side in shape.split('x')]
  if shape in ('2x2x1', '2x2x2', '2x2x4', '2x4x4'):
    return True
  return (
    len(sides) == 3
    and all(side % 4 == 0 and side > 0 for side in sides)
    and sides == sorted(sides)
    and math.prod(sides) <= max_chips
  )
