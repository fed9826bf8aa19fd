"""Data: seqio tasks read by global position, image preprocessing and the feature converter.

Importing this package imports no TensorFlow; the tasks do, when the first one is asked for.
"""

from het_plugin.data.duration import total_steps
from het_plugin.data.pipeline import (
  BatchIterator,
  DatasetConfig,
  element_spec,
  get_dataset,
  one_pass,
  task_info,
)
from het_plugin.data.sources import TaskInfo

__all__ = [
  'BatchIterator',
  'DatasetConfig',
  'ImageFeatureConverter',
  'TaskInfo',
  'element_spec',
  'get_dataset',
  'one_pass',
  'task_info',
  'total_steps',
]


def __getattr__(name: str):
  # A seqio class: its base class cannot be had without importing TensorFlow.
  if name == 'ImageFeatureConverter':
    from het_plugin.data.feature_converter import ImageFeatureConverter

    return ImageFeatureConverter
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
