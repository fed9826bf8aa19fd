"""The seqio feature converter of image classification: from a task to a model under t5x."""

from collections.abc import Mapping

import seqio

from het_plugin.data.tf_host import tf

_Spec = seqio.FeatureConverter.FeatureSpec


class ImageFeatureConverter(seqio.FeatureConverter):
  """Turns examples of image tasks into model features.

  Task features, with task_feature_lengths {'image': H, 'label': L}:
    image  float32 [H, H, C], levels in [-1, 1]
    label  int32 [l], l <= L
  Model features:
    image  float32 [H, H, C]
    label  int32 [L], padded with -1
    index  int32 [], the position of the example in the global order; noise is keyed by it
    mask   float32 [], 1 for an example, 0 for a row that does not count
  A task that lacks `index` or `mask` (one not made by add_image_task) gets the running number of
  the example on this host, and 1.

  Args:
    pack, use_custom_packing_ops: must be False; images are not packed.

  Raises:
    ValueError: packing is asked for.
  """

  TASK_FEATURES = {
    'image': _Spec(dtype=tf.float32, rank=3),
    'label': _Spec(dtype=tf.int32),
  }
  MODEL_FEATURES = {
    'image': _Spec(dtype=tf.float32, rank=3),
    'label': _Spec(dtype=tf.int32),
    'index': _Spec(dtype=tf.int32, rank=0),
    'mask': _Spec(dtype=tf.float32, rank=0),
  }
  PACKING_FEATURE_DTYPES = {}

  def __init__(self, pack: bool = False, use_custom_packing_ops: bool = False, **kwargs):
    if pack or use_custom_packing_ops:
      raise ValueError(
        'pack or use_custom_packing_ops is True; images cannot be packed: use False.'
      )
    super().__init__(pack=False, use_custom_packing_ops=False, **kwargs)

  def _convert_features(
    self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]
  ) -> tf.data.Dataset:
    side, max_labels = task_feature_lengths['image'], task_feature_lengths['label']

    def convert(number, example):
      image, label = example['image'], example['label']
      missing = max_labels - tf.shape(label)[0]
      return {
        'image': tf.ensure_shape(image, [side, side, image.shape[-1]]),
        'label': tf.ensure_shape(tf.pad(label, [[0, missing]], constant_values=-1), [max_labels]),
        'index': example.get('index', tf.cast(number % 2**31, tf.int32)),
        'mask': example.get('mask', tf.ones([], tf.float32)),
      }

    return ds.enumerate().map(convert, num_parallel_calls=tf.data.AUTOTUNE)

  def get_model_feature_lengths(self, task_feature_lengths: Mapping[str, int]) -> Mapping[str, int]:
    # Scalars have no length; seqio wants every model feature named and skips those of rank 0.
    return {**task_feature_lengths, 'index': 1, 'mask': 1}
