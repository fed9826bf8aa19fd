"""The mixture of softmaxes against its definition in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, logsumexp, softmax

from het_plugin.heads import FixedTemperature
from het_plugin.integrate import Integrator
from studies.narrow_layers.mixture import MixtureOfSoftmaxes
from tests.params import perturbed


@pytest.mark.slow
def test_its_definition_and_its_rank():
  temperature = FixedTemperature(0.5)
  head = MixtureOfSoftmaxes(20, temperature=temperature, num_components=3, class_multiple=8)
  phi = 3 * jax.random.normal(jax.random.key(0), (40, 2))  # B = 40, D = 2, Kp = 24
  params = perturbed(head.init(jax.random.key(1), phi)['params'])
  log_p = Integrator(num_samples=1).log_prob(head.apply({'params': params}, phi), None)[:, :20]

  x = np.float64(phi)
  own = jax.tree.map(np.float64, params)
  moved = np.einsum('bd,dmq->bmq', x, own['component_kernel']) + own['component_bias']
  logits = (x[:, None] + moved) @ own['kernel'][:, :20] + own['bias'][:20]  # [B, M, K]
  weights = softmax(x @ own['weight_kernel'] + own['weight_bias'], axis=-1)
  expected = logsumexp(log_softmax(logits / 0.5, axis=-1), axis=1, b=weights[..., None])
  np.testing.assert_allclose(log_p, expected, rtol=1e-5, atol=1e-5)
  assert np.linalg.matrix_rank(np.asarray(log_p), tol=1e-2) > 3  # that of a softmax is D + 1

  count = sum(x.size for x in jax.tree.leaves(params)) - 3 * 4  # without the padded classes
  assert head.num_params(2) == count


@pytest.mark.parametrize(
  ('settings', 'error'),
  [
    ({'num_components': 0}, 'num_components=0'),
    ({'num_components': 2.0}, 'num_components=2.0 must be a whole number, at least 1'),
    ({'link': 'sigmoid'}, "link='sigmoid'"),
  ],
)
def test_errors(settings, error):
  with pytest.raises(ValueError, match=error):
    MixtureOfSoftmaxes(num_classes=3, **settings).init(jax.random.key(0), jnp.ones((1, 2)))
