"""Zero-shot accuracies of a contrastive model while it is being trained."""

import json
from collections.abc import Sequence

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from het_plugin.evaluation import zeroshot
from het_plugin.evaluation.zeroshot_datasets import (
  DEFAULT_DATASETS,
  Tokenizer,
  ZeroShotDataset,
  ZeroShotEvaluator,
  check_model,
  check_names,
)
from het_plugin.training import run_files
from het_plugin.training.actions import ActionContext, BaseAction, MetricsByTask
from het_plugin.training.train_state import TrainState

RESULTS_FILE = 'zeroshot.jsonl'


class ZeroShotAction(BaseAction):
  """Zero-shot classification and retrieval (`zeroshot.py`); for mode TRAIN_EVAL.

  Writes the scalars zeroshot/<name>/top1 and top5, of captions zeroshot/<name>/image_to_text/
  recall1 and so on, in [0, 1], and a line for each data set to <model_dir>/zeroshot.jsonl. A
  resumed run replaces the lines of steps that it takes again. Classes are embedded anew each time.
  `results` holds the latest {name: Accuracy or Recall}.
  """

  def __init__(
    self,
    image_size: int,
    channels: int,
    tokenizer: Tokenizer,
    batch_size: int = 256,
    datasets: Sequence[ZeroShotDataset] = DEFAULT_DATASETS,
    num_samples: int = 0,
    period: int | None = None,
    total_steps: int | None = None,
  ):
    """Sets the evaluation up; nothing is read or compiled yet.

    Args:
      image_size: side of the square images that the model takes, in pixels.
      channels: channels that the model takes; grey data are repeated, colours averaged.
      tokenizer: that of the training; in gin `@run_tokenizer()`, of `@train/DatasetConfig()`.
      batch_size: global batch, of images and of texts.
      datasets: what to evaluate on.
      num_samples: see `ZeroShotEvaluator`.
      period: steps between evaluations, at least; None for each time the loop calls.
      total_steps: the last step of training, evaluated whatever the period.

    Raises:
      ValueError: a setting out of range, or two data sets of one name.
    """
    check_names(tuple(datasets), 'ZeroShotAction.datasets')
    if num_samples < 0:
      raise ValueError(f'ZeroShotAction.num_samples={num_samples} must be at least 0.')
    if period is not None and period < 1:
      raise ValueError(f'ZeroShotAction.period={period} must be at least 1, or None.')
    self._settings = {
      'tokenizer': tokenizer,
      'image_size': image_size,
      'channels': channels,
      'batch_size': batch_size,
      'num_samples': num_samples,
    }
    self._datasets = tuple(datasets)
    self._period = period
    self._total_steps = total_steps
    self._evaluator: ZeroShotEvaluator | None = None
    self.results: dict[str, zeroshot.Accuracy | zeroshot.Recall] = {}

  def setup(self, context: ActionContext) -> None:
    """Checks model and data sets and finds out what an earlier run has evaluated.

    Raises:
      ValueError: a model that is not contrastive, and as `ZeroShotEvaluator.check`.
    """
    check_model(context.model, self._settings['num_samples'])
    self._context = context
    self._file = epath.Path(context.model_dir) / RESULTS_FILE
    checker = ZeroShotEvaluator(context.model, context.partitioner, None, **self._settings)
    for dataset in self._datasets:
      checker.check(dataset)
    # All processes must agree on when to run, and process 0 is the one that writes the file.
    steps = (record['step'] for record in self._read())
    last_step = max((step for step in steps if step <= context.evaluated_step), default=-1)
    self._last_step = int(multihost_utils.broadcast_one_to_all(np.int32(last_step)))

  def run(self, train_state: TrainState, metrics_by_task: MetricsByTask) -> bool:
    """Evaluates if it is time; never stops training."""
    del metrics_by_task
    step = int(train_state.step)
    if not self._is_due(step):
      return False
    if self._evaluator is None:
      partitioner = self._context.partitioner
      specs = partitioner.get_mesh_axes(train_state).params
      self._evaluator = ZeroShotEvaluator(self._context.model, partitioner, specs, **self._settings)
    self.results = {
      dataset.name: self._evaluator(dataset, train_state.params) for dataset in self._datasets
    }
    self._last_step = step
    self._report(step)
    return False

  def _is_due(self, step: int) -> bool:
    if self._period is None or step == self._total_steps:
      return True
    if self._last_step < 0:  # never yet
      return True
    return step - self._last_step >= self._period

  def _report(self, step: int) -> None:
    scalars = {
      f'zeroshot/{name}/{key}': value
      for name, result in self.results.items()
      for key, value in result.scalars().items()
    }
    self._context.writer.write_scalars(step, scalars)
    if jax.process_index() == 0:
      records = [
        {'step': step, 'dataset': name, **result.record()} for name, result in self.results.items()
      ]
      kept = [record for record in self._read() if record['step'] < step]
      self._file.parent.mkdir(parents=True, exist_ok=True)
      run_files.write_text(self._file, ''.join(json.dumps(row) + '\n' for row in kept + records))

  def _read(self) -> list[dict]:
    if not self._file.exists():
      return []
    return [json.loads(line) for line in self._file.read_text().splitlines()]
