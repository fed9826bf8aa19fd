"""The low-rank noise of a heteroscedastic head as a function of phi (section 2.2, appendix L)."""

import math
from collections.abc import Mapping
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from het_plugin.heads.linear import affine, parameter
from het_plugin.integrate import LowRank
from het_plugin.system import ranges
from het_plugin.system.ranges import Count, Positive

Parametrization = Literal['efficient', 'full']
Remainder = Literal['rank_one', 'diag']
MIN_DIAG = 1e-3  # keeps d(x) off zero, as the reference implementation does
# Of noise that starts in given directions: the part of V(x) that depends on x.
_INITIAL_VARIATION = 0.1
_NO_NOISE = -16.0  # softplus of it is 1e-7


class LowRankCovariance(nn.Module):
  """Parametrises the noise eps in R^Q by factors V(x) [R, Q] and a remainder d(x) [Q].

    efficient  V(x) = J o (1_R v(x)^T), v(x) = K_2^T phi + b_2    2 (D + 1) Q + R Q parameters
    full       V(x) = C phi + c                                   (R + 1) (D + 1) Q parameters
    both       d(x) = softplus(K_1^T phi + b_1) + 1e-3            (included in the counts)

  Attributes:
    noise_dim: Q.
    noise_axis: logical axis of the dimension Q: 'vocab' for Q = K, else 'noise'.
    num_factors: R >= 1.
    parametrization: 'efficient' or 'full'.
    remainder: 'rank_one' adds d(x) d(x)^T (eq. 18), 'diag' adds diag(d(x)^2) (eq. 17, with d the
      standard deviation).
    factor_bias: gives J a bias b, as the reference implementation does. The noise then has the mean
      b o v(x), which belongs to the location. Only for 'efficient'.
    initial_noise_scale: initial size of the noise relative to the reference's initialisers (1.0:
      about as large as the pre-logits). Short runs do better with 0.1, see
      studies/paper/initial_noise.gin.
    dtype: compute type of the matrix products; results are float32.
  """

  noise_dim: Count
  noise_axis: str
  num_factors: Count = 50
  parametrization: Parametrization = 'efficient'
  remainder: Remainder = 'rank_one'
  factor_bias: bool = False
  initial_noise_scale: Positive = 1.0
  dtype: DTypeLike = jnp.float32

  @nn.nowrap
  def check(self, owner: str) -> None:
    """Raises ValueError if an attribute is out of range; `owner` is the head named in it."""
    ranges.check(self, owner)
    if self.factor_bias and self.parametrization == 'full':
      raise ValueError(
        f"{owner}.factor_bias=True needs parametrization='efficient': the full V(x) has a bias of "
        'its own'
      )

  @nn.nowrap
  def num_params(self, pre_logits_dim: int, noise_dim: int) -> int:
    """Number of parameters for Q = noise_dim; `self.noise_dim` may be larger by padding."""
    per_dim = {
      'efficient': 2 * (pre_logits_dim + 1) + self.num_factors + self.factor_bias,
      'full': (self.num_factors + 1) * (pre_logits_dim + 1),
    }
    return per_dim[self.parametrization] * noise_dim

  @nn.compact
  def __call__(self, phi: jax.Array) -> tuple[LowRank, jax.Array | None]:
    """phi [B, D] -> the noise and, with `factor_bias`, its mean b o v(x), float32 [B, Q]."""
    self.check(type(self).__name__)
    dim = self.noise_dim
    axis = self.noise_axis
    factors = self.num_factors
    scale_init = self.initial_noise_scale
    # softplus(diag_bias) = scale_init log 2, and the reference starts at softplus(0) = log 2.
    diag_bias = math.log(math.expm1(scale_init * math.log(2.0)))
    diag = affine(self, 'd', phi, (dim,), (axis,), self.dtype, initial_bias=diag_bias)  # [B, Q]
    diag = jax.nn.softplus(diag) + MIN_DIAG
    if self.parametrization == 'full':
      shape = (factors, dim)
      axes = ('factors', axis)
      loading = affine(self, 'V', phi, shape, axes, self.dtype, scale_init)  # [B, R, Q]
      return LowRank(None, loading, diag, self.remainder), None
    scale = affine(self, 'v', phi, (dim,), (axis,), self.dtype, scale_init)  # [B, Q]
    loading = parameter('J', nn.initializers.lecun_normal(), (factors, dim), ('factors', axis))
    mean = None
    if self.factor_bias:
      bias = parameter('J_bias', nn.initializers.zeros, (dim,), (axis,))
      mean = bias * scale  # [B, Q]
    return LowRank(scale, loading, diag, self.remainder), mean


def noise_in_directions(
  params: Mapping[str, jax.Array], directions: np.ndarray, phi_size: float = 1.0
) -> dict[str, jax.Array | np.ndarray]:
  """Parameters of a covariance whose noise lies in given directions, about the same for all x.

      >>> import jax, jax.numpy as jnp
      >>> from het_plugin import heads
      >>> head, phi = heads.Het(num_classes=3, num_factors=1, class_multiple=1), jnp.ones((1, 4))
      >>> params = head.init(jax.random.key(0), phi)['params']
      >>> directions = jnp.array([[1.0, -1.0, 0.0], [0.0, 0.0, 1.0]])  # [R + 1, Q]
      >>> noise = heads.noise_in_directions(params['covariance'], directions)
      >>> head.apply({'params': params | {'covariance': noise}}, phi).factors().shape
      (1, 2, 3)

  Args:
    params: initial parameters of a `LowRankCovariance` for D pre-logits, whose matrices make the
      part of V(x) that depends on x, a tenth of the whole.
    directions: float [R + 1, Q], in units of eps. The first R are those of V(x), over sqrt(R) each.
      The last one gives d(x) its pattern about their size, within a factor of e^(1/2): an equal d
      for all classes of HET would change no probability.
    phi_size: root mean square of the entries of phi.

  Returns:
    The parameters, float32, of the shapes of `params`.
  """
  found: dict[str, jax.Array | np.ndarray] = dict(params)
  factors = directions[:-1] / math.sqrt(len(directions) - 1)
  size = float(np.sqrt(np.mean(np.square(factors))))
  d = size * np.exp(0.5 * directions[-1] / np.abs(directions[-1]).max())
  found['d_kernel'] = np.zeros_like(found['d_kernel'])
  found['d_bias'] = np.asarray(np.log(np.expm1(d)), np.float32)
  variation = _INITIAL_VARIATION / phi_size
  if 'J' in found:  # v and J share the size of their product
    root = math.sqrt(size)
    found['v_kernel'] = (variation * root) * found['v_kernel']
    found['v_bias'] = np.full_like(found['v_bias'], root)
    found['J'] = np.asarray(factors / root, np.float32)
  else:
    found['V_kernel'] = (variation * size) * found['V_kernel']
    found['V_bias'] = np.asarray(factors, np.float32)
  return found


def least_noise(params: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
  """Parameters of a covariance with as little noise as it can have: V(x) = 0 and d(x) = 1e-3."""
  found = {name: np.zeros_like(x) for name, x in params.items()}
  found['d_bias'] += np.float32(_NO_NOISE)
  return found
