import gc
import threading
import time

import jax
import numpy as np
import pytest

from het_plugin.data import (
  BatchIterator,
  DatasetConfig,
  classification_info,
  get_dataset,
  pipeline,
  task_info,
  tasks,
)
from het_plugin.data.sources import TaskInfo
from het_plugin.runs import Run
from het_plugin.training.partitioning import PjitPartitioner
from tests.waiting import wait_for

GLYPHS = dict(mixture_or_task_name='glyphs_core', task_feature_lengths={'image': 28, 'label': 1})


@pytest.fixture(scope='module')
def npz_captions(tmp_path_factory):
  """Every image has up to three captions; the third image of each split has none."""
  path = tmp_path_factory.mktemp('arrays') / 'captions.npz'
  rng = np.random.default_rng(0)
  captions = np.array(
    [[f'image {i}', f'{i} again', '' if i % 2 else f'no. {i}'] for i in range(30)]
  )
  captions[[2, 23]] = ''
  np.savez(
    path,
    image=rng.integers(0, 256, (30, 12, 12, 3), np.uint8),
    caption=captions,
    split=np.repeat(['train', 'validation'], [21, 9]),
  )
  return path


@pytest.fixture(params=['glyphs_core', 'image_folder_captions'])
def settings(request, photos):
  """Of an endless task of labels and a finite one of captions, without the split."""
  name = request.param
  annotation = {'label': 3}
  if name == 'image_folder_captions':
    name = f'{name}:{photos}'
    annotation = {'text': 16}
  return dict(
    mixture_or_task_name=name,
    task_feature_lengths={'image': 12, **annotation},
    batch_size=8,
    max_corrupt_fraction=0.2,
  )


def assert_same(batch, other):
  assert batch.keys() == other.keys()
  for name in batch:
    np.testing.assert_array_equal(batch[name], other[name], err_msg=name)


def take(iterator, count):
  return [next(iterator) for _ in range(count)]


def test_batches_have_the_shapes_and_types_of_the_contract(settings):
  iterator = get_dataset(DatasetConfig(**settings, split='train'))
  batch = next(iterator)
  channels = task_info(settings['mixture_or_task_name']).channels
  has_text = 'text' in settings['task_feature_lengths']
  assert iterator.element_spec == {
    'image': jax.ShapeDtypeStruct((8, 12, 12, channels), np.float32),
    'text' if has_text else 'label': jax.ShapeDtypeStruct((8, 16 if has_text else 3), np.int32),
    'index': jax.ShapeDtypeStruct((8,), np.int32),
    'mask': jax.ShapeDtypeStruct((8,), np.float32),
  }
  for name, spec in iterator.element_spec.items():
    assert (batch[name].shape, batch[name].dtype) == (spec.shape, spec.dtype), name
  assert batch['image'].min() >= -1 and batch['image'].max() <= 1
  assert np.ptp(batch['image']) > 0.5


def test_a_restored_iterator_continues_as_if_never_interrupted(settings):
  cfg = DatasetConfig(**settings, split='train', seed=5)
  batches = take(get_dataset(cfg), 7)  # more than one epoch of the small ones
  first = get_dataset(cfg)
  for batch in batches[:3]:
    assert_same(next(first), batch)
  state = first.get_state()
  assert state == {'position': 24}

  resumed = get_dataset(cfg)
  resumed.set_state(state)
  for batch in batches[3:]:
    assert_same(next(resumed), batch)
  resumed.set_state({'position': 8})  # backwards, with batches read ahead
  assert_same(next(resumed), batches[1])


def test_the_union_over_hosts_is_the_global_batch(settings):
  cfg = DatasetConfig(**settings, split='train', seed=5)
  whole = get_dataset(cfg)
  hosts = [[0, 1, 2], [6, 3], [4, 5, 7, 0]]  # row 0 is on two hosts, as along a model axis
  parts = [get_dataset(cfg, rows) for rows in hosts]
  for step in range(2):
    if step == 1:  # state is the same on every host: any host's restores any other
      for part in parts:
        part.set_state(whole.get_state())
    batch = next(whole)
    for rows, part in zip(hosts, parts, strict=True):
      assert_same(next(part), {name: x[rows] for name, x in batch.items()})


