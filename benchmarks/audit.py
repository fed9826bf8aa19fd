"""Wrong labels found by our audit and by cleanlab, where the truth is known.

    pip install cleanlab && python -m benchmarks.audit [--json OUT]
    python -m benchmarks.audit --data digits,linear --kinds next,uniform,pairs,rate --shares 0.1,0.3
    python -m benchmarks.audit --data worse,annotator,aggre --rows 6000 --people cifar10_human.npz \
      --features cifar.npz

A share of the labels is moved: `next`, to the next class; `uniform`, to any; `pairs`, within pairs
of classes; `rate`, to the next class at a rate that depends on x. `digits` are those of
scikit-learn, `linear` is the argmax of a linear map of 24 normal features plus 0.3 Gumbel, of ten
classes. `unclear` is the same with 3 Gumbel, so that no classifier has an accuracy above about 0.3.
`clusters` are 100 classes in 64 dimensions, normal around normal centres (0.6); README's numbers
are of --data clusters --kinds next --shares 0.2 --rows 20000 --seeds 2 --heads det.
`worse`, `annotator` and `aggre` are labels that people gave to images of CIFAR-10 (CIFAR-10N).
--people is the file of these labels. --features is a file of imagenet_features.py, and 64 whitened
principal components of it are used. The seed chooses the rows, and the annotator for `annotator`.
All methods score the same rows out of the same folds:

    cleanlab                its label quality (self-confidence) by LogisticRegression
    cleanlab, fitted again  the same by a fit without the labels that cleanlab calls issues
    HEAD                    the probability that the label is wrong (estimators/audit.py)
    HEAD, one round         the same by fits to the labels only

Rows: AUROC and average precision of the wrong labels, and the precision of as many rows as are
wrong; means over seeds, with the standard error of the average precision. `seconds` are CPU
seconds, of cleanlab with its fits. `share` is the estimated share of wrong labels. For cleanlab it
is the number of label issues over the number of rows.
Everything takes an hour of CPU time, and DET and cleanlab take five minutes of it. A few seconds
are enough for --data linear --kinds next --shares 0.3 --seeds 2 --rows 300 --heads det.

    python -m benchmarks.audit --stream --rows 1000000

instead audits features of 32 columns that stay on disk, with labels of 20 classes, by one iteration
of DET for each fold: of a tenth of the rows, then of all. It writes all files of the command, and
prints the CPU seconds and the peak memory of the process, without mapped files.
"""

import argparse
import functools
import importlib.util
import itertools
import pathlib
import tempfile
import time
import warnings

import numpy as np
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import StandardScaler

from benchmarks.command_line import make_parser, names, numbers, report
from benchmarks.probe import memory_watched
from het_plugin import reporting
from het_plugin.commands import audit as report_of
from het_plugin.estimators import CLASSIFIERS
from het_plugin.estimators import audit as of_files
from het_plugin.estimators.settings import DET_TOL, ROUNDS, GridSettings

FOLDS = 3
C = 1.0
SETTINGS = {'C': [C], 'C_noise': [0.1], 'num_factors': [4], 'max_iter': 200, 'progress': False}
PEOPLE = ('aggre', 'worse', 'annotator')
NUM_COMPONENTS = 64


def digits(rng, num_rows):
  x, truth = load_digits(return_X_y=True)
  rows = rng.permutation(len(x))[:num_rows]
  return StandardScaler().fit_transform(x)[rows], truth[rows]


def linear(rng, num_rows, gumbel=0.3):
  x = rng.normal(size=(num_rows, 24))
  u = x @ rng.normal(size=(24, 10)) * 24**-0.5 * 3 + gumbel * rng.gumbel(size=(num_rows, 10))
  return x, u.argmax(axis=1)


def clusters(rng, num_rows):
  truth = rng.integers(100, size=num_rows)
  return rng.normal(size=(num_rows, 64)) + 0.6 * rng.normal(size=(100, 64))[truth], truth


