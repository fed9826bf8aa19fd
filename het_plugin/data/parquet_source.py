"""Images in Parquet files, as the Hugging Face hub keeps them, with class labels or captions.

An image is a struct of `bytes` and `path`, the bytes of a file, or these in base64. Only the labels
or captions are read at the start. Random access decodes a row group for each image, so groups
should be small; those of the hub have 100 to 1,000 rows.

Reference: https://huggingface.co/docs/hub/datasets-file-names-and-splits
"""

import base64
import binascii
import collections
import functools
import json
import logging
import pathlib
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from het_plugin.data import array_source, shards
from het_plugin.data.annotations import LABEL_FIELDS
from het_plugin.data.sources import TRAIN_SPLIT, ImageTextInfo, TaskInfo

IMAGE_NAMES = ('image', 'img', 'jpg', 'jpeg', 'png', 'webp', 'picture')
LABEL_NAMES = ('label', 'labels', 'cls', 'class', 'category', 'target', 'y')
CAPTION_NAMES = ('caption', 'captions', 'text', 'texts', 'txt')
_CACHE_BYTES = 2**28  # of decoded row groups
_GROUP_BYTES = 2**30  # a larger row group is refused


class _Files:
  """Parquet files of one schema: their rows in order, and the images of some of them.

  name: how the user names them.
  settings: columns by their use, as written after '?'.
  """

  def __init__(self, prefix: str, argument: str, uses: Sequence[str]):
    self.name = f'{prefix}:{argument}'
    path, self.settings = shards.parse(self.name, argument, uses)
    root, self.paths = shards.find(self.name, path, '.parquet')
    self._metadata = [_footer(path) for path in self.paths]
    self.schema = self._metadata[0].schema.to_arrow_schema()
    for path, metadata in zip(self.paths, self._metadata, strict=True):
      if metadata.schema.to_arrow_schema().names != self.schema.names:
        raise ValueError(
          f'{self.name}: {path} has other columns than {self.paths[0]}; name the folder or the '
          'pattern of one data set.'
        )
    groups = [
      (i, j, metadata.row_group(j).num_rows)
      for i, metadata in enumerate(self._metadata)
      for j in range(metadata.num_row_groups)
    ]
    self._groups = [(i, j) for i, j, _ in groups]
    self._starts = np.cumsum([0, *(num_rows for *_, num_rows in groups)])  # [number of groups + 1]
    self.num_rows = int(self._starts[-1])
    if not self.num_rows:
      raise ValueError(f'{self.name}: the files hold no rows.')
    self.image = self._column('image', IMAGE_NAMES, _holds_images)
    self._cache: collections.OrderedDict[int, pa.ChunkedArray] = collections.OrderedDict()
    self._lock = threading.Lock()
    self._check_groups()
    self.splits = self._splits(root)

  @property
  def version(self) -> str:
    """Number of rows, and a checksum of names, sizes and footers."""
    checksum = 0
    for path, metadata in zip(self.paths, self._metadata, strict=True):
      with open(path, 'rb') as file:
        file.seek(-metadata.serialized_size - 8, 2)
        checksum = zlib.crc32(file.read(), checksum)
      checksum = zlib.crc32(f'{path.name} {path.stat().st_size}'.encode(), checksum)
    return f'{self.num_rows} rows {checksum:08x}'

  def _column(
    self, use: str, names: Sequence[str], fits: Callable[[pa.DataType], bool]
  ) -> str | None:
    """The column of a use: the one that was named, the only one that fits, or one of `names`."""
    columns = {field.name: field.type for field in self.schema}
    shown = ', '.join(f'{name} ({_shown(kind)})' for name, kind in columns.items())
    if named := self.settings.get(use):
      if named not in columns:
        raise ValueError(f'{self.name}: there is no column {named!r}; the columns are {shown}.')
      return named
    fitting = [name for name, kind in columns.items() if fits(kind)]
    usual = [name for name in names if name in fitting]
    if len(usual) == 1 or (use == 'image' and len(fitting) == 1):
      return (usual or fitting)[0]
    raise ValueError(
      f'{self.name}: it is unclear which column is the {use}; add ?{use}=COLUMN to the path. The '
      f'columns are {shown}.'
    )

  def _check_groups(self) -> None:
    for i, metadata in enumerate(self._metadata):
      for j in range(metadata.num_row_groups):
        size = sum(
          chunk.total_uncompressed_size
          for chunk in (metadata.row_group(j).column(k) for k in range(metadata.num_columns))
          if chunk.path_in_schema.split('.')[0] == self.image
        )
        if size > _GROUP_BYTES:
          raise ValueError(
            f'{self.name}: row group {j} of {self.paths[i]} has {size / 2**20:,.0f} MiB of images, '
            'and each image that is read decodes its group: write the file with row groups of '
            'about 100 rows (row_group_size=100).'
          )

  def _splits(self, root: pathlib.Path) -> dict[str, np.ndarray]:
    """The row numbers of each split, by the names of the files; a tenth is held out of one."""
    of_file = [shards.split_of(path, root) for path in self.paths]
    counts = [metadata.num_rows for metadata in self._metadata]
    rows = np.split(np.arange(self.num_rows), np.cumsum(counts)[:-1])
    splits: dict[str, list[np.ndarray]] = {}
    for split, numbers in zip(of_file, rows, strict=True):
      splits.setdefault(split, []).append(numbers)
    if list(splits) != [TRAIN_SPLIT]:
      return {split: np.concatenate(parts) for split, parts in splits.items()}
    files = zip(self.paths, counts, strict=True)
    held_out = np.concatenate([shards.held_out_rows(path.name, count) for path, count in files])
    return shards.train_and_validation(held_out)

  def column(self, name: str) -> pa.ChunkedArray:
    """A whole column, of all rows.

    Raises:
      ValueError: a file is damaged.
    """
    parts = []
    for path, metadata in zip(self.paths, self._metadata, strict=True):
      try:
        parts.append(pq.read_table(path, columns=[name], partitioning=None)[name])
      except (pa.ArrowException, OSError) as error:
        raise ValueError(f'{self.name}: {path}: column {name} cannot be read: {error}') from error
      if len(parts[-1]) != metadata.num_rows:
        raise ValueError(f'{self.name}: {path} changed while it was read.')
    return pa.chunked_array([chunk for part in parts for chunk in part.chunks], parts[0].type)

  def images(self, rows: np.ndarray) -> list[bytes | None]:
    """The encoded images of rows, int64 [B]; None where a row or its group cannot be read."""
    found: list[bytes | None] = [None] * len(rows)
    of_row = np.searchsorted(self._starts, rows, side='right') - 1
    for group in np.unique(of_row).tolist():
      values = self._read_group(group)
      for i in np.flatnonzero(of_row == group).tolist():
        if values is not None:
          found[i] = _encoded(values[int(rows[i] - self._starts[group])].as_py())
    return found

  def _read_group(self, group: int) -> pa.ChunkedArray | None:
    with self._lock:
      if group in self._cache:
        self._cache.move_to_end(group)
        return self._cache[group]
    i, j = self._groups[group]
    column = self.image
    if pa.types.is_struct(self.schema.field(self.image).type):
      column = f'{self.image}.bytes'  # the path, which may lead anywhere, is never followed
    try:
      file = pq.ParquetFile(self.paths[i], metadata=self._metadata[i], memory_map=True)
      values = file.read_row_group(j, columns=[column])[self.image]
    except (pa.ArrowException, OSError):
      return None
    with self._lock:
      self._cache[group] = values
      while len(self._cache) > 1 and sum(x.nbytes for x in self._cache.values()) > _CACHE_BYTES:
        self._cache.popitem(last=False)
    return values

  def describe(self, row: int) -> str:
    group = int(np.searchsorted(self._starts, row, side='right')) - 1
    i, _ = self._groups[group]
    first = next(g for g, (file, _) in enumerate(self._groups) if file == i)
    return f'{self.paths[i]}[{row - self._starts[first]}]'


