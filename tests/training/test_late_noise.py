"""Late noise: DET until a step, then the noise; on meshes, and over interruptions."""

import shutil

import jax
import numpy as np
import pytest
from flax import traverse_util

import gin
from het_plugin.config import parsing
from het_plugin.system import run_files
from het_plugin.training import checkpoint_reader, late_noise, optimizers, partitioning
from het_plugin.training import step as step_lib
from het_plugin.training import train as train_lib
from tests.training import toy

RUN = 'het_plugin/gin/runs/digits_smoke.gin'
LATE = 'het_plugin/gin/heads/late_noise.gin'
START = 3
STEPS = 6
NO_EVALUATION = 'train.train_eval_dataset_cfg = None'


def trained(model_dir, head, *bindings, late=True, total_steps=STEPS):
  """Parameters {path: array} after a training with a schedule of STEPS steps, and its state."""
  files = [RUN, f'het_plugin/gin/heads/{head}.gin', *([LATE] if late else [])]
  shared = [
    f'MODEL_DIR = {str(model_dir)!r}',
    f'TRAIN_STEPS = {STEPS}',
    'WARMUP_STEPS = 0',
    'train/Integrator.num_samples = 2',
    'eval/Integrator.num_samples = 2',
    'EVAL_STEPS = 1',
    'EVAL_PERIOD = 2',
    'vit.width = 16',
    'vit.depth = 1',
    'vit.mlp_dim = 16',
    'vit.num_heads = 2',
    *([f'NOISE_START = {START}'] if late else []),
  ]
  parsing.parse_config(files, [*shared, *bindings])
  _, state = gin.get_configurable(train_lib.train)(total_steps=total_steps)
  params = traverse_util.flatten_dict(jax.device_get(state.params), sep='/')
  gin.clear_config()
  return params, state


def evaluation(model_dir, step):
  """The metrics of the evaluation at a step."""
  rows = [row for row in run_files.read_lines(model_dir / 'metrics.jsonl') if row['step'] == step]
  return {k: x for row in rows for k, x in row.items() if k.startswith('training_eval/')}


@pytest.fixture(scope='module')
def det(tmp_path_factory):
  """Parameters of DET after START steps, and its folder."""
  model_dir = tmp_path_factory.mktemp('det')
  return trained(model_dir, 'det_learned_tau', late=False, total_steps=START)[0], model_dir


@pytest.fixture(scope='module')
def early(tmp_path_factory):
  """The same of HET-XL."""
  model_dir = tmp_path_factory.mktemp('early')
  return trained(model_dir, 'het_xl', total_steps=START)[0], model_dir


@pytest.mark.slow
def test_until_the_start_a_run_is_that_of_det_to_the_last_bit(det, early):
  for name, x in det[0].items():
    np.testing.assert_array_equal(early[0][name], x, err_msg=name)
  of_det, values = (evaluation(model_dir, START - 1) for _, model_dir in (det, early))
  assert len(of_det) > 2 and values == of_det


@pytest.mark.slow
def test_from_the_start_the_noise_learns_also_after_an_interruption_and_on_another_mesh(
  early, tmp_path
):
  whole, state = trained(tmp_path / 'whole', 'het_xl', NO_EVALUATION)
  shutil.copytree(early[1], tmp_path / 'parts')
  parts, resumed = trained(tmp_path / 'parts', 'het_xl', NO_EVALUATION)
  for name, x in whole.items():
    np.testing.assert_array_equal(parts[name], x, err_msg=name)
  jax.tree.map(np.testing.assert_array_equal, resumed.opt_state, state.opt_state)
  mesh = 'PjitPartitioner.num_partitions = 2', 'Trainer.num_microbatches = 2'
  split, _ = trained(tmp_path / 'split', 'het_xl', NO_EVALUATION, *mesh)
  for name, x in whole.items():
    np.testing.assert_allclose(split[name], x, atol=2e-3, err_msg=name)


@pytest.mark.slow
def test_the_noise_keeps_its_first_values_until_the_start(tmp_path):
  """With a W' of its own (eq. 14), which is noise, too."""
  saves = 'SAVE_PERIOD = 1', 'SaveCheckpointConfig.keep = 4'
  trained(tmp_path, 'het_xl', 'HetXL.noise_dim = 4', NO_EVALUATION, *saves, total_steps=START + 1)
  early, before, after = (
    checkpoint_reader.read_params(tmp_path / f'checkpoint_{n}') for n in (1, START, START + 1)
  )
  for name, x in before.items():
    is_noise = name.startswith(('head/covariance/', 'head/noise_kernel'))
    assert np.array_equal(early[name], x) == is_noise, name
    assert not np.array_equal(after[name], x), name


@pytest.mark.parametrize(
  'binding, message',
  [
    ('NOISE_START = 6', 'start=6 must be below total_steps=6'),
    ('NOISE_START = -0.5', 'NOISE_START = -0.5 .* must be at least 0'),
    ("LateNoise.params = '^head/covarance'", "params='.head/covarance' matches no"),
  ],
)
def test_bad_settings_are_named(binding, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    trained(tmp_path, 'het_xl', binding)
  assert not (tmp_path / 'metrics.jsonl').exists()


def test_a_model_without_noise_to_leave_out_is_named():
  late = late_noise.LateNoise(2, total_steps=4, params='^head_kernel$')
  model = toy.ToyModel(optimizer_def=optimizers.adamw(0.1, late_noise=late))
  partitioner = partitioning.PjitPartitioner(num_partitions=1)
  axes, _ = toy.initial_state(model, partitioner, jax.random.key(1))
  with pytest.raises(ValueError, match='late_noise must be None: ToyModel has no method without'):
    step_lib.Trainer(model, partitioner, axes, jax.random.key(2))
