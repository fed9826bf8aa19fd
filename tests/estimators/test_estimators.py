"""The estimators: scikit-learn's conventions, its optimum, targets of every kind, equal bits."""

import contextlib
import unittest
import warnings

import jax
import numpy as np
import pytest
from scipy import sparse
from sklearn import model_selection
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator, estimator_checks_generator

from het_plugin.estimators import (
  DetClassifier,
  HetClassifier,
  HetHClassifier,
  HetXLClassifier,
  cross_val_predict,
  fitting,
  load,
  save,
  targets,
)

NOISY = (HetClassifier, HetHClassifier, HetXLClassifier)
SMALL = {'C_noise': None, 'num_factors': 2, 'num_samples': 16}
FEW = SMALL | {'num_samples': 2}  # no points around the label to compile
N = 100  # rows, with 6 features and 4 classes, where any do: all fits of DET then share programs


def problem(num_rows=300, num_classes=4):
  """Features, and labels of a linear model with noise in the logits."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(num_rows, 6)).astype(np.float32)
  u = x @ rng.normal(size=(6, num_classes)) + rng.gumbel(size=(num_rows, num_classes))
  return x, u.argmax(axis=1)


def optimum(x, y, c):
  with warnings.catch_warnings():  # float64 ends above 1e-10 at times
    warnings.simplefilter('ignore', ConvergenceWarning)
    return LogisticRegression(C=c, tol=1e-10, max_iter=30, solver='newton-cholesky').fit(x, y)


@pytest.mark.parametrize('target', ['votes', 'probabilities'])
def test_cross_val_predict_leaves_votes_and_shares_as_they_are(target):
  x, label = problem(N, 3)
  votes = np.stack([label, label, np.where(np.arange(N) % 3, label, (label + 1) % 3)], axis=1)
  votes[::2, 2] = -1
  y = votes if target == 'votes' else targets.encode(votes, 'votes').distribution()
  y = y.round(1) if target == 'probabilities' else y  # rows of .7 and .3
  det = DetClassifier(100.0, target=target)
  folds = [(np.setdiff1d(np.arange(N), part), part) for part in np.array_split(np.arange(N), 4)]
  found = cross_val_predict(make_pipeline(StandardScaler(), det), x, y, cv=folds)
  train, test = folds[1]
  scaler = StandardScaler().fit(x[train])
  one = clone(det).fit(scaler.transform(x[train]), y[train])
  np.testing.assert_allclose(found[test], one.predict_proba(scaler.transform(x[test])), atol=1e-5)
  predicted = cross_val_predict(det, x, y, method='predict')
  assert predicted.shape == (N,) and set(predicted) <= {0, 1, 2}
  with pytest.raises(ValueError, match='must hold out each of the 100 rows once'):
    cross_val_predict(det, x, y, cv=folds[:2])
  if target == 'probabilities':  # as scikit-learn's function passes them on
    for one in (det, DetClassifier()):
      with pytest.raises(ValueError, match=r"target='probabilities' and call estimators.cross_val"):
        model_selection.cross_val_predict(one, x, y, method='predict_proba', cv=4, n_jobs=None)


@pytest.mark.filterwarnings('ignore:The inner solver')  # of the reference
@pytest.mark.parametrize('scale', [1e8, 1e20])
def test_a_row_that_is_far_ends_at_the_optimum(scale):
  """The row fixes W v for its direction v, as it does nearly where it is 10^4 times as far."""
  x, y = problem(N)
  x[0] *= 1e4
  reference = optimum(x, y, 1.0)
  nll = -np.log(reference.predict_proba(x.astype(np.float64))[np.arange(N), y]).sum()
  expected = (nll + np.square(reference.coef_).sum() / 2) / N
  x[0] *= np.float32(scale / 1e4)
  with (
    pytest.warns(UserWarning, match='1 of the 100 rows of X are much larger than the others'),
    pytest.warns(ConvergenceWarning, match='may be up to 0.04 nats above its optimum'),
  ):
    det = DetClassifier().fit(x, y)
  assert det.objective_ == pytest.approx(expected, abs=1e-3)
  assert det.score(x, y) == pytest.approx(reference.score(x, y), abs=0.02)


def test_the_gap_of_far_rows_holds_and_the_fit_warns():
  """Two far rows of different classes hide the slope of the third class from float32."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(300, 8))
  y = (2 * x[:, :3] + rng.gumbel(size=(300, 3))).argmax(axis=1)
  far = np.flatnonzero(y == 1)[:2]
  x[far, 2] = (4e4, 1.4e5)
  y[far[0]] = 2
  reference = optimum(x, y, 1.0)
  nll = -np.log(reference.predict_proba(x)[np.arange(300), y]).sum()
  least = (nll + np.square(reference.coef_).sum() / 2) / 300
  with pytest.warns(ConvergenceWarning, match='2 of the 300 rows of X are more than 1000 times'):
    det = DetClassifier().fit(x, y)
  assert det.objective_ - det.gap_ < least < det.objective_ + 1e-5


