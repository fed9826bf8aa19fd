"""E[softmax] and E[sigmoid] of Gaussian logits, streamed over samples, exact in log space.

Samples come in chunks. A chunk's logits live only inside the loop body; the backward pass draws the
same normals again and recomputes them. Beside the arguments and the answer only [B, S] scalars are
kept, so memory does not grow with S K.

Classes come as M tiles [M, B, k], M k = Kp: one tile a shard of the model axis. Inside the loops
tiles never talk to each other. What crosses tiles (the log-sum-exp over classes, sums over classes
in the backward pass) is kept a tile and reduced once after the loop, and gradients of what the
tiles share are summed over tiles by the caller's broadcast, again once. Under SPMD partitioning
that makes one reduction a direction instead of one a chunk.

The gradients. With u [S, K] the logits of one example over tau, P_sk = softmax(u_s)_k, and g the
cotangent of the answer:

    log p_y = log mean_s P_sy           w_sy = P_sy / sum_s P_sy
      d/du_sj = sum_y g_y w_sy (1[j = y] - P_sj)
    log p_k = log mean_s P_sk           c_s = sum_k g_k w_sk: the same with y over all classes
      d/du_sj = g_j w_sj - P_sj c_s
    log q_k = log mean_s sigmoid(a u)   w_sk = sigmoid(a u_sk) / sum_s sigmoid(a u_sk)
      d/du_sk = g_k w_sk a sigmoid(-a u_sk)

Every quotient is formed as exp of a difference of logarithms, so none of them underflows where the
quotient does not.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax.custom_derivatives import linear_call

from het_plugin.integrate import samplers
from het_plugin.integrate.gaussian import Hashed, Linear, LowRank, Opaque, apply_projection
from het_plugin.integrate.rotation import Draws

# The logit of a padded class: its exp is exactly zero, and it is finite, so that 0 * PADDED is 0.
PADDED = -1e30


@dataclasses.dataclass(frozen=True)
class Plan:
  """How the samples are streamed (static under jit)."""

  num_samples: int
  chunk_size: int
  sampler: samplers.Sampler

  @property
  def num_chunks(self) -> int:
    return -(-self.num_samples // self.chunk_size)


@struct.dataclass
class Tiles:
  """What gradients flow to; every leaf leads with the tile axis M. Logits are location +
  projection(noise), already over tau.
  """

  location: jax.Array | None  # [M, B, k]
  covariance: LowRank
  projection: Linear | Opaque | None


@struct.dataclass
class Constants:
  draws: Draws
  valid: jax.Array  # [M, k] bool, False at padded classes
  buckets: jax.Array | None  # [M, k] int32, the hash of HET-H


@jax.custom_jvp
def first_order(gradient):
  """The identity on a gradient; differentiating it once more is an error."""
  return gradient


@first_order.defjvp
def _second_order(primals, tangents):
  del primals, tangents
  _refuse()


@jax.custom_jvp
def reverse_once(gradient):
  """The identity on a gradient; once more it can be differentiated in forward mode, which streams
  too; in reverse mode that is an error.
  """
  return gradient


@reverse_once.defjvp
def _forward_over_reverse(primals, tangents):
  return *primals, linear_call(lambda _, t: t, _refuse, (), tangents[0])


def _refuse(*_):
  raise NotImplementedError(
    'Integrator has first derivatives only, but for forward mode over reverse mode without fused '
    'kernels: its gradient is streamed over samples, and what another second derivative needs of '
    'them is not kept'
  )


def _tile_logits(
  tile: Tiles, valid: jax.Array, buckets: jax.Array | None, z: jax.Array
) -> jax.Array:
  """Logits [B, s, k] of one tile for normals z [B, s, num_normals]."""
  eps = tile.covariance.noise(z)  # [B, s, Q]
  if isinstance(tile.projection, Opaque):
    phi = tile.projection.phi[:, None] + eps  # [B, s, D]
    logits = tile.projection.get_logits(tile.projection.params, phi.reshape(-1, phi.shape[-1]))
    logits = logits.reshape(*phi.shape[:2], -1)
  else:
    projection = tile.projection if buckets is None else Hashed(buckets)
    logits = tile.location[:, None] + apply_projection(projection, eps)
  return jnp.where(valid, logits, PADDED)


def _logits(
  plan: Plan, tiles: Tiles, const: Constants, chunk: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Logits [M, B, s, k] of one chunk, and which of its samples count, bool [s]."""
  sample_index = chunk * plan.chunk_size + jnp.arange(plan.chunk_size)
  z = const.draws.normals(plan.sampler, sample_index, tiles.covariance.num_normals)
  logits = jax.vmap(_tile_logits, (0, 0, None if const.buckets is None else 0, None))(
    tiles, const.valid, const.buckets, z
  )
  return logits, sample_index < plan.num_samples


