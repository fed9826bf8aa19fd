"""Logits of samples: made in which order, and how many samples at one time.

Samples are of the noise, or of the factors, whichever costs less (`projects_factors`). Classes are
cut into tiles, so all samples are there at one time, except where what a sample takes does not
shrink with its classes: normals and noise in the noise space with the remainder 'diag', and all
logits of `get_logits`. Those come in chunks of samples.

B examples, S samples, s of them in a chunk, K classes, T normals of a sample, Q noise dimension.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from het_plugin.integrate.classes import (
  Classes,
  EveryClass,
  Tile,
  Tiling,
  classes_of,
  mean_of_class,
  noisy_classes,
)
from het_plugin.integrate.directions import Draws
from het_plugin.integrate.gaussian import PADDED, GaussianLogits, Linear, Opaque, apply_projection
from het_plugin.integrate.placement import budget, bytes_per_device
from het_plugin.integrate.proposal import Chosen
from het_plugin.integrate.samplers import Sampler, sobol, source


@struct.dataclass
class Drawn:
  """What tiles have beside the classes of some samples.

  Attributes:
    z: normals [B, s, T] for `Classes.logits`, or None.
    log_weight: [B, s], `PADDED` and less for samples that do not count; None if all count alike.
    labels: int32 [B, L], or None.
  """

  z: jax.Array | None = None
  log_weight: jax.Array | None = None
  labels: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Samples:
  """S samples of logits over tau, in chunks, and what is a mean over them whatever the link.

  Attributes:
    tiling: how classes are cut.
    num_samples: S.
    num_chunks: of the samples.
    chunk: number of a chunk, and labels or None -> its classes, with `Drawn` as constants.
  """

  tiling: Tiling
  num_samples: int
  num_chunks: int
  chunk: Callable[..., EveryClass]

  @classmethod
  def of_location(cls, logits: GaussianLogits, max_bytes: int | None) -> Self:
    """The one sample of logits without noise."""
    return cls.of_one(EveryClass(Tiling.of(logits, 1, max_bytes), classes_of(logits)))

  @classmethod
  def of_one(cls, every_class: EveryClass, **attributes: Any) -> Self:
    """One chunk, which counts as one sample; with the attributes that a class adds."""

    def chunk(_: int, labels: jax.Array | None = None) -> EveryClass:
      return dataclasses.replace(every_class, constants=Drawn(labels=labels))

    return cls(every_class.tiling, 1, 1, chunk, **attributes)

  @classmethod
  def at(
    cls,
    logits: GaussianLogits,
    draws: Draws | Chosen,
    sampler: Sampler,
    num_samples: int,
    max_bytes: int | None,
  ) -> Self:
    """Samples of logits over tau with noise, taken at the draws; arguments as in `Integrator`."""
    tiling = _tiling(logits, num_samples, max_bytes)
    if isinstance(draws, Chosen):
      num_samples = 2 * draws.num_pairs
    num_chunks = -(-num_samples // _samples_at_once(logits, num_samples, max_bytes))
    size = -(-num_samples // num_chunks)  # of nearly equal size: less of the last one is wasted
    batch = logits.location.shape[0]
    noise = logits.noise

    def chunk(c: jax.Array | int, labels: jax.Array | None = None) -> EveryClass:
      index = c * size + np.arange(size, dtype=np.int32)  # a constant of the only chunk
      log_weight = draws.log_weight(index) if isinstance(draws, Chosen) else None
      if num_samples % size:
        log_weight = jnp.zeros(size) if log_weight is None else log_weight
        log_weight = jnp.where(index < num_samples, log_weight, 2 * PADDED)
      if log_weight is not None:
        log_weight = jnp.broadcast_to(log_weight, (batch, size)).astype(noise.diag.dtype)
      if source(sampler) is not sobol:
        index = jnp.asarray(index)  # which a user's sampler may count on
      z = draws.normals(sampler, index, noise.num_normals)
      # Shared draws are repeated per example: as one product for the batch, with classes and
      # examples in one dimension, samples took 1.6 times as long on a CPU.
      z = jnp.broadcast_to(z, (batch, *z.shape[1:])).astype(noise.diag.dtype)
      classes, z = _classes_at(logits, z, num_samples)
      return EveryClass(tiling, classes, Drawn(z, log_weight, labels))

    return cls(tiling, num_samples, num_chunks, chunk)

  def each(
    self, function: Callable[[EveryClass], jax.Array], labels: jax.Array | None = None
  ) -> jax.Array:
    """function(chunk) of every chunk, stacked; the backward pass draws each chunk again."""
    if self.num_chunks == 1:
      return function(self.chunk(0, labels))[None]
    run = jax.checkpoint(lambda c: function(self.chunk(c, labels)), prevent_cse=False)
    return jax.lax.map(run, jnp.arange(self.num_chunks))

  def log_prob(self, labels: jax.Array | None = None) -> jax.Array:
    """log p [B, Kp], anything at padded classes; of a sigmoid with labels, log p(y_k)."""

    def of_chunk(c: jax.Array | int) -> jax.Array:
      return self.prepared(self.chunk(c, labels)).values(self.log_p_of)

    first = of_chunk(0)
    if self.num_chunks == 1:
      return first

    @jax.checkpoint
    def add(total: jax.Array, c: jax.Array) -> jax.Array:
      return jnp.logaddexp(total, of_chunk(c))

    rest = jnp.arange(1, self.num_chunks)
    return jax.lax.scan(lambda total, c: (add(total, c), None), first, rest)[0]

  def top_k(self, k: int) -> tuple[jax.Array, jax.Array]:
    """The k most probable classes int32 [B, k], and log p [B, k]."""
    if self.num_chunks == 1:
      return self.prepared(self.chunk(0)).top_k(self.log_p_of, k)
    return EveryClass(self.tiling, Classes(self.log_prob()[:, None])).top_k(mean_of_class, k)

  def expected_entropy(self) -> jax.Array:
    """The entropy given the noise, averaged over samples, [B]."""
    of_chunks = self.each(lambda chunk: self.prepared(chunk).total(self.entropies))
    return of_chunks.sum(axis=0) / self.num_samples

  def prepared(self, chunk: EveryClass) -> EveryClass:
    """The chunk, with what `log_p_of` and `entropies` need of all classes."""
    return chunk

  def log_p_of(self, tile: Tile) -> jax.Array:
    """log of sum_s p_s / S over the samples of a chunk, [B, t]."""
    raise NotImplementedError

  def entropies(self, tile: Tile) -> jax.Array:
    """What classes add to the sum of the samples' entropies, [B, t]."""
    raise NotImplementedError


