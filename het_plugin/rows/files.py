"""Files of rows: one reader and one writer.

het_plugin writes .safetensors or .npz files with the columns of the rows (`Rows`) and the arrays

    label         int32 [N, L], padded with -1; beside predictions [N] where L = 1
    index         int64 [N], distinct example ids
    label_weight  float32 [N, L], shares of the labels, if they are not equal
    annotator     int32 [N, L], who gave each vote, if it is known

and a description: class names (`class_name`, [K] strings), `by_name`, provenance (JSON), link, and
checksums of the arrays. In an .npz file these are arrays too; a .safetensors file has them as JSON
in its metadata, under 'het_plugin'.

Files made elsewhere need features or predictions, and labels. They may use other names for them
(`FEATURE_NAMES`, `LABEL_NAMES`). Predictions are exactly one of `log_prob`, `prob` and `logits`
[N, K]. With a softmax, the probabilities of a row must sum to 1 within 0.001 (0.01 in half
precision); logits are normalised. With link = 'sigmoid', each class is on with its own probability.
Features in a .npy file have their labels in a second file. In a .parquet file arrays are columns:
of numbers, or of lists of equally many for the rows of [N, D]. Labels may be lists of any lengths.
A .csv file begins with the names of its columns. One is the label, `index` and `split` mean what
they mean elsewhere, and each other column is a feature.
Labels may be names of classes, '' for none. Their numbers are those of `class_name`, or else of the
sorted names, as scikit-learn numbers them.
"""

import contextlib
import difflib
import json
import re
import zipfile
import zlib
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from etils import epath

from het_plugin import weights
from het_plugin.measures import votes
from het_plugin.rows import labels as labels_lib
from het_plugin.rows import shards
from het_plugin.rows.rows import Rows
from het_plugin.system import run_files, temporary
from het_plugin.weights.files import SAFETENSORS_DTYPES, as_stored, save_safetensors

FEATURE_NAMES = ('features', 'representations', 'embeddings', 'embedding', 'pre_logits', 'x', 'X')
LABEL_NAMES = ('label', 'labels', 'y', 'target', 'targets')
VALUE_NAMES = ('log_prob', 'prob', 'logits')
DTYPES = ('float32', 'bfloat16', 'float16')
SUFFIXES = ('.npz', '.safetensors', '.npy', '.parquet', '.csv')
_OPTIONAL = 'index', 'label_weight', 'annotator', 'class_name', 'split'
_SIMILAR = 0.85  # least similarity of the name of an array to one that was probably meant
_PER_EXAMPLE = ('expected_entropy', 'nll')
_SHOWN = 8  # arrays in an error
_JSON = ('by_name', 'provenance', 'checksums', 'digest')  # of an .npz file
_METADATA = 'het_plugin'
_PARQUET_ROWS = 8192  # that are read at a time
_BLOCK_BYTES = 2**24  # of an array that is looked through
_SUM_TOLERANCE = 1e-3
_HALF_SUM_TOLERANCE = 1e-2  # half precision rounds a log-probability of -10 by 4e-3


def is_file(source: str) -> bool:
  """Whether `read` is to read a source: a file that has rows, or one that is missing or damaged."""
  path, _ = partition_source(source)
  if not path.endswith(SUFFIXES) or re.match(r'\w+:(?!//)', path):  # as npz:PATH, a task
    return False
  names: Collection[str] = ()
  with contextlib.suppress(Exception):  # reading it says why
    if path.endswith('.npz'):
      with np.load(path, allow_pickle=False) as arrays:
        names = arrays.files
    elif path.endswith('.safetensors'):
      with safetensors.safe_open(path, framework='numpy') as file:
        names = tuple(file.keys())
    elif path.endswith('.parquet'):
      names = _open_parquet(path).schema_arrow.names
  known = {*FEATURE_NAMES, *LABEL_NAMES, *VALUE_NAMES}
  return bool(known.intersection(names)) or not any(re.search('[./]', name) for name in names)


