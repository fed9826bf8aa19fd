"""Coordinates in which the objective has about unit curvature, so that a search takes few steps.

    [K; b] = T (s * theta) R^T    for the matrices on features, with their biases
    J      = (s * theta) R^T

The objective itself does not change. T is about the features, R and s are about the outputs: the
location, v, and d before its softplus. Together they are the Fisher matrix as a Kronecker product
(Martens and Grosse 2015, https://arxiv.org/abs/1503.05671).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import threadpoolctl
from flax import struct, traverse_util

from het_plugin.estimators import compilation, placement
from het_plugin.estimators.model import Model, is_noise, on_features
from het_plugin.heads.covariance import MIN_DIAG
from het_plugin.integrate import LowRank

MOMENT_ROWS = 8  # per feature
LEAST_ROWS = 2**13  # what is nearly separable has few rows that count
MAX_OUTPUTS = 2048  # up to so many outputs have an R
# With two threads on a busy machine of two cores, eigh of 100 x 100 took 20 to 200 ms and not 1.
THREAD_SIZE = 512
# Curvatures are at least this, relative to that of a column of W: below, a gradient is rounding.
MIN_CURVATURE = 1e-3

Path = tuple[str, ...]


@struct.dataclass
class Whitening:
  """The coordinates.

  Attributes:
    left: T [D + 1, D + 1].
    scale: s by path of the matrix, [D + 1, Q], or [Q] of J; missing is 1.
    right: R [Q, Q] by path; missing is the identity.
  """

  left: jax.Array
  scale: dict[Path, jax.Array] = struct.field(default_factory=dict)
  right: dict[Path, jax.Array] = struct.field(default_factory=dict)


def _second_moments(weight, g):
  """sum_b w_b g_b g_b^T, [Q, Q] from weight [B] and g [B, Q]."""
  return jnp.matmul(g.T * weight, g, precision=jax.lax.Precision.HIGHEST)


@functools.partial(compilation.jit, static_argnums=(0, 3))
def _moments(model, params, rows, has_outputs):
  """E[c (x, 1) (x, 1)^T], where c is the curvature of a row's loss by its logits; and, if
  `has_outputs`, second moments [Q, Q] of the gradients of the loss by the outputs of each matrix,
  by path.

  The curvature is the variance of the indicator of a class without noise, averaged over the
  classes. Moments of the location are the expected ones without noise; of the noise those of the
  labels.
  """

  def output_moments(x, p, target, weight):
    if model.link == 'sigmoid':
      of_location = jnp.diag(weight @ (p * (1.0 - p)))
    else:
      of_location = jnp.diag(weight @ p) - _second_moments(weight, p)
    padding = params['head']['bias'].shape[0] - model.num_classes
    found = {('kernel',): jnp.pad(of_location, (0, padding))}
    if model.head == 'det':
      return found
    logits = model.logits(params, x)
    noise = logits.noise

    def nll(loading, diag):
      changed = LowRank(None, loading, diag)
      return model.nll_of(dataclasses.replace(logits, covariance=changed), target).sum()

    by_loading, by_diag = jax.grad(nll, argnums=(0, 1))(noise.dense_loading(), noise.diag)
    # The loading is v(x) * J: [B, R, Q] from v [B, Q] and J [R, Q].
    by_scale = jnp.einsum('brq,rq->bq', by_loading, noise.loading)  # [B, Q], by v
    by_diag *= -jnp.expm1(MIN_DIAG - noise.diag)  # the derivative of the softplus
    by_j = (by_loading * noise.scale[:, None]).reshape(-1, noise.diag.shape[-1])  # [B R, Q]
    of_factor = jnp.repeat(weight, noise.num_factors) / noise.num_factors
    return found | {
      ('covariance', 'v_kernel'): _second_moments(weight, by_scale),
      ('covariance', 'd_kernel'): _second_moments(weight, by_diag),
      ('covariance', 'J'): _second_moments(of_factor, by_j),
    }

  def moments(x, target, weight):
    p = model.location_prob(params, x)
    # The Hessian of -log softmax_y by column k of [W; b] is p_k (1 - p_k) (x, 1) (x, 1)^T.
    both = jnp.concatenate([x, jnp.ones_like(x[:, :1])], axis=1)
    features = _second_moments(weight * jnp.mean(p * (1.0 - p), axis=1), both)
    return features, output_moments(x, p, target, weight) if has_outputs else {}

  blocks = rows.x, rows.target, rows.weight
  total = jax.tree.map(
    jnp.zeros_like, jax.eval_shape(moments, *jax.tree.map(lambda x: x[0], blocks))
  )

  def add(total, block):
    return jax.tree.map(jnp.add, total, moments(*block)), None

  (features, outputs), _ = jax.lax.scan(add, total, blocks)
  weight = rows.weight.sum()
  return features / weight, {('head', *path): x / weight for path, x in outputs.items()}


def of_features(moments: np.ndarray, ridge: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """T [D + 1, D + 1] for second moments and the curvature of the penalty, ridge [D + 1]; and the
  part [D + 1] of the unit curvature that is the penalty's.
  """
  moments = moments + np.diag(ridge)
  # T T^T is the inverse of the moments, so badly scaled or correlated features cost no iterations.
  # The scale comes first: small features would lie below the floor otherwise.
  scale = 1.0 / np.sqrt(np.maximum(np.diag(moments), np.finfo(np.float32).tiny))
  values, vectors = _eigh(scale[:, None] * moments * scale)
  floor = values[-1] * len(moments) * np.finfo(np.float32).eps
  left = scale[:, None] * vectors / np.sqrt(np.maximum(values, floor))
  return left, np.square(left).T @ ridge


def _eigh(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """`np.linalg.eigh`, on one thread where more of them would only wait for each other."""
  if len(matrix) > THREAD_SIZE:
    return np.linalg.eigh(matrix)
  with _thread_pools().limit(limits=1, user_api='blas'):
    return np.linalg.eigh(matrix)


@functools.cache
def _thread_pools() -> threadpoolctl.ThreadpoolController:
  return threadpoolctl.ThreadpoolController()  # looks through all libraries of the process


def whitening_of(model: Model, params, rows: Any) -> Whitening:
  """The coordinates that suit `params`, in which a column of W has unit curvature on average.

  They are of about `MOMENT_ROWS` (D + 1) of the rows, `Blocks` or a `stream.Stream`: all would cost
  as much as several iterations.
  """
  some = rows.some(max(MOMENT_ROWS * (rows.width + 1), LEAST_ROWS))

  def ridge(strength):
    found = np.full(rows.width + 1, float(strength / rows.total))
    found[-1] = 0.0  # the bias is not regularised
    return found

  if model.head == 'det':  # whose curvature knows no labels: one program for all kinds of them
    some = dataclasses.replace(some, target=None)
  has_outputs = not model.hidden_layers and model.num_outputs(params) <= MAX_OUTPUTS
  moments = placement.whole(_moments(model, params, some, has_outputs))
  of_x, of_outputs = jax.tree.map(lambda x: x.astype(np.float64), moments)
  left, penalty = of_features(of_x, ridge(rows.strength))
  found = Whitening(jnp.asarray(left, jnp.float32))
  if not has_outputs:
    return found
  unit = np.trace(of_outputs['head', 'kernel']) / model.num_classes
  for path, moments in of_outputs.items():
    # R are the eigenvectors, and s^-2 the eigenvalues with the penalty, relative to a column of W:
    # directions of the noise that change little then move as fast as W.
    values, right = _eigh(moments)
    strength = rows.noise_strength if is_noise(path) else rows.strength
    if on_features(model, path):
      of_penalty = np.square(left).T @ ridge(strength)
      size = values / unit * (1.0 - penalty[:, None]) + of_penalty[:, None]
      size = np.maximum(size, MIN_CURVATURE)
    else:
      size = np.maximum(values + float(strength / rows.total), MIN_CURVATURE * unit)
    found.scale[path] = jnp.asarray(1.0 / np.sqrt(size), jnp.float32)
    found.right[path] = jnp.asarray(right, jnp.float32)
  return found


def unwhiten(model: Model, theta, whitening: Whitening):
  """Parameters from white coordinates."""
  return _mapped(model, theta, functools.partial(_to_params, whitening))


def whiten(model: Model, params, whitening: Whitening):
  """White coordinates from parameters."""
  left = np.linalg.inv(np.asarray(whitening.left, np.float64))
  inverse = dataclasses.replace(whitening, left=jnp.asarray(left, jnp.float32))
  return _mapped(model, params, functools.partial(_to_theta, inverse))


def _mapped(model, params, change):
  """The tree with `change(path, x)` of each matrix on features, with its bias, and of J."""
  flat = traverse_util.flatten_dict(params)
  for path, kernel in list(flat.items()):
    if on_features(model, path):
      beside = (*path[:-1], path[-1].removesuffix('kernel') + 'bias')
      bias = flat[beside]
      both = jnp.concatenate([kernel.reshape(len(kernel), -1), bias.reshape(1, -1)])
      both = change(path, both)
      flat[path] = both[:-1].reshape(kernel.shape)
      flat[beside] = both[-1].reshape(bias.shape)
    elif path[-1] == 'J':
      flat[path] = change(path, kernel)
  return traverse_util.unflatten_dict(flat)


_multiply = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def _to_params(whitening, path, x):
  if path in whitening.scale:
    x = _multiply(x * whitening.scale[path], whitening.right[path].T)
  return x if path[-1] == 'J' else _multiply(whitening.left, x)


def _to_theta(whitening, path, x):
  # The inverse of `_to_params`, given a whitening whose `left` is T^-1. R is orthogonal.
  x = x if path[-1] == 'J' else _multiply(whitening.left, x)
  if path in whitening.scale:
    x = _multiply(x, whitening.right[path]) / whitening.scale[path]
  return x
