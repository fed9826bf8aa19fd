"""Vision Transformer (Dosovitskiy et al., 2020, https://arxiv.org/abs/2010.11929).

B images, H x W pixels, C channels, P patch size, N tokens, D width.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.partitioning import param_with_axes, with_sharding_constraint
from jax.typing import DTypeLike

from het_plugin.backbones.layers import Dense, LayerNorm
from het_plugin.backbones.transformer import (
  SIZES,
  check_encoder,
  check_positive,
  check_settings,
  prepare_tokens,
  run_blocks,
)

POOLINGS = ('token', 'gap')


class PatchEmbedding(nn.Module):
  """Non-overlapping patches, each mapped linearly: image [B, H, W, C] to [B, (H/P)(W/P), D].

  Function and parameters (kernel [P, P, C, D], bias [D]) are those of a P x P convolution of stride
  P. One matrix product is 1.4 to 3.3 times as fast on CPU at 224 x 224 (forward and backward,
  P = 16 and 32), and fills a matrix unit for any C.
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
    remat: what the backward pass recomputes to save memory (`layers.REMAT`).
    scan_layers: runs one block in a loop, which compiles much faster. The parameters are stacked
      [depth, ...] under 'blocks' instead of 'block00', ... (`stack_blocks`, `unstack_blocks`).

  Raises:
    ValueError: a setting is out of range, or P does not divide the image.
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
    check_positive(self, 'patch_size', 'representation_size')
    check_encoder(self, POOLINGS)
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
      image: float32 [B, H, W, C]. H and W are fixed by the position embeddings.
      train: applies dropout, with the 'dropout' rng.

    Returns:
      phi float32 [B, pre_logits_dim], and the representations by name: 'patches'
      [B, (H/P)(W/P), D], 'block00', 'block01', ... [B, N, D], 'encoder_norm' float32 [B, N, D] and
      'pre_logits', which is phi. N counts the patches, and the class token in front of them.
    """
    intermediates = {}
    x = PatchEmbedding(self.patch_size, self.width, self.dtype, name='embedding')(image)
    intermediates['patches'] = x
    x = prepare_tokens(x, self.pooling == 'token', self.dropout, deterministic=not train)
    x, outputs = run_blocks(
      x,
      depth=self.depth,
      num_heads=self.num_heads,
      mlp_dim=self.mlp_dim,
      dropout=self.dropout,
      dtype=self.dtype,
      remat=self.remat,
      scan_layers=self.scan_layers,
      deterministic=not train,
    )
    intermediates |= outputs

    x = intermediates['encoder_norm'] = LayerNorm(name='encoder_norm')(x)
    phi = x[:, 0] if self.pooling == 'token' else x.mean(axis=1)  # [B, D]
    if self.representation_size is not None:
      # 'kv' because t5x's rules leave it whole: every class shard of the head needs all of phi.
      phi = jnp.tanh(Dense(self.representation_size, ('embed', 'kv'), name='representation')(phi))
    phi = intermediates['pre_logits'] = with_sharding_constraint(phi, ('batch', 'embed'))
    return phi, intermediates


def vit(variant: str = 'S/16', **overrides: Any) -> ViT:
  """A ViT by the name of the papers: size, slash, patch size in pixels, such as 'S/16' or 'L/32'.

  Args:
    variant: one of the sizes Ti, S, B, L, H, g, G with any patch size.
    **overrides: fields of `ViT` that replace those of the variant.

  Raises:
    ValueError: the variant or a field is unknown.
  """
  size, slash, patch_size = variant.partition('/')
  if size not in SIZES or not slash or not patch_size.isdecimal():
    raise ValueError(
      f'vit.variant={variant!r} is unknown: write one of the sizes {", ".join(SIZES)}, a slash and '
      "the patch size in pixels, such as 'B/16' or 'L/32'"
    )
  check_settings('vit', ViT, overrides)
  return ViT(**{'patch_size': int(patch_size), **SIZES[size], **overrides})
