"""E[softmax(u)] and E[sigmoid(u)] of Gaussian logits u without samples: closed forms, biased.

These are baselines: with the link 'sigmoid' `Integrator` is exact at the same cost, (R + 1) Q K
multiply-adds per example. `benchmarks/samplers.py` measures their error. Below, u is the logits
over tau, mu [K] its mean, Sigma = G^T G [K, K] its covariance with factors G [R + 1, K], and
p = link(mu). No K x K matrix is ever formed.

Mean field. Lu, Ie and Sha, "Mean-field approximation to Gaussian-softmax integral with application
to uncertainty estimation" (2020), in the first of its three variants (mf0), which leaves the
variances of the rivals i of class k out:

    1 / p_k ~ sum_i exp(c_k (mu_i - mu_k)),    c_k = 1 / sqrt(1 + lambda_0 Sigma_kk)

with lambda_0 = pi / 8. Each class has its own scale, so this takes K^2 exponentials. Here
log sum_i exp(c mu_i), a function of c, is replaced by its tangent at c = 1, and the result is
normalised:

    p_k ~ softmax(c_k (mu_k - m))_k,    m = sum_i p_i mu_i

This equals mf0 if all variances are equal and costs K exponentials. It does not change when a
constant is added to all logits, unlike the common scaling of the bare mu_k. For the sigmoid it is
sigmoid(c_k mu_k), by MacKay, "The evidence framework applied to classification networks" (1992).

Taylor. This is the second-order expansion in the noise around mu, also known as the delta method,
which Collier et al., "Correlated input-dependent label noise in large-scale image classification"
(2021) compare with sampling: E[f(u)] ~ f(mu) + 1/2 tr(Sigma f''(mu)). For f = softmax_k

    f''_ij = p_k ((1[k = i] - p_i) (1[k = j] - p_j) - p_i (1[i = j] - p_j))

    tr(Sigma f'') = p_k (q_k - sum_i p_i q_i),    q_k = Var(u_k - sum_i p_i u_i)

since the first term's trace is the variance of u_k - sum_i p_i u_i, and the second's, the
p-weighted variance of u, is the p-weighted mean of those. With factors,
q_k = sum_r (G_rk - sum_i p_i G_ri)^2. The approximation p_k (1 + (q_k - sum_i p_i q_i) / 2) sums to
one. For f = sigmoid, f'' = p (1 - p) (1 - 2 p). The error falls with the fourth power of the size
of the noise. If the noise is large the bracket can be negative: see `TAYLOR_FLOOR`.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from het_plugin.integrate.exact import marginals
from het_plugin.integrate.gaussian import (
  GaussianLogits,
  LowRank,
  Opaque,
  checked,
  is_valid,
  masked,
  mirrored,
  project,
)
from het_plugin.integrate.integrator import check_labels, check_sigmoid, multi_hot
from het_plugin.integrate.placement import on_mesh_of_caller

LAMBDA_0 = math.pi / 8
CHUNK_BYTES = 2**28  # budget for projected factors per device

# The Taylor expansion never multiplies a probability by less than this, because a negative bracket
# gives no probability. The results are normalised again, so all of them stay in (0, 1).
TAYLOR_FLOOR = 0.01


def mean_field(logits: GaussianLogits) -> jax.Array:
  """Mean-field approximation (module docstring) of log p(k | x).

      >>> import jax.numpy as jnp
      >>> from het_plugin.integrate import GaussianLogits, LowRank, mean_field
      >>> noise = LowRank(None, jnp.zeros((1, 1, 2)), jnp.array([[3.0, 0.0]]))
      >>> logits = GaussianLogits(jnp.array([[1.0, 0.0]]), noise, None, jnp.float32(1.0), 2)
      >>> round(float(jnp.exp(mean_field(logits))[0, 0]), 2)  # 0.73 without noise
      0.7

  Args:
    logits: logits of B examples with either link; the result is exact for deterministic ones.

  Returns:
    float32 [B, Kp] (wider where the logits are): softmax, log-probabilities of the classes, which
    sum to one; sigmoid, log p(y_k = 1 | x). Padded classes get `PADDED`.

  Raises:
    ValueError: for an opaque projection.
  """
  _refuse_opaque(logits)
  mean, variance = marginals(logits, CHUNK_BYTES)
  location = masked(logits, mean)
  scale = jax.lax.rsqrt(1.0 + LAMBDA_0 * variance)
  if logits.link == 'sigmoid':
    return masked(logits, jax.nn.log_sigmoid(scale * location))
  centre = jnp.sum(jax.nn.softmax(location) * location, axis=-1, keepdims=True)
  return masked(logits, jax.nn.log_softmax(masked(logits, scale * (location - centre))))


def taylor(logits: GaussianLogits) -> jax.Array:
  """Second-order Taylor approximation (module docstring) of log p(k | x).

      >>> import jax.numpy as jnp
      >>> from het_plugin.integrate import GaussianLogits, LowRank, taylor
      >>> noise = LowRank(None, jnp.zeros((1, 1, 2)), jnp.array([[1.0, 0.0]]))
      >>> logits = GaussianLogits(jnp.array([[1.0, 0.0]]), noise, None, jnp.float32(1.0), 2)
      >>> round(float(jnp.exp(taylor(logits))[0, 0]), 2)  # 0.73 without noise
      0.69

  Args:
    logits: as in `mean_field`.

  Returns:
    As in `mean_field`.

  Raises:
    ValueError: for an opaque projection; with the link 'softmax' also for the remainder 'diag' with
      a projection.
  """
  _refuse_opaque(logits)
  if logits.link == 'sigmoid':
    location, variance = marginals(logits, CHUNK_BYTES)
    p = jax.nn.sigmoid(location)
    curvature = 0.5 * variance * (1.0 - 2.0 * p)
    on = jax.nn.log_sigmoid(location) + _log_floored(1.0 + (1.0 - p) * curvature)
    off = jax.nn.log_sigmoid(-location) + _log_floored(1.0 - p * curvature)
    return masked(logits, jax.nn.log_sigmoid(on - off))
  location, noise = _in_logit_space(logits)
  p = jax.nn.softmax(location)
  q = _centred_variance(noise, p)
  bracket = 1.0 + 0.5 * (q - jnp.sum(p * q, axis=-1, keepdims=True))
  return masked(logits, jax.nn.log_softmax(jax.nn.log_softmax(location) + _log_floored(bracket)))


ESTIMATORS: dict[str, Callable[[GaussianLogits], jax.Array]] = {
  'mean_field': mean_field,
  'taylor': taylor,
}


@dataclasses.dataclass(frozen=True)
class Analytic:
  """A biased closed form with the methods of an `Integrator` and without samples.

  Attributes:
    method: 'mean_field' or 'taylor'.
  """

  method: str = 'mean_field'

  def __post_init__(self):
    if self.method not in ESTIMATORS:
      raise ValueError(
        f'Analytic.method={self.method!r} is unknown: choose one of {", ".join(ESTIMATORS)}'
      )

  def nll(
    self, logits: GaussianLogits, labels: jax.Array, keys: jax.Array | None = None
  ) -> jax.Array:
    """Negative log-likelihood [B] of int32 labels [B] or [B, L], as `Integrator.nll` defines it;
    `keys` is ignored.
    """
    return on_mesh_of_caller(self._nll, 'b', checked(logits), labels)

  def _nll(self, logits, labels):
    labels = check_labels(logits, labels)
    if logits.link == 'softmax':
      listed = labels >= 0
      log_p = jnp.take_along_axis(self.log_prob(logits), jnp.maximum(labels, 0), axis=-1)  # [B, L]
      nll = -jnp.where(listed, log_p, 0.0).sum(-1) / jnp.maximum(listed.sum(-1), 1)
    else:
      on = multi_hot(labels, logits.location.shape[-1])  # [B, Kp]
      log_q = self.log_prob(mirrored(logits, jnp.where(on, 1.0, -1.0)))
      nll = -jnp.where(is_valid(logits), log_q, 0.0).sum(-1)
    return jnp.where((labels < logits.num_classes).all(-1), nll, jnp.nan)

  def log_prob(self, logits: GaussianLogits, keys: jax.Array | None = None) -> jax.Array:
    """log p(k | x) [B, Kp], as `Integrator.log_prob` defines it; `keys` is ignored."""
    return on_mesh_of_caller(ESTIMATORS[self.method], 'bk', checked(logits))

  def log_odds(self, logits: GaussianLogits, keys: jax.Array | None = None) -> jax.Array:
    """The log odds of the classes [B, Kp], as `Integrator.log_odds` defines them; `keys` is
    ignored.
    """
    logits = check_sigmoid(checked(logits))
    return masked(logits, self.log_prob(logits) - self.log_prob(mirrored(logits, -1.0)))


def _refuse_opaque(logits):
  if logits.covariance is not None and isinstance(logits.projection, Opaque):
    raise ValueError(
      'the analytic estimators need the factors of the noise in logit space, which an opaque '
      'get_logits does not give: use Integrator'
    )


def _in_logit_space(logits: GaussianLogits) -> tuple[jax.Array, LowRank]:
  """Mean [B, Kp] and noise (Q = Kp) of the logits over tau."""
  location = masked(logits, logits.location / logits.temperature)
  covariance = logits.covariance
  if covariance is None:
    no_factors = jnp.zeros((location.shape[0], 0, location.shape[1]), location.dtype)
    return location, LowRank(None, no_factors, jnp.zeros_like(location))
  if covariance.remainder == 'diag' and logits.projection is not None:
    raise ValueError(
      "the Taylor expansion takes remainder='diag' without a projection only (HET), where it "
      f'stays diagonal; got projection={type(logits.projection).__name__}: use '
      "remainder='rank_one', or Integrator"
    )
  return location, project(covariance.scaled(1.0 / logits.temperature), logits.projection)


def _centred_variance(noise: LowRank, p: jax.Array) -> jax.Array:
  """Var(u_k - sum_i p_i u_i), [B, Kp], for probabilities p [B, Kp]."""
  loading = noise.dense_loading()
  diag = noise.diag  # [B, R, K], [B, K]
  mean = jnp.einsum('brk,bk->br', loading, p)
  low_rank = jnp.square(loading - mean[:, :, None]).sum(1)
  if noise.remainder == 'rank_one':
    return low_rank + jnp.square(diag - jnp.sum(p * diag, axis=-1, keepdims=True))
  # sum_j d_j^2 (1[j = k] - p_j)^2
  rest = jnp.sum(jnp.square(p * diag), axis=-1, keepdims=True)
  return low_rank + jnp.square(diag) * (1.0 - 2.0 * p) + rest


def _log_floored(bracket: jax.Array) -> jax.Array:
  return jnp.log(jnp.maximum(bracket, TAYLOR_FLOOR))
