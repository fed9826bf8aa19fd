"""Files of an extraction: interrupted anywhere they end the same, and settings are never mixed."""

import os
import shutil
import signal
import socket
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from het_plugin import rows
from het_plugin.rows import files
from het_plugin.runs import Run, unfinished
from het_plugin.runs.unfinished import SplitFiles, safe_name
from het_plugin.system import exit_codes
from het_plugin.training.partitioning import PjitPartitioner

NUM_EXAMPLES = 43
BATCH_SIZE = 8
CLASSES = ('a', 'b', 'c')
UNREADABLE = (5, 17)
WEIGHTS = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
IMAGES = np.random.default_rng(1).normal(size=(NUM_EXAMPLES, 2, 2, 1)).astype(np.float32)
SETTINGS = {'step': 400, 'dataset': 'toy', 'split': 'train', 'dtype': 'float32'}


class KilledError(Exception):
  pass


class LinearModel:
  def representations(self, params, batch, layers):
    flat = batch['image'].reshape(len(batch['image']), 4)
    known = {'wide': flat @ params['w'], 'narrow': flat}
    return {layer: known[layer] for layer in layers}


class Stream:
  """What a data.BatchIterator is to an extraction; reading position `stop_at` is too much."""

  def __init__(self, batch_size=BATCH_SIZE, ids=None, stop_at=np.inf):
    self._ids = np.arange(NUM_EXAMPLES) if ids is None else ids
    self._batch_size = batch_size
    self._stop_at = stop_at
    self.num_examples = len(self._ids)

    self.rows = np.arange(batch_size)  # of each batch that this process feeds

  def set_state(self, state):
    self._position = state['position']

  def __iter__(self):
    for start in range(self._position, len(self._ids), self._batch_size):
      positions = np.arange(start, start + self._batch_size)
      if positions[-1] >= self._stop_at:
        raise KilledError
      real = positions < len(self._ids)
      index = np.where(real, self._ids[np.minimum(positions, len(self._ids) - 1)], 0)
      batch = {
        'image': IMAGES[index] * real[:, None, None, None],
        'label': np.where(real, index % 3, -1)[:, None].astype(np.int32),
        'index': index.astype(np.int32),
        'mask': (real & ~np.isin(index, UNREADABLE)).astype(np.float32),
      }
      yield {name: x[self.rows] for name, x in batch.items()}


def extract(
  folder,
  batches,
  batch_size=BATCH_SIZE,
  layers=('wide', 'narrow'),
  model_shards=2,
  overwrite=False,
  max_examples=None,
  **changes,
):
  """A call of the program; returns what there was to do."""
  settings = {**SETTINGS, **changes}
  target = SplitFiles(folder, 'train', '.safetensors', settings)
  pending = target.pending(layers, overwrite)
  if pending.layers:
    partitioner = PjitPartitioner(num_partitions=model_shards)
    batches.rows = partitioner.batch_rows(batch_size)
    specs = {'w': PartitionSpec(None, 'model')}
    params = jax.device_put({'w': WEIGHTS}, partitioner.shardings(specs))
    run = Run(LinearModel(), partitioner, params, specs, image_size=2, channels=1)
    bound = min(x for x in (batches.num_examples, max_examples) if x is not None)
    target.complete(pending, run, batches, batch_size, bound, pool='none', class_names=CLASSES)
  return pending


