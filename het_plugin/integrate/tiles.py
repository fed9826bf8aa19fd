"""Logits of a range of classes on demand, and loops over such tiles: memory that is flat in K.

Where the noise of a head lies in fewer dimensions than classes, the logits of any class are a
product of a few rows per example and the columns of W that belong to the class (`Source`). A loop
over tiles of classes makes the logits of one tile, reduces them over its classes, and forgets them.
Its gradient makes them once more. So a loss takes [B]-sized values, one tile, and nothing that
grows with K except W and its gradient. That holds for DET, HET-H and HET-XL. The noise of HET is
itself an array [B, K], so HET is never cut into tiles.

Under a mesh, the tiles are of each device's classes. Loops run inside `Placement.shard_map`, and
what they found is combined over the devices once, after the last tile.

B examples, n rows per example, t classes of a tile, Q noise dimension, D pre-logits.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from het_plugin.integrate.gaussian import (
  PADDED,
  GaussianLogits,
  Hashed,
  Linear,
  LowRank,
  apply_projection,
  masked,
)
from het_plugin.integrate.placement import Placement, bytes_per_device, dims, num_shards

# A loss takes tiles if one array [B, Kp] is larger than this share of `Integrator.chunk_bytes`; the
# arrays of a tile then take about `TILE_SHARE`.
WHOLE_SHARE = 4
TILE_SHARE = 8
TILE_MULTIPLE = 128  # the width of a TPU's registers
MIN_TILE = 256


@dataclasses.dataclass(frozen=True)
class Tiling:
  """How classes are cut into tiles (static under jit).

  Attributes:
    tile: classes of a tile.
    num_classes: K; classes from K on are padding.
    placement: how batch and classes are cut over devices.
  """

  tile: int
  num_classes: int
  placement: Placement

  @property
  def is_whole(self) -> bool:
    """Whether there is one tile of all classes, whose values may be kept."""
    return self.tile >= self.num_classes

  def sum_of_shards(self, x: jax.Array) -> jax.Array:
    """The sum over the devices that have other classes; inside `Placement.shard_map`."""
    axes = self.placement.vocab
    return x if axes is None else jax.lax.psum(x, axes)

  def highest(self, top: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The maximum of all shards, and the factor that makes this shard's sums relative to it."""
    axes = self.placement.vocab
    top = jax.lax.stop_gradient(top)
    highest = top if axes is None else jax.lax.pmax(top, axes)
    return highest, jnp.exp(top - highest)


@struct.dataclass
class Source:
  """What the logits over tau of any range of classes are made from: rows = x W, the last one mu.

  Attributes:
    x: [B, n, Q]. Factors with phi as the last row, if normals are multiplied with them; or samples,
      which are logits already.
    kernel: W [Q, Kp], or W' of eq. 14.
    bias: [Kp], added to mu or to all samples.
    phi: [B, D] if mu has a W of its own, which is the case for W' only.
    location_kernel: that W [D, Kp].
    variance: [B, Q], variances of independent noise, which the exact sigmoid adds.
    is_factors: whether x are factors.
    is_paired: whether x are samples in pairs: the first row is their mean, and the others are what
      is added to it, and subtracted from it.
  """

  x: jax.Array
  kernel: jax.Array
  bias: jax.Array
  phi: jax.Array | None = None
  location_kernel: jax.Array | None = None
  variance: jax.Array | None = None
  is_factors: bool = struct.field(pytree_node=False, default=False)
  is_paired: bool = struct.field(pytree_node=False, default=False)

  @property
  def num_samples(self) -> int:
    """Samples, if x are samples."""
    count = self.x.shape[1]
    return 2 * (count - 1) if self.is_paired else count

  @property
  def num_columns(self) -> int:
    """t."""
    return self.kernel.shape[-1]

  def letters(self) -> 'Source':
    """Letters of the dimensions, for `Placement.shard_map`. Those with classes end with k."""
    return Source(
      dims('bnq'),
      dims('qk'),
      dims('k'),
      None if self.phi is None else dims('bd'),
      None if self.location_kernel is None else dims('dk'),
      None if self.variance is None else dims('bq'),
      self.is_factors,
      self.is_paired,
    )

  def products(self, x: jax.Array) -> jax.Array:
    """x [B, n, Q] times W, [B, n, t]; as a product of two matrices, which avoids copies."""
    flat = apply_projection(Linear(self.kernel), x.reshape(-1, x.shape[-1]))
    return flat.reshape(*x.shape[:2], -1)

  def pull(self, weights: jax.Array) -> jax.Array:
    """weights [B, n, t] times W^T, [B, n, Q]."""
    kernel = self.kernel.astype(weights.dtype)
    flat = weights.reshape(-1, weights.shape[-1]) @ kernel.T
    return flat.reshape(*weights.shape[:2], -1)

  def offset(self) -> jax.Array:
    """What mu has beside x W, [1, 1, t] or [B, 1, t]."""
    if self.phi is None or self.location_kernel is None:
      return self.bias[None, None]
    return (apply_projection(Linear(self.location_kernel), self.phi) + self.bias)[:, None]

  def rows(self) -> tuple[jax.Array, jax.Array]:
    """Rows [B, n, t], for factors with mu as the last one; and a shift [t] of mu or of all samples,
    which is kept apart because it is the same for all examples.
    """
    rows = self.products(self.x)
    if self.phi is not None and self.location_kernel is not None:
      mu = apply_projection(Linear(self.location_kernel), self.phi)[:, None]
      rows = jnp.concatenate([rows, mu], axis=1) if self.is_factors else self._moved(rows, mu)
    if self.is_paired:
      rows = jnp.concatenate([rows[:, :1] + rows[:, 1:], rows[:, :1] - rows[:, 1:]], axis=1)
    return rows, self.bias

  def _moved(self, rows: jax.Array, by: jax.Array) -> jax.Array:
    """All samples [B, n, ...] plus a row [B, 1, ...]."""
    if not self.is_paired:
      return rows + by
    return jnp.concatenate([rows[:, :1] + by, rows[:, 1:]], axis=1)


