"""Wrong labels found by our audit and by cleanlab, where the truth is known.

    pip install cleanlab && python benchmarks/audit.py [--json OUT]
    python benchmarks/audit.py --data digits,linear --kinds next,uniform,pairs,rate --shares 0.1,0.3

A share of the labels is moved: `next`, to the next class; `uniform`, to any; `pairs`, within pairs
of classes; `rate`, to the next class at a rate that depends on x. `digits` are those of
scikit-learn, `linear` is the argmax of a linear map of 24 normal features plus 0.3 Gumbel, of ten
classes. All methods score the same rows out of the same folds:

    cleanlab              its label quality (self-confidence) by LogisticRegression
    HEAD                  the probability that the label is wrong (measures/audit.py)
    HEAD, p of the label  the location's probability of the label alone

Rows: AUROC and average precision of the wrong labels, and the precision of as many rows as are
wrong; means over seeds, with the standard error of the average precision. `share` is the estimated
share of wrong labels. For cleanlab it is the number of label issues over the number of rows. All
data take ten minutes of CPU time. A few seconds are enough for --data linear --kinds next
--shares 0.3 --seeds 2 --rows 300 --heads det.

    python benchmarks/audit.py --stream --rows 1000000

instead audits features of 32 columns that stay on disk, with labels of 20 classes, by one epoch of
DET for each fold: of a tenth of the rows, then of all. It writes all files of the command, and
prints the CPU seconds and the peak memory of the process, without mapped files.
"""

import argparse
import importlib.util
import pathlib
import tempfile
import time
import warnings

import numpy as np
from command_line import make_parser, names, numbers, report
from probe import memory_watched
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import StandardScaler

from het_plugin import reporting
from het_plugin.estimators import CLASSIFIERS, probe
from het_plugin.estimators import audit as of_files
from het_plugin.measures import audit

FOLDS = 3
SETTINGS = {'C': 1.0, 'C_noise': 0.1, 'num_factors': 4, 'max_iter': 200}


def digits(rng, num_rows):
  x, truth = load_digits(return_X_y=True)
  rows = rng.permutation(len(x))[:num_rows]
  return StandardScaler().fit_transform(x)[rows], truth[rows]


def linear(rng, num_rows):
  x = rng.normal(size=(num_rows, 24))
  u = x @ rng.normal(size=(24, 10)) * 24**-0.5 * 3 + 0.3 * rng.gumbel(size=(num_rows, 10))
  return x, u.argmax(axis=1)


DATA = {'digits': digits, 'linear': linear}


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


def out_of_fold(model, method, x, y):
  """Probabilities [N, K] of each fold by a fit to the others."""
  p = np.zeros((len(y), y.max() + 1))
  for fitted, held_out in StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(x, y):
    with warnings.catch_warnings():
      warnings.simplefilter('ignore', ConvergenceWarning)
      p[held_out] = getattr(clone(model).fit(x[fitted], y[fitted]), method)(x[held_out])
  return p


def scores(args, x, y):
  """{method: (how wrong each label seems [N], estimated share)}."""
  found = {}
  if args.cleanlab:
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores

    p = out_of_fold(LogisticRegression(max_iter=1000), 'predict_proba', x, y)
    issues = find_label_issues(y, p, n_jobs=1)
    found['cleanlab'] = -get_label_quality_scores(y, p), issues.mean()
  for head in args.heads:
    own = SETTINGS if head != 'det' else {'C': SETTINGS['C'], 'max_iter': SETTINGS['max_iter']}
    p = out_of_fold(CLASSIFIERS[head](**own), 'predict_clean_proba', x, y)
    result = audit.audit(p, y)
    found[head] = result.wrong, result.share
    found[f'{head}, p of the label'] = -result.probability, float('nan')
  return found


def measure(args):
  """A row for each data set, kind, share and method."""
  rows = []
  for data in args.data:
    for kind in args.kinds:
      for share in args.shares:
        by_method = {}
        for seed in range(args.seeds):
          rng = np.random.default_rng(seed)
          x, truth = DATA[data](rng, args.rows)
          y = moved(rng, kind, share, x, truth)
          is_wrong = y != truth
          for method, (score, estimate) in scores(args, x, y).items():
            worst = np.argsort(-score, kind='stable')[: is_wrong.sum()]
            values = (
              roc_auc_score(is_wrong, score),
              average_precision_score(is_wrong, score),
              is_wrong[worst].mean(),
              estimate,
              is_wrong.mean(),
            )
            by_method.setdefault(method, []).append(values)
        for method, values in by_method.items():
          mean = np.mean(values, axis=0)
          error = np.std(values, axis=0, ddof=1) / np.sqrt(args.seeds)
          columns = ('auroc', 'average_precision', 'precision', 'share', 'true_share')
          row = {'data': f'{data}, {kind}', 'method': method}
          row |= dict(zip(columns, map(float, mean), strict=True))
          rows.append(row | {'stderr_ap': float(error[1])})
  return rows


def stream(args):
  """A row per number of rows."""
  rng, found = np.random.default_rng(0), []
  kernel = rng.normal(size=(32, 20)).astype(np.float32)
  settings = probe.Settings(['det'], solver='adam', max_iter=1, progress=False)
  for num_rows in (args.rows // 10, args.rows):
    with tempfile.TemporaryDirectory() as name:
      folder, labels = pathlib.Path(name), []
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
        made = of_files.report(f'{folder}/x.npy,{folder}/y.npy', settings)
        reporting.write_json(made.json, folder / 'a.json')
        of_files.write_csv(folder / 'a.csv', made.json['rows'])
        of_files.write_suggested(folder / 'suggested.safetensors', made.json['rows'])
        cpu = time.process_time() - cpu
    found.append({'rows': num_rows, 'cpu_seconds': cpu, 'peak_mib': max(memory)})
  report(args.json, found)


def main():
  parser = make_parser(__doc__)
  parser.add_argument('--data', type=names(DATA), default=list(DATA), help=','.join(DATA))
  parser.add_argument('--kinds', type=names(KINDS), default=list(KINDS), help=','.join(KINDS))
  parser.add_argument('--shares', type=numbers, default=[0.3], help='shares of moved labels')
  parser.add_argument('--seeds', type=int, default=3, help='number of seeds, 2 or more')
  parser.add_argument('--rows', type=int, default=1500, help='rows N')
  parser.add_argument(
    '--heads', type=names(CLASSIFIERS), default=['det', 'het', 'het_xl'], help=','.join(CLASSIFIERS)
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
  if args.cleanlab and not importlib.util.find_spec('cleanlab'):
    parser.error('--cleanlab needs `pip install cleanlab`; --no-cleanlab leaves it out')
  report(args.json, measure(args))


if __name__ == '__main__':
  main()
