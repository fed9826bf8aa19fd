"""Statistics of runs: paired tests over draws and examples, unpaired tests of groups of runs."""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy  # which imports its `stats` when it is first used: a training starts sooner

from het_plugin.measures.fewshot import FewShotResult

# {run: {data set: {shots: result}}}
Results = Mapping[str, Mapping[str, Mapping[float, FewShotResult]]]

EXTREME = 0.01  # the share of examples whose contribution to a difference is shown
ROUNDING = 1e-6  # nats: a mean difference below it may be the rounding of float32
MIN_DATASETS = 6  # with fewer, the two-sided signed-rank test cannot reach 0.05


def difference(result: FewShotResult, baseline: FewShotResult) -> dict[str, float | None]:
  """`result` minus `baseline` on the same test rows and with the same draws, paired.

  A single draw, of all examples, is paired with every draw of the other.

  Returns:
    'mean', the difference of the accuracies; 'stderr_draws' and 'p_draws' of a paired t-test over
    draws with fixed test rows; 'stderr_rows' and 'p_rows' of one over test rows, each with the
    share of draws that classify it correctly. None if there are fewer than two values or all
    differences are equal.

  Raises:
    ValueError: shots, draws or test rows differ.
  """
  draws, rows = zip(result.correct.shape, baseline.correct.shape, strict=True)
  if len({*draws} - {1}) > 1 or len({*rows}) > 1 or result.shots != baseline.shots:
    raise ValueError(
      f'Results of {result.shots} shots with {list(result.correct.shape)} draws and test rows '
      f'cannot be paired with {baseline.shots} shots, {list(baseline.correct.shape)}.'
    )
  for name in ('test_index', 'test_y'):
    ours = getattr(result, name)
    theirs = getattr(baseline, name)
    if ours is not None and theirs is not None and not np.array_equal(ours, theirs):
      raise ValueError(
        'the test rows differ: a paired comparison needs the same ids and labels, in one order'
      )
  return _t_tests(result.correct.astype(np.float64) - baseline.correct, 'draws', 'rows')


def _t_tests(gaps: np.ndarray, of_rows: str, of_columns: str) -> dict[str, float | None]:
  """The 'mean' of gaps [N, M], and 'stderr_NAME' and 'p_NAME' of a t-test that it is 0, over the
  means of rows and over the means of columns.
  """
  found = {'mean': float(gaps.mean())}
  for name, means in ((of_rows, gaps.mean(axis=1)), (of_columns, gaps.mean(axis=0))):
    found[f'stderr_{name}'] = found[f'p_{name}'] = None
    if len(means) > 1 and np.ptp(means) > 1e-12 * np.abs(means).max():  # else rounding
      found[f'stderr_{name}'] = float(scipy.stats.sem(means))
      found[f'p_{name}'] = float(scipy.stats.ttest_1samp(means, 0.0).pvalue)
  return found


def signed_rank_p(
  results: Mapping[str, FewShotResult], baseline: Mapping[str, FewShotResult]
) -> float | None:
  """p of Wilcoxon's signed-rank test that two runs are equally good over data sets.

  See Demsar 2006, https://jmlr.org/papers/v7/demsar06a.html. None for fewer than MIN_DATASETS data
  sets.
  """
  # Equal accuracies may differ in their last digits, by the order of the draws.
  gains = np.round([results[name].mean - baseline[name].mean for name in results], 12)
  if len(gains) < MIN_DATASETS or not np.any(gains):
    return None
  return float(scipy.stats.wilcoxon(gains).pvalue)


def group_mean(values: Sequence[float]) -> tuple[float, float | None]:
  """Mean of a metric over runs that differ in their seed, and its standard error, None for a single
  run.
  """
  with np.errstate(invalid='ignore'):  # a run that failed has infinity, and no error is defined
    return float(np.mean(values)), float(scipy.stats.sem(values)) if len(values) > 1 else None


def welch_p(values: Sequence[float], baseline: Sequence[float]) -> float | None:
  """p of Welch's t-test (two samples, unequal variances) that two groups of runs are equally good.

  See Collier et al. 2023, table 6. None if a group has fewer than two runs, or if no runs differ.
  """
  if min(len(values), len(baseline)) < 2 or not (np.ptp(values) or np.ptp(baseline)):
    return None
  with warnings.catch_warnings():  # scipy warns of lost precision if runs in a group are equal
    warnings.filterwarnings('ignore', 'Precision loss occurred', RuntimeWarning)
    return float(scipy.stats.ttest_ind(values, baseline, equal_var=False).pvalue)


