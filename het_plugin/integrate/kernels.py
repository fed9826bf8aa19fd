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

import jax
import jax.numpy as jnp

from het_plugin.integrate import gpu_kernels, tpu_kernels
from het_plugin.integrate.gaussian import PADDED

SAMPLE_MULTIPLE = 128  # of samples in a call
BACKENDS = {'tpu': tpu_kernels, 'gpu': gpu_kernels}


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
  return BACKENDS[backend].log2_z(z, rows, shift, label, interpret)


def softmax_pull(z, rows, shift, log2_scale, *, backend: str, interpret: bool = False) -> jax.Array:
  """sum_s z_s exp(u_sk) / 2^log2_scale_s, float32 [B, T, K], for log2_scale float32 [B, S], where a
  sample at infinity adds nothing; the other arguments are those of `log2_z`.
  """
  return BACKENDS[backend].softmax_pull(z, rows, shift, log2_scale, interpret)


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
  penalty = jnp.where(counts, 0.0, 2 * PADDED)  # where all that follows is 0
  return BACKENDS[backend].sigmoid_sums(z, rows, shift, sign, penalty, interpret)
