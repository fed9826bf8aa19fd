"""Adapts plain flax modules image -> phi to the interface of the backbones here."""

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
from flax import traverse_util
from flax.linen import partitioning

_log = logging.getLogger(__name__)

PyTree = Any

# If the largest dimension of a parameter is a multiple of this number, it gets the axis name of D,
# which FSDP rules shard. The data axes of common meshes divide this number.
_SHARDED_MULTIPLE = 128


class PlainBackbone(nn.Module):
  """Gives a plain flax module the interface of our backbones; parameter names do not change.

  Attributes:
    module: `module(image [B, H, W, C])` returns phi [B, D] or (phi, {name: representation}). If its
      `__call__` has an argument `train` or `deterministic`, the mode is passed.
  """

  module: nn.Module

  def setup(self):
    nn.share_scope(self, self.module)

  def __call__(
    self, image: jax.Array, train: bool = False
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """image [B, H, W, C] -> phi [B, D], and representations by name, 'pre_logits' among them.

    Raises:
      ValueError: the module does not return phi [B, D].
    """
    arguments = inspect.signature(type(self.module).__call__).parameters
    modes = {'train': train, 'deterministic': not train}
    output = self.module(image, **{name: modes[name] for name in modes if name in arguments})
    phi, representations = output if isinstance(output, tuple) else (output, {})
    if getattr(phi, 'ndim', None) != 2 or not isinstance(representations, Mapping):
      raise ValueError(
        f'the backbone {type(self.module).__name__} must return phi [B, D], or (phi, {{name: '
        f'representation}}); for images {image.shape} it returned '
        f'{jax.tree.map(lambda x: getattr(x, "shape", x), output)}'
      )
    return phi, {**representations, 'pre_logits': phi}


def as_backbone(module: nn.Module) -> nn.Module:
  """The module itself if it has `pre_logits_dim`, else a `PlainBackbone` of it."""
  return module if hasattr(module, 'pre_logits_dim') else PlainBackbone(module)


def with_axes(variables: Mapping[str, PyTree]) -> dict[str, PyTree]:
  """Initial variables with logical axes for all parameters.

  Args:
    variables: 'params', and 'params_axes' for parameters made by `param_with_axes`.

  Returns:
    Both collections. A parameter without axes gets 'embed' for its largest dimension if that is a
    multiple of 128; its other dimensions are replicated.

  Raises:
    ValueError: the module has other collections, such as BatchNorm's statistics.
  """
  variables = nn.unbox(variables)
  # 'losses' and 'metrics' are sown at every step (`models.batches.apply_in_training`).
  if state := sorted(set(variables) - {'params', 'params_axes', 'losses', 'metrics'}):
    raise ValueError(
      f'the model has the mutable collections {", ".join(state)}, which training does not update. '
      'Use a layer without state, such as GroupNorm instead of BatchNorm'
    )
  params = traverse_util.flatten_dict(variables['params'])
  axes = traverse_util.flatten_dict(variables.get('params_axes', {}))
  added = {
    (*path[:-1], f'{path[-1]}_axes'): partitioning.AxisMetadata(names=_axes(value.shape))
    for path, value in params.items()
    if (*path[:-1], f'{path[-1]}_axes') not in axes
  }
  if added:
    sharded = sum('embed' in metadata.names for metadata in added.values())
    _log.info(
      '%d parameters have no logical axes: %d are sharded like the axis embed, the others are '
      'replicated.',
      len(added),
      sharded,
    )
  return {
    'params': variables['params'],
    'params_axes': traverse_util.unflatten_dict({**axes, **added}),
  }


def _axes(shape: tuple[int, ...]) -> tuple[str | None, ...]:
  largest = max(range(len(shape)), key=shape.__getitem__, default=None)
  return tuple(
    'embed' if dim == largest and len(shape) > 1 and size % _SHARDED_MULTIPLE == 0 else None
    for dim, size in enumerate(shape)
  )
