import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from het_plugin.backbones import Mlp, ViT
from het_plugin.heads import ContrastiveDet, Det, Het, HetH, HetXL, LearnedTemperature
from het_plugin.integrate import Integrator, Location, example_keys
from het_plugin.models import ClassificationModel
from tests.meshes import make_mesh, on_mesh
from tests.params import perturbed

NUM_CLASSES = 10
PADDED_CLASSES = 16
BACKBONE = ViT(
  patch_size=4, width=16, depth=1, mlp_dim=32, num_heads=2, pooling='gap', representation_size=12
)
SHARED = {
  'num_classes': NUM_CLASSES,
  'class_multiple': 8,
  'temperature': LearnedTemperature(tau_min=0.5, tau_max=1.5),
}
NOISE = {'num_factors': 2, **SHARED}
HEADS = {
  'det': Det(**SHARED),
  'het': Het(**NOISE),
  'het_h': HetH(num_buckets=6, **NOISE),
  'het_xl': HetXL(**NOISE),
}
STEP_KEY = jax.random.key(3)


def task(num_classes=NUM_CLASSES, multi_label=False, class_names=None):
  """The fields of `data.TaskInfo` that a model reads."""
  return types.SimpleNamespace(
    num_classes=num_classes, multi_label=multi_label, class_names=class_names
  )


SAMPLED = Integrator(num_samples=16, sampler='iid')


SMALL = Mlp((12,))  # of the width of BACKBONE, where the test is not about what is in front of phi


def make_model(head='het_xl', backbone=SMALL, link='softmax', eval_integrator=SAMPLED, **kwargs):
  """One object for the same settings, so that tests share its programs."""
  return _cached_model(head, backbone, link, eval_integrator, **kwargs)


def new_model(head, backbone, link, eval_integrator, **kwargs):
  head = HEADS[head] if isinstance(head, str) else head
  return ClassificationModel(
    backbone=backbone,
    head=head.clone(link=link),
    optimizer_def=None,
    train_integrator=Integrator(num_samples=8, sampler='iid'),
    eval_integrator=eval_integrator,
    **kwargs,
  )


_cached_model = functools.cache(new_model)


def make_batch(rows=8, num_labels=1, seed=0):
  rng = np.random.default_rng(seed)
  labels = np.stack([rng.permutation(NUM_CLASSES)[:num_labels] for _ in range(rows)])
  labels[::2, 1:] = -1
  return {
    'image': rng.standard_normal((rows, 8, 8, 1), np.float32),
    'label': labels.astype(np.int32),
    'index': np.arange(100, 100 + rows, dtype=np.int32),
    'mask': np.ones(rows, np.float32),
  }


def make_params(model, batch):
  """Initial parameters, moved off the values at which parts of the model are switched off."""
  return initial_params(model.backbone, model.head.clone(link='softmax'), batch['image'].shape[1:])


@functools.cache
def initial_params(backbone, head, image_shape):
  def init(key):
    return make_model(head, backbone).get_initial_variables(key, {'image': (1, *image_shape)})

  return perturbed(jax.jit(init)(jax.random.key(0))['params'])


def rows_of(batch, rows):
  return {name: x[rows] for name, x in batch.items()}


@functools.cache
def steps_of(model):
  """Compiled once for all tests: (params, batch, key) -> ((loss, metrics), gradient) of training,
  and (params, batch) -> (loss, metrics) of evaluation.
  """
  train = jax.jit(jax.value_and_grad(model.loss_fn, has_aux=True))
  return lambda params, batch, key=STEP_KEY: train(params, batch, key), jax.jit(model.eval_fn)


def loss_and_grads(model, params, batch):
  (loss, _), gradient = steps_of(model)[0](params, batch)
  return loss, gradient


def both_steps(model, params, batch):
  """(loss, metrics) of training and of evaluation."""
  train, evaluate = steps_of(model)
  return train(params, batch)[0], evaluate(params, batch)


def computed(metrics):
  return {name: float(metric.compute()) for name, metric in metrics.items()}


