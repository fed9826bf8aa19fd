"""`cross_entropy` beside optax's and tokamax's losses: seconds and memory of value and gradient.

    python -m benchmarks.cross_entropy [--sizes 32768x512x1024,262144x512x256] [--json OUT]

Each row is the mean loss and its gradient by phi and W, without noise and without a bias, which
tokamax does not have. `plain` is optax's loss of all logits, and `tokamax` the 'chunked_xla' of
linear_softmax_cross_entropy_loss, where it is installed (pip install tokamax). tokamax's is right
only where 2,048 divides K. All are compiled and timed in turns in this process; seconds are the
median. Memory is what XLA says of the program beyond its arguments and results.

Two minutes on two CPU cores; seconds with --sizes 2048x8x16.
"""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.command_line import add_clock, collect, make_parser, sizes
from benchmarks.integrator import time_in_turns
from het_plugin import cross_entropy

MULTIPLE = 2048  # of tokamax's classes


def ours(phi, kernel, labels):
  return cross_entropy(phi, kernel, None, labels).mean()


def plain(phi, kernel, labels):
  logits = (phi @ kernel).astype(jnp.float32)
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def tokamax(phi, kernel, labels):
  from tokamax import linear_softmax_cross_entropy_loss

  return linear_softmax_cross_entropy_loss(
    phi, labels, kernel, reduction='mean', implementation='chunked_xla'
  )


def compare(args, losses, size):
  """A row for each loss."""
  num_classes, dim, batch = size
  rng = np.random.default_rng(0)
  phi = jnp.asarray(rng.normal(size=(batch, dim)), args.dtype)
  kernel = jnp.asarray(rng.normal(size=(dim, num_classes)) * dim**-0.5, args.dtype)
  arguments = phi, kernel, jnp.asarray(rng.integers(num_classes, size=batch), jnp.int32)
  compiled = [
    jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arguments).compile() for loss in losses
  ]
  values = [float(step(*arguments)[0]) for step in compiled]
  if not np.allclose(values, values[0], rtol=1e-2 if args.dtype == 'bfloat16' else 1e-5):
    raise FloatingPointError(f'the losses are {values}')
  seconds = time_in_turns(compiled, arguments, args.repeats, args.clock)
  for loss, step, of_loss in zip(losses, compiled, seconds, strict=True):
    yield dict(
      implementation=loss.__name__,
      k=num_classes,
      d=dim,
      b=batch,
      seconds=of_loss,
      temp_bytes=step.memory_analysis().temp_size_in_bytes,
    )


def main():
  parser = make_parser(__doc__)
  parser.add_argument(
    '--sizes',
    type=sizes('KxDxB', MULTIPLE),
    default=[(32768, 512, 1024), (262144, 512, 256)],
    help='KxDxB: classes, pre-logits and examples',
  )
  parser.add_argument('--dtype', choices=('float32', 'bfloat16'), default='float32')
  parser.add_argument('--repeats', type=int, default=3, help='timed turns, at least')
  add_clock(parser)
  args = parser.parse_args()
  losses = [ours, plain]
  if importlib.util.find_spec('tokamax'):
    losses.append(tokamax)
  else:
    print('tokamax is left out: pip install tokamax')
  rows = (row for size in args.sizes for row in compare(args, losses, size))
  rows = collect(args.json, len(losses) * len(args.sizes), rows)
  for i in range(0, len(rows), len(losses)):
    own, *others = rows[i : i + len(losses)]
    ratios = [
      f"{own['seconds'] / row['seconds']:.2f} of {row['implementation']}'s time and "
      f'{own["temp_bytes"] / row["temp_bytes"]:.2f} of its memory'
      for row in others
    ]
    print(f'K = {own["k"]}, B = {own["b"]}: ours takes {", ".join(ratios)}')


if __name__ == '__main__':
  main()
