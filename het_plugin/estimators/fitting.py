"""Fits of models to rows, in memory or on disk, and what they say of rows."""

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
from het_plugin.estimators.settings import FitSettings
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


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
  """Rows to fit heads to: in memory, without those of weight 0, or on disk.

  Attributes:
    features: N rows.
    targets: their labels.
    weight: [N], at least 0.
    mean: [D], the centre of `Features.spread`, which is subtracted from the features.
    far: in memory its rows are moved already.
    on_disk: whether a fit reads the rows again and again.
    settings: of the fits.
    seed: of hidden layers, noise and splits.
  """

  features: inputs.Features
  targets: Targets
  weight: np.ndarray
  mean: np.ndarray
  far: inputs.Far
  on_disk: bool
  settings: FitSettings
  seed: int

  @classmethod
  def of(
    cls,
    features: inputs.Features,
    targets: Targets,
    weight: np.ndarray,
    settings: FitSettings,
    seed: int,
  ) -> 'Problem':
    """The problem of all rows; arguments as the attributes.

    Raises:
      ValueError: rows of a file are not finite.
    """
    on_disk = inputs.streams(features.x, settings.solver)
    if not on_disk:
      keep = weight > 0
      features = features[keep]
      values = targets.values[keep]
      weight = weight[keep]
      if features.x.size <= MERGED_ENTRIES:
        features, values, weight = features.distinct(values, weight)
      targets = dataclasses.replace(targets, values=values)
    where = features.spread(weight)
    far = features.far(weight, where)
    if len(far.moved) and not on_disk:
      x = np.array(features.x)
      x[far.moved] = far.values
      features = inputs.Features(x)
    return cls(features, targets, weight, where.centre, far, on_disk, settings, seed)

  def under(self, **changes: Any) -> 'Problem':
    """The same rows under other settings."""
    return dataclasses.replace(self, settings=dataclasses.replace(self.settings, **changes))

  def fit(
    self, model: Model, c_noise: float, start: Any = None, near: starts.Near | None = None
  ) -> lbfgs.FitResult:
    """Fits a model.

    Args:
      model: the model.
      c_noise: inverse strength of the regularisation of its noise; 0 is no noise.
      start: a fitted `DetClassifier` where the noise starts; None fits DET first.
      near: of `noise_path`, where the searches start, in memory.

    Raises:
      ValueError: `start` is not a fit of the same rows and settings.
    """
    fitted = model if c_noise else model.deterministic
    with placement.on(self.settings.mesh):
      det_fit = None if start is None else self.fit_of(start, model)
      stoppable = contextlib.nullcontext()
      if self.on_disk and not resuming.are_kept():
        # Ctrl-C ends the searches, which keep what they have.
        stoppable = stopping.handled(lambda: True, lambda: None)
      with stoppable:
        done = self.minimise(fitted, self.weight, c_noise, det_fit, near)
        if len(self.far.alone):
          done = self._bounded(fitted, c_noise, done)
    if fitted != model:
      params = starts.without_noise(model.init(self.seed, self.features.width), done.params)
      done = dataclasses.replace(done, params=params)
    return done

  def fit_of(self, start: Any, model: Model) -> lbfgs.FitResult:
    """The fit of `start`, which must be DET's to the same rows, labels and weights."""
    check_is_fitted(start)
    det = model.deterministic
    same = getattr(start, 'model_', None) == det and start.C == self.settings.C
    if not same or not np.array_equal(start.mean_, self.mean):
      raise ValueError(
        'start must be a DetClassifier fitted to the same rows and weights with the same C, tau '
        f'and hidden_layers; it is {start}'
      )
    nll = self.nll(det, start.params_)
    penalty = float(det.penalty(start.params_)[0]) / (2 * self.settings.C)
    value = (self.weight @ nll + penalty) / self.weight.sum()
    # One that was stopped may have the objective of a part of the rows.
    is_stopped = self.on_disk and stopping.agreed()
    if not is_stopped and not np.isclose(value, start.objective_, rtol=1e-4, atol=1e-6):
      raise ValueError(
        f'start has the objective {start.objective_:.6g}, and {value:.6g} for these rows: it must '
        'be fitted to the same labels and sample_weight, in memory'
      )
    value = float(value) if is_stopped else start.objective_
    return lbfgs.FitResult(start.params_, value, start.gradient_, start.n_iter_, start.gap_)

  def nll(self, model: Model, params: dict, rows: np.ndarray | None = None) -> np.ndarray:
    """NLL of the rows, or of some of them, [N]."""
    features = self.features if rows is None else self.features[rows]
    values = self.targets.values if rows is None else self.targets.values[rows]
    return apply(model, 'nll', params, self.mean, features, values, self.settings.mesh)

  def minimise(
    self,
    model: Model,
    weight: np.ndarray,
    c_noise: float,
    det_fit: lbfgs.FitResult | None,
    near: starts.Near | None = None,
    falls_back: bool = True,
  ) -> lbfgs.FitResult:
    """The fit to rows with these weights [N], which may be 0.

    DET is fitted first, from `near` if it is given, unless `det_fit` is its fit. The result is
    DET's where noise has a worse objective, if it `falls_back`.
    """
    settings = self.settings
    of_rows = model, self.features.x, self.mean, self.targets.values, weight
    strengths = settings.C, c_noise or 1.0
    if self.on_disk:
      rows = stream.make_stream(*of_rows, self.far, *strengths, settings.mesh)
    else:
      rows = placement.place_rows(objective.make_rows(*of_rows, *strengths), settings.mesh)
    search = _Search(rows, settings, stopping.agreed if self.on_disk else lambda: False)
    if det_fit is None:
      det = model.deterministic
      if near:
        start = near.det
      else:
        params = det.init(self.seed, self.features.width)
        start = starts.det_start(det, params, self.targets.class_shares(weight))
      det_fit = search.best(det, start)
    if model.head == 'det':
      return det_fit
    num_iterations = det_fit.num_iterations
    if near:
      start = near.noisy
    else:
      start = starts.noisy_start(model, det_fit.params, search.rows, self.seed)
      grown = search.grown(model, start)
      start = grown.params
      num_iterations += grown.num_iterations
    noisy = search.best(model, start)
    num_iterations += noisy.num_iterations
    if falls_back and not noisy.objective <= det_fit.objective + TOLERANCE:
      noisy = dataclasses.replace(det_fit, params=starts.without_noise(start, det_fit.params))
    return dataclasses.replace(noisy, num_iterations=num_iterations)

  def _bounded(self, model: Model, c_noise: float, done: lbfgs.FitResult) -> lbfgs.FitResult:
    """The fit with a gap that holds where rows are far from the others.

    A far row has a curvature so large that float32 may see no slope in other directions. But its
    loss is not negative, so no parameters have less than the least objective of the other rows. The
    gap is at most the distance from that one.
    """
    weight = self.weight.copy()
    weight[self.far.alone] = 0.0
    if not weight.any():
      return done
    with warnings.catch_warnings():
      warnings.simplefilter('ignore', ConvergenceWarning)
      near = starts.Near(done.params, done.params)
      others = self.minimise(model, weight, c_noise, None if model.head == 'det' else done, near)
    least = (others.objective - others.gap) * weight.sum() / self.weight.sum()
    gap = max(done.gap, done.objective - least)
    if gap - done.gap > max(self.settings.tol, _SEEN_GAP):
      warnings.warn(
        f'{len(self.far.alone)} of the {len(self.features)} rows of X are more than {inputs.FAR:g} '
        f'times as far from the centre as most: the objective of {model.head} may be up to '
        f'{gap:.1g} nats above its optimum, which is what these rows cost; float32 does not tell '
        'more',
        ConvergenceWarning,
        stacklevel=4,
      )
    return dataclasses.replace(done, gap=gap)


