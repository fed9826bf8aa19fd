"""What t5x (revision cc342d4) calls of a model, called here as t5x calls it, so that a change which
it would not survive fails where there is no t5x. tests/hosts/t5x has the real thing.
"""

import dataclasses
import inspect
import re

import clu.metrics
import clu.values
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util
from flax.linen import partitioning

from het_plugin.backbones import Mlp, TextTransformer, ViT
from het_plugin.heads import ContrastiveHetXL, HetXL, LearnedTemperature, LogitScale
from het_plugin.integrate import Integrator
from het_plugin.models import ClassificationModel, ContrastiveModel
from het_plugin.training import optimizers
from tests.models.words import MeanOfWords

B = 8
VIT = ViT(patch_size=4, width=16, depth=1, mlp_dim=16, num_heads=2, pooling='gap')
HEAD = HetXL(num_classes=10, num_factors=2, temperature=LearnedTemperature())


def classification(backbone=VIT):
  integrator = Integrator(num_samples=2)
  optimizer = optimizers.adamw(1e-3, weight_decay=0.1, clip_norm=1.0)
  return ClassificationModel(
    backbone, HEAD, optimizer, integrator, integrator, loss_normalizing_factor=B
  )


def contrastive(backbone=VIT, text=None):
  integrator = Integrator(num_samples=2)
  head = ContrastiveHetXL(num_factors=2, temperature=LogitScale())
  text = text or TextTransformer(vocab_size=20, width=16, depth=1, mlp_dim=16, num_heads=2)
  return ContrastiveModel(backbone, text, head, optimizers.adamw(1e-3), integrator, integrator)


MODELS = {'het_xl': classification, 'lit': contrastive}
# With towers that compile in no time, for what only the head and the loss do.
SMALL = {
  'het_xl': lambda: classification(Mlp((4,))),
  'lit': lambda: contrastive(Mlp((4,)), MeanOfWords()),
}


def batch_of(model):
  rng = np.random.default_rng(0)
  batch = {
    'image': rng.standard_normal((B, 8, 8, 1), np.float32),
    'index': np.arange(B, dtype=np.int32),
    'mask': np.ones(B, np.float32),
  }
  if isinstance(model, ContrastiveModel):
    return {**batch, 'text': rng.integers(1, 20, (B, 6), np.int32)}
  return {**batch, 'label': rng.integers(0, 10, (B, 1), np.int32)}


@pytest.fixture(params=MODELS)
def model(request):
  return MODELS[request.param]()


@pytest.fixture(params=SMALL)
def small(request):
  return SMALL[request.param]()


@pytest.fixture
def batch(model):
  return batch_of(model)


def initial(model, batch):
  """As `utils.TrainStateInitializer` does."""
  shapes = {name: x.shape for name, x in batch.items()}
  types = {name: x.dtype for name, x in batch.items()}

  @jax.jit
  def init(rng):
    return model.get_initial_variables(rng=rng, input_shapes=shapes, input_types=types)

  return flax.core.freeze(init(jax.random.PRNGKey(0)))


def test_the_names_and_the_order_of_arguments(model):
  arguments = {
    'loss_fn': ['params', 'batch', 'dropout_rng'],
    'eval_fn': ['params', 'batch'],
    'predict_batch': ['params', 'batch', 'rng'],
    'predict_batch_with_aux': ['params', 'batch', 'rng'],
    'score_batch': ['params', 'batch', 'return_intermediates'],
    'get_initial_variables': ['rng', 'input_shapes', 'input_types'],
  }
  for name, wanted in arguments.items():
    signature = inspect.signature(getattr(model, name)).parameters
    assert list(signature)[: len(wanted)] == wanted, name
    others = list(signature.values())[len(wanted) :]
    assert all(p.default is not p.empty for p in others), name
  # `utils.get_infer_fn` asks for the parameter rng; mutables would need flax_mutables.
  assert 'rng' not in inspect.signature(model.score_batch).parameters
  assert model.get_initial_variables.__self__ is model
  assert isinstance(model.optimizer_def.optax_optimizer, optax.GradientTransformation)


@pytest.mark.slow
def test_the_feature_converter_is_made_as_t5x_makes_it(model):
  converter = model.FEATURE_CONVERTER_CLS
  made = converter(pack=False, use_custom_packing_ops=False)
  assert not converter(pack=False).pack and not made.pack  # of training; of evaluation
  assert {'image', 'index', 'mask'} < set(made.MODEL_FEATURES)
  with pytest.raises(ValueError, match='images cannot be packed'):
    converter(pack=True, use_custom_packing_ops=False)


def test_every_parameter_has_axes_and_nothing_is_mutable(model, batch):
  variables = jax.eval_shape(lambda: initial(model, batch))
  assert set(variables) == {'params', 'params_axes'}
  names = partitioning.get_axis_names(variables['params_axes'])
  names = traverse_util.flatten_dict(flax.core.unfreeze(names), sep='/')
  for name, x in traverse_util.flatten_dict(
    flax.core.unfreeze(variables['params']), sep='/'
  ).items():
    assert len(names[name]) == x.ndim, name


