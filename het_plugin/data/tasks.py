"""The tasks by name: those that are made here, prefixes of paths and names (`_MAKERS`), and added
ones. docs/data.md has a table of them.
"""

import contextlib
import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from het_plugin.data import annotations, array_source, glyphs, image_folder, tfds_names
from het_plugin.data import augment as augment_lib
from het_plugin.data import order as order_lib
from het_plugin.data import preprocess as pp
from het_plugin.data import reader as reader_lib
from het_plugin.data import splits as splits_lib
from het_plugin.data.sources import ExampleSource, ImageTextInfo, TaskInfo, Vocabulary


@dataclasses.dataclass(frozen=True, eq=False)
class ImageTask:
  """A source with its preprocessing in training and in evaluation (preprocess.py).

  vocabulary: of the captions, a name (see get_vocabulary) or a seqio vocabulary; None for labels.
  """

  name: str
  examples: ExampleSource
  preprocessors: Sequence[pp.Preprocessor] = ()
  eval_preprocessors: Sequence[pp.Preprocessor] = ()
  vocabulary: str | Vocabulary | None = None

  @property
  def info(self) -> TaskInfo | ImageTextInfo:
    """Metadata, known without reading images."""
    info = self.examples.info
    converted = [x.num_channels for x in self.eval_preprocessors if isinstance(x, pp.ToChannels)]
    if converted:
      info = dataclasses.replace(info, channels=converted[-1])
    if self.vocabulary is None:
      return info
    from het_plugin.data import vocabularies

    vocabulary = self.loaded_vocabulary
    name = vocabularies.vocabulary_name(vocabulary)
    return dataclasses.replace(info, vocabulary=name, vocab_size=vocabulary.vocab_size)

  @property
  def loaded_vocabulary(self) -> Vocabulary:
    from het_plugin.data import vocabularies

    return vocabularies.get_vocabulary(self.vocabulary)

  def reader(
    self,
    split: str,
    lengths: Mapping[str, int],
    *,
    augment: bool,
    augmentations: Sequence[Any] | None = None,
    resize: str | pp.ResizeAndCrop | None = None,
    shuffle: bool,
    seed: int,
    num_epochs: int | None,
    order: str | None = 'examples',
    batch_size: int = 1,
  ) -> reader_lib.ExampleReader:
    """Reads the examples of a split or slice in the global order; settings as in DatasetConfig.

    Raises:
      ValueError: the split does not exist, or the task cannot make these lengths, augmentations or
        this order.
    """
    self._check(split, lengths)
    is_sheet = isinstance(resize, pp.ResizeAndCrop) and resize.mode == 'patches'
    if is_sheet:
      resize.check(lengths['image'])
    preprocessors = self._split_preprocessors(augment, resize)
    mixture = None
    if augment and augmentations is not None:
      preprocessors, mixture = augment_lib.resolve(augmentations)
      converted = (x for x in self.eval_preprocessors if isinstance(x, pp.ToChannels))
      preprocessors = (*converted, *preprocessors)
      if is_sheet:
        preprocessors = (*_of_any_aspect(preprocessors), resize)
      if mixture and is_sheet:
        raise ValueError(
          f'augmentations is {augmentations!r}; images of the aspect of their photographs (NaFlex) '
          'cannot be mixed.'
        )
      if mixture and 'text' in lengths:
        raise ValueError(f'augmentations is {augmentations!r}; captions cannot be mixed.')
    if self.vocabulary is None:
      fields = self.examples.info.label_fields
      if mixture and 'label_weight' not in fields:
        if 'annotator' not in fields and lengths['label'] > 1:  # votes, or classes of a sigmoid
          fields = (*fields, 'label_count')
        fields = (*fields, 'label_weight')
      annotated = annotations.Labels(lengths['label'], fields)
    else:
      annotated = annotations.Captions(self.loaded_vocabulary, lengths['text'], at_random=augment)
    return reader_lib.ExampleReader(
      self.examples,
      split,
      size=lengths['image'],
      channels=self.info.channels,
      annotations=annotated,
      preprocessors=preprocessors,
      mixture=mixture,
      shuffle=shuffle,
      seed=seed,
      num_epochs=num_epochs,
      blocks=self._blocks(split, order, seed, batch_size) if shuffle else None,
    )

  def _blocks(
    self, split: str, order: str | None, seed: int, batch_size: int
  ) -> order_lib.BlockOrder | None:
    """The order of blocks, if that is the order: None leaves it to the source."""
    if order == 'examples' or not (order or getattr(self.examples, 'prefers_blocks', False)):
      return None
    if not hasattr(self.examples, 'blocks'):
      raise ValueError(
        f"order is {order!r}; it must be 'examples' for {self.name}, which has no blocks: only "
        'Parquet files, tar shards and TFRecords have.'
      )
    part = splits_lib.resolve(split, self.examples.info.splits)
    starts = self.examples.blocks(part.split)
    bounds = part.start, part.start + part.num_records
    return order_lib.BlockOrder(seed, np.unique(starts.clip(*bounds)) - part.start, batch_size)

  def _split_preprocessors(
    self, augment: bool, resize: str | pp.ResizeAndCrop | None
  ) -> Sequence[pp.Preprocessor]:
    are_photos = any(isinstance(x, _SQUARE) for x in self.eval_preprocessors)
    if isinstance(resize, pp.ResizeAndCrop) and resize.mode == 'patches':
      usual = self.preprocessors if augment else self.eval_preprocessors
      return (*_of_any_aspect(usual), resize)
    if isinstance(resize, pp.ResizeAndCrop):  # of a tower, for all photographs that it reads
      made = resize if are_photos and not augment else None
    else:
      made = None if resize is None else pp.CentralCrop(resize)
    if made is None:
      return self.preprocessors if augment else self.eval_preprocessors
    if augment:
      raise ValueError(
        f'resize is {resize!r}; images that are augmented are cropped at random: it must be None.'
      )
    if not are_photos:
      raise ValueError(
        f'resize is {resize!r}; it must be None for {self.name}, whose images are not '
        'photographs of any size.'
      )
    return tuple(made if isinstance(x, _SQUARE) else x for x in self.eval_preprocessors)

  def _check(self, split: str, lengths: Mapping[str, int]) -> None:
    """ValueError if a split or slice does not exist, or the task cannot make these lengths."""
    info = self.examples.info
    if splits_lib.resolve(split, info.splits, self.name).num_records == 0:
      raise ValueError(f'The split {split!r} of {self.name} is empty.')
    has_labels = self.vocabulary is None
    feature, least, noun = ('label', 1, 'class labels') if has_labels else ('text', 2, 'captions')
    wrong = set(lengths) != {'image', feature}
    if wrong or lengths['image'] < 1 or lengths[feature] < least:
      raise ValueError(
        f"task_feature_lengths is {dict(lengths)}; it must be {{'image': H, {feature!r}: L}} with "
        f'H at least 1 and L at least {least}: {self.name} has {noun}.'
      )
    if has_labels and lengths['label'] < info.max_labels:
      raise ValueError(
        f"task_feature_lengths['label'] is {lengths['label']}; examples of {self.name} have up to "
        f'{info.max_labels} labels: set MAX_LABELS = {info.max_labels}.'
      )


