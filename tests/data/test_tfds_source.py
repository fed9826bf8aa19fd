import numpy as np
import pytest

tfds = pytest.importorskip('tensorflow_datasets')

from het_plugin.data import DatasetConfig, get_dataset, preprocess, tasks, tfds_source  # noqa: E402

LABEL = tfds.features.ClassLabel(names=['a', 'b', 'c'])


def example(features, i):
  """Picture i is i everywhere; its label is i mod 3, and i + 1 mod 3 too if it may have two."""
  label_key = next(key for key in features if key != 'image')
  several = isinstance(features[label_key], tfds.features.Sequence)
  label = [i % 3, (i + 1) % 3][: 1 + i % 2] if several else i % 3
  return {'image': np.full((4 + i, 5, 3), i, np.uint8), label_key: label}


@pytest.fixture(scope='module')
def data_sets(tfds_files):
  image = tfds.features.Image(shape=(None, None, 3))

  def write(name, file_format='array_record', **features):
    examples = [example(features, i) for i in range(6)]
    tfds_files.write(name, features, {'train': examples}, file_format)

  write('tiny_single', image=image, label=LABEL)
  write('tiny_multi', image=image, labels=tfds.features.Sequence(LABEL))
  write('tiny_sequential', 'tfrecord', image=image, label=LABEL)
  write('tiny_regression', image=image, label=tfds.features.Scalar(np.int64))


@pytest.mark.usefixtures('data_sets')
def test_single_label():
  source = tfds_source.TfdsSource('tiny_single')
  info = source.info
  assert (info.num_classes, info.multi_label, info.splits) == (3, False, {'train': 6})
  assert info.class_names == ('a', 'b', 'c')
  images, labels = source.read('train', np.array([5, 0, 3]), 8, seed=0)
  np.testing.assert_array_equal(labels, [[2], [0], [0]])
  images = [np.asarray(preprocess.decode(image)) for image in images]
  assert [image.shape for image in images] == [(9, 5, 3), (4, 5, 3), (7, 5, 3)]
  assert [image[0, 0, 0] for image in images] == [5, 0, 3]


@pytest.mark.parametrize('channels', [1, 4])
def test_grey_and_transparent_images(tfds_files, channels):
  image = tfds.features.Image(shape=(6, 5, channels), encoding_format='png')
  features = {'image': image, 'label': LABEL}
  pixels = np.arange(30 * channels, dtype=np.uint8).reshape(6, 5, channels)
  name = f'tiny_{channels}_channels'
  tfds_files.write(name, features, {'train': [{'image': pixels, 'label': 1}]})
  source = tasks.get_task(f'tfds:{name}').examples
  assert source.info.channels == channels
  images, _ = source.read('train', np.array([0]), 6, seed=0)
  np.testing.assert_array_equal(preprocess.decode(images[0], channels), pixels)
  cfg = DatasetConfig(f'tfds:{name}', {'image': 6, 'label': 1}, 'train', 1, num_epochs=1)
  assert next(get_dataset(cfg))['image'].shape == (1, 6, 6, channels)


@pytest.mark.usefixtures('data_sets')
def test_multi_label():
  source = tfds_source.TfdsSource('tiny_multi')
  assert source.info.multi_label
  _, labels = source.read('train', np.arange(3), 8, seed=0)
  np.testing.assert_array_equal(labels, [[0, -1], [1, 2], [2, -1]])


@pytest.mark.usefixtures('data_sets')
def test_names_with_and_without_prefix_and_version():
  for name in ('tfds:tiny_single', 'tiny_single', 'tiny_single:1.0.0'):
    assert tasks.get_task(name).examples.info.num_classes == 3


@pytest.mark.usefixtures('data_sets')
def test_errors():
  with pytest.raises(ValueError, match='tfds:tiny_nothing: '):
    tfds_source.TfdsSource('tiny_nothing')
  with pytest.raises(ValueError, match='tfds convert_format .*tiny_sequential/1.0.0'):
    tfds_source.TfdsSource('tiny_sequential')
  with pytest.raises(ValueError, match=r"'label'.*\['image', 'label'\]"):
    tfds_source.TfdsSource('tiny_regression')
  with pytest.raises(ValueError, match='mnist .*tfds build mnist'):
    tfds_source.TfdsSource('mnist')
  with pytest.raises(ValueError, match='tfds:two words: .* knows no such data set'):
    tfds_source.TfdsSource('two words')
  for name in ('mnist/unknown', 'mnist:7'):  # TFDS answers with several lines
    with pytest.raises(ValueError, match=rf'^tfds:{name} cannot be opened: [^\n]*$'):
      tfds_source.TfdsSource(name)


TEXT = tfds.features.Text()
CAPTIONS = {  # features of data sets that there are, and example i of each
  'tiny_texts': (
    {'captions': tfds.features.Sequence(TEXT)},
    lambda i: {'captions': [f'{i} {j}' for j in range(i)]},
  ),
  'tiny_coco': (
    {'captions': tfds.features.Sequence({'id': np.int64, 'text': np.str_}), 'text': TEXT},
    lambda i: {'captions': [{'id': j, 'text': f'{i} {j}'} for j in range(i)], 'text': 'other'},
  ),
  'tiny_supervised': ({'alt': TEXT, 'text': TEXT}, lambda i: {'alt': f'only {i}', 'text': ''}),
}


@pytest.fixture(scope='module')
def caption_data_sets(tfds_files):
  image = tfds.features.Image(shape=(None, None, 3))
  for name, (features, make) in CAPTIONS.items():
    examples = [{'image': np.full((4 + i, 5, 3), i, np.uint8), **make(i)} for i in range(4)]
    keys = ('image', 'alt') if name == 'tiny_supervised' else None
    tfds_files.write(name, {'image': image, **features}, {'train': examples}, supervised_keys=keys)


@pytest.mark.usefixtures('caption_data_sets')
@pytest.mark.parametrize('name', ['tiny_texts', 'tiny_coco', 'tiny_supervised'])
def test_captions(name):
  source = tfds_source.TfdsCaptionSource(name)
  assert source.info.splits == {'train': 4} and source.info.channels == 3
  assert source.info.version == f'{name}/1.0.0'
  images, captions = source.read('train', np.array([3, 0, 2]), 8, seed=0)
  images = [np.asarray(preprocess.decode(image)) for image in images]
  assert [image[0, 0, 0] for image in images] == [3, 0, 2]
  several = name in ('tiny_texts', 'tiny_coco')
  expected = [[f'{i} {j}' for j in range(i)] if several else [f'only {i}'] for i in (3, 0, 2)]
  assert [list(texts) for texts in captions] == expected


def test_captions_that_are_not_utf8_are_unreadable(tfds_files):
  features = {'image': tfds.features.Image(shape=(None, None, 3)), 'text': TEXT}
  examples = [{'image': np.zeros((4, 4, 3), np.uint8), 'text': t} for t in (b'\xff\xfe', 'good')]
  tfds_files.write('tiny_bytes', features, {'train': examples})
  cfg = DatasetConfig(
    'tfds_captions:tiny_bytes',
    {'image': 4, 'text': 8},
    'train',
    2,
    shuffle=False,
    max_corrupt_fraction=0.5,
  )
  iterator = get_dataset(cfg)
  np.testing.assert_array_equal(next(iterator)['mask'], [0, 1])
  assert iterator.corrupt_records[0].endswith('(its caption is not valid UTF-8)')