def test_t5x_shards_the_parameters_that_are_as_long_as_k_over_any_devices(model, batch):
  if isinstance(model, ContrastiveModel):
    pytest.skip('no parameter is as long as K')
  variables = jax.eval_shape(lambda: initial(model, batch))
  names = partitioning.get_axis_names(variables['params_axes'])['head']
  shapes = variables['params']['head']
  assert tuple(names['kernel']) == ('embed', 'vocab') and shapes['kernel'].shape == (16, 128)
  for path, axes in traverse_util.flatten_dict(flax.core.unfreeze(names)).items():
    shape = traverse_util.flatten_dict(flax.core.unfreeze(shapes))[path].shape
    for name, size in zip(axes, shape, strict=True):
      assert name != 'vocab' or all(size % devices == 0 for devices in (1, 2, 4, 8, 16, 32, 64))


def value_and_grad(model, params, batch, key):
  """As `trainer.accumulate_grads_microbatched` calls it."""
  return jax.jit(jax.value_and_grad(model.loss_fn, has_aux=True))(params, batch, key)


def is_metric(x):
  return isinstance(x, clu.metrics.Metric)


@pytest.mark.slow
def test_a_step_takes_t5xs_keys_and_gives_metrics_that_it_can_merge_and_write(small):
  model = small
  batch = batch_of(small)
  params = initial(model, batch)['params']
  key = jax.random.fold_in(jax.random.PRNGKey(1), jnp.int32(3))  # `_get_step_rng`: a raw key
  (loss, metrics), gradients = value_and_grad(model, params, batch, key)
  assert loss.shape == () and loss.dtype == jnp.float32 and np.isfinite(loss)
  assert jax.tree.structure(gradients) == jax.tree.structure(params)
  typed = jax.random.fold_in(jax.random.key(1), 3)
  (again, _), _ = value_and_grad(model, params, batch, typed)
  assert float(again) == float(loss)  # our trainer's keys are of the same bits

  assert {'loss'} <= set(metrics) and all(is_metric(m) for m in metrics.values())
  merged = jax.tree.map(lambda a, b: a.merge(b), metrics, metrics, is_leaf=is_metric)
  for metric in jax.device_get(merged).values():
    assert isinstance(metric.compute_value(), clu.values.Scalar)
  # `metrics.shape_obj_to_defined_obj`, with which the loop over microbatches begins
  for metric in jax.eval_shape(model.loss_fn, params, batch, key)[1].values():
    zeros = {f.name: jnp.zeros_like(getattr(metric, f.name)) for f in dataclasses.fields(metric)}
    assert isinstance(type(metric)(**zeros), type(metric))


@pytest.mark.slow
def test_predictions_and_scores_are_as_seqios_evaluator_takes_them():
  """Of classification, which t5x.eval and t5x.infer take."""
  model = SMALL['het_xl']()
  batch = batch_of(model)
  params = initial(model, batch)['params']
  key = jax.random.PRNGKey(0)
  predict = jax.jit(model.predict_batch)
  score = jax.jit(model.score_batch)
  predictions = predict(params, batch, key)
  scores = score(params, batch)
  with_aux, aux = jax.jit(model.predict_batch_with_aux)(params, batch, key)
  np.testing.assert_array_equal(predictions, with_aux)
  assert predictions.shape == (B, 1) and predictions.dtype == jnp.int32
  assert scores.shape == (B,) and {'top5', 'log_prob'} == set(aux)
  assert all(len(x) == B for x in aux.values())
  # It repeats rows to fill the last batch, and drops them by number afterwards.
  padded = {name: np.concatenate([x[:3], x[:1], x[:1]]) for name, x in batch.items()}
  np.testing.assert_array_equal(predict(params, padded, key)[:3], predictions[:3])
  np.testing.assert_allclose(score(params, padded)[:3], scores[:3], rtol=1e-5)


def test_the_states_of_our_optimizer_are_of_types_that_t5x_can_place():
  """t5x has a rule a type (`OptaxStatePartitionRules`) and none for others."""
  known = {
    'EmptyState',
    'MaskedState',
    'ScaleByAdamState',
    'ScaleByScheduleState',
    'PartitionState',
    'MultiTransformState',
  }
  params = {'backbone': {'kernel': jnp.ones(2)}, 'head': {'kernel': jnp.ones(2)}}
  for frozen in (None, '^backbone/'):
    optimizer = optimizers.adamw(
      optimizers.warmup_schedule(1e-3, 10, 2),
      weight_decay=0.1,
      clip_norm=1.0,
      frozen_params=frozen,
    )
    text = repr(jax.eval_shape(optimizer.optax_optimizer.init, params))
    assert set(re.findall(r'(\w+State)\(', text)) <= known
