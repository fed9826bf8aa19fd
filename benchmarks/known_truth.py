"""Labels drawn from a heteroscedastic model itself: what heads gain over DET, of what they could.

    python benchmarks/known_truth.py [--json OUT] [--truth het] [--full]

Features are standard normal, the location W^T x has standard deviation 3, and the noise of the
logits `noise`. `het_plugin.estimators` fits DET at the C that is best on held-out rows, and the
other heads at this C and the C_noise that is best there. gain_share is (NLL of DET - NLL) / (NLL of
DET - NLL of the truth) on 5,000 test rows, gain_stderr the standard error of the gain over them,
and covariance_correlation that of the entries of the covariances of head and truth (centred for a
softmax, to which shared noise is nothing). The default grid takes minutes on one core, --full a
night.
"""

import dataclasses
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from command_line import make_parser, names, report, write_json
from sklearn.exceptions import ConvergenceWarning

from het_plugin.estimators import CLASSIFIERS
from het_plugin.estimators.model import Model

SIGNAL = 3.0
NUM_TEST = 5000
NUM_COMPARED = 200  # rows whose covariances are compared
MAX_CLASSES = 100  # of a covariance
CS = (0.1, 1.0, 30.0)
NOISE_CS = (0.003, 0.01, 0.03, 0.1, 0.3, 3.0)
TRUE_SAMPLES = 2048


@dataclasses.dataclass(frozen=True)
class Problem:
  """A point of the grid; n rows per class, and a fifth of them held out beside them."""

  link: str
  k: int
  d: int
  r: int
  noise: float
  n: int


SMALL = [
  Problem(link, 10, 8, 2, noise, n)
  for link, noise, n in itertools.product(('softmax', 'sigmoid'), (3.0, 0.0), (500, 50))
]
FULL = [
  Problem(link, k, d, r, noise, n)
  for link, k, d, r, noise, n in itertools.product(
    ('softmax', 'sigmoid'),
    (10, 100, 1000, 3000),
    (8, 64, 256),
    (1, 10, 50),
    (0.0, 1.0, 2.0, 5.0),
    (5, 50, 500, 5000),
  )
  if k * n <= 500_000 and r <= k
]


def true_model(problem, truth, seed):
  """A model and parameters whose logits have the standard deviations of the problem."""
  noise = (('num_factors', problem.r),)
  model = Model(truth, problem.k, problem.link, num_samples=TRUE_SAMPLES, noise=noise)
  params = model.init(seed, problem.d)
  rng = np.random.default_rng(seed)
  # HET-XL's noise grows by SIGNAL on its way through W; v(x) has the mean square 1.25.
  size = problem.noise / (SIGNAL if truth == 'het_xl' else 1.0)
  head = {name: np.array(x) for name, x in params['head'].items() if name != 'covariance'}
  covariance = {name: np.array(x) for name, x in params['head']['covariance'].items()}
  head['kernel'] = rng.normal(0, SIGNAL / problem.d**0.5, head['kernel'].shape)
  if problem.link == 'sigmoid':
    head['bias'] -= SIGNAL
  covariance['v_kernel'] = rng.normal(0, 0.5 / problem.d**0.5, covariance['v_kernel'].shape)
  covariance['v_bias'] += 1.0
  covariance['J'] = rng.normal(0, size / (1.25 * problem.r) ** 0.5, covariance['J'].shape)
  covariance['d_kernel'] *= 0.0
  covariance['d_bias'] += np.log(np.expm1(max(0.1 * size, 1e-6)))
  params = jax.tree.map(jnp.float32, {'head': {**head, 'covariance': covariance}})
  return model, params


