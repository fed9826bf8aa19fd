"""A mixture of softmaxes without noise, a control for the heads with noise where K / D is large."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

import gin
from het_plugin.heads import Classifier
from het_plugin.heads.linear import affine
from het_plugin.integrate import GaussianLogits, Integrator
from het_plugin.system.ranges import Count

INITIAL_SCALE = 0.1  # of V_m: the components differ, and their mean is nearly DET


class MixtureOfSoftmaxes(Classifier):
  """log sum_m pi_m(x) softmax((W^T (phi + V_m^T phi + c_m) + b) / tau), pi = softmax(P^T phi + q).

  HET-XL is such a mixture, too, over Gaussian samples of what is added to phi. Here M of them are
  learned, with their weights. The log-probabilities of a softmax have at most rank D + 1, and
  those of a mixture have no such limit (Yang et al. 2018, arXiv 1711.03953, whose components are
  tanh(V_m^T phi + c_m)).

  Attributes:
    num_components: M >= 1.
  """

  num_components: Count = 4

  @nn.nowrap
  def check(self, phi: jax.Array) -> None:
    super().check(phi)
    if self.link != 'softmax':
      raise ValueError(f"MixtureOfSoftmaxes.link={self.link!r} must be 'softmax'")

  @nn.nowrap
  def extra_params(self, pre_logits_dim: int) -> int:
    of_components = self.num_components * (pre_logits_dim + 1) ** 2  # V and c; P and q
    return of_components + super().extra_params(pre_logits_dim)

  @nn.compact
  def __call__(self, phi: jax.Array) -> GaussianLogits:
    """phi [B, D] -> the log-probabilities of the mixture, as logits without noise and tau = 1."""
    self.check(phi)
    count = self.num_components
    dim = phi.shape[-1]
    axes = ('factors', 'noise')
    moved = affine(self, 'component', phi, (count, dim), axes, self.dtype, INITIAL_SCALE)
    weights = affine(self, 'weight', phi, (count,), ('factors',), self.dtype)  # [B, M]
    rows = (phi[:, None] + moved).reshape(-1, dim)  # [B M, D]
    logits = self.gaussian(self.location(rows, self.kernel(phi), self.bias()), None, None)
    log_p = Integrator().log_prob(logits)  # [B M, Kp]
    log_p = log_p.reshape(phi.shape[0], count, log_p.shape[-1])  # [B, M, Kp]; B may be symbolic
    mixed = jax.nn.logsumexp(jax.nn.log_softmax(weights)[..., None] + log_p, axis=1)
    return dataclasses.replace(logits, location=mixed, temperature=jnp.ones((), mixed.dtype))


gin.external_configurable(MixtureOfSoftmaxes, module=__name__)