_TASKS: dict[str, ImageTask] = {}
ON_ADD: list[Callable[[ImageTask], Any]] = []  # called with every added task; for seqio_task

_SMALL = 64  # pixels; folders of images of at most this side are not cropped like photographs
_OF_FILES = 'image_folder', 'parquet', 'webdataset', 'tfrecord', 'array_record'
_PHOTO_TRAIN = pp.InceptionCrop(), pp.Flip()
_SQUARE = pp.CentralCrop, pp.Resize
# No crop and no mirroring, so that everything in the caption stays visible and on its side.
_CAPTIONED = (pp.Resize(),)


def _of_any_aspect(preprocessors: Iterable[pp.Preprocessor]) -> list[pp.Preprocessor]:
  """The preprocessors without what makes squares of photographs."""
  return [
    dataclasses.replace(x, keep_aspect=True) if isinstance(x, pp.InceptionCrop) else x
    for x in preprocessors
    if not isinstance(x, _SQUARE)
  ]


def _tfds(name: str, source: str = 'TfdsSource') -> ExampleSource:
  try:
    from het_plugin.data import tfds_source  # takes time to import
  except ImportError as error:
    raise ValueError(
      f"tfds:{name} needs TensorFlow Datasets: pip install 'het_plugin[tfds]' ({error})."
    ) from error
  return getattr(tfds_source, source)(name)


def _later(name: str, source: str) -> ExampleSource:
  """The source `module.Class`, imported when it is needed, because that takes time."""
  module, kind = source.split('.')
  return getattr(importlib.import_module(f'het_plugin.data.{module}'), kind)(name)


