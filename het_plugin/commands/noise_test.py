"""Estimates what heads with noise, and a hidden layer, would gain over DET; fits none of them.

    python -m het_plugin.noise_test --train=train.npz          # saved features and labels
    python -m het_plugin.noise_test --checkpoint=runs/det      # a trained DET

Of a run the head is taken as it is, and the test is on a split that it was not trained on. Of a
published file, or of a run with another head, give the representations: `het_plugin.represent`
writes them, and --train=RUN computes them.
"""

import dataclasses
from typing import Annotated, Literal

from het_plugin import reporting
from het_plugin.cli.settings import Gin, Processes, Repeated, ReportFolder
from het_plugin.estimators.noise_gain import TITLES
from het_plugin.evaluation import noise_test
from het_plugin.system.ranges import Count

_FITS_OF_ROWS = {'folds': 5, 'tol': 1e-4}
_OF_ROWS = ('target', 'C')
_OF_RUNS = ('dataset', 'split', 'batch_size', 'max_examples', 'gin_file', 'gin_bindings')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(ReportFolder, Gin, Processes):
  """What is tested, and how.

  Attributes:
    train: Representations: F.npz, F.safetensors or X.npy,Y.npy; F.npz:SPLIT if it has several; a
      run, or a task.
    target: votes: the labels of a row are votes.
    checkpoint: A run's directory, or one checkpoint, whose head is Det; repeatable.
    dataset: A task. Default: the task that the run was trained on.
    split: A split of the task. Default: the split that the run was evaluated on.
    max_examples: Largest number of examples of a run, chosen at random.
    batch_size: Global batch.
    heads: Heads to test, from het, het_h, het_xl.
    C: Inverse strength of the regularisation, as in scikit-learn.
    num_factors: R.
    folds: Folds of the rows. Default: 5, of a run 2.
    tol: A fit ends when its gradient is this small. Default: 0.0001, of a run 0.001.
    max_iter: Largest number of iterations of a fit.
    seed: Seed of the folds and of the directions.
    html: Where to write a page.
  """

  train: str | None = None
  target: Literal['auto', 'votes'] = 'auto'
  checkpoint: Repeated[str] = ()
  dataset: str | None = None
  split: str | None = None
  max_examples: Count | None = None
  batch_size: Count = 256
  heads: tuple[str, ...] = tuple(TITLES)
  C: float = 1.0
  num_factors: Count = 8
  folds: Annotated[int, '[2, inf)'] | None = None
  tol: float | None = None
  max_iter: Count = 500
  seed: Annotated[int, '[0, inf)'] = 0
  html: str | None = None

  def __post_init__(self):
    if bool(self.train) == bool(self.checkpoint):
      raise ValueError('--train or --checkpoint is needed: one of them')
    if self.train:
      self.refuse(_OF_RUNS, '--train: it is for --checkpoint')
    else:
      self.refuse(_OF_ROWS, '--checkpoint: it is for --train')
    if not self.heads or set(self.heads) - set(TITLES):
      raise ValueError(f'--heads={",".join(self.heads)} must be of {", ".join(TITLES)}')
    if not self.C > 0:
      raise ValueError(f'--C={self.C} must be a number > 0')
    if self.tol is not None and not self.tol > 0:
      raise ValueError(f'--tol={self.tol} must be a number > 0')


def run(settings: Settings) -> reporting.Report:
  """Gains of heads over DET."""
  fits = settings.chosen('heads', 'num_factors', 'max_iter', 'seed')
  fits |= {name: x for name, x in settings.chosen('folds', 'tol').items() if x is not None}
  if settings.train:
    from het_plugin.runs import sources  # imports what --help does not need

    train = sources.rows_or_file(settings.train, 'train')
    return noise_test.of_rows(train, settings.target, C=settings.C, **{**_FITS_OF_ROWS, **fits})
  settings.join()
  of_split = settings.chosen('dataset', 'split', 'batch_size', 'max_examples')
  return noise_test.of_runs(settings.checkpoint, settings.gin, fits, **of_split)
