"""Losses of u = mu + z F with factors F in logit space: E[softmax(u)]_y and E[sigmoid(u)].

This is where project-then-sample ends: mu [B, K] and F [B, T, K], over tau, are arrays, T = R + 1,
and what a sample adds is one small matrix product. Draws stream in chunks as in `streaming.py`.

One pass. A loss is one number an example (softmax), or one a class (sigmoid), so its cotangent only
scales a gradient that can be known as soon as the samples are seen. The forward pass accumulates
that gradient, relative to a running maximum as in an online softmax, and the backward pass scales
it: no sample is drawn or projected twice. With e_s = exp(u_s - max), Z_s = sum_k e_sk, omega_s the
probability of y in sample s relative to the largest over s, and z_s extended by a 1 for mu,

    d log p_y / dF = sum_s omega_s z_s (1[k = y] - e_sk / Z_s) / sum_s omega_s

of which the first part is a vector at class y, and the second the matrix product of
(omega_s / Z_s) z_s with e_s. For q = mean_s sigmoid(x_s), x = a u, class by class

    d log q / dF = a sum_s z_s sigmoid(x_s) sigmoid(-x_s) / sum_s sigmoid(x_s)

Two passes. Where classes are sharded, a softmax needs Z_s from all shards; inside the loop that
would be a collective a chunk. There the forward pass keeps partial sums [B, S] a shard, which are
combined once, and the backward pass draws and projects again.
"""

import functools

import jax
import jax.numpy as jnp

from het_plugin.integrate.rotation import Draws
from het_plugin.integrate.streaming import PADDED, Plan, at_class, reverse_once


def draw(plan: Plan, draws: Draws, rows: jax.Array, chunk: jax.Array):
  """z of a chunk with a 1 for mu behind it, [B, s, T + 1]; which samples count, bool [s].

  Without a sampler the rows are the samples of u themselves, and there is nothing to draw: None.
  """
  sample_index = chunk * plan.chunk_size + jnp.arange(plan.chunk_size)
  counts = sample_index < plan.num_samples
  if plan.sampler is None:
    return None, counts
  batch, num_rows = rows.shape[-3:-1]
  z = draws.normals(plan.sampler, sample_index, num_rows - 1)
  z = jnp.concatenate([z, jnp.ones_like(z[..., :1])], axis=-1)
  # Draws that all share are repeated: as one product for the batch, with classes and examples in
  # one dimension, a chunk took 1.6 times as long on a CPU.
  return jnp.broadcast_to(z, (batch, *z.shape[1:])), counts


def _logits(rows: jax.Array, shift: jax.Array, z: jax.Array | None) -> jax.Array:
  """u [..., B, s, k]; tiles of classes may lead."""
  shift = shift[..., None, None, :]
  if z is None:
    return rows + shift
  # mu is added, not multiplied by its 1: some devices round the operands of matrix products.
  noise = jnp.einsum('bst,...btk->...bsk', z.at[..., -1].set(0.0), rows)
  return noise + (rows[..., -1:, :] + shift)


