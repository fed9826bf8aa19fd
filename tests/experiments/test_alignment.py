"""Alignment of the noise with W in a trained run."""

import numpy as np
import pytest

from het_plugin.config import trained_run
from het_plugin.experiments.alignment import RowSpaceAlignment


def test_shared_w_is_aligned(digits_run):
  found = RowSpaceAlignment(split='test', num_examples=20)(digits_run[0])
  # HET-XL's noise is in the row space of W; 10 classes leave no room for another.
  assert found['cos SPA'] == pytest.approx(1.0, abs=1e-6)
  assert found.keys() == {'cos SPA', 'std', 'cos SPA, random W', 'std, random W'}


def test_examples_and_their_deviation(digits_run, monkeypatch):
  """Against one product of bases for each example, with factors of a smaller rank than K."""
  factors = np.random.default_rng(0).standard_normal((6, 2, 10))
  monkeypatch.setattr(RowSpaceAlignment, '_factors', lambda self, run: iter(factors))
  run = trained_run.open_run(digits_run[0])
  kernel = np.asarray(run.params['head']['kernel'])[:3, :10]
  run.params['head']['kernel'] = kernel
  monkeypatch.setattr(trained_run, 'open_run', lambda path: run)
  found = RowSpaceAlignment()(digits_run[0])
  w = np.linalg.qr(kernel.T)[0]
  cosines = [np.linalg.svd(w.T @ np.linalg.qr(q.T)[0])[1][0] for q in factors]
  assert found['cos SPA'] == pytest.approx(np.mean(cosines))
  assert found['std'] == pytest.approx(np.std(cosines))


def test_a_head_without_factors_is_told(digits_run, monkeypatch):
  run = trained_run.open_run(digits_run[0])
  run.model.head = run.model.head.clone(remainder='diag')
  monkeypatch.setattr(trained_run, 'open_run', lambda path: run)
  with pytest.raises(ValueError, match="HetXL.remainder='diag' has no factors"):
    RowSpaceAlignment()(digits_run[0])
