"""The loop over steps: train, report, evaluate, act, save, and leave when asked to."""

import copy
import dataclasses
import datetime
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from het_plugin.system import exit_codes
from het_plugin.training import actions as actions_lib
from het_plugin.training import checkpoints, evaluation, metric_writers, nonfinite, prefetch
from het_plugin.training import metrics as metrics_lib
from het_plugin.training import observer as observer_lib
from het_plugin.training import step as step_lib
from het_plugin.training.actions import ActionMode
from het_plugin.training.state import TrainState

_log = logging.getLogger(__name__)

_LINE_SECONDS = 10.0  # at most this long between two lines of the log
_NEAR = 0.1  # a temperature nearer to its start, relatively, is worth a line of the log
_METRIC_PREFIX = {ActionMode.TRAIN_EVAL: 'training_eval', ActionMode.INFER_EVAL: 'infer_eval'}


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The periods of a run, in steps; eval_steps counts batches. None saves nothing."""

  total_steps: int
  eval_steps: int
  eval_period: int
  stats_period: int
  save_period: int | None

  def is_due(self, period: int | None, step: int) -> bool:
    """Whether a period ends at a step; the last step ends all of them."""
    return period is not None and (step % period == 0 or step == self.total_steps)


@dataclasses.dataclass
class TrainLoop:
  """A run in progress; `step` and `train_state` change."""

  step: int  # number of steps done; also train_state.step, on the device
  train_state: TrainState
  schedule: Schedule
  trainer: step_lib.Trainer
  batches: prefetch.DevicePrefetcher
  evaluators: Mapping[ActionMode, evaluation.Evaluator]  # actions of the mode follow each
  actions: actions_lib.Actions
  writer: metric_writers.RunWriter
  checkpointer: checkpoints.Checkpointer
  about: Mapping[str, Any]  # the run as JSON values, which are kept with each checkpoint
  guard: nonfinite.NonFiniteGuard
  observer: observer_lib.Observer
  first_tau: float | None = None  # the temperature of step 1; None if it is not known

  def __post_init__(self):
    self._index: dict[int, jax.Array | None] = {}  # batch['index'] by step in flight
    self._next_line = 0.0  # time of the next line of the log; the first follows the first step
    self._stats: metrics_lib.StepMetrics | None = None  # None before `run`
    self._stopped = False  # by an action of TRAIN
    self._before_evaluation: tuple[int, dict[str, Any]] = (-1, {})  # step, states of the actions

  def run(self, stats: metrics_lib.StepMetrics) -> None:
    """Trains until total_steps, or until an action stops it; `stats` calls `on_step`.

    Raises:
      exit_codes.Preempted: the observer asked to stop.
      nonfinite.NonFiniteStop: a step was not finite; nothing is saved.
      checkpoints.SaveFailed: a checkpoint could not be written.
      ValueError: the training data set ends before total_steps.
    """
    self._stats = stats
    with self.observer.phase(observer_lib.STEP):
      stopped = False
      while not stopped and self.step < self.schedule.total_steps:
        stopped = self._step_and_report()

  def _step_and_report(self) -> bool:
    """One step and everything due after it; returns whether an action stops the run."""
    metrics, data_wait = self._train_step()
    stats = self._stats
    stop = self._report(stats.add(self.step, metrics, data_wait))
    preempted = self._stop_asked()
    schedule = self.schedule
    evaluation_due = bool(self.evaluators) and schedule.is_due(schedule.eval_period, self.step)
    save_due = schedule.is_due(schedule.save_period, self.step)
    ending = stop or self.step == schedule.total_steps
    if not (ending or preempted or evaluation_due or save_due):
      return False
    stop |= self._report(stats.drain() + (stats.close(self.step) if ending else []))
    self._stopped = stop
    evaluation_due |= stop and bool(self.evaluators)
    with stats.paused():
      if preempted:
        self._leave(evaluated=not evaluation_due)
      try:
        ended = evaluation_due and self.evaluate()
      except Exception:
        # The steps are not to blame. Of several processes, others may never come to save.
        if jax.process_count() == 1:
          self._save(evaluated=False)
        raise
      if save_due or stop or ended:
        self._save(evaluated=not ended)  # a restart evaluates again, and so ends again
    return stop or ended

  def _train_step(self) -> tuple[metrics_lib.Metrics, float]:
    """Dispatches one step; returns its metrics on the devices, and the seconds it waited."""
    waited = self.batches.wait_seconds
    with self.observer.phase(observer_lib.DATA):
      batch = next(self.batches, None)
    if batch is None:
      raise ValueError(
        f'The training data set ended after {self.step} of '
        f'total_steps={self.schedule.total_steps} steps.'
      )
    self.observer.before_step(self.step + 1)
    with jax.profiler.StepTraceAnnotation('train', step_num=self.step + 1):
      self.train_state, metrics = self.trainer.train_step(self.train_state, batch)
    self.step += 1
    self._index[self.step] = batch.get('index')
    self.observer.after_step(self.step, metrics)
    return metrics, self.batches.wait_seconds - waited

  def on_step(self, step: int, metrics: metrics_lib.Metrics) -> None:
    """Takes the metrics of a step on the host; later steps may have been dispatched meanwhile."""
    index = self._index.pop(step)
    if step == 1 and 'tau' in metrics:
      self.first_tau = metrics_lib.compute_metrics({'tau': metrics['tau']})['tau']
    if metrics_lib.is_finite(metrics):
      return
    if index is not None:  # collective: gathers the rows of all processes
      index = np.asarray(multihost_utils.process_allgather(index, tiled=True)).tolist()
    self.guard.report(step, metrics_lib.compute_metrics(metrics), index)

  def _report(self, summaries: Sequence[metrics_lib.Summary]) -> bool:
    """Writes training metrics and runs the TRAIN actions on them; returns whether to stop. If the
    guard stops the run, this raises its `NonFiniteStop` after the metrics have been written.
    """
    stop = False
    if self.guard.stop is not None:
      summaries = [*summaries, *self._stats.close(self.guard.stop.step)]
    for summary in summaries:
      self._say(summary)
      if summary.step == self.schedule.total_steps:
        self._say_if_tau_stayed(summary.values.get('tau'))
      self._write('train', summary.step, summary.values)
      if corrupt := self.batches.num_corrupt_records:
        self._write('data', summary.step, {'corrupt_records': corrupt})
      if self.guard.stop is None:
        stop |= self._act(ActionMode.TRAIN, {'train': summary.values})
    if self.guard.stop is not None:
      raise self.guard.stop
    if time.monotonic() >= self._next_line and (summary := self._stats.so_far()):
      self._say(summary)
    return stop

  def _say(self, summary: metrics_lib.Summary) -> None:
    _log.info('%s', _progress(summary, self.schedule.total_steps))
    self._next_line = time.monotonic() + _LINE_SECONDS

  def _say_if_tau_stayed(self, tau: float | None) -> None:
    first = self.first_tau
    # A temperature that is the same to the last bit is not learned.
    if first is not None and tau is not None and 0 < abs(tau - first) < _NEAR * first:
      _log.info(
        'tau ends at %.3f, within %.0f%% of its start, %.3f: a short run leaves it near there.',
        tau,
        100 * _NEAR,
        first,
      )

  def evaluate(self) -> bool:
    """Evaluates every data set and runs the actions that follow; returns whether to stop.

    If the observer asks to stop, it saves and raises as `run`; a resumed run evaluates again.
    """
    stop = False
    self._before_evaluation = self.step, copy.deepcopy(actions_lib.get_states(self.actions))
    for mode, evaluator in self.evaluators.items():
      with self.observer.phase(observer_lib.EVALUATE):
        values = evaluator.run(self.trainer, self.train_state, self._interrupted)
      if values is None:
        self._leave(evaluated=False)
      name = f'{_METRIC_PREFIX[mode]}/{evaluator.task}'
      shown = '  '.join(f'{key}={value:.4g}' for key, value in sorted(values.items()))
      _log.info('step %d  %s  %s', self.step, name, shown)
      self._write(name, self.step, values)
      stop |= self._act(mode, {evaluator.task: values})
    return stop

  def _write(self, prefix: str, step: int, values: Mapping[str, float]) -> None:
    self.writer.write_scalars(step, {f'{prefix}/{name}': value for name, value in values.items()})

  def _act(self, mode: ActionMode, metrics_by_task: actions_lib.MetricsByTask) -> bool:
    if not (actions := self.actions.get(mode)):
      return False
    with self.observer.phase(observer_lib.ACTIONS):
      return actions_lib.run_actions(actions, self.train_state, metrics_by_task)

  def _interrupted(self) -> bool:
    self.observer.progressed()
    return self._stop_asked()

  def _stop_asked(self) -> bool:
    """Whether to save and leave now; all processes agree. SaveFailed if the last save failed."""
    self.checkpointer.raise_failure()
    return self.observer.stop_asked()

  def _leave(self, evaluated: bool) -> None:
    """Saves, waits until it is on disk, and raises Preempted, or SaveFailed if that fails."""
    self._save(evaluated)
    with self.observer.phase(observer_lib.SAVE):
      self.checkpointer.wait_until_finished()
    raise exit_codes.Preempted(self.step)

  def _save(self, evaluated: bool) -> None:
    if self.schedule.save_period is None:
      return
    start = time.monotonic()
    step, states = self._before_evaluation
    # A resumed run repeats the evaluation, and its actions must not see a metric twice.
    repeats = not evaluated and step == self.step
    with self.observer.phase(observer_lib.SAVE):
      self.checkpointer.save(
        self.step,
        self.train_state,
        self.batches.state,
        {
          **self.about,
          'evaluated': evaluated,
          'last_evaluation': step,
          'stopped': stopped_by(self.actions, self.schedule) if self._stopped else None,
          'skipped_steps': self.guard.num_skipped,
          'actions': states if repeats else actions_lib.get_states(self.actions),
          'first_tau': self.first_tau,
          'open_period': None if self._stats is None else self._stats.open_period(),
        },
        flush=self.writer.flush,
      )
    self.observer.saved(self.step)
    self._write('train', self.step, {'timing/save_seconds': time.monotonic() - start})


def stopped_by(actions: actions_lib.Actions, schedule: Schedule) -> dict[str, list[str] | int]:
  """What has to change for a run that an action of TRAIN has stopped to go on."""
  names = [type(action).__name__ for action in actions.get(ActionMode.TRAIN, ())]
  return {'actions': names, 'total_steps': int(schedule.total_steps)}


def _progress(summary: metrics_lib.Summary, total_steps: int) -> str:
  """The line of the log for a summary."""
  values = summary.values
  eta = datetime.timedelta(
    seconds=math.ceil((total_steps - summary.step) * values['timing/ms_per_step'] / 1e3)
  )
  parts = [
    f'step {summary.step}/{total_steps} ({summary.step / total_steps:.0%})',
    f'loss {values["loss"]:.4f}',
    f'{values["timing/ms_per_step"]:.1f} ms/step',
    f'{values["timing/examples_per_second"]:.0f} examples/s',
    f'data wait {values["timing/data_wait_share"]:.0%}',
    f'ETA {eta}',
  ]
  if 'timing/mfu' in values:
    parts.append(f'MFU {values["timing/mfu"]:.1%}')
  return '  '.join(parts)
