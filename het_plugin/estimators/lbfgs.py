"""Full-batch L-BFGS to a gradient tolerance."""

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from sklearn.exceptions import ConvergenceWarning

from het_plugin.estimators import compilation, objective, placement
from het_plugin.estimators.model import Model
from het_plugin.estimators.whitening import unwhiten, whiten, whitening_of
from het_plugin.reporting import Progress

MEMORY = 20
FIRST_SECONDS = 2.0
LINE_SECONDS = 10.0  # of a fit that shows how far it is
MAX_LINE_SEARCH_STEPS = 30
FIRST_STAGE = 20
MAX_RATIO = 0.8
GAP_SHARE = 0.01  # at 0.1, HET-XL ended on plateaus 0.05 nats above what it found later
VALUE_TOLERANCE = 1e-6  # relative rounding of the objective in float32


@dataclasses.dataclass(frozen=True)
class FitResult:
  """Parameters at the end of a fit, and how it ended.

  Attributes:
    params: parameters of the `Model`.
    objective: mean over rows, with the penalty, nats.
    gradient: largest entry of the gradient of the objective in white coordinates.
    num_iterations: L-BFGS iterations.
    gap: how far the objective may be above the optimum, an estimate (`gap_of`), nats.
  """

  params: dict
  objective: float
  gradient: float
  num_iterations: int
  gap: float


def _at(model, theta, direction, step, whitening):
  """theta + step * direction, and the parameters there, of `Model.multiplied`."""
  theta = jax.tree.map(lambda x, d: x + step * d, theta, direction)
  return theta, model.multiplied(unwhiten(model, theta, whitening))


def _gathered(model, theta, direction, totals, scales, whitening):
  """Objective, gradient, slope and largest entry at theta, from the sums over all rows."""
  weight, strength, noise_strength = scales

  def of_theta(theta):
    params = unwhiten(model, theta, whitening)
    of_location, of_noise = model.penalty(params)
    penalty = 0.5 * (strength * of_location + noise_strength * of_noise)
    return model.multiplied(params), penalty

  total, of_params = totals
  (_, penalty), pull = jax.vjp(of_theta, theta)
  (gradient,) = pull((of_params, jnp.ones_like(penalty)))
  gradient = jax.tree.map(lambda x: x / weight, gradient)
  largest = jnp.stack([jnp.abs(x).max() for x in jax.tree.leaves(gradient)]).max()
  slope = optax.tree.vdot(gradient, direction)
  return (total + penalty) / weight, gradient, slope, largest


@functools.partial(compilation.jit, static_argnums=0)
def _evaluate(model, theta, direction, step, rows, whitening):
  """theta + step * direction, and there the objective, its gradient, slope and largest entry."""
  theta, params = _at(model, theta, direction, step, whitening)
  totals = objective.add(model, params, objective.nothing(params), rows)
  return theta, *_gathered(model, theta, direction, totals, rows.scales, whitening)


_at_once = compilation.jit(_at, static_argnums=0)
_gather = compilation.jit(_gathered, static_argnums=0)
_add = compilation.jit(objective.add, static_argnums=0, donate_argnums=2)


def _evaluate_stream(model, theta, direction, step, rows, whitening):
  """`_evaluate` for rows of a file: a program per chunk, while the next one is read."""
  theta, params = _at_once(model, theta, direction, step, whitening)
  totals = objective.nothing(params)
  for chunk in rows.chunks():
    jax.block_until_ready(totals)  # no more than two chunks are in memory
    totals = _add(model, params, totals, chunk)
  return theta, *_gather(model, theta, direction, totals, rows.scales, whitening)


def _as_vector(tree):
  """The tree as one vector, filled up with zeros so that a mesh can cut it, and the way back.

  L-BFGS takes a vector because its program for a tree of six arrays took four times as long to
  compile.
  """
  vector, to_tree = ravel_pytree(tree)
  size = len(vector)
  return jnp.pad(vector, (0, -size % 128)), lambda x: to_tree(x[:size])


@compilation.jit
def _no_memory(theta):
  # Not compiled, its two memories would be one array, which `_direction` cannot be given twice.
  return optax.scale_by_lbfgs(MEMORY).init(_as_vector(theta)[0])


