"""Representations of a split, and their files.

het_plugin writes .safetensors or .npz files with the arrays

    features    float [N, D]
    label       int32 [N, L], padded with -1
    index       int64 [N], distinct example ids
    class_name  [K] strings, if they are known (.npz)
    provenance  JSON: where the features come from (.npz)

.safetensors files hold no strings. There class names and provenance are JSON in the metadata, under
'het_plugin'. Files made elsewhere may lack the last three arrays. They may use other names for the
first two (`FEATURE_NAMES`, `LABEL_NAMES`). Features in a .npy file have labels in a second file.
"""

import contextlib
import dataclasses
import itertools
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from etils import epath

from het_plugin import weights
from het_plugin.data import annotations
from het_plugin.weights.files import SAFETENSORS_DTYPES

FEATURE_NAMES = ('features', 'representations', 'embeddings', 'pre_logits', 'x')
LABEL_NAMES = ('label', 'labels', 'y', 'target', 'targets')
DTYPES = ('float32', 'bfloat16', 'float16')
_CHECKED_ROWS = 8192
SUFFIXES = ('.npz', '.safetensors', '.npy')
_METADATA = 'het_plugin'


@dataclasses.dataclass(frozen=True, eq=False)
class Representations:
  """The representations of a split by one layer.

  Features are float [N, D], labels int32 [N, L], padded with -1, and index integers [N], distinct
  example ids >= 0. The provenance is JSON values: checkpoint, task, split, layer, ...
  """

  features: np.ndarray
  labels: np.ndarray
  index: np.ndarray
  class_names: tuple[str, ...] | None = None
  provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def label(self) -> np.ndarray:
    """The label of each example, int32 [N].

    Raises:
      ValueError: an example has no label or several.
    """
    count = (self.labels >= 0).sum(axis=1)
    if (count != 1).any():
      row = int(np.flatnonzero(count != 1)[0])
      raise ValueError(
        f'example {int(self.index[row])} has {int(count[row])} labels; each must have one'
      )
    return self.labels.max(axis=1)

  @property
  def meaning(self) -> dict[str, Any]:
    """What files of one model must have in common; None for what a file does not say."""
    of_model = {name: self.provenance.get(name) for name in ('checkpoint', 'layer')}
    return {'D': self.features.shape[1], **of_model, 'classes': self.class_names}


def read_representations(source: str, mapped: bool = False) -> Representations:
  """Reads a file.

  Sources are PATH.npz, PATH.safetensors, and FEATURES.npy,LABELS.npy. PATH.npz:NAME is one split of
  a file that has an array 'split' of strings [N]. `mapped` arrays of a .safetensors file stay on
  disk, with the type that they have there, as those of .npy files do.

  Raises:
    ValueError: the file is missing or damaged, its arrays do not fit together, or values are not
      finite or out of range. The message is one sentence that names the file.
  """
  path, split = partition_source(source)
  with reading(path):
    if path.endswith('.npy'):
      arrays, (provenance, class_names) = _read_npy(path), ({}, None)
    elif mapped and path.endswith('.safetensors') and epath.Path(path).exists():
      (provenance, class_names), arrays = _read_description(path), _map_safetensors(path)
    elif weights.is_weights_file(path):
      arrays, (provenance, class_names) = weights.read_arrays(path), _read_description(path)
    else:
      raise ValueError('representations must be in a file that ends in .npz, .safetensors or .npy')
    features = find_features(arrays)
    labels = label_rows(one_of(arrays, LABEL_NAMES)[1], len(features))
    columns = features, labels, example_ids(arrays.get('index'), len(features))
    if split is not None:
      rows = _rows_of_split(arrays, split, len(columns[0]))
      columns = [column[rows] for column in columns]
    read = Representations(*columns, class_names, provenance)
    _check(read)
  return read


