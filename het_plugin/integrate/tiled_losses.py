"""Losses in tiles of classes (`tiles`): softmax and exact sigmoid, and their gradients.

Softmax. -log p(y) needs log Z_s = log sum_k exp(u_sk) and u_sy of every sample, [B, S], and nothing
else of all classes. A loop over tiles finds them as an online softmax does: with a running maximum,
to which the sum of exponentials is relative. A second loop makes the logits again for the gradient

    dL / du_sk = g_s exp(u_sk - log Z_s) + h_s 1[k = y]

with g and h the cotangents of log Z and u_y. DET is the case of one sample.

HET-H. Its softmax is one over buckets (`hashed`). Tiles give log M [B, H].

Sigmoid. Classes are independent, so the loss is a sum over tiles. Its gradient is the sum of the
tiles' gradients.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from het_plugin.integrate import exact
from het_plugin.integrate.draws import Draws
from het_plugin.integrate.gaussian import (
  PADDED,
  GaussianLogits,
  Linear,
  LowRank,
  apply_projection,
)
from het_plugin.integrate.hashed import BucketSums, max_in_buckets
from het_plugin.integrate.order import Plan
from het_plugin.integrate.placement import dims
from het_plugin.integrate.proposal import Chosen
from het_plugin.integrate.samples import with_last
from het_plugin.integrate.tiles import (
  Source,
  Tile,
  Tiling,
  factors_over_tau,
  fold,
  pull_from_tiles,
  source_of,
)
from het_plugin.integrate.top_k import largest_in_tiles

# Softmax of factors or samples


def log_softmax_at(
  plan: Plan,
  tiling: Tiling,
  logits: GaussianLogits,
  noise: LowRank,
  draws: Draws | Chosen,
  labels: jax.Array,
) -> jax.Array:
  """log E[softmax(u)]_y at labels y int32 [B, L] of HET-XL; undefined at labels outside [0, K).

  The noise is that of the logits over tau.
  """
  source, z, log_weight = _of_samples(plan, logits, noise, draws)
  of_samples = log_p(*softmax_sums(tiling, source, z, labels)) + log_weight[..., None]
  return jax.nn.logsumexp(of_samples, axis=(0, 2), b=1.0 / plan.num_samples)  # of [C, B, s, L]


def softmax_top_k(
  tiling: Tiling,
  logits: GaussianLogits,
  k: int,
  plan: Plan | None = None,
  draws: Draws | Chosen | None = None,
) -> tuple[jax.Array, jax.Array]:
  """The k most probable classes of DET or HET-XL, int32 [B, k], and their log E[softmax(u)].

  Plan and draws are those of HET-XL.
  """
  if plan is None:
    num_samples = 1
    source = source_of(logits)
    z = None
    log_weight = jnp.zeros_like(logits.location, shape=(1, logits.location.shape[0], 1))
  else:
    num_samples = plan.num_samples
    noise = logits.noise.scaled(1.0 / logits.temperature)
    source, z, log_weight = _of_samples(plan, logits, noise, draws)
  top, log_total, _ = softmax_sums(tiling, source, z, _no_label(logits))

  def value(tile, z, top, log_total, log_weight):
    rows, shift = tile.source.rows()

    def of_chunk(inputs):
      z, top, log_total, log_weight = inputs
      of_samples = (_logits(rows, shift, z) - top[..., None]) - log_total[..., None]  # [B, s, t]
      return jax.nn.logsumexp(of_samples + log_weight[..., None], axis=1)

    of_chunks = jax.lax.map(of_chunk, (z, top, log_total, log_weight))  # [C, B, t]
    return jax.nn.logsumexp(of_chunks, axis=0, b=1.0 / num_samples)

  letters = None if z is None else dims('cbst'), *('cbs',) * 3
  arrays = z, top, log_total, log_weight
  return largest_in_tiles(tiling, k, source, value, arrays, letters)


def _of_samples(plan, logits, noise, draws):
  """The source of all samples, or of factors and the normals z [C, B, s, T] that go with them;
  and the samples' log-weights [C, B, s].

  The normals [B, S, T] exist at one time, and so do all samples in the noise space [B, S, Q] if
  these are projected.
  """
  batch = logits.location.shape[0]
  if not plan.project_first:
    index = jnp.arange(plan.num_samples)
    is_paired = isinstance(draws, Chosen)
    if is_paired:  # only the mean and the differences are projected
      mean, away = draws.mean_and_away(plan.sampler, index[: draws.num_pairs], noise.num_normals)
      z = jnp.concatenate([mean, away], axis=1)
    else:
      z = draws.normals(plan.sampler, index, noise.num_normals)
    z = jnp.broadcast_to(z, (batch, *z.shape[1:])).astype(noise.diag.dtype)
    source = source_of(logits, noise.noise(z), is_paired=is_paired)
    log_weight = jnp.asarray(draws.log_weight(index), z.dtype)
    return source, None, jnp.broadcast_to(log_weight, (1, batch, plan.num_samples))
  num_chunks = plan.num_chunks
  index = jnp.arange(num_chunks * plan.chunk_size)
  z = draws.normals(plan.sampler, index, noise.num_normals)  # [B, S, T]
  z = jnp.broadcast_to(z, (batch, *z.shape[1:])).astype(noise.diag.dtype)
  log_weight = jnp.where(index < plan.num_samples, draws.log_weight(index), 2 * PADDED)
  log_weight = jnp.broadcast_to(log_weight, z.shape[:2])
  z = jnp.moveaxis(z.reshape(batch, num_chunks, plan.chunk_size, -1), 1, 0)
  log_weight = jnp.moveaxis(log_weight.reshape(batch, num_chunks, plan.chunk_size), 1, 0)
  return source_of(logits, factors_over_tau(noise), is_factors=True), z, log_weight


def log_p(top: jax.Array, log_total: jax.Array, at: jax.Array) -> jax.Array:
  """log softmax at labels [..., L], from what `softmax_sums` returns."""
  # u - maximum is exact: log-probabilities near 0 keep their digits.
  return (at - top[..., None]) - log_total[..., None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def softmax_sums(
  tiling: Tiling, source: Source, z: jax.Array | None, labels: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Sums over classes of the samples in chunks.

  Args:
    tiling: how classes are cut.
    source: of factors, or of samples.
    z: normals [C, B, s, T] that factors are multiplied with; None for samples, where C is 1.
    labels: int32 [B, L].

  Returns:
    The maximum over classes [C, B, s], whose gradient is stopped; log sum_k exp(u_k - maximum),
    [C, B, s]; and u at the labels, 0 for labels outside [0, K), [C, B, s, L].
  """
  return _softmax_sums(tiling, source, z, labels)


