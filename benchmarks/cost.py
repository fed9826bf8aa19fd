"""Figure of docs/integrator.md: error against cost of the loss, and memory against K, by samples.

    python -m benchmarks.cost docs/figures/cost.svg [--json OUT]

HET-XL with a softmax, beside the paper's procedure (benchmarks/integrator.py). The cost is CPU time
of the loss and its gradient over that of DET's, and the error the RMSE over labels that are drawn
from the predictive distribution. The memory is what XLA says of the compiled loss and gradient
beyond arguments and results; these programs are not run. Four minutes on two CPU cores.
"""

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.command_line import collect, integers, make_parser
from benchmarks.integrator import (
  compile_loss,
  loss_rmse,
  make_arguments,
  make_logits,
  our_loss,
  reference_log_prob,
  reference_loss,
  time_in_turns,
)
from het_plugin import Integrator
from het_plugin.reporting import style

HEAD = ('het_xl', 'softmax')
WAYS = ('the paper’s procedure', 'het_plugin')


def det_loss(x: dict[str, jax.Array], labels: jax.Array, key: jax.Array) -> jax.Array:
  """Cross-entropy without noise; labels [B, 1]."""
  del key
  log_p = jax.nn.log_softmax((x['phi'] @ x['kernel'] + x['bias']) / x['tau'])  # [B, K]
  return -jnp.take_along_axis(log_p, labels, axis=-1).mean()


def measure(args: argparse.Namespace) -> Iterator[dict[str, str | float]]:
  """Rows: way, S, cost over DET's, and RMSE."""
  x = make_arguments(args, 'het_xl')
  arguments = (x, jnp.arange(args.batch, dtype=jnp.int32)[:, None], jax.random.key(1))
  det = compile_loss(det_loss, *arguments)
  logits = jax.jit(lambda x: make_logits(*HEAD, x, None))(x)
  log_p = reference_log_prob(args, *HEAD, None)
  for num_samples in args.samples:
    independent = Integrator(num_samples, sampler='iid', tilt=False)  # the paper's, in log space
    ours = Integrator(num_samples)
    ways = (
      (reference_loss(*HEAD, num_samples, None), independent),
      (our_loss(*HEAD, ours, None), ours),
    )
    for way, (loss, integrator) in zip(WAYS, ways, strict=True):
      functions = (det, compile_loss(loss, *arguments))
      of_det, seconds = time_in_turns(functions, arguments, args.repeats, time.process_time)
      error = loss_rmse(integrator, logits, log_p, args.trials)
      yield {'way': way, 's': num_samples, 'cost': seconds / of_det, 'rmse': error}


def memory(args: argparse.Namespace) -> Iterator[dict[str, str | float]]:
  """Rows: way, S, K, and temporary bytes of loss and gradient."""
  labels = jax.ShapeDtypeStruct((args.batch, 1), jnp.int32)
  key = jax.eval_shape(lambda: jax.random.key(1))
  x = jax.eval_shape(lambda: make_arguments(args, 'het_xl'))
  for num_classes in args.memory_classes:
    x['kernel'] = jax.ShapeDtypeStruct((args.dim, num_classes), jnp.float32)
    x['bias'] = jax.ShapeDtypeStruct((num_classes,), jnp.float32)
    for num_samples in args.memory_samples:
      ways = (
        reference_loss(*HEAD, num_samples, None),
        our_loss(*HEAD, Integrator(num_samples), None),
      )
      for way, loss in zip(WAYS, ways, strict=True):
        of_program = compile_loss(loss, x, labels, key).memory_analysis()
        temp = of_program.temp_size_in_bytes
        yield {'way': way, 's': num_samples, 'k': num_classes, 'temp_bytes': temp}


def draw(rows: list[dict[str, str | float]]) -> Figure:
  figure = style.new_figure(9.0, 3.6)
  errors, memories = figure.subplots(1, 2)
  _draw_errors(errors, [row for row in rows if 'rmse' in row])
  _draw_memory(memories, [row for row in rows if 'temp_bytes' in row])
  memories.legend(*errors.get_legend_handles_labels(), loc='upper left')  # where no curve is
  return figure


def _draw_memory(ax: Axes, rows: list[dict[str, str | float]]) -> None:
  for way, look, marker in zip(WAYS, style.STYLES[1:3], style.MARKERS, strict=False):
    of_way = [row for row in rows if row['way'] == way]
    curves = [[row for row in of_way if row['s'] == s] for s in {row['s'] for row in of_way}]
    for rank, points in enumerate(sorted(curves, key=lambda points: points[-1]['temp_bytes'])):
      num_classes = [row['k'] for row in points]
      size = [row['temp_bytes'] / 2**20 for row in points]
      ax.loglog(num_classes, size, color=look[0], linestyle=look[1], marker=marker)
      at = num_classes[-1], size[-1]
      # Curves that are flat end beside each other.
      ax.annotate(f'S = {points[0]["s"]}', at, (5, 11 * rank - 9), textcoords='offset points')
  style.plain_axes(ax, 'both')
  ax.set(xlabel='classes K', ylabel='memory of loss and gradient, MiB')


def _draw_errors(ax: Axes, rows: list[dict[str, str | float]]) -> None:
  for way, look, marker in zip(WAYS, style.STYLES[1:3], style.MARKERS, strict=False):
    color, dashes = look
    points = [row for row in rows if row['way'] == way]
    cost = [row['cost'] for row in points]
    error = [row['rmse'] for row in points]
    ax.loglog(cost, error, color=color, linestyle=dashes, marker=marker, label=way)
    for row in points:
      at = row['cost'], row['rmse']
      ax.annotate(f'S = {row["s"]}', at, (5, 5), textcoords='offset points')
  style.plain_axes(ax, 'both')
  ax.set(xlabel='CPU time of loss and gradient, over DET’s', ylabel='RMSE of log p(y)')


def main() -> None:
  parser = make_parser(__doc__)
  parser.add_argument('file', type=Path, help='the SVG file that is written')
  parser.add_argument('--samples', type=integers, default=[4, 16, 64, 256, 1000])
  parser.add_argument('--classes', type=int, default=2000, help='classes K')
  parser.add_argument('--batch', type=int, default=8, help='examples B')
  parser.add_argument('--dim', type=int, default=128, help='pre-logits D')
  parser.add_argument('--factors', type=int, default=15, help='factors R')
  parser.add_argument('--noise', type=float, default=1.0, help='deviation of the logits over tau')
  parser.add_argument(
    '--memory_classes',
    type=integers,
    default=[1000, 10_000, 100_000, 1_000_000],
    help='K of memory',
  )
  parser.add_argument('--memory_samples', type=integers, default=[16, 256], help='S of memory')
  parser.add_argument('--trials', type=int, default=16, help='keys per example of an RMSE')
  parser.add_argument('--repeats', type=int, default=5, help='timed turns')
  args = parser.parse_args()
  count = 2 * len(args.samples) + 2 * len(args.memory_classes) * len(args.memory_samples)
  rows = collect(args.json, count, itertools.chain(memory(args), measure(args)))
  draw(rows).savefig(args.file, metadata={'Date': None})


if __name__ == '__main__':
  main()