AnySamples = TypeVar('AnySamples', bound=Samples)


def _tiling(logits: GaussianLogits, num_samples: int, max_bytes: int | None) -> Tiling:
  """How the classes of sampled logits are cut."""
  noise = logits.noise
  num_rows = num_samples
  if logits.projection is None:  # noise and logits are arrays of their own
    num_rows *= 2
  is_full = logits.projection is None and noise.scale is None
  if is_full or projects_factors(logits, num_samples):
    num_rows += noise.num_factors + 2
  tiling = Tiling.of(logits, num_rows, max_bytes)
  if logits.has_tiles:
    return tiling
  return dataclasses.replace(tiling, tile=logits.location.shape[-1])


def _classes_at(
  logits: GaussianLogits, z: jax.Array, num_samples: int
) -> tuple[Classes, jax.Array | None]:
  """The classes of samples with normals z [B, s, T], and z if their logits are made from it."""
  noise = logits.noise
  projection = logits.projection
  if isinstance(projection, Linear):
    if projects_factors(logits, num_samples):
      return classes_of(logits, noise.factors(), 'factors'), z
    return classes_of(logits, noise.noise(z)), None
  if logits.has_tiles:
    return noisy_classes(logits, noise), z
  eps = noise.noise(z)
  if isinstance(projection, Opaque):
    phi = projection.phi[:, None] + eps  # [B, s, D]
    u = projection.get_logits(projection.params, phi.reshape(-1, phi.shape[-1]))
    return Classes(location=u.reshape(*phi.shape[:2], -1)), None  # [B, s, K]
  return Classes(location=logits.location[:, None] + apply_projection(projection, eps)), None


def _samples_at_once(logits: GaussianLogits, num_samples: int, max_bytes: int | None) -> int:
  """Samples of a chunk."""
  num_classes = logits.location.shape[-1]
  noise = logits.noise
  num_values = noise.num_normals
  if not logits.has_tiles:
    num_values += 2 * num_classes
  elif isinstance(logits.projection, Linear) and not projects_factors(logits, num_samples):
    num_values += noise.diag.shape[-1]
  bytes_a_sample = bytes_per_device(logits.location) * num_values / num_classes
  return min(num_samples, max(1, int(budget(max_bytes) / bytes_a_sample)))


def projects_factors(logits: GaussianLogits, num_samples: int) -> bool:
  """Whether W projects the R + 1 factors in place of S samples, because that costs less:

  sample then project   S (R + 1) Q + S Q K
  project then sample   (R + 1) Q K + S (R + 1) K
  """
  if not isinstance(logits.projection, Linear) or not logits.has_factors:
    return False
  num_classes = logits.location.shape[-1]
  noise_dim = logits.noise.diag.shape[-1]
  num_factors = logits.noise.num_factors + 1
  of_samples = num_samples * (num_factors * noise_dim + noise_dim * num_classes)
  of_factors = num_factors * noise_dim * num_classes + num_samples * num_factors * num_classes
  return of_factors <= of_samples
