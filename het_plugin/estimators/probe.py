"""Heads fitted at the points of a grid, from which held-out rows choose."""

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

from het_plugin.estimators import inputs, resuming
from het_plugin.estimators.classifier import HeadClassifier
from het_plugin.estimators.classifiers import CLASSIFIERS
from het_plugin.estimators.model import is_noise
from het_plugin.estimators.selection import NOISE_SHARE, least_noise
from het_plugin.estimators.settings import GridSettings
from het_plugin.rows import Reordered


def fit_titles(settings: GridSettings, num_folds: int) -> Iterator[str]:
  """What is shown during each fit, in the order in which they are made."""
  num_fits = {head: len(grid := settings.grid(head)) + (len(grid) > 1) for head in settings.heads}
  total = num_folds * sum(num_fits.values())
  done = 0
  timed = 0  # fits with searches that were made now, and not taken from a folder
  seconds = 0.0
  for count in num_fits.values():
    for fold, _ in itertools.product(range(num_folds), range(count)):
      of_fold = f', fold {fold + 1} of {num_folds}' if num_folds > 1 else ''
      left = ''
      if timed:
        rest = datetime.timedelta(seconds=round(seconds / timed * (total - done)))
        left = f' (all: ETA {rest})'
      done += 1
      start = time.monotonic()
      searches = resuming.num_made()
      yield f'fit {done} of {total}{of_fold}{left}'
      if resuming.num_made() > searches:
        timed += 1
        seconds += time.monotonic() - start


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
        det = CLASSIFIERS['det'](C=point['C'], tau=tau, **common)
        starts[key] = _fitted(det, *part, start=near)
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
      nll.append(estimator.nll(Reordered(x, held_out), y[held_out]))
      failures += is_unfinished
    best = grid[choose(grid, np.stack(nll))]
  estimator, is_unfinished = fit(best, fitted)
  if head != 'det':
    best = {**best, 'C_noise': estimator.C_noise_}
  return estimator, best, failures + is_unfinished


def _fitted(estimator: HeadClassifier, *rows, start=None) -> tuple[HeadClassifier, bool]:
  """The estimator after its fit, and whether it warned that it has not converged."""
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    estimator.fit(*rows, start=start)
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
