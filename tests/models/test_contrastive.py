"""Contrastive learning on t5x's model surface."""

import dataclasses
import functools
import types

import jax
import numpy as np
import pytest
from flax import traverse_util
from scipy import special

from het_plugin.backbones import Mlp, TextTransformer, ViT
from het_plugin.heads import ContrastiveDet, ContrastiveHetXL, Det
from het_plugin.integrate import Integrator, Location
from het_plugin.models import ContrastiveModel
from het_plugin.training import optimizers, partitioning
from het_plugin.training import step as step_lib
from het_plugin.training.state import TrainState
from tests.models.words import MeanOfWords

IMAGE_TOWER = ViT(patch_size=4, width=16, depth=1, mlp_dim=16, num_heads=2, pooling='gap')
TEXT_TOWER = TextTransformer(vocab_size=40, width=16, depth=1, mlp_dim=16, num_heads=2)
HEADS = {'det': ContrastiveDet(), 'het_xl': ContrastiveHetXL(num_factors=3)}
B = 16


def make_model(head='det', **settings):
  settings = {
    'backbone': IMAGE_TOWER,
    'text_tower': TEXT_TOWER,
    'head': HEADS[head] if isinstance(head, str) else head,
    'optimizer_def': optimizers.adamw(1e-2, weight_decay=0.1),
    'train_integrator': Integrator(num_samples=1),
    **settings,
  }
  return ContrastiveModel(**settings)


def small_model(head, **settings):
  """With towers that compile in no time, for what only the head and the loss do."""
  return make_model(head, backbone=Mlp((4,)), text_tower=MeanOfWords(), **settings)


def make_batch(rows=B, seed=0):
  rng = np.random.default_rng(seed)
  text = rng.integers(2, 40, (rows, 6)).astype(np.int32)
  text[:, 4:] = [1, 0]
  return {
    'image': rng.normal(size=(rows, 8, 8, 1)).astype(np.float32),
    'text': text,
    'index': np.arange(100, 100 + rows, dtype=np.int32),
    'mask': np.ones(rows, np.float32),
  }


def initial(model, batch):
  shapes = batch['image'].shape[1:], batch['text'].shape[1:]
  return initial_params(model.module, *shapes)


@functools.cache
def initial_params(module, *shapes):
  image, text = (np.zeros((1, *shape), x) for shape, x in zip(shapes, 'fi', strict=True))
  return jax.jit(module.init)(jax.random.key(0), image, text)['params']


def values(metrics):
  return {name: float(np.asarray(metric.compute())) for name, metric in metrics.items()}


@pytest.mark.slow
def test_the_loss_is_equation_6():
  model = small_model('det')
  batch = make_batch()
  params = initial(model, batch)

  @jax.jit
  def found(params, batch):
    alpha = model.image_embeddings(params, batch)
    beta = model.text_embeddings(params, batch['text'])
    scores = model.score_batch(params, batch)
    predicted = model.predict_batch_with_aux(params, batch)
    return alpha, beta, scores, predicted, model.eval_fn(params, batch)

  alpha, beta, scores, (embeddings, aux), (loss, metrics) = found(params, batch)
  alpha = np.asarray(alpha, np.float64)
  beta = np.asarray(beta, np.float64)
  np.testing.assert_allclose(np.linalg.norm(alpha, axis=1), 1, rtol=1e-5)
  u = 10.0 * alpha @ beta.T
  image_to_text = np.log(np.exp(u).sum(1)) - np.diag(u)
  text_to_image = np.log(np.exp(u).sum(0)) - np.diag(u)
  got = values(metrics)
  np.testing.assert_allclose(loss, (image_to_text + text_to_image).mean() / 2, rtol=1e-5)
  np.testing.assert_allclose(got['loss'], loss, rtol=1e-6)
  np.testing.assert_allclose(got['nll/image_to_text'], image_to_text.mean(), rtol=1e-5)
  np.testing.assert_allclose(got['nll/text_to_image'], text_to_image.mean(), rtol=1e-5)
  assert got['precision_at_1/image_to_text'] == np.mean(u.argmax(1) == np.arange(B))
  assert got['logit_scale'] == pytest.approx(10.0)
  assert got['tau'] == pytest.approx(0.1)
  np.testing.assert_allclose(scores, -(image_to_text + text_to_image) / 2, rtol=1e-4)
  np.testing.assert_allclose(embeddings, alpha, atol=1e-6)
  np.testing.assert_allclose(aux['text'], beta, atol=1e-6)


