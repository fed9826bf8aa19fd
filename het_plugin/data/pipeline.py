"""Batches by global position, as the built-in trainer reads them.

The state of an iterator is one integer, the global position of the first example of the next batch.
It does not depend on the number of hosts: every host reads its rows of each global batch, and the
content of a row depends only on its position.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import jax
import numpy as np
from absl import flags

from het_plugin.data import annotations as annotations_lib
from het_plugin.data import preprocess, reader, splits
from het_plugin.data.sources import TRAIN_SPLIT, ImageTextInfo, TaskInfo
from het_plugin.system import ranges
from het_plugin.system.ranges import Count

if TYPE_CHECKING:
  from het_plugin.data.tasks import ImageTask

Batch = reader.Batch

PREFETCHED_BATCHES = 3
_BLOCK = 256
_BLOCK_BYTES = 2**27  # examples, and bytes of images, that a thread reads at a time
_MAX_THREADS = 16  # more would wait for the GIL
_ENDLESS = 2**48  # batches


@dataclasses.dataclass(frozen=True)
class DatasetConfig:
  """Settings of a data set, with the names of t5x.

  mixture_or_task_name: a name (see tasks.py) or a task.
  task_feature_lengths: {'image': H, 'label': L}, side of the images and length of the labels; for a
    task of captions {'image': H, 'text': L}, where end-of-sequence is one of the L tokens.
  split: one of the task's splits, or a slice of a finite one (splits.py), which is read once and
    without augmentation unless augment = True.
  batch_size: examples of the GLOBAL batch.
  shuffle: whether every epoch has its own random order; otherwise the order of the records.
  order: of a shuffled epoch: 'examples' is one permutation of all; 'blocks' reads the examples of a
    block at about the same time, such as those of a row group of a Parquet file (order.py), and
    depends on the size of the batch, too. None is 'blocks' for Parquet files and for data far away,
    else 'examples'.
  seed: seed of order, augmentation and endless streams; in [0, 2^32).
  num_epochs: passes over the split or slice. None is endless for the split 'train' and with
    augment = True, and one pass otherwise.
  augmentations: names or objects of augment.py, in order, for images that are augmented; None takes
    the task's own. With 'mixup' and 'cutmix' a batch has twice the labels, and label_weight.
  augment: whether images go through the training preprocessors, and one of several captions is
    drawn at random instead of the first. None is True for the whole split 'train' only.
  resize: how evaluation makes photographs square, 'aspect' or 'squash' (preprocess.CentralCrop), or
    a preprocess.ResizeAndCrop; None takes the task's own.
  vocabulary: of captions, see get_vocabulary; None takes the task's own, by default 'bytes'.
  max_corrupt_fraction: fraction of the split or slice that may be unreadable or without a caption;
    these rows are masked.
  num_threads: threads that read ahead; None: one per core, at most 16.
  num_workers: processes that read ahead, each with num_threads threads, for hosts with more cores
    than threads of one process can use; 0: threads of this process.
  """

  mixture_or_task_name: Any
  task_feature_lengths: Mapping[str, int]
  split: str
  batch_size: Count
  shuffle: bool = True
  order: Literal['examples', 'blocks'] | None = None
  seed: Annotated[int, '[0, 4294967296)'] = 0
  num_epochs: Count | None = None
  augment: bool | None = None
  augmentations: Sequence[Any] | None = None
  resize: Literal['aspect', 'squash'] | preprocess.ResizeAndCrop | None = None
  vocabulary: str | None = None
  max_corrupt_fraction: Annotated[float, '[0, 1]'] = reader.MAX_CORRUPT_FRACTION
  num_threads: Count | None = None
  num_workers: Annotated[int, '[0, inf)'] = 0

  def __post_init__(self):
    ranges.check(self)


class BatchIterator:
  """Batches of numpy arrays, read ahead by grain.

  `ExampleReader.read` describes a batch; B is the number of `rows`. An error in reading a batch
  is raised by the `next` that would have returned it; this `next` can be repeated.

  element_spec: {name: jax.ShapeDtypeStruct} of the GLOBAL batch.
  num_examples, num_batches: from position 0 to the end; None if endless.
  """

  def __init__(
    self,
    read: Callable[[np.ndarray], tuple[Batch, Mapping[Hashable, str]]],
    corrupt: reader.CorruptRecords,
    element_spec: Mapping[str, jax.ShapeDtypeStruct],
    batch_size: int,
    rows: np.ndarray,
    num_examples: int | None,
    num_threads: int | None = None,
    num_workers: int = 0,
  ):
    """Reads nothing yet.

    `read` is as ExampleReader.read, called on any thread; `corrupt` counts what it could not read.
    `rows` are the row numbers of the global batch to read.
    Others are as above and in DatasetConfig.
    """
    self.read = read
    self.corrupt = corrupt
    self._batch_size = batch_size
    self.num_examples = num_examples
    self.element_spec = element_spec
    self.num_batches = None if num_examples is None else -(-num_examples // batch_size)
    row_bytes = 4 * int(np.prod(element_spec['image'].shape[1:]))
    block = max(min(_BLOCK, _BLOCK_BYTES // row_bytes), 1)
    self._parts = [rows[start : start + block] for start in range(0, len(rows), block)]
    self._num_threads = num_threads or min(os.cpu_count(), _MAX_THREADS)
    self._num_workers = num_workers
    self._blocks: Iterator | None = None
    self._position = 0

  @property
  def corrupt_records(self) -> tuple[str, ...]:
    """Names of the unreadable images in the batches that this host has returned."""
    return self.corrupt.names

  def __iter__(self) -> 'BatchIterator':
    return self

  def __next__(self) -> Batch:
    if self.num_examples is not None and self._position >= self.num_examples:
      raise StopIteration
    if self._blocks is None:
      self._blocks = self._open()
    try:
      parts = [next(self._blocks) for _ in self._parts]
      for _, unreadable in parts:
        self.corrupt.add(unreadable)
    except Exception:
      self.close()
      raise
    self._position += self._batch_size
    if len(parts) == 1:
      return parts[0][0]
    return {name: np.concatenate([batch[name] for batch, _ in parts]) for name in parts[0][0]}

  def _open(self) -> Iterator[tuple[Batch, Mapping[Hashable, str]]]:
    """The parts of the batches in order, beginning at the position."""
    import grain  # imported by `get_dataset` before

    first = self._position // self._batch_size
    num_batches = _ENDLESS if self.num_batches is None else self.num_batches - first
    read = functools.partial(_read_part, self.read, self._position, self._batch_size, self._parts)
    ahead = max(self._num_threads, PREFETCHED_BATCHES * len(self._parts))
    options = grain.ReadOptions(num_threads=self._num_threads, prefetch_buffer_size=ahead)
    numbers = grain.MapDataset.range(num_batches * len(self._parts))
    blocks = numbers.map(read).to_iter_dataset(options)
    if self._num_workers:
      if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # grain's processes are started with absl's flags
      blocks = blocks.mp_prefetch(grain.MultiprocessingOptions(num_workers=self._num_workers))
    return iter(blocks)

  def get_state(self) -> dict[str, int]:
    """The position of the next example in the global order; batches read ahead do not count."""
    return {'position': self._position}

  def set_state(self, state: Mapping[str, int]) -> None:
    """Continues at a state of get_state, as if never interrupted; reads nothing before it."""
    position = state.get('position', -1)
    if set(state) != {'position'} or position < 0:
      raise ValueError(f"state is {dict(state)}; it must be {{'position': p}} with p >= 0.")
    self.close()
    self._position = int(position)

  def close(self) -> None:
    """Stops reading ahead until the next batch is requested."""
    if self._blocks is not None:
      self._blocks.close()
      self._blocks = None


def _read_part(read: Callable, start: int, batch_size: int, parts: Sequence[np.ndarray], i: int):
  """Reads the i-th part of the batches that begin at position `start`."""
  batch, part = divmod(i, len(parts))
  return read(start + batch * batch_size + parts[part])


def task_info(name: 'str | ImageTask', vocabulary: str | None = None) -> TaskInfo | ImageTextInfo:
  """Metadata of a task with class labels or captions; reads no images.

  vocab_size depends on `vocabulary`, which is as in DatasetConfig.
  """
  from het_plugin.data import tasks

  return tasks.get_task(name, vocabulary).info


@ranges.checked
def total_steps(
  dataset: DatasetConfig, steps: Count | None = None, examples: Count | None = None
) -> int:
  """Number of training steps. Exactly one of steps, examples and dataset.num_epochs must be set.

  Epochs are exact: each example is read num_epochs times, and the last batch is padded with rows
  that do not count. A number of examples is rounded up to whole batches.

  Raises:
    ValueError: none or several of the three are set, or num_epochs is set for an endless split.
  """
  lengths = {'steps': steps, 'examples': examples, 'num_epochs': dataset.num_epochs}
  given = [f'{name}={value}' for name, value in lengths.items() if value is not None]
  if len(given) != 1:
    raise ValueError(
      f'The length of the run is given by {" and ".join(given) or "nothing"}; exactly one of steps '
      '(TRAIN_STEPS), examples (TRAIN_EXAMPLES) and num_epochs (TRAIN_EPOCHS) must be set, the '
      'others None.'
    )
  if steps is not None:
    return steps
  if examples is None:
    task = dataset.mixture_or_task_name
    num_records = splits.resolve(dataset.split, task_info(task).splits, str(task)).num_records
    if num_records is None:
      raise ValueError(
        f'num_epochs={dataset.num_epochs}, but the split {dataset.split!r} of {task} is endless: '
        'give the length of the run in steps or examples.'
      )
    examples = dataset.num_epochs * num_records
  return -(-examples // dataset.batch_size)


def classification_info(name: 'str | ImageTask') -> TaskInfo:
  """`task_info` of a task that must have class labels."""
  info = task_info(name)
  if not isinstance(info, TaskInfo):
    raise ValueError(f'task is {name!r}, whose images have captions; class labels are needed here.')
  return info


def one_pass(
  task: 'str | ImageTask',
  split: str,
  *,
  image_size: int,
  max_labels: int | None = None,
  text_length: int | None = None,
  batch_size: int,
  bounded: bool,
  resize: Literal['aspect', 'squash'] | preprocess.ResizeAndCrop | None = None,
  vocabulary: str | None = None,
  max_corrupt_fraction: float | None = None,
) -> DatasetConfig:
  """Settings for evaluation: each example of a split once, without augmentation.

  A task of class labels has `max_labels` per image, one of captions `text_length` tokens. `bounded`
  tells whether only the first examples will be read. They are then a fixed random choice, because
  the first examples of a split sorted by class would be of few classes. An endless split stays
  endless.

  Raises:
    ValueError: the task does not exist, or a setting is out of range.
  """
  annotation = {'label': max_labels} if text_length is None else {'text': text_length}
  if max_corrupt_fraction is None:
    max_corrupt_fraction = reader.MAX_CORRUPT_FRACTION
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
    max_corrupt_fraction=max_corrupt_fraction,
  )


def get_dataset(
  cfg: DatasetConfig, rows: Sequence[int] | np.ndarray | None = None
) -> BatchIterator:
  """Batches of a task.

  `rows` are the row numbers of the global batch that this process supplies, in this order; None for
  all.

  Raises:
    ValueError: the configuration is wrong or does not fit the task; raised before reading images.
  """
  rows = np.arange(cfg.batch_size) if rows is None else np.asarray(rows, np.int64)
  if not len(rows) or rows.min() < 0 or rows.max() >= cfg.batch_size:
    raise ValueError(
      f'rows is {rows.tolist()}; they must lie in [0, batch_size = {cfg.batch_size}).'
    )

  # Not in the thread that reads ahead: while grain is imported, etils' lazy_imports replaces the
  # import of Python, and what other threads import then, such as jax in a trace, is broken.
  import grain.experimental  # noqa: F401

  from het_plugin.data import tasks  # not at the top: fonts and image files take time to import

  task = tasks.get_task(cfg.mixture_or_task_name, cfg.vocabulary)
  augmented = cfg.split == TRAIN_SPLIT if cfg.augment is None else cfg.augment
  if cfg.augmentations and cfg.augment is None and cfg.split.startswith(f'{TRAIN_SPLIT}['):
    raise ValueError(
      f'augmentations is {cfg.augmentations!r}, but {cfg.split!r} is a part of the training split: '
      'it is augmented only with augment = True.'
    )
  training = cfg.split == TRAIN_SPLIT or cfg.augment
  examples = task.reader(
    cfg.split,
    cfg.task_feature_lengths,
    augment=augmented,
    augmentations=cfg.augmentations,
    resize=cfg.resize,
    shuffle=cfg.shuffle,
    order=cfg.order,
    batch_size=cfg.batch_size,
    seed=cfg.seed,
    num_epochs=cfg.num_epochs or (None if training else 1),
  )
  num_records = examples.part.num_records
  annotations = examples.annotations
  if cfg.num_epochs is not None and num_records is None:
    raise ValueError(
      f'num_epochs is {cfg.num_epochs}; the split {cfg.split!r} of {task.name} is endless: it must '
      f'be None.'
    )
  spec = element_spec(cfg, examples.channels)
  for name, (shape, dtype, _) in annotations.features.items():
    double = examples.mixture is not None and name in annotations_lib.OF_EACH_LABEL
    shape = (2 * shape[0],) if double else shape
    spec[name] = jax.ShapeDtypeStruct((cfg.batch_size, *shape), dtype)
  if load := getattr(task.examples, 'load', None):
    if cfg.num_workers:
      raise ValueError(
        f'num_workers is {cfg.num_workers}; it must be 0 for {task.name}, whose examples are in '
        'the memory of this process.'
      )
    load()  # reads arrays now, so that errors do not appear in a thread
  return BatchIterator(
    examples.read,
    reader.CorruptRecords(num_records or 0, cfg.max_corrupt_fraction, annotations.noun),
    spec,
    cfg.batch_size,
    rows,
    examples.num_examples,
    cfg.num_threads,
    cfg.num_workers,
  )


def element_spec(cfg: Any, channels: int) -> dict[str, jax.ShapeDtypeStruct]:
  """Shapes of the global batch of a data set, for images of `channels` channels; reads nothing.

  `cfg` is a DatasetConfig, or another with its batch_size and task_feature_lengths.
  """
  B = cfg.batch_size
  side = cfg.task_feature_lengths['image']
  annotation = 'text' if 'text' in cfg.task_feature_lengths else 'label'
  return {
    'image': jax.ShapeDtypeStruct((B, side, side, channels), np.float32),
    annotation: jax.ShapeDtypeStruct((B, cfg.task_feature_lengths[annotation]), np.int32),
    'index': jax.ShapeDtypeStruct((B,), np.int32),
    'mask': jax.ShapeDtypeStruct((B,), np.float32),
  }
