"""Calibration errors against brute force; ties, single examples, ends of bins."""

import numpy as np
import pytest

from het_plugin.evaluation import uncertainty


def test_bins_of_equal_width():
  rng = np.random.default_rng(0)
  confidence, correct = rng.random(500), rng.random(500) < 0.6
  expected = 0.0
  for m in range(15):
    members = (confidence > m / 15) & (confidence <= (m + 1) / 15)
    expected += abs(correct[members].sum() - confidence[members].sum()) / 500
  found = uncertainty.reliability(confidence, correct)
  assert found.ece == pytest.approx(expected, rel=1e-12) and found.count.sum() == 500


def test_ends_of_bins_and_empty_ones():
  edges = uncertainty.reliability(np.array([0.0, 1 / 15, 1.0]), np.array([True, True, True]))
  assert edges.count.tolist() == [2, *[0] * 13, 1]
  assert np.isnan(edges.accuracy[1:14]).all()
  assert edges.ece == pytest.approx((1 + 14 / 15) / 3)


def test_single_precision_is_summed_in_double():
  confidence = np.full(300_000, 0.1, np.float32)
  found = uncertainty.reliability(confidence, np.zeros(300_000, bool))
  assert found.ece == pytest.approx(float(np.float32(0.1)), rel=1e-10)


def test_adaptive_bins_are_of_equal_numbers_and_never_part_ties():
  confidence, correct = np.random.default_rng(0).random(150), np.arange(150) % 3 > 0
  even = uncertainty.adaptive_reliability(confidence, correct)
  assert even.count.tolist() == [10] * 15
  order = np.argsort(confidence)
  gaps = np.abs((confidence - correct)[order].reshape(15, 10).mean(axis=1))
  assert even.ece == pytest.approx(gaps.mean())
  tied = uncertainty.adaptive_reliability(np.full(150, 0.5), correct)
  assert tied.count.tolist() == [150] and tied.ece == pytest.approx(abs(0.5 - correct.mean()))
  assert uncertainty.adaptive_reliability(np.array([0.3]), np.array([True])).ece == 0.7
