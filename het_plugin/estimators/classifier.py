"""What the four estimators share: fit, the predictive distribution, scikit-learn's conventions."""

import functools
from typing import Any

import jax
import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from het_plugin.estimators import objective, starts, targets
from het_plugin.estimators.model import Model

# Fits of fewer entries than this merge equal rows, so that neither repeating a row instead of
# giving it a weight, nor the order of the rows, changes a bit of the result.
MERGED_ENTRIES = 2**16
TAU_GRID = (0.25, 0.5, 1.0, 2.0, 4.0)


class HeadClassifier(ClassifierMixin, BaseEstimator):
  """Base of the estimators. A subclass names its head and the fields of it that it takes."""

  _head: str
  _noise: tuple[str, ...] = ()

  def fit(self, X: Any, y: Any, sample_weight: Any = None) -> 'HeadClassifier':  # noqa: N803
    """Fits the head.

    Args:
      X: any float [N, D].
      y: class ids or strings [N]; an indicator of several labels [N, K]; votes [N, L], -1 (or '')
        where one is missing; or probabilities [N, K]. See `target`.
      sample_weight: [N], at least 0; None is 1 for each.

    Raises:
      ValueError: a setting, X or y is wrong, or there is one class only.
    """
    self._check()
    X, y = self._validated(X, y, fit=True)
    encoded = targets.encode(y, self.target)
    weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    self.classes_, self.target_ = encoded.classes, encoded.kind
    if len(self.classes_) < 2 and encoded.kind != 'indicator':
      raise ValueError(
        f'{type(self).__name__} needs at least 2 classes; y has one class only, '
        f'{self.classes_[0].item()!r}'
      )
    seed = int(check_random_state(self.random_state).randint(2**31 - 1))
    self.tau_grid_nll_ = None
    tau = None if self.tau == 'learned' else self.tau
    if self.tau == 'validation':
      tau = self._choose_tau(X, encoded, weight, seed)
    self._fit(tau, X, encoded, weight, seed)
    return self

  def predict_log_proba(self, X: Any) -> np.ndarray:  # noqa: N803
    """log p(k | x), float32 [N, K]; of an indicator log p(y_k = 1 | x)."""
    check_is_fitted(self)
    return self._map(_log_prob, X)

  def predict_proba(self, X: Any) -> np.ndarray:  # noqa: N803
    """p(k | x), float32 [N, K], columns in order of `classes_`."""
    return np.exp(self.predict_log_proba(X))

  def decision_function(self, X: Any) -> np.ndarray:  # noqa: N803
    """Scores float32 [N, K], the largest of which is the prediction: log p(k | x), or for an
    indicator the log odds of each class; for two classes [N], the log odds of the second.
    """
    check_is_fitted(self)
    if self.target_ == 'indicator':
      return self._map(_log_odds, X)
    log_p = self.predict_log_proba(X)
    return log_p[:, 1] - log_p[:, 0] if len(self.classes_) == 2 else log_p

  def predict(self, X: Any) -> np.ndarray:  # noqa: N803
    """The most probable classes [N]; for an indicator whether each is more likely on than off."""
    scores = self.decision_function(X)
    if self.target_ == 'indicator':
      return (scores > 0).astype(int)
    best = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)
    return self.classes_[best]

  def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:  # noqa: N803
    """Accuracy, as scikit-learn's; for votes and probabilities the mean share of the prediction."""
    predicted = self.predict(X)
    if self.target_ in ('classes', 'indicator'):
      return accuracy_score(y, predicted, sample_weight=sample_weight)
    shares = self._encoded(y).distribution()
    found = shares[np.arange(len(shares)), np.searchsorted(self.classes_, predicted)]
    return float(np.average(found, weights=sample_weight))

  def nll(self, X: Any, y: Any) -> np.ndarray:  # noqa: N803
    """Negative log-likelihood of each example, float32 [N], nats (of an indicator: summed over the
    classes; of votes and probabilities: averaged with the shares as weights).
    """
    return self._map(_nll, X, self._encoded(y).values)

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

  def _model(self, num_classes: int, link: str, tau: float | None) -> Model:
    return Model(
      head=self._head,
      num_classes=num_classes,
      link=link,
      tau=tau,
      hidden_layers=tuple(self.hidden_layers),
      num_samples=getattr(self, 'num_samples', 1),
      noise=tuple((name, getattr(self, name)) for name in self._noise),
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
    name = type(self).__name__
    if not self.C > 0:
      raise ValueError(f'{name}: C={self.C} must be positive')
    if not (self.tau in ('learned', 'validation') if isinstance(self.tau, str) else self.tau > 0):
      raise ValueError(f"{name}: tau={self.tau!r} must be 'learned', 'validation' or positive")
    if self.max_iter < 1 or not self.tol > 0:
      raise ValueError(f'{name}: max_iter={self.max_iter} and tol={self.tol} must be positive')
    if any(width < 1 for width in self.hidden_layers):
      raise ValueError(f'{name}: hidden_layers={self.hidden_layers} must be positive widths')

  def _validated(self, X, y=None, fit=False):  # noqa: N803
    if getattr(getattr(X, 'dtype', None), 'name', '') in ('bfloat16', 'float16'):
      X = np.asarray(X).astype(np.float32)  # noqa: N806
    dtype = [np.float32, np.float64]
    if not fit:
      return validate_data(self, X, dtype=dtype, reset=False)
    X = validate_data(self, X, dtype=dtype)  # noqa: N806
    if y is None:
      raise ValueError(f'{type(self).__name__} requires y to be passed, but the target y is None')
    y = np.asarray(y)
    if y.ndim not in (1, 2) or len(y) != len(X):
      raise ValueError(
        f'y has shape {y.shape}; it must be [{len(X)}] or [{len(X)}, ...], as X has {len(X)} rows: '
        'inconsistent numbers of samples'
      )
    return X, y

  def _encoded(self, y):
    return targets.encode(np.asarray(y), self.target, self.classes_, self.target_)

  def _fit(self, tau, X, encoded, weight, seed):  # noqa: N803
    keep = weight > 0
    x, encoded, weight = X[keep], encoded.rows(keep), weight[keep]
    if not len(x):
      raise ValueError('all sample weights are 0')
    shares, values = encoded.class_shares(weight), encoded.values
    if x.size <= MERGED_ENTRIES:
      x, values, weight = _merged(x, values, weight)
    model = self._model(len(encoded.classes), encoded.link, tau)
    self.mean_ = np.average(x, axis=0, weights=weight)
    rows = objective.make_rows(model, x, self.mean_, values, weight, self.C)
    settings = {'tol': self.tol, 'max_iter': self.max_iter, 'progress': self.progress}
    fit = starts.fit(model, rows, shares, seed, **settings)
    self.model_, self.params_ = model, fit.params
    self.n_iter_, self.objective_, self.gradient_ = fit.num_iterations, fit.objective, fit.gradient

  def _choose_tau(self, X, encoded, weight, seed):  # noqa: N803
    """The tau of `TAU_GRID` whose fit to nine tenths of the rows is best on the rest."""
    train, held_out = train_test_split(
      np.flatnonzero(weight > 0), test_size=self.validation_fraction, random_state=seed
    )
    self.tau_grid_nll_ = {}
    for tau in TAU_GRID:
      self._fit(tau, X[train], encoded.rows(train), weight[train], seed)
      nll = self._map(_nll, X[held_out], encoded.values[held_out])
      self.tau_grid_nll_[tau] = float(np.average(nll, weights=weight[held_out]))
    return min(self.tau_grid_nll_, key=self.tau_grid_nll_.get)

  def _map(self, function, X, target=None):  # noqa: N803
    """`function` of rows, in blocks of one shape."""
    X = self._validated(X)  # noqa: N806
    size = min(objective.block_rows(self.model_, len(X)), 4096)
    found = []
    for start in range(0, len(X), size):
      block = [X[start : start + size] - self.mean_]
      if target is not None:
        block.append(target[start : start + size])
      padding = size - len(block[0])
      block = [np.pad(x, [(0, padding), *[(0, 0)] * (x.ndim - 1)]) for x in block]
      found.append(function(self.model_, self.params_, *map(_narrow, block)))
    return np.concatenate([np.asarray(x) for x in found])[: len(X)]


def _merged(x, values, weight):
  """Each distinct row once, with the sum of its weights, in ascending order."""
  both = np.concatenate([x, values.astype(np.float64)], axis=1)
  _, first, which = np.unique(both, axis=0, return_index=True, return_inverse=True)
  return x[first], values[first], np.bincount(which.ravel(), weight)


def _narrow(x):
  return np.asarray(x, np.float32) if x.dtype.kind == 'f' else x


@functools.partial(jax.jit, static_argnums=0)
def _log_prob(model, params, x):
  return model.log_prob(params, x)


@functools.partial(jax.jit, static_argnums=0)
def _log_odds(model, params, x):
  return model.log_odds(params, x)


@functools.partial(jax.jit, static_argnums=0)
def _nll(model, params, x, target):
  return model.nll(params, x, target)
