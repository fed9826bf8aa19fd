"""Heads fitted at the points of a grid, from which held-out rows choose."""

import dataclasses
import datetime
import itertools
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from flax import traverse_util
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split

from het_plugin.estimators import inputs
from het_plugin.estimators.classifier import HeadClassifier
from het_plugin.estimators.classifiers import CLASSIFIERS
from het_plugin.estimators.model import is_noise
from het_plugin.estimators.selection import NOISE_SHARE, least_noise


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of a comparison.

  Attributes:
    heads: names in `CLASSIFIERS`.
    c, c_noise, num_factors, tau: the grid, from which `choose` takes a point by the NLL of held-out
      rows. If there are several values of c_noise, 0 (no noise) is one of them. 'auto', alone, is
      no grid: every fit chooses on rows of its own (`HetClassifier`).
    hidden_layers: widths of GELU layers below every head.
    baseline: the head that others are compared with.
    folds: number of folds of the training rows, used if there is no test file.
    validation: share of the training rows held out to choose from a grid of more than one point.
    target: 'votes' if the labels of an example are those of several annotators; 'auto' takes
      several labels for an indicator. Labels with weights are shares in either case.
    solver, mesh: settings of the estimators.
    num_samples, tol, max_iter: settings of the estimators.
    seed: seed of splits and starts.
    progress: whether each fit longer than two seconds shows how far it is: a bar on a terminal,
      elsewhere a line every ten seconds.
  """

  heads: Sequence[str] = ('det', 'het_xl')
  c: Sequence[float] = (1.0,)
  c_noise: Sequence[float | str | None] = ('auto',)
  num_factors: Sequence[int] = (8,)
  tau: Sequence[float | str] = (1.0,)
  hidden_layers: Sequence[int] = ()
  baseline: str | None = None
  folds: int = 5
  validation: float = 0.1
  num_samples: int = 64
  tol: float = 1e-4
  max_iter: int = 500
  seed: int = 0
  target: str = 'auto'
  solver: str = 'auto'
  mesh: Sequence[int] | None = None
  progress: bool = True

  def __post_init__(self):
    lists = {'heads': self.heads, 'C': self.c, 'C_noise': self.c_noise, 'tau': self.tau}
    lists |= {'num_factors': self.num_factors}
    for flag, values in lists.items():
      if values is None or isinstance(values, (str, int, float)):
        raise ValueError(f'{flag}={values!r} must be a list: [{values!r}]')
      if not values:
        raise ValueError(f'--{flag}= has no value; it must list at least one')
    if 'auto' in self.c_noise and len(self.c_noise) > 1:
      raise ValueError(
        f'--C_noise={",".join(map(str, self.c_noise))}: auto chooses from values of its own, and '
        'must be the only one'
      )
    if unknown := [name for name in self.heads if name not in CLASSIFIERS]:
      raise ValueError(
        f'--heads={",".join(self.heads)}: {unknown[0]} is unknown; choose from '
        f'{", ".join(CLASSIFIERS)}'
      )
    if self.baseline is not None and self.baseline not in self.heads:
      raise ValueError(f'--baseline={self.baseline} must be one of --heads={",".join(self.heads)}')
    if self.target not in ('auto', 'votes', 'probabilities'):
      raise ValueError(f"--target={self.target} must be 'auto' or 'votes'")
    if self.folds < 2:
      raise ValueError(f'--folds={self.folds} must be at least 2')
    if not 0 < self.validation < 1:
      raise ValueError(f'--validation={self.validation} must be a share in (0, 1)')
    if not self.tol > 0:
      raise ValueError(f'--tol={self.tol} must be a number > 0')

  def grid(self, head: str) -> list[dict[str, Any]]:
    """Settings of the estimator at each point of the grid."""
    points = [{'C': c, 'tau': tau} for c, tau in itertools.product(self.c, self.tau)]
    if head == 'det':
      return points
    c_noise = self.c_noise
    if len(c_noise) > 1 and 0.0 not in c_noise:
      c_noise = (0.0, *c_noise)
    return [
      {**point, 'C_noise': c, 'num_factors': r, 'num_samples': self.num_samples}
      for point, c, r in itertools.product(points, c_noise, self.num_factors)
    ]


def fit_titles(settings: Settings, num_folds: int) -> Iterator[str]:
  """What is shown during each fit, in the order in which they are made."""
  num_fits = {head: len(grid := settings.grid(head)) + (len(grid) > 1) for head in settings.heads}
  total = num_folds * sum(num_fits.values())
  done = 0
  start = time.monotonic()
  for count in num_fits.values():
    for fold, _ in itertools.product(range(num_folds), range(count)):
      of_fold = f', fold {fold + 1} of {num_folds}' if num_folds > 1 else ''
      left = ''
      if done:
        seconds = (time.monotonic() - start) / done * (total - done)
        left = f' (all: ETA {datetime.timedelta(seconds=round(seconds))})'
      done += 1
      yield f'fit {done} of {total}{of_fold}{left}'


def are_known(labels, seen):
  """Whether all labels of each row [N, L] are among those that a fit has seen."""
  return ((labels < 0) | np.isin(labels, seen)).all(axis=1)


def price(num_params: int, num_rows: int) -> float:
  """Nats per example of new data that fitting parameters to rows costs without regularisation.

  It is p / (2 N), the expected excess of the NLL over that of the best parameters (Akaike 1974,
  https://doi.org/10.1109/TAC.1974.1100705).
  """
  return num_params / (2 * num_rows)


def num_noise_params(estimator: HeadClassifier) -> int:
  """Number of the parameters of the noise of a fitted head; 0 for DET."""
  flat = traverse_util.flatten_dict(estimator.params_)
  return sum(x.size for path, x in flat.items() if is_noise(path))


def fit_best(
  head, x, y, fitted, settings, starts, titles, near=None
) -> tuple[HeadClassifier, dict[str, Any], int]:
  """The estimator of the best point of the grid, fitted to all rows.

  `starts` collects the fits of DET, where the noise starts; each fit takes one of `titles`. DET's
  search starts at `near`. Also returns this point, with the C_noise of the fit, and the number of
  fits that did not converge.
  """
  grid = settings.grid(head)
  names = ('hidden_layers', 'tol', 'max_iter', 'target', 'solver', 'mesh')
  common = {name: getattr(settings, name) for name in names} | {'random_state': settings.seed}

  def fit(point, rows):
    common['progress'] = settings.progress and next(titles)
    # All rows without a copy where they may be a file: others have no weight.
    if len(rows) == len(x):
      part = x, y
    elif inputs.streams(x, settings.solver):
      part = x, y, np.bincount(rows, minlength=len(x))
    else:
      part = x[rows], y[rows]
    tau = point['tau']
    det = (None, False)
    if head == 'det' or tau != 'validation':
      key = (hash(rows.tobytes()), point['C'], tau)
      if key not in starts:
        starts[key] = _fitted(CLASSIFIERS['det'](C=point['C'], tau=tau, **common), *part, near=near)
      det = starts[key]
    if head == 'det':
      return det
    return _fitted(CLASSIFIERS[head](**common, **point), *part, start=det[0])

  best = grid[0]
  failures = 0
  if len(grid) > 1:
    part, held_out = train_test_split(
      fitted, test_size=settings.validation, random_state=settings.seed
    )
    if settings.target == 'votes' or y.ndim == 1:  # as in `_outcome`
      held_out = held_out[are_known(y[held_out].reshape(len(held_out), -1), y[part])]
    nll = []
    for point in grid:
      estimator, is_unfinished = fit(point, part)
      parts = inputs.parts(held_out, x)
      nll.append(np.concatenate([estimator.nll(x[part], y[part]) for part in parts]))
      failures += is_unfinished
    best = grid[choose(grid, np.stack(nll))]
  estimator, is_unfinished = fit(best, fitted)
  if head != 'det':
    best = {**best, 'C_noise': estimator.C_noise_}
  return estimator, best, failures + is_unfinished


def _fitted(estimator: HeadClassifier, *rows, **where) -> tuple[HeadClassifier, bool]:
  """The estimator after its fit, and whether it warned that it has not converged."""
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    estimator._fit(*rows, **where)
  of_others = [x for x in caught if not issubclass(x.category, ConvergenceWarning)]
  for x in of_others:
    warnings.warn_explicit(x.message, x.category, x.filename, x.lineno)
  return estimator, len(of_others) < len(caught)


def choose(grid: Sequence[dict[str, Any]], nll: np.ndarray) -> int:
  """The number of the point of a grid to take, by the one-standard-error rule for the noise.

  It is one of the points that differ from the one with the least mean NLL in C_noise only
  (`selection.least_noise`).

  Args:
    grid: settings of estimators.
    nll: [points, N], NLL of held-out rows, nats.

  Returns:
    The number of the point.
  """
  best = grid[int(np.argmin(nll.mean(axis=1)))]
  same = [i for i, x in enumerate(grid) if {**x, 'C_noise': None} == {**best, 'C_noise': None}]
  given = [(grid[i].get('C_noise'), grid[i]['C']) for i in same]
  # 'auto' is alone, and any number.
  c_noise = np.array([NOISE_SHARE * c if x in (None, 'auto') else x for x, c in given])
  return same[least_noise(c_noise, nll[same])]