class ParquetSource:
  """An ExampleSource of RGB images with class labels.

  Labels are class numbers, names, or lists of either; or soft labels, lists of K floats. Names of
  the numbers are those of the schema's metadata (`huggingface`). Columns `label_weight`, `weight`
  and `annotator` are as in an NPZ file (docs/data.md).
  """

  def __init__(self, argument: str):
    """Reads footers and labels. ValueError if there are none, or a column is unclear."""
    self._files = _Files('parquet', argument, ('image', 'label', *LABEL_FIELDS))
    column = self._files._column('label', LABEL_NAMES, _holds_labels)
    names = _class_names(self._files.schema, column)
    values = self._files.column(column)
    labels, names = _labels(self._files.name, column, values, names)
    arrays = {'label': labels}
    for field in LABEL_FIELDS:
      chosen = self._files.settings.get(field, field)
      if chosen in self._files.schema.names:
        arrays[field] = _padded(self._files.column(chosen), '' if field == 'annotator' else 0)
    splits = _labelled(self._files.splits, labels)
    num_rows = self._files.num_rows
    kept = np.sort(np.concatenate(list(splits.values())))
    if len(kept) < num_rows:  # the rows of splits without labels are read by nobody
      arrays = {name: array[kept] for name, array in arrays.items()}
    num_classes, of_kept, annotators = array_source.labels_of(
      self._files.name, arrays, names, len(kept)
    )
    self._labels = np.zeros((num_rows, *of_kept.shape[1:]), of_kept.dtype)
    self._labels[kept] = of_kept
    self._rows = splits
    fields = tuple(x for x in of_kept.dtype.names or () if x != 'label')
    max_labels = (of_kept['label'] if fields else of_kept).shape[1]
    self.info = TaskInfo(
      num_classes=num_classes,
      multi_label=max_labels > 1 and 'label_weight' not in fields,
      channels=3,
      class_names=names,
      splits={split: len(rows) for split, rows in splits.items()},
      max_labels=max_labels,
      label_fields=fields,
      annotators=annotators,
      version=self._files.version,
    )

  @functools.cached_property
  def typical_side(self) -> float:
    rows = next(iter(self._rows.values()))
    return shards.typical_side(self._files.images(shards.spaced(rows)))

  def read(
    self, split: str, ids: np.ndarray, size: int, seed: int
  ) -> tuple[list[bytes | None], np.ndarray]:
    rows = self._rows[split][ids]
    return self._files.images(rows), self._labels[rows]

  def describe(self, split: str, example_id: int) -> str:
    return self._files.describe(int(self._rows[split][example_id]))