def test_features_whose_squares_float32_cannot_hold_are_refused():
  x, y = problem(N)
  with pytest.raises(ValueError, match=r'X has values .*e\+20 from the centre, .* standardise X'):
    DetClassifier().fit(x * 1e20, y)


def test_a_number_for_missing_values_is_no_row_that_is_far():
  x, y = problem(N)
  nll = []
  for value in (-999.0, -1e9):
    x[::10, 2] = value
    with warnings.catch_warnings():
      warnings.simplefilter('error')
      nll.append(DetClassifier().fit(x, y).nll(x, y).mean())
  assert nll[1] == pytest.approx(nll[0], abs=1e-3)
  x[::10, 3] = value  # the sum of two such features would need all digits of each
  with pytest.warns(UserWarning, match=r'X has -1e\+09 in 10 rows of feature 2'):
    DetClassifier(tol=0.1).fit(x, y)
  x[::10, 2] = -1e20
  with pytest.raises(
    ValueError, match=r'X has -1e\+20 in 10 rows .* take a number near the others'
  ):
    DetClassifier().fit(x, y)


@pytest.mark.parametrize(
  'y',
  [
    [['a', np.nan], ['b', 'a']],
    [['a', None], ['b', 'a']],
    [[b'a', b''], [b'b', b'a']],
    np.array([[b'a', b''], [b'b', b'a']]),
    np.array([[b'a', None], [b'b', b'a']], object),
  ],
)
def test_a_missing_name_is_no_class(y):
  found = targets.encode(y)
  assert found.kind == 'votes' and found.classes.tolist() == ['a', 'b']
  assert found.values.tolist() == [[0, -1], [1, 0]]
  assert targets.encode([b'b'], classes=found.classes).values.tolist() == [[1]]


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
def test_check_estimator():
  """All checks for DET; the other heads share all that these look at, except for their settings.

  Each check with a fit is of other shapes, for which HET-XL takes six seconds to compile.
  """
  found = check_estimator(DetClassifier(max_iter=100), on_fail=None)
  het_xl = HetXLClassifier(max_iter=30, **FEW | {'C_noise': 'auto'})
  failed = [
    (result['check_name'], result['exception']) for result in found if result['status'] == 'failed'
  ]
  assert not failed
  of_rows = {
    'check_estimators_fit_returns_self',
    'check_fit_score_takes_y',
    'check_n_features_in_after_fitting',
    'check_positive_only_tag_during_fit',
    'check_readonly_memmap_input',
  }
  for estimator, check in estimator_checks_generator(het_xl, legacy=False):
    if getattr(check, 'func', check).__name__ not in of_rows:
      with contextlib.suppress(unittest.SkipTest):
        check(estimator)


@pytest.mark.slow
def test_det_is_logistic_regression_at_its_optimum():
  """The digits are nearly separable: scikit-learn's own L-BFGS takes thousands of steps."""
  x, y = load_digits(n_class=5, return_X_y=True)
  expected = optimum(x, y, 1.0)
  det = DetClassifier(tol=1e-5).fit(x, y)
  assert det.gradient_ <= 1e-5
  nll = -expected.predict_log_proba(x)[np.arange(len(y)), y].mean()
  assert abs(det.nll(x, y).mean() - nll) < 1e-4
  np.testing.assert_allclose(det.coef_, expected.coef_, atol=1e-3)


