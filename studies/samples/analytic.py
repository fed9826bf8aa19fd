"""Closed forms of E[softmax(u)] of Gaussian logits u, without samples and biased, to compare with.

u is the logits over tau, mu [K] its mean, Sigma = G^T G [K, K] its covariance with factors
G [R + 1, K], and p = softmax(mu).

Mean field. Lu, Ie and Sha, "Mean-field approximation to Gaussian-softmax integral with application
to uncertainty estimation" (2020), in the first of its three variants (mf0), which leaves the
variances of the rivals i of class k out:

    1 / p_k ~ sum_i exp(c_k (mu_i - mu_k)),    c_k = 1 / sqrt(1 + pi / 8 Sigma_kk)

This takes K^2 exponentials. Here log sum_i exp(c mu_i), a function of c, is replaced by its tangent
at c = 1, and the result is normalised, which takes K:

    p_k ~ softmax(c_k (mu_k - m))_k,    m = sum_i p_i mu_i

It equals mf0 if all variances are equal, and does not change when a constant is added to all
logits.

Taylor. The second-order expansion in the noise around mu, which Collier et al., "Correlated
input-dependent label noise in large-scale image classification" (2021) compare with sampling:

    p_k (1 + (q_k - sum_i p_i q_i) / 2),    q_k = Var(u_k - sum_i p_i u_i)

It sums to one, and its error falls with the fourth power of the size of the noise. If the noise is
large, the bracket can be negative: see `TAYLOR_FLOOR`.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from het_plugin.integrate import GaussianLogits

# No probability is multiplied by less than this, because a negative one is none. The results are
# normalised again.
TAYLOR_FLOOR = 0.01


def _over_tau(logits: GaussianLogits) -> tuple[jax.Array, jax.Array]:
  """mu [B, K] and G [B, R + 1, K]."""
  K = logits.num_classes
  return (
    logits.location[:, :K] / logits.temperature,
    logits.factors()[..., :K] / logits.temperature,
  )


def mean_field(logits: GaussianLogits) -> jax.Array:
  """log p(k | x) [B, K] by the mean field; `logits` have a rank-one remainder."""
  mu, factors = _over_tau(logits)
  scale = jax.lax.rsqrt(1.0 + math.pi / 8 * jnp.square(factors).sum(1))
  centre = jnp.sum(jax.nn.softmax(mu) * mu, axis=-1, keepdims=True)
  return jax.nn.log_softmax(scale * (mu - centre))


def taylor(logits: GaussianLogits) -> jax.Array:
  """log p(k | x) [B, K] by the Taylor expansion; `logits` have a rank-one remainder."""
  mu, factors = _over_tau(logits)
  p = jax.nn.softmax(mu)
  centred = factors - jnp.einsum('brk,bk->br', factors, p)[:, :, None]
  q = jnp.square(centred).sum(1)
  bracket = 1.0 + 0.5 * (q - jnp.sum(p * q, axis=-1, keepdims=True))
  floored = jnp.log(jnp.maximum(bracket, TAYLOR_FLOOR))
  return jax.nn.log_softmax(jax.nn.log_softmax(mu) + floored)


ESTIMATORS = {'mean_field': mean_field, 'taylor': taylor}


@dataclasses.dataclass(frozen=True)
class Analytic:
  """A closed form with the loss of an `Integrator`; `method` is a key of ESTIMATORS."""

  method: str

  def nll(self, logits: GaussianLogits, labels: jax.Array, keys: jax.Array) -> jax.Array:
    """-log p(y | x) [B] of labels [B]; `keys` is ignored."""
    log_p = ESTIMATORS[self.method](logits)
    return -jnp.take_along_axis(log_p, labels[:, None], axis=-1)[:, 0]
