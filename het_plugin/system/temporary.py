"""Arrays in files without a name, which the system may take out of memory."""

import tempfile
from typing import Any

import numpy as np


def array(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
  """Zeros in a temporary file, which ends with the array; no number in `shape` is 0.

  >>> array((2, 3), 'float32').sum().item()
  0.0
  """
  with tempfile.TemporaryFile() as file:
    return np.memmap(file, dtype, 'w+', shape=shape)
