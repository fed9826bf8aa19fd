"""Rows of features as a task of the trainer: images of one pixel whose channels are the features.

A batch has image [B, 1, 1, D], which the backbone `Mlp` takes as [B, D], so that everything that
handles images (order, mixtures of tasks, slices, seqio, evaluation) handles features.
"""

import os
import zlib

import numpy as np

from het_plugin.data import representations
from het_plugin.data.array_source import VALIDATION_FRACTION, ArraySource, fixed_split
from het_plugin.data.sources import TaskInfo

_SAMPLED_ROWS = 100  # for the version of the data


def features_source(source: str) -> ArraySource:
  """Features and labels of a file.

  The splits are those of an array 'split' of strings in a .npz file. Without it a fixed tenth of
  the rows is 'validation' and the rest 'train'; 'all' has all rows. Features of a .npy file stay on
  disk and are read row by row.

  Args:
    source: as in `representations.read_representations`.

  Raises:
    ValueError: as there, or labels are missing.
  """
  read = representations.read_representations(source)
  splits = _splits(source, len(read.features))
  labels = read.labels
  num_classes = int(labels.max()) + 1 if read.class_names is None else len(read.class_names)
  images = read.features[:, None, None]  # [N, 1, 1, D]
  spaced = np.linspace(0, len(images) - 1, _SAMPLED_ROWS).astype(int)
  checksum = zlib.crc32(labels.tobytes(), zlib.crc32(images[spaced].tobytes()))
  info = TaskInfo(
    num_classes=num_classes,
    multi_label=labels.shape[1] > 1,
    channels=images.shape[-1],
    class_names=read.class_names,
    splits={name: len(rows) for name, rows in splits.items()},
    max_labels=labels.shape[1],
    version=f'{images.shape[0]} x {images.shape[-1]} {checksum:08x}',
  )
  return ArraySource(f'features:{source}', lambda: (images, labels), splits, info)


def _splits(source, num_rows):
  """Row numbers of each split."""
  path, named = representations.partition_source(source)
  if named is None and os.path.isfile(path) and representations.split_names(path):
    with np.load(path, allow_pickle=False) as arrays:
      name_of_row = arrays['split'].astype(str)
    if name_of_row.shape == (num_rows,):
      return {str(name): np.flatnonzero(name_of_row == name) for name in np.unique(name_of_row)}
  held_out, kept = fixed_split(num_rows, VALIDATION_FRACTION)
  return {'train': kept, 'validation': held_out, 'all': np.arange(num_rows)}
