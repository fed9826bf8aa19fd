"""Batches by global position, as the built-in trainer reads them.

The state of an iterator is one integer, the global position of the first example of the next batch.
It does not depend on the number of hosts: every host reads its rows of each global batch, and the
content of a row depends only on its position.
"""

import collections
import concurrent.futures
import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from het_plugin.data import reader, splits
from het_plugin.data.sources import TRAIN_SPLIT, ImageTextInfo, TaskInfo

Batch = dict[str, np.ndarray]

_PREFETCHED_BATCHES = 2
_BLOCK = 128  # examples that a thread reads at a time; bounds the memory of decoded photographs


@dataclasses.dataclass(frozen=True)
class DatasetConfig:
  """Settings of a data set; the names are those of t5x.

  mixture_or_task_name: a name (see tasks.py) or a task.
  task_feature_lengths: {'image': H, 'label': L}, side of the images and length of the labels; for a
    task of captions {'image': H, 'text': L}, where end-of-sequence is one of the L tokens.
  split: one of the task's splits, or a slice of a finite one in TFDS's notation: 'train[:2000]',
    'train[10%:20%]', 'train[-500:]'. A slice, also of 'train', is read as an evaluation split: once
    and without augmentation. To train on a slice set augment = True.
  batch_size: examples of the GLOBAL batch.
  shuffle: whether every epoch has its own random order; otherwise the order of the records.
  seed: seed of order, augmentation and endless streams; in [0, 2^32).
  num_epochs: passes over the split or slice. None is endless for the split 'train' and with
    augment = True, and one pass otherwise.
  augment: whether images go through the training preprocessors, and one of several captions is
    drawn at random instead of the first. None is True for the whole split 'train' only.
  resize: how evaluation makes photographs square: 'aspect' keeps the aspect ratio, 'squash' does
    not (preprocess.photo_evaluation). None takes the task's own, 'aspect' for our photographs.
  vocabulary: for a task of captions, 'bytes' or the path of a SentencePiece .model file, see
    get_vocabulary. None takes the task's own, by default 'bytes'.
  max_corrupt_fraction: fraction of the split or slice that may be unreadable or without a caption;
    these rows are masked.
  num_threads: number of threads that read ahead, 128 examples at a time. The order does not depend
    on it. Photographs are decoded and preprocessed on all cores in any case.
  module: a module to import first, for example one that registers tasks.
  use_cached, pack: must be False; image tasks are neither cached nor packed.
  """

  mixture_or_task_name: Any
  task_feature_lengths: Mapping[str, int]
  split: str
  batch_size: int
  shuffle: bool = True
  seed: int = 0
  num_epochs: int | None = None
  augment: bool | None = None
  resize: Literal['aspect', 'squash'] | None = None
  vocabulary: str | None = None
  max_corrupt_fraction: float = reader.MAX_CORRUPT_FRACTION
  num_threads: int = 4
  module: str | None = None
  use_cached: bool = False
  pack: bool = False

  def __post_init__(self):
    if self.batch_size < 1:
      raise ValueError(f'batch_size is {self.batch_size}; it must be at least 1.')
    if self.seed is None or not 0 <= self.seed < 2**32:
      raise ValueError(f'seed is {self.seed}; it must be an integer in [0, 2^32).')
    if self.num_epochs is not None and self.num_epochs < 1:
      raise ValueError(f'num_epochs is {self.num_epochs}; it must be at least 1, or None.')
    if not 0 <= self.max_corrupt_fraction <= 1:
      raise ValueError(
        f'max_corrupt_fraction is {self.max_corrupt_fraction}; it must lie in [0, 1].'
      )
    if self.num_threads < 1:
      raise ValueError(f'num_threads is {self.num_threads}; it must be at least 1.')
    if self.resize not in (None, 'aspect', 'squash'):
      raise ValueError(f"resize is {self.resize!r}; it must be 'aspect', 'squash' or None.")
    for name in ('use_cached', 'pack'):
      if getattr(self, name):
        raise ValueError(f'{name} is True; image tasks are neither cached nor packed: use False.')


