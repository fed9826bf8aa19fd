"""The Transformer encoder of ViT and text tower.

Source: Dosovitskiy et al., 2020, section 3.1 (https://arxiv.org/abs/2010.11929); Vaswani et al.,
2017. B examples, N tokens, D width.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.partitioning import param_with_axes, scan_with_axes, with_sharding_constraint
from jax.typing import DTypeLike

from het_plugin.backbones.layers import Dense, LayerNorm, check_remat, rematerialize

# B, L and H: table 1 of Dosovitskiy et al. 2020. g and G: table 2 of Zhai et al. 2021
# (https://arxiv.org/abs/2106.04560). Ti and S: table 1 of Touvron et al. 2021 (DeiT,
# https://arxiv.org/abs/2012.12877), named so by Steiner et al. 2021 (https://arxiv.org/abs/2106.10270).
SIZES = {
  'Ti': {'width': 192, 'depth': 12, 'mlp_dim': 768, 'num_heads': 3},
  'S': {'width': 384, 'depth': 12, 'mlp_dim': 1536, 'num_heads': 6},
  'B': {'width': 768, 'depth': 12, 'mlp_dim': 3072, 'num_heads': 12},
  'L': {'width': 1024, 'depth': 24, 'mlp_dim': 4096, 'num_heads': 16},
  'H': {'width': 1280, 'depth': 32, 'mlp_dim': 5120, 'num_heads': 16},
  'g': {'width': 1408, 'depth': 40, 'mlp_dim': 6144, 'num_heads': 16},
  'G': {'width': 1664, 'depth': 48, 'mlp_dim': 8192, 'num_heads': 16},
}


class SelfAttention(nn.Module):
  """Multi-head self-attention [B, N, D] -> [B, N, D], its softmax in float32.

  The heads share one parameter axis 'joined_kv' of the length of the width, so a mesh can divide it
  even if it does not divide the number of heads (3 in Ti).
  """

  num_heads: int
  dtype: DTypeLike

  @nn.compact
  def __call__(self, x: jax.Array, is_token: jax.Array | None = None) -> jax.Array:
    """x [B, N, D]; is_token bool [B, N] marks the tokens to attend to, None for all."""
    width = x.shape[-1]

    def project(name):
      y = Dense(width, ('embed', 'joined_kv'), self.dtype, name=name)(x)
      y = with_sharding_constraint(y, ('batch', 'length', 'joined_kv'))
      return y.reshape(*y.shape[:2], self.num_heads, -1)  # [B, N, heads, D / heads]

    mask = None if is_token is None else is_token[:, None, None, :]  # [B, 1, 1, N]
    y = jax.nn.dot_product_attention(project('query'), project('key'), project('value'), mask=mask)
    return Dense(width, ('joined_kv', 'embed'), self.dtype, name='out')(y.reshape(x.shape))


class Mlp(nn.Module):
  """Perceptron with one hidden layer and GELU, [B, N, D] -> [B, N, D]."""

  mlp_dim: int
  dropout: float
  dtype: DTypeLike

  @nn.compact
  def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
    y = Dense(self.mlp_dim, ('embed', 'mlp'), self.dtype, name='wi')(x)
    y = with_sharding_constraint(nn.gelu(y), ('batch', 'length', 'mlp'))
    y = nn.Dropout(self.dropout)(y, deterministic)
    return Dense(x.shape[-1], ('mlp', 'embed'), self.dtype, name='wo')(y)


class Block(nn.Module):
  """Pre-norm encoder block: attention and MLP with residual connections (Dosovitskiy, eq. 2, 3)."""

  num_heads: int
  mlp_dim: int
  dropout: float
  dtype: DTypeLike
  scanned: bool = False  # returns (carry, output), both the result

  @nn.compact
  def __call__(self, x: jax.Array, deterministic: bool, is_token: jax.Array | None = None):
    y = LayerNorm(self.dtype, name='attention_norm')(x)
    y = SelfAttention(self.num_heads, self.dtype, name='attention')(y, is_token)
    x = constrain_tokens(x + nn.Dropout(self.dropout)(y, deterministic))
    y = LayerNorm(self.dtype, name='mlp_norm')(x)
    y = Mlp(self.mlp_dim, self.dropout, self.dtype, name='mlp')(y, deterministic)
    x = constrain_tokens(x + nn.Dropout(self.dropout)(y, deterministic))
    return (x, x) if self.scanned else x


def prepare_tokens(
  x: jax.Array, has_class_token: bool, dropout: float, deterministic: bool
) -> jax.Array:
  """Input of the first block, [B, N, D], from embedded patches or words x [B, L, D].

  Prepends a learned class token if there is one, adds position embeddings and applies dropout. The
  parameters belong to the compact module that calls this.
  """
  width = x.shape[-1]
  if has_class_token:
    token = param_with_axes(
      'class_token', nn.initializers.zeros, (width,), jnp.float32, axes=('embed',)
    )
    token = jnp.broadcast_to(token.astype(x.dtype), (x.shape[0], 1, width))
    x = jnp.concatenate([token, x], axis=1)  # [B, N, D]
  position = param_with_axes(
    'position_embedding',
    nn.initializers.normal(0.02),
    x.shape[1:],
    jnp.float32,
    axes=('length', 'embed'),
  )
  x = constrain_tokens(x + position.astype(x.dtype))
  return nn.Dropout(dropout)(x, deterministic=deterministic)


def run_blocks(
  x: jax.Array,
  is_token: jax.Array | None = None,
  *,
  depth: int,
  num_heads: int,
  mlp_dim: int,
  dropout: float,
  dtype: DTypeLike,
  remat: str,
  scan_layers: bool,
  deterministic: bool,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Runs `depth` encoder blocks, submodules of the compact module that calls this.

  Args:
    x: [B, N, D].
    is_token: bool [B, N], the tokens to attend to; None for all.
    depth, num_heads, mlp_dim, dropout, dtype, remat, scan_layers: see `ViT`.
    deterministic: True for no dropout.

  Returns:
    The last output [B, N, D] and the outputs of all blocks by name: 'block00', 'block01', ...
  """
  block = rematerialize(Block, remat, static_argnums=(2,), scanned=scan_layers)
  settings = num_heads, mlp_dim, dropout, dtype
  names = [block_name(layer) for layer in range(depth)]
  if not scan_layers:
    outputs = {}
    for name in names:
      x = outputs[name] = block(*settings, name=name)(x, deterministic, is_token)
    return x, outputs
  blocks = scan_with_axes(
    block,
    variable_axes={'params': 0},
    split_rngs={'params': True, 'dropout': True},
    in_axes=nn.broadcast,
    length=depth,
    axis_name='layers',
  )(*settings, scanned=True, name=STACKED)
  x, stacked = blocks(x, deterministic, is_token)
  return x, dict(zip(names, stacked, strict=True))


