"""Data: tasks read by global position, preprocessing, vocabularies and seqio tasks."""

import importlib

# Imported on first use: estimators need no images, and only the last two import TensorFlow.
_MODULES = {
  'pipeline': (
    'BatchIterator',
    'DatasetConfig',
    'classification_info',
    'element_spec',
    'get_dataset',
    'one_pass',
    'task_info',
    'total_steps',
  ),
  'sources': ('ImageTextInfo', 'TaskInfo'),
  'seqio_task': ('ImageFeatureConverter', 'ImageTextFeatureConverter'),
  'vocabularies': ('get_vocabulary', 'tokenize'),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

CONFIGURABLES = {
  'augment': ('CutMix', 'Mixup', 'RandAugment', 'RandomErasing'),
  'pipeline': ('DatasetConfig', 'total_steps'),
  'preprocess': ('Flip', 'InceptionCrop', 'PadCrop', 'ResizeAndCrop'),
}
# Settings that may change between two starts of a run without changing its results
# (config/changes.py).
SAME_RESULTS = (
  'DatasetConfig.num_threads',
  'DatasetConfig.num_workers',
  'DatasetConfig.max_corrupt_fraction',
)

__all__ = [*_MODULE_OF]


def __getattr__(name: str):
  if name in _MODULE_OF:
    return getattr(importlib.import_module(f'het_plugin.data.{_MODULE_OF[name]}'), name)
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
