"""Representations of a split, and the files that hold them.

Ours are .safetensors or .npz with the arrays

    features    float [N, D]
    label       int32 [N, L], padded with -1
    index       int64 [N], distinct example ids
    class_name  [K] strings, where they are known (.npz)
    provenance  JSON: where the features come from (.npz)

.safetensors holds no strings: there class names and provenance are in its metadata, as JSON under
'het_plugin'. Files made elsewhere may be without the last three, and may have other names for the
first two (`FEATURE_NAMES`, `LABEL_NAMES`), or any names where only one array is floating point
[N, D] and only one integers [N]. Features in a .npy file have their labels in another.
"""

import dataclasses
import json
import zipfile
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from etils import epath

from het_plugin import weights

FEATURE_NAMES = ('features', 'representations', 'embeddings', 'pre_logits', 'x')
LABEL_NAMES = ('label', 'labels', 'y', 'target', 'targets')
DTYPES = ('float32', 'bfloat16', 'float16')
SUFFIXES = ('.npz', '.safetensors', '.npy')
_METADATA = 'het_plugin'


@dataclasses.dataclass(frozen=True, eq=False)
class Representations:
  """A split, ascending by example id.

  Attributes:
    features: float [N, D].
    labels: int32 [N, L], padded with -1.
    index: integers [N], distinct example ids >= 0.
    class_names: of the K classes, where they are known.
    provenance: what made them, JSON-able: checkpoint, task, split, layer, ...
  """

  features: np.ndarray
  labels: np.ndarray
  index: np.ndarray
  class_names: tuple[str, ...] | None = None
  provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def label(self) -> np.ndarray:
    """The one label of each example, int32 [N].

    Raises:
      ValueError: an example has none or several.
    """
    count = (self.labels >= 0).sum(axis=1)
    if (count != 1).any():
      row = int(np.flatnonzero(count != 1)[0])
      raise ValueError(
        f'example {int(self.index[row])} has {int(count[row])} labels; each must have one'
      )
    return self.labels.max(axis=1)


def read_representations(source: str) -> Representations:
  """Reads a file.

  Args:
    source: PATH.npz, PATH.safetensors, or FEATURES.npy,LABELS.npy; then a split where the file has
      an array 'split' of strings [N]: PATH.npz:test.

  Raises:
    ValueError: a missing or wrong file, arrays that do not fit together, values that are not finite
      or out of range; one sentence that names the file.
  """
  path, split = partition_source(source)
  try:
    arrays, provenance, class_names = _read_file(path)
    found = _parse(arrays)
  except (ValueError, OSError) as error:
    message = str(error)
    raise ValueError(message if path in message else f'{path}: {message}') from error
  rows = _rows_of_split(path, arrays, split, len(found['features']))
  read = Representations(
    **{name: x if rows is None else x[rows] for name, x in found.items()},
    class_names=class_names,
    provenance=provenance,
  )
  _check(source, read)
  return read


def write_representations(path: epath.PathLike, representations: Representations) -> None:
  """Writes a local .npz or .safetensors, by the suffix, under another name until it is complete.

  Raises:
    ValueError: for another suffix.
  """
  names, provenance = representations.class_names, dict(representations.provenance)
  arrays = {
    'features': np.ascontiguousarray(representations.features),
    'label': np.ascontiguousarray(representations.labels, np.int32),
    'index': np.ascontiguousarray(representations.index, np.int64),
  }
  path = epath.Path(path)
  unfinished = path.with_name(f'.unfinished.{path.name}')
  path.parent.mkdir(parents=True, exist_ok=True)
  if path.suffix == '.npz':
    strings = {'provenance': np.array(json.dumps(provenance))}
    if names is not None:
      strings['class_name'] = np.array(names)
    with unfinished.open('wb') as stream:
      np.savez(stream, **arrays, **strings)
  elif path.suffix == '.safetensors':
    metadata = {_METADATA: json.dumps({'class_names': names, 'provenance': provenance})}
    # From the arrays' memory to the file: features may be mapped and larger than the host's.
    safetensors.numpy.save_file(arrays, unfinished, metadata=metadata)
  else:
    raise ValueError(f'representations file {path} must end in .npz or .safetensors')
  unfinished.replace(path)


def read_provenance(path: epath.PathLike) -> dict[str, Any]:
  """The provenance in a file of ours, without its arrays; empty where it has none.

  Raises:
    ValueError: the file cannot be read.
  """
  try:
    return _read_description(str(path))[0]
  except Exception as error:  # zipfile's, numpy's or safetensors' own
    raise ValueError(f'{path} cannot be read: {error}') from error


