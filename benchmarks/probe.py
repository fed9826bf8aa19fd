"""Seconds that the estimators take, and those of LogisticRegression on the same rows.

    python -m benchmarks.probe [--json OUT] [--rows 50000 --dim 768 --classes 100]

Features are normal with a decaying spectrum, as those of trained backbones are, and labels those of
a HET of rank 4; with --truth=het_xl features have equal variances and labels are those of a HET-XL.
cpu_seconds adds up the cores and includes compilation, unless --compiled runs two iterations before
the clock starts; nll is that of 2,000 other rows. If det is the first of --heads, the others start
at its fit, as in `probe`. times is the CPU time over that of LogisticRegression, and includes DET's
where the fit starts there. A fit that is not `converged` met --iterations, or float32; gap is how
far from the optimum it says that it may be, in nats. C_noise is what was chosen, if --C_noise=auto.
The goal for all four heads at the default size is 120 CPU seconds; at --truth=het_xl --rows=20000
--dim=64 --classes=50 --C=1 it is 4 times LogisticRegression's for HET, and 5 times for HET-XL.

    python -m benchmarks.probe --stream --rows 1000000 --dim 1024 --classes 1000 --heads det

instead fits features that stay on disk, of a quarter of the rows and then of all, with labels of a
DET. It prints the CPU seconds, how often the whole was read (`reads`: rows that were taken from the
file over N), and the peak memory of the process, without mapped files, which must not grow with the
features. The temporary file of the features is removed.
"""

import contextlib
import re
import tempfile
import threading
import time
import warnings

import numpy as np
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from benchmarks.command_line import make_parser, names, report
from het_plugin.estimators import CLASSIFIERS

NUM_TEST = 2000
SIGNAL = 3.0
NOISE = 2.0
RANK = 4


def problem(truth, num_rows, dim, num_classes, seed=0):
  """Features float32 [N, D] and labels [N]."""
  rng = np.random.default_rng(seed)
  if truth == 'het_xl':
    x = rng.normal(size=(num_rows, dim)).astype(np.float32)
    kernel = rng.normal(size=(dim, num_classes)) * SIGNAL / np.sqrt(dim)
    scale = 1 + x @ rng.normal(size=(dim, dim)) / (2 * np.sqrt(dim))
    loading = rng.normal(size=(RANK, dim)) * NOISE / SIGNAL / np.sqrt(1.25 * RANK)
    u = (x + scale * (rng.normal(size=(num_rows, RANK)) @ loading)) @ kernel
    return x, (u + rng.gumbel(size=u.shape)).argmax(axis=1)
  x = rng.normal(size=(num_rows, dim)).astype(np.float32) / np.sqrt(1 + np.arange(dim))
  size = np.sqrt(np.log(dim))  # of a linear map of the features
  u = x @ (4 * rng.normal(size=(dim, num_classes)) / size)
  scale = NOISE * (1 + x @ rng.normal(size=(dim, num_classes)) / size)
  loading = rng.normal(size=(RANK, num_classes)) / np.sqrt(RANK)
  u += scale * (rng.normal(size=(num_rows, RANK)) @ loading)
  return x.astype(np.float32), (u + rng.gumbel(size=u.shape)).argmax(axis=1)


def fitted(estimator, *rows, **others):
  """The estimator after its fit, whether that has converged, and CPU seconds."""
  start = time.process_time()
  with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter('always', ConvergenceWarning)
    estimator.fit(*rows, **others)
  seconds = time.process_time() - start
  return estimator, not any(issubclass(x.category, ConvergenceWarning) for x in warned), seconds


def measure(name, estimator, train, test, **start):
  """One row."""
  wall = time.perf_counter()
  with memory_watched() as memory:
    _, converged, cpu = fitted(estimator, *train, **start)
  wall = time.perf_counter() - wall
  x, y = (part[np.isin(test[1], estimator.classes_)] for part in test)  # others have no column
  column = np.searchsorted(estimator.classes_, y)
  log_p = estimator.predict_log_proba(x)[np.arange(len(column)), column]
  return {
    'head': name,
    'n': len(train[0]),
    'd': train[0].shape[1],
    'k': len(estimator.classes_),
    'peak_bytes': int(max(memory) * 2**20),
    'seconds': wall,
    'cpu_seconds': cpu,
    'iterations': int(np.max(estimator.n_iter_)),
    'converged': converged,
    'C_noise': getattr(estimator, 'C_noise_', None),
    'gradient': getattr(estimator, 'gradient_', None),
    'gap': getattr(estimator, 'gap_', None),
    'nll': float(-log_p.mean()),
  }


def c_noise(text):
  return text if text == 'auto' else float(text)


