"""Data sets of few-shot evaluations, of checkpoints and during training."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from het_plugin import data
from het_plugin import rows as rows_lib
from het_plugin.evaluation.names import check_names, named_task, naming
from het_plugin.measures import fewshot
from het_plugin.runs.run import Run, default_split


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
    resize: 'squash' or 'aspect', see DatasetConfig; None uses the task's own.
  """

  name: str
  task: str
  train_split: str = 'train'
  test_split: str = 'test'
  max_train: int | None = None
  max_test: int | None = None
  resize: Literal['aspect', 'squash'] | None = None

  @property
  def splits(self) -> tuple[tuple[str, int | None], ...]:
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
    with naming(f'--datasets={text}'):
      data.classification_info(task)
    train, test = splits or ('train', default_split(task))
    chosen.append(FewShotDataset(name, task, train, test))
  check_names(chosen, '--datasets')
  return chosen


def check(run: Run, dataset: FewShotDataset, batch_size: int) -> None:
  """Checks a data set before anything is compiled or any image is read."""
  info = data.classification_info(dataset.task)
  if info.multi_label and not info.annotators and 'label_weight' not in info.label_fields:
    raise ValueError(
      f'FewShotDataset.task={dataset.task!r} is multi-label; few-shot needs one label per '
      'image, or votes with annotator or label_weight.'
    )
  for split, bound in dataset.splits:
    with run.open_split(split, bound, **_settings(dataset, batch_size)):
      pass


def read(
  run: Run, dataset: FewShotDataset, layer: str, batch_size: int
) -> tuple[fewshot.Split, fewshot.Split]:
  """(training split, test split), represented by a layer whose positions are averaged.

  Every process calls it.
  """
  column = rows_lib.column(layer)
  halves: list[fewshot.Split] = []
  for split, bound in dataset.splits:
    settings = _settings(dataset, batch_size)
    rows = run.rows(split, (column,), max_examples=bound, **settings)
    halves.append(split_of(rows, f'{dataset.task}, split {split}', column))
  train, test = halves
  return train, test


def split_of(rows: rows_lib.Rows, name: str, column: str = 'features') -> fewshot.Split:
  """A column with one label a row (`Rows.consensus`); an error of the labels has the name."""
  with naming(name):
    return fewshot.Split(rows[column], rows.consensus, rows.index)


def _settings(dataset: FewShotDataset, batch_size: int) -> dict[str, Any]:
  max_labels = data.classification_info(dataset.task).max_labels
  settings = {'batch_size': batch_size, 'max_labels': max_labels, 'resize': dataset.resize}
  return {'task': dataset.task, 'bound': 'max_train and max_test', **settings}