def read(source: str, column: str = 'features', *, mapped: bool = False) -> Rows:
  """Reads a file of rows.

      >>> import os, tempfile
      >>> import numpy as np
      >>> from het_plugin import rows
      >>> x, y = np.ones((2, 4), np.float32), np.array([0, 1])
      >>> with tempfile.TemporaryDirectory() as folder:
      ...   path = os.path.join(folder, 'train.npz')
      ...   np.savez(path, features=x, label=y)
      ...   found = rows.read(path)
      >>> found.features.shape, found.label.tolist()
      ((2, 4), [0, 1])

  Args:
    source: PATH.npz, .safetensors, .parquet, .csv, or FEATURES.npy,LABELS.npy. PATH.npz:NAME is
      one split of a file that has an array 'split' of strings [N]. PATH-*.safetensors is several
      files as one, in the order of their names; of those named PATH-00000-of-00004.safetensors none
      may be missing. Rows of files without ids are numbered through.
    column: what the file must have, 'features' or 'log_prob'.
    mapped: whether arrays of a .safetensors file stay on disk, with the type that they have there,
      as those of .npy files do, and of a .parquet file in a temporary one. Other features are read
      as float32.

  Raises:
    ValueError: the file is missing or damaged, its arrays do not fit together, or values are not
      finite or out of range. The message is one sentence that names the file.
  """
  path, split = partition_source(source)
  if '*' not in path:
    return _read(source, column, mapped)
  files = shards.names(path)
  parts: list[Rows] = []
  for file in files:
    parts.append(_read(file, column, mapped, sum(map(len, parts))))
  with reading(path):
    joined = shards.join(parts, files, mapped)
  if split is not None:
    raise ValueError(f'{source}: several files as one have no split: name them without')
  return joined


def _read(source: str, column: str, mapped: bool, first_id: int = 0) -> Rows:
  """Rows of one file. Without `index` their ids count from `first_id`."""
  path, split = partition_source(source)
  with reading(path), np.errstate(over='ignore'):  # `_check` tells of what float32 cannot hold
    arrays = _arrays(path, column, mapped)
    about = _description(path, arrays)
    _check_sums(arrays, about)
    found = _parse(arrays, about, column, mapped or path.endswith('.npy'), first_id)
    return found if split is None else found.take(_rows_of_split(arrays, split, len(found)))


def write(path: epath.PathLike, rows: Rows) -> None:
  """Writes a local file, whole or not at all.

      >>> import os, tempfile
      >>> import numpy as np
      >>> from het_plugin import rows
      >>> x, labels = np.ones((2, 4), np.float32), np.array([[0], [1]], np.int32)
      >>> some = rows.Rows({'features': x}, labels, np.arange(2), class_names=('cat', 'dog'))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...   path = os.path.join(folder, 'test.safetensors')
      ...   rows.write(path, some)
      ...   rows.read(path).class_names
      ('cat', 'dog')

  Args:
    path: PATH.npz or PATH.safetensors.
    rows: the rows.

  Raises:
    ValueError: the file has another suffix.
  """
  path = epath.Path(path)
  if path.suffix not in ('.npz', '.safetensors'):
    raise ValueError(f'{path} must end in .npz or .safetensors')
  labels = rows.labels.astype(np.int32)
  one_each = 'log_prob' in rows.columns and labels.shape[1] == 1
  label = labels[:, 0] if one_each else labels
  index = rows.index.astype(np.int64)
  beside = {'label_weight': rows.label_weight, 'annotator': rows.annotator}
  named = {**rows.columns, 'label': label, 'index': index, **beside}
  arrays = {name: as_stored(x) for name, x in named.items() if x is not None}
  names = None if rows.class_names is None else tuple(map(str, rows.class_names))
  about = {'class_names': names, 'provenance': dict(rows.provenance)}
  if rows.by_name:
    about['by_name'] = True
  if 'log_prob' in arrays:
    about['link'] = rows.link
  about['checksums'] = {name: crc(x) for name, x in arrays.items()}
  about['digest'] = _digest(about)
  with run_files.replacing(path) as unfinished:
    if path.suffix == '.npz':
      strings = {name: np.array(json.dumps(about[name])) for name in _JSON if name in about}
      if names is not None:
        strings['class_name'] = np.array(names)
      if 'link' in about:
        strings['link'] = np.array(rows.link)
      with unfinished.open('wb') as stream:
        # The stub takes each array for `allow_pickle`, the only keyword that it names.
        np.savez(stream, **arrays, **strings)  # ty: ignore[invalid-argument-type]
    else:
      metadata = {_METADATA: json.dumps(about)}
      save_safetensors(unfinished, arrays, metadata)


