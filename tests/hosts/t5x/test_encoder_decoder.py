"""HET-XL in the place of the last layer of t5x's minimal T5."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from flax import traverse_util

from het_plugin.heads import Det, HetXL, LearnedTemperature
from het_plugin.integrate import Integrator, example_keys, samplers

pytest.importorskip('t5x.train', reason='t5x is not importable: docs/t5x.md says how')
pytestmark = [pytest.mark.t5x, pytest.mark.slow]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
VOCABULARY_SIZE = 260  # padded to 384, which 8 devices divide
FACTOR = 32.0


@pytest.fixture(scope='module')
def network():
  from t5x.examples.t5 import network

  return network


def config(network, **kwargs):
  sizes = {'vocab_size': VOCABULARY_SIZE, 'emb_dim': 16, 'num_heads': 2, 'head_dim': 8}
  sizes |= {'num_encoder_layers': 1, 'num_decoder_layers': 1, 'mlp_dim': 32, 'dtype': 'float32'}
  return network.T5Config(**sizes | {'dropout_rate': 0.0} | kwargs)


def make_model(network, head, train_samples=8, **kwargs):
  from t5x import adafactor, decoding

  from het_plugin.hosts.t5x import encoder_decoder
  from tests.hosts.t5x.text_task import VOCABULARY

  module = encoder_decoder.Transformer(
    config(network), head=head, integrator=Integrator(num_samples=16, sampler='iid')
  )
  return encoder_decoder.EncoderDecoderModel(
    module,
    VOCABULARY,
    VOCABULARY,
    adafactor.Adafactor(1e-3),
    train_integrator=Integrator(num_samples=train_samples, sampler='iid'),
    decode_fn=functools.partial(decoding.beam_search, alpha=0.0),
    **{'loss_normalizing_factor': FACTOR} | kwargs,
  )


@pytest.fixture(scope='module')
def batch():
  rng = np.random.default_rng(0)
  inputs, targets = rng.integers(3, 250, (2, 8, 6))
  targets[:, 5] = 1
  targets[2, 3:] = 0
  return {
    'encoder_input_tokens': jnp.asarray(inputs),
    'decoder_input_tokens': jnp.asarray(np.pad(targets, ((0, 0), (1, 0)))[:, :-1]),
    'decoder_target_tokens': jnp.asarray(targets),
    'decoder_loss_weights': jnp.asarray(targets > 0, jnp.float32),
  }


def variables(model, batch):
  shapes = {name: x.shape for name, x in batch.items()}
  types = {name: x.dtype for name, x in batch.items()}
  return model.get_initial_variables(jax.random.PRNGKey(0), shapes, types)


def het_xl():
  return HetXL(VOCABULARY_SIZE, num_factors=3, temperature=LearnedTemperature())


def test_a_deterministic_head_is_t5(network, batch):
  """Loss, gradient, score and decodes of DET are t5x's own, with its parameters where t5x has
  them.
  """
  from t5x import models

  ours = make_model(network, Det(VOCABULARY_SIZE, class_multiple=1))
  theirs = models.EncoderDecoderModel(
    network.Transformer(config(network)),
    ours.input_vocabulary,
    ours.output_vocabulary,
    ours.optimizer_def,
    decode_fn=ours.decode_fn,
    loss_normalizing_factor=FACTOR,
  )
  params = variables(theirs, batch)['params'].unfreeze()
  layer = dict(params['decoder']['logits_dense'])
  bias = {'bias': jnp.zeros(VOCABULARY_SIZE)}
  with_bias = params | {'decoder': params['decoder'] | {'logits_dense': layer | bias}}
  initial = variables(ours, batch)
  shapes = jax.tree.map(jnp.shape, initial['params'].unfreeze())
  assert shapes == jax.tree.map(jnp.shape, with_bias)

  def value(model, params):
    return jax.value_and_grad(model.loss_fn, has_aux=True)(params, batch, jax.random.PRNGKey(1))

  (loss, metrics), grad = value(ours, with_bias)
  (their_loss, their_metrics), their_grad = value(theirs, params)
  np.testing.assert_allclose(loss, their_loss, rtol=1e-6)
  assert metrics.keys() == their_metrics.keys() - {
    name for name in their_metrics if 'z_loss' in name or 'cross_ent' in name
  } | {'tau'}
  np.testing.assert_allclose(metrics['accuracy'].compute(), their_metrics['accuracy'].compute())
  del grad['decoder']['logits_dense']['bias']
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grad, their_grad
  )
  np.testing.assert_allclose(ours.eval_fn(with_bias, batch)[0], their_loss, rtol=1e-6)
  np.testing.assert_allclose(
    ours.score_batch(with_bias, batch), theirs.score_batch(params, batch), rtol=1e-5
  )
  got, want = (
    model.predict_batch_with_aux(params, batch, num_decodes=2)
    for model, params in ((ours, with_bias), (theirs, params))
  )
  np.testing.assert_array_equal(got[0], want[0])
  np.testing.assert_allclose(got[1]['scores'], want[1]['scores'], rtol=1e-5)


def test_the_loss_is_that_of_the_mean_softmax(network, batch):
  """Against float64, from the samples that the keys of the step give."""
  model = make_model(network, het_xl())
  params = variables(model, batch)['params']
  key = jax.random.PRNGKey(2)
  loss, metrics = model.loss_fn(params, batch, key)
  names = ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')
  logits = model.module.apply(
    {'params': params}, *(batch[name] for name in names), enable_dropout=False,
    method='gaussian_logits',
  )  # fmt: skip
  targets = np.asarray(batch['decoder_target_tokens']).reshape(-1)
  keys = example_keys(jax.random.split(key)[1], jnp.arange(targets.size))
  integrator = model.train_integrator
  covariance = logits.covariance
  sampler = samplers.SAMPLERS[integrator.sampler]
  z = sampler(keys, jnp.arange(integrator.num_samples), covariance.num_normals)
  eps = np.asarray(covariance.noise(z), np.float64)  # [N, S, D]
  kernel = np.asarray(params['decoder']['logits_dense']['kernel'], np.float64)
  u = (np.asarray(logits.location, np.float64)[:, None] + eps @ kernel)[..., :VOCABULARY_SIZE]
  probabilities = scipy.special.softmax(u / float(logits.temperature), axis=-1).mean(axis=1)
  nll = -np.log(probabilities[np.arange(targets.size), targets])
  want = (nll * np.asarray(batch['decoder_loss_weights']).reshape(-1)).sum() / FACTOR
  np.testing.assert_allclose(loss, want, rtol=1e-5)
  np.testing.assert_allclose(metrics['tau'].compute(), 2.525, rtol=1e-6)


def test_decoding_agrees_with_scoring(network, batch):
  """The beam search's score of its own output is the model's score of that output, whatever else
  is in the batch.
  """
  model = make_model(network, het_xl())
  params = variables(model, batch)['params']
  tokens, aux = model.predict_batch_with_aux(params, batch, num_decodes=2)
  assert int(tokens.max()) < VOCABULARY_SIZE
  given = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
  weights = jnp.cumsum(given == 1, axis=1) == 0  # up to the end of the sequence
  scored = batch | {
    'decoder_input_tokens': given,
    'decoder_target_tokens': tokens,
    'decoder_loss_weights': weights.astype(jnp.float32),
  }
  np.testing.assert_allclose(model.score_batch(params, scored), aux['scores'], rtol=1e-4)
  few = {name: x[:2] for name, x in scored.items()}
  np.testing.assert_allclose(model.score_batch(params, few), aux['scores'][:2], rtol=1e-4)


@pytest.mark.parametrize(
  ('head', 'config_change', 'words'),
  [
    (Det(100), {}, 'Det.num_classes=100 .*T5Config.vocab_size, 260'),
    (Det(VOCABULARY_SIZE), {'logits_via_embedding': True}, 'logits_via_embedding=True'),
    (Det(VOCABULARY_SIZE, link='sigmoid'), {}, "Det.link='sigmoid' .*'softmax'"),
  ],
)
def test_wrong_settings(network, batch, head, config_change, words):
  model = make_model(network, head)
  model.module = model.module.clone(config=config(network, **config_change))
  with pytest.raises(ValueError, match=words):
    variables(model, batch)


HEAD = """
include 'het_plugin/gin/t5x/encoder_decoder.gin'
include 'het_plugin/gin/heads/het_xl.gin'
NUM_CLASSES = 384
"""


def run_t5x(main, folder, config):
  """`python -m t5x.MAIN` in a folder, with a gin file of this text."""
  (folder / f'{main}.gin').write_text('import het_plugin.config\n' + config)
  process = subprocess.run(
    [sys.executable, '-m', f't5x.{main}', f'--gin_search_paths={HERE}', f'--gin_file={main}.gin'],
    cwd=folder,
    env=os.environ | {'PYTHONPATH': os.pathsep.join([str(ROOT), *sys.path])},
    capture_output=True,
    text=True,
  )
  assert process.returncode == 0, process.stderr[-3000:]


def parameters(checkpoint):
  import orbax.checkpoint as ocp

  state = ocp.PyTreeCheckpointer().restore(checkpoint / 'state')
  return traverse_util.flatten_dict(state['target'], sep='/')


def test_from_a_checkpoint_of_t5(tmp_path):
  """T5 is trained; HET-XL starts from it, with nothing that it had lost; and is decoded from."""
  train = "include 'tiny_t5_train.gin'\n"
  run_t5x('train', tmp_path, train + f"MODEL_DIR = '{tmp_path}/det'")
  run_t5x(
    'train',
    tmp_path,
    f"""{train}{HEAD}
