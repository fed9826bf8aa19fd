"""Averages and paired tests against scipy and by hand."""

import dataclasses
import math
import warnings

import numpy as np
import pytest
import scipy.stats

from het_plugin.measures import comparison
from het_plugin.measures.fewshot import FewShotResult


def result(correct, shots=5):
  correct = np.asarray(correct, bool)
  accuracies = tuple(map(float, correct.mean(axis=1)))
  return FewShotResult(shots, accuracies, (1.0,) * len(correct), 0, 0, correct=correct)


def test_differences_are_paired():
  rng = np.random.default_rng(0)
  hard = rng.uniform(size=400)  # rows differ in difficulty, for both runs alike
  ours = result(rng.uniform(size=(4, 400)) < np.minimum(hard + 0.05, 1))
  theirs = result(rng.uniform(size=(4, 400)) < hard)
  found = comparison.difference(ours, theirs)
  assert found['mean'] == pytest.approx(ours.mean - theirs.mean)
  by_draw = scipy.stats.ttest_rel(ours.accuracies, theirs.accuracies)
  assert found['p_draws'] == pytest.approx(by_draw.pvalue)
  by_row = ours.correct.mean(axis=0), theirs.correct.mean(axis=0)
  assert found['p_rows'] == pytest.approx(scipy.stats.ttest_rel(*by_row).pvalue)
  assert found['stderr_rows'] < np.hypot(*(scipy.stats.sem(x) for x in by_row))


def test_differences_without_a_test():
  one_draw = comparison.difference(result([[1, 0, 1]]), result([[1, 0, 0]]))
  assert one_draw['p_draws'] is None and one_draw['p_rows'] is not None
  with_several = comparison.difference(result([[1, 0]]), result([[1, 0], [0, 0]]))
  assert with_several['mean'] == 0.25
  same = comparison.difference(result([[1, 0], [0, 1]]), result([[1, 0], [0, 1]]))
  assert same.pop('mean') == 0 and set(same.values()) == {None}


def test_other_draws_or_rows_cannot_be_paired():
  with pytest.raises(ValueError, match=r'with \[1, 3\] draws and test rows cannot be paired'):
    comparison.difference(result([[1, 0, 1]]), result([[1, 0]]))
  ours, theirs = (
    dataclasses.replace(result([[1, 0, 1]]), test_index=np.array(ids))
    for ids in ([1, 2, 3], [1, 3, 2])
  )
  with pytest.raises(ValueError, match='the test rows differ'):
    comparison.difference(ours, theirs)


def test_signed_rank_over_data_sets():
  gains = [0.01, 0.03, -0.01, 0.02, 0.04, 0.05, 0.06]
  ours, theirs = (
    {
      str(i): FewShotResult(1, (0.5 + x,), (1.0,), 0, 0, np.empty((1, 0), bool))
      for i, x in enumerate(values)
    }
    for values in (gains, [0.0] * len(gains))
  )
  assert comparison.signed_rank_p(ours, theirs) == pytest.approx(scipy.stats.wilcoxon(gains).pvalue)
  draws = (0.1, 0.2, 0.3)
  x = ours['0']  # equal means, in another order
  ours['2'], theirs['2'] = (dataclasses.replace(x, accuracies=a) for a in (draws, draws[::-1]))
  gains[2] = 0
  assert comparison.signed_rank_p(ours, theirs) == pytest.approx(scipy.stats.wilcoxon(gains).pvalue)
  assert comparison.signed_rank_p(theirs, theirs) is None
  few = {name: ours[name] for name in list(ours)[:5]}
  assert comparison.signed_rank_p(few, {name: theirs[name] for name in few}) is None


def test_groups_of_seeds():
  a = np.array([85.53, 85.59, 85.56])
  b = np.array([85.31, 85.25, 85.30])
  expected = pytest.approx(85.56), pytest.approx(0.03 / np.sqrt(3))
  assert comparison.group_mean(a) == expected and comparison.group_mean(a[:1]) == (85.53, None)
  with warnings.catch_warnings(action='error'):  # of a run that failed
    mean, error = comparison.group_mean([1.0, math.inf])
  assert math.isinf(mean) and math.isnan(error)
  expected = scipy.stats.ttest_ind(a, b, equal_var=False).pvalue
  assert comparison.welch_p(a, b) == pytest.approx(expected) and expected < 0.01


def test_averages_have_the_same_digits_in_every_process():
  means = [1e16, 1.0, -1e16, 2.0, 3e16, 5.0, -3e16]  # whose sum depends on their order
  about = {'run': 'a', 'shots': 1, 'stderr': None}
  rows = [{**about, 'dataset': f'set{i}', 'mean': x} for i, x in enumerate(means)]
  (found,) = comparison.averages(rows)
  assert found['mean'] == np.mean(means)
