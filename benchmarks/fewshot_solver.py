"""Few-shot ridge regression at 30 strengths: ours, scikit-learn's RidgeClassifier, and the
straightforward eigen-decomposition, on the same arrays.

    python -m benchmarks.fewshot_solver --json solver.json

Each is fitted to 25 shots per class and classifies test rows at l2 = 2^-10 .. 2^19.
RidgeClassifier is fitted once per strength to standardised features, with Cholesky, its fastest
solver for dense features. The straightforward procedure is that of big_vision's fewshot_lsr in
float64: one decomposition of the Gram matrix with the bias column, then weights, scores and argmax
for each strength. Features are Gaussian classes with a power-law spectrum (eigenvalue j
proportional to 1 / j).

The three are timed in turn, `--turns` times, and the minimum counts: seconds of CPU time on one
thread, so that other work on the machine does not count. max_accuracy_difference is over strengths
and both references. RidgeClassifier does not regularise its bias, so its accuracies
count up to l2 = 2^8, where that makes no difference.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import threadpoolctl
from sklearn.linear_model import RidgeClassifier

from benchmarks.command_line import collect, integers, make_parser
from het_plugin.measures import ridge
from het_plugin.measures.fewshot import L2_GRID

FREE_BIAS_L2 = 2.0**8
BLOCK = 1 << 14


def make_arrays(n: int, d: int, num_classes: int, m: int) -> tuple[np.ndarray, ...]:
  """Training features [n, d] and labels, test features [m, d] and labels; float32 and int64."""
  rng = np.random.default_rng(0)
  centres = 0.2 * rng.standard_normal((num_classes, d), np.float32)
  rotation, _ = np.linalg.qr(rng.normal(size=(d, d)))
  spread = ((np.arange(1, d + 1) ** -0.5)[:, None] * rotation).astype(np.float32)

  def split(y):
    x = np.empty((len(y), d), np.float32)
    for start in range(0, len(y), BLOCK):  # in blocks, as a million rows may fill half the memory
      labels = y[start : start + BLOCK]
      x[start : start + BLOCK] = (
        centres[labels] + rng.standard_normal((len(labels), d), np.float32)
      ) @ spread
    return x, y

  return *split(np.arange(n) % num_classes), *split(rng.integers(0, num_classes, m))


def ours(x, y, test_x, test_y) -> np.ndarray:
  """Accuracies [L], like the other two."""
  return (ridge.decompose(x, y).predict(test_x, L2_GRID) == test_y).mean(axis=1)


def ridge_classifier(x, y, test_x, test_y) -> np.ndarray:
  mean = x.mean(0, np.float64)
  scale = x.std(0, np.float64) + ridge.STD_OFFSET
  x = (x - mean) / scale
  test_x = (test_x - mean) / scale
  return np.array([RidgeClassifier(alpha=l2).fit(x, y).score(test_x, test_y) for l2 in L2_GRID])


def eigh(x, y, test_x, test_y) -> np.ndarray:
  mean = x.mean(0, np.float64)
  scale = x.std(0, np.float64) + ridge.STD_OFFSET
  x, test_x = (
    np.pad((z - mean) / scale, ((0, 0), (0, 1)), constant_values=ridge.BIAS_FEATURE)
    for z in (x, test_x)
  )
  targets = np.where(y[:, None] == np.arange(y.max() + 1), 1.0, -1.0)
  if len(x) >= x.shape[1]:
    eigenvalues, lhs = np.linalg.eigh(x.T @ x)
    rhs = lhs.T @ (x.T @ targets)
  else:
    eigenvalues, vectors = np.linalg.eigh(x @ x.T)
    lhs = x.T @ vectors
    rhs = vectors.T @ targets
  return np.array(
    [
      np.mean((test_x @ ((lhs / (eigenvalues + l2)) @ rhs)).argmax(axis=1) == test_y)
      for l2 in L2_GRID
    ]
  )


def measure(
  procedures: Sequence[Callable[..., np.ndarray]], arrays: Sequence[np.ndarray], turns: int
) -> list[tuple[float, np.ndarray]]:
  """(seconds, accuracies) of each."""
  seconds = [[] for _ in procedures]
  for _ in range(turns):
    accuracies = []
    for procedure, times in zip(procedures, seconds, strict=True):
      with threadpoolctl.threadpool_limits(1):
        start = time.process_time()
        accuracies.append(procedure(*arrays))
        times.append(time.process_time() - start)
  return list(zip(map(min, seconds), accuracies, strict=True))


def row(n: int, d: int, num_classes: int, m: int, turns: int) -> dict[str, Any]:
  arrays = make_arrays(n, d, num_classes, m)
  (seconds, accuracies), (sklearn_seconds, sklearn), (eigh_seconds, straight) = measure(
    [ours, ridge_classifier, eigh], arrays, turns
  )
  comparable = np.array(L2_GRID) <= FREE_BIAS_L2
  differences = np.abs(accuracies - straight), np.abs(accuracies - sklearn)[comparable]
  return {
    'n': n,
    'd': d,
    'classes': num_classes,
    'm': m,
    'seconds': seconds,
    'best_accuracy': accuracies.max(),
    'ridge_classifier_seconds': sklearn_seconds,
    'eigh_seconds': eigh_seconds,
    'ridge_classifier_ratio': sklearn_seconds / seconds,
    'eigh_ratio': eigh_seconds / seconds,
    'max_accuracy_difference': max(x.max() for x in differences),
  }


def main() -> None:
  parser = make_parser(__doc__)
  parser.add_argument('--classes', type=integers, default=[100, 1000], help='numbers of classes K')
  parser.add_argument('--shots', type=int, default=25, help='examples per class')
  parser.add_argument('--d', type=int, default=1024, help='features D')
  parser.add_argument('--m', type=int, default=10_000, help='test rows')
  parser.add_argument('--turns', type=int, default=3, help='how often each is timed')
  args = parser.parse_args()
  measured = (row(args.shots * k, args.d, k, args.m, args.turns) for k in args.classes)
  rows = collect(args.json, len(args.classes), measured)
  print(
    'ratios (least over the rows): '
    f'RidgeClassifier {min(r["ridge_classifier_ratio"] for r in rows):.2f}, '
    f'eigh {min(r["eigh_ratio"] for r in rows):.2f}; '
    f'accuracies differ by {max(r["max_accuracy_difference"] for r in rows):.1g}'
  )


if __name__ == '__main__':
  main()
