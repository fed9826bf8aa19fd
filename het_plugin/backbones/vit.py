"""Vision Transformer (Dosovitskiy et al. 2020, "An image is worth 16x16 words", https://arxiv.org/abs/2010.11929).

B images, H x W pixels, C channels, P patch size, N tokens, D width.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.partitioning import param_with_axes, scan_with_axes, with_sharding_constraint
from jax.typing import DTypeLike

from het_plugin.backbones.layers import Dense, LayerNorm, check_remat, rematerialize

POOLINGS = ('token', 'gap')

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


class PatchEmbedding(nn.Module):
  """Non-overlapping patches, each mapped linearly: image [B, H, W, C] to [B, (H/P)(W/P), D].

  The same function and parameters (kernel [P, P, C, D], bias [D]) as a P x P convolution of stride
  P. Written as one matrix product because that is 1.4 to 3.3 times as fast on CPU at 224 x 224
  (forward and backward, P = 16 and 32), and fills a matrix unit whatever C is.
  """

  patch_size: int
  width: int
  dtype: DTypeLike

  @nn.compact
  def __call__(self, image: jax.Array) -> jax.Array:
    batch, height, width, channels = image.shape
    p = self.patch_size
    if height % p or width % p:
      raise ValueError(f'ViT.patch_size={p} must divide the image, which is {height}x{width}')
    kernel = param_with_axes(
      'kernel',
      nn.initializers.lecun_normal(),
      (p, p, channels, self.width),
      jnp.float32,
      axes=(None, None, None, 'embed'),
    )
    bias = param_with_axes(
      'bias', nn.initializers.zeros, (self.width,), jnp.float32, axes=('embed',)
    )
    patches = image.astype(self.dtype).reshape(batch, height // p, p, width // p, p, channels)
    patches = patches.swapaxes(2, 3).reshape(batch, -1, p * p * channels)  # [B, N, P * P * C]
    kernel = kernel.astype(self.dtype).reshape(-1, self.width)
    return patches @ kernel + bias.astype(self.dtype)


class SelfAttention(nn.Module):
  """Multi-head self-attention [B, N, D] -> [B, N, D], its softmax in float32.

  The heads share one 'joined_kv' parameter axis: it is as long as the width, so a mesh divides it
  even where it does not divide the number of heads (3 in Ti).
  """

  num_heads: int
  dtype: DTypeLike

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    width = x.shape[-1]

    def project(name):
      y = Dense(width, ('embed', 'joined_kv'), self.dtype, name=name)(x)
      y = with_sharding_constraint(y, ('batch', 'length', 'joined_kv'))
      return y.reshape(*y.shape[:2], self.num_heads, -1)  # [B, N, heads, D / heads]

    y = jax.nn.dot_product_attention(project('query'), project('key'), project('value'))
    return Dense(width, ('joined_kv', 'embed'), self.dtype, name='out')(y.reshape(x.shape))


class Mlp(nn.Module):
  """GELU perceptron of one hidden layer, [B, N, D] -> [B, N, D]."""

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
  """Pre-norm encoder block: attention, then MLP, each with a residual connection (eq. 2, 3)."""

  num_heads: int
  mlp_dim: int
  dropout: float
  dtype: DTypeLike
  scanned: bool = False  # returns (carry, output), both the result

  @nn.compact
  def __call__(self, x: jax.Array, deterministic: bool):
    y = LayerNorm(self.dtype, name='attention_norm')(x)
    y = SelfAttention(self.num_heads, self.dtype, name='attention')(y)
    x = _constrain(x + nn.Dropout(self.dropout)(y, deterministic))
    y = LayerNorm(self.dtype, name='mlp_norm')(x)
    y = Mlp(self.mlp_dim, self.dropout, self.dtype, name='mlp')(y, deterministic)
    x = _constrain(x + nn.Dropout(self.dropout)(y, deterministic))
    return (x, x) if self.scanned else x


class ViT(nn.Module):
  """Image to pre-logits.

  Attributes:
    patch_size: P, in pixels.
    width: D of the tokens; a multiple of num_heads.
    depth: encoder blocks.
    mlp_dim: hidden width of each block's MLP.
    num_heads: attention heads.
    pooling: 'token', the representation of a learned class token; or 'gap', the mean over patches.
    representation_size: width of the biased tanh layer between the pooled representation and the
      head; None for no such layer.
    dropout: rate after the position embeddings, the attention and both MLP layers, when training.
    dtype: of the activations. Parameters, layer normalisation, softmax and pre-logits stay float32.
    remat: what the backward pass computes again to save memory (`layers.REMAT`).
    scan_layers: one block in a loop instead of `depth` blocks in a row: compiles in a fraction of
      the time. Its parameters are stacked, [depth, ...] under 'blocks' instead of 'block00', ...
      (`stack_blocks`, `unstack_blocks`).

  Raises:
    ValueError: for a setting out of its range, when built; for an image that P does not divide,
      when called.
  """

  patch_size: int
  width: int
  depth: int
  mlp_dim: int
  num_heads: int
  pooling: str = 'token'
  representation_size: int | None = None
  dropout: float = 0.0
  dtype: DTypeLike = jnp.float32
  remat: str = 'none'
  scan_layers: bool = False

  def __post_init__(self):
    for name in ('patch_size', 'width', 'depth', 'mlp_dim', 'num_heads', 'representation_size'):
      value = getattr(self, name)
      if value is not None and value < 1:
        raise ValueError(f'ViT.{name}={value} must be at least 1')
    if self.width % self.num_heads:
      raise ValueError(f'ViT.width={self.width} must be a multiple of num_heads={self.num_heads}')
    if self.pooling not in POOLINGS:
      raise ValueError(
        f'ViT.pooling={self.pooling!r} is unknown: choose one of {", ".join(POOLINGS)}'
      )
    check_remat(f'ViT.remat={self.remat!r}', self.remat)
    if not 0.0 <= self.dropout < 1.0:
      raise ValueError(f'ViT.dropout={self.dropout} must lie in [0, 1)')
    super().__post_init__()

  @property
  def pre_logits_dim(self) -> int:
    """Width of phi."""
    return self.representation_size or self.width

  @nn.compact
  def __call__(
    self, image: jax.Array, train: bool = False
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Encodes images.

    Args:
      image: float32 [B, H, W, C]; the position embeddings tie the parameters to H and W.
      train: applies dropout; then needs the 'dropout' rng, if the rate is above 0.

    Returns:
      phi float32 [B, pre_logits_dim], and the representations by name: 'patches'
      [B, (H/P)(W/P), D], 'block00', 'block01', ... [B, N, D], 'encoder_norm' float32 [B, N, D] and
      'pre_logits', which is phi. N counts the patches, and the class token in front of them.
    """
    intermediates = {}
    x = PatchEmbedding(self.patch_size, self.width, self.dtype, name='embedding')(image)
    intermediates['patches'] = x
    if self.pooling == 'token':
      token = param_with_axes(
        'class_token', nn.initializers.zeros, (self.width,), jnp.float32, axes=('embed',)
      )
      token = jnp.broadcast_to(token.astype(x.dtype), (x.shape[0], 1, self.width))
      x = jnp.concatenate([token, x], axis=1)  # [B, N, D]
    position = param_with_axes(
      'position_embedding',
      nn.initializers.normal(0.02),
      x.shape[1:],
      jnp.float32,
      axes=('length', 'embed'),
    )
    x = _constrain(x + position.astype(x.dtype))
    x = nn.Dropout(self.dropout)(x, deterministic=not train)

    block = rematerialize(Block, self.remat, static_argnums=(2,), scanned=self.scan_layers)
    settings = self.num_heads, self.mlp_dim, self.dropout, self.dtype
    names = [block_name(layer) for layer in range(self.depth)]
    if self.scan_layers:
      blocks = scan_with_axes(
        block,
        variable_axes={'params': 0},
        split_rngs={'params': True, 'dropout': True},
        in_axes=nn.broadcast,
        length=self.depth,
        axis_name='layers',
      )(*settings, scanned=True, name=STACKED)
      x, outputs = blocks(x, not train)
      intermediates |= dict(zip(names, outputs, strict=True))
    else:
      for name in names:
        x = intermediates[name] = block(*settings, name=name)(x, not train)

    x = intermediates['encoder_norm'] = LayerNorm(name='encoder_norm')(x)
    phi = x[:, 0] if self.pooling == 'token' else x.mean(axis=1)  # [B, D]
    if self.representation_size is not None:
      # 'kv' because t5x's rules leave it whole: every class shard of the head needs all of phi.
      phi = jnp.tanh(Dense(self.representation_size, ('embed', 'kv'), name='representation')(phi))
    phi = intermediates['pre_logits'] = with_sharding_constraint(phi, ('batch', 'embed'))
    return phi, intermediates


