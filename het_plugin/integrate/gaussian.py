"""The value type that heads produce and everything else consumes: a Gaussian over logits.

    logits = location + projection(eps),    eps = z F(x) in R^Q,    z ~ N(0, I)

`F(x)` is kept in the structured form in which the heads parametrise it (`LowRank`), and the map
from the noise space R^Q to the K classes is one of a few explicit projections. HET needs none
(Q = K), HET-H indexes by a hash (`Hashed`), and HET-XL multiplies by W (`Linear`) or calls the
user's `get_logits` (`Opaque`).

B examples, S samples, K classes, D pre-logits, Q noise dimension, R factors. Kp is K rounded up so
that a mesh divides it; the padded classes have no probability.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import struct

Link = Literal['softmax', 'sigmoid']
LINKS = get_args(Link)
REMAINDERS = ('rank_one', 'diag')
# The logit of a padded class. Its exp is exactly zero, and it is finite, so 0 * PADDED is 0.
PADDED = -1e30


@struct.dataclass
class LowRank:
  """Low-rank noise eps = z F(x): covariance V(x)^T V(x) plus a remainder made of d(x).

  Attributes:
    scale: v(x) [B, Q], or None if `loading` itself depends on the input.
    loading: J [R, Q] with V(x) = J o (1_R v(x)^T), the parameter-efficient form (section 2.2); or
      V(x) [B, R, Q] if `scale` is None, the full form (eq. 4).
    diag: d(x) [B, Q], positive.
    remainder: 'rank_one' adds d(x) d(x)^T (eq. 18; one normal per sample), 'diag' adds diag(d(x)^2)
      (Q normals per sample).
  """

  scale: jax.Array | None
  loading: jax.Array
  diag: jax.Array
  remainder: str = struct.field(pytree_node=False, default='rank_one')

  @property
  def num_factors(self) -> int:
    return self.loading.shape[-2]

  @property
  def num_normals(self) -> int:
    """Standard normals that one sample takes: R + 1, or R + Q with remainder 'diag'."""
    return self.num_factors + (1 if self.remainder == 'rank_one' else self.diag.shape[-1])

  def noise(self, z: jax.Array) -> jax.Array:
    """Maps standard normals [B, S, num_normals] to noise samples [B, S, Q]."""
    z_factors = z[..., : self.num_factors]
    z_diag = z[..., self.num_factors :]
    if self.scale is None:
      low_rank = jnp.einsum('bsr,brq->bsq', z_factors, self.loading)
    else:
      low_rank = jnp.einsum('bsr,rq->bsq', z_factors, self.loading) * self.scale[:, None]
    return low_rank + z_diag * self.diag[:, None]  # [B, S, Q]

  def scaled(self, factor: jax.Array | float) -> 'LowRank':
    """The noise `factor * eps`; only arrays [B, Q] are multiplied."""
    if self.scale is None:
      return dataclasses.replace(self, loading=self.loading * factor, diag=self.diag * factor)
    return dataclasses.replace(self, scale=self.scale * factor, diag=self.diag * factor)

  def dense_loading(self) -> jax.Array:
    """V(x) as an array [B, R, Q]."""
    return self.loading if self.scale is None else self.loading * self.scale[:, None]

  def factors(self) -> jax.Array:
    """V(x), and d(x) if it is one more factor, [B, R + 1, Q]."""
    if self.remainder == 'diag':
      return self.dense_loading()
    return jnp.concatenate([self.dense_loading(), self.diag[:, None]], axis=1)

  def variances(self) -> jax.Array:
    """Var(eps_q), [B, Q]."""
    variance = jnp.square(self.loading).sum(-2)  # [Q] where all examples share J, or [B, Q]
    if self.scale is not None:
      variance = variance * jnp.square(self.scale)
    return variance + jnp.square(self.diag)


@struct.dataclass
class Linear:
  """logits = location + eps W, with W [Q, Kp]: HET-XL (eq. 5), or W' of eq. 14.

  If the location is phi W + bias with the same W, `phi` and `bias` may be given: the losses then
  compute both products as one, and W has one gradient instead of the sum of two.
  """

  kernel: jax.Array
  phi: jax.Array | None = None  # [B, Q]
  bias: jax.Array | None = None  # [Kp]


@struct.dataclass
class Hashed:
  """logits_k = location_k + eps[h(k)], with h int32 [Kp] into the Q = H buckets: HET-H (eq. 9)."""

  buckets: jax.Array


@struct.dataclass
class Opaque:
  """logits = get_logits(params, phi + eps): the user's map from pre-logits [N, D] to logits [N, K].

  Section 3.1 of the paper.
  """

  phi: jax.Array  # [B, D]
  params: Any
  get_logits: Callable[[Any, jax.Array], jax.Array] = struct.field(pytree_node=False)


Projection = Linear | Hashed | Opaque | None


@struct.dataclass
class GaussianLogits:
  """Gaussian logits of a batch.

      >>> import jax.numpy as jnp
      >>> from het_plugin.integrate import GaussianLogits, LowRank
      >>> noise = LowRank(None, jnp.zeros((2, 1, 3)), jnp.ones((2, 3)))  # B = 2, R = 1, Q = K = 3
      >>> logits = GaussianLogits(jnp.zeros((2, 3)), noise, None, jnp.float32(1.0), num_classes=3)
      >>> logits.factors().shape  # [B, R + 1, K]
      (2, 2, 3)

  Attributes:
    location: [B, Kp] float32, W^T phi + b.
    covariance: the noise, or None for a deterministic classifier.
    projection: the map from the noise space to the classes; None is the identity (Q = Kp).
    temperature: tau, a float32 scalar: probabilities are link(logits / tau).
    num_classes: K <= Kp; classes from K on are padding.
    link: 'softmax' or 'sigmoid'.
    location_from: phi, W and bias of a location phi W + bias. Losses in tiles make it of a range of
      classes from them, and never read `location`, which `jax.jit` then does not compute. None if
      they are not known, or are those of the projection.
  """

  location: jax.Array
  covariance: LowRank | None
  projection: Projection
  temperature: jax.Array
  num_classes: int = struct.field(pytree_node=False)
  link: str = struct.field(pytree_node=False, default='softmax')
  location_from: Linear | None = None

  def __repr__(self) -> str:
    """Says what these are, without arrays: JAX and optax show it where logits [B, K] belong."""
    shape = getattr(self.location, 'shape', None)
    return f'GaussianLogits(location={shape}, num_classes={self.num_classes}), for an Integrator'

  @property
  def noise(self) -> LowRank:
    """The covariance; ValueError if the classifier is deterministic."""
    if self.covariance is None:
      raise ValueError('these logits are deterministic: covariance is None')
    return self.covariance

  @property
  def has_factors(self) -> bool:
    """Whether the noise has factors in logit space.

    It has none if get_logits is opaque or the remainder is 'diag' and fills the noise space.
    """
    is_known = self.covariance is not None and not isinstance(self.projection, Opaque)
    return is_known and self.covariance.remainder == 'rank_one'

  @property
  def has_tiles(self) -> bool:
    """Whether samples of a range of classes can be made alone."""
    if isinstance(self.projection, Opaque):
      return False
    # A remainder 'diag' of classes or buckets has a normal for each.
    return isinstance(self.projection, Linear) or self.noise.remainder == 'rank_one'

  def factors(self) -> jax.Array:
    """All factors in logit space, [B, R + 1, Kp]: logits = location + z @ factors, z ~ N(0, I).

    Raises:
      ValueError: the classifier is deterministic, or there are none (`has_factors`).
    """
    if not self.has_factors:
      raise ValueError(
        'factors() needs a covariance with remainder="rank_one" and a known projection; got '
        f'covariance={self.covariance is not None}, projection={type(self.projection).__name__}'
      )
    return project(self.noise, self.projection).factors()


def checked(logits: GaussianLogits) -> GaussianLogits:
  """The logits with all arrays in the dtype of the location, float32 or wider, except the W of a
  projection and the parameters of `get_logits`.

  Raises:
    ValueError: these are no `GaussianLogits`.
  """
  if not isinstance(logits, GaussianLogits):
    raise ValueError(
      f'logits must be the GaussianLogits that a head returns; got {type(logits).__name__}'
    )
  dtype = jnp.promote_types(jnp.result_type(logits.location), jnp.float32)
  wide = functools.partial(jnp.asarray, dtype=dtype)
  location, covariance, temperature = jax.tree.map(
    wide, (logits.location, logits.covariance, logits.temperature)
  )
  projection = logits.projection
  if isinstance(projection, Linear):
    projection = _with_phi(projection, wide)
  elif isinstance(projection, Opaque):
    projection = dataclasses.replace(projection, phi=wide(projection.phi))
  return dataclasses.replace(
    logits,
    location=location,
    covariance=covariance,
    projection=projection,
    temperature=temperature,
    location_from=_with_phi(logits.location_from, wide),
  )


def _with_phi(linear: Linear | None, function: Callable[[jax.Array], jax.Array]) -> Linear | None:
  """With `function` of phi and of the bias, where both are known: W and the noise stay."""
  if linear is None or linear.phi is None or linear.bias is None:
    return linear
  return dataclasses.replace(linear, phi=function(linear.phi), bias=function(linear.bias))


def over_tau(logits: GaussianLogits) -> GaussianLogits:
  """The same distribution of logits over tau, with a temperature of 1."""
  tau = logits.temperature
  inverse = 1.0 / tau
  projection = logits.projection
  if isinstance(projection, Linear):
    projection = _with_phi(projection, lambda x: x * inverse)
  elif isinstance(projection, Opaque):
    get_logits = projection.get_logits
    projection = dataclasses.replace(
      projection,
      params=(projection.params, tau),
      get_logits=lambda params, x: get_logits(params[0], x).astype(tau.dtype) / params[1],
    )
  is_noisy = logits.covariance is not None and not isinstance(projection, Opaque)
  return dataclasses.replace(
    logits,
    location=logits.location / tau,
    covariance=logits.noise.scaled(inverse) if is_noisy else logits.covariance,
    projection=projection,
    temperature=jnp.ones_like(tau),
    location_from=_with_phi(logits.location_from, lambda x: x * inverse),
  )


def masked(logits: GaussianLogits, u: jax.Array) -> jax.Array:
  """u [..., Kp] with `PADDED` at padded classes."""
  return jnp.where(jnp.arange(u.shape[-1]) < logits.num_classes, u, PADDED)


def mirrored(logits: GaussianLogits, sign: jax.Array | float = -1.0) -> GaussianLogits:
  """The distribution of sign times the logits, for noise that is symmetric about the location.

  With a sigmoid, p(y_k = 1) of these is p(y_k = 0) of the logits where the sign is -1.

      >>> import jax.numpy as jnp
      >>> from het_plugin.integrate import GaussianLogits, mirrored
      >>> logits = GaussianLogits(jnp.array([[1.0, -2.0]]), None, None, jnp.float32(1.0), 2)
      >>> mirrored(logits).location.tolist()
      [[-1.0, 2.0]]

  Args:
    logits: logits of B examples.
    sign: -1, or 1 or -1 for each class [B, Kp] of a known projection.
  """
  projection = logits.projection
  if isinstance(projection, Linear):  # phi and bias would give the location again
    projection = Linear(projection.kernel)
  elif isinstance(projection, Opaque):
    get_logits = projection.get_logits
    projection = dataclasses.replace(
      projection, get_logits=lambda params, x: -get_logits(params, x)
    )
  return dataclasses.replace(
    logits, location=sign * logits.location, projection=projection, location_from=None
  )


def project(covariance: LowRank, projection: Projection) -> LowRank:
  """The same noise with factors in logit space: the first half of project-then-sample.

  Raises:
    TypeError: the projection is opaque.
  """
  match projection:
    case None:
      return covariance
    case Hashed(buckets):
      return jax.tree.map(lambda x: x[..., buckets], covariance)
    case Linear(kernel):
      loading = matmul(covariance.dense_loading(), kernel)  # [B, R, Kp]
      return LowRank(None, loading, matmul(covariance.diag, kernel), covariance.remainder)
  raise TypeError(f'no logit-space factors for projection {type(projection).__name__}')


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """x [..., Q] @ kernel [Q, K] in the kernel's compute type, accumulated in float32 (or wider)."""
  return jnp.matmul(
    x.astype(kernel.dtype), kernel, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32)
  )


def apply_projection(projection: Projection, eps: jax.Array) -> jax.Array:
  """Noise samples [B, S, Q] to logit space [B, S, Kp]: the second half of sample-then-project.

  Raises:
    TypeError: the projection is opaque.
  """
  match projection:
    case None:
      return eps
    case Hashed(buckets):
      return eps[..., buckets]
    case Linear(kernel):
      return matmul(eps, kernel)
  raise TypeError(f'no linear map for projection {type(projection).__name__}')
