"""Layers with float32 parameters that carry t5x's logical axis names."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.partitioning import param_with_axes
from jax.typing import DTypeLike

# What the backward pass recomputes: nothing, everything except products with parameters, or
# everything from the input of the block on.
REMAT = {
  'none': None,
  'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  'full': jax.checkpoint_policies.nothing_saveable,
}
Remat = Literal['none', 'dots', 'full']


def check_dtype(module: nn.Module) -> None:
  """Raises ValueError if the attribute dtype is no floating type, or one that JAX would narrow."""
  try:
    is_floating = jnp.issubdtype(module.dtype, jnp.floating)
  except TypeError:  # numpy does not know the name
    is_floating = False
  if not is_floating:
    raise ValueError(
      f'{type(module).__name__}.dtype={module.dtype!r} must be a floating type such as '
      "'float32' or 'bfloat16'"
    )
  if jax.dtypes.canonicalize_dtype(module.dtype) != jnp.dtype(module.dtype):
    raise ValueError(
      f'{type(module).__name__}.dtype={module.dtype!r} would be float32, because jax_enable_x64 is '
      "off: take 'float32', or set JAX_ENABLE_X64=1"
    )


def check_settings(name: str, module: type[nn.Module], settings: Mapping[str, Any]) -> None:
  """Raises ValueError for settings of the function `name` that `module` does not have."""
  fields = {f.name for f in dataclasses.fields(module)} - {'parent', 'name'}
  if unknown := settings.keys() - fields:
    raise ValueError(
      f'{name} has no setting {", ".join(sorted(unknown))}: choose from {", ".join(sorted(fields))}'
    )


def rematerialize(
  block: type[nn.Module], remat: str, static_argnums: tuple[int, ...] = (), scanned: bool = False
) -> type[nn.Module]:
  """The module class `block` with the rematerialisation policy `REMAT[remat]`."""
  if remat == 'none':
    return block
  policy = REMAT[remat]
  # Inside a loop, common subexpression elimination cannot undo the recomputation.
  return nn.remat(block, policy=policy, static_argnums=static_argnums, prevent_cse=not scanned)


def drop_path(x: jax.Array, rate: jax.Array | float, rng: jax.Array) -> jax.Array:
  """Stochastic depth (Huang et al. 2016, https://arxiv.org/abs/1603.09382).

  Sets the residual branch x [B, ...] of an example to zero with probability `rate`, and divides it
  by 1 - rate otherwise. `flax.linen.Dropout` cannot be used, because its rate must be the same in
  all iterations of a loop over layers.
  """
  keep = jax.random.bernoulli(rng, 1 - rate, (x.shape[0], *(1,) * (x.ndim - 1)))
  return jnp.where(keep, x / jnp.asarray(1 - rate, x.dtype), jnp.zeros((), x.dtype))


def drop_path_rates(largest: float, num_layers: int) -> list[float] | list[None]:
  """The rate of each layer, from 0 for the first to `largest` for the last; None each for 0."""
  if not largest:
    return [None] * num_layers
  return [largest * i / max(num_layers - 1, 1) for i in range(num_layers)]


def param(
  name: str, init: nn.initializers.Initializer, shape: Sequence[int], axes: Sequence[str | None]
) -> jax.Array:
  """A float32 parameter with logical axes, of the compact module that calls this."""
  return param_with_axes(name, init, shape, jnp.float32, axes=tuple(axes))


class Dense(nn.Module):
  """x [..., I] -> x W + b [..., O], computed in `dtype`.

  Parameters: kernel [I, O] with the logical axes `kernel_axes`, and, with `use_bias`, bias [O] with
  the second one.
  """

  features: int
  kernel_axes: tuple[str, str]
  dtype: DTypeLike = jnp.float32
  use_bias: bool = True
  kernel_init: nn.initializers.Initializer = nn.initializers.xavier_uniform()

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    shape = (x.shape[-1], self.features)
    kernel = param('kernel', self.kernel_init, shape, self.kernel_axes)
    x = x.astype(self.dtype) @ kernel.astype(self.dtype)
    if not self.use_bias:
      return x
    bias = param('bias', nn.initializers.zeros, shape[1:], self.kernel_axes[1:])
    return x + bias.astype(self.dtype)


class Norm(nn.Module):
  """Normalisation over the last axis in float32, returned as `dtype`.

  `kind` is 'layer_norm' (Ba et al. 2016; parameters scale [D] and bias [D]) or 'rms_norm', which
  has neither mean nor bias (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467). `axis` is
  the logical axis of the parameters.
  """

  kind: str = 'layer_norm'
  epsilon: float = 1e-6
  dtype: DTypeLike = jnp.float32
  axis: str = 'embed'

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    shape = x.shape[-1:]
    axes = (self.axis,)
    scale = param('scale', nn.initializers.ones, shape, axes)
    x = x.astype(jnp.float32)
    if self.kind == 'layer_norm':
      x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.epsilon) * scale
    if self.kind == 'layer_norm':
      x += param('bias', nn.initializers.zeros, shape, axes)
    return x.astype(self.dtype)


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
    scale = param('scale', self.scale_init, shape, (self.axis,))
    bias = param('bias', nn.initializers.zeros, shape, (self.axis,))
    shape = *x.shape[:-1], self.num_groups, -1  # [B, H, W, G, C / G]
    groups = x.astype(jnp.float32).reshape(shape)
    centred = groups - groups.mean((1, 2, 4), keepdims=True)
    variance = jnp.square(centred).mean((1, 2, 4), keepdims=True)
    normal = (centred * jax.lax.rsqrt(variance + self.epsilon)).reshape(x.shape)
    return (normal * scale + bias).astype(self.dtype)
