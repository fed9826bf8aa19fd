"""Flat files of named arrays: .npz and .safetensors."""

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from etils import epath

from het_plugin.system import run_files
from het_plugin.weights import hub

SUFFIXES = ('.npz', '.safetensors')
# Metadata of a .safetensors file of ours: its description as JSON, and a checksum.
_DESCRIPTION = 'het_plugin.parameters'
CHECKSUM = 'het_plugin.sha256'
# An .npz file whose arrays are larger than both is refused before they are unpacked.
_SMALL_BYTES = 2**28
_LARGEST_RATIO = 50
# safetensors' own reader for numpy does not know bfloat16.
SAFETENSORS_DTYPES = {
  'F64': np.float64,
  'F32': np.float32,
  'F16': np.float16,
  'BOOL': np.bool_,
  **{f'{kind}{bits}': f'{kind.lower()}{bits // 8}' for kind in 'IU' for bits in (8, 16, 32, 64)},
  'BF16': ml_dtypes.bfloat16,
}


def is_weights_file(path: epath.PathLike) -> bool:
  """Whether the name is of an .npz or .safetensors file, of the index of one in shards, or of a
  hub, 'hf:OWNER/NAME'.
  """
  return str(path).removesuffix(hub.INDEX).endswith(SUFFIXES) or hub.is_name(path)


def read_arrays(path: epath.PathLike, *, as_float32: bool = True) -> dict[str, np.ndarray]:
  """All arrays of a local or gs:// file, or of a model of a hub (`hub.local`).

  Floating-point arrays become float32, or with `as_float32=False` keep their types. Where
  model.safetensors is in shards, model.safetensors.index.json beside it tells which.

  Raises:
    ValueError: the file is missing or damaged, or was written by `write_arrays` and has another
      checksum or none.
  """
  path = hub.local(path)
  _check(path)
  if not epath.Path(path).exists():
    index = epath.Path(f'{path}{hub.INDEX}')
    if index.exists():
      return _read_shards(index, as_float32)
    raise ValueError(f'file {path} does not exist')
  content = epath.Path(path).read_bytes()
  try:
    if str(path).endswith('.npz'):
      arrays = _from_npz(content)
    else:
      arrays = {name: _from_safetensors(x) for name, x in safetensors.deserialize(content)}
      metadata = _metadata(content)
      if _DESCRIPTION in metadata:
        check_sum(metadata, metadata[_DESCRIPTION], arrays)
  except Exception as error:  # zipfile, numpy and safetensors each raise their own types
    raise ValueError(f'file {path} cannot be read: {error}') from error
  return {name: _typed(x, as_float32) for name, x in arrays.items()}


def _read_shards(index: epath.Path, as_float32: bool) -> dict[str, np.ndarray]:
  """The arrays of all shards that an index of the Hugging Face hub names."""
  try:
    shards = json.loads(index.read_text())['weight_map']
    names = sorted(set(shards.values()))
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(f'{index} cannot be read: it has no weight_map ({error})') from error
  if missing := [name for name in names if not (index.parent / name).exists()]:
    raise ValueError(
      f'{len(missing)} of the {len(names)} shards that {index} names are not beside it, such as '
      f'{missing[0]}'
    )
  arrays = {}
  for name in names:
    arrays |= read_arrays(index.parent / name, as_float32=as_float32)
  if lacking := shards.keys() - arrays:
    raise ValueError(f'the shards of {index} lack {len(lacking)} arrays, such as {min(lacking)}')
  return arrays


