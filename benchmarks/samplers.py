"""How many samples each sampler needs: the error of log p(y) against S.

    python benchmarks/samplers.py [--json OUT] [--png OUT]

RMSE of log p(y | x) over keys, examples and labels y ~ p(y | x), against 100,000 independent
samples (whose own error, a tenth of that of iid at S = 1000, is part of every figure), for three
sizes of the noise. Takes 15 seconds on two CPU cores; a few with
--classes 20 --factors 4 --reference_samples 2000 --samples 8 32 --trials 2.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
from command_line import print_table, write_json
from gaussian_problem import (
  NOISE,
  add_flags,
  keys_of,
  make_logits,
  problem_line,
  reference_log_prob,
  rmse,
)
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from het_plugin.integrate import SAMPLERS, Integrator


def parse_args():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add_flags(parser)
  parser.add_argument(
    '--samples', type=int, nargs='+', default=[16, 64, 256, 1000], help='values of S'
  )
  parser.add_argument('--trials', type=int, default=20, help='keys an example')
  parser.add_argument('--png', type=Path, help='draw the curves here')
  args = parser.parse_args()
  if len(args.samples) < 2:
    parser.error('--samples needs two numbers at least: the last two are compared')
  return args


def measure(args):
  """Rows {noise, noise_std, sampler, s, rmse}."""
  problems = {noise: make_logits(args, std) for noise, std in NOISE.items()}
  references = {noise: reference_log_prob(args, x) for noise, x in problems.items()}
  rows = []
  for sampler in SAMPLERS:
    for num_samples in args.samples:
      log_prob = jax.jit(Integrator(num_samples=num_samples, sampler=sampler).log_prob)
      for noise, logits in problems.items():
        estimates = [log_prob(logits, keys_of(args, trial)) for trial in range(args.trials)]
        error = rmse(jnp.stack(estimates) - references[noise], references[noise])
        rows.append(
          dict(noise=noise, noise_std=NOISE[noise], sampler=sampler, s=num_samples, rmse=error)
        )
  return rows


def draw(path, rows):
  """A panel a noise, RMSE against S on logarithmic axes."""
  figure = Figure(figsize=(9, 3), layout='constrained')
  axes = figure.subplots(1, len(NOISE), sharey=True)
  for ax, (noise, std) in zip(axes, NOISE.items(), strict=True):
    for sampler in SAMPLERS:
      points = [(r['s'], r['rmse']) for r in rows if (r['noise'], r['sampler']) == (noise, sampler)]
      ax.loglog(*zip(*points, strict=True), marker='o', label=sampler)
    samples = sorted({row['s'] for row in rows})
    ax.set_xticks(samples, map(str, samples), minor=False)
    ax.set(title=f'{noise} noise (std {std})', xlabel='samples S')
    ax.minorticks_off()
  axes[0].set_ylabel('RMSE of log p(y)')
  axes[0].legend(frameon=False)
  FigureCanvasAgg(figure)
  figure.savefig(path, dpi=110)


def main():
  args = parse_args()
  rows = measure(args)
  error = {(row['noise'], row['sampler'], row['s']): row['rmse'] for row in rows}
  print(f'RMSE of log p(y); {problem_line(args)}; {args.trials} keys')
  table = [
    (noise, NOISE[noise], sampler, *(error[noise, sampler, s] for s in args.samples))
    for noise in NOISE
    for sampler in SAMPLERS
  ]
  print_table(('noise', 'std', 'sampler', *(f'S={s}' for s in args.samples)), table)

  fewer, more = args.samples[-2:]
  for noise in NOISE:
    # The error of independent samples falls with the square root of their number.
    saved = (error[noise, 'iid', fewer] / error[noise, 'sobol', fewer]) ** 2
    print(
      f'{noise} noise: iid needs {saved:.2f} times the {fewer} samples of sobol for the same RMSE'
    )
  sobol, iid = error['moderate', 'sobol', fewer], error['moderate', 'iid', more]
  print(
    f'ratio: RMSE of sobol at S = {fewer} over iid at S = {more}, moderate noise: '
    f'{sobol:.4f} / {iid:.4f} = {sobol / iid:.3f}'
  )
  if args.png:
    draw(args.png, rows)
  write_json(args.json, {'rows': rows, 'ratio': sobol / iid})


if __name__ == '__main__':
  main()
