"""Examples in arrays: scikit-learn's digits, NPZ files with labels or captions, and features."""

import contextlib
import functools
import importlib.util
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from het_plugin import rows
from het_plugin.data import annotations, counter_random
from het_plugin.data.locked_cache import locked_cache
from het_plugin.data.sources import ImageTextInfo, TaskInfo
from het_plugin.rows import files
from het_plugin.rows import labels as labels_lib

SPLIT_WORD = 20230127  # a constant: splits must not change between runs
SPLIT_KEY = counter_random.base_key(SPLIT_WORD)
VALIDATION_FRACTION = 0.1
MOST_CHANNELS = 4  # more are rarely meant, see `check_channels`
_NUM_DIGITS = 1797
_SAMPLED_ROWS = 100  # for the version of features


class ArraySource:
  """An ExampleSource over arrays."""

  def __init__(
    self,
    name: str,
    load: Callable[[], tuple[np.ndarray, np.ndarray]],
    splits: Mapping[str, np.ndarray],
    info: Callable[..., TaskInfo | ImageTextInfo],
  ):
    """
    Args:
      name: name of the data set, for messages.
      load: returns images [N, H, W, C], uint8 or float32 in [-1, 1], and labels, int32 [N, L], or
        captions, strings [N, M]; called once.
      splits: the row numbers of each split, int64.
      info: makes the metadata of the task, given `splits`, the number of rows of each.
    """
    self._arguments = name, load, splits, info
    self._name = name
    self.load = locked_cache(load)
    self._splits = splits
    self.info = info(splits={split: len(rows) for split, rows in splits.items()})

  def __reduce__(self):
    # A worker process that gets a copy loads the arrays itself; the lock of `load` has no copies.
    return type(self), self._arguments

  def read(
    self, split: str, ids: np.ndarray, size: int, seed: int
  ) -> tuple[np.ndarray, np.ndarray]:
    images, labels = self.load()
    rows = self._splits[split][ids]
    return images[rows], labels[rows]

  def describe(self, split: str, example_id: int) -> str:
    return f'{self._name}[{self._splits[split][example_id]}]'


def digits_source() -> ArraySource:
  """scikit-learn's digits, 8 x 8: a fixed train split of 1,438 and a test split of 359."""
  held_out, kept = fixed_split(_NUM_DIGITS, 0.2)
  info = functools.partial(
    TaskInfo, num_classes=10, multi_label=False, channels=1, class_names=tuple('0123456789')
  )
  return ArraySource('digits', _load_digits, {'train': kept, 'test': held_out}, info)


def _load_digits() -> tuple[np.ndarray, np.ndarray]:
  # What scikit-learn's load_digits reads. Importing the package takes longer than all of a start.
  package = importlib.util.find_spec('sklearn').submodule_search_locations[0]
  rows = np.loadtxt(os.path.join(package, 'datasets', 'data', 'digits.csv.gz'), delimiter=',')
  images = (rows[:, :-1].reshape(-1, 8, 8, 1) / 16).astype(np.float32)
  return _centred(images), rows[:, -1:].astype(np.int32)


def features_source(source: str) -> ArraySource:
  """Features and labels of a file, as images [1, 1, D]; features in a .npy file stay on disk.

  The backbone `Mlp` takes such images as [B, D], so everything that handles images handles
  features. Without an array 'split' of strings, a fixed tenth of the rows is 'validation', the rest
  'train', and 'all' has all rows.

  Args:
    source: as in `rows.read`.

  Raises:
    ValueError: as there, or labels are missing.
  """
  read = rows.read(source)
  images = read.features[:, None, None]
  names = read.class_names
  labels = annotations.with_fields(read.labels, label_weight=read.label_weight)
  path, named = files.partition_source(source)
  of_rows = files.split_of_rows(path) if named is None and os.path.isfile(path) else None
  splits = _splits(source, of_rows, len(images))
  if of_rows is None:
    splits['all'] = np.arange(len(images))
  spaced = np.linspace(0, len(images) - 1, _SAMPLED_ROWS).astype(int)
  checksum = zlib.crc32(labels.tobytes(), zlib.crc32(images[spaced].tobytes()))
  info = functools.partial(
    TaskInfo,
    num_classes=int(read.labels.max()) + 1 if names is None else len(names),
    multi_label=read.labels.shape[1] > 1 and read.label_weight is None,
    channels=images.shape[-1],
    class_names=names,
    max_labels=read.labels.shape[1],
    label_fields=() if read.label_weight is None else ('label_weight',),
    version=f'{images.shape[0]} x {images.shape[-1]} {checksum:08x}',
  )
  load = functools.partial(tuple, (images, labels))
  return ArraySource(f'features:{source}', load, splits, info)


