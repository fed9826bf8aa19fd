"""The loop over steps: train, report, evaluate, act, save; and leave in good order on SIGTERM."""

import dataclasses
import datetime
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from clu import metric_writers

from het_plugin.operations import preemption, profiling, run_clock
from het_plugin.training import actions as actions_lib
from het_plugin.training import checkpoints, evaluation, nonfinite, prefetch, step_watch
from het_plugin.training import metrics as metrics_lib
from het_plugin.training import step as step_lib
from het_plugin.training.actions import ActionMode
from het_plugin.training.state import TrainState

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
    clock: is told what the loop does.
    watch: of the single steps.
  """

  step: int
  train_state: TrainState
  trainer: step_lib.Trainer
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
  clock: run_clock.RunClock
  watch: step_watch.StepWatch

  def run(self, stats: metrics_lib.StepMetrics) -> None:
    """Trains until total_steps, or until an action stops it.

    Args:
      stats: whose `on_step` is that of the loop.

    Raises:
      preemption.Preempted: after SIGTERM.
      nonfinite.NonFiniteStop: for a step that was not finite; nothing is saved.
      checkpoints.SaveFailed: soon after a checkpoint could not be written.
      ValueError: the training data set ends before.
    """
    with self.clock.phase(run_clock.STEP):
      self._run(stats)

  def _run(self, stats: metrics_lib.StepMetrics) -> None:
    stop = False
    while not stop and self.step < self.total_steps:
      metrics, data_wait = self._train_step()
      stop = self._report(stats.add(self.step, metrics, data_wait), stats)
      preempted = self._stop_asked()
      evaluation_due = self._is_due(self.eval_period) and bool(self.evaluators)
      save_due = self._is_due(self.save_period)
      if not (stop or preempted or evaluation_due or save_due):
        continue
      leaving = stop or preempted or self.step == self.total_steps
      stop |= self._report(stats.flush(self.step) if leaving else stats.drain(), stats)
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
      checkpoints.SaveFailed: a checkpoint could not be written.
    """
    stop = False
    for mode, evaluator in self.evaluators.items():
      with self.clock.phase(run_clock.EVALUATE):
        values = evaluator.run(self.trainer, self.train_state, self._interrupted)
      if values is None:
        self.leave(evaluated=False)
      name = f'{_METRIC_PREFIX[mode]}/{evaluator.task}'
      _log.info('step %d  %s  %s', self.step, name, _format(values))
      self._write(name, self.step, values)
      stop |= self._act(mode, {evaluator.task: values})
    return stop

  def _interrupted(self) -> bool:
    self.clock.tick()
    return self._stop_asked()

  def _stop_asked(self) -> bool:
    """Whether to save and leave now: after SIGTERM, or when a save failed, which saving again then
    says. All processes agree.
    """
    if self.checkpointer.failed:
      self.notice.request()
    return self.notice.reached()

  def _act(self, mode: ActionMode, metrics_by_task: actions_lib.MetricsByTask) -> bool:
    if not self.actions.get(mode):
      return False
    with self.clock.phase(run_clock.ACTIONS):
      return actions_lib.run_actions(mode, self.actions, self.train_state, metrics_by_task)

  def leave(self, evaluated: bool) -> None:
    """Saves, waits until it is on disk, and raises Preempted, or SaveFailed if that fails."""
    self._save(evaluated)
    with self.clock.phase(run_clock.SAVE):
      self.checkpointer.wait_until_finished()
    raise preemption.Preempted(self.step)

  def _is_due(self, period: int | None) -> bool:
    return period is not None and (self.step % period == 0 or self.step == self.total_steps)

  def _train_step(self) -> tuple[metrics_lib.Metrics, float]:
    waited, dataset_state = self.batches.wait_seconds, self.batches.state
    with self.clock.phase(run_clock.DATA):
      batch = next(self.batches, None)
    if batch is None:
      raise ValueError(
        f'The training data set ended after {self.step} of total_steps={self.total_steps} steps.'
      )
    self.profiler.before(self.step + 1)
    with jax.profiler.StepTraceAnnotation('train', step_num=self.step + 1):
      self.train_state, metrics = self.trainer.train_step(self.train_state, batch)
    self.step += 1
    self.watch.dispatched(self.step, batch, dataset_state)
    self.clock.tick(self.step)
    self.profiler.after(self.step, metrics)
    return metrics, self.batches.wait_seconds - waited

  def on_step(self, step: int, metrics: metrics_lib.Metrics) -> None:
    """Has the watch look at a step whose metrics are on the host."""
    self.watch.finished(step, metrics, self._now)

  def _now(self) -> nonfinite.RunState:
    return nonfinite.RunState(
      self.step, self.train_state, self.batches.state, self._record(evaluated=True)
    )

  def _report(
    self, summaries: Sequence[metrics_lib.Summary], stats: metrics_lib.StepMetrics
  ) -> bool:
    """Writes training metrics and runs the TRAIN actions on them; returns whether to stop.

    Raises:
      nonfinite.NonFiniteStop: the watch stops the run; all its metrics are written.
    """
    stop = False
    if self.watch.stop is not None:
      summaries = [*summaries, *stats.close(self.watch.stop.step)]
    for summary in summaries:
      _log.info('%s', _progress(summary, self.total_steps))
      self._write('train', summary.step, summary.values)
      if corrupt := self.batches.num_corrupt_records:
        self._write('data', summary.step, {'corrupt_records': corrupt})
      if self.watch.stop is None:
        stop |= self._act(ActionMode.TRAIN, {'train': summary.values})
    if self.watch.stop is not None:
      raise self.watch.stop
    return stop

  def _write(self, prefix: str, step: int, values: Mapping[str, float]) -> None:
    self.writer.write_scalars(step, {f'{prefix}/{name}': value for name, value in values.items()})

  def _save(self, evaluated: bool) -> None:
    if self.save_period is not None:
      start = time.monotonic()
      with self.clock.phase(run_clock.SAVE):
        self.checkpointer.save(
          self.step,
          self.train_state,
          self.batches.state,
          self._record(evaluated),
          flush=self.writer.flush,
        )
      self.clock.saved(self.step)
      self._write('train', self.step, {'timing/save_seconds': time.monotonic() - start})

  def _record(self, evaluated: bool) -> dict[str, Any]:
    return {
      **self.record,
      'evaluated': evaluated,
      'skipped_steps': self.watch.num_skipped,
      'actions': actions_lib.get_states(self.actions),
    }


def _format(values: Mapping[str, float]) -> str:
  return '  '.join(f'{name}={value:.4g}' for name, value in sorted(values.items()))


def _progress(summary: metrics_lib.Summary, total_steps: int) -> str:
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
