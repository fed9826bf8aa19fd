"""Data: tasks read by global position, preprocessing, vocabularies and seqio tasks."""

from typing import TYPE_CHECKING

from het_plugin.system import faces

if TYPE_CHECKING:  # imported on first use: estimators need no images, and two bring TensorFlow
  from het_plugin.data import annotations, array_source, image_folder, preprocess, sources, tasks
  from het_plugin.data.pipeline import (
    BatchIterator,
    DatasetConfig,
    classification_info,
    element_spec,
    get_dataset,
    one_pass,
    task_info,
    total_steps,
  )
  from het_plugin.data.seqio_task import ImageFeatureConverter, ImageTextFeatureConverter
  from het_plugin.data.sources import ImageTextInfo, TaskInfo
  from het_plugin.data.vocabularies import get_vocabulary, tokenize

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

__getattr__, __all__ = faces.on_first_use(__name__)
