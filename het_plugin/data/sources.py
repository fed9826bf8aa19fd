"""What a data set is here: examples that can be read by number, and what is known beforehand.

An example is an image with class labels or with captions.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

TRAIN_SPLIT = 'train'  # the split that is augmented, and by default endless


@dataclasses.dataclass(frozen=True)
class TaskInfo:
  """What is known of a task of images with class labels, without reading its images.

  num_classes: K; labels are 0 .. K - 1.
  multi_label: whether an example may carry several labels, or none.
  channels: C of the images [H, W, C].
  class_names: K names, or None.
  splits: number of examples of each split; None for an endless one.
  max_labels: the largest number of labels of one example as far as it is known beforehand; the
    least 'label' length.
  version: what tells this state of the data from another, as far as it is known without reading
    them; None for data that do not change.
  """

  num_classes: int
  multi_label: bool
  channels: int
  class_names: tuple[str, ...] | None
  splits: Mapping[str, int | None]
  max_labels: int = 1
  version: str | None = None


@dataclasses.dataclass(frozen=True)
class ImageTextInfo:
  """What is known of a task of images with captions, without reading its images.

  channels: C of the images [H, W, C].
  splits: number of examples, which are images, of each split; None for an endless one.
  vocabulary: name of the vocabulary of the token ids; None in the info of a source, which has
    texts.
  vocab_size: number of token ids: they are 0 .. vocab_size - 1. None in the info of a source.
  version: as in TaskInfo.
  """

  channels: int
  splits: Mapping[str, int | None]
  vocabulary: str | None = None
  vocab_size: int | None = None
  version: str | None = None


class ExampleSource(Protocol):
  """Random access to the examples of a data set, by number within a split.

  info: the TaskInfo, or the ImageTextInfo of a source of captions.
  image_size: side of the square images that `read` returns; None if `read` can return any side.
  image_dtype: float32 (levels in [-1, 1], ready for a model) or uint8 (0 .. 255).
  """

  info: TaskInfo | ImageTextInfo
  image_size: int | None
  image_dtype: type[np.generic]

  def read(
    self, split: str, ids: np.ndarray, size: int, seed: int
  ) -> tuple[Sequence[np.ndarray | bytes | None], np.ndarray | Sequence[Sequence[str]]]:
    """Reads examples as (images, labels) or (images, captions), on any thread.

    The same ones for the same arguments.

    Args:
      split: one of info.splits.
      ids: int64 [B], in [0, info.splits[split]), or any non-negative ones of an endless split.
      size: side of the square images the model takes; only sources of any side need it.
      seed: names the random stream of an endless split; a finite split does not depend on it.

    Returns:
      images: [B] images [h, w, C] of image_dtype: an array, or a list if sides differ, with None
        for an unreadable one. A source of uint8 RGB images may give the bytes of JPEG and PNG files
        instead, which are decoded faster later.
      labels: int32 [B, L], padded with -1.
      captions: [B], the texts of each image in a fixed order. Blank ones do not count; an image
        without any is an unreadable record.
    """

  def describe(self, split: str, example_id: int) -> str:
    """A name by which a person finds the example, such as its file's path."""