def assert_trees_close(actual, expected, **tolerance):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), actual, expected)


@functools.cache
def unsharded_vit():
  """Parameters and batch of a model with a ViT, `step(params, batch)` and its result."""
  model = make_model(backbone=BACKBONE)
  batch = make_batch()
  params = make_params(model, batch)

  def step(params, batch):
    train = jax.value_and_grad(model.loss_fn, has_aux=True)(params, batch, STEP_KEY)
    return train, model.eval_fn(params, batch), model.predict_batch(params, batch)

  return params, batch, step, jax.jit(step)(params, batch)


@pytest.mark.slow
def test_gradients_reach_every_parameter():
  *_, ((_, grads), _, _) = unsharded_vit()
  for name, grad in traverse_util.flatten_dict(grads, sep='/').items():
    assert np.isfinite(grad).all(), name
    if name.endswith('attention/key/bias'):
      continue  # adds the same number to all logits of a query, which its softmax does not see
    assert np.abs(grad).max() > 1e-7, name


@pytest.mark.slow
def test_padded_classes_never_count():
  model = make_model('het_xl', link='sigmoid')
  batch = make_batch()
  params = make_params(model, batch)
  location = np.asarray(jax.jit(lambda p, b: model.logits(p, b).location)(params, batch))
  batch['label'] = location[:, :NUM_CLASSES].argmax(-1, keepdims=True).astype(np.int32)
  bias = params['head']['bias']
  assert bias.shape == (PADDED_CLASSES,)
  tempting = {**params, 'head': {**params['head'], 'bias': bias.at[NUM_CLASSES:].set(50.0)}}
  steps = (both_steps(model, p, batch) for p in (params, tempting))
  for (_, metrics), (_, tempted) in zip(*steps, strict=True):
    assert computed(metrics)['precision_at_1'] > 0
    assert computed(tempted) == computed(metrics)
  top, aux = jax.jit(model.predict_batch_with_aux)(tempting, batch)
  assert top.max() < NUM_CLASSES
  assert aux['top5'].max() < NUM_CLASSES
  _, grads = loss_and_grads(model, tempting, batch)
  np.testing.assert_array_equal(grads['head']['bias'][NUM_CLASSES:], 0)
  np.testing.assert_array_equal(grads['head']['kernel'][:, NUM_CLASSES:], 0)


