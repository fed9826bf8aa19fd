"""Where a fit starts: DET at the classes' frequencies, the other heads at DET with some noise.

A heteroscedastic head that starts at the optimum of DET ends with an objective no worse than DET's
and cannot be caught in a local optimum of the location.
"""

from typing import Any, NamedTuple

import numpy as np

from het_plugin import heads
from het_plugin.estimators import placement
from het_plugin.estimators.directions import noise_directions
from het_plugin.estimators.model import Model

# Standard deviation of the initial noise, in units of the logits. On labels of a HET-XL (see
# studies/known_truth) searches from 0.15 ended on a plateau near DET, whose gradient is below
# 1e-3; those from 0.5 and 1 ended lower, after fewer iterations.
INITIAL_NOISE = 0.5
MIN_SHARE = 1e-6


class Near(NamedTuple):
  """Parameters of DET and of a head with noise, fitted to nearly the same rows or C_noise."""

  det: dict
  noisy: dict


def noisy_start(model: Model, det: dict, rows: Any, seed: int) -> dict:
  """Parameters where the search of a head with noise starts, from those of DET at its optimum and
  rows of the fit, or a sample of them.
  """
  params = model.init(seed, rows.width)
  count = dict(model.noise)['num_factors'] + 1
  directions = noise_directions(model, det, params, rows, count)
  features = model.features(det, placement.whole(rows.some(2**13).x)[0])
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
