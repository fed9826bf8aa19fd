"""Data sets of TensorFlow Datasets that were prepared for random access."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from het_plugin.data import preprocess
from het_plugin.data.sources import ImageTextInfo, TaskInfo

# [NAMESPACE:]NAME[/CONFIG][:VERSION][/KEY=VALUE,...]; TFDS's own parser raises on anything else.
_NAME = r'([\w-]+:)?\w+(/[\w+.-]+)?(:[\d.*]+)?(/\w+=.+)?'
_CAPTION_KEYS = ('captions', 'caption', 'text')


class TfdsSource:
  """An ExampleSource over a prepared TFDS data set: images of 1, 3 or 4 channels, uint8, in their
  own sizes.

  The data set's features must have one image and one class label, or a sequence of class labels:
  those named by its `supervised_keys`, else 'image' and 'label' or 'labels'. It is searched in the
  folders of TFDS, which are TFDS_DATA_DIR if that is set. Nothing is downloaded, because all hosts
  of a pod would do it at once.
  """

  def __init__(self, name: str):
    """Reads the data set's metadata.

    Raises:
      ValueError: the data set is unknown to TFDS, not prepared, not prepared for random access, or
        without image and label features.
    """
    self._name = f'tfds:{name}'
    builder = _prepared_builder(name)
    self._image_key, self._label_key = _supervised_keys(name, builder.info)
    label = builder.info.features[self._label_key]
    multi_label = isinstance(label, tfds.features.Sequence)
    label = label.feature if multi_label else label
    self._records = _records(builder)
    self.info = TaskInfo(
      num_classes=label.num_classes,
      multi_label=multi_label,
      channels=_channels(self._name, builder.info.features[self._image_key]),
      class_names=tuple(label.names),
      splits=_splits(builder),
      version=builder.info.full_name,
    )

  def read(
    self, split: str, ids: np.ndarray, size: int, seed: int
  ) -> tuple[list[bytes], np.ndarray]:
    examples = [self._records[split][i] for i in ids]  # __getitems__ starts threads
    images = [example[self._image_key] for example in examples]
    labels = [np.atleast_1d(example[self._label_key]) for example in examples]
    padded = np.full((len(ids), max(map(len, labels), default=1)), -1, np.int32)
    for row, label in zip(padded, labels, strict=True):
      row[: len(label)] = label
    return images, padded

  def describe(self, split: str, example_id: int) -> str:
    return f'{self._name} {split}[{example_id}]'


class TfdsCaptionSource:
  """An ExampleSource over a prepared TFDS data set of images with captions.

  As TfdsSource with other features: 'image', and the first of 'captions', 'caption' and 'text' that
  exists, unless `supervised_keys` names others. The captions are a text, a sequence of texts, or a
  sequence of records with a field 'text' or 'caption', as in COCO.
  """

  def __init__(self, name: str):
    """Reads the data set's metadata.

    Raises:
      ValueError: the data set is unknown to TFDS, not prepared, not prepared for random access, or
        without image and caption features.
    """
    self._name = f'tfds_captions:{name}'
    builder = _prepared_builder(name)
    self._image_key, self._caption_path = _caption_keys(name, builder.info)
    self._records = _records(builder)
    self.info = ImageTextInfo(
      channels=_channels(self._name, builder.info.features[self._image_key]),
      splits=_splits(builder),
      version=builder.info.full_name,
    )

  def read(
    self, split: str, ids: np.ndarray, size: int, seed: int
  ) -> tuple[list[bytes], list[list[str]]]:
    examples = [self._records[split][i] for i in ids]  # __getitems__ starts threads
    return [example[self._image_key] for example in examples], list(map(self._texts, examples))

  def describe(self, split: str, example_id: int) -> str:
    return f'{self._name} {split}[{example_id}]'

  def _texts(self, example: Mapping[str, Any]) -> list[str]:
    value = example
    for key in self._caption_path:
      value = value[key]
    # Bytes that are not UTF-8 become lone surrogates, which readers of captions refuse.
    return [text.decode('utf-8', 'surrogateescape') for text in np.atleast_1d(value).tolist()]


def exists(name: str) -> bool:
  """Whether TFDS knows a data set of this name, prepared or not."""
  return re.fullmatch(_NAME, name) is not None and _builder(name) is not None


def _builder(name: str) -> tfds.core.DatasetBuilder | None:
  try:
    return tfds.builder(name)
  except tfds.core.DatasetNotFoundError:
    return None


def _supervised_keys(name: str, info: tfds.core.DatasetInfo) -> tuple[str, str]:
  """The names of the image feature and of the label feature."""
  features = dict(info.features.items())
  default = ('image', 'label' if 'label' in features else 'labels')
  image, label = info.supervised_keys or default
  label_feature = features.get(label)
  if isinstance(label_feature, tfds.features.Sequence):
    label_feature = label_feature.feature
  if not (
    isinstance(features.get(image), tfds.features.Image)
    and isinstance(label_feature, tfds.features.ClassLabel)
  ):
    raise ValueError(
      f"tfds:{name} needs an 'image' and a class 'label' (or a sequence of class labels); its "
      f'features are {sorted(features)}.'
    )
  return image, label


def _prepared_builder(name: str) -> tfds.core.DatasetBuilder:
  """The builder of a data set that can be read by number.

  Raises:
    ValueError: the data set is unknown to TFDS, not prepared, or not prepared for random access.
  """
  builder = _builder(name)
  if builder is None:
    raise ValueError(f'tfds:{name}: TensorFlow Datasets knows no such data set.')
  if not builder.is_prepared():
    raise ValueError(
      f'tfds:{name} is not prepared in {builder.data_dir}; run: tfds build {name} '
      f'--file_format=array_record'
    )
  random_access = tfds.core.FileFormat.with_random_access()
  if not builder.info.available_file_formats() & random_access:
    raise ValueError(
      f'tfds:{name} is in a format without random access; run: tfds convert_format '
      f'--dataset_version_dir={builder.data_dir} --out_file_format=array_record'
    )
  return builder


def _records(builder: tfds.core.DatasetBuilder) -> Mapping[str, Any]:
  """The examples of each split by number, with images as the bytes of their files."""
  return builder.as_data_source(
    {split: split for split in builder.info.splits},
    # The image is decoded later; other images, such as masks, are not needed.
    decoders={
      key: tfds.decode.SkipDecoding()
      for key, feature in builder.info.features.items()
      if isinstance(feature, tfds.features.Image)
    },
  )


def _channels(name: str, image: tfds.features.Image) -> int:
  """Of the images; ValueError for images that are not uint8, or have 2 or more than 4 channels."""
  if image.shape[-1] not in preprocess.MODES or image.np_dtype != np.uint8:
    raise ValueError(
      f'{name} has images {image.np_dtype} {image.shape}; they must be uint8, with 1, 3 or 4 '
      'channels.'
    )
  return image.shape[-1]


def _splits(builder: tfds.core.DatasetBuilder) -> dict[str, int]:
  return {split: info.num_examples for split, info in builder.info.splits.items()}


def _caption_keys(name: str, info: tfds.core.DatasetInfo) -> tuple[str, tuple[str, ...]]:
  """The name of the image feature, and the path to the captions' texts."""
  features = dict(info.features.items())
  given = [(info.supervised_keys or ('image', None))[1]]
  image = 'image' if 'image' in features else (info.supervised_keys or ('image',))[0]
  for key in [*given, *_CAPTION_KEYS]:
    path = _text_path(features.get(key))
    if path is not None and isinstance(features.get(image), tfds.features.Image):
      return image, (key, *path)
  raise ValueError(
    f"tfds_captions:{name} needs an 'image' and texts in one of {list(_CAPTION_KEYS)}; it has the "
    f'features {sorted(features)}.'
  )


def _text_path(feature: Any) -> tuple[str, ...] | None:
  """The keys below a feature that lead to its texts; None if there are none."""
  if isinstance(feature, tfds.features.Sequence):
    feature = feature.feature
  if isinstance(feature, tfds.features.FeaturesDict):
    keys = [key for key in ('text', 'caption') if key in feature and _text_path(feature[key]) == ()]
    return (keys[0],) if keys else None
  is_text = isinstance(feature, tfds.features.Tensor) and feature.np_dtype == np.object_
  return () if is_text else None