include 'het_plugin/gin/t5x/from_t5.gin'
INITIAL_CHECKPOINT_PATH = '{tmp_path}/det/checkpoint_10'
MODEL_DIR = '{tmp_path}/het_xl'
TRAIN_STEPS = 11
LEARNING_RATE = 0.0
""",
  )
  det, het_xl = (
    parameters(tmp_path / path) for path in ('det/checkpoint_10', 'het_xl/checkpoint_11')
  )
  for name, value in det.items():
    np.testing.assert_allclose(het_xl[name], value, atol=1e-7, err_msg=name)  # at its least rate
  layer = 'decoder/logits_dense'
  assert {f'{layer}/temperature/t', f'{layer}/covariance/J'} <= het_xl.keys() - det.keys()
  tau = 0.05 + 4.95 * scipy.special.expit(het_xl[f'{layer}/temperature/t'])
  np.testing.assert_allclose(tau, 1.0, rtol=1e-6)
  run_t5x(
    'infer',
    tmp_path,
    f"""
include 't5x/configs/runs/infer.gin'
include 'tiny_t5.gin'
{HEAD}
CHECKPOINT_PATH = '{tmp_path}/het_xl/checkpoint_11'
INFER_OUTPUT_DIR = '{tmp_path}/infer'
include 'tiny_t5_infer.gin'
""",
  )
  (results,) = (tmp_path / 'infer').rglob('*-predict.jsonl-00000-of-00001')
  assert len(results.read_text().splitlines()) == 16
