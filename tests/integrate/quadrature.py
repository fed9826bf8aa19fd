"""E[sigmoid(u)] and its derivatives by quadrature in float64: the yardstick of the exact link."""

import numpy as np


def log_expected_sigmoid(mean: float, std: float) -> tuple[float, float, float]:
  """log E[sigmoid(u)], and its derivatives by mean and std, for u ~ N(mean, std^2).

  Trapezoids over all of the integrand, relative to its maximum: they converge exponentially. Every
  integrand is exp of a logarithm, and those of the derivatives are positive times -tanh(u / 2).
  """
  if std == 0.0:
    log_p = -np.logaddexp(0.0, -mean)
    return log_p, np.exp(-np.logaddexp(0.0, mean)), 0.0
  step = min(std / 8, 0.25)
  u = np.arange(mean - 13 * std, mean + std**2 + 13 * std, step)
  log_density = -0.5 * ((u - mean) / std) ** 2 - np.log(std * np.sqrt(2 * np.pi) / step)
  log_on = -np.logaddexp(0.0, -u)
  log_off = -np.logaddexp(0.0, u)

  def log_integral(log_f, sign=1.0):
    top = (log_f + log_density).max()
    total = np.sum(sign * np.exp(log_f + log_density - top))
    return np.sign(total), top + np.log(np.abs(total))

  _, log_q = log_integral(log_off)
  _, log_p = log_integral(log_on)
  if log_p > -0.5:
    log_p = np.log1p(-np.exp(log_q))
  _, log_first = log_integral(log_on + log_off)
  by_mean = np.exp(log_first - log_p)
  if mean == 0.0:  # by symmetry
    return log_p, by_mean, 0.0
  sign, log_second = log_integral(log_on + log_off, -np.tanh(u / 2))
  return log_p, by_mean, sign * std * np.exp(log_second - log_p)