def read_provenance(path: epath.PathLike) -> dict[str, Any]:
  """The provenance in a file, read without its columns; ValueError if it cannot be read."""
  with reading(str(path)):
    if str(path).endswith('.npz'):
      with np.load(path, allow_pickle=False) as arrays:
        return _description(str(path), arrays)['provenance']
    return _description(str(path), {})['provenance']


def split_of_rows(path: str) -> np.ndarray | None:
  """The array 'split' of a file, strings [N]; None if it has no such array."""
  with reading(path):
    if path.endswith('.npz') and zipfile.is_zipfile(path):
      with np.load(path, allow_pickle=False) as arrays:
        return arrays['split'].astype(str) if 'split' in arrays else None
    if path.endswith('.parquet'):
      with _open_parquet(path) as file:
        if 'split' in file.schema_arrow.names:
          return file.read(['split'])['split'].to_numpy().astype(str)
    if path.endswith('.csv') and 'split' in _names_of_csv(path):
      return _open_csv(path, 'split')['split'].to_numpy().astype(str)
  return None


def partition_source(source: str) -> tuple[str, str | None]:
  """Splits the source of `read` into path and split (None if it names none)."""
  path, colon, split = source.rpartition(':')
  if colon and path.endswith(SUFFIXES):
    return path, split
  return source, None


@contextlib.contextmanager
def reading(path: str) -> Generator[None]:
  """Turns any error into a ValueError of one sentence that names the file."""
  try:
    yield
  except FileNotFoundError as error:
    raise ValueError(f'file {path} does not exist') from error
  except Exception as error:  # a damaged file makes zipfile, numpy, json ... raise many types
    message = ' '.join(str(error).split()) or type(error).__name__
    if 'allow_pickle' in message:
      message = 'it has an array of objects, which is not read: names.astype(str) makes text of it'
    raise ValueError(message if path in message else f'{path}: {message}') from error


