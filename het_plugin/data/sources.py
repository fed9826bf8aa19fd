"""The interface of data sets: examples that can be read by number, metadata and vocabularies.

An example is an image with class labels or with captions.
"""

import dataclasses
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

TRAIN_SPLIT = 'train'  # the split that is augmented, and by default endless


@dataclasses.dataclass(frozen=True)
class TaskInfo:
  """Metadata of a task of images [H, W, C] with class labels 0 .. K - 1.

  Raises ValueError if the names of two classes differ in their Unicode composition only.

  multi_label: whether examples may have several labels, or none.
  channels: C.
  splits: number of examples of each split; None for an endless one.
  max_labels: the largest known number of labels per example; the 'label' length is at least this.
  label_fields: what annotations.Labels has besides class numbers.
  annotators: names of the people whose votes the labels are, or None.
  version: identifies this state of the data as well as possible without reading them; None for data
    that do not change.
  shown_names: names of the classes in tables and plots; None for class_names.
  look_alikes: maps a split and an image size to [K] sets, for each class the other classes that
    look the same in some image; None if this is not known.
  true_classes: maps a split and ids int [B] of its examples to their true classes, int [B], where
    labels may be wrong; None if these are not known.
  label_distribution: maps a split and ids to the distributions that the labels were drawn from,
    as classes int [B, C] and their probabilities [B, C]; None if it is not known.
  """

  num_classes: int
  multi_label: bool
  channels: int
  class_names: tuple[str, ...] | None
  splits: Mapping[str, int | None]
  max_labels: int = 1
  label_fields: tuple[str, ...] = ()
  annotators: tuple[str, ...] | None = None
  version: str | None = None
  shown_names: tuple[str, ...] | None = None
  look_alikes: Callable[[str, int], Sequence[frozenset[int]]] | None = dataclasses.field(
    default=None, compare=False
  )
  true_classes: Callable[[str, np.ndarray], np.ndarray] | None = dataclasses.field(
    default=None, compare=False
  )
  label_distribution: Callable[[str, np.ndarray], tuple[np.ndarray, np.ndarray]] | None = (
    dataclasses.field(default=None, compare=False)
  )

  def __post_init__(self) -> None:
    composed = {}
    for name in self.class_names or ():
      other = composed.setdefault(unicodedata.normalize('NFC', name), name)
      if other != name:
        raise ValueError(
          f'classes {other!a} and {name!a} are both written {other!r}, and differ in their Unicode '
          'composition only: give them one name'
        )

  def knows_truth(self, split: str) -> bool:
    """Whether `true_classes` has those of a whole split; those of an endless one need its seed."""
    return self.true_classes is not None and self.splits.get(split) is not None


@dataclasses.dataclass(frozen=True)
class ImageTextInfo:
  """Metadata of a task of images with captions.

  As TaskInfo; the examples are images. A source, which has texts, has no vocabulary.
  """

  channels: int
  splits: Mapping[str, int | None]
  vocabulary: str | None = None
  vocab_size: int | None = None
  version: str | None = None


class ExampleSource(Protocol):
  """Random access to the examples of a data set, by number within a split.

  A source may have `blocks(split)`: the numbers of the first examples of blocks that are read
  together, and of all, int64 [number of blocks + 1]; and `prefers_blocks`, whether an example costs
  the reading of its block.

  info: the TaskInfo, or the ImageTextInfo of a source of captions.
  """

  info: TaskInfo | ImageTextInfo

  def read(
    self, split: str, ids: np.ndarray, size: int, seed: int
  ) -> tuple[Sequence[np.ndarray | bytes | None], np.ndarray | Sequence[Sequence[str]]]:
    """Reads examples as (images, labels) or (images, captions); safe to call from any thread.

    The same arguments give the same examples.

    Args:
      split: one of info.splits.
      ids: int64 [B], in [0, info.splits[split]), or any non-negative numbers for an endless split.
      size: side of the model's square images; used by sources that can return any side.
      seed: seed of the random stream of an endless split; finite splits do not depend on it.

    Returns:
      images: [B] images [h, w, C], uint8 or float32 in [-1, 1]: an array, or a list if sides
        differ, with None for unreadable images. RGB images may be the bytes of JPEG and PNG files.
      labels: int32 [B, L], padded with -1; with info.label_fields a structured array [B] of 'label'
        [L] and these fields.
      captions: [B], the texts of each image in a fixed order. Blank texts do not count; an image
        without a text is an unreadable record.
    """

  def describe(self, split: str, example_id: int) -> str:
    """A name of the example for messages, such as the path of its file."""


class Vocabulary(Protocol):
  """What a text is encoded with.

  vocab_size: the largest id + 1, or more.
  eos_id: the id of end-of-sequence, which `encode` does not append.
  """

  @property
  def vocab_size(self) -> int: ...

  @property
  def eos_id(self) -> int: ...

  def encode(self, s: str) -> Sequence[int]:
    """The token ids of a text."""
    ...

  def decode(self, ids: Iterable[int]) -> str:
    """The text of token ids, up to the first end-of-sequence."""
    ...
