"""One training step and one evaluation step of a model, partitioned over the mesh.

A model is any object with t5x's surface: `loss_fn(params, batch, dropout_rng) -> (loss, {name: clu
metric})` and `eval_fn(params, batch) -> (loss, {name: clu metric})`, where metrics['loss'].count is
the number of real rows in the batch given.
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import clu.metrics
import jax
import jax.numpy as jnp
import optax
from flax.linen import partitioning as flax_partitioning
from jax import lax

from het_plugin.training import flops, partitioning
from het_plugin.training.train_state import TrainState

PyTree = Any
Batch = Mapping[str, jax.Array]
Metrics = dict[str, clu.metrics.Metric]


def is_metric(x: Any) -> bool:
  return isinstance(x, clu.metrics.Metric)


def merge_metrics(a: Metrics, b: Metrics) -> Metrics:
  """Merges two mappings of the same metrics, of which `a` is the earlier."""
  return jax.tree.map(lambda x, y: x.merge(y), a, b, is_leaf=is_metric)


def split_microbatches(batch: Batch, num_microbatches: int) -> Batch:
  """Cuts rows [B, ...] into microbatches [M, B / M, ...], each spread evenly over the data axis.

  Microbatch j takes the rows j, j + M, j + 2 M, ...: every device keeps the rows it has, whereas M
  contiguous pieces would each lie on a part of the data axis only. Needs the mesh and the axis
  rules in context.
  """
  spec = flax_partitioning.logical_to_mesh_axes((None, 'batch'))

  def split(x: jax.Array) -> jax.Array:
    x = x.reshape(x.shape[0] // num_microbatches, num_microbatches, *x.shape[1:])
    return lax.with_sharding_constraint(jnp.swapaxes(x, 0, 1), spec)

  return jax.tree.map(split, batch)


def accumulate_grads_microbatched(
  model: Any, params: PyTree, batch: Batch, dropout_rng: jax.Array, num_microbatches: int | None
) -> tuple[PyTree, Metrics]:
  """Gradients and metrics of the whole batch, computed one microbatch after the other.

  The number of microbatches changes nothing but rounding: the mean loss of a microbatch counts with
  its number of real rows, a loss that the model normalises by a constant (t5x's
  `loss_normalizing_factor`) is a sum already, and the key is the same for all because noise is
  keyed by batch['index'] inside the model.

  Args:
    model: has t5x's `loss_fn`.
    params: float32.
    batch: arrays [B, ...] split over the data axis.
    dropout_rng: the key of this step.
    num_microbatches: M, which with the data axis divides B; None or 1 for none.

  Returns:
    Float32 gradients shaped as params, and the merged metrics.
  """

  def value_and_grad(microbatch: Batch) -> tuple[PyTree, Metrics]:
    (_, metrics), grads = jax.value_and_grad(model.loss_fn, has_aux=True)(
      params, microbatch, dropout_rng
    )
    return jax.tree.map(lambda g: g.astype(jnp.float32), grads), metrics

  if num_microbatches is None or num_microbatches == 1:
    return value_and_grad(batch)

  summed = getattr(model, 'loss_normalizing_factor', None) is not None

  def step(carry, microbatch):
    grad_sum, weight_sum = carry
    grads, metrics = value_and_grad(microbatch)
    weight = 1.0 if summed else jnp.asarray(metrics['loss'].count, jnp.float32)
    grad_sum = jax.tree.map(lambda total, g: total + weight * g, grad_sum, grads)
    return (grad_sum, weight_sum + weight), metrics

  zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
  (grad_sum, weight_sum), stacked = lax.scan(
    step, (zeros, jnp.zeros((), jnp.float32)), split_microbatches(batch, num_microbatches)
  )
  # reduce() is clu's merge over a leading axis.
  metrics = jax.tree.map(lambda metric: metric.reduce(), stacked, is_leaf=is_metric)
  scale = 1.0 if summed else 1.0 / jnp.maximum(weight_sum, 1.0)
  return jax.tree.map(lambda total: total * scale, grad_sum), metrics


def train_step(
  model: Any,
  train_state: TrainState,
  batch: Batch,
  dropout_rng: jax.Array,
  num_microbatches: int | None,
) -> tuple[TrainState, Metrics]:
  """One optimizer update.

  Returns:
    The new state, and the model's metrics with the global L2 norms `gradient_norm` (before
    clipping), `update_norm` and `param_norm` (after the update), and `learning_rate`.
  """
  grads, metrics = accumulate_grads_microbatched(
    model, train_state.params, batch, dropout_rng, num_microbatches
  )
  updates, opt_state = train_state.optimizer_def.optax_optimizer.update(
    grads, train_state.opt_state, train_state.params
  )
  params = optax.apply_updates(train_state.params, updates)
  norms = {'gradient_norm': grads, 'update_norm': updates, 'param_norm': params}
  for name, tree in norms.items():
    metrics[name] = clu.metrics.Average.from_model_output(optax.tree.norm(tree))
  if (learning_rate_fn := train_state.optimizer_def.learning_rate_fn) is not None:
    learning_rate = jnp.asarray(learning_rate_fn(train_state.step), jnp.float32)
    metrics['learning_rate'] = clu.metrics.LastValue.from_model_output(learning_rate[None])
  return train_state.replace(step=train_state.step + 1, params=params, opt_state=opt_state), metrics


@dataclasses.dataclass(frozen=True)
class Compilation:
  """What compiling the train step took and gave.

  Attributes:
    seconds: of tracing, lowering and compiling.
    flops: of one step over all devices; matrix products and convolutions only, see
      `flops.count_flops`.
  """

  seconds: float
  flops: float


class Trainer:
  """The partitioned steps of one model; holds no training state."""

  def __init__(
    self,
    model: Any,
    partitioner: partitioning.PjitPartitioner,
    train_state_axes: TrainState,
    rng: jax.Array,
    num_microbatches: int | None = None,
  ):
    """Prepares the steps; nothing is compiled.

    Args:
      model: an object with t5x's model surface.
      partitioner: places the computation.
      train_state_axes: `partitioner.get_mesh_axes(train_state)`.
      rng: typed key; step n draws from fold_in(rng, n).
      num_microbatches: pieces a batch is cut into to save memory; None for one.
    """
    if num_microbatches is not None and num_microbatches < 1:
      raise ValueError(f'num_microbatches={num_microbatches} must be at least 1, or None.')
    self.num_microbatches = num_microbatches
    self._partitioner = partitioner

    def step(train_state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
      step_rng = jax.random.fold_in(rng, train_state.step)
      return train_step(model, train_state, batch, step_rng, num_microbatches)

    def eval_step(params: PyTree, batch: Batch) -> Metrics:
      _, metrics = model.eval_fn(params, batch)
      return metrics

    def is_finite(params: PyTree) -> jax.Array:
      return jnp.isfinite(optax.tree.norm(params))

    batch_axes = partitioner.data_partition_spec
    self._train_step = partitioner.partition(
      step,
      in_axis_resources=(train_state_axes, batch_axes),
      out_axis_resources=(train_state_axes, None),
      donate_argnums=(0,),
    )
    self._eval_step = partitioner.partition(
      eval_step,
      in_axis_resources=(train_state_axes.params, batch_axes),
      out_axis_resources=None,
    )
    self._is_finite = partitioner.partition(
      is_finite, in_axis_resources=(train_state_axes.params,), out_axis_resources=None
    )

  def check_batch_size(self, batch_size: int) -> None:
    """Raises ValueError unless the batch cuts into microbatches and shards."""
    self._partitioner.check_batch_size(batch_size, self.num_microbatches or 1)

  def trace_train(self, train_state: TrainState, batch: Batch) -> jax.stages.Traced:
    """The train step for a state and a batch, of which shapes with shardings suffice."""
    return self._train_step.trace(train_state, batch)

  def trace_eval(self, params: PyTree, batch: Batch) -> jax.stages.Traced:
    """The eval step for parameters and a batch, of which shapes with shardings suffice."""
    return self._eval_step.trace(params, batch)

  def compile_train(self, train_state: TrainState, batch: Batch) -> Compilation:
    """Compiles the train step for a state and a batch, of which shapes with shardings suffice."""
    start = time.monotonic()
    traced = self.trace_train(train_state, batch)
    count = flops.count_flops(traced.jaxpr.jaxpr)
    self._train_step = traced.lower().compile()
    return Compilation(seconds=time.monotonic() - start, flops=count)

  def train_step(self, train_state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """One update; the state passed in is donated and must not be used again."""
    return self._train_step(train_state, batch)

  def eval_step(self, train_state: TrainState, batch: Batch) -> Metrics:
    """Metrics of one batch."""
    return self._eval_step(train_state.params, batch)

  def is_finite(self, train_state: TrainState) -> bool:
    """Whether no parameter is NaN or infinite."""
    return bool(self._is_finite(train_state.params))
