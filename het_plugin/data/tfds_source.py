"""Data sets of TensorFlow Datasets that were prepared for random access."""

import re

import numpy as np
import tensorflow_datasets as tfds

from het_plugin.data.sources import TaskInfo

# [NAMESPACE:]NAME[/CONFIG][:VERSION][/KEY=VALUE,...]; TFDS's own parser raises on anything else.
_NAME = r'([\w-]+:)?\w+(/[\w+.-]+)?(:[\d.*]+)?(/\w+=.+)?'


class TfdsSource:
  """An ExampleSource over a prepared TFDS data set: RGB images, uint8, in their own sizes.

  The data set's features must have one image and one class label, or a sequence of class labels:
  those named by its `supervised_keys`, else 'image' and 'label' or 'labels'. It is looked for where
  TFDS looks, that is in TFDS_DATA_DIR if that is set. Nothing is downloaded here: all hosts of a
  pod would do it at once.
  """

  image_size = None
  image_dtype = np.uint8

  def __init__(self, name: str):
    """Reads the data set's metadata.

    Raises:
      ValueError: unknown to TFDS, not prepared, not prepared for random access, or without image
        and label features.
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
    self._name = name
    self._image_key, self._label_key = _supervised_keys(name, builder.info)
    label = builder.info.features[self._label_key]
    multi_label = isinstance(label, tfds.features.Sequence)
    label = label.feature if multi_label else label
    self._records = builder.as_data_source(
      {split: split for split in builder.info.splits},
      # ours is decoded later, on all cores, and no other one (such as a mask) is wanted
      decoders={
        key: tfds.decode.SkipDecoding()
        for key, feature in builder.info.features.items()
        if isinstance(feature, tfds.features.Image)
      },
    )
    self.info = TaskInfo(
      num_classes=label.num_classes,
      multi_label=multi_label,
      channels=3,
      class_names=tuple(label.names),
      splits={split: info.num_examples for split, info in builder.info.splits.items()},
      version=builder.info.full_name,
    )

  def read(
    self, split: str, ids: np.ndarray, size: int, seed: int
  ) -> tuple[list[bytes], np.ndarray]:
    examples = self._records[split].__getitems__(ids.tolist())
    images = [example[self._image_key] for example in examples]
    labels = [np.atleast_1d(example[self._label_key]) for example in examples]
    padded = np.full((len(ids), max(map(len, labels), default=1)), -1, np.int32)
    for row, label in zip(padded, labels, strict=True):
      row[: len(label)] = label
    return images, padded

  def describe(self, split: str, example_id: int) -> str:
    return f'tfds:{self._name} {split}[{example_id}]'


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