def find_features(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
  """The array of features [N, D] among named ones; ValueError for none or several."""
  _, features = one_of(arrays, FEATURE_NAMES)
  if not _is_float(features) or features.ndim != 2 or not features.size:
    raise ValueError(
      f'features are {features.dtype} {list(features.shape)}; they must be floating point [N, D], '
      'N and D at least 1'
    )
  return features


def _is_float(x: np.ndarray) -> bool:
  return x.dtype.kind == 'f' or x.dtype == ml_dtypes.bfloat16  # whose kind is V


def one_of(arrays: Mapping[str, np.ndarray], names: Sequence[str]) -> tuple[str, np.ndarray]:
  """The array that has one of the names, and which; ValueError for none or several."""
  found = [name for name in names if name in arrays]
  if len(found) != 1:
    there = [f'{name} {x.dtype} {list(x.shape)}' for name, x in arrays.items()]
    shown = ', '.join(there[:_SHOWN]) or 'none'
    more = f' and {len(there) - _SHOWN} more' if len(there) > _SHOWN else ''
    raise ValueError(
      f'there must be exactly one of the arrays {", ".join(names)}; there are: {shown}{more}'
    )
  return found[0], arrays[found[0]]


def _arrays(path: str, column: str, mapped: bool) -> dict[str, np.ndarray]:
  """All arrays of a file by name, as they are there."""
  if column == 'features' and path.endswith('.npy'):
    return _read_npy(path)
  if column == 'features' and path.endswith('.csv'):
    return _read_csv(path)
  if path.endswith('.parquet'):
    return _read_parquet(path)
  if not path.endswith(weights.files.SUFFIXES):
    others = '.csv, .npy, ' if column == 'features' else ''
    raise ValueError(f'a file with {column} must end in {others}.npz, .parquet or .safetensors')
  if mapped and path.endswith('.safetensors') and epath.Path(path).exists():
    return _map_safetensors(path)
  return weights.read_arrays(path, as_float32=False)


def _read_csv(path: str) -> dict[str, np.ndarray]:
  """The label, `index` and `split` by their names, and all other columns as features [N, D]."""
  table = _open_csv(path)
  names = table.column_names
  for number, name in enumerate(names):
    if not name:
      raise ValueError(
        f'column {number} has no name: pandas writes such a column of row numbers, '
        'to_csv(..., index=False) does not'
      )
    if name in names[:number]:
      raise ValueError(f'two columns have the name {name}')
  labels = [name for name in names if name in LABEL_NAMES]
  if len(labels) != 1:
    there = ', '.join(names[:_SHOWN]) + (' ...' if len(names) > _SHOWN else '')
    raise ValueError(
      f'its first line must name exactly one column {", ".join(LABEL_NAMES)}; there are {there}'
    )
  check_names('it', names, ('index', 'split'))
  if not len(table):
    raise ValueError('it has no rows')
  arrays = {}
  features = {}
  for name in names:
    column = _as_rows(name, table[name].combine_chunks(), 0)
    if name in (*labels, 'index', 'split'):
      arrays[name] = column
    elif column.dtype.kind in 'biuf':
      features[name] = column
    else:
      raise ValueError(f'column {name} has {column[0]!r}: features are numbers; leave it out')
  if not features:
    raise ValueError('it has no columns of features')
  arrays['feature_name'] = np.array([*features])
  return {**arrays, 'features': np.stack([*features.values()], axis=1, dtype=np.float64)}


def _open_csv(path: str, *columns: str) -> Any:
  """A table of these columns, or of all."""
  csv = _csv_library(path)
  return csv.read_csv(path, convert_options=csv.ConvertOptions(include_columns=columns))


def _names_of_csv(path: str) -> list[str]:
  with _csv_library(path).open_csv(path) as file:  # which reads the first block alone
    return file.schema.names


def _csv_library(path: str) -> Any:
  try:
    from pyarrow import csv
  except ModuleNotFoundError as error:
    raise ImportError(f'{path} needs `pip install pyarrow`') from error
  return csv


def _open_parquet(path: str) -> Any:
  try:
    from pyarrow import parquet  # takes a third of a second to import
  except ModuleNotFoundError as error:
    raise ImportError(f'{path} needs `pip install pyarrow`') from error
  return parquet.ParquetFile(path)


def _read_parquet(path: str) -> dict[str, np.ndarray]:
  """The columns that rows have; those of floating-point lists in files without a name."""
  arrays = {}
  with _open_parquet(path) as file:
    known = {*FEATURE_NAMES, *LABEL_NAMES, *VALUE_NAMES, *_PER_EXAMPLE, *_OPTIONAL}
    for name in known.intersection(file.schema_arrow.names):
      parts = []
      whole = None
      start = 0
      for batch in file.iter_batches(_PARQUET_ROWS, columns=[name]):
        part = _as_rows(name, batch.column(0), start)
        start += len(part)
        if part.ndim == 1 or name not in (*FEATURE_NAMES, *VALUE_NAMES):
          parts.append(part)
          continue
        if whole is None:
          whole = temporary.array((file.metadata.num_rows, part.shape[1]), part.dtype)
        if part.shape[1] != whole.shape[1]:
          raise ValueError(
            f'{name} has {part.shape[1]} values in row {start - len(part)} and {whole.shape[1]} in '
            'row 0'
          )
        whole[start - len(part) : start] = part
      arrays[name] = _stacked(name, parts) if whole is None else whole
    if not arrays.keys() & {*FEATURE_NAMES, *VALUE_NAMES}:
      raise ValueError(
        f'there must be exactly one of the arrays {", ".join(FEATURE_NAMES)}, a column of lists; '
        f'there are the columns {", ".join(file.schema_arrow.names[:_SHOWN])}'
      )
  return arrays


def _as_rows(name: str, column: Any, start: int) -> np.ndarray:
  """A batch of a Parquet column as an array [n] or [n, D]; its first row has the number `start`."""
  if column.null_count:
    row = start + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
    raise ValueError(f'{name} has no value in row {row}')
  if not hasattr(column, 'flatten') or not hasattr(column.type, 'value_type'):
    return _values(column)
  values = _values(column.flatten())
  if hasattr(column.type, 'list_size'):
    return values.reshape(len(column), column.type.list_size)
  lengths = column.value_lengths().to_numpy()
  width = int(lengths.max(initial=0))
  is_ragged = name in (*LABEL_NAMES, *_OPTIONAL)
  if not is_ragged and (wrong := lengths != lengths[:1]).any():
    row = int(np.argmax(wrong))
    raise ValueError(
      f'{name} has {lengths[row]} values in row {start + row} and {lengths[0]} in row {start}'
    )
  found = np.full((len(column), width), _padding(name, values), values.dtype)
  found[np.arange(width) < lengths[:, None]] = values
  return found


def _values(column: Any) -> np.ndarray:
  """A batch as an array [n]. Text becomes objects; equal texts share one."""
  is_text = str(column.type) in ('string', 'large_string', 'string_view')
  return (column.dictionary_encode() if is_text else column).to_numpy(zero_copy_only=False)


def _padding(name: str, values: np.ndarray) -> int | str:
  """What stands for no label."""
  return '' if values.dtype.kind == 'O' else 0 if name == 'label_weight' else -1


def _stacked(name: str, parts: Sequence[np.ndarray]) -> np.ndarray:
  """Parts [n] or [n, L] of any L as one array."""
  if not parts or parts[0].ndim == 1:
    return np.concatenate([*parts]) if parts else np.zeros(0)
  more = [max(part.shape[1] for part in parts) - part.shape[1] for part in parts]
  wide = (
    np.pad(part, ((0, 0), (0, x)), constant_values=_padding(name, part))
    for part, x in zip(parts, more, strict=True)
  )
  return np.concatenate([*wide])


def _read_npy(source: str) -> dict[str, np.ndarray]:
  features, comma, labels = source.partition(',')
  if not comma:
    raise ValueError('features in a .npy file need their labels: write FEATURES.npy,LABELS.npy')
  arrays = {}
  for name, path in (('features', features), ('label', labels)):
    if not epath.Path(path).exists():
      raise ValueError(f'{path} does not exist')
    arrays[name] = np.load(path, mmap_mode='r', allow_pickle=False)
  return arrays


def _map_safetensors(path: str) -> dict[str, np.ndarray]:
  """All arrays of a local file, mapped and of the type that they have there.

  The file has the length of a JSON header in 8 bytes, the header and the arrays
  (https://huggingface.co/docs/safetensors).
  """
  with open(path, 'rb') as stream:
    length = int.from_bytes(stream.read(8), 'little')
    header = json.loads(stream.read(length))
    num_bytes = stream.seek(0, 2) - 8 - length  # of the arrays
  header.pop('__metadata__', None)
  arrays = {}
  for name, entry in header.items():
    start, stop = entry['data_offsets']
    if entry['dtype'] not in SAFETENSORS_DTYPES:
      raise ValueError(
        f'{name} has the type {entry["dtype"]}; choose from {", ".join(SAFETENSORS_DTYPES)}'
      )
    if stop > num_bytes:
      raise ValueError(f'it is cut short: {name} ends at byte {stop} of {num_bytes}')
    content = np.empty(0, np.uint8)  # which cannot be mapped
    if stop > start:
      content = np.memmap(path, np.uint8, 'r', 8 + length + start, (stop - start,))
    arrays[name] = content.view(SAFETENSORS_DTYPES[entry['dtype']]).reshape(entry['shape'])
  return arrays


def _description(path: str, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
  """Class names (None without), provenance ({} without), and what there is of link and checksums.

  Raises:
    ValueError: they are not what was written.
  """
  if path.endswith('.npz'):
    about = {name: json.loads(str(arrays[name])) for name in _JSON if name in arrays}
    if 'class_name' in arrays:
      about['class_names'] = arrays['class_name'].astype(str).tolist()
    if 'link' in arrays:
      about['link'] = str(arrays['link'])
  elif path.endswith('.safetensors'):
    with safetensors.safe_open(path, framework='numpy') as file:
      about = json.loads((file.metadata() or {}).get(_METADATA, '{}'))
  elif path.endswith('.parquet'):
    about = _description_of_hub(_open_parquet(path).schema_arrow.metadata or {})
  elif 'feature_name' in arrays:
    about = {'provenance': {'feature_names': arrays['feature_name'].tolist()}}
  else:
    about = {}  # a .npy file has arrays only
  about = {'class_names': None, 'provenance': {}} | about
  digest = about.pop('digest', None)
  if (digest is not None or 'checksums' in about) and digest != _digest(about):
    raise ValueError('its description is not what was written: the file is damaged')
  return about


def _description_of_hub(metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
  """Names of the classes, as Hugging Face `datasets` writes them."""
  columns = json.loads(metadata.get(b'huggingface', b'{}')).get('info', {}).get('features', {})
  names = [columns[x]['names'] for x in LABEL_NAMES if 'names' in (columns.get(x) or {})]
  return {'class_names': names[0]} if names else {}


def _digest(about: Mapping[str, Any]) -> int:
  """CRC-32 of a description."""
  return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def _check_sums(arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> None:
  """Raises ValueError if an array is not what was written. Files made elsewhere have no sums."""
  for name, written in about.get('checksums', {}).items():
    if name not in arrays or crc(arrays[name]) != written:
      raise ValueError(f'the array {name} is not what was written: the file is damaged')


def crc(x: np.ndarray) -> int:
  """CRC-32 of the shape, type and values of an array, which may be a mapped file."""
  found = zlib.crc32(f'{x.dtype.name} {x.shape}'.encode())
  for block in _blocks(x):
    found = zlib.crc32(np.ascontiguousarray(block).view(np.uint8).data, found)
  return found


def _blocks(x: np.ndarray) -> Iterator[np.ndarray]:
  rows = max(1, _BLOCK_BYTES // max(1, x.nbytes // max(1, len(x))))
  return (x[start : start + rows] for start in range(0, len(x), rows))


def check_names(owner: str, names: Collection[str], optional: Sequence[str]) -> None:
  """Raises ValueError if an array's or a column's name is nearly an `optional` one.

  What has that name would be left out.
  """
  absent = set(optional) - set(names)
  for name in set(names) - set(optional):
    if similar := difflib.get_close_matches(name.lower(), absent, 1, _SIMILAR):
      raise ValueError(f'{owner} has {name!r}: did you mean {similar[0]!r}?')


def _parse(
  arrays: Mapping[str, np.ndarray],
  about: Mapping[str, Any],
  column: str,
  on_disk: bool,
  first_id: int,
) -> Rows:
  """The rows of named arrays, checked."""
  link = about.get('link', votes.LINKS[0])
  if link not in votes.LINKS:
    raise ValueError(f'link is {link!r}; it must be one of {", ".join(votes.LINKS)}')
  check_names('it', arrays, _OPTIONAL)
  columns = {}
  if column == 'log_prob' or 'log_prob' in arrays:  # beside features others may be anything
    columns |= _predictions(arrays, link)
  if column == 'features' or any(name in arrays for name in FEATURE_NAMES[:1]):
    features = find_features(arrays)
    columns['features'] = features if on_disk else np.array(features, np.float32)
  num_examples = len(columns[column])
  if wrong := [name for name, x in columns.items() if len(x) != num_examples]:
    raise ValueError(f'{wrong[0]} has {len(columns[wrong[0]])} rows and {column} {num_examples}')
  index = _example_ids(arrays.get('index'), num_examples, first_id)
  _, given = one_of(arrays, LABEL_NAMES)
  names = about['class_names']
  are_names = given.dtype.kind in 'USO'
  if are_names and names is None and 'log_prob' in columns:
    raise ValueError(
      'the labels are names, and no array class_name [K] says which class each column of the '
      'predictions is'
    )
  if are_names:
    given, names = labels_lib.number_names(given, names)
  labels = labels_lib.label_rows(given, num_examples)
  rows = Rows(
    columns,
    labels,
    index,
    label_weight=_beside(arrays, 'label_weight', labels.shape, 'f'),
    annotator=_beside(arrays, 'annotator', labels.shape, 'iu'),
    link=link,
    class_names=None if names is None else tuple(names),
    by_name=are_names or about.get('by_name', False),
    provenance=about['provenance'],
  )
  _check(rows)
  return rows


def _predictions(arrays: Mapping[str, np.ndarray], link: str) -> dict[str, np.ndarray]:
  """The columns of predictions."""
  name, values = one_of(arrays, VALUE_NAMES)
  if not _is_float(values) or values.ndim != 2 or not values.size:
    raise ValueError(
      f'{name} is {values.dtype} {list(values.shape)}; it must be floating point [N, K]'
    )
  columns = {'log_prob': _log_prob(name, values, link)}
  for column in _PER_EXAMPLE:
    if column in arrays and (column != 'nll' or link == 'sigmoid'):
      if arrays[column].shape != values.shape[:1]:
        raise ValueError(f'{column} is {list(arrays[column].shape)}; it must be [{len(values)}]')
      if not np.isfinite(arrays[column]).all():
        raise ValueError(f'{column} has values that are not finite')
      columns[column] = arrays[column]
  return columns


def _log_prob(name: str, values: np.ndarray, link: str) -> np.ndarray:
  """Log-probabilities [N, K]: given ones unchanged, others computed in float64."""
  from scipy import special  # features, which a training may read, do not need it

  tolerance = _SUM_TOLERANCE if values.dtype.itemsize >= 4 else _HALF_SUM_TOLERANCE
  if name == 'logits':
    if not np.isfinite(values).all():
      raise ValueError('logits has values that are not finite')
    values = values.astype(np.float64)
    return special.log_softmax(values, axis=1) if link == 'softmax' else special.log_expit(values)
  if name == 'prob':
    if not ((values >= 0) & (values <= 1 + tolerance)).all():
      raise ValueError('prob has values outside [0, 1], or NaNs')
    with np.errstate(divide='ignore'):  # a probability of 0 is valid: its log is -inf
      log_prob = np.log(values.astype(np.float64))
  else:
    log_prob = values if values.dtype.itemsize >= 4 else values.astype(np.float32)
    if not (log_prob <= tolerance).all():
      raise ValueError('log_prob has values above 0, or NaNs')
  if link == 'softmax':
    total = np.exp(special.logsumexp(log_prob, axis=1))
    if (wrong := np.abs(total - 1) > tolerance).any():
      row = int(np.flatnonzero(wrong)[0])
      raise ValueError(
        f'the probabilities of row {row} sum to {total[row]:.4g} instead of 1: if they are '
        "rounded, divide each row by its sum (an array link = 'sigmoid' says that classes are "
        'independent)'
      )
  return np.minimum(log_prob, 0.0)


def _beside(
  arrays: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...], kinds: str
) -> np.ndarray | None:
  """An array that belongs to the labels; None without it."""
  if name not in arrays:
    return None
  x = arrays[name]
  if x.shape != shape or x.dtype.kind not in kinds:
    type_ = 'floating point' if kinds == 'f' else 'integers'
    numbered = '; numpy.unique(names, return_inverse=True) numbers names'
    raise ValueError(
      f'{name} is {x.dtype} {list(x.shape)}; it must be {type_} {list(shape)}, as the labels are'
      f'{numbered if kinds == "iu" and x.dtype.kind in "USO" else ""}'
    )
  return x.astype(np.float32 if kinds == 'f' else np.int32)


def _example_ids(index: np.ndarray | None, num_examples: int, first_id: int) -> np.ndarray:
  """Example ids as int64 [N]; None counts on from `first_id`. ValueError unless N are distinct."""
  if index is None:
    return np.arange(first_id, first_id + num_examples)
  if index.shape != (num_examples,) or index.dtype.kind not in 'iu':
    raise ValueError(
      f'index is {index.dtype} {list(index.shape)}; it must be integers [{num_examples}]'
    )
  if len(np.unique(index)) != num_examples:
    raise ValueError('the ids in index must be distinct')
  if index.min() < 0 or index.max() > np.iinfo(np.int64).max:
    raise ValueError('index has an example id below 0 or above 2^63 - 1')
  return index.astype(np.int64)


def _rows_of_split(arrays: Mapping[str, np.ndarray], split: str, num_rows: int) -> np.ndarray:
  names = arrays['split'].astype(str) if 'split' in arrays else np.empty(0, str)
  if names.shape != (num_rows,) or split not in names:
    raise ValueError(
      f"an array 'split' of {num_rows} strings must have {split!r}; there are "
      f'{np.unique(names).tolist()}'
    )
  return np.flatnonzero(names == split)


def _check(rows: Rows) -> None:
  """Raises ValueError if a value is not finite or out of range."""
  if 'features' in rows.columns:
    blocks = (x.astype(np.float32, copy=False) for x in _blocks(rows.features))
    wrong = np.flatnonzero(np.concatenate([~np.isfinite(x).all(axis=1) for x in blocks]))
    if len(wrong):
      raise ValueError(
        f'there are {len(wrong)} rows that are not finite in float32, first row {wrong[0]}'
      )
  names = rows.class_names
  num_classes = None
  if 'log_prob' in rows.columns:
    num_classes = rows.log_prob.shape[1]
    if names is not None and len(names) != num_classes:
      raise ValueError(f'class_name is [{len(names)}]; it must be [{num_classes}]')
    _check_no_marks(rows.labels, num_classes, rows.link)
    votes.check_labels(rows.labels, num_classes, rows.link, rows.index)
  else:
    _check_no_marks(rows.labels, rows.labels.shape[1] if names is None else len(names), rows.link)
    labels_lib.check_range('', rows.labels, None if names is None else len(names))
  if rows.label_weight is not None and rows.link == 'softmax':
    labels_lib.check_weights('label_weight', rows.label_weight, None, rows.labels >= 0)


def _check_no_marks(labels: np.ndarray, num_classes: int, link: str) -> None:
  """Raises ValueError if labels are one-hot or multi-hot instead of class numbers."""
  if not labels_lib.are_marks(labels, num_classes):
    return
  if link == 'sigmoid' or (labels.sum(axis=1) == 1).all():
    raise ValueError(
      f'labels are {list(labels.shape)} of 0 and 1, which mark classes; they must be the numbers '
      'of the classes of each example, padded with -1'
    )
