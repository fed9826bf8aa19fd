"""RankMe against its formula on known spectra."""

import numpy as np
import pytest

from het_plugin.evaluation import rankme


def with_spectrum(sigma, n=200):
  rng = np.random.default_rng(0)
  u, _ = np.linalg.qr(rng.normal(size=(n, len(sigma))))
  v, _ = np.linalg.qr(rng.normal(size=(len(sigma), len(sigma))))
  return u * sigma @ v.T


def test_equal_singular_values_have_full_rank():
  sigma = rankme.singular_values(with_spectrum(np.full(12, 3.0)))
  np.testing.assert_allclose(sigma, 3.0, rtol=1e-12)
  assert rankme.rankme(sigma) == pytest.approx(12, rel=1e-4)


def test_the_formula_of_the_paper():
  spectrum = np.geomspace(1, 1e-3, 10)
  p = spectrum / spectrum.sum() + 1e-7
  expected = np.prod(p**-p)
  assert rankme.rankme(rankme.singular_values(with_spectrum(spectrum))) == pytest.approx(expected)


def test_small_singular_values_survive():
  """The square of 1e-11 is below the rounding of the Gram matrix."""
  spectrum = np.array([1.0, 1e-4, 1e-11])
  sigma = rankme.singular_values(with_spectrum(spectrum))
  np.testing.assert_allclose(sigma, spectrum, rtol=1e-4)
  gram = np.linalg.eigvalsh(with_spectrum(spectrum).T @ with_spectrum(spectrum))
  assert abs(gram[0]) > 1e3 * spectrum[-1] ** 2


def test_more_examples_than_the_bound_are_a_fixed_choice():
  rng = np.random.default_rng(0)
  features = rng.normal(size=(500, 4))
  few = rankme.singular_values(features, max_examples=100)
  np.testing.assert_array_equal(few, rankme.singular_values(features, max_examples=100))
  assert np.any(few != rankme.singular_values(features, max_examples=100, seed=1))
  # A hundred rows of five hundred have about a fifth of the squares.
  whole = np.linalg.svd(features, compute_uv=False)
  assert 0.1 < np.square(few).sum() / np.square(whole).sum() < 0.3
  np.testing.assert_allclose(rankme.singular_values(features, max_examples=500), whole)


@pytest.mark.parametrize(
  'features,limit,words',
  [
    (np.zeros((4, 3)), 9, 'all 4 rows of the features are zero'),
    (np.ones(3), 9, r'must be \[N, D\]'),
    (np.array([[1.0, np.nan], [1, 1]]), 9, '1 rows that are not finite'),
    (np.ones((4, 3)), 0, 'max_examples=0 must be at least 1'),
  ],
)
def test_wrong_input_is_one_sentence(features, limit, words):
  with pytest.raises(ValueError, match=words):
    rankme.singular_values(features, max_examples=limit)
