"""The tasks by name; tasks without a prefix are registered with seqio when this is imported.

Images with class labels:
    glyphs_core, glyphs_full, glyphs_heldout   Unicode characters (glyphs.py)
    glyphs_noisy, glyphs_noisy_full            the same with noisy labels (glyph_confusions.py)
    digits                                     scikit-learn's digits
    npz:PATH, or PATH.npz                      arrays in a file (array_source.py)
    image_folder:PATH, or PATH of a folder     JPEG and PNG files by class (image_folder.py)
    tfds:NAME, or NAME                         TensorFlow Datasets (tfds_source.py); takes
                                               precedence over a folder of the same name
Images with captions:
    glyph_names, glyph_names_full, glyph_names_heldout
                                               the same characters with their names (glyphs.py)
    npz_captions:PATH                          arrays in a file (array_source.py)
    image_folder_captions:PATH                 JPEG and PNG files, and a file of captions
                                               (caption_file.py)
    tfds_captions:NAME                         TensorFlow Datasets (tfds_source.py)

To add a data set, or other preprocessing, call `add_image_task` or `add_image_text_task` in a
module that `DatasetConfig.module` names.
"""

import hashlib
import os
import re
from collections.abc import Callable, Sequence

import seqio

from het_plugin.data import (
  array_source,
  caption_file,
  glyphs,
  image_folder,
  preprocess,
  seqio_metrics,
  tfds_source,
  vocabularies,
)
from het_plugin.data.seqio_task import (
  ImageTask,
  IndexedDataSource,
  Preprocessor,
  output_features,
)
from het_plugin.data.sources import ExampleSource, ImageTextInfo

_PHOTO_TRAIN = (
  preprocess.inception_crop(),
  preprocess.flip_left_right(),
  preprocess.value_range(),
)
_PHOTO_EVAL = preprocess.photo_evaluation()
# No crop and no mirroring, so that everything the caption describes stays visible, on its side.
_CAPTIONED_PHOTO = (preprocess.resize(), preprocess.value_range())

# prefix: (factory of the source, training preprocessors, evaluation preprocessors)
_MAKERS: dict[str, tuple[Callable[[str], ExampleSource], Sequence, Sequence]] = {
  'npz': (array_source.npz_source, (), ()),
  'image_folder': (image_folder.ImageFolderSource, _PHOTO_TRAIN, _PHOTO_EVAL),
  'tfds': (tfds_source.TfdsSource, _PHOTO_TRAIN, _PHOTO_EVAL),
}
_CAPTION_MAKERS: dict[str, tuple[Callable[[str], ExampleSource], Sequence, Sequence]] = {
  'npz_captions': (array_source.npz_captions_source, (), ()),
  'image_folder_captions': (caption_file.CaptionFileSource, _CAPTIONED_PHOTO, _CAPTIONED_PHOTO),
  'tfds_captions': (tfds_source.TfdsCaptionSource, _CAPTIONED_PHOTO, _CAPTIONED_PHOTO),
}


def add_image_task(
  name: str,
  source: ExampleSource,
  preprocessors: Sequence[Preprocessor] = (),
  eval_preprocessors: Sequence[Preprocessor] = (),
) -> ImageTask:
  """Registers a source of images with class labels with seqio.

  Args:
    name: letters, digits and . : _ #
    source: the examples. Without preprocessors it must return float32 images of the model's side.
    preprocessors: run on the split 'train'; see preprocess.py. They must end in float32 images
      [H, H, C] with levels in [-1, 1].
    eval_preprocessors: run on every other split.

  Raises:
    ValueError: the name is taken or has other characters, or the source has captions.
  """
  if isinstance(source.info, ImageTextInfo):
    raise ValueError(f'the images of {name!r} have captions: call add_image_text_task.')
  return _add(name, IndexedDataSource(source), preprocessors, eval_preprocessors)


def add_image_text_task(
  name: str,
  source: ExampleSource,
  vocabulary: str | seqio.Vocabulary | None = None,
  preprocessors: Sequence[Preprocessor] = (),
  eval_preprocessors: Sequence[Preprocessor] = (),
) -> ImageTask:
  """Registers a source of images with captions with seqio.

  The captions are tokenised when they are read, before the preprocessors, which see the token ids
  as `text`.

  Args:
    name, preprocessors, eval_preprocessors: see add_image_task.
    source: the examples; its info is an ImageTextInfo.
    vocabulary: a name (see get_vocabulary; None: bytes) or a vocabulary, with padding as id 0 and
      end-of-sequence as 1. DatasetConfig.vocabulary takes precedence.

  Raises:
    ValueError: the name is taken or has other characters, the source has class labels, the
      vocabulary does not exist, or its end-of-sequence has another id.
  """
  if not isinstance(source.info, ImageTextInfo):
    raise ValueError(f'the images of {name!r} have class labels, no captions: call add_image_task.')
  if vocabulary is None or isinstance(vocabulary, str):
    vocabulary = vocabularies.get_vocabulary(vocabulary)
  if vocabulary.eos_id != vocabularies.END:
    raise ValueError(
      f'vocabulary is {vocabulary}, whose id of end-of-sequence is {vocabulary.eos_id}; it must be '
      f'{vocabularies.END}.'
    )
  return _add(name, IndexedDataSource(source, vocabulary), preprocessors, eval_preprocessors)


