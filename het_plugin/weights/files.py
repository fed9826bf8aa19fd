"""Flat files of named arrays: .npz and .safetensors."""

from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors.numpy

SUFFIXES = ('.npz', '.safetensors')


def is_weights_file(path: str) -> bool:
  return str(path).endswith(SUFFIXES)


def read_arrays(path: str | Path) -> dict[str, np.ndarray]:
  """All arrays of a file, float32 where they are floating point.

  Raises:
    ValueError: for another suffix, a missing file, or one that cannot be read.
  """
  _check(path)
  if not Path(path).is_file():
    raise ValueError(f'weights file {path} does not exist')
  try:
    if str(path).endswith('.npz'):
      with np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    else:
      arrays = safetensors.numpy.load_file(path)
  except Exception as error:  # zipfile's, numpy's or safetensors' own
    raise ValueError(f'weights file {path} cannot be read: {error}') from error
  return {name: _widened(x) for name, x in arrays.items()}


def write_arrays(path: str | Path, arrays: Mapping[str, np.ndarray]) -> None:
  """Writes arrays by name.

  Raises:
    ValueError: for another suffix.
  """
  _check(path)
  Path(path).parent.mkdir(parents=True, exist_ok=True)
  arrays = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
  if str(path).endswith('.npz'):
    np.savez(path, **arrays)
  else:
    safetensors.numpy.save_file(arrays, path)


def _check(path):
  if not is_weights_file(path):
    raise ValueError(f'weights file {path} must end in {" or ".join(SUFFIXES)}')


def _widened(x):
  # numpy has no bfloat16: big_vision's files have it as two bytes of no type.
  if x.dtype == np.dtype('V2'):
    x = x.view(ml_dtypes.bfloat16)
  is_float = np.issubdtype(x.dtype, np.floating) or x.dtype == ml_dtypes.bfloat16
  return x.astype(np.float32) if is_float else x
