"""TensorFlow for input pipelines; configured so that it never uses accelerator memory."""

import tensorflow as tf

if tf.config.get_visible_devices('GPU'):
  tf.config.set_visible_devices([], 'GPU')

__all__ = ['tf']