_parquet = functools.partial(_later, source='parquet_source.ParquetSource')
_parquet_captions = functools.partial(_later, source='parquet_source.ParquetCaptionSource')
_webdataset = functools.partial(_later, source='webdataset_source.WebDatasetSource')
_webdataset_captions = functools.partial(_later, source='webdataset_source.WebDatasetCaptionSource')
_tfrecord = functools.partial(_later, source='record_source.TfRecordSource')
_array_record = functools.partial(_later, source='record_source.ArrayRecordSource')
_tfds_captions = functools.partial(_tfds, source='TfdsCaptionSource')

# prefix: (factory of the source, training preprocessors, evaluation preprocessors, vocabulary)
_MAKERS: dict[str, tuple[Callable[[str], ExampleSource], Sequence, Sequence, str | None]] = {
  'npz': (array_source.npz_source, (), (), None),
  'features': (array_source.features_source, (), (), None),
  'image_folder': (image_folder.ImageFolderSource, _PHOTO_TRAIN, (pp.CentralCrop(),), None),
  'parquet': (_parquet, _PHOTO_TRAIN, (pp.CentralCrop(),), None),
  'webdataset': (_webdataset, _PHOTO_TRAIN, (pp.CentralCrop(),), None),
  'tfrecord': (_tfrecord, _PHOTO_TRAIN, (pp.CentralCrop(),), None),
  'array_record': (_array_record, _PHOTO_TRAIN, (pp.CentralCrop(),), None),
  'tfds': (_tfds, _PHOTO_TRAIN, (pp.CentralCrop(),), None),
  'npz_captions': (array_source.npz_captions_source, (), (), 'bytes'),
  'image_folder_captions': (image_folder.CaptionFileSource, _CAPTIONED, _CAPTIONED, 'bytes'),
  'parquet_captions': (_parquet_captions, _CAPTIONED, _CAPTIONED, 'bytes'),
  'webdataset_captions': (_webdataset_captions, _CAPTIONED, _CAPTIONED, 'bytes'),
  'tfds_captions': (_tfds_captions, _CAPTIONED, _CAPTIONED, 'bytes'),
}


def add_image_task(
  name: str,
  source: ExampleSource,
  preprocessors: Sequence[pp.Preprocessor] = (),
  eval_preprocessors: Sequence[pp.Preprocessor] = (),
) -> ImageTask:
  """Adds a task of images with class labels.

  `name` has letters, digits and . : _ #. Of the preprocessors (preprocess.py), the first run on the
  split 'train' and the second on every other.

  Raises:
    ValueError: the name is taken, or the source has captions.
  """
  if isinstance(source.info, ImageTextInfo):
    raise ValueError(f'the images of {name!r} have captions: call add_image_text_task.')
  return _add(ImageTask(name, source, tuple(preprocessors), tuple(eval_preprocessors)))


def add_image_text_task(
  name: str,
  source: ExampleSource,
  vocabulary: str | Vocabulary | None = None,
  preprocessors: Sequence[pp.Preprocessor] = (),
  eval_preprocessors: Sequence[pp.Preprocessor] = (),
) -> ImageTask:
  """Adds a task of images with captions.

  As `add_image_task`, with a vocabulary: a name (see get_vocabulary; None: bytes) or a vocabulary
  with padding as id 0 and end-of-sequence as 1. DatasetConfig.vocabulary takes precedence.

  Raises:
    ValueError: the name is taken, the source has class labels, or the vocabulary's
      end-of-sequence has another id.
  """
  if not isinstance(source.info, ImageTextInfo):
    raise ValueError(f'the images of {name!r} have class labels, no captions: call add_image_task.')
  if vocabulary is not None and not isinstance(vocabulary, str):
    if vocabulary.eos_id != annotations.END:
      raise ValueError(
        f'vocabulary {vocabulary} has the end-of-sequence id {vocabulary.eos_id}; it must be '
        f'{annotations.END}.'
      )
  return _add(
    ImageTask(name, source, tuple(preprocessors), tuple(eval_preprocessors), vocabulary or 'bytes')
  )


def _add(task: ImageTask) -> ImageTask:
  if task.name in _TASKS:
    raise ValueError(f'there is a task {task.name!r} already: choose another name.')
  _TASKS[task.name] = task
  for call in ON_ADD:
    call(task)
  return task


def names() -> tuple[str, ...]:
  """The names of the tasks that were added; tasks given by a path are not among them."""
  return tuple(sorted(_TASKS))


def own_vocabulary(name: Any) -> str | Vocabulary | None:
  """`ImageTask.vocabulary` of the task with a name, whose data need not be here."""
  task = _given(name)
  return _MAKERS[_prefix(name)[0]][-1] if task is None else task.vocabulary