def _softmax_sums(tiling, source, z, labels):
  return _softmax_pass(tiling, source, z, labels, keep=False)[0]


def _softmax_pass(tiling, source, z, labels, keep):
  """The sums; and to keep, exp(u - top) of all classes, and what makes them probabilities."""

  def local(source, z, labels):
    def body(carry, tile):
      rows, shift = tile.source.rows()

      def of_chunk(z):
        u = tile.masked(_logits(rows, shift, z))
        peak = jax.lax.stop_gradient(u.max(axis=-1))
        e = jnp.exp(u - peak[..., None])
        return peak, e.sum(axis=-1), _at_labels(u, labels, tile), e if keep else None

      peak, new, at_new, e = _map_chunks(of_chunk, z)
      if keep:
        return peak, new, at_new, e
      top, total, at = carry
      high = jnp.maximum(top, peak)
      total = total * jnp.exp(top - high) + new * jnp.exp(peak - high)
      return high, total, at + at_new

    x = source.x
    shape = (1, x.shape[0], source.num_samples) if z is None else z.shape[:3]
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    zero = jnp.zeros_like(x, dtype, shape=shape)
    at = jnp.zeros_like(x, dtype, shape=(*shape, labels.shape[-1]))
    top, total, at, *e = fold(tiling, source, body, (zero + 2 * PADDED, zero, at))
    highest, log_total, at = sums = _over_shards(tiling, top, total, at)
    if not keep:
      return sums, None
    return sums, (e[0], jnp.exp((top - highest) - log_total)[None])

  inputs = source.letters(), None if z is None else dims('cbst'), 'bl'
  kept = ('cbsk', 'kcbs') if keep else None
  run = tiling.placement.shard_map(local, inputs, (('cbs', 'cbs', 'cbsl'), kept))
  return run(source, z, labels)


