"""Decodes image files in parallel."""

import concurrent.futures
import functools
import io
import os
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from PIL import Image

_JPEG_MAGIC = b'\xff\xd8\xff'


def decode_rgb(encoded: bytes) -> np.ndarray | None:
  """Decodes JPEG or PNG bytes to uint8 [h, w, 3]; None if they are not a whole image."""
  try:
    with Image.open(io.BytesIO(encoded), formats=('JPEG', 'PNG')) as image:
      return np.asarray(image.convert('RGB'))
  # Pillow raises these for foreign, truncated and damaged files.
  except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
    return None


def decode_all(images: Sequence, keep_jpegs: bool) -> list[np.ndarray | bytes | None]:
  """Decodes the elements that are bytes, on all cores (Pillow releases the GIL).

  Args:
    images: arrays, None, or the bytes of JPEG or PNG files.
    keep_jpegs: whether JPEG files stay bytes, damaged ones included.
  """
  decoded = list(images)
  pending = {
    i: _threads().submit(decode_rgb, image)
    for i, image in enumerate(images)
    if isinstance(image, bytes) and not (keep_jpegs and image.startswith(_JPEG_MAGIC))
  }
  for i, future in pending.items():
    decoded[i] = future.result()
  return decoded


def load_all(load: Callable[[object], bytes], items: Iterable) -> list[bytes]:
  """[load(item) for item in items], in parallel threads."""
  return list(_threads().map(load, items))


@functools.cache
def _threads() -> concurrent.futures.ThreadPoolExecutor:
  return concurrent.futures.ThreadPoolExecutor(os.cpu_count(), 'decode')