class BatchIterator:
  """Batches of numpy arrays, read ahead on background threads.

  A batch has image float32 [B, H, W, C] with levels in [-1, 1], label int32 [B, L] padded with -1
  or text int32 [B, L] (token ids and end-of-sequence, 1, padded with 0), index int32 [B] and mask
  float32 [B], with B the number of `rows` (see ExampleReader.read). An error in reading a batch is
  raised by the `next` that would have returned it.

  element_spec: {name: jax.ShapeDtypeStruct} of the GLOBAL batch.
  num_examples, num_batches: from position 0 to the end; None if endless.
  """

  def __init__(
    self,
    read: Callable[[np.ndarray], Batch],
    corrupt: reader.CorruptRecords,
    element_spec: Mapping[str, jax.ShapeDtypeStruct],
    batch_size: int,
    rows: np.ndarray,
    num_examples: int | None,
    num_threads: int,
  ):
    """Reads nothing yet.

    Args:
      read: maps positions, int64 [n], to their rows of the batch; called on any thread.
      corrupt: the unreadable records that `read` has found.
      element_spec: see above.
      batch_size: rows of the global batch.
      rows: the row numbers of the global batch to read.
      num_examples: None if endless.
      num_threads: number of threads that read.
    """
    self._read = read
    self._corrupt = corrupt
    self._batch_size = batch_size
    self._rows = rows
    self.num_examples = num_examples
    self.element_spec = element_spec
    self.num_batches = None if num_examples is None else -(-num_examples // batch_size)
    self._executor = concurrent.futures.ThreadPoolExecutor(num_threads, 'input')
    self._pending: collections.deque[_PendingBatch] = collections.deque()
    self._position = 0

  @property
  def corrupt_records(self) -> tuple[str, ...]:
    """Names of the unreadable images that this host has found since it started."""
    return self._corrupt.names

  def __iter__(self) -> 'BatchIterator':
    return self

  def __next__(self) -> Batch:
    if self._ended(self._position):
      raise StopIteration
    while len(self._pending) <= _PREFETCHED_BATCHES:
      start = self._position + len(self._pending) * self._batch_size
      if self._ended(start):
        break
      self._pending.append(self._submit(start + self._rows))
    batch = self._pending[0].result()  # an error leaves the state as it was
    self._pending.popleft()
    self._position += self._batch_size
    return batch

  def get_state(self) -> dict[str, int]:
    """The position of the next example in the global order; batches read ahead do not count."""
    return {'position': self._position}

  def set_state(self, state: Mapping[str, int]) -> None:
    """Continues at a state of get_state, as if never interrupted; reads nothing before it.

    Raises:
      ValueError: this is not a state of get_state.
    """
    if set(state) != {'position'} or state['position'] < 0:
      raise ValueError(f"state is {dict(state)}; it must be {{'position': p}} with p >= 0.")
    self._discard_pending()
    self._position = int(state['position'])

  def close(self) -> None:
    """Stops the background thread. The iterator cannot be used afterwards."""
    self._discard_pending()
    self._executor.shutdown(wait=True)

  def _ended(self, position: int) -> bool:
    return self.num_examples is not None and position >= self.num_examples

  def _submit(self, positions: np.ndarray) -> '_PendingBatch':
    batch = {
      name: np.empty((len(positions), *spec.shape[1:]), spec.dtype)
      for name, spec in self.element_spec.items()
    }
    slices = [slice(start, start + _BLOCK) for start in range(0, len(positions), _BLOCK)]
    # Not a method, which would keep the iterator alive: its threads end with it.
    futures = [self._executor.submit(_fill, self._read, positions, batch, s) for s in slices]
    return _PendingBatch(batch, futures)

  def _discard_pending(self) -> None:
    for pending in self._pending:
      for future in pending.blocks:
        future.cancel()
    self._pending.clear()


@dataclasses.dataclass(frozen=True)
class _PendingBatch:
  """A batch whose blocks of rows are being read.

  batch: whole once all of `blocks` are done.
  """

  batch: Batch
  blocks: Sequence[concurrent.futures.Future]

  def result(self) -> Batch:
    for block in self.blocks:
      block.result()
    return self.batch


def _fill(
  read: Callable[[np.ndarray], Batch], positions: np.ndarray, batch: Batch, rows: slice
) -> None:
  """Reads some rows of a batch into it."""
  block = read(positions[rows])
  for name, array in batch.items():
    if block[name].shape[1:] != array.shape[1:]:
      raise ValueError(
        f'{name} of the examples has the shape {list(block[name].shape[1:])}; it must be '
        f'{list(array.shape[1:])}.'
      )
    array[rows] = block[name]


def task_info(name: str, vocabulary: str | None = None) -> TaskInfo | ImageTextInfo:
  """Metadata of a task; reads no images.

  Args:
    name: name of a task with class labels (returns a TaskInfo) or captions (an ImageTextInfo).
    vocabulary: as in DatasetConfig; vocab_size depends on it.

  Raises:
    ValueError: the task or vocabulary does not exist, or its files are wrong.
  """
  from het_plugin.data import tasks  # not at the top: seqio and TensorFlow take seconds to import

  return tasks.get_task(name, vocabulary).info


def classification_info(name: str) -> TaskInfo:
  """`task_info` of a task that must have class labels.

  Raises:
    ValueError: as task_info, or the task has captions.
  """
  info = task_info(name)
  if not isinstance(info, TaskInfo):
    raise ValueError(f'task is {name!r}, whose images have captions; class labels are needed here.')
  return info


def one_pass(
  task: str,
  split: str,
  *,
  image_size: int,
  max_labels: int | None = None,
  text_length: int | None = None,
  batch_size: int,
  bounded: bool,
  resize: Literal['aspect', 'squash'] | None = None,
  vocabulary: str | None = None,
) -> DatasetConfig:
  """Settings for evaluation: each example of a split once, without augmentation.

  Args:
    task: name of the task.
    split: a split or a slice of one; an endless split stays endless.
    image_size: side of the square images, in pixels.
    max_labels: labels per image, for a task with class labels.
    text_length: tokens per caption including end-of-sequence, for a task with captions.
    batch_size: rows of the global batch.
    bounded: whether only the first examples will be read. They are then a fixed random choice,
      because the first examples of a split sorted by class would be of few classes.
    resize, vocabulary: see DatasetConfig.

  Raises:
    ValueError: the task does not exist, a setting is out of range, or not exactly one of max_labels
      and text_length is set.
  """
  if (max_labels is None) == (text_length is None):
    raise ValueError(
      f'max_labels is {max_labels} and text_length is {text_length}; one of them must be None.'
    )
  annotation = {'label': max_labels} if text_length is None else {'text': text_length}
  endless = task_info(task).splits.get(split, 0) is None
  return DatasetConfig(
    mixture_or_task_name=task,
    task_feature_lengths={'image': image_size, **annotation},
    split=split,
    batch_size=batch_size,
    shuffle=bounded,
    num_epochs=None if endless else 1,
    augment=False,
    resize=resize,
    vocabulary=vocabulary,
  )


def get_dataset(cfg: DatasetConfig, rows: Sequence[int] | None = None) -> BatchIterator:
  """Batches of a task.

  Args:
    cfg: settings.
    rows: the row numbers of the global batch that this process supplies, in this order; None for
      all.

  Raises:
    ValueError: the configuration is wrong or does not fit the task; raised before reading images.
  """
  if cfg.module:
    importlib.import_module(cfg.module)
  rows = np.arange(cfg.batch_size) if rows is None else np.asarray(rows, np.int64)
  if not len(rows) or rows.min() < 0 or rows.max() >= cfg.batch_size:
    raise ValueError(
      f'rows is {rows.tolist()}; they must lie in [0, batch_size = {cfg.batch_size}).'
    )

  # Not at the top: seqio and TensorFlow take seconds to import.
  from het_plugin.data import seqio_task, tasks

  task = tasks.get_task(cfg.mixture_or_task_name, cfg.vocabulary)
  augment = cfg.split == TRAIN_SPLIT if cfg.augment is None else cfg.augment
  preprocessors = task.split_preprocessors(augment, cfg.resize)
  seqio_task.check_request(task, cfg.split, cfg.task_feature_lengths, preprocessors)
  info = task.info
  part = splits.resolve(cfg.split, info.splits, task.name)
  if cfg.num_epochs is not None and part.num_records is None:
    raise ValueError(
      f'num_epochs is {cfg.num_epochs}; the split {cfg.split!r} of {task.name} is endless: it must '
      f'be None.'
    )
  training = cfg.split == TRAIN_SPLIT or cfg.augment
  example_reader = reader.ExampleReader(
    task.examples,
    cfg.split,
    size=cfg.task_feature_lengths['image'],
    annotations=task.source.annotations(cfg.task_feature_lengths, augment),
    shuffle=cfg.shuffle,
    seed=cfg.seed,
    num_epochs=cfg.num_epochs or (None if training else 1),
    max_corrupt_fraction=cfg.max_corrupt_fraction,
  )
  if preprocessors:
    read = seqio_task.preprocessed_reader(
      task, example_reader, cfg.task_feature_lengths, preprocessors
    )
  else:
    read = example_reader.read
  return BatchIterator(
    read,
    example_reader.corrupt,
    element_spec(cfg, info.channels),
    cfg.batch_size,
    rows,
    example_reader.num_examples,
    cfg.num_threads,
  )


def element_spec(cfg: Any, channels: int) -> dict[str, jax.ShapeDtypeStruct]:
  """Shapes of the global batch of a data set, for images of `channels` channels; reads nothing.

  Args:
    cfg: a DatasetConfig, or another with its batch_size and task_feature_lengths.
    channels: of the images.
  """
  B, side = cfg.batch_size, cfg.task_feature_lengths['image']
  annotation = 'text' if 'text' in cfg.task_feature_lengths else 'label'
  return {
    'image': jax.ShapeDtypeStruct((B, side, side, channels), np.float32),
    annotation: jax.ShapeDtypeStruct((B, cfg.task_feature_lengths[annotation]), np.int32),
    'index': jax.ShapeDtypeStruct((B,), np.int32),
    'mask': jax.ShapeDtypeStruct((B,), np.float32),
  }