def averages(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """One row per method and number of shots, averaged over all data sets and settings.

  See Collier et al. 2023, table 22. Methods are averaged over the cells (data set, setting) that
  all of them have. Data sets and settings are fixed and only the draws are random, so the standard
  error of n cells is sqrt(sum of their squared standard errors) / n.
  """
  methods = {}
  for row in rows:
    method, _, setting = row['run'].partition('/')
    methods.setdefault((row['shots'], method), {})[row['dataset'], setting] = row
  averaged = []
  for shots in sorted({shots for shots, _ in methods}):
    of_shots = {m: cells for (n, m), cells in methods.items() if n == shots}
    common = sorted(set.intersection(*map(set, of_shots.values())))  # the order rounds the sums
    for method, cells in of_shots.items() if len(common) > 1 else ():
      means, errors = ([cells[key][name] for key in common] for name in ('mean', 'stderr'))
      stderr = None if None in errors else float(np.linalg.norm(errors) / len(errors))
      averaged.append(
        {'method': method, 'shots': shots, 'mean': float(np.mean(means)), 'stderr': stderr}
        | {'num_cells': len(common)}
      )
  return averaged


def differences(results: Results) -> list[dict[str, Any]]:
  """Differences of each run to the first, per data set and number of shots, and over data sets."""
  rows: list[dict[str, Any]] = []
  if not results:
    return rows
  (first, baseline), *others = results.items()
  for run, by_dataset in others:
    about = {'run': run, 'baseline': first}
    common = [name for name in by_dataset if name in baseline]
    shared = {name: sorted({*by_dataset[name]} & {*baseline[name]}) for name in common}
    for name in common:
      for n in shared[name]:
        found = difference(by_dataset[name][n], baseline[name][n])
        rows.append({**about, 'dataset': name, 'shots': n, **found})
    for n in sorted(set.intersection(*map(set, shared.values()))) if len(common) > 1 else ():
      ours, theirs = ({name: r[name][n] for name in common} for r in (by_dataset, baseline))
      mean = float(np.mean([ours[name].mean - theirs[name].mean for name in common]))
      p = signed_rank_p(ours, theirs)
      over_all = {'dataset': f'all {len(common)}', 'shots': n, 'mean': mean, 'p_datasets': p}
      rows.append(about | over_all)
  return rows


def groups(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Mean and standard error of each metric over each group, and p against the first group."""
  values: dict[tuple[str, str], dict[str, list[float]]] = {}
  for row in rows:
    for metric, value in row['scalars'].items() if row['group'] is not None else ():
      by_group = values.setdefault((row['dataset'], metric), {})
      by_group.setdefault(row['group'], []).append(value)
  found = []
  for (dataset, metric), by_group in values.items():
    first = next(iter(by_group))
    for group, of_runs in by_group.items():
      mean, stderr = group_mean(of_runs)
      found.append(
        {
          'dataset': dataset,
          'metric': metric,
          'group': group,
          'mean': mean,
          'stderr': stderr,
          'num_runs': len(of_runs),
          'baseline': first,
          'p': None if group == first else welch_p(of_runs, by_group[first]),
        }
      )
  return found


def paired(values: np.ndarray, baseline: np.ndarray) -> dict[str, float | None]:
  """`values` minus `baseline`, both [seeds, N], of the same seeds and examples.

      >>> import numpy as np
      >>> from het_plugin.measures import comparison
      >>> nll = np.array([[1.0, 2.0], [1.5, 2.5]])
      >>> round(comparison.paired(nll, nll - [[0.1, 0.2], [0.2, 0.3]])['mean'], 3)
      0.2

  Returns:
    'mean'; 'stderr_seeds' and 'p_seeds' of a paired t-test over seeds; 'stderr_examples' and
    'p_examples' of one over examples, each with its mean over seeds; 'extreme', see extreme_share.
  """
  gaps = np.asarray(values, np.float64) - baseline
  return _t_tests(gaps, 'seeds', 'examples') | {'extreme': extreme_share(gaps.mean(axis=0))}


def extreme_share(differences: np.ndarray) -> float | None:
  """The share of the sum of differences [N] that is due to the largest 1% of them.

  Largest means in absolute value, and at least one difference is taken. A share above 1 means that
  the others have the opposite sign. None if the mean is less than float32 can tell.
  """
  total = float(differences.sum())
  if abs(total) < ROUNDING * len(differences):
    return None
  count = max(1, math.ceil(EXTREME * len(differences)))
  largest = np.argsort(-np.abs(differences), kind='stable')[:count]
  return float(differences[largest].sum()) / total
