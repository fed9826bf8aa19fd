"""Predictions of rows by fits to the other folds, for labels of every kind."""

from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.model_selection import check_cv
from sklearn.pipeline import Pipeline

from het_plugin.estimators import inputs, targets
from het_plugin.estimators.files import check_kind

METHODS = ('predict', 'predict_proba', 'predict_log_proba', 'predict_clean_proba')


def cross_val_predict(
  estimator: Any, X: Any, y: Any = None, *, cv: Any = 5, method: str = 'predict_proba'
) -> np.ndarray:
  """Predicts each row by a fit to the folds that it is not in.

  scikit-learn's function of this name numbers the values of every column of a y [N, L], so that
  votes and shares are others when `fit` sees them. This one does not.

      >>> from sklearn.datasets import load_iris
      >>> from het_plugin import estimators
      >>> x, y = load_iris(return_X_y=True)
      >>> p = estimators.cross_val_predict(estimators.DetClassifier(), x, y)
      >>> p.shape, bool((p.argmax(axis=1) == y).mean() > 0.95)
      ((150, 3), True)

  Args:
    estimator: a head, or a pipeline that ends with one. It stays as it is.
    X: float [N, D], or a file of features, as in `fit`.
    y: labels as in `fit`; None takes those of the file.
    cv: number of folds, with the same shares of the classes (of the first vote, or of the most
      probable class), or a splitter of scikit-learn.
    method: one of `METHODS`.

  Returns:
    [N], or float32 [N, K] with columns in the order of all classes of y.

  Raises:
    ValueError: the estimator is of another kind, the method is unknown, y is wrong, or the folds do
      not have each row once.
  """
  is_pipeline = isinstance(estimator, Pipeline)
  head = estimator[-1] if is_pipeline else estimator
  check_kind(head)
  if method not in METHODS or (is_pipeline and method == 'predict_clean_proba'):
    raise ValueError(f'method={method!r} is unknown: choose one of {", ".join(METHODS)}')
  X, y, _ = inputs.open_features(X, y)
  X = X if hasattr(X, 'shape') else np.asarray(X)
  encoded = targets.encode(inputs.labels_of_rows(len(X), y), head.target)
  folds = check_cv(cv, encoded.main_class(), classifier=True)
  rows = np.arange(len(encoded.values))
  parts = []
  held_out = []
  for fitted, others in folds.split(rows, encoded.main_class()):
    done = clone(estimator).fit(_some(X, fitted), encoded[fitted])
    parts.append(getattr(done, method)(_some(X, others)))
    held_out.append(others)
  place = np.concatenate(held_out)
  if not np.array_equal(np.sort(place), rows):
    raise ValueError(f'cv={cv!r} must hold out each of the {len(rows)} rows once')
  return np.concatenate(parts)[np.argsort(place)]


def _some(x: Any, rows: np.ndarray) -> Any:
  """Rows of an array, or of a data frame, which a pipeline may choose columns of by name."""
  return x.iloc[rows] if hasattr(x, 'iloc') else x[rows]
