"""E[link(logits / tau)] of Gaussian logits, exact or from samples, for training and evaluation."""

import dataclasses
import functools
import logging
import numbers

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from het_plugin.integrate import estimate, exact, hashed, proposal, samplers, tiled_losses
from het_plugin.integrate.draws import Draws, rotation_to
from het_plugin.integrate.gaussian import (
  GaussianLogits,
  Hashed,
  Linear,
  Opaque,
  checked,
  is_valid,
  masked,
)
from het_plugin.integrate.order import MAX_CHUNK, make_plan, placement_of
from het_plugin.integrate.placement import on_mesh_of_caller
from het_plugin.integrate.principal import reduced
from het_plugin.integrate.samples import Constants, samples_of
from het_plugin.integrate.tiles import (
  Tiling,
  factors_over_tau,
  has_source,
  source_of,
  tile_size,
)
from het_plugin.integrate.top_k import largest

METHODS = ('auto', 'exact', 'sample')
ORDERS = ('auto', 'project_then_sample', 'sample_then_project')
# `MIN_ROTATED` or more Sobol points are rotated.
MIN_ROTATED = 32
# Values per class and example of a tile beside those of its factors: exact sigmoid, HET-H.
LOCATION_ROWS = 8


@dataclasses.dataclass(frozen=True)
class Integrator:
  """The heteroscedastic predictive distribution (eq. 2 and 5, last line of appendix A.1).

  With the link 'sigmoid' and a known projection, it is exact and needs neither samples nor keys
  (`exact`). With the link 'softmax' it is a mean over samples. Probabilities never leave log space,
  so nothing is clipped. Deterministic logits (no covariance) always use the closed form.

  Results have the dtype of the location, float32 or wider, and so have all numbers on the way. The
  batch size may be symbolic (`jax.export`).

  All results are differentiable. First derivatives stream over samples, and so does forward mode
  over them (`jax.jvp` of `jax.grad`). Reverse mode over reverse mode keeps the logits of all
  samples. Forward mode alone (`jax.jvp` of a loss) is refused by JAX where a loss has a gradient
  rule of its own, as in tiles: take `jax.grad`.

      >>> import jax, jax.numpy as jnp
      >>> from het_plugin import heads
      >>> from het_plugin.integrate import Integrator, example_keys
      >>> head, phi = heads.HetXL(num_classes=3, num_factors=2), jnp.ones((4, 8))
      >>> logits, _ = jax.jit(head.init_with_output)(jax.random.key(0), phi)
      >>> keys = example_keys(jax.random.key(1), jnp.arange(4))
      >>> nll = jax.jit(Integrator(num_samples=16).nll)
      >>> nll(logits, jnp.array([0, 1, 2, 0]), keys).shape
      (4,)

  Attributes:
    num_samples: S >= 1; the paper takes 1000 of 'iid'.
    order: 'sample_then_project' applies the projection to every noise sample; 'project_then_sample'
      applies it to the R + 1 factors first and samples in logit space; 'auto' takes the cheaper one
      (`pick_order`). The same draws give the same values either way.
    chunk_size: samples whose logits exist at one time; None takes 32, or fewer if `chunk_bytes`
      requires it.
    chunk_bytes: budget for the logits [B, s, Kp] of one chunk, in bytes per device; with a symbolic
      B, for those of one example.
    sampler: source of the normals: 'sobol' or 'iid' (`samplers.SAMPLERS`), or a function of
      that signature.
    method: 'exact', 'sample', or 'auto' for exact where that exists. The attributes above, except
      `chunk_bytes`, affect samples only.
    rotate: whether `MIN_ROTATED` or more samples of 'sobol' are rotated so that their leading
      coordinates are the principal directions of the noise (`draws`). Applies to the link
      'softmax' with a known projection.
    tilt: whether a loss of one label per example takes samples of 'sobol' where the noise explains
      the label (`proposal`), in mirrored pairs: an odd number gives one more. Applies to the same
      logits; unbiased as well.
    class_tile: classes whose logits a loss has at one time, for DET, HET-H and HET-XL: memory is
      then independent of K, and every logit is computed twice. None takes all classes at one time
      if an array [B, Kp] is at most a quarter of `chunk_bytes`, and tiles of about an eighth of
      `chunk_bytes` otherwise. A sampled sigmoid, HET and opaque logits have no tiles.
    principal_factors: m >= 1, the factors of HET-XL that the exact method projects by W instead of
      R + 1; the rest is noise that is independent across dimensions (`principal`), and costs as
      much as one factor more. None, or m of at least R, is the exact integral. Applies to the link
      'sigmoid' with noise that W or a W' of its own projects (eq. 5, 14); to all results, so leave
      it None for evaluation.
  """

  num_samples: int = 64
  order: str = 'auto'
  chunk_size: int | None = None
  chunk_bytes: int = 2**28
  sampler: str | samplers.Sampler = 'sobol'
  method: str = 'auto'
  rotate: bool = True
  tilt: bool = True
  class_tile: int | None = None
  principal_factors: int | None = None

  def __post_init__(self):
    choices = {'order': ORDERS, 'method': METHODS}
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
    whole = {
      'num_samples': 'samples',
      'chunk_size': 'samples',
      'chunk_bytes': 'bytes',
      'class_tile': 'classes',
      'principal_factors': 'factors',
    }
    for name, of_what in whole.items():
      value = getattr(self, name)
      default = getattr(type(self), name)
      is_left_out = value is None and default is None
      if not is_left_out and not (isinstance(value, numbers.Integral) and value >= 1):
        raise ValueError(
          f'Integrator.{name}={value!r} must be a whole number of {of_what}, at least 1'
          + (', or None' if default is None else '')
        )

  def with_fixed_points(self, seed: int = 0) -> 'Integrator':
    """The same with `samplers.FixedPoints`, which all examples share.

    Results are those of the key [1] `shared_key(jax.random.key(seed))`, without `tilt`. A program
    that is exported then makes no random numbers.
    """
    source = self._sampler
    source = source.sampler if isinstance(source, samplers.FixedPoints) else source
    points = samplers.FixedPoints(source, self.num_samples, seed)
    return dataclasses.replace(self, sampler=points)

  @property
  def _sampler(self) -> samplers.Sampler:
    return samplers.SAMPLERS[self.sampler] if isinstance(self.sampler, str) else self.sampler

  def nll(
    self, logits: GaussianLogits, labels: jax.Array, keys: jax.Array | Draws | None = None
  ) -> jax.Array:
    """Negative log-likelihood of each example.

    Args:
      logits: logits of B examples.
      labels: int32 class ids, [B] or [B, L]; negative entries are padding. With a softmax the loss
        is the mean of -log p over an example's labels (the cross-entropy for one label). With a
        sigmoid it is the sum over classes of the binary cross-entropies; the target of a class is 1
        if it is listed.
      keys: [B] typed PRNG keys of any kind, one per example (`samplers.example_keys`); or [1],
        whose draws all examples share; or `draws` of such logits. Ignored if the logits are
        deterministic or the method is exact.

    Returns:
      [B]; an example without any label gets 0 under softmax, and one with a label that is
      not below K gets NaN (under `jax.jit`, where labels cannot be looked at).

    Raises:
      ValueError: the logits are no `GaussianLogits`; or labels are not whole numbers, do not have B
        rows, or (if they are concrete) are not below K.
    """
    return on_mesh_of_caller(self._nll, 'b', checked(logits), labels, keys)

  def _nll(self, logits, labels, keys):
    labels = check_labels(logits, labels)
    if logits.link == 'softmax':
      listed = labels >= 0
      log_p = self._log_softmax_at(logits, labels, keys)  # [B, L]
      count = listed.sum(-1, dtype=log_p.dtype)
      nll = -jnp.where(listed, log_p, 0.0).sum(-1) / jnp.maximum(count, 1)
    elif (tiling := self._tiling(logits)) is not None:
      nll = tiled_losses.sigmoid_nll(tiling, *self._sigmoid_source(logits), labels)
    else:
      on = multi_hot(labels, logits.location.shape[-1])  # [B, Kp]
      sign = jnp.where(on, 1.0, -1.0).astype(logits.location.dtype)
      nll = -jnp.where(is_valid(logits), self._log_sigmoid(logits, sign, keys), 0.0).sum(-1)
    return jnp.where((labels < logits.num_classes).all(-1), nll, jnp.nan)

  def draws(self, logits: GaussianLogits, keys: jax.Array) -> Draws:
    """The draws of these logits, which `nll` and `log_prob` take in the place of keys.

    A rotation follows the logits, and its own gradient is stopped. Draws that are found once stay
    when the logits move: the likelihood is then a smooth function with an exact gradient. They are
    not tilted, because with draws that know the label a fit learns the draws.

        >>> import jax, jax.numpy as jnp
        >>> from het_plugin import heads
        >>> from het_plugin.integrate import Integrator, shared_key
        >>> head, phi = heads.Het(num_classes=3, num_factors=2), jnp.ones((4, 8))
        >>> logits, _ = jax.jit(head.init_with_output)(jax.random.key(0), phi)
        >>> integrator, keys = Integrator(num_samples=32), shared_key(jax.random.key(1))
        >>> draws, log_prob = integrator.draws(logits, keys), jax.jit(integrator.log_prob)
        >>> bool((log_prob(logits, draws) == log_prob(logits, keys)).all())
        True

    Args:
      logits: logits of B examples with noise, and the link 'softmax'.
      keys: as in `nll`.
    """
    logits = checked(logits)
    if hashed.has_fewer_buckets(logits):
      logits = hashed.shares_of(logits)[0].logits(logits)
    return self._draws_of_all(logits, keys)

  def log_prob(self, logits: GaussianLogits, keys: jax.Array | Draws | None = None) -> jax.Array:
    """log p(k | x) of every class.

    Args:
      logits: logits of B examples.
      keys: as in `nll`.

    Returns:
      [B, Kp], with padded classes at about -1e30. With a softmax the probabilities of the classes
      sum to one. With a sigmoid this is log p(y_k = 1 | x) per class.

    Raises:
      ValueError: the logits are no `GaussianLogits`, or there are no keys where samples need them.
    """
    return on_mesh_of_caller(self._log_prob, 'bk', checked(logits), keys)

  def _log_prob(self, logits, keys):
    if logits.link == 'sigmoid':
      log_p = self._log_sigmoid(logits, jnp.ones_like(logits.location), keys)
    elif logits.covariance is None:
      log_p = jax.nn.log_softmax(_deterministic(logits), axis=-1)
    elif hashed.has_fewer_buckets(logits):
      sums, log_share = hashed.shares_of(logits)
      log_p = log_share + self._log_prob(sums.logits(logits), keys)[:, sums.buckets]
    else:
      log_p = estimate.log_softmax(*self._problem(logits, keys))
    return masked(logits, log_p)

  def top_k(
    self, logits: GaussianLogits, keys: jax.Array | Draws | None = None, k: int = 5
  ) -> tuple[jax.Array, jax.Array]:
    """The k most probable classes, of equally probable ones the first.

    They are those of `log_prob` with the same keys. Where losses are cut into tiles of classes
    (`class_tile`), so is this, and no array [B, K] is made.

    Args:
      logits: logits of B examples.
      keys: as in `nll`.
      k: from 1 to K.

    Returns:
      Class ids int32 [B, k], and their log p(k | x) [B, k], in descending order.

    Raises:
      ValueError: as in `log_prob`, or there are no k classes.
    """
    logits = checked(logits)
    if not 1 <= k <= logits.num_classes:
      raise ValueError(f'top_k: k={k} must be from 1 to K = {logits.num_classes}')
    return on_mesh_of_caller(functools.partial(self._top_k, k=k), 'b', logits, keys)

  def is_tiled(self, logits: GaussianLogits) -> bool:
    """Whether `nll` and `top_k` of these logits go through tiles of classes (`class_tile`)."""
    return self._tiling(checked(logits)) is not None

  def _top_k(self, logits, keys, k):
    tiling = self._tiling(logits)
    if tiling is None:
      return largest(self._log_prob(logits, keys), k)
    if logits.link == 'sigmoid':
      return tiled_losses.sigmoid_top_k(tiling, *self._sigmoid_source(logits), k)
    if logits.covariance is None:
      return tiled_losses.softmax_top_k(tiling, logits, k)
    if isinstance(logits.projection, Hashed):
      log_prob = functools.partial(dataclasses.replace(self, class_tile=None)._log_prob, keys=keys)
      return tiled_losses.hashed_top_k(tiling, logits, logits.projection.buckets, k, log_prob)
    draws = self._draws(logits, keys, tiling=tiling)
    plan = self._plan(logits, draws, self.chunk_size or MAX_CHUNK)
    return tiled_losses.softmax_top_k(tiling, logits, k, plan, draws)

  def log_odds(self, logits: GaussianLogits, keys: jax.Array | None = None) -> jax.Array:
    """log p(y_k = 1 | x) - log p(y_k = 0 | x) of every class of a sigmoid.

    Args:
      logits: logits of B examples with the link 'sigmoid'.
      keys: as in `nll`.

    Returns:
      [B, Kp], with padded classes at about -1e30; accurate also where p rounds to 0 or 1.

    Raises:
      ValueError: as in `log_prob`, or the link is 'softmax'.
    """
    return on_mesh_of_caller(self._log_odds, 'bk', check_sigmoid(checked(logits)), keys)

  def _log_odds(self, logits, keys):
    if logits.covariance is None:
      return _deterministic(logits)
    if self._is_exact(logits):
      return masked(logits, exact.expected_log_odds(*self._marginals(logits)))
    on = jnp.ones_like(logits.location)
    odds = self._log_sigmoid(logits, on, keys) - self._log_sigmoid(logits, -on, keys)
    return masked(logits, odds)

  def expected_entropy(self, logits: GaussianLogits, keys: jax.Array | None = None) -> jax.Array:
    """E[H(y | x, z)], the entropy given the noise, averaged over the noise.

    The entropy of `log_prob` less this is the mutual information of label and noise (Depeweg et al.
    2018, https://arxiv.org/abs/1710.07283, eq. 4, with noise in place of weights). Both are exact
    or use the same draws, so the difference is at least 0 up to rounding.

    Use it for evaluation only: with K sharded, every chunk of samples communicates over the model
    axis.

    Args:
      logits: logits of B examples.
      keys: as in `nll`.

    Returns:
      [B], nats. With a sigmoid it is summed over the classes.

    Raises:
      ValueError: as in `log_prob`.
    """
    return on_mesh_of_caller(self._expected_entropy, 'b', checked(logits), keys)

  def _expected_entropy(self, logits, keys):
    if logits.covariance is None:
      return entropy(_deterministic(logits), logits.link)
    if self._is_exact(logits):
      of_classes = exact.expected_entropy(*self._marginals(logits))
      return jnp.where(is_valid(logits), of_classes, 0.0).sum(-1)
    if hashed.has_fewer_buckets(logits):
      sums, log_share = hashed.shares_of(logits)
      buckets = sums.logits(logits)
      within = hashed.entropy_in_buckets(sums, log_share)
      p = jnp.exp(self._log_prob(buckets, keys))[:, : within.shape[-1]]  # [B, H]
      return self._expected_entropy(buckets, keys) + (p * within).sum(-1)
    of_samples = functools.partial(entropy, link=logits.link)
    return estimate.mean_over_samples(*self._problem(logits, keys), of_samples)

  def _log_softmax_at(self, logits, labels, keys):
    """log p [B, L] at labels [B, L]; undefined at padding."""
    tiling = self._tiling(logits)
    if tiling is not None or self._is_linear(logits):
      return self._tiled_log_softmax_at(tiling or _one_tile(logits), logits, labels, keys)
    if logits.covariance is None:
      log_p = jax.nn.log_softmax(_deterministic(logits), axis=-1)
      return jnp.take_along_axis(log_p, jnp.maximum(labels, 0), axis=-1)
    if hashed.has_fewer_buckets(logits):
      log_share, labels, buckets = hashed.at_labels(logits, labels)
      return log_share + self._log_softmax_at(buckets, labels, keys)
    draws = self._draws(logits, keys, labels)
    plan, samples, constants = self._problem(logits, draws)
    one_pass = self._one_pass(plan, samples, 'softmax')
    if labels.shape[-1] > 1 or one_pass is None:
      return estimate.log_softmax_at(plan, samples, constants, labels)
    return one_pass(constants.draws, jnp.maximum(labels, 0))

  def _is_linear(self, logits):
    """Whether a softmax's loss is a cross-entropy of rows x W + b: DET, and HET-XL whose samples
    are all projected.
    """
    if not has_source(logits) or isinstance(logits.projection, Hashed):
      return False
    if logits.covariance is None:
      return True
    plan = make_plan(
      logits, self.num_samples, self._sampler, self.order, self.chunk_size, self.chunk_bytes
    )
    return not plan.project_first and plan.num_chunks == 1

  def _log_sigmoid(self, logits, sign, keys):
    """log p(y_k = (1 + sign_k) / 2), [B, Kp]; undefined at padded classes."""
    if logits.covariance is None:
      return jax.nn.log_sigmoid(sign * _deterministic(logits))
    if self._is_exact(logits):
      mean, variance = self._marginals(logits)
      return exact.log_expected_sigmoid(sign * mean, variance)
    plan, samples, constants = self._problem(logits, keys)
    if (one_pass := self._one_pass(plan, samples, 'sigmoid')) is not None:
      return one_pass(constants.draws, sign)
    return estimate.log_sigmoid(plan, samples, constants, sign)

  def _one_pass(self, plan, samples, link):
    """The loss of projected factors, (draws, target) -> log p; None if there is none."""
    if not plan.project_first or (link == 'softmax' and plan.placement.vocab is not None):
      return None
    _say_once(
      f'Integrator: S = {plan.num_samples}. Losses project the factors first and take '
      f'{plan.chunk_size} samples at a time.'
    )
    return functools.partial(estimate.one_pass, link, plan, samples)

  def _marginals(self, logits):
    return exact.marginals(self._reduced(logits), self.chunk_bytes)

  def _reduced(self, logits):
    """The logits whose exact expectation is taken."""
    if self.principal_factors is None or not isinstance(logits.projection, Linear):
      return logits
    return dataclasses.replace(logits, covariance=reduced(logits.noise, self.principal_factors))

  def _is_exact(self, logits):
    exists = logits.link == 'sigmoid' and not isinstance(logits.projection, Opaque)
    if self.method == 'exact' and not exists:
      raise ValueError(
        "Integrator.method='exact' needs the link 'sigmoid' and a known projection; got link="
        f"{logits.link!r} and projection={type(logits.projection).__name__}: use 'auto' or 'sample'"
      )
    return exists and self.method != 'sample'

  def _problem(self, logits, draws):
    """How to sample, what, and from which draws; the draws may also be keys."""
    if not isinstance(draws, (Draws, proposal.Chosen)):
      draws = self._draws(logits, draws)
    plan = self._plan(logits, draws, self.chunk_size)
    samples, buckets = samples_of(logits, plan.project_first)
    return plan, samples, Constants(draws, buckets)

  def _draws(
    self,
    logits: GaussianLogits,
    keys: jax.Array | Draws | None,
    labels: jax.Array | None = None,
    tiling: Tiling | None = None,
  ) -> Draws | proposal.Chosen:
    """Where the samples are taken; labels [B, L] if only their probabilities are wanted."""
    self._is_exact(logits)  # refuses where method='exact' cannot be met
    is_one_label = labels is not None and labels.shape[-1] == 1
    of_caller = isinstance(keys, Draws)
    if not is_one_label or of_caller or not self._is_tilted or not self._is_refined(logits):
      return self._draws_of_all(logits, keys, tiling)
    keys = samplers.checked_keys('Integrator', keys, logits.location.shape[0])
    tiling = tiling or _one_tile(logits)
    return proposal.choose(tiling, logits, labels[:, 0], keys, self._sampler, self.num_samples)

  def _draws_of_all(
    self, logits: GaussianLogits, keys: jax.Array | Draws | None, tiling: Tiling | None = None
  ) -> Draws:
    """Where samples of all classes' probabilities are taken."""
    batch = logits.location.shape[0]
    if isinstance(keys, Draws):
      samplers.checked_keys('Integrator', keys.keys, batch)
      return keys
    keys = samplers.checked_keys('Integrator', keys, batch)
    if not self._is_rotated or not self._is_refined(logits):
      return Draws(keys)
    return Draws(keys, rotation_to(proposal.directions(tiling or _one_tile(logits), logits)))

  def _plan(self, logits, draws, chunk_size):
    count = self.num_samples
    if isinstance(draws, proposal.Chosen):
      count = 2 * draws.num_pairs
    return make_plan(logits, count, self._sampler, self.order, chunk_size, self.chunk_bytes)

  def _is_refined(self, logits):
    """Whether draws may be tilted and rotated."""
    is_known = logits.link == 'softmax' and not isinstance(logits.projection, Opaque)
    sampler = self._sampler
    source = sampler.sampler if isinstance(sampler, samplers.FixedPoints) else sampler
    return is_known and source is samplers.sobol

  @property
  def _is_tilted(self):
    # A proposal takes more points than there are fixed ones.
    is_fixed = isinstance(self._sampler, samplers.FixedPoints)
    return self.tilt and not is_fixed

  @property
  def _is_rotated(self):
    return self.rotate and self.num_samples >= MIN_ROTATED

  def _tiling(self, logits):
    """How a loss of these logits is cut into tiles of classes; None for all at one time."""
    is_tiled = has_source(logits)
    if is_tiled and logits.link == 'sigmoid' and logits.covariance is not None:
      is_tiled = self._is_exact(logits)
    if self.class_tile is None:
      size = tile_size(logits, self._num_rows(logits), self.chunk_bytes) if is_tiled else None
    elif is_tiled:
      size = int(self.class_tile)
    else:
      raise ValueError(
        f'Integrator.class_tile={self.class_tile} needs logits of DET, HET-H or HET-XL, which are '
        'made of a range of classes on demand, and for a sigmoid the exact method; got projection='
        f'{type(logits.projection).__name__}, link={logits.link!r} and method={self.method!r}: '
        'leave class_tile None'
      )
    return None if size is None else Tiling(size, logits.num_classes, placement_of(logits))

  def _num_rows(self, logits):
    """Values per example and class that a tile has at one time."""
    if logits.covariance is None:
      return 2
    if isinstance(logits.projection, Hashed):
      return LOCATION_ROWS
    if logits.link == 'sigmoid':
      num_factors = logits.noise.num_factors
      return min(num_factors, self.principal_factors or num_factors) + LOCATION_ROWS
    return logits.noise.num_factors + 2 + min(self.num_samples, self.chunk_size or MAX_CHUNK)

  def _tiled_log_softmax_at(self, tiling, logits, labels, keys):
    if logits.covariance is None:
      sums = tiled_losses.softmax_sums(tiling, source_of(logits), None, labels)
      return tiled_losses.log_p(*sums)[0, :, 0]
    if isinstance(logits.projection, Hashed):
      log_share, labels, buckets = tiled_losses.by_buckets(
        tiling, logits, logits.projection.buckets, labels
      )
      whole = dataclasses.replace(self, class_tile=None)
      return log_share + whole._log_softmax_at(buckets, labels, keys)
    chunk_size = self.chunk_size or MAX_CHUNK
    draws = self._draws(logits, keys, labels, tiling)
    plan = self._plan(logits, draws, chunk_size)
    noise = logits.noise.scaled(1.0 / logits.temperature)
    return tiled_losses.log_softmax_at(plan, tiling, logits, noise, draws, labels)

  def _sigmoid_source(self, logits):
    """What the exact sigmoid of a range of classes is made from, and HET-H's buckets or None."""
    logits = self._reduced(logits)
    covariance = logits.covariance
    if covariance is None:
      return source_of(logits), None
    noise = covariance.scaled(1.0 / logits.temperature)
    if isinstance(logits.projection, Hashed):
      return source_of(logits, variance=exact.variances(noise)), logits.projection.buckets
    variance = jnp.square(noise.diag) if noise.remainder == 'diag' else None
    return source_of(logits, factors_over_tau(noise), variance, is_factors=True), None


