"""Base of the four estimators: fit, predictive distribution and scikit-learn's conventions."""

import dataclasses
import functools
import warnings
from numbers import Integral, Real
from typing import Any

import jax
import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from het_plugin.estimators import (
  calibration,
  inputs,
  lbfgs,
  minibatch,
  objective,
  placement,
  starts,
  targets,
)
from het_plugin.estimators.model import Model

# If X has fewer entries than this, equal rows are merged: repeating a row gives the same bits as
# giving it a weight, and the order of the rows does not matter.
MERGED_ENTRIES = 2**16
TAU_GRID = (0.25, 0.5, 1.0, 2.0, 4.0)
_COUNT = Interval(Integral, 1, None, closed='left')
# C_noise / C. Where noise was chosen for labels of people and of characters, it was 0.001 to 0.3,
# and 0.03 most often (benchmarks/real_features.py).
NOISE_SHARE = 0.03


class HeadClassifier(ClassifierMixin, BaseEstimator):
  """Base of the estimators. A subclass names its head and the head's fields that it exposes."""

  _head: str
  _noise: tuple[str, ...] = ()
  # Of the heads with noise these are parameters.
  C_noise = None
  num_samples = 1
  _parameter_constraints = {  # what `_validate_params` of scikit-learn checks
    'C': [Interval(Real, 0, None, closed='right')],
    'C_noise': [Interval(Real, 0, None, closed='both'), None],
    'tau': [StrOptions({'learned', 'validation'}), Interval(Real, 0, None, closed='neither')],
    'tol': [Interval(Real, 0, None, closed='neither')],
    'max_iter': [_COUNT],
    'num_factors': [_COUNT],
    'num_samples': [_COUNT],
    'num_buckets': [_COUNT, None],
    'noise_dim': [_COUNT, None],
    'solver': [StrOptions(set(inputs.SOLVERS))],
    'validation_fraction': [Interval(Real, 0, 1, closed='neither')],
    'random_state': ['random_state'],
    'progress': ['boolean'],
  }

  def fit(
    self, X: Any, y: Any = None, sample_weight: Any = None, start: 'HeadClassifier | None' = None
  ) -> 'HeadClassifier':
    """Fits the head.

    Args:
      X: any float [N, D]; or a file of features (`inputs.open_features`), here and elsewhere.
      y: class ids or strings [N]; an indicator of several labels [N, K]; votes [N, L], with -1 (or
        '') for a missing one; or probabilities [N, K]. See `target`. None takes those of the file.
      sample_weight: [N], at least 0; None is 1 for each.
      start: a `DetClassifier` that has been fitted to the same rows with the same C, tau and hidden
        layers. The noise starts at its optimum, which is otherwise computed first.

    Raises:
      ValueError: a setting, X, y or start is wrong, or there is only one class.
    """
    self._check()
    X, y = inputs.open_features(X, y)
    X, y = self._validated(X, y, fit=True)
    if self.tau == 'validation' and start is not None:
      raise ValueError("start needs one tau: tau='validation' fits DET at several")
    if self.tau == 'validation' and inputs.streams(X, self.solver):
      raise ValueError(
        f"tau='validation' needs all rows in memory (solver='lbfgs'); X has {np.size(X):,} entries "
        f'and solver={self.solver!r}'
      )
    encoded = targets.encode(y, self.target)
    if len(encoded.classes) > len(X):
      warnings.warn(
        f'y has K={len(encoded.classes)} classes and X has N={len(X)} rows: some classes have no '
        'row; is y transposed?',
        stacklevel=2,
      )
    weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    self.classes_, self.target_ = encoded.classes, encoded.kind
    if len(self.classes_) < 2 and encoded.kind != 'indicator':
      raise ValueError(
        f'{type(self).__name__} needs at least 2 classes; y has one class only, '
        f'{self.classes_.tolist()[0]!r}'
      )
    seed = int(check_random_state(self.random_state).randint(2**31 - 1))
    self.tau_grid_nll_ = self.calibration_ = None
    tau = None if self.tau == 'learned' else self.tau
    if self.tau == 'validation':
      tau = self._choose_tau(X, encoded, weight, seed)
    self._fit(tau, X, encoded, weight, seed, start)
    return self

  def predict_log_proba(self, X: Any) -> np.ndarray:
    """log p(k | x), float32 [N, K]; for an indicator log p(y_k = 1 | x)."""
    check_is_fitted(self)
    if self.calibration_ is None:
      return self._map('log_prob', X)
    if self.target_ == 'indicator':
      return -np.logaddexp(0.0, -self._scores(X))
    return self._scores(X)

  def predict_proba(self, X: Any) -> np.ndarray:
    """p(k | x), float32 [N, K], with columns in the order of `classes_`."""
    return np.exp(self.predict_log_proba(X))

  def decision_function(self, X: Any) -> np.ndarray:
    """Scores, float32 [N, K]; the class with the largest score is the prediction.

    Scores are log p(k | x), or for an indicator the log odds of each class. For two classes they
    are the log odds of the second class, [N].
    """
    check_is_fitted(self)
    if self.target_ == 'indicator':
      return self._scores(X)
    log_p = self.predict_log_proba(X)
    return log_p[:, 1] - log_p[:, 0] if len(self.classes_) == 2 else log_p

  def predict(self, X: Any) -> np.ndarray:
    """The most probable classes [N]; for an indicator whether each is more likely on than off."""
    scores = self.decision_function(X)
    if self.target_ == 'indicator':
      return (scores > 0).astype(int)
    best = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)
    return self.classes_[best]

  def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
    """Accuracy as in scikit-learn; for votes and probabilities the mean share of the prediction."""
    predicted = self.predict(X)
    if self.target_ in ('classes', 'indicator'):
      return accuracy_score(y, predicted, sample_weight=sample_weight)
    shares = self._encoded(X, y).distribution()
    found = shares[np.arange(len(shares)), np.searchsorted(self.classes_, predicted)]
    return float(np.average(found, weights=sample_weight))

  def nll(self, X: Any, y: Any) -> np.ndarray:
    """Negative log-likelihood of each example, float32 [N], nats.

    It is summed over the classes for an indicator, and averaged with the shares as weights for
    votes and probabilities.
    """
    check_is_fitted(self)
    encoded = self._encoded(X, y)
    if self.calibration_ is None:
      return self._map('nll', X, encoded.values)
    scores, shares = self._scores(X), encoded.distribution()
    if encoded.kind == 'indicator':
      return (np.logaddexp(0.0, scores) - shares * scores).sum(axis=1)
    return -np.where(shares > 0, shares * scores, 0.0).sum(axis=1)

  def entropy(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
    """Entropy of the prediction and expected entropy given the noise, float32 [N] each, nats.

    See `Integrator.expected_entropy`. The difference is the mutual information of label and noise.
    Calibration is not applied.
    """
    check_is_fitted(self)
    both = self._map('entropies', X)
    return both[:, 0], both[:, 1]

  def covariance(self, X: Any, classes: Any = None) -> np.ndarray:
    """Covariance of the logits over tau, float32 [N, K, K].

    Args:
      X: [N, D].
      classes: names of the classes to show; None shows all.

    Raises:
      ValueError: a class is unknown.
    """
    check_is_fitted(self)
    chosen = np.arange(len(self.classes_))
    if classes is not None:
      chosen = targets.encode(np.atleast_1d(classes), 'classes', self.classes_).values[:, 0]
    if self._head == 'det':
      rows = inputs.open_features(X)[0]
      return np.zeros((len(rows), len(chosen), len(chosen)), np.float32)
    factors = self._map('factors', X)[:, :, chosen]  # [N, R + 1, k]
    return np.einsum('nrk,nrl->nkl', factors, factors)

  def correlated_classes(self, X: Any, num: int = 10) -> list[tuple[Any, Any, float]]:
    """The pairs of classes whose logits correlate most over the rows of X.

    Returns:
      `num` tuples (class, other class, correlation) of the mean covariance over the rows, sorted by
      absolute correlation. Empty for the deterministic head.
    """
    check_is_fitted(self)
    if self._head == 'det':
      return []
    total, rows = 0.0, inputs.open_features(X)[0]
    for start in range(0, len(rows), 1024):
      factors = self._map('factors', rows[start : start + 1024])
      total = total + np.tensordot(factors, factors, axes=((0, 1), (0, 1)))
    deviation = np.sqrt(np.diag(total))
    correlation = np.triu(np.clip(total / np.outer(deviation, deviation), -1, 1), k=1)
    best = np.argsort(-np.abs(correlation), axis=None, kind='stable')[:num]
    pairs = [np.unravel_index(i, correlation.shape) for i in best]
    names = self.classes_.tolist()
    return [(names[i], names[j], float(correlation[i, j])) for i, j in pairs if i < j]

  def calibrate(self, X: Any, y: Any, method: str = 'temperature') -> 'HeadClassifier':
    """Calibrates predictions on rows that the fit has not seen.

    Half of the rows fit the scaling. The other half is kept for `predict_set`, whose coverage
    needs separate rows. With method 'none' all rows are kept for it.

    Args:
      X: [N, D].
      y: as in `fit`, of the classes of `fit`.
      method: 'temperature', 'vector' or 'none' (`calibration`).
    """
    check_is_fitted(self)
    encoded, scores = self._encoded(X, y), self._raw_scores(X)
    shares, link = encoded.distribution(), encoded.link
    order = np.random.default_rng(0).permutation(len(shares))
    half = 0 if method == 'none' else (len(order) + 1) // 2
    fitted, kept = order[:half], order[half:]
    scaling = calibration.fit_scaling(scores[fitted], shares[fitted], link, method)
    found = calibration.Calibration(*scaling, np.zeros(0))
    if encoded.kind == 'classes':
      p = np.exp(found.apply(scores[kept], link).astype(np.float64))
      found = dataclasses.replace(found, scores=np.sort(1.0 - (p * shares[kept]).sum(axis=1)))
    self.calibration_ = found
    return self

  def predict_set(self, X: Any, alpha: float = 0.1) -> np.ndarray:
    """Sets of classes, bool [N, K].

    For rows like those of `calibrate`, at least 1 - alpha of the sets contain the label. This
    conformal guarantee holds on average over rows, not for each class.

    Raises:
      ValueError: `calibrate` has not run or kept too few rows, or examples have no single label.
    """
    check_is_fitted(self)
    if self.calibration_ is None or self.target_ != 'classes':
      raise ValueError('predict_set needs one label per example, and calibrate(X, y) before it')
    # Computed as in `calibrate`, because rows of equal scores would be lost to rounding.
    p = np.exp(self.predict_log_proba(X).astype(np.float64))
    return 1.0 - p <= calibration.threshold(self.calibration_, alpha)

  @property
  def coef_(self) -> np.ndarray:
    """W^T / tau of the features, float32 [K, D]; for two classes the difference, [1, D]."""
    return self._location()[0]

  @property
  def intercept_(self) -> np.ndarray:
    """b / tau, float32 [K], or [1]."""
    return self._location()[1]

  @property
  def temperature_(self) -> float:
    """tau, fixed, chosen or learned."""
    check_is_fitted(self)
    head = self.model_.make_head()
    return float(head.temperature.apply({'params': self.params_['head'].get('temperature', {})}))

  def __sklearn_tags__(self):
    tags = super().__sklearn_tags__()
    tags.classifier_tags.multi_label = True
    return tags

  def _raw_scores(self, X):
    """log p, or log odds for an indicator, [N, K]."""
    return self._map('log_odds' if self.target_ == 'indicator' else 'log_prob', X)

  def _scores(self, X):
    """The same, calibrated."""
    scores = self._raw_scores(X)
    if self.calibration_ is None:
      return scores
    return self.calibration_.apply(scores, self.model_.link)

  @property
  def _noise_c(self) -> float:
    return self.C_noise or NOISE_SHARE * self.C  # without noise any value will do

  def _model(self, num_classes: int, link: str, tau: float | None) -> Model:
    return Model(
      head=self._head,
      num_classes=num_classes,
      link=link,
      tau=tau,
      hidden_layers=tuple(self.hidden_layers),
      num_samples=self.num_samples,
      noise=tuple((name, getattr(self, name)) for name in self._noise),
      class_multiple=1 if self.mesh is None else self.mesh[1],
    )

  def _location(self):
    check_is_fitted(self)
    if self.hidden_layers:
      raise AttributeError('coef_ and intercept_ exist without hidden layers only')
    head, num_classes = self.params_['head'], len(self.classes_)
    kernel = head['kernel'].T[:num_classes] / self.temperature_
    bias = head['bias'][:num_classes] / self.temperature_ - kernel @ self.mean_
    if num_classes == 2 and self.target_ != 'indicator':
      return kernel[1:] - kernel[:1], bias[1:] - bias[:1]
    return kernel, bias

  def _check(self):
    self._validate_params()
    if self.mesh is not None:
      placement.make_mesh(self.mesh)
    widths = self.hidden_layers
    if np.ndim(widths) != 1 or not all(isinstance(w, Integral) and w > 0 for w in widths):
      raise ValueError(
        f'{type(self).__name__}: hidden_layers={widths!r} must be positive widths, such as (256,)'
      )

  def _validated(self, X, y=None, fit=False):
    if inputs.is_mapped(X) and y is not None:  # its rows are checked as they are read
      self.n_features_in_ = X.shape[1]
      return X, inputs.labels_of_rows(X, y)
    if getattr(getattr(X, 'dtype', None), 'name', '') in ('bfloat16', 'float16'):
      X = np.asarray(X).astype(np.float32)
    if getattr(X, 'ndim', 2) == 1:
      raise ValueError(f'Reshape your data: X has shape {X.shape}, and must be [N, D]')
    dtype = [np.float32, np.float64]
    X = validate_data(self, X, dtype=dtype, reset=fit, ensure_all_finite=False)
    inputs.check_finite(X)
    if not fit:
      return X
    if y is None:
      raise ValueError(f'{type(self).__name__} requires y to be passed, but the target y is None')
    return X, inputs.labels_of_rows(X, y)

  def _encoded(self, X, y):
    y = inputs.labels_of_rows(*inputs.open_features(X, y))
    return targets.encode(y, self.target, self.classes_, self.target_)

  def _fit(self, tau, X, encoded, weight, seed, start=None):
    model = self.model_ = self._model(len(encoded.classes), encoded.link, tau)
    has_no_noise = self.C_noise == 0
    fit_rows = self._fit_streamed if inputs.streams(X, self.solver) else self._fit_in_memory
    with placement.on(self.mesh):
      fitted = model.deterministic if has_no_noise else model
      fit = fit_rows(fitted, X, encoded, weight, seed, start)
    self.params_ = fit.params
    if has_no_noise:
      self.params_ = starts.without_noise(model.init(seed, X.shape[1]), fit.params)
    self.n_iter_, self.objective_, self.gradient_ = fit.num_iterations, fit.objective, fit.gradient

  def _fit_streamed(self, model, X, encoded, weight, seed, start):
    data = minibatch.Data(X, encoded.values, weight)
    self.mean_ = data.mean
    return minibatch.fit(
      model,
      data,
      encoded.class_shares(weight),
      seed,
      *(self.C, self._noise_c),
      validation_fraction=self.validation_fraction,
      max_iter=self.max_iter,
      progress=self.progress,
      mesh=self.mesh,
      det_fit=self._det_fit(start),
    )

  def _det_fit(self, start):
    """The fit of `start`, which must be that of this estimator's DET."""
    if start is None:
      return None
    check_is_fitted(start)
    same = start.model_ == self.model_.deterministic and start.C == self.C
    if not same or not np.array_equal(start.mean_, self.mean_):
      raise ValueError(
        'start must be a DetClassifier fitted to the same rows with the same C, tau and '
        f'hidden_layers; it is {start}'
      )
    return lbfgs.Fit(start.params_, start.objective_, start.gradient_, start.n_iter_)

  def _fit_in_memory(self, model, X, encoded, weight, seed, start):
    keep = weight > 0
    x, encoded, weight = X[keep], encoded.rows(keep), weight[keep]
    if inputs.is_mapped(X):
      x = self._validated(np.asarray(x), fit=True, y=encoded.values)[0]
    shares, values = encoded.class_shares(weight), encoded.values
    if x.size <= MERGED_ENTRIES:
      x, values, weight = inputs.merged(x, values, weight)
    self.mean_ = np.average(x, axis=0, weights=weight)
    rows = objective.make_rows(model, x, self.mean_, values, weight, self.C, self._noise_c)
    rows = placement.place_rows(rows, self.mesh)

    def search(model, params):
      params = placement.place_params(model, params, self.mesh)
      settings = {'tol': self.tol, 'max_iter': self.max_iter, 'progress': self.progress}
      return lbfgs.minimise(model, params, rows, **settings)

    return starts.fit(search, model, x.shape[1], shares, lambda: rows, seed, self._det_fit(start))

  def _choose_tau(self, X, encoded, weight, seed):
    """The tau of `TAU_GRID` with the best fit to held-out rows."""
    train, held_out = train_test_split(
      np.flatnonzero(weight > 0), test_size=self.validation_fraction, random_state=seed
    )
    self.tau_grid_nll_ = {}
    for tau in TAU_GRID:
      self._fit(tau, X[train], encoded.rows(train), weight[train], seed)
      nll = self._map('nll', X[held_out], encoded.values[held_out])
      self.tau_grid_nll_[tau] = float(np.average(nll, weights=weight[held_out]))
    return min(self.tau_grid_nll_, key=self.tau_grid_nll_.get)

  def _map(self, method, X, target=None):
    """A method of the model for the rows, computed in blocks of one shape."""
    X, _ = inputs.open_features(X)
    is_mapped = inputs.is_mapped(X)
    X = X if is_mapped else self._validated(X)
    size, found = min(objective.block_rows(self.model_, len(X)), 4096), []
    with placement.on(self.mesh):
      params = placement.place_params(self.model_, self.params_, self.mesh)
      params = self.model_.multiplied(params)
      for start in range(0, len(X), size):
        x = X[start : start + size]
        x = self._validated(np.asarray(x)) if is_mapped else x
        block = [x - self.mean_]
        if target is not None:
          block.append(target[start : start + size])
        padding = size - len(x)
        block = [np.pad(x, [(0, padding), *[(0, 0)] * (x.ndim - 1)]) for x in block]
        found.append(np.asarray(_apply(self.model_, method, params, *block)))
        placement.forget_pages(X)
    return np.concatenate(found)[: len(X)]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _apply(model, method, params, *arrays):
  return getattr(model, method)(params, *arrays)
