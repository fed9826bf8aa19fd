import dataclasses
import pathlib
import pickle
import types

import numpy as np
import pytest

from het_plugin.data import DatasetConfig, array_source, get_dataset
from het_plugin.models import soft_labels


def write(path, **arrays):
  np.savez(path, **arrays)
  return str(path)


def images(n, size=6, dtype=np.uint8):
  return np.random.default_rng(0).integers(0, 256, (n, size, size)).astype(dtype)


def test_digits():
  source = array_source.digits_source()
  assert source.info.splits == {'train': 1438, 'test': 359}
  pictures, labels = source.read('train', np.arange(1438), 8, seed=0)
  test_pictures, test_labels = source.read('test', np.arange(359), 8, seed=0)
  assert pictures.shape == (1438, 8, 8, 1) and pictures.dtype == np.float32
  assert pictures.min() == -1 and pictures.max() == 1
  assert np.bincount(labels[:, 0]).min() > 100 and np.bincount(test_labels[:, 0]).min() > 20
  everything = {p.tobytes() for p in pictures} | {p.tobytes() for p in test_pictures}
  assert len(everything) > 1790  # the splits are disjoint (a few digits may be the same picture)


def test_a_worker_process_gets_a_copy(tmp_path):
  """Also of a source whose arrays are loaded: Kauldron reads in 16 processes."""
  path = write(tmp_path / 'a.npz', image=images(10), label=np.arange(10))
  features = write(tmp_path / 'b.npz', features=np.ones((10, 4), np.float32), label=np.arange(10))
  for source, size in (
    (array_source.digits_source(), 8),
    (array_source.npz_source(path), 6),
    (array_source.features_source(features), 1),
  ):
    read = source.read('train', np.arange(5), size, seed=0)
    copy = pickle.loads(pickle.dumps(source))
    assert copy.info == source.info
    for x, y in zip(copy.read('train', np.arange(5), size, seed=0), read, strict=True):
      np.testing.assert_array_equal(x, y)


def test_npz_uint8_and_the_split_it_makes(tmp_path):
  array = images(50)
  label = np.arange(50) % 7
  source = array_source.npz_source(write(tmp_path / 'a.npz', image=array, label=label))
  assert source.info.splits == {'train': 45, 'validation': 5}
  assert (source.info.num_classes, source.info.channels) == (7, 1)
  seen = {}
  for split, count in source.info.splits.items():
    pictures, labels = source.read(split, np.arange(count), 6, seed=0)
    for picture, row in zip(pictures, labels, strict=True):
      seen[picture[..., 0].tobytes()] = row[0]
  assert len(seen) == 50
  assert all(seen[picture.tobytes()] == k for picture, k in zip(array, label, strict=True))


def test_npz_float_multi_label_names_and_splits(tmp_path):
  path = write(
    tmp_path / 'a.npz',
    image=np.linspace(0, 1, 3 * 4 * 4 * 3).reshape(3, 4, 4, 3),
    label=np.array([[0, 2, -1], [1, -1, -1], [-1, -1, -1]]),
    class_name=np.array(['a', 'b', 'c', 'd']),
    split=np.array(['train', 'test', 'train']),
  )
  source = array_source.npz_source(path)
  info = source.info
  assert info.splits == {'train': 2, 'test': 1} and info.class_names == ('a', 'b', 'c', 'd')
  assert (info.num_classes, info.channels, info.max_labels) == (4, 3, 3) and info.multi_label
  pictures, labels = source.read('train', np.array([1, 0]), 4, seed=0)
  np.testing.assert_array_equal(labels, [[-1, -1, -1], [0, 2, -1]])
  assert pictures.dtype == np.float32 and pictures.max() == 1 and pictures.min() == -1
  with pytest.raises(ValueError, match=r"\['label'\] is 2; .*npz:.* 3 labels"):
    get_dataset(DatasetConfig(path, {'image': 4, 'label': 2}, 'train', 4))


