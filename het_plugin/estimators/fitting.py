"""A fit of a model to rows, in memory or on disk, and what it says of rows."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.utils.validation import check_is_fitted

from het_plugin.estimators import (
  compilation,
  inputs,
  lbfgs,
  objective,
  placement,
  resuming,
  selection,
  starts,
  stream,
)
from het_plugin.estimators.model import Model
from het_plugin.estimators.targets import Targets
from het_plugin.system import stopping

# If X has fewer entries than this, equal rows are merged: repeating a row gives the same bits as
# giving it a weight, and the order of the rows does not matter.
MERGED_ENTRIES = 2**16
# The noise first has GROWTH times its C_noise. With a third of the labels wrong (digits, and
# studies/noisy_labels) this lowered the NLL of other rows by 0.003 to 0.13 in 7 of 8 fits.
GROWTH = 10.0
GROWTH_ITERATIONS = 20
TOLERANCE = 1e-6  # nats by which noise may have a larger objective than DET
# Of the fits of `noise_path`.
PATH_TOLERANCE = 1e-3
PATH_ITERATIONS = 60
PATH_TRIAL = 20  # after so many of them, those that are hopeless end
PATH_SAMPLES = 16
_SEEN_GAP = 1e-3  # nats; a smaller gap of far rows is no warning
TAU_GRID = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclasses.dataclass(frozen=True)
class FitSettings:
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
  settings: FitSettings,
  start: Any = None,
  near: starts.Near | None = None,
) -> tuple[lbfgs.FitResult, np.ndarray]:
  """Fits a model.

  Args:
    model: the model.
    x: features [N, D], finite in memory, or a mapped file whose rows are checked as they are read.
    targets: the labels of N rows.
    weight: [N], at least 0.
    settings: settings of the fit.
    start: a fitted `DetClassifier` where the noise starts; None fits DET first.
    near: of `noise_path`, where the searches start, in memory.

  Returns:
    The fit, and the mean of the features that its parameters expect to be subtracted, [D].

  Raises:
    ValueError: `start` is not a fit of the same rows and settings, or rows of a mapped file are not
      finite.
  """
  fitted = model if settings.c_noise else model.deterministic
  with placement.on(settings.mesh):
    data = _Data.of(x, targets, weight, settings)
    det_fit = data.fit_of(start, model, settings)
    with data.stoppable():
      done = data.bounded(
        fitted, data.minimise(fitted, data.weight, settings, det_fit, near), settings
      )
  if fitted != model:
    params = starts.without_noise(model.init(settings.seed, x.shape[1]), done.params)
    done = dataclasses.replace(done, params=params)
  return done, data.mean


@dataclasses.dataclass(frozen=True, eq=False)
class _Data:
  """Rows in memory, without those of weight 0, or on disk.

  Attributes:
    x, targets, weight: as in `fit`.
    mean: [D], the centre of `inputs.spread`.
    far: in memory its rows are moved already.
    on_disk: whether a fit reads them again and again.
  """

  x: np.ndarray
  targets: Targets
  weight: np.ndarray
  mean: np.ndarray
  far: inputs.Far
  on_disk: bool

  @classmethod
  def of(cls, x: Any, targets: Targets, weight: np.ndarray, settings: FitSettings) -> '_Data':
    on_disk = inputs.streams(x, settings.solver)
    if not on_disk:
      keep = weight > 0
      x = x[keep]
      values = targets.values[keep]
      weight = weight[keep]
      if x.size <= MERGED_ENTRIES:
        x, values, weight = inputs.merged(x, values, weight)
      targets = dataclasses.replace(targets, values=values)
    where = inputs.spread(x, weight)
    far = inputs.far_rows(x, weight, where)
    if len(far.moved) and not on_disk:
      x = np.array(x)
      x[far.moved] = far.values
    return cls(x, targets, weight, where.centre, far, on_disk)

  def stoppable(self) -> contextlib.AbstractContextManager:
    """Inside, Ctrl-C ends the searches of rows on disk, which keep what they have."""
    if not self.on_disk or resuming.are_kept():
      return contextlib.nullcontext()
    return stopping.handled(lambda: True, lambda: None)

  def bounded(self, model: Model, done: lbfgs.FitResult, settings: FitSettings) -> lbfgs.FitResult:
    """The fit with a gap that holds where rows are far from the others.

    A far row has a curvature so large that float32 may see no slope in other directions. But its
    loss is not negative, so no parameters have less than the least objective of the other rows. The
    gap is at most the distance from that one.
    """
    weight = self.weight.copy()
    weight[self.far.alone] = 0.0
    if not len(self.far.alone) or not weight.any():
      return done
    with warnings.catch_warnings():
      warnings.simplefilter('ignore', ConvergenceWarning)
      near = starts.Near(done.params, done.params)
      others = self.minimise(model, weight, settings, None if model.head == 'det' else done, near)
    least = (others.objective - others.gap) * weight.sum() / self.weight.sum()
    gap = max(done.gap, done.objective - least)
    if gap - done.gap > max(settings.tol, _SEEN_GAP):
      warnings.warn(
        f'{len(self.far.alone)} of the {len(self.x)} rows of X are more than {inputs.FAR:g} times '
        f'as far from the centre as most: the objective of {model.head} may be up to {gap:.1g} '
        'nats above its optimum, which is what these rows cost; float32 does not tell more',
        ConvergenceWarning,
        stacklevel=4,
      )
    return dataclasses.replace(done, gap=gap)

  def fit_of(self, start: Any, model: Model, settings: FitSettings) -> lbfgs.FitResult | None:
    """`_fit_of`, if it is a fit to these labels and weights, too."""
    found = _fit_of(start, model, settings.c, self.mean)
    if found is not None:
      det = model.deterministic
      nll = apply(det, 'nll', found.params, self.mean, self.x, self.targets.values, settings.mesh)
      penalty = float(det.penalty(found.params)[0]) / (2 * settings.c)
      value = (self.weight @ nll + penalty) / self.weight.sum()
      if not np.isclose(value, found.objective, rtol=1e-4, atol=1e-6):
        raise ValueError(
          f'start has the objective {found.objective:.6g}, and {value:.6g} for these rows: it must '
          'be fitted to the same labels and sample_weight, in memory'
        )
    return found

  def minimise(
    self,
    model: Model,
    weight: np.ndarray,
    settings: FitSettings,
    det_fit: lbfgs.FitResult | None,
    near: starts.Near | None = None,
    falls_back: bool = True,
  ) -> lbfgs.FitResult:
    """The fit to rows with these weights [N], which may be 0.

    DET is fitted first, from `near` if it is given, unless `det_fit` is its fit. The result is
    DET's where noise has a worse objective, if it `falls_back`.
    """
    strengths = settings.c, settings.c_noise or 1.0
    values = self.x, self.mean, self.targets.values, weight
    if self.on_disk:
      rows = stream.make_stream(model, *values, self.far, *strengths, settings.mesh)
    else:
      rows = placement.place_rows(objective.make_rows(model, *values, *strengths), settings.mesh)

    stops = stopping.requested if self.on_disk else lambda: False

    def search(model, params, rows=rows, max_iter=settings.max_iter):
      limits: dict[str, Any] = {'tol': settings.tol, 'max_iter': max_iter}
      limits |= {'progress': settings.progress, 'stops': stops}
      num_iterations = 0
      for part, gap, title in rows.stages(model):
        if title and settings.progress:
          before = [settings.progress] if isinstance(settings.progress, str) else []
          limits['progress'] = ', '.join([*before, title])
        params = placement.place_params(model, params, settings.mesh)
        with warnings.catch_warnings():
          if part is not rows:
            warnings.simplefilter('ignore', ConvergenceWarning)
          done = resuming.minimise(model, params, part, **limits, gap=gap)
        params = done.params
        num_iterations += done.num_iterations
        if part is not rows and stops():
          warnings.warn(
            f'{model.head} has not converged: it was stopped when it was fitted to a part of the '
            'rows',
            ConvergenceWarning,
            stacklevel=2,
          )
          break
      return dataclasses.replace(done, num_iterations=num_iterations)

    def grow(params):
      """A short search with less regularisation of the noise. Under the full one, noise in slightly
      wrong directions vanishes before it has turned to better ones.
      """
      first, *_ = next(rows.stages(model))
      weaker = dataclasses.replace(first, noise_strength=first.noise_strength / GROWTH)
      with warnings.catch_warnings():
        warnings.simplefilter('ignore', ConvergenceWarning)
        return search(model, params, weaker, min(GROWTH_ITERATIONS, settings.max_iter))

    if det_fit is None:
      det = model.deterministic
      if near:
        start = near.det
      else:
        params = det.init(settings.seed, self.x.shape[1])
        start = starts.det_start(det, params, self.targets.class_shares(weight))
      det_fit = search(det, start)
    if model.head == 'det':
      return det_fit
    num_iterations = det_fit.num_iterations
    if near:
      start = near.noisy
    else:
      grown = grow(starts.noisy_start(model, det_fit.params, rows, settings.seed))
      start = grown.params
      num_iterations += grown.num_iterations
    noisy = search(model, start)
    num_iterations += noisy.num_iterations
    if falls_back and not noisy.objective <= det_fit.objective + TOLERANCE:
      noisy = dataclasses.replace(det_fit, params=starts.without_noise(start, det_fit.params))
    return dataclasses.replace(noisy, num_iterations=num_iterations)


class _Point(NamedTuple):
  """A C_noise, the fit, and the NLL of the held-out rows, [N] and their mean."""

  c_noise: float
  fit: lbfgs.FitResult
  nll: np.ndarray
  mean: float


@dataclasses.dataclass(frozen=True)
class NoisePath:
  """What `noise_path` finds; without held-out rows it is no noise, and None.

  Attributes:
    c_noise: the C_noise to take.
    nll: mean NLL of the held-out rows, nats, by C_noise.
    near: parameters of DET and of the chosen point, fitted to the other rows.
  """

  c_noise: float
  nll: dict[float, float] | None = None
  near: starts.Near | None = None


def noise_path(
  model: Model,
  x: np.ndarray,
  targets: Targets,
  weight: np.ndarray,
  settings: FitSettings,
  start: Any = None,
) -> NoisePath:
  """Chooses C_noise on held-out rows (`selection`).

  The fits to the other rows go from the most noise to the least. Each starts at the one before, and
  ends early: differences of a standard error decide. One that is hopeless after `PATH_TRIAL`
  iterations ends there, and its neighbour is left out. Less noise is left out where a fit is worse
  by more than a standard error than the best so far and that one has noise, and where the noise has
  vanished.
  With fewer than `selection.MIN_HELD_OUT` held-out rows nothing speaks for noise: it warns.

  Args:
    model, x, targets, weight, settings, start: as in `fit`; of rows on disk a tenth chooses.

  Raises:
    ValueError: C is infinite, or `start` is not a fit of the same rows.
  """
  if not np.isfinite(settings.c):
    raise ValueError(
      f"C_noise='auto' chooses a share of C={settings.c:g}, which must be finite: give C_noise a "
      'number'
    )
  if inputs.streams(x, settings.solver):
    x, targets, weight = stream.sample(x, targets, weight, settings.seed)
    settings = dataclasses.replace(settings, solver='lbfgs')
    start = None
  with placement.on(settings.mesh), warnings.catch_warnings():
    warnings.simplefilter('ignore', ConvergenceWarning)
    data = _Data.of(x, targets, weight, settings)
    whole = data.fit_of(start, model, settings)
    held_out = selection.held_out_rows(data.targets.main_class(), settings.seed)
    if held_out.sum() < selection.MIN_HELD_OUT:
      warnings.warn(
        f"C_noise='auto' takes no noise: it holds out one row in {selection.HELD_OUT} of each "
        f'class, and the {len(held_out)} rows of X are too few for that',
        stacklevel=3,
      )
      return NoisePath(0.0)
    fitted = np.where(held_out, 0.0, data.weight)
    weight = data.weight[held_out]
    rows = data.x[held_out], data.targets.values[held_out]

    def point(model, c_noise, det_fit=None, near=None, max_iter=None):
      limits = dataclasses.replace(settings, c_noise=c_noise)
      if isinstance(settings.progress, str):  # the title of a bar
        limits = dataclasses.replace(limits, progress=f'{settings.progress}, C_noise={c_noise:.3g}')
      if max_iter is not None:
        tol = max(settings.tol, PATH_TOLERANCE)
        limits = dataclasses.replace(limits, tol=tol, max_iter=max_iter)
      done = data.minimise(model, fitted, limits, det_fit, near, max_iter != begun)
      nll = apply(model, 'nll', done.params, data.mean, *rows, settings.mesh)
      return _Point(c_noise, done, nll, float(np.average(nll, weights=weight)))

    # Differences of a standard error need no more points of the integral.
    model = dataclasses.replace(model, num_samples=min(model.num_samples, PATH_SAMPLES))
    begun = min(settings.max_iter, PATH_TRIAL)
    rest = max(1, min(settings.max_iter, PATH_ITERATIONS) - begun)
    near = None if whole is None else starts.Near(whole.params, {})
    points = [point(model.deterministic, 0.0, near=near)]
    det = points[0].fit
    near = None
    shares = list(selection.NOISE_SHARES)
    while shares:
      c_noise = shares.pop(0) * settings.c
      new = point(model, c_noise, det, near, begun)
      least = min(points, key=lambda point: point.mean).nll
      # One that is not below DET yet has more noise than it needs, of the point before.
      has_fitted = new.fit.objective < det.objective
      is_hopeless = has_fitted and selection.is_hopeless(new.nll, least, weight)
      if is_hopeless:
        shares = shares[1:] or shares  # and its neighbour is left out, unless it is the last
      else:
        new = point(model, c_noise, det, starts.Near(det.params, new.fit.params), rest)
      points.append(new)
      best = min(points, key=lambda point: point.mean)
      has_vanished = new.fit.objective == det.objective
      is_worse = best.c_noise > 0 and not selection.is_close(new.nll, best.nll, weight)
      if has_vanished or is_worse:
        break
      near = starts.Near(det.params, new.fit.params)
  c_noise = np.array([point.c_noise for point in points])
  chosen = points[selection.least_noise(c_noise, np.stack([x.nll for x in points]), weight)]
  means = {point.c_noise: point.mean for point in points}
  return NoisePath(chosen.c_noise, means, starts.Near(det.params, chosen.fit.params))


def _fit_of(start, model, c, mean):
  """The fit of `start`, which must be DET's to the same rows."""
  if start is None:
    return None
  check_is_fitted(start)
  same = start.model_ == model.deterministic and start.C == c
  if not same or not np.array_equal(start.mean_, mean):
    raise ValueError(
      'start must be a DetClassifier fitted to the same rows and weights with the same C, tau '
      f'and hidden_layers; it is {start}'
    )
  return lbfgs.FitResult(
    start.params_, start.objective_, start.gradient_, start.n_iter_, start.gap_
  )


