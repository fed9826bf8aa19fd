"""Base of the evaluations during training: their period, and the file of their results."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from het_plugin.evaluation.names import check_names
from het_plugin.training import run_files
from het_plugin.training.actions import ActionContext, BaseAction, MetricsByTask
from het_plugin.training.state import TrainState


class Row(NamedTuple):
  """A result of one data set: its scalars by name, and what the line of the file says."""

  dataset: str
  scalars: Mapping[str, float]
  record: Mapping[str, Any]


class PeriodicAction(BaseAction):
  """Evaluates periodically on data sets; for mode TRAIN_EVAL.

  Writes the scalars KIND/<data set>/<scalar>, and a line per result to <model_dir>/KIND.jsonl. A
  resumed run replaces the lines of steps that it repeats, and continues the period of the run
  before.

  Attributes:
    kind: KIND.
  """

  kind: str

  def __init__(self, datasets: Sequence[Any], period: int | None, total_steps: int | None):
    """Sets the period.

    Args:
      datasets: what to evaluate on; each has a name.
      period: least number of steps between evaluations; None evaluates whenever the loop calls.
      total_steps: the last step of training, which is always evaluated.

    Raises:
      ValueError: the period is below 1, or two data sets have the same name.
    """
    check_names(datasets, f'{type(self).__name__}.datasets')
    if period is not None and period < 1:
      raise ValueError(f'{type(self).__name__}.period={period} must be at least 1, or None.')
    self._datasets = tuple(datasets)
    self._period = period
    self._total_steps = total_steps

  def setup(self, context: ActionContext) -> None:
    """Reads which steps an earlier run has evaluated."""
    self._context = context
    self._file = epath.Path(context.model_dir) / f'{self.kind}.jsonl'
    # All processes must agree on when to run, and only process 0 writes the file.
    steps = (record['step'] for record in self._read())
    last_step = max((step for step in steps if step <= context.evaluated_step), default=-1)
    self._last_step = int(multihost_utils.broadcast_one_to_all(np.int32(last_step)))

  def run(self, train_state: TrainState, metrics_by_task: MetricsByTask) -> bool:
    """Evaluates if the step is due; never stops training."""
    del metrics_by_task
    step = int(train_state.step)
    if self._is_due(step):
      results = self.evaluate(train_state)
      self._last_step = step
      self._context.writer.write_scalars(
        step,
        {f'{self.kind}/{x.dataset}/{k}': v for x in results for k, v in x.scalars.items()},
      )
      if jax.process_index() == 0:
        kept = [record for record in self._read() if record['step'] < step]
        rows = kept + [{'step': step, 'dataset': x.dataset, **x.record} for x in results]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        run_files.write_text(self._file, ''.join(json.dumps(row) + '\n' for row in rows))
    return False

  def evaluate(self, train_state: TrainState) -> Sequence[Row]:
    """Evaluates a state on the data sets; every process calls it."""
    raise NotImplementedError

  def _is_due(self, step: int) -> bool:
    if self._period is None or step == self._total_steps:
      return True
    if self._last_step < 0:  # never yet
      return True
    return step - self._last_step >= self._period

  def _read(self) -> list[dict[str, Any]]:
    return run_files.read_jsonl(self._file)