def _one_tile(logits: GaussianLogits) -> Tiling:
  return Tiling(logits.location.shape[-1], logits.num_classes, placement_of(logits))


@functools.cache
def _say_once(message):
  logging.getLogger(__name__).info(message)


def check_sigmoid(logits: GaussianLogits) -> GaussianLogits:
  """The logits. Raises ValueError if their link has no odds of single classes."""
  if logits.link != 'sigmoid':
    raise ValueError(f"log_odds needs the link 'sigmoid'; got link={logits.link!r}: use log_prob")
  return logits


def check_labels(logits: GaussianLogits, labels: jax.Array) -> jax.Array:
  """Labels [B, L] of labels [B] or [B, L], as `Integrator.nll` takes them."""
  batch = logits.location.shape[0]
  shape = jnp.shape(labels)
  dtype = jnp.result_type(labels)
  if not jnp.issubdtype(dtype, jnp.integer):
    raise ValueError(f'labels must be class ids of an integer type; got {dtype} {shape}')
  if len(shape) not in (1, 2) or shape[0] != batch:
    raise ValueError(f'labels must be [B] or [B, L] with B = {batch}; got {shape}')
  if not isinstance(labels, core.Tracer):
    largest = np.asarray(labels).max(initial=0)
    if largest >= logits.num_classes:
      raise ValueError(f'labels hold {largest}: class ids are below K = {logits.num_classes}')
  labels = jnp.asarray(labels, jnp.int32)  # int8 cannot hold K
  if shape[1:] == (0,):
    return jnp.pad(labels, ((0, 0), (0, 1)), constant_values=-1)
  return labels if len(shape) == 2 else labels[:, None]


def multi_hot(labels: jax.Array, num_classes: int) -> jax.Array:
  """bool [B, num_classes] from int32 [B, L] class ids padded with negative entries."""
  return (labels[:, :, None] == jnp.arange(num_classes)).any(axis=1)


def _deterministic(logits):
  return masked(logits, logits.location / logits.temperature)


def entropy(u: jax.Array, link: str) -> jax.Array:
  """Entropy in nats [...] of logits over tau [..., Kp]; padded classes add nothing.

      >>> import jax.numpy as jnp
      >>> from het_plugin.integrate import entropy
      >>> round(float(entropy(jnp.zeros((1, 4)), 'softmax')[0]), 4)  # log 4
      1.3863

  With a sigmoid it is summed over the classes.
  """
  if link == 'softmax':
    log_p = jax.nn.log_softmax(u, axis=-1)
    return -(jnp.exp(log_p) * log_p).sum(-1)
  log_p = jax.nn.log_sigmoid(u)
  log_q = jax.nn.log_sigmoid(-u)
  return -(jnp.exp(log_p) * log_p + jnp.exp(log_q) * log_q).sum(-1)