def _accumulate_gradient(plan, tiles, const, cotangent, per_chunk):
  """Sums over chunks the pull-back of `cotangent(logits, counts, x)` to the tiles.

  x is the chunk's slice of `per_chunk`, which leads with the chunk axis.
  """

  def body(total, inputs):
    chunk, x = inputs
    logits, pull, counts = jax.vjp(lambda t: _logits(plan, t, const, chunk), tiles, has_aux=True)
    (gradient,) = pull(cotangent(logits, counts, x))
    return jax.tree.map(jnp.add, total, gradient), None

  zeros = jax.tree.map(jnp.zeros_like, tiles)
  return reverse_once(jax.lax.scan(body, zeros, (jnp.arange(plan.num_chunks), per_chunk))[0])


def _chunked(x: jax.Array, plan: Plan) -> jax.Array:
  """[B, S', ...] to [C, B, s, ...]."""
  x = x.reshape(x.shape[0], plan.num_chunks, plan.chunk_size, *x.shape[2:])
  return jnp.moveaxis(x, 1, 0)


def _unchunked(x: jax.Array) -> jax.Array:
  """[C, B, s, ...] to [B, S', ...]."""
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])


@struct.dataclass
class _LogSumExp:
  """log-sum-exp over classes, as the maximum plus the log of the rest.

  Log-probabilities near 0 keep their digits so: u - max is exact there.
  """

  peak: jax.Array
  log_total: jax.Array

  def log_prob(self, logits):
    return logits - self.peak[..., None] - self.log_total[..., None]


def _combine(peak: jax.Array, total: jax.Array) -> _LogSumExp:
  """The log-sum-exp [C, B, s] over tiles of partial maxima and sums [C, M, B, s]."""
  top = peak.max(axis=1)
  return _LogSumExp(top, jnp.log(jnp.sum(total * jnp.exp(peak - top[:, None]), axis=1)))


