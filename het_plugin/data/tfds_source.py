"""Data sets of TensorFlow Datasets that were prepared for random access.

They are searched in the folders of TFDS, which are TFDS_DATA_DIR if that is set. Nothing is
downloaded, because all hosts of a pod would do it at once.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from het_plugin.data import preprocess, tfds_names
from het_plugin.data.sources import ImageTextInfo, TaskInfo

_CAPTION_KEYS = ('captions', 'caption', 'text')


class _Prepared:
  """The examples of a prepared data set, by number, with images as the bytes of their files."""

  def __init__(self, name: str):
    """Reads the data set's metadata; ValueError if it is not here or lacks what is needed."""
    self._name = f'{self.PREFIX}:{name}'
    builder = _prepared_builder(name)
    features = dict(builder.info.features.items())
    self._image_key, self._path = self._keys(features, builder.info.supervised_keys)
    image = features[self._image_key]
    if image.shape[-1] not in preprocess.MODES or image.np_dtype != np.uint8:
      raise ValueError(
        f'{self._name} has images {image.np_dtype} {image.shape}; they must be uint8, with 1, 3 or '
        '4 channels.'
      )
    # The image is decoded later; other images, such as masks, are not needed.
    images = [key for key, x in features.items() if isinstance(x, tfds.features.Image)]
    self._records = builder.as_data_source(
      {split: split for split in builder.info.splits},
      decoders={key: tfds.decode.SkipDecoding() for key in images},
    )
    self.info = self._info(
      features,
      channels=image.shape[-1],
      splits={split: info.num_examples for split, info in builder.info.splits.items()},
      version=builder.info.full_name,
    )

  def describe(self, split: str, example_id: int) -> str:
    return f'{self._name} {split}[{example_id}]'

  def _read(self, split: str, ids: np.ndarray) -> tuple[list[bytes], list[Any]]:
    """Images, and labels or captions."""
    records = self._records[split]
    examples = [records[i] for i in ids]  # __getitems__ would start threads
    values = []
    for value in examples:
      for key in self._path:
        value = value[key]
      values.append(np.atleast_1d(value))
    return [example[self._image_key] for example in examples], values


class TfdsSource(_Prepared):
  """An ExampleSource of images of 1, 3 or 4 channels, uint8, in their own sizes, with class labels.

  The data set's features must have one image and one class label, or a sequence of class labels:
  those named by its `supervised_keys`, else 'image' and 'label' or 'labels'.
  """

  PREFIX = 'tfds'

  def read(
    self, split: str, ids: np.ndarray, size: int, seed: int
  ) -> tuple[list[bytes], np.ndarray]:
    images, labels = self._read(split, ids)
    padded = np.full((len(ids), max(map(len, labels), default=1)), -1, np.int32)
    for row, label in zip(padded, labels, strict=True):
      row[: len(label)] = label
    return images, padded

  def _keys(self, features: Mapping[str, Any], supervised: Any) -> tuple[str, tuple[str]]:
    default = ('image', 'label' if 'label' in features else 'labels')
    image, label = supervised or default
    if not (
      isinstance(features.get(image), tfds.features.Image)
      and isinstance(_element(features.get(label)), tfds.features.ClassLabel)
    ):
      raise ValueError(
        f"{self._name} needs an 'image' and a class 'label' (or a sequence of class labels); its "
        f'features are {sorted(features)}.'
      )
    return image, (label,)

  def _info(self, features: Mapping[str, Any], **common: Any) -> TaskInfo:
    label = features[self._path[0]]
    names = _element(label).names
    several = isinstance(label, tfds.features.Sequence)
    return TaskInfo(num_classes=len(names), multi_label=several, class_names=tuple(names), **common)


class TfdsCaptionSource(_Prepared):
  """An ExampleSource of such images with captions.

  The features must be 'image', and the first of 'captions', 'caption' and 'text' that exists,
  unless `supervised_keys` names others. The captions are a text, a sequence of texts, or a sequence
  of records with a field 'text' or 'caption', as in COCO.
  """

  PREFIX = 'tfds_captions'

  def read(
    self, split: str, ids: np.ndarray, size: int, seed: int
  ) -> tuple[list[bytes], list[list[str]]]:
    images, captions = self._read(split, ids)
    # Bytes that are not UTF-8 become lone surrogates, which readers of captions refuse.
    return images, [[x.decode('utf-8', 'surrogateescape') for x in texts] for texts in captions]

  def _keys(self, features: Mapping[str, Any], supervised: Any) -> tuple[str, tuple[str, ...]]:
    given_image, given = supervised or ('image', None)
    image = 'image' if 'image' in features else given_image
    for key in (given, *_CAPTION_KEYS):
      path = _text_path(features.get(key))
      if path is not None and isinstance(features.get(image), tfds.features.Image):
        return image, (key, *path)
    raise ValueError(
      f"{self._name} needs an 'image' and texts in one of {list(_CAPTION_KEYS)}; it has the "
      f'features {sorted(features)}.'
    )

  def _info(self, features: Mapping[str, Any], **common: Any) -> ImageTextInfo:
    return ImageTextInfo(**common)


def exists(name: str) -> bool:
  """Whether TFDS knows a data set of this name, prepared or not."""
  return _builder(name) is not None


def _builder(name: str) -> tfds.core.DatasetBuilder | None:
  if not tfds_names.is_valid(name):
    return None
  try:
    return tfds.builder(name)
  except tfds.core.DatasetNotFoundError:
    return None
  except (AssertionError, TypeError, ValueError) as error:  # of other versions, configs, settings
    reason = ' '.join(str(error).split())
    raise ValueError(f'tfds:{name} cannot be opened: {reason}') from error


def _prepared_builder(name: str) -> tfds.core.DatasetBuilder:
  builder = _builder(name)
  if builder is None:
    raise ValueError(f'tfds:{name}: TensorFlow Datasets knows no such data set.')
  if not builder.is_prepared():
    raise ValueError(
      f'tfds:{name} is not prepared in {builder.data_dir}; run: tfds build {name} '
      f'--file_format=array_record'
    )
  if not builder.info.available_file_formats() & tfds.core.FileFormat.with_random_access():
    raise ValueError(
      f'tfds:{name} is in a format without random access; run: tfds convert_format '
      f'--dataset_version_dir={builder.data_dir} --out_file_format=array_record'
    )
  return builder


def _element(feature: Any) -> Any:
  """A feature; for a sequence, the feature of its elements."""
  return feature.feature if isinstance(feature, tfds.features.Sequence) else feature


def _text_path(feature: Any) -> tuple[str, ...] | None:
  """The keys below a feature that lead to its texts; None if there are none."""
  feature = _element(feature)
  if isinstance(feature, tfds.features.FeaturesDict):
    keys = [key for key in ('text', 'caption') if key in feature and _text_path(feature[key]) == ()]
    return (keys[0],) if keys else None
  is_text = isinstance(feature, tfds.features.Tensor) and feature.np_dtype == np.object_
  return () if is_text else None
