"""What HET-XL gains over DET from ten thousand to millions of rows, and the price of its noise.

    python -m studies.known_truth.many_rows --json=rows.json [--sizes=10000,1000000] [--seeds=0,1]

Labels are drawn from a HET-XL head with K = 1,000, D = 8 and R = 1, whose location and noise have
standard deviation 3 (`known_truth.true_model`). The rows of a size are the first of one file, which
the fits read from disk (solver='streamed'). Both heads have C = 1, about the variance of the true
W, and HET-XL has C_noise = 0.1; with --C_noise=auto each fit chooses it.

gain is in nats per row, on 20,000 test rows. gain_stderr is its paired standard error over them.
price is p / (2N) of the noise. gap is an estimate of how far the objective of a fit may be above
its optimum, in nats, and converged whether the fit ended there. gain_64 is the gain with 64 points
of the noise in place of the S of the fit. nll_true is that of the head that drew the labels.

Rows that --json already has are not measured again.
"""

import dataclasses
import functools
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import probe
from benchmarks.command_line import integers, make_parser, print_table, read_json, write_json
from het_plugin.estimators import CLASSIFIERS
from het_plugin.estimators.probe import num_noise_params, price
from het_plugin.measures.uncertainty import stderr
from studies.known_truth.known_truth import Problem, true_model, true_nll

C = 1.0
SIZES = [10_000, 30_000, 100_000, 300_000, 1_000_000]
NUM_TEST = 20_000
MORE_SAMPLES = 64
BLOCK = 4096
KEY = ('seed', 'n', 'test', 'k', 'd', 'c_noise', 's')


@functools.partial(jax.jit, static_argnums=0)
def _labels(model, params, x, z, uniform):
  """Draws of classes [B] from standard normal z [B, R + 1] and uniform [B]."""
  logits = model.logits(params, x)
  p = jax.nn.softmax(logits.location + jnp.einsum('bt,btk->bk', z, logits.factors()))
  total = jnp.cumsum(p, axis=1)
  return (total < uniform[:, None] * total[:, -1:]).sum(axis=1)


def write_rows(path, model, params, num_rows, dim, rng):
  """Writes features [N, D] to a file; returns them, mapped, and the labels [N]."""
  header = {'descr': '<f4', 'fortran_order': False, 'shape': (num_rows, dim)}
  labels = np.empty(num_rows, np.int32)
  with path.open('wb') as file:
    np.lib.format.write_array_header_1_0(file, header)
    for start in range(0, num_rows, BLOCK):
      x = rng.standard_normal((BLOCK, dim), np.float32)
      z = rng.standard_normal((BLOCK, 1 + dict(model.noise)['num_factors']), np.float32)
      drawn = np.asarray(_labels(model, params, x, z, rng.random(BLOCK, np.float32)))
      labels[start : start + BLOCK] = drawn[: num_rows - start]
      file.write(x[: num_rows - start])
  return np.load(path, mmap_mode='r'), labels


def nll_with(estimator, num_samples, x, y):
  """NLL [N] with another number of points of the noise."""
  model = estimator.model_
  try:
    estimator.model_ = dataclasses.replace(model, num_samples=num_samples)
    return estimator.nll(x, y)
  finally:
    estimator.model_ = model


