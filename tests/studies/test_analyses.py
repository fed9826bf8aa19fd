"""Analyses of a trained run: what the noise does, the NLL of its examples, its alignment with W."""

import math

import jax
import numpy as np
import pytest
import scipy.linalg
from scipy import special

from het_plugin import backbones, data, models, runs
from het_plugin.heads import Det
from het_plugin.integrate import Integrator, example_keys
from het_plugin.training.partitioning import PjitPartitioner
from studies.analyses import (
  ExampleNLL,
  NoiseEffect,
  RowSpaceAlignment,
  largest_cosine,
  row_space,
)

EFFECT = NoiseEffect(split='test', num_examples=24)


@pytest.fixture
def noisy_run(digits_run, monkeypatch):
  """HET-XL with many samples at evaluation; whoever opens a run gets it."""
  run = runs.open_run(digits_run[0])
  run.model.eval_integrator = Integrator(1000, tilt=False, rotate=False)
  monkeypatch.setattr(runs, 'open_run', lambda path: run)
  return run


def batch_of(run, split='test', bounded=True):
  """The same examples in one batch."""
  size = 128
  cfg = data.one_pass(run.task, split, image_size=8, max_labels=1, batch_size=size, bounded=bounded)
  batch = next(iter(data.get_dataset(cfg)))
  return {name: x[:24] for name, x in batch.items()}


@pytest.mark.slow
def test_against_samples_in_float64(noisy_run):
  found = EFFECT(None)
  batch = batch_of(noisy_run)

  @jax.jit
  def parts(params, batch):
    logits = noisy_run.model.logits(params, batch)
    return logits.factors(), logits.location, logits.temperature

  factors, location, tau = (np.float64(x) for x in parts(noisy_run.params, batch))
  factors = factors[..., :10]
  location = location[:, :10]  # [B, R + 1, K], [B, K]
  z = np.random.default_rng(0).standard_normal((factors.shape[0], 10_000, factors.shape[1]))
  noise = (z @ factors).swapaxes(0, 1) / tau  # [S, B, K]
  centred = noise - noise.mean(-1, keepdims=True)
  assert found['noise / tau'] == pytest.approx(np.sqrt(centred.var(0).mean()), rel=0.02)
  labels = batch['label'][:, 0]
  rows = np.arange(len(labels))
  with_noise = -np.log(special.softmax(location / tau + noise, -1)[:, rows, labels].mean(0))
  bare = -special.log_softmax(location / tau, -1)[rows, labels]
  assert abs(bare - with_noise).mean() > 0.02
  assert found['NLL without noise'] == pytest.approx((bare - with_noise).mean(), abs=0.01)


def test_a_deterministic_head_has_none(digits_run, monkeypatch):
  run = runs.open_run(digits_run[0])
  run.model.head = Det(num_classes=10, class_multiple=run.model.head.class_multiple)
  run.model.module = run.model.module.clone(head=run.model.head)
  del run.params['head']['covariance'], run.params['head']['temperature']
  del run.param_specs['head']['covariance'], run.param_specs['head']['temperature']
  monkeypatch.setattr(runs, 'open_run', lambda path: run)
  assert EFFECT(None) == {'noise / tau': 0, 'NLL without noise': 0}


def test_labels_count_by_their_shares_as_in_training(tmp_path, monkeypatch):
  file = tmp_path / 'a.npz'
  x = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
  label = np.tile([1, 2], (32, 1))
  weight = np.tile(np.float32([0.9, 0.1]), (32, 1))
  np.savez(file, features=x, label=label, label_weight=weight, split=['train', 'test'] * 16)
  rule = Integrator()
  model = models.ClassificationModel(backbones.Mlp((8,)), Det(num_classes=3), None, rule, rule)
  params = model.get_initial_variables(jax.random.key(0), {'image': (2, 1, 1, 4)})['params']
  run = runs.Run(model, PjitPartitioner(), params, None, 1, 4, task=f'features:{file}')
  monkeypatch.setattr(runs, 'open_run', lambda path: run)
  assert EFFECT(None) == {'noise / tau': 0, 'NLL without noise': 0}
  ExampleNLL(split='test', choose_split='train')(tmp_path)
  log_p = run.predict({'image': x[1::2, None, None]})['log_prob']
  expected = -log_p[:, 1:] @ weight[0]
  written = np.load(tmp_path / 'nll.npz')
  np.testing.assert_allclose(written['NLL'], expected, rtol=1e-5)
  assert (np.diff(written['index']) > 0).all() and len(written['index']) == len(expected)


