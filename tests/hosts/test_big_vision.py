"""Our heads inside big_vision: examples/big_vision_config.py under its own train.py, and the model
that the config names.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from het_plugin.heads import Det, PredictiveLogits
from het_plugin.hosts import big_vision as host
from het_plugin.integrate import Integrator

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ('big_vision', 'overrides', 'ml_collections')
needs_big_vision = pytest.mark.skipif(
  any(importlib.util.find_spec(name) is None for name in NEEDED),
  reason='big_vision is not importable: docs/big_vision.md says how',
)

K = 4
SIZE = 8
BATCH = 32
IMAGES = jax.random.normal(jax.random.key(0), (BATCH, SIZE, SIZE, 3))
VIT = {'base': 'vit', 'variant': 'mu/4'}
HEADS = {
  'det': set(),
  'het': {'covariance', 'temperature'},
  'het_h': {'covariance', 'temperature'},
  'het_xl': {'covariance', 'temperature'},
}
BASES = {
  'vit': {'variant': 'mu/4', 'rep_size': True, 'scan': True, 'dropout': 0.1, 'pool_type': 'map'},
  'bit': {'depth': [1, 1], 'width': 0.5},
  'bit_paper': {'depth': [1, 1]},
  'mlp_mixer': {'variant': 'S/4', 'num_blocks': 1, 'hidden_dim': 16},
}


def init(model):
  return model.init(jax.random.PRNGKey(0), IMAGES)['params']


def flat(params):
  return traverse_util.flatten_dict(params, sep='/')


class Backbone(nn.Module):
  """What a model of big_vision is to us."""

  name_of_output: str = 'pre_logits'

  @nn.compact
  def __call__(self, image, *, train=False):
    x = nn.Dense(6, name='embedding')(image.reshape(len(image), -1))
    return x, {self.name_of_output: x, 'trained': jnp.asarray(train)}


def test_the_parameters_of_model_and_head_are_side_by_side():
  model = host.HeadModel(Backbone(), PredictiveLogits(Det(K, class_multiple=1)))
  params = init(model)
  assert jax.tree.map(jnp.shape, params) == {
    'embedding': {'kernel': (SIZE * SIZE * 3, 6), 'bias': (6,)},
    'head': {'kernel': (6, K), 'bias': (K,)},
  }
  logits, out = model.apply({'params': params}, IMAGES, train=True)
  location = out['pre_logits'] @ params['head']['kernel'] + params['head']['bias']
  np.testing.assert_allclose(logits, jax.nn.log_softmax(location), atol=1e-6)
  assert out['logits'] is logits and out['trained']


@pytest.fixture
def utils(monkeypatch):
  """An empty module in the place of big_vision.utils, to which a model gives its loss."""
  module = types.ModuleType('big_vision.utils')
  monkeypatch.setitem(sys.modules, module.__name__, module)
  monkeypatch.setattr(host, '_backbone', lambda *_: Backbone())
  return module


@pytest.mark.slow
def test_the_fitted_loss_is_that_of_the_integrator(utils):
  model = host.Model(K, base='vit', head='het_xl', num_factors=2, loss_samples=2)
  params = {'params': init(model)}
  rngs = {'dropout': jax.random.PRNGKey(1)}
  hot = jax.nn.one_hot(jnp.arange(BATCH) % K, K)

  @jax.jit
  def found(params, labels):
    logits, _ = model.apply(params, IMAGES, train=True, rngs=rngs)
    plain, _ = model.apply(params, IMAGES)
    nll = Integrator(2).nll(logits.gaussian, labels.argmax(-1), logits.keys)
    of_model = utils.het_nll(logits=logits, labels=labels, reduction=False)
    in_evaluation = utils.het_nll(logits=plain, labels=labels)
    return nll, of_model, in_evaluation, (-plain * labels).sum(-1).mean()

  nll, of_model, in_evaluation, expected = found(params, hot)
  np.testing.assert_array_equal(of_model, nll)
  assert len(np.unique(nll)) > K  # each image has draws of its own
  np.testing.assert_allclose(in_evaluation, expected, rtol=1e-5)
  mixed = found(params, hot.at[0].set(0.25))[1]
  assert np.isnan(mixed[0]) and np.isfinite(mixed[1:]).all()


def test_a_complete_run_ends_without_an_error():
  """What the last statement of train.py does."""
  sharding = jax.sharding.PositionalSharding(jax.devices())
  assert jax.device_put(np.ones(jax.device_count()), sharding).sum() == jax.device_count()


def test_a_model_without_pre_logits_is_refused():
  model = host.HeadModel(Backbone('features'), PredictiveLogits(Det(K)))
  with pytest.raises(ValueError, match=r"config\.model\.base: .* has no out\['pre_logits'\]"):
    init(model)


@pytest.mark.parametrize(
  'num_classes, settings, message',
  [
    (None, {'head': 'det'}, r'config\.num_classes=None must be the number of classes'),
    (K, {'head': 'hetxl'}, r"config\.model\.head='hetxl' .* one of det, het, het_h, het_xl"),
    (K, {'head': 'het', 'temperature': 'learned'}, "temperature='learned' must be a number, or"),
    (K, {'head': 'het', 'temperature': {'tau': 1}}, 'some of tau_min, tau_max, initial_tau'),
    (K, {'head': 'het', 'loss_samples': 4, 'link': 'sigmoid'}, "loss_samples=4 needs link='softm"),
    (K, {'head': 'het', 'num_samples': 0}, r'Integrator\.num_samples=0 must be at least 1'),
  ],
)
def test_bad_settings_of_a_head(num_classes, settings, message):
  """They are refused before big_vision is imported."""
  with pytest.raises(ValueError, match=message):
    host.Model(num_classes, base='vit', **settings)


@needs_big_vision
@pytest.mark.parametrize(
  'settings, message',
  [
    ({'base': 'resnet'}, "base='resnet' is unknown: .*bit, bit_paper, mlp_mixer, vit$"),
    ({'base': 'proj.none.vit'}, "base='proj.none.vit' is unknown"),
    ({'base': 'common'}, "base='common' is unknown"),  # has no Model
    ({'base': 'het'}, "base='het' is unknown"),  # is this one
    ({'num_factor': 3}, r"refuses \{'num_factor': 3\} .* head='het_xl' takes .* num_factors, "),
    ({'variant': 'Q/16'}, r"vit refuses \{'variant': 'Q/16'\} with KeyError\('Q'\)"),
    ({'base': 'mlp_mixer', 'variant': 'S'}, r'mlp_mixer refuses .* with ValueError'),
  ],
)
def test_bad_settings_of_the_base(settings, message):
  with pytest.raises(ValueError, match=message):
    host.Model(K, **{'base': 'vit', 'head': 'het_xl'} | settings)


@needs_big_vision
def test_config_model_name_finds_the_model():
  assert importlib.import_module('big_vision.models.het') is host


@needs_big_vision
@pytest.mark.parametrize('head', HEADS)
def test_a_head_adds_its_parameters_to_those_of_big_vision(head):
  from big_vision.models import vit

  theirs = flat(init(vit.Model(K, variant='mu/4')))
  ours = flat(init(host.Model(K, head=head, **VIT)))
  assert {name: x.shape for name, x in theirs.items()} == {
    name: ours[name].shape for name in theirs
  }
  added = set(ours) - set(theirs)
  assert {name.split('/')[1] for name in added} == HEADS[head]
  assert not [name for name in added if re.fullmatch('.*/kernel', name)]  # what its wd decays


@needs_big_vision
def test_det_is_the_last_layer_of_big_vision():
  from big_vision.models import vit

  theirs = vit.Model(K, variant='mu/4', head_zeroinit=False)
  ours = host.Model(K, head='det', **VIT)
  params = {'params': init(theirs)}
  expected, _ = theirs.apply(params, IMAGES)
  np.testing.assert_allclose(ours.apply(params, IMAGES)[0], jax.nn.log_softmax(expected), atol=1e-5)


@needs_big_vision
@pytest.mark.parametrize('base', BASES)
@pytest.mark.parametrize('link', ['softmax', 'sigmoid'])
def test_every_image_model_takes_a_head(base, link):
  """In training the noise of a softmax comes from 'dropout'; in evaluation it is fixed."""
  settings = BASES[base] | {'link': link}
  images = IMAGES[:2]
  model = host.Model(K, base=base, head='het_xl', num_factors=2, num_samples=4, **settings)
  params = model.init(jax.random.PRNGKey(0), images)

  def apply(seed=None):
    rngs = {} if seed is None else {'rngs': {'dropout': jax.random.PRNGKey(seed)}}
    logits, out = model.apply({'params': params['params']}, images, train=seed is not None, **rngs)
    assert logits.shape == (2, K) and out['pre_logits'].ndim == 2
    return logits

  np.testing.assert_array_equal(apply(), apply())
  is_noisy = link == 'softmax' or base == 'vit'  # whose dropout is on
  assert bool(jnp.any(apply(1) != apply(2))) == is_noisy
  if link == 'softmax':
    np.testing.assert_allclose(jax.nn.logsumexp(apply(), axis=-1), 0.0, atol=1e-5)


@pytest.fixture
def saved_det(tmp_path):
  """A checkpoint of big_vision's own ViT, as those that it publishes, and its parameters."""
  from big_vision.models import vit

  params = flat(init(vit.Model(K, variant='mu/4', head_zeroinit=False)))
  np.savez(tmp_path / 'det.npz', **params)
  return str(tmp_path / 'det.npz'), params


