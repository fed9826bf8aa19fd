"""Labels drawn from a heteroscedastic model itself: what heads gain over DET, of what they could.

    python -m studies.known_truth.known_truth --json=rows.json [--full]
    python -m studies.known_truth.known_truth --json=rows.json --problem=softmax,10,8,2,3,50
    python -m studies.known_truth.known_truth --json=rows.json --plot=map.png  # fits nothing

Features are standard normal, the location W^T x has standard deviation 3, and the noise of the
logits `noise`. A point is measured on n rows per class, and a fifth as many more are held out.
`het_plugin.estimators` fits DET at the C that is best on held-out rows, and the other heads at this
C and the C_noise that `probe.choose` takes. The gain over DET is on 5,000 test rows; gain_stderr is
its paired standard error over them, extreme the share that 1% of them make, and gain_share the gain
over (NLL of DET - NLL of the truth). covariance_correlation is that of the entries of the
covariances of head and truth (centred for a softmax, to which shared noise is nothing). grid lists
the values of C_noise, and the last table compares the rule with taking the least NLL.
The prediction is that the gain of HET and HET-XL is what DET lacks, less the prices of W and of the
noise (`probe.price`).
--from_truth adds rows of the head that drew the labels, fitted from the true parameters on.
--truth=het or het_h draws the labels from another head; where labels of all three were measured, a
table shows what each head gets of each.

Rows that --json already has are not measured again, so a run can be cut anywhere. The default takes
minutes of CPU time, and --full, cheap points first, hours.
"""

import copy
import dataclasses
import functools
import itertools
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.exceptions import ConvergenceWarning

from benchmarks.command_line import integers, make_parser, names, print_table, read_json, write_json
from het_plugin.estimators import CLASSIFIERS, lbfgs, objective, targets, whitening
from het_plugin.estimators.model import Model
from het_plugin.estimators.probe import choose, price
from het_plugin.integrate import LINKS
from het_plugin.measures.comparison import extreme_share
from het_plugin.measures.uncertainty import stderr
from het_plugin.reporting import style

SIGNAL = 3.0
NUM_TEST = 5000
NUM_COMPARED = 200  # rows whose covariances are compared
MAX_CLASSES = 100  # of a covariance
CS = (0.01, 0.1, 1.0, 10.0)
NOISE_CS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)  # ascending
TRUE_SAMPLES = 512
SETTINGS = {'tol': 1e-3, 'max_iter': 150}
NUM_SAMPLES = 32
ERROR_BARS = {'markersize': 4, 'elinewidth': 1}  # of plots
MAP_FACTORS = 2  # R of the points of the map
KEY = ('truth', 'head', 'link', 'k', 'd', 'r', 'noise', 'n')


@dataclasses.dataclass(frozen=True)
class Problem:
  """A point of the grid; n rows per class, and a fifth as many more held out."""

  link: str
  k: int
  d: int
  r: int
  noise: float
  n: int


def as_problem(text):
  link, k, d, r, noise, n = text.split(',')
  names(LINKS)(link)
  return Problem(link, int(k), int(d), int(r), float(noise), int(n))


SMALL = [
  Problem(link, 10, 8, 2, noise, n)
  for link, noise, n in itertools.product(('sigmoid', 'softmax'), (3.0, 0.0), (50, 500))
]


def full_grid():
  """Points about the map's size, cheap ones first."""
  links = ('sigmoid', 'softmax')
  sizes = ((10, 8), (10, 32), (10, 128), (100, 8), (100, 32))
  points = [
    Problem(link, k, d, MAP_FACTORS, noise, n)
    for link, (k, d), noise, n in itertools.product(links, sizes, (1.0, 3.0, 5.0), (5, 50, 500))
  ]
  for link, n in itertools.product(links, (50, 500)):
    points += [Problem(link, 10, 8, 2, 0.0, n), *(Problem(link, 10, 8, r, 3.0, n) for r in (1, 8))]
  points += [Problem(link, 10, 8, 2, 3.0, 5000) for link in links]
  points += [Problem(link, 1000, 32, 2, 3.0, n) for link in links for n in (5, 50)]
  points += [Problem('sigmoid', 3000, 8, 2, 3.0, 5)]
  points += [Problem('sigmoid', 10, 256, 2, 3.0, 500), Problem('sigmoid', 100, 32, 50, 3.0, 50)]
  return sorted(points, key=lambda p: p.k**2 * p.n * (8 if p.link == 'softmax' else 1))


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


@functools.partial(jax.jit, static_argnums=0)
def _location_and_factors(model, params, x):
  logits = model.logits(params, x)
  return logits.location, logits.factors()


