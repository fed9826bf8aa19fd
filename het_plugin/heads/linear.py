"""Affine maps of the pre-logits with t5x's logical axes."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import partitioning
from jax.typing import DTypeLike


def affine(
  module: nn.Module,
  name: str,
  phi: jax.Array,
  features: tuple[int, ...],
  axes: tuple[str, ...],
  dtype: DTypeLike,
  initial_scale: float = 1.0,
  initial_bias: float = 0.0,
) -> jax.Array:
  """phi [B, D] -> phi W + b, float32 [B, *features].

  W and b are the parameters `{name}_kernel` and `{name}_bias` of `module`. W is initialised with
  LeCun's normal times `initial_scale`, b with `initial_bias`.
  """
  pre_logits_dim = phi.shape[-1]

  def kernel_init(key, shape, dtype):  # the fan-in is D for any rank of `features`
    flat = nn.initializers.lecun_normal()(key, (pre_logits_dim, math.prod(features)), dtype)
    return initial_scale * flat.reshape(shape)

  shape = (pre_logits_dim, *features)
  axes_of_kernel = ('embed', *axes)
  kernel = parameter(f'{name}_kernel', kernel_init, shape, axes_of_kernel, module)
  bias_init = nn.initializers.constant(initial_bias)
  bias = parameter(f'{name}_bias', bias_init, features, axes, module)
  return matmul(phi, kernel, dtype) + bias


def parameter(
  name: str,
  init: nn.initializers.Initializer,
  shape: tuple[int, ...],
  axes: tuple[str, ...],
  module: nn.Module | None = None,
) -> jax.Array:
  """A float32 parameter of `module` (that of the caller if None) with t5x's logical axes.

  The value is float32 or wider, also where a caller gives parameters of a narrower type.
  """
  x = partitioning.param_with_axes(name, init, shape, jnp.float32, axes=axes, module=module)
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def matmul(x: jax.Array, kernel: jax.Array, dtype: DTypeLike) -> jax.Array:
  """x [B, D] times kernel [D, ...]: operands in `dtype`, sums and result in float32 or wider."""
  return jax.lax.dot_general(
    x.astype(dtype),
    kernel.astype(dtype),
    (((x.ndim - 1,), (0,)), ((), ())),
    preferred_element_type=jnp.promote_types(dtype, jnp.float32),
  )
