"""Exact k-nearest neighbours: time against scikit-learn's brute force on the same arrays.

    python benchmarks/knn.py [--json OUT]

Finds the neighbours of the examples themselves, each left out in turn, which is the work of a
representation's proxy. scikit-learn has no such call: its KNeighborsClassifier is asked for k + 1
neighbours, of which the first is the example. Both take float32 arrays and all cores, alternate,
and the median counts.
Takes a minute and a half on two CPU cores; a second with --rows 200 --dim 8 --ks 1,3 --repeats 1.
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
from command_line import integers, print_table, write_json
from sklearn.neighbors import KNeighborsClassifier

from het_plugin.evaluation import knn


def parse_args():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--rows', type=int, default=10_000, help='examples N')
  parser.add_argument('--dim', type=int, default=1024, help='features D')
  parser.add_argument('--classes', type=int, default=100, help='classes K')
  parser.add_argument('--ks', type=integers, default=[1, 20], help='neighbours, such as 1,20')
  parser.add_argument('--repeats', type=int, default=3, help='runs of each side')
  parser.add_argument('--json', type=Path, help='write the rows here')
  return parser.parse_args()


def ours(x, k):
  return knn.nearest_neighbors(x, k=k).rows


def scikit_learn(x, labels, k):
  """Rows of the k nearest others."""
  classifier = KNeighborsClassifier(k + 1, algorithm='brute', n_jobs=-1).fit(x, labels)
  return classifier.kneighbors(x, return_distance=False)[:, 1:]


def seconds(function, *arguments):
  start = time.perf_counter()
  result = function(*arguments)
  return time.perf_counter() - start, result


def measure(args):
  """A row {k, seconds, sklearn_seconds, time_ratio, agreement} for each k."""
  rng = np.random.default_rng(0)
  labels = rng.integers(0, args.classes, args.rows)
  centres = 0.3 * rng.normal(size=(args.classes, args.dim))
  x = (centres[labels] + rng.normal(size=(args.rows, args.dim))).astype(np.float32)
  rows = []
  for k in args.ks:
    mine, theirs = [], []
    for _ in range(args.repeats):
      taken, found = seconds(ours, x, k)
      mine.append(taken)
      taken, reference = seconds(scikit_learn, x, labels, k)
      theirs.append(taken)
    ratio = statistics.median(theirs) / statistics.median(mine)
    rows.append(
      {
        'k': k,
        'seconds': statistics.median(mine),
        'sklearn_seconds': statistics.median(theirs),
        'time_ratio': ratio,
        'agreement': float(np.mean(found == reference)),
      }
    )
  return rows


def main():
  args = parse_args()
  rows = measure(args)
  print(f'N {args.rows}, D {args.dim}, float32; seconds for all examples, each left out')
  header = ('k', 'seconds', 'scikit-learn', 'ratio', 'same neighbours')
  print_table(header, [tuple(row.values()) for row in rows])
  for row in rows:
    print(f'k = {row["k"]}: {row["time_ratio"]:.2f} times as fast as scikit-learn')
  write_json(args.json, rows)


if __name__ == '__main__':
  main()