def test_without_a_penalty_it_is_that_of_a_tiny_one():
  x, y = problem(N)
  free, weak = (DetClassifier(c, tol=1e-5).fit(x, y) for c in (np.inf, 1e8))
  np.testing.assert_allclose(free.predict_proba(x), weak.predict_proba(x), atol=1e-3)


@pytest.mark.slow
def test_without_a_penalty_noise_has_no_worse_objective():
  x, y = problem(num_rows=200)
  free = DetClassifier(np.inf, tol=1e-5).fit(x, y)
  noisy = HetXLClassifier(np.inf, tol=1e-2, **FEW | {'C_noise': 0.1}).fit(x, y)
  assert noisy.objective_ <= free.objective_ + 1e-6


def test_two_classes_and_several_labels_are_logistic_regression():
  x, y = problem(N, num_classes=2)
  expected = optimum(x, y, 0.5)
  det = DetClassifier(0.5, tol=1e-6).fit(x, y)
  np.testing.assert_allclose(det.coef_, expected.coef_, atol=1e-3)
  np.testing.assert_allclose(det.intercept_, expected.intercept_, atol=1e-3)
  on = np.stack([y == 1, x[:, 0] > 0.3, x[:, 1] + x[:, 2] > 1], axis=1).astype(int)
  det = DetClassifier(0.5, tol=1e-6).fit(x, on)
  for k in range(3):
    np.testing.assert_allclose(det.coef_[k], optimum(x, on[:, k], 0.5).coef_[0], atol=2e-3)
  np.testing.assert_array_equal(det.predict(x), det.predict_proba(x) > 0.5)
  assert det.score(x, on.astype(object)) == det.score(x, on)  # as pandas gives nullable columns


def test_features_of_any_scale_reach_the_optimum():
  x, y = problem(N)
  x = x * 10.0 ** np.arange(-3, 3) + 5
  expected = optimum(x.astype(np.float64), y, 1e4)
  det = DetClassifier(1e4, tol=1e-5).fit(x, y)
  nll = -expected.predict_log_proba(x)[np.arange(len(y)), y].mean()
  assert abs(det.nll(x, y).mean() - nll) < 1e-4


def test_integers_that_float32_would_round_are_features_as_they_are():
  x, y = problem(N)
  times = np.int64(100 * x) + 1_600_000_000
  by_integers, by_floats = (DetClassifier().fit(t, y) for t in (times, times * 1.0))
  np.testing.assert_array_equal(
    by_integers.predict_proba(times), by_floats.predict_proba(times * 1.0)
  )