@pytest.mark.slow
def test_masked_rows_do_not_matter():
  model = small_model('het_xl')
  batch = make_batch()
  params = initial(model, batch)
  step = jax.jit(jax.value_and_grad(lambda p, b: model.loss_fn(p, b, jax.random.key(3))[0]))
  value_and_grad = functools.partial(step, params)
  padded = make_batch(B + 8, seed=5)
  for name, x in batch.items():
    padded[name][:B] = x
  padded['mask'][B:] = 0
  (loss, gradient), (padded_loss, padded_gradient) = map(value_and_grad, (batch, padded))
  np.testing.assert_allclose(padded_loss, loss, rtol=1e-5)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(y, x, atol=1e-5), gradient, padded_gradient)
  nothing = batch | {'mask': np.zeros(B, np.float32)}
  assert float(jax.jit(model.eval_fn)(params, nothing)[0]) == 0


@pytest.mark.slow
def test_noise_is_of_training_and_follows_the_examples():
  model = small_model('het_xl')
  batch = make_batch()
  params = initial(model, batch)
  loss = jax.jit(lambda p, b, key: model.loss_fn(p, b, key)[0])
  first = loss(params, batch, jax.random.key(1))
  assert first == loss(params, batch, jax.random.key(1))
  assert abs(first - loss(params, batch, jax.random.key(2))) > 1e-6
  order = np.random.default_rng(0).permutation(B)
  shuffled = {name: x[order] for name, x in batch.items()}
  np.testing.assert_allclose(loss(params, shuffled, jax.random.key(1)), first, rtol=1e-5)
  # Without a key, as at evaluation: no noise, whatever the covariance is.
  plain = jax.jit(lambda p, b: model.loss_fn(p, b, None)[0])(params, batch)
  without = small_model('det')
  without.head = dataclasses.replace(HEADS['det'], temperature=HEADS['het_xl'].temperature)
  without.module = without.module.clone(head=without.head)
  flat = {name: tree for name, tree in params.items() if name != 'head'}
  flat['head'] = {'temperature': params['head']['temperature']}
  np.testing.assert_allclose(jax.jit(without.eval_fn)(flat, batch)[0], plain, rtol=1e-5)
  noisy = small_model('het_xl', eval_integrator=Integrator(num_samples=8))
  assert abs(jax.jit(noisy.eval_fn)(params, batch)[0] - plain) > 1e-5


@pytest.mark.slow
def test_a_locked_tower_has_no_gradient_and_its_projection_has():
  model = small_model('det', embedding_dim=10, locked=True)
  batch = make_batch()
  params = initial(model, batch)
  gradient = jax.jit(jax.grad(lambda p: model.loss_fn(p, batch, jax.random.key(0))[0]))(params)
  flat = traverse_util.flatten_dict(gradient, sep='/')
  for name, x in flat.items():
    if name.startswith('backbone/'):
      assert not np.any(x), name
  assert np.any(flat['image_projection/kernel'])
  assert np.any(flat['text_tower/Embed_0/embedding'])
  assert jax.eval_shape(model.image_embeddings, params, batch).shape == (B, 10)