def _partial_logsumexp(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
  peak = logits.max(axis=-1)  # [M, B, s]
  return peak, jnp.exp(logits - peak[..., None]).sum(axis=-1)


# softmax at given classes


def at_class(logits: jax.Array, label: jax.Array) -> jax.Array:
  """logits [..., s, k] at classes label [...], 0 where a label is outside [0, k): [..., s].

  As a sum, which joins that of the exponentials. For a gather XLA turns all logits around in a
  TPU's memory, which took 0.7 of the time of all else in the loop.
  """
  is_label = jnp.arange(logits.shape[-1]) == label[..., None, None]
  return jnp.where(is_label, logits, 0.0).sum(axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def log_softmax_at(plan: Plan, tiles: Tiles, const: Constants, labels: jax.Array) -> jax.Array:
  """log E[softmax(u)]_y at the given classes.

  Args:
    plan: how to stream.
    tiles: the logits.
    const: draws, valid classes.
    labels: int32 [B, L] class ids; entries that are negative get the answer of no class (a very
      negative number).

  Returns:
    [B, L] in the accumulation type (float32, or wider where the logits are).
  """
  return _log_softmax_at(plan, tiles, const, labels)[0]


def _log_softmax_at(plan, tiles, const, labels):
  k = const.valid.shape[1]
  local = labels - k * jnp.arange(const.valid.shape[0])[:, None, None]  # [M, B, L]
  inside = (local >= 0) & (local < k)

  def body(_, chunk):
    logits, counts = _logits(plan, tiles, const, chunk)
    peak, total = _partial_logsumexp(logits)
    if labels.shape[-1] == 1:
      at_label = at_class(logits, local[..., 0])[..., None]  # [M, B, s, 1]
    else:
      at_label = jnp.take_along_axis(logits, jnp.clip(local, 0, k - 1)[:, :, None], axis=-1)
      at_label = jnp.where(inside[:, :, None], at_label, 0.0)  # [M, B, s, L]
    return None, (peak, total, at_label, counts)

  _, (peak, total, at_label, counts) = jax.lax.scan(body, None, jnp.arange(plan.num_chunks))
  lse = jax.tree.map(_unchunked, _combine(peak, total))  # [B, S']
  at_label = _unchunked(at_label.sum(axis=1))  # [B, S', L]
  found = inside.any(axis=0)  # [B, L]
  log_p = jnp.where(counts.reshape(-1)[:, None], lse.log_prob(at_label), -jnp.inf)  # [B, S', L]
  answer = jax.nn.logsumexp(log_p, axis=1) - jnp.log(plan.num_samples)
  return jnp.where(found, answer, PADDED), (lse, log_p, found)


def _log_softmax_at_fwd(plan, tiles, const, labels):
  answer, (lse, log_p, found) = _log_softmax_at(plan, tiles, const, labels)
  return answer, (tiles, const, labels, lse, jax.nn.softmax(log_p, axis=1) * found[:, None])


def _log_softmax_at_bwd(plan, residuals, g):
  tiles, const, labels, lse, weight = residuals
  k = const.valid.shape[1]
  classes = jnp.arange(const.valid.size).reshape(-1, 1, 1, k)  # [M, 1, 1, k]

  def cotangent(logits, counts, x):
    del counts  # the weight of a sample that does not count is zero
    lse, weight = x  # [B, s], [B, s, L]
    gradient = -jnp.exp(lse.log_prob(logits)) * weight.sum(axis=-1, keepdims=True)  # [M, B, s, k]
    for label in range(labels.shape[1]):
      at_label = classes == labels[:, label, None, None]
      gradient += jnp.where(at_label, weight[..., label, None], 0.0)
    return gradient.astype(logits.dtype)

  per_chunk = jax.tree.map(lambda x: _chunked(x, plan), (lse, weight * g[:, None]))
  return _accumulate_gradient(plan, tiles, const, cotangent, per_chunk), None, None


log_softmax_at.defvjp(_log_softmax_at_fwd, _log_softmax_at_bwd)


# softmax at all classes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def log_softmax(plan: Plan, tiles: Tiles, const: Constants) -> jax.Array:
  """log E[softmax(u)] at all classes, [M, B, k]; padded classes get about PADDED."""
  return _log_softmax(plan, tiles, const)[0]


def _log_mean_exp(plan, tiles, const, log_value, per_chunk):
  """log mean_s exp(log_value(logits, x)), [M, B, k], by a running maximum and sum."""

  def body(carry, inputs):
    peak, total = carry
    chunk, x = inputs
    logits, counts = _logits(plan, tiles, const, chunk)
    value, extra = log_value(logits, x)  # [M, B, s, k]
    value = jnp.where(counts[:, None], value, -jnp.inf)
    new_peak = jnp.maximum(peak, value.max(axis=2))
    total = total * jnp.exp(peak - new_peak) + jnp.exp(value - new_peak[:, :, None]).sum(axis=2)
    return (new_peak, total), extra

  shape = jax.eval_shape(lambda: _logits(plan, tiles, const, jnp.int32(0))[0])
  start = jnp.full((*shape.shape[:2], shape.shape[3]), 2 * PADDED, shape.dtype)
  (peak, total), extras = jax.lax.scan(
    body, (start, jnp.zeros_like(start)), (jnp.arange(plan.num_chunks), per_chunk)
  )
  return peak + jnp.log(total) - jnp.log(plan.num_samples), extras


def _log_softmax(plan, tiles, const):
  if const.valid.shape[0] == 1:  # one tile knows its own log-sum-exp: one loop

    def log_value(logits, _):
      peak, total = _partial_logsumexp(logits)  # [1, B, s]
      lse = _combine(peak[None], total[None])  # [1, B, s]
      return lse.log_prob(logits), jax.tree.map(lambda x: x[0], lse)

    return _log_mean_exp(plan, tiles, const, log_value, None)

  def body(_, chunk):
    return None, _partial_logsumexp(_logits(plan, tiles, const, chunk)[0])

  _, partial = jax.lax.scan(body, None, jnp.arange(plan.num_chunks))
  lse = _combine(*partial)  # [C, B, s]
  log_p, _ = _log_mean_exp(plan, tiles, const, lambda u, lse: (lse.log_prob(u), None), lse)
  return log_p, lse


def _log_softmax_fwd(plan, tiles, const):
  log_p, lse = _log_softmax(plan, tiles, const)
  return log_p, (tiles, const, log_p, lse)


def _log_softmax_bwd(plan, residuals, g):
  tiles, const, log_p, lse = residuals
  g_mean = jnp.where(const.valid[:, None], g, 0.0)[:, :, None] / plan.num_samples  # [M, B, 1, k]

  def weighted(logits, counts, lse):  # g_k w_sk, [M, B, s, k]
    weight = jnp.exp(lse.log_prob(logits) - log_p[:, :, None])
    return jnp.where(counts[:, None], g_mean * weight, 0.0)

  def sum_over_classes(_, inputs):
    chunk, lse = inputs
    return None, weighted(*_logits(plan, tiles, const, chunk), lse).sum(axis=-1)

  if const.valid.shape[0] == 1:
    c = jnp.zeros(plan.num_chunks)
  else:
    chunks = (jnp.arange(plan.num_chunks), lse)
    c = jax.lax.scan(sum_over_classes, None, chunks)[1].sum(axis=1)  # [C, B, s]

  def cotangent(logits, counts, x):
    lse, c = x
    gradient = weighted(logits, counts, lse)
    c = gradient.sum(axis=-1) if const.valid.shape[0] == 1 else c
    return gradient - jnp.exp(lse.log_prob(logits)) * c[..., None]

  return _accumulate_gradient(plan, tiles, const, cotangent, (lse, c)), None


log_softmax.defvjp(_log_softmax_fwd, _log_softmax_bwd)


# sigmoid


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def log_sigmoid(plan: Plan, tiles: Tiles, const: Constants, sign: jax.Array) -> jax.Array:
  """log E[sigmoid(sign * u)], [M, B, k]; sign [M, B, k] is +1 where a class is on and -1 where off.

  Nothing crosses classes here: neither direction communicates over tiles. The answer at padded
  classes means nothing, and no gradient flows to them.
  """
  return _log_sigmoid(plan, tiles, const, sign)


def _log_sigmoid(plan, tiles, const, sign):
  return _log_mean_exp(
    plan, tiles, const, lambda u, _: (jax.nn.log_sigmoid(sign[:, :, None] * u), None), None
  )[0]


def _log_sigmoid_fwd(plan, tiles, const, sign):
  log_q = _log_sigmoid(plan, tiles, const, sign)
  return log_q, (tiles, const, sign, log_q)


def _log_sigmoid_bwd(plan, residuals, g):
  tiles, const, sign, log_q = residuals
  # [M, B, 1, k]
  g_mean = jnp.where(const.valid[:, None], g * sign, 0.0)[:, :, None] / plan.num_samples

  def cotangent(logits, counts, _):
    signed = sign[:, :, None] * logits
    weight = jnp.exp(jax.nn.log_sigmoid(signed) - log_q[:, :, None])  # [M, B, s, k]
    return jnp.where(counts[:, None], g_mean * weight * jax.nn.sigmoid(-signed), 0.0)

  return _accumulate_gradient(plan, tiles, const, cotangent, None), None, None


log_sigmoid.defvjp(_log_sigmoid_fwd, _log_sigmoid_bwd)