def get_task(name: Any, vocabulary: str | Vocabulary | None = None) -> ImageTask:
  """The task with a name, or `name` itself if it is an ImageTask.

  `vocabulary` replaces the task's own vocabulary of captions, see get_vocabulary.

  Raises:
    ValueError: the task, path, data set or vocabulary does not exist, or a vocabulary is given for
      a task of labels.
  """
  task = _given(name) or _made(*_prefix(name))
  if vocabulary is None:
    return task
  if task.vocabulary is None:
    raise ValueError(
      f'vocabulary is {vocabulary!r}; {task.name} has class labels, no captions: it must be None.'
    )
  from het_plugin.data import vocabularies

  return dataclasses.replace(task, vocabulary=vocabularies.get_vocabulary(vocabulary))


def _given(name: Any) -> ImageTask | None:
  """The task that was added under a name, or `name` if it is a task; None for other names."""
  if isinstance(name, ImageTask):
    return name
  if not isinstance(name, str):
    raise ValueError(
      f"mixture_or_task_name is {name!r}; it must be the name of one task: 'digits'."
    )
  return _TASKS.get(name)


def tfds_namespace(name: str) -> str | None:
  """The namespace of the TFDS data set that a task's name stands for, such as 'kaggle' of
  'tfds:kaggle:birds' and of 'kaggle:birds'; None if there is none. TFDS is not asked.
  """
  prefix, argument = _split(name)
  if name in _TASKS or prefix not in (None, 'tfds', 'tfds_captions'):
    return None
  return tfds_names.namespace(argument)


def _split(name: str) -> tuple[str | None, str]:
  """The prefix and the rest; None and the whole name where TFDS or a folder decides."""
  prefix, _, argument = str(name).partition(':')
  if prefix in _MAKERS and argument:
    return prefix, argument
  return 'npz' if str(name).endswith('.npz') else None, name


def _prefix(name: str) -> tuple[str, str]:
  """The prefix, which may be missing in the name, and the rest."""
  prefix, argument = _split(name)
  if prefix is not None:
    return prefix, argument
  with contextlib.suppress(ImportError):  # without TensorFlow Datasets there are none of its names
    from het_plugin.data import tfds_source  # takes time to import

    if tfds_source.exists(str(name)):
      return 'tfds', name
  if os.path.isdir(name):
    return 'image_folder', name
  raise ValueError(
    f'mixture_or_task_name is {name!r}; it must be one of {", ".join(names())}, npz:PATH '
    'or a path that ends in .npz, features:PATH, image_folder:PATH or the path of an existing '
    'folder, parquet:PATH, webdataset:PATTERN, tfrecord:PATH, array_record:PATH, tfds:NAME or the '
    'name of a TensorFlow Datasets data set; or, with captions, npz_captions:PATH, '
    'image_folder_captions:PATH, parquet_captions:PATH, webdataset_captions:PATTERN or '
    'tfds_captions:NAME.'
  )


@functools.cache
def _made(prefix: str, argument: str) -> ImageTask:
  make, *_, vocabulary = _MAKERS[prefix]
  source = make(argument)
  train, evaluation = _preprocessors(prefix, lambda: source.typical_side)
  return ImageTask(f'{prefix}:{argument}', source, train, evaluation, vocabulary)


def _preprocessors(prefix: str, typical_side: Callable[[], float]) -> tuple[Sequence, Sequence]:
  """The preprocessors of training and of evaluation."""
  if prefix in _OF_FILES and typical_side() <= _SMALL:
    # A crop of 5% of a small image shows nothing, and 8/7 of the side cuts off its border.
    return (pp.PadCrop(), pp.Flip()), (pp.Resize(),)
  return _MAKERS[prefix][1:3]


def absent_eval_preprocessors(
  name: str, typical_side: Callable[[], float]
) -> Sequence[pp.Preprocessor]:
  """The evaluation preprocessors of a task whose data are not here, for images of this side.

  A task that was added under its name, and is not here, is taken to have none.
  """
  try:
    prefix, _ = _prefix(name)
  except ValueError:
    prefix = 'image_folder' if os.path.dirname(name) else 'npz'
  return _preprocessors(prefix, typical_side)[1]


# Not by add_image_task, which reads their metadata, for which fonts must be loaded.
for _name, _source in glyphs.SOURCES.items():
  _add(ImageTask(_name, _source))
for _class_set in ('core', 'full', 'heldout'):
  _name = 'glyph_names' if _class_set == 'core' else f'glyph_names_{_class_set}'
  _add(ImageTask(_name, glyphs.GlyphNameSource(_class_set), vocabulary='bytes'))
_add(ImageTask('digits', array_source.digits_source()))
