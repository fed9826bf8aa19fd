"""seqio tasks over sources that read by number, in the same global order as our pipeline."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import seqio

from het_plugin.data import annotations, preprocess, reader, sources, vocabularies
from het_plugin.data import splits as splits_lib
from het_plugin.data.tf_host import tf

_BLOCK = 64  # examples that one call of the source reads under seqio
_JPEG = (0, 0, 0)  # in place of the shape of an image that is still a JPEG file

Preprocessor = Callable[..., tf.data.Dataset]


def output_features(vocabulary: seqio.Vocabulary | None) -> dict[str, seqio.Feature]:
  """The features of a task of captions with this vocabulary, or of labels (None)."""
  if vocabulary is None:
    label = seqio.Feature(seqio.PassThroughVocabulary(size=1), add_eos=False, dtype=tf.int32)
    annotation = {'label': label}
  else:
    annotation = {'text': seqio.Feature(vocabulary, add_eos=True, dtype=tf.int32)}
  return {
    'image': seqio.ContinuousFeature(dtype=tf.float32, rank=3),
    **annotation,
    # Rank 1, because seqio's evaluator measures the length of every feature.
    'index': seqio.ContinuousFeature(dtype=tf.int32, rank=1),
    'mask': seqio.ContinuousFeature(dtype=tf.float32, rank=1),
  }


class IndexedDataSource(seqio.DataSource):
  """A seqio data source over an ExampleSource. Shuffles by epoch, shards by position."""

  def __init__(self, examples: sources.ExampleSource, vocabulary: seqio.Vocabulary | None = None):
    """`vocabulary` is for captions; None for examples with labels."""
    self.examples = examples
    self.vocabulary = vocabulary
    super().__init__(
      splits=examples.info.splits,
      caching_permitted=False,
      performs_internal_shuffling=True,
    )

  @property
  def splits(self) -> splits_lib.SliceableSplits:
    return splits_lib.SliceableSplits(self.examples.info.splits)

  @property
  def annotation(self) -> str:
    """The feature beside the image: 'label' or 'text'."""
    return 'label' if self.vocabulary is None else 'text'

  def annotations(
    self, lengths: Mapping[str, int], augment: bool
  ) -> annotations.Labels | annotations.Captions:
    """Makes rows of labels or captions, for training (augment) or evaluation."""
    if self.vocabulary is None:
      return annotations.Labels(lengths['label'])
    return annotations.Captions(self.vocabulary, lengths['text'], at_random=augment)

  def num_input_examples(self, split: str) -> int | None:
    return self.splits[split]

  @property
  def supports_arbitrary_sharding(self) -> bool:
    return True

  def list_shards(self, split: str) -> Sequence[str]:
    return [split]

  def get_dataset(
    self,
    split: str = sources.TRAIN_SPLIT,
    shuffle: bool = True,
    seed: int | None = None,
    shard_info: seqio.ShardInfo | None = None,
    *,
    sequence_length: Mapping[str, int] | None = None,
    use_cached: bool = False,
    num_epochs: int | None = 1,
  ) -> tf.data.Dataset:
    """Packed examples (see `unpack`) of one shard, in the global order.

    Shard i of n holds the positions p with p mod n = i. `split` may be a slice. An endless split
    ignores num_epochs.
    """
    if not sequence_length:
      raise ValueError(
        f"sequence_length is missing; it must be {{'image': H, '{self.annotation}': L}}."
      )
    example_reader = reader.ExampleReader(
      self.examples,
      split,
      size=sequence_length['image'],
      annotations=self.annotations(sequence_length, augment=split == sources.TRAIN_SPLIT),
      shuffle=shuffle,
      seed=seed or 0,
      num_epochs=num_epochs,
      max_corrupt_fraction=reader.MAX_CORRUPT_FRACTION,
    )
    shard, num_shards = (shard_info.index, shard_info.num_shards) if shard_info else (0, 1)
    total = example_reader.num_examples
    specs = packed_specs(self.annotation)

    def read_block(start):
      stop = start + _BLOCK * num_shards
      positions = np.arange(start, stop if total is None else min(stop, total), num_shards)
      block = pack(example_reader.read(positions))
      return [block[name] for name in specs]

    def read_tensors(start):
      tensors = tf.numpy_function(read_block, [start], [s.dtype for s in specs.values()])
      for tensor, spec in zip(tensors, specs.values(), strict=True):
        tensor.set_shape([None, *spec.shape])
      return dict(zip(specs, tensors, strict=True))

    stop = np.iinfo(np.int64).max if total is None else total
    starts = tf.data.Dataset.range(shard, stop, _BLOCK * num_shards)
    return starts.map(read_tensors).unbatch()


class ImageTask(seqio.Task):
  """A seqio task whose order and preprocessing are keyed by one global position.

  seqio.Task caches, repeats and shuffles outside its source, which loses the position. Here the
  source orders the examples, and the preprocessors run as in seqio.
  """

  def __init__(
    self,
    name: str,
    source: IndexedDataSource,
    output_features: Mapping[str, seqio.Feature],
    preprocessors: Sequence[Preprocessor] = (),
    eval_preprocessors: Sequence[Preprocessor] = (),
    **kwargs,
  ):
    """`preprocessors` are for the split 'train', `eval_preprocessors` for all others."""
    super().__init__(name, source, output_features, preprocessors=preprocessors, **kwargs)
    self._eval_preprocessors = tuple(eval_preprocessors)

  @property
  def examples(self) -> sources.ExampleSource:
    """The examples by number, before preprocessing."""
    return self.source.examples

  @property
  def vocabulary(self) -> seqio.Vocabulary | None:
    """Vocabulary of the captions; None for a task of labels."""
    return self.source.vocabulary

  @property
  def eval_preprocessors(self) -> Sequence[Preprocessor]:
    """Evaluation preprocessors; seqio's `preprocessors` are for training."""
    return self._eval_preprocessors

  @property
  def info(self) -> sources.TaskInfo | sources.ImageTextInfo:
    """Metadata, known without reading images."""
    info = self.examples.info
    if self.vocabulary is None:
      return info
    return dataclasses.replace(
      info,
      vocabulary=vocabularies.vocabulary_name(self.vocabulary),
      vocab_size=self.vocabulary.vocab_size,
    )

  def split_preprocessors(self, augment: bool, resize: str | None = None) -> Sequence[Preprocessor]:
    """The preprocessors of training (augment) or of evaluation.

    Args:
      augment: whether they are those of training.
      resize: None for the task's own, else see preprocess.photo_evaluation.

    Raises:
      ValueError: `resize` is set for training, or for images that are no photographs.
    """
    if resize is None:
      return self.preprocessors if augment else self._eval_preprocessors
    if augment:
      raise ValueError(
        f'resize is {resize!r}; images that are augmented are cropped at random: it must be None.'
      )
    if self.examples.image_size is not None or self.examples.image_dtype != np.uint8:
      raise ValueError(
        f'resize is {resize!r}; it is for photographs, uint8 of any size, which the images of '
        f'{self.name} are not: it must be None.'
      )
    return preprocess.photo_evaluation(resize)

  def preprocess(
    self,
    packed: tf.data.Dataset,
    sequence_length: Mapping[str, int],
    preprocessors: Sequence[Preprocessor],
  ) -> tf.data.Dataset:
    """Converts packed examples to the task's output features."""
    source = self.examples
    dtype, num_channels = tf.as_dtype(source.image_dtype), source.info.channels
    dataset = packed.map(lambda example: unpack(example, dtype, num_channels))
    dataset = self._preprocess_dataset(dataset, preprocessors, sequence_length)
    dataset = dataset.map(
      lambda example: {**example, **{name: example[name][None] for name in ('index', 'mask')}}
    )
    dataset = self._validate_preprocessing(dataset)
    return dataset.map(lambda example: {name: example[name] for name in self.output_features})

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
    """As seqio.Task.get_dataset; the whole split is shuffled, so the buffer size is not needed.

    `split` may be a slice; only the whole split 'train' is augmented.

    Raises:
      ValueError: use_cached is True, the split does not exist or the lengths do not fit the task.
    """
    del shuffle_buffer_size, trim_output_features, try_in_mem_cache
    if use_cached:
      raise ValueError(
        f'use_cached is True; the image task {self.name} cannot be cached: use False.'
      )
    preprocessors = self.split_preprocessors(augment=split == sources.TRAIN_SPLIT)
    check_request(self, split, sequence_length or {}, preprocessors)
    packed = self.source.get_dataset(
      split,
      shuffle,
      seed,
      shard_info,
      sequence_length=sequence_length,
      num_epochs=num_epochs,
    )
    return self.preprocess(packed, sequence_length, preprocessors).prefetch(tf.data.AUTOTUNE)