def tau_grid_nll(
  make_model: Callable[[float], Model],
  x: np.ndarray,
  targets: Targets,
  weight: np.ndarray,
  settings: FitSettings,
) -> dict[float, float]:
  """The mean NLL of held-out rows, nats, under the fit to the others with each tau of `TAU_GRID`.

  Args:
    make_model: the model of a tau.
    x, targets, weight, settings: as in `fit`.
  """
  _, held_out = train_test_split(
    np.flatnonzero(weight > 0),
    test_size=settings.validation_fraction,
    random_state=settings.seed,
  )
  held_out = np.sort(held_out)
  weight_of_fit = np.array(weight)
  weight_of_fit[held_out] = 0.0
  found = {}
  for tau in TAU_GRID:
    model = make_model(tau)
    done, mean = fit(model, x, targets, weight_of_fit, settings)
    of_fit = model, 'nll', done.params, mean
    nll = [
      apply(*of_fit, x[part], targets.values[part], mesh=settings.mesh)
      for part in inputs.parts(held_out, x)
    ]
    found[tau] = float(np.average(np.concatenate(nll), weights=weight[held_out]))
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
  # Inputs of many lengths share few programs, of a power of two rows where they are one block.
  size = min(objective.block_rows(model, 1 << (len(x) - 1).bit_length()), 4096)
  found = []
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


@functools.partial(compilation.jit, static_argnums=(0, 1))
def _apply(model, method, params, *arrays):
  return getattr(model, method)(params, *arrays)
