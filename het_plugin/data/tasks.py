"""The tasks by name. The first four are registered with seqio when this module is imported.

    glyphs_core, glyphs_full, glyphs_heldout   Unicode characters (glyphs.py)
    digits                                     scikit-learn's digits
    npz:PATH, or PATH.npz                      arrays in a file (array_source.py)
    image_folder:PATH, or PATH of a folder     JPEG and PNG files by class (image_folder.py)
    tfds:NAME, or NAME                         TensorFlow Datasets (tfds_source.py); of a NAME that
                                               a folder here has too, this one is taken

Another data set, or other preprocessing, is one call of `add_image_task` in a module that
`DatasetConfig.module` names.
"""

import hashlib
import os
import re
from collections.abc import Callable, Sequence

import seqio

from het_plugin.data import array_source, glyphs, image_folder, preprocess, tfds_source
from het_plugin.data.seqio_task import (
  OUTPUT_FEATURES,
  ImageTask,
  IndexedDataSource,
  Preprocessor,
)
from het_plugin.data.sources import ExampleSource

_PHOTO_TRAIN = (
  preprocess.inception_crop(),
  preprocess.flip_left_right(),
  preprocess.value_range(),
)
_PHOTO_EVAL = preprocess.photo_evaluation()

# prefix: (maker of the source, preprocessors of training, of evaluation)
_MAKERS: dict[str, tuple[Callable[[str], ExampleSource], Sequence, Sequence]] = {
  'npz': (array_source.npz_source, (), ()),
  'image_folder': (image_folder.ImageFolderSource, _PHOTO_TRAIN, _PHOTO_EVAL),
  'tfds': (tfds_source.TfdsSource, _PHOTO_TRAIN, _PHOTO_EVAL),
}


def add_image_task(
  name: str,
  source: ExampleSource,
  preprocessors: Sequence[Preprocessor] = (),
  eval_preprocessors: Sequence[Preprocessor] = (),
) -> ImageTask:
  """Registers a source of images with seqio.

  Args:
    name: letters, digits and . : _ #
    source: the examples. Without preprocessors it must return float32 images of the model's side.
    preprocessors: run on the split 'train'; see preprocess.py. They must end in float32 images
      [H, H, C] with levels in [-1, 1].
    eval_preprocessors: run on every other split.

  Raises:
    ValueError: the name is taken or has other characters.
  """
  return seqio.TaskRegistry.add(
    name,
    source=IndexedDataSource(source),
    output_features=OUTPUT_FEATURES,
    preprocessors=tuple(preprocessors),
    task_cls=ImageTask,
    eval_preprocessors=tuple(eval_preprocessors),
  )


def get_task(name: str | ImageTask) -> ImageTask:
  """The task of a name; a task of a path is registered under a name that seqio accepts.

  Raises:
    ValueError: no such task, path or data set, or a seqio task that cannot be read by number.
  """
  if isinstance(name, ImageTask):
    return name
  if name in seqio.TaskRegistry.names():
    task = seqio.TaskRegistry.get(name)
    if not isinstance(task, ImageTask):
      raise ValueError(
        f'{name!r} is a plain seqio task, which cannot be read by position; register it with '
        f'het_plugin.data.tasks.add_image_task (under t5x it works as it is).'
      )
    return task
  prefix, _, argument = name.partition(':')
  if prefix not in _MAKERS:
    prefix, argument = _guess_prefix(name), name
  if prefix is None or not argument:
    ours = sorted(n for n in seqio.TaskRegistry.names() if is_image_task(n))
    raise ValueError(
      f'mixture_or_task_name is {name!r}; it must be one of {ours}, npz:PATH or a path that ends '
      f'in .npz, image_folder:PATH or the path of an existing folder, tfds:NAME or the name of a '
      f'TensorFlow Datasets data set.'
    )
  seqio_name = _seqio_name(prefix, argument)
  if seqio_name in seqio.TaskRegistry.names():
    return seqio.TaskRegistry.get(seqio_name)
  make, train, evaluation = _MAKERS[prefix]
  return add_image_task(seqio_name, make(argument), train, evaluation)


def is_image_task(name: str) -> bool:
  return isinstance(seqio.TaskRegistry.get(name), ImageTask)


def _guess_prefix(name: str) -> str | None:
  """The kind of a name without a prefix, by what it looks like."""
  if name.endswith('.npz'):
    return 'npz'
  if tfds_source.exists(name):
    return 'tfds'
  return 'image_folder' if os.path.isdir(name) else None


def _seqio_name(prefix: str, argument: str) -> str:
  """A readable name within seqio's alphabet, unique to the argument."""
  readable = re.sub(r'[^A-Za-z0-9.]+', '_', argument)[-40:]
  return f'{prefix}:{readable}_{hashlib.sha256(argument.encode()).hexdigest()[:8]}'


for _class_set in glyphs.SPLITS:
  add_image_task(f'glyphs_{_class_set}', glyphs.GlyphSource(_class_set))
add_image_task(
  'digits',
  array_source.digits_source(),
  preprocessors=(preprocess.resize(),),
  eval_preprocessors=(preprocess.resize(),),
)
