"""Fused kernels (Pallas) of project-then-sample: a sample's logits never reach device memory.

Each kernel takes normals z [B, S, T] (T = R + 2, a 1 for mu behind the normals), rows [B, T, K]
(the factors with mu as the last one, over tau) and shift [K], and forms the logits u = z rows +
shift of a block of samples and a block of classes in fast memory, where they also end:

    log_z          log sum_k exp(u_sk), and u_sy                                    [B, S]
    softmax_pull   sum_s z_s exp(u_sk - log_scale_s)                               [B, T, K]
    sigmoid_sums   sum_s sigmoid(x_sk), sum_s z_s sigmoid(x_sk) sigmoid(-x_sk)      x = a u

There are two of each. On a TPU (Mosaic) the grid walks the blocks that are summed over in order and
accumulates into an output block that stays in VMEM. On an NVIDIA GPU (Triton) programs run in any
order, so one program loops over the blocks it sums and keeps the sum in registers.

The operands of matrix products are rounded as XLA rounds them by default on the same device, except
mu and shift, which are added. All else is float32.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu

from het_plugin.integrate.streaming import PADDED

# Samples and classes of a block: on a TPU multiples of its tile (8, 128), on a GPU powers of two.
TPU_BLOCK = (128, 512)
GPU_LOG_Z_BLOCK = (128, 64)
GPU_SAMPLES = 32  # of a block, where a program sums over samples
SAMPLE_MULTIPLE = 128  # of all sample blocks
LOG2_E = math.log2(math.e)
BACKENDS = ('tpu', 'gpu')


def log_z(
  z, rows, shift, label, *, backend: str, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
  """Log of the partition sum of every sample, and its logit at the label.

  Args:
    z: float32 [B, S, T] normals, the last of the T being 1; S a multiple of `SAMPLE_MULTIPLE`.
    rows: float32 [B, T, K].
    shift: float32 [K].
    label: int32 [B]; one outside [0, K) has the logit 0.
    backend: 'tpu' or 'gpu', whose kernel to take.
    interpret: run it on any device, slowly, for tests.

  Returns:
    Both float32 [B, S].
  """
  call = {'tpu': _tpu_log_z, 'gpu': _gpu_log_z}[backend]
  return call(z, rows, shift[None], label, interpret)


def softmax_pull(z, rows, shift, log_scale, *, backend: str, interpret: bool = False) -> jax.Array:
  """sum_s z_s exp(u_sk - log_scale_s), float32 [B, T, K], for log_scale float32 [B, S], where a
  sample at infinity adds nothing; the other arguments are those of `log_z`.
  """
  call = {'tpu': _tpu_softmax_pull, 'gpu': _gpu_softmax_pull}[backend]
  return call(z, rows, shift[None], log_scale, interpret)


def sigmoid_sums(
  z, rows, shift, sign, counts, *, backend: str, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The sums of sigmoids of x = sign * u over samples that count, relative to a scale.

  Args:
    z, rows, shift, backend, interpret: as those of `log_z`.
    sign: float32 [B, K], +1 or -1.
    counts: bool [S], whether a sample counts.

  Returns:
    top [B, K], total [B, K] and gradient [B, T, K] with sum_s sigmoid(x_s) = exp(top) total and
    sum_s z_s sigmoid(x_s) sigmoid(-x_s) = exp(top) gradient; all float32.
  """
  call = {'tpu': _tpu_sigmoid_sums, 'gpu': _gpu_sigmoid_sums}[backend]
  return call(z, rows, shift[None], sign, counts, interpret)


# What a block of samples and classes does, on either device.


def _block_logits(z, rows, mu, shift, dot, num_rows):
  """u [s, k] for z [s, T], rows [T, k], mu and shift [1, k]. mu is kept out of the product: matrix
  units round its operands.
  """
  is_noise = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1) < num_rows - 1
  return dot(jnp.where(is_noise, z, 0.0), rows) + (mu + shift)


def _add_classes(top, total, u):
  """Running maximum and sum of exponentials relative to it, [s, 1], with those of u [s, k]."""
  new_top = jnp.maximum(top, u.max(axis=1, keepdims=True))
  e = jnp.exp(u - new_top)
  return new_top, total * jnp.exp(top - new_top) + e.sum(axis=1, keepdims=True)


def _at_label(u, index, label):
  """u [s, 1] at the column whose index [1, k] is the label; 0 where none is."""
  return jnp.where(index == label, u, 0.0).sum(axis=1, keepdims=True)


