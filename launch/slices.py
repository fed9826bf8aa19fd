"""TPU slices on GKE: accelerator names, topologies and numbers of hosts.

The table follows "TPU availability in GKE", see DOCUMENTED; names and machine types agree with
xpk's system_characteristics.py.
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
    topologies: all topologies, for generations with two dimensions.
    max_chips: largest slice, for generations with three dimensions, whose topologies follow a rule.
  """

  accelerator: str
  topologies: tuple[str, ...] = ()
  max_chips: int = 0


GENERATIONS = {
  'v3': Generation(
    'tpu-v3-slice',
    ('4x4', '4x8', '8x8', '8x16', '16x16', '16x32', '32x32'),
  ),
  'v4': Generation('tpu-v4-podslice', max_chips=16 * 16 * 16),
  'v5e': Generation('tpu-v5-lite-podslice', _PLANE),
  'v5p': Generation('tpu-v5p-slice', max_chips=16 * 16 * 24),
  'v6e': Generation('tpu-v6e-slice', _PLANE),
  'tpu7x': Generation('tpu7x', max_chips=16 * 16 * 36),
}


@dataclasses.dataclass(frozen=True)
class Slice:
  """A slice: TPU chips that are connected to each other.

  Attributes:
    generation: key of GENERATIONS.
    shape: topology in chips, for example '4x8'.
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


def parse(topology: str, num_slices: int = 1) -> Slice:
  """The slice that is called 'v5e:4x4', for example.

  A 2x4 slice of v5e or v6e has two hosts here. The machine type with eight chips per host is not
  supported.

  Raises:
    ValueError: GKE does not have the topology, or cannot combine several slices of it.
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
    raise ValueError(f'--num_slices={num_slices}: slices of v3 cannot be combined')
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
