import numpy as np
import pytest
import seqio
import tensorflow as tf

from het_plugin.data import (
  DatasetConfig,
  ImageFeatureConverter,
  ImageTextFeatureConverter,
  get_dataset,
  glyphs,
  reader,
  seqio_task,
  tasks,
)

LENGTHS = {'image': 12, 'label': 2}
TEXT_LENGTHS = {'image': 12, 'text': 16}
MOST = {'max_corrupt_fraction': 0.1}


@pytest.fixture(params=['image_folder', 'image_folder_captions'])
def name(request, photos):
  return f'{request.param}:{photos}'


@pytest.fixture(autouse=True)
def some_may_be_unreadable(monkeypatch):
  """seqio.get_dataset cannot say how many; two of 21 are."""
  monkeypatch.setattr(reader, 'MAX_CORRUPT_FRACTION', 0.1)


def lengths_of(name):
  return LENGTHS if tasks.get_task(name).vocabulary is None else TEXT_LENGTHS


def seqio_batches(name, split, batch_size, count=None, **kwargs):
  """What t5x reads: seqio.get_dataset with the converter."""
  lengths = lengths_of(name)
  converter = ImageFeatureConverter if lengths is LENGTHS else ImageTextFeatureConverter
  dataset = seqio.get_dataset(
    mixture_or_task_name=seqio_task.register(name).name,
    task_feature_lengths=lengths,
    feature_converter=converter(pack=False, use_custom_packing_ops=False),
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


@pytest.mark.slow
def test_seqio_and_the_pipeline_give_the_same_training_batches(name):
  ours = get_dataset(DatasetConfig(name, lengths_of(name), 'train', 8, seed=3, **MOST))
  theirs = seqio_batches(name, 'train', 8, 5, shuffle=True, seed=3, num_epochs=None)
  assert len(theirs) == 5
  for batch in theirs:
    assert_same(batch, next(ours))


def test_seqio_and_the_pipeline_give_the_same_evaluation_batches(name):
  ours = get_dataset(DatasetConfig(name, lengths_of(name), 'validation', 3, shuffle=False, **MOST))
  for batch in seqio_batches(name, 'validation', 3, 3, shuffle=False, num_epochs=1):
    assert_same(batch, next(ours))


def test_seqio_knows_slices():
  task = seqio_task.register('digits')
  assert set(task.splits) == {'train', 'test'}
  assert task.num_input_examples('train[:10%]') == 144
  # what decides whether seqio's evaluator and mixtures take a task
  assert 'test[-9:]' in task.splits and 'test[:9999]' not in task.splits
  seqio.MixtureRegistry.add('only_digits', ['digits'], default_rate=1)
  dataset = seqio.get_dataset(
    'only_digits', LENGTHS, ImageFeatureConverter(), 'test[-9:]', shuffle=False, num_epochs=1
  )
  assert [int(e['index']) for e in dataset.as_numpy_iterator()] == list(range(350, 359))


@pytest.mark.slow
def test_shards_of_seqio_are_rows_of_the_global_batch(name):
  whole = seqio_batches(name, 'train', 8, 3, shuffle=True, seed=3, num_epochs=None)
  for index in range(2):
    shard_info = seqio.ShardInfo(index=index, num_shards=2)
    shard = seqio_batches(
      name, 'train', 4, 3, shuffle=True, seed=3, num_epochs=None, shard_info=shard_info
    )
    for part, batch in zip(shard, whole, strict=True):
      assert_same(part, {feature: x[index::2] for feature, x in batch.items()})


def test_the_vocabulary_is_in_the_output_features(sentencepiece_model):
  plain = seqio_task.register('glyph_names')
  assert plain.name == 'glyph_names'
  assert plain.output_features['text'].vocabulary == seqio.ByteVocabulary()
  task = seqio_task.register('glyph_names', sentencepiece_model)
  assert seqio.get_mixture_or_task(task.name) is task and task is not plain
  assert seqio_task.register('glyph_names', sentencepiece_model) is task
  feature = task.output_features['text']
  assert feature.vocabulary.vocab_size == 60 and feature.add_eos


def test_names_that_seqio_refuses_and_tasks_of_ones_own(tmp_path):
  path = tmp_path / 'dash-ed ümlaut.npz'
  np.savez(path, image=np.zeros((4, 3, 3), np.uint8), label=np.arange(4))
  task = seqio_task.register(f'npz:{path}')
  assert seqio_task.register(str(path)) is task and set(task.splits) == {'train', 'validation'}
  tasks.add_image_task('own_glyphs', glyphs.GlyphSource('heldout'))
  try:
    assert isinstance(seqio.TaskRegistry.get('own_glyphs'), seqio_task.SeqioTask)
  finally:
    seqio.TaskRegistry.remove('own_glyphs')
    del tasks._TASKS['own_glyphs']


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


@pytest.mark.slow
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
  with pytest.raises(ValueError, match='task_feature_lengths .*glyph_names'):
    converted('glyph_names', LENGTHS)
  with pytest.raises(ValueError, match="extra features .*{'text'}"):
    converted('glyph_names', TEXT_LENGTHS)  # by the converter of labels


def test_precision_counts_any_of_the_labels():
  targets = [np.array(x) for x in ([3, -1], [2, 5], [-1, -1], [0, -1])]
  aux = {'top5': [np.array(x) for x in ([3, 1, 2], [1, 5, 0], [7, 8, 9], [4, 5, 6])]}
  metrics = seqio_task.precision(targets, [None] * 4, aux)
  assert metrics == {'precision_at_1': pytest.approx(1 / 3), 'precision_in_5': pytest.approx(2 / 3)}


def test_likelihood_leaves_out_rows_without_a_label():
  targets = [np.array([1]), np.array([-1]), np.array([0])]
  assert seqio_task.likelihood(targets, [-1.0, -9.0, -3.0]) == {'nll': pytest.approx(2.0)}


@pytest.mark.slow
def test_the_evaluator_reads_a_task_whole_and_in_order():
  evaluator = seqio.Evaluator(
    'digits',
    ImageFeatureConverter(pack=False),
    eval_split='test[:20]',
    sequence_length={'image': 8, 'label': 1},
    target_field_name='label',
    async_compute_metrics=False,
  )
  seen = []

  def rows(dataset):
    for number, batch in dataset.as_numpy_iterator():
      assert {name: x.shape for name, x in batch.items()} == {
        'image': (8, 8, 1),
        'label': (1,),
        'index': (),
        'mask': (),
      }
      seen.append(int(batch['index']))
      yield int(number), batch['label']

  def predict_with_aux(dataset):
    predictions = list(rows(dataset))
    right = [np.repeat(label, 5) if i % 2 else np.full(5, 99) for i, label in predictions]
    return predictions, {'top5': right}

  def score(dataset):
    return [(i, -2.0) for i, _ in rows(dataset)]

  metrics, _ = evaluator.evaluate(
    compute_metrics=True, predict_with_aux_fn=predict_with_aux, score_fn=score
  )
  assert metrics.result() == {'digits': {'precision_at_1': 0.5, 'precision_in_5': 0.5, 'nll': 2.0}}
  assert seen == 2 * list(range(20))
