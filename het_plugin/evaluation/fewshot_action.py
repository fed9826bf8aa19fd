"""Few-shot accuracies of a representation while it is being trained."""

import json
from collections.abc import Sequence

import jax
import numpy as np
from absl import logging
from etils import epath
from jax.experimental import multihost_utils

from het_plugin.evaluation.extraction import RepresentationExtractor
from het_plugin.evaluation.fewshot import FewShotResult, Protocol, check_settings, few_shot_all
from het_plugin.evaluation.fewshot_datasets import (
  DEFAULT_DATASETS,
  FewShotDataset,
  FewShotReader,
  check_names,
)
from het_plugin.training import run_files
from het_plugin.training.actions import ActionContext, BaseAction, MetricsByTask
from het_plugin.training.train_state import TrainState

RESULTS_FILE = 'fewshot.jsonl'


class FewShotAction(BaseAction):
  """Linear models of a layer's representations (protocol: `fewshot.py`); for mode TRAIN_EVAL.

  Writes the scalars fewshot/<name>/<shots>shot, in [0, 1], and the same with _stderr (not for one
  seed), and a line for each data set and number of shots to <model_dir>/fewshot.jsonl. A resumed
  run replaces the lines of steps that it takes again. `results` holds the latest
  {name: {shots: FewShotResult}}.
  """

  def __init__(
    self,
    image_size: int,
    channels: int,
    batch_size: int = 256,
    datasets: Sequence[FewShotDataset] = DEFAULT_DATASETS,
    shots: Sequence[int] = (1, 5, 10, 25),
    seeds: Sequence[int] = (0, 1, 2),
    l2: float | str = 'loo',
    classifier: str = 'ridge',
    draw: str = 'random',
    layer: str = 'pre_logits',
    period: int | None = None,
    total_steps: int | None = None,
  ):
    """Sets the evaluation up; nothing is read or compiled yet.

    Args:
      image_size: side of the square images that the model takes, in pixels.
      channels: channels that the model takes; grey data are repeated, colours averaged.
      batch_size: global batch of the extraction.
      datasets: what to evaluate on.
      shots: examples a class.
      seeds: a subset is drawn for each.
      l2, classifier, draw: see `fewshot.Protocol`.
      layer: name of the representation.
      period: steps between evaluations, at least; None for each time the loop calls.
      total_steps: the last step of training, evaluated whatever the period.

    Raises:
      ValueError: a setting out of range, or two data sets of one name.
    """
    self._protocol = Protocol(classifier, draw, l2)
    check_settings(shots, seeds, l2, len(datasets))
    check_names(datasets, 'FewShotAction.datasets')
    if period is not None and period < 1:
      raise ValueError(f'FewShotAction.period={period} must be at least 1, or None.')
    self._image_size = image_size
    self._channels = channels
    self._batch_size = batch_size
    self._datasets = tuple(datasets)
    self._shots = tuple(shots)
    self._seeds = tuple(seeds)
    self._layer = layer
    self._period = period
    self._total_steps = total_steps
    self._extractor: RepresentationExtractor | None = None
    self.results: dict[str, dict[int, FewShotResult]] = {}

  def setup(self, context: ActionContext) -> None:
    """Checks the data sets against the mesh and finds out what an earlier run has evaluated.

    Raises:
      ValueError: a batch size that the mesh does not divide, an unknown task or split, a
        multi-label task, an endless split without a bound.
    """
    self._context = context
    self._file = epath.Path(context.model_dir) / RESULTS_FILE
    self._reader = FewShotReader(context.partitioner, self._image_size, self._batch_size)
    for dataset in self._datasets:
      self._reader.check(dataset)
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
    if self._extractor is None:
      partitioner = self._context.partitioner
      self._extractor = RepresentationExtractor(
        self._context.model,
        partitioner,
        partitioner.get_mesh_axes(train_state).params,
        layers=(self._layer,),
        channels=self._channels,
      )
    data = {
      dataset.name: self._reader.extract(dataset, self._extractor, train_state.params)
      for dataset in self._datasets
    }
    self.results = few_shot_all(data, self._protocol, shots=self._shots, seeds=self._seeds)
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
    scalars, records = {}, []
    for name, by_shots in self.results.items():
      for shots, result in by_shots.items():
        key = f'fewshot/{name}/{shots}shot'
        scalars[key] = result.mean
        if result.stderr is not None:
          scalars[f'{key}_stderr'] = result.stderr
        if result.classes_short:
          logging.warning('%s: %d classes have fewer images.', key, result.classes_short)
        records.append({'step': step, 'dataset': name, **result.record()})
    self._context.writer.write_scalars(step, scalars)
    if jax.process_index() == 0:
      kept = [record for record in self._read() if record['step'] < step]
      self._file.parent.mkdir(parents=True, exist_ok=True)
      run_files.write_text(self._file, ''.join(json.dumps(row) + '\n' for row in kept + records))

  def _read(self) -> list[dict]:
    if not self._file.exists():
      return []
    return [json.loads(line) for line in self._file.read_text().splitlines()]
