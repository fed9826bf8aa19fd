"""Data: tasks read by global position, preprocessing, vocabularies and seqio tasks.

Only vocabularies and seqio tasks import TensorFlow.
"""

import importlib

from het_plugin.data.duration import total_steps
from het_plugin.data.held_out import HeldOutDatasetConfig, get_dataset_with_held_out
from het_plugin.data.pipeline import (
  BatchIterator,
  DatasetConfig,
  classification_info,
  element_spec,
  get_dataset,
  one_pass,
  task_info,
)
from het_plugin.data.sources import ImageTextInfo, TaskInfo

# These need seqio, which imports TensorFlow, so they are imported on first use.
_LAZY = {
  'ImageFeatureConverter': 'seqio_task',
  'ImageTextFeatureConverter': 'seqio_task',
  'get_vocabulary': 'vocabularies',
  'tokenize': 'vocabularies',
}

CONFIGURABLES = {
  'augment': ('CutMix', 'Mixup', 'RandAugment', 'RandomErasing'),
  'duration': ('total_steps',),
  'held_out': ('HeldOutDatasetConfig', 'get_dataset_with_held_out'),
  'pipeline': ('DatasetConfig',),
  'preprocess': ('Flip', 'InceptionCrop', 'PadCrop'),
}
# Settings that may change between two starts of a run without changing its results
# (config/changes.py).
SAME_RESULTS = (
  'DatasetConfig.num_threads',
  'DatasetConfig.num_workers',
  'DatasetConfig.max_corrupt_fraction',
)

__all__ = [
  'BatchIterator',
  'DatasetConfig',
  'HeldOutDatasetConfig',
  'ImageFeatureConverter',
  'ImageTextFeatureConverter',
  'ImageTextInfo',
  'TaskInfo',
  'classification_info',
  'element_spec',
  'get_dataset',
  'get_dataset_with_held_out',
  'get_vocabulary',
  'one_pass',
  'task_info',
  'tokenize',
  'total_steps',
]


def __getattr__(name: str):
  if name in _LAZY:
    return getattr(importlib.import_module(f'het_plugin.data.{_LAZY[name]}'), name)
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