def test_soft_labels_votes_and_example_weights(tmp_path):
  soft = np.array([[0.5, 0, 0.5], [0, 1, 0], [0.2, 0.3, 0.5]])
  weight = np.array([1, 2, 0.5])
  path = write(tmp_path / 'a.npz', image=images(3), label=soft, weight=weight, split=['train'] * 3)
  info = array_source.npz_source(path).info
  assert info.label_fields == ('label_weight', 'weight') and not info.multi_label
  assert info.num_classes == info.max_labels == 3
  cfg = DatasetConfig(path, {'image': 6, 'label': 4}, 'train', 4, shuffle=False, augment=False)
  iterator = get_dataset(dataclasses.replace(cfg, num_epochs=1))
  batch = next(iterator)
  for name, spec in iterator.element_spec.items():
    assert (batch[name].shape, batch[name].dtype) == (spec.shape, spec.dtype), name
  dense = np.zeros((4, 3))
  for row, (classes, weights) in enumerate(zip(batch['label'], batch['label_weight'], strict=True)):
    np.add.at(dense[row], classes[classes >= 0], weights[classes >= 0])
  np.testing.assert_allclose(dense[:3], soft, atol=1e-6)
  np.testing.assert_allclose(batch['weight'], [*weight, 0])
  assert not batch['label_weight'][3].any() and (batch['label'][3] == -1).all()


@pytest.mark.parametrize('kind', ['U', 'S'])
def test_votes_with_annotators(tmp_path, kind):
  votes = np.array([[0, 2], [1, -1], [2, 2]])
  who = np.array([['eva', 'ben'], ['ben', ''], ['ada', 'eva']]).astype(kind)
  path = write(tmp_path / 'a.npz', image=images(3), label=votes, annotator=who, split=['train'] * 3)
  info = array_source.npz_source(path).info
  assert info.annotators == ('ada', 'ben', 'eva') and info.label_fields == ('annotator',)
  cfg = DatasetConfig(path, {'image': 6, 'label': 3}, 'train', 4, shuffle=False, num_epochs=1)
  batch = next(get_dataset(cfg))
  expected = [[2, 1, -1], [1, -1, -1], [0, 2, -1], [-1] * 3]
  np.testing.assert_array_equal(batch['annotator'], expected)
  np.testing.assert_array_equal(batch['label'][2], [2, 2, -1])


@pytest.mark.parametrize('augmentation', ['mixup', 'cutmix'])
@pytest.mark.parametrize('named', [False, True])
@pytest.mark.parametrize('weight', [None, [10.0, 1.0], [1.0, 0.0]])
def test_mixed_images_with_votes_keep_their_shares_and_weights(
  tmp_path, weight, named, augmentation
):
  votes = np.array([[0, 0], [1, -1]])
  who = np.array([[5, 6], [5, -1]])
  image = np.stack([np.zeros((6, 6, 1)), np.ones((6, 6, 1))])  # black is class 0
  arrays = {'image': image, 'label': votes, 'split': ['train'] * 2}
  arrays |= {'annotator': who} if named else {}
  path = write(tmp_path / 'a.npz', **arrays, **({} if weight is None else {'weight': weight}))
  lengths = {'image': 6, 'label': 2}
  cfg = DatasetConfig(path, lengths, 'train', 2, augmentations=(augmentation,), shuffle=False)
  batch = next(get_dataset(cfg))
  white = (batch['image'].mean((1, 2, 3)) + 1) / 2
  for k, share in ((0, 1 - white), (1, white)):
    of_class = np.where(batch['label'] == k, batch['label_weight'], 0).sum(1)
    if weight is not None:
      of_class = of_class * batch['weight']
      share = share * weight[k]
    np.testing.assert_allclose(of_class, share, rtol=1e-4)
  if named:
    assert batch['annotator'].shape == batch['label'].shape
  elif weight is None:  # the labels may also be classes that a sigmoid has on at once
    logits = types.SimpleNamespace(location=np.zeros((2, 2)), link='sigmoid', num_classes=2)
    on = soft_labels.targets(batch, logits)
    np.testing.assert_allclose(on, np.stack([1 - white, white], 1), rtol=1e-4)


