"""Index, mask and loss of a batch, shared by the models."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from clu import metrics as clu_metrics
from flax import linen as nn

Batch = Mapping[str, jax.Array]
PyTree = Any


def index(batch: Batch) -> jax.Array:
  """The index of each example, int32 [B]: the row number if the batch has none."""
  return batch['index'] if 'index' in batch else jnp.arange(batch['image'].shape[0])


def mask(batch: Batch) -> jax.Array:
  """float32 [B], 0 for padding rows; all ones if the batch has no mask."""
  return batch['mask'] if 'mask' in batch else jnp.ones(batch['image'].shape[0], jnp.float32)


def mean_loss(
  nll: jax.Array,
  mask: jax.Array,
  normalizing_factor: float | None,
  auxiliary: jax.Array | float = 0.0,
) -> jax.Array:
  """The mean of nll [B] over the real rows plus a scalar, or their sum over rows / the factor."""
  total = jnp.where(mask > 0, nll, 0.0).sum()
  rows = (mask > 0).sum()
  if normalizing_factor is None:
    return total / jnp.maximum(rows, 1) + auxiliary
  return (total + rows * auxiliary) / normalizing_factor


def apply_in_training(
  module: nn.Module, params: PyTree, *inputs: jax.Array, rngs: dict[str, jax.Array]
) -> tuple[Any, jax.Array | float, dict[str, clu_metrics.Metric]]:
  """Applies the module with train=True.

  Returns:
    Its output; the sum of the scalars that backbones sow in 'losses', to be added to the training
    loss, 0.0 if there are none; and that sum as the metric 'auxiliary_loss', with the dicts of
    scalars sown in 'metrics', each the mean over the layers that have it.
  """
  output, sown = module.apply(
    {'params': params}, *inputs, train=True, rngs=rngs, mutable=['losses', 'metrics']
  )
  if not (losses := jax.tree.leaves(sown.get('losses', {}))):
    return output, 0.0, {}
  by_name = collections.defaultdict(list, auxiliary_loss=[sum(losses)])
  for path, value in jax.tree.leaves_with_path(sown.get('metrics', {})):
    by_name[path[-1].key].append(value)
  average = clu_metrics.Average.from_model_output
  metrics: dict[str, clu_metrics.Metric] = {
    name: average(jnp.stack(values)) for name, values in by_name.items()
  }
  return output, sum(losses), metrics


def representations(
  backbone: nn.Module, params: PyTree, batch: Batch, layers: Sequence[str]
) -> dict[str, jax.Array]:
  """The backbone's representations [B, ...] with the given names."""
  _, intermediates = backbone.apply({'params': params}, batch['image'], train=False)
  if unknown := [layer for layer in layers if layer not in intermediates]:
    raise ValueError(
      f'representations.layers={unknown} are unknown: choose from {", ".join(intermediates)}'
    )
  return {layer: intermediates[layer] for layer in layers}
