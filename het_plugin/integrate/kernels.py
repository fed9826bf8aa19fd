"""Fused kernels (Pallas): the logits of samples never reach device memory, nor the projected
factors of the exact sigmoid.

A kernel of project-then-sample takes normals z [B, S, T] (T = R + 2, the last is a 1 for mu), rows
[B, T, K] (the factors with mu as the last one, over tau) and shift [K]. It computes the logits
u = z rows + shift of a block of samples and a block of classes in fast memory and reduces them
there:

    log2_z         log2 sum_k exp(u_sk), and u_sy                                   [B, S]
    softmax_pull   sum_s z_s exp(u_sk) / 2^log2_scale_s                             [B, T, K]
    sigmoid_sums   sum_s sigmoid(x_sk), sum_s z_s sigmoid(x_sk) sigmoid(-x_sk)      x = a u

Devices have an instruction for 2^x, so logits and logarithms inside the kernels and in their
results are in units of log 2.

Each of these exists twice. On a TPU (Mosaic) the grid walks the blocks of a sum in order and
accumulates into an output block that stays in VMEM. On an NVIDIA GPU (Triton) programs run in any
order, so one program loops over the blocks of a sum and keeps the sum in registers.

The exact sigmoid takes the factors before the projection, with phi as the last row, [B, T, D], and
W [D, K]. `last_and_squares` projects and sums the squares of the factors, `squares_pull` projects
again for the gradients. They exist for a TPU only: a GPU's registers do not hold the gradients of
an example's rows, [T, D], or of a block of W, [D, k], while they are summed.

The operands of matrix products are rounded as XLA rounds them by default on the same device, except
mu and shift, which are added. Everything else is float32.
"""

import importlib
from types import ModuleType

import jax
import jax.numpy as jnp

from het_plugin.integrate.gaussian import PADDED

SAMPLE_MULTIPLE = 128  # the number of samples in a call is a multiple of this
BACKENDS = ('tpu', 'gpu')


def _of(backend: str) -> ModuleType:
  """The kernels of a backend, imported when they are called: Pallas takes a while."""
  return importlib.import_module(f'het_plugin.integrate.{backend}_kernels')


def log2_z(
  z, rows, shift, label, *, backend: str, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
  """log2 of the partition sum of every sample, and its logit at the label in the same unit.

  Args:
    z: float32 [B, S, T] normals; the last of the T is 1. S is a multiple of `SAMPLE_MULTIPLE`.
    rows: float32 [B, T, K].
    shift: float32 [K].
    label: int32 [B]; a label outside [0, K) has the logit 0.
    backend: 'tpu' or 'gpu'.
    interpret: runs the kernel on any device, slowly, for tests.

  Returns:
    Both float32 [B, S].
  """
  label = jnp.where(label < rows.shape[-1], label, -1)  # blocks may reach beyond K
  return _of(backend).log2_z(z, rows, shift, label, interpret)


def softmax_pull(z, rows, shift, log2_scale, *, backend: str, interpret: bool = False) -> jax.Array:
  """sum_s z_s exp(u_sk) / 2^log2_scale_s, float32 [B, T, K], for log2_scale float32 [B, S].

  A sample with an infinite scale adds nothing. The other arguments are those of `log2_z`.
  """
  return _of(backend).softmax_pull(z, rows, shift, log2_scale, interpret)


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
    sum_s z_s sigmoid(x_s) sigmoid(-x_s) = 2^top gradient; all float32. `estimate` has the
    mathematics.
  """
  penalty = jnp.where(counts, 0.0, 2 * PADDED)  # makes everything that follows 0
  return _of(backend).sigmoid_sums(z, rows, shift, sign, penalty, interpret)


def last_and_squares(rows, kernel, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
  """The last row of u = rows W, and the sum of the squares of the others.

  Args:
    rows: [B, T, D].
    kernel: W [D, K].
    interpret: as of `log2_z`.

  Returns:
    Both float32 [B, K].
  """
  return _of('tpu').last_and_squares(rows, kernel, interpret)


def squares_pull(
  rows, kernel, to_last, to_squares, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
  """The gradients of rows and W, float32, for those of `last_and_squares`, float32 [B, K]."""
  return _of('tpu').squares_pull(rows, kernel, to_last, to_squares, interpret)
