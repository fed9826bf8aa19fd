import io

import numpy as np
import pytest
from PIL import Image

from het_plugin.data import preprocess

PHOTO = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)


def apply(preprocessor, image=PHOTO, size=16, seed=0):
  return np.asarray(preprocessor(image, np.random.default_rng(seed), size))


@pytest.mark.parametrize('image', [PHOTO, PHOTO[..., :2], PHOTO / np.float32(255)])
def test_every_kind_of_image_keeps_its_type(image):
  for preprocessor in (
    preprocess.Resize(),
    preprocess.CentralCrop(),
    preprocess.CentralCrop('squash'),
    preprocess.InceptionCrop(),
    preprocess.PadCrop(),
  ):
    made = apply(preprocessor, image)
    assert made.shape == (16, 16, image.shape[-1]) and made.dtype == image.dtype, preprocessor
    assert np.ptp(made) > 0.2 * np.ptp(image)


def test_files_are_decoded_and_resized_as_by_pillow():
  picture = Image.fromarray(np.kron(PHOTO[:10, :15], np.ones((8, 8, 1), np.uint8)))
  for settings in ({'format': 'JPEG', 'quality': 90}, {'format': 'PNG'}):
    file = io.BytesIO()
    picture.save(file, **settings)
    expected = Image.open(file)
    image = preprocess.decode(file.getvalue())
    np.testing.assert_array_equal(image, expected)
    for size, box in (((200, 30), (3, 5, 60, 71)), ((24, 20), (0.5, 1.25, 118.5, 79.75))):
      made = preprocess.resized(image, *size[::-1], box)
      reference = expected.resize(size, Image.Resampling.BILINEAR, box)
      np.testing.assert_allclose(made, np.asarray(reference), atol=2)  # rounded twice
    assert preprocess.decode(file.getvalue()[:-100]) is None
  assert preprocess.decode(b'') is preprocess.decode(b'GIF89a not an image of ours') is None
  for mode, form in (('L', 'JPEG'), ('CMYK', 'JPEG'), ('P', 'PNG')):
    file = io.BytesIO()
    picture.convert(mode).save(file, form)
    expected = np.asarray(Image.open(file).convert('RGB'))
    np.testing.assert_allclose(preprocess.decode(file.getvalue()), expected, atol=1)


def test_inception_crop_is_a_function_of_the_generator():
  crops = [apply(preprocess.InceptionCrop(), seed=seed) for seed in [*range(8), 0]]
  np.testing.assert_array_equal(crops[0], crops[-1])
  assert len({crop.tobytes() for crop in crops}) == 8


def test_inception_crop_respects_the_area():
  """Of a picture whose columns are their number, a crop shows the range of columns it spans."""
  ramp = np.tile(np.arange(200, dtype=np.float32)[None, :, None], (200, 1, 1))
  crop = preprocess.InceptionCrop(area_range=(0.25, 0.5))
  widths = np.array([np.ptp(apply(crop, ramp, 32, seed)) for seed in range(64)]) / 200
  # width / side = sqrt(area * aspect); the resize trims half an output pixel at either end
  assert widths.min() > np.sqrt(0.25 * 3 / 4) - 0.05
  assert widths.max() < np.sqrt(0.5 * 4 / 3) + 0.05
  assert widths.std() > 0.05


def test_pad_crop_moves_the_image_over_black():
  white = np.full((16, 16, 1), 255, np.uint8)
  moved = np.array([apply(preprocess.PadCrop(), white, seed=seed) for seed in range(100)])[..., 0]
  assert set(np.unique(moved)) == {0, 255}
  borders = {(int((x[:, 8] == 0).sum()), int((x[8] == 0).sum())) for x in moved}
  assert borders == {(i, j) for i in range(3) for j in range(3)}


def test_squash_is_the_public_few_shot_protocol():
  """resize(256)|central_crop(224), by tf.image."""
  import tensorflow as tf

  image = np.random.default_rng(1).integers(0, 256, (300, 200, 3), np.uint8)
  expected = tf.image.resize(image, [256, 256], method='bilinear').numpy()[16:240, 16:240]
  squashed = apply(preprocess.CentralCrop('squash'), image, 224)
  np.testing.assert_allclose(squashed, expected, atol=1.01)  # levels are rounded


@pytest.mark.parametrize('shape', [(40, 60), (10, 300)])
def test_the_central_crop_keeps_the_aspect_and_is_centred(shape):
  height, width = shape
  rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing='ij')
  image = np.stack([rows, columns], -1).astype(np.float32)
  crop = apply(preprocess.CentralCrop(), image, 32)
  scale = min(shape) / round(32 * 256 / 224)
  for axis, length in enumerate(shape):
    line = crop[:, 16, 0] if axis == 0 else crop[16, :, 1]
    np.testing.assert_allclose(line.mean(), (length - 1) / 2, atol=0.1)
    np.testing.assert_allclose(np.diff(line)[4:-4], scale, atol=0.05 * scale)


def test_flip_mirrors_half_of_the_images():
  flipped = [apply(preprocess.Flip(), seed=seed) for seed in range(200)]
  mirrored = [np.array_equal(image, PHOTO[:, ::-1]) for image in flipped]
  straight = [np.array_equal(image, PHOTO) for image in flipped]
  assert sum(mirrored) + sum(straight) == 200
  assert 70 < sum(mirrored) < 130


def test_grey_images_of_16_bits_keep_their_levels():
  levels = np.arange(256, dtype=np.uint16).reshape(16, 16)
  png = io.BytesIO()
  Image.fromarray(257 * levels).save(png, 'PNG')
  np.testing.assert_array_equal(preprocess.decode(png.getvalue())[..., 0], levels)


def test_channels():
  grey = np.arange(12, dtype=np.uint8).reshape(3, 4, 1)
  rgb = apply(preprocess.ToChannels(3), grey)
  np.testing.assert_array_equal(rgb, np.repeat(grey, 3, axis=-1))
  back = apply(preprocess.ToChannels(1), rgb)
  np.testing.assert_array_equal(back, grey)
  assert back.dtype == np.uint8


def test_bad_arguments():
  with pytest.raises(ValueError, match=r'area_range is \(0, 1\)'):
    preprocess.InceptionCrop(area_range=(0, 1))
  with pytest.raises(ValueError, match="mode is 'stretch'"):
    preprocess.CentralCrop('stretch')
