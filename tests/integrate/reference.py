"""The predictive distribution as the paper writes it, in float64 and with every sample
materialised: the tests' yardstick.

Deliberately shares nothing with het_plugin.integrate but the normals it is given.
"""

import jax
import jax.numpy as jnp


def noise(z, scale, loading, diag):
  """z [B, S, n] -> eps [B, S, Q]; `scale` None: loading is V(x) [B, R, Q]."""
  num_factors = loading.shape[-2]
  low_rank_matrix = loading if scale is None else loading[None] * scale[:, None, :]
  low_rank_matrix = jnp.broadcast_to(low_rank_matrix, (z.shape[0], *low_rank_matrix.shape[1:]))
  eps = jnp.stack([z[b, :, :num_factors] @ low_rank_matrix[b] for b in range(z.shape[0])])
  # One normal more a sample (rank one), or Q (diag).
  return eps + z[:, :, num_factors:] * diag[:, None, :]


def sample_logits(z, location, covariance, projection, buckets=None, kernel=None):
  eps = noise(z, *covariance)
  if projection == 'hash':
    eps = jnp.stack([eps[:, :, h] for h in buckets], axis=-1)
  elif projection == 'linear':
    eps = eps @ kernel
  return location[:, None, :] + eps  # [B, S, K]


def log_prob(logits, tau, link):
  """log of the mean probability, [B, K], for logits [B, S, K]."""
  scaled = logits / tau
  if link == 'softmax':
    value = scaled - jax.scipy.special.logsumexp(scaled, axis=-1, keepdims=True)
  else:
    value = -jnp.logaddexp(0.0, -scaled)
  return jax.scipy.special.logsumexp(value, axis=1) - jnp.log(logits.shape[1])


def nll(logits, tau, link, labels):
  """[B]; labels: a list of lists of class ids."""
  losses = []
  for b, ids in enumerate(labels):
    if link == 'softmax':
      row = log_prob(logits[b : b + 1], tau, link)[0]
      losses.append(-sum(row[i] for i in ids) / max(len(ids), 1))
    else:
      sign = (-jnp.ones(logits.shape[-1])).at[jnp.array(ids, int)].set(1.0)
      losses.append(-log_prob(logits[b : b + 1] * sign, tau, link)[0].sum())
  return jnp.stack(losses)