def measure(args, seed, sizes, folder):
  """Rows of one seed, two for a size."""
  problem = Problem('softmax', args.classes, args.dim, 1, 3.0, 0)
  model, params = true_model(problem, 'het_xl', seed)
  rng = np.random.default_rng(seed + 1)
  test = write_rows(folder / 'test.npy', model, params, args.test, args.dim, rng)
  x, y = write_rows(folder / 'rows.npy', model, params, max(sizes), args.dim, rng)
  true = true_nll(model, params, test)
  for n in sizes:
    seen = np.isin(test[1], y[:n])  # no head can say anything about other classes
    of_test = test[0][seen], test[1][seen]
    settings = {'C': C, 'tol': 1e-3, 'solver': 'streamed', 'random_state': seed}
    det = probe.fitted(CLASSIFIERS['det'](**settings), x[:n], y[:n])
    noise = {'C_noise': args.C_noise, 'num_factors': 1, 'num_samples': args.samples}
    het_xl = probe.fitted(CLASSIFIERS['het_xl'](**settings, **noise), x[:n], y[:n], start=det[0])
    nll_det = det[0].nll(*of_test)
    for head, (estimator, converged, seconds) in {'det': det, 'het_xl': het_xl}.items():
      nll = estimator.nll(*of_test)
      gain = nll_det - nll
      more = nll if head == 'det' else nll_with(estimator, MORE_SAMPLES, *of_test)
      yield {
        'seed': seed,
        'n': n,
        'test': args.test,
        'k': args.classes,
        'd': args.dim,
        'c_noise': args.C_noise,
        's': args.samples,
        'head': head,
        'nll': float(nll.mean()),
        'nll_true': float(true[seen].mean()),
        'gain': float(gain.mean()),
        'gain_stderr': stderr(gain) or 0.0,
        'gain_64': float((nll_det - more).mean()),
        'price': price(num_noise_params(estimator), n),
        'chosen': estimator.C_noise_,
        'iterations': int(estimator.n_iter_),
        'gap': float(estimator.gap_),
        'converged': converged,
        'cpu_seconds': seconds,
      }


def means(rows):
  """By size and C_noise: means over seeds, with their standard errors over seeds and test rows."""
  groups = {}
  for row in rows:
    if row['head'] == 'het_xl':
      groups.setdefault((str(row['c_noise']), row['s'], row['n']), []).append(row)
  found = []
  for (c_noise, num_samples, n), of in sorted(groups.items()):
    gain = np.array([row['gain'] for row in of])
    keys = {_key(row) for row in of}
    det = [row for row in rows if row['head'] == 'det' and _key(row) in keys]
    possible = [row['nll'] - row['nll_true'] for row in det]
    found.append(
      {
        'C_noise': c_noise,
        'S': num_samples,
        'N': n,
        'seeds': len(of),
        'DET above the truth': float(np.mean(possible)),
        'gain': float(gain.mean()),
        '± rows': float(np.sqrt(np.mean([row['gain_stderr'] ** 2 for row in of]) / len(of))),
        '± seeds': stderr(gain),
        'price': of[0]['price'],
        'largest gap': max(row['gap'] for row in of),
        'converged': all(row['converged'] for row in of),
      }
    )
  return found


def _key(row):
  return tuple(row[name] for name in KEY)


def main():
  parser = make_parser(__doc__)
  parser.add_argument('--sizes', type=integers, default=SIZES, help='numbers of rows N')
  parser.add_argument('--seeds', type=integers, default=[0])
  parser.add_argument('--classes', type=int, default=1000)
  parser.add_argument('--dim', type=int, default=8)
  parser.add_argument('--test', type=int, default=NUM_TEST, help='test rows')
  parser.add_argument('--C_noise', type=probe.c_noise, default=0.1, help='a number, or auto')
  parser.add_argument('--samples', type=int, default=4, help='S of HET-XL')
  args = parser.parse_args()
  rows = read_json(args.json)
  for seed in args.seeds:
    done = {_key(row) for row in rows}
    about = args.test, args.classes, args.dim, args.C_noise, args.samples
    sizes = [n for n in args.sizes if (seed, n, *about) not in done]
    if not sizes:
      continue
    with tempfile.TemporaryDirectory() as folder:
      for row in measure(args, seed, sizes, Path(folder)):
        rows.append(row)
        print(row, flush=True)
        if row['head'] == 'het_xl':
          write_json(args.json, rows)
  found = means(rows)
  print_table(list(found[0]), [list(row.values()) for row in found])


if __name__ == '__main__':
  main()
