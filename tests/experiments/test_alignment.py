"""Alignment of the noise with W in a trained run."""

import math

import numpy as np
import pytest
import scipy.linalg

from het_plugin import runs
from het_plugin.experiments.analyses import RowSpaceAlignment, largest_cosine, row_space


def test_shared_w_is_aligned(digits_run):
  found = RowSpaceAlignment(split='test', num_examples=20)(digits_run[0])
  # HET-XL's noise is in the row space of W; 10 classes leave no room for another.
  assert found['cos SPA'] == pytest.approx(1.0, abs=1e-6)
  assert found.keys() == {'cos SPA', 'std', 'cos SPA, random W', 'std, random W'}


def test_examples_and_their_deviation(digits_run, monkeypatch):
  """Against one product of bases for each example, with factors of a smaller rank than K."""
  factors = np.random.default_rng(0).standard_normal((6, 2, 10))
  monkeypatch.setattr(RowSpaceAlignment, '_factors', lambda self, run: iter(factors))
  run = runs.open_run(digits_run[0])
  kernel = np.asarray(run.params['head']['kernel'])[:3, :10]
  run.params['head']['kernel'] = kernel
  monkeypatch.setattr(runs, 'open_run', lambda path: run)
  found = RowSpaceAlignment()(digits_run[0])
  w = np.linalg.qr(kernel.T)[0]
  cosines = [np.linalg.svd(w.T @ np.linalg.qr(q.T)[0])[1][0] for q in factors]
  assert found['cos SPA'] == pytest.approx(np.mean(cosines))
  assert found['std'] == pytest.approx(np.std(cosines))


def test_a_head_without_factors_is_told(digits_run, monkeypatch):
  run = runs.open_run(digits_run[0])
  run.model.head = run.model.head.clone(remainder='diag')
  monkeypatch.setattr(runs, 'open_run', lambda path: run)
  with pytest.raises(ValueError, match="HetXL.remainder='diag' "):
    RowSpaceAlignment()(digits_run[0])


def test_the_cosine_is_that_of_scipys_smallest_angle():
  rng = np.random.default_rng(0)
  w = rng.standard_normal((6, 40))
  q = rng.standard_normal((4, 40))
  q[1] = q[0]  # a lower rank
  angles = scipy.linalg.subspace_angles(w.T, q.T)
  found = largest_cosine(row_space(w), row_space(q))
  assert math.isclose(found, np.cos(angles.min()), rel_tol=1e-12)
  q[2] = w[0] - 2 * w[3]  # one common direction is enough
  assert math.isclose(largest_cosine(row_space(w), row_space(q)), 1.0)
  assert largest_cosine(np.eye(6)[:3], np.eye(6)[3:]) == 0.0