STACKED = 'blocks'


def block_name(layer: int) -> str:
  return f'block{layer:02d}'


def stack_blocks(params: dict[str, Any]) -> dict[str, Any]:
  """Parameters of a `ViT` in the layout of `scan_layers`, from those without it."""
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


def vit(variant: str = 'S/16', **overrides: Any) -> ViT:
  """A ViT by the name of the papers: size, slash, patch size in pixels, such as 'S/16' or 'L/32'.

  Args:
    variant: one of the sizes Ti, S, B, L, H, g, G with any patch size.
    **overrides: fields of `ViT` that replace or complete those of the variant.

  Raises:
    ValueError: for an unknown variant or field.
  """
  size, slash, patch_size = variant.partition('/')
  if size not in SIZES or not slash or not patch_size.isdecimal():
    raise ValueError(
      f'vit.variant={variant!r} is unknown: write one of the sizes {", ".join(SIZES)}, a slash and '
      "the patch size in pixels, such as 'B/16' or 'L/32'"
    )
  fields = {f.name for f in dataclasses.fields(ViT)} - {'parent', 'name'}
  if unknown := overrides.keys() - fields:
    raise ValueError(
      f'vit has no setting {", ".join(sorted(unknown))}: choose from {", ".join(sorted(fields))}'
    )
  return ViT(**{'patch_size': int(patch_size), **SIZES[size], **overrides})


def _constrain(x):
  return with_sharding_constraint(x, ('batch', 'length', 'embed'))
