"""The seqio feature converters for image classification and image-text training under t5x."""

from collections.abc import Mapping

import seqio

from het_plugin.data.tf_host import tf

_Spec = seqio.FeatureConverter.FeatureSpec


class _ImageConverter(seqio.FeatureConverter):
  """Base of both converters; subclasses name the feature beside the image and its padding."""

  ANNOTATION: str
  PADDING: int
  PACKING_FEATURE_DTYPES = {}

  def __init__(self, pack: bool = False, use_custom_packing_ops: bool = False, **kwargs):
    if pack or use_custom_packing_ops:
      raise ValueError(
        'pack or use_custom_packing_ops is True; images cannot be packed: use False.'
      )
    super().__init__(pack=False, use_custom_packing_ops=False, **kwargs)

  def __call__(
    self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]
  ) -> tf.data.Dataset:
    # Only seqio's evaluator gives lengths of index and mask; tasks need not have these features.
    lengths = {
      name: length for name, length in task_feature_lengths.items() if name not in ('index', 'mask')
    }
    return super().__call__(ds, lengths)

  def _convert_features(
    self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]
  ) -> tf.data.Dataset:
    name = self.ANNOTATION
    side, length = task_feature_lengths['image'], task_feature_lengths[name]

    def convert(number, example):
      image, row = example['image'], example[name]
      missing = length - tf.shape(row)[0]
      padded = tf.pad(row, [[0, missing]], constant_values=self.PADDING)
      return {
        'image': tf.ensure_shape(image, [side, side, image.shape[-1]]),
        name: tf.ensure_shape(padded, [length]),
        'index': tf.reshape(example.get('index', tf.cast(number % 2**31, tf.int32)), []),
        'mask': tf.reshape(example.get('mask', tf.ones([], tf.float32)), []),
      }

    return ds.enumerate().map(convert, num_parallel_calls=tf.data.AUTOTUNE)

  def get_model_feature_lengths(self, task_feature_lengths: Mapping[str, int]) -> Mapping[str, int]:
    # seqio needs an entry for every model feature and skips those of rank 0.
    return {**task_feature_lengths, 'index': 1, 'mask': 1}


def _task_features(annotation: str) -> dict[str, _Spec]:
  return {'image': _Spec(dtype=tf.float32, rank=3), annotation: _Spec(dtype=tf.int32)}


def _model_features(annotation: str) -> dict[str, _Spec]:
  return {
    **_task_features(annotation),
    'index': _Spec(dtype=tf.int32, rank=0),
    'mask': _Spec(dtype=tf.float32, rank=0),
  }


class ImageFeatureConverter(_ImageConverter):
  """Turns examples of image tasks into model features.

  Task features, with task_feature_lengths {'image': H, 'label': L}:
    image  float32 [H, H, C], levels in [-1, 1]
    label  int32 [l], l <= L
  Model features:
    image  float32 [H, H, C]
    label  int32 [L], padded with -1
    index  int32 [], the position of the example in the global order, which keys its noise
    mask   float32 [], 1 for examples, 0 for rows that do not count
  If a task lacks `index` and `mask` (it was not made by add_image_task), they are the running
  number of the example on this host, and 1.

  Args:
    pack, use_custom_packing_ops: must be False; images are not packed.

  Raises:
    ValueError: pack or use_custom_packing_ops is True.
  """

  ANNOTATION = 'label'
  PADDING = -1
  TASK_FEATURES = _task_features('label')
  MODEL_FEATURES = _model_features('label')


class ImageTextFeatureConverter(_ImageConverter):
  """Turns examples of image-text tasks into model features.

  As ImageFeatureConverter, with task_feature_lengths {'image': H, 'text': L} and, instead of label,
    text  int32 [l], l <= L, token ids that end with end-of-sequence (1)
  which the model gets as int32 [L], padded with 0.

  Args:
    pack, use_custom_packing_ops: must be False; images are not packed.

  Raises:
    ValueError: pack or use_custom_packing_ops is True.
  """

  ANNOTATION = 'text'
  PADDING = 0
  TASK_FEATURES = _task_features('text')
  MODEL_FEATURES = _model_features('text')