@dataclasses.dataclass(frozen=True, eq=False)
class _Search:
  """Searches for the parameters with the least objective.

  Attributes:
    rows: `objective.Blocks`, or a `stream.Stream`.
    settings: tolerance, number of iterations and progress.
    stops: whether to end with what is found.
  """

  rows: Any
  settings: FitSettings
  stops: Callable[[], bool]

  def best(self, model: Model, params: dict) -> lbfgs.FitResult:
    """The fit from `params`, to parts of the rows first where they are on disk."""
    settings = self.settings
    progress = settings.progress
    num_iterations = 0
    for part, gap, title in self.rows.stages(model):
      if title and settings.progress:
        before = [settings.progress] if isinstance(settings.progress, str) else []
        progress = ', '.join([*before, title])
      params = placement.place_params(model, params, settings.mesh)
      limits = {'tol': settings.tol, 'max_iter': settings.max_iter, 'gap': gap}
      with warnings.catch_warnings():
        if part is not self.rows:
          warnings.simplefilter('ignore', ConvergenceWarning)
        done = resuming.minimise(model, params, part, **limits, progress=progress, stops=self.stops)
      params = done.params
      num_iterations += done.num_iterations
      if part is not self.rows and self.stops():
        warnings.warn(
          f'{model.head} has not converged: it was stopped when it was fitted to a part of the '
          'rows',
          ConvergenceWarning,
          stacklevel=2,
        )
        break
    return dataclasses.replace(done, num_iterations=num_iterations)

  def grown(self, model: Model, params: dict) -> lbfgs.FitResult:
    """A short search with less regularisation of the noise. Under the full one, noise in slightly
    wrong directions vanishes before it has turned to better ones.
    """
    first, *_ = next(self.rows.stages(model))
    weaker = dataclasses.replace(first, noise_strength=first.noise_strength / GROWTH)
    max_iter = min(GROWTH_ITERATIONS, self.settings.max_iter)
    settings = dataclasses.replace(self.settings, max_iter=max_iter)
    with warnings.catch_warnings():
      warnings.simplefilter('ignore', ConvergenceWarning)
      return dataclasses.replace(self, rows=weaker, settings=settings).best(model, params)