def split_names(path: str) -> tuple[str, ...]:
  """The distinct strings of the array 'split' of a .npz file; empty where there is none."""
  if not path.endswith('.npz') or not zipfile.is_zipfile(path):
    return ()
  with np.load(path, allow_pickle=False) as arrays:
    return tuple(np.unique(arrays['split'].astype(str)).tolist()) if 'split' in arrays else ()


def partition_source(source: str) -> tuple[str, str | None]:
  """(path, split or None) of what `read_representations` takes; other colons belong to the path."""
  path, colon, split = source.rpartition(':')
  if colon and path.endswith(SUFFIXES):
    return path, split
  return source, None


def _read_file(path: str) -> tuple[dict[str, np.ndarray], dict[str, Any], tuple[str, ...] | None]:
  """Arrays, provenance and class names."""
  if path.endswith('.npy'):
    return _read_npy(path), {}, None
  if not weights.is_weights_file(path):
    raise ValueError('representations must be in a file that ends in .npz, .safetensors or .npy')
  return weights.read_arrays(path), *_read_description(path)


def _read_description(path: str) -> tuple[dict[str, Any], tuple[str, ...] | None]:
  """Provenance and class names of a .npz or .safetensors file."""
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


def _parse(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  features = _find(
    arrays, FEATURE_NAMES, 'floating point [N, D]', lambda x: _is_float(x) and x.ndim == 2
  )
  others = {name: x for name, x in arrays.items() if x is not features and name != 'index'}
  labels = _find(
    others, LABEL_NAMES, 'integers [N]', lambda x: x.dtype.kind in 'iu' and x.ndim == 1
  )
  if not _is_float(features) or features.ndim != 2:
    raise ValueError(
      f'features are {features.dtype} {list(features.shape)}; they must be floating point [N, D]'
    )
  if labels.dtype.kind not in 'iu' or labels.ndim not in (1, 2) or len(labels) != len(features):
    raise ValueError(
      f'labels are {labels.dtype} {list(labels.shape)}; they must be integers [N] or [N, L] with '
      f'N = {len(features)}, the rows of the features'
    )
  index = arrays.get('index', np.arange(len(features)))
  if index.shape != features.shape[:1] or index.dtype.kind not in 'iu':
    raise ValueError(f'index is {index.dtype} {list(index.shape)}; it must be integers [N]')
  if labels.size and labels.max() > np.iinfo(np.int32).max:
    raise ValueError(f'label {labels.max()} is out of range; labels are class numbers')
  labels = labels.reshape(len(labels), labels.shape[1] if labels.ndim == 2 else 1)
  return {'features': features, 'labels': labels.astype(np.int32), 'index': index.astype(np.int64)}


def _find(arrays, names, description, fits) -> np.ndarray:
  named = [name for name in names if name in arrays] or [
    name for name, x in arrays.items() if fits(x)
  ]
  if len(named) != 1:
    shown = ', '.join(f'{name} {x.dtype} {list(x.shape)}' for name, x in arrays.items())
    raise ValueError(
      f'there must be one array named {" or ".join(names)}, or one of {description} only; there '
      f'are: {shown or "none"}'
    )
  return arrays[named[0]]


def _is_float(x: np.ndarray) -> bool:
  return x.dtype.kind == 'f' or x.dtype == ml_dtypes.bfloat16


def _rows_of_split(
  path: str, arrays: Mapping[str, np.ndarray], split: str | None, num_rows: int
) -> np.ndarray | None:
  if split is None:
    return None
  if 'split' not in arrays:
    raise ValueError(f"{path} has no array 'split', which {path}:{split} asks for")
  names = arrays['split'].astype(str)
  if names.shape != (num_rows,):
    raise ValueError(f'{path}: split is {list(names.shape)}; it must be [{num_rows}]')
  if split not in names:
    raise ValueError(f'{path} has no split {split!r}: choose from {sorted(set(names))}')
  return np.flatnonzero(names == split)


def _check(source: str, read: Representations) -> None:
  if not read.features.size:
    raise ValueError(f'{source} has no features: {list(read.features.shape)}')
  finite = np.isfinite(read.features).all(axis=1)
  if not finite.all():
    raise ValueError(f'{source} has {int((~finite).sum())} rows that are not finite')
  lowest = 0 if read.labels.shape[1] == 1 else -1
  names = read.class_names
  highest = np.iinfo(np.int32).max if names is None else len(names) - 1
  wrong = (read.labels < lowest) | (read.labels > highest)
  if wrong.any():
    row = int(np.flatnonzero(wrong.any(axis=1))[0])
    raise ValueError(
      f'{source}: label {int(read.labels[row][wrong[row]][0])} of row {row} is out of range; '
      f'labels are 0 .. {"K - 1" if names is None else highest}'
    )
  if len(np.unique(read.index)) != len(read.index) or read.index.min() < 0:
    raise ValueError(f'{source}: index must give each row an example id of its own, >= 0')
