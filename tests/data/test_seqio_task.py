import io

import numpy as np
import pytest
import seqio
from PIL import Image

from het_plugin.data import (
  DatasetConfig,
  ImageFeatureConverter,
  decode,
  get_dataset,
  seqio_task,
  tasks,
)
from het_plugin.data.tf_host import tf

LENGTHS = {'image': 12, 'label': 2}


@pytest.fixture(scope='module')
def folder(tmp_path_factory, image_files):
  root = tmp_path_factory.mktemp('photos')
  for seed, name in enumerate('abc'):
    image_files.write(root / 'train' / name, 7, '.jpg', seed)
    image_files.write(root / 'validation' / name, 3, '.png', seed + 10)
  return f'image_folder:{root}'


@pytest.fixture(params=['glyphs_core', 'digits', 'image_folder'])
def name(request):
  return request.getfixturevalue('folder') if request.param == 'image_folder' else request.param


def seqio_batches(name, split, batch_size, count=None, **kwargs):
  """What t5x reads: seqio.get_dataset with the converter."""
  dataset = seqio.get_dataset(
    mixture_or_task_name=tasks.get_task(name).name,
    task_feature_lengths=LENGTHS,
    feature_converter=ImageFeatureConverter(pack=False, use_custom_packing_ops=False),
    dataset_split=split,
    use_cached=False,
    batch_size=batch_size,
    **kwargs,
  )
  return list(dataset.take(count or -1).as_numpy_iterator())


def assert_same(batch, other):
  assert batch.keys() == other.keys()
  for feature in batch:
    np.testing.assert_array_equal(batch[feature], other[feature], err_msg=feature)


def test_seqio_and_the_pipeline_give_the_same_training_batches(name):
  ours = get_dataset(DatasetConfig(name, LENGTHS, 'train', 8, seed=3))
  theirs = seqio_batches(name, 'train', 8, 5, shuffle=True, seed=3, num_epochs=None)
  assert len(theirs) == 5
  for batch in theirs:
    assert_same(batch, next(ours))


def test_seqio_and_the_pipeline_give_the_same_evaluation_batches(name):
  split = 'test' if name == 'digits' else 'validation'
  ours = get_dataset(DatasetConfig(name, LENGTHS, split, 3, shuffle=False))
  for batch in seqio_batches(name, split, 3, 3, shuffle=False, num_epochs=1):
    assert_same(batch, next(ours))


@pytest.mark.parametrize('part', ['train[5:16]', 'train[50%:]'])
@pytest.mark.parametrize('shuffle', [False, True])
def test_slices_under_seqio(folder, part, shuffle):
  ours = get_dataset(DatasetConfig(folder, LENGTHS, part, 4, shuffle=shuffle))
  theirs = seqio_batches(folder, part, 4, 2, shuffle=shuffle, seed=0, num_epochs=1)
  assert len(theirs) == 2
  for batch in theirs:
    assert_same(batch, next(ours))


def test_seqio_knows_slices():
  task = tasks.get_task('digits')
  assert set(task.splits) == {'train', 'test'}
  assert task.num_input_examples('train[:10%]') == 144
  # what decides whether seqio's evaluator and mixtures take a task
  assert 'test[-9:]' in task.splits and 'test[:9999]' not in task.splits
  seqio.MixtureRegistry.add('only_digits', ['digits'], default_rate=1)
  dataset = seqio.get_dataset(
    'only_digits', LENGTHS, ImageFeatureConverter(), 'test[-9:]', shuffle=False, num_epochs=1
  )
  assert [int(e['index']) for e in dataset.as_numpy_iterator()] == list(range(350, 359))


def test_shards_of_seqio_are_rows_of_the_global_batch(name):
  whole = seqio_batches(name, 'train', 8, 3, shuffle=True, seed=3, num_epochs=None)
  for index in range(2):
    shard_info = seqio.ShardInfo(index=index, num_shards=2)
    shard = seqio_batches(
      name, 'train', 4, 3, shuffle=True, seed=3, num_epochs=None, shard_info=shard_info
    )
    for part, batch in zip(shard, whole, strict=True):
      assert_same(part, {feature: x[index::2] for feature, x in batch.items()})


def test_epochs_under_seqio(folder):
  batches = seqio_batches(folder, 'train', 7, shuffle=True, seed=0, num_epochs=2)
  assert len(batches) == 6
  first, second = (np.concatenate([b['image'] for b in batches[i : i + 3]]) for i in (0, 3))
  assert not ({x.tobytes() for x in first} & {x.tobytes() for x in second})  # augmented anew
  np.testing.assert_array_equal(np.concatenate([b['index'] for b in batches]), np.arange(42))