def write_arrays(
  path: epath.PathLike, arrays: Mapping[str, np.ndarray], about: Mapping[str, Any] | None = None
) -> None:
  """Writes arrays to a local or gs:// file.

  `about` are JSON values, which a .safetensors file keeps in its metadata, under
  'het_plugin.parameters', with a checksum of them and of the arrays. An .npz file has no place for
  them that other programs would not take for an array; it has the checksums of a zip archive.
  """
  _check(path)
  arrays = {name: as_stored(x) for name, x in arrays.items()}
  if str(path).endswith('.npz'):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # ty: ignore[invalid-argument-type]
    content = buffer.getvalue()
  else:
    text = json.dumps(about)
    metadata = {_DESCRIPTION: text, CHECKSUM: checksum(text, arrays)}
    content = safetensors.numpy.save(arrays, metadata)
  with run_files.replacing(path) as unfinished:
    unfinished.write_bytes(content)


def checksum(text: str, arrays: Mapping[str, np.ndarray]) -> str:
  """SHA-256 of a description and of arrays with their names, types and shapes."""
  found = hashlib.sha256(text.encode())
  for name, x in sorted(arrays.items()):
    found.update(f'{name} {x.dtype} {x.shape}'.encode())
    found.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
  return found.hexdigest()


def check_sum(metadata: Mapping[str, str], text: str, arrays: Mapping[str, np.ndarray]) -> None:
  """Raises ValueError if a .safetensors file of ours has another checksum than was written."""
  if CHECKSUM not in metadata:
    raise ValueError('it has no checksum, and was written with one: take the file as it was')
  if metadata[CHECKSUM] != checksum(text, arrays):
    raise ValueError('it is damaged: it does not have the checksum that was written')


def _metadata(content: bytes) -> dict[str, str]:
  """The metadata of a .safetensors file: 8 bytes say how long the header is that follows them."""
  length = int.from_bytes(content[:8], 'little')
  return json.loads(content[8 : 8 + length]).get('__metadata__', {})


def as_stored(x: np.ndarray) -> np.ndarray:
  """x in C order with the least byte first, as safetensors writes memory, whatever its values."""
  return np.asarray(x, x.dtype.newbyteorder('<'), order='C')


def save_safetensors(
  path: epath.PathLike, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
  """Writes a local .safetensors file that has the mode of the umask.

  The library makes one that only its owner may read.
  """
  path = epath.Path(path)
  path.touch()
  mode = os.stat(path).st_mode
  safetensors.numpy.save_file(dict(arrays), path, metadata=dict(metadata))
  os.chmod(path, mode)


def _check(path: epath.PathLike) -> None:
  if not str(path).endswith(SUFFIXES):
    raise ValueError(f'weights file {path} must end in {" or ".join(SUFFIXES)}')


def _from_npz(content: bytes) -> dict[str, np.ndarray]:
  if not zipfile.is_zipfile(io.BytesIO(content)):
    raise ValueError('it is not a zip archive, as .npz files are')
  with np.load(io.BytesIO(content), allow_pickle=False) as archive:
    # zipfile reads no more of a member than its header states.
    stated = sum(member.file_size for member in archive.zip.infolist())
    if stated > max(_SMALL_BYTES, _LARGEST_RATIO * len(content)):
      raise ValueError(
        f'its {len(content):,} bytes would become {stated:,}, more than {_LARGEST_RATIO} times as '
        'many, which no weights do'
      )
    return {name: archive[name] for name in archive.files}


def _from_safetensors(tensor: Mapping[str, Any]) -> np.ndarray:
  if tensor['dtype'] not in SAFETENSORS_DTYPES:
    raise ValueError(
      f'its type {tensor["dtype"]} must be one of {", ".join(SAFETENSORS_DTYPES)}: take the file '
      'that is not quantised'
    )
  return np.frombuffer(tensor['data'], SAFETENSORS_DTYPES[tensor['dtype']]).reshape(tensor['shape'])


def _typed(x: np.ndarray, as_float32: bool) -> np.ndarray:
  # numpy has no bfloat16: big_vision's files store it as two bytes without a type.
  if x.dtype == np.dtype('V2'):
    x = x.view(ml_dtypes.bfloat16)
  is_float = np.issubdtype(x.dtype, np.floating) or x.dtype == ml_dtypes.bfloat16
  return x.astype(np.float32) if as_float32 and is_float else x
