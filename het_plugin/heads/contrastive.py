"""The heads of contrastive learning, DET and HET-XL (section 5).

alpha [B, D] are the representations of the images and beta [B, D] those of the texts, in one space.
Each row of one tower is classified among the B rows of the other; its class is its own pair:

    DET     p(b | a_n) = softmax(<alpha_n, beta_i> / tau)_i                (eq. 6)
    HET-XL  p(b | a_n) = E[softmax(<alpha_n + eps(a_n), beta_i> / tau)_i]  (eq. 8, image to text)

The direction text to image exchanges the towers and has a separate covariance. Only the row that is
classified is noisy, not the rows that it is compared with. Scaling representations to unit length
is crucial before the noise (`pre_normalization`); after it (`post_normalization`) it "does not have
a consistent effect" (table 7).

Size of the noise. The entries of a unit vector are about 1 / sqrt(D), and the initialisers of
`LowRankCovariance` expect entries of about 1. With pre-normalisation the noise is therefore
computed in these units: eps = F(sqrt(D) alpha) / sqrt(D). V(x) is still an affine map of alpha and
d(x) a softplus of one; only initial values and step sizes change. With `initial_noise_scale` s, the
initial noise is about s sqrt(R + 1/2) times as long as the representation, for any D. The default
0.1 with the paper's R = 15 gives 0.4; 1.0 would give 3.9. The input of the covariance is the
normalised representation. The length before normalisation would be unbounded, because nothing else
in the loss depends on it.

At test time (appendix M) the paper uses the representations without noise. Averaging noisy
representations is no alternative, because the noise has mean zero. Averaging probabilities gives a
different result, which `class_log_prob` estimates.
"""

import dataclasses
import math
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from flax.linen import partitioning
from jax.typing import DTypeLike

from het_plugin.heads.batch import CHUNK_BYTES
from het_plugin.heads.batch_softmax import BatchSoftmax, symmetric_nll
from het_plugin.heads.covariance import LowRankCovariance, Parametrization, Remainder
from het_plugin.heads.noisy_batch import batch_nll, unit_length
from het_plugin.heads.settings import check_dtype
from het_plugin.heads.temperature import FixedTemperature, LearnedTemperature, LogitScale, owned
from het_plugin.integrate import (
  GaussianLogits,
  Integrator,
  Linear,
  LowRank,
  Opaque,
)
from het_plugin.integrate.samplers import checked_keys
from het_plugin.system.ranges import Count, Positive

Temperature = FixedTemperature | LearnedTemperature | LogitScale


@struct.dataclass
class Pairs:
  """B pairs, the input of the contrastive loss.

  Attributes:
    alpha: float32 [B, D], images before the noise is added; of unit length with pre-normalisation.
    beta: float32 [B, D], texts, in the same way.
    image_to_text: noise of alpha in the direction image to text, or None.
    text_to_image: noise of beta in the direction text to image, or None.
    temperature: tau, a float32 scalar: logits are similarities over tau.
    post_normalization: whether noisy representations are scaled to unit length.
    dtype: compute type of the similarities.
  """

  alpha: jax.Array
  beta: jax.Array
  image_to_text: LowRank | None
  text_to_image: LowRank | None
  temperature: jax.Array
  post_normalization: bool = struct.field(pytree_node=False, default=False)
  dtype: DTypeLike = struct.field(pytree_node=False, default=jnp.float32)

  def representations(self) -> tuple[jax.Array, jax.Array]:
    """(alpha, beta) [B, D] without noise, scaled as for the similarities; used for zero-shot."""
    if self.post_normalization:
      return unit_length(self.alpha), unit_length(self.beta)
    return self.alpha, self.beta