@pytest.mark.parametrize('mode', ['RGB', 'L', 'CMYK'])
@pytest.mark.parametrize('subsampling', [0, 1, 2])
@pytest.mark.parametrize('progressive', [False, True])
def test_tensorflow_decodes_jpeg_files_to_the_levels_of_pillow(mode, subsampling, progressive):
  coarse = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)
  for size in ((45, 37), (1, 1)):
    photo = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).convert(mode)
    file = io.BytesIO()
    photo.save(file, 'JPEG', quality=90, subsampling=subsampling, progressive=progressive)
    packed = seqio_task.pack({'image': [file.getvalue()]})
    image = seqio_task.unpack({name: x[0] for name, x in packed.items()}, tf.uint8, 3)['image']
    np.testing.assert_array_equal(image, decode.decode_rgb(file.getvalue()))


def test_model_features():
  (batch,) = seqio_batches('glyphs_core', 'validation', 4, 1)
  assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {
    'image': ((4, 12, 12, 1), np.float32),
    'label': ((4, 2), np.int32),
    'index': ((4,), np.int32),
    'mask': ((4,), np.float32),
  }
  assert (batch['label'][:, 1] == -1).all() and (batch['mask'] == 1).all()


def test_mixtures_keep_index_and_mask():
  seqio.MixtureRegistry.add('two_glyph_tasks', ['glyphs_core', 'glyphs_heldout'], default_rate=1)
  dataset = seqio.get_dataset(
    'two_glyph_tasks',
    LENGTHS,
    ImageFeatureConverter(),
    'train',
    shuffle=False,
    num_epochs=None,
    seed=0,
  )
  examples = list(dataset.take(40).as_numpy_iterator())
  assert all(example['mask'] == 1 for example in examples)
  assert len({int(example['index']) for example in examples}) > 10


def plain_dataset(split, shuffle_files, seed=None):
  """Examples of a seqio task made without us: no index, no mask, labels of any number."""
  del split, shuffle_files, seed
  examples = [
    {'image': np.full((12, 12, 3), i, np.float32), 'label': [i] * (i + 1)} for i in range(3)
  ]
  signature = {
    'image': tf.TensorSpec([12, 12, 3], tf.float32),
    'label': tf.TensorSpec([None], tf.int32),
  }
  return tf.data.Dataset.from_generator(lambda: iter(examples), output_signature=signature)


def plain_task():
  if 'plain' not in seqio.TaskRegistry.names():
    seqio.TaskRegistry.add(
      'plain',
      source=seqio.FunctionDataSource(plain_dataset, splits=['train']),
      preprocessors=[],
      output_features={
        'image': seqio.ContinuousFeature(dtype=tf.float32, rank=3),
        'label': seqio.Feature(seqio.PassThroughVocabulary(size=3), add_eos=False),
      },
    )
  return seqio.TaskRegistry.get('plain')


def converted(task, lengths, **kwargs):
  return seqio.get_dataset(task, lengths, ImageFeatureConverter(), **kwargs)


def test_the_converter_completes_tasks_without_index_and_mask():
  dataset = converted(plain_task(), {'image': 12, 'label': 3}, shuffle=False)
  examples = list(dataset.as_numpy_iterator())
  assert [int(e['index']) for e in examples] == [0, 1, 2]
  assert [int(e['mask']) for e in examples] == [1, 1, 1]
  assert [e['label'].tolist() for e in examples] == [[0, -1, -1], [1, 1, -1], [2, 2, 2]]


def test_the_converter_checks_lengths():
  with pytest.raises(ValueError, match='image|shape'):
    converted(plain_task(), {'image': 16, 'label': 3}, shuffle=False)
  short = converted(
    plain_task(), {'image': 12, 'label': 2}, shuffle=False, trim_output_features=False
  )
  with pytest.raises(tf.errors.InvalidArgumentError, match='label.* has length not less than'):
    list(short.as_numpy_iterator())
  with pytest.raises(ValueError, match='task_feature_lengths'):
    converted('glyphs_core', {'image': 12, 'label': 1, 'text': 3})


def test_the_converter_does_not_pack():
  with pytest.raises(ValueError, match='images cannot be packed'):
    ImageFeatureConverter(pack=True)


@pytest.mark.parametrize(
  'kwargs,message',
  [
    ({'split': 'dev'}, "split is 'dev'; the splits of digits are"),
    ({'split': 'train[:2000]'}, "the split 'train' of digits has 1438 records"),
    ({'use_cached': True}, 'use_cached is True'),
    ({'sequence_length': None}, "it must be {'image': H, 'label': L}"),
  ],
)
def test_errors_of_the_task(kwargs, message):
  settings = {'sequence_length': LENGTHS, 'split': 'train'} | kwargs
  with pytest.raises(ValueError, match=message):
    tasks.get_task('digits').get_dataset(**settings)


def test_plain_seqio_tasks_cannot_be_read_by_position():
  plain_task()
  with pytest.raises(ValueError, match="'plain' is a plain seqio task"):
    get_dataset(DatasetConfig('plain', LENGTHS, 'train', 4))


def test_tensorflow_sees_no_accelerator():
  assert not tf.config.get_visible_devices('GPU')