DATA = {
  'digits': digits,
  'linear': linear,
  'unclear': functools.partial(linear, gumbel=3.0),
  'clusters': clusters,
}


def moved(rng, kind, share, x, truth):
  """The labels, after about a share of them is moved."""
  num_classes = truth.max() + 1
  rate = np.full(len(truth), share)
  if kind.startswith('rate'):
    u = 1 / (1 + np.exp(-3 * x @ rng.normal(size=x.shape[1]) / np.sqrt(x.shape[1])))
    rate = np.minimum(share * u / u.mean(), 0.95)
  to_any = (truth + rng.integers(1, num_classes, len(truth))) % num_classes
  targets = {
    'uniform': to_any,
    'rate_any': to_any,
    'pairs': np.minimum(truth ^ 1, num_classes - 1),
  }
  target = targets.get(kind, (truth + 1) % num_classes)
  return np.where(rng.random(len(truth)) < rate, target, truth)


KINDS = ('next', 'uniform', 'pairs', 'rate')


def people(kind, features, labels, seed):
  """Features [N, 1280] of images, people's labels and the truth [N], from the two files."""
  with np.load(features) as file:
    x = file['features'].astype(np.float32)
    index = file['index']
  with np.load(labels) as file:
    truth = file['label'][index].astype(int)
    y = file['annotators' if kind == 'annotator' else kind][index].astype(int)
  return x, y[:, seed % y.shape[1]] if kind == 'annotator' else y, truth


def draw(data, kind, share, args, seed):
  """Features, labels and truth of the rows of a seed."""
  rng = np.random.default_rng(seed)
  if data not in PEOPLE:
    x, truth = DATA[data](rng, args.rows)
    return x, moved(rng, kind, share, x, truth), truth
  x, y, truth = people(data, args.features, args.people, seed)
  rows = rng.permutation(len(y))[: args.rows]
  pca = PCA(NUM_COMPONENTS, whiten=True, random_state=0)
  return pca.fit_transform(x[rows]), y[rows], truth[rows]


def regression_p(x, y, kept):
  """Probabilities [N, K] of each fold by LogisticRegression of the kept rows of the others."""
  p = np.zeros((len(y), y.max() + 1))
  for fitted, held_out in StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(x, y):
    fitted = fitted[kept[fitted]]
    model = LogisticRegression(C=C, max_iter=1000).fit(x[fitted], y[fitted])
    p[np.ix_(held_out, model.classes_)] = model.predict_proba(x[held_out])
  return p


def scores(args, x, y):
  """{method: (how wrong each label seems [N], estimated share, CPU seconds)}."""
  found = {}
  start = time.process_time()
  if args.cleanlab:
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores

    p = regression_p(x, y, np.ones(len(y), bool))
    issues = find_label_issues(y, p, n_jobs=1)
    quality = get_label_quality_scores(y, p)
    found['cleanlab'] = -quality, issues.mean(), time.process_time() - start
    again = regression_p(x, y, ~issues)
    quality = get_label_quality_scores(y, again)
    found['cleanlab, fitted again'] = -quality, issues.mean(), time.process_time() - start
  for head in args.heads:
    tol = DET_TOL if head == 'det' else GridSettings.tol
    settings = GridSettings([head], folds=FOLDS, tol=tol, **SETTINGS)
    for name, rounds in ((f'{head}, one round', 1), (head, ROUNDS)):
      start = time.process_time()
      with warnings.catch_warnings():
        warnings.simplefilter('ignore', ConvergenceWarning)
        result = of_files.audit(x, y, settings, rounds)
      found[name] = result.wrong, result.share, time.process_time() - start
  return found


