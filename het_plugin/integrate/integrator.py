"""E[link(logits / tau)] of Gaussian logits, exact or from samples, for training and evaluation."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from het_plugin.integrate import samplers
from het_plugin.integrate.classes import Tiling, linear_location
from het_plugin.integrate.directions import Draws, rotation_to
from het_plugin.integrate.gaussian import GaussianLogits, Opaque, checked, masked, over_tau
from het_plugin.integrate.placement import on_mesh_of_caller
from het_plugin.integrate.proposal import choose, directions
from het_plugin.integrate.sampled_logits import AnySamples
from het_plugin.integrate.sigmoid import ExactSigmoid, SampledSigmoid, binary_entropy
from het_plugin.integrate.softmax import BucketSoftmax, Softmax, fewer_buckets
from het_plugin.system import ranges
from het_plugin.system.ranges import Count

MIN_ROTATED = 32  # Sobol points; fewer are not rotated

Keys = jax.Array | Draws | None  # of `Integrator.nll`


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
    sampler: source of the normals: a name in `samplers.SAMPLERS`, such as 'sobol' or 'iid', or a
      function as those are.
    method: 'exact', 'sample', or 'auto' for exact where that exists. The attributes above affect
      samples only.
    rotate: whether `MIN_ROTATED` or more samples of 'sobol' are rotated so that their leading
      coordinates are the principal directions of the noise (`draws`). Applies to the link
      'softmax' with a known projection.
    tilt: whether a loss of one label per example takes samples of 'sobol' where the noise explains
      the label (`proposal`), in mirrored pairs: an odd number gives one more. Applies to the same
      logits; unbiased as well.
    max_bytes: budget of the logits of all samples and classes, in bytes per device; with a symbolic
      B, of those of one example. Above it they are made in tiles of classes, whose arrays take a
      half of it: memory is then independent of K and S, and every logit is computed twice. None is
      32 MiB on CPUs and 128 MiB on other devices.
    principal_factors: m >= 1, the factors of HET-XL that the exact method projects by W instead of
      R + 1; the rest is noise that is independent across dimensions (`principal`), and costs as
      much as one factor more. None, or m of at least R, is the exact integral. Applies to the link
      'sigmoid' with noise that W or a W' of its own projects (eq. 5, 14); to all results, so leave
      it None for evaluation.
  """

  num_samples: Count = 64
  sampler: str | samplers.Sampler = 'sobol'
  method: Literal['auto', 'exact', 'sample'] = 'auto'
  rotate: bool = True
  tilt: bool = True
  max_bytes: Annotated[int, '[1, inf)'] | None = None
  principal_factors: Count | None = None

  def __post_init__(self):
    ranges.check(self)
    if not callable(self.sampler) and self.sampler not in [*samplers.SAMPLERS]:
      names = ', '.join(map(repr, samplers.SAMPLERS))
      raise ValueError(
        f'Integrator.sampler={self.sampler!r} must be one of {names} or a function: @name'
      )

  def with_fixed_points(self, seed: int = 0) -> 'Integrator':
    """The same with `samplers.FixedPoints`, which all examples share.

    Results are those of the key [1] `shared_key(jax.random.key(seed))`, without `tilt`. A program
    that is exported then makes no random numbers.
    """
    source = samplers.source(self._sampler)
    points = samplers.FixedPoints(source, self.num_samples, seed)
    return dataclasses.replace(self, sampler=points)

  @property
  def _sampler(self) -> samplers.Sampler:
    return samplers.SAMPLERS[self.sampler] if isinstance(self.sampler, str) else self.sampler

  def nll(self, logits: GaussianLogits, labels: jax.Array, keys: Keys = None) -> jax.Array:
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
    logits = checked(logits)
    labels = check_labels(labels, logits.location.shape[:1], logits.num_classes, logits.link)
    return on_mesh_of_caller(self._nll, 'b', logits, keys, labels)

  def _nll(self, logits: GaussianLogits, keys: Keys, labels: jax.Array) -> jax.Array:
    nll = self._link(logits, keys, labels).nll(labels)
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
    logits = over_tau(checked(logits))
    if fewer_buckets(logits) is not None:
      logits = self._bucket_softmax(logits, keys).sums()[1]
    return self._draws(logits, keys)

  def log_prob(self, logits: GaussianLogits, keys: Keys = None) -> jax.Array:
    """log p(k | x) of every class; arguments as in `nll`.

    Returns:
      [B, Kp], with padded classes at about -1e30. With a softmax the probabilities of the classes
      sum to one. With a sigmoid this is log p(y_k = 1 | x) per class.

    Raises:
      ValueError: the logits are no `GaussianLogits`, or there are no keys where samples need them.
    """
    return self._of_link(lambda link: masked(logits, link.log_prob()), 'bk', logits, keys)

  def _of_link(
    self, function: Callable[[Any], Any], result: str, logits: GaussianLogits, keys: Keys
  ) -> Any:
    """function(link) on the mesh of the caller; `result` as in `on_mesh_of_caller`."""
    return on_mesh_of_caller(
      lambda *args: function(self._link(*args)), result, checked(logits), keys
    )

  def top_k(
    self, logits: GaussianLogits, keys: Keys = None, k: int = 5
  ) -> tuple[jax.Array, jax.Array]:
    """The k most probable classes, of equally probable ones the first.

    They are those of `log_prob` with the same keys. Above `max_bytes`, no array [B, K] is made.

    Args:
      logits: logits of B examples.
      keys: as in `nll`.
      k: from 1 to K.

    Returns:
      Class ids int32 [B, k], and their log p(k | x) [B, k], in descending order.

    Raises:
      ValueError: as in `log_prob`, or there are no k classes.
    """
    if not 1 <= k <= checked(logits).num_classes:
      raise ValueError(f'top_k: k={k} must be from 1 to K = {logits.num_classes}')
    return self._of_link(lambda link: link.top_k(k), 'b', logits, keys)

  def is_tiled(self, logits: GaussianLogits) -> bool:
    """Whether `nll` and `top_k` of these logits go through tiles of classes (`max_bytes`)."""
    draws = Draws(samplers.shared_key(jax.random.key(0)))
    return not self._link(checked(logits), draws).tiling.is_whole

  def log_odds(self, logits: GaussianLogits, keys: Keys = None) -> jax.Array:
    """log p(y_k = 1 | x) - log p(y_k = 0 | x) of every class of a sigmoid; arguments as in `nll`.

    Returns:
      [B, Kp], with padded classes at about -1e30; accurate also where p rounds to 0 or 1.

    Raises:
      ValueError: as in `log_prob`, or the link is 'softmax'.
    """
    if checked(logits).link != 'sigmoid':
      raise ValueError(f"log_odds needs the link 'sigmoid'; got link={logits.link!r}: use log_prob")
    return self._of_link(lambda link: masked(logits, link.log_odds()), 'bk', logits, keys)

  def expected_entropy(self, logits: GaussianLogits, keys: Keys = None) -> jax.Array:
    """E[H(y | x, z)], the entropy given the noise, averaged over the noise.

    The entropy of `log_prob` less this is the mutual information of label and noise (Depeweg et al.
    2018, https://arxiv.org/abs/1710.07283, eq. 4, with noise in place of weights). Both are exact
    or use the same draws, so the difference is at least 0 up to rounding.

    Use it for evaluation only: with K sharded, every chunk of samples communicates over the model
    axis. Arguments are as in `nll`.

    Returns:
      [B], nats. With a sigmoid it is summed over the classes.

    Raises:
      ValueError: as in `log_prob`.
    """
    return self._of_link(lambda link: link.expected_entropy(), 'b', logits, keys)

  def _link(
    self, logits: GaussianLogits, keys: Keys, labels: jax.Array | None = None
  ) -> Softmax | ExactSigmoid | SampledSigmoid:
    """What computes the results of these logits.

    Labels int32 [B, L] are given if only their probabilities are wanted.
    """
    logits = over_tau(logits)
    is_sigmoid = logits.link == 'sigmoid'
    if logits.covariance is None and not is_sigmoid:
      return Softmax.of_location(logits, self.max_bytes)
    if logits.covariance is None or self._is_exact(logits):
      return ExactSigmoid.of(logits, self.max_bytes, self.principal_factors)
    if fewer_buckets(logits) is not None and not is_sigmoid:
      return self._bucket_softmax(logits, keys)
    return self._sampled(SampledSigmoid if is_sigmoid else Softmax, logits, keys, labels)

  def _bucket_softmax(self, logits: GaussianLogits, keys: Keys) -> BucketSoftmax:
    def softmax(logits: GaussianLogits, labels: jax.Array | None) -> Softmax:
      return self._sampled(Softmax, logits, keys, labels)

    return BucketSoftmax.of(logits, softmax, self.max_bytes)

  def _sampled(
    self, link: type[AnySamples], logits: GaussianLogits, keys: Keys, labels: jax.Array | None
  ) -> AnySamples:
    """The link of logits over tau with noise."""
    draws = self._draws(logits, keys, labels)
    return link.at(logits, draws, self._sampler, self.num_samples, self.max_bytes)

  def _draws(self, logits: GaussianLogits, keys: Keys, labels: jax.Array | None = None) -> Any:
    """Where samples of logits over tau are taken: `Chosen` by the label if an example has one that
    is wanted alone, and otherwise `Draws`.
    """
    given = keys.keys if isinstance(keys, Draws) else keys
    given = samplers.checked_keys('Integrator', given, logits.location.shape[0])
    if isinstance(keys, Draws):
      return keys
    is_known = logits.link == 'softmax' and not isinstance(logits.projection, Opaque)
    if not is_known or samplers.source(self._sampler) is not samplers.sobol:
      return Draws(given)
    one_pass = Tiling.of(logits, 2, self.max_bytes)  # of a sample's logits, and their priorities
    # A proposal takes more points than there are fixed ones.
    is_tilted = self.tilt and not isinstance(self._sampler, samplers.FixedPoints)
    if is_tilted and labels is not None and labels.shape[-1] == 1:
      return choose(one_pass, logits, labels[:, 0], given, self._sampler, self.num_samples)
    if self.rotate and self.num_samples >= MIN_ROTATED:
      return Draws(given, rotation_to(directions(one_pass, logits)))
    return Draws(given)

  def _is_exact(self, logits: GaussianLogits) -> bool:
    exists = logits.link == 'sigmoid' and not isinstance(logits.projection, Opaque)
    if self.method == 'exact' and not exists:
      raise ValueError(
        "Integrator.method='exact' needs the link 'sigmoid' and a known projection; got link="
        f"{logits.link!r} and projection={type(logits.projection).__name__}: use 'auto' or 'sample'"
      )
    return exists and self.method != 'sample'


