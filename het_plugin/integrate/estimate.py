"""E[softmax(u)] and E[sigmoid(u)] of Gaussian logits u from samples, in log space.

Samples come in chunks, whose logits live only inside the loop. Only numbers per sample, [B, S], are
kept of a chunk, so memory does not grow with S K. Nothing is clipped: quotients are computed as the
exp of a difference of logarithms. There are three loops.

`one_pass` is the loss if factors are projected first and one device has all classes. Its value is
one number per example (softmax) or class (sigmoid), so its cotangent only scales a gradient that is
known as soon as the samples are. The forward pass accumulates the gradient with respect to the
factors F [T, K], relative to a running maximum as in an online softmax: no sample is drawn or
projected twice. On a CPU it takes few examples at a time (`Placement.by_example`). With
e_s = exp(u_s - max), Z_s = sum_k e_sk, omega_s the weight times the probability of y in sample s
relative to the largest over s, and z_s extended by a 1 for the mean,

    d log p_y / dF = sum_s omega_s z_s (1[k = y] - e_sk / Z_s) / sum_s omega_s
    d log q_k / dF = +-sum_s z_s sigmoid(x_s) sigmoid(-x_s) / sum_s sigmoid(x_s),   x = +-u_k

`log_softmax_at` is the softmax loss in all other cases. Each device takes the maximum and the sum
of exponentials of its own classes, and these are combined once, after the loop. The backward pass
draws and projects again (`jax.checkpoint`).

`log_mean_exp` is the mean over samples of a value per class, with a running maximum. Its gradient
weights the gradient of each sample by exp(value - answer).
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from het_plugin.integrate.draws import Draws
from het_plugin.integrate.gaussian import PADDED, Linear, LowRank
from het_plugin.integrate.order import Plan
from het_plugin.integrate.placement import Placement, dims
from het_plugin.integrate.proposal import Chosen
from het_plugin.integrate.samples import Constants, Samples, with_last


def draw(plan: Plan, draws: Draws | Chosen, chunk: jax.Array, num_normals: int, batch: int):
  """The normals of a chunk, [B, s, T]; the log-weights of its samples [B, s], or 0; and which of
  them count, bool [s].
  """
  index = chunk * plan.chunk_size + jnp.arange(plan.chunk_size)
  z = draws.normals(plan.sampler, index, num_normals)
  # Shared draws are repeated per example: as one product for the batch, with classes and examples
  # in one dimension, a chunk took 1.6 times as long on a CPU.
  z = jnp.broadcast_to(z, (batch, *z.shape[1:]))
  return z, draws.log_weight(index), index < plan.num_samples


def scan(plan: Plan, body, start, chunks):
  """`lax.scan` over chunks; a single chunk needs no loop, for which XLA would copy arguments."""
  if plan.num_chunks > 1:
    return jax.lax.scan(body, start, chunks)
  carry, out = body(start, jax.tree.map(lambda x: x[0], chunks))
  return carry, jax.tree.map(lambda x: x[None], out)


def at_class(u: jax.Array, label: jax.Array) -> jax.Array:
  """u [B, s, k] at classes label [B], 0 where a label is outside [0, k): [B, s].

  This is a sum, which XLA fuses with that of the exponentials. For a gather XLA transposes all
  logits in a TPU's memory, which took 0.7 of the time of everything else in the loop.
  """
  return jnp.where(jnp.arange(u.shape[-1]) == label[:, None, None], u, 0.0).sum(axis=-1)


# One pass: factors projected first, all classes on one device


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def one_pass(
  link: str, plan: Plan, samples: Samples, draws: Draws | Chosen, target: jax.Array
) -> jax.Array:
  """log E[softmax(u)]_y [B, 1] for the target y int32 [B, 1], or log E[sigmoid(a u)], [B, K], for
  the target a [B, K] of +1 and -1.
  """
  return _run_one_pass(link, plan, samples, draws, target, with_gradient=False)[0]


def _run_one_pass(link, plan, samples, draws, target, with_gradient):
  run = functools.partial(_one_pass, link, plan, with_gradient=with_gradient)
  inputs = _samples_spec(samples), draws.letters(), 'bk'
  example_bytes = plan.chunk_size * _class_bytes(samples)
  return plan.placement.by_example(run, inputs, example_bytes)(samples, draws, target)


def _class_bytes(samples):
  """Bytes of K numbers."""
  return samples.mean.shape[-1] * samples.mean.dtype.itemsize


def _one_pass(link, plan, samples, draws, target, with_gradient):
  """The answer [B, n], the total [B, n] to which the gradient sums are relative, and these sums."""
  rows, shift = samples.rows()
  samples = Samples(shift[None, None], rows, None)
  terms = _softmax_terms if link == 'softmax' else _sigmoid_terms

  def body(carry, chunk):
    top, total, sums = carry
    z, log_weight, counts = draw(plan, draws, chunk, samples.num_normals, samples.batch_size)
    counts = counts if plan.num_samples % plan.chunk_size else None
    u = samples.logits(z, None)
    new_top, new_total, pull = terms(u, target, log_weight, counts, top)
    shrink = jnp.exp(top - new_top)
    if with_gradient:
      new_sums = pull(with_last(z, 1.0))
      sums = jax.tree.map(lambda x, y: x * shrink[:, None] + y, sums, new_sums)
    return (new_top, total * shrink + new_total, sums), None

  total = jnp.zeros_like(target, rows.dtype)
  top = jnp.full_like(total, 2 * PADDED)
  sums = None
  if with_gradient:
    at_label = jnp.zeros_like(rows[..., :1]) if link == 'softmax' else None
    sums = at_label, jnp.zeros_like(rows)
  chunks = jnp.arange(plan.num_chunks)
  (top, total, sums), _ = scan(plan, body, (top, total, sums), chunks)
  return top + jnp.log(total / plan.num_samples), total, sums


def _softmax_terms(u, label, log_weight, counts, top):
  peak = u.max(axis=-1)  # [B, s]
  e = jnp.exp(u - peak[..., None])
  z_total = e.sum(axis=-1)
  log_p = at_class(u, label[:, 0]) - peak - jnp.log(z_total) + log_weight
  log_p = log_p if counts is None else jnp.where(counts, log_p, -jnp.inf)
  new_top = jnp.maximum(top, log_p.max(axis=1, keepdims=True))  # [B, 1]
  omega = jnp.exp(log_p - new_top)

  def pull(z):
    weighted = z * (omega / z_total)[..., None]
    return pull_samples(z, omega)[..., None], jnp.einsum('bst,bsk->btk', weighted, e)

  return new_top, omega.sum(axis=1, keepdims=True), pull


def _sigmoid_terms(u, sign, log_weight, counts, top):
  del log_weight  # draws are tilted for a softmax only
  x = sign[:, None] * u  # [B, s, K]
  if counts is not None:
    x = jnp.where(counts[:, None], x, 2 * PADDED)  # makes everything that follows 0
  new_top, sigmoid, slope = _sigmoids(x, top)
  return new_top, sigmoid.sum(axis=1), lambda z: (None, jnp.einsum('bst,bsk->btk', z, slope))


def _sigmoids(x, top):
  """The new top = max(top, min(max_s x, 0)) [B, K], and exp(-top) times sigmoid(x) and
  sigmoid(x) sigmoid(-x), [B, s, K], from the one exponential exp(-|x| - top).
  """
  top = jnp.maximum(top, jnp.minimum(jax.lax.stop_gradient(x).max(axis=1), 0.0))
  e = jnp.exp(-jnp.abs(x) - top[:, None])
  t = e * jnp.exp(top)[:, None]  # exp(-|x|)
  r = 1.0 / (1.0 + t)
  return top, jnp.where(x < 0, e * r, r), e * r * r


def pull_samples(z: jax.Array, weights: jax.Array) -> jax.Array:
  """sum_s z_s weights_s, [B, T], for weights [B, s]."""
  return jnp.einsum('bst,bs->bt', z, weights)


def _one_pass_fwd(link, plan, samples, draws, target):
  log_p, *sums = _run_one_pass(link, plan, samples, draws, target, with_gradient=True)
  return log_p, (samples, sums, target)


# The answer log p [B, n] has the cotangent g [B, n], and the forward pass kept the sums over
# samples of the module docstring, all relative to exp(top), which cancels in their quotients:
#
#   softmax   total = sum_s omega_s [B, 1],  at_label = sum_s omega_s z_s [B, T + 1, 1],
#             gradient = sum_s omega_s z_s e_sk / Z_s [B, T + 1, K]
#             dL / dF = g (1[k = y] at_label - gradient) / total
#   sigmoid   total = sum_s sigmoid(x_s) [B, K],
#             gradient = sum_s z_s sigmoid(x_s) sigmoid(-x_s) [B, T + 1, K]
#             dL / dF_tk = g_k a_k gradient_tk / total_k, for x = a u with a = +-1
#
# F is `Samples.rows`. Its last row is mu, because z ends with a 1. Where the noise came as v, J and
# d, their gradients are the pullback of `rows`. The gradient of the draws is stopped.
def _one_pass_bwd(link, plan, residuals, g):
  samples, (total, (at_label, gradient)), target = residuals
  if link == 'sigmoid':
    gradient = gradient * (g * (target / total))[:, None]
  else:
    scale = (g / total)[:, None]
    is_label = jnp.arange(gradient.shape[-1]) == target[:, None]  # [B, 1, K]
    gradient = jnp.where(is_label, scale * at_label, 0.0) - scale * gradient
  if not isinstance(samples.noise, LowRank):
    gradient, shift = with_shift(gradient)
    return Samples(shift[None, None], gradient, None), None, None
  example_bytes = (samples.num_normals + 1) * _class_bytes(samples)
  spec = (_samples_spec(samples),)
  to_rows = plan.placement.by_example(lambda x: x.rows()[0], spec, example_bytes)
  return *jax.vjp(to_rows, samples)[1](gradient), None, None


one_pass.defvjp(_one_pass_fwd, _one_pass_bwd)


def with_shift(gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The gradients of rows and shift."""
  # A product, because XLA's sum over examples took ten times as long on a CPU.
  ones = jnp.ones(gradient.shape[0], gradient.dtype)
  shift = jnp.einsum('b,bk->k', ones, gradient[:, -1], precision=jax.lax.Precision.HIGHEST)
  return gradient, shift


