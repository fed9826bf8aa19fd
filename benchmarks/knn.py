"""Exact k-nearest neighbours: time against scikit-learn's brute force on the same arrays.

    python benchmarks/knn.py [--json OUT]

Finds the neighbours of the examples themselves, each left out in turn, as the proxy of
`het_plugin.select` does. scikit-learn has no such call: it is asked for k + 1 neighbours, of which
the first is the example. Both sides take float32 arrays and use all cores. They run in turns, and
the median counts.

Takes a minute and a half on two CPU cores, and a second with --rows 200 --dim 8 --ks 1,3
--repeats 1.
"""

import argparse
import statistics
import time

import numpy as np
from command_line import integers, make_parser, report
from sklearn.neighbors import NearestNeighbors

from het_plugin.evaluation import knn


def parse_args() -> argparse.Namespace:
  parser = make_parser(__doc__)
  parser.add_argument('--rows', type=int, default=10_000, help='examples N')
  parser.add_argument('--dim', type=int, default=1024, help='features D')
  parser.add_argument('--classes', type=int, default=100, help='classes K')
  parser.add_argument('--ks', type=integers, default=[1, 20], help='neighbours, such as 1,20')
  parser.add_argument('--repeats', type=int, default=3, help='runs of each side')
  return parser.parse_args()


def ours(x, k):
  return knn.nearest_neighbors(x, k=k)


def scikit_learn(x, k):
  """Rows of the k nearest others."""
  neighbors = NearestNeighbors(n_neighbors=k + 1, algorithm='brute', n_jobs=-1).fit(x)
  return neighbors.kneighbors(x, return_distance=False)[:, 1:]


def measure(x: np.ndarray, k: int, repeats: int) -> dict[str, float]:
  """The row of a number of neighbours."""
  seconds = {ours: [], scikit_learn: []}
  found = {}
  for _ in range(repeats):
    for side, times in seconds.items():
      start = time.perf_counter()
      found[side] = side(x, k)
      times.append(time.perf_counter() - start)
  mine, theirs = (statistics.median(times) for times in seconds.values())
  return {
    'k': k,
    'seconds': mine,
    'sklearn_seconds': theirs,
    'time_ratio': theirs / mine,
    'agreement': float(np.mean(found[ours] == found[scikit_learn])),
  }


def main() -> None:
  args = parse_args()
  rng = np.random.default_rng(0)
  labels = rng.integers(0, args.classes, args.rows)
  centres = 0.3 * rng.normal(size=(args.classes, args.dim))
  x = (centres[labels] + rng.normal(size=(args.rows, args.dim))).astype(np.float32)
  rows = [measure(x, k, args.repeats) for k in args.ks]
  report(args.json, rows)
  least = min(row['time_ratio'] for row in rows)
  print(f'{least:.2f} times as fast as scikit-learn, or faster')


if __name__ == '__main__':
  main()