def _over_shards(tiling, top, total, at):
  """Maximum, log of the total relative to it, and logits at labels, of all devices' classes."""
  top, scale = tiling.highest(top)
  total, at = (tiling.sum_of_shards(x) for x in (total * scale, at))
  return top, jnp.log(jnp.where(total > 0, total, 1.0)), at


def _softmax_sums_fwd(tiling, source, z, labels):
  is_one_tile = source.num_columns <= tiling.tile
  sums, kept = _softmax_pass(tiling, source, z, labels, keep=is_one_tile)
  return sums, (source, z, labels, *sums[:2], kept)


def _softmax_sums_bwd(tiling, residuals, g):
  source, z, labels, top, log_total, kept = residuals

  def local(source, z, labels, top, log_total, kept, g_total, g_at):
    def pull(tile):
      (rows, shift), to_source = jax.vjp(Source.rows, tile.source)

      def of_chunk(z, top, log_total, kept, g_total, g_at):
        if kept is None:
          p = jnp.exp((_logits(rows, shift, z) - top[..., None]) - log_total[..., None])
          weighted = jnp.where(tile.counts, g_total[..., None] * p, 0.0)
        else:  # which is 0 at classes that do not count
          weighted = kept[0] * (g_total * kept[1])[..., None]
        is_label = (labels[..., None] == tile.classes) & tile.counts  # [B, L, t]
        g_u = weighted + jnp.where(is_label[:, None], g_at[..., None], 0.0).sum(axis=2)
        return g_u if z is None else jnp.einsum('bst,bsk->btk', with_last(z, 1.0), g_u)

      g_rows = _sum_chunks(of_chunk, z, top, log_total, kept, g_total, g_at)
      of_mu = g_rows[:, -1] if source.is_factors else g_rows.reshape(-1, g_rows.shape[-1])
      # A product, because XLA's sum over examples took ten times as long on a CPU.
      ones = jnp.ones(of_mu.shape[0], of_mu.dtype)
      g_shift = jnp.einsum('b,bk->k', ones, of_mu, precision=jax.lax.Precision.HIGHEST)
      return to_source((g_rows, g_shift.astype(shift.dtype)))[0]

    if kept is not None:
      kept = kept[0], kept[1][0]
    return pull_from_tiles(tiling, source, pull)

  letters = source.letters()
  of_kept = None if kept is None else ('cbsk', 'kcbs')
  of_chunks = 'cbs', 'cbs', of_kept, 'cbs', 'cbsl'
  inputs = letters, None if z is None else dims('cbst'), 'bl', *of_chunks
  run = tiling.placement.shard_map(local, inputs, letters)
  # The maximum moves nothing: it cancels in what callers compute.
  return run(source, z, labels, top, log_total, kept, *g[1:]), None, None


softmax_sums.defvjp(_softmax_sums_fwd, _softmax_sums_bwd)


def _logits(rows, shift, z):
  """u [B, s, t] of rows [B, n, t], which are factors with mu as the last one, or samples."""
  if z is None:
    return rows + shift
  # mu is added, not multiplied by a 1, since some devices round the operands of products.
  return jnp.einsum('bst,btk->bsk', with_last(z, 0.0), rows) + (rows[:, -1:] + shift)


def _at_labels(u, labels, tile):
  """u [B, s, t] at labels [B, L], 0 where a label is no class of the tile: [B, s, L]."""
  if labels.shape[-1] == 1:  # a sum, which XLA fuses with that of the exponentials
    is_label = (labels == tile.classes) & tile.counts  # [B, t]
    return jnp.where(is_label[:, None], u, 0.0).sum(axis=-1, keepdims=True)
  index = labels - tile.classes[0]
  at = jnp.clip(index, 0, u.shape[-1] - 1)
  inside = (index == at) & tile.counts[at]
  return jnp.where(inside[:, None], jnp.take_along_axis(u, at[:, None], axis=-1), 0.0)


def _map_chunks(function, z):
  """function(z) of all chunks, stacked; of None if there is one without normals."""
  if z is not None and len(z) > 1:
    return jax.lax.map(function, z)
  return jax.tree.map(lambda x: x[None], function(None if z is None else z[0]))


def _sum_chunks(function, *chunks):
  """The sum of function(*chunk) over chunks; the first one may be None if there is one chunk."""
  first = function(*jax.tree.map(lambda x: x[0], chunks))
  if len(chunks[-1]) == 1:
    return first
  rest = jax.tree.map(lambda x: x[1:], chunks)
  return jax.lax.scan(lambda total, chunk: (total + function(*chunk), None), first, rest)[0]


