"""Softmax over a batch: every row against the columns of all rows, without a [B, B] on any device.

The loss of contrastive learning (section 5). Row i of one modality is an example, column j of the
other modality a class, and row and column i belong together:

    u_ij = <row_i, column_j> / tau
    nll_i = log sum_j exp(u_ij) - u_ii        rows to columns     (eq. 6)
    nll_j = log sum_i exp(u_ij) - u_jj        columns to rows

B examples lie over n devices, b = B / n each. A device gathers the columns [B, D] and forms the
block [b, B] of its own rows; the gradient of the columns goes back by a reduce-scatter. The batch
is cut over the mesh axes of the logical axis 'batch' and then over every other axis that still
divides it, so that a model axis shares the work rather than repeating it. Without a mesh, or
without logical axis rules, one device does all. Neither mesh nor chunks change the result.

Deterministic (`symmetric_nll`): one product serves both directions. What the columns need of other
devices' blocks is a maximum and a sum of exponentials, vectors [B] that collectives combine. A
block that fits the budget is kept for the backward pass (3 products in all); otherwise rows come in
chunks, which the backward pass forms again (4 products).

Noisy rows (`batch_nll`, HET-XL, eq. 8): each row is Gaussian, and the columns are a classifier's W:
chunks of rows are ordinary problems of the `Integrator`. A chunk knows its rows' losses and their
gradients at once, so the forward pass accumulates the gradient of sum_i nll_i and keeps nothing of
a chunk (3 products with one sample). That is the gradient up to a factor wherever the rows have one
cotangent, which is what a mean over the real rows gives them; for any other cotangent the backward
pass runs the chunks again.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import core, struct
from flax.linen import partitioning as flax_partitioning

from het_plugin.integrate.gaussian import GaussianLogits, Linear, LowRank, Opaque
from het_plugin.integrate.integrator import Integrator
from het_plugin.integrate.placement import mesh_axes
from het_plugin.integrate.streaming import PADDED

CHUNK_BYTES = 2**26


@struct.dataclass
class BatchSoftmax:
  """One direction of the loss.

  Attributes:
    nll: float32 [B], the negative log-likelihood of each example's own counterpart, nats; 0 where
      the mask is 0.
    correct: float32 [B], whether the own counterpart is the most similar one: 1 or 0, and 1/n where
      n counterparts tie at the top, so that representations which are all alike are right one time
      in B. Without a gradient. 0 where the mask is 0.
  """

  nll: jax.Array
  correct: jax.Array


def symmetric_nll(
  rows: jax.Array,
  columns: jax.Array,
  temperature: jax.Array,
  mask: jax.Array | None = None,
  *,
  dtype: jnp.dtype = jnp.float32,
  chunk_bytes: int = CHUNK_BYTES,
) -> tuple[BatchSoftmax, BatchSoftmax]:
  """Both directions of the batch softmax without noise (eq. 6).

  Args:
    rows: [B, D] representations of one modality.
    columns: [B, D] those of the other; row and column i are a pair.
    temperature: tau, a positive scalar: logits are <row, column> / tau.
    mask: [B]; a pair where it is 0 has no loss and no gradient, and is nobody's candidate. None:
      all pairs count.
    dtype: compute type of the products, which add up in float32 (or wider), as all the rest is.
    chunk_bytes: budget for a block of logits on a device. The backward pass holds two of that size.

  Returns:
    (rows to columns, columns to rows).

  Raises:
    ValueError: the shapes of rows and columns differ, or chunk_bytes is below 1.
  """
  plan = _plan('symmetric_nll', rows, columns, dtype, chunk_bytes)
  valid = _valid(mask, len(rows))
  rows, columns = (_real(x, valid, plan.accumulate) for x in (rows, columns))
  inverse = 1.0 / jnp.asarray(temperature, plan.accumulate)
  nll_rows, nll_columns, correct = _symmetric(plan, rows, columns, inverse, valid)
  correct = jax.lax.stop_gradient(correct)
  return BatchSoftmax(nll_rows, correct[0]), BatchSoftmax(nll_columns, correct[1])


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
  dtype: jnp.dtype = jnp.float32,
  chunk_bytes: int = CHUNK_BYTES,
) -> jax.Array:
  """One direction of the batch softmax, from noisy rows to columns (eq. 8): -log E[p(i | row_i)].

  With one sample (the paper's training) the expectation is that sample, and loss and gradient cost
  the 3 products of a softmax without noise. More samples: as `Integrator` has it.

  Args:
    integrator: of the noise. Its `class_shards` does not apply.
    rows: [B, D], the means.
    covariance: of the noise that is added to them (Q = D).
    columns: [B, D], without noise.
    temperature: tau, a positive scalar.
    mask: [B] or None, as in `symmetric_nll`.
    keys: typed PRNG keys [B], one an example (`example_keys`), or [1], whose draws all share.
    post_normalization: each noisy row is scaled to unit length (table 7).
    dtype: compute type of the products.
    chunk_bytes: budget for the logits, or factors, of a chunk of rows on a device. About three
      arrays of that size exist at one time.

  Returns:
    float32 [B], nats; 0 where the mask is 0.

  Raises:
    ValueError: the shapes of rows and columns differ, or chunk_bytes is below 1.
  """
  plan = _plan('batch_nll', rows, columns, dtype, chunk_bytes)
  noisy = _NoisyPlan(
    **vars(plan),
    integrator=dataclasses.replace(integrator, class_shards=1),
    num_factors=covariance.num_factors,
    post_normalization=post_normalization,
  )
  valid = _valid(mask, len(rows))
  rows, columns = (_real(x, valid, plan.accumulate) for x in (rows, columns))
  keys = jnp.broadcast_to(keys, (len(rows),))
  own, loading = covariance, None
  if covariance.scale is not None:  # J belongs to all rows
    own, loading = covariance.replace(loading=None), covariance.loading
  if mask is not None:
    own = jax.tree.map(lambda x: _real(x, valid, x.dtype), own)
  shared = columns, jnp.asarray(temperature, plan.accumulate), loading
  return _noisy(noisy, (rows, own), shared, keys, valid)


def unit_length(x: jax.Array) -> jax.Array:
  """x [..., D] over its Euclidean norm; a zero vector stays zero, with a finite gradient."""
  squared = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(jnp.maximum(squared, 1e-12))


@dataclasses.dataclass(frozen=True)
class _Plan:
  """Where the rows lie and in what pieces they are taken (static under jit).

  Attributes:
    mesh: the active mesh; None for one device.
    axes: its axes that cut the batch, the first being the slowest.
    dtype: compute type of the products.
    chunk_bytes: budget.
  """

  mesh: jax.sharding.Mesh | None
  axes: tuple[str, ...]
  dtype: jnp.dtype
  chunk_bytes: int

  @property
  def accumulate(self) -> jnp.dtype:
    return jnp.promote_types(self.dtype, jnp.float32)

  def shard_map(self, function, inputs: tuple, outputs: tuple):
    """`function` on each device's part; a spec is True where the leading dimension is cut."""
    if not self.axes:
      return function
    cut = jax.sharding.PartitionSpec(self.axes)
    inputs, outputs = jax.tree.map(
      lambda is_cut: cut if is_cut else jax.sharding.PartitionSpec(), (inputs, outputs)
    )
    return jax.shard_map(
      function, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False
    )

  def gather(self, x: jax.Array) -> jax.Array:
    """[b, ...] of every device as one [B, ...]."""
    return jax.lax.all_gather(x, self.axes, tiled=True) if self.axes else x

  def scatter_sum(self, x: jax.Array) -> jax.Array:
    """The sum over devices of [B, ...], of which each gets its [b, ...]."""
    if not self.axes:
      return x
    return jax.lax.psum_scatter(x, self.axes, scatter_dimension=0, tiled=True)

  def sum(self, x):
    return jax.lax.psum(x, self.axes) if self.axes else x

  def max(self, x):
    return jax.lax.pmax(x, self.axes) if self.axes else x

  def labels(self, num_rows: int) -> jax.Array:
    """The column that belongs to each of this device's rows, int32 [b]."""
    start = jax.lax.axis_index(self.axes) * num_rows if self.axes else 0
    return start + jnp.arange(num_rows, dtype=jnp.int32)

  def chunks(self, num_rows: int, bytes_a_row: int) -> tuple[int, int]:
    """(number of chunks, rows of each) within the budget, nearly all of them full."""
    limit = max(1, self.chunk_bytes // max(1, bytes_a_row))
    size = math.ceil(num_rows / math.ceil(num_rows / limit))
    return math.ceil(num_rows / size), size


@dataclasses.dataclass(frozen=True)
class _NoisyPlan(_Plan):
  integrator: Integrator
  num_factors: int
  post_normalization: bool


def _plan(caller, rows, columns, dtype, chunk_bytes):
  if rows.shape != columns.shape or rows.ndim != 2:
    raise ValueError(
      f'{caller}: rows {rows.shape} and columns {columns.shape} must be of one shape [B, D]'
    )
  if chunk_bytes < 1:
    raise ValueError(f'{caller}: chunk_bytes={chunk_bytes} must be at least 1')
  mesh, axes = _cut(len(rows))
  return _Plan(mesh, axes, jnp.dtype(dtype), chunk_bytes)


def _cut(batch_size):
  """The active mesh and its axes that cut a batch of that size."""
  mesh = core.meta.get_global_mesh()
  if mesh is None or not flax_partitioning.get_axis_rules():
    return None, ()
  batch = mesh_axes('batch')
  batch = batch if isinstance(batch, tuple) else (batch,)
  batch = [axis for axis in batch if axis is not None]
  axes, shards = [], 1
  for axis in (*batch, *(axis for axis in mesh.axis_names if axis not in batch)):
    if batch_size % (shards * mesh.shape[axis]) == 0:
      axes.append(axis)
      shards *= mesh.shape[axis]
  return mesh, tuple(axes)


def _valid(mask, batch_size):
  return jnp.ones(batch_size, bool) if mask is None else mask > 0


def _real(x, valid, dtype):
  """Rows that do not count are 0, whatever they hold: not even a NaN gets out of them."""
  return jnp.where(valid.reshape(-1, *(1,) * (x.ndim - 1)), x, 0).astype(dtype)


def _to_chunks(x, chunks):
  """[b, ...] to [C, c, ...]; the last row fills up what is left over."""
  num_chunks, size = chunks
  if num_chunks * size != len(x):
    x = x[jnp.minimum(jnp.arange(num_chunks * size), len(x) - 1)]
  return x.reshape(num_chunks, size, *x.shape[1:])


def _is_real(chunks, num_rows):
  """bool [C, c], False at what `_to_chunks` filled up."""
  return jnp.arange(math.prod(chunks)).reshape(chunks) < num_rows


def _from_chunks(x, num_rows):
  return x.reshape(-1, *x.shape[2:])[:num_rows]


# Deterministic: both directions from one product


@struct.dataclass
class _Sums:
  """Log-sum-exps as maximum and sum of exp(u - maximum), and how many reach the maximum.

  Kept apart because log-probabilities near 0 keep their digits so: u - maximum is exact there.
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


def _products(plan, x, y):
  """x [c, D] times y [B, D], both of the compute type, to [c, B]."""
  return jax.lax.dot_general(x, y, (((1,), (1,)), ((), ())), preferred_element_type=plan.accumulate)


def _excluded(valid, dtype):
  """Added to the logits of a row, or column: 0, or `PADDED` where it is nobody's candidate."""
  return jnp.where(valid, 0.0, PADDED).astype(dtype)


def _row_chunks(plan, rows, valid, num_columns):
  """What a scan over chunks takes: rows [C, c, D] in the compute type, whether they count and which
  columns are theirs [C, c].
  """
  num_rows = len(rows)
  chunks = plan.chunks(num_rows, num_columns * plan.accumulate.itemsize)
  inputs = rows.astype(plan.dtype), valid, plan.labels(num_rows)
  rows, valid, labels = jax.tree.map(lambda x: _to_chunks(x, chunks), inputs)
  return rows, valid & _is_real(chunks, num_rows), labels


def _block(plan, rows, counts, everyone, shift, inverse):
  """Logits [c, B] of a chunk of rows."""
  similarity = _products(plan, rows, everyone)
  return similarity * inverse + (_excluded(counts, similarity.dtype)[:, None] + shift)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _symmetric(plan, rows, columns, inverse, valid):
  """(nll of rows [B], nll of columns [B], (both directions' correct [B]))."""
  return _symmetric_fwd(plan, rows, columns, inverse, valid)[0]


def _symmetric_fwd(plan, rows, columns, inverse, valid):
  keeps = _one_block(plan, len(rows))

  def local(rows, columns, inverse, valid):
    everyone = plan.gather(columns.astype(plan.dtype))  # [B, D]
    shift = _excluded(plan.gather(valid), plan.accumulate)  # [B]

    def body(partial, chunk):
      rows, counts, labels = chunk
      u = _block(plan, rows, counts, everyone, shift, inverse)  # [c, B]
      new = _sums(u, axis=0)
      top = jnp.maximum(partial.top, new.top)
      partial = jax.tree.map(jnp.add, partial.relative_to(top), new.relative_to(top))
      partial = partial.replace(top=top)
      own = jnp.take_along_axis(u, labels[:, None], axis=1)[:, 0]
      return partial, (_sums(u, axis=1), own, u)

    chunks = _row_chunks(plan, rows, valid, len(everyone))
    nothing = jnp.zeros_like(shift)
    partial = _Sums(jnp.full_like(shift, -jnp.inf), nothing, nothing)
    if keeps:
      partial, (of_rows, own, block) = body(partial, jax.tree.map(lambda x: x[0], chunks))
    else:
      partial, outputs = jax.lax.scan(lambda *x: _without_block(*body(*x)), partial, chunks)
      (of_rows, own), block = jax.tree.map(lambda x: _from_chunks(x, len(rows)), outputs), None
    of_columns = partial.relative_to(plan.max(partial.top))
    total, ties = plan.sum((of_columns.total, of_columns.ties))
    of_columns = of_columns.replace(total=total, ties=ties)
    own_columns = jax.tree.map(lambda x: x[plan.labels(len(rows))], of_columns)

    nll = [jnp.where(valid, -sums.log_prob(own), 0.0) for sums in (of_rows, own_columns)]
    correct = [jnp.where(valid, sums.correct(own), 0.0) for sums in (of_rows, own_columns)]
    return (*nll, tuple(correct)), (of_rows, of_columns, everyone, block)

  outputs = (True, True, (True, True)), (True, False, False, True if keeps else None)
  answer, residuals = plan.shard_map(local, (True, True, False, True), outputs)(
    rows, columns, inverse, valid
  )
  return answer, (rows, inverse, valid, *residuals)


def _without_block(carry, output):
  return carry, output[:2]


def _one_block(plan, batch_size):
  """Whether a device's logits are within the budget."""
  rows_a_device = batch_size // math.prod(plan.mesh.shape[axis] for axis in plan.axes)
  return plan.chunks(rows_a_device, batch_size * plan.accumulate.itemsize)[0] == 1


def _symmetric_bwd(plan, residuals, g):
  rows, inverse, valid, of_rows, of_columns, everyone, block = residuals
  g_rows, g_columns, _ = g

  def local(rows, inverse, valid, of_rows, of_columns, everyone, block, g_rows, g_columns):
    num_rows, num_columns = len(rows), len(everyone)
    everyone_valid = plan.gather(valid)
    shift = _excluded(everyone_valid, plan.accumulate)
    g_rows = jnp.where(valid, g_rows, 0.0)
    g_columns = jnp.where(everyone_valid, plan.gather(g_columns), 0.0)
    classes = jnp.arange(num_columns, dtype=jnp.int32)

    def pull(u, rows, of_rows, labels, g_rows):
      """Gradients over 1 / tau of a chunk's rows [c, D] and, from them, of all columns [B, D]."""
      of_rows = jax.tree.map(lambda x: x[:, None], of_rows)
      own = classes == labels[:, None]
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
      more = jax.tree.map(lambda x: _to_chunks(x, chunks), (of_rows, g_rows))

      def body(total, chunk):
        (rows, counts, labels), (of_rows, g_rows) = chunk
        u = _block(plan, rows, counts, everyone, shift, inverse)
        to_rows, to_columns = pull(u, rows, of_rows, labels, jnp.where(counts, g_rows, 0.0))
        return total + to_columns, to_rows

      zero = jnp.zeros(everyone.shape, plan.accumulate)
      to_columns, to_rows = jax.lax.scan(body, zero, (inputs, more))
      to_rows = _from_chunks(to_rows, num_rows)
    to_inverse = plan.sum(jnp.sum(to_rows * rows))
    return to_rows * inverse, plan.scatter_sum(to_columns) * inverse, to_inverse

  keeps = None if block is None else True
  inputs = (True, False, True, True, False, False, keeps, True, True)
  gradient = plan.shard_map(local, inputs, (True, True, False))(*residuals, g_rows, g_columns)
  return *gradient, None


_symmetric.defvjp(_symmetric_fwd, _symmetric_bwd)


# Noisy rows: chunks of rows through the integrator


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _noisy(plan, own, shared, keys, valid):
  """nll [B] for what each row has of its own, (phi, covariance), and what all share, (columns, tau,
  J or None).
  """
  return _noisy_nll(plan, own, shared, keys, valid, None)[0]


def _noisy_fwd(plan, own, shared, keys, valid):
  weights = valid.astype(plan.accumulate)
  nll, gradient = _noisy_nll(plan, own, shared, keys, valid, weights)
  return nll, (own, shared, keys, valid, gradient)


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
  """nll [B] and the gradients of sum_i weights_i nll_i by `own` and `shared`; None for weights
  None.
  """

  def local(own, shared, keys, valid, weights):
    num_rows = len(valid)
    shift = _excluded(plan.gather(valid), plan.accumulate)
    everyone = plan.gather(shared[0].astype(plan.dtype)), *shared[1:]
    # Either all samples' logits exist at one time, or the factors and the location in logit space.
    copies = min(plan.integrator.num_samples, plan.num_factors + 2)
    chunks = plan.chunks(num_rows, copies * len(shift) * plan.accumulate.itemsize)
    inputs = own, (keys, valid, plan.labels(num_rows), weights)
    own, (keys, valid, labels, weights) = jax.tree.map(lambda x: _to_chunks(x, chunks), inputs)
    rest = keys, valid & _is_real(chunks, num_rows), labels, weights

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
      output = jax.tree.map(lambda x: _from_chunks(x, num_rows), output)
    nll, to_own = output
    if weights is None:
      return nll, None
    to_shared = plan.scatter_sum(total[0]), *plan.sum(total[1:])
    return nll, (to_own, jax.tree.map(lambda x, y: x.astype(y.dtype), to_shared, shared))

  of_shared = (True, False, False)
  gradient = None if weights is None else (True, of_shared)
  return plan.shard_map(local, (True, of_shared, True, True, True), (True, gradient))(
    own, shared, keys, valid, weights
  )


def _chunk_nll(plan, own, everyone, keys, labels, shift):
  """nll [c] of a chunk of rows against all columns [B, D]."""
  phi, covariance = own
  columns, temperature, loading = everyone
  if loading is not None:
    covariance = covariance.replace(loading=loading)
  # Over tau it is `PADDED` again, whatever tau is.
  bias = shift * jax.lax.stop_gradient(temperature)
  if plan.post_normalization:
    projection = Opaque(phi, (columns, bias), _UnitLengthLogits(plan))
    location = projection.get_logits(projection.params, phi)
  else:
    projection = Linear(columns.T, phi, bias)
    location = _products(plan, phi.astype(plan.dtype), columns) + bias
  logits = GaussianLogits(location, covariance, projection, temperature, len(columns))
  with flax_partitioning.axis_rules(()):  # a device is on its own here
    return plan.integrator.nll(logits, labels[:, None], keys)


@dataclasses.dataclass(frozen=True)
class _UnitLengthLogits:
  """Logits of noisy rows scaled to unit length."""

  plan: _Plan

  def __call__(self, params, phi):
    columns, bias = params
    return _products(self.plan, unit_length(phi).astype(self.plan.dtype), columns) + bias
