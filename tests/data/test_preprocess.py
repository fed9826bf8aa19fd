import numpy as np
import pytest

from het_plugin.data import preprocess
from het_plugin.data.tf_host import tf

PHOTO = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)


def apply(preprocessor, image=PHOTO, size=16, keys=((1, 2),)):
  """The images that a preprocessor makes of one image, for each key."""
  dataset = tf.data.Dataset.from_tensor_slices({'key': np.array(keys, np.int32)})
  static_image = tf.constant(image)

  def add_image(example):
    image = tf.identity(static_image)
    image.set_shape([None, None, static_image.shape[-1]])
    return {**example, 'image': image, 'label': tf.constant([3, -1])}

  dataset = preprocessor(dataset.map(add_image), {'image': size, 'label': 2})
  examples = list(dataset.as_numpy_iterator())
  assert all((example['label'] == [3, -1]).all() for example in examples)
  return [example['image'] for example in examples]


def test_inception_crop_is_a_function_of_the_key():
  keys = [(i, 0) for i in range(8)] + [(0, 0)]
  crops = apply(preprocess.inception_crop(), keys=keys)
  assert all(crop.shape == (16, 16, 3) and crop.dtype == np.uint8 for crop in crops)
  np.testing.assert_array_equal(crops[0], crops[-1])
  assert len({crop.tobytes() for crop in crops}) == 8


def test_inception_crop_respects_the_area():
  """Of a picture whose columns are their number, a crop shows the range of columns it spans."""
  ramp = np.tile(np.arange(200, dtype=np.float32)[None, :, None], (200, 1, 1))
  keys = [(i, 7) for i in range(64)]
  crops = apply(preprocess.inception_crop(area_range=(0.25, 0.5)), image=ramp, size=32, keys=keys)
  widths = np.array([np.ptp(crop) for crop in crops]) / 200
  # width / side = sqrt(area * aspect); the resize trims half an output pixel at either end
  assert widths.min() > np.sqrt(0.25 * 3 / 4) - 0.05
  assert widths.max() < np.sqrt(0.5 * 4 / 3) + 0.05
  assert widths.std() > 0.05


def apply_all(preprocessors, image, size):
  """What several preprocessors make of one image."""

  def together(dataset, lengths):
    for preprocessor in preprocessors:
      dataset = preprocessor(dataset, lengths)
    return dataset

  (made,) = apply(together, image=image, size=size)
  return made


@pytest.mark.parametrize('shape, size', [((300, 200, 3), 224), ((32, 32, 3), 15)])
def test_squash_is_the_public_few_shot_protocol(shape, size):
  """resize(256)|central_crop(224)|value_range(-1, 1), by tf.image and by hand."""
  image = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
  squashed = apply_all(preprocess.photo_evaluation('squash'), image, size)
  side = {224: 256, 15: 17}[size]
  margin = (side - size) // 2
  resized = tf.image.resize(image, [side, side], method='bilinear').numpy()
  expected = resized[margin : margin + size, margin : margin + size] / 127.5 - 1
  assert squashed.shape == (size, size, 3) and squashed.dtype == np.float32
  np.testing.assert_allclose(squashed, expected, atol=0.5 / 127.5 + 1e-5)  # levels are rounded


def test_flip_mirrors_half_of_the_images():
  flipped = apply(preprocess.flip_left_right(), keys=[(i, 0) for i in range(200)])
  mirrored = [np.array_equal(image, PHOTO[:, ::-1]) for image in flipped]
  straight = [np.array_equal(image, PHOTO) for image in flipped]
  assert sum(mirrored) + sum(straight) == 200
  assert 70 < sum(mirrored) < 130


@pytest.mark.parametrize('shape', [(40, 60, 3), (10, 300, 3)])
def test_resize_small_then_central_crop(shape):
  image = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
  (small,) = apply(preprocess.resize_small(1.25), image=image)
  assert min(small.shape[:2]) == 20
  assert abs(max(small.shape[:2]) - 20 * max(shape) / min(shape[:2])) <= 1
  (crop,) = apply(preprocess.central_crop(), image=small)
  assert crop.shape == (16, 16, 3)
  top, left = (small.shape[0] - 16) // 2, (small.shape[1] - 16) // 2
  np.testing.assert_array_equal(crop, small[top : top + 16, left : left + 16])


def test_channels(dtype=np.uint8):
  grey = np.arange(12).reshape(3, 4, 1).astype(dtype)
  (rgb,) = apply(preprocess.to_channels(3), image=grey)
  np.testing.assert_array_equal(rgb, np.repeat(grey, 3, axis=-1))
  (back,) = apply(preprocess.to_channels(1), image=rgb)
  np.testing.assert_allclose(back, grey, atol=1e-5)
  assert back.dtype == dtype and back.shape == grey.shape
  (same,) = apply(preprocess.to_channels(1), image=grey)
  np.testing.assert_array_equal(same, grey)


def test_bad_arguments():
  with pytest.raises(ValueError, match=r'area_range is \(0, 1\)'):
    preprocess.inception_crop(area_range=(0, 1))
