"""Where a fit starts: DET at the classes' frequencies, the other heads at DET with little noise.

A heteroscedastic head that starts at the optimum of DET ends with an objective no worse than DET's
and cannot be caught in a local optimum of the location.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from het_plugin.estimators import lbfgs, objective
from het_plugin.estimators.model import Model

# Standard deviation of the initial noise, in units of the logits.
INITIAL_NOISE = 0.3
MIN_SHARE = 1e-6
TOLERANCE = 1e-6  # nats of the objective
_NO_NOISE = -16.0  # softplus of it is 1e-7


def fit(
  model: Model, rows: objective.Rows, class_shares: np.ndarray, seed: int, **settings
) -> lbfgs.Fit:
  """Fits a model.

  Args:
    model: the model.
    rows: rows of the fit.
    class_shares: [K] frequencies of the classes.
    seed: seed of hidden layers and noise.
    **settings: tol, max_iter and progress of `lbfgs.minimise`.
  """
  num_features = rows.x.shape[-1]
  det = dataclasses.replace(model, head='det', noise=())
  params = det_start(det, det.init(seed, num_features), class_shares)
  whitening = objective.whitening_of(det, None, rows, class_shares)
  fitted = lbfgs.minimise(det, params, rows, whitening, **settings)
  if model.head == 'det':
    return fitted
  whitening = objective.whitening_of(det, fitted.params, rows)
  start = with_noise(model, model.init(seed, num_features), fitted.params, rows.x[0])
  noisy = lbfgs.minimise(model, start, rows, whitening, **settings)
  if noisy.objective > fitted.objective + TOLERANCE:
    start = without_noise(start, fitted.params)
    noisy = lbfgs.minimise(model, start, rows, whitening, **settings)
  return dataclasses.replace(noisy, num_iterations=fitted.num_iterations + noisy.num_iterations)


def det_start(model: Model, params: dict, class_shares: np.ndarray) -> dict:
  """W = 0, and biases that give the frequencies of the classes."""
  shares = np.clip(class_shares, MIN_SHARE, 1 - MIN_SHARE)
  bias = np.log(shares) - (np.log1p(-shares) if model.link == 'sigmoid' else np.log(shares).mean())
  head = params['head']
  bias = jnp.zeros_like(head['bias']).at[: len(bias)].set(bias * (model.tau or 1.0))
  return {**params, 'head': {**head, 'kernel': jnp.zeros_like(head['kernel']), 'bias': bias}}


def with_noise(model: Model, params: dict, det: dict, x: jax.Array) -> dict:
  """DET's parameters with noise of standard deviation about `INITIAL_NOISE` on some rows x."""
  size = float(jnp.sqrt(jnp.mean(jnp.square(model.features(det, x)))))
  noise = INITIAL_NOISE
  if model.head == 'het_xl':  # W multiplies the noise by the length of its columns
    kernel = params['head'].get('noise_kernel', det['head']['kernel'])
    noise /= float(jnp.sqrt(jnp.square(kernel).sum() / kernel.shape[1])) + 1e-3
  covariance = dict(params['head']['covariance'])
  covariance['d_kernel'] = jnp.zeros_like(covariance['d_kernel'])
  covariance['d_bias'] = jnp.full_like(covariance['d_bias'], math.log(math.expm1(noise)))
  if 'J' in covariance:  # v and J share the size of their product
    covariance['v_kernel'] *= math.sqrt(noise) / size
    covariance['J'] *= math.sqrt(noise)
  else:
    covariance['V_kernel'] *= noise / size
  return {**det, 'head': {**params['head'], **det['head'], 'covariance': covariance}}


def without_noise(params: dict, det: dict) -> dict:
  """The same parameters with as little noise as the head can have."""
  covariance = {name: jnp.zeros_like(x) for name, x in params['head']['covariance'].items()}
  covariance['d_bias'] += _NO_NOISE
  return {**det, 'head': {**params['head'], **det['head'], 'covariance': covariance}}
