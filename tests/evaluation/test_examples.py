"""Images of examples by their ids."""

import io

import numpy as np
import pytest
from PIL import Image

from het_plugin import reporting
from het_plugin.evaluation.examples import SIDE, Examples


def test_photographs_of_a_folder(tmp_path):
  colours = [(200, 10, 30), (0, 120, 250), (90, 90, 90)]
  files = [tmp_path / 'train' / name for name in ('cat/1.png', 'cat/2.png', 'dog/1.png')]
  for file, colour in zip(files, colours, strict=True):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new('RGB', (200, 150), colour).save(file)
  (tmp_path / 'train' / 'dog' / '2.png').write_bytes(b'no image')
  examples = Examples.of(str(tmp_path), 'train[1:]')  # ids are those of the whole split
  assert examples.are_images and [examples.name(i) for i in range(3)] == [
    str(file.relative_to(tmp_path)) for file in files
  ]
  found = examples.read(np.array([1, 2, 3]), 32)
  assert found.labels[:2].tolist() == [[0], [1]] and found.images[2] is None
  for image, colour in zip(found.images[:2], colours[1:], strict=True):
    shown = np.asarray(Image.open(io.BytesIO(reporting.thumbnail_png(image))))
    whole = (SIDE * 3 // 4, SIDE, 3)  # 200 x 150 pixels, whatever a model would see of them
    np.testing.assert_array_equal(shown, np.broadcast_to(colour, whole))


def test_features_are_no_images(tmp_path):
  np.savez(tmp_path / 'x.npz', features=np.ones((20, 8), np.float32), label=np.arange(20) % 2)
  assert not Examples.of(f'features:{tmp_path / "x.npz"}', 'train').are_images
  with pytest.raises(ValueError, match='captions'):
    Examples.of('glyph_names', 'validation')