def content(folder):
  return {
    str(path.relative_to(folder)): path.read_bytes()
    for path in sorted(folder.rglob('*'))
    if path.is_file()
  }


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
  folder = tmp_path_factory.mktemp('uninterrupted')
  extract(folder, Stream())
  readable = np.setdiff1d(np.arange(NUM_EXAMPLES), UNREADABLE)
  flat = IMAGES.reshape(-1, 4)[readable]
  for layer, expected in (('wide', flat @ WEIGHTS), ('narrow', flat)):
    read = rows.read(str(folder / layer / 'train.safetensors'))
    np.testing.assert_allclose(read.features, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(read.index, readable)
    np.testing.assert_array_equal(read.label, readable % 3)
    assert read.class_names == CLASSES
    about = {'layer': layer, 'num_examples': len(readable), 'dim': expected.shape[1]}
    assert read.provenance == {**SETTINGS, **about}
  found = content(folder)
  assert sorted(found) == ['narrow/train.safetensors', 'wide/train.safetensors']
  return found


@pytest.fixture(autouse=True)
def commit_each_batch(monkeypatch):
  monkeypatch.setattr(unfinished, '_COMMIT_SECONDS', 0.0)


@pytest.mark.parametrize('stop_at,seconds', [(0, 0), (24, 0), (40, 3600)])
def test_interrupted_it_ends_bit_for_bit_the_same(
  tmp_path, uninterrupted, stop_at, seconds, monkeypatch
):
  """An exception loses nothing, however long ago the last commit was."""
  monkeypatch.setattr(unfinished, '_COMMIT_SECONDS', seconds)
  with pytest.raises(KilledError):
    extract(tmp_path, Stream(stop_at=stop_at))
  assert all(name.startswith('.unfinished.train/') for name in content(tmp_path))
  # One batch is in flight when the next cannot be read.
  assert extract(tmp_path, Stream()).position == max(stop_at - 8, 0)
  assert content(tmp_path) == uninterrupted


def test_a_signal_ends_it_with_42_and_loses_no_row(tmp_path, uninterrupted, monkeypatch):
  monkeypatch.setattr(unfinished, '_COMMIT_SECONDS', 3600)

  class Signalled(Stream):
    def __iter__(self):
      for number, batch in enumerate(super().__iter__()):
        if number == 3:
          os.kill(os.getpid(), signal.SIGTERM)
        yield batch

  with pytest.raises(exit_codes.Preempted) as error:
    extract(tmp_path, Signalled())
  assert error.value.code == 42
  assert extract(tmp_path, Stream()).position >= 8
  assert content(tmp_path) == uninterrupted


def test_killed_between_the_files_of_two_layers(tmp_path, uninterrupted, monkeypatch):
  write = files.write

  def write_one(path, written):
    if 'narrow' in str(path):
      raise KilledError
    write(path, written)

  monkeypatch.setattr(files, 'write', write_one)
  with pytest.raises(KilledError):
    extract(tmp_path, Stream())
  monkeypatch.undo()
  pending = extract(tmp_path, Stream(stop_at=0))  # no image is needed again
  assert pending.layers == ('narrow',) and pending.num_rows == 41
  assert content(tmp_path) == uninterrupted


def test_complete_files_stay_and_a_new_layer_is_added(tmp_path, uninterrupted):
  extract(tmp_path, Stream(), layers=('wide',))
  wide = tmp_path / 'wide/train.safetensors'
  before = wide.stat().st_mtime_ns
  assert extract(tmp_path, Stream(stop_at=0), layers=('wide',)).layers == ()
  assert extract(tmp_path, Stream()).layers == ('narrow',)
  assert wide.stat().st_mtime_ns == before
  assert content(tmp_path) == uninterrupted


def test_other_settings_are_an_error_until_overwritten(tmp_path):
  changes = {'dtype': 'bfloat16', 'config': 'x' * 100}
  with pytest.raises(KilledError):
    extract(tmp_path, Stream(stop_at=24))
  before = content(tmp_path)
  with pytest.raises(ValueError, match=r'dtype float32, now bfloat16; config\).*--overwrite'):
    extract(tmp_path, Stream(), **changes)
  assert content(tmp_path) == before
  extract(tmp_path, Stream(), overwrite=True, **changes)
  provenance = rows.read(str(tmp_path / 'wide/train.safetensors')).provenance
  assert changes.items() <= provenance.items() and len(content(tmp_path)) == 2


def test_max_examples_of_a_shuffled_split(tmp_path):
  ids = np.random.default_rng(2).permutation(NUM_EXAMPLES)
  with pytest.raises(KilledError):
    extract(tmp_path, Stream(ids=ids, stop_at=16), max_examples=20, dtype='bfloat16')
  extract(tmp_path, Stream(ids=ids), max_examples=20, dtype='bfloat16')
  first = sorted([i for i in ids if i not in UNREADABLE][:20])
  read = rows.read(str(tmp_path / 'narrow/train.safetensors'))
  np.testing.assert_array_equal(read.index, first)
  expected = IMAGES.reshape(-1, 4)[first].astype(ml_dtypes.bfloat16)
  np.testing.assert_array_equal(read.features, expected.astype(np.float32))


def test_rows_that_cannot_be_a_file(tmp_path):
  with pytest.raises(ValueError, match='3 examples but only 2 distinct'):
    extract(tmp_path, Stream(ids=np.array([3, 4, 3])))
  assert content(tmp_path) == {}


def test_names_of_files():
  splits = ('train', 'train[:2000]', 'train[2000:]', 'train[:50%]', 'train[:50]', '../x', 'a b')
  assert [safe_name(split) for split in splits] == [
    'train',
    'train_..2000',
    'train_2000..',
    'train_..50pct',
    'train_..50',
    '.._x',
    'a_b',
  ]


HOLDER = """
import sys
from pathlib import Path
from het_plugin.runs.unfinished import SplitFiles
with SplitFiles(Path(sys.argv[1]), 'train', '.npz', {}).held():
  print('held', flush=True)
  sys.stdin.read()
"""


def test_one_program_writes_a_split(tmp_path):
  train, test = (SplitFiles(tmp_path, split, '.npz', {}) for split in ('train', 'test'))
  command = [sys.executable, '-c', HOLDER, str(tmp_path)]
  other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
  assert other.stdout.readline() == 'held\n'
  with test.held():
    pass
  with pytest.raises(ValueError, match='another program writes its split train'), train.held():
    pass
  other.communicate()
  with train.held():
    pass
  assert not [*tmp_path.iterdir()]


def test_rows_that_have_gone_make_no_file(tmp_path):
  with pytest.raises(KilledError):
    extract(tmp_path, Stream(stop_at=2 * BATCH_SIZE))
  with pytest.raises(KilledError):
    extract(tmp_path, Stream(stop_at=4 * BATCH_SIZE))
  first, *_ = sorted((tmp_path / '.unfinished.train').glob('[0-9]*.npz'))
  first.unlink()
  with pytest.raises(ValueError, match='another program has changed it'):
    extract(tmp_path, Stream())
  assert not [*tmp_path.rglob('*.safetensors')]
  assert extract(tmp_path, Stream()).position == 0


PROCESS = """
import sys
from pathlib import Path
import jax
from tests.runs import test_unfinished
folder, stop_at, address, process = sys.argv[1:]
jax.config.update('jax_num_cpu_devices', 1)
jax.distributed.initialize(address, 2, int(process))
test_unfinished.unfinished._COMMIT_SECONDS = 0.0
stream = test_unfinished.Stream(stop_at=float(stop_at))
try:
  print(test_unfinished.extract(Path(folder), stream, model_shards=1).position)
except test_unfinished.KilledError:
  print('killed')
"""


def extract_by_two(folder, stop_at):
  """What two processes print."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  command = [sys.executable, '-c', PROCESS, str(folder), str(stop_at), address]
  environment = {**os.environ, 'XLA_FLAGS': ''}
  both = [
    subprocess.Popen([*command, number], stdout=subprocess.PIPE, text=True, env=environment)
    for number in '01'
  ]
  return [process.communicate(timeout=300)[0].split()[-1] for process in both]


@pytest.mark.slow
def test_two_processes_write_their_rows_and_one_goes_on(tmp_path, uninterrupted):
  two = tmp_path / 'two'
  assert extract_by_two(two, 24) == ['killed', 'killed']
  assert not list(two.glob('wide/*'))
  one = tmp_path / 'one'
  shutil.copytree(two, one)
  assert extract_by_two(two, np.inf) == ['16', '16']
  assert extract(one, Stream(), model_shards=1).position == 16
  shards = [f'train-0000{i}-of-00002.safetensors' for i in (0, 1)]
  assert list(content(two)) == [f'{layer}/{x}' for layer in ('narrow', 'wide') for x in shards]
  assert list(content(one)) == list(uninterrupted)
  for layer in ('narrow', 'wide'):
    alone = rows.read(str(one / layer / 'train.safetensors'))
    found = rows.read(str(two / layer / 'train-*-of-00002.safetensors'))
    assert found.provenance == alone.provenance
    assert min(len(rows.read(str(two / layer / x))) for x in shards) > 15
    for name in ('features', 'labels', 'index'):
      want = getattr(alone, name)
      np.testing.assert_allclose(getattr(found.ordered(), name), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(alone.index, np.setdiff1d(np.arange(NUM_EXAMPLES), UNREADABLE))
  assert extract(two, Stream(stop_at=0)).layers == ()  # nothing is left
  extract(two, Stream(), overwrite=True, dtype='bfloat16')
  assert list(content(two)) == list(uninterrupted)  # no shard of before
