"""Base of the four estimators: fit, predictive distribution and scikit-learn's conventions."""

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from numbers import Integral
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils import check_random_state
from sklearn.utils.validation import (
  _check_feature_names,
  _check_n_features,
  _check_sample_weight,
  check_array,
  check_is_fitted,
)

from het_plugin.estimators import calibration, fitting, inputs, placement, starts, targets
from het_plugin.estimators.model import Model
from het_plugin.estimators.selection import NOISE_SHARE
from het_plugin.estimators.settings import FitSettings, estimator, part
from het_plugin.rows import check_names
from het_plugin.system import ranges
from het_plugin.system.ranges import Positive

_WEIGHTS = 1e-30, 1e30  # whose sums float32 holds
_SCORES = 2**24  # that are held for `predict`
_LEAST_CALIBRATED = 10  # rows that fit a scaling without a warning


@estimator
class HeadClassifier(FitSettings, ClassifierMixin, BaseEstimator):
  """Base of the estimators, with the parameters of all of them, see `DetClassifier`.

  In all methods X is any float [N, D], a file of features or `Rows` (`inputs.open_features`), and y
  labels as `fit` takes them. Wrong ones are a ValueError. Before `fit` the other methods raise
  `sklearn.exceptions.NotFittedError`. A subclass names its head and the head's fields that it
  exposes.
  """

  tau: Positive | Literal['learned', 'validation'] = 1.0
  hidden_layers: Sequence[int] = ()
  target: targets.Target = 'auto'
  class_weight: dict[Any, float] | Literal['balanced'] | None = None
  random_state: Any = 0

  _head: ClassVar[str]
  _noise: ClassVar[tuple[str, ...]] = ()
  # Of the heads with noise these are parameters.
  C_noise = None
  num_samples = 1

  def fit(
    self,
    X: Any,
    y: Any = None,
    sample_weight: Any = None,
    start: 'HeadClassifier | starts.Near | None' = None,
  ) -> 'HeadClassifier':
    """Fits the head.

    Args:
      X: the features.
      y: class ids or strings [N]; an indicator of several labels [N, K]; votes [N, L], with -1 (or
        '') for a missing one; or probabilities [N, K]. See `target`. None takes those of the file.
      sample_weight: [N], at least 0; None is 1 for each.
      start: a `DetClassifier` that has been fitted to the same rows and weights with the same C,
        tau and hidden layers. The noise starts at its optimum, which is otherwise computed
        first. `starts.Near` is where searches start, if C_noise is a number.

    Returns:
      The estimator.

    Raises:
      ValueError: a setting, X, y or start is wrong, or there is only one class.
    """
    self._check()
    near = start if isinstance(start, starts.Near) else None
    start = None if near else start
    features, y = self._opened(X, y, fit=True)
    if self.tau == 'validation' and start is not None:
      raise ValueError("start needs one tau: tau='validation' fits DET at several")
    if y is None:
      raise ValueError(f'{type(self).__name__} requires y to be passed, but the target y is None')
    is_encoded = isinstance(y, targets.Targets)  # as of an audit, whose labels stay in a file
    encoded = (
      y if is_encoded else targets.encode(inputs.labels_of_rows(len(features), y), self.target)
    )
    if len(encoded.classes) > len(features):
      warnings.warn(
        f'y has K={len(encoded.classes)} classes and X has N={len(features)} rows: some classes '
        'have no row; is y transposed?',
        stacklevel=2,
      )
    weight = _check_sample_weight(
      sample_weight, features, dtype=np.float64, ensure_non_negative=True
    )
    if not weight.any():  # which scikit-learn refuses from 1.9 on
      raise ValueError('sample_weight is 0 for all rows: it must be above 0 for at least one')
    if len(encoded.classes) < 2 and encoded.kind != 'indicator':
      raise ValueError(
        f'{type(self).__name__} needs at least 2 classes; y has one class only, '
        f'{encoded.classes.tolist()[0]!r}'
      )
    if self.class_weight is not None:
      weight = weight * encoded.class_factors(self.class_weight, weight)
      if not weight.any():
        raise ValueError(f'class_weight={self.class_weight} leaves no row a weight above 0')
    if not _WEIGHTS[0] <= weight.max() <= _WEIGHTS[1]:
      raise ValueError(
        f'the largest weight of a row is {weight.max():g}; it must be in {_WEIGHTS[0]:g} .. '
        f'{_WEIGHTS[1]:g}: multiply the weights, and 1 / C, by a number'
      )
    rows = (features, encoded, weight, part(self, FitSettings))
    seed = int(check_random_state(self.random_state).randint(2**31 - 1))
    c_noise = NOISE_SHARE * self.C if self.C_noise in (None, 'auto') else self.C_noise
    tau = None if isinstance(self.tau, str) else self.tau
    grid = None
    if self.tau == 'validation':
      make_model = functools.partial(self._model, len(encoded.classes), encoded.link)
      grid = fitting.tau_grid_nll(make_model, c_noise, *rows, seed)
      tau = min(grid, key=grid.__getitem__)
    model = self._model(len(encoded.classes), encoded.link, tau)
    problem = fitting.Problem.of(*rows, seed)
    noise_nll = None
    if self.C_noise == 'auto':
      c_noise, noise_nll, near = fitting.noise_path(model, problem, start)
    done = problem.fit(model, c_noise, start, near)
    # All at the end: a fit that is interrupted leaves no names of classes beside older parameters.
    self.classes_ = encoded.classes
    self.target_ = encoded.kind
    self.calibration_ = None
    self.tau_grid_nll_ = grid
    self.noise_nll_ = noise_nll
    self.model_ = model
    self.mean_ = problem.mean
    self.C_noise_ = 0.0 if self._head == 'det' else c_noise
    self.params_ = done.params
    self.n_iter_ = done.num_iterations
    self.objective_ = done.objective
    self.gradient_ = done.gradient
    self.gap_ = done.gap
    return self

  def __sklearn_is_fitted__(self) -> bool:
    return hasattr(self, 'params_')  # a fit that failed leaves n_features_in_

  def predict_log_proba(self, X: Any) -> np.ndarray:
    """log p(k | x), in nats.

    Returns:
      float32 [N, K], with columns in the order of `classes_`; for an indicator log p(y_k = 1 | x).
    """
    return self._log_proba(self._opened(X)[0])

  def predict_proba(self, X: Any) -> np.ndarray:
    """p(k | x), float32 [N, K]; the exponential of `predict_log_proba`."""
    return np.exp(self.predict_log_proba(X))

  def decision_function(self, X: Any) -> np.ndarray:
    """Scores, float32 [N, K]; the class with the largest score is the prediction.

    Scores are log p(k | x), or for an indicator the log odds of each class. For two classes they
    are the log odds of the second class, [N].
    """
    return self._decision(self._opened(X)[0])

  def predict(self, X: Any) -> np.ndarray:
    """The most probable classes.

    Returns:
      [N] of the type of `classes_`; for an indicator int [N, K], whether each class is more likely
      on than off.
    """
    return self._predict(self._opened(X)[0])

  def predict_clean_proba(self, X: Any) -> np.ndarray:
    """The location's prediction, without the noise: link((W^T phi + b) / tau), float32 [N, K].

    `predict_proba` is the distribution of labels like those of the fit, noise included. Where the
    noise stands for errors of the labels, this is the distribution of the labels without them. It
    is no better than that reading: noise may also be what the features do not tell. For DET both
    are the same. Calibration is not applied.

        >>> import numpy as np
        >>> from het_plugin.estimators import HetClassifier
        >>> rng = np.random.default_rng(0)
        >>> x = rng.normal(size=(150, 4)).astype(np.float32)
        >>> truth = x[:, :3].argmax(axis=1)
        >>> y = np.where(x[:, 3] > 0, rng.integers(3, size=150), truth)  # wrong where x_3 > 0
        >>> het = HetClassifier(C=10, C_noise=10, num_factors=1, num_samples=16).fit(x, y)
        >>> clean = het.predict_clean_proba(x)[np.arange(150), truth]
        >>> bool(clean.mean() > het.predict_proba(x)[np.arange(150), truth].mean())
        True

    Returns:
      p(k | x), with columns in the order of `classes_`; for an indicator p(y_k = 1 | x).
    """
    return self._map('location_prob', self._opened(X)[0])

  def predict_clean(self, X: Any) -> np.ndarray:
    """The most probable classes without the noise (`predict_clean_proba`), [N].

    For an indicator, whether each class is more likely on than off, int [N, K].

        >>> from sklearn.datasets import load_iris
        >>> from het_plugin.estimators import DetClassifier
        >>> x, y = load_iris(return_X_y=True)
        >>> det = DetClassifier().fit(x, y)
        >>> bool((det.predict_clean(x) == det.predict(x)).all())  # DET has no noise
        True
    """
    clean = self.predict_clean_proba(X)
    if self.target_ == 'indicator':
      return (clean > 0.5).astype(int)
    return self.classes_[clean.argmax(axis=1)]

  def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
    """Accuracy as in scikit-learn; for votes and probabilities the mean share of the prediction.

    Args:
      y: labels as in `fit`; None takes those of the file.
      sample_weight: [N]; None is 1 for each.
    """
    features, y = self._opened(X, y)
    y = inputs.labels_of_rows(len(features), y)
    predicted = self._predict(features)
    if self.target_ == 'indicator':
      y = self._encoded(features, y).values  # numbers; pandas may have objects
    if self.target_ == 'indicator' or y.ndim == 1:
      return accuracy_score(y, predicted, sample_weight=sample_weight)
    shares = self._encoded(features, y).distribution()
    found = shares[self.classes_ == predicted[:, None]]
    return float(np.average(found, weights=sample_weight))

  def nll(self, X: Any, y: Any = None) -> np.ndarray:
    """Negative log-likelihood of each example, float32 [N], nats.

    It is summed over the classes for an indicator, and averaged with the shares as weights for
    votes and probabilities.

    Args:
      y: labels as in `fit`; None takes those of the file.

    Raises:
      ValueError: y has a class that `fit` has not seen.
    """
    features, y = self._opened(X, y)
    encoded = self._encoded(features, y)
    if self.calibration_ is None:
      return self._map('nll', features, encoded.values)
    scores = self._scores(features)
    shares = encoded.distribution()
    if encoded.kind == 'indicator':
      return (np.logaddexp(0.0, scores) - shares * scores).sum(axis=1)
    return -np.where(shares > 0, shares * scores, 0.0).sum(axis=1)

  def entropy(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
    """Entropy of the prediction and expected entropy given the noise, float32 [N] each, nats.

    See `Integrator.expected_entropy`. The difference is the mutual information of label and noise.
    Calibration is not applied.

        >>> from sklearn.datasets import load_iris
        >>> from het_plugin.estimators import HetClassifier
        >>> x, y = load_iris(return_X_y=True)
        >>> het = HetClassifier(C_noise=1.0, num_factors=1, num_samples=16).fit(x, y)
        >>> total, expected = het.entropy(x)
        >>> bool((total >= expected).all())
        True
    """
    both = self._map('entropies', self._opened(X)[0])
    return both[:, 0], both[:, 1]

  def covariance(self, X: Any, classes: Any = None) -> np.ndarray:
    """Covariance of the logits over tau, float32 [N, K, K].

        >>> from sklearn.datasets import load_iris
        >>> from het_plugin.estimators import HetClassifier
        >>> iris = load_iris()
        >>> het = HetClassifier(C_noise=1.0, num_factors=1, num_samples=16)
        >>> het = het.fit(iris.data, iris.target_names[iris.target])
        >>> het.covariance(iris.data, classes=['setosa', 'virginica']).shape
        (150, 2, 2)

    Args:
      classes: names of the classes to show; None shows all.

    Raises:
      ValueError: a class is unknown.
    """
    features, _ = self._opened(X)
    chosen = np.arange(len(self.classes_))
    if classes is not None:
      chosen = targets.encode(np.atleast_1d(classes), 'classes', self.classes_).values[:, 0]
    if self._head == 'det':
      return np.zeros((len(features), len(chosen), len(chosen)), np.float32)
    factors = self._map('factors', features)[:, :, chosen]  # [N, R + 1, k]
    return np.einsum('nrk,nrl->nkl', factors, factors)

  def correlated_classes(self, X: Any, num: int = 10) -> list[tuple[Any, Any, float]]:
    """The pairs of classes whose logits correlate most over the rows of X.

    Args:
      num: the number of pairs.

    Returns:
      `num` tuples (class, other class, correlation) of the mean covariance over the rows, sorted by
      absolute correlation. Empty without noise: for the deterministic head, and where the fit
      took none.
    """
    features, _ = self._opened(X)
    if self._head == 'det' or not np.any(self.params_['head']['covariance']['J']):
      return []
    total = 0.0
    for start in range(0, len(features), 1024):
      factors = self._map('factors', features[start : start + 1024])
      total = total + np.tensordot(factors, factors, axes=((0, 1), (0, 1)))
    deviation = np.sqrt(np.diag(total))
    correlation = np.triu(np.clip(total / np.outer(deviation, deviation), -1, 1), k=1)
    best = np.argsort(-np.abs(correlation), axis=None, kind='stable')[:num]
    pairs = [np.unravel_index(i, correlation.shape) for i in best]
    names = self.classes_.tolist()
    return [(names[i], names[j], float(correlation[i, j])) for i, j in pairs if i < j]

  @ranges.checked
  def calibrate(
    self, X: Any, y: Any = None, method: calibration.Method = 'temperature'
  ) -> 'HeadClassifier':
    """Calibrates predictions on rows that the fit has not seen.

    Half of the rows fit the scaling. The other half is kept for `predict_set`, whose coverage
    needs separate rows. With method 'none' all rows are kept for it.

        >>> from sklearn.datasets import load_digits
        >>> from het_plugin.estimators import DetClassifier
        >>> x, y = load_digits(return_X_y=True)
        >>> det = DetClassifier(C=10.0).fit(x[:1000], y[:1000])
        >>> before = det.nll(x[1400:], y[1400:]).mean()
        >>> det = det.calibrate(x[1000:1400], y[1000:1400])
        >>> bool(det.nll(x[1400:], y[1400:]).mean() < before)
        True

    Args:
      y: as in `fit`, of the classes of `fit`.
      method: see `calibration`.

    Returns:
      The estimator.

    Raises:
      ValueError: the method is wrong.
    """
    features, y = self._opened(X, y)
    encoded = self._encoded(features, y)
    scores = self._raw_scores(features)
    shares = encoded.distribution()
    link = encoded.link
    order = np.random.default_rng(0).permutation(len(shares))
    half = 0 if method == 'none' else (len(order) + 1) // 2
    fitted = order[:half]
    kept = order[half:]
    least = max(_LEAST_CALIBRATED, 2 * len(self.classes_) if method == 'vector' else 1)
    if method != 'none' and half < least:
      warnings.warn(
        f'calibrate: half of the {len(order)} rows fit the {method} scaling, and so few say '
        f'nothing: give {2 * least} rows or more',
        stacklevel=3,
      )
    scaling = calibration.fit_scaling(scores[fitted], shares[fitted], link, method)
    found = calibration.Calibration(*scaling, np.zeros(0))
    if encoded.kind == 'classes':
      p = np.exp(found.apply(scores[kept], link).astype(np.float64))
      found = dataclasses.replace(found, scores=np.sort(1.0 - (p * shares[kept]).sum(axis=1)))
    self.calibration_ = found
    return self

  @ranges.checked
  def predict_set(self, X: Any, alpha: Annotated[float, '(0, 1)'] = 0.1) -> np.ndarray:
    """Sets of classes, bool [N, K].

    For rows like those of `calibrate`, at least 1 - alpha of the sets contain the label. This
    conformal guarantee holds on average over rows, not for each class.

        >>> from sklearn.datasets import load_iris
        >>> from het_plugin.estimators import DetClassifier
        >>> x, y = load_iris(return_X_y=True)
        >>> det = DetClassifier().fit(x[::2], y[::2]).calibrate(x[1::2], y[1::2], 'none')
        >>> det.predict_set(x, alpha=0.1).shape
        (150, 3)

    Args:
      alpha: the share of sets that may lack the label.

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
    return float(self.model_.temperature(self.params_))

  def __sklearn_tags__(self):
    tags = super().__sklearn_tags__()
    tags.classifier_tags.multi_label = True
    return tags

  def _log_proba(self, features):
    if self.calibration_ is None:
      return self._map('log_prob', features)
    if self.target_ == 'indicator':
      return -np.logaddexp(0.0, -self._scores(features))
    return self._scores(features)

  def _decision(self, features):
    if self.target_ == 'indicator':
      return self._scores(features)
    log_p = self._log_proba(features)
    return log_p[:, 1] - log_p[:, 0] if len(self.classes_) == 2 else log_p

  def _predict(self, features):
    rows = max(1, _SCORES // len(self.classes_))  # whose scores are held together
    starts = range(0, len(features), rows)
    return np.concatenate([self._best(features[i : i + rows]) for i in starts])

  def _best(self, features):
    scores = self._decision(features)
    if self.target_ == 'indicator':
      return (scores > 0).astype(int)
    best = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)
    return self.classes_[best]

  def _raw_scores(self, features):
    """log p, or log odds for an indicator, [N, K]."""
    return self._map('log_odds' if self.target_ == 'indicator' else 'log_prob', features)

  def _scores(self, features):
    """Calibrated log p, or log odds for an indicator, [N, K]."""
    scores = self._raw_scores(features)
    if self.calibration_ is None:
      return scores
    return self.calibration_.apply(scores, self.model_.link)

  def _encoded(self, features, y):
    y = inputs.labels_of_rows(len(features), y)
    return targets.encode(y, self.target, self.classes_, self.target_)

  def _map(self, method, features, target=None):
    model = self.model_
    return fitting.apply(model, method, self.params_, self.mean_, features, target, self.mesh)

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
    if self.model_.hidden_layers:
      raise AttributeError('coef_ and intercept_ exist without hidden layers only')
    head = self.params_['head']
    num_classes = len(self.classes_)
    kernel = head['kernel'].T[:num_classes] / self.temperature_
    bias = head['bias'][:num_classes] / self.temperature_ - kernel @ self.mean_
    if num_classes == 2 and self.target_ != 'indicator':
      return kernel[1:] - kernel[:1], bias[1:] - bias[:1]
    return kernel, bias

  def _check(self):
    ranges.check(self)
    if self.C_noise == 'auto' and not np.isfinite(self.C):
      raise ValueError(
        f"C_noise='auto' chooses a share of C={self.C:g}, which must be finite: give C_noise a "
        'number'
      )
    if self.mesh is not None:
      placement.make_mesh(self.mesh)
    widths = self.hidden_layers
    if np.ndim(widths) != 1 or not all(isinstance(w, Integral) and w > 0 for w in widths):
      raise ValueError(
        f'{type(self).__name__}: hidden_layers={widths!r} must be positive widths, such as (256,)'
      )

  def _opened(self, X, y=None, fit=False):
    """Checked features, and labels as they are."""
    if not fit:
      check_is_fitted(self)
    names = None
    if not isinstance(X, np.ndarray):
      X, y, names = inputs.open_features(X, y)
    if fit or names is None:
      _check_feature_names(self, X, reset=fit)
    if not inputs.is_mapped(X) or (fit and not inputs.streams(X, self.solver)):
      if getattr(X, 'ndim', 2) == 1:
        raise ValueError(f'Reshape your data: X has shape {X.shape}, and must be [N, D]')
      if str(getattr(X, 'dtype', '')) in inputs.HALVES:
        X = inputs.widened(X)
      dtype = [np.float64, np.float32]  # the first is that of integers, which float32 may round
      X = check_array(X, dtype=dtype, ensure_all_finite=False, estimator=self, input_name='X')
      inputs.check_finite(X)
    _check_n_features(self, X, reset=fit)
    if names is not None and fit:
      self.feature_names_in_ = np.array(names, object)
    else:
      check_names(('the fit', 'X'), getattr(self, 'feature_names_in_', None), names)
    return inputs.Features(X), y
