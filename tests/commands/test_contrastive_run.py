"""LiT as gin files describe it: a classifier's image tower, locked, and a text tower trained to it,
with late noise; zero-shot evaluation while it trains and of its checkpoint.
"""

import json

import jax
import numpy as np
import pytest
from flax import traverse_util

import gin
from het_plugin import weights
from het_plugin.commands import export, zeroshot
from het_plugin.config import parsing
from het_plugin.runs import open_run, starting
from het_plugin.training import checkpoint_reader, partitioning
from tests.training.toy_run import lines, series

pytestmark = pytest.mark.slow  # of the fixture `runs`

TOWER = ('vit.width = 16', 'vit.depth = 1', 'vit.mlp_dim = 16', 'vit.num_heads = 2')
NO_EVALUATION = 'train.train_eval_dataset_cfg = None'
DET = (*TOWER, 'TRAIN_STEPS = 1', 'BATCH_SIZE = 16', 'WARMUP_STEPS = 0', NO_EVALUATION)
TINY = (
  *TOWER,
  'BATCH_SIZE = 16',
  'EVAL_STEPS = 1',
  'EVAL_PERIOD = 2',
  'SAVE_PERIOD = 1',
  *(f'text_transformer.{x}' for x in ('width = 16', 'depth = 1', 'mlp_dim = 16', 'num_heads = 2')),
  "TASK_FEATURE_LENGTHS = {'image': 28, 'text': 8}",
  'STATS_PERIOD = 1',
  'WARMUP_STEPS = 0',
  "warmup_schedule.decay = 'constant'",
  'ZeroShotAction.datasets = (@heldout/ZeroShotDataset(), @pairs/ZeroShotDataset())',
  *(f'{name}/ZeroShotDataset.max_examples = 64' for name in ('heldout', 'pairs')),
  'LOCKED = True',
  "adamw.frozen_params = '^backbone/'",
  'CheckpointConfig.restore = @RestoreCheckpointConfig()',
  'RestoreCheckpointConfig.fallback_to_scratch = True',
  'LogitScale.initial_scale = 10.0',  # of HET-XL, and where DET is compared with it
)


def train(model_dir, files, *bindings, **settings):
  files = [f'het_plugin/gin/{name}.gin' for name in files]
  parsing.parse_config(files, [f"MODEL_DIR = '{model_dir}'", *bindings])
  starting.train_from_gin(**settings)
  gin.clear_config()


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """(a classifier, LiT of three steps that was started again for a fourth one).

  LiT has its noise from step 3 on, and a checkpoint of every step.
  """
  folder = tmp_path_factory.mktemp('runs')
  one = partitioning.PjitPartitioner(devices=jax.devices()[:1])
  files = ['runs/glyphs', 'heads/det']
  train(folder / 'det', files, *DET, 'ACTIONS = None', partitioner=one)
  path = f"RestoreCheckpointConfig.path = '{folder / 'det'}'"
  lit = *TINY, path, 'NOISE_START = 2', 'SaveCheckpointConfig.keep = 4', 'TRAIN_STEPS = 4'
  for steps in (3, 4):
    files = ['runs/lit_glyphs_het_xl', 'heads/late_noise']
    train(folder / 'lit', files, *lit, total_steps=steps)
  return folder / 'det', folder / 'lit'


def test_the_locked_tower_is_the_classifiers(runs):
  towers = []
  for run in runs:
    params = open_run(run).params
    towers.append(traverse_util.flatten_dict(params['backbone'], sep='/'))
  assert towers[0].keys() == towers[1].keys()
  for name, x in towers[0].items():
    np.testing.assert_array_equal(x, towers[1][name], err_msg=name)


def test_late_noise_is_that_of_det_until_it_starts(runs, tmp_path):
  path = f"RestoreCheckpointConfig.path = '{runs[0]}'"
  det = *TINY, path, 'ACTIONS = None', NO_EVALUATION, 'TRAIN_STEPS = 2'
  train(tmp_path, ['runs/lit_glyphs_det'], *det)
  folders = tmp_path, *(runs[1] / f'checkpoint_{step}' for step in (1, 2, 3))
  det, first, second, third = map(checkpoint_reader.read_params, folders)
  for name, x in det.items():
    np.testing.assert_array_equal(x, second[name], err_msg=name)
  noise = second.keys() - det.keys()
  assert {name.split('/')[1] for name in noise} == {'image_to_text', 'text_to_image'}
  for name in noise:
    np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    assert not np.array_equal(second[name], third[name]), name


def test_it_is_evaluated_while_it_trains_and_goes_on(runs):
  rows = lines(runs[1])
  assert [row['step'] for row in rows if 'train/loss' in row] == [1, 2, 3, 4]
  top1 = series(runs[1], 'zeroshot/glyphs_heldout/top1')
  assert list(top1) == [2, 3, 4] and all(0 <= x <= 1 for x in top1.values())
  assert any('zeroshot/glyph_names/image_to_text/recall10' in row for row in rows)
  assert any('train/precision_at_1/text_to_image' in row for row in rows)


def test_zero_shot_of_the_checkpoint(runs, run_main, tmp_path):
  """The main finds what the action has found."""
  out = tmp_path / 'zeroshot.json'
  run_main(zeroshot, f'--checkpoint={runs[1]}', f'--json={out}')
  rows = {row['dataset']: row for row in json.loads(out.read_text())['rows']}
  for record in lines(runs[1] / 'zeroshot.jsonl'):
    if record['step'] == 4:
      row = rows[record['dataset']]
      assert all(row[key] == record[key] for key in ('top1', 'top5', 'recall_at') if key in record)
  assert rows['glyph_names']['recall_at']['image_to_text'].keys() == {'1', '5', '10'}
  sampled = tmp_path / 'sampled.json'
  flags = ('--dataset=glyphs_heldout', '--samples=4', '--max_examples=32')
  run_main(zeroshot, f'--checkpoint={runs[1]}', *flags, f'--json={sampled}')
  assert 0 <= json.loads(sampled.read_text())['top1'] <= 1


def test_the_image_tower_is_exported(runs, run_main, tmp_path):
  towers = []
  for name, run in zip(('classifier', 'contrastive'), runs, strict=True):
    path = tmp_path / f'{name}.npz'
    run_main(export, f'--checkpoint={run}', f'--output={path}')
    towers.append(weights.read_arrays(path))
  assert towers[0].keys() - towers[1].keys() == {'head/kernel', 'head/bias'}
  for name, x in towers[1].items():
    np.testing.assert_array_equal(x, towers[0][name], err_msg=name)
