"""Our actions in t5x's loop."""

from collections.abc import Mapping, Sequence
from typing import Any

import flax.core
import jax
from clu import metric_writers, values
from etils import epath
from t5x import checkpoints_utils
from t5x import partitioning as t5x_partitioning
from t5x import trainer as t5x_trainer

from het_plugin.evaluation.actions import PeriodicAction
from het_plugin.hosts.t5x import partitioning
from het_plugin.training import actions as actions_lib
from het_plugin.training.state import TrainState


class HostedActions(t5x_trainer.BaseAction):
  """Runs our actions of a mode on t5x's state and metrics, in our format.

  `stopping` are the actions of all modes that have asked to stop. t5x would forget them at the next
  mode of the same step.
  """

  def __init__(
    self, actions: Sequence[actions_lib.BaseAction], stopping: list[actions_lib.BaseAction]
  ):
    self.actions = actions
    self.stopping = stopping

  def run(self, train_state: Any, metrics_by_task: Mapping[str, Mapping[str, Any]]) -> bool:
    for action in self.actions:
      if action.run(our_state(train_state), our_metrics(metrics_by_task)):
        self.stopping.append(action)
    return bool(self.stopping)


def our_state(train_state: Any) -> TrainState:
  """Step and parameters of t5x's train state; no action reads the optimizer state."""
  return TrainState(
    step=train_state.step,
    params=flax.core.unfreeze(train_state.params),
    opt_state=(),
    optimizer_def=None,
    params_axes=flax.core.freeze(train_state.params_axes),
  )


def our_metrics(metrics_by_task: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
  """Numbers instead of clu's values; values that are not numbers are left out."""

  def number(value: Any) -> float | None:
    value = value.value if isinstance(value, values.Scalar) else value
    return float(value) if hasattr(value, '__float__') and jax.numpy.ndim(value) == 0 else None

  return {
    task: {name: x for name, value in metrics.items() if (x := number(value)) is not None}
    for task, metrics in metrics_by_task.items()
  }


def hosted_actions(
  actions: Mapping[str, Sequence[actions_lib.BaseAction]] | None,
  model: Any,
  partitioner: t5x_partitioning.PjitPartitioner,
  model_dir: str,
  random_seed: int = 0,
) -> dict[str, list[HostedActions]]:
  """Our actions as the argument `train.actions` of t5x; calls their `setup`.

  Scalars of the actions go to MODEL_DIR/actions; t5x writes its own to MODEL_DIR/train.

  `actions` are {'TRAIN' | 'TRAIN_EVAL' | 'INFER_EVAL': actions}, None for none. Pass the
  model and the partitioner of the run, or equal ones.

  Raises:
    ValueError: model_dir is relative, a mode is unknown, `setup` raises it, or an action computes
      on the mesh of several processes, because t5x runs actions on process 0 only.
  """
  if not epath.Path(model_dir).is_absolute():
    raise ValueError(f'MODEL_DIR={model_dir!r} must be an absolute path: t5x takes no other')
  groups = actions_lib.parse_actions(actions)
  if not groups:
    return {}
  context = actions_lib.ActionContext(
    model,
    partitioning.ours(partitioner),
    metric_writers.create_default_writer(
      model_dir, just_logging=jax.process_index() > 0, collection='actions'
    ),
    model_dir,
    random_seed,
    # t5x evaluates after it has saved, so the steps of a checkpoint have been evaluated.
    checkpoints_utils.latest_step(model_dir) or 0,
  )
  for group in groups.values():
    for action in group:
      if jax.process_count() > 1 and isinstance(action, PeriodicAction):
        raise ValueError(
          f'{type(action).__name__} computes on the whole mesh, and with {jax.process_count()} '
          'processes t5x runs actions on the first only: leave it out, and evaluate the '
          'checkpoints afterwards (python -m het_plugin.fewshot).'
        )
      action.setup(context)
  stopping: list[actions_lib.BaseAction] = []
  return {
    mode.value: [HostedActions(groups.get(mode, ()), stopping)] for mode in actions_lib.ActionMode
  }