def test_several_classes_of_mixed_images(tmp_path):
  """A class of a mixed image is on with the share of its image, however many others are on."""
  image = np.stack([np.zeros((6, 6, 1)), np.ones((6, 6, 1))])
  label = np.array([[0, 1, 2], [3, -1, -1]])
  path = write(tmp_path / 'a.npz', image=image, label=label, split=['train'] * 2)
  lengths = {'image': 6, 'label': 3}
  cfg = DatasetConfig(path, lengths, 'train', 2, augmentations=('mixup',), shuffle=False)
  batch = next(get_dataset(cfg))
  white = (batch['image'].mean((1, 2, 3)) + 1) / 2
  black = 1 - white
  for link, one in {'softmax': black / 3, 'sigmoid': black}.items():
    logits = types.SimpleNamespace(location=np.zeros((2, 4)), link=link, num_classes=4)
    target = soft_labels.targets(batch, logits)
    np.testing.assert_allclose(target, np.stack([one, one, one, white], 1), rtol=1e-4)
    np.testing.assert_allclose(
      soft_labels.correct(np.array([1, 3]), batch, link), target[[0, 1], [1, 3]], rtol=1e-5
    )


BAD_FILES = {
  "has 'splits': did you mean 'split'": {
    'image': images(2),
    'label': np.arange(2),
    'splits': ['train', 'test'],
  },
  'vote 2 of example 0 .*annotator': {
    'image': images(2),
    'label': np.array([[0, 1], [1, -1]]),
    'annotator': np.array([[7, -1], [7, -1]]),
  },
  'weights of example 1 sum to 0.9': {
    'image': images(2),
    'label': np.array([[0.5, 0.5], [0.5, 0.4]]),
  },
  r'annotator is float64 \(2, 1\); .*integers or strings \(2, 1\)': {
    'image': images(2),
    'label': np.zeros((2, 1), int),
    'annotator': np.array([[7], [np.nan]]),
  },
  r'weight is <U1 \(2,\); .*numbers \(2,\)': {
    'image': images(2),
    'label': np.zeros(2, int),
    'weight': np.array(['1', '2']),
  },
  'weight of all examples is 0; it must be above 0': {
    'image': images(2),
    'label': np.zeros(2, int),
    'weight': np.zeros(2),
  },
  r'class_name is \(2, 1\); .*\[K\]': {
    'image': images(2),
    'label': np.arange(2),
    'class_name': [['a'], ['b']],
  },
  r"\['label'\] .*\['image', 'x'\]": {'image': images(2), 'x': np.zeros(2)},
  r'label -1 of example 1 .* 0 .. 0': {
    'image': images(2),
    'label': np.array([0, -1]),
  },
  r'label -5 of example 0 .* 0 .. K - 1\.': {
    'image': images(2),
    'label': np.array([-5, -4]),
  },
  'no example has a label': {
    'image': images(2),
    'label': np.full((2, 2), -1),
  },
  r'label is \(2, 3\) of 0 and 1': {
    'image': images(2),
    'label': np.eye(3, dtype=int)[:2],
    'class_name': ['a', 'b', 'c'],
  },
  r'image is \(2, 4\); .*\[N, H, W\]': {'image': np.zeros((2, 4)), 'label': np.zeros(2, int)},
}


@pytest.mark.parametrize('message', BAD_FILES)
def test_bad_npz(tmp_path, message):
  with pytest.raises(ValueError, match=message):
    array_source.npz_source(write(tmp_path / 'a.npz', **BAD_FILES[message]))


