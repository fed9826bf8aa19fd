"""Where noise helps DET most: the directions in which a fit of a noisy head starts.

With noise of a small covariance Sigma in the logits, the log-likelihood of a softmax grows by
tr(Sigma H) / 2, with p the prediction, t one label (one-hot) and

    H = E[(t - p)(t - p)^T] - E[diag(p) - p p^T]

by how much the labels vary more than p says. This is diag(E[t - p]) - A - A^T with
A = E[(t - p) p^T], where t may be the shares of several labels. For a sigmoid
H = diag(E[(t - p) (1 - 2 p)]). With B the map from the noise space to the logits, the directions
are the leading eigenvectors of B H B^T.
"""

import functools
from typing import Any

import jax
import numpy as np
from scipy.sparse import linalg

from het_plugin.estimators import compilation, placement, targets
from het_plugin.estimators.model import Model
from het_plugin.integrate import Hashed, Linear

# Predictions [n, K] of the rows that H is taken over have at most so many entries.
ENTRIES = 2**22
MIN_SIZE = 1e-2  # W of a DET that has learned little would ask for noise without bound
_DENSE = 1024  # up to this size of the noise space all eigenvectors are computed


def noise_directions(model: Model, det: dict, params: dict, rows: Any, count: int) -> np.ndarray:
  """The leading directions, float32 [count, Q], of mean square 1 in the logits, or of less
  where W maps them to less than others.

  `det` are the parameters of DET at its optimum, `params` the initial ones of the model with noise,
  whose W' is used if it has one.
  """
  size, to_logits, from_logits = noise_map(model, det, params)
  p, gap = _residuals(model, det, rows)

  def product(z):  # [Q, n]
    u = to_logits(z.astype(np.float32))
    if model.link == 'sigmoid':
      h = (gap * (1 - 2 * p)).sum(axis=0)[:, None] * u
    else:
      h = gap.sum(axis=0)[:, None] * u - gap.T @ (p @ u) - p.T @ (gap @ u)
    return from_logits(h) / len(p)

  rng = np.random.default_rng(0)
  found = rng.normal(size=(count, size)).astype(np.float32)
  num = min(count, size - 1)
  if size <= _DENSE:
    matrix = product(np.eye(size))
    vectors = np.linalg.eigh((matrix + matrix.T) / 2)[1][:, ::-1]
  else:
    shape = (size, size)

    def matvec(z):
      return product(z.reshape(size, 1)).ravel()

    # The stub has the arguments of LinearOperator's subclasses.
    operator = linalg.LinearOperator(shape, matvec, dtype=np.float32)  # ty: ignore[parameter-already-assigned]
    values, vectors = linalg.eigsh(operator, num, which='LA', v0=rng.normal(size=size), tol=1e-2)
    vectors = vectors[:, np.argsort(-values)]
  found[:num] = vectors[:, :num].T
  found /= np.linalg.norm(found, axis=1, keepdims=True)
  in_logits = np.sqrt(np.mean(np.square(to_logits(found.T)), axis=0))
  # W may map a direction to nothing: it stays of the size that suits most directions.
  typical = np.sqrt(np.mean(np.square(to_logits(rng.normal(size=(size, 16)).astype(np.float32)))))
  return found / np.maximum(in_logits, max(typical / np.sqrt(size), MIN_SIZE))[:, None]


@functools.partial(compilation.jit, static_argnums=0)
def _location_prob(model, params, x):
  return model.location_prob(params, x)


def _residuals(model, det, rows):
  """p and w (t - p), [n, K], of evenly spaced rows."""
  some = placement.whole(rows.some(max(1, ENTRIES // model.num_classes)))
  p = []
  gap = []
  for x, *of_block in zip(some.x, some.target, some.weight, strict=True):
    predicted = placement.whole(_location_prob(model, det, x))
    target, weight = of_block
    shares = targets.shares_of(target, predicted.shape[1]).astype(np.float32)
    p.append(predicted)
    gap.append((shares - predicted) * weight[:, None])
  return np.concatenate(p), np.concatenate(gap)


def noise_map(model, det, params):
  """Q, and B^T: [Q, n] to [K, n], and B back, of the head with the location of DET."""
  params = {**det, 'head': {**params['head'], **det['head']}}
  row = np.zeros((1, det.get('hidden_0', det['head'])['kernel'].shape[0]), np.float32)
  num_classes = model.num_classes
  size = _noise_dim(model, params, row)
  match jax.jit(lambda params: model.logits(params, row).projection)(params):
    case Linear(kernel):
      kernel = np.asarray(kernel)[:, :num_classes]
      return size, lambda z: kernel.T @ z, lambda u: kernel @ u
    case Hashed(buckets):
      buckets = np.asarray(buckets)[:num_classes]
      held = np.zeros((num_classes, size), np.float32)
      held[np.arange(num_classes), buckets] = 1.0
      return size, lambda z: z[buckets], lambda u: held.T @ u
  padding = [(0, size - num_classes), (0, 0)]
  return size, lambda z: z[:num_classes], lambda u: np.pad(u, padding)


def _noise_dim(model, params, row):
  return jax.eval_shape(model.logits, params, row).covariance.diag.shape[1]
