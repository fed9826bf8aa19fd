"""Image preprocessing as seqio preprocessors (TensorFlow ops).

Each function returns a preprocessor of a dataset whose examples hold at least
  image  [h, w, C], float32 levels in [-1, 1] or uint8, sides may vary
  key    int32 [2], the example's own random key, from (seed, position in the global order)
Randomness is stateless: it depends only on `key`, so an example is the same on every host, in
every batch and after every restart, and differs between epochs. The image side comes from seqio's
`sequence_length['image']`.
"""

from het_plugin.data.tf_host import tf

_CROP_STREAM, _FLIP_STREAM = 1, 2  # folded into the example's key
_CROP_MARGIN = 256 / 224  # side before the central crop relative to the side after it


def inception_crop(
  area_range: tuple[float, float] = (0.05, 1.0), aspect_range: tuple[float, float] = (3 / 4, 4 / 3)
):
  """A random crop of the given relative area and aspect ratio, resized (Szegedy et al., 2015)."""
  if not 0 < area_range[0] <= area_range[1] <= 1:
    raise ValueError(f'area_range is {area_range}; it must satisfy 0 < low <= high <= 1.')

  def crop(image, key, size):
    begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
      tf.shape(image),
      tf.zeros([0, 0, 4], tf.float32),
      seed=tf.random.experimental.stateless_fold_in(key, _CROP_STREAM),
      area_range=area_range,
      aspect_ratio_range=aspect_range,
      min_object_covered=0.0,
      use_image_if_no_bounding_boxes=True,
    )
    cropped = tf.slice(image, begin, extent)
    cropped.set_shape([None, None, image.shape[-1]])
    return _resize(cropped, size, size)

  return _map_image(crop)


def flip_left_right():
  """Mirrors half of the images."""

  def flip(image, key, size):
    del size
    seed = tf.random.experimental.stateless_fold_in(key, _FLIP_STREAM)
    mirrored = tf.random.stateless_uniform([], seed) < 0.5
    return tf.cond(mirrored, lambda: tf.reverse(image, axis=[1]), lambda: image)

  return _map_image(flip)


def photo_evaluation(resize_mode: str = 'aspect'):
  """The evaluation preprocessors of photographs, uint8 of any size.

  Both modes resize to 8/7 of the side (256 for 224), crop the centre and map levels to [-1, 1];
  small images are enlarged.

  Args:
    resize_mode: 'aspect' keeps the aspect ratio: the shorter side becomes 8/7 of the side. 'squash'
      does not: both sides do, bilinear without antialiasing. This is the public few-shot protocol,
      big_vision's resize(256)|central_crop(224)|value_range(-1,1), except that levels are rounded
      here and truncated there.

  Raises:
    ValueError: the mode is unknown.
  """
  modes = {'aspect': resize_small(), 'squash': resize(_CROP_MARGIN, antialias=False)}
  if resize_mode not in modes:
    raise ValueError(f'resize_mode is {resize_mode!r}; it must be one of {sorted(modes)}.')
  return modes[resize_mode], central_crop(), value_range()


def resize(factor: float = 1.0, antialias: bool = True):
  """Resizes to a square of factor * side; does not keep the aspect ratio."""
  if factor <= 0:
    raise ValueError(f'factor is {factor}; it must be positive.')

  def squash(image, key, size):
    del key
    return _resize(image, round(factor * size), round(factor * size), antialias)

  return _map_image(squash)


def resize_small(factor: float = _CROP_MARGIN):
  """Resizes so that the shorter side is factor * side, keeping the aspect ratio."""
  if factor < 1:
    raise ValueError(f'factor is {factor}; it must be at least 1 to leave room for a central crop.')

  def shrink(image, key, size):
    del key
    height, width = tf.shape(image)[0], tf.shape(image)[1]
    shorter = tf.cast(tf.round(factor * size), tf.int32)
    height, width = (
      tf.maximum(shorter, height * shorter // tf.minimum(height, width)),
      tf.maximum(shorter, width * shorter // tf.minimum(height, width)),
    )
    return _resize(image, height, width)

  return _map_image(shrink)


def central_crop():
  """Crops the central side x side square; the image must be at least as large."""

  def crop(image, key, size):
    del key
    top = (tf.shape(image)[0] - size) // 2
    left = (tf.shape(image)[1] - size) // 2
    return image[top : top + size, left : left + size]

  return _map_image(crop)


def value_range(low: float = -1.0, high: float = 1.0):
  """Maps levels 0 .. 255 linearly to [low, high], as float32."""

  def scale(image, key, size):
    del key, size
    return tf.cast(image, tf.float32) * ((high - low) / 255) + low

  return _map_image(scale)


def to_channels(num_channels: int):
  """Converts grey (1) to RGB (3) or back (the luma of ITU-R BT.601)."""
  if num_channels not in (1, 3):
    raise ValueError(f'num_channels is {num_channels}; it must be 1 (grey) or 3 (RGB).')

  def convert(image, key, size):
    del key, size
    if image.shape[-1] == num_channels:
      return image
    if num_channels == 3:
      return tf.image.grayscale_to_rgb(image)
    luma = tf.tensordot(tf.cast(image, tf.float32), tf.constant([0.299, 0.587, 0.114]), 1)
    return _to_dtype(luma[..., None], image.dtype)

  return _map_image(convert)


def _map_image(fn):
  """Lifts fn(image, key, size) to a preprocessor."""

  def preprocessor(dataset: tf.data.Dataset, sequence_length) -> tf.data.Dataset:
    size = sequence_length['image']
    return dataset.map(
      lambda example: {**example, 'image': fn(example['image'], example['key'], size)},
      num_parallel_calls=tf.data.AUTOTUNE,
    )

  return preprocessor


def _resize(image, height, width, antialias=True):
  """Bilinear; keeps the dtype."""
  resized = tf.image.resize(image, [height, width], antialias=antialias)
  return _to_dtype(resized, image.dtype)


def _to_dtype(image, dtype):
  if dtype == tf.uint8:
    image = tf.clip_by_value(tf.round(image), 0, 255)
  return tf.cast(image, dtype)