@pytest.mark.slow
def test_the_nll_of_each_example_and_a_temperature_of_others(digits_run, tmp_path, monkeypatch):
  run = runs.open_run(digits_run[0])
  monkeypatch.setattr(runs, 'open_run', lambda path: run)
  found = ExampleNLL(split='test[:24]', choose_split='train', num_examples=64)(tmp_path)
  written = np.load(tmp_path / 'nll.npz')
  batch = batch_of(run, 'test[:24]', bounded=False)

  @jax.jit
  def expected(params, batch, tau):
    logits = run.model.logits(params, batch)
    keys = example_keys(jax.random.key(run.model.eval_seed), batch['index'])
    nll = run.model.eval_integrator.nll(logits.replace(temperature=tau), batch['label'], keys)
    return run.model.score_batch(params, batch), nll, tau / logits.temperature

  score, nll, scale = expected(run.params, batch, found['tau of held-out'])
  np.testing.assert_allclose(written['NLL'], -score, rtol=1e-4)
  assert round(4 * np.log2(scale), 4) in range(-4, 5)
  np.testing.assert_allclose(written['NLL, tau of held-out'], nll, rtol=1e-4)
  assert found['NLL, tau of held-out'] == pytest.approx(float(nll.mean()), rel=1e-4)


def test_shared_w_is_aligned(digits_run):
  found = RowSpaceAlignment(split='test', num_examples=20)(digits_run[0])
  # HET-XL's noise is in the row space of W; 10 classes leave no room for another.
  assert found['cos SPA'] == pytest.approx(1.0, abs=1e-6)
  assert found.keys() == {'cos SPA', 'std', 'cos SPA, random W', 'std, random W'}


def test_examples_and_their_deviation(digits_run, monkeypatch):
  """Against one product of bases for each example, with factors of a smaller rank than K."""
  factors = np.random.default_rng(0).standard_normal((6, 2, 10))
  monkeypatch.setattr(RowSpaceAlignment, '_factors', lambda self, run: iter(factors))
  run = runs.open_run(digits_run[0])
  kernel = np.asarray(run.params['head']['kernel'])[:3, :10]
  run.params['head']['kernel'] = kernel
  monkeypatch.setattr(runs, 'open_run', lambda path: run)
  found = RowSpaceAlignment()(digits_run[0])
  w = np.linalg.qr(kernel.T)[0]
  cosines = [np.linalg.svd(w.T @ np.linalg.qr(q.T)[0])[1][0] for q in factors]
  assert found['cos SPA'] == pytest.approx(np.mean(cosines))
  assert found['std'] == pytest.approx(np.std(cosines))


def test_a_head_without_factors_is_told(digits_run, monkeypatch):
  run = runs.open_run(digits_run[0])
  run.model.head = run.model.head.clone(remainder='diag')
  monkeypatch.setattr(runs, 'open_run', lambda path: run)
  with pytest.raises(ValueError, match="HetXL.remainder='diag' "):
    RowSpaceAlignment()(digits_run[0])


def test_the_cosine_is_that_of_scipys_smallest_angle():
  rng = np.random.default_rng(0)
  w = rng.standard_normal((6, 40))
  q = rng.standard_normal((4, 40))
  q[1] = q[0]  # a lower rank
  angles = scipy.linalg.subspace_angles(w.T, q.T)
  found = largest_cosine(row_space(w), row_space(q))
  assert math.isclose(found, np.cos(angles.min()), rel_tol=1e-12)
  q[2] = w[0] - 2 * w[3]  # one common direction is enough
  assert math.isclose(largest_cosine(row_space(w), row_space(q)), 1.0)
  assert largest_cosine(np.eye(6)[:3], np.eye(6)[3:]) == 0.0
