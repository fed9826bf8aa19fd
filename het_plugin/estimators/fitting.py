"""A fit of a model to rows, in memory or over minibatches of a file, and what it says of rows."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from sklearn.model_selection import train_test_split
from sklearn.utils.validation import check_is_fitted

from het_plugin.estimators import inputs, lbfgs, minibatch, objective, placement, starts
from het_plugin.estimators.model import Model
from het_plugin.estimators.targets import Targets

# If X has fewer entries than this, equal rows are merged: repeating a row gives the same bits as
# giving it a weight, and the order of the rows does not matter.
MERGED_ENTRIES = 2**16
TAU_GRID = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of a fit, see `DetClassifier` and `HetClassifier`; C_noise = 0 is no noise."""

  c: float
  c_noise: float
  tol: float
  max_iter: int
  solver: str
  mesh: Sequence[int] | None
  validation_fraction: float
  progress: bool | str
  seed: int


def fit(
  model: Model,
  x: np.ndarray,
  targets: Targets,
  weight: np.ndarray,
  settings: Settings,
  start: Any = None,
) -> tuple[lbfgs.Fit, np.ndarray]:
  """Fits a model.

  Args:
    model: the model.
    x: features [N, D], finite in memory, or a mapped file whose rows are checked as they are read.
    targets: the labels of N rows.
    weight: [N], at least 0.
    settings: settings of the fit.
    start: a fitted `DetClassifier` where the noise starts; None fits DET first.

  Returns:
    The fit, and the mean of the features that its parameters expect to be subtracted, [D].

  Raises:
    ValueError: `start` is not a fit of the same rows and settings, or rows of a mapped file are not
      finite.
  """
  fitted = model if settings.c_noise else model.deterministic
  fit_rows = _fit_streamed if inputs.streams(x, settings.solver) else _fit_in_memory
  with placement.on(settings.mesh):
    done, mean = fit_rows(fitted, x, targets, weight, settings, start)
  if fitted != model:
    params = starts.without_noise(model.init(settings.seed, x.shape[1]), done.params)
    done = dataclasses.replace(done, params=params)
  return done, mean


def _fit_streamed(model, x, targets, weight, settings, start):
  data = minibatch.Data(x, targets.values, weight)
  done = minibatch.fit(
    model,
    data,
    targets.class_shares(weight),
    settings.seed,
    *(settings.c, settings.c_noise or 1.0),
    validation_fraction=settings.validation_fraction,
    max_iter=settings.max_iter,
    progress=settings.progress,
    mesh=settings.mesh,
    det_fit=_fit_of(start, model, settings.c, data.mean),
  )
  return done, data.mean


def _fit_in_memory(model, x, targets, weight, settings, start):
  keep = weight > 0
  x, values, weight = x[keep], targets.values[keep], weight[keep]
  shares = targets.rows(keep).class_shares(weight)
  if x.size <= MERGED_ENTRIES:
    x, values, weight = inputs.merged(x, values, weight)
  mean = np.average(x, axis=0, weights=weight)
  strengths = settings.c, settings.c_noise or 1.0
  rows = objective.make_rows(model, x, mean, values, weight, *strengths)
  rows = placement.place_rows(rows, settings.mesh)

  def search(model, params):
    params = placement.place_params(model, params, settings.mesh)
    limits = {'tol': settings.tol, 'max_iter': settings.max_iter, 'progress': settings.progress}
    return lbfgs.minimise(model, params, rows, **limits)

  det_fit = _fit_of(start, model, settings.c, mean)
  done = starts.fit(search, model, x.shape[1], shares, lambda: rows, settings.seed, det_fit)
  return done, mean


def _fit_of(start, model, c, mean):
  """The fit of `start`, which must be DET's to the same rows."""
  if start is None:
    return None
  check_is_fitted(start)
  same = start.model_ == model.deterministic and start.C == c
  if not same or not np.array_equal(start.mean_, mean):
    raise ValueError(
      'start must be a DetClassifier fitted to the same rows with the same C, tau and '
      f'hidden_layers; it is {start}'
    )
  return lbfgs.Fit(start.params_, start.objective_, start.gradient_, start.n_iter_)


def tau_grid_nll(
  make_model: Callable[[float], Model],
  x: np.ndarray,
  targets: Targets,
  weight: np.ndarray,
  settings: Settings,
) -> dict[float, float]:
  """The mean NLL of held-out rows, nats, under the fit to the others with each tau of `TAU_GRID`.

  Args:
    make_model: the model of a tau.
    x, targets, weight, settings: as in `fit`, in memory.
  """
  train, held_out = train_test_split(
    np.flatnonzero(weight > 0),
    test_size=settings.validation_fraction,
    random_state=settings.seed,
  )
  found = {}
  for tau in TAU_GRID:
    model = make_model(tau)
    done, mean = fit(model, x[train], targets.rows(train), weight[train], settings)
    rows = x[held_out], targets.values[held_out]
    nll = apply(model, 'nll', done.params, mean, *rows, mesh=settings.mesh)
    found[tau] = float(np.average(nll, weights=weight[held_out]))
  return found


def apply(
  model: Model,
  method: str,
  params: dict[str, Any],
  mean: np.ndarray,
  x: np.ndarray,
  target: np.ndarray | None = None,
  mesh: Sequence[int] | None = None,
) -> np.ndarray:
  """A method of the model for rows x [N, D], computed in blocks of one shape.

  Args:
    model: the model.
    method: its name, of (params, x) or (params, x, target).
    params, mean: what `fit` gives.
    x: features, finite in memory, or a mapped file.
    target: `Targets.values`.
    mesh: (data, model) numbers of devices.

  Returns:
    [N, ...].
  """
  size, found = min(objective.block_rows(model, len(x)), 4096), []
  with placement.on(mesh):
    params = model.multiplied(placement.place_params(model, params, mesh))
    for start in range(0, len(x), size):
      block = [inputs.read_rows(x, slice(start, start + size)) - mean]
      if target is not None:
        block.append(target[start : start + size])
      padding = size - len(block[0])
      block = [np.pad(rows, [(0, padding), *[(0, 0)] * (rows.ndim - 1)]) for rows in block]
      found.append(np.asarray(_apply(model, method, params, *block)))
      placement.forget_pages(x)
  return np.concatenate(found)[: len(x)]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _apply(model, method, params, *arrays):
  return getattr(model, method)(params, *arrays)
