"""The initial state of a training: shapes, fresh values, a warm start or a checkpoint."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import traverse_util
from jax.extend import core

from het_plugin.training import checkpoints, partitioning, warm_start
from het_plugin.training.state import TrainState

_log = logging.getLogger(__name__)

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


def with_shardings(shapes: PyTree, shardings: PyTree) -> PyTree:
  """A tree of ShapeDtypeStructs with shapes and shardings."""
  return jax.tree.map(
    lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, shardings
  )


@dataclasses.dataclass(frozen=True)
class Start:
  """Where a call of `train` begins: number of steps done, state and record."""

  step: int
  train_state: TrainState
  record: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the checkpoint, if any

  @property
  def evaluated(self) -> bool:
    """Whether the evaluations of `step` are done."""
    return self.record.get('evaluated', True)


def resume(restored: checkpoints.Restored, train_iter: Any) -> Start:
  """Begins with a checkpoint and moves the data set to the next example."""
  if restored.dataset_state is None:
    _log.warning('The checkpoint has no input position: the data set starts again.')
  else:
    train_iter.set_state(restored.dataset_state)
  return Start(int(restored.train_state.step), restored.train_state, restored.record)


def begin(
  init: Callable[[], TrainState],
  target: TrainState,
  axes: TrainState,
  restore_cfg: checkpoints.RestoreCheckpointConfig | None,
  partitioner: partitioning.PjitPartitioner,
) -> Start:
  """Begins at step 0 with a fresh state, or with the parameters of another run if one is given.

  `target` has the shapes and shardings of the state, `axes` its partition specs.
  """
  read = {}
  if restore_cfg is not None:
    read = warm_start.restore_params(restore_cfg, target.params)
  train_state = partitioner.partition(init, (), axes)()
  if read:
    flat = traverse_util.flatten_dict(train_state.params, sep='/')
    params = traverse_util.unflatten_dict(flat | dict(read), sep='/')
    # An optimizer may keep parameters in its state, such as their average.
    start = train_state.optimizer_def.optax_optimizer.init
    opt_state = partitioner.partition(start, (axes.params,), axes.opt_state)(params)
    train_state = train_state.replace(params=params, opt_state=opt_state)
  return Start(0, train_state)


def check_enough_batches(
  train_iter: Any, batch_size: int, restored: checkpoints.Restored | None, total_steps: int
) -> None:
  """Raises ValueError if the data set does not last until the end of the run."""
  if train_iter.num_batches is None:
    return
  step, position = 0, 0
  if restored is not None:
    step = int(restored.train_state.step)
    position = (restored.dataset_state or {'position': 0})['position']
  left = max(train_iter.num_batches - position // batch_size, 0)
  if left < total_steps - step:
    raise ValueError(
      f'total_steps={total_steps} must be at most {step + left}: at step {step} the training data '
      f'set has {left} batches of {batch_size} left; its num_epochs says how often it is read.'
    )
