"""The classifier heads DET, HET, HET-H and HET-XL: pre-logits phi [B, D] to `GaussianLogits`.

All heads name their location parameters as a linear head does, `kernel` [D, Kp] and `bias` [Kp], so
that a deterministic checkpoint can initialise a heteroscedastic model. Kp is K rounded up to a
multiple of `class_multiple`. It does not depend on the mesh, so checkpoints move between meshes,
and every mesh whose model axis divides `class_multiple` can shard it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.linen import partitioning
from jax.typing import DTypeLike

from het_plugin.heads.covariance import LowRankCovariance, Parametrization, Remainder
from het_plugin.heads.linear import matmul, parameter
from het_plugin.heads.settings import check_dtype
from het_plugin.heads.temperature import FixedTemperature, LearnedTemperature, owned
from het_plugin.integrate import (
  GaussianLogits,
  Hashed,
  Linear,
  LowRank,
  Opaque,
  apply_projection,
)
from het_plugin.system import ranges
from het_plugin.system.ranges import Count, Positive

Temperature = FixedTemperature | LearnedTemperature


class Classifier(nn.Module):
  """Base of all heads: W, b, temperature and link.

  Attributes:
    num_classes: K >= 1.
    link: 'softmax', or 'sigmoid' for multi-label problems.
    temperature: `FixedTemperature` or `LearnedTemperature`; None is a fixed tau of 1.
    class_multiple: K is padded to a multiple of it. Padded classes are masked out of all
      probabilities.
    initial_bias: initial bias in units of tau, b = initial_bias * tau_0, so that the first loss
      does not depend on tau_0. Use 0 for softmax and -10 for a sigmoid link with many classes.
    dtype: compute type of matrix products; logits are float32.
  """

  num_classes: Count
  link: Literal['softmax', 'sigmoid'] = 'softmax'
  temperature: Temperature | None = None
  class_multiple: Count = 128
  initial_bias: float = 0.0
  dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    self.temperature = owned(self.temperature, FixedTemperature())
    super().__post_init__()

  @property
  def own_temperature(self) -> Temperature:
    """The module `temperature`; `__post_init__` has put the default in the place of None."""
    if self.temperature is None:
      raise ValueError(f'{type(self).__name__}.temperature is None after __post_init__')
    return self.temperature

  @property
  def padded_classes(self) -> int:
    """Kp."""
    return -(-self.num_classes // self.class_multiple) * self.class_multiple

  @nn.nowrap
  def check(self, phi: jax.Array) -> None:
    """Raises ValueError if an attribute is out of range, or phi is not [B, D]."""
    name = type(self).__name__
    ranges.check(self)
    check_dtype(name, self.dtype)
    self.own_temperature.check()
    if phi.ndim != 2:
      raise ValueError(f'{name}: pre-logits must be [B, D]; got the shape {phi.shape}')

  @nn.nowrap
  def num_params(self, pre_logits_dim: int) -> int:
    """Number of parameters for D = pre_logits_dim, without padding."""
    return (pre_logits_dim + 1) * self.num_classes + self.extra_params(pre_logits_dim)

  @nn.nowrap
  def extra_params(self, pre_logits_dim: int) -> int:
    """Number of parameters beyond a deterministic head with fixed temperature, without padding."""
    del pre_logits_dim
    return self.own_temperature.num_params()

  def kernel(self, phi: jax.Array) -> jax.Array:
    shape = phi.shape[-1], self.padded_classes
    return parameter('kernel', nn.initializers.lecun_normal(), shape, ('embed', 'vocab'))

  def bias(self) -> jax.Array:
    start = nn.initializers.constant(self.initial_bias * self.own_temperature.tau_0)
    return parameter('bias', start, (self.padded_classes,), ('vocab',))

  def location(self, phi: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """W^T phi + b, float32 [B, Kp]."""
    location = matmul(phi, kernel, self.dtype) + bias
    return partitioning.with_sharding_constraint(location, ('batch', 'vocab'))

  def gaussian(
    self,
    location: jax.Array,
    covariance: LowRank | None,
    projection,
    location_from: Linear | None = None,
  ) -> GaussianLogits:
    return GaussianLogits(
      location,
      covariance,
      projection,
      self.own_temperature(),
      num_classes=self.num_classes,
      link=self.link,
      location_from=location_from,
    )


class Det(Classifier):
  """The deterministic classifier, link((W^T phi + b) / tau) (eq. 1; with learned tau, table 8).

  >>> import jax, jax.numpy as jnp
  >>> from het_plugin.heads import Det
  >>> head, phi = Det(num_classes=3, class_multiple=4), jnp.ones((2, 8))  # B = 2, D = 8
  >>> logits = head.apply(head.init(jax.random.key(0), phi), phi)
  >>> logits.location.shape, logits.num_classes  # one class is padding
  ((2, 4), 3)
  """

  @nn.compact
  def __call__(self, phi: jax.Array) -> GaussianLogits:
    """phi [B, D] -> logits without noise."""
    self.check(phi)
    kernel = self.kernel(phi)
    bias = self.bias()
    linear = Linear(kernel.astype(self.dtype), phi, bias)
    return self.gaussian(self.location(phi, kernel, bias), None, None, linear)


class Heteroscedastic(Classifier):
  """Base of the heteroscedastic heads: the parametrisation of Sigma(x), see `LowRankCovariance`.

  Attributes:
    num_factors: R >= 1; 50 in the paper.
    parametrization: 'efficient' or 'full'.
    remainder: 'rank_one' or 'diag'.
    factor_bias: whether J has a bias, as in the reference implementation.
    initial_noise_scale: initial size of the noise; 1.0 in the reference implementation.
  """

  num_factors: Count = 50
  parametrization: Parametrization = 'efficient'
  remainder: Remainder = 'rank_one'
  factor_bias: bool = False
  initial_noise_scale: Positive = 1.0

  @nn.nowrap
  def extra_params(self, pre_logits_dim: int) -> int:
    noise_dim = self.unpadded_noise_dim(pre_logits_dim)
    covariance = self.make_covariance(noise_dim, 'noise', parent=None)
    return covariance.num_params(pre_logits_dim, noise_dim) + self.own_temperature.num_params()

  @nn.nowrap
  def unpadded_noise_dim(self, pre_logits_dim: int) -> int:
    """Q."""
    raise NotImplementedError

  @nn.nowrap
  def make_covariance(self, noise_dim: int, noise_axis: str, **kwargs) -> LowRankCovariance:
    return LowRankCovariance(
      noise_dim,
      noise_axis,
      num_factors=self.num_factors,
      parametrization=self.parametrization,
      remainder=self.remainder,
      factor_bias=self.factor_bias,
      initial_noise_scale=self.initial_noise_scale,
      dtype=self.dtype,
      **kwargs,
    )

  @nn.nowrap
  def check(self, phi: jax.Array) -> None:
    super().check(phi)
    self.make_covariance(1, 'noise', parent=None).check(type(self).__name__)


class Het(Heteroscedastic):
  """HET (Collier et al. 2021; eq. 2, 4, 18): noise in logit space, Q = K.

  >>> import jax, jax.numpy as jnp
  >>> from het_plugin.heads import Het
  >>> head, phi = Het(num_classes=3, num_factors=2, class_multiple=4), jnp.ones((2, 8))
  >>> logits = head.apply(head.init(jax.random.key(0), phi), phi)
  >>> logits.factors().shape  # [B, R + 1, Kp]
  (2, 3, 4)
  """

  @nn.nowrap
  def unpadded_noise_dim(self, pre_logits_dim: int) -> int:
    return self.num_classes

  @nn.compact
  def __call__(self, phi: jax.Array) -> GaussianLogits:
    """phi [B, D] -> logits W^T phi + b + z F(x)."""
    self.check(phi)
    location = self.location(phi, self.kernel(phi), self.bias())
    covariance, mean = self.make_covariance(self.padded_classes, 'vocab', name='covariance')(phi)
    return self.gaussian(_shift(location, mean, None), covariance, None)


def class_buckets(num_classes: int, num_buckets: int) -> np.ndarray:
  """The fixed hash h(k) of HET-H (section 6.1, appendix A.3) for k < num_classes.

  Returns int32 [num_classes] in [0, num_buckets).

  The finaliser of splitmix64 mixes k, so the bucket of a class depends neither on the version of a
  random number generator nor on the number of classes.
  """
  x = np.arange(num_classes, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
  for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
    x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)  # wraps modulo 2^64
  x ^= x >> np.uint64(31)
  return (x % np.uint64(num_buckets)).astype(np.int32)


class HetH(Heteroscedastic):
  """HET-H (eq. 9): noise in R^H, mapped to the classes by a fixed hash.

      >>> from het_plugin.heads import HetH
      >>> HetH(num_classes=1000, num_factors=50, num_buckets=64).extra_params(1024)
      134400

  Attributes:
    num_buckets: H; None is D, which gives as many parameters as HET-XL has (section 6.1).
    empty_buckets: whether buckets that hold no class have parameters, as the paper counts them.
      They change no logit. With K = 100 and H = 768, only 90 buckets hold a class.
  """

  num_buckets: Count | None = None
  empty_buckets: bool = True

  @nn.nowrap
  def unpadded_noise_dim(self, pre_logits_dim: int) -> int:
    if not self.empty_buckets:
      return len(self.used_buckets(pre_logits_dim))
    return pre_logits_dim if self.num_buckets is None else self.num_buckets

  @nn.nowrap
  def used_buckets(self, pre_logits_dim: int) -> np.ndarray:
    """The buckets that hold a class: distinct values of h, ascending."""
    return np.unique(self._hashed(pre_logits_dim)[: self.num_classes])

  @nn.nowrap
  def buckets(self, pre_logits_dim: int) -> np.ndarray:
    """Where in eps the noise of each class is, int32 [Kp]: h(k), or without empty buckets the
    number of h(k) among the used ones. The logits of padded classes are masked, so their noise may
    be that of any bucket.
    """
    hashed = self._hashed(pre_logits_dim)
    if self.empty_buckets:
      return hashed
    used = self.used_buckets(pre_logits_dim)
    return np.minimum(np.searchsorted(used, hashed), len(used) - 1).astype(np.int32)

  @nn.nowrap
  def _hashed(self, pre_logits_dim):
    num_buckets = pre_logits_dim if self.num_buckets is None else self.num_buckets
    return class_buckets(self.padded_classes, num_buckets)

  @nn.compact
  def __call__(self, phi: jax.Array) -> GaussianLogits:
    """phi [B, D] -> logits W^T phi + b + (z F(x))[h(k)]."""
    self.check(phi)
    kernel = self.kernel(phi)
    bias = self.bias()
    location = self.location(phi, kernel, bias)
    noise_dim = self.unpadded_noise_dim(phi.shape[-1])
    covariance, mean = self.make_covariance(noise_dim, 'noise', name='covariance')(phi)
    projection = Hashed(jnp.asarray(self.buckets(phi.shape[-1])))
    # With a factor bias the location has the mean of the noise, too.
    linear = Linear(kernel.astype(self.dtype), phi, bias) if mean is None else None
    return self.gaussian(_shift(location, mean, projection), covariance, projection, linear)


@struct.dataclass
class AffineLoading:
  """V(x) W of HET-XL as one affine map of phi, maps phi + shift; see `HetXL.affine_loading`."""

  maps: jax.Array  # [D, R, Kp]
  shift: jax.Array  # [R, Kp]


class HetXL(Heteroscedastic):
  """HET-XL (eq. 5): noise in the pre-logits, mapped to the classes by W itself.

      >>> from het_plugin.heads import Het, HetXL
      >>> Het(num_classes=21_843).extra_params(1024)  # R = 50
      45870300
      >>> HetXL(num_classes=21_843).extra_params(1024)
      2150400

  Attributes:
    noise_dim: None shares W (Q = D). A number M gives the noise a separate W' [M, K] (eq. 14,
      Q = M).
    get_logits: a linen module or function phi [N, D] -> logits [N, K] that replaces W^T phi + b
      (section 3.1). The head then has only the parameters of covariance and temperature;
      `class_multiple` and `initial_bias` are ignored.
  """

  noise_dim: Count | None = None
  get_logits: Callable[[jax.Array], jax.Array] | nn.Module | None = None

  @nn.nowrap
  def check(self, phi: jax.Array) -> None:
    super().check(phi)
    if self.noise_dim is not None and self.get_logits is not None:
      raise ValueError(
        'set HetXL.noise_dim or HetXL.get_logits, not both: get_logits takes phi + noise as one '
        'input'
      )

  @nn.nowrap
  def unpadded_noise_dim(self, pre_logits_dim: int) -> int:
    return pre_logits_dim if self.noise_dim is None else self.noise_dim

  @nn.nowrap
  def num_params(self, pre_logits_dim: int) -> int:
    if self.get_logits is None:
      return super().num_params(pre_logits_dim)
    return self.extra_params(pre_logits_dim)

  @nn.nowrap
  def extra_params(self, pre_logits_dim: int) -> int:
    own_kernel = 0 if self.noise_dim is None else self.noise_dim * self.num_classes
    return super().extra_params(pre_logits_dim) + own_kernel

  @nn.nowrap
  def affine_loading(self, params: Mapping[str, Any]) -> AffineLoading | None:
    """The product of K_v, J and W, for many batches under the same parameters.

    V(x) = J o (1 v(x)^T) is affine in phi, so V(x) W is as well. With the product, v(x) is never
    computed, which is a third of the cost of a row at D = 768, K = 100 and R = 4. The product
    itself costs as much as v(x) of R K rows.

    Args:
      params: the parameters of this head.

    Returns:
      The second argument of `__call__`. None where V(x) W is not the only loading, or not affine
      (another parametrisation or remainder, a factor bias, opaque logits), and with W' of eq. 14,
      where the map from D would cost more than v(x).
    """
    is_plain = self.parametrization == 'efficient' and self.remainder == 'rank_one'
    shares_w = self.noise_dim is None and self.get_logits is None
    if not is_plain or not shares_w or self.factor_bias:
      return None
    kernel = params['kernel']
    noise = params['covariance']
    return AffineLoading(
      maps=jnp.einsum('dq,rq,qk->drk', noise['v_kernel'], noise['J'], kernel),
      shift=jnp.einsum('q,rq,qk->rk', noise['v_bias'], noise['J'], kernel),
    )

  @nn.compact
  def __call__(self, phi: jax.Array, loading: AffineLoading | None = None) -> GaussianLogits:
    """phi [B, D] -> logits W^T (phi + z F(x)) + b; `loading` is that of the same parameters."""
    self.check(phi)
    noise_dim = self.unpadded_noise_dim(phi.shape[-1])
    covariance, mean = self.make_covariance(noise_dim, 'noise', name='covariance')(phi)
    if self.get_logits is not None:
      phi = phi.astype(covariance.diag.dtype)
      return self._opaque(self.get_logits, phi if mean is None else phi + mean, covariance)
    kernel = self.kernel(phi)
    bias = self.bias()
    if loading is not None:
      in_logits = LowRank(
        scale=None,
        loading=matmul(phi, loading.maps, self.dtype) + loading.shift,
        diag=matmul(covariance.diag, kernel, self.dtype),
      )
      return self.gaussian(self.location(phi, kernel, bias), in_logits, None)
    if self.noise_dim is None:
      phi = phi if mean is None else phi + mean
      projection = Linear(kernel.astype(self.dtype), phi, bias)
      return self.gaussian(self.location(phi, kernel, bias), covariance, projection)
    shape = noise_dim, self.padded_classes
    init = nn.initializers.lecun_normal()
    noise_kernel = parameter('noise_kernel', init, shape, ('noise', 'vocab'))
    projection = Linear(noise_kernel.astype(self.dtype))
    location = _shift(self.location(phi, kernel, bias), mean, projection)
    linear = Linear(kernel.astype(self.dtype), phi, bias) if mean is None else None
    return self.gaussian(location, covariance, projection, linear)

  def _opaque(self, get_logits, phi, covariance):
    location = get_logits(phi)
    if location.shape != (phi.shape[0], self.num_classes):
      raise ValueError(
        f'HetXL.get_logits returned shape {location.shape} for pre-logits {phi.shape}; '
        f'num_classes={self.num_classes} asks for {(phi.shape[0], self.num_classes)}'
      )
    if isinstance(get_logits, nn.Module):
      module, params = get_logits.unbind()
      projection = Opaque(phi, params, _Apply(module))
    else:
      # What it closes over becomes an argument, for gradients. Of one row, since the result keeps
      # the shapes of its trace, and integrators call it with B s rows.
      function, params = jax.closure_convert(lambda row: get_logits(row[None])[0], phi[0])
      of_rows = jax.vmap(function, (0, *[None] * len(params)))
      projection = Opaque(phi, params, lambda params, phi: of_rows(phi, *params))
    return self.gaussian(location.astype(phi.dtype), covariance, projection)


@dataclasses.dataclass(frozen=True)
class _Apply:
  """module.apply, but equal where the modules are: a bound method compiles again at each call."""

  module: nn.Module

  def __call__(self, params, phi):
    return self.module.apply(params, phi)


def _shift(
  location: jax.Array, mean: jax.Array | None, projection: Linear | Hashed | None
) -> jax.Array:
  """Adds the mean of the noise to the location, so that the noise itself has mean zero."""
  if mean is None:
    return location
  return location + apply_projection(projection, mean[:, None])[:, 0]
