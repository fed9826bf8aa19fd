"""Predicts the classes of images without labels.

    python -m het_plugin.predict --checkpoint=runs/het_xl --dataset=photos --csv=predictions.csv

prints the most probable classes of each image with their probabilities, and the entropy of the
predictive distribution in nats. --dataset is an image file, a folder that is searched for .jpg and
.png files, or a .npz file with an array 'image' [N, H, W] or [N, H, W, C] of uint8, or of floats in
[0, 1]. Images that cannot be read are left out. A file of predictions, as
`het_plugin.evaluate --save_predictions` writes them, may take the place of checkpoint and data set.
"""

import dataclasses
import functools

from het_plugin import reporting
from het_plugin.cli.settings import Gin, Processes
from het_plugin.evaluation import predict
from het_plugin.rows import read
from het_plugin.runs import open_run
from het_plugin.system.ranges import Count
from het_plugin.weights import is_weights_file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Gin, Processes):
  """What predicts, and for which images.

  Attributes:
    checkpoint: A run's directory, a checkpoint in it, or a file of predictions.
    dataset: An image file, a folder of images, or a .npz file.
    top: Classes per image at most.
    batch_size: Global batch.
    csv: Where all rows are written as CSV.
    json: Where all rows are written as JSON.
  """

  checkpoint: str | None = None
  dataset: str | None = None
  top: Count = 5
  batch_size: Count = 256
  csv: str | None = None
  json: str | None = None


def run(settings: Settings) -> reporting.Report:
  """The most probable classes of each image."""
  checkpoint = settings.checkpoint
  if not checkpoint:
    raise ValueError('--checkpoint is needed')
  if is_weights_file(checkpoint):
    if settings.dataset:
      raise ValueError(
        f'--checkpoint={checkpoint} is a file: with --dataset it must be the directory of a run. A '
        'file of predictions goes without --dataset.'
      )
    settings.refuse(('batch_size', 'gin_file', 'gin_bindings'), 'a file of predictions')
    found = predict.most_probable(read(checkpoint, 'log_prob'), settings.top)
  else:
    if not settings.dataset:
      raise ValueError(f'--dataset is needed for the run --checkpoint={checkpoint}')
    images = predict.Images(settings.dataset)  # before the model: its path may be wrong
    settings.join()
    opened = open_run(checkpoint, *settings.gin)
    found = predict.predict(opened, images, settings.top, settings.batch_size)
  return reporting.Report(
    title='Predictions',
    introduction=predict.table(found),
    json=found,
    writers={'csv': functools.partial(predict.write_csv, found)},
  )
