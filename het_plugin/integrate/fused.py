"""The losses of `estimate` and the sums of `exact` by fused kernels, on one device or over a mesh.

A softmax takes two passes, because its normaliser spans all classes: the forward pass keeps log2 Z
and u_y of every sample, [B, S], and the backward pass draws the normals again. A sigmoid takes one.
Kernels see the arrays of one device (`jax.shard_map`), so the only collective gathers the shards'
log2 Z and u_y after the last sample. The backward pass has none.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from het_plugin.integrate import kernels
from het_plugin.integrate.draws import Draws
from het_plugin.integrate.estimate import draw, pull_samples, scan, with_shift
from het_plugin.integrate.gaussian import PADDED
from het_plugin.integrate.order import Plan
from het_plugin.integrate.placement import Placement
from het_plugin.integrate.samples import with_last

# Samples per kernel call: normals [B, SAMPLES_A_CALL, R + 1] exist at one time.
SAMPLES_A_CALL = 512
LN_2 = math.log(2.0)  # a kernel's unit of logarithms


def plan_calls(plan: Plan) -> Plan:
  """The plan with chunks of whole blocks, in kernel calls of nearly equal size."""
  num_calls = -(-plan.num_samples // SAMPLES_A_CALL)
  blocks = -(-plan.num_samples // (num_calls * kernels.SAMPLE_MULTIPLE))
  return dataclasses.replace(plan, chunk_size=blocks * kernels.SAMPLE_MULTIPLE)


@jax.custom_jvp
def first_order(gradient):
  """The identity on a gradient; differentiating it once more is an error."""
  return gradient


@first_order.defjvp
def _refuse(primals, tangents):
  del primals, tangents
  raise NotImplementedError(
    "Integrator.implementation='pallas' has first derivatives only: its kernels have no others"
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def log_softmax_at(
  plan: Plan, rows: jax.Array, shift: jax.Array, draws: Draws, label: jax.Array
) -> jax.Array:
  """log E[softmax(u)]_y [B, 1] as `estimate.one_pass`; float32 rows, plan from `plan_calls`."""
  return _log_softmax_at_fwd(plan, rows, shift, draws, label)[0]


def _log_softmax_at_fwd(plan, rows, shift, draws, label):
  rows, shift = first_order((rows, shift))

  def local(rows, shift, draws, label):
    def body(_, chunk):
      z, log_weight, _ = _draw(plan, draws, rows, chunk)
      parts = _on_this_platform(kernels.log2_z, z, rows, shift, _local(plan, label, rows))
      return None, (*parts, log_weight)

    _, (log2_z, at_label, log_weight) = scan(plan, body, None, jnp.arange(plan.num_chunks))
    if plan.placement.vocab is not None:
      parts = jnp.stack([log2_z, at_label])
      parts = jax.lax.all_gather(parts, plan.placement.vocab)  # [M, 2, C, B, s]
      top = parts[:, 0].max(axis=0)
      log2_z = top + jnp.log2(jnp.exp2(parts[:, 0] - top).sum(axis=0))
      at_label = parts[:, 1].sum(axis=0)
    log_p = (at_label - log2_z) * LN_2 + log_weight  # [C, B, s]
    answer = jax.nn.logsumexp(log_p, axis=(0, 2)) - jnp.log(plan.num_samples)
    return answer, log_p, log2_z

  inputs = 'btk', 'k', draws.letters(), 'bl'
  run = plan.placement.shard_map(local, inputs, ('b', 'cbs', 'cbs'))
  answer, *residuals = run(rows, shift, draws, label)
  return answer[:, None], (rows, shift, draws, label, *residuals)


def _log_softmax_at_bwd(plan, residuals, g):
  g = first_order(g)

  def local(rows, shift, draws, label, log_p, log2_z, g):
    log_omega = jax.nn.log_softmax(log_p, axis=(0, 2))  # [C, B, s]

    def body(sums, inputs):
      chunk, log2_z, log_omega = inputs
      z, *_ = _draw(plan, draws, rows, chunk)
      log2_scale = log2_z - log_omega / LN_2
      matrix = _on_this_platform(kernels.softmax_pull, z, rows, shift, log2_scale)
      return jax.tree.map(jnp.add, sums, (pull_samples(z, jnp.exp(log_omega)), matrix)), None

    start = (jnp.zeros(rows.shape[:2], rows.dtype), jnp.zeros_like(rows))
    chunks = (jnp.arange(plan.num_chunks), log2_z, log_omega)
    (vector, matrix), _ = scan(plan, body, start, chunks)
    at_label = jnp.arange(rows.shape[-1]) == _local(plan, label, rows)[:, None, None]
    return g[:, None, None] * (jnp.where(at_label, vector[..., None], 0.0) - matrix)

  inputs = 'btk', 'k', residuals[2].letters(), 'bl', 'cbs', 'cbs', 'b'
  gradient = plan.placement.shard_map(local, inputs, 'btk')(*residuals, g[:, 0])
  return *with_shift(gradient), None, None


log_softmax_at.defvjp(_log_softmax_at_fwd, _log_softmax_at_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def log_sigmoid(
  plan: Plan, rows: jax.Array, shift: jax.Array, draws: Draws, sign: jax.Array
) -> jax.Array:
  """log E[sigmoid(a u)], [B, K], as `estimate.one_pass`."""
  return _log_sigmoid_fwd(plan, rows, shift, draws, sign)[0]


def _log_sigmoid_fwd(plan, rows, shift, draws, sign):
  rows, shift = first_order((rows, shift))

  def local(rows, shift, draws, sign):
    def body(sums, chunk):
      z, _, counts = _draw(plan, draws, rows, chunk)
      new = _on_this_platform(kernels.sigmoid_sums, z, rows, shift, sign, counts)
      top = jnp.maximum(sums[0], new[0])  # [B, K]
      old_scale, new_scale = jnp.exp2(sums[0] - top), jnp.exp2(new[0] - top)
      total = sums[1] * old_scale + new[1] * new_scale
      gradient = sums[2] * old_scale[:, None] + new[2] * new_scale[:, None]
      return (top, total, gradient), None

    start = (jnp.full_like(sign, 2 * PADDED), jnp.zeros_like(sign), jnp.zeros_like(rows))
    (top, total, gradient), _ = scan(plan, body, start, jnp.arange(plan.num_chunks))
    return top * LN_2 + jnp.log(total) - jnp.log(plan.num_samples), total, gradient

  inputs, outputs = ('btk', 'k', draws.letters(), 'bk'), ('bk', 'bk', 'btk')
  run = plan.placement.shard_map(local, inputs, outputs)
  answer, total, gradient = run(rows, shift, draws, sign)
  return answer, (gradient, sign / total)


def _log_sigmoid_bwd(plan, residuals, g):
  gradient, scale = residuals
  return *with_shift(gradient * (g * scale)[:, None]), None, None


log_sigmoid.defvjp(_log_sigmoid_fwd, _log_sigmoid_bwd)
LOSSES = {'softmax': log_softmax_at, 'sigmoid': log_sigmoid}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def last_and_squares(
  placement: Placement, rows: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The last row of rows W, and the sum of the others' squares, float32 [B, Kp], for rows
  [B, T, D] and W [D, Kp]. The backward pass multiplies again.
  """
  return _last_and_squares_fwd(placement, rows, kernel)[0]


