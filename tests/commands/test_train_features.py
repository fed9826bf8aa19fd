"""The trainer on rows of features: no hidden layer is the estimator's optimum; an MLP, a mesh."""

import jax
import numpy as np
import pytest

import gin
from het_plugin import estimators, heads
from het_plugin.commands import represent as represent_main
from het_plugin.commands import train as train_main
from het_plugin.config import parsing
from het_plugin.rows import read as read_rows
from het_plugin.training import checkpoint_reader, train
from tests.feature_rows import write_rows
from tests.training.toy_run import series


@pytest.fixture(scope='module')
def rows(tmp_path_factory):
  path, x, y = write_rows(tmp_path_factory.mktemp('features'), 512)
  return str(path), x, y


def parse(head, path, model_dir, *extra):
  files = ['het_plugin/gin/runs/features.gin', f'het_plugin/gin/heads/{head}.gin']
  bindings = [
    f"MIXTURE_OR_TASK_NAME = 'features:{path}'",
    f"MODEL_DIR = '{model_dir}'",
    'NUM_CLASSES = 5',
    'BATCH_SIZE = 512',
    'WARMUP_STEPS = 0',
  ]
  parsing.parse_config(files, [*bindings, *extra])


def run():
  return gin.get_configurable(train.train)()[1]


WHOLE = (
  "train/DatasetConfig.split = 'all'",
  'train/DatasetConfig.augment = True',
  'train.train_eval_dataset_cfg = None',
  'CheckpointConfig.save = None',
)


@pytest.mark.slow
def test_no_hidden_layer_ends_at_the_optimum_of_the_estimator(rows, tmp_path):
  path, x, y = rows
  settings = ('TRAIN_STEPS = 150', 'LEARNING_RATE = 0.2', 'WEIGHT_DECAY = 0.0')
  parse('det', path, tmp_path / 'det', *settings, *WHOLE)
  state = run()
  assert 'backbone' not in state.params
  head = state.params['head']
  logits = x @ np.asarray(head['kernel'])[:, :5] + np.asarray(head['bias'])[:5]
  logits -= logits.max(axis=1, keepdims=True)
  log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
  trained = -log_p[np.arange(512), y].mean()
  fitted = estimators.DetClassifier(C=1e6).fit(x, y).nll(x, y).mean()
  assert trained == pytest.approx(fitted, abs=1e-3)


@pytest.mark.slow
def test_a_run_starts_from_a_fitted_head_and_its_head_is_an_estimator(rows, tmp_path):
  """It has the parameters of the estimator, with its hidden layer as the backbone."""
  path, x, y = rows
  fitted = estimators.HetXLClassifier(
    hidden_layers=(8,), C_noise=0.03, num_factors=2, num_samples=16, max_iter=10, tol=0.1
  ).fit(x, y)
  estimators.to_checkpoint(fitted, str(tmp_path / 'start.safetensors'))
  parse(
    'het_xl',
    path,
    tmp_path / 'run',
    'TRAIN_STEPS = 1',
    'LEARNING_RATE = 1e-12',
    'HetXL.num_factors = 2',
    'Mlp.hidden_layers = (8,)',
    'WEIGHT_DECAY = 0.0',
    'train/Integrator.num_samples = 2',
    'HetXL.temperature = @FixedTemperature()',
    'FixedTemperature.tau = 1.0',
    'warmup_schedule.init_value = 0.0',
    'warmup_schedule.end_value = 0.0',
    'CheckpointConfig.restore = @RestoreCheckpointConfig()',
    f"RestoreCheckpointConfig.path = '{tmp_path}/start.safetensors'",
    *WHOLE,
  )
  params = jax.tree.map(np.asarray, run().params)
  hidden = params['backbone']['hidden_0']
  phi = np.asarray(jax.nn.gelu(x @ hidden['kernel'] + hidden['bias']))
  opened = estimators.from_head(heads.HetXL(5, num_factors=2), params['head'])
  np.testing.assert_allclose(
    opened.covariance(phi[:20]), fitted.covariance(x[:20]), rtol=2e-3, atol=1e-4
  )


