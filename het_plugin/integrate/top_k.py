"""The k largest classes without an array of all classes [B, K]: a loop over tiles of them.

The log-probabilities of a tile are known once the sums over all classes are, which the losses' loop
over tiles finds (`tiled_losses`). A second loop keeps the k largest of those seen so far. Under a
mesh each device keeps those of its own classes, and all devices' candidates are compared once.

B examples, t classes of a tile, S samples, C chunks of s samples.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from het_plugin.integrate.gaussian import PADDED
from het_plugin.integrate.placement import dims
from het_plugin.integrate.tiles import Source, Tiling, fold


def largest(log_p: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
  """The k largest of log_p [B, Kp] in order: classes int32 [B, k], and values [B, k].

  A sharded `lax.top_k` gathers all classes of all examples on every device; argmax does not.
  """
  classes = jnp.arange(log_p.shape[-1])
  top = []
  values = []
  for _ in range(k):
    top.append(jnp.argmax(log_p, axis=-1).astype(jnp.int32))
    values.append(log_p.max(axis=-1))
    log_p = jnp.where(classes == top[-1][:, None], -jnp.inf, log_p)
  return jnp.stack(top, axis=-1), jnp.stack(values, axis=-1)


def largest_in_tiles(
  tiling: Tiling,
  k: int,
  source: Source,
  value: Callable[..., jax.Array],
  arrays: tuple[Any, ...] = (),
  letters: tuple[Any, ...] = (),
  buckets: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """The k largest values of all classes in order: classes int32 [B, k], and values [B, k].

  Args:
    tiling: how classes are cut.
    k: at most the number of classes.
    source: what logits are made from.
    value: (tile, *arrays) -> [B, t].
    arrays: what values are made from beside the tile.
    letters: those of the arrays' dimensions, for `Placement.shard_map`.
    buckets: of the classes [Kp], or None.
  """

  def local(source, buckets, arrays):
    def body(carry, tile):
      best, classes = carry
      own = jnp.broadcast_to(tile.classes.astype(jnp.int32), (best.shape[0], len(tile.classes)))
      best = jnp.concatenate([best, tile.masked(value(tile, *arrays))], axis=-1)  # [B, k + t]
      return best_of(best, jnp.concatenate([classes, own], axis=-1), k)

    dtype = jnp.promote_types(source.x.dtype, jnp.float32)
    start = jnp.full_like(source.x, 2 * PADDED, dtype, shape=(source.x.shape[0], k))
    found = fold(tiling, source, body, (start, jnp.zeros_like(start, jnp.int32)), buckets)
    return best_of_shards(tiling, *found, k)

  inputs = source.letters(), None if buckets is None else dims('k'), letters
  run = tiling.placement.shard_map(local, inputs, ('bl', 'bl'))
  values, classes = run(source, buckets, arrays)
  return classes, values


def best_of(values: jax.Array, classes: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
  """The k largest of n candidates [B, n]: values and classes [B, k]."""
  if not isinstance(values.shape[0], int):  # TensorFlow has no `top_k` of a symbolic B
    values, classes = jax.lax.sort((-values, classes), num_keys=1)
    return -values[:, :k], classes[:, :k]
  values, at = jax.lax.top_k(values, k)
  return values, jnp.take_along_axis(classes, at, axis=-1)


def best_of_shards(
  tiling: Tiling, values: jax.Array, classes: jax.Array, k: int
) -> tuple[jax.Array, jax.Array]:
  """`best_of` the candidates [B, n] of all devices that share the classes, inside `shard_map`.

  They come in the order of the classes, so that the first of equal ones is kept.
  """
  axes = tiling.placement.vocab
  if axes is None:
    return values, classes
  values, classes = (jax.lax.all_gather(x, axes, axis=1, tiled=True) for x in (values, classes))
  return best_of(values, classes, k)