@pytest.mark.slow
@pytest.mark.parametrize('cls', NOISY)
def test_noise_never_has_a_worse_objective_than_det(cls):
  x, y = problem(num_rows=120)
  det = DetClassifier(0.3).fit(x, y)
  het = cls(0.3, max_iter=200, **SMALL).fit(x, y)
  assert het.objective_ <= det.objective_ + 2e-6
  again = cls(0.3, max_iter=200, **SMALL).fit(x, y, start=det)
  np.testing.assert_array_equal(het.predict_log_proba(x), again.predict_log_proba(x))
  np.testing.assert_allclose(het.predict_proba(x).sum(axis=1), 1.0, rtol=1e-5)
  nll = -het.predict_log_proba(x)[np.arange(len(y)), y]
  np.testing.assert_allclose(het.nll(x, y), nll, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_noise_is_found_where_labels_have_it():
  """Rows with x_0 > 0 have random labels, which a linear location cannot say."""
  rng = np.random.default_rng(0)
  x, y = problem(num_rows=2000, num_classes=3)
  y = np.where(x[:, 0] > 0, rng.integers(0, 3, len(x)), (x[:, 1:4] * 3).argmax(axis=1))
  train = slice(0, 1000)
  test = slice(1000, None)
  det = DetClassifier().fit(x[train], y[train]).nll(x[test], y[test])
  het = HetClassifier(**SMALL).fit(x[train], y[train]).nll(x[test], y[test])
  gain = det - het
  assert gain.mean() > 4 * gain.std() / np.sqrt(len(gain))


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
def test_votes_with_noise_are_the_shares_of_classes():
  x, y = problem(num_rows=100)
  votes = np.stack([y, np.random.default_rng(1).integers(0, 4, len(y))], axis=1)
  shares = (np.eye(4)[votes]).mean(axis=1)
  by_votes = HetHClassifier(target='votes', max_iter=20, **FEW).fit(x, votes)
  by_shares = HetHClassifier(max_iter=20, **FEW).fit(x, shares)
  np.testing.assert_allclose(by_votes.predict_proba(x), by_shares.predict_proba(x), atol=1e-3)
  np.testing.assert_allclose(by_votes.nll(x, votes), by_shares.nll(x, shares), atol=2e-3)


@pytest.mark.slow
def test_votes_are_the_shares_of_classes_and_weights_are_repetitions():
  x, y = problem(num_rows=100)
  rng = np.random.default_rng(1)
  votes = np.stack([y, rng.integers(0, 4, len(y)), np.where(y > 1, y, -1)], axis=1)
  shares = np.stack([(votes == k).sum(axis=1) for k in range(4)], axis=1) / (votes >= 0).sum(
    axis=1, keepdims=True
  )
  by_votes = DetClassifier(target='votes', tol=1e-6).fit(x, votes)
  by_shares = DetClassifier(tol=1e-6).fit(x, shares)
  np.testing.assert_allclose(by_votes.coef_, by_shares.coef_, atol=1e-3)
  np.testing.assert_allclose(by_votes.nll(x, votes), by_shares.nll(x, shares), atol=1e-3)
  assert by_votes.score(x, votes) == pytest.approx(by_shares.score(x, shares))
  missing = np.where(votes < 0, np.nan, votes)
  for same in (votes.astype(float), missing, votes.astype(object)):
    found = DetClassifier(target='votes', tol=1e-6).fit(x, same)
    np.testing.assert_array_equal(found.coef_, by_votes.coef_)
  names = np.where(votes < 0, None, votes.astype(str).astype(object))
  for none in (None, np.nan):
    texts = DetClassifier(target='votes').fit(x, np.where(names == None, none, names))  # noqa: E711
    assert list(texts.classes_) == list('0123')
  with pytest.raises(ValueError, match="Input y contains NaN.* a missing vote with target='votes'"):
    DetClassifier().fit(x, np.where(votes < 0, None, (votes > 1).astype(object)))
  with pytest.raises(ValueError, match='rows of different lengths: fill those of missing votes'):
    DetClassifier(target='votes').fit(x, [[vote for vote in row if vote >= 0] for row in votes])
  texts = DetClassifier(target='votes').fit(x, votes.astype(str))
  assert list(texts.classes_) == list('0123')
  weight = rng.integers(0, 3, len(y))
  weighted = DetClassifier().fit(x, y, sample_weight=weight)
  repeated = DetClassifier().fit(np.repeat(x, weight, axis=0), np.repeat(y, weight))
  np.testing.assert_array_equal(weighted.coef_, repeated.coef_)


def test_class_weights_are_weights_of_rows(tmp_path):
  x, y = problem(N)
  y = np.array([5, 3, 8, 7])[np.where(y == 3, 0, y)]
  own = np.where(y == 5, 2.0, 1.0)
  by_class = DetClassifier(class_weight={5: 2.0}).fit(x, y)
  np.testing.assert_array_equal(by_class.coef_, DetClassifier().fit(x, y, sample_weight=own).coef_)
  balanced = DetClassifier(class_weight='balanced', tol=1e-6).fit(x, y)
  reference = LogisticRegression(class_weight='balanced', tol=1e-6, max_iter=1000).fit(x, y)
  np.testing.assert_allclose(balanced.coef_, reference.coef_, atol=1e-3)
  save(by_class, str(tmp_path / 'det.safetensors'))
  assert load(str(tmp_path / 'det.safetensors')).class_weight == {5: 2.0}


def test_wrong_class_weights_are_one_sentence():
  x, y = problem(num_rows=20)
  for wrong, message in (
    ({9: 1.0}, 'class_weight has 9, which is not one of the 4 classes'),
    ({0: -1.0}, 'must have factors of at least 0'),
    ('equal', "class_weight='equal' must be a dict: {...} or 'balanced' or None"),
    (dict.fromkeys(range(4), 0.0), 'class_weight={0: 0.0, .* leaves no row a weight above 0'),
  ):
    with pytest.raises(ValueError, match=message):
      DetClassifier(class_weight=wrong).fit(x, y)
  with pytest.raises(ValueError, match='one non-zero number|sample_weight is 0 for all rows'):
    DetClassifier().fit(x, y, sample_weight=np.zeros(20))
  for weight in (1e-300, 1e300):  # which float32 does not hold
    with pytest.raises(ValueError, match='largest weight of a row is 1e.300; it must be in'):
      DetClassifier().fit(x, y, sample_weight=np.full(20, weight))
  with pytest.raises(ValueError, match="needs one class per row; y is of the kind 'indicator'"):
    DetClassifier(class_weight='balanced').fit(x, np.eye(4, dtype=int)[y])


@pytest.mark.slow
def test_strings_pipelines_and_searches():
  x, y = problem(num_rows=150)
  names = np.array(['cat', 'dog', 'eel', 'fox'])[y]
  search = GridSearchCV(
    make_pipeline(StandardScaler(), DetClassifier()), {'detclassifier__C': [0.01, 1.0]}, cv=2
  ).fit(x, names)
  assert set(search.predict(x)) <= set(names)
  assert search.score(x, names) > 0.6
  fast = {'num_factors': 1, 'num_samples': 2, 'max_iter': 10, 'tol': 0.1}
  values = [0.0, 'auto']
  search = GridSearchCV(HetClassifier(**fast), {'C_noise': values}, cv=2, error_score='raise')
  search.fit(x, names)
  assert search.best_params_['C_noise'] in values
  assert clone(HetClassifier()).C_noise == 'auto' and search.best_estimator_.C_noise_ >= 0
  assert clone(HetXLClassifier(tau=2.0)).tau == 2.0


@pytest.mark.slow
def test_tau(monkeypatch):
  monkeypatch.setattr(fitting, 'TAU_GRID', (0.25, 1.0))  # each is a model that is compiled
  x, y = problem(num_rows=200)
  plain = DetClassifier(tol=1e-5).fit(x, y)
  learned = DetClassifier(tau='learned', tol=1e-5).fit(x, y)
  np.testing.assert_allclose(learned.coef_, plain.coef_, atol=3e-3)
  chosen = DetClassifier(0.01, tau='validation', max_iter=100).fit(x, y)
  assert chosen.temperature_ == min(chosen.tau_grid_nll_, key=chosen.tau_grid_nll_.get) < 1


@pytest.mark.slow
def test_hidden_layers_learn_what_a_line_cannot():
  rng = np.random.default_rng(0)
  x = rng.uniform(-1, 1, (400, 2))
  y = (x[:, 0] * x[:, 1] > 0).astype(int)
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', ConvergenceWarning)
    mlp = DetClassifier(10.0, hidden_layers=(16,), max_iter=150).fit(x, y)
    noisy = HetXLClassifier(10.0, hidden_layers=(16,), max_iter=100, **FEW).fit(x, y)
  assert DetClassifier().fit(x, y).score(x, y) < 0.7
  assert mlp.score(x, y) > 0.95 and noisy.score(x, y) > 0.95


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'C': 0}, 'DetClassifier.C=0 must be above 0'),
    ({'C': '1'}, "DetClassifier.C='1' must be a number, above 0"),
    ({'tau': 'best'}, "tau='best' must be a number, above 0 or one of 'learned', 'validation'"),
    ({'hidden_layers': 8}, 'hidden_layers=8 must be positive widths'),
    ({'hidden_layers': ('8',)}, r"hidden_layers=\('8',\) must be positive widths"),
    ({'validation_fraction': 2.0}, r'validation_fraction=2.0 must be in \(0, 1\)'),
    ({'target': 'votes'}, 'needs y of two dimensions'),
    ({'target': 'ordinal'}, "target='ordinal' must be one of 'auto', "),
    ({'solver': 'sgd'}, "solver='sgd' must be one of 'auto', 'lbfgs', 'streamed'"),
    ({'class_weight': {0: 'a'}}, 'class_weight=.* must be a dict, each value a number or '),
    ({'random_state': 'a'}, "'a' cannot be used to seed"),
    ({'mesh': (3, 1)}, r'mesh=\(3, 1\) must be \(data, model\)'),
    ({'mesh': 2}, r'mesh=\(2,\) must be \(data, model\)'),
    ({'mesh': (1, 64)}, 'at most 8, the number of devices'),
  ],
)
def test_wrong_settings_are_one_sentence(change, message):
  x, y = problem(num_rows=20)
  with pytest.raises(ValueError, match=message):
    DetClassifier(**change).fit(x, y)


