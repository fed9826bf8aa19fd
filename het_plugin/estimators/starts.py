"""Where a fit starts: DET at the classes' frequencies, the other heads at DET with some noise.

A heteroscedastic head that starts at the optimum of DET ends with an objective no worse than DET's
and cannot be caught in a local optimum of the location.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from het_plugin import heads
from het_plugin.estimators import lbfgs
from het_plugin.estimators.directions import noise_directions
from het_plugin.estimators.model import Model

# Standard deviation of the initial noise, in units of the logits. On labels of a HET-XL (see
# studies/known_truth) searches from 0.15 ended on a plateau near DET, whose gradient is below
# 1e-3; those from 0.5 and 1 ended lower, after fewer iterations.
INITIAL_NOISE = 0.5
MIN_SHARE = 1e-6
TOLERANCE = 1e-6  # nats of the objective


class Near(NamedTuple):
  """Parameters of DET and of a head with noise, fitted to nearly the same rows or C_noise."""

  det: dict
  noisy: dict


def fit(
  search: Callable[[Model, dict], lbfgs.FitResult],
  model: Model,
  num_features: int,
  class_shares: np.ndarray,
  sample: Callable[[], Any],
  seed: int,
  det_fit: lbfgs.FitResult | None,
  grow: Callable[[Model, dict], lbfgs.FitResult] | None = None,
  near: Near | None = None,
) -> lbfgs.FitResult:
  """Fits a model over D features.

  Args:
    search: minimises the objective of a model from given parameters.
    class_shares: [K] frequencies of the classes.
    sample: gives rows of the fit, or a sample of them, for `noisy_start`.
    det_fit: DET's, where the noise starts; None computes it.
    grow: a short search with less regularisation of the noise, before that of the noise. Under the
      full one, noise in slightly wrong directions vanishes before it has turned to better ones.
    near: where the searches start instead; nothing grows then.
  """
  det = model.deterministic
  if det_fit is None:
    first = near.det if near else det_start(det, det.init(seed, num_features), class_shares)
    det_fit = search(det, first)
  if model.head == 'det':
    return det_fit
  start = near.noisy if near else noisy_start(model, det_fit.params, sample(), seed)
  num_iterations = det_fit.num_iterations
  if grow is not None and near is None:
    grown = grow(model, start)
    start = grown.params
    num_iterations = num_iterations + grown.num_iterations
  noisy = search(model, start)
  num_iterations += noisy.num_iterations
  if not noisy.objective <= det_fit.objective + TOLERANCE:
    noisy = dataclasses.replace(det_fit, params=without_noise(start, det_fit.params))
  return dataclasses.replace(noisy, num_iterations=num_iterations)


def noisy_start(model: Model, det: dict, rows: Any, seed: int) -> dict:
  """Parameters where the search of a head with noise starts, from those of DET at its optimum and
  rows of the fit, or a sample of them.
  """
  params = model.init(seed, rows.width)
  count = dict(model.noise)['num_factors'] + 1
  directions = noise_directions(model, det, params, rows, count)
  features = model.features(det, rows.some(2**13).x[0])
  feature_size = max(float(np.sqrt(np.mean(np.square(features)))), 1e-6)
  noise = heads.noise_in_directions(
    params['head']['covariance'], INITIAL_NOISE * directions, feature_size
  )
  return {**det, 'head': {**params['head'], **det['head'], 'covariance': noise}}


def det_start(model: Model, params: dict, class_shares: np.ndarray) -> dict:
  """W = 0, and biases that give the frequencies of the classes."""
  shares = np.clip(class_shares, MIN_SHARE, 1 - MIN_SHARE)
  bias = np.log(shares) - (np.log1p(-shares) if model.link == 'sigmoid' else np.log(shares).mean())
  head = params['head']
  padded = np.zeros_like(head['bias'])
  padded[: len(bias)] = bias * (model.tau or 1.0)
  return {**params, 'head': {**head, 'kernel': np.zeros_like(head['kernel']), 'bias': padded}}


def without_noise(params: dict, det: dict) -> dict:
  """The parameters of DET with as little noise as the head with the initial `params` can have."""
  noise = heads.least_noise(params['head']['covariance'])
  return {**det, 'head': {**params['head'], **det['head'], 'covariance': noise}}
