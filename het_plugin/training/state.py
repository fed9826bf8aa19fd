"""The state that training carries from step to step."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import core, struct, traverse_util

from het_plugin.training import optimizers

PyTree = Any


class TrainState(struct.PyTreeNode):
  """Step, parameters and optimizer state; the leaves are arrays, shapes or PartitionSpecs."""

  step: jax.Array  # number of updates done, int32 []
  params: PyTree  # float32, as nested dicts
  opt_state: PyTree
  optimizer_def: optimizers.OptaxWrapper | None = struct.field(pytree_node=False)
  # logical axis names, laid out as flax's `params_axes` collection
  params_axes: core.FrozenDict = struct.field(pytree_node=False)

  @property
  def eval_params(self) -> PyTree:
    """The parameters to evaluate: their average if `with_ema` keeps one for evaluation."""
    if optimizers.evaluates_ema(self.optimizer_def):
      return optimizers.ema_params(self.opt_state)
    return self.params

  @classmethod
  def create(
    cls, optimizer_def: optimizers.OptaxWrapper, model_variables: Mapping[str, Any]
  ) -> 'TrainState':
    """The state at step 0, from the result of a model's `get_initial_variables`."""
    variables = core.unfreeze(model_variables)
    params = variables.pop('params')
    params_axes = variables.pop('params_axes', {})
    if variables:
      raise ValueError(
        f'The model has the mutable collections {", ".join(sorted(variables))}; this trainer '
        'carries parameters only (batch statistics would depend on the microbatch).'
      )
    named = {
      path.removesuffix('_axes') for path in traverse_util.flatten_dict(params_axes, sep='/')
    }
    missing = sorted(set(traverse_util.flatten_dict(params, sep='/')) - named)
    if missing:
      raise ValueError(
        f'Parameter {missing[0]} has no logical axis names ({len(missing)} such parameters): '
        'create it with flax.linen.partitioning.param_with_axes.'
      )
    return cls(
      step=jnp.zeros((), jnp.int32),
      params=params,
      opt_state=optimizer_def.optax_optimizer.init(params),
      optimizer_def=optimizer_def,
      params_axes=core.freeze(params_axes),
    )