# Softmax at given classes, in general


def log_softmax_at(
  plan: Plan, samples: Samples, constants: Constants, labels: jax.Array
) -> jax.Array:
  """log E[softmax(u)]_y at labels y int32 [B, L]; undefined at labels outside [0, K)."""
  peak, total, at_label = _partial_sums(plan, samples, constants, labels)
  top, log_z = _combine(peak, total)  # [C, B, s]
  counts = jnp.arange(plan.num_chunks * plan.chunk_size) < plan.num_samples
  counts = counts.reshape(plan.num_chunks, 1, plan.chunk_size, 1)
  log_p = (at_label.sum(axis=0) - top[..., None]) - log_z[..., None]  # [C, B, s, L]
  log_p = jnp.where(counts, log_p, 2 * PADDED)
  return jax.nn.logsumexp(log_p, axis=(0, 2), b=1.0 / plan.num_samples)


def _partial_sums(plan, samples, constants, labels):
  """Per shard of classes (M): maximum and sum of exponentials [M, C, B, s], and the logits at
  labels [M, C, B, s, L].
  """

  def local(samples, constants, labels):
    num_classes = samples.mean.shape[-1]
    labels = labels - plan.placement.shard_index() * num_classes

    def partial(samples, chunk):
      u, log_weight, _ = _chunk_logits(plan, samples, constants, chunk)
      peak = jax.lax.stop_gradient(u.max(axis=-1))
      total = jnp.exp(u - peak[..., None]).sum(axis=-1)
      if labels.shape[-1] == 1:
        # One shard has the label, so the weight is added once.
        weight = jnp.broadcast_to(log_weight, peak.shape)
        return peak, total, at_class(u + weight[..., None], labels[:, 0])[..., None]
      index = jnp.clip(labels, 0, num_classes - 1)[:, None]
      at_label = jnp.take_along_axis(u, index, axis=-1)
      inside = (labels >= 0) & (labels < num_classes)
      return peak, total, jnp.where(inside[:, None], at_label, 0.0)

    body = jax.checkpoint(partial, prevent_cse=False) if plan.num_chunks > 1 else partial
    chunks = jnp.arange(plan.num_chunks)
    _, sums = scan(plan, lambda _, chunk: (None, body(samples, chunk)), None, chunks)
    return jax.tree.map(lambda x: x[None], sums)

  inputs = *_specs(samples, constants), 'bl'
  run = plan.placement.shard_map(local, inputs, ('kcbs', 'kcbs', 'kcbsl'))
  return run(samples, constants, labels)