@struct.dataclass
class Tile:
  """Classes of one step of a loop.

  Attributes:
    source: with the columns of these classes only.
    buckets: those of the classes [t], or None.
    start: index of the first one among this device's classes.
    classes: int32 [t], class ids.
    counts: bool [t], False at padding and at classes that an earlier tile had.
  """

  source: Any
  buckets: jax.Array | None
  start: jax.Array
  classes: jax.Array
  counts: jax.Array

  def masked(self, u: jax.Array) -> jax.Array:
    """u [..., t] with `PADDED` where classes do not count."""
    return jnp.where(self.counts, u, PADDED)


def linear_location(logits: GaussianLogits) -> Linear | None:
  """phi, W and b of the location, if it is known that it is phi W + b."""
  projection = logits.projection
  is_shared = isinstance(projection, Linear) and projection.phi is not None
  return projection if is_shared else logits.location_from


def has_source(logits: GaussianLogits) -> bool:
  """Whether the logits of a range of classes can be made on demand."""
  is_flat = logits.covariance is None or isinstance(logits.projection, (Linear, Hashed))
  return is_flat and linear_location(logits) is not None


def source_of(
  logits: GaussianLogits,
  vectors: jax.Array | None = None,
  variance: jax.Array | None = None,
  is_factors: bool = False,
  is_paired: bool = False,
) -> Source:
  """The `Source` of logits that have one (`has_source`).

  Args:
    logits: `GaussianLogits`.
    vectors: noise over tau in the noise space [B, n, Q] of HET-XL: factors, or samples. None for
      the location alone.
    variance: that of `Source`.
    is_factors: whether the vectors are factors.
    is_paired: as in `Source`.

  Raises:
    ValueError: the logits have none.
  """
  inverse = 1.0 / logits.temperature
  linear = linear_location(logits)
  if linear is None or linear.phi is None or linear.bias is None:
    raise ValueError('source_of: the logits need a location phi W + b that they are made from')
  phi = linear.phi * inverse
  bias = linear.bias * inverse
  if vectors is None:
    return Source(phi[:, None], linear.kernel, bias, variance=variance)
  if linear is not logits.projection and isinstance(logits.projection, Linear):  # W' of eq. 14
    own = logits.projection.kernel
    return Source(vectors, own, bias, phi, linear.kernel, variance, is_factors, is_paired)
  if is_paired:
    x = jnp.concatenate([vectors[:, :1] + phi[:, None], vectors[:, 1:]], axis=1)
  else:
    x = jnp.concatenate([vectors, phi[:, None]], axis=1) if is_factors else vectors + phi[:, None]
  return Source(x, linear.kernel, bias, None, None, variance, is_factors, is_paired)


