"""The initial state of a training: shapes, fresh values, a warm start or a checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import traverse_util
from jax.extend import core

from het_plugin.training import checkpoints, partitioning, warm_start
from het_plugin.training.state import TrainState

PyTree = Any


def init_fn(
  model: Any, element_spec: Mapping[str, jax.ShapeDtypeStruct], rng: jax.Array
) -> Callable[[], TrainState]:
  """A function that creates the fresh state of a model for batches of these shapes.

  The model is traced here, once.
  """
  shapes = {name: spec.shape for name, spec in element_spec.items()}
  types = {name: spec.dtype for name, spec in element_spec.items()}

  def create() -> TrainState:
    return TrainState.create(model.optimizer_def, model.get_initial_variables(rng, shapes, types))

  traced, state = jax.make_jaxpr(create, return_shape=True)()
  make = core.jaxpr_as_fun(traced)
  return lambda: jax.tree.unflatten(jax.tree.structure(state), make())


def placed(
  init: Callable[[], TrainState], partitioner: partitioning.PjitPartitioner
) -> tuple[TrainState, TrainState]:
  """PartitionSpecs, and shapes with shardings, of the state that `init` creates."""
  shapes = jax.eval_shape(init)
  axes = partitioner.get_mesh_axes(shapes)
  return axes, jax.tree.map(
    lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
    shapes,
    partitioner.shardings(axes),
  )


def begin(
  init: Callable[[], TrainState],
  target: TrainState,
  axes: TrainState,
  restore_cfg: checkpoints.RestoreCheckpointConfig | None,
  partitioner: partitioning.PjitPartitioner,
  model: Any,
  names: Sequence[str] | None = None,
) -> TrainState:
  """The state at step 0: fresh, or with the parameters of another run if one is given.

  `target` has the shapes and shardings of the state, `axes` its partition specs. `names` are
  the names of the task's classes.
  """
  read = {}
  if restore_cfg is not None:
    read = warm_start.restore_params(restore_cfg, target.params, model=model, names=names)
  train_state = partitioner.partition(init, (), axes)()
  if read:
    flat = traverse_util.flatten_dict(train_state.params, sep='/')
    params = traverse_util.unflatten_dict(flat | dict(read), sep='/')
    # An optimizer may keep parameters in its state, such as their average.
    start = train_state.optimizer_def.optax_optimizer.init
    opt_state = partitioner.partition(start, (axes.params,), axes.opt_state)(params)
    train_state = train_state.replace(params=params, opt_state=opt_state)
  return train_state


def check_enough_batches(
  train_iter: Any, batch_size: int, restored: checkpoints.RunState | None, total_steps: int
) -> None:
  """Raises ValueError if the data set does not last until the end of the run."""
  if train_iter.num_examples is None:
    return
  step = 0 if restored is None else restored.step
  dataset_state = None if restored is None else restored.dataset_state
  position = 0 if dataset_state is None else dataset_state['position']
  # Not from the number of batches: the run may have had another batch size up to here.
  left = len(range(position, train_iter.num_examples, batch_size))
  if left < total_steps - step:
    raise ValueError(
      f'total_steps={total_steps} must be at most {step + left}: at step {step} the training data '
      f'set has {left} batches of {batch_size} left; its num_epochs says how often it is read.'
    )
