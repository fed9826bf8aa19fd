"""The tasks as seqio tasks, with the pipeline's order and pixels, and t5x's feature converters.

Importing this module registers all added tasks, including those that are added later; `register`
registers any other.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from het_plugin.data import reader, sources, tasks, vocabularies
from het_plugin.data import splits as splits_lib

if tf.config.get_visible_devices('GPU'):
  tf.config.set_visible_devices([], 'GPU')  # leaves the memory to the model

_BLOCK = 64  # examples per read


class _TaskSource(seqio.DataSource):
  """Splits of a source, for seqio. The task reads the examples."""

  def __init__(self, examples: sources.ExampleSource):
    self._examples = examples
    super().__init__(splits=examples.info.splits, caching_permitted=False)

  @property
  def splits(self) -> splits_lib.SliceableSplits:
    return splits_lib.SliceableSplits(self._examples.info.splits)

  @property
  def supports_arbitrary_sharding(self) -> bool:
    return True

  def num_input_examples(self, split: str) -> int | None:
    return self.splits[split]

  def list_shards(self, split: str) -> Sequence[str]:
    return [split]

  def get_dataset(self, *args, **kwargs):
    raise NotImplementedError('the examples are read by the task')


class SeqioTask(seqio.Task):
  """A seqio task whose order and preprocessing are keyed by one global position.

  seqio.Task caches, repeats and shuffles outside its source, which loses the position.
  """

  def __init__(self, name: str, source: seqio.DataSource, *, task: tasks.ImageTask, **kwargs):
    super().__init__(name, source, **kwargs)
    self._task = task

  def get_dataset(
    self,
    sequence_length: Mapping[str, int] | None = None,
    split: str = sources.TRAIN_SPLIT,
    use_cached: bool = False,
    shuffle: bool = True,
    shuffle_buffer_size: int | None = None,
    seed: int | None = None,
    shard_info: seqio.ShardInfo | None = None,
    num_epochs: int | None = 1,
    trim_output_features: bool = True,
    try_in_mem_cache: bool = True,
  ) -> tf.data.Dataset:
    """Reads as seqio.Task.get_dataset; the whole split is shuffled, so it needs no buffer size.

    Shard i of n holds the positions p with p mod n = i. `split` may be a slice; only the whole
    split 'train' is augmented.

    Raises:
      ValueError: use_cached is True, the split does not exist or the lengths do not fit the task.
    """
    del shuffle_buffer_size, trim_output_features, try_in_mem_cache
    if use_cached:
      raise ValueError(
        f'use_cached is True; the image task {self.name} cannot be cached: use False.'
      )
    lengths = sequence_length or {}
    augment = split == sources.TRAIN_SPLIT
    order = {'shuffle': shuffle, 'seed': seed or 0, 'num_epochs': num_epochs}
    examples = self._task.reader(split, lengths, augment=augment, **order)
    annotations = examples.annotations
    side = examples.size
    corrupt = reader.CorruptRecords(
      examples.part.num_records or 0, reader.MAX_CORRUPT_FRACTION, annotations.noun
    )
    shard, num_shards = (shard_info.index, shard_info.num_shards) if shard_info else (0, 1)
    stop = examples.num_examples or np.iinfo(np.int64).max
    (feature,) = set(annotations.features) & {'label', 'text'}
    if len(annotations.features) > 1:
      raise ValueError(f'{self.name} has soft labels or weights, which seqio tasks cannot have.')
    specs = {
      'image': tf.TensorSpec([None, side, side, examples.channels], tf.float32),
      feature: tf.TensorSpec([None, annotations.length], tf.int32),
      'index': tf.TensorSpec([None, 1], tf.int32),  # rank 1, see `_output_features`
      'mask': tf.TensorSpec([None, 1], tf.float32),
    }

    def read_block(start):
      positions = np.arange(start, min(start + _BLOCK * num_shards, stop), num_shards)
      batch, unreadable = examples.read(positions)
      corrupt.add(unreadable)
      return [batch[name].reshape(-1, *spec.shape[1:]) for name, spec in specs.items()]

    def read_tensors(start):
      tensors = tf.numpy_function(read_block, [start], [s.dtype for s in specs.values()])
      shaped = (tf.ensure_shape(x, s.shape) for x, s in zip(tensors, specs.values(), strict=True))
      return dict(zip(specs, shaped, strict=True))

    starts = tf.data.Dataset.range(shard, stop, _BLOCK * num_shards)
    blocks = starts.map(read_tensors, num_parallel_calls=tf.data.AUTOTUNE)
    return blocks.unbatch().prefetch(tf.data.AUTOTUNE)


class _Tokenizer(seqio.Vocabulary):
  """A `vocabularies.TokenizerFile` for seqio."""

  def __init__(self, vocabulary: vocabularies.TokenizerFile):
    super().__init__()
    self._of_file = vocabulary

  @property
  def eos_id(self) -> int:
    return self._of_file.eos_id

  @property
  def unk_id(self) -> int | None:
    return None

  @property
  def _base_vocab_size(self) -> int:
    return self._of_file.vocab_size

  def _encode(self, s: str) -> Sequence[int]:
    return self._of_file.encode(s)

  def _decode(self, ids: Sequence[int]) -> str:
    return self._of_file.decode(ids)

  def _encode_tf(self, s: tf.Tensor) -> tf.Tensor:
    encode = lambda text: np.asarray(self._encode(text.decode()), np.int32)  # noqa: E731
    return tf.ensure_shape(tf.numpy_function(encode, [s], tf.int32), [None])

  def _decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
    return tf.numpy_function(lambda row: self._decode(row.tolist()).encode(), [ids], tf.string)


def _of_seqio(vocabulary: vocabularies.Vocabulary) -> seqio.Vocabulary:
  """The vocabulary of seqio with the same ids."""
  if isinstance(vocabulary, vocabularies.ByteVocabulary):
    return seqio.ByteVocabulary()
  if isinstance(vocabulary, vocabularies.SentencePieceVocabulary):
    return seqio.SentencePieceVocabulary(vocabulary.path)
  if isinstance(vocabulary, vocabularies.TokenizerFile):
    return _Tokenizer(vocabulary)
  return vocabulary


def _output_features(task: tasks.ImageTask) -> dict[str, seqio.Feature]:
  if task.vocabulary is None:
    label = seqio.Feature(seqio.PassThroughVocabulary(size=1), add_eos=False, dtype=tf.int32)
    annotation = {'label': label}
  else:
    vocabulary = _of_seqio(task.loaded_vocabulary)
    annotation = {'text': seqio.Feature(vocabulary, add_eos=True, dtype=tf.int32)}
  return {
    'image': seqio.ContinuousFeature(dtype=tf.float32, rank=3),
    **annotation,
    # Rank 1, because seqio's evaluator measures the length of every feature.
    'index': seqio.ContinuousFeature(dtype=tf.int32, rank=1),
    'mask': seqio.ContinuousFeature(dtype=tf.float32, rank=1),
  }


def precision(
  targets: Sequence[np.ndarray],
  predictions: Sequence[np.ndarray],
  aux_values: Mapping[str, Sequence[np.ndarray]],
) -> dict[str, float]:
  """How often the most probable class, or one of the five most probable, is among the labels.

  A metric of seqio's evaluator, which t5x.eval and t5x's infer-eval run on the host. Rows without a
  label, such as unreadable images, do not count.

  Args:
    targets: N times int32 [L], padded with -1.
    predictions: unused.
    aux_values: from `predict_batch_with_aux`; 'top5' is read, N times [min(5, K)].
  """
  del predictions
  labels = np.asarray(targets)
  top = np.asarray(aux_values['top5'])
  right = (labels[:, :, None] == top[:, None, :]).any(1)[(labels >= 0).any(1)]  # [n, 5]
  return {
    'precision_at_1': float(right[:, 0].mean()),
    'precision_in_5': float(right.any(1).mean()),
  }


def likelihood(targets: Sequence[np.ndarray], scores: Sequence[float]) -> dict[str, float]:
  """The mean of -log p(labels | x) over such rows, from the N scores of `score_batch`."""
  has_label = (np.asarray(targets) >= 0).any(1)
  return {'nll': float(-np.asarray(scores)[has_label].mean())}


def register(name: Any, vocabulary: str | None = None) -> SeqioTask:
  """The seqio task of `tasks.get_task`, which is registered under a name that seqio accepts."""
  task = tasks.get_task(name, vocabulary)
  seqio_name = task.name
  if vocabulary is not None or not re.fullmatch(r'[\w.:#]+', task.name, re.ASCII):
    what = f'{task.name}:{vocabulary}' if vocabulary else task.name
    readable = re.sub(r'[^A-Za-z0-9.:]+', '_', what)[-60:]
    seqio_name = f'{readable}_{hashlib.sha256(what.encode()).hexdigest()[:8]}'
  if seqio_name not in seqio.TaskRegistry.names():
    has_labels = task.vocabulary is None
    seqio.TaskRegistry.add(
      seqio_name,
      source=_TaskSource(task.examples),
      output_features=_output_features(task),
      metric_fns=(precision, likelihood) if has_labels else (),
      preprocessors=(),
      task_cls=SeqioTask,
      task=task,
    )
  return seqio.TaskRegistry.get(seqio_name)


_Spec = seqio.FeatureConverter.FeatureSpec
_NUMBERS = {'index': _Spec(dtype=tf.int32, rank=0), 'mask': _Spec(dtype=tf.float32, rank=0)}


class _ImageConverter(seqio.FeatureConverter):
  """Base of both converters; subclasses name the second feature and its padding."""

  ANNOTATION: str
  PADDING: int
  PACKING_FEATURE_DTYPES = {}

  def __init__(self, pack: bool = False, use_custom_packing_ops: bool = False, **kwargs):
    if pack or use_custom_packing_ops:
      raise ValueError(
        'pack or use_custom_packing_ops is True; images cannot be packed: use False.'
      )
    super().__init__(pack=False, use_custom_packing_ops=False, **kwargs)

  def __call__(
    self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]
  ) -> tf.data.Dataset:
    # Only seqio's evaluator gives lengths of index and mask; tasks need not have these features.
    lengths = task_feature_lengths
    return super().__call__(ds, {name: lengths[name] for name in lengths if name not in _NUMBERS})

  def _convert_features(
    self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]
  ) -> tf.data.Dataset:
    name = self.ANNOTATION
    side = task_feature_lengths['image']
    length = task_feature_lengths[name]

    def convert(number, example):
      image = example['image']
      row = example[name]
      missing = length - tf.shape(row)[0]
      padded = tf.pad(row, [[0, missing]], constant_values=self.PADDING)
      return {
        'image': tf.ensure_shape(image, [side, side, image.shape[-1]]),
        name: tf.ensure_shape(padded, [length]),
        'index': tf.reshape(example.get('index', tf.cast(number % 2**31, tf.int32)), []),
        'mask': tf.reshape(example.get('mask', tf.ones([], tf.float32)), []),
      }

    return ds.enumerate().map(convert, num_parallel_calls=tf.data.AUTOTUNE)

  def get_model_feature_lengths(self, task_feature_lengths: Mapping[str, int]) -> Mapping[str, int]:
    # seqio needs an entry for every model feature and skips features of rank 0.
    return {**task_feature_lengths, 'index': 1, 'mask': 1}


class ImageFeatureConverter(_ImageConverter):
  """Turns examples of image tasks into model features, for lengths {'image': H, 'label': L}.

    image  float32 [H, H, C], levels in [-1, 1]
    label  int32 [L], padded with -1
    index  int32 [], the position of the example in the global order, which keys its noise; for
           tasks of others, which lack it, the running number on this host
    mask   float32 [], 1 for examples, 0 for rows that do not count; 1 for tasks that lack it

  Raises:
    ValueError: pack or use_custom_packing_ops is True; images are not packed.
  """

  ANNOTATION = 'label'
  PADDING = -1
  TASK_FEATURES = {'image': _Spec(dtype=tf.float32, rank=3), 'label': _Spec(dtype=tf.int32)}
  MODEL_FEATURES = TASK_FEATURES | _NUMBERS


class ImageTextFeatureConverter(_ImageConverter):
  """Converts `image` and `text`: token ids, 1 as their end, padded with 0."""

  ANNOTATION = 'text'
  PADDING = 0
  TASK_FEATURES = {'image': _Spec(dtype=tf.float32, rank=3), 'text': _Spec(dtype=tf.int32)}
  MODEL_FEATURES = TASK_FEATURES | _NUMBERS


tasks.ON_ADD.append(register)
for _name in tasks.names():
  register(_name)