def check_pair(sources: Sequence[str], meanings: Sequence[dict[str, Any]]) -> None:
  """Raises ValueError if features or labels mean something else in the second of two files.

  `meanings` are `Representations.meaning` of both; what a file does not say is not compared.
  """
  first, other = meanings
  for name, ours in first.items():
    theirs = other[name]
    if ours is None or theirs is None or ours == theirs:
      continue
    if name != 'classes':
      raise ValueError(
        f'{sources[1]} has {name} {theirs} and {sources[0]} {name} {ours}: the features of both '
        'must be of the same model and layer'
      )
    pairs = enumerate(itertools.zip_longest(ours, theirs))
    label, (ours, theirs) = next((k, pair) for k, pair in pairs if pair[0] != pair[1])
    raise ValueError(
      f'label {label} is {theirs!r} in {sources[1]} and {ours!r} in {sources[0]}: both must have '
      'the same classes in the same order'
    )


def _map_safetensors(path: str) -> dict[str, np.ndarray]:
  """All arrays of a local file, mapped and of the type that they have there.

  The file has the length of a JSON header in 8 bytes, the header and the arrays
  (https://huggingface.co/docs/safetensors).
  """
  with open(path, 'rb') as stream:
    length = int.from_bytes(stream.read(8), 'little')
    header = json.loads(stream.read(length))
  header.pop('__metadata__', None)
  arrays = {}
  for name, entry in header.items():
    start, stop = entry['data_offsets']
    if entry['dtype'] not in SAFETENSORS_DTYPES or start == stop:
      raise ValueError(f'{name} has the type {entry["dtype"]} and {stop - start} bytes')
    content = np.memmap(path, np.uint8, 'r', 8 + length + start, (stop - start,))
    arrays[name] = content.view(SAFETENSORS_DTYPES[entry['dtype']]).reshape(entry['shape'])
  return arrays


def write_representations(path: epath.PathLike, representations: Representations) -> None:
  """Writes a local .npz or .safetensors file; ValueError for another suffix."""
  names, provenance = representations.class_names, dict(representations.provenance)
  arrays = {
    'features': np.ascontiguousarray(representations.features),
    'label': np.ascontiguousarray(representations.labels, np.int32),
    'index': np.ascontiguousarray(representations.index, np.int64),
  }
  path = epath.Path(path)
  if not weights.is_weights_file(path):
    raise ValueError(f'representations file {path} must end in .npz or .safetensors')
  with weights.replacing(path) as unfinished:
    if path.suffix == '.npz':
      strings = {'provenance': np.array(json.dumps(provenance))}
      if names is not None:
        strings['class_name'] = np.array(names)
      with unfinished.open('wb') as stream:
        np.savez(stream, **arrays, **strings)
    else:
      metadata = {_METADATA: json.dumps({'class_names': names, 'provenance': provenance})}
      safetensors.numpy.save_file(arrays, unfinished, metadata=metadata)


def read_provenance(path: epath.PathLike) -> dict[str, Any]:
  """The provenance in a file, read without its arrays; ValueError if it cannot be read."""
  with reading(str(path)):
    return _read_description(str(path))[0]


def split_names(path: str) -> tuple[str, ...]:
  """The distinct strings in the array 'split' of a .npz file; empty if it has no such array."""
  if not path.endswith('.npz') or not zipfile.is_zipfile(path):
    return ()
  with reading(path), np.load(path, allow_pickle=False) as arrays:
    return tuple(np.unique(arrays['split'].astype(str)).tolist()) if 'split' in arrays else ()


def partition_source(source: str) -> tuple[str, str | None]:
  """Splits the source of `read_representations` into path and split (None if it names none)."""
  path, colon, split = source.rpartition(':')
  if colon and path.endswith(SUFFIXES):
    return path, split
  return source, None


