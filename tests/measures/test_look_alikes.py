"""Look-alikes among correlated classes, by hand."""

import numpy as np
import pytest

from het_plugin.measures.look_alikes import look_alike_rate


def test_homoglyph_rate_by_hand():
  homoglyphs = [frozenset({1}), frozenset({0}), frozenset(), frozenset({4, 5})]
  homoglyphs += [frozenset({3, 5}), frozenset({3, 4})]
  correlation = {
    0: [1.0, 0.9, 0.2, 0, 0, 0],  # found
    2: [1.0, 0.9, 1.0, 0, 0, 0],  # has none: does not count
    3: [0.0, 0.8, 0.8, 1.0, 0.8, 0.8],  # half of four equal ones
  }
  found = look_alike_rate(
    list(correlation), [np.array(x) for x in correlation.values()], homoglyphs
  )
  assert found['rate'] == pytest.approx(0.75) and found['num_examples'] == 2
  assert found['chance'] == pytest.approx((1 / 5 + 2 / 5) / 2)
  assert found['stderr'] == pytest.approx(0.25)
  none = look_alike_rate([2], [np.zeros(6)], homoglyphs)
  assert none == {'rate': None, 'stderr': None, 'chance': None, 'num_examples': 0}
