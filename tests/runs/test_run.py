"""Extraction over meshes: the same rows on any mesh, for any batch size; several layers at once."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import partitioning as flax_partitioning
from jax.sharding import PartitionSpec

from het_plugin import rows
from het_plugin.runs import Run, per_example
from het_plugin.runs.per_example import as_rows, match_channels
from het_plugin.runs.run import params_fingerprint
from het_plugin.training.partitioning import PjitPartitioner
from tests.evaluation.batches import in_batches

WEIGHTS = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
SPECS = {'w': PartitionSpec(None, 'model')}


class FakeModel:
  """Two linear representations of an image of 2 x 2 pixels and 2 channels."""

  def __init__(self):
    self.traces = 0

  def representations(self, params, batch, layers):
    self.traces += 1
    flat = batch['image'].reshape(len(batch['image']), -1)
    out = flax_partitioning.with_sharding_constraint(flat @ params['w'], ('batch', 'embed'))
    known = {'pre_logits': out.astype(jnp.bfloat16), 'tokens': out.reshape(-1, 4, 4)}
    return {layer: known[layer] for layer in layers}


def make_examples(n):
  rng = np.random.default_rng(1)
  index = rng.permutation(10 * n)[:n].astype(np.int32)  # neither sorted nor dense
  return {
    'image': rng.normal(size=(n, 2, 2, 2)).astype(np.float32),
    'label': rng.integers(0, 5, (n, 1)).astype(np.int32),
    'index': index,
  }


def make_run(model, model_shards):
  partitioner = PjitPartitioner(num_partitions=model_shards)
  params = jax.device_put({'w': WEIGHTS}, partitioner.shardings(SPECS))
  return Run(model, partitioner, params, SPECS, image_size=2, channels=2)


def expected_rows(examples):
  order = np.argsort(examples['index'])
  flat = examples['image'].reshape(-1, 8)[order]
  return flat @ WEIGHTS, examples['label'][order], examples['index'][order]


def test_all_layers_come_from_one_forward_pass():
  model = FakeModel()
  examples = make_examples(21)
  run = make_run(model, 2)
  columns = (rows.column('tokens'), 'features')
  both = rows.ordered(list(run.stream(in_batches(examples, 8), columns, 8, pool='mean')))
  assert set(both.columns) == set(columns) and model.traces == 1
  flat, labels, index = expected_rows(examples)
  for column, expected, rtol in zip(
    columns, (flat.reshape(-1, 4, 4).mean(axis=1), flat), (1e-4, 1e-2), strict=True
  ):
    np.testing.assert_allclose(both[column], expected, rtol=rtol, atol=1e-2)
    assert both[column].dtype == np.float32  # the model computes one in bfloat16
  np.testing.assert_array_equal(both.labels, labels)
  np.testing.assert_array_equal(both.index, index)


def test_pooling():
  x = jnp.arange(24.0).reshape(2, 3, 2, 2)  # a feature map
  np.testing.assert_array_equal(as_rows(x, 'none'), x.reshape(2, 12))
  np.testing.assert_allclose(as_rows(x, 'mean'), x.mean(axis=(1, 2)))
  np.testing.assert_array_equal(as_rows(x[:, 0, 0], 'mean'), x[:, 0, 0])
  # 1 + 1/256 is 1 in bfloat16: the mean of tokens is taken in float32
  tokens = jnp.array([[[1.0], [1.0078125]]], jnp.bfloat16)
  assert float(as_rows(tokens, 'mean')[0, 0]) == 1.00390625


def test_match_channels(tmp_path):
  image = jnp.arange(12.0).reshape(1, 2, 2, 3)
  assert match_channels(image, 3) is image
  np.testing.assert_allclose(match_channels(image, 1), image.mean(-1, keepdims=True))
  assert match_channels(image[..., :1], 3).shape == (1, 2, 2, 3)
  with pytest.raises(ValueError, match='3 channels cannot be turned into 4'):
    match_channels(image, 4)
  np.savez(tmp_path / 'rgb.npz', image=np.zeros((2, 2, 2, 3), np.uint8), label=np.arange(2))
  run = Run(None, PjitPartitioner(), None, None, image_size=2, channels=4)
  split = run.open_split('train', task=f'npz:{tmp_path}/rgb.npz', batch_size=8)
  with pytest.raises(ValueError, match='3 channels cannot be turned into 4'), split:
    pass


def test_the_fingerprint_of_parameters():
  """It is the same on any mesh; every change shows."""
  params = {'a': {'kernel': WEIGHTS}, 'b': np.arange(8, dtype=jnp.bfloat16)}
  specs = {'a': {'kernel': PartitionSpec('data', 'model')}, 'b': PartitionSpec('model')}
  found = set()
  for model_shards in (1, 2, 8):
    shardings = PjitPartitioner(num_partitions=model_shards).shardings(specs)
    found.add(params_fingerprint(jax.device_put(params, shardings)))
  assert len(found) == 1
  next_float = WEIGHTS.copy()
  next_float[-1, -1] = np.nextafter(next_float[-1, -1], np.float32(10))
  for kernel in ({'kernel': next_float}, {'bias': WEIGHTS}, {'kernel': WEIGHTS.reshape(16, 8)}):
    found.add(params_fingerprint(jax.tree.map(jnp.asarray, {**params, 'a': kernel})))
  assert len(found) == 4


def test_a_cpu_takes_a_batch_in_chunks(monkeypatch):
  """Columns are those of the whole batch; chunks without an example are not computed."""

  def compute(params, batch):
    # 1 / 0 where a chunk has no example
    ran = batch['image'][..., 0] / batch['mask'].sum()
    return {'sum': params * batch['image'].sum(axis=(1, 2, 3)), 'ran': ran}

  image = np.arange(12.0, dtype=np.float32).reshape(12, 1, 1, 1)
  mask = np.float32([1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0])
  batch = {'image': jnp.asarray(image), 'mask': jnp.asarray(mask)}
  whole = per_example.in_chunks(compute)
  monkeypatch.setattr(jax, 'device_count', lambda: 1)
  monkeypatch.setattr(os, 'cpu_count', lambda: 1)
  monkeypatch.setattr(per_example, '_CHUNK_BYTES', 16)  # of images of 4 bytes
  found = jax.jit(per_example.in_chunks(compute))(2.0, batch)
  expected = whole(2.0, batch)['sum']
  np.testing.assert_array_equal(found['sum'][:4], expected[:4])
  np.testing.assert_array_equal(found['sum'][4:], 0)
  assert np.isfinite(found['ran']).all()
