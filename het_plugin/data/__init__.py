"""Data: tasks read by global position, preprocessing, vocabularies and seqio tasks."""

from het_plugin.system import faces

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

__all__ = [name for names in _MODULES.values() for name in names]
__getattr__ = faces.on_first_use(__name__, _MODULES)