@dataclasses.dataclass(frozen=True)
class Location:
  """link(location / tau), with the methods of an `Integrator`: what a head says of the classes
  without its noise.

  Where labels are noisy, the noise explains wrong labels and the location the true classes
  (docs/uncertainty.md). It is no estimate of the likelihood of labels.

      >>> import jax.numpy as jnp
      >>> from het_plugin.integrate import GaussianLogits, Location, LowRank
      >>> noise = LowRank(None, jnp.zeros((1, 1, 2)), jnp.array([[3.0, 0.0]]))
      >>> logits = GaussianLogits(jnp.array([[1.0, 0.0]]), noise, None, jnp.float32(1.0), 2)
      >>> round(float(jnp.exp(Location().log_prob(logits))[0, 0]), 2)  # 0.7 with the noise
      0.73
  """

  def nll(self, logits: GaussianLogits, labels: jax.Array, keys: Keys = None) -> jax.Array:
    """Losses [B] (`Integrator.nll`); `keys` is ignored."""
    return Integrator().nll(_without_noise(logits), labels)

  def log_prob(self, logits: GaussianLogits, keys: Keys = None) -> jax.Array:
    """log p [B, Kp] (`Integrator.log_prob`); `keys` is ignored."""
    return Integrator().log_prob(_without_noise(logits))

  def top_k(
    self, logits: GaussianLogits, keys: Keys = None, k: int = 5
  ) -> tuple[jax.Array, jax.Array]:
    """The k most probable classes (`Integrator.top_k`); `keys` is ignored."""
    return Integrator().top_k(_without_noise(logits), k=k)

  def is_tiled(self, logits: GaussianLogits) -> bool:
    """Whether there are tiles of classes (`Integrator.is_tiled`)."""
    return Integrator().is_tiled(_without_noise(logits))

  def log_odds(self, logits: GaussianLogits, keys: Keys = None) -> jax.Array:
    """Log odds [B, Kp] (`Integrator.log_odds`); `keys` is ignored."""
    return Integrator().log_odds(_without_noise(logits))


