"""Learning rates of groups of parameters: by regular expression, by layer, from a step on."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

PyTree = Any

# Parameters before the first layer. All others that belong to no layer come after the last one.
_IN_FRONT = re.compile(
  r'(^|/)(embedding|position_embedding|class_token|registers|pre_norm|conv_root|norm_root'
  r'|stem|stem_norm)(/|$)'
)
# 'block03/', 'stage2_unit01/', 'stage2_block01/', or stacked by `scan_layers` 'blocks/',
# 'stage2_units/'. What halves the image before a stage belongs to the first block of the stage.
_LAYER = re.compile(r'^(.*?)(block|stage)(s|\d+)(?:_(?:(?:unit|block)(s|\d+)|norm|patches))?/')


def matching(pattern: str, params: PyTree, setting: str | None) -> PyTree:
  """Whether a regular expression is found in the path of each parameter ('head/kernel').

  One that is found in none is a ValueError, which names the setting; with None it is allowed.
  """
  mask = jax.tree_util.tree_map_with_path(
    lambda path, _: bool(re.search(pattern, _name(path))), params
  )
  if setting is not None and not any(jax.tree.leaves(mask)):
    raise ValueError(f'{setting}={pattern!r} matches no parameter.')
  return mask


def unfreeze_at(step: int) -> optax.Schedule:
  """A factor of the learning rate that is 0 before an update and 1 from it on."""
  return lambda count: jnp.where(count >= step, 1.0, 0.0)


def scale_by_group(
  factors: Sequence[tuple[str, float | optax.Schedule]], setting: str = 'learning_rate_factors'
) -> optax.GradientTransformation:
  """Multiplies updates with the factor of the first pattern that is found in a parameter's path.

  A pattern that is found in none is a ValueError at initialisation, which names the setting.
  """

  def first(number: int) -> Callable[[PyTree], PyTree]:
    def mask(params: PyTree) -> PyTree:
      masks = [matching(x, params, setting) for x, _ in factors[: number + 1]]
      return jax.tree.map(lambda *found: found[-1] and not any(found[:-1]), *masks)

    return mask

  scales = [optax.scale_by_schedule(f) if callable(f) else optax.scale(f) for _, f in factors]
  return optax.chain(*(optax.masked(scale, first(i)) for i, scale in enumerate(scales)))


def scale_by_layer(decay: float) -> optax.GradientTransformation:
  """Multiplies updates with decay^n, n the number of layers between a parameter and the head.

  Clark et al. (2020, https://arxiv.org/abs/2003.10555) and Bao et al. (2021,
  https://arxiv.org/abs/2106.08254) fine-tune in this way. Parameters after the last layer of a
  backbone have n = 0, the last layer n = 1, and patch and position embeddings the largest n.
  """

  def shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    return {_name(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(tree)}

  def init(params: PyTree) -> optax.EmptyState:
    if not any(map(_LAYER.match, shapes(params))):
      raise ValueError(
        f'layer_decay={decay} needs a backbone with layers (block00, stage1_unit01).'
      )
    return optax.EmptyState()

  def update(
    updates: PyTree, state: optax.EmptyState, params: PyTree | None = None
  ) -> tuple[PyTree, optax.EmptyState]:
    del params
    exponents = layer_exponents(shapes(updates))
    return jax.tree_util.tree_map_with_path(
      lambda path, x: x * jnp.asarray(decay ** exponents[_name(path)], x.dtype), updates
    ), state

  return optax.GradientTransformation(init, update)


def layer_exponents(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
  """The n of `scale_by_layer`, from shapes by path: a scalar, or [layers, 1, ...] if stacked."""
  layers: dict[str, dict[tuple[float, float], int]] = {}  # {tower: {place of a layer: how many}}
  for path, shape in shapes.items():
    if match := _LAYER.match(path):
      place = _place(match)
      layers.setdefault(match[1], {})[place] = shape[0] if 's' in match.groups() else 1

  def exponent(path: str, shape: tuple[int, ...]) -> np.ndarray:
    tower = next((x for x in sorted(layers, key=len, reverse=True) if path.startswith(x)), None)
    if tower is None:
      return np.zeros(())
    depth = sum(layers[tower].values())
    if match := _LAYER.match(path):
      place = _place(match)
      number = sum(n for other, n in layers[tower].items() if other < place)
      if 's' not in match.groups():
        return np.asarray(depth - number)
      stacked = depth - number - np.arange(shape[0])
      return stacked.reshape(-1, *(1,) * (len(shape) - 1))
    return np.asarray(depth + 1 if _IN_FRONT.search(path.removeprefix(tower)) else 0)

  return {path: exponent(path, shape) for path, shape in shapes.items()}


def _place(match: re.Match) -> tuple[float, float]:
  """Where a layer lies among the layers of its tower.

  Stacked blocks precede the others, and stacked units follow the first of their stage.
  """
  number, unit = match.groups()[2:]
  return -1 if number == 's' else float(number), math.inf if unit == 's' else float(unit or 1)


def _name(path: tuple[Any, ...]) -> str:
  return jax.tree_util.keystr(path, simple=True, separator='/')
