"""The order by a proxy, and its agreement with accuracies."""

import itertools

import numpy as np
import pytest

from het_plugin.evaluation.selection import agreement, best_first


def test_best_first_keeps_the_order_of_equals():
  assert best_first([0.5, 0.9, 0.5, 0.7]) == [1, 3, 0, 2]


def test_kendall_tau_counts_pairs():
  proxy, accuracy = [0.1, 0.4, 0.3, 0.9], [0.2, 0.3, 0.6, 0.5]
  pairs = list(itertools.combinations(range(4), 2))
  signs = [np.sign((proxy[i] - proxy[j]) * (accuracy[i] - accuracy[j])) for i, j in pairs]
  assert agreement(proxy, accuracy).kendall_tau == pytest.approx(sum(signs) / len(pairs))


def test_regret_falls_to_nothing_as_more_are_kept():
  found = agreement([0.1, 0.4, 0.3, 0.9], [0.2, 0.3, 0.6, 0.5])
  np.testing.assert_allclose(found.regret, [0.1, 0.1, 0, 0])


@pytest.mark.parametrize('proxy,accuracy', [([0.5], [0.5]), ([1, 1], [0, 1]), ([0, 1], [0.5, 0.5])])
def test_an_undefined_tau_is_none(proxy, accuracy):
  found = agreement(proxy, accuracy)
  assert found.kendall_tau is None and np.isfinite(found.regret).all()
