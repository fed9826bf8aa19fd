"""A head as an ordinary layer: pre-logits phi [B, D] to logits [B, K] for anybody's loss.

With a softmax, log p(k | x) are themselves logits, whose softmax is the predictive distribution.
With a sigmoid, log p_k - log(1 - p_k) are. So a trainer's own cross-entropy of these logits is the
heteroscedastic loss, and its label smoothing, mixup, metrics and argmax need no change.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from het_plugin.integrate import (
  AnyIntegrator,
  GaussianLogits,
  Integrator,
  entropy,
  example_keys,
  shared_key,
)


def predictive_logits(
  logits: GaussianLogits, integrator: AnyIntegrator, keys: jax.Array | None = None
) -> jax.Array:
  """Logits [B, K] whose softmax or sigmoid is the predictive distribution, float32 or wider.

  Padded classes are cut off, and the mean of the noise and tau are inside.

      >>> import jax, jax.numpy as jnp
      >>> from het_plugin import heads
      >>> from het_plugin.integrate import Integrator, example_keys
      >>> head, phi = heads.HetXL(num_classes=3, num_factors=2), jnp.ones((2, 8))
      >>> logits = head.apply(head.init(jax.random.key(0), phi), phi)
      >>> keys = example_keys(jax.random.key(1), jnp.arange(2))
      >>> heads.predictive_logits(logits, Integrator(), keys).shape
      (2, 3)

  Args:
    logits: what a head returned for B examples.
    integrator: estimates the predictive distribution. A softmax of `Integrator` is estimated from
      `num_samples` samples; a sigmoid is exact and takes neither samples nor keys.
    keys: typed PRNG keys [B], as in `Integrator.nll`.

  Raises:
    ValueError: the logits are no `GaussianLogits`, or there are no keys where samples need them.
  """
  if not isinstance(logits, GaussianLogits):
    raise ValueError(
      'PredictiveLogits.head must be a head, which returns GaussianLogits (Det, Het, HetH, HetXL); '
      f'this one returned {type(logits).__name__}'
    )
  of_all = integrator.log_prob if logits.link == 'softmax' else integrator.log_odds
  return of_all(logits, keys)[:, : logits.num_classes]


def served(
  logits: GaussianLogits,
  integrator: AnyIntegrator,
  *,
  entropies: bool = False,
  seed: int = 0,
  scaling: tuple[jax.Array, jax.Array] | None = None,
) -> dict[str, jax.Array]:
  """The predictive distribution as an exported program computes it, without keys.

  A softmax of `Integrator` takes fixed points (`Integrator.with_fixed_points`), so a prediction
  depends neither on the row nor on the rest of the batch.

      >>> import jax, jax.numpy as jnp
      >>> from het_plugin import heads
      >>> from het_plugin.integrate import Integrator
      >>> head, phi = heads.HetXL(num_classes=3, num_factors=2), jnp.ones((2, 8))
      >>> logits = head.apply(head.init(jax.random.key(0), phi), phi)
      >>> found = heads.served(logits, Integrator(), entropies=True)
      >>> {name: x.shape for name, x in found.items()}
      {'probabilities': (2, 3), 'entropy': (2,), 'expected_entropy': (2,)}

  Args:
    logits: what a head returned for B examples.
    integrator: as in `predictive_logits`.
    entropies: whether to add them.
    seed: of the points.
    scaling: scale and shift [K] or [1] of the `predictive_logits`, which calibrate probabilities,
      but not entropies; None for none.

  Returns:
    'probabilities' float32 [B, K], p(k | x), or p(y_k = 1 | x) with a sigmoid. With `entropies`
    also 'entropy' [B] of the predictive distribution in nats, summed over the classes of a sigmoid,
    and, by an `Integrator`, 'expected_entropy' [B] (`Integrator.expected_entropy`).

  Raises:
    ValueError: as in `predictive_logits`.
  """
  if isinstance(integrator, Integrator):
    integrator = integrator.with_fixed_points(seed)
  keys = shared_key(jax.random.key(seed))  # which the fixed points ignore
  u = predictive_logits(logits, integrator, keys)
  calibrated = u
  if scaling is not None:
    calibrated = u * scaling[0] + scaling[1]
    if logits.link == 'softmax':
      calibrated = jax.nn.log_softmax(calibrated)
  squash = jnp.exp if logits.link == 'softmax' else jax.nn.sigmoid
  found = {'probabilities': squash(calibrated)}
  if entropies:
    found['entropy'] = entropy(u, logits.link)
    if isinstance(integrator, Integrator):
      found['expected_entropy'] = integrator.expected_entropy(logits, keys)
  return found


def check_integrator(owner: str, integrator: AnyIntegrator) -> None:
  """Raises ValueError if it is none, such as a number of samples; `owner` has it as attribute."""
  if not isinstance(integrator, AnyIntegrator):
    raise ValueError(
      f'{owner}.integrator={integrator!r} must be an Integrator or Location: '
      'Integrator(num_samples=64)'
    )


def row_keys(key: jax.Array, num_rows: int) -> jax.Array:
  """A typed PRNG key [num_rows] for each row of a batch, from a typed or a raw key."""
  return example_keys(key, jnp.arange(num_rows))


class PredictiveLogits(nn.Module):
  """phi [B, D] -> `predictive_logits` [B, K] of a head.

      >>> import jax, jax.numpy as jnp
      >>> from het_plugin import HetXL, PredictiveLogits
      >>> layer, phi = PredictiveLogits(HetXL(num_classes=3, num_factors=2)), jnp.ones((2, 8))
      >>> params = layer.init(jax.random.key(0), phi)
      >>> layer.apply(params, phi, rngs={'noise': jax.random.key(1)}).shape
      (2, 3)

  The noise of a softmax has a key for each row of the batch. Where the stream `rng_collection` is
  given, as in training, the keys come from it. Without it they are the same in every call, so that
  a prediction is a function of the parameters, phi and the row.

  A caller that makes the collection 'intermediates' mutable, other than by a `DenyList`, gets
  'gaussian_logits', the `GaussianLogits`, and 'expected_entropy' [B]
  (`Integrator.expected_entropy`).

  In training, `Integrator.nll` on the head itself has less noise for the same S, because it places
  its samples where they explain the label (docs/integrator.md).

  Attributes:
    head: `Det`, `Het`, `HetH`, `HetXL`, or another module that returns `GaussianLogits`. Its
      parameters are below 'head', or where it is made in a module's `nn.compact`, below that
      module, as 'HetXL_0'.
    integrator: `Integrator` or `Location`.
    rng_collection: name of the rng stream of the noise.
  """

  head: nn.Module
  integrator: AnyIntegrator = Integrator()
  rng_collection: str = 'noise'

  def __post_init__(self) -> None:
    if not isinstance(self.head, nn.Module):
      raise ValueError(
        f'PredictiveLogits.head={self.head!r} must be a linen module: HetXL(num_classes=1000)'
      )
    check_integrator('PredictiveLogits', self.integrator)
    super().__post_init__()

  def __call__(self, phi: jax.Array) -> jax.Array:
    """phi [B, D] -> logits [B, K], float32 or wider."""
    has_rng = self.has_rng(self.rng_collection)
    key = self.make_rng(self.rng_collection) if has_rng else jax.random.key(0)
    keys = row_keys(key, phi.shape[0])
    logits = self.head(phi)
    # Keras's FlaxLayer makes all but the parameters mutable, and expects the collections of `init`.
    is_asked = self.is_mutable_collection('intermediates') and not (
      self.scope and isinstance(self.scope.mutable, nn.DenyList)
    )
    if is_asked and isinstance(logits, GaussianLogits):
      self.sow('intermediates', 'gaussian_logits', logits)
      if isinstance(self.integrator, Integrator):
        entropy = self.integrator.expected_entropy(logits, keys)
        self.sow('intermediates', 'expected_entropy', entropy)
    return predictive_logits(logits, self.integrator, keys)
