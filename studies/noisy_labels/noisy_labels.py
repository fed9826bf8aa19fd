"""How right classifiers are about the truth, and which labels they find wrong, if labels are noisy.

    pip install cleanlab
    python -m studies.noisy_labels.noisy_labels --json=rows.json [--plot=PNG]
    python -m studies.noisy_labels.noisy_labels --json=rows.json --data=DIR \\
      --features cifar.npz omniglot.npz
    python -m studies.noisy_labels.noisy_labels --json=rows.json --problem=rate,0.4,2500,10,24,0.3,0

A problem is KIND,SHARE,N,K,D,GUMBEL,HIDDEN. x is normal. The truth is the argmax of a linear map
(standard deviation 3) of D + HIDDEN features, plus GUMBEL times Gumbel noise. Methods see the first
D features, so that the accuracy of the best classifier, `bayes`, falls with GUMBEL and HIDDEN. A
share of the labels is wrong:

    next       the next class
    rate       the next class, at a rate that depends on x
    rate_any   any class, at a rate that depends on x
    uniform    any class
    pairs      the other class of a pair

DIR has cifar10_human.npz, with people's labels (CIFAR-10N), and omniglot28.npz, whose labels we
move. imagenet_features.py makes the features, of which 64 whitened principal components are used.

    det                 logistic regression
    hidden              with a hidden layer of 64
    smoothing           with smoothed labels, by 0.1 or 0.3
    gce                 generalised cross-entropy, q = 0.7 (Zhang and Sabuncu 2018,
                        https://arxiv.org/abs/1805.07836)
    forward_known       forward correction with the confusions of the rows themselves (Patrini et
                        al. 2017, https://arxiv.org/abs/1609.03683)
    forward_estimated   with confusions read off det's most certain row of each class (their eq. 12)
    forward_audit       with the confusions that our audit finds on the held-out rows by the
                        location of the chosen het_xl; forward_audit_det, by that of det
    audited             det of the rows with the labels that our audit suggests (C = 1, 3 folds)
    cleanlab            its CleanLearning of LogisticRegression: prunes and fits again
    het, het_h, het_xl  the heads, R = 4, S = 16

N rows are fitted. A fourth as many (at least 500) choose C and the rest by the NLL of their noisy
labels: gce by its own loss, cleanlab, whose model has no distribution of noisy labels, by its
accuracy on them. All else is of other rows: noisy `nll`; the accuracy on the truth by the
predictive distribution (`clean_accuracy`) and by the location or its counterpart
(`clean_accuracy_location`); the NLL and calibration error of both on the truth; `auroc` and
`average_precision` of wrong labels by the location's probability of the label (`_predictive`: by
that of the predictive distribution). `best_accuracy` is the most that any point of the method's
grid has by the location: what choosing on noisy labels leaves. `gradient` is its largest entry at
the end of the fit (of gce and forward in raw coordinates; cleanlab tells none).

Rows that --json already has are not measured again. The whole grid takes about an hour of CPU time.
The rows in results/ took 20 minutes.
"""

import argparse
import dataclasses
import importlib.util
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize, special
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, roc_auc_score

from benchmarks.audit import NUM_COMPONENTS, PEOPLE, moved, people
from benchmarks.command_line import integers, make_parser, names, print_table, read_json, write_json
from het_plugin.estimators import CLASSIFIERS
from het_plugin.estimators import audit as of_files
from het_plugin.estimators.selection import NOISE_SHARE
from het_plugin.estimators.settings import GridSettings
from het_plugin.measures import audit, uncertainty
from het_plugin.reporting import style