AnyIntegrator = Integrator | Location


def _without_noise(logits: GaussianLogits) -> GaussianLogits:
  logits = checked(logits)
  linear = linear_location(logits)  # with which losses in tiles of classes make the location
  return dataclasses.replace(logits, covariance=None, projection=None, location_from=linear)


def check_labels(
  labels: Any, rows: tuple[int, ...], num_classes: int, link: str, or_what: str = ''
) -> jax.Array:
  """Class ids int32 [*rows, L] of labels [*rows] or [*rows, L], as `Integrator.nll` takes them;
  `or_what` says what else labels may be.
  """
  labels = labels if isinstance(labels, jax.Array) else np.asarray(labels)
  shape = labels.shape
  of_marks = ': jnp.where(hot > 0, jnp.arange(K), -1) makes ids of zeros and ones hot [B, K]'
  is_hot = shape == (*rows, num_classes)
  if not jnp.issubdtype(labels.dtype, jnp.integer):
    hint = of_marks if is_hot else ''
    raise ValueError(
      f'labels must be class ids of an integer type{or_what}; got {labels.dtype} {shape}{hint}'
    )
  if rows not in (shape, shape[:-1]):
    raise ValueError(f'labels must be {rows} or {(*rows, "L")}; got {shape}')
  if not isinstance(labels, core.Tracer):
    values = np.asarray(labels)
    if (largest := values.max(initial=0)) >= num_classes:
      raise ValueError(f'labels hold {largest}: class ids are below K = {num_classes}')
    if is_hot and num_classes > 2 and values.size and np.isin(values, (0, 1)).all():
      # Ids of a sigmoid are distinct in a row. Those of a softmax may be votes, of few rows.
      if link == 'sigmoid' or (values.size > 8 and (values.sum(-1) == 1).all()):
        raise ValueError(f'labels are {shape} of 0 and 1, not class ids{of_marks}')
  labels = jnp.asarray(labels, jnp.int32)  # int8 cannot hold K
  return labels[..., None] if shape == rows else labels


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
  return binary_entropy(u).sum(-1)