@pytest.mark.parametrize('setting', ['num_factors', 'num_samples', 'noise_dim', 'C_noise'])
def test_wrong_settings_of_the_noise_are_one_sentence(setting):
  message = f'HetXLClassifier.{setting}=-1 must be at least [01]'
  with pytest.raises(ValueError, match=message):
    HetXLClassifier(**{setting: -1}).fit(*problem(num_rows=20))


def test_the_start_is_a_fit_to_the_same_rows():
  x, y = problem(N)
  others = DetClassifier(0.5).fit(x, y), DetClassifier().fit(x[1:], y[1:])
  for start in (*others, LogisticRegression().fit(x, y)):
    with pytest.raises(ValueError, match='start must be a DetClassifier fitted to the same rows'):
      HetClassifier(**SMALL).fit(x, y, start=start)
  with pytest.raises(ValueError, match='start has the objective .* fitted to the same labels'):
    HetClassifier(C_noise=0).fit(x, (y + 1) % 4, start=DetClassifier(tol=0.1).fit(x, y))
  with pytest.raises(ValueError, match='start needs one tau'):
    HetClassifier(tau='validation', **SMALL).fit(x, y, start=start)


def test_wrong_labels_are_one_sentence():
  x, y = problem(N)
  with pytest.raises(ValueError, match='the label 9 is'):
    DetClassifier().fit(x, y).nll(x, np.where(y == 0, 9, y))
  with pytest.raises(ValueError, match=r'y has shape \(7,\); it must be \[100\]'):
    DetClassifier().fit(x, y).calibrate(x, y[:7])
  with pytest.raises(ValueError, match='y is None, but there must be labels'):
    DetClassifier().fit(x, y).score(x)
  for wrong in (np.array([None, 'a'] * 50), ['a', np.nan] * 50):  # of pandas, and a list
    with pytest.raises(ValueError, match='y must be all numbers or all strings, none missing'):
      DetClassifier().fit(x, wrong)
  with pytest.raises(ValueError, match='y must be all numbers or all strings, none missing'):
    DetClassifier().fit(x, np.array([['a'], ['b'], [None], ['b']] * 25, object))
  on = np.eye(4, dtype=int)[y]
  with pytest.raises(ValueError, match='y is sparse, but must be dense'):
    DetClassifier().fit(x, sparse.csr_array(on))
  with pytest.raises(ValueError, match="target='indicator' needs y of two dimensions"):
    DetClassifier().fit(x, on).nll(x, y)
  det = DetClassifier().fit(x, y)  # which has a softmax, whatever the labels of `nll` look like
  np.testing.assert_array_equal(det.calibrate(x, y).nll(x, on), det.calibrate(x, on).nll(x, y))
  votes = np.stack([y, (y + 1) % 4], axis=1)
  assert det.score(x, on) == det.score(x, y)
  share = np.mean(votes == det.predict(x)[:, None])
  np.testing.assert_allclose(det.score(x, votes), share)
  with pytest.raises(ValueError, match='add up to 0.5'):
    DetClassifier(target='probabilities').fit(x, np.full((N, 2), 0.25))
  with pytest.raises(ValueError, match='the indicator y has 0.3'):  # it was taken for a 1
    DetClassifier(target='indicator').fit(x, np.full((N, 2), 0.3))
  with pytest.raises(ValueError, match='has the vote 0.5'):
    DetClassifier(target='votes').fit(x, np.full((N, 2), 0.5))
  with pytest.raises(ValueError, match='too large for float32'):
    DetClassifier().fit(np.where(x > 1, 1e39, x.astype(float)), y)


