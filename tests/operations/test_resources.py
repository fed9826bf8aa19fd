import collections

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from het_plugin.operations import resources
from het_plugin.training import checkpoints

SAVE = checkpoints.SaveCheckpointConfig(period=10, keep=2)
ARRAYS = 4 * (64 * 1000 + 1000) + 4  # bytes
CHECKPOINT = int(0.9 * ARRAYS)


def state():
  """A kernel on 8 shards, a bias on every device, a step."""
  mesh = Mesh(np.asarray(jax.devices()), ('model',))

  def leaf(shape, dtype, *spec):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  return {
    'kernel': leaf((64, 1000), np.float32, None, 'model'),
    'bias': leaf((1000,), np.float32),
    'step': leaf((), np.int32),
  }


@pytest.fixture
def machine(monkeypatch):
  """Lets a test say what is free."""

  def set_free(disk):
    usage = collections.namedtuple('usage', 'total used free')
    monkeypatch.setattr(resources.shutil, 'disk_usage', lambda path: usage(10**12, 0, disk))

  return set_free


def test_sizes():
  assert resources.checkpoint_bytes(state(), SAVE) == ARRAYS
  half = checkpoints.SaveCheckpointConfig(period=1, dtype='bfloat16')
  assert resources.checkpoint_bytes(state(), half) == (ARRAYS - 4) // 2 + 4


def test_no_room_for_one_checkpoint_is_an_error(tmp_path, machine):
  machine(disk=CHECKPOINT - 1)
  words = r'model_dir=.* has 234.0 kB free, but a checkpoint takes 234.0 kB'
  with pytest.raises(ValueError, match=words):
    resources.check(state(), SAVE, tmp_path, 100)
  resources.check(state(), None, tmp_path, 100)  # a run that saves nothing


@pytest.mark.parametrize(
  'disk, total_steps, words',
  [
    (3 * CHECKPOINT - 1, 100, '3 more checkpoints'),
    (2 * CHECKPOINT, 20, ''),  # it saves only two
    (3 * CHECKPOINT, 100, ''),
  ],
)
def test_little_room_is_a_warning(tmp_path, machine, caplog, disk, total_steps, words):
  machine(disk)
  resources.check(state(), SAVE, tmp_path, total_steps)
  assert words in caplog.text
  assert bool(words) == bool(caplog.records)


def fake_checkpoint(path, num_bytes):
  path.mkdir(parents=True)
  (path / 'data').write_bytes(bytes(num_bytes))


def test_space_of_checkpoints_that_go_is_counted(tmp_path, machine, caplog):
  """Two of keep=2 are there, of 1000 bytes each: a third one must fit, and then the oldest goes."""
  fake_checkpoint(tmp_path / 'checkpoint_10', 1000)
  fake_checkpoint(tmp_path / 'checkpoint_20', 1000)
  machine(disk=1000)
  resources.check(state(), SAVE, tmp_path, 100)
  assert not caplog.records
  machine(disk=999)
  with pytest.raises(ValueError, match='a checkpoint takes 1.0 kB'):
    resources.check(state(), SAVE, tmp_path, 100)
  resources.check(state(), SAVE, tmp_path, 20)  # the run is complete
  fake_checkpoint(tmp_path / 'checkpoint_30.orbax-checkpoint-tmp', 1)  # goes when the run opens
  resources.check(state(), SAVE, tmp_path, 100)


def test_object_stores_are_not_asked_for_space(machine):
  machine(disk=0)
  resources.check(state(), SAVE, 'gs://bucket/run', 100)
