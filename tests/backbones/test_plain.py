"""Flax modules that know nothing of this project as backbones."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gin
from het_plugin import models
from het_plugin.heads import HetXL, LearnedTemperature
from het_plugin.integrate import Integrator
from het_plugin.training import optimizers

IMAGES = jax.random.normal(jax.random.key(0), (4, 8, 8, 1))
BATCH = {'image': IMAGES, 'label': jnp.array([[0], [1], [2], [0]])}


@gin.configurable(module='test_plain')
class OwnNet(nn.Module):
  """What anybody would write."""

  width: int = 256

  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.Conv(self.width, (3, 3))(x))
    return nn.Dense(16)(x.mean((1, 2)))


class WithModes(nn.Module):
  @nn.compact
  def __call__(self, x, *, deterministic):
    x = x.reshape(len(x), -1)
    hidden = nn.Dropout(0.5, deterministic=deterministic)(nn.Dense(6)(x))
    return nn.Dense(5)(hidden), {'hidden': hidden}


class WithState(nn.Module):
  @nn.compact
  def __call__(self, x, train):
    return nn.BatchNorm(use_running_average=not train)(x).mean((1, 2))


class WithLosses(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.Dense(5)(x.mean((1, 2)))
    self.sow('losses', 'size', jnp.square(x).mean())
    return x


class Map(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Conv(3, (3, 3))(x)


def model(backbone):
  return models.ClassificationModel(
    backbone,
    HetXL(3, num_factors=2, temperature=LearnedTemperature()),
    optimizers.adamw(1e-3),
    Integrator(num_samples=2),
    Integrator(num_samples=2),
  )


def init_of(made):
  return functools.partial(made.get_initial_variables, input_shapes={'image': IMAGES.shape})


def shapes_of(made):
  return jax.eval_shape(init_of(made), jax.random.key(1))


def test_parameters_have_the_modules_own_names_and_axes():
  variables = shapes_of(model(OwnNet()))
  assert set(variables['params']['backbone']) == {'Conv_0', 'Dense_0'}
  axes = variables['params_axes']['backbone']
  assert axes['Conv_0']['kernel_axes'].names == (None, None, None, 'embed')  # 3 x 3 x 1 x 256
  assert axes['Dense_0']['kernel_axes'].names == ('embed', None)
  assert axes['Dense_0']['bias_axes'].names == (None,)


@pytest.mark.slow
def test_modes_and_representations_reach_the_module():
  made = model(WithModes())
  params = jax.jit(init_of(made))(jax.random.key(1))['params']
  represent = jax.jit(made.representations, static_argnums=2)
  found = represent(params, BATCH, ('hidden', 'pre_logits'))
  assert found['hidden'].shape == (4, 6) and found['pre_logits'].shape == (4, 5)
  step = jax.jit(made.loss_fn)
  losses = {float(step(params, BATCH, jax.random.key(i))[0]) for i in range(3)}
  assert len(losses) == 3  # dropout is on
  assert np.isfinite(step(params, BATCH, None)[0])  # and off without a key


@pytest.mark.parametrize(
  ('backbone', 'message'),
  [(WithState(), 'batch_stats'), (Map(), r'Map .*\[B, D\].*\(4, 8, 8, 3\)')],
)
def test_what_does_not_fit_is_one_sentence(backbone, message):
  with pytest.raises(ValueError, match=message):
    shapes_of(model(backbone))


def test_what_a_module_sows_as_losses_is_added_to_the_loss_in_training():
  made = model(WithLosses())
  params = shapes_of(made)['params']
  _, metrics = jax.eval_shape(made.loss_fn, params, BATCH, jax.random.key(2))
  assert 'auxiliary_loss' in metrics
  assert 'auxiliary_loss' not in jax.eval_shape(made.eval_fn, params, BATCH)[1]


@pytest.mark.slow
def test_it_trains_bound_by_one_line_of_gin(run_main, tmp_path):
  from het_plugin.commands import train

  run = tmp_path / 'run'
  run_main(
    train,
    '--gin_file=het_plugin/gin/runs/digits_smoke.gin',
    '--gin_file=het_plugin/gin/heads/het_xl.gin',
    '--gin_file=het_plugin/gin/partitioning/fsdp.gin',
    '--gin.BACKBONE=@OwnNet()',
    '--gin.TRAIN_STEPS=2',
    '--gin.WARMUP_STEPS=0',
    '--gin.train.train_eval_dataset_cfg=None',
    '--gin.train/Integrator.num_samples=2',
    f"--gin.MODEL_DIR='{run}'",
  )
  assert (run / 'checkpoint_2').is_dir()