@needs_big_vision
def test_a_deterministic_checkpoint_starts_backbone_and_location(saved_det):
  file, theirs = saved_det
  cfg = VIT | {'head': 'het_xl', 'num_factors': 2}
  initial = flat(init(host.Model(K, **cfg)))
  loaded = flat(host.load(traverse_util.unflatten_dict(initial, sep='/'), file, cfg))
  assert set(loaded) == set(initial)
  for name, x in loaded.items():
    np.testing.assert_array_equal(x, theirs.get(name, initial[name]), err_msg=name)


@needs_big_vision
def test_a_checkpoint_of_a_noisy_head_is_loaded_with_its_noise(tmp_path):
  cfg = VIT | {'head': 'het_xl', 'num_factors': 2}
  params = init(host.Model(K, **cfg))
  saved = jax.tree.map(lambda x: x + 1, params)
  file = str(tmp_path / 'het_xl.npz')
  np.savez(file, **flat(saved))
  jax.tree.map(np.testing.assert_array_equal, host.load(params, file, cfg), saved)
  jax.tree.map(np.testing.assert_array_equal, host.load(None, file, cfg), saved)
  kept = flat(host.load(params, file, cfg, 'head/covariance/.*'))
  np.testing.assert_array_equal(kept['head/covariance/J'], params['head']['covariance']['J'])
  with pytest.raises(ValueError, match=r'\+ head/covariance/J'):  # DET has no use for it
    host.load(init(host.Model(K, head='det', **VIT)), file, VIT | {'head': 'det'})