def _read_description(path: str) -> tuple[dict[str, Any], tuple[str, ...] | None]:
  """Provenance and class names."""
  if path.endswith('.npz'):
    with np.load(path, allow_pickle=False) as arrays:
      provenance = json.loads(str(arrays['provenance'])) if 'provenance' in arrays else {}
      names = arrays['class_name'] if 'class_name' in arrays else None
    return provenance, None if names is None else tuple(map(str, names))
  with safetensors.safe_open(path, framework='numpy') as file:
    ours = json.loads((file.metadata() or {}).get(_METADATA, '{}'))
  names = ours.get('class_names')
  return ours.get('provenance', {}), None if names is None else tuple(names)


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


def find_features(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
  """The array of features [N, D] among named ones; ValueError for none or several."""
  _, features = one_of(arrays, FEATURE_NAMES)
  is_float = features.dtype.kind == 'f' or features.dtype == ml_dtypes.bfloat16
  if not is_float or features.ndim != 2 or not features.size:
    raise ValueError(
      f'features are {features.dtype} {list(features.shape)}; they must be floating point [N, D], '
      'N and D at least 1'
    )
  return features


def one_of(arrays: Mapping[str, np.ndarray], names: Sequence[str]) -> tuple[str, np.ndarray]:
  """The array that has one of the names, and which; ValueError for none or several."""
  found = [name for name in names if name in arrays]
  if len(found) != 1:
    shown = ', '.join(f'{name} {x.dtype} {list(x.shape)}' for name, x in arrays.items())
    raise ValueError(
      f'there must be exactly one of the arrays {", ".join(names)}; there are: {shown or "none"}'
    )
  return found[0], arrays[found[0]]


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
  """Turns any error into a ValueError of one sentence that names the file."""
  try:
    yield
  except Exception as error:  # a damaged file makes zipfile, numpy, json ... raise many types
    message = ' '.join(str(error).split()) or type(error).__name__
    raise ValueError(message if path in message else f'{path}: {message}') from error


def label_rows(labels: np.ndarray, num_examples: int) -> np.ndarray:
  """Labels [N] or [N, L] of any integer type as int32 [N, L]; ValueError for others."""
  if labels.dtype.kind not in 'iu' or labels.ndim not in (1, 2) or len(labels) != num_examples:
    raise ValueError(
      f'labels are {labels.dtype} {list(labels.shape)}; they must be integers [N] or [N, L] with '
      f'N = {num_examples}, the number of examples'
    )
  return (labels[:, None] if labels.ndim == 1 else labels).astype(np.int32)


def example_ids(index: np.ndarray | None, num_examples: int) -> np.ndarray:
  """Example ids as int64 [N]; None counts from 0. ValueError unless N distinct integers."""
  if index is None:
    return np.arange(num_examples)
  if index.shape != (num_examples,) or index.dtype.kind not in 'iu':
    raise ValueError(
      f'index is {index.dtype} {list(index.shape)}; it must be integers [{num_examples}]'
    )
  if len(np.unique(index)) != num_examples:
    raise ValueError('index must give each example an id of its own')
  return index.astype(np.int64)


def _rows_of_split(arrays: Mapping[str, np.ndarray], split: str, num_rows: int) -> np.ndarray:
  names = arrays['split'].astype(str) if 'split' in arrays else np.empty(0, str)
  if names.shape != (num_rows,) or split not in names:
    raise ValueError(
      f"an array 'split' of {num_rows} strings must have {split!r}; there are {sorted(set(names))}"
    )
  return np.flatnonzero(names == split)


def _check(read: Representations) -> None:
  """Raises ValueError if a value is not finite or out of range."""
  starts = range(0, len(read.features), _CHECKED_ROWS)  # they may be a mapped file
  blocks = (read.features[start : start + _CHECKED_ROWS] for start in starts)
  if wrong := sum(int((~np.isfinite(block).all(axis=1)).sum()) for block in blocks):
    raise ValueError(f'there are {wrong} rows that are not finite')
  names = read.class_names
  annotations.check_range('', read.labels, None if names is None else len(names))
  if read.index.min() < 0:
    raise ValueError('index has an example id below 0')