@pytest.mark.slow
@pytest.mark.parametrize('link, garbage_label', [('softmax', -1), ('sigmoid', 3)])
def test_padding_rows_change_nothing(link, garbage_label):
  model = make_model('het_xl', link=link)
  batch = make_batch(rows=2)
  params = make_params(model, batch)
  padding = make_batch(rows=6, seed=9)
  padding['mask'] = np.zeros(6, np.float32)
  padding['label'] = np.full((6, 1), garbage_label, np.int32)
  padded = {name: np.concatenate([batch[name], padding[name]]) for name in batch}
  assert_trees_close(
    loss_and_grads(model, params, padded),
    loss_and_grads(model, params, batch),
    rtol=1e-5,
    atol=1e-6,
  )
  of_both = (both_steps(model, params, b) for b in (padded, batch))
  for (loss, metrics), (expected_loss, expected) in zip(*of_both, strict=True):
    assert int(metrics['loss'].count) == 2
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for name, value in computed(expected).items():
      np.testing.assert_allclose(float(metrics[name].compute()), value, rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_batch_of_padding_only_has_no_loss_and_no_gradient():
  model = make_model()
  batch = make_batch()
  batch['mask'] = np.zeros_like(batch['mask'])
  loss, grads = loss_and_grads(model, make_params(model, batch), batch)
  assert float(loss) == 0
  assert all(np.abs(g).max() == 0 for g in jax.tree.leaves(grads))


@pytest.mark.slow
def test_neither_order_nor_microbatches_change_the_step():
  model = make_model()
  batch = make_batch()
  params = make_params(model, batch)
  expected = loss_and_grads(model, params, batch)
  shuffled = rows_of(batch, np.random.default_rng(0).permutation(8))
  assert_trees_close(loss_and_grads(model, params, shuffled), expected, rtol=1e-4, atol=1e-6)
  parts = [
    loss_and_grads(model, params, rows_of(batch, slice(start, start + 2)))
    for start in range(0, 8, 2)
  ]
  mean = jax.tree.map(lambda *x: sum(x) / 4, *parts)
  assert_trees_close(mean, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_evaluation_does_not_depend_on_the_batches():
  model = make_model()
  batch = make_batch()
  params = make_params(model, batch)
  _, eval_fn = steps_of(model)
  whole = computed(eval_fn(params, batch)[1])
  first = eval_fn(params, rows_of(batch, slice(0, 2)))[1]
  last = eval_fn(params, batch | {'mask': np.float32(np.arange(8) >= 2)})[1]
  merged = computed({name: first[name].merge(last[name]) for name in first})
  assert merged.keys() == {'loss', 'nll', 'precision_at_1', 'ece', 'tau'}
  for name, value in whole.items():
    np.testing.assert_allclose(merged[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_keys_decide_the_noise():
  model = make_model()
  batch = make_batch()
  params = make_params(model, batch)

  def loss(key, batch=batch):
    return float(steps_of(model)[0](params, batch, key)[0][0])

  moved = {**batch, 'index': batch['index'] + 1}
  raw = jax.random.PRNGKey(3)  # as t5x passes it
  assert loss(STEP_KEY) == loss(STEP_KEY) == loss(raw)
  assert loss(STEP_KEY) != loss(jax.random.key(4))
  assert loss(STEP_KEY) != loss(STEP_KEY, moved)

  def eval_loss(model, batch=batch):
    return float(steps_of(model)[1](params, batch)[0])

  again = new_model('het_xl', SMALL, 'softmax', SAMPLED)
  assert eval_loss(model) == eval_loss(again)
  assert eval_loss(model) != eval_loss(make_model(eval_seed=1))
  assert eval_loss(model) != eval_loss(model, moved)


@pytest.mark.slow
def test_dropout_acts_in_training_only_and_follows_the_key():
  model = make_model('det', backbone=BACKBONE.clone(dropout=0.5))
  batch = make_batch()
  params = make_params(model, batch)
  loss_fn = jax.jit(model.loss_fn)
  loss = [float(loss_fn(params, batch, jax.random.key(seed))[0]) for seed in (0, 0, 1)]
  assert loss[0] == loss[1] != loss[2]
  expected = float(jax.jit(make_model('det', BACKBONE).eval_fn)(params, batch)[0])
  assert float(jax.jit(model.eval_fn)(params, batch)[0]) == expected
  assert float(loss_fn(params, batch, None)[0]) == expected  # t5x's deterministic mode


@pytest.mark.slow
def test_index_and_mask_are_optional():
  model = make_model()
  batch = make_batch()
  params = make_params(model, batch)
  bare = {name: batch[name] for name in ('image', 'label')}
  full = {**batch, 'index': np.arange(8, dtype=np.int32)}
  of_both = (both_steps(model, params, b) for b in (bare, full))
  for (_, metrics), (_, expected) in zip(*of_both, strict=True):
    assert computed(metrics) == computed(expected)


@pytest.mark.slow
def test_loss_normalizing_factor_divides_the_sum():
  batch = make_batch()
  model = make_model()
  summed = make_model(loss_normalizing_factor=4.0)
  params = make_params(model, batch)
  mean, _ = loss_and_grads(model, params, batch)
  loss, metrics = jax.jit(summed.loss_fn)(params, batch, STEP_KEY)
  np.testing.assert_allclose(loss, mean * 8 / 4, rtol=1e-6)
  np.testing.assert_allclose(metrics['loss'].compute(), mean, rtol=1e-6)
  with pytest.raises(ValueError, match='loss_normalizing_factor=0 must be above 0'):
    make_model(loss_normalizing_factor=0)


@pytest.mark.slow
@pytest.mark.parametrize('integrator', [SAMPLED, Location()], ids=['sampled', 'location'])
@pytest.mark.parametrize('link', ['softmax', 'sigmoid'])
def test_multi_label_metrics_and_scores(link, integrator):
  model = make_model('het', link=link, eval_integrator=integrator)
  batch = make_batch(num_labels=3)
  params = make_params(model, batch)

  @jax.jit
  def found(params, batch):
    keys = example_keys(jax.random.key(0), batch['index'])
    log_prob = integrator.log_prob(model.logits(params, batch), keys)
    of_model = (f(params, batch) for f in (model.predict_batch, model.score_batch, model.eval_fn))
    return log_prob[:, :NUM_CLASSES], *of_model

  log_prob, top, scores, (loss, metrics) = found(params, batch)
  log_prob = np.asarray(log_prob)
  top = np.asarray(top)
  same = [t == row[row >= 0] for (t,), row in zip(top, batch['label'], strict=True)]
  correct = [x.any() if link == 'sigmoid' else x.mean() for x in same]
  np.testing.assert_allclose(metrics['precision_at_1'].compute(), np.mean(correct), rtol=1e-6)

  on = (batch['label'][:, :, None] == np.arange(NUM_CLASSES)).any(1)  # [B, K]
  if link == 'sigmoid':
    expected = np.where(on, log_prob, np.log1p(-np.exp(log_prob))).sum(-1)
  else:
    expected = (on * log_prob).sum(-1) / on.sum(-1)
  np.testing.assert_allclose(scores, expected, rtol=1e-4)
  np.testing.assert_allclose(metrics['nll'].compute(), -expected.mean(), rtol=1e-4)
  np.testing.assert_allclose(loss, -expected.mean(), rtol=1e-4)


def test_predictions_and_scores_agree():
  model = make_model(backbone=Mlp(()))
  batch = make_batch()
  params = make_params(model, batch)

  @jax.jit
  def predict(params, batch):
    of_other_key = model.predict_batch(params, batch, rng=jax.random.key(8))
    return *model.predict_batch_with_aux(params, batch), of_other_key

  top, aux, of_other_key = predict(params, batch)
  assert (top.shape, top.dtype) == ((8, 1), jnp.int32)
  assert (aux['log_prob'].shape, aux['top5'].shape) == ((8, 1), (8, 5))
  np.testing.assert_array_equal(top, np.asarray(aux['top5'])[:, :1])
  np.testing.assert_array_equal(top, of_other_key)

  score_batch = jax.jit(model.score_batch)

  def score(labels):
    return np.asarray(score_batch(params, {**batch, 'label': labels}))

  top5 = np.asarray(aux['top5'])
  by_rank = np.stack([score(top5[:, i : i + 1]) for i in range(5)], axis=1)  # [B, 5]
  assert (np.diff(by_rank) <= 0).all()
  np.testing.assert_allclose(by_rank[:, :1], aux['log_prob'], rtol=1e-4, atol=1e-6)
  every = np.stack([score(np.full((8, 1), k, np.int32)) for k in range(NUM_CLASSES)], axis=1)
  np.testing.assert_allclose(np.exp(every).sum(-1), 1.0, rtol=1e-5)


def test_fixed_draws_make_the_loss_a_function_of_the_parameters():
  """Those of other models follow the key: see `test_keys_decide_the_noise`."""
  model = make_model('het_xl', Mlp(()), fixed_draws=True)
  batch = make_batch()
  loss_fn = jax.jit(model.loss_fn)
  params = make_params(model, batch)
  losses = [loss_fn(params, batch, jax.random.key(step))[0] for step in range(2)]
  assert losses[0] == losses[1]


@pytest.mark.slow
def test_representations_and_intermediates():
  model = make_model(backbone=BACKBONE, eval_integrator=Location())
  batch = make_batch()
  params = make_params(model, batch)
  layers = ('pre_logits', 'block00')
  found = jax.jit(lambda p, b: model.representations(p, b, layers=layers))(params, batch)
  assert {name: x.shape for name, x in found.items()} == {
    'pre_logits': (8, 12),
    'block00': (8, 4, 16),
  }
  score = jax.jit(model.score_batch, static_argnames='return_intermediates')
  scores, intermediates = score(params, batch, return_intermediates=True)
  np.testing.assert_array_equal(scores, score(params, batch))
  (pre_logits,) = intermediates['pre_logits']
  np.testing.assert_allclose(pre_logits, found['pre_logits'], rtol=1e-6)
  with pytest.raises(ValueError, match='block99.* choose from patches, block00, .*pre_l'):
    jax.eval_shape(lambda: model.representations(params, batch, layers=('block99',)))


def test_validate_names_what_does_not_fit():
  make_model().validate(task())
  make_model(link='sigmoid').validate(task(multi_label=True))
  with pytest.raises(ValueError, match=r'HetXL.num_classes=10 must be .* of the task, 7.*largest'):
    make_model().validate(task(num_classes=7))
  with pytest.raises(ValueError, match=r'of the task, 2 \(NUM_CLASSES\)$'):
    make_model().validate(task(num_classes=2, class_names=('no', 'yes')))
  pairs = ClassificationModel(BACKBONE, ContrastiveDet(), None, SAMPLED, SAMPLED)
  with pytest.raises(ValueError, match='ClassificationModel.head=ContrastiveDet compares pairs'):
    pairs.validate(task())
  make_model().validate(task(multi_label=True))  # the loss is the mean over the labels


def test_parameters_are_counted_without_padding():
  def counts(class_multiple):
    model = make_model(HEADS['het_xl'].clone(class_multiple=class_multiple))
    shapes = jax.eval_shape(
      lambda: model.get_initial_variables(jax.random.key(0), {'image': (1, 8, 8, 1)})['params']
    )
    return model.count_params(shapes), sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))

  unpadded, num_unpadded = counts(class_multiple=1)
  padded, num_padded = counts(class_multiple=8)
  assert unpadded == padded
  assert unpadded.total == num_unpadded < num_padded
  assert unpadded.head - unpadded.extra == (12 + 1) * NUM_CLASSES


@pytest.mark.slow
def test_a_mesh_does_not_change_loss_gradients_or_predictions():
  params, batch, step, expected = unsharded_vit()
  cut = [(name, 'model') for name in ('vocab', 'mlp', 'joined_kv')]
  with on_mesh(make_mesh(2, 4), [('batch', 'data'), *cut, ('embed', None)]):
    actual = jax.jit(lambda params, batch: step(params, batch))(params, batch)
  assert_trees_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('head', ['det', 'het_xl', pytest.param('het_h', marks=pytest.mark.slow)])
def test_evaluation_of_a_million_classes_has_no_array_of_all(head):
  """Loss, top class, calibration and predictions of 256 examples. [B, K] would be 1 GB."""
  million = HEADS[head].clone(num_classes=10**6, class_multiple=128)
  model = make_model(million, Mlp(()), eval_integrator=Integrator(1000))
  shape = 256, 1, 1, 16
  batch = {'image': jnp.ones(shape), 'label': jnp.zeros((256, 1), jnp.int32)}
  init = functools.partial(model.get_initial_variables, input_shapes={'image': shape})
  params = jax.eval_shape(init, jax.random.key(0))['params']
  for function in (model.eval_fn, model.predict_batch_with_aux):
    compiled = jax.jit(function).lower(params, batch).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 256e6


@pytest.mark.slow
@pytest.mark.parametrize('link', ['softmax', 'sigmoid'])
def test_evaluation_in_tiles_has_the_same_metrics(link):
  head = HEADS['het_xl'].clone(link=link)
  batch = make_batch()
  found = []
  for max_bytes in (2**26, 100):
    model = make_model(head, Mlp(()), eval_integrator=Integrator(4, max_bytes=max_bytes))
    loss, metrics = jax.jit(model.eval_fn)(make_params(model, batch), batch)
    found.append({'mean': loss, **computed(metrics)})
  assert_trees_close(found[1], found[0], rtol=1e-5, atol=1e-6)
