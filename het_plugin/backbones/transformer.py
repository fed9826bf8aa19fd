"""The Transformer encoder of ViT and text tower.

Source: Dosovitskiy et al., 2020, section 3.1 (https://arxiv.org/abs/2010.11929); Vaswani et al.,
2017. B examples, N tokens, D width.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen.partitioning import scan_with_axes, with_sharding_constraint
from jax.typing import DTypeLike

from het_plugin.backbones.layers import (
  Dense,
  Norm,
  check_dtype,
  drop_path,
  drop_path_rates,
  param,
  rematerialize,
)
from het_plugin.backbones.moe import Moe, moe_layers, stack_experts
from het_plugin.system import ranges

# B, L and H: table 1 of Dosovitskiy et al. 2020. g and G: table 2 of Zhai et al. 2021
# (https://arxiv.org/abs/2106.04560). Ti and S: table 1 of Touvron et al. 2021 (DeiT,
# https://arxiv.org/abs/2012.12877), named so by Steiner et al. 2021 (https://arxiv.org/abs/2106.10270).
# 22B: table 1 of Dehghani et al. 2023 (https://arxiv.org/abs/2302.05442).
SIZES = {
  'Ti': {'width': 192, 'depth': 12, 'mlp_dim': 768, 'num_heads': 3},
  'S': {'width': 384, 'depth': 12, 'mlp_dim': 1536, 'num_heads': 6},
  'B': {'width': 768, 'depth': 12, 'mlp_dim': 3072, 'num_heads': 12},
  'L': {'width': 1024, 'depth': 24, 'mlp_dim': 4096, 'num_heads': 16},
  'H': {'width': 1280, 'depth': 32, 'mlp_dim': 5120, 'num_heads': 16},
  'g': {'width': 1408, 'depth': 40, 'mlp_dim': 6144, 'num_heads': 16},
  'G': {'width': 1664, 'depth': 48, 'mlp_dim': 8192, 'num_heads': 16},
  '22B': {'width': 6144, 'depth': 48, 'mlp_dim': 24_576, 'num_heads': 48},
}

Activation = Literal['gelu', 'gelu_exact', 'quick_gelu', 'swiglu']
MLPS: dict[str, Callable[[jax.Array], jax.Array]] = {
  'gelu': nn.gelu,  # the tanh approximation, as in vision_transformer and big_vision
  'gelu_exact': functools.partial(nn.gelu, approximate=False),  # as in timm and transformers
  'quick_gelu': lambda x: x * nn.sigmoid(1.702 * x),  # as in OpenAI's CLIP
  'swiglu': nn.silu,  # of a gate that multiplies the hidden layer (Shazeer 2020)
}


@dataclasses.dataclass(frozen=True)
class BlockSettings:
  """Settings that all blocks of an encoder share; `ViT` describes each of them."""

  num_heads: int
  mlp_dim: int
  dropout: float = 0.0
  dtype: DTypeLike = jnp.float32
  mlp: str = 'gelu'
  norm: str = 'layer_norm'
  norm_epsilon: float = 1e-6
  qkv_bias: bool = True
  qk_norm: bool = False
  parallel: bool = False
  layer_scale: float | None = None
  causal: bool = False
  adapter_dim: int | None = None
  sub_norm: str | None = None
  relative_grid: tuple[int, int] | None = None  # of `ViT.position='relative'`

  @classmethod
  def of(cls, module: nn.Module) -> 'BlockSettings':
    """The settings, from the attributes of `module`."""
    names = [f.name for f in dataclasses.fields(cls)]
    return cls(**{name: getattr(module, name) for name in names if hasattr(module, name)})

  def normalisation(self, name: str, **overrides: Any) -> Norm:
    settings = {'kind': self.norm, 'epsilon': self.norm_epsilon, 'dtype': self.dtype}
    return Norm(**settings | overrides, name=name)


class Attention(nn.Module):
  """Multi-head attention, its softmax in float32.

  The heads share one parameter axis 'joined_kv' of the length of the width, so a mesh can divide it
  even if it does not divide the number of heads (3 in Ti).
  """

  settings: BlockSettings

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    is_token: jax.Array | None = None,
    rotation: tuple[jax.Array, jax.Array] | None = None,
    queries: jax.Array | None = None,
  ) -> jax.Array:
    """Attends from `queries` to x.

    Args:
      x: [B, N, D].
      is_token: bool [B, N], the tokens to attend to; None for all.
      rotation: cosine and sine [N, D / heads] of rotary position embeddings.
      queries: [B, M, D], which have the first M positions; None for x.

    Returns:
      [B, M, D].
    """
    s = self.settings
    width = x.shape[-1]

    def project(name, x):
      y = Dense(width, ('embed', 'joined_kv'), s.dtype, s.qkv_bias, name=name)(x)
      y = with_sharding_constraint(y, ('batch', 'length', 'joined_kv'))
      y = y.reshape(*y.shape[:2], s.num_heads, -1)  # [B, N, heads, D / heads]
      if name == 'value':
        return y
      if s.qk_norm:
        y = s.normalisation(f'{name}_norm', axis='kv')(y)
      return y if rotation is None else rotate(y, *(angle[: y.shape[1]] for angle in rotation))

    q = project('query', x if queries is None else queries)
    k = project('key', x)
    v = project('value', x)
    mask = None if is_token is None else is_token[:, None, None, :]  # [B, 1, 1, N]
    bias = None
    if s.relative_grid is not None:
      places = relative_places(s.relative_grid)  # [N, N]
      shape = places.max() + 1, s.num_heads
      table = param('relative_position', nn.initializers.zeros, shape, (None, None))
      places = places[: q.shape[1]]
      bias = table[places].transpose(2, 0, 1)[None].astype(q.dtype)  # [1, heads, M, N]
    y = jax.nn.dot_product_attention(q, k, v, bias, mask, is_causal=s.causal)
    y = y.reshape(*y.shape[:2], -1)
    if s.sub_norm == 'both':
      y = s.normalisation('sub_norm', axis='joined_kv')(y)
    return Dense(width, ('joined_kv', 'embed'), s.dtype, name='out')(y)


class Mlp(nn.Module):
  """Perceptron with one hidden layer, [B, N, D] -> [B, N, D].

  `rows` are the logical axes of B and N.
  """

  settings: BlockSettings
  rows: tuple[str, str] = ('batch', 'length')

  @nn.compact
  def __call__(self, x: jax.Array, deterministic: bool = True) -> jax.Array:
    s = self.settings
    y = Dense(s.mlp_dim, ('embed', 'mlp'), s.dtype, name='wi')(x)
    if s.mlp == 'swiglu':
      y = nn.silu(Dense(s.mlp_dim, ('embed', 'mlp'), s.dtype, name='wi_gate')(x)) * y
    else:
      y = MLPS[s.mlp](y)
    y = with_sharding_constraint(y, (*self.rows, 'mlp'))
    if s.sub_norm is not None:
      y = s.normalisation('sub_norm', axis='mlp')(y)
    y = nn.Dropout(s.dropout)(y, deterministic)
    return Dense(x.shape[-1], ('mlp', 'embed'), s.dtype, name='wo')(y)


class Adapter(nn.Module):
  """Residual adapter [B, N, D] -> [B, N, D], which starts as the identity (Rebuffi et al. 2017,
  https://arxiv.org/abs/1705.08045; Houlsby et al. 2019, https://arxiv.org/abs/1902.00751).
  """

  settings: BlockSettings

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    s = self.settings
    y = nn.gelu(Dense(s.adapter_dim, ('embed', 'mlp'), s.dtype, name='wi')(x))
    start = nn.initializers.zeros
    return x + Dense(x.shape[-1], ('mlp', 'embed'), s.dtype, kernel_init=start, name='wo')(y)


class Block(nn.Module):
  """Pre-norm encoder block: attention and MLP with residual connections, one after the other
  (Dosovitskiy, eq. 2, 3) or in parallel (Dehghani et al. 2023, section 2.1).

  With `moe` experts replace the MLP.
  """

  settings: BlockSettings
  scanned: bool = False  # returns (carry, output), both the result
  moe: Moe | None = None

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    deterministic: bool,
    is_token: jax.Array | None = None,
    rotation: tuple[jax.Array, jax.Array] | None = None,
    drop_rate: jax.Array | float | None = None,
    first: jax.Array | None = None,
  ):
    """The result for `first` [B, M, D], the first tokens of x [B, N, D]; None for all."""
    s = self.settings

    def residual(y, name):
      if s.layer_scale is not None:
        init = nn.initializers.constant(s.layer_scale)
        y *= param(f'{name}_scale', init, x.shape[-1:], ('embed',)).astype(s.dtype)
      y = nn.Dropout(s.dropout)(y, deterministic)
      if drop_rate is None or deterministic:
        return y
      return drop_path(y, drop_rate, self.make_rng('dropout'))

    y = s.normalisation('attention_norm')(x)
    queries = None
    if first is not None:
      x = first
      queries = y[:, : first.shape[1]]
    attended = Attention(s, name='attention')(y, is_token, rotation, queries)
    attended = residual(attended, 'attention')
    y = y if queries is None else queries
    if s.parallel:
      x = x + attended
    else:
      x = constrain_tokens(x + attended)
      y = s.normalisation('mlp_norm')(x)
    if self.moe is None:
      mlp = Mlp(s, name='mlp')
    else:
      experts = stack_experts(Mlp)
      rows = ('expert_group', 'length')
      mlp = self.moe.layer(lambda: experts(s, rows, name='experts'), name='moe')
    x = constrain_tokens(x + residual(mlp(y, deterministic), 'mlp'))
    if s.adapter_dim is not None:
      x = constrain_tokens(Adapter(s, name='adapter')(x))
    return (x, x) if self.scanned else x


class AttentionPooling(nn.Module):
  """Pools tokens [B, N, D] to [B, D] by attention from one learned query and an MLP ("MAP", Zhai et
  al. 2021, https://arxiv.org/abs/2106.04560, section 3.2); `is_token` as for `Attention`.
  """

  settings: BlockSettings

  @nn.compact
  def __call__(self, x: jax.Array, is_token: jax.Array | None = None) -> jax.Array:
    width = x.shape[-1]
    init = nn.initializers.normal(width**-0.5)
    probe = param('probe', init, (width,), ('embed',))
    queries = jnp.broadcast_to(probe.astype(x.dtype), (x.shape[0], 1, width))
    x = Attention(self.settings, name='attention')(x, is_token, queries=queries)
    y = self.settings.normalisation('mlp_norm')(x)
    return (x + Mlp(self.settings, name='mlp')(y))[:, 0]


def rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
  """Rotary position embeddings (Su et al. 2021, https://arxiv.org/abs/2104.09864).

  Rotates x [B, N, heads, d] by angles with cosine and sine [N, d], whose second half repeats the
  first.
  """
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([-second, first], axis=-1)
  return (x * cosine[:, None] + turned * sine[:, None]).astype(x.dtype)


def relative_places(grid: tuple[int, int]) -> np.ndarray:
  """Rows of the table of relative positions, int [N, N], from a class token and patches to each.

  There is a row for each difference of two places, and after them one from the class token, one to
  it, and one to itself (BEiT, Bao et al. 2021, https://arxiv.org/abs/2106.08254).
  """
  rows, columns = (2 * n - 1 for n in grid)
  place = np.mgrid[: grid[0], : grid[1]].reshape(2, -1)  # [2, N - 1]
  row, column = place[:, :, None] - place[:, None] + np.reshape(grid, (2, 1, 1)) - 1
  places = np.pad(row * columns + column, ((1, 0), (1, 0)), constant_values=rows * columns)
  places[1:, 0] += 1
  places[0, 0] += 2
  return places


def learned_position(num_tokens: int, width: int) -> jax.Array:
  """Learned position embeddings [N, D], parameters of the compact module that calls this."""
  init = nn.initializers.normal(0.02)
  return param('position_embedding', init, (num_tokens, width), ('length', 'embed'))


def prepare_tokens(
  x: jax.Array,
  has_class_token: bool,
  dropout: float,
  deterministic: bool,
  position: Callable[[int, int], jax.Array | np.ndarray | None] = learned_position,
  num_registers: int = 0,
) -> jax.Array:
  """Input of the first block, [B, N, D], from embedded patches or words x [B, L, D].

  Prepends a learned class token if there is one, adds position embeddings, inserts registers after
  the class token, and applies dropout. The parameters belong to the compact module that calls this.

  `position` maps (L or L + 1, D) to the position embeddings of class token and x, for all examples
  or each, or to None.
  Registers are learned tokens without a position.
  """
  width = x.shape[-1]

  def repeat(tokens):
    return jnp.broadcast_to(tokens.astype(x.dtype), (x.shape[0], *tokens.shape[-2:]))

  if has_class_token:
    token = param('class_token', nn.initializers.zeros, (width,), ('embed',))
    x = jnp.concatenate([repeat(token[None]), x], axis=1)  # [B, L + 1, D]
  embeddings = position(*x.shape[1:])
  if embeddings is not None:
    x += embeddings.astype(x.dtype)
  if num_registers:
    init = nn.initializers.normal(0.02)
    registers = param('registers', init, (num_registers, width), (None, 'embed'))
    first = x[:, :has_class_token]
    rest = x[:, has_class_token:]
    x = jnp.concatenate([first, repeat(registers), rest], axis=1)  # [B, N, D]
  return nn.Dropout(dropout)(constrain_tokens(x), deterministic=deterministic)


def run_blocks(
  module: nn.Module,
  x: jax.Array,
  deterministic: bool,
  is_token: jax.Array | None = None,
  rotation: tuple[jax.Array, jax.Array] | None = None,
  moe: Moe | None = None,
  settings: BlockSettings | None = None,
  num_first: int | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Runs the encoder blocks of the compact module that calls this, with its settings.

  x is [B, N, D]; `is_token` and `rotation` are as for `Attention`, the settings as for `ViT`, or
  `settings`. Returns the last output [B, N, D] and the outputs of all blocks: 'block00', ... With
  `num_first` the last output is that of so many first tokens, for which alone the last block is
  computed where nobody asks for the others. Without jit, which finds that out, all are computed.
  """
  settings = settings or BlockSettings.of(module)
  depth = module.depth
  remat = module.remat
  names = [f'block{layer:02d}' for layer in range(depth)]
  rates = drop_path_rates(module.stochastic_depth, depth)
  with_experts = moe_layers(moe, depth)
  outputs = {}
  looped = min(with_experts, default=depth) if module.scan_layers else 0
  if looped:
    blocks = scan_with_axes(
      rematerialize(Block, remat, static_argnums=(2,), scanned=True),
      variable_axes={'params': 0},
      split_rngs={'params': True, 'dropout': True},
      in_axes=(nn.broadcast, nn.broadcast, nn.broadcast, 0),
      length=looped,
      axis_name='layers',
    )(settings, scanned=True, name='blocks')
    looped_rates = None if rates[0] is None else jnp.asarray(rates[:looped], jnp.float32)
    x, stacked = blocks(x, deterministic, is_token, rotation, looped_rates)
    outputs = dict(zip(names[:looped], stacked, strict=True))
  block = rematerialize(Block, remat, static_argnums=(2,))
  for layer in range(looped, depth):
    name = names[layer]
    layer_block = block(settings, moe=moe if layer in with_experts else None, name=name)
    arguments = x, deterministic, is_token, rotation, rates[layer]
    outputs[name] = layer_block(*arguments)
    is_last = layer == depth - 1 and layer not in with_experts
    if num_first and is_last and isinstance(x, jax.core.Tracer):
      return layer_block(*arguments, x[:, :num_first]), outputs
    x = outputs[name]
  return x if num_first is None else x[:, :num_first], outputs


def check_encoder(module: nn.Module) -> None:
  """Raises ValueError if a setting of the encoder is out of range."""
  ranges.check(module)
  if module.width % module.num_heads:
    raise ValueError(
      f'{type(module).__name__}.width={module.width} must be a multiple of '
      f'num_heads={module.num_heads}'
    )
  check_dtype(module)


def constrain_tokens(x: jax.Array) -> jax.Array:
  """Shards activations of tokens [B, N, D]."""
  return with_sharding_constraint(x, ('batch', 'length', 'embed'))