def _combine(peak, total):
  """The maximum over shards, and the log of the sum of exponentials relative to it, [C, B, s]."""
  # Kept apart, because u - maximum is exact: log-probabilities near 0 keep their digits.
  top = peak.max(axis=0)
  return top, jnp.log(jnp.sum(total * jnp.exp(peak - top), axis=0))


def _chunk_logits(plan, samples, constants, chunk):
  """u [B, s, K] of a chunk, the log-weights of its samples [B, s], and which count, bool [s]."""
  noise = samples.noise
  vocab = plan.placement.vocab
  num_normals = samples.num_normals
  in_classes = isinstance(noise, LowRank) and samples.projection is None
  # In the space of the classes a remainder 'diag' has a normal for each class, and these are cut.
  is_cut = in_classes and noise.remainder == 'diag' and vocab and constants.buckets is None
  if is_cut:
    num_own = noise.diag.shape[-1]
    num_normals = noise.num_factors + num_own * jax.lax.psum(1, vocab)
  z, log_weight, counts = draw(plan, constants.draws, chunk, num_normals, samples.batch_size)
  if is_cut:
    first = noise.num_factors + num_own * plan.placement.shard_index()
    own = jax.lax.dynamic_slice_in_dim(z, first, num_own, axis=-1)
    z = jnp.concatenate([z[..., : noise.num_factors], own], axis=-1)
  return samples.logits(z, constants.buckets), log_weight, counts


