import numpy as np
import pytest

tfds = pytest.importorskip('tensorflow_datasets')

from het_plugin.data import tasks, tfds_source  # noqa: E402

LABEL = tfds.features.ClassLabel(names=['a', 'b', 'c'])


def prepare(root, name, file_format='array_record', count=6, **features):
  """Writes a data set as `tfds build` would, one split of `count` examples."""
  folder = root / name / '1.0.0'
  folder.mkdir(parents=True)
  identity = tfds.core.DatasetIdentity(
    name=name, version=tfds.core.Version('1.0.0'), data_dir=str(folder), module_name=''
  )
  info = tfds.core.DatasetInfo(builder=identity, features=tfds.features.FeaturesDict(features))
  writer = tfds.core.SequentialWriter(info, 100, overwrite=True, file_format=file_format)
  writer.initialize_splits(['train'])
  writer.add_examples({'train': [example(features, i) for i in range(count)]})
  writer.close_all()


def example(features, i):
  """Picture i is i everywhere; its label is i mod 3, and i + 1 mod 3 too if it may have two."""
  label_key = next(key for key in features if key != 'image')
  several = isinstance(features[label_key], tfds.features.Sequence)
  label = [i % 3, (i + 1) % 3][: 1 + i % 2] if several else i % 3
  return {'image': np.full((4 + i, 5, 3), i, np.uint8), label_key: label}


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
  root = tmp_path_factory.mktemp('tfds')
  image = tfds.features.Image(shape=(None, None, 3))
  prepare(root, 'tiny_single', image=image, label=LABEL)
  prepare(root, 'tiny_multi', image=image, labels=tfds.features.Sequence(LABEL))
  prepare(root, 'tiny_sequential', 'tfrecord', image=image, label=LABEL)
  prepare(root, 'tiny_regression', image=image, label=tfds.features.Scalar(np.int64))
  tfds.core.add_data_dir(str(root))
  return root


@pytest.mark.usefixtures('data_dir')
def test_single_label():
  source = tfds_source.TfdsSource('tiny_single')
  info = source.info
  assert (info.num_classes, info.multi_label, info.splits) == (3, False, {'train': 6})
  assert info.class_names == ('a', 'b', 'c')
  images, labels = source.read('train', np.array([5, 0, 3]), 8, seed=0)
  np.testing.assert_array_equal(labels, [[2], [0], [0]])
  assert [image.shape for image in images] == [(9, 5, 3), (4, 5, 3), (7, 5, 3)]
  assert [image[0, 0, 0] for image in images] == [5, 0, 3]


@pytest.mark.usefixtures('data_dir')
def test_multi_label():
  source = tfds_source.TfdsSource('tiny_multi')
  assert source.info.multi_label
  _, labels = source.read('train', np.arange(3), 8, seed=0)
  np.testing.assert_array_equal(labels, [[0, -1], [1, 2], [2, -1]])


@pytest.mark.usefixtures('data_dir')
def test_names_with_and_without_prefix_and_version():
  for name in ('tfds:tiny_single', 'tiny_single', 'tiny_single:1.0.0'):
    assert tasks.get_task(name).examples.info.num_classes == 3


@pytest.mark.usefixtures('data_dir')
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