@pytest.mark.slow
def test_a_step_is_the_same_on_every_mesh():
  """The loss compares all of the batch, over all devices."""
  batch = make_batch()
  # The mesh test of tests/models/test_classification.py has a ViT.
  model = make_model('het_xl', backbone=Mlp((16,)), optimizer_def=optimizers.adamw(1e-2, eps=1e-3))
  shapes = {name: x.shape for name, x in batch.items()}

  @jax.jit
  def init():
    variables = model.get_initial_variables(jax.random.key(0), shapes)
    return TrainState.create(model.optimizer_def, variables)

  initial_state = jax.device_get(init())
  results = []
  for num_partitions in (1, 4):
    partitioner = partitioning.PjitPartitioner(num_partitions=num_partitions)
    axes = partitioner.get_mesh_axes(jax.eval_shape(init))
    state = jax.device_put(initial_state, partitioner.shardings(axes))
    steps = step_lib.Trainer(model, partitioner, axes, jax.random.key(2))
    spec = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
    placed = jax.tree.map(
      lambda x, s: jax.device_put(x, s.sharding), batch, partitioner.batch_spec(spec)
    )
    state, metrics = steps.train_step(state, placed)
    results.append((values({'loss': metrics['loss']}), jax.device_get(state.params)))
  for loss, params in results[1:]:
    assert loss == pytest.approx(results[0][0], rel=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(y, x, atol=1e-4), results[0][1], params)


@pytest.mark.slow
def test_zero_shot_probabilities():
  model = small_model('het_xl')
  batch = make_batch()
  params = initial(model, batch)

  @jax.jit
  def found(params, batch, text):
    classes = model.text_embeddings(params, text)
    log_prob, sampled = (model.class_log_prob(params, batch, classes, n) for n in (0, 500))
    return classes, model.image_embeddings(params, batch), log_prob, sampled

  classes, images, log_prob, sampled = found(params, batch, make_batch(7, seed=9)['text'])
  scores = 3.0 * np.asarray(images) @ np.asarray(classes).T
  np.testing.assert_allclose(log_prob, special.log_softmax(scores, axis=-1), atol=1e-5)
  np.testing.assert_allclose(np.exp(sampled).sum(-1), 1, rtol=1e-4)
  assert np.abs(sampled - log_prob).max() > 1e-3


def test_count_params_of_another_text_tower():
  model = make_model(text_tower=MeanOfWords())
  shapes = {name: x.shape for name, x in make_batch().items()}
  params = jax.eval_shape(lambda: model.get_initial_variables(jax.random.key(0), shapes))['params']
  assert model.count_params(params).total == sum(x.size for x in jax.tree.leaves(params))


@pytest.mark.parametrize('head', HEADS)
def test_count_params(head):
  model = make_model(head, embedding_dim=10)
  shapes = {name: x.shape for name, x in make_batch().items()}
  params = jax.eval_shape(lambda: model.get_initial_variables(jax.random.key(0), shapes))['params']
  counts = model.count_params(params)
  total = sum(x.size for x in jax.tree.leaves(params))
  assert counts.total == total - (128 - 40) * 16  # the padding of the vocabulary
  assert counts.extra == {'det': 1, 'het_xl': 2 * 4 * 11 * 10 + 1}[head]


def task(**info):
  return types.SimpleNamespace(**{'vocab_size': 41, 'vocabulary': 'bytes'} | info)


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: make_model().validate(task()), 'vocab_size=40 must be at least 41, .*bytes'),
    (lambda: make_model().validate(types.SimpleNamespace(num_classes=3)), 'has class labels'),
    (
      lambda: make_model(head=Det(3)).validate(task(vocab_size=40)),
      'ContrastiveModel.head=Det has clas',
    ),
    (lambda: make_model(eval_integrator=Location()), r'eval_integrator=Location\(.* None for no n'),
    (lambda: make_model(backbone=Mlp()), 'embedding_dim must be set: Mlp does not state the width'),
    (lambda: make_model(embedding_dim=0), 'ContrastiveModel.embedding_dim=0 must be at least 1'),
  ],
)
def test_wrong_settings(make, message):
  make_model().validate(task(vocab_size=40))
  with pytest.raises(ValueError, match=message):
    make()