def _no_label(logits):
  return jnp.full_like(logits.location, -1, jnp.int32, shape=(logits.location.shape[0], 1))


# Softmax of HET-H


def hashed_top_k(
  tiling: Tiling,
  logits: GaussianLogits,
  buckets: jax.Array,
  k: int,
  log_prob: Callable[[GaussianLogits], jax.Array],
) -> tuple[jax.Array, jax.Array]:
  """The k most probable classes int32 [B, k] of HET-H's softmax, and their log p [B, k].

  `log_prob` is that of the logits over tau of the buckets, [B, H] or more.
  """
  num_buckets = logits.noise.diag.shape[-1]
  source = source_of(logits)
  top, log_total, _ = bucket_sums(tiling, num_buckets, source, buckets, _no_label(logits))
  of_buckets = log_prob(BucketSums(buckets, top, log_total).logits(logits))

  def value(tile, top, log_total, of_buckets):
    own = tile.buckets
    share = (_location(tile.source) - top[:, own]) - log_total[:, own]  # [B, t]
    return share + of_buckets[:, own]

  arrays = top, log_total, of_buckets
  return largest_in_tiles(tiling, k, source, value, arrays, ('bh',) * 3, buckets)


def by_buckets(
  tiling: Tiling, logits: GaussianLogits, buckets: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array, GaussianLogits]:
  """HET-H's softmax at labels int32 [B, L] as one over buckets, h(k) int32 [Kp]: what
  `hashed.BucketSums.at` returns.
  """
  num_buckets = logits.noise.diag.shape[-1]
  top, log_total, mu = bucket_sums(tiling, num_buckets, source_of(logits), buckets, labels)
  return BucketSums(buckets, top, log_total).at(logits, labels, mu)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def bucket_sums(
  tiling: Tiling, num_buckets: int, source: Source, buckets: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Sums of exp(mu) over the classes of each bucket.

  Args:
    tiling: how classes are cut.
    num_buckets: H.
    source: of the location.
    buckets: h(k), int32 [Kp].
    labels: int32 [B, L].

  Returns:
    The maximum [B, H], whose gradient is stopped; log sum exp(mu - maximum) [B, H]; and mu at the
    labels, 0 for labels outside [0, K), [B, L]. For a bucket without classes the first two are as
    in `BucketSums`.
  """
  return _bucket_sums(tiling, num_buckets, source, buckets, labels)


def _bucket_sums(tiling, num_buckets, source, buckets, labels):
  def local(source, buckets, labels):
    def body(carry, tile):
      top, total, at = carry
      mu = tile.masked(_location(tile.source))  # [B, t]
      high = jnp.maximum(top, max_in_buckets(mu, tile.buckets, num_buckets))
      e = jnp.where(tile.counts, jnp.exp(mu - high[:, tile.buckets]), 0.0)
      new = jax.ops.segment_sum(e.T, tile.buckets, num_buckets).T
      total = total * jnp.exp(top - high) + new
      return high, total, at + _at_labels(mu[:, None], labels, tile)[:, 0]

    x = source.x
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    zero = jnp.zeros_like(x, dtype, shape=(x.shape[0], num_buckets))
    at = jnp.zeros_like(x, dtype, shape=labels.shape)
    return _over_shards(tiling, *fold(tiling, source, body, (zero + 2 * PADDED, zero, at), buckets))

  run = tiling.placement.shard_map(local, (source.letters(), 'k', 'bl'), ('bh', 'bh', 'bl'))
  return run(source, buckets, labels)


def _bucket_sums_fwd(tiling, num_buckets, source, buckets, labels):
  sums = _bucket_sums(tiling, num_buckets, source, buckets, labels)
  return sums, (source, buckets, labels, *sums[:2])


def _bucket_sums_bwd(tiling, num_buckets, residuals, g):
  del num_buckets
  source, buckets, labels, top, log_total = residuals

  def local(source, buckets, labels, top, log_total, g_total, g_at):
    def pull(tile):
      mu, to_source = jax.vjp(_location, tile.source)
      own = tile.buckets
      p = jnp.exp((mu - top[:, own]) - log_total[:, own])
      is_label = (labels[..., None] == tile.classes) & tile.counts  # [B, L, t]
      g_mu = jnp.where(tile.counts, g_total[:, own] * p, 0.0)
      g_mu += jnp.where(is_label, g_at[..., None], 0.0).sum(axis=1)
      return to_source(g_mu)[0]

    return pull_from_tiles(tiling, source, pull, buckets)

  letters = source.letters()
  inputs = letters, 'k', 'bl', *('bh',) * 3, 'bl'
  run = tiling.placement.shard_map(local, inputs, letters)
  return run(source, buckets, labels, top, log_total, *g[1:]), None, None


bucket_sums.defvjp(_bucket_sums_fwd, _bucket_sums_bwd)


def _location(source: Source) -> jax.Array:
  """mu [B, t]."""
  return (source.products(source.x) + source.offset())[:, 0]


# Sigmoid


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sigmoid_nll(
  tiling: Tiling, source: Source, buckets: jax.Array | None, labels: jax.Array
) -> jax.Array:
  """The sum over classes of the exact -log p(y_k), [B], with y_k = 1 for the labels int32 [B, L].

  The source is of factors (HET-XL), or of the location, with the variances [B, H] of the noise and
  buckets [Kp] for HET-H and without both for DET.
  """
  return _sigmoid_nll(tiling, source, buckets, labels)


def _sigmoid_nll(tiling, source, buckets, labels):
  def local(source, buckets, labels):
    def body(total, tile):
      return total + _tile_nll(tile.source, tile, labels)

    zero = jnp.zeros_like(source.x, shape=source.x.shape[:1])
    return tiling.sum_of_shards(fold(tiling, source, body, zero, buckets))

  inputs = source.letters(), None if buckets is None else dims('k'), 'bl'
  return tiling.placement.shard_map(local, inputs, 'b')(source, buckets, labels)


def _sigmoid_nll_fwd(tiling, source, buckets, labels):
  return _sigmoid_nll(tiling, source, buckets, labels), (source, buckets, labels)


def _sigmoid_nll_bwd(tiling, residuals, g):
  source, buckets, labels = residuals

  def local(source, buckets, labels, g):
    def pull(tile):
      return jax.vjp(lambda source: _tile_nll(source, tile, labels), tile.source)[1](g)[0]

    return pull_from_tiles(tiling, source, pull, buckets)

  letters = source.letters()
  inputs = letters, None if buckets is None else dims('k'), 'bl', 'b'
  return tiling.placement.shard_map(local, inputs, letters)(source, buckets, labels, g), None, None


sigmoid_nll.defvjp(_sigmoid_nll_fwd, _sigmoid_nll_bwd)


def sigmoid_top_k(
  tiling: Tiling, source: Source, buckets: jax.Array | None, k: int
) -> tuple[jax.Array, jax.Array]:
  """The k classes int32 [B, k] with the largest exact p(y_k = 1), and its logarithm [B, k]; source
  and buckets as in `sigmoid_nll`.
  """
  return largest_in_tiles(tiling, k, source, lambda tile: _tile_log_p(tile, 1.0), (), (), buckets)


def _tile_nll(source: Source, tile: Tile, labels: jax.Array) -> jax.Array:
  """[B], of the classes of a tile."""
  is_label = (labels[..., None] == tile.classes).any(axis=1)  # [B, t]
  log_p = _tile_log_p(dataclasses.replace(tile, source=source), jnp.where(is_label, 1.0, -1.0))
  return -jnp.where(tile.counts, log_p, 0.0).sum(axis=-1)


def _tile_log_p(tile: Tile, sign: jax.Array | float) -> jax.Array:
  """log E[sigmoid(sign u)] of the classes of a tile, [B, t]."""
  source = tile.source
  rows, shift = source.rows()
  sign = jnp.asarray(sign, rows.dtype)
  if not source.is_factors and source.variance is None:
    return jax.nn.log_sigmoid(sign * (rows[:, 0] + shift))
  mean, variance = exact.last_and_squares(rows)
  if source.variance is not None and tile.buckets is not None:
    variance += source.variance[:, tile.buckets]
  elif source.variance is not None:
    squares = Linear(jnp.square(source.kernel))
    variance += apply_projection(squares, source.variance[:, None])[:, 0]
  return exact.log_expected_sigmoid(sign * (mean + shift), variance)
