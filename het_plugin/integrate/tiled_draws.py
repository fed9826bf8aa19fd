"""Rotation and fit of `draws`, with sums over classes in tiles (`tiles`).

The results are those of `draws` up to rounding. There, the factors in logit space G = F W exist for
all classes. Here they never do, because all that is needed of them are two sums over the classes
in the noise space R^Q. With p the softmax of the logits at one point of the noise, and w_k the
column of W that belongs to class k,

    mean = sum_k p_k w_k                                       E_p[G] = F mean
    C v = sum_k p_k (w_k - mean) ((w_k - mean) . v)            A = F C F^T

Each is a loop over tiles that multiplies W with a few vectors per example. Every step of the fit
takes two loops, so the fit costs several times as much as a loss of few samples.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from het_plugin.integrate import draws as draws_lib
from het_plugin.integrate.draws import Fit, Root
from het_plugin.integrate.gaussian import PADDED, LowRank
from het_plugin.integrate.placement import dims
from het_plugin.integrate.tiles import Source, Tile, Tiling, fold


def fit(tiling: Tiling, source: Source, noise: LowRank, label: jax.Array, count: int) -> Fit:
  """The fit of `draws.fit`.

  Args:
    tiling: how classes are cut.
    source: of the location: x [B, 1, Q] is phi, or 0 where phi has a W of its own.
    noise: over tau, in the noise space.
    label: int32 [B].
    count: number of axes.
  """

  def local(source, noise, label):
    at_label = _column(tiling, source, label)
    zero = jnp.zeros_like(source.x, shape=(source.x.shape[0], 1, noise.num_normals))
    _, pull = jax.vjp(noise.noise, zero)
    location = _point(tiling, source, noise, zero[:, 0])

    def add(i, state):
      axes, mean = state
      z = jnp.einsum('bm,bmt->bt', mean, axes)
      is_location = isinstance(i, int) and i == 0
      point = location if is_location else _point(tiling, source, noise, z)
      slope = pull(at_label[:, None] - point.mean)[0][:, 0]  # [B, T]
      axes = draws_lib.with_row(axes, draws_lib.next_axis(axes, slope, i), i)
      curvature = point.covariance_of(noise.noise(axes))
      return axes, draws_lib.newton_step(axes, slope, mean, curvature)

    num_classes = source.kernel.shape[-1]
    start = zero, zero[:, 0, :1]
    axes, mean = draws_lib.grown(min(count, noise.num_normals), num_classes, add, start)
    expectations = _expectations(location, at_label, noise.noise(axes))
    return draws_lib.fit_along(axes, mean, expectations, num_classes)

  source, noise = jax.lax.stop_gradient((source, noise))
  inputs = *_letters(source, noise), dims('b')
  outputs = Fit(dims('bmt'), dims('bm'), Root.letters(), dims('b'))
  run = tiling.placement.shard_map(local, inputs, outputs)
  return jax.lax.stop_gradient(run(source, noise, label))


def principal_directions(tiling: Tiling, source: Source, noise: LowRank) -> jax.Array:
  """Those of `draws.principal_directions`; arguments are those of `fit`."""

  def local(source, noise):
    zero = jnp.zeros_like(source.x, shape=(source.x.shape[0], noise.num_normals))
    return _point(tiling, source, noise, zero).principal_directions()

  source, noise = jax.lax.stop_gradient((source, noise))
  run = tiling.placement.shard_map(local, _letters(source, noise), dims('bmt'))
  return jax.lax.stop_gradient(run(source, noise))


def _letters(source, noise):
  scale, loading = (None, 'brq') if noise.scale is None else (dims('bq'), 'rq')
  return source.letters(), LowRank(scale, dims(loading), dims('bq'), noise.remainder)


@dataclasses.dataclass(frozen=True)
class _Point:
  """The softmax at one point of the noise.

  Attributes:
    tiling: how classes are cut.
    source: the logits of its x [B, 1, Q] are those at the point.
    noise: over tau, in the noise space.
    top: the maximum of the logits, [B, 1].
    log_total: log of the sum of their exponentials relative to it, [B, 1].
    mean: sum_k p_k w_k, [B, 1, Q].
  """

  tiling: Tiling
  source: Source
  noise: LowRank
  top: jax.Array
  log_total: jax.Array
  mean: jax.Array

  def logits(self, tile: Tile, directions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """u [B, 1, t], and (w_k - mean) . v for v = directions [B, m, Q], [B, m, t]."""
    products = tile.source.products(jnp.concatenate([self.source.x, directions], axis=1))
    along = products[:, 1:] - directions @ jnp.swapaxes(self.mean, 1, 2)
    return tile.masked(products[:, :1] + tile.source.offset()), along

  def covariance_times(self, directions: jax.Array) -> jax.Array:
    """C v, [B, m, Q]."""

    def body(total, tile):
      u, along = self.logits(tile, directions)
      p = jnp.exp((u - self.top[..., None]) - self.log_total[..., None])
      weighted = jnp.where(tile.counts, p * along, 0.0)
      centred = weighted.sum(axis=-1, keepdims=True) * self.mean
      return total + tile.source.pull(weighted) - centred

    total = fold(self.tiling, self.source, body, jnp.zeros_like(directions))
    return self.tiling.sum_of_shards(total)

  def covariance_of(self, directions: jax.Array) -> jax.Array:
    """v_i . C v_j, [B, m, m], of directions v [B, m, Q]."""

    def body(total, tile):
      u, along = self.logits(tile, directions)
      p = jnp.exp((u - self.top[..., None]) - self.log_total[..., None])
      p = jnp.where(tile.counts, p, 0.0)
      return total + draws_lib.second_moment(along, p[:, 0])

    zero = jnp.zeros_like(directions[..., :1]) + jnp.zeros_like(directions[:, None, :, 0])
    return self.tiling.sum_of_shards(fold(self.tiling, self.source, body, zero))

  def principal_directions(self) -> jax.Array:
    """The principal directions of A, [B, m, T]."""

    def multiply(directions):  # A z = F C F^T z, for [B, m, T]
      vectors, pull = jax.vjp(self.noise.noise, directions)
      return pull(self.covariance_times(vectors))[0]

    zero = jnp.zeros_like(self.source.x[..., :1])
    return draws_lib.directions_of(multiply, zero, self.noise.num_normals)


def _point(tiling: Tiling, source: Source, noise: LowRank, z: jax.Array) -> _Point:
  """That of normals z [B, T]; x of the source is the location without noise."""
  x = source.x + noise.noise(z[:, None])
  source = dataclasses.replace(source, x=x)

  def body(carry, tile):
    top, total, sums = carry
    u = tile.masked(tile.source.products(x) + tile.source.offset())
    high = jnp.maximum(top, u.max(axis=-1))
    e = jnp.exp(u - high[..., None])
    shrink = jnp.exp(top - high)
    return (
      high,
      total * shrink + e.sum(axis=-1),
      sums * shrink[..., None] + tile.source.pull(e),
    )

  zero = jnp.zeros_like(x[..., 0])
  top, total, sums = fold(tiling, source, body, (zero + 2 * PADDED, zero, jnp.zeros_like(x)))
  top, scale = tiling.highest(top)
  total = tiling.sum_of_shards(total * scale)
  sums = tiling.sum_of_shards(sums * scale[..., None])
  return _Point(tiling, source, noise, top, jnp.log(total), sums / total[..., None])


def _expectations(point, at_label, vectors):
  """Those of `draws.fit`, for points along vectors [B, m, Q] in the noise space, from a point."""
  tiling = point.tiling
  of_label = jnp.einsum('bmq,bq->bm', vectors, at_label - point.mean[:, 0])

  def expectations(at):
    """As in `draws.fit`, for at [B, s, m]."""

    def logits(tile):
      u, along = point.logits(tile, vectors)
      return tile.masked(u + at @ along), along

    top, log_total = _log_z(tiling, point.source, logits, at[..., 0])

    def body(sums, tile):
      u, along = logits(tile)
      p = jnp.where(tile.counts, jnp.exp((u - top[..., None]) - log_total[..., None]), 0.0)
      new = p @ jnp.swapaxes(along, 1, 2), draws_lib.second_moment(along, p.mean(axis=1))
      return jax.tree.map(jnp.add, sums, new)

    second = jnp.zeros_like(of_label, shape=(*of_label.shape, of_label.shape[-1]))
    sums = fold(tiling, point.source, body, (jnp.zeros_like(at), second))
    each, second = (tiling.sum_of_shards(x) for x in sums)
    return of_label - each.mean(axis=1), second - draws_lib.square(each)

  return expectations


def _log_z(
  tiling: Tiling,
  source: Source,
  logits: Callable[[Tile], tuple[jax.Array, jax.Array]],
  like: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Maximum over classes and log of the sum of exponentials relative to it, [B, s] as `like`, of
  the first result of logits(tile), [B, s, t].
  """

  def body(carry, tile):
    top, total = carry
    u, _ = logits(tile)
    high = jnp.maximum(top, u.max(axis=-1))
    return high, total * jnp.exp(top - high) + jnp.exp(u - high[..., None]).sum(axis=-1)

  start = jnp.full_like(like, 2 * PADDED), jnp.zeros_like(like)
  top, total = fold(tiling, source, body, start)
  top, scale = tiling.highest(top)
  return top, jnp.log(tiling.sum_of_shards(total * scale))


def _column(tiling, source, label):
  """w_k of labels k int32 [B], [B, Q]; 0 for labels outside [0, Kp)."""
  kernel = source.kernel
  index = label - tiling.placement.shard_index() * kernel.shape[-1]
  at = jnp.clip(index, 0, kernel.shape[-1] - 1)
  column = jnp.where(index == at, kernel[:, at], 0.0).T
  return tiling.sum_of_shards(column.astype(source.x.dtype))
