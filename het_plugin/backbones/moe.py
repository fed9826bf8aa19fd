"""Mixtures of experts in place of the MLP of encoder blocks.

Sparse: V-MoE (Riquelme et al. 2021, https://arxiv.org/abs/2106.05974). A router sends each token to
k of E experts, each of which has a limited number of places per group of tokens. Soft: Soft MoE
(Puigcerver et al. 2023, https://arxiv.org/abs/2308.00951). Each expert reads weighted means of an
image's tokens.

B images, N tokens, D width, G groups of n tokens, E experts, C places per expert and group.

Experts carry the logical axis 'expert', which standard rules map to the mesh axis 'data'. Tokens
then reach their experts by an all-to-all, and no parameter of an expert is gathered.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.partitioning import vmap_with_axes, with_sharding_constraint

from het_plugin.backbones.layers import param
from het_plugin.system import ranges
from het_plugin.system.ranges import Count, NotNegative, Positive

PLACES = re.compile(r'(every|last)_([1-9]\d*)')


@dataclasses.dataclass(frozen=True)
class SparseMoe:
  """V-MoE: k experts per token.

  In training the tokens of `group_size` images compete for the experts' places, so results depend
  on how a batch is cut into microbatches unless `group_size` is 1. Elsewhere each image is routed
  by itself: its representation is a function of the image alone.

  Attributes:
    num_experts: E; the size of the mesh axis 'data' must divide it.
    layers: blocks with experts: 'every_n', 'last_n' (the last n of every second block) or block
      numbers from 0.
    num_selected: k, experts per token.
    capacity: C is capacity * k * n / E, rounded up (section 2.4). Tokens that find no place skip
      the expert.
    eval_capacity: the same outside training.
    group_size: images whose tokens are routed together in training; must divide the rows of a
      microbatch.
    noise: standard deviation of the noise added to router logits in training, times E. As for
      dropout, its draws depend on how a batch is cut into microbatches.
    importance_weight, load_weight: weights of the two losses that balance the experts' use
      (appendix A). The paper's total of 0.01 is shared equally.
    batch_priority: tokens with the largest weights take places first (section 4.1), in place of the
      first tokens.

  Raises:
    ValueError: a setting is out of range.
  """

  num_experts: Count
  layers: str | Sequence[int] = 'every_2'
  num_selected: Count = 2
  capacity: Positive = 1.05
  eval_capacity: Positive = 4.0
  group_size: Count = 8
  noise: NotNegative = 1.0
  importance_weight: NotNegative = 0.005
  load_weight: NotNegative = 0.005
  batch_priority: bool = True

  def __post_init__(self):
    ranges.check(self)
    _check_layers(self)
    if self.num_selected > self.num_experts:
      raise ValueError(
        f'SparseMoe.num_selected={self.num_selected} must be at most num_experts={self.num_experts}'
      )

  def layer(self, make_experts: Callable[[], nn.Module], name: str) -> nn.Module:
    return SparseExperts(self, make_experts, name=name)


@dataclasses.dataclass(frozen=True)
class SoftMoe:
  """Soft MoE: every expert has `num_slots` slots per image.

  Attributes:
    num_experts: E; the size of the mesh axis 'data' must divide it.
    layers: as for `SparseMoe`.
    num_slots: slots per expert. An image costs as much as a dense MLP if E * num_slots is N.

  Raises:
    ValueError: a setting is out of range.
  """

  num_experts: Count
  layers: str | Sequence[int] = 'every_2'
  num_slots: Count = 1

  def __post_init__(self):
    ranges.check(self)
    _check_layers(self)

  def layer(self, make_experts: Callable[[], nn.Module], name: str) -> nn.Module:
    return SoftExperts(self, make_experts, name=name)


Moe = SparseMoe | SoftMoe


def _check_layers(moe: Moe) -> None:
  if isinstance(moe.layers, str):
    known = PLACES.fullmatch(moe.layers)
  else:
    known = isinstance(moe.layers, Sequence) and moe.layers
  if not known:
    raise ValueError(
      f"{type(moe).__name__}.layers={moe.layers!r} must be 'every_n', 'last_n' or numbers of "
      'blocks such as (1, 3)'
    )


def moe_layers(moe: Moe | None, depth: int) -> frozenset[int]:
  """Numbers of the blocks, from 0, that have experts.

  Raises:
    ValueError: there is no such block.
  """
  if moe is None:
    return frozenset()
  layers = moe.layers
  if isinstance(layers, str):
    place, number = PLACES.fullmatch(layers).groups()
    n = int(number)
    layers = range(n - 1, depth, n) if place == 'every' else range(1, depth, 2)[-n:]
    fits = len(layers) >= (n if place == 'last' else 1)
  else:
    fits = all(0 <= layer < depth for layer in layers)
  if not fits:
    raise ValueError(
      f'{type(moe).__name__}.layers={moe.layers!r} asks for more blocks than depth={depth} has'
    )
  return frozenset(layers)


def stack_experts(mlp: type[nn.Module]) -> type[nn.Module]:
  """The module class `mlp`, (x [G, C, D], deterministic) -> [G, C, D], for E experts at a time:
  x and parameters have a leading axis E. All start with the same parameters, as in V-MoE.
  """
  return vmap_with_axes(
    mlp,
    variable_axes={'params': 0},
    split_rngs={'params': False, 'dropout': True},
    in_axes=(0, None),
    partitioning_axis_names={'params': 'expert'},
  )


class SparseExperts(nn.Module):
  """Routes tokens to experts (`stack_experts`); see `SparseMoe`."""

  moe: SparseMoe
  make_experts: Callable[[], nn.Module]

  @nn.compact
  def __call__(self, x: jax.Array, deterministic: bool = True) -> jax.Array:
    """x [B, N, D] -> the same shape.

    In training it sows 'losses' (a scalar to be added to the training loss) and 'metrics'
    (importance and load loss; the share of choices that found no place; the share of choices of the
    most chosen expert times E).

    Raises:
      ValueError: group_size does not divide B in training.
    """
    moe = self.moe
    images = 1 if deterministic else moe.group_size
    if x.shape[0] % images:
      raise ValueError(
        f'SparseMoe.group_size={images} must divide the rows of a microbatch, {x.shape[0]}'
      )
    groups = x.reshape(-1, images * x.shape[1], x.shape[2])  # [G, n, D]
    init = nn.initializers.lecun_normal()
    shape = x.shape[-1], moe.num_experts
    kernel = param('router', init, shape, ('embed', None))
    logits = groups.astype(jnp.float32) @ kernel  # [G, n, E]
    noisy = logits
    std = moe.noise / moe.num_experts
    if noise := moe.noise > 0 and not deterministic:
      noisy += std * jax.random.normal(self.make_rng('dropout'), logits.shape)
    gates = nn.softmax(noisy)

    factor = moe.eval_capacity if deterministic else moe.capacity
    capacity = min(
      math.ceil(factor * moe.num_selected * groups.shape[1] / moe.num_experts), groups.shape[1]
    )
    weights, chosen = top_k(gates, moe.num_selected)  # [G, n, k]
    slots = assign(weights, chosen, moe.num_experts, capacity, moe.batch_priority)  # [G, n, k]
    y = self._run(groups, weights, slots, capacity, deterministic)

    if not deterministic:
      importance = squared_variation(nn.softmax(logits).sum(1)).mean()
      load = squared_variation(load_per_expert(logits, noisy, chosen, std)) if noise else 0.0
      load = jnp.mean(load)
      self.sow('losses', 'balance', moe.importance_weight * importance + moe.load_weight * load)
      use = nn.one_hot(chosen, moe.num_experts).mean((0, 1, 2))  # [E]
      metrics = {
        'router_importance_loss': importance,
        'router_load_loss': load,
        'router_dropped': (slots == moe.num_experts * capacity).mean(),
        'router_most_chosen': use.max() * moe.num_experts,
      }
      self.sow('metrics', 'router', metrics)
    return y.reshape(x.shape)

  def _run(
    self,
    groups: jax.Array,
    weights: jax.Array,
    slots: jax.Array,
    capacity: int,
    deterministic: bool,
  ) -> jax.Array:
    """Output [G, n, D] of the experts for tokens [G, n, D], from weights and slots [G, n, k]."""
    num_groups, n, k = slots.shape
    num_experts = self.moe.num_experts
    dim = groups.shape[-1]
    slots = slots.swapaxes(1, 2).reshape(num_groups, k * n)  # all first choices, all second ones
    # Choice in each place, k n where there is none. Gathers by index cost no products; one-hot
    # matrices [n, E C] cost n / (4 D) of the experts' own.
    empty = jnp.full(num_experts * capacity, k * n)
    choice = jax.vmap(lambda slot: empty.at[slot].set(jnp.arange(k * n), mode='drop'))(slots)
    token = jnp.where(choice < k * n, choice % n, n)  # [G, E C]
    places = take(groups, token, slots.reshape(num_groups, k, n))
    places = places.reshape(num_groups, num_experts, capacity, dim)
    out = from_experts(self.make_experts()(to_experts(places), deterministic))  # [G, E, C, D]
    out = take(out.reshape(num_groups, -1, dim), slots, choice[:, None])
    weights = weights.astype(groups.dtype).swapaxes(1, 2)[..., None]  # [G, k, n, 1]
    return (weights * out.reshape(num_groups, k, n, dim)).sum(1)


class SoftExperts(nn.Module):
  """Mixes tokens for experts; see `SoftMoe`."""

  moe: SoftMoe
  make_experts: Callable[[], nn.Module]

  @nn.compact
  def __call__(self, x: jax.Array, deterministic: bool = True) -> jax.Array:
    """x [B, N, D] -> the same shape (Puigcerver et al. 2023, section 2.1 and 2.3)."""
    moe = self.moe
    shape = x.shape[-1], moe.num_experts, moe.num_slots
    init = nn.initializers.lecun_normal(in_axis=0, out_axis=(1, 2))
    directions = param('router', init, shape, ('embed', None, None))
    scale = param('scale', nn.initializers.ones, (), ())
    tokens = unit_length(x.astype(jnp.float32), axis=-1)
    directions = scale * unit_length(directions, axis=0)  # [D, E, slots]
    logits = jnp.einsum('bnd,des->bnes', tokens, directions)  # [B, N, E, slots]
    dispatch = nn.softmax(logits, axis=1).astype(x.dtype)
    combine = nn.softmax(logits, axis=(2, 3)).astype(x.dtype)
    places = jnp.einsum('bnd,bnes->besd', x, dispatch)  # [B, E, slots, D]
    out = from_experts(self.make_experts()(to_experts(places), deterministic))  # [B, E, slots, D]
    return jnp.einsum('besd,bnes->bnd', out, combine)  # [B, N, D]


def top_k(gates: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
  """The k largest gates [G, n, k] and their experts int32 [G, n, k], in order."""
  # lax.top_k is a custom call, which would gather the tokens of all devices.
  weights = []
  chosen = []
  rest = jax.lax.stop_gradient(gates)
  for _ in range(k):
    chosen.append(rest.argmax(-1))
    weights.append(pick(gates, chosen[-1]))
    rest = jnp.where(nn.one_hot(chosen[-1], gates.shape[-1], dtype=bool), -jnp.inf, rest)
  return jnp.stack(weights, axis=-1), jnp.stack(chosen, axis=-1)


def pick(x: jax.Array, index: jax.Array) -> jax.Array:
  """The element of x [..., E] at index [...], without a gather."""
  return jnp.where(nn.one_hot(index, x.shape[-1], dtype=bool), x, 0).sum(-1)


def assign(
  weights: jax.Array, chosen: jax.Array, num_experts: int, capacity: int, batch_priority: bool
) -> jax.Array:
  """Gives places to choices: first all first choices, then all second ones (algorithms 1 and 2).

  Takes weights and chosen [G, n, k] of `top_k`, E and C. With `batch_priority` tokens are in the
  order of their largest weights. Returns int32 [G, n, k]: expert * C + place, or E * C for a choice
  without a place.
  """
  # Counts pairs of tokens. A sort takes seconds to compile for TPUs, in each layer.
  token = jnp.arange(chosen.shape[1])
  earlier = token < token[:, None]  # [n, n]: the second token goes before the first
  if batch_priority:
    weight = weights[:, :, None, 0]
    other = weights[:, None, :, 0]
    earlier = (other > weight) | ((other == weight) & earlier)  # [G, n, n]
  places = []
  used = 0
  for choice in jnp.moveaxis(chosen, -1, 0):  # [G, n]
    same = choice[:, :, None] == choice[:, None, :]
    member = nn.one_hot(choice, num_experts, dtype=jnp.int32)  # [G, n, E]
    places.append((earlier & same).sum(-1) + (member * used).sum(-1))
    used += member.sum(1, keepdims=True)
  place = jnp.stack(places, axis=-1)
  return jnp.where(place < capacity, chosen * capacity + place, num_experts * capacity)


def load_per_expert(
  logits: jax.Array, noisy: jax.Array, chosen: jax.Array, std: float
) -> jax.Array:
  """Mean probability [G, E] that new noise of deviation `std` selects an expert (appendix A, "Load
  Loss"), from logits [G, n, E] without and with noise and the experts chosen [G, n, k].
  """
  threshold = pick(noisy, chosen[..., -1])[..., None]  # [G, n, 1]
  return jax.scipy.stats.norm.sf((threshold - logits) / std).mean(axis=1)


def squared_variation(x: jax.Array) -> jax.Array:
  """Squared coefficient of variation of x [G, E] over E, [G]."""
  return x.var(-1) / jnp.square(x.mean(-1))


def unit_length(x: jax.Array, axis: int) -> jax.Array:
  """x over its Euclidean length along `axis`, finite for x = 0."""
  return x * jax.lax.rsqrt(jnp.square(x).sum(axis, keepdims=True) + 1e-6)


@jax.custom_vjp
def take(x: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
  """Rows x [G, n, D] at index int32 [G, m], [G, m, D]; zeros where the index is n.

  inverse int32 [G, j, n] are the places of each row in the result, m for none. With it the gradient
  gathers, too; a scatter sorts on TPUs, which takes long to compile.
  """
  return jnp.take_along_axis(x, index[..., None], axis=1, mode='fill', fill_value=0)


def _take_fwd(
  x: jax.Array, index: jax.Array, inverse: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return take(x, index, inverse), (index, inverse)


def _take_bwd(saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, None, None]:
  index, inverse = saved
  rows = [take(dy, inverse[:, j], index[:, None]) for j in range(inverse.shape[1])]
  return sum(rows), None, None


take.defvjp(_take_fwd, _take_bwd)


def to_experts(x: jax.Array) -> jax.Array:
  """x [G, E, C, D], groups on their devices, to [E, G, C, D], experts on theirs: an all-to-all."""
  x = with_sharding_constraint(x, ('batch', None, 'length', 'embed'))
  return with_sharding_constraint(x.swapaxes(0, 1), ('expert', 'expert_group', 'length', 'embed'))


def from_experts(x: jax.Array) -> jax.Array:
  """The inverse of `to_experts`."""
  x = with_sharding_constraint(x, ('expert', 'expert_group', 'length', 'embed'))
  return with_sharding_constraint(x.swapaxes(0, 1), ('batch', None, 'length', 'embed'))
