import jax
import jax.numpy as jnp
import numpy as np
import pytest

from het_plugin import heads
from het_plugin.integrate import Integrator, example_keys
from het_plugin.models import soft_labels
from tests.params import drawn

B = 4
D = 6
K = 5
HEADS = {
  'det': lambda link: heads.Det(K, link=link),
  'het_xl': lambda link: heads.HetXL(K, num_factors=2, link=link),
}


def logits_of(name, link):
  head = HEADS[name](link)
  phi = jax.random.normal(jax.random.key(1), (B, D))
  return jax.jit(head.apply)({'params': drawn(head.init, phi)}, phi)


@pytest.mark.parametrize('link', ['softmax', 'sigmoid'])
@pytest.mark.parametrize('name', HEADS)
def test_the_loss_is_the_mean_of_the_losses_of_the_votes(name, link):
  """Votes as weights give the mean of the NLLs of the annotators' labels."""
  logits = logits_of(name, link)
  integrator = Integrator(num_samples=4, sampler='iid')
  keys = example_keys(jax.random.key(2), jnp.arange(B))
  votes = np.array([[0, 1, 1], [2, 2, 2], [3, 0, 4], [1, 4, 1]])
  batch = {'label': votes, 'label_weight': np.full(votes.shape, 1 / 3, np.float32)}
  hard = {'label': votes[:, :1]}
  weighted = {**hard, 'label_weight': np.ones((B, 1), np.float32)}

  @jax.jit
  def found(logits):
    of_votes = [integrator.nll(logits, votes[:, [a]], keys) for a in range(3)]
    return of_votes, [soft_labels.nll(integrator, logits, x, keys) for x in (batch, weighted, hard)]

  of_votes, (soft, weighted, hard) = found(logits)
  tolerance = 2e-4 if link == 'softmax' else 2e-3
  np.testing.assert_allclose(soft, np.mean(of_votes, axis=0), rtol=tolerance)
  np.testing.assert_allclose(weighted, hard, rtol=tolerance)


def test_smoothing_spreads_the_target():
  logits = logits_of('det', 'softmax')
  batch = {'label': jnp.array([[0, -1], [1, 2], [4, -1], [-1, -1]])}

  @jax.jit
  def targets(logits):
    links = (logits, logits.replace(link='sigmoid'))
    return [soft_labels.targets(batch, x, smoothing=0.1)[:, :K] for x in links]

  target, on = map(np.asarray, targets(logits))
  np.testing.assert_allclose(target[:3].sum(1), 1, rtol=1e-6)
  np.testing.assert_allclose(target[0], [0.92, 0.02, 0.02, 0.02, 0.02], rtol=1e-5)
  np.testing.assert_allclose(target[1, [1, 2]], 0.47, rtol=1e-5)
  assert not target[3].any()
  np.testing.assert_allclose(on[1], [0.05, 0.95, 0.95, 0.05, 0.05], rtol=1e-5)


def test_accuracy_of_soft_labels_is_the_share_that_agrees():
  label = jnp.array([[0, 1], [2, -1]])
  top = jnp.array([1, 2])
  np.testing.assert_array_equal(soft_labels.correct(top, {'label': label}, 'sigmoid'), [1, 1])
  np.testing.assert_array_equal(soft_labels.correct(top, {'label': label}, 'softmax'), [0.5, 1])
  votes = {'label': jnp.array([[0, 0, 1, 2], [-1, -1, -1, -1]])}
  np.testing.assert_array_equal(soft_labels.correct(top, votes, 'softmax'), [0.25, 0])
  weights = jnp.array([[0.7, 0.3], [1.0, 0.0]])
  batch = {'label': label, 'label_weight': weights}
  np.testing.assert_allclose(soft_labels.correct(top, batch, 'softmax'), [0.3, 1.0])
  mixed = {'label': label, 'label_weight': jnp.array([[1.0, 3.0], [2.0, 0.0]])}
  np.testing.assert_allclose(soft_labels.correct(top, mixed, 'softmax'), [0.75, 1.0])


@pytest.mark.parametrize('link', ['softmax', 'sigmoid'])
def test_a_label_that_is_no_class_is_nan_with_weights_and_smoothing_too(link):
  logits = logits_of('det', link)
  label = np.arange(B)[:, None] % K
  label[1] = K
  cases = [
    ({'label': label, 'label_weight': np.ones(label.shape, 'f4')}, 0.0),
    ({'label': label}, 0.1),
  ]
  find = jax.jit(lambda x: [soft_labels.nll(Integrator(), x, y, None, z) for y, z in cases])
  for nll in map(np.asarray, find(logits)):
    assert np.isnan(nll[1]) and np.isfinite(np.delete(nll, 1)).all()