def _add(
  name: str,
  source: IndexedDataSource,
  preprocessors: Sequence[Preprocessor],
  eval_preprocessors: Sequence[Preprocessor],
) -> ImageTask:
  has_labels = source.vocabulary is None
  return seqio.TaskRegistry.add(
    name,
    source=source,
    metric_fns=(seqio_metrics.precision, seqio_metrics.likelihood) if has_labels else (),
    output_features=output_features(source.vocabulary),
    preprocessors=tuple(preprocessors),
    task_cls=ImageTask,
    eval_preprocessors=tuple(eval_preprocessors),
  )


def get_task(name: str | ImageTask, vocabulary: str | None = None) -> ImageTask:
  """The task with a name; tasks given by a path are registered under a name that seqio accepts.

  Args:
    name: a name, or a task.
    vocabulary: of the captions, see get_vocabulary; the task with another vocabulary than its own
      is registered under another name. None for the task's own.

  Raises:
    ValueError: the task, path, data set or vocabulary does not exist, the task is a plain seqio
      task, which cannot be read by number, or a vocabulary is given for a task of labels.
  """
  task = _get_task(name)
  if vocabulary is None:
    return task
  if task.vocabulary is None:
    raise ValueError(
      f'vocabulary is {vocabulary!r}; {task.name} has class labels, no captions: it must be None.'
    )
  loaded = vocabularies.get_vocabulary(vocabulary)
  if loaded == task.vocabulary:
    return task
  seqio_name = f'{task.name}:{_readable(vocabulary)}'
  if seqio_name in seqio.TaskRegistry.names():
    return seqio.TaskRegistry.get(seqio_name)
  return add_image_text_task(
    seqio_name, task.examples, loaded, task.preprocessors, task.eval_preprocessors
  )


def _get_task(name: str | ImageTask) -> ImageTask:
  if isinstance(name, ImageTask):
    return name
  if name in seqio.TaskRegistry.names():
    task = seqio.TaskRegistry.get(name)
    if not isinstance(task, ImageTask):
      raise ValueError(
        f'{name!r} is a plain seqio task, which cannot be read by position; register it with '
        f'add_image_task or add_image_text_task of het_plugin.data.tasks (under t5x it works as it '
        f'is).'
      )
    return task
  prefix, _, argument = name.partition(':')
  if prefix not in _MAKERS and prefix not in _CAPTION_MAKERS:
    prefix, argument = _guess_prefix(name), name
  if prefix is None or not argument:
    # Without the tasks that this function registered for paths and vocabularies.
    ours = sorted(n for n in seqio.TaskRegistry.names() if is_image_task(n) and ':' not in n)
    raise ValueError(
      f'mixture_or_task_name is {name!r}; it must be one of {ours}, npz:PATH or a path that ends '
      f'in .npz, image_folder:PATH or the path of an existing folder, tfds:NAME or the name of a '
      f'TensorFlow Datasets data set; or, with captions, npz_captions:PATH, '
      f'image_folder_captions:PATH or tfds_captions:NAME.'
    )
  seqio_name = _seqio_name(prefix, argument)
  if seqio_name in seqio.TaskRegistry.names():
    return seqio.TaskRegistry.get(seqio_name)
  if prefix in _CAPTION_MAKERS:
    make, train, evaluation = _CAPTION_MAKERS[prefix]
    return add_image_text_task(seqio_name, make(argument), None, train, evaluation)
  make, train, evaluation = _MAKERS[prefix]
  return add_image_task(seqio_name, make(argument), train, evaluation)


def is_image_task(name: str) -> bool:
  """Whether a task with this name is registered and can be read by number."""
  names = seqio.TaskRegistry.names()
  return name in names and isinstance(seqio.TaskRegistry.get(name), ImageTask)


def _guess_prefix(name: str) -> str | None:
  """Guesses the prefix of a name without one."""
  if name.endswith('.npz'):
    return 'npz'
  if tfds_source.exists(name):
    return 'tfds'
  return 'image_folder' if os.path.isdir(name) else None


def _seqio_name(prefix: str, argument: str) -> str:
  """A readable name within seqio's alphabet, unique to the argument."""
  return f'{prefix}:{_readable(argument)}'


def _readable(argument: str) -> str:
  readable = re.sub(r'[^A-Za-z0-9.]+', '_', argument)[-40:]
  return f'{readable}_{hashlib.sha256(argument.encode()).hexdigest()[:8]}'


for _name, _source in glyphs.SOURCES.items():
  add_image_task(_name, _source)
for _class_set in glyphs.SPLITS:
  _suffix = '' if _class_set == 'core' else f'_{_class_set}'
  add_image_text_task(f'glyph_names{_suffix}', glyphs.GlyphNameSource(_class_set))
add_image_task(
  'digits',
  array_source.digits_source(),
  preprocessors=(preprocess.resize(),),
  eval_preprocessors=(preprocess.resize(),),
)
