import numpy as np
import pytest
from PIL import Image


class ImageFiles:
  """Writes small image folders."""

  @staticmethod
  def write(folder, count, suffix='.png', seed=0):
    """Writes `count` RGB images of different sizes; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    paths = [folder / f'{i:03}{suffix}' for i in range(count)]
    for i, path in enumerate(paths):
      Image.fromarray(rng.integers(0, 256, (20 + i, 30, 3), np.uint8)).save(path)
    return paths

  @staticmethod
  def truncate(path):
    """Cuts an image file off in the middle."""
    encoded = path.read_bytes()
    path.write_bytes(encoded[: len(encoded) // 2])


@pytest.fixture(scope='session')
def image_files():
  return ImageFiles