@functools.partial(compilation.jit, donate_argnums=2)
def _direction(theta, gradient, state):
  """Minus the inverse curvature times the gradient, its slope, and L-BFGS' memory."""
  theta, to_tree = _as_vector(theta)
  gradient, _ = _as_vector(gradient)
  update, state = optax.scale_by_lbfgs(MEMORY).update(gradient, state, theta)
  scaled = jnp.asarray(update)  # a vector, as the gradient
  return to_tree(-scaled), -jnp.vdot(gradient, scaled), state


def _line_search(evaluate, value, slope):
  """Finds a step that satisfies the weak Wolfe conditions.

  After a step that is too long the next one is the minimum of the cubic with the values and slopes
  at both ends of the bracket, or its middle if that minimum is close to an end. If float32 cannot
  tell the values apart, the approximate conditions of Hager and Zhang (2005) are used. Returns the
  result of `evaluate` at the step, or None if there is no such step.
  """
  low = (0.0, value, slope)
  high = None
  step = 1.0
  for _ in range(MAX_LINE_SEARCH_STEPS):
    found = evaluate(step)
    end = step, float(found[1]), float(found[3])
    _, new_value, new_slope = end
    close = new_value <= value + VALUE_TOLERANCE * abs(value)
    lower = new_value <= value + 1e-4 * step * slope or (close and new_slope <= -0.9998 * slope)
    if not lower:
      high = end
    elif new_slope < 0.9 * slope:
      low = end
    else:
      return found
    step = 2 * step if high is None else _between(low, high)
  return None


def _between(low, high):
  """The next step between two of (step, value, slope)."""
  (a, value_a, slope_a), (b, value_b, slope_b) = low, high
  d = slope_a + slope_b - 3 * (value_b - value_a) / (b - a)
  square = d * d - slope_a * slope_b
  if square >= 0:  # not if a value is infinite
    root = math.sqrt(square)
    total = slope_b - slope_a + 2 * root
    if total > 0 and 0.1 <= (share := 1 - (slope_b + root - d) / total) <= 0.9:
      return a + share * (b - a)
  return (a + b) / 2


def progress_of(progress: bool | str, head: str, total: int, unit: str) -> Progress:
  """The progress of a fit, as `DetClassifier.progress` asks for it."""
  is_title = isinstance(progress, str)
  title, seconds = (f'{progress}: {head}', LINE_SECONDS) if is_title else (head, math.inf)
  shown = bool(progress)
  return Progress(title, total, unit=unit, seconds=seconds, first=FIRST_SECONDS, shown=shown)


