"""The temperature tau of link(logits / tau).

It is fixed, learned within a range (appendix K), or learned as the scale of similarities for
contrastive learning (appendix N.2).
"""

import math
from typing import TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from het_plugin.heads.linear import parameter
from het_plugin.system import ranges
from het_plugin.system.ranges import Positive

_Module = TypeVar('_Module', bound=nn.Module)


class FixedTemperature(nn.Module):
  """A constant tau without parameters.

  Attributes:
    tau: the temperature, positive and finite.
  """

  tau: Positive = 1.0

  @property
  def tau_0(self) -> float:
    return self.tau

  @nn.nowrap
  def num_params(self) -> int:
    return 0

  @nn.nowrap
  def check(self) -> None:
    """Raises ValueError if tau is not positive and finite."""
    ranges.check(self)

  def __call__(self) -> jax.Array:
    self.check()
    return jnp.float32(self.tau)


class LearnedTemperature(nn.Module, kw_only=True):
  """tau(t) = (tau_max - tau_min) sigmoid(t) + tau_min with one trainable scalar t (eq. 16).

      >>> import jax
      >>> from het_plugin.heads import LearnedTemperature
      >>> tau = LearnedTemperature(initial_tau=1.0)
      >>> round(float(tau.apply(tau.init(jax.random.key(0)))), 3)
      1.0

  Attributes:
    tau_min: lower end of the range, positive. 0.05 in the paper.
    tau_max: upper end of the range. 5.0 in the paper.
    initial_tau: tau_0, within the range; None is the midpoint (t = 0; 2.525 in the paper).
  """

  tau_min: float = 0.05
  tau_max: float = 5.0
  initial_tau: float | None = None

  @property
  def tau_0(self) -> float:
    return (self.tau_min + self.tau_max) / 2 if self.initial_tau is None else self.initial_tau

  @nn.nowrap
  def num_params(self) -> int:
    return 1

  @nn.nowrap
  def check(self) -> None:
    """Raises ValueError if the range is empty, not positive or finite, or does not hold tau_0."""
    if not 0 < self.tau_min < self.tau_max < math.inf:
      raise ValueError(
        f'LearnedTemperature.tau_min={self.tau_min} and tau_max={self.tau_max} must satisfy '
        '0 < tau_min < tau_max, both finite'
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
    t = parameter('t', start, (), ())
    return (self.tau_max - self.tau_min) * jax.nn.sigmoid(t) + self.tau_min


class LogitScale(nn.Module):
  """tau(t) = exp(-t) with one trainable scalar t: the temperature of contrastive learning.

  In CLIP (https://arxiv.org/abs/2103.00020, sections 2.3 and 2.5) and LiT
  (https://arxiv.org/abs/2111.07991) the temperature is a factor of the similarities: logits =
  exp(t) <alpha, beta>, so exp(t) = 1 / tau. The paper's initial values of 10 (DET) and 3 (HET-XL,
  appendix N.2) are `initial_scale`, that is tau_0 = 1/10 and 1/3.

  Attributes:
    initial_scale: exp(t) at the start, positive.
  """

  initial_scale: Positive = 10.0

  @property
  def tau_0(self) -> float:
    return 1.0 / self.initial_scale

  @nn.nowrap
  def num_params(self) -> int:
    return 1

  @nn.nowrap
  def check(self) -> None:
    """Raises ValueError if the scale is not positive and finite."""
    ranges.check(self)

  @nn.compact
  def __call__(self) -> jax.Array:
    self.check()
    start = nn.initializers.constant(math.log(self.initial_scale))
    t = parameter('t', start, (), ())
    return jnp.exp(-t)


def owned(temperature: _Module | None, default: _Module) -> _Module:
  """A copy of the temperature, or of `default` if it is None, without a parent module.

  A head takes this copy in `__post_init__`. Otherwise, if the head is built inside another module's
  `nn.compact`, linen would place t beside the head and not below it.
  """
  temperature = default if temperature is None else temperature
  if not isinstance(temperature, nn.Module):
    raise ValueError(
      f'temperature={temperature!r} must be a module: FixedTemperature(tau) or LearnedTemperature()'
    )
  return temperature.clone(parent=None)
