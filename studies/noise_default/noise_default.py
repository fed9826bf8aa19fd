"""The default of C_noise, 'auto', against 0.03 C and DET: NLL of other rows, and CPU seconds.

    python -m studies.noise_default.noise_default --json=rows.json [--problems=digits,known]

Every problem is fitted with the default C, tolerance and iterations, and R = 4:

    digits    half of scikit-learn's digits, standardised
    next      the same, with 30% of the labels moved to the next class
    uniform   the same, with 30% moved to any class
    known     known_truth.py: labels of a HET-XL, 10 classes, 8 features, N = 5,000
    probe     benchmarks/probe.py --truth=het_xl, 50 classes, 64 features, N = 5,000

gain is the NLL of DET less that of the head on rows that no fit has seen, in nats. gain_stderr is
its paired standard error over examples. cpu_seconds count neither the fit of DET, where the noise
starts, nor compilation. Rows that --json already has are not measured again. Ten minutes of CPU
time.
"""

import itertools
import warnings

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from benchmarks import audit, probe
from benchmarks.command_line import integers, make_parser, names, read_json, report, write_json
from het_plugin.estimators import CLASSIFIERS
from het_plugin.estimators.selection import NOISE_SHARE
from het_plugin.measures.uncertainty import stderr
from studies.known_truth import known_truth

NUM_TEST = 2000
HEADS = ['het', 'het_xl']
SETTINGS = {'num_factors': 4, 'num_samples': 32}


def digits(kind, seed):
  rng = np.random.default_rng(seed)
  x, truth = audit.digits(rng, 1797)
  y = truth if kind == 'digits' else audit.moved(rng, kind, 0.3, x, truth)
  return (x[:900], y[:900]), (x[900:], y[900:])


def known(seed):
  problem = known_truth.Problem('softmax', 10, 8, 2, 3.0, 500)
  _, _, train, _, test = known_truth.draw_problem(problem, 'het_xl', seed)
  return train, test


def rows_of_probe(seed):
  x, y = probe.problem('het_xl', 5_000 + NUM_TEST, 64, 50, seed)
  return (x[NUM_TEST:], y[NUM_TEST:]), (x[:NUM_TEST], y[:NUM_TEST])


PROBLEMS = {
  'digits': lambda seed: digits('digits', seed),
  'next': lambda seed: digits('next', seed),
  'uniform': lambda seed: digits('uniform', seed),
  'known': known,
  'probe': rows_of_probe,
}


def fitted(head, settings, train, **start):
  """`probe.fitted` of a program that is compiled."""
  CLASSIFIERS[head](**settings, max_iter=2).fit(*train, **start)
  return probe.fitted(CLASSIFIERS[head](**settings), *train, **start)


def measure(problem, seed, heads, num_rows):
  """A row for DET, and for each head with either C_noise."""
  train, (x, y) = PROBLEMS[problem](seed)
  train = tuple(rows[:num_rows] for rows in train)
  det, converged, cpu = fitted('det', {}, train)
  x, y = (rows[np.isin(y, det.classes_)] for rows in (x, y))
  base = det.nll(x, y)
  of_all = {'problem': problem, 'seed': seed, 'n': len(train[0])}
  row = {'nll': float(base.mean()), 'gain': 0.0, 'gain_stderr': 0.0, 'cpu_seconds': cpu}
  found = [{**of_all, 'head': 'det', 'given': 0.0, 'C_noise': 0.0, **row, 'converged': converged}]
  for head, c_noise in itertools.product(heads, (NOISE_SHARE, 'auto')):
    settings = {**SETTINGS, 'C_noise': c_noise}
    estimator, converged, cpu = fitted(head, settings, train, start=det)
    gain = base - estimator.nll(x, y)
    row = {'nll': float(base.mean() - gain.mean()), 'gain': float(gain.mean())}
    row |= {'gain_stderr': stderr(gain), 'cpu_seconds': cpu, 'converged': converged}
    of_head = {'head': head, 'given': c_noise, 'C_noise': float(estimator.C_noise_)}
    found.append({**of_all, **of_head, **row})
  return found


def main():
  parser = make_parser(__doc__)
  parser.add_argument('--problems', type=names(PROBLEMS), default=list(PROBLEMS))
  parser.add_argument('--seeds', type=integers, default=[0, 1])
  parser.add_argument('--heads', type=names(HEADS), default=HEADS)
  parser.add_argument('--rows', type=int, help='rows of a fit, at most')
  args = parser.parse_args()
  rows = read_json(args.json)
  warnings.simplefilter('ignore', ConvergenceWarning)  # of what compiles
  for problem, seed in itertools.product(args.problems, args.seeds):
    key = {'problem': problem, 'seed': seed, 'n': len(PROBLEMS[problem](seed)[0][0][: args.rows])}
    done = {row['head'] for row in rows if key.items() <= row.items()}
    if left := [head for head in args.heads if head not in done]:
      found = measure(problem, seed, left, args.rows)
      rows += [row for row in found if row['head'] not in done]
      write_json(args.json, rows)
      print(problem, seed, *(f'{row["nll"]:.4f}' for row in found), flush=True)
  report(args.json, rows)


if __name__ == '__main__':
  main()