def check_request(
  task: ImageTask,
  split: str,
  lengths: Mapping[str, int],
  preprocessors: Sequence[Preprocessor],
) -> None:
  """Checks a split or slice and the feature lengths of a task.

  Raises:
    ValueError: the split does not exist, or the task cannot make features of these lengths.
  """
  info = task.info
  if splits_lib.resolve(split, info.splits, task.name).num_records == 0:
    raise ValueError(f'The split {split!r} of {task.name} is empty.')
  has_labels = task.vocabulary is None
  if has_labels and (set(lengths) != {'image', 'label'} or min(lengths.values()) < 1):
    raise ValueError(
      f"task_feature_lengths is {dict(lengths)}; it must be {{'image': H, 'label': L}}, both at "
      f'least 1: {task.name} has class labels.'
    )
  if not has_labels and (
    set(lengths) != {'image', 'text'} or lengths['image'] < 1 or lengths['text'] < 2
  ):
    raise ValueError(
      f"task_feature_lengths is {dict(lengths)}; it must be {{'image': H, 'text': L}} with H at "
      f'least 1 and L at least 2: {task.name} has captions.'
    )
  if has_labels and lengths['label'] < info.max_labels:
    raise ValueError(
      f"task_feature_lengths['label'] is {lengths['label']}; examples of {task.name} have up to "
      f'{info.max_labels} labels.'
    )
  size = task.examples.image_size
  if size not in (None, lengths['image']) and not preprocessors:
    raise ValueError(
      f"task_feature_lengths['image'] is {lengths['image']}; the images of {task.name} are {size} "
      f'x {size} and the task does not resize them: use {size}, or register a task of your '
      f'own with a resize preprocessor (add_image_task, add_image_text_task).'
    )


