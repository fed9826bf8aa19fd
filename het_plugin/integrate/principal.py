"""Noise of HET-XL with fewer factors: a few principal ones, and the rest as independent noise.

The exact sigmoid needs the variances s_k^2 = sum_t (F_t w_k)^2 of the logits, with F [T, Q] all
factors of an example and w_k the column of W of class k. That projects T = R + 1 factors to the
classes. With any orthonormal U [m, T], the same sum is

    s_k^2 = sum_j (U_j F w_k)^2 + sum_t (E_t w_k)^2,    E = F - U^T U F

The first term projects m factors. In the second one, the covariance E^T E is replaced by its
diagonal e_q = sum_t E_tq^2 = sum_t F_tq^2 - sum_j (U F)_jq^2, as if the dimensions of the noise
space were independent:

    s_k^2 ~ sum_j (U_j F w_k)^2 + sum_q e_q W_qk^2

which costs as much as one more factor, and nothing else touches K. The rows of U are the principal
directions of the Gram matrix F F^T [T, T], which leave the least e. Subspace iteration finds them,
and their gradient is stopped. Everything else is differentiated: the result is a Gaussian over
logits as any other, with a likelihood of its own.
"""

import jax
import jax.numpy as jnp
import numpy as np

from het_plugin.integrate.draws import orthonormal
from het_plugin.integrate.exact import variances
from het_plugin.integrate.gaussian import LowRank
from het_plugin.integrate.tiles import factors_over_tau

# Of subspace iteration, and products with the Gram matrix in each.
NUM_ROUNDS = 2
NUM_PRODUCTS = 2


def reduced(noise: LowRank, num_factors: int) -> LowRank:
  """Noise of m = `num_factors` principal factors with the remainder 'diag'.

  It is the same noise if m is at least R, where fewer factors would save nothing.
  """
  if num_factors >= noise.num_factors:
    return noise
  factors = factors_over_tau(noise)  # [B, T, Q]
  axes = principal_axes(jax.lax.stop_gradient(factors), num_factors)
  loading = jnp.einsum('bmt,btq->bmq', axes, factors, precision=jax.lax.Precision.HIGHEST)
  rest = variances(noise) - jnp.square(loading).sum(1)
  return LowRank(None, loading, _root(rest), 'diag')


def principal_axes(factors: jax.Array, count: int) -> jax.Array:
  """Orthonormal U [B, m, T] of factors [B, T, Q], near the first m = `count` singular vectors."""
  highest = jax.lax.Precision.HIGHEST
  gram = jnp.einsum('btq,bsq->bts', factors, factors, precision=highest)
  largest = jnp.abs(gram).max(axis=(1, 2), keepdims=True)
  gram /= jnp.where(largest > 0, largest, 1.0)
  # A constant of the program, as in `draws.directions_of`.
  start = np.random.RandomState(0).normal(size=(count, factors.shape[1])).astype(np.float32)
  axes = jnp.broadcast_to(start.astype(factors.dtype), (factors.shape[0], *start.shape))
  for _ in range(NUM_ROUNDS):
    for _ in range(NUM_PRODUCTS):
      axes = jnp.matmul(axes, gram, precision=highest)
    axes = orthonormal(axes)
  return axes


def _root(x):
  """sqrt(x), and 0 with a gradient of 0 where rounding left nothing of x."""
  is_positive = x > 0
  return jnp.where(is_positive, jnp.sqrt(jnp.where(is_positive, x, 1.0)), 0.0)