def test_evaluation_is_one_pass_with_a_masked_tail(settings):
  iterator = get_dataset(DatasetConfig(**settings, split='validation', shuffle=False))
  total = task_info(settings['mixture_or_task_name']).splits['validation']
  assert total % 8
  position = 8 * (iterator.num_batches - 2)
  iterator.set_state({'position': position})
  batches = list(iterator)
  assert iterator.num_batches == -(-total // 8) and len(batches) == 2
  mask = np.concatenate([batch['mask'] for batch in batches])
  index = np.concatenate([batch['index'] for batch in batches])
  records = np.arange(position, position + 16)
  np.testing.assert_array_equal(mask, records < total)
  np.testing.assert_array_equal(index[: total - position], np.arange(position, total))
  name = 'text' if 'text' in batches[0] else 'label'
  padding = 0 if name == 'text' else -1
  assert all((batch[name][batch['mask'] == 0] == padding).all() for batch in batches)
  with pytest.raises(StopIteration):
    next(iterator)


def read_all(**settings):
  """Every batch in one, without padding and unreadable records."""
  batches = list(get_dataset(DatasetConfig(**settings)))
  whole = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
  return {name: x[whole['mask'] == 1] for name, x in whole.items()}


@pytest.mark.parametrize('shuffle', [False, True])
def test_slices_are_the_records_of_the_split(settings, shuffle):
  settings = settings | {'augment': False, 'num_epochs': 1}
  split = 'train' if 'text' in settings['task_feature_lengths'] else 'validation'
  slices = [f'{split}[3:9]', f'{split}[-5:]']
  total = task_info(settings['mixture_or_task_name']).splits[split]
  expected = [np.arange(3, 9), np.arange(total - 5, total)]
  for name, records in zip(slices, expected, strict=True):
    part = read_all(**settings, split=name, shuffle=shuffle)
    assert set(part['index']) <= set(records) and len(part['index']) >= len(records) - 1
    if not shuffle:
      assert (np.diff(part['index']) > 0).all()
    whole = get_dataset(DatasetConfig(**settings, split=split, shuffle=False))
    for row, number in enumerate(part['index']):
      whole.set_state({'position': int(number) // 8 * 8})
      batch = next(whole)
      assert batch['index'][number % 8] == number
      for feature in ('image', *set(batch) & {'label', 'text'}):
        np.testing.assert_array_equal(part[feature][row], batch[feature][number % 8])
    whole.close()


def of_photos(photos, split, batch_size, **settings):
  lengths = {'image': 12, 'label': 1}
  return get_dataset(
    DatasetConfig(f'image_folder:{photos}', lengths, split, batch_size, **settings)
  )


def test_a_slice_of_train_is_evaluated_unless_augment_says_otherwise(photos):
  evaluation, plain, training, bounded = (
    of_photos(photos, 'train[:6]', 3, shuffle=False, **settings)
    for settings in ({}, {'augment': False}, {'augment': True}, {'augment': True, 'num_epochs': 2})
  )
  assert evaluation.num_batches == plain.num_batches == 2
  assert_same(next(evaluation), next(plain))
  assert training.num_batches is None
  first, _, again = take(training, 3)
  np.testing.assert_array_equal(first['label'], again['label'])
  assert not np.array_equal(first['image'], again['image'])
  assert bounded.num_batches == 4
  assert of_photos(photos, 'train', 3, augment=False).num_batches is None


def test_captions_are_those_of_their_images(npz_captions):
  """Through shuffling, epochs and slices; in training any one, in evaluation the first."""
  with np.load(npz_captions) as arrays:
    images = arrays['image'].astype(np.float32) * (2 / 255) - 1
    captions = arrays['caption']
  settings = dict(
    mixture_or_task_name=f'npz_captions:{npz_captions}',
    task_feature_lengths={'image': 12, 'text': 16},
    batch_size=4,
    max_corrupt_fraction=0.2,
  )

  def pairs(num_batches, **kwargs):
    iterator = get_dataset(DatasetConfig(**settings, **kwargs))
    for batch in take(iterator, num_batches):
      for i in np.flatnonzero(batch['mask']):
        (number,) = np.flatnonzero(np.abs(images - batch['image'][i]).max(axis=(1, 2, 3)) < 1e-6)
        text = bytes(token - 3 for token in batch['text'][i].tolist() if token > 2).decode()
        yield number, list(captions[number]).index(text)

  training = set(pairs(200, split='train'))
  assert training == {(i, j) for i in range(21) for j in range(3 - i % 2) if i != 2}
  assert set(pairs(3, split='train[:50%]')) == {(i, 0) for i in range(10) if i != 2}


def test_resize_is_chosen_for_photographs(photos, monkeypatch):
  monkeypatch.setattr(tasks, '_SMALL', 0)
  tasks._made.cache_clear()
  images = {
    mode: next(of_photos(photos, 'validation', 9, shuffle=False, resize=mode))['image']
    for mode in (None, 'aspect', 'squash')
  }
  np.testing.assert_array_equal(images[None], images['aspect'])
  assert not np.array_equal(images[None], images['squash'])
  run = Run(None, PjitPartitioner(), {}, {}, 12, 3, task=f'image_folder:{photos}', resize='squash')
  with run.open_split('validation', batch_size=16) as (batches, _):  # as training evaluated
    np.testing.assert_array_equal(next(batches)['image'][:9], images['squash'])
  with pytest.raises(ValueError, match="resize is 'squash'; .*augmented"):
    of_photos(photos, 'validation', 9, resize='squash', augment=True)
  with pytest.raises(ValueError, match="resize is 'squash'; .*digits"):
    get_dataset(DatasetConfig('digits', {'image': 8, 'label': 1}, 'test', 4, resize='squash'))


def test_an_error_of_the_background_thread_reaches_the_consumer(photos):
  iterator = of_photos(photos, 'train', 21, max_corrupt_fraction=0.01)
  for _ in range(2):  # it stays where it is
    with pytest.raises(ValueError, match='1 of 21 .*002.jpg'):
      next(iterator)
  assert iterator.get_state() == {'position': 0}


class SlowSource:
  """Counts how far it has been read."""

  def __init__(self):
    self.info = TaskInfo(2, False, 1, None, {'train': None})
    self.last = -1

  def read(self, split, ids, size, seed):
    self.last = max(self.last, int(ids.max()))
    return np.zeros((len(ids), size, size, 1), np.float32), np.zeros((len(ids), 1), np.int32)


def test_threads_change_neither_the_order_nor_the_batches(monkeypatch):
  """Blocks of 3 rows of batches of 10, the later ones read faster."""

  class Numbers(SlowSource):
    def read(self, split, ids, size, seed):
      time.sleep(0.005 / (1 + ids.min()))
      images = np.broadcast_to(ids[:, None, None, None], (len(ids), size, size, 1))
      return images.astype(np.float32), ids.astype(np.int32)[:, None]

  monkeypatch.setattr(pipeline, '_BLOCK', 3)
  task = tasks.ImageTask('numbers', Numbers())
  for num_threads in (1, 8):
    cfg = DatasetConfig(task, {'image': 2, 'label': 1}, 'train', 12, num_threads=num_threads)
    iterator = get_dataset(cfg, rows=np.arange(2, 12))
    for start in (0, 12, 24, 36):
      batch = next(iterator)
      assert iterator.get_state() == {'position': start + 12}
      for name in batch:
        flat = batch[name].reshape(10, -1)[:, 0]
        np.testing.assert_array_equal(
          flat, 1 if name == 'mask' else np.arange(start + 2, start + 12)
        )
    iterator.set_state({'position': 12})
    np.testing.assert_array_equal(next(iterator)['index'], np.arange(14, 24))
    iterator.close()


@pytest.mark.slow
def test_reading_ahead_is_bounded_and_the_threads_end():
  source = SlowSource()
  task = tasks.ImageTask('slow_source', source)
  cfg = DatasetConfig(task, {'image': 4, 'label': 1}, 'train', 2, num_threads=2)
  before = set(threading.enumerate())

  def ended():
    gc.collect()
    return not set(threading.enumerate()) - before

  iterator = get_dataset(cfg)
  next(iterator)
  wait_for(lambda: source.last >= 2)
  time.sleep(0.2)
  assert not ended() and source.last < 2 * 4
  iterator.close()
  wait_for(ended)
  dropped = get_dataset(cfg)
  next(dropped)
  del dropped
  wait_for(ended)


@pytest.mark.slow
def test_processes_read_the_same_batches(photos):
  threads, processes = (
    of_photos(photos, 'train', 8, max_corrupt_fraction=0.1, **settings)
    for settings in ({}, {'num_workers': 2, 'num_threads': 1})
  )
  for iterator in (threads, processes):
    iterator.set_state({'position': 8})
  for _ in range(4):
    assert_same(next(processes), next(threads))
  assert processes.corrupt_records == threads.corrupt_records
  processes.close()


BAD_CONFIGS = {
  "mixture_or_task_name is 'glyph_core'; .*digits, glyph_names, .*glyphs_core, ": {
    'mixture_or_task_name': 'glyph_core'
  },
  "task_feature_lengths is .*'text': 8}; .*{'image': H, 'label': L}": {
    'task_feature_lengths': {'image': 28, 'text': 8}
  },
}


@pytest.mark.parametrize('message', BAD_CONFIGS)
def test_errors_before_anything_is_read(message):
  settings = {**GLYPHS, 'split': 'train', 'batch_size': 4} | BAD_CONFIGS[message]
  with pytest.raises(ValueError, match=message):
    get_dataset(DatasetConfig(**settings))


def test_arrays_are_read_by_threads_only():
  cfg = DatasetConfig('digits', {'image': 8, 'label': 1}, 'train', 4, num_workers=1)
  with pytest.raises(ValueError, match='num_workers is 1; it must be 0 for digits'):
    get_dataset(cfg)


def test_wrong_rows_state_and_kind_of_task():
  cfg = DatasetConfig(**GLYPHS, split='train', batch_size=4)
  with pytest.raises(ValueError, match=r'rows is \[-1, 2\]'):
    get_dataset(cfg, [-1, 2])
  iterator = get_dataset(cfg)
  assert isinstance(iterator, BatchIterator)
  with pytest.raises(ValueError, match="state is {'position': -1}"):
    iterator.set_state({'position': -1})
  with pytest.raises(ValueError, match="task is 'glyph_names'"):
    classification_info('glyph_names')