def draw(model, params, num_rows, rng):
  """Features [N, D] and labels: ids [N], or zeros and ones [N, K]."""
  x = rng.normal(size=(num_rows, params['head']['kernel'].shape[0])).astype(np.float32)
  labels = []
  for block in np.array_split(x, -(-num_rows // 2000)):
    location, factors = map(np.asarray, _location_and_factors(model, params, block))
    z = rng.normal(size=factors.shape[:2]).astype(np.float32)
    u = location + np.einsum('bt,btk->bk', z, factors)
    if model.link == 'softmax':
      labels.append((u + rng.gumbel(size=u.shape)).argmax(axis=1))
    else:
      labels.append((u + rng.logistic(size=u.shape) > 0).astype(int))
  return x, np.concatenate(labels)


def _compared(factors, link):
  """Factors [N, T, k] of the first classes; of a softmax those of logits relative to their mean."""
  if link == 'softmax':
    factors = factors - factors.mean(axis=-1, keepdims=True)
  return factors[..., :MAX_CLASSES]


def _covariance(factors):
  return np.einsum('ntk,ntl->nkl', factors, factors)


def fit_best(head, grid, train, held_out, start=None):
  """The estimator of the point of a grid that `choose` takes, the estimators of all points, and
  the NLL of held-out rows [points, N].

  The points of a head with noise have one C, and its fits start at DET's with this C. The grid ends
  where the NLL is 0.05 nats above the best: fits that overfit are slow.
  """
  fits = []
  nll = []
  for point in grid:
    fits.append(CLASSIFIERS[head](**SETTINGS | point).fit(*train, start=start))
    nll.append(fits[-1].nll(*held_out))
    if 'C_noise' in point and nll[-1].mean() > min(x.mean() for x in nll) + 0.05:
      break
  best = choose(grid[: len(fits)], np.stack(nll))
  return fits[best], fits, np.stack(nll)


def draw_problem(problem, truth, seed):
  """The true model and its parameters, rows to fit, held-out rows and test rows.

  Rows of classes that the fit has not seen are left out: no head can say anything about them.
  """
  rng = np.random.default_rng(seed + 1)
  model, params = true_model(problem, truth, seed)
  num_train = problem.k * problem.n
  sizes = num_train, max(200, num_train // 5), NUM_TEST
  train, *others = (draw(model, params, size, rng) for size in sizes)
  if problem.link == 'softmax':
    others = [(x[seen], y[seen]) for x, y in others for seen in [np.isin(y, train[1])]]
  return model, params, train, *others


def true_nll(model, params, test):
  """The NLL of the truth, [N]."""
  x, y = test
  y = y[:, None] if model.link == 'softmax' else y.astype(np.float32)
  step = max(10, 2**21 // (model.num_classes * 32))
  nll = jax.jit(model.nll)
  return np.concatenate(
    [np.asarray(nll(params, x[i : i + step], y[i : i + step])) for i in range(0, len(x), step)]
  )


def measure(problem, truth, heads, seed, from_truth):
  """A row for each head."""
  model, params, train, held_out, test = draw_problem(problem, truth, seed)
  true = true_nll(model, params, test)
  det, *of_det = fit_best('det', [{'C': c} for c in CS], train, held_out)
  det_nll = det.nll(*test)
  noise = {'C': det.C, 'num_factors': problem.r, 'num_samples': NUM_SAMPLES}
  compared = test[0][:NUM_COMPARED]
  true_factors = np.asarray(jax.jit(model.factors)(params, compared))[..., det.classes_]
  true_factors = _compared(true_factors, problem.link)
  fitted = {'det': (det, *of_det)}
  for head in heads:
    grid = [{**noise, 'C_noise': c} for c in NOISE_CS]
    fitted[head] = fit_best(head, grid, train, held_out, det)
  if from_truth and getattr(fitted[truth][0], 'C_noise', None) and len(det.classes_) == problem.k:
    estimator, *grid = fitted[truth]
    fitted[f'{truth} from the truth'] = refit(estimator, params, train), *grid
  rows = []
  for head, (estimator, fits, held_out_nll) in fitted.items():
    nll = estimator.nll(*test)
    gain = det_nll - nll
    possible = float(det_nll.mean() - true.mean())
    correlation = None
    c_noise = getattr(estimator, 'C_noise', None)
    if c_noise and problem.noise:
      of_fit = jax.jit(estimator.model_.factors)(estimator.params_, compared - estimator.mean_)
      factors = _compared(np.asarray(of_fit), problem.link)
      upper = np.triu_indices(factors.shape[-1])
      pair = (_covariance(x)[:, *upper].ravel() for x in (factors, true_factors))
      correlation = float(np.corrcoef(*pair)[0, 1])
    rows.append(
      {
        **dataclasses.asdict(problem),
        'seed': seed,
        'truth': truth,
        'head': head,
        'c': estimator.C,
        'c_noise': c_noise,
        'objective': estimator.objective_,
        'nll': float(nll.mean()),
        'nll_true': float(true.mean()),
        'nll_det': float(det_nll.mean()),
        'gain': float(gain.mean()),
        'gain_stderr': stderr(gain),
        'extreme': extreme_share(gain),
        'gain_share': float(gain.mean()) / possible if problem.noise else None,
        'covariance_correlation': correlation,
        'grid': [] if head == 'det' else candidates(fits, held_out_nll, test),
      }
    )
  return rows


def candidates(fits, held_out_nll, test):
  """The values of C_noise: NLL of held-out rows, of test rows, and the paired standard error of the
  first to the least.
  """
  least = held_out_nll[np.argmin(held_out_nll.mean(axis=1))]
  return [
    {
      'c_noise': fit.C_noise,
      'held_out': float(nll.mean()),
      'stderr': stderr(nll - least),
      'nll': float(fit.nll(*test).mean()),
    }
    for fit, nll in zip(fits, held_out_nll, strict=True)
  ]


def refit(estimator, params, train):
  """A copy of a fitted estimator, fitted from other parameters on."""
  estimator, (x, y) = copy.deepcopy(estimator), train
  model = estimator.model_
  mean = estimator.mean_
  values = targets.encode(y, estimator.target, estimator.classes_, estimator.target_).values
  rows = objective.make_rows(
    model, x, mean, values, np.ones(len(x)), estimator.C, estimator.C_noise
  )
  shift = np.eye(len(mean) + 1, dtype=np.float32)
  shift[-1, :-1] = mean  # the estimator's features have the mean 0
  start = whitening.unwhiten(model, params, whitening.Whitening(jnp.asarray(shift)))
  fit = lbfgs.minimise(model, start, rows, progress=False, **SETTINGS)
  estimator.params_ = fit.params
  estimator.objective_ = fit.objective
  return estimator


def over_seeds(rows):
  """{truth, head and point: means}, whose gain is None if no seed chose noise, and whose covariance
  is None if there is none to compare.
  """
  groups = {}
  for row in rows:
    if row['head'] in CLASSIFIERS and row['head'] != 'det':
      groups.setdefault(tuple(row[name] for name in KEY), []).append(row)
  means = {}
  for key, found in groups.items():
    possible = np.mean([row['nll_det'] - row['nll_true'] for row in found])
    gain = np.mean([row['gain'] for row in found])
    correlations = [row['covariance_correlation'] for row in found if row['c_noise']]
    means[key] = {
      'gain': gain if any(row['c_noise'] for row in found) else None,
      'stderr': np.sqrt(np.mean([row['gain_stderr'] ** 2 for row in found]) / len(found)),
      'possible': possible,
      'share': gain / possible,
      'covariance': np.mean(correlations) if found[0]['noise'] and correlations else None,
      'seeds': len(found),
    }
  return means


def predicted_share(row):
  """The share of the possible gain that a head has after the price of its noise.

  DET has paid its own price for W. What else it lacks to the truth is what the noise is worth.
  """
  k = row['k']
  d = row['d']
  num_rows = row['k'] * row['n']
  noise = (('num_factors', row['r']),)
  noise_dim = Model(row['head'], k, row['link'], noise=noise).make_head().unpadded_noise_dim(d)  # Q
  possible = row['nll_det'] - row['nll_true']
  worth = possible - price(k * (d + 1), num_rows)
  return (worth - price(noise_dim * (2 * (d + 1) + row['r']), num_rows)) / possible


def with_prediction(rows):
  """`over_seeds` of labels with noise, and the prediction, of heads that can express the truth."""
  able = {('het_xl', 'het'), *((head, head) for head in CLASSIFIERS)}
  rows = [row for row in rows if (row['truth'], row['head']) in able and row['noise']]
  means = over_seeds(rows)
  for key, x in means.items():
    names = dict(zip(KEY, key, strict=True))
    x['predicted'] = np.mean([predicted_share(row) for row in rows if names.items() <= row.items()])
  return means


def print_rows(rows):
  """Prints the means over seeds, sorted by the prediction, and the error of the prediction."""
  means = with_prediction(rows)
  columns = 'predicted gain stderr share covariance seeds'.split()
  table = [[*key, *(x[column] for column in columns)] for key, x in means.items()]
  print_table([*KEY, *columns], sorted(table, key=lambda x: x[len(KEY)]))
  for head in sorted({key[1] for key in means}):
    found = [x for key, x in means.items() if key[1] == head]
    gaps = [x['share'] - max(x['predicted'], 0.0) for x in found]
    error = np.sqrt(np.mean(np.square(gaps)))
    print(f'{head}: share minus prediction, at least 0: {error:.2f} rms over {len(gaps)} points')


def compare_truths(rows):
  """Prints each head's share of the possible gain where labels of several heads were measured."""
  means = over_seeds([row for row in rows if row['noise']])
  heads = [head for head in CLASSIFIERS if head != 'det']
  points = sorted({key[2:] for key in means})
  table = []
  for point, truth in itertools.product(points, heads):
    if all((x, x, *point) in means for x in heads):
      found = [means[truth, head, *point] for head in heads]
      shares = [f'{x["share"]:.2f} ± {x["stderr"] / x["possible"]:.2f}' for x in found]
      table.append([*point, truth, found[0]['possible'], *shares])
  print_table([*KEY[2:], 'truth', 'possible', *heads], table)


def compare_rules(rows):
  """Prints the gain with the C_noise that `choose` takes, and with that of the least NLL."""
  table = []
  rows = [row for row in rows if row['grid']]
  for head, n in sorted({(row['head'], row['n']) for row in rows if row['head'] in CLASSIFIERS}):
    found = [row for row in rows if (row['head'], row['n']) == (head, n)]
    rule = [row['gain'] for row in found]
    least = [row['nll_det'] - min(row['grid'], key=lambda x: x['held_out'])['nll'] for row in found]
    table.append([head, n, len(found), *(f(x) for x in (rule, least) for f in (np.mean, min))])
  header = 'head', 'n', 'points', 'mean gain', 'worst', 'mean of least NLL', 'worst of it'
  print_table(header, table)


def draw_map(rows, path):
  """Draws a panel per link and head: the share of the possible gain, in percent, by D/K, rows per
  class and noise; bold if it is beyond two standard errors, and a dash if no noise was chosen.
  """
  rows = [
    row
    for row in rows
    if row['truth'] == 'het_xl'
    and row['noise']
    and row['r'] == MAP_FACTORS
    and row['head'] in set(CLASSIFIERS) - {'det'}
  ]
  means = over_seeds(rows)
  links, heads, noises, ns, sizes = (
    sorted({tuple(row[name] for name in key) for row in rows}, key=order)
    for key, order in (
      (['link'], None),
      (['head'], lambda x: list(CLASSIFIERS).index(x[0])),
      (['noise'], None),
      (['n'], None),
      (['d', 'k'], lambda x: (x[0] / x[1], x[1])),
    )
  )
  figure = style.new_figure(4.6 * len(heads), 0.9 + (0.36 * len(sizes) + 1.0) * len(links))
  panels = figure.subplots(len(links), len(heads), squeeze=False, sharex=True, sharey=True)
  columns = [(*n, *noise) for n, noise in itertools.product(ns, noises)]
  for (i, link), (j, head) in itertools.product(enumerate(links), enumerate(heads)):
    ax = panels[i, j]
    cells = np.full((len(sizes), len(columns)), np.nan)
    for at in np.ndindex(cells.shape):
      (d, k), (n, noise) = sizes[at[0]], columns[at[1]]
      if found := means.get(('het_xl', *head, *link, k, d, MAP_FACTORS, noise, n)):
        gain = found['gain']
        cells[at] = found['share']
        weight = 'bold' if gain is not None and abs(gain) > 2 * found['stderr'] else 'normal'
        text = '–' if gain is None else f'{100 * cells[at]:.0f}'.replace('-0', '0')
        color = 'white' if abs(cells[at]) > 0.6 else 'black'
        ax.text(*at[::-1], text, ha='center', va='center', fontsize=7, color=color, weight=weight)
    picture = ax.imshow(cells, cmap='PuOr', vmin=-1, vmax=1, aspect='auto', origin='lower')
    ax.set_facecolor('#dddddd')
    ax.set_title(f'{head[0].upper().replace("_", "-")}, {link[0]}', fontsize=10)
    ax.set_xticks(range(len(columns)), [f'{noise:g}' for _, noise in columns], fontsize=7)
    ax.set_yticks(range(len(sizes)), [f'{d / k:.2g}  ({d}/{k})' for d, k in sizes], fontsize=7)
    for edge in range(len(noises), len(columns), len(noises)):
      ax.axvline(edge - 0.5, color='white', linewidth=3)
    if i == len(links) - 1:
      for number, (n,) in enumerate(ns):
        center = (number + 0.5) * len(noises) - 0.5
        ax.annotate(
          f'N = {n}',
          (center, 0),
          (0, -24),
          fontsize=8,
          ha='center',
          xycoords=('data', 'axes fraction'),
          textcoords='offset points',
        )
      ax.set_xlabel('noise, and N rows per class', fontsize=8, labelpad=16)
  for line in panels:
    line[0].set_ylabel('D/K', fontsize=8)
  figure.colorbar(picture, ax=panels, label='share of the possible gain', shrink=0.8)
  path.write_bytes(style.to_png(figure, dpi=130))


def draw_prediction(rows, path):
  """Draws the share of the possible gain over `predicted_share`, ± over examples."""
  figure = style.new_figure(6.4, 4.0)
  ax = figure.subplots()
  ax.plot([-1, 0, 1], [0, 0, 1], color='#999999', linewidth=1)
  means = with_prediction(rows)
  panels = itertools.product(('het', 'het_xl', 'het_h'), ('sigmoid', 'softmax'))
  for (head, link), (color, _) in zip(panels, style.STYLES, strict=False):
    found = [x for key, x in means.items() if key[1:3] == (head, link)]
    ax.errorbar(
      [max(x['predicted'], -1) for x in found],
      [x['share'] for x in found],
      [x['stderr'] / x['possible'] for x in found],
      fmt='s' if link == 'softmax' else 'o',
      color=color,
      label=f'{head.upper().replace("_", "-")}, {link}',
      **ERROR_BARS,
    )
  ax.set_xlabel('predicted share; -1 or less')
  ax.set_ylabel('share of the possible gain')
  ax.legend(fontsize=8)
  style.plain_axes(ax, 'both')
  path.write_bytes(style.to_png(figure, dpi=130))


def main():
  parser = make_parser(__doc__)
  heads = [head for head in CLASSIFIERS if head != 'det']  # which has a row in any case
  parser.add_argument('--truth', default='het_xl', choices=heads)
  parser.add_argument('--heads', type=names(heads), default=heads, help=','.join(heads))
  parser.add_argument('--seed', type=integers, default=[0], help='one or several')
  parser.add_argument('--full', action='store_true', help='the whole grid')
  parser.add_argument(
    '--problem', type=as_problem, action='append', help='one point instead: LINK,K,D,R,NOISE,N'
  )
  parser.add_argument('--from_truth', action='store_true', help='also fits from the truth on')
  parser.add_argument(
    '--plot', type=Path, help='a map of the rows of --json as a PNG, and X_price.png; fits nothing'
  )
  args = parser.parse_args()
  rows = read_json(args.json)
  if args.plot and not rows:
    parser.error(f'--plot draws the rows of --json={args.json}, which has none')
  if args.plot:
    draw_map(rows, args.plot)
    draw_prediction(rows, args.plot.with_stem(args.plot.stem + '_price'))
    print_rows(rows)
    compare_truths(rows)
    compare_rules(rows)
    return
  problems = args.problem or (full_grid() if args.full else SMALL)
  warnings.simplefilter('ignore', ConvergenceWarning)  # at large C a few end above the tolerance
  for number, (seed, problem) in enumerate(itertools.product(args.seed, problems), start=1):
    key = {**dataclasses.asdict(problem), 'seed': seed, 'truth': args.truth}
    done = {row['head'] for row in rows if key.items() <= row.items()}
    wanted = set(args.heads)
    if args.from_truth:
      wanted |= {args.truth, f'{args.truth} from the truth'}
    if done >= wanted:
      continue
    start = time.process_time()
    heads = [head for head in args.heads if head not in done]
    if args.from_truth and args.truth not in heads:
      heads.append(args.truth)
    found = measure(problem, args.truth, heads, seed, args.from_truth)
    rows += [row for row in found if row['head'] not in done]
    write_json(args.json, rows)
    print(
      f'{number}/{len(problems) * len(args.seed)} {time.process_time() - start:.0f} s {problem}',
      *(f'{x["head"]} {x["gain"]:+.4f}±{x["gain_stderr"]:.4f}' for x in found[1:]),
      flush=True,
    )
  print_rows(rows)
  compare_truths(rows)
  compare_rules(rows)


if __name__ == '__main__':
  main()
