"""Finds wrong labels of saved representations.

    python -m het_plugin.audit --train=train.npz --csv=audit.csv --json=audit.json
    python -m het_plugin.audit --train=train.npz --suggest=corrected.npz
    python -m het_plugin.audit --checkpoint=runs/det --dataset=digits --html=audit.html
    python -m het_plugin.audit --train=train.npz --dataset=digits --html=audit.html

Fits a head to each fold's other folds, and compares the labels with its location: what it says of
the classes without the noise. Then it fits the head to what it found, in --rounds rounds or fewer.
Prints the share of wrong labels, the pairs of classes that people confuse, and the labels that are
most probably wrong. --csv and --json list every example: index, label, probability of the label,
probability that it is wrong, suggested label, and its kind: wrong, ambiguous or fine. --suggest
writes the rows with suggested labels in place of wrong ones. Of several labels of an example, which
are votes, the most frequent one is audited. With --dataset the page of --html
shows images of the worst labels, of the most ambiguous ones and of the confused pairs. The index of
a row is then the number of its example in --split.
--C, --C_noise and --num_factors may list several values, from which held-out labels choose; with
--C_noise=auto every fit chooses from no noise and shares of C.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from het_plugin import reporting
from het_plugin.cli.settings import OneOf
from het_plugin.commands._rows import RowsSettings
from het_plugin.estimators import CLASSIFIERS
from het_plugin.estimators import probe as grid
from het_plugin.estimators.audit import ROUNDS
from het_plugin.evaluation import audit
from het_plugin.rows import files
from het_plugin.system.ranges import Count
from het_plugin.weights import is_weights_file

# Flags of the fits that --pred_probs replaces.
_OF_FITS = ('head', 'C', 'C_noise', 'num_factors', 'rounds', 'folds', 'max_iter', 'seed')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(RowsSettings):
  """Which labels are audited, and how.

  Attributes:
    dataset: The task to represent, or of the rows of --train.
    split: Split of --dataset.
    head: The head to fit.
    C: Inverse strength of the regularisation, as in scikit-learn.
    C_noise: Inverse strength of the regularisation of the noise, or auto.
    num_factors: R.
    rounds: Largest number of rounds. From the second one on, the head is fitted to what was found.
    folds: Folds of the rows.
    max_iter: Largest number of iterations of a fit.
    seed: Seed of the folds and of the initial values.
    csv: Where to write a line per example.
    suggest: Where to write the rows with suggested labels; with --dataset=image_folder:PATH also
      PATH/labels.csv, which a training of PATH reads.
    pred_probs: A .npy file of out-of-fold probabilities [N, K], instead of fits.
    write_pred_probs: Where to write the out-of-fold probabilities [N, K], as .npy.
    json: Where to write all results.
    html: Where to write a page.
  """

  dataset: str | None = None
  split: str = 'train'
  head: Annotated[str, OneOf(tuple(CLASSIFIERS))] = 'det'
  C: tuple[float, ...] = (1,)
  C_noise: tuple[float | Literal['auto'], ...] = (0.1,)
  num_factors: tuple[Count, ...] = (4,)
  rounds: Count = ROUNDS
  folds: Annotated[int, '[2, inf)'] = 5
  max_iter: Count = 500
  seed: Annotated[int, '[0, inf)'] = 0
  csv: str | None = None
  suggest: str | None = None
  pred_probs: str | None = None
  write_pred_probs: str | None = None
  json: str | None = None
  html: str | None = None

  @property
  def fits(self) -> grid.Settings:
    """Settings of the fits."""
    same = self.chosen('num_factors', 'folds', 'max_iter', 'seed')
    return grid.Settings(heads=[self.head], c=self.C, c_noise=self.C_noise, **same)


def run(settings: Settings) -> reporting.Report:
  """The labels that are wrong, and those that people confuse."""
  fits = settings.fits
  suggest = settings.suggest or ''
  settings.check_rows(['train'], [])
  if 'split' in settings.given and not settings.dataset:
    raise ValueError('--split is for --dataset: a split of a file is --train=F.npz:SPLIT')
  if settings.head == 'det' and {'C_noise', 'num_factors'} & settings.given:
    raise ValueError('--C_noise and --num_factors have no effect on --head=det, which has no noise')
  if suggest and not suggest.endswith('.csv') and not is_weights_file(suggest):
    raise ValueError(f'--suggest={suggest} must end in .npz, .safetensors or .csv')
  if settings.pred_probs:
    settings.refuse((*_OF_FITS, 'write_pred_probs'), '--pred_probs, which is not fitted')
  if settings.write_pred_probs and not settings.write_pred_probs.endswith('.npy'):
    raise ValueError(f'--write_pred_probs={settings.write_pred_probs} must end in .npy')
  source = settings.train
  if source:
    _check_suggested(suggest, source)
  examples = None
  if settings.dataset:
    from het_plugin.evaluation.examples import Examples  # imports what files do not need

    examples = Examples.of(settings.dataset, settings.split)
  if suggest.endswith('.csv') and not (examples and examples.have_files):
    raise ValueError(f'--suggest={suggest} needs --dataset=image_folder:PATH, whose files it names')
  if settings.checkpoint:
    (source,) = settings.represented('het_plugin.audit', [settings.split])
    _check_suggested(suggest, source)
  from het_plugin.runs import sources  # imports what --help does not need

  source = sources.rows_or_file(source, settings.split)
  probs = settings.write_pred_probs, settings.pred_probs
  return audit.report(source, fits, examples, settings.rounds, *probs)


def _check_suggested(path: str, source: str) -> None:
  """Raises ValueError if a file that is read would be replaced."""
  read = files.partition_source(source)[0].split(',')
  if path and Path(path).resolve() in (Path(x).resolve() for x in read):
    raise ValueError(f'--suggest={path} is read by the audit: name another file')