def _specs(samples, constants):
  """Letters of the arrays' dimensions for `Placement`."""
  buckets = None if constants.buckets is None else dims('k')
  return _samples_spec(samples, buckets), Constants(constants.draws.letters(), buckets)


def _samples_spec(samples, buckets=None):
  noise = samples.noise
  projection = samples.projection
  if isinstance(noise, LowRank):
    q = 'k' if projection is None and buckets is None else 'q'
    scale, loading = (None, 'br' + q) if noise.scale is None else ('b' + q, 'r' + q)
    noise = LowRank(dims(scale), dims(loading), dims('b' + q), noise.remainder)
  else:
    noise = dims('btk')
  if isinstance(projection, Linear):
    projection = Linear(dims('qk'), None if projection.phi is None else dims('bq'))
  return Samples(dims('1sk' if samples.mean.shape[0] == 1 else 'bsk'), noise, projection)


# Values at all classes


def log_softmax(plan: Plan, samples: Samples, constants: Constants) -> jax.Array:
  """log E[softmax(u)] at all classes, [B, K]; padded classes get about `PADDED`."""
  if plan.placement.vocab is None:
    return _log_mean_exp(plan, _log_softmax, samples, constants)
  no_label = jnp.zeros((samples.batch_size, 1), jnp.int32)
  peak, total, _ = _partial_sums(plan, samples, constants, no_label)
  return _log_mean_exp(plan, _relative, samples, constants, log_z=_combine(peak, total))


def log_sigmoid(plan: Plan, samples: Samples, constants: Constants, sign: jax.Array) -> jax.Array:
  """log E[sigmoid(sign * u)], [B, K], for signs [B, K]; undefined at padded classes."""
  if plan.num_chunks > 1:
    return _log_mean_exp(plan, _log_sigmoid, samples, constants, sign)

  def of_one_chunk(samples, constants, sign):
    u, _, _ = _chunk_logits(plan, samples, constants, 0)
    return _log_mean_sigmoid(sign[:, None] * u)

  run = plan.placement.shard_map(of_one_chunk, (*_specs(samples, constants), 'bk'), 'bk')
  return run(samples, constants, sign)


@jax.custom_jvp
def _log_mean_sigmoid(x):
  """log mean_s sigmoid(x_s), [B, K] of [B, s, K].

  Its own derivative, since that of `_log_mean_exp_of` took HET-H a tenth more CPU time.
  """
  top, sigmoid, _ = _sigmoids(x, 2 * PADDED)
  return top + jnp.log(sigmoid.mean(axis=1))


@_log_mean_sigmoid.defjvp
def _log_mean_sigmoid_jvp(primals, tangents):
  (x,) = primals
  top, sigmoid, slope = _sigmoids(x, 2 * PADDED)
  gradient = slope / sigmoid.sum(axis=1, keepdims=True)
  return top + jnp.log(sigmoid.mean(axis=1)), (gradient * tangents[0]).sum(axis=1)


