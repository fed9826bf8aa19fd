"""The loop over steps: train, report, evaluate, act, save; and leave in good order on SIGTERM."""

import dataclasses
import datetime
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from clu import metric_writers

from het_plugin.training import actions as actions_lib
from het_plugin.training import (
  checkpoints,
  evaluation,
  preemption,
  prefetch,
  profiling,
  step_metrics,
)
from het_plugin.training import trainer as trainer_lib
from het_plugin.training.actions import ActionMode
from het_plugin.training.train_state import TrainState

_log = logging.getLogger(__name__)

_METRIC_PREFIX = {ActionMode.TRAIN_EVAL: 'training_eval', ActionMode.INFER_EVAL: 'infer_eval'}


@dataclasses.dataclass
class TrainLoop:
  """A run in progress; `step` and `train_state` change, the rest is what it works with.

  Attributes:
    step: number of steps done, which train_state.step holds too, on the device.
    train_state: the current state.
    trainer: the compiled steps.
    batches: the training batches.
    evaluators: by the mode of the actions that follow each.
    actions: by mode.
    writer: of metrics.
    checkpointer: saves, if the run saves.
    notice: of preemption.
    profiler: of a range of steps.
    total_steps: where the run ends.
    eval_period: steps between evaluations.
    save_period: steps between checkpoints; None for a run that saves nothing.
    record: JSON values to keep with each checkpoint.
  """

  step: int
  train_state: TrainState
  trainer: trainer_lib.Trainer
  batches: prefetch.DevicePrefetcher
  evaluators: Mapping[ActionMode, evaluation.Evaluator]
  actions: actions_lib.Actions
  writer: metric_writers.MetricWriter
  checkpointer: checkpoints.Checkpointer
  notice: preemption.PreemptionNotice
  profiler: profiling.StepProfiler
  total_steps: int
  eval_period: int
  save_period: int | None
  record: Mapping[str, Any]

  def run(self, stats: step_metrics.StepMetrics) -> None:
    """Trains until total_steps, or until an action stops it.

    Raises:
      preemption.Preempted: after SIGTERM.
      ValueError: the training data set ends before.
    """
    stop = False
    while not stop and self.step < self.total_steps:
      metrics, data_wait = self._train_step()
      stop = self._report(stats.add(self.step, metrics, data_wait))
      preempted = self.notice.reached()
      evaluation_due = self._is_due(self.eval_period) and bool(self.evaluators)
      save_due = self._is_due(self.save_period)
      if not (stop or preempted or evaluation_due or save_due):
        continue
      leaving = stop or preempted or self.step == self.total_steps
      stop |= self._report(stats.flush(self.step) if leaving else stats.drain())
      with stats.paused():
        if preempted:
          self.leave(evaluated=not evaluation_due)
        if evaluation_due and not stop:
          stop = self.evaluate()
        if save_due or stop:
          self._save(evaluated=True)

  def evaluate(self) -> bool:
    """Evaluates every data set and runs the actions that follow; returns whether to stop.

    Raises:
      preemption.Preempted: after SIGTERM in the middle; the run evaluates again when it is resumed.
    """
    stop = False
    for mode, evaluator in self.evaluators.items():
      values = evaluator.run(self.trainer, self.train_state, self.notice.reached)
      if values is None:
        self.leave(evaluated=False)
      name = f'{_METRIC_PREFIX[mode]}/{evaluator.task}'
      _log.info('step %d  %s  %s', self.step, name, _format(values))
      self._write(name, self.step, values)
      stop |= actions_lib.run_actions(
        mode, self.actions, self.train_state, {evaluator.task: values}
      )
    return stop

  def leave(self, evaluated: bool) -> None:
    """Saves, waits until it is on disk, and raises Preempted."""
    self._save(evaluated)
    self.checkpointer.wait_until_finished()
    raise preemption.Preempted(self.step)

  def _is_due(self, period: int | None) -> bool:
    return period is not None and (self.step % period == 0 or self.step == self.total_steps)

  def _train_step(self) -> tuple[trainer_lib.Metrics, float]:
    waited = self.batches.wait_seconds
    batch = next(self.batches, None)
    if batch is None:
      raise ValueError(
        f'The training data set ended after {self.step} of total_steps={self.total_steps} steps.'
      )
    self.profiler.before(self.step + 1)
    with jax.profiler.StepTraceAnnotation('train', step_num=self.step + 1):
      self.train_state, metrics = self.trainer.train_step(self.train_state, batch)
    self.step += 1
    self.profiler.after(self.step, metrics)
    return metrics, self.batches.wait_seconds - waited

  def _report(self, summaries: Sequence[step_metrics.Summary]) -> bool:
    """Writes training metrics and runs the TRAIN actions on them; returns whether to stop."""
    stop = False
    for summary in summaries:
      _log.info('%s', _progress(summary, self.total_steps))
      self._write('train', summary.step, summary.values)
      metrics = {'train': summary.values}
      stop |= actions_lib.run_actions(ActionMode.TRAIN, self.actions, self.train_state, metrics)
    return stop

  def _write(self, prefix: str, step: int, values: Mapping[str, float]) -> None:
    self.writer.write_scalars(step, {f'{prefix}/{name}': value for name, value in values.items()})

  def _save(self, evaluated: bool) -> None:
    if self.save_period is None:
      return
    if not self.trainer.is_finite(self.train_state):
      # It would be what a relaunch resumes from, and push a good checkpoint out.
      _log.error('Step %d is not saved: its parameters are not finite.', self.step)
      return
    self.writer.flush()
    record = {**self.record, 'evaluated': evaluated}
    self.checkpointer.save(self.step, self.train_state, self.batches.state, record)


def _format(values: Mapping[str, float]) -> str:
  return '  '.join(f'{name}={value:.4g}' for name, value in sorted(values.items()))


def _progress(summary: step_metrics.Summary, total_steps: int) -> str:
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
