"""The losses of `factored` by fused kernels, on one device or over a mesh.

Two passes for a softmax, whose normaliser spans all classes: the forward pass keeps log2 Z and u_y
of every sample, [B, S], and the backward pass draws the normals again. One for a sigmoid. Kernels
see the arrays of one device (`jax.shard_map`), so the only collective is the gathering of the
shards' log2 Z and u_y after the last sample; the backward pass has none.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from het_plugin.integrate import kernels
from het_plugin.integrate.factored import draw, pull, scan, with_shift
from het_plugin.integrate.placement import Placement
from het_plugin.integrate.rotation import Draws
from het_plugin.integrate.streaming import PADDED, Plan, first_order

# Samples a kernel call: normals of so many exist at one time, [B, SAMPLES_A_CALL, R + 1].
SAMPLES_A_CALL = 512
ONE_DEVICE = Placement()
LN_2 = math.log(2.0)  # a kernel's unit of logarithms


@dataclasses.dataclass(frozen=True)
class FusedPlan(Plan):
  """How the samples stream through kernels, and where the arrays lie (static under jit)."""

  placement: Placement = ONE_DEVICE


def plan_calls(num_samples: int, sampler, placement: Placement = ONE_DEVICE) -> FusedPlan:
  """Samples in kernel calls of nearly one size, each of whole blocks."""
  num_calls = -(-num_samples // SAMPLES_A_CALL)
  blocks = -(-num_samples // (num_calls * kernels.SAMPLE_MULTIPLE))
  return FusedPlan(num_samples, blocks * kernels.SAMPLE_MULTIPLE, sampler, placement)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def log_softmax_at(
  plan: FusedPlan, rows: jax.Array, shift: jax.Array, draws: Draws, label: jax.Array
) -> jax.Array:
  """`factored.log_softmax_at`, for float32 rows and a plan by `plan_calls`."""
  return _log_softmax_at_fwd(plan, rows, shift, draws, label)[0]


def _log_softmax_at_fwd(plan, rows, shift, draws, label):
  rows, shift = first_order((rows, shift))

  def local(rows, shift, draws, label):
    def body(_, chunk):
      z, counts = draw(plan, draws, rows, chunk)
      parts = _on_this_platform(kernels.log2_z, z, rows, shift, _local(plan, label, rows))
      return None, (*parts, counts)

    _, (log2_z, at_label, counts) = scan(plan, body, None, jnp.arange(plan.num_chunks))
    if plan.placement.vocab is not None:
      parts = jax.lax.all_gather(
        jnp.stack([log2_z, at_label]), plan.placement.vocab
      )  # [M, 2, C, B, s]
      top = parts[:, 0].max(axis=0)
      log2_z = top + jnp.log2(jnp.exp2(parts[:, 0] - top).sum(axis=0))
      at_label = parts[:, 1].sum(axis=0)
    log_p = jnp.where(counts[:, None], (at_label - log2_z) * LN_2, -jnp.inf)  # [C, B, s]
    answer = jax.nn.logsumexp(log_p, axis=(0, 2)) - jnp.log(plan.num_samples)
    return answer, log_p, log2_z

  answer, *residuals = plan.placement.shard_map(local, f'btk k {_of_draws(draws)} b -> b cbs cbs')(
    rows, shift, draws, label
  )
  return answer, (rows, shift, draws, label, *residuals)


def _log_softmax_at_bwd(plan, residuals, g):
  g = first_order(g)

  def local(rows, shift, draws, label, log_p, log2_z, g):
    log_omega = jax.nn.log_softmax(log_p, axis=(0, 2))  # [C, B, s]

    def body(sums, inputs):
      chunk, log2_z, log_omega = inputs
      z, _ = draw(plan, draws, rows, chunk)
      log2_scale = log2_z - log_omega / LN_2
      matrix = _on_this_platform(kernels.softmax_pull, z, rows, shift, log2_scale)
      return jax.tree.map(jnp.add, sums, (pull(z, jnp.exp(log_omega)), matrix)), None

    start = (jnp.zeros(rows.shape[:2], rows.dtype), jnp.zeros_like(rows))
    chunks = (jnp.arange(plan.num_chunks), log2_z, log_omega)
    (vector, matrix), _ = scan(plan, body, start, chunks)
    at_label = jnp.arange(rows.shape[-1]) == _local(plan, label, rows)[:, None, None]
    return g[:, None, None] * (jnp.where(at_label, vector[..., None], 0.0) - matrix)

  specs = f'btk k {_of_draws(residuals[2])} b cbs cbs b -> btk'
  gradient = plan.placement.shard_map(local, specs)(*residuals, g)
  return *with_shift(plan, gradient), None, None


log_softmax_at.defvjp(_log_softmax_at_fwd, _log_softmax_at_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def log_sigmoid(
  plan: FusedPlan, rows: jax.Array, shift: jax.Array, draws: Draws, sign: jax.Array
) -> jax.Array:
  """`factored.log_sigmoid`, for float32 rows and a plan by `plan_calls`."""
  return _log_sigmoid_fwd(plan, rows, shift, draws, sign)[0]


def _log_sigmoid_fwd(plan, rows, shift, draws, sign):
  rows, shift = first_order((rows, shift))

  def local(rows, shift, draws, sign):
    def body(sums, chunk):
      z, counts = draw(plan, draws, rows, chunk)
      new = _on_this_platform(kernels.sigmoid_sums, z, rows, shift, sign, counts)
      top = jnp.maximum(sums[0], new[0])  # [B, K]
      old_scale, new_scale = jnp.exp2(sums[0] - top), jnp.exp2(new[0] - top)
      total = sums[1] * old_scale + new[1] * new_scale
      gradient = sums[2] * old_scale[:, None] + new[2] * new_scale[:, None]
      return (top, total, gradient), None

    start = (jnp.full_like(sign, 2 * PADDED), jnp.zeros_like(sign), jnp.zeros_like(rows))
    (top, total, gradient), _ = scan(plan, body, start, jnp.arange(plan.num_chunks))
    return top * LN_2 + jnp.log(total) - jnp.log(plan.num_samples), total, gradient

  specs = f'btk k {_of_draws(draws)} bk -> bk bk btk'
  sums = plan.placement.shard_map(local, specs)(rows, shift, draws, sign)
  return sums[0], (sums[2], sign / sums[1])


def _log_sigmoid_bwd(plan, residuals, g):
  gradient, scale = residuals
  return *with_shift(plan, gradient * (g * scale)[:, None]), None, None


log_sigmoid.defvjp(_log_sigmoid_fwd, _log_sigmoid_bwd)


def _of_draws(draws):
  """The letter of draws: keys [B], or keys [1] that all examples share."""
  return 'b' if len(draws.keys) > 1 else '1'


def _local(plan, label, rows):
  """The labels [B] as indices into this device's classes, outside of [0, K) if on another."""
  if plan.placement.vocab is None:
    return label
  return label - rows.shape[-1] * jax.lax.axis_index(plan.placement.vocab)


def _on_this_platform(kernel, *args):
  """The kernel for the platform that is compiled for; elsewhere the interpreted TPU kernel."""
  return jax.lax.platform_dependent(
    *args,
    tpu=functools.partial(kernel, backend='tpu'),
    cuda=functools.partial(kernel, backend='gpu'),
    default=functools.partial(kernel, backend='tpu', interpret=True),
  )
