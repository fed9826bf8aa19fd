"""ConvNeXt (Liu et al. 2022, https://arxiv.org/abs/2201.03545) and ConvNeXt V2 (Woo et al. 2023,
https://arxiv.org/abs/2301.00808).

B images, H x W pixels, C channels.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.partitioning import with_sharding_constraint
from jax.typing import DTypeLike

from het_plugin.backbones.layers import (
  Dense,
  Norm,
  Remat,
  check_dtype,
  check_settings,
  drop_path,
  drop_path_rates,
  param,
  rematerialize,
)
from het_plugin.backbones.vit import PatchEmbedding
from het_plugin.system import ranges
from het_plugin.system.ranges import NOT_EMPTY, Count, Rate

# T to XL: section 3 of Liu et al. A, F, P, N and H: appendix A.1 of Woo et al.
SIZES = {
  **{name: ((2, 2, 6, 2), width) for name, width in {'A': 40, 'F': 48, 'P': 64}.items()},
  'N': ((2, 2, 8, 2), 80),
  'T': ((3, 3, 9, 3), 96),
  **{name: ((3, 3, 27, 3), w) for name, w in {'S': 96, 'B': 128, 'L': 192, 'XL': 256}.items()},
  'H': ((3, 3, 27, 3), 352),
}


class Block(nn.Module):
  """A 7 x 7 convolution per channel and an MLP, [B, H, W, C] -> the same shape."""

  version: str
  dtype: DTypeLike
  norm_epsilon: float = 1e-6

  @nn.compact
  def __call__(self, x: jax.Array, drop_rate: float | None = None) -> jax.Array:
    width = x.shape[-1]

    def cast_param(*args):
      return param(*args).astype(self.dtype)

    start = nn.initializers.truncated_normal(0.02)
    kernel = cast_param('kernel', start, (7, 7, 1, width), (None, None, None, 'embed'))
    y = per_channel(x, kernel)
    y += cast_param('bias', nn.initializers.zeros, (width,), ('embed',))
    y = Norm(epsilon=self.norm_epsilon, dtype=self.dtype, name='norm')(_once(y))
    y = _once(y)
    y = Dense(4 * width, ('embed', 'mlp'), self.dtype, kernel_init=start, name='wi')(y)
    y = nn.gelu(with_sharding_constraint(y, ('batch', None, None, 'mlp')), approximate=False)
    if self.version == 'v2':  # global response normalisation (Woo et al., section 3)
      scale = cast_param('response_scale', nn.initializers.zeros, y.shape[-1:], ('mlp',))
      bias = cast_param('response_bias', nn.initializers.zeros, y.shape[-1:], ('mlp',))
      response = jnp.sqrt(jnp.square(y.astype(jnp.float32)).sum((1, 2), keepdims=True) + 1e-20)
      response /= response.mean(-1, keepdims=True) + 1e-6
      y = y + scale * (y * response.astype(self.dtype)) + bias
    y = Dense(width, ('mlp', 'embed'), self.dtype, kernel_init=start, name='wo')(y)
    if self.version == 'v1':
      y *= cast_param('layer_scale', nn.initializers.constant(1e-6), (width,), ('embed',))
    if drop_rate is not None:
      y = drop_path(y, drop_rate, self.make_rng('dropout'))
    return with_sharding_constraint(x + y, ('batch', None, None, 'embed'))


def per_channel(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Convolution of each channel with its own kernel: x [B, H, W, C], kernel [k, k, 1, C].

  A CPU adds k^2 shifted images, which is 10 to 16 times as fast there as the convolution (one core,
  float32, the four stages of ConvNeXt-T).
  """
  side = kernel.shape[0]

  def as_sum(x: jax.Array, kernel: jax.Array) -> jax.Array:
    height, width = x.shape[1:3]
    edges = (side // 2,) * 2
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    padded = jnp.pad(x, ((0, 0), edges, edges, (0, 0))).astype(dtype)
    total = jnp.zeros(x.shape, dtype)
    for i in range(side):
      for j in range(side):
        total += padded[:, i : i + height, j : j + width] * kernel[i, j, 0].astype(dtype)
    return total.astype(x.dtype)

  def as_convolution(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(
      x,
      kernel,
      window_strides=(1, 1),
      padding=((side // 2,) * 2,) * 2,
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
      feature_group_count=x.shape[-1],
    )

  return jax.lax.platform_dependent(x, kernel, cpu=as_sum, default=as_convolution)


def _once(x: jax.Array) -> jax.Array:
  """x itself. A CPU would compute it anew in each of the sums and products that read it."""
  return jax.lax.platform_dependent(x, cpu=jax.lax.optimization_barrier, default=lambda x: x)


class ConvNeXt(nn.Module):
  """Image to pre-logits: patches of 4 pixels, and stages that each halve the image from the second
  on and double the channels.

  Attributes:
    depths: blocks per stage.
    width: channels of the first stage.
    version: 'v1', with factors per channel on the residual branches, or 'v2', with normalised
      responses.
    norm_epsilon: added to the variance.
    last_epsilon: added to the variance of the normalisation after pooling; None for norm_epsilon.
    projection_size: width of a linear layer without bias after it, as in open_clip; None for none.
    stochastic_depth, dtype, remat: as in `ResNet`.

  Raises:
    ValueError: a setting is out of range, or the stages do not divide the image.
  """

  depths: Annotated[Sequence[Count], NOT_EMPTY]
  width: Count
  version: Literal['v1', 'v2'] = 'v1'
  stochastic_depth: Rate = 0.0
  dtype: DTypeLike = jnp.float32
  remat: Remat = 'none'
  norm_epsilon: Rate = 1e-6
  last_epsilon: Rate | None = None
  projection_size: Count | None = None

  def __post_init__(self):
    ranges.check(self)
    check_dtype(self)
    super().__post_init__()

  @property
  def pre_logits_dim(self) -> int:
    """Width of phi: 768 for T."""
    return self.projection_size or self.width * 2 ** (len(self.depths) - 1)

  @nn.compact
  def __call__(
    self, image: jax.Array, train: bool = False
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """image float32 [B, H, W, C] -> phi float32 [B, pre_logits_dim], and the representations by
    name: 'stem', 'stage1', 'stage2', ... [B, H', W', C'], and 'pre_logits', which is phi.

    `train` applies stochastic depth, with the 'dropout' rng.
    """
    if any(side % (multiple := 2 ** (len(self.depths) + 1)) for side in image.shape[1:3]):
      raise ValueError(
        f'ConvNeXt needs images whose sides are multiples of {multiple} pixels, not '
        f'{image.shape[1]}x{image.shape[2]}'
      )

    def patches(name, size, width, x):
      rows, columns = (side // size for side in x.shape[1:3])
      y = PatchEmbedding(size, width, self.dtype, name=name)(x)
      return y.reshape(-1, rows, columns, width)

    def normalise(name):
      return Norm(epsilon=self.norm_epsilon, dtype=self.dtype, name=name)

    x = normalise('stem_norm')(patches('stem', 4, self.width, image))
    intermediates = {'stem': x}
    rates = iter(drop_path_rates(self.stochastic_depth if train else 0.0, sum(self.depths)))
    block = rematerialize(Block, self.remat)
    for stage, depth in enumerate(self.depths, start=1):
      if stage > 1:
        x = normalise(f'stage{stage}_norm')(x)
        x = patches(f'stage{stage}_patches', 2, 2 * x.shape[-1], x)
      for i in range(1, depth + 1):
        name = f'stage{stage}_block{i:02d}'
        x = block(self.version, self.dtype, self.norm_epsilon, name=name)(x, next(rates))
      intermediates[f'stage{stage}'] = x
    last = self.norm_epsilon if self.last_epsilon is None else self.last_epsilon
    phi = Norm(epsilon=last, name='norm')(x.astype(jnp.float32).mean(axis=(1, 2)))  # [B, D]
    if self.projection_size:
      phi = Dense(self.projection_size, ('embed', 'kv'), use_bias=False, name='projection')(phi)
    phi = intermediates['pre_logits'] = with_sharding_constraint(phi, ('batch', 'embed'))
    return phi, intermediates


def convnext(variant: str = 'T', **overrides: Any) -> ConvNeXt:
  """A ConvNeXt by its size: A (atto), F, P, N, T, S, B, L, XL or H.

  `overrides` are fields of `ConvNeXt`. An unknown size or field is a ValueError.
  """
  if variant not in SIZES:
    raise ValueError(f'convnext.variant={variant!r} is unknown: choose one of {", ".join(SIZES)}')
  check_settings('convnext', ConvNeXt, overrides)
  depths, width = SIZES[variant]
  return ConvNeXt(**{'depths': depths, 'width': width, **overrides})
