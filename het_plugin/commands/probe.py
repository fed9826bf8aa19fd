"""Fits heads to saved representations, up to convergence, and compares them; trains no backbone.

    python -m het_plugin.probe --train=train.npz --test=test.npz --heads=det,het_xl
    python -m het_plugin.probe --train=representations/digits  # from `represent`: train and test
    python -m het_plugin.probe --train=X.npy,Y.npy --heads=det,het,het_xl --C=0.1,1,10 --folds=5
    python -m het_plugin.probe --checkpoint=runs/det --dataset=digits

Prints NLL, precision@1, ECE and Brier score with standard errors, and differences to the first head
(or --baseline), paired by example. Without --test the rows of --train are scored fold by fold.
--C, --C_noise, --num_factors and --tau may list several values. The NLL on a share (--validation)
of the training rows chooses. For --C_noise, 0 (no noise) is added, and the smallest value within
one standard error of the best is taken. With --C_noise=auto, the default, there is no such grid:
every fit chooses no noise or a share of C by the same rule, on a fifth of its own rows. A list has
a whole fit for each value; auto has short ones, each from the end of the one before.
"""

import dataclasses
from typing import Annotated, Literal

from het_plugin import reporting
from het_plugin.commands._rows import RowsSettings
from het_plugin.estimators import probe as grid
from het_plugin.evaluation import probe
from het_plugin.system.ranges import Count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(RowsSettings):
  """What is fitted, and to what.

  Attributes:
    train: Representations to fit the heads to: F.npz, F.safetensors or X.npy,Y.npy; F.npz:SPLIT if
      it has several; a run, or a task.
    test: Representations to score the heads on: F.npz, F.safetensors or X.npy,Y.npy; F.npz:SPLIT if
      it has several; a run, or a task.
    ood: Rows of another distribution, for the AUROC: F.npz, F.safetensors or X.npy,Y.npy;
      F.npz:SPLIT if it has several; a run, or a task.
    target: votes: the labels of a row are votes.
    mesh: DATA,MODEL: devices that split rows and classes.
    splits: Splits of --dataset to fit to and to score on. Default: train, and test or else
      validation.
    heads: Heads to fit: det, het, het_h, het_xl.
    baseline: The head to compare with. Default: the first.
    C: Inverse strength of the regularisation, as in scikit-learn.
    C_noise: Inverse strength of the regularisation of the noise; auto: every fit chooses it.
    num_factors: R, for heads with noise.
    tau: Temperatures: numbers, learned or validation.
    hidden_layers: Widths of layers below the heads. Default: none.
    folds: Folds of the training rows, without --test.
    validation: Share of the training rows that chooses from a grid.
    num_samples: S, for a softmax with noise.
    tol: A fit ends when its gradient is this small.
    max_iter: Largest number of iterations.
    seed: Seed of the folds and of the initial values.
    json: Where to write the rows.
    html: Where to write a page with plots.
  """

  train: str | None = None
  test: str | None = None
  ood: str | None = None
  target: Literal['auto', 'votes'] = 'auto'
  mesh: tuple[Count, Count] | None = None
  splits: tuple[str, ...] | None = None
  heads: tuple[str, ...] = ('det', 'het_xl')
  baseline: str | None = None
  C: tuple[float, ...] = (1,)
  C_noise: tuple[float | Literal['auto'], ...] = ('auto',)
  num_factors: tuple[Count, ...] = (8,)
  tau: tuple[float | Literal['learned', 'validation'], ...] = (1,)
  hidden_layers: tuple[Count, ...] = ()
  folds: Annotated[int, '[2, inf)'] = 5
  validation: float = 0.1
  num_samples: Count = 64
  tol: float = 1e-4
  max_iter: Count = 500
  seed: Annotated[int, '[0, inf)'] = 0
  json: str | None = None
  html: str | None = None

  @property
  def fits(self) -> grid.Settings:
    """Settings of the fits."""
    same = 'heads baseline folds validation num_samples tol max_iter seed target mesh'.split()
    same += ['num_factors', 'hidden_layers', 'tau']
    of_c = {'c': self.C, 'c_noise': self.C_noise}
    return grid.Settings(**of_c, **self.chosen(*same))


def run(settings: Settings) -> reporting.Report:
  """Scores of the heads, and their differences."""
  fits = settings.fits
  settings.check_rows(('train', 'test'), ('dataset', 'splits'))
  if set(settings.heads) <= {'det'}:
    of_noise = 'C_noise', 'num_factors', 'num_samples'
    settings.refuse(of_noise, '--heads=det, which has no noise')
  if settings.test:
    settings.refuse(['folds'], '--test')
  if len(settings.splits or ()) > 2:
    raise ValueError(f'--splits={",".join(settings.splits)} must be a training and a test split')
  train, test = settings.train, settings.test
  if settings.checkpoint:
    splits = settings.splits or _usual_splits(settings.dataset)
    train, *others = settings.represented('het_plugin.probe', splits)
    test = others[0] if others else None
  from het_plugin.runs import sources  # imports what --help does not need

  train = sources.rows_or_file(train, 'train')
  test = test and sources.rows_or_file(test)
  return probe.probe(train, test or None, fits, settings.ood and sources.rows_or_file(settings.ood))


def _usual_splits(dataset: str) -> list[str]:
  from het_plugin.evaluation import represent
  from het_plugin.runs.run import default_split

  return ['train', default_split(represent.task_name(dataset))]