def tile_size(logits: GaussianLogits, num_rows: int, chunk_bytes: int) -> int | None:
  """Classes of a tile that has `num_rows` values per example and class; None for all classes at one
  time, where one array [B, Kp] is small enough.
  """
  location = bytes_per_device(logits.location)
  if location <= chunk_bytes // WHOLE_SHARE:
    return None
  classes = logits.location.shape[-1] // num_shards('vocab')
  # Rows, their gradient, and exponentials beside logits: each value exists twice.
  bytes_a_class = 2 * num_rows * location / classes
  size = int(chunk_bytes / TILE_SHARE / bytes_a_class)
  return max(MIN_TILE, size // TILE_MULTIPLE * TILE_MULTIPLE)


def fold(
  tiling: Tiling,
  source: Source,
  body: Callable[[Any, Tile], Any],
  carry: Any,
  buckets: jax.Array | None = None,
) -> Any:
  """The carry after body(carry, tile) of all tiles of this device's classes.

  The source is any pytree with `num_columns` and `letters()`. One tile of all classes is no loop.
  """
  num_classes = source.num_columns
  size = min(tiling.tile, num_classes)
  first_class = tiling.placement.shard_index() * num_classes

  def step(carry, index):
    first = index * size
    start = jnp.minimum(first, num_classes - size)  # the last tile overlaps the one before
    local = start + jnp.arange(size)
    classes = first_class + local
    counts = (local >= first) & (classes < tiling.num_classes)
    own = buckets
    columns = source
    if size < num_classes:
      own = None if buckets is None else jax.lax.dynamic_slice_in_dim(buckets, start, size)
      columns = _columns(source, start, size)
    return body(carry, Tile(columns, own, start, classes, counts)), None

  if size == num_classes:
    return step(carry, 0)[0]
  return jax.lax.scan(step, carry, jnp.arange(-(-num_classes // size)))[0]


def pull_from_tiles(
  tiling: Tiling,
  source: Source,
  pull: Callable[[Tile], Source],
  buckets: jax.Array | None = None,
) -> Source:
  """The gradient of this device's source, from that of each tile's.

  Each column of W is written once. Gradients are summed over the devices that share what they
  belong to.
  """
  letters = source.letters()

  def add(total, tile):
    def one(letters, total, new):
      if not letters.endswith('k'):
        return total + new
      size = new.shape[-1]
      axis = new.ndim - 1
      old = jax.lax.dynamic_slice_in_dim(total, tile.start, size, axis)
      new = jnp.where(tile.counts, new, old)
      return jax.lax.dynamic_update_slice_in_dim(total, new, tile.start, axis)

    return jax.tree.map(one, letters, total, pull(tile))

  def over_devices(letters, total):
    axes = tiling.placement.batch if letters.endswith('k') else tiling.placement.vocab
    return total if axes is None else jax.lax.psum(total, axes)

  if source.num_columns <= tiling.tile:
    total = fold(tiling, source, lambda _, tile: pull(tile), None, buckets)
  else:
    total = fold(tiling, source, add, jax.tree.map(jnp.zeros_like, source), buckets)
  return jax.tree.map(over_devices, letters, total)


def _columns(source, start, size):
  def one(letters, x):
    return jax.lax.dynamic_slice_in_dim(x, start, size, x.ndim - 1) if letters[-1] == 'k' else x

  return jax.tree.map(one, source.letters(), source)


def factors_over_tau(noise: LowRank) -> jax.Array:
  """V(x), and d(x) if it is one more factor, [B, R + 1, Q]."""
  if noise.remainder == 'diag':
    return noise.dense_loading()
  return jnp.concatenate([noise.dense_loading(), noise.diag[:, None]], axis=1)


def top_class(logits: GaussianLogits, chunk_bytes: int = 2**28) -> jax.Array:
  """The class with the largest location, int32 [B]; never a padded one.

      >>> import jax.numpy as jnp
      >>> from het_plugin.integrate import GaussianLogits, top_class
      >>> location = jnp.array([[0.0, 2.0, 1.0, 9.0]])  # the last class is padding
      >>> logits = GaussianLogits(location, None, None, jnp.float32(1.0), num_classes=3)
      >>> top_class(logits).tolist()
      [1]

  A location larger than `WHOLE_SHARE` of `chunk_bytes` is searched in tiles, if it can be made on
  demand.
  """
  size = tile_size(logits, 1, chunk_bytes) if has_source(logits) else None
  if size is None:
    return jnp.argmax(masked(logits, logits.location), axis=-1)
  tiling = Tiling(size, logits.num_classes, Placement.current(logits.location.shape[0]))
  source = jax.lax.stop_gradient(source_of(logits))

  def local(source):
    def body(carry, tile):
      best, found = carry
      u = tile.masked(tile.source.products(tile.source.x) + tile.source.offset())[:, 0]  # [B, t]
      new = u.max(axis=-1)
      index = tile.classes[jnp.argmax(u, axis=-1)].astype(jnp.int32)
      return jnp.maximum(best, new), jnp.where(new > best, index, found)

    like = jnp.zeros_like(source.x, shape=source.x.shape[:1])
    best, found = fold(tiling, source, body, (like + 2 * PADDED, like.astype(jnp.int32)))
    if tiling.placement.vocab is None:
      return found
    highest = jax.lax.pmax(best, tiling.placement.vocab)
    found = jnp.where(best == highest, found, jnp.iinfo(jnp.int32).max)
    return jax.lax.pmin(found, tiling.placement.vocab)

  return tiling.placement.shard_map(local, (source.letters(),), 'b')(source)