def packed_specs(annotation: str) -> dict[str, tf.TensorSpec]:
  """The element specification of packed examples (see `pack`), without the batch dimension.

  `annotation` is the feature beside the image, 'label' or 'text'.
  """
  return {
    'image': tf.TensorSpec([], tf.string),
    'shape': tf.TensorSpec([3], tf.int32),
    annotation: tf.TensorSpec([None], tf.int32),
    'index': tf.TensorSpec([], tf.int32),
    'mask': tf.TensorSpec([], tf.float32),
    'key': tf.TensorSpec([2], tf.int32),
  }


def pack(examples: Mapping[str, Sequence[np.ndarray | bytes]]) -> dict[str, np.ndarray]:
  """Converts the result of ExampleReader.read for TensorFlow.

  Images of any side become byte strings and shapes; JPEG files stay as they are, with a shape of
  zeros.
  """
  packed = [
    (image, _JPEG) if isinstance(image, bytes) else (image.tobytes(), image.shape)
    for image in examples['image']
  ]
  return {
    **examples,
    'image': np.array([image for image, _ in packed], object),
    'shape': np.array([shape for _, shape in packed], np.int32).reshape(-1, 3),
  }


def unpack(
  example: Mapping[str, tf.Tensor], dtype: tf.DType, num_channels: int
) -> dict[str, tf.Tensor]:
  """The inverse of `pack` for one example: image [h, w, C]."""
  encoded, shape = example['image'], example['shape']

  def decode_raw():
    return tf.reshape(tf.io.decode_raw(encoded, dtype), shape)

  def decode_jpeg():
    # This method gives the same levels as Pillow.
    return tf.io.decode_jpeg(encoded, num_channels, dct_method='INTEGER_ACCURATE')

  if dtype == tf.uint8 and num_channels == 3:
    image = tf.cond(tf.reduce_all(shape == _JPEG), decode_jpeg, decode_raw)
  else:
    image = decode_raw()
  image.set_shape([None, None, num_channels])
  rest = {name: value for name, value in example.items() if name not in ('image', 'shape')}
  return {**rest, 'image': image}


def preprocessed_reader(
  task: ImageTask,
  example_reader: reader.ExampleReader,
  lengths: Mapping[str, int],
  preprocessors: Sequence[Preprocessor],
) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
  """Returns a function from positions, int64 [B], to the task's output features [B, ...].

  It runs the preprocessors exactly as seqio does, on a dataset of these examples only; the graph is
  built once. Images are checked to be [H, H, C]. Safe to call from any thread.
  """
  specs = packed_specs(task.source.annotation)
  batch_specs = {n: tf.TensorSpec([None, *s.shape], s.dtype, name=n) for n, s in specs.items()}
  options = tf.data.Options()
  # Every call makes a new dataset, which is too short for autotuning of the parallelism.
  options.autotune.initial_parallelism = os.cpu_count()
  side = lengths['image']

  @tf.function(input_signature=[batch_specs])
  def preprocess_batch(packed):
    dataset = tf.data.Dataset.from_tensor_slices(packed)
    dataset = task.preprocess(dataset, lengths, preprocessors)
    size = tf.shape(packed['index'], tf.int64)[0]
    batch = dataset.batch(size).with_options(options).get_single_element()
    channels = task.examples.info.channels
    return {
      **batch,
      'image': tf.ensure_shape(batch['image'], [None, side, side, channels]),
      'index': batch['index'][:, 0],
      'mask': batch['mask'][:, 0],
    }

  def preprocess_examples(examples):
    batch = preprocess_batch({name: tf.constant(x) for name, x in pack(examples).items()})
    return {name: np.asarray(x) for name, x in batch.items()}  # x.numpy() would copy

  def read(positions):
    try:
      return preprocess_examples(example_reader.read(positions, keep_jpegs=True))
    except tf.errors.InvalidArgumentError:  # a damaged JPEG: Pillow finds out which
      return preprocess_examples(example_reader.read(positions))

  return read
