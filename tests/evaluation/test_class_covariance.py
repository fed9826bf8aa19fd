"""Class correlations against a materialised Sigma, for every head and mesh; homoglyphs."""

import functools

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax.linen import partitioning
from jax.sharding import PartitionSpec

from het_plugin.evaluation import class_covariance
from het_plugin.heads import Det, Het, HetH, HetXL
from het_plugin.integrate import Integrator
from het_plugin.models import ClassificationModel
from het_plugin.rows import concatenate
from het_plugin.runs import Run
from het_plugin.training.partitioning import PjitPartitioner
from tests.evaluation.batches import in_batches

K = 10
SHARED = {'num_classes': K, 'class_multiple': 8}
HEADS = {
  'het': Het(num_factors=2, **SHARED),
  'het_h': HetH(num_factors=2, num_buckets=4, **SHARED),
  'het_xl': HetXL(num_factors=2, **SHARED),
}


class Pixels(nn.Module):
  """A backbone that compiles at once: the first pixels are the pre-logits."""

  pre_logits_dim: int = 6

  @nn.compact
  def __call__(self, image, train=False):
    # Parameters, since a model has some in its backbone.
    scale = partitioning.param_with_axes('scale', nn.initializers.ones, (6,), axes=('embed',))
    return image.reshape(len(image), -1)[:, :6] * scale, {}


def make_model(head, integrator=None):
  sampled = Integrator(num_samples=2)
  return ClassificationModel(Pixels(), head, None, sampled, integrator or sampled)


def make_examples(n=19):
  rng = np.random.default_rng(0)
  return {
    'image': rng.normal(size=(n, 8, 8, 1)).astype(np.float32),
    'label': rng.integers(0, K, (n, 1)).astype(np.int32),
    'index': np.arange(100, 100 + n, dtype=np.int32),
  }


@functools.cache
def make_run(head):
  """A run of fresh parameters."""
  model = make_model(HEADS[head])
  start = jax.jit(lambda: model.get_initial_variables(jax.random.key(0), {'image': (1, 8, 8, 1)}))
  params = start()['params']
  specs = jax.tree.map(lambda _: PartitionSpec(), params)
  return Run(model, PjitPartitioner(num_partitions=2), params, specs, image_size=8, channels=1)


@functools.cache
def expected(head):
  """Factors and predictions of `make_examples()`, on one device."""
  model = make_run(head).model
  params = make_run(head).params
  return jax.jit(
    lambda batch: (model.logits(params, batch).factors(), model.predictive(params, batch))
  )(make_examples())


def look(head, examples, **which):
  return class_covariance.look(make_run(head), in_batches(examples, 8), 8, **which)


@pytest.mark.slow
@pytest.mark.parametrize('head', HEADS)
def test_correlations_are_those_of_sigma(head):
  examples = make_examples()
  found = look(head, examples, number=99, num_top=4)
  assert [x.index for x in found] == examples['index'].tolist()
  factors, predictive = expected(head)
  factors = np.asarray(factors, np.float64)[..., :K]
  log_prob = np.asarray(predictive['log_prob'])
  for i, x in enumerate(found):
    sigma = factors[i].T @ factors[i]
    scale = np.sqrt(np.diag(sigma))
    correlation = sigma / scale / scale[:, None]
    assert x.label == examples['label'][i, 0]
    np.testing.assert_allclose(x.log_prob, log_prob[i][x.top], atol=1e-5)
    np.testing.assert_allclose(x.log_prob, np.sort(log_prob[i])[::-1][:4], atol=1e-5)
    np.testing.assert_allclose(x.correlation, correlation[np.ix_(x.top, x.top)], atol=1e-4)
    assert x.anchor == x.label
    np.testing.assert_allclose(x.with_anchor, correlation[x.label], atol=1e-4)
    np.testing.assert_array_equal(x.image, examples['image'][i])


