"""Fused kernels (Pallas) of project-then-sample: a sample's logits never reach device memory.

Each kernel takes normals z [B, S, T] (T = R + 2, a 1 for mu behind the normals), rows [B, T, K]
(the factors with mu as the last one, over tau) and shift [K], and forms the logits u = z rows +
shift of a block of samples and a block of classes in fast memory, where they also end:

    log2_z         log2 sum_k exp(u_sk), and u_sy                                   [B, S]
    softmax_pull   sum_s z_s exp(u_sk) / 2^log2_scale_s                             [B, T, K]
    sigmoid_sums   sum_s sigmoid(x_sk), sum_s z_s sigmoid(x_sk) sigmoid(-x_sk)      x = a u

Devices have an instruction for 2^x, so inside of them, and in what they return, logits and
logarithms are in units of log 2.

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

SAMPLE_MULTIPLE = 128
LANES = 128  # of a TPU's vector register
# Samples and classes of a block, at most. Large ones, so that its phases overlap: a product of 128
# samples and 512 classes alone takes two to three times as long a logit.
TPU_SUM_OF_CLASSES = (256, 1024)
TPU_SUM_OF_SAMPLES = (512, 1024)
GPU_SUM_OF_CLASSES = (128, 64)
GPU_SAMPLES = 32  # of a block, where a program sums over samples
LOG2_E = math.log2(math.e)
BACKENDS = ('tpu', 'gpu')


def log2_z(
  z, rows, shift, label, *, backend: str, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
  """log2 of the partition sum of every sample, and its logit at the label in the same unit.

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
  label = jnp.where(label < rows.shape[-1], label, -1)  # blocks may reach beyond K
  call = {'tpu': _tpu_log2_z, 'gpu': _gpu_log2_z}[backend]
  return call(z, rows, shift, label, interpret)


def softmax_pull(z, rows, shift, log2_scale, *, backend: str, interpret: bool = False) -> jax.Array:
  """sum_s z_s exp(u_sk) / 2^log2_scale_s, float32 [B, T, K], for log2_scale float32 [B, S], where a
  sample at infinity adds nothing; the other arguments are those of `log2_z`.
  """
  call = {'tpu': _tpu_softmax_pull, 'gpu': _gpu_softmax_pull}[backend]
  return call(z, rows, shift, log2_scale, interpret)


def sigmoid_sums(
  z, rows, shift, sign, counts, *, backend: str, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The sums of sigmoids of x = sign * u over samples that count, relative to a scale.

  Args:
    z, rows, shift, backend, interpret: as those of `log2_z`.
    sign: float32 [B, K], +1 or -1.
    counts: bool [S], whether a sample counts.

  Returns:
    top [B, K], total [B, K] and gradient [B, T, K] with sum_s sigmoid(x_s) = 2^top total and
    sum_s z_s sigmoid(x_s) sigmoid(-x_s) = 2^top gradient; all float32. `factored.log_sigmoid` has
    the mathematics.
  """
  penalty = jnp.where(counts, 0.0, 2 * PADDED)  # where all that follows is 0
  call = {'tpu': _tpu_sigmoid_sums, 'gpu': _gpu_sigmoid_sums}[backend]
  return call(z, rows, shift, sign, penalty, interpret)


# TPU: the grid walks the blocks of a sum in order. A block at the edge of K reads what lies beyond
# it; those columns meet no other, are masked where classes are summed, and never written.
#
# A core issues its instructions in the compiler's order: what a block of a size takes was read from
# libtpu's final bundles, for v4, v5e, v5p and v6e.


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


def tpu_block(at_most, num_samples, num_classes):
  """Samples, which divide `num_samples`, and classes, which leave little of the last block idle."""
  s, k = at_most
  tiles = pl.cdiv(num_classes, LANES)
  return math.gcd(s, num_samples), LANES * pl.cdiv(tiles, pl.cdiv(LANES * tiles, k))


def _tpu_operands(z, rows, shift):
  """z with 0 for mu's 1, and mu + shift [B, 1, K], in units of log 2."""
  is_noise = jnp.arange(z.shape[-1]) < z.shape[-1] - 1
  return jnp.where(is_noise, z * LOG2_E, 0.0), (rows[:, -1:] + shift) * LOG2_E


def _lanes(x):
  """The columns of x [s, k] in parts of one vector register's width."""
  return [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)]