def _last_and_squares_fwd(placement, rows, kernel):
  rows, kernel = first_order((rows, kernel))
  local = functools.partial(_on_a_tpu, kernels.last_and_squares)
  run = placement.shard_map(local, ('btd', 'dk'), ('bk', 'bk'))
  return run(rows, kernel), (rows, kernel)


def _last_and_squares_bwd(placement, residuals, g):
  rows, kernel = residuals

  def local(rows, kernel, *g):
    to_rows, to_kernel = _on_a_tpu(kernels.squares_pull, rows, kernel, *g)
    if placement.vocab is not None:
      to_rows = jax.lax.psum(to_rows, placement.vocab)
    if placement.batch is not None:
      to_kernel = jax.lax.psum(to_kernel, placement.batch)
    return to_rows.astype(rows.dtype), to_kernel.astype(kernel.dtype)

  run = placement.shard_map(local, ('btd', 'dk', 'bk', 'bk'), ('btd', 'dk'))
  return run(rows, kernel, *first_order(g))


last_and_squares.defvjp(_last_and_squares_fwd, _last_and_squares_bwd)


def _draw(plan, draws, rows, chunk):
  """z extended by a 1 for mu [B, s, T + 1], log-weights [B, s], and which samples count [s]."""
  z, counts = draw(plan, draws, chunk, rows.shape[1] - 1, rows.shape[0])
  return with_last(z, 1.0), jnp.where(counts, draws.log_weight(z), -jnp.inf), counts


def _local(plan, label, rows):
  """Labels [B, 1] as indices [B] into this device's classes; outside [0, K) if on another one."""
  return label[:, 0] - rows.shape[-1] * plan.placement.shard_index()


def _on_this_platform(kernel, *args):
  """Runs the kernel of the platform; on other platforms the interpreted TPU kernel."""
  return jax.lax.platform_dependent(
    *args,
    tpu=functools.partial(kernel, backend='tpu'),
    cuda=functools.partial(kernel, backend='gpu'),
    default=functools.partial(kernel, backend='tpu', interpret=True),
  )


def _on_a_tpu(kernel, *args):
  return jax.lax.platform_dependent(
    *args, tpu=kernel, default=functools.partial(kernel, interpret=True)
  )