@needs_big_vision
def test_a_checkpoint_of_another_number_of_classes_is_refused(saved_det):
  file, _ = saved_det
  cfg = VIT | {'head': 'het_xl', 'num_factors': 2}
  params = init(host.Model(K + 1, **cfg))
  message = r"head/bias has the shape \(4,\), the model \(5,\); .*dont_load=\['head/bias'\]"
  with pytest.raises(ValueError, match=message):
    host.load(params, file, cfg)
  loaded = host.load(params, file, cfg, ['head/kernel', 'head/bias'])
  np.testing.assert_array_equal(loaded['head']['kernel'], params['head']['kernel'])


def write_patterns(tfds_files):
  """A data set of noisy copies of K random images. Returns its images [64, ...] and labels of
  'test'.
  """
  import tensorflow_datasets as tfds

  rng = np.random.default_rng(0)
  patterns = rng.integers(0, 256, (K, SIZE, SIZE, 3))
  labels = rng.integers(0, K, 160 + 64)
  noise = rng.normal(0, 40, (len(labels), *patterns.shape[1:]))
  images = (patterns[labels] + noise).clip(0, 255).astype(np.uint8)
  features = {
    'image': tfds.features.Image(shape=images.shape[1:]),
    'label': tfds.features.ClassLabel(num_classes=K),
  }
  examples = [{'image': x, 'label': int(y)} for x, y in zip(images, labels, strict=True)]
  splits = {'train': examples[:160], 'test': examples[160:]}
  tfds_files.write('patterns', features, splits, file_format='tfrecord')
  return images[160:], labels[160:]


