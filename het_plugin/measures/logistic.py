"""Multinomial logistic regression on standardised features, by scikit-learn.

It has C = 1 / l2 and at most 150 iterations, as in the few-shot evaluation of
uncertainty-baselines (baselines/jft/fewshot_utils.py).
"""

import warnings

import numpy as np

from het_plugin.measures import ridge

_BLOCK_ROWS = 8192
MAX_ITERATIONS = 150


class Logistic:
  """Standardised examples x, any float [N, D], with labels y, int [N], to be fitted at any l2."""

  def __init__(self, x: np.ndarray, y: np.ndarray):
    self._mean, self._scale = ridge.standardisation(x)
    self._x = self._standardised(x)
    self._y = y

  def _standardised(self, x: np.ndarray) -> np.ndarray:
    return (x - self._mean) / self._scale

  def predict(self, x: np.ndarray, l2s: ridge.Strengths) -> np.ndarray:
    """The most probable labels of x [M, D] at L strengths, [L, M]."""
    # These imports take a second, which training without few-shot does not need.
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    if (self._y == self._y[0]).all():  # scikit-learn wants two classes
      return np.full((len(l2s), len(x)), self._y[0])
    with warnings.catch_warnings():
      # The protocol has 150 iterations, whether or not they converge.
      warnings.simplefilter('ignore', ConvergenceWarning)
      models = [LogisticRegression(C=1 / float(l2), max_iter=MAX_ITERATIONS) for l2 in l2s]
      for model in models:
        model.fit(self._x, self._y)
    found = np.empty((len(l2s), len(x)), self._y.dtype)
    for rows in ridge.blocks(len(x), _BLOCK_ROWS):
      z = self._standardised(x[rows])
      found[:, rows] = [model.predict(z) for model in models]
    return found
