"""The images of single examples of a data set, by the ids that rows have of them."""

import dataclasses
from typing import NamedTuple

import numpy as np

from het_plugin import data
from het_plugin.data import splits, tasks
from het_plugin.evaluation import represent
from het_plugin.rows import Rows

SIDE = 96  # pixels of an image, at most


class Found(NamedTuple):
  """Some examples.

  Attributes:
    images: float32 [B, S, S, C], levels in [-1, 1], preprocessed as in an evaluation.
    labels: int32 [B, L], those of the data set, padded with -1.
    names: [B], such as the path of a file.
    readable: bool [B]; the image of one that is not is black.
  """

  images: np.ndarray
  labels: np.ndarray
  names: list[str]
  readable: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
  """The examples of a split of a task, or of a slice of one; `of` makes it."""

  task: tasks.ImageTask
  info: data.TaskInfo
  split: str

  @classmethod
  def of(cls, dataset: str, split: str) -> 'Examples':
    """Those of the flags --dataset and --split; reads no image.

    Raises:
      ValueError: the task or the split does not exist, or the images have captions.
    """
    task = tasks.get_task(represent.task_name(dataset))
    info = data.classification_info(task)
    splits.resolve(split, info.splits, task.name)
    return cls(task, info, split)

  @property
  def are_images(self) -> bool:
    """Whether the examples can be shown: features, for one, are images of other channels."""
    return self.info.channels in (1, 3)

  def named(self, rows: Rows) -> Rows:
    """Rows of these examples, with the names of the task's classes if they have none.

    Raises:
      ValueError: the rows are of other examples, as far as they say.
    """
    info, of = self.info, f'{self.task.name}, split {self.split}'
    given = rows.provenance.get('split') if 'dataset' in rows.provenance else self.split
    if given != self.split:
      raise ValueError(f'--split={self.split}: the rows are of the split {given}')
    size = info.splits[splits.resolve(self.split, info.splits).split]
    if size is not None and rows.index.max() >= size:
      raise ValueError(
        f'the rows have the example id {rows.index.max()}; ids of {of} are 0 .. {size - 1}'
      )
    names = rows.class_names or info.class_names
    if info.class_names not in (None, names):
      raise ValueError(f'the class names of the rows are not those of {self.task.name}')
    if names is not None and rows.labels.max() >= len(names):
      raise ValueError(
        f'the rows have the label {rows.labels.max()}; {self.task.name} has {len(names)} classes'
      )
    return dataclasses.replace(rows, class_names=names)

  def read(self, index: np.ndarray, size: int | None = None) -> Found:
    """Examples by id, int [B], with square images of `size` pixels, or `SIDE` if that is less."""
    info, side = self.info, min(SIDE, size or SIDE)
    split = splits.resolve(self.split, info.splits).split
    lengths = {'image': side, 'label': info.max_labels}
    reader = self.task.reader(split, lengths, augment=False, shuffle=False, seed=0, num_epochs=1)
    batch, _ = reader.read(np.asarray(index, np.int64))
    names = [self.task.examples.describe(split, int(i)) for i in index]
    return Found(batch['image'], batch['label'], names, batch['mask'] > 0)