def check_positive(module: nn.Module, *names: str) -> None:
  """Raises ValueError if one of the attributes is below 1; None is allowed."""
  for name in names:
    value = getattr(module, name)
    if value is not None and value < 1:
      raise ValueError(f'{type(module).__name__}.{name}={value} must be at least 1')


def check_encoder(module: nn.Module, poolings: Sequence[str]) -> None:
  """Raises ValueError if a setting of the encoder is out of range."""
  owner = type(module).__name__
  check_positive(module, 'width', 'depth', 'mlp_dim', 'num_heads')
  if module.width % module.num_heads:
    raise ValueError(
      f'{owner}.width={module.width} must be a multiple of num_heads={module.num_heads}'
    )
  if module.pooling not in poolings:
    raise ValueError(
      f'{owner}.pooling={module.pooling!r} is unknown: choose one of {", ".join(poolings)}'
    )
  check_remat(f'{owner}.remat={module.remat!r}', module.remat)
  if not 0.0 <= module.dropout < 1.0:
    raise ValueError(f'{owner}.dropout={module.dropout} must lie in [0, 1)')


def check_settings(name: str, module: type[nn.Module], settings: Mapping[str, Any]) -> None:
  """Raises ValueError for settings of the function `name` that `module` does not have."""
  fields = {f.name for f in dataclasses.fields(module)} - {'parent', 'name'}
  if unknown := settings.keys() - fields:
    raise ValueError(
      f'{name} has no setting {", ".join(sorted(unknown))}: choose from {", ".join(sorted(fields))}'
    )


STACKED = 'blocks'


def block_name(layer: int) -> str:
  return f'block{layer:02d}'


def stack_blocks(params: dict[str, Any]) -> dict[str, Any]:
  """Converts parameters to the layout of `scan_layers`."""
  names = [name for name in map(block_name, range(len(params))) if name in params]
  rest = {name: value for name, value in params.items() if name not in names}
  blocks = [params[name] for name in names]
  return rest | {STACKED: jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}


def unstack_blocks(params: dict[str, Any]) -> dict[str, Any]:
  """The inverse of `stack_blocks`."""
  rest = {name: value for name, value in params.items() if name != STACKED}
  depth = len(jax.tree.leaves(params[STACKED])[0])

  def layer(i):
    return jax.tree.map(lambda x: x[i], params[STACKED])

  return rest | {block_name(i): layer(i) for i in range(depth)}


def constrain_tokens(x: jax.Array) -> jax.Array:
  """Shards activations of tokens [B, N, D]."""
  return with_sharding_constraint(x, ('batch', 'length', 'embed'))
