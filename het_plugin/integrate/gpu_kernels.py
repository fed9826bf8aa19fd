"""The kernels of `kernels` for an NVIDIA GPU (Triton): each program sums in its registers.

Neighbours in the grid read the same normals or rows. Block sides are powers of two; elements beyond
an array are not loaded. Instructions bound these kernels: in the code for sm_90, up to half of
those in a loop round and transpose the operands of products. Therefore products share one block of
normals, and sums over samples have classes along the rows, where they stay in a thread.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from het_plugin.integrate.gaussian import PADDED

SUM_OF_CLASSES = (128, 64)  # samples and classes per block
SAMPLES = 32  # per block of a program that sums over samples
LOG2_E = math.log2(math.e)


def _call(kernel, grid, out_shape, num_warps, interpret):
  return pl.pallas_call(
    functools.partial(kernel, interpret=interpret),
    grid=grid,
    out_shape=out_shape,
    interpret=interpret,
    compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=2),
  )


def _instruction(asm, x):
  (y,) = plgpu.elementwise_inline_asm(
    asm,
    args=[x],
    constraints='=f,f',
    pack=1,
    result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
  )
  return y


def _exp2(x, interpret):
  """2^x in one instruction: within 2 units in the last place, 0 below 2^-126."""
  return jnp.exp2(x) if interpret else _instruction('ex2.approx.ftz.f32 $0, $1;', x)


def _reciprocal(x, interpret):
  """1 / x in one instruction: within 1 unit in the last place."""
  return 1.0 / x if interpret else _instruction('rcp.approx.ftz.f32 $0, $1;', x)


def _operands(z, rows, shift):
  """z with T padded to a power of two, and mu + shift [B, K], in units of log 2."""
  num_rows = rows.shape[1]
  padding = max(16, pl.next_power_of_2(num_rows)) - num_rows
  z = jnp.pad(z, ((0, 0), (0, 0), (0, padding)))
  return z * LOG2_E, (rows[:, -1] + shift) * LOG2_E


def _log2_z_kernel(z_ref, rows_ref, mu_ref, label_ref, log2_z_ref, at_label_ref, *, interpret):
  s, k = SUM_OF_CLASSES
  b, samples = pl.program_id(1), pl.ds(pl.program_id(0) * s, s)
  num_rows, num_classes = rows_ref.shape[1:]
  t = jnp.arange(z_ref.shape[-1])
  z = jnp.where(t < num_rows - 1, plgpu.load(z_ref.at[b, samples]), 0.0)  # [s, T], without mu's 1
  label = plgpu.load(label_ref.at[b])

  def add(carry, j, inside=None):
    top, total, at_label = carry  # [s]
    start = j * k
    index = start + jnp.arange(k)
    mask = (t < num_rows)[:, None]
    rows = plgpu.load(
      rows_ref.at[b, t[:, None], index[None]],
      mask=mask if inside is None else mask & inside[None],
      other=0.0,
    )
    mu = plgpu.load(mu_ref.at[b, index], mask=inside, other=None if inside is None else PADDED)
    u = plgpu.dot(z, rows) + mu[None]  # [s, k]
    at_label = jax.lax.cond(
      (label >= start) & (label < start + k),
      lambda: at_label + jnp.where((index == label)[None], u, 0.0).sum(axis=1),
      lambda: at_label,
    )
    new_top = jnp.maximum(top, u.max(axis=1))
    e = _exp2(u - new_top[:, None], interpret)
    return new_top, total * _exp2(top - new_top, interpret) + e.sum(axis=1), at_label

  zeros = jnp.zeros(s)
  carry = jnp.full_like(zeros, 2 * PADDED), zeros, zeros
  whole, rest = divmod(num_classes, k)
  carry = jax.lax.fori_loop(0, whole, lambda j, carry: add(carry, j), carry)
  if rest:
    carry = add(carry, whole, jnp.arange(k) < rest)
  top, total, at_label = carry
  plgpu.store(log2_z_ref.at[b, samples], top + jnp.log2(total))
  plgpu.store(at_label_ref.at[b, samples], at_label)


def log2_z(z, rows, shift, label, interpret):
  """`kernels.log2_z`."""
  batch, num_samples, _ = z.shape
  out_shape = [jax.ShapeDtypeStruct((batch, num_samples), jnp.float32)] * 2
  grid = (num_samples // SUM_OF_CLASSES[0], batch)
  z, mu = _operands(z, rows, shift)
  return _call(_log2_z_kernel, grid, out_shape, num_warps=8, interpret=interpret)(
    z, rows, mu, label
  )


class _Classes:
  """A block of classes of one example; one program sums over its samples."""

  def __init__(self, num_normals, rows_ref):
    num_rows, num_classes = rows_ref.shape[1:]
    k = _classes_a_program(num_normals)
    self.b = pl.program_id(1)
    self.index = pl.program_id(0) * k + jnp.arange(k)
    self.inside = self.index < num_classes
    self._t = jnp.arange(num_normals)
    self._mask = (self._t < num_rows)[:, None] & self.inside[None]
    self._is_noise = (self._t < num_rows - 1)[:, None]

  def load_rows(self, rows_ref):
    """[T, k] without mu, 0 outside."""
    mask = self._mask & self._is_noise
    return plgpu.load(rows_ref.at[self.b, self._t[:, None], self.index[None]], mask=mask, other=0.0)

  def load(self, ref, other):
    """[k] of [B, K]."""
    return plgpu.load(ref.at[self.b, self.index], mask=self.inside, other=other)

  def store(self, ref, value):
    plgpu.store(ref.at[self.b, self.index], value, mask=self.inside)

  def store_rows(self, ref, value):
    plgpu.store(ref.at[self.b, self._t[:, None], self.index[None]], value, mask=self._mask)


def _classes_a_program(num_normals):
  """128, or fewer if the rows would not fit into registers."""
  return max(16, min(128, 8192 // num_normals))


def _pull_call(kernel, z, rows, out_shape, interpret):
  grid = (pl.cdiv(rows.shape[-1], _classes_a_program(z.shape[-1])), rows.shape[0])
  return _call(kernel, grid, out_shape, num_warps=4, interpret=interpret)


def _softmax_pull_kernel(z_ref, rows_ref, mu_ref, log2_scale_ref, out_ref, *, interpret):
  classes = _Classes(z_ref.shape[-1], rows_ref)
  rows, mu = classes.load_rows(rows_ref), classes.load(mu_ref, PADDED)[:, None]

  def body(i, total):
    samples = pl.ds(i * SAMPLES, SAMPLES)
    z = plgpu.load(z_ref.at[classes.b, samples])  # [s, T]
    log2_scale = plgpu.load(log2_scale_ref.at[classes.b, samples])
    u = plgpu.dot(rows, z, trans_a=True, trans_b=True) + mu  # [k, s]
    return total + plgpu.dot(z, _exp2(u - log2_scale, interpret), trans_a=True, trans_b=True)

  num_blocks = z_ref.shape[1] // SAMPLES
  total = jax.lax.fori_loop(0, num_blocks, body, jnp.zeros_like(rows))
  classes.store_rows(out_ref, total / LOG2_E)


def softmax_pull(z, rows, shift, log2_scale, interpret):
  """`kernels.softmax_pull`."""
  z, mu = _operands(z, rows, shift)
  out_shape = jax.ShapeDtypeStruct(rows.shape, jnp.float32)
  call = _pull_call(_softmax_pull_kernel, z, rows, out_shape, interpret)
  return call(z, rows, mu, log2_scale)


def _sigmoid_sums_kernel(
  z_ref, rows_ref, mu_ref, sign_ref, penalty_ref, top_ref, total_ref, gradient_ref, *, interpret
):
  classes = _Classes(z_ref.shape[-1], rows_ref)
  sign = classes.load(sign_ref, 1.0)
  rows = classes.load_rows(rows_ref) * sign
  mu = (classes.load(mu_ref, 0.0) * sign)[:, None]

  def body(i, carry):
    top, total, gradient = carry  # [k], [k], [T, k]
    samples = pl.ds(i * SAMPLES, SAMPLES)
    z = plgpu.load(z_ref.at[classes.b, samples])  # [s, T]
    x = plgpu.dot(rows, z, trans_a=True, trans_b=True) + mu + plgpu.load(penalty_ref.at[samples])
    new_top = jnp.maximum(top, jnp.minimum(x.max(axis=1), 0.0))
    e = _exp2(-new_top[:, None] - jnp.abs(x), interpret)  # [k, s]
    r = _reciprocal(1.0 + e * _exp2(new_top, interpret)[:, None], interpret)
    shrink = _exp2(top - new_top, interpret)
    total = total * shrink + jnp.where(x < 0, e * r, r).sum(axis=1)
    gradient = gradient * shrink[:, None] + plgpu.dot(e * r * r, z)
    return new_top, total, gradient

  start = jnp.full_like(sign, 2 * PADDED), jnp.zeros_like(sign), jnp.zeros_like(rows.T)
  num_blocks = z_ref.shape[1] // SAMPLES
  top, total, gradient = jax.lax.fori_loop(0, num_blocks, body, start)
  classes.store(top_ref, top)
  classes.store(total_ref, total)
  classes.store_rows(gradient_ref, gradient.T / LOG2_E)


def sigmoid_sums(z, rows, shift, sign, penalty, interpret):
  """`kernels.sigmoid_sums`."""
  batch, _, num_classes = rows.shape
  one_row = jax.ShapeDtypeStruct((batch, num_classes), jnp.float32)
  out_shape = [one_row, one_row, jax.ShapeDtypeStruct(rows.shape, jnp.float32)]
  z, mu = _operands(z, rows, shift)
  call = _pull_call(_sigmoid_sums_kernel, z, rows, out_shape, interpret)
  return call(z, rows, mu, sign, penalty)
