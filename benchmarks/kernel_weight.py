"""What HET-XL's loss costs beside DET's: CPU time, compilation and memory of loss and gradient.

    python -m benchmarks.kernel_weight [--sizes 5000x64x512x8,21843x384x64x50] [--json OUT]

Each row is the mean loss and its gradient by the head's parameters and phi. `det` is the plain loss
of all logits; `softmax, S = 4` is `Integrator(4).nll` of HET-XL, `sigmoid` the exact one, and
`independent` takes independent samples that follow no label, as the paper does. All are compiled,
and timed in turns in this process; cpu_seconds are the least of the repeats. compile_seconds are
CPU time of lowering and compiling, instructions those of the compiled program, also inside of
fusions, and temp_bytes what XLA says of it beyond its arguments and results.

--topology=v5e:2x2 adds `cycles`, which libtpu estimates for one core of such a slice. It has no
estimate for sorts and gathers.

Four minutes on two CPU cores; a minute with --sizes 64x8x8x2.
"""

import os
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.command_line import collect, integers, make_parser, sizes
from benchmarks.integrator import loss_of
from het_plugin import HetXL, Integrator
from het_plugin.planning import hlo, topology


def det(params, phi, labels):
  log_p = jax.nn.log_softmax(phi @ params['kernel'] + params['bias'])
  return -jnp.take_along_axis(log_p, labels[:, None], axis=1).mean()


def compare(args, size):
  """A row for each loss."""
  num_classes, dim, batch, num_factors = size
  rng = np.random.default_rng(0)
  phi = jnp.asarray(rng.normal(size=(batch, dim)), jnp.float32)
  labels = jnp.asarray(rng.integers(num_classes, size=batch), jnp.int32)
  head = HetXL(num_classes, num_factors=num_factors)
  params = jax.jit(head.init)(jax.random.key(0), phi)['params']
  losses = {'det': det}
  for s in args.samples:
    losses[f'softmax, S = {s}'] = loss_of(head, Integrator(s))
  independent = Integrator(args.samples[0], 'iid', rotate=False, tilt=False)
  losses[f'independent, S = {args.samples[0]}'] = loss_of(head, independent)
  losses['sigmoid'] = loss_of(head.clone(link='sigmoid'), Integrator())
  compiled = {}
  compile_seconds = {}
  for name, loss in losses.items():
    start = time.process_time()
    step = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(params, phi, labels)
    compiled[name] = step.compile()
    compile_seconds[name] = time.process_time() - start
  seconds = dict.fromkeys(losses, float('inf'))
  for _ in range(args.repeats):
    for name, step in compiled.items():
      start = time.process_time()
      jax.block_until_ready(step(params, phi, labels))
      seconds[name] = min(seconds[name], time.process_time() - start)
  for name, step in compiled.items():
    row = {}
    if args.topology:
      row['cycles'] = hlo.cycles(on_tpu(args.topology, losses[name], params, phi, labels))
    yield dict(
      loss=name,
      k=num_classes,
      d=dim,
      b=batch,
      cpu_seconds=seconds[name],
      ratio=seconds[name] / seconds['det'],
      compile_seconds=compile_seconds[name],
      instructions=step.as_text().count(' = '),
      temp_bytes=step.memory_analysis().temp_size_in_bytes,
      **row,
    )


def on_tpu(name, loss, *args):
  """The text of the program that libtpu makes of a loss and its gradient, for one core."""
  device = topology.get(name).devices[:1]
  mesh = jax.sharding.Mesh(np.array(device), ('data',))
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  step = jax.jit(jax.value_and_grad(loss, (0, 1)), in_shardings=whole)
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
  with jax.set_mesh(mesh):  # whose devices say how large tiles are
    return step.lower(*shapes).compile().as_text()


def main():
  parser = make_parser(__doc__)
  parser.add_argument(
    '--sizes',
    type=sizes('KxDxBxR'),
    default=[(5000, 64, 512, 8), (21843, 384, 64, 50)],
    help='KxDxBxR: classes, pre-logits, examples and factors',
  )
  parser.add_argument('--samples', type=integers, default=[4, 16, 64], help='values of S')
  parser.add_argument('--repeats', type=int, default=9, help='timed turns')
  parser.add_argument('--topology', help='a slice of TPUs, for their cycles; needs libtpu')
  args = parser.parse_args()
  if args.topology:
    topology.check(args.topology)
    os.environ |= topology.environment(args.topology)
  rows = (row for size in args.sizes for row in compare(args, size))
  rows = collect(args.json, (len(args.samples) + 3) * len(args.sizes), rows)
  for row in rows:
    if row['loss'] != 'det':
      print(f"K = {row['k']}, {row['loss']}: {row['ratio']:.1f} times the time of DET's loss")
  for row in rows if args.topology else ():
    print(f'K = {row["k"]}, {row["loss"]}: {row["cycles"] / 1e6:.2f} million cycles')


if __name__ == '__main__':
  main()