class ParquetCaptionSource:
  """An ExampleSource of RGB images with captions: a text, or a list of texts, per image."""

  def __init__(self, argument: str):
    """Reads footers and captions. ValueError if there are none, or a column is unclear."""
    self._files = _Files('parquet_captions', argument, ('image', 'caption'))
    column = self._files._column('caption', CAPTION_NAMES, _holds_texts)
    self._captions = self._files.column(column)
    self._rows = self._files.splits
    self.info = ImageTextInfo(
      channels=3,
      splits={split: len(rows) for split, rows in self._rows.items()},
      version=self._files.version,
    )

  def read(
    self, split: str, ids: np.ndarray, size: int, seed: int
  ) -> tuple[list[bytes | None], list[list[str]]]:
    rows = self._rows[split][ids]
    texts = (self._captions[row].as_py() for row in rows.tolist())
    captions = [[text] if isinstance(text, str) else [t for t in text or () if t] for text in texts]
    return self._files.images(rows), captions

  def describe(self, split: str, example_id: int) -> str:
    return self._files.describe(int(self._rows[split][example_id]))


def _footer(path: pathlib.Path) -> pq.FileMetaData:
  try:
    return pq.read_metadata(path)
  except (pa.ArrowException, OSError) as error:
    raise ValueError(f'{path} is not a whole Parquet file: {error}') from error


def _shown(kind: pa.DataType) -> str:
  return (
    f'struct<{", ".join(field.name for field in kind)}>' if pa.types.is_struct(kind) else str(kind)
  )


def _is_text(kind: pa.DataType) -> bool:
  return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_binary(kind: pa.DataType) -> bool:
  return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _item(kind: pa.DataType) -> pa.DataType | None:
  """The type of a list's elements; None for other types."""
  lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
  return kind.value_type if any(test(kind) for test in lists) else None


def _holds_images(kind: pa.DataType) -> bool:
  if pa.types.is_struct(kind):
    at = kind.get_field_index('bytes')
    return at >= 0 and _is_binary(kind.field(at).type)
  return _is_binary(kind) or _is_text(kind)


