"""The main as a user runs it, and the agreement of real models across meshes and microbatches."""

import functools
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import gin
from het_plugin.commands import export
from het_plugin.commands import train as main
from het_plugin.config import parsing
from het_plugin.runs.starting import train_from_gin
from het_plugin.training import partitioning
from het_plugin.training import step as step_lib
from tests.training.toy_run import lines

ROOT = pathlib.Path(__file__).parents[2]
SHORT = ['WARMUP_STEPS = 0', 'train.train_eval_dataset_cfg = None']
TINY = ['vit.width = 16', 'vit.depth = 1', 'vit.mlp_dim = 16', 'vit.num_heads = 2']
FEW = [f'{mode}/Integrator.num_samples = 2' for mode in ('train', 'eval')]  # no fit to compile


def parse(head, model_dir, *extra, run='digits_smoke', files=()):
  files = [f'het_plugin/gin/runs/{run}.gin', f'het_plugin/gin/heads/{head}.gin', *files]
  parsing.parse_config(files, [f"MODEL_DIR = '{model_dir}'", *TINY, *extra])


def train_params(model_dir, head, *extra, files=()):
  """Parameters after four steps on the 2,297 classes of glyphs_core."""
  settings = [
    'TRAIN_STEPS = 4',
    *SHORT,
    *FEW,
    'ACTIONS = None',
    'CheckpointConfig.save = None',
    'BATCH_SIZE = 32',
  ]
  parse(head, model_dir, *settings, *extra, run='glyphs', files=files)
  return train_from_gin()[1].params


def assert_same(got, expected, rtol=1e-4):
  """All parameters but the attention keys' bias: softmax does not see it, its gradient is rounding
  error around zero, and Adam scales that up to a full step.
  """
  for path, value in jax.tree_util.tree_leaves_with_path(expected):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    if not name.endswith('attention/key/bias'):
      actual = functools.reduce(lambda tree, key: tree[key], name.split('/'), got)
      np.testing.assert_allclose(actual, value, rtol=rtol, atol=1e-4, err_msg=name)


def shards(model, microbatches):
  return [f'PjitPartitioner.num_partitions = {model}', f'Trainer.num_microbatches = {microbatches}']


@pytest.mark.slow
def test_four_steps_agree_on_a_mesh_and_in_microbatches(tmp_path):
  """K = 2,297 on 1 shard, and on 8 shards, which do not divide it."""
  expected = train_params(tmp_path / '0', 'het')
  assert_same(train_params(tmp_path / '1', 'het', *shards(8, 4)), expected)


@pytest.mark.slow
def test_a_replica_axis_changes_nothing(tmp_path):
  """Two slices of (2, 2), parameters over data too, against one device a model."""
  flat = train_params(tmp_path / 'flat', 'het_xl')
  fsdp = ['het_plugin/gin/partitioning/fsdp.gin']
  replicas = 'PjitPartitioner.num_replicas = 2'
  params = train_params(tmp_path / 'sliced', 'het_xl', *shards(2, 2), replicas, files=fsdp)
  kernel = params['head']['kernel']
  assert kernel.sharding.mesh.axis_names == ('replica', 'data', 'model')
  assert kernel.sharding.spec == jax.sharding.PartitionSpec('data', 'model')
  assert_same(params, flat, rtol=1e-7)


def arguments(model_dir, *bindings):
  return [
    '--gin_file=het_plugin/gin/runs/digits_smoke.gin',
    f"--gin.MODEL_DIR='{model_dir}'",
    '--gin_file=het_plugin/gin/heads/het_xl.gin',
    *(f'--gin.{binding.replace(" ", "")}' for binding in (*TINY, *bindings)),
  ]


