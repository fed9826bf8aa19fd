"""The images of single examples of a data set, by the ids that rows have of them."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from het_plugin import data
from het_plugin.data import annotations, preprocess, splits, tasks
from het_plugin.evaluation.names import naming, task_name
from het_plugin.rows import Rows

SIDE = 192  # pixels of the longer side of an image, at most


class Found(NamedTuple):
  """Some examples.

  Attributes:
    images: [B], each float32 [h, w, C] with levels in [-1, 1], whole; None if it is not readable.
    labels: int32 [B, L], from the data set. Missing ones are -1.
  """

  images: list[np.ndarray | None]
  labels: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
  """The examples of a split of a task, or of a slice of one, whose whole split is `whole`."""

  task: tasks.ImageTask
  info: data.TaskInfo
  split: str
  whole: str

  @classmethod
  def of(cls, dataset: str, split: str) -> 'Examples':
    """Opens the examples of the flags --dataset and --split; reads no image.

    Raises:
      ValueError: the task or the split does not exist, or the images have captions.
    """
    with naming(f'--dataset={dataset}'):
      task = tasks.get_task(task_name(dataset))
      info = data.classification_info(task)
    return cls(task, info, split, splits.resolve(split, info.splits, task.name).split)

  @property
  def are_images(self) -> bool:
    """Whether the examples can be shown: features, for one, are images of other channels."""
    return self.info.channels in (1, 3)

  @property
  def have_names(self) -> bool:
    """Whether a table of labels, which replaces those of the data, may name each example."""
    return hasattr(self.task.examples, 'file')

  @functools.cached_property
  def folder(self) -> Path | None:
    """The image folder whose files the examples are, or None."""
    kind, _, path = self.task.name.partition(':')
    return Path(path).resolve() if kind == 'image_folder' else None

  def named(self, rows: Rows) -> Rows:
    """Rows of these examples, with the names of the task's classes if they have none.

    Raises:
      ValueError: the rows are of other examples, as far as they say.
    """
    info = self.info
    of = f'{self.task.name}, split {self.split}'
    given = rows.provenance.get('split') if 'dataset' in rows.provenance else self.split
    if given != self.split:
      raise ValueError(f'--split={self.split}: the rows are of the split {given}')
    size = info.splits[self.whole]
    if size is not None and rows.index.max() >= size:
      raise ValueError(
        f'the rows have the example id {rows.index.max()}; ids of {of} are 0 .. {size - 1}'
      )
    if rows.by_name and info.class_names:
      with naming(f'the labels of the rows and the classes of {of}'):
        rows = rows.named(info.class_names)
    names = rows.class_names or info.class_names
    if info.class_names not in (None, names):
      raise ValueError(f'the class names of the rows are not those of {self.task.name}')
    if names is not None and rows.labels.max() >= len(names):
      raise ValueError(
        f'the rows have the label {rows.labels.max()}; {self.task.name} has {len(names)} classes'
      )
    return dataclasses.replace(rows, class_names=names)

  def name(self, index: int) -> str:
    """The name of an example, such as the path of its file as in labels.csv (docs/data.md)."""
    source = self.task.examples
    return getattr(source, 'file', source.describe)(self.whole, index)

  def read(self, index: np.ndarray, size: int | None = None) -> Found:
    """Examples by id, int [B]; drawn ones with `size` pixels, or `SIDE` without."""
    given, labels = self._raw(index, size)
    return Found([self._picture(x) for x in given], labels)

  def labels(self, index: np.ndarray) -> np.ndarray:
    """Labels int32 [B, L] of examples by id, int [B], from the data set. Missing ones are -1."""
    return self._raw(index, None)[1]

  def _raw(self, index: np.ndarray, size: int | None) -> tuple[Sequence[Any], np.ndarray]:
    """Images as they are stored, and labels."""
    ids = np.asarray(index, np.int64)
    given, annotated = self.task.examples.read(self.whole, ids, size or SIDE, 0)
    labels = annotations.Labels(self.info.max_labels)
    rows, _ = labels.rows(np.asarray(annotated), np.zeros(len(ids), np.uint64))
    return given, rows['label']

  def _picture(self, image: bytes | np.ndarray | None) -> np.ndarray | None:
    """The whole picture; a large one is made smaller."""
    if isinstance(image, bytes):
      image = preprocess.decode(image, self.task.examples.info.channels)
    if image is None:
      return None
    height, width = image.shape[:2]
    shrink = min(1.0, SIDE / max(height, width))
    size = max(1, round(shrink * height)), max(1, round(shrink * width))
    return preprocess.to_levels(preprocess.resized(image, *size))[..., :3]