class _Point(NamedTuple):
  """A C_noise, the fit, and the NLL of the held-out rows, [N] and their mean."""

  c_noise: float
  fit: lbfgs.FitResult
  nll: np.ndarray
  mean: float


class NoisePath(NamedTuple):
  """What `noise_path` finds; without held-out rows it is no noise, and None.

  Attributes:
    c_noise: the C_noise to take.
    nll: mean NLL of the held-out rows, nats, by C_noise.
    near: parameters of DET and of the chosen point, fitted to the other rows.
  """

  c_noise: float
  nll: dict[float, float] | None = None
  near: starts.Near | None = None


def noise_path(model: Model, problem: Problem, start: Any = None) -> NoisePath:
  """Chooses C_noise on held-out rows (`selection`).

  The fits to the other rows go from the most noise to the least. Each starts at the one before, and
  ends early: differences of a standard error decide. One that is hopeless after `PATH_TRIAL`
  iterations ends there, and its neighbour is left out. Less noise is left out where a fit is worse
  by more than a standard error than the best so far and that one has noise, and where the noise has
  vanished.
  With fewer than `selection.MIN_HELD_OUT` held-out rows nothing speaks for noise: it warns.

  Args:
    model: the model.
    problem: its rows; of those on disk a tenth chooses. C is finite.
    start: as in `Problem.fit`.

  Raises:
    ValueError: `start` is not a fit of the same rows.
  """
  settings = problem.settings
  if problem.on_disk:
    some = stream.sample(problem.features, problem.targets, problem.weight, problem.seed)
    settings = dataclasses.replace(settings, solver='lbfgs')
    problem = Problem.of(*some, settings, problem.seed)
    start = None
  with placement.on(settings.mesh), warnings.catch_warnings():
    warnings.simplefilter('ignore', ConvergenceWarning)
    whole = None if start is None else problem.fit_of(start, model)
    held_out = selection.held_out_rows(problem.targets.main_class(), problem.seed)
    if held_out.sum() < selection.MIN_HELD_OUT:
      warnings.warn(
        f"C_noise='auto' takes no noise: it holds out one row in {selection.HELD_OUT} of each "
        f'class, and the {len(held_out)} rows of X are too few for that',
        stacklevel=3,
      )
      return NoisePath(0.0)
    fitted = np.where(held_out, 0.0, problem.weight)
    weight = problem.weight[held_out]
    # Differences of a standard error need no more points of the integral, iterations and digits.
    rough = dataclasses.replace(model, num_samples=min(model.num_samples, PATH_SAMPLES))
    trial = {
      'tol': max(settings.tol, PATH_TOLERANCE),
      'max_iter': min(settings.max_iter, PATH_TRIAL),
    }
    rest = trial | {'max_iter': max(1, min(settings.max_iter, PATH_ITERATIONS) - trial['max_iter'])}

    def point(model, c_noise, det_fit, near, limits, falls_back=True):
      if isinstance(settings.progress, str):  # the title of a bar
        limits = limits | {'progress': f'{settings.progress}, C_noise={c_noise:.3g}'}
      of_rows = problem.under(**limits)
      done = of_rows.minimise(model, fitted, c_noise, det_fit, near, falls_back)
      nll = problem.nll(model, done.params, held_out)
      return _Point(c_noise, done, nll, float(np.average(nll, weights=weight)))

    near = None if whole is None else starts.Near(whole.params, {})
    points = [point(model.deterministic, 0.0, None, near, {})]
    det = points[0].fit
    near = None
    shares = list(selection.NOISE_SHARES)
    while shares:
      c_noise = shares.pop(0) * settings.C
      new = point(rough, c_noise, det, near, trial, falls_back=False)
      least = min(points, key=lambda point: point.mean).nll
      # One that is not below DET yet has more noise than it needs, of the point before.
      has_fitted = new.fit.objective < det.objective
      if has_fitted and selection.is_hopeless(new.nll, least, weight):
        shares = shares[1:] or shares  # and its neighbour is left out, unless it is the last
      else:
        new = point(rough, c_noise, det, starts.Near(det.params, new.fit.params), rest)
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


