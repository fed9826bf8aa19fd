"""Derivatives of the held-out loss with respect to t, the trainer that follows them, and batches
with rows of a second data set.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import partitioning as flax_partitioning

from het_plugin import data
from het_plugin.heads import LearnedTemperature
from het_plugin.training import metrics as metrics_lib
from het_plugin.training import optimizers, partitioning
from studies.temperature import held_out as held_out_lib
from studies.temperature.held_out import HeldOutDatasetConfig, get_dataset_with_held_out
from tests.training import toy

BATCH = 64


def tau_of(t):
  return 4.95 / (1 + np.exp(-t)) + 0.05


def mean_nll(x, y, theta, t):
  """Mean -log softmax(tanh(x A) W / tau)[y] and theta's gradient, in NumPy's float64."""
  hidden = np.tanh(x @ theta['A'])
  logits = hidden @ theta['W'] / tau_of(t)
  p = np.exp(logits - logits.max(-1, keepdims=True))
  p /= p.sum(-1, keepdims=True)
  nll = -np.log(p[np.arange(len(y)), y]).mean()
  residual = (p - np.eye(p.shape[1])[y]) / len(y) / tau_of(t)
  back = (residual @ theta['W'].T) * (1 - hidden**2)
  return nll, {'A': x.T @ back, 'W': hidden.T @ residual}


def test_the_hypergradient_is_that_of_finite_differences_in_float64(step_size=1.0):
  rng = np.random.default_rng(0)
  theta = {'A': rng.normal(size=(5, 7)), 'W': rng.normal(size=(7, 4))}
  rows, held_out = ((rng.normal(size=(9, 5)), rng.integers(4, size=9)) for _ in range(2))
  t = 0.3

  def after_a_step(t):
    _, grads = mean_nll(*rows, theta, t)
    return mean_nll(*held_out, {k: theta[k] - step_size * grads[k] for k in theta}, t)[0]

  def loss(x, y, theta, t):
    tau = 4.95 * jax.nn.sigmoid(t) + 0.05
    log_p = jax.nn.log_softmax(jnp.tanh(x @ theta['A']) @ theta['W'] / tau)
    return -log_p[jnp.arange(len(y)), y].mean(), None

  losses = functools.partial(loss, *rows), functools.partial(loss, *held_out)
  eps = 1e-5
  with jax.enable_x64(True):
    t64 = jnp.asarray(t, jnp.float64)
    grads, t_grad, _, _ = held_out_lib.gradients(*losses, theta, t64, step_size)
    _, simple, _, _ = held_out_lib.gradients(*losses, theta, t64, None)
    assert t_grad.dtype == jnp.float64
  want = (after_a_step(t + eps) - after_a_step(t - eps)) / (2 * eps)
  np.testing.assert_allclose(t_grad, want, rtol=1e-7)
  direct = mean_nll(*held_out, theta, t + eps)[0] - mean_nll(*held_out, theta, t - eps)[0]
  np.testing.assert_allclose(simple, direct / (2 * eps), rtol=1e-7)
  assert abs(t_grad - simple) > 1e-4  # the step matters
  jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w), grads, mean_nll(*rows, theta, t)[1])


class Module(toy.Mlp):
  """The toy model; its temperature is where the heads have it."""

  @nn.compact
  def __call__(self, image, noise=None):
    x = jnp.tanh(self._dense(image.reshape(image.shape[0], -1), 'hidden', 32, (None, 'embed')))
    x = flax_partitioning.with_sharding_constraint(x, ('batch', 'embed'))
    x = x if noise is None else x + noise
    return self._dense(x, 'head', 16, ('embed', 'vocab')) / LearnedTemperature(name='temperature')()


def toy_model():
  base = optimizers.adamw(1e-2, weight_decay=1e-2, weight_decay_params='_kernel$', clip_norm=1.0)
  return toy.ToyModel(Module(), held_out_lib.temperature_optimizer(base, 0.01))


@functools.cache
def initial(num_partitions):
  """(partitioner, PartitionSpecs, initial state on the host) of a mesh."""
  partitioner = partitioning.PjitPartitioner(num_partitions=num_partitions)
  axes, state = toy.initial_state(toy_model(), partitioner, jax.random.key(1))
  return partitioner, axes, jax.device_get(state)


@functools.cache
def make_trainer(num_partitions, estimator, **settings):
  """A trainer, whose program all trainings with it share."""
  partitioner, axes, _ = initial(num_partitions)
  settings = {'held_out_every': 4} | settings
  rng = jax.random.key(2)
  trainer = held_out_lib.HeldOutTemperatureTrainer(
    toy_model(), partitioner, axes, rng, estimator=estimator, **settings
  )
  trainer.check_batch_size(BATCH)
  return trainer


def trained(num_partitions, estimator, steps=3, held_out_real=True, **settings):
  """State and metrics after some steps."""
  partitioner, axes, state = initial(num_partitions)
  state = jax.device_put(state, partitioner.shardings(axes))
  trainer = make_trainer(num_partitions, estimator, **settings)
  for step in range(steps):
    index = step * BATCH + np.arange(BATCH)
    batch = toy.make_batch(index, np.ones(BATCH, bool))
    if not held_out_real:
      batch['image'][3::4] = np.nan
    state, metrics = trainer.train_step(state, partitioner.shard_batch(batch, BATCH))
    jax.block_until_ready(metrics)
  return state, steps and metrics_lib.compute_metrics(jax.device_get(metrics))


def t_of(state):
  return float(state.params['temperature']['t'])


@pytest.mark.slow
def test_meshes_agree(estimator='luketina'):
  (state, metrics), (other, other_metrics) = (trained(n, estimator) for n in (1, 4))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), state.params, other.params)
  for name, value in metrics.items():
    np.testing.assert_allclose(value, other_metrics[name], atol=1e-4, err_msg=name)
  assert metrics['held_out_loss'] != metrics['loss']
  assert t_of(state) != 0.0


@pytest.mark.slow
def test_only_the_temperature_sees_the_held_out_rows():
  """One step takes theta to the same place by both estimators, and t by its rate."""
  luketina = trained(1, 'luketina', 1)[0]
  simple = trained(1, 'simple', 1)[0]
  assert abs(t_of(luketina)) == pytest.approx(0.01, rel=1e-3)
  a = dict(luketina.params)
  b = dict(simple.params)
  del a['temperature'], b['temperature']
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), a, b)


@pytest.mark.slow
def test_a_step_whose_held_out_rows_are_not_finite_changes_nothing():
  state, _ = trained(1, 'luketina', 2, held_out_real=False)
  assert t_of(state) == 0.0 and int(state.step) == 1  # and no step after it
  assert all(bool(jnp.isfinite(p).all()) for p in jax.tree.leaves(state.params))


def test_settings_are_checked():
  with pytest.raises(ValueError, match='HeldOutTemperatureTrainer.num_microbatches=2 '):
    trained(1, 'simple', steps=0, num_microbatches=2)
  optimizer = held_out_lib.temperature_optimizer(optimizers.adamw(1e-3))
  with pytest.raises(ValueError, match='0 learned temperatures'):
    optimizer.optax_optimizer.init({'kernel': jnp.zeros(2)})


def config(train_size=6, held_out_size=2, **held_out):
  def one(split, size, **settings):
    settings = {'augment': True, 'task_feature_lengths': {'image': 8, 'label': 1}} | settings
    settings = {'mixture_or_task_name': 'digits'} | settings
    return data.DatasetConfig(split=split, batch_size=size, **settings)

  return HeldOutDatasetConfig(
    one('train[:100]', train_size), one('train[100:120]', held_out_size, **held_out)
  )


def test_every_nth_row_is_of_the_second_data_set():
  cfg = config()
  assert (cfg.batch_size, cfg.held_out_every) == (8, 4)
  got = get_dataset_with_held_out(cfg)
  part = get_dataset_with_held_out(cfg, [4, 5, 6, 7])  # of another process
  assert got.element_spec['image'].shape == (8, 8, 8, 1) and got.num_examples is None
  plain = get_dataset_with_held_out(cfg.train)
  held_out = data.get_dataset(cfg.held_out)
  for _ in range(3):
    state = got.get_state()
    batch = next(got)
    a = next(plain)
    b = next(held_out)
    own = next(part)
    for name in batch:
      np.testing.assert_array_equal(np.delete(batch[name], [3, 7], 0), a[name])
      np.testing.assert_array_equal(batch[name][[3, 7]], b[name])
      np.testing.assert_array_equal(batch[name][4:], own[name])
  again = get_dataset_with_held_out(cfg)
  again.set_state(state)
  np.testing.assert_array_equal(next(again)['image'], batch['image'])


def test_two_data_sets_must_fit():
  with pytest.raises(ValueError, match='held_out.batch_size=4 .* 6'):
    config(held_out_size=4)
  with pytest.raises(ValueError, match='held_out.mixture_or_task_name=glyphs_core .* digits'):
    config(mixture_or_task_name='glyphs_core')
  with pytest.raises(ValueError, match='HeldOutDatasetConfig.held_out .* 20 '):
    get_dataset_with_held_out(config(augment=False))
  with pytest.raises(ValueError, match=r"held_out has rows of .*'label': \(3,\)"):
    get_dataset_with_held_out(config(task_feature_lengths={'image': 8, 'label': 3}))