def _add_samples(top, total, gradient, x, counts, pull):
  """The sums of `sigmoid_sums` of a block, top and total [1, k] and gradient [T, k], with those of
  x [s, k] where counts [s, 1] is not 0; `factored.log_sigmoid` has the mathematics.
  """
  x = jnp.where(counts > 0, x, 2 * PADDED)  # where all that follows is 0
  new_top = jnp.maximum(top, jnp.minimum(x.max(axis=0, keepdims=True), 0.0))
  e = jnp.exp(-jnp.abs(x) - new_top)
  t = e * jnp.exp(new_top)  # exp(-|x|)
  r = 1.0 / (1.0 + t)
  sigmoid = jnp.where(x < 0, e * r, r)
  shrink = jnp.exp(top - new_top)
  total = total * shrink + sigmoid.sum(axis=0, keepdims=True)
  return new_top, total, gradient * shrink + pull(e * r * r)


# TPU: the grid walks the blocks of a sum in order. A block at the edge of K reads what lies beyond
# it; those columns meet no other, are masked where classes are summed, and never written.


def _tpu_dot(a, b):
  return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _tpu_call(kernel, grid, in_specs, out_specs, out_shape, scratch_shapes, interpret):
  return pl.pallas_call(
    kernel,
    grid=grid,
    in_specs=in_specs,
    out_specs=out_specs,
    out_shape=out_shape,
    scratch_shapes=scratch_shapes,
    interpret=interpret,
    compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'parallel', 'arbitrary')),
  )


def _tpu_log_z_kernel(z, rows, shift, label, out, at_label, top, total, *, num_classes):
  j = pl.program_id(2)

  @pl.when(j == 0)
  def _():
    top[:] = jnp.full_like(top, 2 * PADDED)
    total[:] = jnp.zeros_like(total)
    at_label[:] = jnp.zeros_like(at_label)

  num_rows, k = rows.shape
  u = _block_logits(z[:], rows[:], rows[num_rows - 1 :], shift[:], _tpu_dot, num_rows)
  index = j * k + jax.lax.broadcasted_iota(jnp.int32, (1, k), 1)
  top[:], total[:] = _add_classes(top[:], total[:], jnp.where(index < num_classes, u, PADDED))
  at_label[:] += _at_label(u, index, label[:])

  @pl.when(j == pl.num_programs(2) - 1)
  def _():
    out[:] = top[:] + jnp.log(total[:])


