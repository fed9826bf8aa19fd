"""One training step and one evaluation step of a model, partitioned over the mesh.

A model is any object with t5x's surface: `loss_fn(params, batch, dropout_rng)` and
`eval_fn(params, batch)` return (loss, {name: clu metric}), and metrics['loss'].count is the number
of real rows in the batch. A model whose loss compares examples with each other sets an attribute
`needs_whole_batch`.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import clu.metrics
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.linen import partitioning as flax_partitioning
from jax import lax
from jax.sharding import PartitionSpec

from het_plugin.system import ranges
from het_plugin.system.ranges import Count, Pattern
from het_plugin.training import flops, optimizers, partitioning
from het_plugin.training import metrics as metrics_lib
from het_plugin.training.state import TrainState

PyTree = Any
Batch = Mapping[str, jax.Array]
Metrics = metrics_lib.Metrics


def split_microbatches(batch: Batch, num_microbatches: int) -> Batch:
  """Cuts rows [B, ...] into microbatches [M, B / M, ...], each spread evenly over the data axis.

  Needs the mesh and the axis rules in context.
  """
  spec = flax_partitioning.logical_to_mesh_axes((None, 'batch'))

  def split(x: jax.Array) -> jax.Array:
    # Microbatch j takes the rows j, j + M, j + 2 M, ..., so every device keeps its rows. Each of M
    # contiguous pieces would lie on a part of the data axis only.
    x = x.reshape(x.shape[0] // num_microbatches, num_microbatches, *x.shape[1:])
    return lax.with_sharding_constraint(jnp.swapaxes(x, 0, 1), spec)

  return jax.tree.map(split, batch)


def accumulate_grads_microbatched(
  model: Any,
  train_state: TrainState,
  batch: Batch,
  dropout_rng: jax.Array,
  num_microbatches: int | None,
) -> tuple[PyTree, Metrics]:
  """Gradients, float32 and shaped as the parameters, and metrics of the whole batch [B, ...].

  Gradients of frozen parameters are 0. Microbatches are computed one after the other, which changes
  only rounding. B must be divisible by `num_microbatches` times the size of the data axis.
  """

  def loss(params: PyTree, microbatch: Batch) -> tuple[jax.Array, Metrics]:
    params = optimizers.stop_frozen(train_state.optimizer_def, params)
    # The same key for all microbatches: the model draws noise per example, keyed by batch['index'].
    return model.loss_fn(params, microbatch, dropout_rng)

  def value_and_grad(microbatch: Batch) -> tuple[PyTree, Metrics]:
    (_, metrics), grads = jax.value_and_grad(loss, has_aux=True)(train_state.params, microbatch)
    return jax.tree.map(lambda g: g.astype(jnp.float32), grads), metrics

  if num_microbatches is None or num_microbatches == 1:
    return value_and_grad(batch)

  # With t5x's loss_normalizing_factor the loss is a sum over rows. Otherwise it is a mean, which is
  # weighted by the number of real rows of the microbatch.
  summed = getattr(model, 'loss_normalizing_factor', None) is not None

  def step(
    carry: tuple[PyTree, jax.Array], microbatch: Batch
  ) -> tuple[tuple[PyTree, jax.Array], Metrics]:
    grad_sum, weight_sum = carry
    grads, metrics = value_and_grad(microbatch)
    weight = 1.0 if summed else jnp.asarray(metrics['loss'].count, jnp.float32)
    grad_sum = jax.tree.map(lambda total, g: total + weight * g, grad_sum, grads)
    return (grad_sum, weight_sum + weight), metrics

  zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), train_state.params)
  (grad_sum, weight_sum), stacked = lax.scan(
    step, (zeros, jnp.zeros((), jnp.float32)), split_microbatches(batch, num_microbatches)
  )
  # clu's reduce() merges over the leading axis.
  metrics = jax.tree.map(lambda metric: metric.reduce(), stacked, is_leaf=metrics_lib.is_metric)
  scale = 1.0 if summed else 1.0 / jnp.maximum(weight_sum, 1.0)
  return jax.tree.map(lambda total: total * scale, grad_sum), metrics


def learning_rate(train_state: TrainState) -> jax.Array | None:
  """Learning rate of the next update, float32 []; None if the optimizer does not state it."""
  if (schedule := train_state.optimizer_def.learning_rate_fn) is None:
    return None
  return jnp.asarray(schedule(num_updates(train_state)), jnp.float32)


def num_updates(train_state: TrainState) -> jax.Array:
  """Number of updates done; `train_state.step` also counts the steps without an update."""
  return optimizers.num_updates(train_state.opt_state, default=train_state.step)


def apply_grads(
  train_state: TrainState,
  grads: PyTree,
  metrics: Metrics,
  norm_groups: Sequence[str] = metrics_lib.GROUPS,
  halted: jax.Array | bool = False,
) -> tuple[TrainState, Metrics]:
  """One optimizer update, or none if loss, gradient or update are not finite.

  optax.apply_if_finite checks the gradients only, and its state would be in every checkpoint.

  If the step is not finite, only `step` of the state changes; if `halted`, a bool [], nothing. The
  metrics of the batch, which contain 'loss', gain `learning_rate` and `update`, an UpdateReport of
  the L2 norms `gradient_norm` (before clipping), `update_norm` and `param_norm` (after the update),
  in total and by group (`metrics.GROUPS`).
  """
  updates, opt_state = train_state.optimizer_def.optax_optimizer.update(
    grads, train_state.opt_state, train_state.params
  )
  if (rate := learning_rate(train_state)) is not None:
    metrics['learning_rate'] = clu.metrics.LastValue.from_model_output(rate[None])

  norms = metrics_lib.norms('gradient_norm', grads, norm_groups)
  norms |= metrics_lib.norms('update_norm', updates, norm_groups)
  checked = [*jax.tree.leaves(metrics['loss']), norms['gradient_norm'], norms['update_norm']]
  finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in checked]))
  applied = finite & ~jnp.asarray(halted)

  def choose(new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: lax.select(applied, x, y), new, old)

  params = choose(optax.apply_updates(train_state.params, updates), train_state.params)
  norms |= metrics_lib.norms('param_norm', params, norm_groups)
  metrics['update'] = metrics_lib.UpdateReport.from_norms(norms, finite)
  return train_state.replace(
    step=train_state.step + jnp.where(halted, 0, 1),
    params=params,
    opt_state=choose(opt_state, train_state.opt_state),
  ), metrics


def with_explicit_axes(
  model: Any, partitioner: partitioning.PjitPartitioner, params_axes: PyTree
) -> Any:
  """A copy of the model whose `loss_fn` and `eval_fn` get arrays with explicit shardings.

  Parameters that are split over the axes of the batch, too, are gathered first: a product with the
  batch would have no sharding.
  """
  batch_axes = partitioner.data_partition_spec
  of_batch = {*jax.tree.leaves(tuple(batch_axes))}

  def is_kept(axes: Any) -> bool:
    return of_batch.isdisjoint(jax.tree.leaves(axes))

  def gathered(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*(axes if is_kept(axes) else None for axes in spec))

  all_rules = partitioner.logical_axis_rules
  rules = [(name, axes) for name, axes in all_rules if name == 'batch' or is_kept(axes)]
  params_axes = jax.tree.map(gathered, params_axes, is_leaf=lambda x: isinstance(x, PartitionSpec))

  def explicit(fn: Callable[..., Any], *in_axes: PyTree) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
      with flax_partitioning.axis_rules(rules):
        return fn(*args)

    return jax.sharding.explicit_axes(run, in_sharding=in_axes)

  changed = copy.copy(model)
  changed.loss_fn = explicit(model.loss_fn, params_axes, batch_axes, PartitionSpec())
  changed.eval_fn = explicit(model.eval_fn, params_axes, batch_axes)
  return changed


class Trainer:
  """The partitioned steps of one model.

  The only training state it holds is whether training has halted at a step that was not finite.
  """

  @ranges.checked
  def __init__(
    self,
    model: Any,
    partitioner: partitioning.PjitPartitioner,
    train_state_axes: TrainState,
    rng: jax.Array,
    num_microbatches: Count | None = None,
    norm_groups: Sequence[Pattern] = metrics_lib.GROUPS,
    halt_at_nonfinite: bool = True,
  ):
    """Prepares the steps; nothing is compiled.

    Args:
      model: an object with t5x's model surface.
      partitioner: places the computation.
      train_state_axes: `partitioner.get_mesh_axes(train_state)`.
      rng: typed key; step n uses fold_in(rng, n).
      num_microbatches: number of pieces a batch is cut into to save memory; None for one.
      norm_groups: groups of parameters whose norms are metrics, see `metrics.GROUPS`.
      halt_at_nonfinite: whether the state stays unchanged after a step whose loss, gradient or
        update was not finite. The host may dispatch further steps before it knows of this one.

    Raises:
      ValueError: num_microbatches or the optimizer's `late_noise` does not fit the model.
    """
    if (num_microbatches or 1) > 1 and getattr(model, 'needs_whole_batch', False):
      raise ValueError(
        f'num_microbatches={num_microbatches} must be 1: the loss of {type(model).__name__} '
        "compares every example with the whole batch. To save memory set the backbones' remat."
      )
    self.num_microbatches = num_microbatches
    # On a mesh with explicit axes, steps have automatic ones (`PjitPartitioner.partition`).
    if partitioner.is_explicit and getattr(model, 'explicit_axes', False):
      model = with_explicit_axes(model, partitioner, train_state_axes.params)
    self._model = model
    # Optimizers that are not ours start the noise with the run.
    self._late_noise = getattr(train_state_axes.optimizer_def, 'late_noise', None)
    self._early_model = model if self._late_noise is None else self._late_noise.without_noise(model)
    self._partitioner = partitioner
    self._halted: jax.Array | np.bool_ = np.False_

    def step(
      train_state: TrainState, batch: Batch, halted: jax.Array
    ) -> tuple[TrainState, Metrics, jax.Array]:
      step_rng = jax.random.fold_in(rng, train_state.step)
      grads, metrics = self.compute_grads(train_state, batch, step_rng)
      train_state, metrics = apply_grads(train_state, grads, metrics, norm_groups, halted)
      if halt_at_nonfinite:
        halted |= ~metrics['update'].finite
      return train_state, metrics, halted

    def eval_step(model: Any) -> Callable[[PyTree, Batch], Metrics]:
      return partitioner.partition(
        lambda params, batch: model.eval_fn(params, batch)[1],
        in_axis_resources=(train_state_axes.eval_params, batch_axes),
        out_axis_resources=None,
      )

    batch_axes = partitioner.data_partition_spec
    self._train_step = partitioner.partition(
      step,
      in_axis_resources=(train_state_axes, batch_axes, None),
      out_axis_resources=(train_state_axes, None, None),
      donate_argnums=(0,),
    )
    self._eval_step = eval_step(model)
    self._early_eval_step = eval_step(self._early_model)

  def compute_grads(
    self, train_state: TrainState, batch: Batch, step_rng: jax.Array
  ) -> tuple[PyTree, Metrics]:
    """Float32 gradients shaped as the parameters, and metrics that contain 'loss'.

    Subclasses may override this. `batch` has arrays [B, ...] split over the data axis.
    """

    def grads_of(model: Any) -> tuple[PyTree, Metrics]:
      return accumulate_grads_microbatched(
        model, train_state, batch, step_rng, self.num_microbatches
      )

    if self._late_noise is None:
      return grads_of(self._model)
    return lax.cond(
      self._late_noise.has_begun(num_updates(train_state)),
      lambda: grads_of(self._model),
      lambda: grads_of(self._early_model),
    )

  def check_batch_size(self, batch_size: int) -> None:
    """Raises ValueError unless the batch divides into microbatches and shards."""
    self._partitioner.check_batch_size(batch_size, self.num_microbatches or 1)

  def trace_train(self, train_state: TrainState, batch: Batch) -> jax.stages.Traced:
    """Traces the train step for a state and a batch, given as arrays or shapes with shardings."""
    return self._train_step.trace(train_state, batch, self._halted)

  def trace_eval(self, params: PyTree, batch: Batch) -> jax.stages.Traced:
    """Traces the eval step in the same way."""
    return self._eval_step.trace(params, batch)

  def compile_train(self, traced: jax.stages.Traced) -> float:
    """Compiles the train step, a result of `trace_train`.

    Returns:
      The `count_flops` of one step over all devices.
    """
    count = flops.count_flops(traced.jaxpr.jaxpr)
    self._train_step = traced.lower().compile()
    return count

  def train_step(self, train_state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """One update. The state passed in is donated and must not be used again."""
    train_state, metrics, self._halted = self._train_step(train_state, batch, self._halted)
    return train_state, metrics

  def eval_step(self, train_state: TrainState, batch: Batch) -> Metrics:
    """Metrics of one batch."""
    late = self._late_noise
    if late is None or late.has_begun(num_updates(train_state)):
      return self._eval_step(train_state.eval_params, batch)
    return self._early_eval_step(train_state.eval_params, batch)
