"""The temperature tau of link(logits / tau): fixed, or learned inside a range (appendix K)."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import partitioning


class FixedTemperature(nn.Module):
  """A constant tau, without a parameter.

  Attributes:
    tau: the temperature, positive.
  """

  tau: float = 1.0

  @property
  def tau_0(self) -> float:
    return self.tau

  def num_params(self) -> int:
    return 0

  def check(self) -> None:
    """Raises ValueError where tau is not positive."""
    if not self.tau > 0:
      raise ValueError(f'FixedTemperature.tau={self.tau} must be positive')

  def __call__(self) -> jax.Array:
    self.check()
    return jnp.float32(self.tau)


class LearnedTemperature(nn.Module):
  """tau(t) = (tau_max - tau_min) sigmoid(t) + tau_min with one trainable scalar t (eq. 16).

  Attributes:
    tau_min: lower end of the range, positive. 0.05 in the paper.
    tau_max: upper end of the range. 5.0 in the paper.
    initial_tau: tau_0, inside the range; None is its midpoint (t = 0; 2.525 in the paper).
  """

  tau_min: float = 0.05
  tau_max: float = 5.0
  initial_tau: float | None = None

  @property
  def tau_0(self) -> float:
    return (self.tau_min + self.tau_max) / 2 if self.initial_tau is None else self.initial_tau

  def num_params(self) -> int:
    return 1

  def check(self) -> None:
    """Raises ValueError where the range is empty, not positive, or does not contain tau_0."""
    if not 0 < self.tau_min < self.tau_max:
      raise ValueError(
        f'LearnedTemperature.tau_min={self.tau_min} and tau_max={self.tau_max} must satisfy '
        '0 < tau_min < tau_max'
      )
    if not self.tau_min < self.tau_0 < self.tau_max:
      raise ValueError(
        f'LearnedTemperature.initial_tau={self.tau_0} must lie strictly between '
        f'tau_min={self.tau_min} and tau_max={self.tau_max}'
      )

  @nn.compact
  def __call__(self) -> jax.Array:
    self.check()
    share = (self.tau_0 - self.tau_min) / (self.tau_max - self.tau_min)
    start = nn.initializers.constant(math.log(share) - math.log1p(-share))
    t = partitioning.param_with_axes('t', start, (), jnp.float32, axes=())
    return (self.tau_max - self.tau_min) * jax.nn.sigmoid(t) + self.tau_min
