"""Affine maps of the pre-logits with t5x's logical axes."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import partitioning


def affine(
  module: nn.Module,
  name: str,
  phi: jax.Array,
  features: tuple[int, ...],
  axes: tuple[str, ...],
  dtype: jnp.dtype,
  initial_scale: float = 1.0,
  initial_bias: float = 0.0,
) -> jax.Array:
  """phi [B, D] -> phi W + b, float32 [B, *features].

  W and b are the parameters `{name}_kernel` and `{name}_bias` of `module`. W is initialised with
  LeCun's normal times `initial_scale`, b with `initial_bias`.
  """
  pre_logits_dim = phi.shape[-1]

  def kernel_init(key, shape, dtype):  # fan-in D whatever the rank of `features`
    flat = nn.initializers.lecun_normal()(key, (pre_logits_dim, math.prod(features)), dtype)
    return initial_scale * flat.reshape(shape)

  kernel = partitioning.param_with_axes(
    f'{name}_kernel',
    kernel_init,
    (pre_logits_dim, *features),
    jnp.float32,
    axes=('embed', *axes),
    module=module,
  )
  bias = partitioning.param_with_axes(
    f'{name}_bias',
    nn.initializers.constant(initial_bias),
    features,
    jnp.float32,
    axes=axes,
    module=module,
  )
  return matmul(phi, kernel, dtype) + bias


def matmul(x: jax.Array, kernel: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """x [B, D] times kernel [D, ...]: operands in `dtype`, sums and result in float32 or wider."""
  return jax.lax.dot_general(
    x.astype(dtype),
    kernel.astype(dtype),
    (((x.ndim - 1,), (0,)), ((), ())),
    preferred_element_type=jnp.promote_types(dtype, jnp.float32),
  )
