"""Adam over minibatches of rows that stay on disk, for data beyond the memory.

The objective is the same as in `lbfgs`. Each batch has its share of the penalty. The search is in
coordinates in which the features are white: one learning rate suits them, and correlated features
cost no epochs. An average of the parameters over about 1 / (1 - DECAY) steps is evaluated on
held-out rows, and returned. If its NLL has not improved in `PATIENCE` evaluations, the learning
rate is divided by four and the search continues from the best parameters. The fit ends when that
has happened `NUM_RATES` times.
"""

import copy
import functools
import itertools
import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.exceptions import ConvergenceWarning

from het_plugin.estimators import compilation, inputs, lbfgs, objective, placement, starts
from het_plugin.estimators.model import Model
from het_plugin.estimators.whitening import Whitening, unwhiten, whiten

BATCH_SIZE = 1024
LEARNING_RATE = 0.1  # over the square root of D
NUM_RATES = 3
DECAY = 0.99
PATIENCE = 2
MIN_GAIN = 1e-4  # nats of the held-out NLL
EVALUATION_STEPS = 200  # between two evaluations
MIN_EPOCH_STEPS = 16
MAX_HELD_OUT = 2**14
MOMENT_ROWS = 16  # per feature
MIN_VARIANCE = 1e-4  # of a direction of the standardised features, whose mean is 1
_READ_ROWS = 8192