def _log_softmax(u, sign, log_z):
  del sign, log_z
  top = jax.lax.stop_gradient(u.max(axis=-1))
  return _relative(u, None, (top, jnp.log(jnp.exp(u - top[..., None]).sum(axis=-1))))


def _relative(u, sign, log_z):
  del sign
  top, log_total = log_z
  return (u - top[..., None]) - log_total[..., None]


def _log_sigmoid(u, sign, log_z):
  del log_z
  return jax.nn.log_sigmoid(sign[:, None] * u)


def _log_mean_exp(plan, value, samples, constants, sign=None, log_z=None):
  """`log_mean_exp` over the mesh; `log_z` is a pair of [C, B, s]."""
  function = _log_mean_exp_of if plan.num_chunks == 1 else log_mean_exp
  run = functools.partial(function, value, plan)
  run = plan.placement.shard_map(run, (*_specs(samples, constants), 'bk', 'cbs'), 'bk')
  return run(samples, constants, sign, log_z)


def _log_mean_exp_of(value, plan, samples, constants, sign, log_z):
  """log mean_s exp(value(u_s, sign, log_z_s)), [B, K]."""

  def body(carry, inputs):
    top, total = carry
    chunk, log_z = inputs
    u, _, counts = _chunk_logits(plan, samples, constants, chunk)
    v = jnp.where(counts[:, None], value(u, sign, log_z), -jnp.inf)  # [B, s, K]
    new_top = jnp.maximum(top, jax.lax.stop_gradient(v).max(axis=1))
    total = total * jnp.exp(top - new_top) + jnp.exp(v - new_top[:, None]).sum(axis=1)
    return (new_top, total), None

  shape = samples.batch_size, samples.mean.shape[-1]
  start = jnp.full_like(samples.mean, 2 * PADDED, shape=shape)
  chunks = jnp.arange(plan.num_chunks), log_z
  (top, total), _ = scan(plan, body, (start, jnp.zeros_like(start)), chunks)
  return top + jnp.log(total / plan.num_samples)


def _log_mean_exp_fwd(value, plan, samples, constants, sign, log_z):
  answer = _log_mean_exp_of(value, plan, samples, constants, sign, log_z)
  return answer, (samples, constants, sign, log_z, answer)


def _log_mean_exp_bwd(value, plan, residuals, g):
  samples, constants, sign, log_z, answer = residuals
  g = g / plan.num_samples

  def body(total, inputs):
    chunk, log_z = inputs

    def values(samples, log_z):
      u, _, counts = _chunk_logits(plan, samples, constants, chunk)
      return value(u, sign, log_z), counts[:, None]

    v, pull, counts = jax.vjp(values, samples, log_z, has_aux=True)
    weight = jnp.where(counts, g[:, None] * jnp.exp(v - answer[:, None]), 0.0)
    to_samples, to_log_z = pull(weight)
    return jax.tree.map(jnp.add, total, to_samples), to_log_z

  zeros = jax.tree.map(jnp.zeros_like, samples)
  to_samples, to_log_z = jax.lax.scan(body, zeros, (jnp.arange(plan.num_chunks), log_z))
  return to_samples, None, None, to_log_z


log_mean_exp = jax.custom_vjp(_log_mean_exp_of, nondiff_argnums=(0, 1))
log_mean_exp.defvjp(_log_mean_exp_fwd, _log_mean_exp_bwd)


def mean_over_samples(
  plan: Plan, samples: Samples, constants: Constants, value: Callable[[jax.Array], jax.Array]
) -> jax.Array:
  """mean_s value(u_s), [B], for value [B, s] of u [B, s, K]."""
  plan = dataclasses.replace(plan, placement=Placement())  # whole arrays, not those of a shard

  def add(total, chunk):
    u, _, counts = _chunk_logits(plan, samples, constants, chunk)
    return total + jnp.where(counts, value(u), 0.0).sum(axis=1), None

  body = jax.checkpoint(add, prevent_cse=False) if plan.num_chunks > 1 else add
  zero = jnp.zeros_like(samples.mean, shape=samples.batch_size)
  return scan(plan, body, zero, jnp.arange(plan.num_chunks))[0] / plan.num_samples
