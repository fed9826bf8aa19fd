"""Features from elsewhere as pre-logits, through an MLP or as they are."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from het_plugin.backbones.layers import check_dtype
from het_plugin.system import ranges
from het_plugin.system.ranges import Count, Rate


class Mlp(nn.Module):
  """Dense layers with GELU over rows of features; without layers, the features themselves.

  The layers are those that the estimators' `hidden_layers` have. Dropout follows each of them.

  Attributes:
    hidden_layers: widths; () has no parameters.
    dropout_rate: in training.
    dtype: compute type of the products; pre-logits are float32.

  Raises:
    ValueError: a width is below 1, the rate is not in [0, 1), or dtype is no floating type.
  """

  hidden_layers: Sequence[Count] = ()
  dropout_rate: Rate = 0.0
  dtype: jnp.dtype = jnp.float32

  def __post_init__(self):
    ranges.check(self)
    check_dtype(self)
    super().__post_init__()

  @property
  def pre_logits_dim(self) -> int | None:
    """D of the last layer; None without layers, where it is the number of features."""
    return self.hidden_layers[-1] if self.hidden_layers else None

  @property
  def explicit_axes(self) -> bool:
    """Whether it takes arrays of explicit shardings, which flax's dropout does not."""
    return not self.dropout_rate

  @nn.compact
  def __call__(
    self, image: jax.Array, train: bool = False
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """image [B, ...] (of the task features:PATH [B, 1, 1, D]) -> phi [B, D], and the hidden layers'
    outputs by name, 'pre_logits' among them.
    """
    x = image.reshape(image.shape[0], -1)
    representations = {}
    for i, width in enumerate(self.hidden_layers):
      x = nn.gelu(nn.Dense(width, dtype=self.dtype, name=f'hidden_{i}')(x))
      x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
      representations[f'hidden_{i}'] = x
    phi = x.astype(jnp.float32)
    return phi, {**representations, 'pre_logits': phi}
