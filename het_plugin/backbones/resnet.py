"""ResNets with group normalisation and weight standardisation, as in BiT.

He et al. 2016 (https://arxiv.org/abs/1512.03385, v2: https://arxiv.org/abs/1603.05027); Kolesnikov
et al. 2020, "Big Transfer (BiT)", https://arxiv.org/abs/1912.11370; Qiao et al. 2019, "Micro-batch
training with batch-channel normalization and weight standardization",
https://arxiv.org/abs/1903.10520.

B images, H x W pixels, C channels.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.partitioning import scan_with_axes, with_sharding_constraint
from jax.typing import DTypeLike

from het_plugin.backbones.layers import (
  GroupNorm,
  Remat,
  check_dtype,
  check_settings,
  drop_path,
  drop_path_rates,
  param,
  rematerialize,
)
from het_plugin.system import ranges
from het_plugin.system.ranges import NOT_EMPTY, Count, Rate

# Units of the four stages, table 1 of He et al. 2016.
DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
ROOT_WIDTH = 64


class StandardizedConv(nn.Module):
  """A convolution without bias whose kernel has mean 0 and variance 1 per output channel.

  Parameter: kernel [kernel_size, kernel_size, I / groups, O]. Statistics are over all axes except
  O, in float32.

  Attributes:
    features: O.
    kernel_size: side of the square kernel.
    axes: logical axes of I and O.
    stride: stride in both directions.
    same_padding: True pads for an output of ceil(H / stride) as TensorFlow does; False pads
      kernel_size // 2 on every side. The two differ for strides above 1.
    dtype: compute type of operands and result.
    epsilon: added to the variance.
    is_plain: takes the kernel as it is, and adds a bias [O].
    groups: number of groups of channels that do not see each other.
  """

  features: int
  kernel_size: int
  axes: tuple[str | None, str]
  stride: int = 1
  same_padding: bool = False
  dtype: DTypeLike = jnp.float32
  epsilon: float = 1e-10
  is_plain: bool = False
  groups: int = 1

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """x [B, H, W, I] -> [B, H', W', O]."""
    shape = self.kernel_size, self.kernel_size, x.shape[-1] // self.groups, self.features
    kernel = param('kernel', nn.initializers.he_normal(), shape, (None, None, *self.axes))
    if not self.is_plain:
      kernel = kernel - kernel.mean(axis=(0, 1, 2))
      kernel = kernel * jax.lax.rsqrt(jnp.square(kernel).mean(axis=(0, 1, 2)) + self.epsilon)
    sides = ((self.kernel_size // 2,) * 2,) * 2
    y = jax.lax.conv_general_dilated(
      x.astype(self.dtype),
      kernel.astype(self.dtype),
      window_strides=(self.stride, self.stride),
      padding='SAME' if self.same_padding else sides,
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
      feature_group_count=self.groups,
    )
    if not self.is_plain:
      return y
    bias = param('bias', nn.initializers.zeros, (self.features,), self.axes[1:])
    return y + bias.astype(self.dtype)


class Bottleneck(nn.Module):
  """A residual unit of three convolutions: 1 x 1, 3 x 3 with the stride, 1 x 1 to 4 x the width; or
  with `is_basic` of two: 3 x 3 with the stride, 3 x 3.

  Inside there are `inner_factor` times the width, and the 3 x 3 convolution has `groups`.

  v1.5 normalises after each convolution and applies ReLU to the sum. v2 normalises and applies ReLU
  before each convolution and leaves the sum unchanged. With the norm 'folded' nothing normalises.
  """

  width: int
  stride: int
  version: str
  dtype: DTypeLike
  norm: str = 'group'
  is_basic: bool = False
  kernel_epsilon: float = 1e-10
  groups: int = 1
  inner_factor: int = 1
  scanned: bool = False  # returns (carry, output), the result and None

  @nn.compact
  def __call__(self, x: jax.Array, drop_rate: jax.Array | float | None = None):
    """x [B, H, W, I] -> [B, H / stride, W / stride, 4 width]; drops the residual branch at a rate
    that is not None.
    """
    before = self.version == 'v2'
    is_folded = self.norm == 'folded'
    inside = self.inner_factor * self.width
    outside = self.width if self.is_basic else 4 * self.width

    def conv(name, features, size, axes, x, stride=1):
      same = not (before or is_folded)
      rest = {'epsilon': self.kernel_epsilon, 'is_plain': is_folded, 'name': name}
      if size == 3 and self.groups > 1:
        rest['groups'] = self.groups
        axes = (None, axes[1])  # the few channels of a group are not split
      return StandardizedConv(features, size, axes, stride, same, self.dtype, **rest)(x)

    def norm(name, axis, x, **kwargs):
      if is_folded:
        return x
      return GroupNorm(axis, dtype=self.dtype, name=name, **kwargs)(x)

    # The residual stream is replicated; between the convolutions channels are sharded.
    project = self.stride > 1 or x.shape[-1] != outside
    if before:
      y = nn.relu(norm('norm1', 'embed', x))
      shortcut = y if project else x
    else:
      y = x
      shortcut = x
    if project:
      shortcut = conv('conv_proj', outside, 1, (None, 'embed'), shortcut, self.stride)
      shortcut = shortcut if before else norm('norm_proj', 'embed', shortcut)
    sizes = [3, 3] if self.is_basic else [1, 3, 1]
    strided = sizes.index(3)
    last = len(sizes)
    for number, size in enumerate(sizes[:-1], start=1):
      axes = ('embed', 'mlp') if number == 1 else ('mlp', 'embed')
      stride = self.stride if number == strided + 1 else 1
      y = _sharded(conv(f'conv{number}', inside, size, axes, y, stride))
      y = nn.relu(norm(f'norm{number + before}', 'mlp', y))
    y = _whole(conv(f'conv{last}', outside, sizes[-1], ('mlp', 'embed'), y))
    if not before:
      y = norm(f'norm{last}', 'embed', y, scale_init=nn.initializers.zeros)
    if drop_rate is not None:
      y = drop_path(y, drop_rate, self.make_rng('dropout'))
    y = shortcut + y if before else nn.relu(shortcut + y)
    return (y, None) if self.scanned else y


class ResNet(nn.Module):
  """Image to pre-logits.

  Attributes:
    stages: number of residual units per stage; every stage after the first halves the image.
    width: channels after the root; a multiple of 32, the groups of the normalisation. The units of
      the stages have `width`, 2 `width`, ... channels inside and four times as many outside.
    version: 'v2' (BiT's published weights) or 'v1.5'.
    norm: 'group', with standardised kernels; or 'folded' for v1.5, where convolutions have a bias
      in place of a normalisation: that of a published file is folded into them.
    block: 'bottleneck', or 'basic' as in the depths 18 and 34.
    groups: of the channels in the 3 x 3 convolutions of bottlenecks: 32 in ResNeXt-50 32x4d (Xie et
      al. 2017, https://arxiv.org/abs/1611.05431).
    inner_factor: multiplies the channels inside bottlenecks: 2 in ResNeXt-50 32x4d, and in a Wide
      ResNet-50-2.
    kernel_epsilon: added to the variance of a kernel that is standardised.
    image_mean: levels of the channels that are subtracted from the image, so that convolutions
      which pad with zeros pad with them; None for zeros.
    dtype: type of the activations. Parameters, normalisation and pre-logits stay float32.
    stem: '7x7_pool', a 7 x 7 convolution of stride 2 and max pooling, or for small images '3x3', a
      3 x 3 convolution of stride 1.
    stochastic_depth: probability that training drops the residual branch of the last unit for an
      example; it grows linearly from 0 in the first (Huang et al. 2016).
    remat: what the backward pass recomputes to save memory (`layers.REMAT`).
    scan_layers: runs the equal units of a stage, all except its first, in a loop, which compiles
      much faster. Their parameters are stacked under 'stage1_units', ... instead of
      'stage1_unit02', ... (`weights.transfer.restacked`, `unstacked`).

  Raises:
    ValueError: a setting is out of range.
  """

  stages: Annotated[Sequence[Count], NOT_EMPTY]
  width: Count = ROOT_WIDTH
  version: Literal['v1.5', 'v2'] = 'v2'
  dtype: DTypeLike = jnp.float32
  remat: Remat = 'none'
  scan_layers: bool = False
  stem: Literal['7x7_pool', '3x3'] = '7x7_pool'
  stochastic_depth: Rate = 0.0
  norm: Literal['group', 'folded'] = 'group'
  block: Literal['bottleneck', 'basic'] = 'bottleneck'
  groups: Count = 1
  inner_factor: Count = 1
  kernel_epsilon: Rate = 1e-10
  image_mean: Sequence[float] | None = None

  def __post_init__(self):
    ranges.check(self)
    if self.norm == 'folded' and self.version == 'v2':
      raise ValueError("ResNet.norm='folded' needs ResNet.version='v1.5'")
    if self.block == 'basic' and (self.groups, self.inner_factor) != (1, 1):
      raise ValueError("ResNet.groups and ResNet.inner_factor need ResNet.block='bottleneck'")
    if (self.width * self.inner_factor) % self.groups:
      raise ValueError(
        f'ResNet.groups={self.groups} must divide the {self.width * self.inner_factor} channels '
        'inside its first units'
      )
    if self.norm == 'group' and self.width % GroupNorm.num_groups:
      raise ValueError(
        f'ResNet.width={self.width} must be a multiple of the {GroupNorm.num_groups} groups of the '
        'normalisation'
      )
    check_dtype(self)
    super().__post_init__()

  @property
  def pre_logits_dim(self) -> int:
    """Width of phi: 2048 for a width of 64 and four stages of bottlenecks."""
    return (1 if self.block == 'basic' else 4) * self.width * 2 ** (len(self.stages) - 1)

  @nn.compact
  def __call__(
    self, image: jax.Array, train: bool = False
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """image float32 [B, H, W, C] -> phi float32 [B, pre_logits_dim], and the representations by
    name: 'root', 'stage1', 'stage2', ... [B, H', W', C'], and 'pre_logits', which is phi.

    `train` applies stochastic depth, with the 'dropout' rng.
    """
    before = self.version == 'v2'
    is_folded = self.norm == 'folded'
    is_centred = before or is_folded  # pads both sides alike
    intermediates = {}
    size, stride = (7, 2) if self.stem == '7x7_pool' else (3, 1)
    axes = (None, 'embed')
    if self.image_mean is not None:
      image -= jnp.asarray(self.image_mean, image.dtype)
    rest = {'epsilon': self.kernel_epsilon, 'is_plain': is_folded, 'name': 'conv_root'}
    x = StandardizedConv(self.width, size, axes, stride, not is_centred, self.dtype, **rest)(image)
    if not before:
      x = x if is_folded else GroupNorm('embed', dtype=self.dtype, name='norm_root')(x)
      x = nn.relu(x)
    if self.stem == '7x7_pool':
      x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))) if is_centred else x
      x = nn.max_pool(x, (3, 3), (2, 2), 'VALID' if is_centred else 'SAME')
    x = intermediates['root'] = _whole(x)
    settings = {
      'version': self.version,
      'dtype': self.dtype,
      'norm': self.norm,
      'is_basic': self.block == 'basic',
      'kernel_epsilon': self.kernel_epsilon,
      'groups': self.groups,
      'inner_factor': self.inner_factor,
    }
    x, outputs = run_stages(self, x, Bottleneck, self.stages, self.width, train, **settings)
    intermediates |= outputs
    if before:
      x = nn.relu(GroupNorm('embed', name='norm')(x))
    phi = x.astype(jnp.float32).mean(axis=(1, 2))  # [B, D]
    phi = intermediates['pre_logits'] = with_sharding_constraint(phi, ('batch', 'embed'))
    return phi, intermediates


def run_stages(
  module: nn.Module,
  x: jax.Array,
  unit: type[nn.Module],
  stages: Sequence[int],
  width: int,
  train: bool,
  **settings: Any,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Runs the residual units of the compact module that calls this, with its `stochastic_depth`,
  `remat` and `scan_layers`.

  x is [B, H, W, I], and `stages` the numbers of units. A unit is
  `unit(width=..., stride=..., scanned=..., **settings)(x, drop_rate)`; the width doubles from stage
  to stage. Returns the last output and the outputs of all stages: 'stage1', 'stage2', ...
  """
  rates = drop_path_rates(module.stochastic_depth if train else 0.0, sum(stages))
  one = rematerialize(unit, module.remat)
  outputs = {}
  for stage, units in enumerate(stages):
    name = f'stage{stage + 1}'
    shared = {'width': width * 2**stage, **settings}
    first, *others = rates[:units]
    rates = rates[units:]
    x = one(stride=2 if stage else 1, **shared, name=f'{name}_unit01')(x, first)
    if module.scan_layers and others:
      scan = scan_with_axes(
        rematerialize(unit, module.remat, scanned=True),
        variable_axes={'params': 0},
        split_rngs={'params': True, 'dropout': True},
        in_axes=0,
        length=len(others),
        axis_name='layers',
      )
      stacked = None if first is None else jnp.asarray(others, jnp.float32)
      x, _ = scan(stride=1, **shared, scanned=True, name=f'{name}_units')(x, stacked)
    else:
      for number, rate in enumerate(others, start=2):
        x = one(stride=1, **shared, name=f'{name}_unit{number:02d}')(x, rate)
    outputs[name] = x
  return x, outputs


def resnet(variant: str = '50x1', **overrides: Any) -> ResNet:
  """A ResNet by its name in BiT: depth, x, factor of the width, such as '50x1' or '152x2'.

  The depths are 50, 101 and 152. `overrides` are fields of `ResNet`. An unknown variant or field is
  a ValueError.
  """
  depth, x, factor = variant.partition('x')
  if not (x and depth.isdecimal() and factor.isdecimal()) or int(depth) not in DEPTHS:
    raise ValueError(
      f'resnet.variant={variant!r} is unknown: write one of the depths '
      f"{', '.join(map(str, DEPTHS))}, an x and the factor of the width, such as '152x1'"
    )
  check_settings('resnet', ResNet, overrides)
  shape = {'stages': DEPTHS[int(depth)], 'width': ROOT_WIDTH * int(factor)}
  return ResNet(**{**shape, **overrides})


def _whole(x: jax.Array) -> jax.Array:
  return with_sharding_constraint(x, ('batch', None, None, 'embed'))


def _sharded(x: jax.Array) -> jax.Array:
  return with_sharding_constraint(x, ('batch', None, None, 'mlp'))
