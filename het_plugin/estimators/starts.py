"""Where a fit starts: DET at the classes' frequencies, the other heads at DET with some noise.

A heteroscedastic head that starts at the optimum of DET ends with an objective no worse than DET's
and cannot be caught in a local optimum of the location.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from het_plugin.estimators import lbfgs, objective
from het_plugin.estimators.directions import noise_directions
from het_plugin.estimators.model import Model

# Standard deviation of the initial noise, in units of the logits. On labels of a HET-XL (see
# benchmarks/known_truth.py) searches from 0.15 ended on a plateau near DET, whose gradient is below
# 1e-3; those from 0.5 and 1 ended lower, after fewer iterations.
INITIAL_NOISE = 0.5
MIN_SHARE = 1e-6
TOLERANCE = 1e-6  # nats of the objective
_NO_NOISE = -16.0  # softplus of it is 1e-7


def fit(
  search: Callable[[Model, dict], lbfgs.Fit],
  model: Model,
  num_features: int,
  class_shares: np.ndarray,
  sample: Callable[[], objective.Rows],
  seed: int,
  det_fit: lbfgs.Fit | None,
) -> lbfgs.Fit:
  """Fits a model over D features.

  Args:
    search: minimises the objective of a model from given parameters.
    class_shares: [K] frequencies of the classes.
    sample: gives rows of the fit, or a sample of them, for `noisy_start`.
    det_fit: DET's, where the noise starts; None computes it.
  """
  det = model.deterministic
  if det_fit is None:
    det_fit = search(det, det_start(det, det.init(seed, num_features), class_shares))
  if model.head == 'det':
    return det_fit
  start = noisy_start(model, det_fit.params, sample(), seed)
  noisy = search(model, start)
  num_iterations = det_fit.num_iterations + noisy.num_iterations
  if not noisy.objective <= det_fit.objective + TOLERANCE:
    noisy = dataclasses.replace(det_fit, params=without_noise(start, det_fit.params))
  return dataclasses.replace(noisy, num_iterations=num_iterations)


def noisy_start(model: Model, det: dict, rows: objective.Rows, seed: int) -> dict:
  """Parameters where the search of a head with noise starts, from those of DET at its optimum and
  rows of the fit, or a sample of them.
  """
  params = model.init(seed, rows.x.shape[-1])
  count = dict(model.noise)['num_factors'] + 1
  directions = noise_directions(model, det, params, rows, count)
  features = model.features(det, rows.x[0])
  feature_size = max(float(np.sqrt(np.mean(np.square(features)))), 1e-6)
  return with_noise(params, det, INITIAL_NOISE * directions, feature_size)


def det_start(model: Model, params: dict, class_shares: np.ndarray) -> dict:
  """W = 0, and biases that give the frequencies of the classes."""
  shares = np.clip(class_shares, MIN_SHARE, 1 - MIN_SHARE)
  bias = np.log(shares) - (np.log1p(-shares) if model.link == 'sigmoid' else np.log(shares).mean())
  head = params['head']
  padded = np.zeros_like(head['bias'])
  padded[: len(bias)] = bias * (model.tau or 1.0)
  return {**params, 'head': {**head, 'kernel': np.zeros_like(head['kernel']), 'bias': padded}}


def with_noise(params: dict, det: dict, directions: np.ndarray, feature_size: float) -> dict:
  """DET's parameters with noise of the size of `directions`, about the same for all x.

  Args:
    params: initial parameters of the model.
    det: those of DET at its optimum.
    directions: [R + 1, Q] (`noise_directions`), of J or V(x). The last one gives d its pattern: an
      equal d of all classes would change no probability.
    feature_size: root of the mean square of the features that the head takes.
  """
  covariance = dict(params['head']['covariance'])
  factors = directions[:-1] / math.sqrt(len(directions) - 1)
  size = float(np.sqrt(np.mean(np.square(factors))))
  d = size * np.exp(0.5 * directions[-1] / np.abs(directions[-1]).max())
  covariance['d_kernel'] = np.zeros_like(covariance['d_kernel'])
  covariance['d_bias'] = np.asarray(np.log(np.expm1(d)), np.float32)
  if 'J' in covariance:  # v and J share the size of their product
    root = math.sqrt(size)
    covariance['v_kernel'] = (0.1 * root / feature_size) * covariance['v_kernel']
    covariance['v_bias'] = np.full_like(covariance['v_bias'], root)
    covariance['J'] = np.asarray(factors / root, np.float32)
  else:
    covariance['V_kernel'] = (0.1 * size / feature_size) * covariance['V_kernel']
    covariance['V_bias'] = np.asarray(factors, np.float32)
  return {**det, 'head': {**params['head'], **det['head'], 'covariance': covariance}}


def without_noise(params: dict, det: dict) -> dict:
  """The same parameters with as little noise as the head can have."""
  covariance = {name: np.zeros_like(x) for name, x in params['head']['covariance'].items()}
  covariance['d_bias'] += np.float32(_NO_NOISE)
  return {**det, 'head': {**params['head'], **det['head'], 'covariance': covariance}}
