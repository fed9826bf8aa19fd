"""Images in Parquet files, as the Hugging Face hub keeps them, with class labels or captions.

An image is a struct of `bytes` and `path`, the bytes of a file, or these in base64. Only the labels
or captions are read at the start. Random access decodes a row group for each image, so groups
should be small; those of the hub have 100 to 1,000 rows.

Reference: https://huggingface.co/docs/hub/datasets-file-names-and-splits
"""

import base64
import binascii
import collections
import concurrent.futures
import contextlib
import functools
import json
import os
import pathlib
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from het_plugin.data import array_source, preprocess, remote, shards
from het_plugin.data.annotations import LABEL_FIELDS
from het_plugin.data.corrections import relabel
from het_plugin.data.sources import TRAIN_SPLIT, ImageTextInfo, TaskInfo
from het_plugin.rows.labels import class_numbers

IMAGE_NAMES = ('image', 'img', 'jpg', 'jpeg', 'png', 'webp', 'picture')
LABEL_NAMES = ('label', 'labels', 'cls', 'class', 'category', 'target', 'y')
CAPTION_NAMES = ('caption', 'captions', 'text', 'texts', 'txt')
_THREADS = 16  # that read the beginnings of files
_CACHE_BYTES = 3 * 2**29  # of decoded row groups, which the order of blocks needs at a time
_GROUP_BYTES = 2**30  # a larger row group is refused