@pytest.fixture(scope='module')
def patterns(tfds_files):
  return write_patterns(tfds_files)


@pytest.fixture
def train(tfds_files, patterns, tmp_path):
  """Runs big_vision's train.py with the example config in tmp_path/NAME. Returns what it measured:
  {step: {name: value}}, 5 steps an epoch.
  """
  del patterns  # are written
  config = 'examples/big_vision_config.py:dataset=patterns,num_classes=4,size=8'
  environment = os.environ | {
    'PYTHONPATH': os.pathsep.join([str(ROOT), *sys.path]),
    'TFDS_DATA_DIR': str(tfds_files.root),
  }

  def run(name, arguments, epochs=4, mixup=0.0):
    command = [sys.executable, '-m', 'big_vision.train', f'--config={config},{arguments}']
    command += [f'--workdir={tmp_path / name}', f'--config.input.batch_size={BATCH}']
    command += ['--config.lr=0.01', f'--config.total_epochs={epochs}']
    command += [f'--config.mixup.p={mixup}']
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = (tmp_path / name / 'big_vision_metrics.txt').read_text().splitlines()
    records = [json.loads(line) for line in lines]
    # Its writer, in a thread, may be late and take the number of the next step for 'step'.
    return {int(x['examples_seen']) // BATCH: x for x in records if 'examples_seen' in x}

  return run


@needs_big_vision
@pytest.mark.slow
def test_train_py_trains_evaluates_and_resumes(train, patterns, tmp_path):
  """DET, then HET-XL from the checkpoint of DET, then more epochs of HET-XL."""
  det = train('det', 'head=det')
  assert det[20]['test/prec@1'] > 0.9 and det[20]['a/patterns_10shot-seed-0'] > 0.9

  warm = f'head=het_xl,init={tmp_path}/det/checkpoint.bv'
  het_xl = train('het_xl', warm)
  # The noise starts small and tau at 1, so its first loss is like the last one of DET.
  assert het_xl[1]['training_loss'] < 0.1 < 1 < det[1]['training_loss']
  assert het_xl[20]['test/prec@1'] > 0.9

  # What it saved and what its evaluator measured belong together.
  cfg = VIT | {'head': 'het_xl', 'num_factors': 5}
  params = host.load(None, f'{tmp_path}/het_xl/checkpoint.bv', cfg)
  images, labels = patterns
  logits, _ = host.Model(K, **cfg).apply({'params': params}, images / 127.5 - 1)
  loss = -np.take_along_axis(np.asarray(logits), labels[:, None], 1).mean()
  np.testing.assert_allclose(het_xl[20]['test/loss'], loss, rtol=0.01)

  resumed = train('het_xl', warm, epochs=6)
  assert set(resumed) - set(het_xl) <= set(range(21, 31)) and 30 in resumed
  assert resumed[21]['training_loss'] < 0.1 and resumed[30]['test/prec@1'] > 0.9


@needs_big_vision
@pytest.mark.slow
def test_train_py_trains_with_the_fitted_loss(train):
  measured = train('fitted', 'head=het_xl,loss=het_nll')
  assert measured[20]['test/loss'] < 0.5 * measured[4]['test/loss']
  assert measured[20]['test/prec@1'] > 0.9


@needs_big_vision
@pytest.mark.slow
def test_train_py_trains_multi_label_losses_with_mixup(train):
  measured = train('sigmoid', 'head=het_xl,loss=sigmoid_xent', mixup=0.2)
  assert measured[20]['test/loss'] < 0.5 * measured[4]['test/loss']
  assert measured[20]['test/prec@1'] > 0.9 and measured[20]['a/patterns_10shot-seed-0'] > 0.9
