"""Our batch softmax against the plain one over 8 devices: seconds and memory of loss and gradient.

    python -m benchmarks.contrastive_loss [--losses det,het_xl] [--samples 1] [--json OUT]

The plain loss is what one writes down: all similarities [B, B] (with noise [B, S, B], for each
direction), `jax.nn.log_softmax` along both sides, differentiated by JAX and cut over the devices by
the compiler. Both sides get the same arrays, cut over the data axis, are compiled, and are timed in
turns in this process; seconds are the median of the repeats. Memory is what XLA says of a device's
part of the compiled program beyond its arguments and results. DET and HET-XL with one sample take
four minutes on two CPU cores, seconds with --batch 64 --dim 8 --repeats 1. With many samples and
the default batch the plain side takes tens of gigabytes: give S = 16 a --batch of 2048.
"""

import math
import os

# Read when JAX is first imported.
os.environ.setdefault('XLA_FLAGS', '--xla_force_host_platform_device_count=8')

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import partitioning as flax_partitioning
from jax.sharding import PartitionSpec

from benchmarks.command_line import collect, integers, make_parser, names
from benchmarks.integrator import time_in_turns
from het_plugin.heads import Pairs, contrastive_nll
from het_plugin.integrate import Integrator, LowRank, example_keys
from het_plugin.training.partitioning import PjitPartitioner

LOSSES = ('det', 'het_xl')
NOISE = 0.1  # size of the noise over that of the representations


def make_arguments(args, loss):
  """Everything that gradients flow to: unit vectors, noise, tau; as functions of nothing."""
  shape = args.batch, args.dim

  def make():
    keys = jax.random.split(jax.random.key(0), 6)
    alpha, beta = (jax.random.normal(key, shape) * args.dim**-0.5 for key in keys[:2])
    noise = [None, None]
    if loss == 'het_xl':
      noise = [
        LowRank(
          None,
          NOISE * args.dim**-0.5 * jax.random.normal(loading, (args.batch, args.factors, args.dim)),
          NOISE * args.dim**-0.5 * jnp.abs(jax.random.normal(diag, shape)),
        )
        for loading, diag in (keys[2:4], keys[4:])
      ]
    return {'alpha': alpha, 'beta': beta, 'noise': noise, 'tau': jnp.float32(1 / 3)}

  return make


def our_loss(args, num_samples):
  """Through `contrastive_nll`: (arguments, key) -> loss."""
  integrator = Integrator(num_samples=max(1, num_samples))

  def loss(x, key):
    pairs = Pairs(x['alpha'], x['beta'], *x['noise'], x['tau'])
    keys = example_keys(key, jnp.arange(args.batch))
    one, two = contrastive_nll(pairs, integrator, keys)
    return (one.nll.mean() + two.nll.mean()) / 2

  return loss


def plain_loss(args, num_samples):
  """The same written down: (arguments, key) -> loss."""

  def similarities(rows, columns, tau):
    return jnp.einsum('...d,jd->...j', rows, columns) / tau

  def direction(rows, noise, columns, tau, key):
    z = jax.random.normal(key, (args.batch, num_samples, args.factors + 1))
    samples = rows[:, None] + noise.noise(z)  # [B, S, D]
    log_p = jax.nn.log_softmax(similarities(samples, columns, tau), axis=-1)  # [B, S, B]
    own = jnp.einsum('isi->is', log_p)
    return (math.log(num_samples) - jax.nn.logsumexp(own, axis=1)).mean()

  def loss(x, key):
    alpha, beta, (of_alpha, of_beta), tau = x['alpha'], x['beta'], x['noise'], x['tau']
    if of_alpha is None:
      logits = similarities(alpha, beta, tau)
      log_p = [jnp.diagonal(jax.nn.log_softmax(logits, axis=axis)) for axis in (1, 0)]
      return -(log_p[0].mean() + log_p[1].mean()) / 2
    keys = jax.random.split(key)
    one = direction(alpha, of_alpha, beta, tau, keys[0])
    two = direction(beta, of_beta, alpha, tau, keys[1])
    return (one + two) / 2

  return loss


def shardings(partitioner, make):
  """Rows over the data axis, scalars whole."""

  def place(x):
    spec = partitioner.data_partition_spec if x.ndim else PartitionSpec()
    return jax.sharding.NamedSharding(partitioner.mesh, spec)

  return jax.tree.map(place, jax.eval_shape(make))


def compile_loss(partitioner, loss, make):
  """Compiled value and gradient, the gradient placed as its arguments are."""
  place = shardings(partitioner, make)
  whole = jax.sharding.NamedSharding(partitioner.mesh, PartitionSpec())
  arguments = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), jax.eval_shape(make), place
  )
  key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=whole)
  step = jax.jit(jax.value_and_grad(loss), out_shardings=(whole, place))
  rules = partitioner.logical_axis_rules
  with jax.set_mesh(partitioner.mesh), flax_partitioning.axis_rules(rules):
    return step.lower(arguments, key).compile()


def compare(args, partitioner, loss, num_samples):
  """One row: seconds and temporary bytes per device of both sides, and their ratios."""
  make = make_arguments(args, loss)
  sides = [
    compile_loss(partitioner, side(args, num_samples), make) for side in (our_loss, plain_loss)
  ]
  whole = jax.sharding.NamedSharding(partitioner.mesh, PartitionSpec())
  arguments = (
    jax.jit(make, out_shardings=shardings(partitioner, make))(),
    jax.device_put(jax.random.key(1), whole),
  )
  values = [float(side(*arguments)[0]) for side in sides]
  if not np.allclose(*values, rtol=0.02):  # the draws differ
    raise FloatingPointError(f'the losses are {values}')
  seconds, plain_seconds = time_in_turns(sides, arguments, args.repeats)
  temp, plain_temp = (side.memory_analysis().temp_size_in_bytes for side in sides)
  return dict(
    loss=loss,
    b=args.batch,
    d=args.dim,
    s=num_samples,
    devices=partitioner.mesh.size,
    model_shards=partitioner.mesh.shape['model'],
    seconds=seconds,
    plain_seconds=plain_seconds,
    time_ratio=plain_seconds / seconds,
    temp_bytes=temp,
    plain_temp_bytes=plain_temp,
    memory_ratio=plain_temp / temp,
  )


def main():
  parser = make_parser(__doc__)
  parser.add_argument('--losses', type=names(LOSSES), default=list(LOSSES), help=','.join(LOSSES))
  parser.add_argument('--samples', type=integers, default=[1], help='values of S of het_xl')
  parser.add_argument('--batch', type=int, default=8192, help='pairs B')
  parser.add_argument('--dim', type=int, default=512, help='representations D')
  parser.add_argument('--factors', type=int, default=15, help='factors R')
  parser.add_argument('--model_shards', type=int, default=1, help='size of the model axis')
  parser.add_argument('--repeats', type=int, default=5, help='timed turns of each side, at least')
  args = parser.parse_args()
  cases = [(x, s) for x in args.losses for s in (args.samples if x == 'het_xl' else [0])]
  partitioner = PjitPartitioner(args.model_shards)
  if args.batch % partitioner.data_shards:
    parser.error(f'--batch={args.batch} must be a multiple of {partitioner.data_shards} shards')
  rows = collect(args.json, len(cases), (compare(args, partitioner, *case) for case in cases))
  for row in rows:
    print(
      f'{row["loss"]}, S = {row["s"]}: {row["time_ratio"]:.2f} times as fast as the plain loss '
      f'in {row["memory_ratio"]:.1f} times less memory'
    )


if __name__ == '__main__':
  main()
