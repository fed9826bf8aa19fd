"""The kernels of `kernels` for a TPU (Mosaic): the grid walks the blocks of a sum in order.

A block at the edge of K also reads columns beyond it. They are masked where classes are summed and
never written. A core issues its instructions in the compiler's order, so the times of block sizes
were read from libtpu's final bundles, for v4, v5e, v5p and v6e.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from het_plugin.integrate.gaussian import PADDED

LANES = 128  # per vector register of a TPU
# Samples and classes per block, at most. Blocks are large so that their phases overlap: with 128
# samples and 512 classes a product alone takes two to three times as long per logit.
SUM_OF_CLASSES = (256, 1024)
SUM_OF_SAMPLES = (512, 1024)
LOG2_E = math.log2(math.e)


def _dot(a, b):
  return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _call(kernel, grid, in_specs, out_specs, out_shape, scratch_shapes, interpret):
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


def block_shape(at_most, num_samples, num_classes):
  """Samples that divide `num_samples`, and classes that leave little of the last block idle."""
  s, k = at_most
  tiles = pl.cdiv(num_classes, LANES)
  return math.gcd(s, num_samples), LANES * pl.cdiv(tiles, pl.cdiv(LANES * tiles, k))


def _operands(z, rows, shift):
  """z with 0 in place of the 1 for mu, and mu + shift [B, 1, K], in units of log 2."""
  is_noise = jnp.arange(z.shape[-1]) < z.shape[-1] - 1
  return jnp.where(is_noise, z * LOG2_E, 0.0), (rows[:, -1:] + shift) * LOG2_E


def _lanes(x):
  """The columns of x [s, k] in parts as wide as a vector register."""
  return [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)]


def _log2_z_kernel(z, rows, mu, label, out, at_label, top, total, label_sum, *, num_classes):
  j, last = pl.program_id(2), pl.num_programs(2) - 1
  k = rows.shape[1]

  @pl.when(j == 0)
  def _():
    top[:] = jnp.full_like(top, 2 * PADDED)
    total[:] = jnp.zeros_like(total)
    label_sum[:] = jnp.zeros_like(label_sum)

  index = j * k + jax.lax.broadcasted_iota(jnp.int32, (1, k), 1)

  def add(is_whole):
    u = _dot(z[:], rows[:]) + mu[:]
    if not is_whole:
      u = jnp.where(index < num_classes, u, PADDED)
    # Each lane has its own sums, which are added after the last block.
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


def log2_z(z, rows, shift, label, interpret):
  batch, num_samples, num_rows = z.shape
  num_classes = rows.shape[-1]
  s, k = block_shape(SUM_OF_CLASSES, num_samples, num_classes)
  z, mu = _operands(z, rows, shift)
  out, at_label = _call(
    functools.partial(_log2_z_kernel, num_classes=num_classes),
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


def _softmax_pull_kernel(z, pulled, rows, mu, log2_scale, out):
  @pl.when(pl.program_id(2) == 0)
  def _():
    out[:] = jnp.zeros_like(out)

  u = _dot(z[:], rows[:]) + mu[:]
  out[:] += _dot(pulled[:], jnp.exp2(u - log2_scale[:]))


def softmax_pull(z, rows, shift, log2_scale, interpret):
  batch, num_samples, num_rows = z.shape
  num_classes = rows.shape[-1]
  s, k = block_shape(SUM_OF_SAMPLES, num_samples, num_classes)
  pulled = jnp.swapaxes(z, 1, 2)
  z, mu = _operands(z, rows, shift)
  return _call(
    _softmax_pull_kernel,
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


def _sigmoid_sums_kernel(z, pulled, rows, mu, sign, penalty, top, total, gradient, *, interpret):
  @pl.when(pl.program_id(2) == 0)
  def _():
    top[:] = jnp.full_like(top, 2 * PADDED)
    total[:] = jnp.zeros_like(total)
    gradient[:] = jnp.zeros_like(gradient)

  x = _dot(z[:], rows[:] * sign[:]) + mu[:] * sign[:] + penalty[:]
  new_top = jnp.maximum(top[:], jnp.minimum(x.max(axis=0, keepdims=True), 0.0))
  e = jnp.exp2(-new_top - jnp.abs(x))
  r = _reciprocal(1.0 + e * jnp.exp2(new_top), interpret)
  shrink = jnp.exp2(top[:] - new_top)
  total[:] = total[:] * shrink + jnp.where(x < 0, e * r, r).sum(axis=0, keepdims=True)
  gradient[:] = gradient[:] * shrink + _dot(pulled[:], e * r * r)
  top[:] = new_top


def _reciprocal(x, interpret):
  """1 / x for float32 x in [1, 2]: the hardware's estimate and one Newton step."""
  if interpret:
    return 1.0 / x
  r = pl.reciprocal(x, approx=True)
  return r * (2.0 - x * r)


def sigmoid_sums(z, rows, shift, sign, penalty, interpret):
  batch, num_samples, num_rows = z.shape
  num_classes = rows.shape[-1]
  s, k = block_shape(SUM_OF_SAMPLES, num_samples, num_classes)
  class_block = pl.BlockSpec((None, 1, k), lambda b, j, i: (b, 0, j))
  row_block = pl.BlockSpec((None, num_rows, k), lambda b, j, i: (b, 0, j))
  one_row = jax.ShapeDtypeStruct((batch, 1, num_classes), jnp.float32)
  pulled = jnp.swapaxes(z, 1, 2)
  z, mu = _operands(z, rows, shift)
  top, total, gradient = _call(
    functools.partial(_sigmoid_sums_kernel, interpret=interpret),
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
