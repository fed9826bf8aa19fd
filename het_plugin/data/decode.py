"""Decoding of image files, many at a time."""

import concurrent.futures
import functools
import io
import os
from collections.abc import Callable, Iterable

import numpy as np
from PIL import Image


def decode_rgb(encoded: bytes) -> np.ndarray | None:
  """Decodes JPEG or PNG bytes to uint8 [h, w, 3]; None if they are not a whole image."""
  try:
    with Image.open(io.BytesIO(encoded), formats=('JPEG', 'PNG')) as image:
      return np.asarray(image.convert('RGB'))
  # What Pillow raises for bytes that are not an image, are cut off, or are damaged inside.
  except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
    return None


def decode_all(load: Callable[[object], bytes], items: Iterable) -> list[np.ndarray | None]:
  """decode_rgb(load(item)) of every item, in order, on all cores (Pillow releases the GIL)."""
  return list(_threads().map(lambda item: decode_rgb(load(item)), items))


@functools.cache
def _threads() -> concurrent.futures.ThreadPoolExecutor:
  return concurrent.futures.ThreadPoolExecutor(os.cpu_count(), 'decode')