def draw(model, params, num_rows, rng):
  """Features [N, D] and labels: ids [N], or zeros and ones [N, K]."""
  x = rng.normal(size=(num_rows, params['head']['kernel'].shape[0])).astype(np.float32)
  labels = []
  for block in np.array_split(x, -(-num_rows // 2000)):
    logits = model.logits(params, block)
    factors = np.asarray(logits.factors())
    z = rng.normal(size=factors.shape[:2]).astype(np.float32)
    u = np.asarray(logits.location) + np.einsum('bt,btk->bk', z, factors)
    if model.link == 'softmax':
      labels.append((u + rng.gumbel(size=u.shape)).argmax(axis=1))
    else:
      labels.append((u + rng.logistic(size=u.shape) > 0).astype(int))
  return x, np.concatenate(labels)


def covariances(factors, link, classes):
  """Entries [N, k, k] of the covariances of factors [N, T, K]."""
  if link == 'softmax':
    factors = factors - factors.mean(axis=-1, keepdims=True)
  factors = factors[..., classes]
  return np.einsum('ntk,ntl->nkl', factors, factors)


def fit_best(cls, name, values, settings, train, held_out):
  """The estimator of the best value of a setting on held-out rows, and that value."""
  fits = {c: cls(**settings, **{name: c}).fit(*train) for c in values}
  best = min(fits, key=lambda c: fits[c].nll(*held_out).mean())
  return fits[best], best


def measure(problem, truth, heads, seed):
  """A row for each head."""
  rng = np.random.default_rng(seed + 1)
  model, params = true_model(problem, truth, seed)
  num_train = problem.k * problem.n
  train = draw(model, params, num_train, rng)
  held_out = draw(model, params, max(200, num_train // 5), rng)
  test = draw(model, params, NUM_TEST, rng)
  values = test[1][:, None] if problem.link == 'softmax' else test[1].astype(np.float32)
  nll = jax.jit(model.nll)
  step = max(10, min(1000, 2_000_000 // problem.k // 32))
  true = np.concatenate(
    [
      np.asarray(nll(params, test[0][i : i + step], values[i : i + step].astype(values.dtype)))
      for i in range(0, NUM_TEST, step)
    ]
  )
  classes = rng.permutation(problem.k)[:MAX_CLASSES]
  rows_compared = test[0][:NUM_COMPARED]
  true_covariance = covariances(
    np.asarray(model.factors(params, rows_compared)), problem.link, classes
  )
  rows, det, settings = [], None, {'tol': 1e-3, 'max_iter': 200}
  for head in ('det', *heads):
    if head == 'det':
      fitted, c = fit_best(CLASSIFIERS[head], 'C', CS, settings, train, held_out)
      settings |= {'C': c, 'num_factors': problem.r}
      c_noise = None
    else:
      fitted, c_noise = fit_best(CLASSIFIERS[head], 'C_noise', NOISE_CS, settings, train, held_out)
    found = fitted.nll(*test)
    det = found if det is None else det
    gain, possible = det - found, float(det.mean() - true.mean())
    correlation = None
    if head != 'det' and problem.noise:
      estimate = covariances(fitted._map(_factors, rows_compared), problem.link, classes)
      upper = np.triu_indices(len(classes))
      pair = (x[:, upper[0], upper[1]].ravel() for x in (estimate, true_covariance))
      if estimate.std() > 0:  # a head without noise has a constant
        correlation = float(np.corrcoef(*pair)[0, 1])
    rows.append(
      {
        **dataclasses.asdict(problem),
        'truth': truth,
        'head': head,
        'c': c,
        'c_noise': c_noise,
        'nll': float(found.mean()),
        'nll_true': float(true.mean()),
        'nll_det': float(det.mean()),
        'gain': float(gain.mean()),
        'gain_stderr': float(gain.std(ddof=1) / len(gain) ** 0.5),
        'gain_share': float(gain.mean()) / possible if problem.noise else None,
        'covariance_correlation': correlation,
      }
    )
  return rows


def _factors(model, params, x):
  return model.factors(params, x)


def main():
  parser = make_parser(__doc__)
  parser.add_argument('--truth', default='het_xl', choices=['het', 'het_xl'])
  parser.add_argument('--heads', type=names(CLASSIFIERS), default='het,het_h,het_xl'.split(','))
  parser.add_argument('--full', action='store_true', help='the whole grid')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--problem', help='one point instead: LINK,K,D,R,NOISE,N')
  args = parser.parse_args()
  problems = FULL if args.full else SMALL
  if args.problem:
    link, *numbers = args.problem.split(',')
    k, d, r, noise, n = map(float, numbers)
    problems = [Problem(link, int(k), int(d), int(r), noise, int(n))]
  warnings.simplefilter('ignore', ConvergenceWarning)  # at C = 30 a few end at 2e-3
  rows = []
  for problem in problems:
    found = measure(problem, args.truth, args.heads, args.seed)
    rows += found
    write_json(args.json, rows)  # a long grid can be read while it runs
    print(*(f'{row["head"]} {row["nll"]:.4f}' for row in found), problem, flush=True)
  report(args.json, rows)


if __name__ == '__main__':
  main()
