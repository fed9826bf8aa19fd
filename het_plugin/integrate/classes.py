"""Logits of a range of classes on demand, and loops over such tiles: memory that is flat in K.

The logits of any classes are made from few numbers per example and the columns of W that belong to
the classes (`Classes`). A loop over tiles makes the logits of one tile, reduces them over its
classes, and forgets them. Its gradient makes them once more. So a loss takes [B]-sized values, one
tile, and nothing that grows with K except W and its gradient; HET's noise is itself an array
[B, K], but its samples [B, S, K] never exist. All classes at one time are one tile: there is no
loop then, and JAX keeps for the gradient what it made.

Under a mesh, the tiles are of each device's classes. Loops run inside `Placement.shard_map`, and
what they found is combined over the devices once, after the last tile.

B examples, S samples of T normals, K classes, t of them in a tile, Q noise dimension, D pre-logits.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from het_plugin.integrate.gaussian import (
  PADDED,
  GaussianLogits,
  Linear,
  LowRank,
  Opaque,
  masked,
  matmul,
  project,
)
from het_plugin.integrate.placement import (
  Placement,
  budget,
  bytes_per_device,
  num_examples,
  num_shards,
  platform,
)

# Where the logits of all classes are more than the budget, the arrays of a tile take a half of it.
TILE_SHARE = 2
TILE_MULTIPLE = 128  # the width of a TPU's registers
# Rows of W whose columns at single classes [rows, B, C] are made at one time. A CPU remembers where
# the pages of few rows are: products with 384 to 1,024 rows took half to a third of the time. On
# other devices parts take longer: as many rows as fit into `COLUMN_BYTES`, at least `DEVICE_ROWS`.
CPU_ROWS = 32
DEVICE_ROWS = 128
COLUMN_BYTES = 2**27

HIGHEST = jax.lax.Precision.HIGHEST
MaybeArray = Any  # jax.Array, or None where the attributes say so


@struct.dataclass
class Classes:
  """Logits over tau of a range of t classes: u = mu + noise.

  mu is an array, or phi W + b. The noise is a `LowRank`, in the noise space if there is a kernel
  and of the classes themselves if there is none; or it is given as vectors of the noise space.

  Attributes:
    location: mu [B, 1, t], or the logits of n samples [B, n, t]; None if it is made of phi.
    phi: [B, D]; None if the vectors contain it, which need one product then.
    location_kernel: W of phi, [D, t]; None for `kernel`.
    bias: b [t], or None.
    noise: `LowRank`; None without noise, and with vectors.
    vectors: [B, n, Q], of one `kind`:
      'samples': the noise of n samples;
      'factors': what normals are multiplied with, and phi as the last row if it is contained.
    kernel: W [Q, t] that maps the noise space to the classes, or W' of eq. 14.
    kind: that of the vectors.
    dtype: of the operands of products with W, also for the gradient; None is that of W.
  """

  location: MaybeArray = None
  phi: MaybeArray = None
  location_kernel: MaybeArray = None
  bias: MaybeArray = None
  noise: Any = None
  vectors: MaybeArray = None
  kernel: MaybeArray = None
  kind: str = struct.field(pytree_node=False, default='samples')
  dtype: Any = struct.field(pytree_node=False, default=None)

  @property
  def num_classes(self) -> int:
    """t."""
    columns = self.location if self.kernel is None else self.kernel
    return columns.shape[-1]

  def zeros(self, *shape: int) -> jax.Array:
    """Zeros [B, ...], float32 or wider; they vary along the axes of a `jax.shard_map` as u does."""
    like = next(x for x in (self.vectors, self.location, self.phi) if x is not None)
    dtype = jnp.promote_types(like.dtype, jnp.float32)
    return jnp.zeros_like(like, dtype, shape=(like.shape[0], *shape))

  def letters(self) -> 'Classes':
    """Letters of the dimensions, for `Placement.shard_map`. Those with classes end with k."""
    letters = {
      'location': 'bnk',
      'phi': 'bd',
      'location_kernel': 'dk',
      'bias': 'k',
      'vectors': 'bnq',
      'kernel': 'qk',
    }
    letters = {name: x for name, x in letters.items() if getattr(self, name) is not None}
    noise = self.noise
    if noise is not None:
      q = 'k' if self.kernel is None else 'q'
      scale, loading = (None, 'br' + q) if noise.scale is None else ('b' + q, 'r' + q)
      noise = dataclasses.replace(noise, scale=scale, loading=loading, diag='b' + q)
    return dataclasses.replace(self, noise=noise, **letters)

  def columns(self, start: jax.Array, size: int) -> 'Classes':
    """The same of `size` classes from `start` on."""

    def cut(letters: str, x: jax.Array) -> jax.Array:
      is_cut = letters.endswith('k')
      return jax.lax.dynamic_slice_in_dim(x, start, size, x.ndim - 1) if is_cut else x

    return jax.tree.map(cut, self.letters(), self)

  def mean(self) -> jax.Array:
    """mu [B, 1, t]."""
    if self.location is not None:
      return self.location
    return _products(self.phi[:, None], self._kernel_of_phi) + self.bias

  def logits(self, z: jax.Array | None = None) -> jax.Array:
    """u [B, S, t] of normals z [B, S, T]; None for logits and vectors that are of samples."""
    if self.vectors is None:
      if self.noise is None or z is None:
        return self.mean()
      noise = self.noise.noise(z)  # [B, S, Q] or [B, S, t]
      if self.kernel is None:
        return self.mean() + noise
      if self.location is None and self.location_kernel is None:  # the same W: one product
        return _products(noise + self.phi[:, None], self.kernel) + self.bias
      return self.mean() + _products(noise, self.kernel)
    rows, mu = self.rows()
    if self.kind == 'factors' and z is not None:
      if mu is None:
        mu = rows[:, -1:]
        # With 0 for the row of phi: a slice of the factors would be one more array.
        z = jnp.concatenate([z, jnp.zeros_like(z[..., :1])], axis=-1)
      # mu is added, not multiplied by a 1, since some devices round the operands of products.
      rows = jnp.einsum('bst,btk->bsk', z, rows) + _repeated(mu[:, 0], z.shape[1])  # [B, S, t]
    elif mu is not None:
      rows = rows + mu
    return rows if self.bias is None else rows + self._bias_of(rows)

  def rows(self) -> tuple[jax.Array, jax.Array | None]:
    """The vectors times W [B, n, t]; and mu [B, 1, t] without b, if they do not contain it."""
    rows = _products(self.vectors, self.kernel, self.dtype)
    if self.phi is None:
      return rows, self.location
    return rows, _products(self.phi[:, None], self.location_kernel)

  @property
  def is_product(self) -> bool:
    """Whether u is W times the vectors, and the bias: B S rows of a linear classifier."""
    is_alone = self.location is None and self.phi is None
    return self.vectors is not None and is_alone and self.kind == 'samples'

  def _bias_of(self, rows: jax.Array) -> jax.Array:
    """The bias of rows [B, S, t]."""
    # An outer product, whose transpose is a product too: XLA's sum over examples took ten times as
    # long on a CPU.
    batch, count, _ = rows.shape
    ones = jnp.ones((batch * count,), rows.dtype)
    return jnp.einsum('n,k->nk', ones, self.bias, precision=HIGHEST).reshape(rows.shape)

  @property
  def _kernel_of_phi(self) -> jax.Array:
    """W [D, t] that makes the location."""
    return self.kernel if self.location_kernel is None else self.location_kernel

  def at(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """mu [B, C] and the factors of the noise [B, T, C] of the classes at index int32 [B, C]."""
    noise = self.noise
    if self.kernel is None:
      if noise.scale is None:
        loading = _take(noise.loading, index)
      else:
        loading = jnp.moveaxis(noise.loading[:, index], 0, 1) * _take(noise.scale, index)[:, None]
      factors = jnp.concatenate([loading, _take(noise.diag, index)[:, None]], axis=1)
    else:
      factors = noise.factors()
      if self.location is None and self.location_kernel is None:  # the same W: one product
        phi = self.phi[:, None].astype(factors.dtype)
        rows = _of_columns(jnp.concatenate([factors, phi], axis=1), self.kernel, index)
        return rows[:, -1] + self.bias[index], rows[:, :-1]
      factors = _of_columns(factors, self.kernel, index)  # [B, T, C]
    if self.location is not None:
      return _take(self.location[:, 0], index), factors
    mu = _of_columns(self.phi[:, None], self._kernel_of_phi, index)[:, 0]
    return mu + self.bias[index], factors


def _products(x: jax.Array, kernel: jax.Array, dtype: Any = None) -> jax.Array:
  """x [B, n, Q] times W [Q, t], [B, n, t]; as a product of two matrices, which avoids copies."""
  flat = x.reshape(-1, x.shape[-1])
  if dtype is None or x.dtype == kernel.dtype == dtype:
    flat = matmul(flat, kernel)
  else:
    flat = _product(flat, kernel, dtype)
  return flat.reshape(*x.shape[:2], kernel.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: jax.Array, kernel: jax.Array, dtype: Any) -> jax.Array:
  """x [n, Q] times W [Q, t] in a dtype, summed in that of x; and so is the gradient, whose sums JAX
  would round to the dtype.
  """
  return matmul(x, kernel.astype(dtype))


def _product_fwd(x: jax.Array, kernel: jax.Array, dtype: Any) -> tuple[jax.Array, tuple]:
  return _product(x, kernel, dtype), (x, kernel)


def _product_bwd(dtype: Any, residuals: tuple, g: jax.Array) -> tuple[jax.Array, jax.Array]:
  x, kernel = residuals
  narrow = g.astype(dtype)
  product = functools.partial(jnp.einsum, preferred_element_type=g.dtype)
  of_kernel = product('nq,nk->qk', x.astype(dtype), narrow)
  return product('nk,qk->nq', narrow, kernel.astype(dtype)), of_kernel.astype(kernel.dtype)


_product.defvjp(_product_fwd, _product_bwd)


def _repeated(x: jax.Array, count: int) -> jax.Array:
  """x [B, t] for each of `count` samples, [B, S, t]; an outer product as in `Classes._bias_of`."""
  ones = jnp.ones((count,), x.dtype)
  return jnp.einsum('s,bk->bsk', ones, x, precision=HIGHEST)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
  """x [B, ..., t] at classes [B, C]: [B, ..., C]."""
  index = index.reshape(index.shape[0], *(1,) * (x.ndim - 2), index.shape[1])
  return jnp.take_along_axis(x, index, axis=-1, mode='promise_in_bounds')


def _of_columns(x: jax.Array, kernel: jax.Array, index: jax.Array) -> jax.Array:
  """x [B, T, Q] times the columns of W [Q, t] at classes [B, C]: [B, T, C]."""

  def product(start: jax.Array | int, size: int) -> jax.Array:
    """What `size` rows of W add."""
    rows = jax.lax.dynamic_slice_in_dim(kernel, start, size, 0)
    columns = jnp.moveaxis(rows[:, index], 0, -1).astype(x.dtype)  # [B, C, size]
    return jnp.einsum('btq,bcq->btc', jax.lax.dynamic_slice_in_dim(x, start, size, 2), columns)

  size = CPU_ROWS
  if platform() != 'cpu':
    bytes_a_row = num_examples(index.shape[0]) * index.shape[1] * x.dtype.itemsize
    size = max(DEVICE_ROWS, COLUMN_BYTES // bytes_a_row)
  num_parts, rest = divmod(len(kernel), size)
  if num_parts < 2:
    return product(0, len(kernel))
  zeros = jnp.zeros_like(x, shape=(*x.shape[:2], index.shape[1]))
  found = product(num_parts * size, rest) if rest else zeros
  return jax.lax.fori_loop(0, num_parts, lambda i, total: total + product(i * size, size), found)


# Classes of logits


def linear_location(logits: GaussianLogits) -> Linear | None:
  """phi, W and b of the location, if they are known; where the noise has the same W, that of it."""
  projection = logits.projection
  is_shared = isinstance(projection, Linear) and projection.phi is not None
  linear = projection if is_shared else logits.location_from
  return None if linear is None or linear.phi is None or linear.bias is None else linear


def noisy_classes(logits: GaussianLogits, noise: LowRank) -> Classes:
  """The classes of logits over tau with noise that has the remainder 'rank_one'."""
  projection = logits.projection
  if not isinstance(projection, Linear):
    return Classes(location=logits.location[:, None], noise=project(noise, projection))
  location = _location_of(logits, linear_location(logits))
  return dataclasses.replace(location, noise=noise, kernel=projection.kernel)


def _location_of(logits: GaussianLogits, linear: Linear | None) -> Classes:
  """The location as an array, or of phi; without a second W where the noise has the same."""
  if linear is None:
    return Classes(location=logits.location[:, None])
  own = None if linear is logits.projection else linear.kernel
  return Classes(phi=linear.phi, location_kernel=own, bias=linear.bias)


def classes_of(
  logits: GaussianLogits, vectors: jax.Array | None = None, kind: str = 'samples'
) -> Classes:
  """The classes of logits over tau without noise, or with noise that W or W' projects.

  Args:
    logits: over tau.
    vectors: noise in the noise space [B, n, Q], as in `Classes`. None for the location.
    kind: as in `Classes`.
  """
  linear = linear_location(logits)
  location = _location_of(logits, linear)
  projection: Any = logits.projection
  if vectors is not None and linear is not projection:  # the location is an array, or W' of eq. 14
    return dataclasses.replace(location, vectors=vectors, kernel=projection.kernel, kind=kind)
  if linear is None:
    return location
  phi = location.phi[:, None]
  if vectors is None:
    vectors = phi
  elif kind == 'samples':
    vectors = vectors + phi  # which the same W projects: one product
  else:
    vectors = jnp.concatenate([vectors, phi], axis=1)
  return Classes(bias=linear.bias, vectors=vectors, kernel=linear.kernel, kind=kind)


# Tiles


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

  @classmethod
  def of(cls, logits: GaussianLogits, num_rows: int, max_bytes: int | None) -> 'Tiling':
    """All classes in one tile if arrays of `num_rows` values per example and class take at most
    `max_bytes` per device (None: `placement.budget`); otherwise tiles whose arrays take a share of
    it.
    """
    size = logits.location.shape[-1]
    placement = placement_of(logits)
    location = bytes_per_device(logits.location)
    limit = budget(max_bytes)
    if num_rows * location > limit and not isinstance(logits.projection, Opaque):
      # Each value exists twice: exponentials beside logits, gradients beside rows.
      bytes_a_class = 2 * num_rows * location * num_shards('vocab') / size
      size = max(1, int(limit / TILE_SHARE / bytes_a_class))
      size = max(size // TILE_MULTIPLE * TILE_MULTIPLE, min(size, TILE_MULTIPLE))
    return cls(size, logits.num_classes, placement)

  @property
  def is_whole(self) -> bool:
    """Whether there is one tile of all classes, whose values may be kept."""
    return self.tile >= self.num_classes


def placement_of(logits: GaussianLogits) -> Placement:
  """The placement; ValueError if the mesh does not divide the classes."""
  if isinstance(logits.projection, Opaque):
    return Placement()  # the layout of its classes is unknown
  num_classes = logits.location.shape[-1]
  shards = num_shards('vocab')
  if num_classes % shards:
    raise ValueError(
      f'{num_classes} (padded) classes do not divide into {shards} shards of the model axis: '
      f"set the head's class_multiple to a multiple of {shards}"
    )
  return Placement.current(logits.location.shape[0])


@struct.dataclass
class Tile:
  """Classes of one step of a loop.

  Attributes:
    classes: what their logits are made from.
    buckets: those of the classes [t], or None.
    start: index of the first one among this device's classes.
    ids: int32 [t], class ids.
    counts: bool [t], False at padding and at classes that an earlier tile had.
    constants: as in `EveryClass`, and so are the arrays.
  """

  classes: Classes
  buckets: MaybeArray
  start: jax.Array | int
  ids: jax.Array
  counts: jax.Array
  constants: Any = None
  arrays: Any = None

  def masked(self, u: jax.Array) -> jax.Array:
    """u [..., t] with about `PADDED` where classes do not count."""
    # A sum, since XLA would compute the gradient of u once more for each use of a selection of it.
    return u + jnp.where(self.counts, 0.0, PADDED)

  def logits(self, z: jax.Array | None = None) -> jax.Array:
    """u [B, n, t] (`Classes.logits`), `masked`."""
    u = self.masked(self.classes.logits(z))
    # Behind the barrier, the gradient of u is written where u was: half of a loss's memory. A TPU
    # would need a half more cycles.
    return jax.lax.optimization_barrier(u) if platform() == 'cpu' else u

  def is_label(self, labels: jax.Array) -> jax.Array:
    """bool [B, L, t], which class is which label int32 [B, L]."""
    return (labels[..., None] == self.ids) & self.counts

  def at(self, u: jax.Array, labels: jax.Array) -> jax.Array:
    """u [B, n, t] at labels int32 [B, L], 0 where a label is no class of the tile: [B, n, L]."""
    index = labels - self.ids[0]
    at = jnp.clip(index, 0, u.shape[-1] - 1)
    inside = (index == at) & self.counts[at]
    if labels.shape[-1] == 1:
      return _at_label(u, at, inside, self.is_label(labels))
    return _gathered(u, at, inside)


@jax.custom_jvp
def _at_label(u: jax.Array, at: jax.Array, inside: jax.Array, is_label: jax.Array) -> jax.Array:
  """`Tile.at` of one label, where `is_label` [B, 1, t], with a gradient that is no scatter."""
  # A sum fuses with that of the exponentials, but on a CPU it is an array as large as u. For a
  # gather XLA transposes all logits in a TPU's memory: 0.7 of the time of everything else.
  return jax.lax.platform_dependent(
    u,
    at,
    inside,
    is_label,
    cpu=lambda u, at, inside, _: _gathered(u, at, inside),
    default=lambda u, at, inside, is_label: _summed(u, is_label),
  )


@_at_label.defjvp
def _at_label_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
  return _at_label(*primals), _summed(tangents[0], primals[-1])


def _gathered(u: jax.Array, at: jax.Array, inside: jax.Array) -> jax.Array:
  found = jnp.take_along_axis(u, at[:, None], axis=-1, mode='promise_in_bounds')
  return jnp.where(inside[:, None], found, 0.0)


def _summed(u: jax.Array, is_label: jax.Array) -> jax.Array:
  return jnp.where(is_label, u, 0.0).sum(axis=-1, keepdims=True)


# Sums over classes


@struct.dataclass
class Terms:
  """What the classes of a tile add to sums over all classes; None for what is not asked for.

  Attributes:
    exponents: u [B, S, t], of which log sum_k exp(u_k) is taken; [B, t] with buckets.
    sums: arrays [B, ...] of any tree, which tiles add up.
    each: a value of each class [B, t].
    num_buckets: H, for the exponents to be summed in each bucket; None over all classes.
  """

  exponents: MaybeArray = None
  sums: Any = None
  each: MaybeArray = None
  num_buckets: int | None = struct.field(pytree_node=False, default=None)

  def highest(self, tile: Tile) -> MaybeArray:
    """The maximum [B, S] or [B, H] without a gradient; 2 `PADDED` for a bucket without classes."""
    if self.exponents is None:
      return None
    u = jax.lax.stop_gradient(self.exponents)
    if self.num_buckets is None:
      return u.max(axis=-1)
    # Class by class: a CPU took 15 times as long for a maximum under a mask [B, H, K].
    lowest = jnp.full_like(u, 2 * PADDED, shape=(self.num_buckets, u.shape[0]))
    return lowest.at[tile.buckets].max(u.T).T

  def relative_to(self, top: MaybeArray, tile: Tile) -> 'Sums':
    """The sums of this tile."""
    total = None
    if self.num_buckets is not None:
      e = jnp.where(tile.counts, jnp.exp(self.exponents - top[:, tile.buckets]), 0.0)
      total = jax.ops.segment_sum(e.T, tile.buckets, self.num_buckets).T
    elif self.exponents is not None:
      total = _sum_exp(self.exponents, top)
    return Sums(top, total, self.sums, self.each)


@jax.checkpoint
def _sum_exp(u: jax.Array, top: jax.Array) -> jax.Array:
  """The sum of exp(u - top), of u [B, S, t]: its gradient makes the exponentials again, which costs
  less than an array of them.
  """
  return jnp.exp(u - top[..., None]).sum(axis=-1)


@struct.dataclass
class Sums:
  """What was found over classes; as `Terms`.

  Attributes:
    top: the maximum of the exponents [B, S] or [B, H], without a gradient.
    total: the sum of exp(u - top).
    sums: arrays [B, ...].
    each: [B, k].
  """

  top: MaybeArray = None
  total: MaybeArray = None
  sums: Any = None
  each: MaybeArray = None

  @property
  def log_total(self) -> jax.Array:
    """Kept apart from `top`, because u - top is exact; 0 for a bucket without classes."""
    return jnp.log(jnp.where(self.total > 0, self.total, 1.0))

  def with_tile(self, terms: Terms, tile: Tile) -> 'Sums':
    """The sums of these tiles and of one more, as an online softmax has them."""
    top = total = each = None
    if self.top is not None:
      top = jnp.maximum(self.top, terms.highest(tile))
      total = self.total * jnp.exp(self.top - top)
    new = terms.relative_to(top, tile)
    total, sums = jax.tree.map(jnp.add, (total, self.sums), (new.total, new.sums))
    if self.each is not None:  # classes of an earlier tile have the same values again
      each = jax.lax.dynamic_update_slice_in_dim(self.each, new.each, tile.start, 1)
    return Sums(top, total, sums, each)


TermsOf = Callable[[Tile], Terms]  # without a closure over arrays
Value = Callable[[Tile], jax.Array]  # [B, t], the same


@struct.dataclass
class EveryClass:
  """What sums over every class are made from, a tile at a time.

  Attributes:
    tiling: how classes are cut.
    classes: what logits are made from.
    constants: arrays [B, ...] that a tile has beside its classes, without a gradient.
    arrays: the same, with a gradient.
    buckets: of the classes [Kp], or None.
  """

  tiling: Tiling = struct.field(pytree_node=False)
  classes: Classes
  constants: Any = None
  arrays: Any = None
  buckets: MaybeArray = None

  def sums(self, terms: TermsOf) -> Sums:
    """The sums of the terms over all classes."""
    return self._run(functools.partial(_sums_of_device, terms), Sums('b', 'b', 'b', 'bk'))

  def values(self, value: Value) -> jax.Array:
    """The values [B, Kp]."""
    return self.sums(lambda tile: Terms(each=value(tile))).each

  def total(self, value: Value) -> jax.Array:
    """The sum of the values [B]."""

    def terms(tile: Tile) -> Terms:
      return Terms(sums=jnp.where(tile.counts, value(tile), 0.0).sum(axis=-1))

    return self.sums(terms).sums

  def at(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`Classes.at` of the classes at index int32 [B, C].

    Each device multiplies its own columns of W: for an index of all of them, the compiler would
    send the columns [Q, B, C] to every device.
    """

    def local(self: EveryClass) -> tuple[jax.Array, jax.Array]:
      axes = self.tiling.placement.vocab
      if axes is None:
        return self.classes.at(self.constants)
      num_classes = self.classes.num_classes
      own = self.constants - self.tiling.placement.shard_index() * num_classes
      inside = (own >= 0) & (own < num_classes)
      mu, factors = self.classes.at(jnp.where(inside, own, 0))
      found = jnp.where(inside, mu, 0.0), jnp.where(inside[:, None], factors, 0.0)
      return jax.lax.psum(found, axes)

    return dataclasses.replace(self, constants=index)._run(local, 'b')

  def top_k(self, value: Value, k: int, num_bins: int | None = None) -> tuple[jax.Array, jax.Array]:
    """The k <= K largest values in order: ids int32 [B, k], and values [B, k].

    No array [B, K] is made: the loop keeps the k largest of those seen so far. With bins, they
    are the largest of the best ones of the bins of a tile.
    """

    def local(self: EveryClass) -> Best:
      def body(best: Best | None, tile: Tile) -> Best:
        return _best_so_far(best, tile.masked(value(tile)), tile, k, num_bins)

      best = None
      if self.is_tiled:
        lowest = self.classes.zeros(k) + 2 * PADDED
        best = lowest, jnp.zeros_like(lowest, jnp.int32)
      best = self.fold(body, best)
      axes = self.tiling.placement.vocab
      if axes is None:
        return best
      # In the order of the classes, so that the first of equal ones is kept.
      return _best_of(*(jax.lax.all_gather(x, axes, axis=1, tiled=True) for x in best), k)

    values, ids = self._run(local, 'b')
    return ids, values

  @property
  def is_tiled(self) -> bool:
    """Whether this device's classes are more than a tile."""
    return self.classes.num_classes > self.tiling.tile

  def fold(self, body: Callable[[Any, Tile], Any], carry: Any) -> Any:
    """The carry after body(carry, tile) of all tiles of this device's classes."""
    num_classes = self.classes.num_classes
    size = min(self.tiling.tile, num_classes)
    first_class = self.tiling.placement.shard_index() * num_classes

    def step(carry: Any, index: jax.Array | int) -> tuple[Any, None]:
      first = index * size
      start = jnp.minimum(first, num_classes - size)  # the last tile overlaps the one before
      local = start + jnp.arange(size)
      ids = first_class + local
      counts = (local >= first) & (ids < self.tiling.num_classes)
      buckets = self.buckets
      classes = self.classes
      if self.is_tiled:
        if buckets is not None:
          buckets = jax.lax.dynamic_slice_in_dim(buckets, start, size)
        classes = classes.columns(start, size)
      tile = Tile(classes, buckets, start, ids, counts, self.constants, self.arrays)
      return body(carry, tile), None

    if not self.is_tiled:
      return step(carry, 0)[0]
    return jax.lax.scan(step, carry, jnp.arange(-(-num_classes // size)))[0]

  def _run(self, local: Callable[['EveryClass'], Any], outputs: Any) -> Any:
    """`local` of each device's part."""
    letters = EveryClass(self.tiling, self.classes.letters(), 'b', 'b', 'k')
    return self.tiling.placement.shard_map(local, (letters,), outputs)(self)


def _sums_of_device(terms: TermsOf, every_class: EveryClass) -> Sums:
  """The sums over all classes; `each` of this device's alone."""
  if every_class.is_tiled:
    found = _sums_in_tiles(terms, every_class)
  else:
    found = _sums(terms, every_class)[0]
  axes = every_class.tiling.placement.vocab
  if found.top is not None:
    own = jax.lax.stop_gradient(found.top)
    top = own if axes is None else jax.lax.pmax(own, axes)
    found = dataclasses.replace(found, top=top, total=found.total * jnp.exp(own - top))
  if axes is None:
    return found
  total, sums = jax.lax.psum((found.total, found.sums), axes)
  return dataclasses.replace(found, total=total, sums=sums)


def _sums(
  terms: TermsOf, every_class: EveryClass, kept: jax.Array | None = None
) -> tuple[Sums, jax.Array | None]:
  """The sums over this device's classes; and `kept`, None or an array as W, with logits of the
  first examples in its rows.
  """
  classes = every_class.classes

  def body(carry: tuple[Any, Any], tile: Tile) -> tuple[Sums, jax.Array | None]:
    before, kept = carry
    if kept is not None:
      u = tile.classes.logits()
      own = u[: _num_kept(classes)].reshape(-1, u.shape[-1])
      kept = jax.lax.dynamic_update_slice(kept, own, (0, tile.start))
      tile = dataclasses.replace(tile, classes=Classes(location=u))
    new = terms(tile)
    if before is None:
      return new.relative_to(new.highest(tile), tile), kept
    return before.with_tile(new, tile), kept

  start = None
  if every_class.is_tiled:
    tiling = dataclasses.replace(every_class.tiling, tile=classes.num_classes)
    shapes = jax.eval_shape(
      lambda: _sums(terms, dataclasses.replace(every_class, tiling=tiling))[0]
    )
    start = jax.tree.map(lambda x: classes.zeros(*x.shape[1:]), shapes)
    if start.top is not None:
      start = dataclasses.replace(start, top=start.top + 2 * PADDED)
  return every_class.fold(body, (start, kept))


def _num_kept(classes: Classes) -> int:
  """Examples whose logits fit into an array as large as W [Q, k]."""
  batch, count, dim = classes.vectors.shape
  return min(batch, dim // count)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums_in_tiles(terms: TermsOf, every_class: EveryClass) -> Sums:
  """`_sums`, with a gradient in a second loop, which makes the logits of each tile again.

  Making them is a third of the work of a linear classifier. But the gradient of W [Q, K] has memory
  that nothing uses before the second loop. So the first loop leaves up to Q rows of logits there,
  and the second one takes each tile of them out before it writes that tile's gradient.
  """
  return _sums(terms, every_class)[0]


def _sums_fwd(terms: TermsOf, primal: Any) -> tuple[Sums, tuple[Any, ...]]:
  every_class = jax.custom_derivatives.custom_vjp_primal_tree_values(primal)
  classes = every_class.classes
  kept = None
  if classes.is_product and primal.classes.kernel.perturbed:
    batch = classes.vectors.shape[0]
    is_many = isinstance(batch, int) and 4 * _num_kept(classes) >= batch  # fewer do not pay
    if is_many and classes.kernel.dtype == classes.zeros().dtype:
      kept = jnp.zeros_like(classes.kernel)
  found, kept = _sums(terms, every_class, kept)
  return found, (every_class, found.top, kept)


def _sums_bwd(terms: TermsOf, residuals: tuple[Any, ...], g: Sums) -> tuple[EveryClass]:
  every_class, top, kept = residuals
  classes = every_class.classes
  letters = classes.letters()
  g = dataclasses.replace(jax.tree.map(_dense, g), top=None)

  if kept is not None:
    # Stored so, since the product that is the gradient of W takes a CPU a quarter longer otherwise.
    columns = jax.lax.optimization_barrier(classes.vectors.reshape(-1, len(classes.kernel)).T)

  def body(carry: tuple[Classes, Any], tile: Tile) -> tuple[Classes, Any]:
    of_classes, of_arrays = carry
    own = tile.classes
    pull = None
    if kept is not None:
      transposed = dataclasses.replace(own, vectors=columns.T.reshape(classes.vectors.shape))
      pull = jax.vjp(lambda classes: classes.logits(), transposed)[1]
      own = Classes(location=_logits_again(own, of_classes.kernel, tile.start))

    def of(classes: Classes, arrays: Any) -> Sums:
      new = terms(dataclasses.replace(tile, classes=classes, arrays=arrays))
      return dataclasses.replace(new.relative_to(top, tile), top=None)

    g_tile = g
    if g.each is not None:
      g_tile = jax.lax.dynamic_slice_in_dim(g.each, tile.start, tile.ids.size, 1)
      g_tile = dataclasses.replace(g, each=jnp.where(tile.counts, g_tile, 0.0))
    new, new_arrays = jax.vjp(of, own, tile.arrays)[1](g_tile)
    if pull is not None:
      (new,) = pull(new.location)

    def add(letters: str, total: jax.Array, new: jax.Array) -> jax.Array:
      if not letters.endswith('k'):
        return total + new
      size = new.shape[-1]
      axis = new.ndim - 1
      if classes.num_classes % size:  # the last tile has classes of the one before
        old = jax.lax.dynamic_slice_in_dim(total, tile.start, size, axis)
        is_padding = tile.ids >= every_class.tiling.num_classes  # whose gradient is 0
        new = jnp.where(tile.counts | is_padding, new, old)
      return jax.lax.dynamic_update_slice_in_dim(total, new, tile.start, axis)

    of_classes = jax.tree.map(add, letters, of_classes, new)
    return of_classes, jax.tree.map(jnp.add, of_arrays, new_arrays)

  of_classes, of_arrays = jax.tree.map(jnp.zeros_like, (classes, every_class.arrays))
  if kept is not None:
    of_classes = dataclasses.replace(of_classes, kernel=kept)
  of_classes, of_arrays = every_class.fold(body, (of_classes, of_arrays))
  return (EveryClass(every_class.tiling, of_classes, arrays=of_arrays),)


_sums_in_tiles.defvjp(_sums_fwd, _sums_bwd, symbolic_zeros=True)


def _logits_again(classes: Classes, kept: jax.Array, start: jax.Array | int) -> jax.Array:
  """u [B, S, t] of a tile that starts at `start`, with those that the first loop left."""
  batch, count, _ = classes.vectors.shape
  num_kept = _num_kept(classes)
  size = classes.num_classes
  u = jax.lax.dynamic_slice(kept, (0, start), (num_kept * count, size))
  u = u.reshape(num_kept, count, size)
  if num_kept == batch:
    return u
  rest = dataclasses.replace(classes, vectors=classes.vectors[num_kept:])
  return jnp.concatenate([u, rest.logits()])


def _dense(cotangent: Any) -> jax.Array:
  is_zero = isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
  return jnp.zeros(cotangent.shape, cotangent.dtype) if is_zero else cotangent


# The k largest


Best = tuple[jax.Array, jax.Array]  # the k largest values [B, k], and their class ids


def _best_so_far(
  best: Best | None, values: jax.Array, tile: Tile, k: int, num_bins: int | None
) -> Best:
  """The k largest of those that were found before, None at the first tile, and of a tile [B, t]."""
  size = values.shape[-1]
  if num_bins is not None and size >= 2 * num_bins:
    values, at = _best_of_bins(values, num_bins)
    values, at = _best_of(values, at, k)
  else:
    values, at = _top_k(values, min(k, size))
  ids = at + tile.ids[0].astype(jnp.int32)
  if best is None:
    return values, ids
  values = jnp.concatenate([best[0], values], axis=-1)
  return _best_of(values, jnp.concatenate([best[1], ids], axis=-1), k)


def _best_of_bins(values: jax.Array, num_bins: int) -> tuple[jax.Array, jax.Array]:
  """The largest value of every bin of [B, n], and where it is; a bin has every `num_bins`-th value.

  A `top_k` of all values is a sort on a TPU, and with 5,000 took twice as long on a CPU.
  """
  padding = -values.shape[-1] % num_bins
  values = jnp.pad(values, ((0, 0), (0, padding)), constant_values=2 * PADDED)
  values = values.reshape(values.shape[0], -1, num_bins)
  at = jnp.argmax(values, axis=1).astype(jnp.int32)
  return values.max(axis=1), at * num_bins + jnp.arange(num_bins, dtype=jnp.int32)


def _best_of(values: jax.Array, ids: jax.Array, k: int) -> Best:
  """The k largest of n candidates [B, n]."""
  values, at = _top_k(values, k)
  return values, jnp.take_along_axis(ids, at, axis=-1, mode='promise_in_bounds')


def _top_k(values: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
  """The k largest values [B, k] of [B, n], and where they are."""
  if isinstance(values.shape[0], int):
    return jax.lax.top_k(values, k)
  # TensorFlow has no `top_k` of a symbolic B.
  at = jnp.broadcast_to(jnp.arange(values.shape[1], dtype=jnp.int32), values.shape)
  values, at = jax.lax.sort((-values, at), num_keys=1)
  return -values[:, :k], at[:, :k]


def top_class(logits: GaussianLogits, max_bytes: int | None = None) -> jax.Array:
  """The class with the largest location, int32 [B]; never a padded one.

      >>> import jax.numpy as jnp
      >>> from het_plugin.integrate import GaussianLogits, top_class
      >>> location = jnp.array([[0.0, 2.0, 1.0, 9.0]])  # the last class is padding
      >>> logits = GaussianLogits(location, None, None, jnp.float32(1.0), num_classes=3)
      >>> top_class(logits).tolist()
      [1]

  A location larger than `max_bytes` (None: as in `Integrator`) is searched in tiles, if it can be
  made on demand.
  """
  tiling = Tiling.of(logits, 1, max_bytes)
  if tiling.is_whole or linear_location(logits) is None:
    return jnp.argmax(masked(logits, logits.location), axis=-1)
  classes = jax.lax.stop_gradient(classes_of(logits))  # in which tau changes no order
  return EveryClass(tiling, classes).top_k(mean_of_class, 1)[0][:, 0]


def mean_of_class(tile: Tile) -> jax.Array:
  """mu [B, t]."""
  return tile.classes.logits()[:, 0]