class _Files:
  """Parquet files of one schema: their rows in order, and the images of some of them.

  name: how the user names them.
  settings: columns by their use, as written after '?'.
  """

  def __init__(self, prefix: str, argument: str, uses: Sequence[str]):
    self.name = f'{prefix}:{argument}'
    path, self.settings = shards.parse(self.name, argument, uses)
    _, self.paths = shards.find(self.name, path, '**/*.parquet')
    # Threads, because each file that is far away takes its time.
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
      self._stats = list(pool.map(lambda path: path.stat(), self.paths))
      self._metadata = list(pool.map(_footer, self.paths, self._stats))
    self._schemas = [metadata.schema.to_arrow_schema() for metadata in self._metadata]
    counts = [metadata.num_rows for metadata in self._metadata]
    self.file_starts = np.cumsum([0, *counts])  # [number of files + 1]
    # A file without rows may have columns without a type.
    first = int(np.argmax(np.array(counts) > 0))
    self.schema = self._schemas[first]
    for path, schema in zip(self.paths, self._schemas, strict=True):
      if set(schema.names) != set(self.schema.names):
        raise ValueError(
          f'{self.name}: {path} has other columns than {self.paths[first]}; name the folder or the '
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
    self.image = self.column_for('image', IMAGE_NAMES, _holds_images)
    # The path of an image, which may lead anywhere, is not even read.
    self._image_columns = [
      f'{self.image}.bytes' if pa.types.is_struct(schema.field(self.image).type) else self.image
      for schema in self._schemas
    ]
    self._check_groups()
    self.splits = self._splits()
    self._start_cache()

  def _start_cache(self) -> None:
    self._cache: collections.OrderedDict[int, pa.ChunkedArray] = collections.OrderedDict()
    self._cached_bytes = 0
    self._lock = threading.Lock()

  def __getstate__(self) -> dict[str, Any]:
    # A worker process that gets a copy has a cache and a lock of its own.
    return {k: v for k, v in self.__dict__.items() if k not in ('_cache', '_cached_bytes', '_lock')}

  def __setstate__(self, state: Mapping[str, Any]) -> None:
    self.__dict__.update(state)
    self._start_cache()

  @property
  def version(self) -> str:
    """Number of rows, and a checksum of names, sizes and footers."""
    checksum = 0
    for path, metadata, stat in zip(self.paths, self._metadata, self._stats, strict=True):
      with path.open_blocks(stat) as file:
        file.seek(-metadata.serialized_size - 8, 2)
        checksum = zlib.crc32(file.read(), checksum)
      checksum = zlib.crc32(os.fsencode(f'{_name(path)} {stat[0]}'), checksum)
    return f'{self.num_rows} rows {checksum:08x}'

  def column_for(
    self, use: str, names: Sequence[str], fits: Callable[[pa.DataType], bool]
  ) -> str | None:
    """The column of a use: the one that was named, the only one that fits, or one of `names`."""
    columns = {field.name: field.type for field in self.schema}
    shown = ', '.join(f'{name} ({_shown(kind)})' for name, kind in columns.items())
    if named := self.settings.get(use):
      if named not in columns:
        raise ValueError(f'{self.name}: there is no column {named!r}; the columns are {shown}.')
      if not fits(columns[named]):
        raise ValueError(
          f'{self.name}: the column {named!r} is {_shown(columns[named])}, which is no type of '
          f'{use}s; the columns are {shown}.'
        )
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
      paths = [metadata.schema.column(k).path for k in range(metadata.num_columns)]
      chunks = [k for k, path in enumerate(paths) if path == self._image_columns[i]]
      for j in range(metadata.num_row_groups):
        group = metadata.row_group(j)
        size = sum(group.column(k).total_uncompressed_size for k in chunks)
        if size > _GROUP_BYTES:
          raise ValueError(
            f'{self.name}: row group {j} of {self.paths[i]} has {size / 2**20:,.0f} MiB of images, '
            'and each image that is read decodes its group: write the file with row groups of '
            'about 100 rows (row_group_size=100).'
          )

  def _splits(self) -> dict[str, np.ndarray]:
    """The row numbers of each split, by the names of the files; a tenth is held out of one."""
    of_file = [shards.split_of(path.relative) for path in self.paths]
    counts = [metadata.num_rows for metadata in self._metadata]
    rows = np.split(np.arange(self.num_rows), np.cumsum(counts)[:-1])
    splits: dict[str, list[np.ndarray]] = {}
    for split, numbers in zip(of_file, rows, strict=True):
      splits.setdefault(split, []).append(numbers)
    if list(splits) != [TRAIN_SPLIT]:
      return {split: np.concatenate(parts) for split, parts in splits.items()}
    files = zip(self.paths, counts, strict=True)
    held_out = np.concatenate([shards.held_out_rows(_name(path), count) for path, count in files])
    return shards.train_and_validation(held_out)

  def column(self, name: str) -> pa.ChunkedArray:
    """A column of all files, in the order of rows.

    Raises:
      ValueError: a file is damaged, or has another type of column than the others.
    """

    def read(i: int) -> pa.Array:
      try:
        with self._open(i) as file:
          return file.read(columns=[name])[name].combine_chunks()
      except (pa.ArrowException, OSError) as error:
        raise ValueError(
          f'{self.name}: {self.paths[i]}: column {name} cannot be read: {error}'
        ) from error

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
      parts = list(pool.map(read, range(len(self.paths))))
    schemas = [pa.schema([(name, part.type)]) for part in parts]
    try:
      kind = pa.unify_schemas(schemas, promote_options='permissive').field(0).type
      return pa.chunked_array([part.cast(kind) for part in parts], kind)
    except pa.ArrowException as error:
      raise ValueError(
        f'{self.name}: {name} has one type in some files and another in others: {error}'
      ) from error

  def class_names(self, column: str) -> tuple[str, ...] | None:
    """The names of the classes in the schemas' metadata; ValueError if two files differ."""
    found = {}  # by path
    for path, schema in zip(self.paths, self._schemas, strict=True):
      if names := _class_names(schema, column):
        found.setdefault(names, path)
    if len(found) > 1:
      one, other, *_ = found.values()
      raise ValueError(
        f'{self.name}: {one} and {other} have other names for the classes of {column}, or another '
        'order of them: read them as two data sets.'
      )
    return next(iter(found), None)

  @contextlib.contextmanager
  def _open(self, i: int) -> Iterator[pq.ParquetFile]:
    with (
      self.paths[i].open_blocks(self._stats[i]) as content,
      pq.ParquetFile(content, metadata=self._metadata[i]) as file,
    ):
      yield file

  def images(self, rows: np.ndarray) -> list[bytes | None]:
    """The encoded images of rows, int64 [B]; None where a row or its group cannot be read."""
    found: list[bytes | None] = [None] * len(rows)
    of_row = np.searchsorted(self._starts, rows, side='right') - 1

    def read_group(group: int) -> None:
      values = self._read_group(group)
      for i in np.flatnonzero(of_row == group).tolist():
        if values is not None:
          found[i] = _encoded(values[int(rows[i] - self._starts[group])].as_py())

    remote.each(read_group, np.unique(of_row).tolist(), at_once=self.paths[0].is_remote)
    return found

  def _read_group(self, group: int) -> pa.ChunkedArray | None:
    with self._lock:
      if group in self._cache:
        self._cache.move_to_end(group)
        return self._cache[group]
    i, j = self._groups[group]
    try:
      with self._open(i) as file:
        values = file.read_row_group(j, columns=[self._image_columns[i]])[self.image]
    except (pa.ArrowException, OSError):
      return None
    with self._lock:
      if group not in self._cache:  # another thread may have read it, too
        self._cache[group] = values
        self._cached_bytes += values.nbytes
      while len(self._cache) > 1 and self._cached_bytes > _CACHE_BYTES:
        _, oldest = self._cache.popitem(last=False)
        self._cached_bytes -= oldest.nbytes
    return values

  def blocks(self, rows: np.ndarray) -> np.ndarray:
    """Where row groups begin in sorted rows [N], and N."""
    return shards.block_starts(np.searchsorted(self._starts, rows, side='right'))

  def describe(self, row: int) -> str:
    """The file, and the number of the row in it."""
    i, number = shards.locate(self.file_starts, row)
    return f'{self.paths[i]}[{number}]'

  def file(self, row: int) -> str:
    """The same below what the user named, as in a table of labels."""
    i, number = shards.locate(self.file_starts, row)
    return f'{self.paths[i].relative}[{number}]'


class ParquetSource:
  """An ExampleSource of RGB images with class labels.

  Labels are class numbers, names, or lists of either; or soft labels, lists of K floats. Names of
  the numbers are those of the schema's metadata (`huggingface`). Columns `label_weight`, `weight`
  and `annotator` are as in an NPZ file (docs/data.md). The row of an image without a label (null,
  -1 or '') is masked, unless a list is empty and others have several labels. ?labels=FILE replaces
  labels (`corrections.relabel`).
  """

  def __init__(self, argument: str):
    """Reads footers and labels. ValueError if there are none, or a column is unclear."""
    self._files = _Files('parquet', argument, ('image', 'label', 'labels', *LABEL_FIELDS))
    column = self._files.column_for('label', LABEL_NAMES, _holds_labels)
    values = self._files.column(column)
    names = self._files.class_names(column)
    labels, names = _labels(f'{self._files.name}: {column}', values, names)
    arrays = {'label': labels}
    for field in LABEL_FIELDS:
      chosen = self._files.settings.get(field, field)
      if chosen in self._files.schema.names:
        kind = pa.string() if field == 'annotator' else pa.float64()
        where = f'{self._files.name}: {chosen}'
        array = _padded(
          where, self._files.column(chosen), kind, '' if field == 'annotator' else 0.0
        )
        arrays[field] = array[:, None] if field == 'annotator' and array.ndim == 1 else array
    self._has_label = _has_label(values, labels)
    # A row without a label stands here for one that has one; its image is masked.
    rows = np.where(self._has_label, np.arange(len(labels)), np.argmax(self._has_label))
    table = self._files.settings.get('labels')
    own = ('weight',) if table else ()  # of an image to which the table gives a label
    arrays = {name: array if name in own else array[rows] for name, array in arrays.items()}
    num_classes, self._labels, annotators = array_source.labels_of(
      self._files.name, arrays, names, len(rows)
    )
    if table:
      of_files = self._files.paths, self._files.file_starts
      named, _ = relabel(table, self._labels, *of_files, names, num_classes)
      self._has_label[named] = True
    self._rows = shards.labelled(self._files.splits, self._has_label)
    fields = tuple(x for x in self._labels.dtype.names or () if x != 'label')
    max_labels = (self._labels['label'] if fields else self._labels).shape[1]
    self.info = TaskInfo(
      num_classes=num_classes,
      multi_label=max_labels > 1 and 'label_weight' not in fields,
      channels=3,
      class_names=names,
      splits={split: len(rows) for split, rows in self._rows.items()},
      max_labels=max_labels,
      label_fields=fields,
      annotators=annotators,
      version=f'{self._files.version} {zlib.crc32(self._labels.tobytes()):08x}',
    )

  @functools.cached_property
  def typical_side(self) -> float:
    rows = next(iter(self._rows.values()))
    if self._files.paths[0].is_remote:  # those of the first row group
      rows = rows[: self._files.blocks(rows)[1]]
    return preprocess.typical_side(rows, self._files.images)

  def read(
    self, split: str, ids: np.ndarray, size: int, seed: int
  ) -> tuple[list[bytes | None], np.ndarray]:
    rows = self._rows[split][ids]
    images = self._files.images(rows)
    known = self._has_label[rows].tolist()
    return [x if y else None for x, y in zip(images, known, strict=True)], self._labels[rows]

  prefers_blocks = True  # an image that is read decodes its row group

  def blocks(self, split: str) -> np.ndarray:
    """First numbers of the examples of each row group; see ExampleSource."""
    return self._files.blocks(self._rows[split])

  def describe(self, split: str, example_id: int) -> str:
    return self._files.describe(int(self._rows[split][example_id]))

  def file(self, split: str, example_id: int) -> str:
    """The name of an example in a table of labels."""
    return self._files.file(int(self._rows[split][example_id]))


class ParquetCaptionSource:
  """An ExampleSource of RGB images with captions: a text, or a list of texts, per image."""

  def __init__(self, argument: str):
    """Reads footers and captions. ValueError if there are none, or a column is unclear."""
    self._files = _Files('parquet_captions', argument, ('image', 'caption'))
    column = self._files.column_for('caption', CAPTION_NAMES, _holds_texts)
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

  prefers_blocks = True  # an image that is read decodes its row group

  def blocks(self, split: str) -> np.ndarray:
    """First numbers of the examples of each row group; see ExampleSource."""
    return self._files.blocks(self._rows[split])

  def describe(self, split: str, example_id: int) -> str:
    return self._files.describe(int(self._rows[split][example_id]))


def _footer(path: shards.File, stat: tuple[int, int]) -> pq.FileMetaData:
  try:
    with path.open_blocks(stat) as file:
      return pq.read_metadata(file)
  except (pa.ArrowException, OSError) as error:
    raise ValueError(f'{path} is not a whole Parquet file: {error}') from error


def _name(path: shards.File) -> str:
  return pathlib.PurePosixPath(path.relative).name


def _shown(kind: pa.DataType) -> str:
  return (
    f'struct<{", ".join(field.name for field in kind)}>' if pa.types.is_struct(kind) else str(kind)
  )


def _is_text(kind: pa.DataType) -> bool:
  tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
  return any(test(kind) for test in tests)


def _is_binary(kind: pa.DataType) -> bool:
  tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
  return any(test(kind) for test in tests)


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
  element = _element(kind)
  numbers = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
  return _is_text(element) or any(test(element) for test in numbers)


def _element(kind: pa.DataType) -> pa.DataType:
  """The type of a value, also in a list, and without a dictionary."""
  element = _item(kind) or kind
  return element.value_type if pa.types.is_dictionary(element) else element


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
  except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError):
    return None


