"""Alignment of the noise with W in trained runs (table 17), as an analysis of an ablation."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from het_plugin.config import trained_run
from het_plugin.evaluation import class_covariance, row_spaces
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
    w_bases = [row_spaces.basis(w) for w in (kernel, random)]
    q_bases = map(row_spaces.basis, self._factors(run))
    found = np.array([[row_spaces.cosine(w, q) for w in w_bases] for q in q_bases])  # [N, 2]
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
      return run.model.logits(params, batch).factors()[..., :num_classes]

    size = 4 * run.partitioner.data_shards  # rows are R + 1 times the size of logits
    for rows in examples.per_example(run, factors, self.split, self.num_examples, size):
      yield from rows