class ContrastiveDet(nn.Module):
  """Contrastive learning without noise (eq. 6).

  Attributes:
    pre_normalization: scales representations to unit length.
    temperature: `LogitScale`, or any other; None is a `LogitScale` that starts at 10.
    dtype: compute type of the similarities; logits are float32.
  """

  pre_normalization: bool = True
  temperature: Temperature | None = None
  dtype: DTypeLike = jnp.float32

  _INITIAL_SCALE: ClassVar[float] = 10.0  # appendix N.2

  def __post_init__(self) -> None:
    self.temperature = owned(self.temperature, LogitScale(self._INITIAL_SCALE))
    super().__post_init__()

  @property
  def own_temperature(self) -> Temperature:
    """The module `temperature`; `__post_init__` has put the default in the place of None."""
    if self.temperature is None:
      raise ValueError(f'{type(self).__name__}.temperature is None after __post_init__')
    return self.temperature

  @nn.nowrap
  def check(self) -> None:
    """Raises ValueError if an attribute is out of range."""
    check_dtype(type(self).__name__, self.dtype)
    self.own_temperature.check()

  @nn.nowrap
  def num_params(self, pre_logits_dim: int) -> int:
    """Number of parameters for D = pre_logits_dim. There is no W: the other tower replaces it."""
    return self.extra_params(pre_logits_dim)

  @nn.nowrap
  def extra_params(self, pre_logits_dim: int) -> int:
    """Number of parameters beyond a deterministic head with fixed temperature."""
    del pre_logits_dim
    return self.own_temperature.num_params()

  def normalized(self, alpha: jax.Array, beta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both as float32, scaled to unit length with `pre_normalization`.

    Raises:
      ValueError: they do not have the same shape [B, D].
    """
    if alpha.shape != beta.shape or alpha.ndim != 2:
      raise ValueError(
        f'{type(self).__name__}: representations of images {alpha.shape} and texts {beta.shape} '
        'must be of one shape [B, D]'
      )
    alpha = alpha.astype(jnp.float32)
    beta = beta.astype(jnp.float32)
    return (unit_length(alpha), unit_length(beta)) if self.pre_normalization else (alpha, beta)

  @nn.compact
  def __call__(self, alpha: jax.Array, beta: jax.Array) -> Pairs:
    """Representations alpha (images) and beta (texts) [B, D] -> `Pairs` without noise."""
    self.check()
    alpha, beta = self.normalized(alpha, beta)
    return Pairs(alpha, beta, None, None, self.own_temperature(), dtype=self.dtype)


class ContrastiveHetXL(ContrastiveDet):
  """Contrastive learning with noise on the representation that is classified (eq. 8).

  The parameters of the two covariances are 'image_to_text' and 'text_to_image'.

  Attributes:
    temperature: as in `ContrastiveDet`; None starts at a scale of 3 (appendix N.2).
    post_normalization: scales representations to unit length after the noise (table 7).
    num_factors: R >= 1; 15 in the paper (appendix N.2).
    parametrization: 'full' as in the paper, or 'efficient'.
    remainder: 'rank_one' or 'diag'.
    initial_noise_scale: initial size of the noise, see the module docstring.
  """

  _INITIAL_SCALE: ClassVar[float] = 3.0
  post_normalization: bool = False
  num_factors: Count = 15
  parametrization: Parametrization = 'full'
  remainder: Remainder = 'rank_one'
  initial_noise_scale: Positive = 0.1

  @nn.nowrap
  def check(self) -> None:
    super().check()
    self.make_covariance(1, parent=None).check(type(self).__name__)

  @nn.nowrap
  def extra_params(self, pre_logits_dim: int) -> int:
    covariance = self.make_covariance(pre_logits_dim, parent=None)
    both = 2 * covariance.num_params(pre_logits_dim, pre_logits_dim)
    return both + self.own_temperature.num_params()

  @nn.nowrap
  def make_covariance(self, noise_dim: int, **kwargs) -> LowRankCovariance:
    return LowRankCovariance(
      noise_dim,
      'noise',
      num_factors=self.num_factors,
      parametrization=self.parametrization,
      remainder=self.remainder,
      initial_noise_scale=self.initial_noise_scale,
      dtype=self.dtype,
      **kwargs,
    )

  @nn.compact
  def __call__(self, alpha: jax.Array, beta: jax.Array) -> Pairs:
    """Representations alpha (images) and beta (texts) [B, D] -> `Pairs` with noise."""
    self.check()
    alpha, beta = self.normalized(alpha, beta)
    noise = {
      name: self._noise(name, phi)
      for name, phi in (('image_to_text', alpha), ('text_to_image', beta))
    }
    return Pairs(
      alpha,
      beta,
      **noise,
      temperature=self.own_temperature(),
      post_normalization=self.post_normalization,
      dtype=self.dtype,
    )

  def _noise(self, name, phi):
    unit = math.sqrt(phi.shape[-1]) if self.pre_normalization else 1.0
    covariance, _ = self.make_covariance(phi.shape[-1], name=name)(phi * unit)
    return covariance.scaled(1.0 / unit)


def contrastive_nll(
  pairs: Pairs,
  integrator: Integrator | None = None,
  keys: jax.Array | None = None,
  mask: jax.Array | None = None,
  chunk_bytes: int = CHUNK_BYTES,
) -> tuple[BatchSoftmax, BatchSoftmax]:
  """Both directions of the contrastive loss; a batch has the mean over both and over all pairs.

      >>> import jax, jax.numpy as jnp
      >>> from het_plugin import heads
      >>> from het_plugin.integrate import Integrator, example_keys
      >>> alpha, beta = jax.random.normal(jax.random.key(0), (2, 4, 8))  # B = 4, D = 8
      >>> head = heads.ContrastiveHetXL(num_factors=2)
      >>> pairs, _ = jax.jit(head.init_with_output)(jax.random.key(1), alpha, beta)
      >>> keys = example_keys(jax.random.key(2), jnp.arange(4))
      >>> loss = jax.jit(heads.contrastive_nll, static_argnums=1)
      >>> to_text, to_image = loss(pairs, Integrator(num_samples=1), keys)
      >>> to_text.nll.shape
      (4,)

  Uses the active mesh, see `batch_softmax`.

  Args:
    pairs: output of a head.
    integrator: integrates over the noise; the paper trains with one sample. With None, or with
      pairs without noise, the loss is deterministic.
    keys: typed PRNG keys [B], one per pair (`example_keys`), needed with noise; the directions draw
      different noise.
    mask: [B]; pairs with 0 have no loss and no gradient, and no other pair is compared with them.
    chunk_bytes: memory budget per device for logits.

  Returns:
    (image to text, text to image). `correct` is computed from the representations without noise, as
    they are used at test time; with noise this takes a second matrix product.

  Raises:
    ValueError: there is noise, but no typed keys.
  """
  alpha, beta = pairs.representations()
  if integrator is None or pairs.image_to_text is None or pairs.text_to_image is None:
    return symmetric_nll(
      alpha, beta, pairs.temperature, mask, dtype=pairs.dtype, chunk_bytes=chunk_bytes
    )
  keys = checked_keys('contrastive_nll', keys, len(alpha))
  plain = symmetric_nll(
    *jax.lax.stop_gradient((alpha, beta, pairs.temperature)),
    mask,
    dtype=pairs.dtype,
    chunk_bytes=chunk_bytes,
  )
  directions = (
    (pairs.alpha, pairs.image_to_text, beta),
    (pairs.beta, pairs.text_to_image, alpha),
  )
  noisy = (
    batch_nll(
      integrator,
      rows,
      covariance,
      columns,
      pairs.temperature,
      mask,
      jax.vmap(jax.random.fold_in, (0, None))(keys, direction),
      post_normalization=pairs.post_normalization,
      dtype=pairs.dtype,
      chunk_bytes=chunk_bytes,
    )
    for direction, (rows, covariance, columns) in enumerate(directions)
  )
  image_to_text, text_to_image = (
    dataclasses.replace(without_noise, nll=nll)
    for without_noise, nll in zip(plain, noisy, strict=True)
  )
  return image_to_text, text_to_image


def class_log_prob(
  representation: jax.Array,
  class_embeddings: jax.Array,
  temperature: jax.Array,
  covariance: LowRank | None = None,
  integrator: Integrator | None = None,
  keys: jax.Array | None = None,
  *,
  post_normalization: bool = False,
  dtype: DTypeLike = jnp.float32,
) -> jax.Array:
  """Zero-shot classification: log p of K classes given as representations of the other tower.

  Without noise (the paper's choice) this is log softmax(<alpha, class_k> / tau), with noise the log
  of the expected probability (appendix M). Classes are not sharded.

      >>> import jax.numpy as jnp
      >>> from het_plugin import heads
      >>> images, classes = jnp.eye(2, 8), jnp.eye(3, 8)
      >>> heads.class_log_prob(images, classes, jnp.float32(0.1)).argmax(-1)
      Array([0, 1], dtype=int32)

  Args:
    representation: [B, D], as in `Pairs`.
    class_embeddings: [K, D], scaled as the other tower's representations are (with several prompts
      per class: their mean, scaled again).
    temperature: tau.
    covariance: covariance of the noise; None for no noise.
    integrator: integrates over the noise; None for no noise.
    keys: typed PRNG keys [B], or [1] to share the draws; needed with noise.
    post_normalization: as in `Pairs`; scales the representation without noise too.
    dtype: compute type of the similarities.

  Returns:
    float32 [B, K].

  Raises:
    ValueError: there is noise, but no typed keys.
  """
  weights = class_embeddings.astype(dtype)
  num_classes = len(class_embeddings)
  get_logits = _Similarities(post_normalization, jnp.dtype(dtype))
  location = get_logits(weights, representation)
  logits = GaussianLogits(location, None, None, jnp.asarray(temperature), num_classes)
  if covariance is None or integrator is None:
    return Integrator().log_prob(logits, keys)
  projection = Linear(weights.T)
  if post_normalization:
    projection = Opaque(representation, weights, get_logits)
  logits = dataclasses.replace(logits, covariance=covariance, projection=projection)
  with partitioning.axis_rules(()):  # K has no shards here
    return integrator.log_prob(logits, keys)


@dataclasses.dataclass(frozen=True)
class _Similarities:
  """(class embeddings [K, D], representations [N, D]) -> [N, K], accumulated in float32."""

  post_normalization: bool
  dtype: DTypeLike

  def __call__(self, class_embeddings, representations):
    if self.post_normalization:
      representations = unit_length(representations)
    return jax.lax.dot_general(
      representations.astype(self.dtype),
      class_embeddings,
      (((1,), (1,)), ((), ())),
      preferred_element_type=jnp.promote_types(self.dtype, jnp.float32),
    )
