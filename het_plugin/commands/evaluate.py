"""Evaluates the predictive uncertainty of trained heads.

    python -m het_plugin.evaluate --checkpoint=runs/het_xl --checkpoint=runs/det \\
      --split=validation --ood_dataset=glyphs_heldout --ood_split=test --output_dir=runs/uncertainty

Prints a row per checkpoint: likelihood, calibration, selective prediction, and detection of inputs
from another data set. Differences are to the first checkpoint, paired by example. --checkpoint also
takes a file of predictions; --predictions adds further files. The configuration is the run's own
config.gin. Gin files and bindings override it, such as --gin.eval/Integrator.num_samples=1000.

The output directory gets results.json, results.txt, index.html and its plots as .png files. With
--save_predictions it also gets predictions/NAME.npz.
"""

import dataclasses
from typing import Annotated

from het_plugin import reporting
from het_plugin.cli.settings import Gin, Processes, Repeated, ReportFolder
from het_plugin.evaluation import evaluate, uncertainty_report
from het_plugin.system import run_files
from het_plugin.system.ranges import Count
from het_plugin.weights import is_weights_file

_AS_GIVEN = (
  'checkpoint',
  'predictions',
  'dataset',
  'split',
  'ood_dataset',
  'ood_split',
  'max_examples',
  'batch_size',
  'covariance_images',
  'homoglyph_examples',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(ReportFolder, Gin, Processes):
  """What is evaluated, and on what.

  Attributes:
    checkpoint: A run's directory (its newest checkpoint), one checkpoint, or a file of predictions
      (.npz, .safetensors); repeatable.
    predictions: A file of predictions; repeatable.
    dataset: A task. Default: the task that the run was trained on.
    split: A split of the task. Default: the split that the run was evaluated on.
    ood_dataset: A task with unknown inputs.
    ood_split: Split of --ood_dataset.
    max_examples: Largest number of examples per split, chosen at random.
    batch_size: Global batch.
    save_predictions: Writes OUTPUT_DIR/predictions/NAME.npz.
    covariance_images: Number of images to draw class correlations of.
    covariance_index: Example ids to draw instead.
    homoglyph_examples: Images for the homoglyph rate of glyph tasks.
  """

  checkpoint: Repeated[str] = ()
  predictions: Repeated[str] = ()
  dataset: str | None = None
  split: str | None = None
  ood_dataset: str | None = None
  ood_split: str | None = None
  max_examples: Count | None = None
  batch_size: Count = 256
  save_predictions: bool = False
  covariance_images: Annotated[int, '[0, inf)'] = 4
  covariance_index: tuple[int, ...] = ()
  homoglyph_examples: Annotated[int, '[0, inf)'] = 512


def run(settings: Settings) -> reporting.Report:
  """A row per checkpoint."""
  save_to = None
  if settings.save_predictions:
    if not settings.output_dir:
      raise ValueError('--save_predictions needs --output_dir')
    save_to = run_files.local_folder('output_dir', settings.output_dir) / 'predictions'
  chosen = evaluate.EvaluateSettings(
    **settings.chosen(*_AS_GIVEN),
    covariance_index=tuple(dict.fromkeys(settings.covariance_index)),
    save_to=save_to,
  )
  if all(map(is_weights_file, settings.checkpoint)):
    of_runs = 'gin_file', 'gin_bindings', 'batch_size', 'covariance_images', 'homoglyph_examples'
    settings.refuse(of_runs, 'files of predictions')
  settings.join()
  return uncertainty_report.make_report(evaluate.evaluate(chosen, settings.gin))
