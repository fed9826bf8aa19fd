"""The prediction of a head without its noise."""

import dataclasses

import jax

from het_plugin.integrate.gaussian import GaussianLogits, checked
from het_plugin.integrate.integrator import Integrator
from het_plugin.integrate.tiles import linear_location


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

  def nll(
    self, logits: GaussianLogits, labels: jax.Array, keys: jax.Array | None = None
  ) -> jax.Array:
    """As `Integrator.nll`; `keys` is ignored."""
    return Integrator().nll(_without_noise(logits), labels)

  def log_prob(self, logits: GaussianLogits, keys: jax.Array | None = None) -> jax.Array:
    """As `Integrator.log_prob`; `keys` is ignored."""
    return Integrator().log_prob(_without_noise(logits))

  def top_k(
    self, logits: GaussianLogits, keys: jax.Array | None = None, k: int = 5
  ) -> tuple[jax.Array, jax.Array]:
    """As `Integrator.top_k`; `keys` is ignored."""
    return Integrator().top_k(_without_noise(logits), k=k)

  def is_tiled(self, logits: GaussianLogits) -> bool:
    """As `Integrator.is_tiled`."""
    return Integrator().is_tiled(_without_noise(logits))

  def log_odds(self, logits: GaussianLogits, keys: jax.Array | None = None) -> jax.Array:
    """As `Integrator.log_odds`; `keys` is ignored."""
    return Integrator().log_odds(_without_noise(logits))


def _without_noise(logits):
  logits = checked(logits)
  linear = linear_location(logits)  # with which losses in tiles of classes make the location
  return dataclasses.replace(logits, covariance=None, projection=None, location_from=linear)
