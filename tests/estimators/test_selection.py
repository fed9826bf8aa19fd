"""C_noise='auto', the default: the held-out rows, the rule, and what it chooses."""

import numpy as np
import pytest

from het_plugin.estimators import DetClassifier, HetClassifier, HetXLClassifier, load, save
from het_plugin.estimators.selection import NOISE_SHARES, held_out_rows, is_close, least_noise

SETTINGS = {'num_factors': 2, 'num_samples': 16, 'max_iter': 100}


def problem(num_rows, is_noisy):
  """Labels of a linear map; if noisy, a third of them are the next class."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(num_rows, 6))
  y = (3 * x @ rng.normal(size=(6, 4)) + rng.gumbel(size=(num_rows, 4))).argmax(axis=1)
  if is_noisy:
    y = np.where(rng.random(num_rows) < 0.33, (y + 1) % 4, y)
  return x, y


def test_a_fifth_of_each_class_is_held_out_and_never_its_only_row():
  label = np.repeat([0, 1, 2], [50, 20, 1])
  for seed in range(5):
    held_out = held_out_rows(label, seed)
    assert np.bincount(label[held_out], minlength=3).tolist() == [10, 4, 0]
  assert (held_out_rows(label, 0) != held_out_rows(label, 1)).any()


def test_weights_count_as_repetitions_in_the_mean_of_the_rule():
  nll = np.array([[0.2, 1.0], [0.1, 1.1]])
  assert least_noise(np.array([1.0, 0.0]), nll, np.array([100.0, 1.0])) == 1
  assert not is_close(nll[0], nll[1], np.array([100.0, 1e-3]))
  assert is_close(nll[0], nll[1], np.array([1.0, 1.0]))


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore::sklearn.exceptions.ConvergenceWarning')
@pytest.mark.parametrize('cls', [HetClassifier, HetXLClassifier])
def test_noise_is_taken_where_labels_have_it(cls, tmp_path):
  x, y = problem(1500, is_noisy=True)
  fitted = x[:1000], y[:1000]
  x_test = x[1000:]
  y_test = y[1000:]
  det = DetClassifier().fit(*fitted)
  head = cls(**SETTINGS).fit(*fitted, start=det)
  assert head.C_noise_ in NOISE_SHARES
  assert head.noise_nll_[head.C_noise_] < head.noise_nll_[0.0] - 0.02
  assert head.nll(x_test, y_test).mean() < det.nll(x_test, y_test).mean() - 0.02
  save(head, str(tmp_path / 'head.safetensors'))
  opened = load(str(tmp_path / 'head.safetensors'))
  assert (opened.C_noise, opened.C_noise_) == ('auto', head.C_noise_)


@pytest.mark.slow
def test_without_noise_in_the_labels_the_fit_is_that_of_det():
  x, y = problem(300, is_noisy=False)
  head = HetClassifier(**SETTINGS).fit(x, y)
  assert head.C_noise_ == 0.0
  reference = DetClassifier(tol=1e-6).fit(x, y)
  np.testing.assert_allclose(head.predict_proba(x), reference.predict_proba(x), atol=2e-3)


@pytest.mark.slow
def test_a_fit_that_starts_at_its_optimum_has_a_gap_near_zero():
  x, y = problem(300, is_noisy=False)
  head = HetClassifier(**{**SETTINGS, 'tol': 1e-2}).fit(x, y)
  assert 0 <= head.gap_ < 0.02


@pytest.mark.slow
def test_weights_are_repetitions_and_the_order_of_rows_is_nothing():
  x, y = problem(300, is_noisy=True)
  weight = 1 + np.arange(300) % 2
  which = np.random.default_rng(1).permutation(np.repeat(np.arange(300), weight))
  fast = {**SETTINGS, 'max_iter': 10}
  with pytest.warns(UserWarning, match='not converged'):
    weighted = HetClassifier(**fast).fit(x, y, sample_weight=weight)
    repeated = HetClassifier(**fast).fit(x[which], y[which])
  assert weighted.C_noise_ == repeated.C_noise_
  np.testing.assert_array_equal(weighted.coef_, repeated.coef_)


def test_what_cannot_be_chosen_is_one_sentence():
  x, y = problem(100, is_noisy=False)
  with pytest.raises(ValueError, match="C_noise='best' must be a number, at least 0 or"):
    HetClassifier(C_noise='best').fit(x, y)
  with pytest.raises(ValueError, match="C_noise='auto' chooses a share of C=inf, which must be"):
    HetClassifier(float('inf'), **SETTINGS).fit(x, y)
  with pytest.raises(ValueError, match='start must be a DetClassifier fitted to the same rows'):
    HetClassifier(**SETTINGS).fit(x, y, start=DetClassifier(C=2.0).fit(x, y))


def test_with_too_few_rows_no_noise_is_taken():
  x, _ = problem(7, is_noisy=False)
  y = np.array([0, 0, 0, 0, 0, 1, 1])  # one row could be held out
  with pytest.warns(UserWarning, match="C_noise='auto' takes no noise: .* 7 rows of X are too few"):
    head = HetClassifier(**SETTINGS | {'num_samples': 2}).fit(x, y)
  assert (head.C_noise, head.C_noise_, head.noise_nll_) == ('auto', 0.0, None)
  expected = DetClassifier().fit(x, y).predict_proba(x)
  np.testing.assert_allclose(head.predict_proba(x), expected, atol=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore::sklearn.exceptions.ConvergenceWarning')
def test_of_rows_on_disk_a_tenth_chooses():
  x, y = problem(3000, is_noisy=True)
  settings = {**SETTINGS, 'max_iter': 20, 'solver': 'streamed'}
  head = HetClassifier(2.0, **settings).fit(x, y)
  assert head.C_noise_ in head.noise_nll_
  same = HetClassifier(2.0, C_noise=head.C_noise_, **settings).fit(x, y)
  assert head.nll(x, y).mean() == pytest.approx(same.nll(x, y).mean(), abs=0.02)