def test_predictions_of_many_lengths_share_a_program(monkeypatch):
  x, y = problem(num_rows=128)
  det = DetClassifier(max_iter=20, tol=0.1).fit(x[:N], y[:N])
  apply = fitting._apply
  shapes = set()
  monkeypatch.setattr(fitting, '_apply', lambda *args: shapes.add(args[-1].shape) or apply(*args))
  expected = det.predict_proba(x)
  for n in (65, 100, 127):
    np.testing.assert_allclose(det.predict_proba(x[:n]), expected[:n], atol=1e-6)
  assert shapes == {(128, 6)}


def test_where_jax_has_64_bits_the_fit_is_the_same():
  x, y = problem(N)
  expected = DetClassifier(max_iter=20, tol=0.1).fit(x, y).predict_proba(x)
  with jax.enable_x64(True):
    found = DetClassifier(max_iter=20, tol=0.1).fit(x, y).predict_proba(x)
  np.testing.assert_array_equal(found, expected)


def test_class_ids_of_64_bits_stay_what_they_are():
  x, y = problem(N)
  det = DetClassifier(max_iter=20, tol=0.1).fit(x, y)
  large = DetClassifier(max_iter=20, tol=0.1).fit(x, y + 2**32)
  np.testing.assert_array_equal(large.predict(x), det.predict(x) + 2**32)
  with pytest.raises(ValueError, match=f'the label {y[0] + 2**32} is'):
    det.nll(x, y + 2**32)