def measure(args):
  """A row for each data set, kind, share and method."""
  rows = []
  cases = []
  for data in args.data:
    moves = itertools.product(args.kinds, args.shares)
    cases += [(data, None, None)] if data in PEOPLE else [(data, *move) for move in moves]
  for data, kind, share in cases:
    by_method = {}
    for seed in range(args.seeds):
      x, y, truth = draw(data, kind, share, args, seed)
      is_wrong = y != truth
      for method, (score, estimate, seconds) in scores(args, x, y).items():
        worst = np.argsort(-score, kind='stable')[: is_wrong.sum()]
        values = (
          roc_auc_score(is_wrong, score),
          average_precision_score(is_wrong, score),
          is_wrong[worst].mean(),
          estimate,
          is_wrong.mean(),
          seconds,
        )
        by_method.setdefault(method, []).append(values)
    for method, values in by_method.items():
      mean = np.mean(values, axis=0)
      error = np.std(values, axis=0, ddof=1) / np.sqrt(args.seeds)
      columns = ('auroc', 'average_precision', 'precision', 'share', 'true_share', 'seconds')
      row = {'data': data if kind is None else f'{data}, {kind}', 'method': method}
      row |= dict(zip(columns, map(float, mean), strict=True))
      rows.append(row | {'stderr_ap': float(error[1])})
  return rows


def stream(args):
  """A row per number of rows."""
  rng = np.random.default_rng(0)
  found = []
  kernel = rng.normal(size=(32, 20)).astype(np.float32)
  settings = GridSettings(['det'], solver='streamed', max_iter=1, progress=False)
  for num_rows in (args.rows // 10, args.rows):
    with tempfile.TemporaryDirectory() as name:
      folder = pathlib.Path(name)
      labels = []
      shape = (num_rows, len(kernel))
      x = np.lib.format.open_memmap(folder / 'x.npy', 'w+', np.float32, shape)
      for start in range(0, num_rows, 4096):
        x[start : start + 4096] = rng.standard_normal(x[start : start + 4096].shape, np.float32)
        labels.append((x[start : start + 4096] @ kernel).argmax(axis=1))
      del x
      y = np.concatenate(labels)
      np.save(folder / 'y.npy', np.where(rng.random(num_rows) < 0.2, (y + 1) % 20, y))
      with memory_watched() as memory:
        cpu = time.process_time()
        made = report_of.report(f'{folder}/x.npy,{folder}/y.npy', settings)
        reporting.write_json(made.json, folder / 'a.json')
        made.writers['csv'](folder / 'a.csv')
        made.writers['suggest'](folder / 'suggested.safetensors')
        cpu = time.process_time() - cpu
    found.append({'rows': num_rows, 'cpu_seconds': cpu, 'peak_mib': max(memory)})
  report(args.json, found)


def main():
  parser = make_parser(__doc__)
  of_data = (*DATA, *PEOPLE)
  parser.add_argument(
    '--data', type=names(of_data), default=['digits', 'linear'], help=','.join(of_data)
  )
  parser.add_argument('--people', help="file of people's labels")
  parser.add_argument('--features', help='file of the features of their images')
  parser.add_argument('--kinds', type=names(KINDS), default=list(KINDS), help=','.join(KINDS))
  parser.add_argument('--shares', type=numbers, default=[0.3], help='shares of moved labels')
  parser.add_argument('--seeds', type=int, default=3, help='number of seeds, 2 or more')
  parser.add_argument('--rows', type=int, default=1500, help='rows N')
  parser.add_argument(
    '--heads', type=names(CLASSIFIERS), default=['det', 'het_xl'], help=','.join(CLASSIFIERS)
  )
  parser.add_argument(
    '--cleanlab', action=argparse.BooleanOptionalAction, default=True, help='also cleanlab'
  )
  parser.add_argument('--stream', action='store_true', help='the memory of rows on disk')
  args = parser.parse_args()
  if args.stream:
    return stream(args)
  if args.seeds < 2:
    parser.error(f'--seeds={args.seeds} must be at least 2, for the errors')
  if {*args.data} & {*PEOPLE} and not (args.people and args.features):
    parser.error(f'--data={",".join(args.data)} needs --people and --features')
  if args.cleanlab and not importlib.util.find_spec('cleanlab'):
    parser.error('--cleanlab needs `pip install cleanlab`; --no-cleanlab leaves it out')
  report(args.json, measure(args))


if __name__ == '__main__':
  main()