def npz_source(path: str) -> ArraySource:
  """An NPZ file of images and labels; docs/data.md has its arrays.

  Raises:
    ValueError: the file or an array is missing or damaged, or has another shape, type or values.
  """
  name = f'npz:{path}'
  with _reading(
    name, path, 'label', optional=(*annotations.LABEL_FIELDS, 'channels', 'class_name', 'split')
  ) as arrays:
    names = arrays['class_name'].astype(str) if 'class_name' in arrays.files else None
    if names is not None:
      if names.ndim != 1:
        raise ValueError(f'{name}: class_name is {names.shape}; it must be [K].')
      names = tuple(names.tolist())
    num_images, common = _images_info(name, path, arrays)
    num_classes, labels, annotators = labels_of(name, arrays, names, num_images)
    splits = _splits(name, arrays.get('split'), num_images)
  fields = tuple(x for x in labels.dtype.names or () if x != 'label')
  max_labels = (labels['label'] if fields else labels).shape[1]
  info = functools.partial(
    TaskInfo,
    num_classes=num_classes,
    multi_label=max_labels > 1 and 'label_weight' not in fields,
    class_names=names,
    max_labels=max_labels,
    label_fields=fields,
    annotators=annotators,
    **common,
  )
  return ArraySource(name, functools.partial(_load, name, path, labels), splits, info)


def npz_captions_source(path: str) -> ArraySource:
  """An NPZ file of images and captions, strings [N] or [N, M] for up to M per image.

  Raises:
    ValueError: as npz_source.
  """
  name = f'npz_captions:{path}'
  with _reading(name, path, 'caption', optional=('channels', 'split')) as arrays:
    num_images, common = _images_info(name, path, arrays)
    shape, dtype = _header(path, 'caption')
    if dtype.kind != 'U' or len(shape) not in (1, 2) or shape[0] != num_images:
      raise ValueError(
        f'{name}: caption is {dtype} {shape}; it must be unicode strings [N] or [N, M] with '
        f'N = {num_images}, the number of images.'
      )
    captions = arrays['caption'].reshape(num_images, -1)
    splits = _splits(name, arrays.get('split'), num_images)
  info = functools.partial(ImageTextInfo, **common)
  return ArraySource(name, functools.partial(_load, name, path, captions), splits, info)


def check_channels(shape: Sequence[int], arrays: Mapping[str, np.ndarray]) -> None:
  """Raises ValueError if the last axis of images [N, H, W, C] need not be that of the channels.

  Up to `MOST_CHANNELS` are taken as they are. More are taken only where the array `channels` of the
  file says so: [N, 3, 32, 48] are as likely images of PyTorch.
  """
  if 'channels' in arrays:
    stated = arrays['channels']
    if stated.dtype.kind not in 'iu' or stated.size != 1:
      raise ValueError(
        f'channels is {stated.dtype} {list(stated.shape)}; it must be one integer, the number of '
        'channels of each image'
      )
    count = shape[3] if len(shape) == 4 else 1
    if int(stated.item()) != count:
      raise ValueError(
        f'channels is {stated.item()}, and image is {list(shape)}; it must be [N, H, W, C] with '
        f'C = {stated.item()}'
      )
  elif len(shape) == 4 and shape[3] > MOST_CHANNELS:
    looks = 'looks like channels first' if shape[1] <= MOST_CHANNELS else f'has C = {shape[3]}'
    raise ValueError(
      f'image is {list(shape)}, which {looks}; it must be [N, H, W, C]: '
      f'image.transpose(0, 2, 3, 1) turns [N, C, H, W], and channels={shape[3]} in the file says '
      'that the last axis is right'
    )


