"""E[link(logits / tau)] of Gaussian logits, exact or from samples, for training and evaluation."""

import dataclasses
import functools
import logging
import math

import jax
import jax.numpy as jnp

from het_plugin.integrate import exact, factored, fused, samplers, streaming
from het_plugin.integrate.gaussian import (
  GaussianLogits,
  Hashed,
  Linear,
  LowRank,
  Opaque,
  apply_projection,
  project,
)
from het_plugin.integrate.order import can_project_first, pick_order
from het_plugin.integrate.placement import (
  Placement,
  bytes_per_device,
  num_shards,
  on_every_shard,
  tile,
  untile,
)
from het_plugin.integrate.rotation import Draws, find_rotation

IMPLEMENTATIONS = ('xla', 'pallas')
METHODS = ('auto', 'exact', 'sample')
ORDERS = ('auto', 'project_then_sample', 'sample_then_project')


@dataclasses.dataclass(frozen=True)
class Integrator:
  """The heteroscedastic predictive distribution (eq. 2 and 5, last line of appendix A.1).

  With the link 'sigmoid' it is exact and takes neither samples nor keys (`exact`), but for an
  opaque projection. With the link 'softmax' it is a mean over samples, and exact for its samples:
  probabilities never leave log space, so nothing is clipped. Deterministic logits (no covariance)
  take the closed form whatever the settings say.

  Sampled losses are differentiable once, in reverse mode, and without fused kernels once more in
  forward mode over it (`jax.jvp` of `jax.grad`), which streams as well; other second derivatives
  are an error. The exact ones have all derivatives.

  Attributes:
    num_samples: S >= 1.
    order: 'sample_then_project' applies the projection to every noise sample; 'project_then_sample'
      applies it to the R + 1 factors first and samples in logit space; 'auto' takes the one with
      fewer floating point operations (`pick_order`). The same draws give the same values either
      way.
    chunk_size: samples whose logits exist at one time; None takes 32, or fewer if
      `chunk_bytes` asks for it.
    chunk_bytes: budget for the logits [B, s, Kp] of one chunk, in bytes a device.
    class_shards: tiles into which the classes are cut so that shards never talk inside the sample
      loop; None takes the number of shards that the active mesh and logical axis rules give the
      axis 'vocab' (1 outside a mesh).
    implementation: 'xla', or 'pallas' for fused kernels (`kernels`) where a float32 loss projects
      first. They are for TPUs and NVIDIA GPUs; other devices interpret them, slowly.
    sampler: where the normals come from: 'iid', 'antithetic', 'sobol' (`samplers.SAMPLERS`), or a
      function of that signature.
    method: 'exact', 'sample', or 'auto' for exact wherever that exists. The attributes above but
      `chunk_bytes` matter to samples only.
    rotate: whether `MIN_ROTATED` and more samples of 'sobol' are turned so that their leading
      coordinates are the principal directions of the noise (`rotation`), with the link 'softmax'
      and a known projection.
  """

  num_samples: int = 1000
  order: str = 'auto'
  chunk_size: int | None = None
  chunk_bytes: int = 2**28
  class_shards: int | None = None
  implementation: str = 'xla'
  sampler: str | samplers.Sampler = 'iid'
  method: str = 'auto'
  rotate: bool = True

  def __post_init__(self):
    for name in ('num_samples', 'chunk_size', 'chunk_bytes'):
      value = getattr(self, name)
      if value is not None and value < 1:
        raise ValueError(f'Integrator.{name}={value} must be at least 1')
    choices = {'order': ORDERS, 'implementation': IMPLEMENTATIONS, 'method': METHODS}
    for name, known in choices.items():
      if getattr(self, name) not in known:
        raise ValueError(
          f'Integrator.{name}={getattr(self, name)!r} is unknown: choose one of {", ".join(known)}'
        )
    if not callable(self.sampler) and self.sampler not in samplers.SAMPLERS:
      raise ValueError(
        f'Integrator.sampler={self.sampler!r} is unknown: choose one of '
        f'{", ".join(samplers.SAMPLERS)}, or give a function'
      )

  def nll(
    self, logits: GaussianLogits, labels: jax.Array, keys: jax.Array | None = None
  ) -> jax.Array:
    """Negative log-likelihood of each example.

    Args:
      logits: of B examples.
      labels: int32 [B, L] class ids, negative entries are padding. Softmax: the mean of -log p over
        an example's labels (one label: the cross-entropy). Sigmoid: the binary cross-entropies
        summed over all classes, listed ones being on.
      keys: [B] typed PRNG keys, one an example (`samplers.example_keys`); or [1], whose draws all
        examples share. Ignored where the logits are deterministic or the method is exact.

    Returns:
      float32 [B]; an example without any label gets 0 under softmax.
    """
    if self._is_exact(logits, keys):
      on = multi_hot(labels, logits.location.shape[-1])  # [B, Kp]
      mean, variance = exact.marginals(logits, self.chunk_bytes)
      log_q = exact.log_expected_sigmoid(jnp.where(on, mean, -mean), variance)
      return -jnp.where(_valid(logits), log_q, 0.0).sum(-1)
    problem = self._factored(logits, keys)
    if logits.link == 'softmax':
      listed = labels >= 0
      if problem is None or labels.shape[-1] > 1:
        log_p = self._log_softmax_at(logits, labels, keys)  # [B, L]
      else:
        log_p = self._factored_log_softmax_at(self._num_tiles(logits), *problem, labels)
      return -jnp.where(listed, log_p, 0.0).sum(-1) / jnp.maximum(listed.sum(-1), 1)
    on = multi_hot(labels, logits.location.shape[-1])  # [B, Kp]
    sign = jnp.where(on, 1.0, -1.0).astype(logits.location.dtype)
    if problem is None:
      log_q = self._log_sigmoid(logits, sign, keys)
    else:
      log_q = _losses(problem[0]).log_sigmoid(*problem, sign)
    return -jnp.where(_valid(logits), log_q, 0.0).sum(-1)

  def log_prob(self, logits: GaussianLogits, keys: jax.Array | None = None) -> jax.Array:
    """log p(k | x) of every class: float32 [B, Kp], with padded classes at about -1e30.

    Softmax: the classes' probabilities sum to one. Sigmoid: log p(y_k = 1 | x), class by class.
    """
    if self._is_exact(logits, keys):
      log_p = exact.log_expected_sigmoid(*exact.marginals(logits, self.chunk_bytes))
    elif logits.link == 'softmax':
      if logits.covariance is None:
        log_p = jax.nn.log_softmax(_deterministic(logits), axis=-1)
      else:
        log_p = untile(streaming.log_softmax(*self._streams(logits, keys)))
    else:
      log_p = self._log_sigmoid(logits, jnp.ones_like(logits.location), keys)
    return jnp.where(_valid(logits), log_p, streaming.PADDED)

  def expected_entropy(self, logits: GaussianLogits, keys: jax.Array | None = None) -> jax.Array:
    """E[H(y | x, z)], the entropy of the classes given the noise, averaged over the noise: float32
    [B], nats.

    The entropy of `log_prob` less this is the mutual information of label and noise (Depeweg et al.
    2018, https://arxiv.org/abs/1710.07283, eq. 4, with the noise in the place of the weights). Both
    are exact or take the same draws, so the difference is at least 0 up to rounding. Sigmoid:
    summed over the classes.

    For evaluation: with K sharded, every chunk of samples talks over the model axis. Arguments as
    in `log_prob`.
    """
    if logits.covariance is None:
      return _entropy(_deterministic(logits), logits.link)
    if self._is_exact(logits, keys):
      entropy = exact.expected_entropy(*exact.marginals(logits, self.chunk_bytes))
      return jnp.where(_valid(logits), entropy, 0.0).sum(-1)
    if self._order(logits) == 'project_then_sample':
      covariance = project(logits.covariance, logits.projection)
      logits = logits.replace(covariance=covariance, projection=None)
    chunk, draws = self._chunk(logits), self._draws(logits, keys)

    def add_chunk(total, start):
      index = start + jnp.arange(chunk)
      z = draws.normals(self._sampler(), index, logits.covariance.num_normals)
      u, shift = _samples(logits, z)
      entropy = _entropy(u + shift, logits.link)  # [B, s]
      return total + jnp.where(index < self.num_samples, entropy, 0.0).sum(-1), None

    zero = jnp.zeros_like(logits.location[:, 0])
    total, _ = jax.lax.scan(add_chunk, zero, jnp.arange(0, self.num_samples, chunk))
    return total / self.num_samples

  def noise(self, covariance: LowRank, keys: jax.Array) -> jax.Array:
    """The S noise samples [B, S, Q] of the sampler with these keys, without any rotation."""
    z = self._sampler()(keys, jnp.arange(self.num_samples), covariance.num_normals)
    return covariance.noise(z)

  def _is_exact(self, logits, keys):
    if logits.covariance is None:
      return False
    exists = logits.link == 'sigmoid' and not isinstance(logits.projection, Opaque)
    if self.method == 'exact' and not exists:
      raise ValueError(
        "Integrator.method='exact' needs the link 'sigmoid' and a known projection; got link="
        f"{logits.link!r} and projection={type(logits.projection).__name__}: use 'auto' or 'sample'"
      )
    if exists and self.method != 'sample':
      return True
    if keys is None:
      raise ValueError('Integrator: samples need keys, one per example (example_keys)')
    return False

  def _log_softmax_at(self, logits, labels, keys):
    if logits.covariance is None:
      log_p = jax.nn.log_softmax(_deterministic(logits), axis=-1)
      return jnp.take_along_axis(log_p, jnp.maximum(labels, 0), axis=-1)
    return streaming.log_softmax_at(*self._streams(logits, keys), labels)

  def _log_sigmoid(self, logits, sign, keys):
    if logits.covariance is None:
      return jax.nn.log_sigmoid(sign * _deterministic(logits))
    plan, tiles, const = self._streams(logits, keys)
    return untile(streaming.log_sigmoid(plan, tiles, const, tile(sign, const.valid.shape[0])))

  def _factored(self, logits, keys):
    """The arguments of the fast losses (`factored`) but for the labels; None where only the general
    road is open: deterministic logits, or more samples at once than fit.
    """
    if logits.covariance is None:
      return None
    has_factors = can_project_first(logits) and logits.covariance.remainder == 'rank_one'
    chunk_size = self._chunk(logits)
    if has_factors and self._order(logits) == 'project_then_sample':
      rows, shift = _factors_and_location(logits)
      if self.implementation == 'pallas' and rows.dtype == jnp.float32:
        plan = fused.plan_calls(self.num_samples, self._sampler(), Placement.current())
      else:
        plan = streaming.Plan(self.num_samples, chunk_size, self._sampler())
      _say_once(
        f'Integrator: losses project first and take {self.num_samples} samples, {plan.chunk_size} '
        f'at a time, by {"XLA" if _losses(plan) is factored else "fused kernels"}'
      )
      return plan, rows, shift, self._draws(logits, keys, rows[:, :-1])
    # As many samples as there are factors need no budget, since factors have none either.
    free = logits.covariance.num_normals if has_factors and self.chunk_size is None else 0
    if self.num_samples > max(chunk_size, free):
      return None
    draws = self._draws(logits, keys)
    index, num_normals = jnp.arange(self.num_samples), logits.covariance.num_normals
    u, shift = _samples(logits, draws.normals(self._sampler(), index, num_normals))
    return streaming.Plan(self.num_samples, self.num_samples, None), u, shift, draws

  def _factored_log_softmax_at(self, num_tiles, plan, rows, shift, draws, labels):
    """log p [B, 1] at labels [B, 1]."""
    label = jnp.maximum(labels[:, 0], 0)
    if num_tiles == 1 or isinstance(plan, fused.FusedPlan):
      return _losses(plan).log_softmax_at(plan, rows, shift, draws, label)[:, None]
    tiles = (tile(x, num_tiles) for x in (rows, shift))
    return factored.tiled_log_softmax_at(plan, *tiles, draws, label)[:, None]

  def _streams(self, logits, keys):
    """The arguments of the streamed estimators: plan, tiles, constants."""
    num_tiles = self._num_tiles(logits)
    order = self._order(logits)
    plan = streaming.Plan(self.num_samples, self._chunk(logits), self._sampler())
    tiles, buckets = _make_tiles(logits, order, num_tiles)
    valid = _valid(logits).reshape(num_tiles, -1)
    return plan, tiles, streaming.Constants(self._draws(logits, keys), valid, buckets)

  def _draws(self, logits, keys, factors=None):
    """What the normals are made of; `factors` [B, T, Kp] are those over tau, where they exist."""
    is_sobol = self.sampler in ('sobol', samplers.sobol)
    if not (self.rotate and is_sobol and self.num_samples >= MIN_ROTATED):
      return Draws(keys)
    if logits.link == 'sigmoid' or isinstance(logits.projection, Opaque):
      return Draws(keys)
    covariance, projection = logits.covariance.scaled(1.0 / logits.temperature), logits.projection
    if factors is None and self._order(logits) == 'project_then_sample':
      covariance, projection = project(covariance, projection), None

    def to_logits(z):  # [B, m, T] to [B, m, Kp]
      if factors is not None:
        return jnp.einsum('bmt,btk->bmk', z, factors)
      return apply_projection(projection, covariance.noise(z))

    rotation = find_rotation(to_logits, _deterministic(logits), covariance.num_normals)
    if self.implementation == 'pallas':
      keys = jnp.broadcast_to(keys, len(logits.location))
    return Draws(keys, rotation)

  def _order(self, logits):
    if self.order == 'auto':
      return pick_order(logits, self.num_samples)
    if self.order == 'project_then_sample' and not can_project_first(logits):
      raise ValueError(
        "Integrator.order='project_then_sample' needs remainder='rank_one' and a known projection; "
        f'got remainder={logits.covariance.remainder!r} and '
        f'projection={type(logits.projection).__name__}: '
        "use 'sample_then_project' or 'auto'"
      )
    return self.order

  def _sampler(self):
    return self.sampler if callable(self.sampler) else samplers.SAMPLERS[self.sampler]

  def _chunk(self, logits):
    if self.chunk_size is None:
      limit = min(MAX_CHUNK, max(1, self.chunk_bytes // bytes_per_device(logits.location)))
    else:
      limit = self.chunk_size
    num_chunks = math.ceil(self.num_samples / limit)
    # Chunks of nearly one size: less of the last one is thrown away.
    return math.ceil(self.num_samples / num_chunks)

  def _num_tiles(self, logits):
    if isinstance(logits.projection, Opaque):
      return 1  # nothing is known of how its classes are laid out
    num_classes = logits.location.shape[-1]
    num_tiles = num_shards('vocab') if self.class_shards is None else self.class_shards
    if num_classes % num_tiles:
      raise ValueError(
        f'{num_classes} (padded) classes do not divide into {num_tiles} shards of the model axis: '
        f"set the head's class_multiple to a multiple of {num_tiles}"
      )
    return num_tiles


@functools.cache
def _say_once(message):
  logging.getLogger(__name__).info(message)


# Fewer Sobol points gain little by a rotation, and it costs what a dozen samples cost.
MIN_ROTATED = 32
# Samples at one time: their logits and exponentials together weigh about what the factors weigh.
MAX_CHUNK = 32


def _losses(plan):
  return fused if isinstance(plan, fused.FusedPlan) else factored


def multi_hot(labels: jax.Array, num_classes: int) -> jax.Array:
  """bool [B, num_classes] from int32 [B, L] class ids padded with negative entries."""
  return (labels[:, :, None] == jnp.arange(num_classes)).any(axis=1)


def _deterministic(logits):
  return _masked(logits, logits.location / logits.temperature)


def _masked(logits, u):
  return jnp.where(_valid(logits), u, streaming.PADDED)


def _entropy(u, link):
  """Entropy in nats [...] of logits over tau [..., Kp]; padded ones, at `PADDED`, add nothing."""
  if link == 'softmax':
    log_p = jax.nn.log_softmax(u, axis=-1)
    return -(jnp.exp(log_p) * log_p).sum(-1)
  log_p, log_q = jax.nn.log_sigmoid(u), jax.nn.log_sigmoid(-u)
  return -(jnp.exp(log_p) * log_p + jnp.exp(log_q) * log_q).sum(-1)


def _valid(logits):
  return jnp.arange(logits.location.shape[-1]) < logits.num_classes


def _factors_and_location(logits):
  """F with mu as its last row [B, R + 2, Kp], over tau and in logit space, and what is added to all
  mu, [Kp] (`factored.log_softmax_at`).
  """
  inverse, projection = 1.0 / logits.temperature, logits.projection
  noise = logits.covariance.scaled(inverse)
  if _has_phi(projection):
    rows = [noise.dense_loading(), noise.diag[:, None], projection.phi[:, None] * inverse]
    rows = apply_projection(projection, jnp.concatenate(rows, axis=1))
    return rows, _masked(logits, projection.bias * inverse)
  noise, location = project(noise, projection), logits.location[:, None] * inverse
  rows = jnp.concatenate([noise.dense_loading(), noise.diag[:, None], location], axis=1)
  return rows, _masked(logits, jnp.zeros_like(location[0, 0]))


def _samples(logits, z):
  """Samples of the logits over tau, [B, S, Kp], for normals z [B, S, num_normals], and what is
  added to all of them, [Kp].
  """
  inverse, projection = 1.0 / logits.temperature, logits.projection
  eps = logits.covariance.noise(z)  # [B, S, Q]
  shift = jnp.zeros_like(logits.location[0])
  if isinstance(projection, Opaque):
    phi = projection.phi[:, None] + eps
    u = projection.get_logits(projection.params, phi.reshape(-1, phi.shape[-1]))
    u = u.reshape(*phi.shape[:2], -1).astype(shift.dtype) * inverse
  elif _has_phi(projection):
    u = apply_projection(projection, (projection.phi[:, None] + eps) * inverse)
    shift = projection.bias * inverse
  else:
    u = apply_projection(projection, eps * inverse) + logits.location[:, None] * inverse
  return u, _masked(logits, shift)


def _has_phi(projection):
  return isinstance(projection, Linear) and projection.phi is not None


def _make_tiles(logits, order, num_tiles):
  """Splits the classes into tiles and folds 1 / tau in, outside the loops, so that neither costs
  anything a sample.
  """
  inverse = 1.0 / logits.temperature
  if isinstance(logits.projection, Opaque):
    opaque = logits.projection
    scaled = opaque.replace(
      params=(opaque.params, inverse),
      get_logits=_TemperedLogits(opaque.get_logits),
    )
    one_tile = jax.tree.map(lambda x: x[None], (logits.covariance, scaled))
    return streaming.Tiles(None, *one_tile), None

  covariance, projection = logits.covariance.scaled(inverse), logits.projection
  if order == 'project_then_sample':
    covariance, projection = project(covariance, projection), None
  split = functools.partial(tile, num_tiles=num_tiles)
  # The noise space is either that of the logits or shared by all classes.
  place = split if projection is None else functools.partial(on_every_shard, num_tiles=num_tiles)
  covariance = jax.tree.map(place, covariance)
  location = split(logits.location * inverse)
  match projection:
    case None:
      return streaming.Tiles(location, covariance, None), None
    case Linear(kernel):
      return streaming.Tiles(location, covariance, Linear(split(kernel))), None
    case Hashed(buckets):
      return streaming.Tiles(location, covariance, None), split(buckets)


@dataclasses.dataclass(frozen=True)
class _TemperedLogits:
  """get_logits(phi) / tau with the inverse temperature as one more parameter."""

  get_logits: object

  def __call__(self, params, phi):
    params, inverse = params
    return self.get_logits(params, phi) * inverse
