"""Results of several runs: averages (Collier et al. 2023, table 22), paired tests of few-shot
results, and unpaired ones of groups of runs.

A run is a method at a setting. The paper averages a method's accuracies over data sets and upstream
settings; the standard error of such an average of n cells is here sqrt(sum of the cells' squared
standard errors) / n: data sets and settings are those that were chosen, only the draws are random.
"""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import scipy.stats

from het_plugin.evaluation.fewshot import FewShotResult

MIN_DATASETS = 6  # with fewer the signed-rank test cannot reach 0.05 (two-sided)


@dataclasses.dataclass(frozen=True)
class Average:
  """Mean accuracy over `num_cells` data sets and settings; stderr None if a cell has none."""

  mean: float
  stderr: float | None
  num_cells: int


def average(means: Sequence[float], errors: Sequence[float | None]) -> Average:
  """Of the mean accuracies of cells and their standard errors."""
  stderr = None if None in errors else float(np.sqrt(np.sum(np.square(errors))) / len(errors))
  return Average(float(np.mean(means)), stderr, len(means))


@dataclasses.dataclass(frozen=True)
class Difference:
  """How much better one run is than another on the same test rows and with the same draws.

  Attributes:
    mean: difference of the mean accuracies.
    stderr_draws, p_draws: over draws, as if the test rows were all there are: paired t-test. None
      for fewer than two draws, or where all of them differ by the same.
    stderr_rows, p_rows: over test rows, as if there were no other draws: t-test on each row's
      difference of the share of draws that get it right. None for fewer than two rows, or where all
      of them differ by the same.
  """

  mean: float
  stderr_draws: float | None
  p_draws: float | None
  stderr_rows: float | None
  p_rows: float | None


def difference(result: FewShotResult, baseline: FewShotResult) -> Difference:
  """`result` minus `baseline`, paired.

  Raises:
    ValueError: other shots, draws or test rows.
  """
  if result.correct.shape != baseline.correct.shape or result.shots != baseline.shots:
    raise ValueError(
      f'Results of {result.shots} shots with {list(result.correct.shape)} draws and test rows '
      f'cannot be paired with {baseline.shots} shots, {list(baseline.correct.shape)}.'
    )
  gains = result.correct.astype(np.float64) - baseline.correct  # [draws, M]
  return Difference(float(gains.mean()), *_t_test(gains.mean(axis=1)), *_t_test(gains.mean(axis=0)))


def _t_test(gains: np.ndarray) -> tuple[float | None, float | None]:
  """Standard error of the mean, and p of a mean of 0."""
  if len(gains) < 2 or np.ptp(gains) == 0:
    return None, None
  test = scipy.stats.ttest_1samp(gains, 0.0)
  return float(scipy.stats.sem(gains)), float(test.pvalue)


def signed_rank_p(
  results: Mapping[str, FewShotResult], baseline: Mapping[str, FewShotResult]
) -> float | None:
  """p of Wilcoxon's signed-rank test that two runs are equally good over data sets (Demsar 2006,
  https://jmlr.org/papers/v7/demsar06a.html); None for fewer than MIN_DATASETS.
  """
  gains = [results[name].mean - baseline[name].mean for name in results]
  if len(gains) < MIN_DATASETS or not np.any(gains):
    return None
  return float(scipy.stats.wilcoxon(gains).pvalue)


@dataclasses.dataclass(frozen=True)
class GroupMean:
  """Mean of a metric over the runs of a group, which differ by their seed; stderr None for one."""

  mean: float
  stderr: float | None
  num_runs: int


def group_mean(values: Sequence[float]) -> GroupMean:
  """Of the metric of each run of a group."""
  stderr = float(scipy.stats.sem(values)) if len(values) > 1 else None
  return GroupMean(float(np.mean(values)), stderr, len(values))


def welch_p(values: Sequence[float], baseline: Sequence[float]) -> float | None:
  """p of the two-sample unequal-variance (Welch's) t-test that two groups of runs are equally good
  (Collier et al. 2023, table 6); None for a group of fewer than two, or where no runs differ.
  """
  if min(len(values), len(baseline)) < 2 or not (np.ptp(values) or np.ptp(baseline)):
    return None
  with warnings.catch_warnings():  # that runs of one group are the same is no loss of precision
    warnings.filterwarnings('ignore', 'Precision loss occurred', RuntimeWarning)
    return float(scipy.stats.ttest_ind(values, baseline, equal_var=False).pvalue)
