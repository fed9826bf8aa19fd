"""Vision Transformer (Dosovitskiy et al., 2020, https://arxiv.org/abs/2010.11929).

B images, H x W pixels, C channels, P patch size, N tokens, D width.
"""

import dataclasses
import functools
import math
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen.partitioning import with_sharding_constraint
from jax.typing import DTypeLike

from het_plugin.backbones.layers import Dense, Remat, check_settings, param
from het_plugin.backbones.moe import Moe, moe_layers
from het_plugin.backbones.naflex import Resampling, positions
from het_plugin.backbones.transformer import (
  SIZES,
  Activation,
  AttentionPooling,
  BlockSettings,
  check_encoder,
  learned_position,
  prepare_tokens,
  run_blocks,
)
from het_plugin.system.ranges import Count, Rate
from het_plugin.system.sheets import grid_of, is_sheet


class PatchEmbedding(nn.Module):
  """Non-overlapping patches, each mapped linearly: image [B, H, W, C] to [B, (H/P)(W/P), D].

  Result and parameters (kernel [P, P, C, D], bias [D]) are the same as in a P x P convolution of
  stride P. One matrix product is 1.4 to 3.3 times as fast on CPU at 224 x 224 (forward and
  backward, P = 16 and 32), and fills a matrix unit for any C.

  With `stored_patch_size` the kernel has that size and is resized to P (`resize_kernel`).
  """

  patch_size: Count
  width: int
  dtype: DTypeLike
  stored_patch_size: Count | None = None

  @nn.compact
  def __call__(self, image: jax.Array) -> jax.Array:
    batch, height, width, channels = image.shape
    p = self.patch_size
    if height % p or width % p:
      raise ValueError(f'ViT.patch_size={p} must divide the image, which is {height}x{width}')
    stored = self.stored_patch_size or p
    shape = stored, stored, channels, self.width
    kernel = param('kernel', nn.initializers.lecun_normal(), shape, (None, None, None, 'embed'))
    bias = param('bias', nn.initializers.zeros, (self.width,), ('embed',))
    if stored != p:
      kernel = resize_kernel(kernel, p)
    patches = image.astype(self.dtype).reshape(batch, height // p, p, width // p, p, channels)
    patches = patches.swapaxes(2, 3).reshape(batch, -1, p * p * channels)  # [B, N, P * P * C]
    kernel = kernel.astype(self.dtype).reshape(-1, self.width)
    return patches @ kernel + bias.astype(self.dtype)


def resize_kernel(kernel: jax.Array, patch_size: int) -> jax.Array:
  """The kernel w [P', P', C, D] for patches of P = `patch_size` pixels, [P, P, C, D].

  The result is pinv(B^T) w, where B resizes a P' x P' patch (bilinear, without antialiasing as in
  big_vision; FlexiViT, Beyer et al. 2022, https://arxiv.org/abs/2212.08013, eq. 2). For P >= P' its
  product with B x is <w, x>.
  """
  old = kernel.shape[0]
  # B resizes rows and columns alike, so one side's inverse is enough. It is a constant: an SVD in
  # the program would run at every step, and a SavedModel cannot hold it.
  with jax.ensure_compile_time_eval():
    resized = jax.image.resize(jnp.eye(old), (old, patch_size), 'bilinear', antialias=False)
  inverse = np.linalg.pinv(resized)  # [P, P']
  return jnp.einsum('pi,qj,ijcd->pqcd', inverse, inverse, kernel)  # [P, P, C, D]


def sincos_2d(grid: tuple[int, int], width: int) -> np.ndarray:
  """Fixed position embeddings [rows * columns, width] (Chen et al. 2021, https://arxiv.org/abs/2104.02057,
  as in big_vision).
  """
  omega = 10_000.0 ** -np.linspace(0.0, 1.0, width // 4)
  y, x = np.mgrid[: grid[0], : grid[1]].reshape(2, -1, 1) * omega  # [N, width / 4] each
  return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1).astype(np.float32)


def rotary_2d(
  grid: tuple[int, int],
  head_dim: int,
  num_prefix: int,
  theta: float = 100.0,
  rope_grid: int | None = None,
  offset: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
  """Cosine and sine [N, head_dim] of rotary position embeddings over two axes.

  A quarter of the dimensions rotates with the row and a quarter with the column; the other half
  repeats them. Rows and columns are turns in [-1, 1] (DINOv3, Simeoni et al. 2025,
  https://arxiv.org/abs/2508.10104), or with `rope_grid` radians: `offset`, `offset` + 1, ... for a
  grid of this side, to which others are stretched (EVA-02, Fang et al. 2023,
  https://arxiv.org/abs/2303.11331). The first `num_prefix` tokens have no position and do not
  rotate.
  """
  frequency = theta ** -(np.arange(head_dim // 4) * (4 / head_dim))  # [head_dim / 4]
  if rope_grid is None:
    axes = [2 * np.pi * ((np.arange(n) + 0.5) / n * 2 - 1) for n in grid]
  else:
    axes = [(np.arange(n) + offset) / n * rope_grid for n in grid]
  position = np.stack(np.meshgrid(*axes, indexing='ij'), axis=-1).reshape(-1, 2, 1)
  angles = np.tile((position * frequency).reshape(len(position), -1), 2)
  angles = np.pad(angles, ((num_prefix, 0), (0, 0)))
  return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


# Poolings that read a class token.
_WITH_TOKEN = ('token', 'token_and_gap', 'distilled')


class ViT(nn.Module):
  """Image to pre-logits.

  Attributes:
    patch_size: P, in pixels.
    width: D of the tokens; a multiple of num_heads.
    depth: encoder blocks.
    mlp_dim: hidden width of each block's MLP.
    num_heads: attention heads.
    pooling: 'token', the representation of a learned class token (and of `num_pooled` - 1 registers
      after it, side by side, as in RADIO); 'gap', the mean over patches;
      'all', the mean over all tokens; 'token_and_gap', the class token and after it the mean over
      patches, twice the width (Oquab et al. 2023, https://arxiv.org/abs/2304.07193);
      'distilled', the mean of the class token and the first register (Touvron et al. 2020,
      https://arxiv.org/abs/2012.12877); or 'map', attention from a learned query, with an MLP
      (`transformer.AttentionPooling`).
    class_token: whether there is a class token; None for poolings that read it.
    norm_pooled: whether the last normalisation follows the pooling instead of preceding it.
    representation_size: width of the biased tanh layer between the pooled representation and the
      head; None for no such layer.
    dropout: rate after the position embeddings, the attention and both MLP layers, when training.
    stochastic_depth: probability that training drops both residual branches of the last block for
      an example; it grows linearly from 0 in the first (Huang et al. 2016).
    dtype: type of the activations. Parameters, layer normalisation, softmax and pre-logits stay
      float32.
    remat: what the backward pass recomputes to save memory (`layers.REMAT`).
    scan_layers: runs the blocks in front of the first experts in a loop, which compiles much
      faster. Their parameters are stacked [blocks, ...] under 'blocks' instead of 'block00', ...
      (`weights.transfer.restacked`, `unstacked`).
    position: position embeddings: 'learned', 'sincos2d' (fixed; `sincos_2d`), 'rope' (queries and
      keys are rotated in every block; `rotary_2d`), 'learned_and_rope', or 'relative', a learned
      bias of the attention for each difference of two places (`transformer.relative_places`).
    rope_theta: base of the frequencies of 'rope'.
    rope_grid: side of the grid whose rows and columns 'rope' counts; None for turns in [-1, 1].
    rope_offset: number of the first row and column of `rope_grid`.
    num_registers: learned tokens after the class token; only attention and 'map' read them (Darcet
      et al. 2023, https://arxiv.org/abs/2309.16588).
    mlp: the activation, one of `transformer.MLPS`; 'swiglu' has a second input layer.
    norm: 'layer_norm' or 'rms_norm' (`layers.Norm`).
    norm_epsilon: added to the variance.
    qkv_bias: biases on the projections to queries, keys and values.
    qk_norm: normalises queries and keys per head (Dehghani et al. 2023, section 2.1).
    parallel: attention and MLP read the same input and are added together (ibid.).
    layer_scale: start value of learned factors per channel on both residual branches (Touvron et
      al. 2021, https://arxiv.org/abs/2103.17239); None for no factors.
    pre_norm: normalises the tokens before the first block, as CLIP does.
    projection_size: width of a linear layer without bias after pooling, as in CLIP; None for none.
    stored_patch_size: patch size of the embedding's parameters, which are resized to patch_size.
    stored_grid: side of the grid of the learned position embeddings, which are resized (bilinear)
      to the image's grid; None for no resizing. With both, one checkpoint serves any patch and
      image size.
    moe: `SparseMoe` or `SoftMoe`, experts in place of the MLP of some blocks; None for none.
    sub_norm: normalises the hidden layer of each MLP ('mlp'), or also the result of the attention
      before its output layer ('both'), as EVA-02 does; None for neither.
    patch_norm: normalises the embedded patches, before they get positions, as AIMv2 does.
    last_norm: whether there is a normalisation after the last block.
    projection_bias: a bias of the projection.
    num_pooled: tokens that the pooling 'token' takes.
    naflex: how the learned positions of `stored_grid` are resampled to the grid of each picture,
      where images are sheets of patches of pictures of any aspect (`system.sheets`); None for
      square images. Poolings of patches, 'map' among them, then read the picture's patches alone.
    naflex_square: whether a picture takes its positions from a square of its longer side.
    pool_heads: attention heads of the pooling 'map'; None for num_heads.
    adapter_dim: hidden width of a residual adapter after each block, to be trained over a frozen
      backbone (`transformer.Adapter`); None for no adapters.

  Raises:
    ValueError: a setting is out of range, or P does not divide the image.
  """

  patch_size: Count
  width: Count
  depth: Count
  mlp_dim: Count
  num_heads: Count
  pooling: Literal['token', 'gap', 'map', 'all', 'token_and_gap', 'distilled'] = 'token'
  representation_size: Count | None = None
  dropout: Rate = 0.0
  dtype: DTypeLike = jnp.float32
  remat: Remat = 'none'
  scan_layers: bool = False
  position: Literal['learned', 'sincos2d', 'rope', 'learned_and_rope', 'relative'] = 'learned'
  num_registers: Annotated[int, '[0, inf)'] = 0
  mlp: Activation = 'gelu'
  norm: Literal['layer_norm', 'rms_norm'] = 'layer_norm'
  norm_epsilon: Rate = 1e-6
  qkv_bias: bool = True
  qk_norm: bool = False
  parallel: bool = False
  layer_scale: float | None = None
  pre_norm: bool = False
  projection_size: Count | None = None
  stored_patch_size: Count | None = None
  stored_grid: Count | None = None
  stochastic_depth: Rate = 0.0
  moe: Moe | None = None
  adapter_dim: Count | None = None
  class_token: bool | None = None
  norm_pooled: bool = False
  rope_theta: Annotated[float, '(0, inf)'] = 100.0
  rope_grid: Count | None = None
  rope_offset: float = 0.0
  sub_norm: Literal['mlp', 'both'] | None = None
  pool_heads: Count | None = None
  patch_norm: bool = False
  last_norm: bool = True
  num_pooled: Count = 1
  projection_bias: bool = False
  naflex: Resampling | None = None
  naflex_square: bool = False

  def __post_init__(self):
    check_encoder(self)
    per_head = self.width // self.num_heads
    if self.has_rope and per_head % 4 or self.position == 'sincos2d' and self.width % 4:
      raise ValueError(
        f'ViT.position={self.position!r} needs a width (and with rope, a width per head) that is a '
        f'multiple of 4: ViT.width={self.width}, num_heads={self.num_heads}'
      )
    if self.naflex and (self.position != 'learned' or self.stored_grid is None):
      raise ValueError(
        f"ViT.naflex={self.naflex!r} needs position='learned' and ViT.stored_grid, not "
        f'{self.position!r} and {self.stored_grid}'
      )
    if self.stored_grid is not None and 'learned' not in self.position:
      raise ValueError(
        f"ViT.stored_grid={self.stored_grid} needs position='learned', not {self.position!r}"
      )
    if self.pool_heads is not None and (self.pooling != 'map' or self.width % self.pool_heads):
      raise ValueError(
        f"ViT.pool_heads={self.pool_heads} needs pooling='map' and must divide "
        f'ViT.width={self.width}'
      )
    if self.position == 'relative' and (self.num_registers or not self.has_class_token):
      raise ValueError("ViT.position='relative' needs a class token and no registers")
    if self.class_token is False and self.pooling in _WITH_TOKEN:
      raise ValueError(f'ViT.class_token=False, but ViT.pooling={self.pooling!r} reads the token')
    if self.pooling == 'distilled' and not self.num_registers:
      raise ValueError("ViT.pooling='distilled' needs a register: ViT.num_registers=0")
    if self.norm_pooled and self.pooling == 'map':
      raise ValueError("ViT.norm_pooled=True is for means and tokens, not for ViT.pooling='map'")
    if self.num_pooled > 1 and (
      self.pooling != 'token' or self.num_pooled > 1 + self.num_registers
    ):
      raise ValueError(
        f"ViT.num_pooled={self.num_pooled} needs pooling='token' and ViT.num_registers of at least "
        f'{self.num_pooled - 1}, not {self.pooling!r} and {self.num_registers}'
      )
    moe_layers(self.moe, self.depth)
    super().__post_init__()

  @property
  def pre_logits_dim(self) -> int:
    """Width of phi."""
    pooled = self.width * (2 if self.pooling == 'token_and_gap' else self.num_pooled)
    return self.representation_size or self.projection_size or pooled

  @property
  def has_rope(self) -> bool:
    """Whether queries and keys are rotated."""
    return self.position in ('rope', 'learned_and_rope')

  @property
  def has_class_token(self) -> bool:
    """Whether there is a class token."""
    return self.pooling in _WITH_TOKEN if self.class_token is None else self.class_token

  @nn.compact
  def __call__(
    self, image: jax.Array, train: bool = False
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """image float32 [B, H, W, C] -> phi float32 [B, pre_logits_dim], and the representations by
    name: 'patches' [B, (H/P)(W/P), D], 'block00', 'block01', ... [B, N, D], 'encoder_norm' float32
    [B, N, D] and 'pre_logits', which is phi. With `naflex` they are means over the tokens that
    count, [B, D], and phi is NaN for an image that is no sheet.

    N counts the patches, and the class token and the registers in front of them. H and W are fixed
    by the position embeddings. `train` applies dropout and stochastic depth, with the 'dropout'
    rng.
    """
    settings = BlockSettings.of(self)
    grid = tuple(n // self.patch_size for n in image.shape[1:3])
    num_prefix = self.has_class_token + self.num_registers
    rotation = None
    if self.has_rope:
      of_grid = self.rope_theta, self.rope_grid, self.rope_offset
      rotation = rotary_2d(grid, self.width // self.num_heads, num_prefix, *of_grid)
    x = PatchEmbedding(
      self.patch_size, self.width, self.dtype, self.stored_patch_size, name='embedding'
    )(image)
    # Where None, all count.
    is_patch = None  # bool [B, N]
    is_token = None  # with class token and registers
    is_pooled = None  # what the pooling 'map' reads
    position = functools.partial(self._position, grid)
    if self.naflex is not None:
      num_patches = (grid[0] - 1) ** 2
      x = x[:, :num_patches]
      sizes = grid_of(image)  # [B, 2]
      is_patch = jnp.arange(num_patches) < sizes.prod(axis=1)[:, None]
      prefix = (0, 0), (num_prefix, 0)
      is_token = jnp.pad(is_patch, prefix, constant_values=True)
      is_pooled = jnp.pad(is_patch, prefix)
      position = functools.partial(self._position_in_sheet, sizes, num_patches)
    intermediates = {'patches': x if is_patch is None else _mean(x, is_patch)}
    if self.patch_norm:
      x = settings.normalisation('patch_norm')(x)
    if self.position == 'relative':
      settings = dataclasses.replace(settings, relative_grid=grid)
    x = prepare_tokens(
      x,
      self.has_class_token,
      self.dropout,
      deterministic=not train,
      position=position,
      num_registers=self.num_registers,
    )
    if self.pre_norm:
      x = settings.normalisation('pre_norm')(x)
    # In training, dropout would differ between the two results of the last block.
    read = {'token': self.num_pooled, 'distilled': 2}.get(self.pooling)
    x, outputs = run_blocks(
      self,
      x,
      not train,
      is_token,
      rotation=rotation,
      moe=self.moe,
      settings=settings,
      num_first=None if train else read,
    )
    last = outputs[f'block{self.depth - 1:02d}']  # [B, N, D], or the same as x
    if is_token is not None:
      outputs = {name: _mean(y, is_token) for name, y in outputs.items()}
    intermediates |= outputs

    def as_float32(x):
      return x.astype(jnp.float32)

    normalise = as_float32
    if self.last_norm:
      normalise = settings.normalisation('encoder_norm', dtype=jnp.float32)
    before_pooling = as_float32 if self.norm_pooled else normalise
    is_last = last is x
    x = before_pooling(x)
    last = x if is_last else before_pooling(last)
    intermediates['encoder_norm'] = last if is_token is None else _mean(last, is_token)
    if self.pooling == 'token':
      phi = x[:, : self.num_pooled].reshape(x.shape[0], -1)  # [B, num_pooled D]
    elif self.pooling == 'gap':
      phi = _mean(x[:, num_prefix:], is_patch)
    elif self.pooling == 'all':
      phi = _mean(x, is_token)
    elif self.pooling == 'token_and_gap':
      phi = jnp.concatenate([x[:, 0], _mean(x[:, num_prefix:], is_patch)], axis=-1)  # [B, 2 D]
    elif self.pooling == 'distilled':
      phi = x[:, :2].mean(axis=1)
    else:
      heads = self.pool_heads or self.num_heads
      plain = {'qk_norm': False, 'sub_norm': None, 'relative_grid': None, 'num_heads': heads}
      plain = dataclasses.replace(settings, **plain)
      phi = AttentionPooling(plain, name='pooling')(x.astype(self.dtype), is_pooled)
      phi = phi.astype(jnp.float32)
    if self.norm_pooled:
      phi = normalise(phi)
    if self.projection_size is not None:
      has_bias = self.projection_bias
      phi = Dense(self.projection_size, ('embed', 'kv'), use_bias=has_bias, name='projection')(phi)
    if self.representation_size is not None:
      # 'kv', because t5x's rules replicate it: every class shard of the head needs all of phi.
      phi = jnp.tanh(Dense(self.representation_size, ('embed', 'kv'), name='representation')(phi))
    if self.naflex is not None:
      phi = jnp.where(is_sheet(image, num_patches)[:, None], phi, jnp.nan)
    phi = intermediates['pre_logits'] = with_sharding_constraint(phi, ('batch', 'embed'))
    return phi, intermediates

  def _position(
    self, grid: tuple[int, int], num_tokens: int, width: int
  ) -> jax.Array | np.ndarray | None:
    """Position embeddings [N, D] of class token and patches; None where there are none."""
    num_prefix = num_tokens - math.prod(grid)  # 1 with a class token
    if self.position in ('rope', 'relative'):
      return None
    if self.position == 'sincos2d':
      return np.pad(sincos_2d(grid, width), ((num_prefix, 0), (0, 0)))
    if self.stored_grid is None:
      return learned_position(num_tokens, width)
    stored = (self.stored_grid,) * 2
    learned = learned_position(num_prefix + math.prod(stored), width)
    prefix = learned[:num_prefix]
    patches = learned[num_prefix:].reshape(*stored, width)
    resized = jax.image.resize(patches, (*grid, width), 'bilinear')  # the same at stored_grid
    return jnp.concatenate([prefix, resized.reshape(-1, width)])

  def _position_in_sheet(
    self, sizes: jax.Array, num_patches: int, num_tokens: int, width: int
  ) -> jax.Array:
    """Position embeddings [B, N, D] of class token and patches, of pictures of `sizes` [B, 2]."""
    num_prefix = num_tokens - num_patches  # 1 with a class token
    stored = (self.stored_grid,) * 2
    learned = learned_position(num_prefix + math.prod(stored), width)
    table = learned[num_prefix:].reshape(*stored, width)
    made = positions(table, sizes, num_patches, self.naflex, self.naflex_square)
    prefix = jnp.broadcast_to(learned[:num_prefix], (len(made), num_prefix, width))
    return jnp.concatenate([prefix, made], axis=1)


def _mean(x: jax.Array, counts: jax.Array | None) -> jax.Array:
  """The mean [B, D] of tokens [B, N, D], of those that count [B, N]; None for all."""
  if counts is None:
    return x.mean(axis=1)
  weights = counts.astype(jnp.float32)
  total = jnp.einsum('bnd,bn->bd', x.astype(jnp.float32), weights)
  return total / jnp.maximum(weights.sum(axis=1, keepdims=True), 1)


def vit(variant: str = 'S/16', **overrides: Any) -> ViT:
  """A ViT by the name of the papers: size, slash, patch size in pixels, such as 'S/16' or 'L/32'.

  The sizes are Ti, S, B, L, H, g, G and 22B. `overrides` are fields of `ViT`. An unknown variant or
  field is a ValueError.
  """
  size, slash, patch_size = variant.partition('/')
  if size not in SIZES or not slash or not patch_size.isdecimal():
    raise ValueError(
      f'vit.variant={variant!r} is unknown: write one of the sizes {", ".join(SIZES)}, a slash and '
      "the patch size in pixels, such as 'B/16' or 'L/32'"
    )
  check_settings('vit', ViT, overrides)
  return ViT(**{'patch_size': int(patch_size), **SIZES[size], **overrides})
