"""Cycles that libtpu expects of the integrator, for loss and gradient on a TPU that is not here.

    python benchmarks/tpu_cycles.py [--topology v5e:2x2] [--links softmax,sigmoid] [--json OUT]

Sides: HET-XL compiled for one device of the topology by the paper's procedure, XLA's loop and the
fused kernels; for the link 'sigmoid' also by the exact method, whatever S: by XLA, which keeps all
projected factors, and by the fused kernels. XLA writes its estimate into the program, one per
operation; those of a loop's body count as often as it runs. A kernel counts the bundles of
instructions that libtpu dumps, which a TPU issues in this order, times its blocks: too many, since
some run for the first or last block only. Neither knows all waits for memory. So these numbers
choose between programs, and a TPU has to confirm them. Needs libtpu (the extra 'plan'); 20 seconds
per row on one CPU core.
"""

import functools
import math
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from command_line import integers, make_parser, names, report
from integrator import compile_loss, our_loss, reference_loss

from het_plugin.integrate import LINKS, Integrator, fused, kernels, tpu_kernels
from het_plugin.integrate.order import Plan
from het_plugin.integrate.placement import Placement
from het_plugin.planning import hlo, topology

DUMP = 'HET_PLUGIN_TPU_CYCLES_DUMP'  # the directory of this process's dumps
CHUNK_BYTES = 2**30  # so that the exact method keeps all projected factors
PROCEDURES = ('paper', 'xla', 'pallas')
EXACT = ('exact, xla', 'exact, pallas')  # of the link 'sigmoid'


def start_for(name):
  """Goes on as a process that compiles for the topology and dumps kernels."""
  if DUMP in os.environ:
    return
  environment = topology.environment(name)
  dump = tempfile.mkdtemp(prefix='tpu_cycles_')
  flags = f'--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true'
  environment |= {'LIBTPU_INIT_ARGS': flags, DUMP: dump}
  sys.stdout.flush()
  os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | environment)


def on(sharding):
  """(*shape, dtype=float32) -> the shape of an array that lies so."""

  def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  return array


def arguments(args, sharding):
  """Shapes of `integrator.make_arguments` for HET-XL, labels and a key."""
  array = on(sharding)

  x = {name: array(args.batch, args.dim) for name in ('phi', 'scale', 'diag')}
  x |= {
    'loading': array(args.factors, args.dim),
    'kernel': array(args.dim, args.classes),
    'bias': array(args.classes),
    'tau': array(),
  }
  key = jax.eval_shape(lambda: jax.random.key(0))
  return x, array(args.batch, 1, dtype=jnp.int32), array(dtype=key.dtype)


def program_cycles(text):
  """XLA's estimate for a compiled program, given as HLO text; custom calls count nothing."""
  computations, entry = hlo.parse(text)

  def of(computation):
    return sum(map(of_line, computations[computation].splitlines()))

  def of_line(line):
    if loop := re.search(r' while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)', line):
      return trips(loop[1]) * of(loop[2])
    estimate = re.search(r'"estimated_cycles":"(\d+)"', line)
    return int(estimate[1]) if estimate else 0

  def trips(condition):
    """The constant that the loop's counter stays below."""
    (trip,) = re.findall(r'= s32\[\]\S* constant\((\d+)\)', computations[condition])
    return int(trip)

  return of(entry)