def test_a_fit_that_is_interrupted_leaves_the_one_before(monkeypatch):
  x, y = problem(N)
  settings = {'max_iter': 20, 'tol': 0.1}
  det = DetClassifier(**settings).fit(x, y)
  other = DetClassifier(**settings)
  expected = det.predict(x)
  monkeypatch.setattr(
    fitting.Problem, 'fit', lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)
  )
  for estimator in (det, other):
    with pytest.raises(KeyboardInterrupt):
      estimator.fit(x, np.array(list('abcd'))[y])
  np.testing.assert_array_equal(det.predict(x), expected)
  with pytest.raises(NotFittedError):  # it was an AttributeError
    other.predict(x)


def test_an_unfinished_fit_warns():
  x, y = problem(N)
  with pytest.warns(ConvergenceWarning, match='nats above its optimum .* max_iter=2 is reached'):
    DetClassifier(max_iter=2).fit(x, y)


@pytest.mark.slow
@pytest.mark.parametrize('cls', [DetClassifier, HetXLClassifier])
def test_the_gap_of_an_unfinished_fit_is_predicted(cls):
  """Within a factor of twenty, where it is above 1e-5; with noise, which has plateaus, of fifty."""
  factor = 20 if cls is DetClassifier else 50
  x, y = problem(num_rows=1500 if cls is DetClassifier else 500)
  settings = {} if cls is DetClassifier else {**SMALL, 'C_noise': 1.0}
  det = DetClassifier().fit(x, y)
  start = {} if cls is DetClassifier else {'start': det}
  best = cls(tol=1e-6, **settings).fit(x, y, **start).objective_
  for max_iter in (4, 8, 12, 30) if cls is DetClassifier else (12, 30):
    with warnings.catch_warnings():
      warnings.simplefilter('ignore', ConvergenceWarning)
      fit = cls(max_iter=max_iter, **settings).fit(x, y, **start)
    gap = fit.objective_ - best
    assert gap / factor - 1e-5 <= fit.gap_ <= factor * gap + 1e-5, (max_iter, gap, fit.gap_)