def gap_of(values: Sequence[float], by_curvature: float) -> float:
  """How far the objective may be above the optimum, nats.

  It is the larger one of g^T H g / 2, the fall to the minimum of a quadratic with L-BFGS' inverse
  curvature H, and of what is left if the objective goes on to fall as in the last half of the
  iterations: d_2 r / (1 - r), where d_1 and d_2 are the falls in the two last quarters, and
  r = d_2 / d_1 up to `MAX_RATIO` (Aitken). The first is too small where the search is slow.

  Args:
    values: objective at the start and after each iteration.
    by_curvature: g^T H g / 2.
  """
  window = max((len(values) - 1) // 4, min(5, (len(values) - 1) // 2))
  if window == 0:
    return by_curvature
  before = values[-1 - 2 * window] - values[-1 - window]
  after = values[-1 - window] - values[-1]
  ratio = min(after / before, MAX_RATIO) if before > 0 else MAX_RATIO
  return max(by_curvature, after * ratio / (1.0 - ratio))


def _iterations_left(gradients: Sequence[float], tol: float) -> float | None:
  """How many more until the gradient is `tol`, if it goes on to fall as in the last ones."""
  recent = np.log(gradients[-10:])
  if len(recent) < 3:
    return None
  slope = np.polyfit(np.arange(len(recent)), recent, 1)[0]
  return max(1.0, (recent[-1] - math.log(tol)) / -slope) if slope < 0 else None


def _so_far(model, theta, whitening, *numbers):
  return FitResult(placement.whole(unwhiten(model, theta, whitening)), *numbers)


class StoppedError(Exception):
  """Somebody ends the fit, which keeps its best parameters."""


def minimise(
  model: Model,
  params: dict,
  rows: Any,
  *,
  tol: float,
  max_iter: int,
  progress: bool | str,
  gap: float = 0.0,
  stops: Callable[[], bool] = lambda: False,
  keep: Callable[[Callable[[], FitResult]], None] = lambda make: None,
) -> FitResult:
  """Minimises the objective from `params`.

  After 20, 60, 140, ... iterations, and when it is about to end, the search starts again in
  coordinates that are white at the current parameters, and with the draws there. It ends when the
  largest entry of the gradient in these coordinates is at most `tol`, or when the gap is at most
  `gap`, or, with noise, at most tol / 100: float32 does not tell what is left. Warns
  (`ConvergenceWarning`) if none is so after `max_iter` iterations, if no step lowers the objective
  in float32, or if it was stopped.

  Args:
    model: the model.
    params: where the search starts.
    rows: `objective.Blocks`, or a `stream.Stream`.
    tol, max_iter, progress: see `DetClassifier`.
    gap: nats.
    stops: whether the search is to be stopped.
    keep: called after each iteration with a function that gives what has been found so far.
  """
  is_det = model.head == 'det'
  close = gap if is_det else max(gap, GAP_SHARE * tol)
  evaluate_at = _evaluate if isinstance(rows, objective.Blocks) else _evaluate_stream
  num_iterations = 0
  stage = FIRST_STAGE
  failures = 0
  values = []
  gradients = []
  left = math.inf  # the gap
  value = math.nan
  largest = math.inf
  is_close = False
  is_stopped = False
  with progress_of(progress, model.head, max_iter, 'iterations') as bar:
    for restart in itertools.count():
      try:
        whitening = whitening_of(model, params, rows)
        drawn = rows.drawn(model, params)
        evaluate = functools.partial(evaluate_at, model, rows=drawn, whitening=whitening)
        theta = whiten(model, params, whitening)
        state = _no_memory(theta)
        theta, value, gradient, _, largest = evaluate(theta, theta, 0.0)
      except StoppedError:
        is_stopped = True
        break
      is_close |= restart > 0 and float(largest) <= tol
      if is_close or failures > 1 or not np.isfinite(value):
        if num_iterations == 0:  # it starts at the optimum, with a curvature of about one
          left = float(np.square(ravel_pytree(gradient)[0]).sum()) / 2
        break
      values = values or [float(value)]
      end = min(num_iterations + stage, max_iter)
      while float(largest) > tol and num_iterations < end and not is_close:
        direction, slope, state = _direction(theta, gradient, state)
        along = functools.partial(evaluate, theta, direction)
        try:
          if stops():
            raise StoppedError
          found = _line_search(along, float(value), float(slope))
        except StoppedError:
          is_stopped = True
          break
        if found is None:
          failures += 1
          break
        theta, value, gradient, _, largest = found
        num_iterations += 1
        values.append(float(value))
        left = gap_of(values, -float(slope) / 2)
        is_close = left <= close and (is_det or num_iterations >= FIRST_STAGE)
        gradients.append(float(largest))
        note = f'objective {value:.6f}, gradient {largest:.1e}'
        bar.update(1, note, _iterations_left(gradients, tol))
        so_far = float(value), float(largest), num_iterations, left
        keep(functools.partial(_so_far, model, theta, whitening, *so_far))
      params = unwhiten(model, theta, whitening)
      if num_iterations >= max_iter or is_stopped:
        break
      stage *= 2
  if is_stopped or not (is_close or float(largest) <= tol):
    reason = 'no step lowers it in float32' if failures > 1 else f'max_iter={max_iter} is reached'
    reason = 'it was stopped' if is_stopped else reason
    warnings.warn(
      f'{model.head} has not converged: the objective may be {left:.1g} nats above its optimum '
      f'(estimated), the gradient is {largest:.1e}, above tol={tol:g}, and {reason}',
      ConvergenceWarning,
      stacklevel=2,
    )
  params = placement.whole(params)
  return FitResult(params, float(value), float(largest), num_iterations, left)
