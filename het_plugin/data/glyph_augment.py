"""Random affine maps, blur, contrast and noise for whole batches of glyphs, in numpy.

All draws of an example are functions of its key (counter_random), and all operations are
element-wise, so an example is bit-identical in every batch.
"""

import numpy as np

from het_plugin.data import counter_random

_MAX_ROTATION = np.deg2rad(6.0)
_SCALE = (0.85, 1.1)
_MAX_ASPECT = 0.1  # relative stretch of the width against the height
_MAX_SHEAR = 0.1
_MAX_TRANSLATION = 0.04  # of the side
_MAX_BLUR = 0.25  # outer weight of the three-tap kernel: a standard deviation of 0.7 pixels
_MAX_NOISE = 0.08  # standard deviation, where black to white is 1
_MIN_CONTRAST = 0.5

# Meaning of an example's uniform draws; the first six belong to the affine map.
_BLUR = 6
_CONTRAST = 7
_NOISE = 8
_LEVEL = 9
_NUM_DRAWS = 10
_NOISE_STREAM = 2**32  # folded into the key; far from the counters of the other draws
_CHUNK = 64  # examples processed at a time, so that temporaries stay in the cache


def augment(glyphs: np.ndarray, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
  """Augmented images, float32 [B, S, S, 1] in [-1, 1], of rows of GlyphBank.images with keys."""
  side = glyphs.shape[1] - 2
  images = np.empty((len(rows), side, side, 1), np.float32)
  for start in range(0, len(rows), _CHUNK):
    chunk = slice(start, start + _CHUNK)
    images[chunk, :, :, 0] = _augment_chunk(glyphs, rows[chunk], keys[chunk])
  return images


def difficulty(keys: np.ndarray) -> np.ndarray:
  """How hard each image is to read, float64 [B] in [1/2, 3): (1/2 + n) / c.

  c is the contrast, from 1/2 to 1, and n the noise as a fraction of its maximum.
  """
  u = counter_random.uniform(keys, _NUM_DRAWS).astype(np.float64)
  return (0.5 + u[:, _NOISE]) / _contrast(u)


def _contrast(u: np.ndarray) -> np.ndarray:
  return _MIN_CONTRAST + (1 - _MIN_CONTRAST) * u[:, _CONTRAST]


def _augment_chunk(glyphs: np.ndarray, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
  side = glyphs.shape[1] - 2
  u = counter_random.uniform(keys, _NUM_DRAWS)  # [B, 10]
  images = _sample(glyphs, rows, _inverse_affine(u[:, :6], side))
  weight = (_MAX_BLUR * u[:, _BLUR])[:, None, None]
  images = _blur(images, weight)

  contrast = _contrast(u)
  # The darkest level is drawn so that black and white stay within range before the noise.
  darkest = (1 - contrast) * u[:, _LEVEL]
  deviation = _MAX_NOISE * u[:, _NOISE]
  noise_keys = counter_random.fold(keys, _NOISE_STREAM)
  noise = counter_random.standard_normal(noise_keys, side * side).reshape(images.shape)
  # Levels in [-1, 1]: 2 x - 1 folded into the factors.
  images *= (contrast * (2 / 255))[:, None, None]
  images += (2 * darkest - 1)[:, None, None]
  images += noise * (2 * deviation)[:, None, None]
  return np.clip(images, -1, 1, out=images)


def _inverse_affine(u: np.ndarray, side: int) -> tuple[np.ndarray, ...]:
  """Maps output pixels to source pixels: y' = a y + b x + c, x' = d y + e x + f, each [B].

  u: draws in [0, 1), [B, 6]. y' and x' are coordinates in the bordered glyph; y and x count
  from the centre of the image.
  """
  symmetric = 2 * u - 1
  angle = _MAX_ROTATION * symmetric[:, 0]
  scale = _SCALE[0] + (_SCALE[1] - _SCALE[0]) * u[:, 1]
  aspect = 1 + _MAX_ASPECT * symmetric[:, 2]
  shear = _MAX_SHEAR * symmetric[:, 3]
  shift_y, shift_x = side * _MAX_TRANSLATION * symmetric[:, 4:6].T
  cos = np.cos(angle)
  sin = np.sin(angle)
  # inverse of scale * rotation * [[1, 0], [shear, aspect]] on (y, x)
  a = cos / scale
  b = sin / scale
  d = (-sin / scale - shear * a) / aspect
  e = (cos / scale - shear * b) / aspect
  centre = (side - 1) / 2 + 1
  c = centre - a * shift_y - b * shift_x
  f = centre - d * shift_y - e * shift_x
  return tuple(x.astype(np.float32) for x in (a, b, c, d, e, f))


def _sample(glyphs: np.ndarray, rows: np.ndarray, affine: tuple[np.ndarray, ...]) -> np.ndarray:
  """Bilinear samples of the glyphs, float32 [B, S, S] in [0, 255]."""
  padded = glyphs.shape[1]
  side = padded - 2
  a, b, c, d, e, f = (x[:, None] for x in affine)
  grid = np.arange(side, dtype=np.float32) - np.float32((side - 1) / 2)
  y = (a * grid + c)[:, :, None] + (b * grid)[:, None, :]  # [B, S, S]
  x = (d * grid + f)[:, :, None] + (e * grid)[:, None, :]
  np.clip(y, 0, np.float32(padded - 1.001), out=y)
  np.clip(x, 0, np.float32(padded - 1.001), out=x)
  row = np.floor(y)
  column = np.floor(x)
  y -= row
  x -= column
  # The top left pixel's number in its glyph, exact in float32 for sides below 4,096.
  row *= padded
  row += column
  corner = row.astype(np.intp)
  corner += (np.arange(len(rows)) * padded**2)[:, None, None]
  levels = glyphs[rows].astype(np.float32)

  def pixels() -> np.ndarray:
    return levels.take(corner, mode='clip')  # all are inside; other modes take longer

  top = pixels()
  corner += 1
  top_right = pixels()
  corner += padded
  right = pixels()
  corner -= 1
  bottom = pixels()
  top += x * (top_right - top)
  bottom += x * (right - bottom)
  return top + y * (bottom - top)


def _blur(images: np.ndarray, weight: np.ndarray) -> np.ndarray:
  """Convolves [B, S, S] along y and x with (weight, 1 - 2 weight, weight), weight [B, 1, 1]."""
  blurred = images * (1 - 2 * weight)
  weighted = images * weight
  blurred[:, 1:] += weighted[:, :-1]
  blurred[:, :-1] += weighted[:, 1:]
  weighted = blurred * weight
  blurred *= 1 - 2 * weight
  blurred[:, :, 1:] += weighted[:, :, :-1]
  blurred[:, :, :-1] += weighted[:, :, 1:]
  return blurred