def _flat(values: pa.ChunkedArray) -> pa.ChunkedArray:
  """The values of a column, or of all its lists, without a dictionary."""
  flat = values if _item(values.type) is None else pc.list_flatten(values)
  return flat.cast(_element(flat.type))


def _padded(where: str, values: pa.ChunkedArray, kind: pa.DataType, padding: Any) -> np.ndarray:
  """A column of `kind`, [N], or [N, L] of lists whose rows are padded; nulls are padding, too."""
  try:
    flat = _flat(values).cast(kind).fill_null(padding).to_numpy()
  except pa.ArrowException as error:
    raise ValueError(f'{where} cannot be read as {kind}: {error}') from error
  return _in_rows(values, flat.astype(str) if flat.dtype.kind == 'O' else flat, padding)


def _in_rows(values: pa.ChunkedArray, flat: np.ndarray, padding: Any) -> np.ndarray:
  """What was made of `_flat(values)`, in the rows of `values`."""
  if _item(values.type) is None:
    return flat
  lengths = _lengths(values)
  present = np.arange(max(lengths.max(initial=0), 1)) < lengths[:, None]  # [N, L]
  rows = np.full(present.shape, padding, flat.dtype)
  rows[present] = flat
  return rows


def _lengths(values: pa.ChunkedArray) -> np.ndarray:
  """The lengths of lists, [N]; 0 for null."""
  return pc.list_value_length(values).fill_null(0).to_numpy()