def _tpu_log2_z_kernel(z, rows, mu, label, out, at_label, top, total, label_sum, *, num_classes):
  j, last = pl.program_id(2), pl.num_programs(2) - 1
  k = rows.shape[1]

  @pl.when(j == 0)
  def _():
    top[:] = jnp.full_like(top, 2 * PADDED)
    total[:] = jnp.zeros_like(total)
    label_sum[:] = jnp.zeros_like(label_sum)

  index = j * k + jax.lax.broadcasted_iota(jnp.int32, (1, k), 1)

  def add(is_whole):
    u = _tpu_dot(z[:], rows[:]) + mu[:]
    if not is_whole:
      u = jnp.where(index < num_classes, u, PADDED)
    # Each lane has its own sums; they meet after the last block.
    new_top = functools.reduce(jnp.maximum, _lanes(u), top[:])
    e = sum(jnp.exp2(part - new_top) for part in _lanes(u))
    total[:] = total[:] * jnp.exp2(top[:] - new_top) + e
    top[:] = new_top

    @pl.when((label[0, 0] >= j * k) & (label[0, 0] < (j + 1) * k))
    def _():
      label_sum[:] += sum(_lanes(jnp.where(index == label[:], u, 0.0)))

  if num_classes % k:
    pl.when(j < last)(functools.partial(add, True))
    pl.when(j == last)(functools.partial(add, False))
  else:
    add(True)

  @pl.when(j == last)
  def _():
    peak = top[:].max(axis=1, keepdims=True)
    sums = (total[:] * jnp.exp2(top[:] - peak)).sum(axis=1, keepdims=True)
    out[:] = peak + jnp.log2(sums)
    at_label[:] = label_sum[:].sum(axis=1, keepdims=True)