def fixed_split(num_examples: int, fraction: float) -> tuple[np.ndarray, np.ndarray]:
  """Sorted row numbers (held out, kept), the same for every run; neither is empty if N > 1."""
  order = counter_random.permutation(SPLIT_KEY, num_examples)
  num_held_out = min(max(round(fraction * num_examples), 1), num_examples - 1)
  return np.sort(order[:num_held_out]), np.sort(order[num_held_out:])


@contextlib.contextmanager
def _reading(
  name: str, path: str, *needed: str, optional: Sequence[str] = ()
) -> Iterator[np.lib.npyio.NpzFile]:
  """The arrays of a file; any damage becomes a ValueError of one sentence, also on later reads.

  So does an array whose name is nearly that of an `optional` one, which would be left out.
  """
  if not os.path.isfile(path):
    raise ValueError(f'{name}: there is no such file.')
  try:
    arrays = np.load(path, allow_pickle=False)
    if isinstance(arrays, np.ndarray):
      raise ValueError('it is a single array, of numpy.save')
    with arrays:
      missing = [array for array in ('image', *needed) if array not in arrays.files]
      if missing:
        raise ValueError(f'it lacks the arrays {missing} and has {sorted(arrays.files)}')
      files.check_names(name, arrays.files, optional)
      yield arrays
  except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
    if str(error).startswith(name):
      raise
    raise ValueError(f'{name} is not a valid NPZ file: {error}.') from error


def labels_of(
  name: str, arrays: Mapping[str, np.ndarray], names: tuple[str, ...] | None, num_images: int
) -> tuple[int, np.ndarray, tuple[str, ...] | None]:
  """Number of classes, labels int32 [N, L] or with fields, and annotators.

  `arrays` are those of an NPZ file (docs/data.md); `names` are those of the classes.

  Raises:
    ValueError: an array has another shape, type or values; it begins with `name`.
  """
  labels = arrays['label']
  label_weight, weight, annotator = (
    arrays[field] if field in arrays else None for field in annotations.LABEL_FIELDS
  )
  is_soft = labels.dtype.kind == 'f' and labels.ndim == 2 and label_weight is None
  if len(labels) != num_images or not (is_soft or labels.dtype.kind in 'iu' and labels.ndim <= 2):
    raise ValueError(
      f'{name}: label is {labels.dtype} {labels.shape}; it must be integers [N] or [N, L], or soft '
      f'labels, float [N, K], with N = {num_images}, the number of images.'
    )
  is_numbers = not is_soft and annotator is None
  if names is not None and is_numbers and labels_lib.are_marks(labels, len(names)):
    raise ValueError(
      f'{name}: label is {labels.shape} of 0 and 1, which mark classes; it must hold the numbers '
      'of the classes of each image, padded with -1.'
    )
  if is_soft:
    num_classes = labels.shape[1]
    if names is not None and len(names) != num_classes:
      raise ValueError(
        f'{name}: label has {num_classes} columns and class_name {len(names)} names.'
      )
    most = max(int((labels != 0).sum(1).max()), 1)
    classes = np.argsort(-labels, axis=1, kind='stable')[:, :most]
    label_weight = np.take_along_axis(labels, classes, axis=1)
    labels = np.where(label_weight != 0, classes, -1)
  try:
    labels = labels_lib.label_rows(labels.reshape(num_images, -1), num_images)
  except ValueError as error:
    raise ValueError(f'{name}: {error}') from error
  if not is_soft:
    num_classes = len(names) if names is not None else int(labels.max()) + 1
  labels_lib.check_range(f'{name}: ', labels, num_classes)
  if label_weight is not None:
    label_weight = label_weight.reshape(num_images, -1)
  for field, array, shape, kinds, what in (
    ('label_weight', label_weight, labels.shape, 'fiu', 'numbers'),
    ('weight', weight, (num_images,), 'fiu', 'numbers'),
    ('annotator', annotator, labels.shape, 'iuUS', 'integers or strings'),
  ):
    if array is not None and (array.shape != shape or array.dtype.kind not in kinds):
      found = f'{array.dtype} {array.shape}'
      raise ValueError(f'{name}: {field} is {found}; it must be {what} {shape}.')
  labels_lib.check_weights(name, label_weight, weight, labels >= 0)
  annotators = None
  if annotator is not None:
    annotators, annotator = annotations.annotator_numbers(name, annotator, labels >= 0)
  fields = {'label_weight': label_weight, 'weight': weight, 'annotator': annotator}
  return num_classes, annotations.with_fields(labels, **fields), annotators


