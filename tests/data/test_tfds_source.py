import numpy as np
import pytest

tfds = pytest.importorskip('tensorflow_datasets')

from het_plugin.data import decode, tasks, tfds_source  # noqa: E402

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
  images = decode.decode_all(images, keep_jpegs=False)
  assert [image.shape for image in images] == [(9, 5, 3), (4, 5, 3), (7, 5, 3)]
  assert [image[0, 0, 0] for image in images] == [5, 0, 3]


@pytest.mark.usefixtures('data_sets')
def test_multi_label():
  source = tfds_source.TfdsSource('tiny_multi')
  assert source.info.multi_label
  _, labels = source.read('train', np.arange(3), 8, seed=0)
  np.testing.assert_array_equal(labels, [[0, -1], [1, 2], [2, -1]])


def test_features_that_are_not_wanted(tfds_files):
  """As in birds and pets: a mask, a box and a text beside the image and its label."""
  features = {
    'image': tfds.features.Image(shape=(None, None, 3)),
    'label': LABEL,
    'segmentation_mask': tfds.features.Image(shape=(None, None, 1)),
    'bbox': tfds.features.BBoxFeature(),
    'label_name': tfds.features.Text(),
  }
  box = tfds.features.BBox(0.0, 0.0, 1.0, 1.0)
  mask = np.zeros((4, 4, 1), np.uint8)
  examples = [
    {
      'image': np.full((4, 4, 3), i, np.uint8),
      'label': i,
      'segmentation_mask': mask,
      'bbox': box,
      'label_name': 'x',
    }
    for i in range(3)
  ]
  tfds_files.write('tiny_masks', features, {'train': examples}, supervised_keys=('image', 'label'))
  images, labels = tfds_source.TfdsSource('tiny_masks').read('train', np.array([2, 0]), 8, seed=0)
  images = decode.decode_all(images, keep_jpegs=False)
  assert [image[0, 0, 0] for image in images] == [2, 0] and labels.tolist() == [[2], [0]]


@pytest.mark.usefixtures('data_sets')
def test_names_with_and_without_prefix_and_version():
  for name in ('tfds:tiny_single', 'tiny_single', 'tiny_single:1.0.0'):
    assert tasks.get_task(name).examples.info.num_classes == 3


@pytest.mark.usefixtures('data_sets')
def test_errors():
  with pytest.raises(ValueError, match='tfds:tiny_nothing: TensorFlow Datasets knows no such'):
    tfds_source.TfdsSource('tiny_nothing')
  with pytest.raises(ValueError, match='run: tfds convert_format .*tiny_sequential/1.0.0'):
    tfds_source.TfdsSource('tiny_sequential')
  with pytest.raises(ValueError, match=r"a class 'label'.*are \['image', 'label'\]"):
    tfds_source.TfdsSource('tiny_regression')
  with pytest.raises(ValueError, match='mnist is not prepared in .*; run: tfds build mnist'):
    tfds_source.TfdsSource('mnist')


def test_the_version_of_the_data(data_dir):
  assert tfds_source.TfdsSource('tiny_single').info.version == 'tiny_single/1.0.0'