@pytest.mark.parametrize('size', [1e-23, 1e20])
def test_squares_of_factors_that_float32_does_not_hold(size):
  factors = np.random.default_rng(0).normal(size=(1, 4, 5)).astype(np.float32) * np.float32(size)
  factors[..., 3] = 0.0
  found = class_covariance.correlations(factors, np.array([[0, 3]]))
  sigma = factors[0].T.astype(np.float64) @ factors[0]
  scale = np.sqrt(np.diag(sigma))
  expected = sigma[0] / scale[0] / np.where(scale > 0, scale, 1.0)
  np.testing.assert_allclose(found[0, 0], expected, atol=1e-6)
  np.testing.assert_array_equal(found[0, 1], 0.0)  # of a class without noise


def test_an_image_without_a_label_and_more_classes_than_there_are():
  examples = make_examples(1) | {
    'label': np.full((1, 2), -1, np.int32),
    'label_weight': np.zeros((1, 2), np.float32),  # what votes have besides
    'annotator': np.full((1, 2), -1, np.int32),
  }
  (found,) = look('het_xl', examples, number=1, num_top=99)
  assert found.label == -1 and found.anchor == found.top[0] and len(found.top) == K
  np.testing.assert_allclose(found.with_anchor[found.top], found.correlation[0], atol=1e-5)


def test_examples_are_the_first_or_those_asked_for():
  examples = make_examples()
  assert [x.index for x in look('het_xl', examples, number=11)] == [*range(100, 111)]
  asked = look('het_xl', examples, index=(117, 101))
  assert [x.index for x in asked] == [117, 101]
  np.testing.assert_array_equal(asked[0].image, examples['image'][17])
  with pytest.raises(ValueError, match=' 7$'):
    look('het_xl', examples, index=(110, 7))


def test_heads_without_class_correlations():
  assert 'Det is deterministic' in class_covariance.why_none(Det(**SHARED))
  diag = HetXL(remainder='diag', **SHARED)
  assert "HetXL.remainder='diag'" in class_covariance.why_none(diag)
  opaque = HetXL(get_logits=lambda phi: phi, **SHARED)
  assert 'get_logits' in class_covariance.why_none(opaque)


def test_predictions_over_the_mesh():
  run = make_run('het_xl')
  examples = make_examples()
  mesh = PjitPartitioner(num_partitions=4)
  run = Run(run.model, mesh, run.params, run.param_specs, image_size=8, channels=1)

  def predicted(batches, **bound):
    return list(run.stream(batches, ('log_prob',), 8, **bound))

  found = concatenate(predicted(in_batches(examples, 8)))
  _, predictive = expected('het_xl')
  np.testing.assert_allclose(found.log_prob, predictive['log_prob'], atol=1e-5)
  np.testing.assert_allclose(found['expected_entropy'], predictive['expected_entropy'], atol=1e-5)
  np.testing.assert_array_equal(found.labels, examples['label'])
  np.testing.assert_array_equal(found.index, examples['index'])
  assert found.log_prob.shape == (19, K) and 'nll' not in found.columns
  padding = next(in_batches(examples, 8)) | {'mask': np.zeros(8, np.float32)}
  assert not predicted([padding, padding])
  for bound in (1, 11):
    parts = predicted(in_batches(examples, 8), max_examples=bound)
    np.testing.assert_array_equal(concatenate(parts).index, examples['index'][:bound])


@pytest.mark.slow
def test_one_batch_of_any_size():
  """`Run.predict` and `Run.represent` take what people have: images alone, any number of them."""
  run = make_run('het_xl')
  examples = make_examples(5)
  found = run.predict({name: examples[name] for name in ('image', 'index')})
  _, predictive = expected('het_xl')
  assert set(found) == {'log_prob', 'expected_entropy'}
  np.testing.assert_allclose(found['log_prob'], predictive['log_prob'][:5], atol=1e-5)
  assert run.predict({'image': examples['image'][:1]})['log_prob'].shape == (1, K)
  with pytest.raises(ValueError, match='no_such_layer'):
    run.represent({'image': examples['image']}, ['no_such_layer'])
