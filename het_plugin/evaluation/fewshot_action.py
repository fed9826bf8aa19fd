"""Few-shot accuracies of a model while it trains."""

from collections.abc import Sequence

from absl import logging

from het_plugin.evaluation.extraction import RepresentationExtractor
from het_plugin.evaluation.fewshot import FewShotResult, Protocol, check_settings, few_shot_all
from het_plugin.evaluation.fewshot_datasets import (
  DEFAULT_DATASETS,
  FewShotDataset,
  FewShotReader,
)
from het_plugin.evaluation.periodic_action import PeriodicAction, Row
from het_plugin.training.actions import ActionContext
from het_plugin.training.state import TrainState


class FewShotAction(PeriodicAction):
  """Fits linear classifiers to a layer's representations (`fewshot.py`) during training.

  The scalars are <shots>shot, in [0, 1], with more than one seed also <shots>shot_stderr; there is
  a line per data set and number of shots. `results` holds the latest {name: {shots:
  FewShotResult}}.
  """

  kind = 'fewshot'

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
    """Checks the settings; nothing is read or compiled yet.

    Args:
      image_size: side of the square images that the model takes, in pixels.
      channels: number of channels that the model takes; grey images are repeated, colours averaged.
      batch_size: global batch of the extraction.
      datasets: data sets to evaluate on.
      shots: examples per class.
      seeds: one subset is drawn for each.
      l2, classifier, draw: see `fewshot.Protocol`.
      layer: name of the representation.
      period, total_steps: see `PeriodicAction`.

    Raises:
      ValueError: a setting is out of range, or two data sets have the same name.
    """
    super().__init__(datasets, period, total_steps)
    self._protocol = Protocol(classifier, draw, l2)
    check_settings(shots, seeds, l2, len(datasets))
    self._image_size = image_size
    self._channels = channels
    self._batch_size = batch_size
    self._shots = tuple(shots)
    self._seeds = tuple(seeds)
    self._layer = layer
    self._extractor: RepresentationExtractor | None = None
    self.results: dict[str, dict[int, FewShotResult]] = {}

  def setup(self, context: ActionContext) -> None:
    """Checks the data sets against the mesh and reads what an earlier run has evaluated.

    Raises:
      ValueError: a batch size that the mesh does not divide, an unknown task or split, a
        multi-label task, an endless split without a bound.
    """
    super().setup(context)
    self._reader = FewShotReader(context.partitioner, self._image_size, self._batch_size)
    for dataset in self._datasets:
      self._reader.check(dataset)

  def evaluate(self, train_state: TrainState) -> list[Row]:
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
    rows = []
    for name, by_shots in self.results.items():
      for shots, result in by_shots.items():
        key = f'{shots}shot'
        scalars = {key: result.mean}
        if result.stderr is not None:
          scalars[f'{key}_stderr'] = result.stderr
        if result.classes_short:
          logging.warning('%s, %s: %d classes have fewer images.', name, key, result.classes_short)
        rows.append(Row(name, scalars, result.record()))
    return rows