def test_main_trains_stops_on_sigterm_and_goes_on(tmp_path, run_main):
  """Interrupted anywhere and started again, it ends with the metrics of the run that was not."""
  settings = ('TRAIN_STEPS=100', 'EVAL_PERIOD=100', 'SAVE_PERIOD=100', 'STATS_PERIOD=10', *FEW)
  whole = tmp_path / 'whole'
  parts = tmp_path / 'parts'
  command = [sys.executable, '-m', 'het_plugin.train', *arguments(parts, *settings)]
  process = subprocess.Popen(
    command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
  )
  deadline = time.time() + 300
  while not (parts / 'metrics.jsonl').exists() or len(lines(parts)) < 2:
    assert time.time() < deadline and process.poll() is None
    time.sleep(0.02)
  process.send_signal(signal.SIGTERM)
  assert process.wait(timeout=300) == 42
  assert max(line['step'] for line in lines(parts)) < 100
  for model_dir in (parts, whole):
    run_main(main, *arguments(model_dir, *settings))
  assert 'HetXL' in (whole / 'config.gin').read_text()

  def final(model_dir):
    (line,) = [line for line in lines(model_dir) if 'training_eval/digits/nll' in line]
    return line

  assert final(parts) == final(whole)


class BegunError(Exception):
  """A training is at its first step."""


@pytest.mark.slow
def test_a_det_run_starts_a_het_xl_model(digits_det_run, tmp_path, run_main, monkeypatch):
  """The plug-in property: backbone and W are kept, only the noise and tau are new (section 3.1).

  From its checkpoint, here with parameters sharded over data too, and from a file under
  vision_transformer's names.
  """
  run_dir, det = digits_det_run
  file = tmp_path / 'det.npz'
  run_main(export, f'--checkpoint={run_dir}', f'--output={file}')
  with np.load(file) as arrays:
    assert arrays['head/kernel'].shape[-1] == 10  # without the padded classes
    query = arrays['Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel']
    assert query.shape == (16, 2, 8)

  begun = []

  def first_step(_, train_state, batch):
    begun.append(train_state.params)
    raise BegunError

  monkeypatch.setattr(step_lib.Trainer, 'compile_train', lambda *_: 0.0)
  monkeypatch.setattr(step_lib.Trainer, 'train_step', first_step)

  def start(path, *settings, files=()):
    parse(
      'het_xl',
      tmp_path / f'from_{path.name}',
      'TRAIN_STEPS = 1',
      *SHORT,
      *FEW,
      *settings,
      'CheckpointConfig.restore = @RestoreCheckpointConfig()',
      f"RestoreCheckpointConfig.path = '{path}'",
      files=files,
    )
    with pytest.raises(BegunError):
      train_from_gin()
    params = begun.pop()
    kernel = np.asarray(params['head']['kernel'])
    np.testing.assert_array_equal(kernel[:, :10], det['head']['kernel'][:, :10])
    assert 'covariance' in params['head']
    return params

  fsdp = [f'het_plugin/gin/partitioning/{name}.gin' for name in ('model_2', 'fsdp')]
  scratch = 'RestoreCheckpointConfig.fallback_to_scratch = True'
  params = start(run_dir, scratch, files=fsdp)
  assert params['head']['kernel'].sharding.spec == jax.sharding.PartitionSpec('data', 'model')
  assert gin.get_configurable(partitioning.PjitPartitioner)().model_shards == 2
  wanted = det['backbone']
  got = params['backbone']['encoder_norm']['scale']
  np.testing.assert_array_equal(got, wanted['encoder_norm']['scale'])

  got = start(file, 'vit.scan_layers = True')['backbone']['blocks']['mlp']['wi']['kernel'][0]
  np.testing.assert_array_equal(got, wanted['block00']['mlp']['wi']['kernel'])

  with np.load(file) as arrays:
    fewer = {name: x[..., :9] if name.startswith('head/') else x for name, x in arrays.items()}
  np.savez(tmp_path / 'fewer.npz', **fewer)
  with pytest.raises(ValueError, match='has 9 classes: set NUM_CLASSES'):
    start(tmp_path / 'fewer.npz')
