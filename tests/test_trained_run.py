"""Runs opened for evaluation: ours, one checkpoint of ours, and published files."""

import jax
import numpy as np
import pytest

import gin
from het_plugin import trained_run, weights

TINY = ['vit.width = 16', 'vit.depth = 1', 'vit.mlp_dim = 16', 'vit.num_heads = 2']


@pytest.fixture(autouse=True)
def gin_left_clean():
  yield
  gin.clear_config()


def assert_trees_equal(got, want):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), got, want)


def test_the_newest_checkpoint_on_another_mesh(digits_run):
  folder, params = digits_run
  run = trained_run.open_run(folder, bindings=['PjitPartitioner.num_partitions = 2'])
  assert (run.step, run.image_size, run.channels, run.max_labels) == (2, 8, 1, 1)
  assert run.task == 'digits' and run.checkpoint == str(folder / 'checkpoint_2')
  assert run.partitioner.model_shards == 2 and 'digits' in run.config
  assert_trees_equal(run.params, params)


def test_one_checkpoint(digits_run):
  folder, params = digits_run
  run = trained_run.open_run(folder / 'checkpoint_1')
  assert run.step == 1
  with pytest.raises(AssertionError):
    assert_trees_equal(run.params, params)


def test_a_published_file_has_a_backbone_and_a_fresh_head(digits_run, tmp_path):
  _, params = digits_run
  flat = {f'{name}/{path}': x for name, tree in params.items() for path, x in _flat(tree).items()}
  path = tmp_path / 'vit.npz'
  weights.write_arrays(path, weights.export_params(flat, 10, 2))
  model = ['BACKBONE = @vit()', "vit.variant = 'Ti/4'", "vit.pooling = 'gap'", *TINY]
  run = trained_run.open_run(path, bindings=[*model, 'IMAGE_SIZE = 8'])
  assert (run.step, run.task, run.channels) == (None, None, 1)
  assert_trees_equal(run.params['backbone'], params['backbone'])
  with pytest.raises(ValueError, match='vit.npz'):
    trained_run.open_run(path, bindings=[*model, 'IMAGE_SIZE = 8', 'vit.mlp_dim = 32'])


def _flat(tree):
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): x
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def test_what_is_no_run(digits_run, tmp_path):
  with pytest.raises(ValueError, match='holds no checkpoint'):
    trained_run.open_run(tmp_path)
  folder, _ = digits_run
  (tmp_path / 'checkpoint_2').symlink_to(folder / 'checkpoint_2')
  with pytest.raises(ValueError, match='config.gin does not exist'):
    trained_run.open_run(tmp_path)
  with pytest.raises(ValueError, match='parameters|kernel|shape'):
    trained_run.open_run(folder, bindings=['vit.mlp_dim = 32'])