def with_shift(plan: Plan, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The gradients of rows and shift."""
  mu = gradient.sum(axis=-2) if plan.sampler is None else gradient[..., -1, :]  # [..., B, K]
  # As a product: XLA's own sum over examples took ten times as long on a CPU.
  ones = jnp.ones(mu.shape[-2], mu.dtype)
  shift = jnp.einsum('b,...bk->...k', ones, mu, precision=jax.lax.Precision.HIGHEST)
  return reverse_once((gradient, shift))


def pull(z: jax.Array | None, weights: jax.Array) -> jax.Array:
  """sum_s z_s weights_s, [B, T + 1], for weights [B, s]; without z the weights."""
  return weights if z is None else jnp.einsum('bst,bs->bt', z, weights)


def _pull_classes(z: jax.Array | None, weights: jax.Array, e: jax.Array) -> jax.Array:
  """sum_s z_s weights_s e_s, [..., B, T + 1, k], for e [..., B, s, k]; without z their products."""
  if z is None:
    return weights[..., None] * e
  return jnp.einsum('bst,...bsk->...btk', z * weights[..., None], e)


def _exp(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """exp(u - max) [..., k], the maximum and the sum [...] over classes."""
  peak = logits.max(axis=-1)
  e = jnp.exp(logits - peak[..., None])
  return e, peak, e.sum(axis=-1)


# softmax at one class an example, all classes on one device: one pass


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def log_softmax_at(
  plan: Plan, rows: jax.Array, shift: jax.Array, draws: Draws, label: jax.Array
) -> jax.Array:
  """log E[softmax(u)]_y.

  Args:
    plan: how to stream; without a sampler, there is one chunk.
    rows: F with mu as its last row, [B, T + 1, K]; without a sampler all samples of u, [B, S, K].
    shift: [K], added to mu of all examples: `PADDED` at padded classes, elsewhere a bias or 0.
    draws: what the normals are made of.
    label: y int32 [B], in [0, K).

  Returns:
    [B], of the type of rows.
  """
  return _log_softmax_at(plan, rows, shift, draws, label, with_gradient=False)[0]


def _log_softmax_at(plan, rows, shift, draws, label, with_gradient):
  """The answer [B], the sum of omega [B], and the sums of the module docstring over samples: the
  vector [B, T + 1] and the matrix [B, T + 1, K] (without a sampler [B, S] and [B, S, K]).
  """
  batch, num_rows, _ = rows.shape

  def body(carry, chunk):
    top, total, sums = carry
    z, counts = draw(plan, draws, rows, chunk)
    logits = _logits(rows, shift, z)  # [B, s, K]
    e, peak, z_total = _exp(logits)
    at_label = at_class(logits, label)
    log_p = jnp.where(counts, at_label - peak - jnp.log(z_total), -jnp.inf)
    new_top = jnp.maximum(top, log_p.max(axis=-1))
    omega = jnp.exp(log_p - new_top[:, None])  # [B, s]
    shrink = jnp.exp(top - new_top)
    total = total * shrink + omega.sum(axis=-1)
    if with_gradient:
      vector = sums[0] * shrink[:, None] + pull(z, omega)
      matrix = sums[1] * shrink[:, None, None] + _pull_classes(z, omega / z_total, e)
      sums = (vector, matrix)
    return (new_top, total, sums), None

  dtype = rows.dtype
  sums = (jnp.zeros((batch, num_rows), dtype), jnp.zeros_like(rows))
  start = (
    jnp.full(batch, 2 * PADDED, dtype),
    jnp.zeros(batch, dtype),
    sums if with_gradient else (),
  )
  (top, total, sums), _ = scan(plan, body, start, jnp.arange(plan.num_chunks))
  return top + jnp.log(total) - jnp.log(plan.num_samples), total, sums


def _log_softmax_at_fwd(plan, rows, shift, draws, label):
  log_p, total, (vector, matrix) = _log_softmax_at(
    plan, rows, shift, draws, label, with_gradient=True
  )
  return log_p, (vector, matrix, total, label)


def _log_softmax_at_bwd(plan, residuals, g):
  vector, matrix, total, label = residuals
  scale = (g / total)[:, None]
  at_label = jnp.arange(matrix.shape[-1]) == label[:, None, None]  # [B, 1, K]
  gradient = jnp.where(at_label, (scale * vector)[..., None], 0.0) - scale[..., None] * matrix
  return *with_shift(plan, gradient), None, None


log_softmax_at.defvjp(_log_softmax_at_fwd, _log_softmax_at_bwd)


# softmax at one class an example, classes in M tiles: two passes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def tiled_log_softmax_at(
  plan: Plan, rows: jax.Array, shift: jax.Array, draws: Draws, label: jax.Array
) -> jax.Array:
  """`log_softmax_at` of rows [M, B, T + 1, k] and shift [M, k]: tiles do not talk."""
  return _tiled_log_softmax_at(plan, rows, shift, draws, label)[0]


def _tiled_log_softmax_at(plan, rows, shift, draws, label):
  num_tiles, _, num_rows, k = rows.shape
  local = label - k * jnp.arange(num_tiles)[:, None]  # [M, B]

  def body(_, chunk):
    z, counts = draw(plan, draws, rows, chunk)
    logits = _logits(rows, shift, z)  # [M, B, s, k]
    _, peak, z_total = _exp(logits)
    return None, (peak, z_total, at_class(logits, local), counts)

  _, (peak, z_total, at_label, counts) = scan(plan, body, None, jnp.arange(plan.num_chunks))
  top = peak.max(axis=1)  # [C, B, s]
  log_z = jnp.log(jnp.sum(z_total * jnp.exp(peak - top[:, None]), axis=1))
  log_p = jnp.where(counts[:, None], at_label.sum(axis=1) - top - log_z, -jnp.inf)  # [C, B, s]
  answer = jax.nn.logsumexp(log_p, axis=(0, 2)) - jnp.log(plan.num_samples)
  return answer, (log_p, top, log_z)


def _tiled_log_softmax_at_fwd(plan, rows, shift, draws, label):
  answer, (log_p, top, log_z) = _tiled_log_softmax_at(plan, rows, shift, draws, label)
  omega = jax.nn.softmax(log_p, axis=(0, 2))
  return answer, (rows, shift, draws, label, omega, top, log_z)


def _tiled_log_softmax_at_bwd(plan, residuals, g):
  rows, shift, draws, label, omega, top, log_z = residuals
  num_tiles, batch, num_rows, k = rows.shape

  def body(sums, inputs):
    chunk, omega, top, log_z = inputs
    z, _ = draw(plan, draws, rows, chunk)
    logits = _logits(rows, shift, z)  # [M, B, s, k]
    p = jnp.exp((logits - top[..., None]) - log_z[..., None])
    new = pull(z, omega), _pull_classes(z, omega, p)
    return jax.tree.map(jnp.add, sums, new), None

  start = (jnp.zeros((batch, num_rows), rows.dtype), jnp.zeros_like(rows))
  chunks = (jnp.arange(plan.num_chunks), omega * g[:, None], top, log_z)
  (vector, matrix), _ = scan(plan, body, start, chunks)
  classes = jnp.arange(num_tiles * k).reshape(num_tiles, 1, 1, k)
  at_label = classes == label[:, None, None]  # [M, B, 1, k]
  gradient = jnp.where(at_label, vector[..., None], 0.0) - matrix
  return *with_shift(plan, gradient), None, None


tiled_log_softmax_at.defvjp(_tiled_log_softmax_at_fwd, _tiled_log_softmax_at_bwd)


# sigmoid: nothing crosses classes, so one pass wherever they are


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def log_sigmoid(
  plan: Plan, rows: jax.Array, shift: jax.Array, draws: Draws, sign: jax.Array
) -> jax.Array:
  """log E[sigmoid(a u)], [B, K], for signs a [B, K], +1 or -1. Padded classes mean nothing."""
  return _log_sigmoid(plan, rows, shift, draws, sign, with_gradient=False)[0]


def _log_sigmoid(plan, rows, shift, draws, sign, with_gradient):
  """The answer [B, K], the sum of sigmoids [B, K] over a scale that it shares with the sum of
  z_s sigmoid(x_s) sigmoid(-x_s), shaped as rows.
  """
  batch, num_rows, num_classes = rows.shape

  def body(carry, chunk):
    top, total, gradient = carry
    z, counts = draw(plan, draws, rows, chunk)
    x = sign[:, None] * _logits(rows, shift, z)  # [B, s, K]
    if plan.num_samples % plan.chunk_size:
      x = jnp.where(counts[:, None], x, 2 * PADDED)  # where all that follows is 0
    # sigmoid(x) exp(-top) for top = min(max_s x, 0), from the one exponential exp(-|x| - top).
    new_top = jnp.maximum(top, jnp.minimum(x.max(axis=1), 0.0))  # [B, K]
    e = jnp.exp(-jnp.abs(x) - new_top[:, None])
    t = e * jnp.exp(new_top)[:, None]  # exp(-|x|)
    r = 1.0 / (1.0 + t)
    sigmoid = jnp.where(x < 0, e * r, r)
    shrink = jnp.exp(top - new_top)
    total = total * shrink + sigmoid.sum(axis=1)
    if with_gradient:
      ones = jnp.ones(x.shape[:2], x.dtype)
      gradient = gradient * shrink[:, None] + _pull_classes(z, ones, e * r * r)
    return (new_top, total, gradient), None

  dtype = rows.dtype
  start = (
    jnp.full((batch, num_classes), 2 * PADDED, dtype),
    jnp.zeros((batch, num_classes), dtype),
    jnp.zeros_like(rows) if with_gradient else (),
  )
  (top, total, gradient), _ = scan(plan, body, start, jnp.arange(plan.num_chunks))
  return top + jnp.log(total) - jnp.log(plan.num_samples), total, gradient


def _log_sigmoid_fwd(plan, rows, shift, draws, sign):
  log_q, total, gradient = _log_sigmoid(plan, rows, shift, draws, sign, with_gradient=True)
  return log_q, (gradient, sign / total)


def _log_sigmoid_bwd(plan, residuals, g):
  gradient, scale = residuals
  return *with_shift(plan, gradient * (g * scale)[:, None]), None, None


log_sigmoid.defvjp(_log_sigmoid_fwd, _log_sigmoid_bwd)


def scan(plan: Plan, body, start, chunks):
  """`lax.scan` over chunks; of one chunk without a loop, which XLA would copy its arguments for."""
  if plan.num_chunks > 1:
    return jax.lax.scan(body, start, chunks)
  carry, out = body(start, jax.tree.map(lambda x: x[0], chunks))
  return carry, jax.tree.map(lambda x: x[None], out)
