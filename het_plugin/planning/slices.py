"""TPU slices that can be had: generations, shapes, hosts, machine types. Needs no other package.

python3 het_plugin/planning/slices.py v5e:4x4    # flags of a queued resource
"""

import dataclasses
import math
import re
import sys
from collections.abc import Mapping

CHIPS_PER_HOST = 4  # of every slice of several hosts


@dataclasses.dataclass(frozen=True)
class Generation:
  """A TPU generation.

  Attributes:
    shapes: the slices that exist, in chips, the smallest first.
    machines: machine type on GKE by chips per host; none if GKE does not have the generation.
    label: value of the node label cloud.google.com/gke-tpu-accelerator.
    alone: label and machine type of a slice of one host, if they are others.
    queued: flags by which a queued resource asks for the slice, with {shape}, {chips} or {cores};
      none if there are no TPU VMs of the generation. v2 and v3 count cores, two per chip.
    runtime: software version of the TPU VMs, https://cloud.google.com/tpu/docs/runtimes.
    hbm_gib: memory of a device, from the compiler's out-of-memory errors (libtpu 0.0.50.1).
    flops: peak bfloat16 FLOP/s of a chip.
    hbm_bytes: peak bytes/s of a chip's memory.
    link_bytes: bytes/s of one link between chips, in one direction.
    devices: number of devices that JAX shows per chip; v4 shows one, compiled as a 'megacore'.
    default_shape: the chips of one host, used if only the generation is given. A slice has as many
      dimensions.
    placement_policy: slices of several hosts are placed on GKE by a workload policy.
    multislice: GKE combines several slices.
  """

  shapes: tuple[str, ...]
  machines: Mapping[int, str]
  label: str
  queued: str
  runtime: str
  hbm_gib: float
  flops: float
  hbm_bytes: float
  link_bytes: float
  alone: tuple[str, str] | None = None
  devices: int = 1
  default_shape: str = '2x2'
  placement_policy: bool = False
  multislice: bool = True


