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

  def set_free(disk=10**12, memory=10**12):
    usage = collections.namedtuple('usage', 'total used free')
    monkeypatch.setattr(resources.shutil, 'disk_usage', lambda path: usage(10**12, 0, disk))
    monkeypatch.setattr(resources, 'available_host_bytes', lambda: memory)

  return set_free


def test_sizes():
  assert resources.checkpoint_bytes(state(), SAVE) == ARRAYS
  half = checkpoints.SaveCheckpointConfig(period=1, dtype='bfloat16')
  assert resources.checkpoint_bytes(state(), half) == (ARRAYS - 4) // 2 + 4
  assert resources.host_bytes(state(), SAVE) == ARRAYS  # each element once, on however many devices


@pytest.mark.parametrize(
  'free, words',
  [
    ({'disk': CHECKPOINT - 1}, r'model_dir=.* has 234.0 kB free, but a checkpoint takes 234.0 kB'),
    ({'memory': ARRAYS - 1}, '260.0 kB of host memory while it is written, but 260.0 kB'),
  ],
)
def test_no_room_for_one_checkpoint_is_an_error(tmp_path, machine, free, words):
  machine(**free)
  with pytest.raises(ValueError, match=words):
    resources.check(state(), SAVE, tmp_path, 100)
  resources.check(state(), None, tmp_path, 100)  # a run that saves nothing


@pytest.mark.parametrize(
  'free, total_steps, words',
  [
    ({'disk': 3 * CHECKPOINT - 1}, 100, '3 more checkpoints'),
    ({'disk': 2 * CHECKPOINT}, 20, ''),  # it saves only two
    ({'memory': int(1.2 * ARRAYS)}, 100, 'needs 260.0 kB of host memory'),
    ({'disk': 3 * CHECKPOINT, 'memory': int(1.3 * ARRAYS)}, 100, ''),
  ],
)
def test_little_room_is_a_warning(tmp_path, machine, caplog, free, total_steps, words):
  machine(**free)
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


def test_memory_of_a_container(tmp_path, monkeypatch):
  """Its limit, less what it uses and cannot drop, by cgroups."""
  monkeypatch.setattr(resources, '_CGROUP', tmp_path)
  machine_has = resources.available_host_bytes()
  assert machine_has is None or machine_has > 1e6
  (tmp_path / 'memory.max').write_text('max\n')
  (tmp_path / 'memory.current').write_text('500000\n')
  assert resources.available_host_bytes() == pytest.approx(machine_has, rel=0.5)
  (tmp_path / 'memory.max').write_text('900000\n')
  (tmp_path / 'memory.stat').write_text('anon 1\ninactive_file 100000\n')
  assert resources.available_host_bytes() == 500000