def test_float_images_out_of_range(tmp_path):
  path = write(tmp_path / 'a.npz', image=np.full((3, 4, 4), np.nan), label=np.zeros(3, int))
  with pytest.raises(ValueError, match=r'\[0, 1\].*\[nan, nan\]'):
    array_source.npz_source(path).load()


@pytest.mark.parametrize('damage', ['truncated', 'flipped'])
def test_a_damaged_file_is_one_sentence_before_training(tmp_path, damage):
  path = write(tmp_path / 'a.npz', image=images(50), label=np.arange(50))
  content = bytearray(pathlib.Path(path).read_bytes())
  content[len(content) // 3] ^= 0x40  # within the array of images
  end = len(content) // 2 if damage == 'truncated' else None
  pathlib.Path(path).write_bytes(content[:end])
  with pytest.raises(ValueError, match=r'^npz:.*a.npz .*NPZ'):
    get_dataset(DatasetConfig(path, {'image': 6, 'label': 1}, 'train', 4))


def captions(*texts):
  return np.array(texts)


def test_npz_captions(tmp_path):
  array = images(5)
  path = write(
    tmp_path / 'a.npz',
    image=array,
    caption=captions('one', 'zwei ✓', '', 'four', 'five'),
    split=captions('train', 'test', 'train', 'test', 'train'),
  )
  source = array_source.npz_captions_source(path)
  info = source.info
  assert info.splits == {'train': 3, 'test': 2} and info.channels == 1
  assert info.vocab_size is None and 'caption.npy' in info.version
  pictures, texts = source.read('train', np.array([2, 0, 1]), 6, seed=0)
  assert [list(several) for several in texts] == [['five'], ['one'], ['']]
  np.testing.assert_array_equal(pictures[..., 0], array[[4, 0, 2]])
  _, texts = source.read('test', np.arange(2), 6, seed=0)
  assert [list(several) for several in texts] == [['zwei ✓'], ['four']]


BAD_CAPTIONS = {
  r"\['caption'\] .*\['image'\]": {'image': images(2)},
  r'caption is <U1 \(3,\); .*N = 2': {
    'image': images(2),
    'caption': captions('a', 'b', 'c'),
  },
}


@pytest.mark.parametrize('message', BAD_CAPTIONS)
def test_bad_npz_captions(tmp_path, message):
  path = write(tmp_path / 'a.npz', **BAD_CAPTIONS[message])
  with pytest.raises(ValueError, match=f'npz_captions:{path}.*{message}'):
    array_source.npz_captions_source(path)


@pytest.mark.parametrize(
  ('shape', 'channels', 'message'),
  [
    ((2, 8, 8), None, None),
    ((2, 3, 8, 3), None, None),
    ((2, 8, 6, 4), 4, None),
    ((2, 8, 6, 12), 12, None),
    ((2, 3, 32, 48), None, r'\[2, 3, 32, 48\], which looks like channels first; .*\(0, 2, 3, 1\)'),
    ((2, 1, 28, 30), None, 'looks like channels first'),
    ((2, 4, 32, 32), None, 'looks like channels first'),
    ((2, 12, 8, 8), None, 'which has C = 8; .*channels=8 in the file'),
    ((2, 12, 8, 8), 12, r'channels is 12, .* \[N, H, W, C\] with C = 12'),
    ((2, 8, 8, 8), 1.5, r'channels is float64 \[\]; it must be one integer'),
  ],
)
def test_the_axis_of_the_channels(tmp_path, shape, channels, message):
  given = {} if channels is None else {'channels': channels}
  path = write(tmp_path / 'a.npz', image=np.zeros(shape), label=np.arange(2), **given)
  if message is None:
    source = array_source.npz_source(path)
    assert source.info.channels == (*shape, 1)[3]
    assert source.read('train', np.arange(1), 8, 0)[0].shape[3] == source.info.channels
  else:
    with pytest.raises(ValueError, match=message):
      array_source.npz_source(path)