def cubes(most_chips: int) -> tuple[str, ...]:
  """Shapes of three dimensions: parts of a cube of 4x4x4 chips, and A <= B <= C of whole cubes."""
  most = most_chips // 64
  whole = [
    (a, b, c)
    for a in range(1, most + 1)
    for b in range(a, most // a + 1)
    for c in range(b, most // (a * b) + 1)
  ]
  whole.sort(key=math.prod)
  return (
    '2x2x1',
    '2x2x2',
    '2x2x4',
    '2x4x4',
    *(f'{4 * a}x{4 * b}x{4 * c}' for a, b, c in whole),
  )


_POD_256 = ('1x1', '2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16')  # of v5e and v6e

# Sources, in the stored copies of 2025 and 2026 that were read on 2026-11-29:
# - shapes: cloud.google.com/tpu/docs/v2 (v2-8, -32, -128, -256 and -512 cores; v2-64 is not in its
#   list), /v5e, /v6e (its table has the machine types, too), /v5p (at most 16x16x24, 6,144 of the
#   pod's 8,960 chips). Its table has the most common shapes; the rule of `cubes` is that of
#   github.com/AI-Hypercomputer/xpk, core/system_characteristics.py, of 2026-06-25, also for tpu7x;
#   the pods' sizes are from /v4 (4,096 chips) and /tpu7x (9,216). The shapes of v3 follow from the
#   sizes v3-8, v3-32 to v3-2048 and the pod of 1,024 chips (/v3); no table of them was found.
# - GKE: cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus for labels and machine types.
#   Its rows of v3 were not found: ct3-hightpu-4t and ct3p-hightpu-4t have no source at hand.
# - placement: cloud.google.com/kubernetes-engine/docs/concepts/tpu-ironwood; several slices:
#   /docs/how-to/tpu-multislice (not of v3, and not of one host).
# - rates: cloud.google.com/tpu/docs/system-architecture-tpu-vm and the pages of the versions.
GENERATIONS = {
  'v2': Generation(
    shapes=('2x2', '4x4', '8x8', '8x16', '16x16'),
    machines={},
    label='',
    queued='--accelerator-type=v2-{cores}',
    runtime='tpu-ubuntu2204-base',
    hbm_gib=7.48,
    flops=45e12,
    hbm_bytes=700e9,
    link_bytes=62e9,
    devices=2,
  ),
  'v3': Generation(
    shapes=('2x2', '4x4', '4x8', '8x8', '8x16', '16x16', '16x32', '32x32'),
    machines={4: 'ct3p-hightpu-4t'},
    label='tpu-v3-slice',
    alone=('tpu-v3-device', 'ct3-hightpu-4t'),
    queued='--accelerator-type=v3-{cores}',
    runtime='tpu-ubuntu2204-base',
    hbm_gib=15.48,
    flops=123e12,
    hbm_bytes=900e9,
    link_bytes=82e9,
    devices=2,
    multislice=False,
  ),
  'v4': Generation(
    shapes=cubes(4096),
    machines={4: 'ct4p-hightpu-4t'},
    label='tpu-v4-podslice',
    queued='--type=v4 --topology={shape}',
    runtime='tpu-ubuntu2204-base',
    hbm_gib=30.75,
    flops=275e12,
    hbm_bytes=1228e9,
    link_bytes=50e9,
    default_shape='2x2x1',
  ),
  'v5e': Generation(
    shapes=_POD_256,
    machines={1: 'ct5lp-hightpu-1t', 4: 'ct5lp-hightpu-4t', 8: 'ct5lp-hightpu-8t'},
    label='tpu-v5-lite-podslice',
    queued='--accelerator-type=v5litepod-{chips}',
    runtime='v2-alpha-tpuv5-lite',
    hbm_gib=15.75,
    flops=197e12,
    hbm_bytes=819e9,
    link_bytes=50e9,
  ),
  'v5p': Generation(
    shapes=cubes(6144),
    machines={4: 'ct5p-hightpu-4t'},
    label='tpu-v5p-slice',
    queued='--type=v5p --topology={shape}',
    runtime='v2-alpha-tpuv5',
    hbm_gib=95.73,
    flops=459e12,
    hbm_bytes=2765e9,
    link_bytes=100e9,
    default_shape='2x2x1',
  ),
  'v6e': Generation(
    shapes=_POD_256,
    machines={1: 'ct6e-standard-1t', 4: 'ct6e-standard-4t', 8: 'ct6e-standard-8t'},
    label='tpu-v6e-slice',
    queued='--accelerator-type=v6e-{chips}',
    runtime='v2-alpha-tpuv6e',
    hbm_gib=31.24,
    flops=918e12,
    hbm_bytes=1640e9,
    link_bytes=100e9,
  ),
  'tpu7x': Generation(
    shapes=('1x1x1', *cubes(9216)),
    machines={1: 'tpu7x-standard-1t', 4: 'tpu7x-standard-4t'},
    label='tpu7x',
    queued='',
    runtime='',
    hbm_gib=94.74,
    flops=2307e12,
    hbm_bytes=7380e9,
    link_bytes=200e9,
    devices=2,
    default_shape='2x2x1',
    placement_policy=True,
  ),
}


@dataclasses.dataclass(frozen=True)
class Hosts:
  """The hosts of a slice on GKE; each has `chips` chips. The label is that of `Generation`."""

  generation: str
  shape: str
  label: str
  machine: str
  chips: int
  count: int


def parse(name: str) -> tuple[str, str]:
  """The generation and the shape of a slice that is called 'v5e:4x4', for example.

  Raises:
    ValueError: the name has another form, or there is no such slice.
  """
  generation, _, shape = name.partition(':')
  if generation not in GENERATIONS or not re.fullmatch(r'([1-9]\d*(x[1-9]\d*){1,2})?', shape):
    raise ValueError(
      f'--topology={name} is unknown: write a TPU generation of {", ".join(GENERATIONS)}, a colon '
      'and the shape of the slice in chips, such as v3:8x8, v4:4x4x8 or v5e:8x16'
    )
  slices = GENERATIONS[generation]
  shape = shape or slices.default_shape
  if shape not in slices.shapes:
    raise ValueError(
      f'--topology={name}: there is no {shape} slice of {generation}; the nearest that exist are '
      f'{" and ".join(nearest(generation, shape))}'
    )
  return generation, shape


def num_chips(shape: str) -> int:
  return math.prod(_sides(shape))


def nearest(generation: str, shape: str) -> list[str]:
  """The two shapes of a generation whose sides, then whose chips, are nearest by their ratios."""
  sides = sorted(_sides(shape))

  def distance(other: str) -> tuple[float, float]:
    others = sorted(_sides(other))
    short, long = sorted((sides, others), key=len)
    short = [1] * (len(long) - len(short)) + short
    ratios = [math.log2(b / a) for a, b in zip(short, long, strict=True)]
    return sum(map(abs, ratios)), abs(sum(ratios))

  return sorted(GENERATIONS[generation].shapes, key=distance)[:2]


def _sides(shape: str) -> list[int]:
  return [int(side) for side in shape.split('x')]


def xpk_type(generation: str, shape: str) -> str:
  """What xpk (0.14 and newer) calls a slice.

  The names have the shape: those with a number of cores, such as v5p-512, stand for one of several
  shapes.

  Raises:
    ValueError: xpk does not have the slice.
  """
  if generation == 'v3':
    raise ValueError('--topology=v3: xpk has slices of v4, v5e, v5p, v6e and tpu7x')
  if generation == 'v5e' and num_chips(shape) <= CHIPS_PER_HOST:
    raise ValueError(f'--topology=v5e:{shape}: the smallest slice of v5e that xpk has is 2x4')
  return f'{"v5litepod" if generation == "v5e" else generation}-{shape}'


def hosts(name: str, num_slices: int = 1, chips_per_host: int | None = None) -> Hosts:
  """The hosts of a slice on GKE.

  A slice of 2x4 chips has two hosts of four chips by default; with `chips_per_host` = 8, it is one
  host.

  Raises:
    ValueError: GKE does not have the slice or the hosts, or cannot combine several such slices.
  """
  known = [generation for generation, slices in GENERATIONS.items() if slices.machines]
  if name.partition(':')[0] not in known:
    raise ValueError(
      f'--topology={name}: GKE has slices of {", ".join(known)}; write v5e:4x4, for example'
    )
  generation, shape = parse(name)
  slices = GENERATIONS[generation]
  chips = num_chips(shape)
  # Hosts of one or eight chips are slices by themselves.
  several = CHIPS_PER_HOST if chips > CHIPS_PER_HOST else None
  possible = [size for size in slices.machines if size in (chips, several)]
  if chips_per_host not in (None, *possible):
    raise ValueError(
      f'--chips_per_host={chips_per_host}: a slice {generation}:{shape} has hosts of '
      f'{" or ".join(map(str, possible))} chips'
    )
  size = chips_per_host or possible[0]
  count = chips // size
  if num_slices > 1 and (count == 1 or not slices.multislice):
    raise ValueError(
      f'--num_slices={num_slices} needs slices of several hosts, and not of v3; {name} cannot be '
      'combined'
    )
  one_machine = slices.label, slices.machines[size]
  label, machine = slices.alone if count == 1 and slices.alone else one_machine
  return Hosts(generation, shape, label, machine, size, count)


def queued_resource(name: str) -> list[str]:
  """Flags of `gcloud compute tpus queued-resources create` for the TPU VMs of a slice.

  Raises:
    ValueError: there is no such slice, or it has no TPU VMs.
  """
  generation, shape = parse(name)
  slices = GENERATIONS[generation]
  if not slices.queued:
    known = [generation for generation, slices in GENERATIONS.items() if slices.queued]
    raise ValueError(f'--topology={name}: queued resources are of {", ".join(known)}')
  chips = num_chips(shape)
  flags = slices.queued.format(shape=shape, chips=chips, cores=2 * chips)
  return [*flags.split(), f'--runtime-version={slices.runtime}']


if __name__ == '__main__':  # launch/tpu_vm.sh
  try:
    print(*queued_resource(sys.argv[1]))
  except ValueError as wrong:
    sys.exit(f'Error: {wrong}')
