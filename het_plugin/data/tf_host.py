"""TensorFlow for input pipelines: imported here so that it never takes an accelerator's memory."""

import tensorflow as tf

if tf.config.get_visible_devices('GPU'):
  tf.config.set_visible_devices([], 'GPU')

__all__ = ['tf']
