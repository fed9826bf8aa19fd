"""The kernels of `kernels` for a TPU (Mosaic): the grid walks the blocks of a sum in order.

A block at the edge of K also reads columns beyond it. They are masked where classes are summed and
never written. A core issues its instructions in the compiler's order, so the times of block sizes
were read from libtpu's final bundles, for v4, v5e, v5p and v6e.
"""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from het_plugin.integrate.gaussian import PADDED

LANES, SUBLANES = 128, 8  # of a vector register of a TPU
# Samples and classes per block, at most. Blocks are large so that their phases overlap: with 128
# samples and 512 classes a product alone takes two to three times as long per logit.
SUM_OF_CLASSES = (256, 1024)
SUM_OF_SAMPLES = (512, 1024)
# Numbers of the rows of one group of examples, and of one block of W, at most. On a v5e, blocks of
# W of two thirds the size take a tenth longer. Larger ones do not fit into the 16 MiB of a v4.
PROJECTED = (2**19, 3 * 2**17)
LOG2_E = math.log2(math.e)


def _dot(a, b):
  return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _call(
  kernel, grid, in_specs, out_specs, out_shape, scratch_shapes, interpret, parallel=2, aliases=()
):
  semantics: list[Literal['parallel', 'arbitrary']] = ['parallel'] * parallel
  semantics += ['arbitrary'] * (len(grid) - parallel)
  return pl.pallas_call(
    kernel,
    grid=grid,
    in_specs=in_specs,
    out_specs=out_specs,
    out_shape=out_shape,
    scratch_shapes=scratch_shapes,
    input_output_aliases=dict(aliases),
    interpret=interpret,
    compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
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
  """`kernels.log2_z`."""
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
  """`kernels.softmax_pull`."""
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
  # jax 0.12 has it in pltpu, jax 0.10 in pl.
  r = (pltpu if hasattr(pltpu, 'reciprocal') else pl).reciprocal(x, approx=True)
  return r * (2.0 - x * r)


def sigmoid_sums(z, rows, shift, sign, penalty, interpret):
  """`kernels.sigmoid_sums`."""
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


def projected_blocks(batch, num_rows, dim, num_classes):
  """Groups of examples, examples of a group, and classes of a block of W."""
  num_rows += -num_rows % SUBLANES
  n = pl.cdiv(batch, max(1, PROJECTED[0] // (num_rows * dim)))
  k = LANES * max(1, PROJECTED[1] // (LANES * dim))
  return n, pl.cdiv(batch, n), block_shape((1, k), 1, num_classes)[1]


def _groups(x, n, g, interpret):
  """Rows [B, T, D] as n groups of g examples, [n, g T, D]; T is rounded up by rows of zeros before
  the last one.
  """
  batch, num_rows, dim = x.shape
  zeros = jnp.zeros((batch, -num_rows % SUBLANES, dim), x.dtype)
  x = jnp.concatenate([x[:, :-1], zeros, x[:, -1:]], axis=1)
  x = jnp.pad(x, ((0, n * g - batch), (0, 0), (0, 0))).reshape(n, -1, dim)
  # A TPU rounds the operands of products so by default. Done here, it saves a tenth of the cycles.
  return x if interpret else x.astype(jnp.bfloat16)


def _project(x, w, num_examples):
  """u [g, T, k], and which rows are noise [1, T, 1]: all but the last one."""
  u = _dot(x, w).reshape(num_examples, -1, w.shape[1])
  return u, jax.lax.broadcasted_iota(jnp.int32, (1, u.shape[1], 1), 1) < u.shape[1] - 1


def _last_and_squares_kernel(x, w, last, squares):
  u, is_noise = _project(x[:], w[:].astype(x.dtype), len(last))
  last[:] = u[:, -1]
  squares[:] = jnp.where(is_noise, jnp.square(u), 0.0).sum(axis=1)


def last_and_squares(rows, kernel, interpret):
  """`kernels.last_and_squares`."""
  batch, (dim, num_classes) = len(rows), kernel.shape
  n, g, k = projected_blocks(*rows.shape, num_classes)
  x = _groups(rows, n, g, interpret)
  out = _call(
    _last_and_squares_kernel,
    (pl.cdiv(num_classes, k), n),
    [
      pl.BlockSpec((None, *x.shape[1:]), lambda j, i: (i, 0, 0)),
      pl.BlockSpec((dim, k), lambda j, i: (0, j)),
    ],
    [pl.BlockSpec((None, g, k), lambda j, i: (i, 0, j))] * 2,
    [jax.ShapeDtypeStruct((n, g, num_classes), jnp.float32)] * 2,
    [],
    interpret,
  )(x, kernel)
  return tuple(part.reshape(-1, num_classes)[:batch] for part in out)


def _squares_pull_kernel(x, x_t, w, to_last, to_squares, start, dx, dw, *, num_classes):
  j, k = pl.program_id(0), w.shape[1]
  w = w[:].astype(x.dtype)
  # Columns beyond K would enter the sum over classes.
  inside = j * k + jax.lax.broadcasted_iota(jnp.int32, (1, k), 1) < num_classes
  if num_classes % k:
    w = jnp.where(inside, w, jnp.zeros_like(w))
  u, is_noise = _project(x[:], w, len(to_last))
  du = jnp.where(is_noise, 2.0 * u * to_squares[:][:, None], to_last[:][:, None]).reshape(-1, k)
  if num_classes % k:
    du = jnp.where(inside, du, 0.0)
  du = du.astype(w.dtype)

  @pl.when(j == 0)
  def _():
    dx[:] = jnp.zeros_like(dx)

  dx[:] += jax.lax.dot_general(du, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
  dw[:] = start[:] + _dot(x_t[:], du)


def squares_pull(rows, kernel, to_last, to_squares, interpret):
  """`kernels.squares_pull`."""
  batch, (dim, num_classes) = len(rows), kernel.shape
  n, g, k = projected_blocks(*rows.shape, num_classes)
  x = _groups(rows, n, g, interpret)
  pad = ((0, n * g - batch), (0, 0))
  cotangents = [jnp.pad(y, pad).reshape(n, g, num_classes) for y in (to_last, to_squares)]
  w_block = pl.BlockSpec((dim, k), lambda j: (0, j))
  # A call takes one group, as the gradient of its rows has to fit into VMEM. Further groups add to
  # the gradient of W where it lies.
  is_alone = n == 1
  call = _call(
    functools.partial(_squares_pull_kernel, num_classes=num_classes),
    (pl.cdiv(num_classes, k),),
    [
      pl.BlockSpec(x.shape[1:], lambda j: (0, 0)),
      pl.BlockSpec(x.shape[:0:-1], lambda j: (0, 0)),
      w_block,
      *[pl.BlockSpec((g, k), lambda j: (0, j))] * 2,
      pl.BlockSpec((dim, k), lambda j: (0, 0)) if is_alone else w_block,
    ],
    [pl.BlockSpec(x.shape[1:], lambda j: (0, 0)), w_block],
    [jax.ShapeDtypeStruct(y, jnp.float32) for y in (x.shape[1:], kernel.shape)],
    [],
    interpret,
    parallel=0,
    aliases=[] if is_alone else [(5, 1)],
  )

  def add(dw, inputs):
    x, *cotangents = inputs
    dx, dw = call(x, x.T, kernel, *cotangents, dw)
    return dw, dx

  if is_alone:
    dw, dx = add(jnp.zeros((dim, k), jnp.float32), [y[0] for y in (x, *cotangents)])
  else:
    dw, dx = jax.lax.scan(add, jnp.zeros(kernel.shape, jnp.float32), (x, *cotangents))
  dx = dx.reshape(-1, x.shape[1] // g, dim)[:batch]
  return jnp.concatenate([dx[:, : rows.shape[1] - 1], dx[:, -1:]], axis=1), dw
