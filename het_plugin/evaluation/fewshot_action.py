"""Few-shot accuracies of a representation while it is being trained."""

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np
from absl import logging
from etils import epath
from jax.experimental import multihost_utils

from het_plugin.data import BatchIterator, DatasetConfig, get_dataset, task_info
from het_plugin.evaluation.extraction import RepresentationExtractor
from het_plugin.evaluation.fewshot import FewShotResult, check_settings, few_shot
from het_plugin.evaluation.representations import Representations
from het_plugin.training.actions import ActionContext, BaseAction, MetricsByTask
from het_plugin.training.train_state import TrainState

RESULTS_FILE = 'fewshot.jsonl'


@dataclasses.dataclass(frozen=True)
class FewShotDataset:
  """A task to evaluate on.

  Attributes:
    name: names its results.
    task: name of a single-label task.
    train_split: split that the shots are drawn from, or a slice of one, 'train[:2000]'.
    test_split: split or slice that accuracies are measured on.
    max_train, max_test: use only so many examples of the split, a fixed random choice (of an
      endless split, the first); None for all.
    resize: 'squash' or 'aspect', see DatasetConfig; None for the task's own.
  """

  name: str
  task: str
  train_split: str = 'train'
  test_split: str = 'test'
  max_train: int | None = None
  max_test: int | None = None
  resize: Literal['aspect', 'squash'] | None = None


# The second: characters that no training split shows, in faces that none uses.
DEFAULT_DATASETS = (
  FewShotDataset('digits', 'digits'),
  FewShotDataset('glyphs_heldout', 'glyphs_heldout'),
)


class FewShotAction(BaseAction):
  """Ridge regression on a layer's representations (protocol: `fewshot.py`); for mode TRAIN_EVAL.

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
    l2: float | Literal['loo'] = 'loo',
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
      l2: 'loo' or a strength.
      layer: name of the representation.
      period: steps between evaluations, at least; None for each time the loop calls.
      total_steps: the last step of training, evaluated whatever the period.

    Raises:
      ValueError: a setting out of range, or two data sets of one name.
    """
    check_settings(shots, seeds, l2)
    names = [dataset.name for dataset in datasets]
    if len(set(names)) != len(names):
      raise ValueError(f'FewShotAction.datasets must have distinct names; they are {names}.')
    if period is not None and period < 1:
      raise ValueError(f'FewShotAction.period={period} must be at least 1, or None.')
    self._image_size = image_size
    self._channels = channels
    self._batch_size = batch_size
    self._datasets = tuple(datasets)
    self._shots = tuple(shots)
    self._seeds = tuple(seeds)
    self._l2 = l2
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
    for dataset in self._datasets:
      if task_info(dataset.task).multi_label:
        raise ValueError(
          f'FewShotDataset.task={dataset.task!r} is multi-label; few-shot needs one label an image.'
        )
      for split, bound in _splits(dataset):
        with contextlib.closing(self._batches(dataset, split, bound)) as batches:
          if batches.num_batches is None and bound is None:
            raise ValueError(
              f'FewShotDataset {dataset.name!r}: split {split!r} of {dataset.task!r} is endless; '
              'set max_train or max_test.'
            )
    # All processes must agree on when to run, and process 0 is the one that writes the file.
    last_step = max((record['step'] for record in self._read()), default=-1)
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
        layer=self._layer,
        channels=self._channels,
      )
    self.results = {d.name: self._evaluate(d, train_state) for d in self._datasets}
    self._last_step = step
    self._report(step)
    return False

  def _is_due(self, step: int) -> bool:
    if self._period is None or step == self._total_steps:
      return True
    if not 0 <= self._last_step <= step:  # never yet, or the run went back to an older checkpoint
      return True
    return step - self._last_step >= self._period

  def _evaluate(self, dataset: FewShotDataset, state: TrainState) -> dict[int, FewShotResult]:
    train, test = (self._extract(dataset, split, bound, state) for split, bound in _splits(dataset))
    return few_shot(
      train.features,
      train.labels[:, 0],
      test.features,
      test.labels[:, 0],
      train_index=train.index,
      shots=self._shots,
      seeds=self._seeds,
      l2=self._l2,
    )

  def _extract(
    self, dataset: FewShotDataset, split: str, bound: int | None, state: TrainState
  ) -> Representations:
    with contextlib.closing(self._batches(dataset, split, bound)) as batches:
      return self._extractor(state.params, batches, self._batch_size, bound)

  def _batches(self, dataset: FewShotDataset, split: str, bound: int | None) -> BatchIterator:
    endless = task_info(dataset.task).splits.get(split, 0) is None
    cfg = DatasetConfig(
      mixture_or_task_name=dataset.task,
      task_feature_lengths={'image': self._image_size, 'label': 1},
      split=split,
      batch_size=self._batch_size,
      shuffle=bound is not None,  # the first of a split sorted by class would be few classes
      num_epochs=None if endless else 1,
      augment=False,
      resize=dataset.resize,
    )
    return get_dataset(cfg, self._context.partitioner.batch_rows(self._batch_size))

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
      unfinished = self._file.with_suffix('.tmp')
      unfinished.parent.mkdir(parents=True, exist_ok=True)
      unfinished.write_text(''.join(json.dumps(record) + '\n' for record in kept + records))
      unfinished.replace(self._file)

  def _read(self) -> list[dict]:
    if not self._file.exists():
      return []
    return [json.loads(line) for line in self._file.read_text().splitlines()]


def _splits(dataset: FewShotDataset) -> tuple[tuple[str, int | None], tuple[str, int | None]]:
  return (dataset.train_split, dataset.max_train), (dataset.test_split, dataset.max_test)