@pytest.mark.slow
def test_an_mlp_under_het_xl_on_a_mesh_is_represented(rows, tmp_path, run_main):
  """Its files have the pre-logits of the MLP; the run is a run of the main."""
  path, x, _ = rows
  bindings = [
    f"MIXTURE_OR_TASK_NAME='features:{path}'",
    f"MODEL_DIR='{tmp_path}/run'",
    'NUM_CLASSES=5',
    'TRAIN_STEPS=3',
    'WARMUP_STEPS=0',
    'BATCH_SIZE=64',
    'Mlp.hidden_layers=(16,)',
    'PjitPartitioner.num_partitions=4',
    'HetXL.num_factors=3',
    'EVAL_PERIOD=3',
    *(f'{mode}/Integrator.num_samples=2' for mode in ('train', 'eval')),
  ]
  files = [f'--gin_file=het_plugin/gin/{x}.gin' for x in ('runs/features', 'heads/het_xl')]
  run_main(train_main, *files, *(f'--gin.{x}' for x in bindings))
  assert series(tmp_path / 'run', f'training_eval/features:{path}/nll')
  out = tmp_path / 'out'
  arguments = [f'--checkpoint={tmp_path}/run', f'--dataset=features:{path}', '--splits=all']
  run_main(represent_main, *arguments, f'--output_dir={out}')
  (file,) = out.rglob('*.safetensors')
  found = read_rows(str(file))
  hidden = checkpoint_reader.read_params(tmp_path / 'run')
  kernel, bias = (hidden[f'backbone/hidden_0/{name}'] for name in ('kernel', 'bias'))
  expected = np.asarray(jax.nn.gelu(x @ kernel + bias))
  np.testing.assert_allclose(found.features[np.argsort(found.index)], expected, atol=1e-4)


@pytest.mark.slow
def test_the_run_of_a_million_classes_learns_without_moments_of_w(tmp_path):
  """gin/runs/million_classes.gin with K = 2,000, whose losses are in tiles; W' is eq. 14.

  A run of such an optimizer is resumed in tests/training/test_train.py.
  """
  rng = np.random.default_rng(0)
  number = rng.integers(5, size=400)
  x = 2 * rng.normal(size=(5, 16))[number] + 0.5 * rng.normal(size=(400, 16))
  split = np.array(['train'] * 360 + ['validation'] * 40)
  path = tmp_path / 'rows.npz'
  y = np.array([3, 700, 1500, 1998, 1999])[number]
  np.savez(path, features=x.astype('f4'), label=y, split=split)
  files = [f'het_plugin/gin/{name}.gin' for name in ('runs/million_classes', 'heads/het_xl')]
  bindings = [
    f"MIXTURE_OR_TASK_NAME = 'features:{path}'",
    f"MODEL_DIR = '{tmp_path}/run'",
    'NUM_CLASSES = 2000',
    'BATCH_SIZE = 32',
    'LEARNING_RATE = 0.05',
    'EVAL_STEPS = 1',
    'EVAL_BATCH_SIZE = 8',
    'PjitPartitioner.num_partitions = 2',
    'train/Integrator.max_bytes = 100_000',
    'HetXL.num_factors = 2',
    'HetXL.noise_dim = 4',
    *(f'{mode}/Integrator.num_samples = 2' for mode in ('train', 'eval')),
    'TRAIN_STEPS = 30',
    'STATS_PERIOD = 1',
    'EVAL_PERIOD = 30',
    'WARMUP_STEPS = 0',
  ]
  parsing.parse_config(files, bindings)
  state = run()
  largest = max(x.size for x in jax.tree.leaves(state.opt_state))
  assert largest == state.params['head']['bias'].size  # nothing of the size of W
  loss = series(tmp_path / 'run', 'train/loss')
  assert loss[1] > 7 and loss[30] < 3  # log 2,000 = 7.6