def _images_info(
  name: str, path: str, arrays: Mapping[str, np.ndarray]
) -> tuple[int, dict[str, Any]]:
  """The number of images, and the metadata that does not depend on labels or captions."""
  shape, dtype = _header(path, 'image')
  if len(shape) not in (3, 4) or 0 in shape:
    raise ValueError(f'{name}: image is {shape}; it must be [N, H, W] or [N, H, W, C].')
  try:
    check_channels(shape, arrays)
  except ValueError as error:
    raise ValueError(f'{name}: {error}.') from error
  if dtype != np.uint8 and dtype.kind != 'f':
    raise ValueError(f'{name}: image is {dtype}; it must be uint8, or float in [0, 1].')
  with zipfile.ZipFile(path) as archive:
    checksums = ' '.join(f'{entry.filename} {entry.CRC:08x}' for entry in archive.infolist())
  return shape[0], {'channels': shape[3] if len(shape) == 4 else 1, 'version': checksums}


def _splits(name: str, of_rows: np.ndarray | None, num: int) -> dict[str, np.ndarray]:
  """The row numbers of each split, from the array 'split' [num] if there is one."""
  if of_rows is None:
    held_out, kept = fixed_split(num, VALIDATION_FRACTION)
    return {'train': kept, 'validation': held_out}
  split_names = of_rows.astype(str)
  if split_names.shape != (num,):
    raise ValueError(f'{name}: split is {split_names.shape}; it must be {(num,)}.')
  return {str(s): np.flatnonzero(split_names == s) for s in np.unique(split_names)}


def _header(path: str, array: str) -> tuple[tuple[int, ...], np.dtype]:
  """Shape and dtype of an array, without reading its data."""
  with zipfile.ZipFile(path) as archive, archive.open(f'{array}.npy') as stream:
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
      raise ValueError(f'{array} has the header version {version}, not (1, 0) or (2, 0)')
    read = getattr(np.lib.format, f'read_array_header_{version[0]}_0')
    shape, _, dtype = read(stream)
  return shape, dtype


def read_images(path: str) -> np.ndarray:
  """Images [N, H, W, C] of an NPZ file, which needs no other array: uint8 or float32 in [-1, 1].

  Raises:
    ValueError: as npz_source.
  """
  name = f'npz:{path}'
  with _reading(name, path) as arrays:
    _images_info(name, path, arrays)
  return _load_images(name, path)


def _load(name: str, path: str, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The images of a file, and the labels or captions that are given."""
  return _load_images(name, path), labels


def _load_images(name: str, path: str) -> np.ndarray:
  """Images [N, H, W, C], uint8 or float32 in [-1, 1]."""
  with _reading(name, path) as arrays:
    images = arrays['image']
  images = images if images.ndim == 4 else images[..., None]
  if images.dtype == np.uint8:
    return images
  if not (images.min() >= 0 and images.max() <= 1):  # NaN is neither
    raise ValueError(
      f'{name}: float images must lie in [0, 1], these in [{images.min()}, {images.max()}].'
    )
  return _centred(images.astype(np.float32))


def _centred(images: np.ndarray) -> np.ndarray:
  """Maps float32 levels in [0, 1] to [-1, 1]."""
  return images * np.float32(2) - np.float32(1)