SIGNAL = 3.0
NUM_TEST = 3000
BAYES_DRAWS = 100  # of the hidden features
CS = (0.03, 0.1, 0.3, 1.0, 3.0)
NOISE_CS = (0.3, 1.0, 3.0)  # C of heads with noise
NOISE_CS_OF_FEATURES = (0.03, 0.1, 0.3)  # the same for images' features
NOISE_RATIOS = (0.03, 0.1, 0.3)  # C_noise / C
SMOOTHING = (0.1, 0.3)
Q = 0.7  # of gce
SETTINGS = {'tol': 1e-3, 'max_iter': 150}
NOISE = {'num_factors': 4, 'num_samples': 16}
KINDS = ('next', 'rate', 'rate_any', 'uniform', 'pairs')
FILES = {**dict.fromkeys(PEOPLE, 'cifar10_human.npz'), 'omniglot': 'omniglot28.npz'}
POINT = ('kind', 'share', 'n', 'k', 'd', 'gumbel', 'hidden')
COLUMNS = (
  'nll',
  'clean_accuracy',
  'clean_accuracy_location',
  'best_accuracy',
  'auroc',
  'average_precision',
  'average_precision_predictive',
  'truth_nll_location',
  'truth_ece',
  'truth_ece_location',
  'gradient',
)
TO_DET = {'accuracy - DET': 'clean_accuracy_location', 'auroc - DET': 'auroc'}  # of the same rows
PRINTED = (*COLUMNS, *TO_DET)
SHOWN = {  # in the picture
  'det': 'DET',
  'cleanlab': 'cleanlab',
  'het': 'HET, location',
  'gce': 'generalised cross-entropy',
  'het_xl': 'HET-XL, location',
  'forward_audit': 'corrected by HET-XL',
  'audited': 'labels of the audit',
}
TITLES = {
  'next': 'next class',
  'rate': 'next class, rate by x',
  'rate_any': 'any class, rate by x',
  'uniform': 'any class',
  'pairs': 'pairs of classes',
}


@dataclasses.dataclass(frozen=True)
class Problem:
  """Labels of our making, see above."""

  kind: str
  share: float
  n: int = 2500
  k: int = 10
  d: int = 24
  gumbel: float = 0.3
  hidden: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Data:
  """Features, noisy labels and truth of the rows of a fit, held-out rows and test rows."""

  x: tuple[np.ndarray, ...]
  y: tuple[np.ndarray, ...]
  truth: tuple[np.ndarray, ...]
  bayes: float | None  # accuracy on the truth that no classifier exceeds; None if not known

  @property
  def num_classes(self):
    return int(max(y.max() for y in self.y + self.truth)) + 1


@dataclasses.dataclass(frozen=True, eq=False)
class Fit:
  """A point of a method's grid.

  held_out: what is least at the chosen point. log_p, clean: log-probabilities of the noisy labels
  and probabilities of the truth, [test, K].
  """

  settings: dict
  gradient: float | None
  held_out: float
  log_p: np.ndarray
  clean: np.ndarray


def as_problem(text):
  kind, share, n, k, d, gumbel, hidden = text.split(',')
  names(KINDS)(kind)
  sizes = (int(x) for x in (n, k, d))
  return Problem(kind, float(share), *sizes, float(gumbel), int(hidden))


def grid():
  """Problems and numbers of seeds, the most telling first."""
  points = [(Problem(kind, 0.4), 2) for kind in KINDS[1:]]
  points += [(Problem(kind, share), 2) for kind in KINDS[1:] for share in (0.2, 0.6)]
  points += [(Problem('uniform', 0.0), 2)]
  for kind in ('rate', 'uniform'):
    points += [(Problem(kind, 0.4, gumbel=g), 2) for g in (1.0, 3.0)]
    points += [(Problem(kind, 0.4, hidden=24), 2), (Problem(kind, 0.4, n=500), 2)]
    points += [(Problem(kind, 0.4, n=10_000), 1), (Problem(kind, 0.4, n=3000, k=50), 1)]
  return points


