"""Actions run between training steps and may stop training; names are as in t5x."""

import abc
import dataclasses
import enum
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils

from het_plugin.system import ranges
from het_plugin.training import partitioning
from het_plugin.training.state import TrainState

_log = logging.getLogger(__name__)

MetricsByTask = Mapping[str, Mapping[str, float]]


class ActionMode(enum.StrEnum):
  """When an action runs."""

  TRAIN = 'TRAIN'  # every stats_period, on the training metrics of that period
  TRAIN_EVAL = 'TRAIN_EVAL'  # after each train-eval
  INFER_EVAL = 'INFER_EVAL'  # after each infer-eval


@dataclasses.dataclass(frozen=True)
class ActionContext:
  """The argument of `BaseAction.setup`."""

  model: Any
  partitioner: partitioning.PjitPartitioner
  # has the methods of clu's MetricWriter; all processes may call it, only process 0 writes
  writer: Any
  model_dir: str
  random_seed: int
  # evaluations up to this step are done; later ones will be done, again if necessary
  evaluated_step: int = 0
  # names of metrics by task, as in metrics_by_task; {} or () where they are not known
  metrics: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
  # shapes of the training's batches, by feature, such as 'image'; {} where they are not known
  input_shapes: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
  # how images are made for evaluation, as `DatasetConfig.resize`; None for each task's own way
  resize: Any = None


class BaseAction(abc.ABC):
  """An action; it runs on every process, so that it may use the whole mesh."""

  def setup(self, context: ActionContext) -> None:
    """Called once before the first step."""
    del context

  @abc.abstractmethod
  def run(self, train_state: TrainState, metrics_by_task: MetricsByTask) -> bool:
    """Runs the action; returns True to stop training.

    Args:
      train_state: the current state. Do not keep it: the next step donates its buffers.
      metrics_by_task: {task: {metric: value}}; the task of training metrics is 'train'.
    """

  def get_state(self) -> Any:
    """JSON value that a resumed run passes to `set_state`; None if the action has no state."""
    return None

  def set_state(self, state: Any) -> None:
    """Restores a state of `get_state`; called after `setup` if there is one."""
    del state


Actions = Mapping[ActionMode, Sequence[BaseAction]]


def parse_actions(actions: Mapping[str, Sequence[BaseAction]] | None) -> Actions:
  """Maps t5x's string keys to modes; raises ValueError for an unknown key."""
  for key in actions or {}:
    if key not in ActionMode.__members__:
      raise ValueError(
        f'Unknown action mode {key!r}; valid are {", ".join(ActionMode.__members__)}.'
      )
  return {ActionMode(key): tuple(group) for key, group in (actions or {}).items()}


def run_actions(
  actions: Sequence[BaseAction], train_state: TrainState, metrics_by_task: MetricsByTask
) -> bool:
  """Runs actions; all processes return whether process 0 wants to stop."""
  stop = False
  for action in actions:
    stop |= bool(action.run(train_state, metrics_by_task))
  if jax.process_count() > 1:
    stop = bool(multihost_utils.broadcast_one_to_all(np.asarray(stop)))
  return stop


def get_states(actions: Actions) -> dict[str, Any]:
  """States of all actions that have one, by a name made of mode, position and class."""
  states = {name: action.get_state() for name, action in _named(actions)}
  return {name: state for name, state in states.items() if state is not None}


def set_states(actions: Actions, states: Mapping[str, Any]) -> None:
  """Restores the result of `get_states`; an action without a saved state starts afresh."""
  for name, action in _named(actions):
    if name in states:
      action.set_state(states[name])


def _named(actions: Actions) -> list[tuple[str, BaseAction]]:
  return [
    (f'{mode}/{index}/{type(action).__name__}', action)
    for mode, group in actions.items()
    for index, action in enumerate(group)
  ]


def _metric(metrics_by_task: MetricsByTask, task: str, metric: str) -> float:
  """Looks up a metric; a missing one is an error, because the action would never do anything."""
  if task not in metrics_by_task:
    raise ValueError(f'Unknown task {task!r}; valid are {", ".join(sorted(metrics_by_task))}.')
  _check_metric(task, metric, metrics_by_task[task])
  return metrics_by_task[task][metric]


def _check_metric(task: str, metric: str, valid: Collection[str]) -> None:
  if metric not in valid:
    valid = ', '.join(sorted(valid))
    raise ValueError(f'Task {task!r} has no metric {metric!r}; valid are {valid}.')


def _check(setting: str, task: str, metric: str, context: ActionContext) -> None:
  if context.metrics and task not in context.metrics:
    raise ValueError(f'{setting} has the task {task!r}; it must be {" or ".join(context.metrics)}')
  if valid := context.metrics.get(task):
    _check_metric(task, metric, valid)


class TerminateOnNanAction(BaseAction):
  """Stops training when a metric is NaN or infinite."""

  def __init__(self, task: str = 'train', metric: str = 'loss'):
    self._task = task
    self._metric = metric

  def setup(self, context: ActionContext) -> None:
    _check('TerminateOnNanAction.task', self._task, self._metric, context)

  def run(self, train_state: TrainState, metrics_by_task: MetricsByTask) -> bool:
    value = _metric(metrics_by_task, self._task, self._metric)
    if math.isfinite(value):
      return False
    _log.error('Stopping: %s of %s is %s.', self._metric, self._task, value)
    return True


class EarlyStoppingAction(BaseAction):
  """Stops training when none of the last `patience` values of a metric improved on its predecessor.

  An improvement is a change in the better direction by more than atol + rtol * |predecessor|, or
  from infinity or NaN to a number.
  """

  @ranges.checked
  def __init__(
    self,
    metric: tuple[str, str],
    mode: Literal['min', 'max'],
    patience: Annotated[int, '[2, inf)'] = 3,
    atol: Annotated[float, '[0, inf)'] = 0.0,
    rtol: Annotated[float, '[0, inf)'] = 0.0,
  ):
    """Watches the metric (task, metric); `mode` is the better direction."""
    self._task, self._metric = metric
    self._watched = [*metric, mode]
    self._sign = 1.0 if mode == 'min' else -1.0
    self._patience = patience
    self._atol = atol
    self._rtol = rtol
    self._history: list[float] = []  # last values, with a sign that makes smaller better

  def setup(self, context: ActionContext) -> None:
    _check('EarlyStoppingAction.metric', self._task, self._metric, context)

  def get_state(self) -> dict[str, list]:
    return {'watched': self._watched, 'history': self._history}

  def set_state(self, state: dict[str, list]) -> None:
    if state['watched'] == self._watched:  # values of another metric tell nothing of this one
      self._history = state['history']

  def run(self, train_state: TrainState, metrics_by_task: MetricsByTask) -> bool:
    value = _metric(metrics_by_task, self._task, self._metric)
    self._history = [*self._history, self._sign * value][-self._patience :]
    if len(self._history) < self._patience:
      return False
    pairs = zip(self._history[:-1], self._history[1:], strict=True)
    if any(self._improved(before, now) for before, now in pairs):
      return False
    _log.warning('Stopping: %s of %s has not improved.', self._metric, self._task)
    return True

  def _improved(self, before: float, now: float) -> bool:
    if not math.isfinite(before):
      return math.isfinite(now)
    return now < before - self._atol - self._rtol * abs(before)
