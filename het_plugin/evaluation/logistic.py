"""Multinomial logistic regression on standardised features: scikit-learn's with C = 1 / l2 and at
most 150 iterations, as uncertainty-baselines evaluates few-shot (baselines/jft/fewshot_utils.py).
"""

import dataclasses
import warnings
from collections.abc import Sequence

import numpy as np
import scipy.special

from het_plugin.evaluation import calibration, ridge

MAX_ITERATIONS = 150


@dataclasses.dataclass(frozen=True, eq=False)
class Logistic:
  """A set of standardised examples that can be fitted at any l2.

  Attributes:
    classes: int64 [K], the labels seen, ascending.
    mean, scale: float64 [D]; see `ridge.Ridge`.
    x: float64 [N, D], standardised.
    y: int [N].
  """

  classes: np.ndarray
  mean: np.ndarray
  scale: np.ndarray
  x: np.ndarray
  y: np.ndarray

  def log_prob(self, x: np.ndarray, l2: float) -> np.ndarray:
    """Log-probabilities of features x [M, D], float64 [M, K], columns in order of `classes`."""
    if len(self.classes) == 1:
      return np.zeros((len(x), 1))
    # These imports take a second, which training without few-shot does not need.
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    with warnings.catch_warnings():
      # The protocol says 150 iterations, whether or not they converge.
      warnings.simplefilter('ignore', ConvergenceWarning)
      fitted = LogisticRegression(C=1 / float(l2), max_iter=MAX_ITERATIONS).fit(self.x, self.y)
    scores = fitted.decision_function((x - self.mean) / self.scale)
    if scores.ndim == 1:  # two classes: scikit-learn gives the score of the second
      scores = np.stack([np.zeros_like(scores), scores], axis=1)
    return scipy.special.log_softmax(scores, axis=1)

  def predict(self, x: np.ndarray, l2s: Sequence[float]) -> np.ndarray:
    """The most probable labels of x [M, D] at L strengths, int64 [L, M]."""
    return np.stack([self.classes[self.log_prob(x, l2).argmax(axis=1)] for l2 in l2s])

  def score(self, x: np.ndarray, y: np.ndarray, l2: float) -> tuple[np.ndarray, float, float]:
    """Scores labelled rows x [M, D], y int [M].

    Returns:
      Whether each row is classified correctly, bool [M]; the mean negative log-likelihood in nats
      and the expected calibration error over the rows whose class the model knows, NaN without any.
    """
    log_prob = self.log_prob(x, l2)
    best = log_prob.argmax(axis=1)
    correct = self.classes[best] == y
    known = np.flatnonzero(np.isin(y, self.classes))
    if not known.size:
      return correct, np.nan, np.nan
    at_label = log_prob[known, np.searchsorted(self.classes, y[known])]
    confidence = np.exp(log_prob.max(axis=1))
    ece = calibration.reliability(confidence[known], correct[known]).ece
    return correct, float(-at_label.mean()), ece


def standardise(x: np.ndarray, y: np.ndarray) -> Logistic:
  """Standardises examples x, any float [N, D], with labels y, int [N]; N >= 1."""
  mean, scale = ridge.standardisation(x)
  return Logistic(np.unique(y).astype(np.int64), mean, scale, (x - mean) / scale, y)