def _holds_texts(kind: pa.DataType) -> bool:
  return _is_text(_item(kind) or kind)


def _holds_labels(kind: pa.DataType) -> bool:
  element = _item(kind) or kind
  element = element.value_type if pa.types.is_dictionary(element) else element
  is_soft = _item(kind) is not None and pa.types.is_floating(element)
  return pa.types.is_integer(element) or _is_text(element) or is_soft


def _encoded(value: Any) -> bytes | None:
  """The bytes of an image file, from a cell."""
  if isinstance(value, Mapping):
    value = value.get('bytes')
  if isinstance(value, str):
    try:
      value = base64.b64decode(value.partition('base64,')[2] or value, validate=True)
    except (binascii.Error, ValueError):
      return None
  return value


def _class_names(schema: pa.Schema, column: str) -> tuple[str, ...] | None:
  """The names of the classes in the metadata that the hub's library writes."""
  try:
    feature = json.loads(schema.metadata[b'huggingface'])['info']['features'][column]
    feature = feature[0] if isinstance(feature, list) else feature.get('feature', feature)
    return tuple(map(str, feature['names']))
  except (KeyError, TypeError, ValueError, AttributeError, IndexError):
    return None


def _padded(values: pa.ChunkedArray, padding: Any) -> np.ndarray:
  """A column [N], or [N, L] of lists whose rows are padded."""
  if _item(values.type) is None:
    return values.to_numpy()
  lists = values.combine_chunks()
  lists = lists.chunks[0] if isinstance(lists, pa.ChunkedArray) else lists
  lengths = np.asarray(lists.value_lengths().fill_null(0))
  flat = np.asarray(lists.flatten().to_numpy(zero_copy_only=False))
  width = max(int(lengths.max(initial=0)), 1)
  dtype = np.result_type(flat.dtype, type(padding)) if flat.dtype.kind != 'O' else object
  rows = np.full((len(lengths), width), padding, dtype)
  rows[np.arange(width) < lengths[:, None]] = flat
  return rows.astype(str) if dtype is object else rows


def _labels(
  where: str, column: str, values: pa.ChunkedArray, names: tuple[str, ...] | None
) -> tuple[np.ndarray, tuple[str, ...] | None]:
  """Class numbers int [N] or [N, L] padded with -1, or soft labels [N, K]; and the names."""
  kind = values.type
  element = _item(kind) or kind
  if pa.types.is_dictionary(element):
    values = values.cast(pa.list_(pa.string()) if _item(kind) is not None else pa.string())
    element = pa.string()
  if pa.types.is_floating(element):
    lengths = np.unique(np.asarray(values.combine_chunks().value_lengths().fill_null(0)))
    if len(lengths) != 1:
      raise ValueError(
        f'{where}: {column} has lists of {lengths[0]} to {lengths[-1]} numbers; soft labels need K '
        'in each row.'
      )
    return _padded(values, 0.0).astype(np.float32), names
  if pa.types.is_integer(element):
    if _item(kind) is None:
      return np.asarray(values.fill_null(-1)), names
    return _padded(values, -1), names
  flat = values if _item(kind) is None else pa.chunked_array([values.combine_chunks().flatten()])
  if names is None:
    names = tuple(sorted(filter(None, flat.unique().to_pylist())))
  numbers = {name: k for k, name in enumerate(names)}
  if unknown := set(flat.unique().to_pylist()) - numbers.keys() - {None, ''}:
    raise ValueError(f'{where}: {column} has {sorted(unknown)[0]!r}, which is no name of a class.')
  texts = _padded(values, '')
  find = np.vectorize(lambda name: numbers.get(name, -1), otypes=[np.int32])
  return find(texts), names


def _labelled(splits: Mapping[str, np.ndarray], labels: np.ndarray) -> dict[str, np.ndarray]:
  """The splits that have labels: the hub's test splits often have -1 only."""
  kept = {
    split: rows
    for split, rows in splits.items()
    if labels.dtype.kind == 'f' or (labels[rows] >= 0).any()
  }
  for split in splits.keys() - kept.keys():
    logging.getLogger(__name__).warning('The split %r has no labels and is left out.', split)
  return kept or dict(splits)