def kernel_cycles(name, args, sharding, num_samples):
  """Cycles of a kernel of samples."""
  array = on(sharding)

  at_most = tpu_kernels.SUM_OF_CLASSES if name == 'log2_z' else tpu_kernels.SUM_OF_SAMPLES
  s, k = tpu_kernels.block_shape(at_most, num_samples, args.classes)
  class_blocks = math.ceil(args.classes / k)
  num_classes = class_blocks * k  # whole blocks: a rest has code of its own, and would count twice
  others = {
    'log2_z': [array(args.batch, dtype=jnp.int32)],
    'softmax_pull': [array(args.batch, num_samples)],
    'sigmoid_sums': [array(args.batch, num_classes), array(num_samples, dtype=bool)],
  }[name]
  z = array(args.batch, num_samples, args.factors + 2)
  rows = array(args.batch, args.factors + 2, num_classes)
  kernel = functools.partial(getattr(kernels, name), backend='tpu')
  blocks = args.batch * (num_samples // s) * class_blocks
  return bundles(name, kernel, z, rows, array(num_classes), *others) * blocks / num_cores(sharding)


def exact_kernel_cycles(args, sharding):
  """Cycles of the kernels of the exact method. One core takes all blocks of the second one."""
  array = on(sharding)
  shape = args.factors + 2, args.dim
  n, g, k = tpu_kernels.projected_blocks(args.batch, *shape, args.classes)
  arrays = array(g, *shape), array(args.dim, args.classes), *[array(g, args.classes)] * 2
  forward = bundles('last_and_squares', kernels.last_and_squares, *arrays[:2])
  backward = bundles('squares_pull', kernels.squares_pull, *arrays)
  return (forward / num_cores(sharding) + backward) * n * math.ceil(args.classes / k)


def num_cores(sharding):
  (device,) = sharding.device_set
  return device.num_cores


def bundles(name, kernel, *arrays):
  """Bundles of instructions in the code of one kernel."""
  dump = Path(os.environ[DUMP])
  shutil.rmtree(dump)
  dump.mkdir()
  jax.jit(kernel).lower(*arrays).compile()
  (path,) = (
    path for path in dump.glob(f'*-{name}*-final_bundles.txt') if 'schedule' not in path.name
  )
  return len(re.findall(r'^ *0x[0-9a-f]+ ', path.read_text(), re.MULTILINE))


def compile_side(args, sharding, link, num_samples, procedure):
  """One row: the cycles and temporary bytes of a side."""
  if procedure == 'paper':
    loss = reference_loss('het_xl', link, num_samples, None)
  else:
    *exact, implementation = procedure.split(', ')
    method = 'exact' if exact else 'sample'
    integrator = Integrator(
      num_samples,
      chunk_bytes=CHUNK_BYTES,
      implementation=implementation,
      sampler='iid',
      method=method,
    )
    loss = our_loss('het_xl', link, integrator, None, shared_draws=False)
  compiled = compile_loss(loss, *arguments(args, sharding))
  text = compiled.as_text()
  cycles = program_cycles(text)
  if procedure == 'exact, pallas':
    cycles += exact_kernel_cycles(args, sharding)
  elif 'tpu_custom_call' in text:  # not where few samples go through W
    plan = fused.plan_calls(Plan(num_samples, num_samples, None, True, Placement()))
    names = ('log2_z', 'softmax_pull') if link == 'softmax' else ('sigmoid_sums',)
    cycles += plan.num_chunks * sum(
      kernel_cycles(name, args, sharding, plan.chunk_size) for name in names
    )
  return dict(
    topology=args.topology,
    link=link,
    b=args.batch,
    d=args.dim,
    k=args.classes,
    r=args.factors,
    s=num_samples,
    procedure=procedure,
    cycles=cycles,
    temp_bytes=compiled.memory_analysis().temp_size_in_bytes,
  )


def main():
  parser = make_parser(__doc__)
  parser.add_argument('--topology', default='v5e:2x2', help='whose device, as of het_plugin.plan')
  parser.add_argument('--links', type=names(LINKS), default=['softmax'], help=','.join(LINKS))
  parser.add_argument('--samples', type=integers, default=[64, 1000], help='values of S')
  parser.add_argument('--batch', type=int, default=8, help='examples B of a device')
  parser.add_argument('--dim', type=int, default=1024, help='pre-logits D')
  parser.add_argument('--classes', type=int, default=21888, help='classes K')
  parser.add_argument('--factors', type=int, default=50, help='factors R')
  args = parser.parse_args()
  try:
    start_for(args.topology)
    device = topology.get(args.topology).devices[0]
    if device.platform != 'tpu':
      raise ValueError(f'--topology={args.topology} is no TPU: write one such as v5e:2x2')
  except ValueError as error:
    parser.error(str(error))
  sharding = jax.sharding.SingleDeviceSharding(device)
  rows = []
  for link in args.links:
    for s in args.samples:
      procedures = PROCEDURES + EXACT if link == 'sigmoid' else PROCEDURES
      sides = [compile_side(args, sharding, link, s, procedure) for procedure in procedures]
      for side in sides:
        side['cycles_ratio'] = sides[0]['cycles'] / side['cycles']
        side['memory_ratio'] = sides[0]['temp_bytes'] / side['temp_bytes']
      rows += sides
  shutil.rmtree(os.environ[DUMP])
  report(args.json, rows)
  paper, xla, pallas, *_ = sides
  print(
    f"{paper['link']}, S = {paper['s']}: of the paper's procedure XLA's loop takes 1 / "
    f'{xla["cycles_ratio"]:.1f} of the cycles, the fused kernels 1 / {pallas["cycles_ratio"]:.1f}'
  )


if __name__ == '__main__':
  main()