def _labels(
  where: str, values: pa.ChunkedArray, names: tuple[str, ...] | None
) -> tuple[np.ndarray, tuple[str, ...] | None]:
  """Class numbers int64 [N] or [N, L] padded with -1, or soft labels float32 [N, K]; and names."""
  is_list = _item(values.type) is not None
  element = _element(values.type)
  if pa.types.is_floating(element) and is_list:
    lengths = np.unique(_lengths(values))
    lengths = lengths[lengths > 0]
    if len(lengths) > 1:
      raise ValueError(
        f'{where} has lists of {lengths[0]} to {lengths[-1]} numbers; soft labels need K in each '
        'row.'
      )
    return _padded(where, values, pa.float32(), 0.0), names
  if not _is_text(element):
    if pa.types.is_floating(element):  # pandas writes numbers so if some are missing
      values = pc.if_else(pc.is_nan(values), None, values)
    return _padded(where, values, pa.int64(), -1), names
  flat = _flat(values).cast(pa.string())
  found = set(flat.unique().to_pylist()) - {None, ''}
  names = names or tuple(sorted(found))
  numbers = class_numbers(f'{where}: ', names, found)
  flat = pc.index_in(flat, pa.array(numbers, pa.string())).fill_null(-1).to_numpy()
  return _in_rows(values, flat, -1), names


def _has_label(values: pa.ChunkedArray, labels: np.ndarray) -> np.ndarray:
  """Which rows have labels, bool [N]; no label is one of several labels' answers."""
  if labels.dtype.kind == 'f':
    return _lengths(values) > 0
  if labels.ndim == 1:
    return labels != -1
  return values.is_valid().to_numpy() & ((labels != -1).any(1) | (labels.shape[1] > 1))
