"""Seconds that the estimators take, beside scikit-learn's LogisticRegression on the same rows.

    python benchmarks/probe.py [--json OUT] [--rows 50000 --dim 768 --classes 100]

Features are normal with a decaying spectrum, as those of trained backbones are, and labels those of
a HET of rank 4. cpu_seconds adds up the cores and includes compilation; nll is that of 2,000 other
rows. If det is the first of --heads, the others start at its fit, as in `probe`. The goal for all
four heads at the default size is 120 CPU seconds.

    python benchmarks/probe.py --stream --rows 1000000 --dim 1024 --classes 1000 --heads det

instead fits one epoch to features that stay on disk, of a quarter of the rows and then of all, and
prints the CPU seconds and the peak memory of the process, without mapped files, which must not grow
with the features.
"""

import re
import tempfile
import threading
import time
import warnings

import numpy as np
from command_line import make_parser, names, report
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from het_plugin.estimators import CLASSIFIERS

NUM_TEST = 2000
NOISE, RANK = 2.0, 4
DET_ITERATIONS = 15  # at most


def problem(num_rows, dim, num_classes):
  """Features float32 [N, D] and labels [N]."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(num_rows, dim)).astype(np.float32) / np.sqrt(1 + np.arange(dim))
  size = np.sqrt(np.log(dim))  # of a linear map of the features
  u = x @ (4 * rng.normal(size=(dim, num_classes)) / size)
  scale = NOISE * (1 + x @ rng.normal(size=(dim, num_classes)) / size)
  loading = rng.normal(size=(RANK, num_classes)) / np.sqrt(RANK)
  u += scale * (rng.normal(size=(num_rows, RANK)) @ loading)
  return x.astype(np.float32), (u + rng.gumbel(size=u.shape)).argmax(axis=1)


def measure(name, estimator, train, test, **start):
  """One row."""
  wall, cpu = time.perf_counter(), time.process_time()
  estimator.fit(*train, **start)
  wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
  column = np.searchsorted(estimator.classes_, test[1])
  log_p = estimator.predict_log_proba(test[0])[np.arange(len(column)), column]
  return {
    'head': name,
    'seconds': wall,
    'cpu_seconds': cpu,
    'iterations': int(np.max(estimator.n_iter_)),
    'gradient': getattr(estimator, 'gradient_', None),
    'nll': float(-log_p.mean()),
  }


def memory_mib():
  """Memory of the process without mapped files, whose pages the system can take back."""
  with open('/proc/self/status') as file:
    return int(re.search(r'RssAnon:\s+(\d+)', file.read())[1]) / 1024


def watch_memory(found, stop):
  """Appends `memory_mib` every 50 ms until the event is set."""
  while not stop.wait(0.05):
    found.append(memory_mib())


def stream(args):
  """A row per head and number of rows, of features in a file and labels that 32 of them set."""
  rng, found = np.random.default_rng(0), []
  kernel = rng.normal(size=(min(32, args.dim), args.classes)).astype(np.float32)
  labels = []
  with tempfile.NamedTemporaryFile(suffix='.npy') as file:
    header = {'descr': '<f4', 'fortran_order': False, 'shape': (args.rows, args.dim)}
    np.lib.format.write_array_header_1_0(file, header)
    for start in range(0, args.rows, 4096):
      x = rng.standard_normal((min(4096, args.rows - start), args.dim), np.float32)
      labels.append((x[:, : len(kernel)] @ kernel).argmax(axis=1).astype(np.int32))
      file.write(x)
    file.flush()
    x, y = np.load(file.name, mmap_mode='r'), np.concatenate(labels)
    for head in args.heads:
      for rows in (args.rows // 4, args.rows):
        estimator = CLASSIFIERS[head](args.C, solver='adam', max_iter=1)
        memory, stop = [memory_mib()], threading.Event()
        watch = threading.Thread(target=watch_memory, args=(memory, stop))
        watch.start()
        cpu = time.process_time()
        estimator.fit(x[:rows], y[:rows])
        cpu = time.process_time() - cpu
        stop.set()
        watch.join()
        row = {'head': head, 'rows': rows, 'mib_of_features': rows * args.dim / 2**18}
        found.append(row | {'cpu_seconds': cpu, 'peak_mib': max(memory)})
        print(found[-1], flush=True)
  report(args.json, found)


def main():
  parser = make_parser(__doc__)
  parser.add_argument('--rows', type=int, default=50_000)
  parser.add_argument('--dim', type=int, default=768)
  parser.add_argument('--classes', type=int, default=100)
  parser.add_argument('--heads', type=names(CLASSIFIERS), default=list(CLASSIFIERS))
  parser.add_argument('--factors', type=int, default=4)
  parser.add_argument('--samples', type=int, default=16)
  parser.add_argument('--C', type=float, default=0.1)
  parser.add_argument('--iterations', type=int, default=12, help='at most, of the noise')
  parser.add_argument('--stream', action='store_true', help='one epoch over features on disk')
  args = parser.parse_args()
  warnings.simplefilter('ignore', ConvergenceWarning)  # the column gradient tells
  if args.stream:
    return stream(args)
  x, y = problem(args.rows + NUM_TEST, args.dim, args.classes)
  train, test = (x[NUM_TEST:], y[NUM_TEST:]), (x[:NUM_TEST], y[:NUM_TEST])
  rows = [measure('LogisticRegression', LogisticRegression(C=args.C, max_iter=1000), train, test)]
  start = {}
  for head in args.heads:
    noise = {'num_factors': args.factors, 'num_samples': args.samples, 'C_noise': 0.1}
    settings = {
      'C': args.C,
      'tol': 1e-3,
      'max_iter': DET_ITERATIONS if head == 'det' else args.iterations,
      **(noise if head != 'det' else {}),
    }
    estimator = CLASSIFIERS[head](**settings)
    rows.append(measure(head, estimator, train, test, **start))
    if head == 'det':
      start = {'start': estimator}
    print(rows[-1], flush=True)
  report(args.json, rows)
  total = sum(row['cpu_seconds'] for row in rows[1:])
  print(
    f'all heads: {total:.0f} CPU seconds, {total / rows[0]["cpu_seconds"]:.1f} times those of '
    'LogisticRegression'
  )


if __name__ == '__main__':
  main()
