"""The data sets of a few-shot evaluation, and their representations by a model."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from het_plugin.data import classification_info
from het_plugin.evaluation.extraction import (
  PlacedModel,
  RepresentationExtractor,
  default_split,
  open_split,
)
from het_plugin.evaluation.fewshot import Split
from het_plugin.evaluation.names import check_names, named_task


@dataclasses.dataclass(frozen=True)
class FewShotDataset:
  """A task to evaluate on.

  Attributes:
    name: name in results.
    task: name of a single-label task.
    train_split: split that the shots are drawn from, or a slice of one, 'train[:2000]'.
    test_split: split or slice that accuracies are measured on.
    max_train, max_test: largest number of examples of the split, a fixed random choice (of an
      endless split, the first ones); None for all.
    resize: 'squash' or 'aspect', see DatasetConfig; None uses that of the task.
  """

  name: str
  task: str
  train_split: str = 'train'
  test_split: str = 'test'
  max_train: int | None = None
  max_test: int | None = None
  resize: Literal['aspect', 'squash'] | None = None

  @property
  def splits(self):
    return (self.train_split, self.max_train), (self.test_split, self.max_test)


# glyphs_heldout has characters and faces that are in no training split.
DEFAULT_DATASETS = (
  FewShotDataset('digits', 'digits'),
  FewShotDataset('glyphs_heldout', 'glyphs_heldout'),
)


def choose(
  texts: Sequence[str] | None,
  splits: Sequence[str] | None,
  bound: Sequence[FewShotDataset] | None,
) -> Sequence[FewShotDataset]:
  """The data sets of --datasets, TASK or NAME=TASK, else those that are bound, else the default.

  Without `splits` they are train, and test if the task has it, else validation.
  """
  if texts is None:
    return bound or DEFAULT_DATASETS
  chosen = []
  for text in texts:
    name, task = named_task(text)
    chosen.append(FewShotDataset(name, task, *(splits or ('train', default_split(task)))))
  check_names(chosen, '--datasets')
  return chosen


class FewShotReader:
  """Represents data sets by one layer of a model; every process calls its methods."""

  def __init__(self, run: PlacedModel, batch_size: int, layer: str):
    """Reads and compiles nothing yet; a layer with positions is averaged over them."""
    self._extractor = RepresentationExtractor(run, layers=(layer,), pool='mean')
    self._run, self._batch_size = run, batch_size

  def check(self, dataset: FewShotDataset) -> None:
    """Checks a data set before anything is compiled or any image is read."""
    if classification_info(dataset.task).multi_label:
      raise ValueError(
        f'FewShotDataset.task={dataset.task!r} is multi-label; few-shot needs one label per image.'
      )
    for split in dataset.splits:
      with self._open(dataset, *split):
        pass

  def __call__(self, dataset: FewShotDataset, params: Any) -> tuple[Split, Split]:
    """(training split, test split); `params` are the model's, placed."""
    halves = []
    for split, bound in dataset.splits:
      with self._open(dataset, split, bound) as (batches, _):
        (read,) = self._extractor.read(params, batches, self._batch_size, bound).values()
      halves.append(Split(read.features, read.label, read.index))
    return tuple(halves)

  def _open(self, dataset: FewShotDataset, split: str, bound: int | None):
    return open_split(
      *(self._run, dataset.task, split, bound),
      bound='max_train and max_test',
      max_labels=1,
      batch_size=self._batch_size,
      resize=dataset.resize,
    )