def tau_grid_nll(
  make_model: Callable[[float], Model],
  c_noise: float,
  features: inputs.Features,
  targets: Targets,
  weight: np.ndarray,
  settings: FitSettings,
  seed: int,
) -> dict[float, float]:
  """The mean NLL of held-out rows, nats, under the fit to the others with each tau of `TAU_GRID`.

  Args:
    make_model: the model of a tau.
    c_noise: as in `Problem.fit`.
    features, targets, weight, settings, seed: as in `Problem.of`.
  """
  _, held_out = train_test_split(
    np.flatnonzero(weight > 0), test_size=settings.validation_fraction, random_state=seed
  )
  held_out = np.sort(held_out)
  weight_of_fit = np.array(weight)
  weight_of_fit[held_out] = 0.0
  problem = Problem.of(features, targets, weight_of_fit, settings, seed)
  found = {}
  for tau in TAU_GRID:
    model = make_model(tau)
    of_fit = model, 'nll', problem.fit(model, c_noise).params, problem.mean
    rows = features.some(held_out), targets.values[held_out]
    found[tau] = float(np.average(apply(*of_fit, *rows, settings.mesh), weights=weight[held_out]))
  return found


def apply(
  model: Model,
  method: str,
  params: dict[str, Any],
  mean: np.ndarray,
  features: inputs.Features,
  target: np.ndarray | None = None,
  mesh: Sequence[int] | None = None,
) -> np.ndarray:
  """A method of the model for N rows, computed in blocks of one shape. Each of several processes
  reads and computes those of its own devices.

  Args:
    model: the model.
    method: its name, of (params, x) or (params, x, target).
    params, mean: of a `Problem` and its fit.
    features: the rows.
    target: `Targets.values`.
    mesh: (data, model) numbers of devices.

  Returns:
    [N, ...].
  """
  # Inputs of many lengths share few programs, of a power of two rows where they are one block.
  size = min(
    objective.block_rows(model, 1 << (len(features) - 1).bit_length(), features.width), 4096
  )

  def from_mean(rows: slice) -> np.ndarray:
    x = inputs.widened(np.asarray(features.x[rows])) - mean
    # An infinite row becomes NaN, and so do its outputs, which all processes see. A sigmoid of
    # infinity would be finite.
    return np.where(np.isfinite(x), x, np.nan) if features.is_mapped else x

  sources: list[tuple[Callable, tuple]] = [(from_mean, (features.width,))]
  if target is not None:
    sources.append((target.__getitem__, target.shape[1:]))

  def read(source, start, rows):  # what is after the last row is 0
    found = source(slice(start + rows.start, start + rows.stop))
    padding = rows.stop - rows.start - len(found)
    return np.pad(found, [(0, padding), *[(0, 0)] * (found.ndim - 1)])

  whole = np.zeros(0)
  with placement.on(mesh):
    params = model.multiplied(placement.place_params(model, params, mesh))
    for start in range(0, len(features), size):
      block = [
        placement.cut(functools.partial(read, source, start), (size, *shape), mesh)
        for source, shape in sources
      ]
      found = placement.whole(_apply(model, method, params, *block))
      if features.is_mapped and not np.isfinite(found).all():
        features.read(slice(start, start + size))  # every process says which row is wrong
      placement.forget_pages(features.x)
      if not start:
        whole = np.empty((len(features), *found.shape[1:]), found.dtype)
      whole[start : start + size] = found[: len(features) - start]
  return whole


@functools.partial(compilation.jit, static_argnums=(0, 1))
def _apply(model, method, params, *arrays):
  return getattr(model, method)(params, *arrays)