def draw(problem, seed):
  rng = np.random.default_rng(seed)
  sizes = np.cumsum([problem.n, max(500, problem.n // 4)])
  num_rows = sizes[-1] + NUM_TEST
  d = problem.d + problem.hidden
  x = rng.normal(size=(num_rows, d))
  w = rng.normal(size=(d, problem.k)) * SIGNAL * d**-0.5
  truth = (x @ w + problem.gumbel * rng.gumbel(size=(num_rows, problem.k))).argmax(axis=1)
  seen = x[:, : problem.d]
  y = moved(rng, problem.kind, problem.share, seen, truth)
  parts = _fitted_classes(np.split(np.arange(num_rows), sizes), seen, y, truth)
  p = 0.0
  draws = BAYES_DRAWS if problem.hidden else 1
  for _ in range(draws):
    unseen = rng.normal(size=(NUM_TEST, problem.hidden))
    whole = np.concatenate([seen[-NUM_TEST:], unseen], axis=1)
    p = p + special.softmax(whole @ w / problem.gumbel, axis=1) / draws
  return Data(*parts, float(p.max(axis=1).mean()))


def _fitted_classes(parts, x, y, truth):
  """x, y and truth of the parts' rows, without the classes that no label of the first part is."""
  while True:  # rows that are left out may have had a class alone
    classes = np.unique(y[parts[0]])
    known = np.isin(y, classes) & np.isin(truth, classes)
    if all(known[rows].all() for rows in parts):
      break
    parts = [rows[known[rows]] for rows in parts]
  y = np.searchsorted(classes, y)
  truth = np.searchsorted(classes, truth)
  return (tuple(a[rows] for rows in parts) for a in (x.astype(np.float32), y, truth))


def of_people(kind, args, seed):
  """Data of people's labels, or of Omniglot's characters with 30% of the labels moved."""
  is_omniglot = kind == 'omniglot'
  rng = np.random.default_rng(seed)
  given = args.features[is_omniglot], args.data / FILES[kind], seed
  features, y, truth = people('label' if is_omniglot else kind, *given)
  if is_omniglot:
    y = moved(rng, 'uniform', 0.3, features, truth)
  order = rng.permutation(len(truth))
  sizes = np.cumsum(np.array([0.6, 0.15]) * len(order)).astype(int)
  first, *others = np.split(order, sizes)
  pca = PCA(NUM_COMPONENTS, whiten=True, random_state=0).fit(features[first])
  parts = [first, *others]
  x = tuple(pca.transform(features[rows]) for rows in parts)
  return Data(x, *(tuple(a[rows].astype(int) for rows in parts) for a in (y, truth)), None)


def of_labels(values, y):
  """Of each row [N, K] the entry of its label, [N]."""
  return values[np.arange(len(y)), y]


def nll(log_p, y):
  return -float(of_labels(log_p, y).mean())


def of_estimator(estimator, data, settings):
  """Fits an estimator, of which the location is the distribution of the truth."""
  _, held_out, test = data.x
  log_p = estimator.predict_log_proba(held_out)
  return Fit(
    settings,
    estimator.gradient_,
    nll(log_p, data.y[1]),
    estimator.predict_log_proba(test),
    estimator.predict_clean_proba(test),
  )


# A method takes the data and gives its fits. `starts` has the estimators of DET by C, and the best
# one of each head.


def det(data, starts):
  for c in CS:
    starts[c] = CLASSIFIERS['det'](C=c, **SETTINGS).fit(data.x[0], data.y[0])
  return [of_estimator(starts[c], data, {'C': c}) for c in CS]


def hidden(data, starts):
  del starts
  found = []
  for c in CS[1:4:2]:
    estimator = CLASSIFIERS['det'](C=c, hidden_layers=(64,), **SETTINGS)
    found.append(of_estimator(estimator.fit(data.x[0], data.y[0]), data, {'C': c}))
  return found


def smoothing(data, starts):
  del starts
  found = []
  for alpha in SMOOTHING:
    shares = (1 - alpha) * np.eye(data.num_classes)[data.y[0]] + alpha / data.num_classes
    for c in CS:
      estimator = CLASSIFIERS['det'](C=c, target='probabilities', **SETTINGS)
      estimator.fit(data.x[0], shares)
      found.append(of_estimator(estimator, data, {'C': c, 'alpha': alpha}))
  return found


def heads(head):
  def fits(data, starts):
    found = []
    for c in NOISE_CS if data.bayes else NOISE_CS_OF_FEATURES:
      for ratio in NOISE_RATIOS:
        settings = {'C': c, 'C_noise': ratio * c}
        estimator = CLASSIFIERS[head](**settings, **NOISE, **SETTINGS)
        estimator.fit(data.x[0], data.y[0], start=starts[c])
        found.append(of_estimator(estimator, data, settings))
        if min(found, key=lambda fit: fit.held_out) is found[-1]:
          starts[head] = estimator  # the best so far
    return found

  return fits


def linear_loss(name, w, x, y, t, c):
  """(loss of noisy labels + |W|^2 / (2 C)) / N of logits x W, whose last row is the bias."""
  log_p = jax.nn.log_softmax(x @ w[:-1] + w[-1])
  if name == 'gce':
    p = jnp.exp(log_p[jnp.arange(len(y)), y])
    losses = (1 - p**Q) / Q
  else:  # sum_k p_k T_ky
    losses = -jax.nn.logsumexp(log_p + jnp.log(t.T[y]), axis=1)
  return losses.mean() + jnp.square(w[:-1]).sum() / (2 * c * len(y))


_linear_gradient = jax.jit(jax.value_and_grad(linear_loss, argnums=1), static_argnums=0)


def fit_linear(name, data, t, start, c):
  """A `Fit` of `linear_loss`, which is not convex, from DET's optimum."""
  shape = len(start.coef_[0]) + 1, data.num_classes
  first = np.concatenate([start.coef_.T, start.intercept_[None]])

  def value_and_gradient(flat):
    given = jnp.float32(flat.reshape(shape)), data.x[0], data.y[0], t, c
    value, gradient = _linear_gradient(name, *given)
    return float(value), np.asarray(gradient, np.float64).ravel()

  done = optimize.minimize(
    value_and_gradient, first.ravel(), jac=True, method='L-BFGS-B', options={'maxiter': 300}
  )
  w = done.x.reshape(shape)
  _, log_held_out, log_test = (special.log_softmax(x @ w[:-1] + w[-1], axis=1) for x in data.x)
  if name == 'gce':
    held_out = float(((1 - np.exp(Q * of_labels(log_held_out, data.y[1]))) / Q).mean())
    log_label = log_test
  else:
    held_out = nll(np.log(np.exp(log_held_out) @ t), data.y[1])
    log_label = np.log(np.exp(log_test) @ t)
  return Fit({'C': c}, float(np.abs(done.jac).max()), held_out, log_label, np.exp(log_test))


def gce(data, starts):
  t = np.eye(data.num_classes)
  return [fit_linear('gce', data, t, starts[c], c) for c in CS]


def forward_known(data, starts):
  counts = np.full((data.num_classes,) * 2, 1e-3)
  np.add.at(counts, (data.truth[0], data.y[0]), 1.0)
  t = counts / counts.sum(axis=1, keepdims=True)
  return [fit_linear('forward', data, t, starts[c], c) for c in CS]


def best_det(data, starts):
  return starts[min(CS, key=lambda c: nll(starts[c].predict_log_proba(data.x[1]), data.y[1]))]


def forward_estimated(data, starts):
  p = best_det(data, starts).predict_proba(data.x[0])
  t = p[p.argmax(axis=0)]  # row k: of the row that is most certainly k
  return [fit_linear('forward', data, t, starts[c], c) for c in CS]


def forward_audited(head):
  def fits(data, starts):
    if head != 'det' and head not in starts:
      heads(head)(data, starts)
    estimator = best_det(data, starts) if head == 'det' else starts[head]
    found = audit.audit(estimator.predict_clean_proba(data.x[1]), data.y[1])
    t = np.maximum(found.confusions, 1e-6)
    return [fit_linear('forward', data, t, starts[c], c) for c in CS]

  return fits


def audited(data, starts):
  del starts
  settings, (x, *_), y = GridSettings(['det'], folds=3, progress=False), data.x, data.y[0].copy()
  rows = np.flatnonzero(np.bincount(y)[y] >= settings.folds)  # others keep their labels
  found = of_files.audit(x[rows], y[rows], settings)
  y[rows] = np.where(found.kind == 'wrong', found.suggested, y[rows])
  t = np.eye(data.num_classes)
  fits = []
  t[np.ix_(found.ids, found.ids)] = found.confusions
  for c in CS:
    estimator = CLASSIFIERS['det'](C=c, target='probabilities', **SETTINGS)
    estimator.fit(x, np.eye(data.num_classes)[y])  # a class may have lost its only row
    held_out, test = (estimator.predict_proba(rows) for rows in data.x[1:])
    log_held_out, log_test = (np.log(np.maximum(p @ t, 1e-12)) for p in (held_out, test))
    fits.append(Fit({'C': c}, estimator.gradient_, nll(log_held_out, data.y[1]), log_test, test))
  return fits


def cleanlab(data, starts):
  del starts
  from cleanlab.classification import CleanLearning

  found = []
  for c in CS:
    regression = LogisticRegression(C=c, max_iter=1000)
    model = CleanLearning(regression, seed=0, find_label_issues_kwargs={'n_jobs': 1})
    model.fit(data.x[0], data.y[0])
    wrong = float((model.predict(data.x[1]) != data.y[1]).mean())
    p = np.full((len(data.x[2]), data.num_classes), 1e-6)
    p[:, model.clf.classes_] = model.predict_proba(data.x[2])
    found.append(Fit({'C': c}, None, wrong, np.log(np.maximum(p, 1e-6)), p))
  return found


METHODS = {
  'det': det,
  'hidden': hidden,
  'smoothing': smoothing,
  'gce': gce,
  'forward_known': forward_known,
  'forward_estimated': forward_estimated,
  'cleanlab': cleanlab,
  'audited': audited,
  **{head: heads(head) for head in ('het', 'het_h', 'het_xl')},
  'forward_audit': forward_audited('het_xl'),
  'forward_audit_det': forward_audited('det'),
}


def accuracy(p, truth):
  return float((p.argmax(axis=1) == truth).mean())


def of_location(fit, y, truth):
  """What the location of a fit is worth, by the truth of the test rows."""
  return {'clean_accuracy_location': accuracy(fit.clean, truth)} | detection(fit.clean, y, truth)


def detection(p, y, truth):
  """How well 1 - p [N, K] of the label tells wrong labels; None where there are none."""
  is_wrong = y != truth
  score = 1 - of_labels(p, y)
  measures = {'auroc': roc_auc_score, 'average_precision': average_precision_score}
  some = is_wrong.any()
  return {name: float(of(is_wrong, score)) if some else None for name, of in measures.items()}


def measure(data, methods):
  """{method: row}; the other methods need det, which is fitted in any case."""
  y = data.y[2]
  truth = data.truth[2]
  rows = {}
  starts = {}
  for method in dict.fromkeys(['det', *methods]):
    start = time.process_time()
    fits = METHODS[method](data, starts)
    seconds = time.process_time() - start
    best = min(fits, key=lambda fit: fit.held_out)
    row = {'nll': nll(best.log_p, y), 'clean_accuracy': accuracy(best.log_p, truth)}
    row |= of_location(best, y, truth)
    by_predictive = detection(np.exp(best.log_p), y, truth)
    row |= {f'{name}_predictive': value for name, value in by_predictive.items()}
    row['best_accuracy'] = max(accuracy(fit.clean, truth) for fit in fits)
    for suffix, p in (('', np.exp(best.log_p)), ('_location', best.clean)):
      row[f'truth_nll{suffix}'] = nll(np.log(np.maximum(p, 1e-12)), truth)
      right = p.argmax(axis=1) == truth
      row[f'truth_ece{suffix}'] = uncertainty.reliability(p.max(axis=1), right).ece
    row |= {'bayes': data.bayes, 'chosen': best.settings, 'gradient': best.gradient}
    row['cpu_seconds'] = seconds
    row['grid'] = [
      {**fit.settings, 'held_out': fit.held_out, 'gradient': fit.gradient}
      | of_location(fit, y, truth)
      for fit in fits
    ]
    rows[method] = row
  return {method: rows[method] for method in methods}


def point_of(row):
  return tuple(row[name] for name in POINT)


def over_seeds(rows):
  """{(point, head): {column: (mean, standard error, number of seeds)}}."""
  groups = {}
  det = {(point_of(row), row['seed']): row for row in rows if row['head'] == 'det'}
  for row in rows:
    if base := det.get((point_of(row), row['seed'])):
      known = {name: x for name, x in TO_DET.items() if row[x] is not None}
      row = row | {name: row[column] - base[column] for name, column in known.items()}
    if row['kind'] in FILES:  # the share is that of a split
      row = row | {'share': None}
    groups.setdefault((*point_of(row), row['head']), []).append(row)
  means = {}
  for key, found in groups.items():
    means[key] = {}
    for column in PRINTED:
      values = [row[column] for row in found if row.get(column) is not None]
      if values:
        means[key][column] = np.mean(values), uncertainty.stderr(np.array(values)), len(values)
  return means


def print_rows(rows):
  means = over_seeds(rows)
  table = []
  for key, found in means.items():
    cells = []
    for column in PRINTED:
      mean, error, _ = found.get(column, (None, None, 0))
      text = '' if mean is None else f'{mean:.3f}'
      cells.append(text + (f' ± {error:.3f}' if error is not None else ''))
    table.append([*key, max(x[2] for x in found.values()), *cells])
  print_table([*POINT, 'head', 'seeds', *PRINTED], table)


def compare_noise(rows):
  """Prints, for each C_noise / C, what choosing C alone gives, less what choosing both gives."""
  rows = [row for row in rows if row['head'] in ('het', 'het_h', 'het_xl')]
  table = []
  columns = 'held_out', 'clean_accuracy_location', 'auroc'
  groups = sorted({(row['head'], row['kind'] in FILES) for row in rows})
  for head, of_images in groups:
    found = [row for row in rows if (row['head'], row['kind'] in FILES) == (head, of_images)]
    for ratio in NOISE_RATIOS:
      gaps = []
      for row in found:
        some = [x for x in row['grid'] if np.isclose(x['C_noise'], ratio * x['C'])]
        first, best = (min(x, key=lambda x: x['held_out']) for x in (some, row['grid']))
        gaps.append([(first[x] or np.nan) - (best[x] or np.nan) for x in columns])
      features = 'of images' if of_images else 'normal'
      table.append([head, features, ratio, len(found), *map(float, np.nanmean(gaps, axis=0))])
  if table:
    print(f'C_noise / C, which is {NOISE_SHARE} where nothing is chosen:')
    print_table(['head', 'features', 'C_noise / C', 'fits', *columns], table)


def draw_picture(rows, path):
  """Accuracy on the truth by the share of wrong labels, a panel for each kind of noise."""
  means = over_seeds([row for row in rows if row['kind'] in KINDS])
  base = dataclasses.asdict(Problem('', 0.0))
  shown = {
    key: x['clean_accuracy_location']
    for key, x in means.items()
    if key[2:-1] == tuple(base[name] for name in POINT[2:]) and key[-1] in SHOWN
  }
  figure = style.new_figure(9.6, 3.2)
  kinds = [kind for kind in KINDS if any(key[0] == kind and key[1] for key in shown)]
  panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
  styles = style.line_styles(SHOWN)
  for ax, kind in zip(panels, kinds, strict=True):
    for head, (color, dashes) in styles.items():
      points = sorted(
        (key[1], *x[:2])
        for key, x in shown.items()
        if key[-1] == head and (key[0] == kind or not key[1])
      )
      if points:
        share, mean, error = zip(*points, strict=True)
        error = [e or 0.0 for e in error]
        ax.errorbar(
          share,
          mean,
          error,
          color=color,
          linestyle=dashes,
          marker='o',
          markersize=3,
          label=SHOWN[head],
        )
    ax.set_title(TITLES[kind], fontsize=10)
    ax.set_xlabel('share of wrong labels')
    style.plain_axes(ax, 'both')
  panels[0].set_ylabel('accuracy on the truth')
  panels[len(panels) // 2].legend(fontsize=7, loc='lower left')
  path.write_bytes(style.to_png(figure, dpi=130))


def main():
  parser = make_parser(__doc__)
  parser.add_argument('--heads', type=names(METHODS), default=list(METHODS), help=','.join(METHODS))
  parser.add_argument(
    '--problem', type=as_problem, action='append', help='one point instead of the grid'
  )
  parser.add_argument(
    '--seeds', type=integers, help='0,1 for example, in place of those of the grid'
  )
  parser.add_argument(
    '--data', type=Path, help="folder of people's labels, which take the place of the grid"
  )
  parser.add_argument(
    '--features', type=Path, nargs=2, help='files of imagenet_features.py for CIFAR-10 and Omniglot'
  )
  parser.add_argument('--people', type=names(FILES), default=list(FILES), help=','.join(FILES))
  parser.add_argument('--cleanlab', action=argparse.BooleanOptionalAction, default=True)
  parser.add_argument('--plot', type=Path, help='draws the rows of --json as a PNG; fits nothing')
  args = parser.parse_args()
  if bool(args.data) != bool(args.features):
    parser.error('--data and --features belong together: set both or none')
  for kind in args.people if args.data else ():
    if not (args.data / FILES[kind]).exists():
      parser.error(f'--data={args.data} has no {FILES[kind]}, which --people={kind} reads')
  args.heads = [x for x in args.heads if args.cleanlab or x != 'cleanlab']
  if 'cleanlab' in args.heads and not args.plot and not importlib.util.find_spec('cleanlab'):
    parser.error('--heads=cleanlab needs `pip install cleanlab`; --no-cleanlab leaves it out')
  rows = read_json(args.json)
  if args.plot and not rows:
    parser.error(f'--plot draws the rows of --json={args.json}, which has none')
  if not args.plot:
    rows = run(args, rows)
  else:
    draw_picture(rows, args.plot)
  print_rows(rows)
  compare_noise(rows)


def run(args, rows):
  """Measures what rows lack."""
  warnings.simplefilter('ignore', ConvergenceWarning)  # gradients are among the results
  points = [(problem, 1) for problem in args.problem or ()]
  if args.data:
    points += [(kind, 3) for kind in args.people]
  points = points or grid()
  work = [(p, seed) for p, seeds in points for seed in args.seeds or range(seeds)]
  for number, (point, seed) in enumerate(work, start=1):
    start = time.process_time()
    is_problem = isinstance(point, Problem)
    key = {**(dataclasses.asdict(point) if is_problem else {'kind': point}), 'seed': seed}
    done = {row['head'] for row in rows if key.items() <= row.items()}
    left = [method for method in args.heads if method not in done]
    if not left:
      continue
    data = draw(point, seed) if is_problem else of_people(point, args, seed)
    if not is_problem:
      key |= {'share': float((data.y[2] != data.truth[2]).mean()), 'n': len(data.x[0])}
      key |= {'k': data.num_classes, 'd': NUM_COMPONENTS, 'gumbel': None, 'hidden': None}
    found = measure(data, left)
    rows += [{**key, 'head': head, **row} for head, row in found.items()]
    write_json(args.json, rows)
    print(f'{number}/{len(work)} {time.process_time() - start:.0f} s {key}', flush=True)
    for head, row in found.items():
      cells = [f'{x} {row[x]:.3f}' for x in COLUMNS if row[x] is not None]
      print(f'  {head}: {", ".join(cells)} {row["chosen"]}', flush=True)
  return rows


if __name__ == '__main__':
  main()