def _tpu_log_z(z, rows, shift, label, interpret):
  batch, num_samples, num_rows = z.shape
  num_classes = rows.shape[-1]
  s, k = TPU_BLOCK[0], min(TPU_BLOCK[1], num_classes)
  out, at_label = _tpu_call(
    functools.partial(_tpu_log_z_kernel, num_classes=num_classes),
    (batch, num_samples // s, pl.cdiv(num_classes, k)),
    [
      pl.BlockSpec((None, s, num_rows), lambda b, i, j: (b, i, 0)),
      pl.BlockSpec((None, num_rows, k), lambda b, i, j: (b, 0, j)),
      pl.BlockSpec((1, k), lambda b, i, j: (0, j)),
      pl.BlockSpec((None, 1, 1), lambda b, i, j: (b, 0, 0)),
    ],
    [pl.BlockSpec((None, s, 1), lambda b, i, j: (b, i, 0))] * 2,
    [jax.ShapeDtypeStruct((batch, num_samples, 1), jnp.float32)] * 2,
    [pltpu.VMEM((s, 1), jnp.float32)] * 2,
    interpret,
  )(z, rows, shift, label[:, None, None])
  return out[..., 0], at_label[..., 0]


def _tpu_softmax_pull_kernel(z, pulled, rows, shift, log_scale, out):
  @pl.when(pl.program_id(2) == 0)
  def _():
    out[:] = jnp.zeros_like(out)

  num_rows = rows.shape[0]
  u = _block_logits(z[:], rows[:], rows[num_rows - 1 :], shift[:], _tpu_dot, num_rows)
  out[:] += _tpu_dot(pulled[:], jnp.exp(u - log_scale[:]))


def _tpu_softmax_pull(z, rows, shift, log_scale, interpret):
  batch, num_samples, num_rows = z.shape
  num_classes = rows.shape[-1]
  s, k = TPU_BLOCK[0], min(TPU_BLOCK[1], num_classes)
  return _tpu_call(
    _tpu_softmax_pull_kernel,
    (batch, pl.cdiv(num_classes, k), num_samples // s),
    [
      pl.BlockSpec((None, s, num_rows), lambda b, j, i: (b, i, 0)),
      pl.BlockSpec((None, num_rows, s), lambda b, j, i: (b, 0, i)),
      pl.BlockSpec((None, num_rows, k), lambda b, j, i: (b, 0, j)),
      pl.BlockSpec((1, k), lambda b, j, i: (0, j)),
      pl.BlockSpec((None, s, 1), lambda b, j, i: (b, i, 0)),
    ],
    pl.BlockSpec((None, num_rows, k), lambda b, j, i: (b, 0, j)),
    jax.ShapeDtypeStruct(rows.shape, jnp.float32),
    [],
    interpret,
  )(z, jnp.swapaxes(z, 1, 2), rows, shift, log_scale[..., None])


def _tpu_sigmoid_sums_kernel(z, pulled, rows, shift, sign, counts, top, total, gradient):
  @pl.when(pl.program_id(2) == 0)
  def _():
    top[:] = jnp.full_like(top, 2 * PADDED)
    total[:] = jnp.zeros_like(total)
    gradient[:] = jnp.zeros_like(gradient)

  num_rows = rows.shape[0]
  u = _block_logits(z[:], rows[:], rows[num_rows - 1 :], shift[:], _tpu_dot, num_rows)
  top[:], total[:], gradient[:] = _add_samples(
    top[:], total[:], gradient[:], sign[:] * u, counts[:], lambda x: _tpu_dot(pulled[:], x)
  )


def _tpu_sigmoid_sums(z, rows, shift, sign, counts, interpret):
  batch, num_samples, num_rows = z.shape
  num_classes = rows.shape[-1]
  s, k = TPU_BLOCK[0], min(TPU_BLOCK[1], num_classes)
  class_block = pl.BlockSpec((None, 1, k), lambda b, j, i: (b, 0, j))
  row_block = pl.BlockSpec((None, num_rows, k), lambda b, j, i: (b, 0, j))
  one_row = jax.ShapeDtypeStruct((batch, 1, num_classes), jnp.float32)
  top, total, gradient = _tpu_call(
    _tpu_sigmoid_sums_kernel,
    (batch, pl.cdiv(num_classes, k), num_samples // s),
    [
      pl.BlockSpec((None, s, num_rows), lambda b, j, i: (b, i, 0)),
      pl.BlockSpec((None, num_rows, s), lambda b, j, i: (b, 0, i)),
      row_block,
      pl.BlockSpec((1, k), lambda b, j, i: (0, j)),
      class_block,
      pl.BlockSpec((s, 1), lambda b, j, i: (i, 0)),
    ],
    [class_block, class_block, row_block],
    [one_row, one_row, jax.ShapeDtypeStruct(rows.shape, jnp.float32)],
    [],
    interpret,
  )(z, jnp.swapaxes(z, 1, 2), rows, shift, sign[:, None], counts.astype(jnp.float32)[:, None])
  return top[:, 0], total[:, 0], gradient


# NVIDIA: one program sums, and neighbours in the grid read the same normals or rows. Block sides are
# powers of two; what lies beyond an array is not loaded. Logits are in units of log 2, as the
# hardware's exponential takes them. Instructions are what bounds these kernels, and half of them
# round and turn the operands of products: hence products that share one block of normals, and sums
# over samples with classes along the rows, where they stay in a thread.


def _gpu_call(kernel, grid, out_shape, num_warps, interpret):
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
  """2^x in one instruction: to 2 in the last place, 0 below 2^-126."""
  return jnp.exp2(x) if interpret else _instruction('ex2.approx.ftz.f32 $0, $1;', x)


def _reciprocal(x, interpret):
  """1 / x in one instruction: to 1 in the last place."""
  return 1.0 / x if interpret else _instruction('rcp.approx.ftz.f32 $0, $1;', x)


def _gpu_operands(z, rows, shift):
  """z [B, S, T] padded to a power of two, and mu + shift [B, K], both in units of log 2."""
  num_rows = rows.shape[1]
  padding = max(16, pl.next_power_of_2(num_rows)) - num_rows
  z = jnp.pad(z, ((0, 0), (0, 0), (0, padding)))
  return z * LOG2_E, (rows[:, -1] + shift) * LOG2_E


def _gpu_log_z_kernel(z_ref, rows_ref, mu_ref, label_ref, log_z_ref, at_label_ref, *, interpret):
  s, k = GPU_LOG_Z_BLOCK
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
  plgpu.store(log_z_ref.at[b, samples], top / LOG2_E + jnp.log(total))
  plgpu.store(at_label_ref.at[b, samples], at_label / LOG2_E)


def _gpu_log_z(z, rows, shift, label, interpret):
  batch, num_samples, _ = z.shape
  out_shape = [jax.ShapeDtypeStruct((batch, num_samples), jnp.float32)] * 2
  grid = (num_samples // GPU_LOG_Z_BLOCK[0], batch)
  z, mu = _gpu_operands(z, rows, shift)
  return _gpu_call(_gpu_log_z_kernel, grid, out_shape, 8, interpret)(z, rows, mu, label)


class _Classes:
  """A block of classes of one example, whose samples one program sums."""

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
  """128, or what registers hold of the rows."""
  return max(16, min(128, 8192 // num_normals))


def _gpu_pull_call(kernel, z, rows, out_shape, interpret):
  grid = (pl.cdiv(rows.shape[-1], _classes_a_program(z.shape[-1])), rows.shape[0])
  return _gpu_call(kernel, grid, out_shape, 4, interpret)


def _gpu_softmax_pull_kernel(z_ref, rows_ref, mu_ref, log_scale_ref, out_ref, *, interpret):
  classes = _Classes(z_ref.shape[-1], rows_ref)
  rows, mu = classes.load_rows(rows_ref), classes.load(mu_ref, PADDED)[:, None]

  def body(i, total):
    samples = pl.ds(i * GPU_SAMPLES, GPU_SAMPLES)
    z = plgpu.load(z_ref.at[classes.b, samples])  # [s, T]
    log_scale = plgpu.load(log_scale_ref.at[classes.b, samples])
    u = plgpu.dot(rows, z, trans_a=True, trans_b=True) + mu  # [k, s]
    return total + plgpu.dot(z, _exp2(u - log_scale, interpret), trans_a=True, trans_b=True)

  num_blocks = z_ref.shape[1] // GPU_SAMPLES
  total = jax.lax.fori_loop(0, num_blocks, body, jnp.zeros_like(rows))
  classes.store_rows(out_ref, total / LOG2_E)


def _gpu_softmax_pull(z, rows, shift, log_scale, interpret):
  z, mu = _gpu_operands(z, rows, shift)
  out_shape = jax.ShapeDtypeStruct(rows.shape, jnp.float32)
  call = _gpu_pull_call(_gpu_softmax_pull_kernel, z, rows, out_shape, interpret)
  return call(z, rows, mu, log_scale * LOG2_E)


def _gpu_sigmoid_sums_kernel(
  z_ref, rows_ref, mu_ref, sign_ref, penalty_ref, top_ref, total_ref, gradient_ref, *, interpret
):
  classes = _Classes(z_ref.shape[-1], rows_ref)
  sign = classes.load(sign_ref, 1.0)
  rows = classes.load_rows(rows_ref) * sign
  mu = (classes.load(mu_ref, 0.0) * sign)[:, None]

  def body(i, carry):
    top, total, gradient = carry  # [k], [k], [T, k]
    samples = pl.ds(i * GPU_SAMPLES, GPU_SAMPLES)
    z = plgpu.load(z_ref.at[classes.b, samples])  # [s, T]
    x = plgpu.dot(rows, z, trans_a=True, trans_b=True) + mu + plgpu.load(penalty_ref.at[samples])
    new_top = jnp.maximum(top, jnp.minimum(x.max(axis=1), 0.0))
    e = _exp2(-jnp.abs(x) - new_top[:, None], interpret)  # [k, s]
    r = _reciprocal(1.0 + e * _exp2(new_top, interpret)[:, None], interpret)
    shrink = _exp2(top - new_top, interpret)
    total = total * shrink + jnp.where(x < 0, e * r, r).sum(axis=1)
    gradient = gradient * shrink[:, None] + plgpu.dot(e * r * r, z)
    return new_top, total, gradient

  start = jnp.full_like(sign, 2 * PADDED), jnp.zeros_like(sign), jnp.zeros_like(rows.T)
  num_blocks = z_ref.shape[1] // GPU_SAMPLES
  top, total, gradient = jax.lax.fori_loop(0, num_blocks, body, start)
  classes.store(top_ref, top / LOG2_E)
  classes.store(total_ref, total)
  classes.store_rows(gradient_ref, gradient.T / LOG2_E)


def _gpu_sigmoid_sums(z, rows, shift, sign, counts, interpret):
  batch, _, num_classes = rows.shape
  one_row = jax.ShapeDtypeStruct((batch, num_classes), jnp.float32)
  out_shape = [one_row, one_row, jax.ShapeDtypeStruct(rows.shape, jnp.float32)]
  z, mu = _gpu_operands(z, rows, shift)
  penalty = jnp.where(counts, 0.0, 2 * PADDED)
  call = _gpu_pull_call(_gpu_sigmoid_sums_kernel, z, rows, out_shape, interpret)
  return call(z, rows, mu, sign, penalty)