def memory_mib():
  """Memory of the process without mapped files, whose pages the system can take back."""
  with open('/proc/self/status') as file:
    return int(re.search(r'RssAnon:\s+(\d+)', file.read())[1]) / 1024


@contextlib.contextmanager
def memory_watched():
  """Gives a list to which `memory_mib` is appended at once, and every 50 ms inside."""
  found = [memory_mib()]
  stop = threading.Event()

  def watch():
    while not stop.wait(0.05):
      found.append(memory_mib())

  thread = threading.Thread(target=watch)
  thread.start()
  try:
    yield found
  finally:
    stop.set()
    thread.join()


class Counted(np.memmap):
  """Mapped rows [N, D] that count how many of them are taken."""

  taken = 0

  def __getitem__(self, rows):
    found = np.asarray(super().__getitem__(rows))
    self.taken += len(found)
    return found


def stream(args):
  """A row per head and number of rows, of features in a file and labels of 32 of them."""
  rng = np.random.default_rng(0)
  found = []
  kernel = rng.normal(size=(min(32, args.dim), args.classes)).astype(np.float32)
  kernel *= SIGNAL / np.sqrt(len(kernel))
  labels = []
  with tempfile.NamedTemporaryFile(suffix='.npy') as file:
    header = {'descr': '<f4', 'fortran_order': False, 'shape': (args.rows, args.dim)}
    np.lib.format.write_array_header_1_0(file, header)
    for start in range(0, args.rows, 4096):
      x = rng.standard_normal((min(4096, args.rows - start), args.dim), np.float32)
      u = x[:, : len(kernel)] @ kernel
      labels.append((u + rng.gumbel(size=u.shape)).argmax(axis=1).astype(np.int32))
      file.write(x)
    file.flush()
    y = np.concatenate(labels)
    for head in args.heads:
      for rows in (args.rows // 4, args.rows):
        settings = {'solver': 'streamed', 'max_iter': args.iterations}
        estimator = CLASSIFIERS[head](args.C, **settings)
        x = np.load(file.name, mmap_mode='r')[:rows].view(Counted)
        with memory_watched() as memory, warnings.catch_warnings():
          warnings.simplefilter('ignore', ConvergenceWarning)  # of few iterations
          cpu = time.process_time()
          estimator.fit(x, y[:rows])
          cpu = time.process_time() - cpu
        row = {'head': head, 'rows': rows, 'mib_of_features': rows * args.dim / 2**18}
        row |= {'iterations': estimator.n_iter_, 'gap': estimator.gap_, 'reads': x.taken / rows}
        found.append(row | {'cpu_seconds': cpu, 'peak_mib': max(memory), 'before': memory[0]})
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
  parser.add_argument('--C_noise', type=c_noise, default=None, help='a number, or auto')
  parser.add_argument('--iterations', type=int, default=500, help='at most')
  parser.add_argument('--truth', choices=('het', 'het_xl'), default='het')
  parser.add_argument('--compiled', action='store_true', help='compile before the clock starts')
  parser.add_argument('--stream', action='store_true', help='features stay on disk')
  args = parser.parse_args()
  if args.stream:
    return stream(args)
  x, y = problem(args.truth, args.rows + NUM_TEST, args.dim, args.classes)
  train = (x[NUM_TEST:], y[NUM_TEST:])
  test = (x[:NUM_TEST], y[:NUM_TEST])
  rows = [measure('LogisticRegression', LogisticRegression(C=args.C, max_iter=1000), train, test)]
  rows[0]['times'] = 1.0
  start = {}
  of_det = 0.0
  for head in args.heads:
    noise = {'num_factors': args.factors, 'num_samples': args.samples, 'C_noise': args.C_noise}
    settings = {'C': args.C, 'max_iter': args.iterations}
    estimator = CLASSIFIERS[head](**settings, **(noise if head != 'det' else {}))
    if args.compiled:
      measure(head, clone(estimator).set_params(max_iter=2), train, test, **start)
    row = measure(head, estimator, train, test, **start)
    row['sklearn_seconds'] = rows[0]['seconds']
    row['times'] = (row['cpu_seconds'] + of_det) / rows[0]['cpu_seconds']
    rows.append(row)
    if head == 'det':
      start = {'start': estimator}
      of_det = row['cpu_seconds']
    print(row, flush=True)
  report(args.json, rows)
  total = sum(row['cpu_seconds'] for row in rows[1:])
  print(
    f'all heads: {total:.0f} CPU seconds, {total / rows[0]["cpu_seconds"]:.1f} times those of '
    'LogisticRegression'
  )


if __name__ == '__main__':
  main()
