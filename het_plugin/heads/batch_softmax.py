"""Softmax over a batch: every row against the columns of all rows; no device holds [B, B] logits.

The loss of contrastive learning (section 5). Row i of one modality is an example, column j of the
other modality a class, and row and column i belong together:

    u_ij = <row_i, column_j> / tau
    nll_i = log sum_j exp(u_ij) - u_ii        rows to columns     (eq. 6)
    nll_j = log sum_i exp(u_ij) - u_jj        columns to rows

Each of n devices has b = B / n examples. A device gathers the columns [B, D] and forms the block
[b, B] of its own rows; a reduce-scatter returns the gradient of the columns. The batch is cut over
the mesh axes of the logical axis 'batch' and then over every other axis that still divides it, so
that a model axis shares the work instead of repeating it. Without a mesh, or without logical axis
rules, one device does all of it. Neither mesh nor chunks change the result.

Without noise (`symmetric_nll`) one product serves both directions. Of other devices' blocks the
columns need only a maximum and a sum of exponentials, vectors [B] that collectives combine. A block
that fits the budget is kept for the backward pass (3 products in all). Otherwise rows come in
chunks, which the backward pass computes again (4 products). `noisy_batch` handles rows with noise.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from het_plugin.heads.batch import (
  CHUNK_BYTES,
  excluded,
  from_chunks,
  in_batch,
  is_real_pair,
  plan_batch,
  products,
  real_rows,
  to_chunks,
)
from het_plugin.integrate.gaussian import PADDED


@struct.dataclass
class BatchSoftmax:
  """One direction of the loss.

  Attributes:
    nll: float32 [B], the negative log-likelihood of each example's own counterpart, nats; 0 where
      the mask is 0.
    correct: float32 [B], 1 if the own counterpart is the most similar one, else 0; 1/n if n
      counterparts tie at the top, so that identical representations score 1/B. It has no gradient
      and is 0 where the mask is 0.
  """

  nll: jax.Array
  correct: jax.Array


def symmetric_nll(
  rows: jax.Array,
  columns: jax.Array,
  temperature: jax.Array,
  mask: jax.Array | None = None,
  *,
  dtype: DTypeLike = jnp.float32,
  chunk_bytes: int = CHUNK_BYTES,
) -> tuple[BatchSoftmax, BatchSoftmax]:
  """Both directions of the batch softmax without noise (eq. 6).

  Args:
    rows: [B, D] representations of one modality.
    columns: [B, D] those of the other; row and column i are a pair.
    temperature: tau, a positive scalar: logits are <row, column> / tau.
    mask: [B]; a pair where it is 0 has no loss, no gradient, and is no candidate for other pairs.
      None: all pairs count.
    dtype: compute type of the products. Sums and everything else are float32 or wider.
    chunk_bytes: budget for a block of logits, in bytes per device. The backward pass holds two such
      blocks.

  Returns:
    (rows to columns, columns to rows).

  Raises:
    ValueError: the shapes of rows and columns differ, B is 0, or chunk_bytes is below 1.
  """
  plan = plan_batch('symmetric_nll', rows, columns, dtype, chunk_bytes)
  valid = is_real_pair(mask, len(rows))
  rows, columns = (real_rows(x, valid, plan.accumulate) for x in (rows, columns))
  inverse = 1.0 / jnp.asarray(temperature, plan.accumulate)
  nll_rows, nll_columns, correct = _symmetric(plan, rows, columns, inverse, valid)
  correct = jax.lax.stop_gradient(correct)
  return BatchSoftmax(nll_rows, correct[0]), BatchSoftmax(nll_columns, correct[1])


# Deterministic: both directions from one product


@struct.dataclass
class _Sums:
  """Log-sum-exps as maximum and sum of exp(u - maximum), and how many logits reach the maximum.

  The two are kept apart so that log-probabilities near 0 keep their digits: u - maximum is exact
  there.
  """

  top: jax.Array
  total: jax.Array
  ties: jax.Array

  def log_prob(self, u: jax.Array) -> jax.Array:
    return (u - self.top) - jnp.log(self.total)

  def correct(self, u: jax.Array) -> jax.Array:
    return jnp.where(u == self.top, 1.0 / self.ties, 0.0)

  def relative_to(self, top: jax.Array) -> '_Sums':
    """The same with sums relative to a maximum over more logits."""
    shrink = jnp.exp(self.top - top)
    return _Sums(top, self.total * shrink, jnp.where(self.top == top, self.ties, 0.0))


def _sums(u: jax.Array, axis: int) -> _Sums:
  top = u.max(axis=axis)
  shifted = u - jnp.expand_dims(top, axis)
  return _Sums(top, jnp.exp(shifted).sum(axis), (shifted == 0).sum(axis).astype(u.dtype))


def _row_chunks(plan, rows, valid, num_columns):
  """Inputs of a scan over chunks: rows [C, c, D] in the compute type, whether they count [C, c],
  and their columns [C, c].
  """
  num_rows = len(rows)
  chunks = plan.chunks(num_rows, num_columns * plan.accumulate.itemsize)
  inputs = rows.astype(plan.dtype), valid, plan.labels(num_rows)
  rows, valid, labels = jax.tree.map(lambda x: to_chunks(x, chunks), inputs)
  return rows, valid & in_batch(chunks, num_rows), labels


def _block(plan, rows, counts, everyone, shift, inverse):
  """Logits [c, B] of a chunk of rows."""
  similarity = products(plan, rows, everyone)
  return similarity * inverse + (excluded(counts, similarity.dtype)[:, None] + shift)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _symmetric(plan, rows, columns, inverse, valid):
  """(nll of rows [B], nll of columns [B], (both directions' correct [B]))."""
  return _symmetric_fwd(plan, rows, columns, inverse, valid)[0]


def _symmetric_fwd(plan, rows, columns, inverse, valid):
  keeps = _one_block(plan, len(rows))

  def local(rows, columns, inverse, valid):
    everyone = plan.gather(columns.astype(plan.dtype))  # [B, D]
    shift = excluded(plan.gather(valid), plan.accumulate)  # [B]

    def body(partial, chunk):
      rows, counts, labels = chunk
      u = _block(plan, rows, counts, everyone, shift, inverse)  # [c, B]
      new = _sums(u, axis=0)
      top = jnp.maximum(partial.top, new.top)
      partial = jax.tree.map(jnp.add, partial.relative_to(top), new.relative_to(top))
      partial = dataclasses.replace(partial, top=top)
      own = jnp.take_along_axis(u, labels[:, None], axis=1)[:, 0]
      return partial, (_sums(u, axis=1), own, u)

    chunks = _row_chunks(plan, rows, valid, len(everyone))
    nothing = jnp.zeros_like(shift)
    partial = _Sums(jnp.full_like(shift, 3 * PADDED), nothing, nothing)
    if keeps:
      partial, (of_rows, own, block) = body(partial, jax.tree.map(lambda x: x[0], chunks))
    else:
      partial, outputs = jax.lax.scan(lambda *x: _without_block(*body(*x)), partial, chunks)
      (of_rows, own), block = jax.tree.map(lambda x: from_chunks(x, len(rows)), outputs), None
    of_columns = partial.relative_to(plan.max(partial.top))
    total, ties = plan.sum((of_columns.total, of_columns.ties))
    of_columns = dataclasses.replace(of_columns, total=total, ties=ties)
    own_columns = jax.tree.map(lambda x: x[plan.labels(len(rows))], of_columns)

    nll = [jnp.where(valid, -sums.log_prob(own), 0.0) for sums in (of_rows, own_columns)]
    correct = [jnp.where(valid, sums.correct(own), 0.0) for sums in (of_rows, own_columns)]
    return (*nll, tuple(correct)), (of_rows, of_columns, everyone, block)

  outputs = ('b', 'b', ('b', 'b')), ('b', '', '', 'b' if keeps else None)
  answer, residuals = plan.shard_map(local, ('b', 'b', '', 'b'), outputs)(
    rows, columns, inverse, valid
  )
  return answer, (rows, inverse, valid, *residuals)


def _without_block(carry, output):
  return carry, output[:2]


def _one_block(plan, batch_size):
  """Whether a device's logits are within the budget."""
  rows_a_device = batch_size // math.prod(plan.mesh.shape[axis] for axis in plan.axes)
  return plan.chunks(rows_a_device, batch_size * plan.accumulate.itemsize)[0] == 1


# Let P_ij = exp(u_ij) / sum_j exp(u_ij), Q_ij = exp(u_ij) / sum_i exp(u_ij), and let g_i and h_j be
# the cotangents of the losses of row i and column j. Each loss is a cross-entropy, so
#
#   dL / du_ij = g_i (P_ij - 1[i = j]) + h_j (Q_ij - 1[i = j]) =: U_ij
#
# and u = rows columns^T / tau gives
#
#   dL / drows = U columns / tau,  dL / dcolumns = U^T rows / tau,
#   dL / d(1 / tau) = sum_ij U_ij <row_i, column_j> = sum_i <row_i, (U columns)_i>
#
# P and Q need the log-sum-exps of the forward pass only. A device has the rows of U of its own
# rows, so its U^T rows is a part of a sum over devices.
def _symmetric_bwd(plan, residuals, g):
  rows, inverse, valid, of_rows, of_columns, everyone, block = residuals
  g_rows, g_columns, _ = g

  def local(rows, inverse, valid, of_rows, of_columns, everyone, block, g_rows, g_columns):
    num_rows = len(rows)
    num_columns = len(everyone)
    everyone_valid = plan.gather(valid)
    shift = excluded(everyone_valid, plan.accumulate)
    g_rows = jnp.where(valid, g_rows, 0.0)
    g_columns = jnp.where(everyone_valid, plan.gather(g_columns), 0.0)
    classes = jnp.arange(num_columns, dtype=jnp.int32)

    def pull(u, rows, of_rows, labels, g_rows):
      """Gradients over 1 / tau of a chunk's rows [c, D] and, from them, of all columns [B, D]."""
      of_rows = jax.tree.map(lambda x: x[:, None], of_rows)
      own = (classes == labels[:, None]).astype(u.dtype)
      gradient = g_rows[:, None] * (jnp.exp(of_rows.log_prob(u)) - own)
      gradient += g_columns * (jnp.exp(of_columns.log_prob(u)) - own)
      gradient = gradient.astype(plan.dtype)  # [c, B]
      to_rows = jnp.matmul(gradient, everyone, preferred_element_type=plan.accumulate)
      to_columns = jax.lax.dot_general(
        gradient, rows, (((0,), (0,)), ((), ())), preferred_element_type=plan.accumulate
      )
      return to_rows, to_columns

    if block is not None:
      labels = plan.labels(num_rows)
      to_rows, to_columns = pull(block, rows.astype(plan.dtype), of_rows, labels, g_rows)
    else:
      inputs = _row_chunks(plan, rows, valid, num_columns)
      chunks = inputs[0].shape[:2]
      more = jax.tree.map(lambda x: to_chunks(x, chunks), (of_rows, g_rows))

      def body(total, chunk):
        (rows, counts, labels), (of_rows, g_rows) = chunk
        u = _block(plan, rows, counts, everyone, shift, inverse)
        labels = jnp.where(counts, labels, -1)  # a copy of the last row has no column of its own
        to_rows, to_columns = pull(u, rows, of_rows, labels, jnp.where(counts, g_rows, 0.0))
        return total + to_columns, to_rows

      zero = jnp.zeros(everyone.shape, plan.accumulate)
      to_columns, to_rows = jax.lax.scan(body, zero, (inputs, more))
      to_rows = from_chunks(to_rows, num_rows)
    to_inverse = plan.sum(jnp.sum(to_rows * rows))
    return to_rows * inverse, plan.scatter_sum(to_columns) * inverse, to_inverse

  inputs = ('b', '', 'b', 'b', '', '', None if block is None else 'b', 'b', 'b')
  gradient = plan.shard_map(local, inputs, ('b', 'b', ''))(*residuals, g_rows, g_columns)
  return *gradient, None


_symmetric.defvjp(_symmetric_fwd, _symmetric_bwd)
