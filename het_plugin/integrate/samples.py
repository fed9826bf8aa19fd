"""What samples of Gaussian logits are made from: the noise, and its map to logits."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from het_plugin.integrate.draws import Draws
from het_plugin.integrate.gaussian import (
  GaussianLogits,
  Hashed,
  Linear,
  LowRank,
  Opaque,
  apply_projection,
  masked,
  project,
)
from het_plugin.integrate.proposal import Chosen


@struct.dataclass
class Samples:
  """What the logits over tau are sampled from: u = mean + projection(noise).

  Attributes:
    mean: [B, 1, K]; or [1, 1, K], the bias or 0, if the noise or the projection contain the rest.
      `PADDED` at padded classes.
    noise: the noise in the noise space; or, if factors are projected first, in logit space, for
      HET-XL as rows with mu as the last one, [B, T + 1, K].
    projection: None, `Linear`, or `Opaque`.
  """

  mean: jax.Array
  noise: LowRank | jax.Array
  projection: Linear | Opaque | None

  @property
  def batch_size(self) -> int:
    noise = self.noise.diag if isinstance(self.noise, LowRank) else self.noise
    return noise.shape[0]

  @property
  def num_normals(self) -> int:
    """T."""
    is_low_rank = isinstance(self.noise, LowRank)
    return self.noise.num_normals if is_low_rank else self.noise.shape[1] - 1

  def noise_of(self, z: jax.Array, buckets: jax.Array | None) -> jax.Array:
    """The noise of the logits [B, s, K] for normals z [B, s, T]: linear in z."""
    if not isinstance(self.noise, LowRank):
      return jnp.einsum('bst,btk->bsk', with_last(z, 0.0), self.noise)
    projection = self.projection if buckets is None else Hashed(buckets)
    return apply_projection(projection, self.noise.noise(z))

  def rows(self) -> tuple[jax.Array, jax.Array]:
    """Factors in logit space with mu as their last row [B, T + 1, K], and a shift [K] of all mu."""
    if not isinstance(self.noise, LowRank):
      return self.noise, self.mean[0, 0]
    loading = self.noise.loading
    if self.noise.scale is not None:
      # An outer product, whose transpose is a product too: XLA's sum is slow on a CPU.
      ones = jnp.ones(loading.shape[0], loading.dtype)
      loading = loading * jnp.einsum('r,bk->brk', ones, self.noise.scale)
    rows = jnp.concatenate([loading, self.noise.diag[:, None], self.mean], axis=1)
    return rows, jnp.zeros_like(self.mean[0, 0])

  def logits(self, z: jax.Array, buckets: jax.Array | None) -> jax.Array:
    """u [B, s, K]."""
    if not isinstance(self.noise, LowRank):
      # mu is added, not multiplied by a 1, since some devices round the operands of products.
      return self.noise_of(z, buckets) + (self.noise[:, -1:] + self.mean)
    match self.projection:
      case Opaque(phi, params, get_logits):
        phi = phi[:, None] + self.noise.noise(z)  # [B, s, D]
        u = get_logits(params, phi.reshape(-1, phi.shape[-1])).reshape(*phi.shape[:2], -1)
        return u.astype(self.mean.dtype) + self.mean
      case Linear(_, phi) if phi is not None:
        return apply_projection(self.projection, phi[:, None] + self.noise.noise(z)) + self.mean
    return self.noise_of(z, buckets) + self.mean


@struct.dataclass
class Constants:
  """Draws, and the hash of HET-H [K] if noise is hashed after it is sampled."""

  draws: Draws | Chosen
  buckets: jax.Array | None = None


def samples_of(logits: GaussianLogits, project_first: bool) -> tuple[Samples, jax.Array | None]:
  """What is sampled, already divided by tau, and the hash, if any. If the location is phi W + bias,
  one product serves location and noise, so W has one gradient.
  """
  inverse = 1.0 / logits.temperature
  covariance = logits.noise
  mean = logits.location[:, None] * inverse
  noise = covariance.scaled(inverse)
  match logits.projection:
    case Opaque(phi, params, get_logits):
      opaque = Opaque(phi, (params, inverse), _Tempered(get_logits))
      return Samples(masked(logits, jnp.zeros_like(mean[:1])), covariance, opaque), None
    case Linear(kernel, phi, bias) if phi is not None and bias is not None:
      phi = phi * inverse
      mean = masked(logits, (bias * inverse)[None, None])
      if not project_first:
        return Samples(mean, noise, Linear(kernel, phi)), None
      rows = [noise.dense_loading(), noise.diag[:, None], phi[:, None]]
      rows = apply_projection(Linear(kernel), jnp.concatenate(rows, axis=1))
      return Samples(mean, rows, None), None
    case Hashed(buckets) if not project_first:
      return Samples(masked(logits, mean), noise, None), buckets
    case Linear() as linear if not project_first:
      return Samples(masked(logits, mean), noise, linear), None
  noise = project(noise, logits.projection) if project_first else noise
  return Samples(masked(logits, mean), noise, None), None


@dataclasses.dataclass(frozen=True)
class _Tempered:
  """get_logits(phi) / tau, with 1 / tau as one more parameter."""

  get_logits: Callable

  def __call__(self, params, phi):
    params, inverse = params
    return self.get_logits(params, phi) * inverse


def with_last(z: jax.Array, last: float) -> jax.Array:
  """z [B, s, T] with `last` as one more column."""
  return jnp.concatenate([z, jnp.full_like(z[..., :1], last)], axis=-1)
