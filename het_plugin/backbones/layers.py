"""Layers whose float32 parameters carry t5x's logical axis names, so that its rules shard them."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.partitioning import param_with_axes
from jax.typing import DTypeLike


class Dense(nn.Module):
  """x [..., I] -> x W + b [..., O], computed in `dtype`.

  Parameters: kernel [I, O] with the logical axes `kernel_axes`, bias [O] with the second of them.
  """

  features: int
  kernel_axes: tuple[str, str]
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    shape = (x.shape[-1], self.features)
    kernel = param_with_axes(
      'kernel', nn.initializers.xavier_uniform(), shape, jnp.float32, axes=self.kernel_axes
    )
    bias = param_with_axes(
      'bias', nn.initializers.zeros, shape[1:], jnp.float32, axes=self.kernel_axes[1:]
    )
    return x.astype(self.dtype) @ kernel.astype(self.dtype) + bias.astype(self.dtype)


class LayerNorm(nn.Module):
  """Layer normalisation over the last axis (Ba et al. 2016) in float32, returned as `dtype`.

  Parameters: scale [D] and bias [D].
  """

  dtype: DTypeLike = jnp.float32
  epsilon: float = 1e-6

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    shape = x.shape[-1:]
    scale = param_with_axes('scale', nn.initializers.ones, shape, jnp.float32, axes=('embed',))
    bias = param_with_axes('bias', nn.initializers.zeros, shape, jnp.float32, axes=('embed',))
    x = x.astype(jnp.float32)
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + self.epsilon) * scale + bias).astype(self.dtype)


class GroupNorm(nn.Module):
  """Normalisation over space and groups of channels (Wu and He 2018), in float32.

  Parameters: scale [C] and bias [C] with the logical axis `axis`. The result is of type `dtype`.
  """

  axis: str
  dtype: DTypeLike = jnp.float32
  scale_init: nn.initializers.Initializer = nn.initializers.ones
  num_groups: int = 32
  epsilon: float = 1e-5

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """x [B, H, W, C] -> the same shape."""
    shape = x.shape[-1:]
    scale = param_with_axes('scale', self.scale_init, shape, jnp.float32, axes=(self.axis,))
    bias = param_with_axes('bias', nn.initializers.zeros, shape, jnp.float32, axes=(self.axis,))
    groups = x.astype(jnp.float32).reshape(
      *x.shape[:-1], self.num_groups, -1
    )  # [B, H, W, G, C / G]
    centred = groups - groups.mean((1, 2, 4), keepdims=True)
    variance = jnp.square(centred).mean((1, 2, 4), keepdims=True)
    normal = (centred * jax.lax.rsqrt(variance + self.epsilon)).reshape(x.shape)
    return (normal * scale + bias).astype(self.dtype)
