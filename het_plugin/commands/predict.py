"""Predicts the classes of images without labels.

    python -m het_plugin.predict --checkpoint=runs/het_xl --dataset=photos --csv=predictions.csv

prints the most probable classes of each image with their probabilities, and the entropy of the
predictive distribution in nats. --dataset is an image file, a folder that is searched for .jpg and
.png files, or a .npz file with an array 'image' [N, H, W] or [N, H, W, C] of uint8, or of floats in
[0, 1]. Images that cannot be read are left out. A file of predictions, as
`het_plugin.evaluate --save_predictions` writes them, may take the place of checkpoint and data set.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from het_plugin import data, measures, reporting, runs
from het_plugin.cli.settings import Batches, Gin, JsonFile
from het_plugin.rows import Rows, files
from het_plugin.system.ranges import Count

_log = logging.getLogger(__name__)
_SPLIT = 'all'
_SHOWN = 20  # rows of the printed table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Gin, Batches, JsonFile):
  """What predicts, and for which images.

  Attributes:
    checkpoint: A run's directory, a checkpoint in it, or a file of predictions.
    dataset: An image file, a folder of images, or a .npz file.
    top: Classes per image at most.
    csv: Where all rows are written as CSV.
  """

  checkpoint: str | None = None
  dataset: str | None = None
  top: Count = 5
  csv: str | None = None


def run(settings: Settings) -> reporting.Report:
  """The most probable classes of each image."""
  checkpoint = settings.checkpoint
  if not checkpoint:
    raise ValueError('--checkpoint is needed')
  if files.is_file(checkpoint):
    of_runs = 'dataset', 'batch_size', 'gin_file', 'gin_bindings'
    settings.refuse(of_runs, f'--checkpoint={checkpoint}, a file of predictions')
    rows = runs.sources.open_source(checkpoint).rows(columns=('log_prob',))
    found = most_probable(rows, settings.top)
  else:
    if not settings.dataset:
      raise ValueError(f'--dataset is needed for the run --checkpoint={checkpoint}')
    images = Images(settings.dataset)  # before the model: its path may be wrong
    settings.join()
    source = runs.Checkpoint.find(checkpoint)
    source.check_trained()
    opened = runs.open_run(source, *settings.gin)
    found = predict(opened, images, settings.top, settings.batch_size)
  return reporting.Report(
    title='Predictions',
    introduction=table(found),
    json=found,
    writers={'csv': functools.partial(write_csv, found)},
  )


class Images:
  """Images without labels, as a `data.sources.ExampleSource`.

  Attributes:
    path: where they are.
    names: what each image is called.
    files: one per image; none if the images are an array.
    is_array: whether they are an array.
  """

  info: data.TaskInfo | data.ImageTextInfo

  def __init__(self, path: str):
    """Lists the files, or reads the array, of the flag --dataset of `het_plugin.predict`."""
    # These names of the same data are those of the other commands.
    self.path = path
    root = Path(str(path).removeprefix('image_folder:').removeprefix('npz:'))
    channels = 3
    self.files = []
    if not root.exists():
      raise ValueError(
        f'--dataset={path}: there is no such file or folder (a task is for het_plugin.evaluate)'
      )
    self.is_array = root.suffix == '.npz'
    if self.is_array:
      self._images = data.array_source.read_images(str(root))
      *_, width, channels = self._images.shape
      if channels == 1 and width in data.preprocess.MODES:
        raise ValueError(
          f'{path}: image is [H, W, C]; write [N, H, W, C], with N = 1 for one image'
        )
      self.names = [str(i) for i in range(len(self._images))]
    else:
      found = root.rglob('*') if root.is_dir() else [root]
      self.files = data.image_folder.image_files([x for x in found if x.is_file()])
      # A name may have bytes that are not text, which no file of results can hold.
      self.names = [os.fsencode(x).decode('utf-8', 'backslashreplace') for x in self.files]
    if not self.names:
      raise ValueError(
        f'--dataset={path} holds no images: a .npz file or files of '
        f'{", ".join(data.image_folder.SUFFIXES)}'
      )
    # Only a multi-label task may have images without a label.
    self.info = data.TaskInfo(1, True, channels, None, {_SPLIT: len(self.names)})

  def read(self, split: str, ids: np.ndarray, size: int, seed: int) -> tuple[list, np.ndarray]:
    images = (
      self._images[ids]
      if self.is_array
      else [data.image_folder.read_bytes(self.files[i]) for i in ids]
    )
    return images, np.full((len(ids), 1), -1, np.int32)

  def describe(self, split: str, example_id: int) -> str:
    return self.names[example_id]


def predict(
  run: runs.Run, images: str | Images, top: int = 5, batch_size: int = 256
) -> list[dict[str, Any]]:
  """The most probable classes of images, by the run's evaluation integrator.

  Photographs are preprocessed as in the evaluation of the run's task. Images of a run whose task
  has images of one size are resized to that size. All processes call this. `images` may be their
  path; this and the other arguments are flags of `het_plugin.predict`.

  Returns:
    A row per readable image, as `most_probable`.

  Raises:
    ValueError: the model has no classes of its own.
  """
  if not hasattr(run.model, 'predictive'):
    raise ValueError(
      f'{run.checkpoint} is a contrastive model, whose classes are texts: use zeroshot'
    )
  from het_plugin.data import tasks

  images = Images(images) if isinstance(images, str) else images
  if run.class_names is None:
    _log.warning('Classes have numbers: %s has no names', Path(run.checkpoint).parent)
  try:
    photo = tasks.get_task(run.task).eval_preprocessors
  except ValueError:  # the training data are not here
    photo = tasks.absent_eval_preprocessors(
      str(run.task), lambda: data.image_folder.typical_side(images.files)
    )
  config = data.one_pass(
    tasks.ImageTask(images.path, images, (), () if images.is_array else photo),
    _SPLIT,
    image_size=run.image_size,
    max_labels=run.max_labels,
    batch_size=batch_size,
    bounded=False,
    resize=run.resize if run.reads_sheets or not images.is_array else None,
    max_corrupt_fraction=1.0,
  )
  batches = data.get_dataset(config, run.partitioner.batch_rows(batch_size))
  progress = reporting.Progress('predict', len(images.names))
  found = []
  with contextlib.closing(batches), progress:
    for part in run.stream(batches, ('log_prob',), batch_size):
      part = dataclasses.replace(part, class_names=run.class_names)
      found += most_probable(part, top, images.names)
      progress.update(len(part))
  if not found:
    raise ValueError(f'--dataset={images.path}: no image can be read')
  return found


def most_probable(
  rows: Rows, top: int = 5, names: Sequence[str] | None = None
) -> list[dict[str, Any]]:
  """The `top` most probable classes of each example of predictions.

  Args:
    rows: they have log_prob [N, K].
    top: largest number of classes.
    names: what each example is called, by its id; None for the id itself.

  Returns:
    A row per example: 'image', its name; 'entropy' of the predictive distribution in nats; and
    'top', classes in order with 'class', 'name' and 'probability'.
  """
  entropy = measures.uncertainty.uncertainty(**rows.predictive).entropy
  order = np.argsort(-rows.log_prob, axis=1, kind='stable')[:, :top]  # [N, top]
  probability = np.exp(np.take_along_axis(rows.log_prob, order, axis=1))
  called = rows.class_names
  found = []
  for i, index in enumerate(rows.index):
    best = [
      {'class': int(k), 'name': str(k) if called is None else called[k], 'probability': float(p)}
      for k, p in zip(order[i], probability[i], strict=True)
    ]
    name = str(index) if names is None else names[index]
    found.append({'image': name, 'entropy': float(entropy[i]), 'top': best})
  return found


def write_csv(rows: Sequence[Mapping[str, Any]], path: str) -> None:
  """A line per image: image, entropy, then name and probability of each class."""

  def cells(row: Mapping[str, Any]) -> dict[str, Any]:
    found = {'image': row['image'], 'entropy': row['entropy']}
    for rank, best in enumerate(row['top'], 1):
      found |= {f'class_{rank}': best['name'], f'probability_{rank}': best['probability']}
    return found

  reporting.write_csv(list(cells(rows[0])), map(cells, rows), path)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
  """The first rows as text."""
  lines = [
    (
      row['image'],
      f'{row["entropy"]:.3f}',
      ', '.join(f'{x["name"]} {x["probability"]:.3f}' for x in row['top']),
    )
    for row in rows[:_SHOWN]
  ]
  caption = reporting.counted(len(rows), 'image')
  if len(rows) > _SHOWN:
    caption += f', the first {_SHOWN}'
  return reporting.plain_table(
    reporting.Table(caption, ('image', 'entropy', 'most probable classes'), lines)
  )
