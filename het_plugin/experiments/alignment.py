"""Alignment of the noise with W in trained runs (table 17), as an analysis of an ablation."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import scipy.linalg

from het_plugin.config import trained_run
from het_plugin.evaluation import class_covariance
from het_plugin.experiments import examples


@dataclasses.dataclass(frozen=True)
class RowSpaceAlignment:
  """Cosine of the smallest principal angle between the row spaces of W and of Q(x), all R + 1
  factors of the noise in logit space: mean over examples, their standard deviation, and both for a
  Gaussian W instead.

  Attributes:
    split: of the run's task.
    num_examples: at most; a fixed random choice of the split.

  Raises:
    ValueError: the head has no factors.
  """

  split: str = 'validation'
  num_examples: int = 256

  def __call__(self, run_dir: Path) -> dict[str, float]:
    run = trained_run.open_run(run_dir)
    if reason := class_covariance.why_none(run.model.head):
      raise ValueError(f'RowSpaceAlignment: {reason}')
    kernel = np.asarray(run.params['head']['kernel'])[:, : run.model.head.num_classes]  # [D, K]
    random = np.random.default_rng(0).standard_normal(kernel.shape)
    w_bases = [row_space(w) for w in (kernel, random)]
    q_bases = map(row_space, self._factors(run))
    found = np.array([[largest_cosine(w, q) for w in w_bases] for q in q_bases])  # [N, 2]
    mean, std = found.mean(axis=0), found.std(axis=0)
    return {
      'cos SPA': mean[0],
      'std': std[0],
      'cos SPA, random W': mean[1],
      'std, random W': std[1],
    }

  def _factors(self, run: trained_run.TrainedRun) -> Iterator[np.ndarray]:
    """Q(x) [R + 1, K] of each example."""
    num_classes = run.model.head.num_classes

    def factors(params, batch):
      return {'factors': run.model.logits(params, batch).factors()[..., :num_classes]}

    size = 4 * run.partitioner.data_shards  # rows are R + 1 times the size of logits
    for rows in examples.per_example(run, factors, self.split, self.num_examples, size):
      yield from rows['factors']


def row_space(rows: np.ndarray) -> np.ndarray:
  """An orthonormal basis of the row space of [N, K], float64 [rank, K]."""
  return scipy.linalg.orth(np.asarray(rows, np.float64).T).T


def largest_cosine(basis_a: np.ndarray, basis_b: np.ndarray) -> float:
  """Cosine of the smallest principal angle between the spans of two bases, [n, K] and [m, K].

  It is the largest singular value of their product (Bjorck and Golub 1973).
  `scipy.linalg.subspace_angles` agrees up to rounding, but decomposes both bases on every call.
  """
  return float(min(1.0, scipy.linalg.svdvals(basis_a @ basis_b.T)[0]))
