"""Softmax over a batch whose rows are Gaussian (HET-XL, eq. 8), as `batch_softmax` cuts it.

The columns act as a classifier's W, and chunks of rows are ordinary problems of the `Integrator`.
The losses of a chunk and their gradients are computed together. So the forward pass accumulates the
gradient of sum_i nll_i and stores no chunk (3 products with one sample).
If all rows have the same cotangent, as under a mean over the real rows, this is the gradient up to
a factor. For any other cotangent the backward pass runs the chunks again.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen import partitioning as flax_partitioning
from jax.typing import DTypeLike

from het_plugin.heads.batch import (
  CHUNK_BYTES,
  BatchPlan,
  excluded,
  from_chunks,
  in_batch,
  is_real_pair,
  plan_batch,
  products,
  real_rows,
  to_chunks,
)
from het_plugin.integrate.gaussian import GaussianLogits, Linear, LowRank, Opaque
from het_plugin.integrate.integrator import Integrator
from het_plugin.integrate.samplers import checked_keys

_SHARED: Any = None  # in the place of a J that all rows share


@dataclasses.dataclass(frozen=True)
class _NoisyPlan(BatchPlan):
  integrator: Integrator
  num_factors: int
  post_normalization: bool


def batch_nll(
  integrator: Integrator,
  rows: jax.Array,
  covariance: LowRank,
  columns: jax.Array,
  temperature: jax.Array,
  mask: jax.Array | None,
  keys: jax.Array,
  *,
  post_normalization: bool = False,
  dtype: DTypeLike = jnp.float32,
  chunk_bytes: int = CHUNK_BYTES,
) -> jax.Array:
  """One direction of the batch softmax, from noisy rows to columns (eq. 8): -log E[p(i | row_i)].

  With one sample, as in the paper's training, loss and gradient cost the 3 products of a softmax
  without noise.

  Args:
    integrator: integrates over the noise.
    rows: [B, D], the means.
    covariance: covariance of the noise that is added to the rows (Q = D).
    columns: [B, D], without noise.
    temperature: tau, a positive scalar.
    mask: [B] or None, as in `symmetric_nll`.
    keys: typed PRNG keys [B], one per example (`example_keys`), or [1], whose draws all share.
    post_normalization: each noisy row is scaled to unit length (table 7).
    dtype: compute type of the products.
    chunk_bytes: budget for the logits, or factors, of a chunk of rows, in bytes per device. About
      three arrays of that size exist at one time.

  Returns:
    float32 [B], nats; 0 where the mask is 0.

  Raises:
    ValueError: the shapes of rows and columns differ, B is 0, chunk_bytes is below 1, or the keys
      are not typed or not one per example.
  """
  plan = plan_batch('batch_nll', rows, columns, dtype, chunk_bytes)
  noisy = _NoisyPlan(
    **vars(plan),
    integrator=integrator,
    num_factors=covariance.num_factors,
    post_normalization=post_normalization,
  )
  valid = is_real_pair(mask, len(rows))
  rows, columns = (real_rows(x, valid, plan.accumulate) for x in (rows, columns))
  keys = jnp.broadcast_to(checked_keys('batch_nll', keys, len(rows)), (len(rows),))
  own = covariance
  loading = None
  if covariance.scale is not None:  # all rows share J
    own = dataclasses.replace(covariance, loading=_SHARED)
    loading = covariance.loading
  if mask is not None:
    own = jax.tree.map(lambda x: real_rows(x, valid, x.dtype), own)
  shared = columns, jnp.asarray(temperature, plan.accumulate), loading
  return _noisy(noisy, (rows, own), shared, keys, valid)


def unit_length(x: jax.Array) -> jax.Array:
  """x [..., D] over its Euclidean norm; a zero vector stays zero, with a finite gradient."""
  squared = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(jnp.maximum(squared, 1e-12))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _noisy(plan, own, shared, keys, valid):
  """nll [B]; `own` is (phi, covariance) of each row, `shared` is (columns, tau, J or None)."""
  return _noisy_nll(plan, own, shared, keys, valid, None)[0]


def _noisy_fwd(plan, own, shared, keys, valid):
  weights = valid.astype(plan.accumulate)
  nll, gradient = _noisy_nll(plan, own, shared, keys, valid, weights)
  return nll, (own, shared, keys, valid, gradient)


# For L = sum_i g_i nll_i the forward pass has the gradient G of sum_i nll_i over the real rows. If
# all their g_i are one number g, dL = g G. Otherwise G does not tell the rows apart, and the chunks
# run again with the g_i as weights.
def _noisy_bwd(plan, residuals, g):
  *arguments, valid, gradient = residuals
  largest = jnp.max(g, where=valid, initial=-jnp.inf)
  g = jnp.where(valid, g, 0.0)

  def scale():
    return jax.tree.map(
      lambda x: x * jnp.where(valid.any(), largest, 0.0).astype(x.dtype), gradient
    )

  def run_again():
    return _noisy_nll(plan, *arguments, valid, g)[1]

  alike = jnp.all((g == largest) | ~valid)
  return *jax.lax.cond(alike, scale, run_again), None, None


_noisy.defvjp(_noisy_fwd, _noisy_bwd)


def _noisy_nll(plan, own, shared, keys, valid, weights):
  """nll [B], and with weights the gradients of sum_i weights_i nll_i by `own` and `shared`."""

  def local(own, shared, keys, valid, weights):
    num_rows = len(valid)
    shift = excluded(plan.gather(valid), plan.accumulate)
    everyone = plan.gather(shared[0].astype(plan.dtype)), *shared[1:]
    # Either the logits of all samples exist at one time, or factors and location in logit space.
    copies = min(plan.integrator.num_samples, plan.num_factors + 2)
    chunks = plan.chunks(num_rows, copies * len(shift) * plan.accumulate.itemsize)
    inputs = own, (keys, valid, plan.labels(num_rows), weights)
    own, (keys, valid, labels, weights) = jax.tree.map(lambda x: to_chunks(x, chunks), inputs)
    rest = keys, valid & in_batch(chunks, num_rows), labels, weights

    def loss(own, everyone, keys, counts, labels, weights):
      nll = _chunk_nll(plan, own, everyone, keys, labels, shift)
      nll = jnp.where(counts, nll, 0.0)
      return (0.0 if weights is None else jnp.sum(weights * nll)), nll

    def body(total, chunk):
      own, rest = chunk
      if weights is None:
        return total, (loss(own, everyone, *rest)[1], None)
      (_, nll), gradient = jax.value_and_grad(loss, (0, 1), has_aux=True)(own, everyone, *rest)
      total = jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, gradient[1])
      return total, (nll, gradient[0])

    total = jax.tree.map(lambda x: jnp.zeros(x.shape, plan.accumulate), everyone)
    if chunks[0] == 1:
      total, output = body(total, jax.tree.map(lambda x: x[0], (own, rest)))
    else:
      total, output = jax.lax.scan(body, total, (own, rest))
      output = jax.tree.map(lambda x: from_chunks(x, num_rows), output)
    nll, to_own = output
    if weights is None:
      return nll, None
    to_shared = plan.scatter_sum(total[0]), *plan.sum(total[1:])
    return nll, (to_own, jax.tree.map(lambda x, y: x.astype(y.dtype), to_shared, shared))

  of_shared = ('b', '', '')
  outputs = 'b', None if weights is None else ('b', of_shared)
  run = plan.shard_map(local, ('b', of_shared, 'b', 'b', 'b'), outputs)
  return run(own, shared, keys, valid, weights)


def _chunk_nll(plan, own, everyone, keys, labels, shift):
  """nll [c] of a chunk of rows against all columns [B, D]."""
  phi, covariance = own
  columns, temperature, loading = everyone
  if loading is not None:
    covariance = dataclasses.replace(covariance, loading=loading)
  # Divided by tau it is `PADDED` again.
  bias = shift * jax.lax.stop_gradient(temperature)
  if plan.post_normalization:
    projection = Opaque(phi, (columns, bias), _UnitLengthLogits(plan))
    location = projection.get_logits(projection.params, phi)
  else:
    projection = Linear(columns.T, phi, bias)
    location = products(plan, phi.astype(plan.dtype), columns) + bias
  logits = GaussianLogits(location, covariance, projection, temperature, len(columns))
  with flax_partitioning.axis_rules(()):  # inside shard_map there is one device
    return plan.integrator.nll(logits, labels[:, None], keys)


@dataclasses.dataclass(frozen=True)
class _UnitLengthLogits:
  """Logits of noisy rows scaled to unit length."""

  plan: BatchPlan

  def __call__(self, params, phi):
    columns, bias = params
    return products(self.plan, unit_length(phi).astype(self.plan.dtype), columns) + bias