def _tpu_log2_z(z, rows, shift, label, interpret):
  batch, num_samples, num_rows = z.shape
  num_classes = rows.shape[-1]
  s, k = tpu_block(TPU_SUM_OF_CLASSES, num_samples, num_classes)
  z, mu = _tpu_operands(z, rows, shift)
  out, at_label = _tpu_call(
    functools.partial(_tpu_log2_z_kernel, num_classes=num_classes),
    (batch, num_samples // s, pl.cdiv(num_classes, k)),
    [
      pl.BlockSpec((None, s, num_rows), lambda b, i, j: (b, i, 0)),
      pl.BlockSpec((None, num_rows, k), lambda b, i, j: (b, 0, j)),
      pl.BlockSpec((None, 1, k), lambda b, i, j: (b, 0, j)),
      pl.BlockSpec((None, 1, 1), lambda b, i, j: (b, 0, 0)),
    ],
    [pl.BlockSpec((None, s, 1), lambda b, i, j: (b, i, 0))] * 2,
    [jax.ShapeDtypeStruct((batch, num_samples, 1), jnp.float32)] * 2,
    [pltpu.VMEM((s, LANES), jnp.float32)] * 3,
    interpret,
  )(z, rows, mu, label[:, None, None])
  return out[..., 0], at_label[..., 0]


def _tpu_softmax_pull_kernel(z, pulled, rows, mu, log2_scale, out):
  @pl.when(pl.program_id(2) == 0)
  def _():
    out[:] = jnp.zeros_like(out)

  u = _tpu_dot(z[:], rows[:]) + mu[:]
  out[:] += _tpu_dot(pulled[:], jnp.exp2(u - log2_scale[:]))


def _tpu_softmax_pull(z, rows, shift, log2_scale, interpret):
  batch, num_samples, num_rows = z.shape
  num_classes = rows.shape[-1]
  s, k = tpu_block(TPU_SUM_OF_SAMPLES, num_samples, num_classes)
  pulled = jnp.swapaxes(z, 1, 2)
  z, mu = _tpu_operands(z, rows, shift)
  return _tpu_call(
    _tpu_softmax_pull_kernel,
    (batch, pl.cdiv(num_classes, k), num_samples // s),
    [
      pl.BlockSpec((None, s, num_rows), lambda b, j, i: (b, i, 0)),
      pl.BlockSpec((None, num_rows, s), lambda b, j, i: (b, 0, i)),
      pl.BlockSpec((None, num_rows, k), lambda b, j, i: (b, 0, j)),
      pl.BlockSpec((None, 1, k), lambda b, j, i: (b, 0, j)),
      pl.BlockSpec((None, s, 1), lambda b, j, i: (b, i, 0)),
    ],
    pl.BlockSpec((None, num_rows, k), lambda b, j, i: (b, 0, j)),
    jax.ShapeDtypeStruct(rows.shape, jnp.float32),
    [],
    interpret,
  )(z, pulled, rows, mu, log2_scale[..., None])


def _tpu_sigmoid_sums_kernel(
  z, pulled, rows, mu, sign, penalty, top, total, gradient, *, interpret
):
  @pl.when(pl.program_id(2) == 0)
  def _():
    top[:] = jnp.full_like(top, 2 * PADDED)
    total[:] = jnp.zeros_like(total)
    gradient[:] = jnp.zeros_like(gradient)

  x = _tpu_dot(z[:], rows[:] * sign[:]) + mu[:] * sign[:] + penalty[:]
  new_top = jnp.maximum(top[:], jnp.minimum(x.max(axis=0, keepdims=True), 0.0))
  e = jnp.exp2(-new_top - jnp.abs(x))
  r = _tpu_reciprocal(1.0 + e * jnp.exp2(new_top), interpret)
  shrink = jnp.exp2(top[:] - new_top)
  total[:] = total[:] * shrink + jnp.where(x < 0, e * r, r).sum(axis=0, keepdims=True)
  gradient[:] = gradient[:] * shrink + _tpu_dot(pulled[:], e * r * r)
  top[:] = new_top


def _tpu_reciprocal(x, interpret):
  """1 / x of float32 in [1, 2]: the hardware's guess, and one step of Newton's."""
  if interpret:
    return 1.0 / x
  r = pl.reciprocal(x, approx=True)
  return r * (2.0 - x * r)


def _tpu_sigmoid_sums(z, rows, shift, sign, penalty, interpret):
  batch, num_samples, num_rows = z.shape
  num_classes = rows.shape[-1]
  s, k = tpu_block(TPU_SUM_OF_SAMPLES, num_samples, num_classes)
  class_block = pl.BlockSpec((None, 1, k), lambda b, j, i: (b, 0, j))
  row_block = pl.BlockSpec((None, num_rows, k), lambda b, j, i: (b, 0, j))
  one_row = jax.ShapeDtypeStruct((batch, 1, num_classes), jnp.float32)
  pulled = jnp.swapaxes(z, 1, 2)
  z, mu = _tpu_operands(z, rows, shift)
  top, total, gradient = _tpu_call(
    functools.partial(_tpu_sigmoid_sums_kernel, interpret=interpret),
    (batch, pl.cdiv(num_classes, k), num_samples // s),
    [
      pl.BlockSpec((None, s, num_rows), lambda b, j, i: (b, i, 0)),
      pl.BlockSpec((None, num_rows, s), lambda b, j, i: (b, 0, i)),
      row_block,
      class_block,
      class_block,
      pl.BlockSpec((s, 1), lambda b, j, i: (i, 0)),
    ],
    [class_block, class_block, row_block],
    [one_row, one_row, jax.ShapeDtypeStruct(rows.shape, jnp.float32)],
    [],
    interpret,
  )(z, pulled, rows, mu, sign[:, None], penalty[:, None])
  return top[:, 0], total[:, 0], gradient


# NVIDIA: one program sums, and neighbours in the grid read the same normals or rows. Block sides
# are powers of two; what lies beyond an array is not loaded. Instructions are what bounds these
# kernels: those of a loop were counted in the code for sm_90, where up to half of them round and
# turn the operands of products. Hence products that share one block of normals, and sums over
# samples with classes along the rows, where they stay in a thread.


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
  """z with T padded to a power of two, and mu + shift [B, K], in units of log 2."""
  num_rows = rows.shape[1]
  padding = max(16, pl.next_power_of_2(num_rows)) - num_rows
  z = jnp.pad(z, ((0, 0), (0, 0), (0, padding)))
  return z * LOG2_E, (rows[:, -1] + shift) * LOG2_E


def _gpu_log2_z_kernel(z_ref, rows_ref, mu_ref, label_ref, log2_z_ref, at_label_ref, *, interpret):
  s, k = GPU_SUM_OF_CLASSES
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


def _gpu_log2_z(z, rows, shift, label, interpret):
  batch, num_samples, _ = z.shape
  out_shape = [jax.ShapeDtypeStruct((batch, num_samples), jnp.float32)] * 2
  grid = (num_samples // GPU_SUM_OF_CLASSES[0], batch)
  z, mu = _gpu_operands(z, rows, shift)
  return _gpu_call(_gpu_log2_z_kernel, grid, out_shape, num_warps=8, interpret=interpret)(
    z, rows, mu, label
  )


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
  return _gpu_call(kernel, grid, out_shape, num_warps=4, interpret=interpret)


def _gpu_softmax_pull_kernel(z_ref, rows_ref, mu_ref, log2_scale_ref, out_ref, *, interpret):
  classes = _Classes(z_ref.shape[-1], rows_ref)
  rows, mu = classes.load_rows(rows_ref), classes.load(mu_ref, PADDED)[:, None]

  def body(i, total):
    samples = pl.ds(i * GPU_SAMPLES, GPU_SAMPLES)
    z = plgpu.load(z_ref.at[classes.b, samples])  # [s, T]
    log2_scale = plgpu.load(log2_scale_ref.at[classes.b, samples])
    u = plgpu.dot(rows, z, trans_a=True, trans_b=True) + mu  # [k, s]
    return total + plgpu.dot(z, _exp2(u - log2_scale, interpret), trans_a=True, trans_b=True)

  num_blocks = z_ref.shape[1] // GPU_SAMPLES
  total = jax.lax.fori_loop(0, num_blocks, body, jnp.zeros_like(rows))
  classes.store_rows(out_ref, total / LOG2_E)


def _gpu_softmax_pull(z, rows, shift, log2_scale, interpret):
  z, mu = _gpu_operands(z, rows, shift)
  out_shape = jax.ShapeDtypeStruct(rows.shape, jnp.float32)
  call = _gpu_pull_call(_gpu_softmax_pull_kernel, z, rows, out_shape, interpret)
  return call(z, rows, mu, log2_scale)


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
    e = _exp2(-new_top[:, None] - jnp.abs(x), interpret)  # [k, s]
    r = _reciprocal(1.0 + e * _exp2(new_top, interpret)[:, None], interpret)
    shrink = _exp2(top - new_top, interpret)
    total = total * shrink + jnp.where(x < 0, e * r, r).sum(axis=1)
    gradient = gradient * shrink[:, None] + plgpu.dot(e * r * r, z)
    return new_top, total, gradient

  start = jnp.full_like(sign, 2 * PADDED), jnp.zeros_like(sign), jnp.zeros_like(rows.T)
  num_blocks = z_ref.shape[1] // GPU_SAMPLES
  top, total, gradient = jax.lax.fori_loop(0, num_blocks, body, start)
  classes.store(top_ref, top)
  classes.store(total_ref, total)
  classes.store_rows(gradient_ref, gradient.T / LOG2_E)


def _gpu_sigmoid_sums(z, rows, shift, sign, penalty, interpret):
  batch, _, num_classes = rows.shape
  one_row = jax.ShapeDtypeStruct((batch, num_classes), jnp.float32)
  out_shape = [one_row, one_row, jax.ShapeDtypeStruct(rows.shape, jnp.float32)]
  z, mu = _gpu_operands(z, rows, shift)
  call = _gpu_pull_call(_gpu_sigmoid_sums_kernel, z, rows, out_shape, interpret)
  return call(z, rows, mu, sign, penalty)
