"""Text tower: a Transformer encoder from token ids to pre-logits.

As in LiT (Zhai et al., 2022, https://arxiv.org/abs/2111.07991) it is a ViT with token embeddings in
place of patches. B texts, L token ids per text, D width. Id 0 is padding, as in seqio.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.partitioning import with_sharding_constraint
from jax.typing import DTypeLike

from het_plugin.backbones.layers import Remat, check_settings, param
from het_plugin.backbones.transformer import (
  SIZES,
  Activation,
  BlockSettings,
  check_encoder,
  prepare_tokens,
  run_blocks,
)
from het_plugin.system.ranges import Count, Rate

PADDING = 0


class TextTransformer(nn.Module):
  """Token ids to pre-logits.

  Unless `reads_padding`, no token attends to padding, so the representation of a text does not
  depend on its padding.

  Attributes:
    vocab_size: ids lie in [0, vocab_size).
    pooling: the representation to take: 'last', of the last id before the padding; 'token', of a
      learned class token; or 'mean', the mean over all ids before the padding.
    vocab_multiple: the embedding table is padded to a multiple of it, so that meshes divide it.
    causal: whether a token attends to itself and earlier ones only, as in CLIP.
    reads_padding: whether padding is a token like any other, as in SigLIP; 'last' is then the last
      position.
    width, depth, mlp_dim, num_heads, mlp, norm_epsilon: as in `ViT`.
    dropout, stochastic_depth, dtype, remat, scan_layers: as in `ViT`.

  Raises:
    ValueError: a setting is out of range, or the ids are not int32 [B, L].
  """

  vocab_size: Count
  width: Count
  depth: Count
  mlp_dim: Count
  num_heads: Count
  pooling: Literal['last', 'token', 'mean'] = 'last'
  vocab_multiple: Count = 128
  dropout: Rate = 0.0
  dtype: DTypeLike = jnp.float32
  remat: Remat = 'none'
  scan_layers: bool = False
  stochastic_depth: Rate = 0.0
  mlp: Activation = 'gelu'
  norm_epsilon: Rate = 1e-6
  causal: bool = False
  reads_padding: bool = False

  def __post_init__(self):
    check_encoder(self)
    if self.causal and self.pooling == 'token':
      raise ValueError(
        "TextTransformer.pooling='token' with causal=True sees no text: the token comes first. "
        "Take 'last'"
      )
    super().__post_init__()

  @property
  def pre_logits_dim(self) -> int:
    """Width of phi."""
    return self.width

  @nn.compact
  def __call__(
    self, text: jax.Array, train: bool = False
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """text int32 [B, L], padded with 0 on the right -> phi float32 [B, D], and the representations
    by name: 'embedding' [B, L, D], 'block00', 'block01', ... [B, N, D], 'encoder_norm' float32
    [B, N, D] and 'pre_logits', which is phi.

    N is L, and one more with a class token in front. L is fixed by the position embeddings. An
    empty text has a finite but meaningless representation. `train` applies dropout and stochastic
    depth, with the 'dropout' rng.
    """
    if text.ndim != 2 or not jnp.issubdtype(text.dtype, jnp.integer):
      raise ValueError(
        f'text has the shape {list(text.shape)} and dtype {text.dtype}; it must be int32 [B, L]'
      )
    rows = -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
    init = nn.initializers.normal(self.width**-0.5)
    embedding = param('embedding', init, (rows, self.width), ('vocab', 'embed'))
    is_token = jnp.full(text.shape, True) if self.reads_padding else text != PADDING  # [B, L]
    x = jnp.take(embedding.astype(self.dtype), text, axis=0)  # [B, L, D]
    intermediates = {'embedding': x}
    has_class_token = self.pooling == 'token'
    if has_class_token:
      is_token = jnp.pad(is_token, ((0, 0), (1, 0)), constant_values=True)  # [B, N]
    x = prepare_tokens(x, has_class_token, self.dropout, deterministic=not train)
    x, outputs = run_blocks(self, x, not train, is_token)
    norm = BlockSettings.of(self).normalisation('encoder_norm', dtype=jnp.float32)
    x = intermediates['encoder_norm'] = norm(x)
    intermediates |= outputs
    phi = _pool(x, is_token, self.pooling)
    phi = intermediates['pre_logits'] = with_sharding_constraint(phi, ('batch', 'embed'))
    return phi, intermediates


def _pool(x: jax.Array, is_token: jax.Array, pooling: str) -> jax.Array:
  """[B, N, D] to [B, D]."""
  if pooling == 'token':
    return x[:, 0]
  if pooling == 'mean':
    weight = is_token[:, :, None].astype(x.dtype)
    return (x * weight).sum(axis=1) / jnp.maximum(weight.sum(axis=1), 1)
  position = jnp.arange(is_token.shape[1])
  last = jnp.where(is_token, position, 0).max(axis=1)  # [B]
  # A product rather than indices: each device keeps its rows, forward and backward.
  is_last = (position == last[:, None]).astype(x.dtype)  # [B, N]
  return jnp.einsum('bn,bnd->bd', is_last, x)  # [B, D]


def text_transformer(variant: str = 'S', **overrides: Any) -> TextTransformer:
  """A text tower by the size of the ViT that it equals, such as 'S' or 'g'.

  `overrides` are fields of `TextTransformer`; vocab_size is 32,000 unless given (appendix N.2). An
  unknown variant or field is a ValueError.
  """
  if variant not in SIZES:
    raise ValueError(
      f'text_transformer.variant={variant!r} is unknown: choose one of {", ".join(SIZES)}'
    )
  check_settings('text_transformer', TextTransformer, overrides)
  return TextTransformer(**{'vocab_size': 32_000, **SIZES[variant], **overrides})