class Data:
  """Rows that are read when they are asked for.

  Attributes:
    x: [N, D], in memory or mapped.
    values: `Targets.values` of all rows.
    weight: [N].
    index: the rows of positive weight.
    mean: [D].
    whitening: T [D + 1, D + 1] of `whitening`; T T^T is the inverse covariance of the features.
  """

  def __init__(self, x: np.ndarray, values: np.ndarray, weight: np.ndarray):
    """Reads all rows once; a ValueError if one is not finite."""
    self.x = x
    self.values = values
    self.weight = weight
    self.index = np.flatnonzero(weight > 0)
    total = 0.0
    first = np.zeros(x.shape[1])
    second = np.zeros(x.shape[1])
    shift = np.asarray(x[0], np.float64)  # spares digits where the mean is large
    for start in range(0, len(x), _READ_ROWS):
      block = np.asarray(x[start : start + _READ_ROWS]).astype(np.float64)
      w = weight[start : start + _READ_ROWS]
      total = total + w.sum()
      first = first + w @ (block - shift)
      second = second + w @ np.square(block - shift)
      if not np.isfinite(first).all():
        raise ValueError(f'Input X contains NaN or infinity in rows from {start} on')
      placement.forget_pages(x)
    mean = first / total
    deviation = np.sqrt(np.maximum(second / total - mean**2, 0.0))
    mean = shift + mean
    where = inputs.spread(x, mean)
    self.mean = where.centre
    self.total = total
    deviation = np.where(where.centre == mean, deviation, where.distance)
    scale = 1.0 / np.where(deviation > 1e-6 * np.abs(self.mean), deviation, 1.0)
    some = self.index[:: max(1, len(self.index) // (MOMENT_ROWS * len(mean)))]
    rows = scale * (np.asarray(x[some]) - self.mean)
    placement.forget_pages(x)
    is_near = np.abs(rows).max(axis=1) < inputs.FAR
    rows = rows[is_near] if is_near.any() else rows  # steps along a far row would be too short
    values, vectors = np.linalg.eigh(rows.T @ rows / len(rows))
    self.whitening = np.eye(len(mean) + 1)
    self.whitening[:-1, :-1] = scale[:, None] * vectors / np.sqrt(np.maximum(values, MIN_VARIANCE))

  def rows(self, model: Model, index: np.ndarray, c: float, c_noise: float) -> objective.Blocks:
    """Rows of the numbers in `index`, with their part of the penalty."""
    index = np.sort(index)
    x = np.asarray(self.x[index]).astype(np.float32)
    placement.forget_pages(self.x)
    weight = self.weight[index]
    share = weight.sum() / self.total
    of_batch = (c / share, c_noise / share)
    return objective.make_rows(model, x, self.mean, self.values[index], weight, *of_batch)


@functools.partial(compilation.jit, static_argnums=0, donate_argnums=(1, 2, 3))
def _step(model, theta, mean, state, rate, rows, whitening):
  gradient = jax.grad(lbfgs.white_objective, argnums=1)(model, theta, rows, whitening)
  updates, state = optax.scale_by_adam().update(gradient, state)
  theta = jax.tree.map(lambda x, u: x - rate * u, theta, updates)
  return theta, optax.incremental_update(theta, mean, 1 - DECAY), state


@functools.partial(compilation.jit, static_argnums=0)
def _mean_nll(model, theta, rows, whitening):
  return objective.mean_nll(model, unwhiten(model, theta, whitening), rows)


def fit(
  model: Model,
  data: Data,
  class_shares: np.ndarray,
  seed: int,
  c: float,
  c_noise: float,
  *,
  validation_fraction: float,
  max_iter: int,
  progress: bool | str,
  mesh: Sequence[int] | None,
  det_fit: lbfgs.FitResult | None,
) -> lbfgs.FitResult:
  """Fits a model; the objective of the result is the NLL of the held-out rows.

  DET and the noise take `max_iter` epochs each at most. The seed is that of hidden layers, noise,
  order and held-out rows. `class_shares` [K] and `det_fit` are as in `starts.fit`.
  """
  rng = np.random.default_rng(seed)
  order = rng.permutation(data.index)
  num_held_out = min(max(1, int(validation_fraction * len(order))), MAX_HELD_OUT)
  held_out = order[:num_held_out]
  index = order[num_held_out:]
  width = data.x.shape[1]
  search = functools.partial(
    _search, data, index, held_out, rng, c, c_noise, max_iter=max_iter, progress=progress, mesh=mesh
  )
  first = index[: max(16, 2**23 // width)]
  sample = functools.partial(data.rows, model, first, c, c_noise)
  return starts.fit(search, model, width, class_shares, sample, seed, det_fit)


def _search(data, index, held_out, rng, c, c_noise, model, params, *, max_iter, progress, mesh):
  rng = copy.deepcopy(rng)  # every search sees the rows in the same order
  whitening = Whitening(jnp.asarray(data.whitening, jnp.float32))
  theta = whiten(model, jax.tree.map(jnp.asarray, params), whitening)
  theta = placement.place_params(model, theta, mesh)
  state = optax.scale_by_adam().init(theta)
  size = max(1, min(BATCH_SIZE, len(index) // MIN_EPOCH_STEPS))
  per_epoch = len(index) // size
  rows = functools.partial(data.rows, model, c=c, c_noise=c_noise)

  def validate(theta):
    parts = [held_out[i : i + _READ_ROWS] for i in range(0, len(held_out), _READ_ROWS)]
    nll = [
      float(_mean_nll(model, theta, placement.place_rows(rows(p), mesh), whitening)) for p in parts
    ]
    return float(np.average(nll, weights=[data.weight[p].sum() for p in parts]))

  rate = LEARNING_RATE / np.sqrt(data.x.shape[1])
  num_rates = 0
  waited = 0
  step = 0
  period = min(EVALUATION_STEPS, max_iter * per_epoch)
  best = theta
  best_nll = validate(theta)
  theta, mean = jax.tree.map(jnp.copy, (best, best))
  note = ''
  with lbfgs.progress_of(progress, model.head, max_iter * per_epoch, 'steps') as bar:
    for epoch in itertools.count():
      if epoch == max_iter or num_rates == NUM_RATES:
        break
      order = rng.permutation(index)
      for i in range(per_epoch):
        batch = placement.place_rows(rows(order[i * size : (i + 1) * size]), mesh)
        theta, mean, state = _step(model, theta, mean, state, rate, batch, whitening)
        step += 1
        bar.update(1, note)
        if step % period:
          continue
        nll = validate(mean)
        note = f'held-out NLL {nll:.5f}, learning rate {rate:.1e}'
        waited = 0 if nll < best_nll - MIN_GAIN else waited + 1
        if nll < best_nll:
          best = jax.tree.map(jnp.copy, mean)
          best_nll = nll
        if waited == PATIENCE:
          theta, mean = jax.tree.map(jnp.copy, (best, best))
          state = optax.scale_by_adam().init(best)
          rate = rate / 4
          num_rates = num_rates + 1
          waited = 0
          if num_rates == NUM_RATES:
            break
  if num_rates < NUM_RATES:
    warnings.warn(
      f'{model.head} has not converged: the NLL of the held-out rows still falls after '
      f'max_iter={max_iter} epochs',
      ConvergenceWarning,
      stacklevel=2,
    )
  params = jax.tree.map(np.asarray, unwhiten(model, best, whitening))
  return lbfgs.FitResult(params, best_nll, float('nan'), epoch, float('nan'))
