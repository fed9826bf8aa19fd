"""Wide ResNets (Zagoruyko and Komodakis 2016, https://arxiv.org/abs/1605.07146) for small images.

The architecture is as in uncertainty-baselines' tables for CIFAR (Nado et al. 2021,
https://arxiv.org/abs/2106.04015): a shortcut that changes the shape reads the input before
normalisation. A training step here carries no statistics of batch normalisation, so there are group
normalisation and weight standardisation instead, as in `resnet`.

B images, H x W pixels, C channels.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.partitioning import with_sharding_constraint
from jax.typing import DTypeLike

from het_plugin.backbones.layers import (
  GroupNorm,
  Remat,
  check_dtype,
  check_settings,
  drop_path,
)
from het_plugin.backbones.resnet import StandardizedConv, run_stages
from het_plugin.system import ranges
from het_plugin.system.ranges import Count, Rate

_NUM_GROUPS = 16  # the root has 16 channels


class BasicUnit(nn.Module):
  """A residual unit of two 3 x 3 convolutions, each after a normalisation and ReLU."""

  width: int
  stride: int
  dropout: float
  deterministic: bool
  dtype: DTypeLike
  scanned: bool = False  # returns (carry, output), the result and None

  @nn.compact
  def __call__(self, x: jax.Array, drop_rate: jax.Array | float | None = None):
    """x [B, H, W, I] -> [B, H / stride, W / stride, width]; drops the residual branch at a rate
    that is not None.
    """

    def conv(name, size, axes, x, stride=1):
      settings = {'same_padding': True, 'dtype': self.dtype, 'name': name}
      return StandardizedConv(self.width, size, axes, stride, **settings)(x)

    def norm(name, axis, x):
      return GroupNorm(axis, self.dtype, num_groups=_NUM_GROUPS, name=name)(x)

    # The residual stream is replicated; between the convolutions channels are sharded.
    y = nn.relu(norm('norm1', 'embed', x))
    y = conv('conv1', 3, ('embed', 'mlp'), y, self.stride)
    y = with_sharding_constraint(y, ('batch', None, None, 'mlp'))
    y = nn.relu(norm('norm2', 'mlp', y))
    y = nn.Dropout(self.dropout, deterministic=self.deterministic)(y)
    y = conv('conv2', 3, ('mlp', 'embed'), y)
    if drop_rate is not None:
      y = drop_path(y, drop_rate, self.make_rng('dropout'))
    if x.shape != y.shape:
      x = conv('conv_proj', 1, (None, 'embed'), x, self.stride)
    y = with_sharding_constraint(x + y, ('batch', None, None, 'embed'))
    return (y, None) if self.scanned else y


class WideResNet(nn.Module):
  """Image to pre-logits: a 3 x 3 convolution to 16 channels and three stages of 16, 32 and 64 times
  `factor` channels; the second and the third halve the image.

  Attributes:
    units: residual units per stage, (depth - 4) / 6.
    factor: factor of the width.
    dropout: rate between the convolutions of a unit, when training.
    stochastic_depth, dtype, remat, scan_layers: as in `ResNet`.

  Raises:
    ValueError: a setting is out of range.
  """

  units: Count
  factor: Count
  dropout: Rate = 0.0
  stochastic_depth: Rate = 0.0
  dtype: DTypeLike = jnp.float32
  remat: Remat = 'none'
  scan_layers: bool = False

  def __post_init__(self):
    ranges.check(self)
    check_dtype(self)
    super().__post_init__()

  @property
  def pre_logits_dim(self) -> int:
    """Width of phi: 640 for a factor of 10."""
    return 64 * self.factor

  @nn.compact
  def __call__(
    self, image: jax.Array, train: bool = False
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """image float32 [B, H, W, C] -> phi float32 [B, pre_logits_dim], and the representations by
    name: 'root', 'stage1', 'stage2', 'stage3' [B, H', W', C'], and 'pre_logits', which is phi.

    `train` applies dropout and stochastic depth, with the 'dropout' rng.
    """
    root = StandardizedConv(16, 3, (None, 'embed'), dtype=self.dtype, name='conv_root')
    x = root(image)
    intermediates = {'root': x}
    settings = {'dropout': self.dropout, 'deterministic': not train, 'dtype': self.dtype}
    stages = (self.units,) * 3
    width = 16 * self.factor
    x, outputs = run_stages(self, x, BasicUnit, stages, width, train, **settings)
    intermediates |= outputs
    x = nn.relu(GroupNorm('embed', num_groups=_NUM_GROUPS, name='norm')(x))
    phi = x.astype(jnp.float32).mean(axis=(1, 2))  # [B, D]
    phi = intermediates['pre_logits'] = with_sharding_constraint(phi, ('batch', 'embed'))
    return phi, intermediates


def wide_resnet(variant: str = '28-10', **overrides: Any) -> WideResNet:
  """A wide ResNet by the paper's name, depth-factor, such as '28-10' or '16-4'.

  A depth is 6 n + 4. `overrides` are fields of `WideResNet`. An unknown variant or field is a
  ValueError.
  """
  depth, _, factor = variant.partition('-')
  if not (depth.isdecimal() and factor.isdecimal()) or int(depth) < 10 or int(depth) % 6 != 4:
    raise ValueError(
      f'wide_resnet.variant={variant!r} is unknown: write a depth of 6 n + 4, a hyphen and the '
      "factor of the width, such as '28-10'"
    )
  check_settings('wide_resnet', WideResNet, overrides)
  return WideResNet(**{'units': (int(depth) - 4) // 6, 'factor': int(factor), **overrides})
