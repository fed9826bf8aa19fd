"""Decoding, resizing and augmentation of one image, in numpy.

An image is an array [h, w, C]: uint8, or float32 in [-1, 1]. A preprocessor is a function
(image, rng, size) -> image, where `rng` is the example's own generator, derived from (seed,
position in the global order), and `size` the side of the model's images. An example is therefore
the same on every host, in every batch and after every restart. An image that is not size x size
after the last preprocessor is resized, and uint8 levels become float32 in [-1, 1].
"""

import contextlib
import dataclasses
import io
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

import cykooz_resizer as fast
import numpy as np
import simplejpeg
from PIL import Image

from het_plugin.system import ranges, sheets

Preprocessor = Callable[[np.ndarray, np.random.Generator, int], np.ndarray]

MODES = {1: 'L', 3: 'RGB', 4: 'RGBA'}  # Pillow's, by number of channels
_CROP_MARGIN = 256 / 224  # side before the central crop relative to the side after it
_LARGEST = 2**24  # pixels of a resized image before its crop, at most
_SAMPLE = 16  # number of images whose size is read
_ATTEMPTS = 20  # random boxes that a crop tries to fit into the image
_BILINEAR = fast.ResizeAlg.convolution(fast.FilterType.bilinear)


def decode(encoded: bytes, channels: int = 3) -> np.ndarray | None:
  """Decodes a JPEG, PNG or WebP file to uint8 [h, w, 1, 3 or 4]; None if it is no whole image."""
  if channels == 3 and encoded[:2] == b'\xff\xd8':  # a JPEG file
    with contextlib.suppress(ValueError):  # damaged or CMYK: Pillow decides
      height, width, *_ = simplejpeg.decode_jpeg_header(encoded)
      if height * width <= Image.MAX_IMAGE_PIXELS:
        return simplejpeg.decode_jpeg(encoded)
  try:
    image = Image.open(io.BytesIO(encoded), formats=('JPEG', 'PNG', 'WEBP'))
    if image.mode.startswith('I'):  # 16-bit grey: convert would clip values above 255
      image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    image = image.convert(MODES[channels])
    return np.asarray(image).reshape(*image.size[::-1], channels)
  # Pillow raises these for foreign, truncated and damaged files.
  except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
    return None


def sampled(examples: Sequence) -> Sequence:
  """Some of the examples, at equal distances."""
  return examples[:: max(len(examples) // _SAMPLE, 1)]


def typical_side(examples: Sequence, read: Callable[[Sequence], Iterable[bytes | None]]) -> float:
  """The median of the shorter sides of some images, in pixels; infinite if none can be read.

  `read` gives the encoded images of some of the examples, such as files or numbers of rows.
  """
  images = map(decode, filter(None, read(sampled(examples))))
  sides = [min(image.shape[:2]) for image in images if image is not None]
  return float(np.median(sides)) if sides else np.inf


def resized(
  image: np.ndarray,
  height: int,
  width: int,
  box: tuple[float, float, float, float] | None = None,
  antialias: bool = True,
) -> np.ndarray:
  """Bilinear samples of an image, or of a box of it, [height, width, C]; keeps the levels' type.

  `box` is left, top, right and bottom in pixels or fractions of them; with `antialias` the filter
  covers all pixels when the image becomes smaller.
  """
  if box is None and image.shape[:2] == (height, width):
    return image
  h, w = image.shape[:2]
  left, top, right, bottom = box = box or (0, 0, w, h)
  if image.dtype == np.uint8 and image.shape[-1] == 3 and antialias:
    # Pillow's algorithm with vector instructions; rounding differs by one or two levels.
    crop = fast.CropBox(left, top, min(right - left, w - left), min(bottom - top, h - top))
    options = fast.ResizeOptions(_BILINEAR, use_alpha=False, crop_box=crop)
    made = fast.ImageData(width, height, fast.PixelType.U8x3)
    pixels = fast.ImageData(w, h, fast.PixelType.U8x3, image.tobytes())
    fast.Resizer().resize(pixels, made, options)
    return np.frombuffer(made.get_buffer(), np.uint8).reshape(height, width, 3)
  bilinear = Image.Resampling.BILINEAR
  if antialias:
    return _by_pillow(image, height, width, bilinear, box)
  planes = [Image.fromarray(np.ascontiguousarray(x)) for x in np.moveaxis(image, -1, 0)]
  affine = ((right - left) / width, 0, left, 0, (bottom - top) / height, top)
  kind = Image.Transform.AFFINE
  return np.stack([x.transform((width, height), kind, affine, bilinear) for x in planes], -1)


def _by_pillow(
  image: np.ndarray,
  height: int,
  width: int,
  filter: Image.Resampling,
  box: tuple[float, float, float, float] | None = None,
) -> np.ndarray:
  """An image, or a box of it, as Pillow resizes it, [height, width, C]."""
  if image.dtype == np.uint8 and image.shape[-1] == 3:
    picture = Image.fromarray(np.ascontiguousarray(image))
    return np.asarray(picture.resize((width, height), filter, box))
  planes = [Image.fromarray(np.ascontiguousarray(x)) for x in np.moveaxis(image, -1, 0)]
  return np.stack([x.resize((width, height), filter, box) for x in planes], -1)


@dataclasses.dataclass(frozen=True)
class Resize:
  """Resizes to a square; does not keep the aspect ratio."""

  def __call__(self, image: np.ndarray, rng: np.random.Generator, size: int) -> np.ndarray:
    return resized(image, size, size)


@dataclasses.dataclass(frozen=True)
class CentralCrop:
  """Crops the centre of an image that is first resized to 8/7 of the side (256 for 224).

  mode: 'aspect' keeps the aspect ratio: the shorter side becomes 8/7 of the side. 'squash' does
    not: both sides do, bilinear without antialiasing. This is the public few-shot protocol,
    big_vision's resize(256)|central_crop(224)|value_range(-1,1), except that levels are rounded
    here.
  """

  mode: str = 'aspect'

  def __post_init__(self):
    if self.mode not in ('aspect', 'squash'):
      raise ValueError(f"mode is {self.mode!r}; it must be 'aspect' or 'squash'.")

  def __call__(self, image: np.ndarray, rng: np.random.Generator, size: int) -> np.ndarray:
    height, width = image.shape[:2]
    before = round(_CROP_MARGIN * size)
    scales = height / before, width / before  # pixels of the image per pixel of the result
    if self.mode == 'aspect':
      scales = (min(scales),) * 2
      top = (height - scales[0] * size) / 2
      left = (width - scales[1] * size) / 2
    else:
      top, left = (scale * ((before - size) // 2) for scale in scales)
    box = left, top, left + scales[1] * size, top + scales[0] * size
    return resized(image, size, size, box, antialias=self.mode == 'aspect')


@dataclasses.dataclass(frozen=True)
class ResizeAndCrop:
  """Resizes a photograph and takes its centre as timm, open_clip and transformers do: by Pillow,
  with their rounding of sizes.

  mode: open_clip's names. 'shortest' makes the shorter side size / crop_fraction pixels and keeps
    the aspect ratio. 'squash' makes both sides so. 'longest' makes the longer side so, and pads.
    'patches' (NaFlex) keeps the aspect, without a crop: both sides are rounded up to whole patches
    at the largest scale that gives at most max_patches of them, which are laid into a sheet
    (`system.sheets`).
  crop_fraction: side of the image relative to that before the crop.
  filter: Pillow's, which covers all pixels when the image becomes smaller.
  offset: where half a pixel is left over, the crop begins at the 'even' one of the two pixels
    (torchvision), or at the one below, 'down' (transformers).
  fill: the levels of the three channels beside the photograph, in 0 .. 255.
  patch_size, max_patches: of the mode 'patches', the side of a patch in pixels, and their number.
  """

  mode: Literal['shortest', 'squash', 'longest', 'patches'] = 'shortest'
  crop_fraction: Annotated[float, '(0, 1]'] = 1.0
  filter: Literal['nearest', 'box', 'bilinear', 'hamming', 'bicubic', 'lanczos'] = 'bicubic'
  offset: Literal['even', 'down'] = 'even'
  fill: tuple[int, int, int] = (0, 0, 0)
  patch_size: ranges.Count = 16
  max_patches: ranges.Count = 256

  def __post_init__(self):
    ranges.check(self)

  def check(self, size: int) -> None:
    """Raises ValueError if images of this side are no sheets of `max_patches` patches."""
    side = sheets.side_of(self.max_patches, self.patch_size)
    if self.mode == 'patches' and size != side:
      raise ValueError(
        f'image_size={size} must be {side} for ResizeAndCrop.max_patches={self.max_patches} of '
        f'{self.patch_size} pixels a side: an image has one row and one column of patches more '
        'than the smallest square that holds them'
      )

  def __call__(self, image: np.ndarray, rng: np.random.Generator, size: int) -> np.ndarray:
    if self.mode == 'patches':
      return self._sheet(image, size)
    shape = image.shape[:2]
    before = math.floor(size / self.crop_fraction)
    if self.mode == 'squash':
      sides = (before, before)
    elif self.mode == 'shortest':
      sides = tuple(int(before * x / min(shape)) for x in shape)
    else:
      scale = max(x / before for x in shape)
      sides = tuple(max(round(x / scale), 1) for x in shape)
    halves = [(side - size) / 2 for side in sides]
    starts = [round(half) if self.offset == 'even' else math.floor(half) for half in halves]
    filter = Image.Resampling[self.filter.upper()]
    if math.prod(sides) > _LARGEST:  # of a very narrow photograph: one level from the whole
      scales = np.divide(shape, sides)
      top, left = starts * scales
      bottom, right = (np.asarray(starts) + size) * scales
      image = _by_pillow(image, size, size, filter, (left, top, right, bottom))
    else:
      image = _by_pillow(image, *sides, filter)
      top, left = (max(start, 0) for start in starts)
      image = image[top : top + size, left : left + size]
    if image.dtype != np.uint8:
      image = image.clip(-1, 1)  # as levels are, beyond which bicubic samples go
    if image.shape[:2] == (size, size):
      return image
    fill = np.asarray(self.fill[: image.shape[-1]])
    fill = fill if image.dtype == np.uint8 else 2 / 255 * fill - 1
    padded = np.empty((size, size, image.shape[-1]), image.dtype)
    padded[...] = fill
    top, left = ((size - x) // 2 for x in image.shape[:2])
    padded[top : top + image.shape[0], left : left + image.shape[1]] = image
    return padded

  def _sheet(self, image: np.ndarray, size: int) -> np.ndarray:
    """The patches of an image, row by row, and the size of its grid, in a square of patches."""
    p = self.patch_size
    rows, columns = patch_grid(image.shape[0], image.shape[1], p, self.max_patches)
    image = _by_pillow(image, rows * p, columns * p, Image.Resampling[self.filter.upper()])
    channels = image.shape[-1]
    empty = 0
    if image.dtype != np.uint8:
      image = image.clip(-1, 1)
      empty = -1
    side = size // p  # n + 1
    sheet = np.full((side * side, p, p, channels), empty, image.dtype)
    patches = image.reshape(rows, p, columns, p, channels).swapaxes(1, 2)
    sheet[: rows * columns] = patches.reshape(-1, p, p, channels)
    sheet = sheet.reshape(side, side, p, p, channels).swapaxes(1, 2).reshape(size, size, channels)
    levels = np.array([rows >> 8, rows & 255, columns >> 8, columns & 255])
    sheet[-1, -4:, 0] = levels if image.dtype == np.uint8 else 2 / 255 * levels - 1
    return sheet


def check_images(resize: Any, model: Any, reader: str) -> None:
  """Raises ValueError if the backbone of the model of `reader` takes other images than `resize`
  makes.

  `resize` is as in DatasetConfig. Only `ResizeAndCrop(mode='patches')` makes sheets, and only a
  backbone with `naflex` takes them.
  """
  kinds = 'squares', 'pictures of any aspect (NaFlex)'
  makes = isinstance(resize, ResizeAndCrop) and resize.mode == 'patches'
  backbone = getattr(model, 'backbone', None)  # other hosts' models have none
  takes = bool(getattr(backbone, 'naflex', None))
  if makes != takes:
    wanted = "resize must be ResizeAndCrop(mode='patches')" if takes else 'take another mode'
    raise ValueError(
      f'resize={resize!r} makes {kinds[makes]}, and {reader} takes {kinds[takes]}: {wanted}'
    )
  if backbone and takes and resize.patch_size != backbone.patch_size:
    raise ValueError(
      f'ResizeAndCrop.patch_size={resize.patch_size} must be {backbone.patch_size}, as in {reader}'
    )


def check_sheets(image: np.ndarray, model: Any, reader: str) -> None:
  """Raises ValueError if the backbone of the model of `reader` takes sheets, and an image is none.

  `image` is float32 [B, H, W, C] in [-1, 1].
  """
  backbone = getattr(model, 'backbone', None)
  if backbone is None or not getattr(backbone, 'naflex', None):
    return
  num_patches = (image.shape[1] // backbone.patch_size - 1) ** 2
  if len(wrong := np.flatnonzero(~sheets.is_sheet(np.asarray(image), num_patches))):
    raise ValueError(
      f"batch['image'][{wrong[0]}] is no sheet of patches, which {reader} takes (NaFlex): make it "
      "by ResizeAndCrop(mode='patches')"
    )


def patch_grid(height: int, width: int, patch_size: int, max_patches: int) -> tuple[int, int]:
  """Rows and columns of patches of an image at the largest scale that gives at most so many.

  Transformers and timm bisect scales to 1e-5, which can fall short of the largest by a patch; so
  does this.
  """

  def at(scale: float) -> tuple[int, int]:
    rows, columns = (max(math.ceil(scale * x / patch_size), 1) for x in (height, width))
    return rows, columns

  low = 1e-6
  high = 100.0
  while high - low >= 1e-5:
    middle = (low + high) / 2
    if math.prod(at(middle)) <= max_patches:
      low = middle
    else:
      high = middle
  return at(low)


@dataclasses.dataclass(frozen=True)
class InceptionCrop:
  """A random crop of a relative area and aspect ratio, resized (Szegedy et al., 2015).

  keep_aspect: whether the crop stays as it is, which NaFlex towers need, in place of a square.
  """

  area_range: tuple[float, float] = (0.05, 1.0)
  aspect_range: tuple[float, float] = (3 / 4, 4 / 3)
  keep_aspect: bool = False

  def __post_init__(self):
    if not 0 < self.area_range[0] <= self.area_range[1] <= 1:
      raise ValueError(f'area_range is {self.area_range}; it must satisfy 0 < low <= high <= 1.')

  def __call__(self, image: np.ndarray, rng: np.random.Generator, size: int) -> np.ndarray:
    box = random_box(image, rng, self.area_range, self.aspect_range)
    if self.keep_aspect:
      left, top, right, bottom = box
      return image[top:bottom, left:right]
    return resized(image, size, size, box)


def random_box(
  image: np.ndarray,
  rng: np.random.Generator,
  area_range: tuple[float, float],
  aspect_range: tuple[float, float],
) -> tuple[int, int, int, int]:
  """Left, top, right and bottom of a random box; the whole image if none fits into it."""
  height, width = image.shape[:2]
  for _ in range(_ATTEMPTS):
    area = height * width * rng.uniform(*area_range)
    aspect = rng.uniform(*aspect_range)
    w = max(round((area * aspect) ** 0.5), 1)
    h = max(round((area / aspect) ** 0.5), 1)
    if w <= width and h <= height:
      left = rng.integers(width - w + 1)
      top = rng.integers(height - h + 1)
      return left, top, left + w, top + h
  return 0, 0, width, height


@dataclasses.dataclass(frozen=True)
class PadCrop:
  """Resizes to a square, pads it with black and crops a random square of its side.

  padding: width of the border relative to the side; 1/8 is the usual 4 of 32 pixels.
  """

  padding: float = 1 / 8

  def __call__(self, image: np.ndarray, rng: np.random.Generator, size: int) -> np.ndarray:
    image = resized(image, size, size)
    border = round(self.padding * size)
    black = 0 if image.dtype == np.uint8 else -1
    padded = np.pad(image, [(border, border)] * 2 + [(0, 0)], constant_values=black)
    top, left = rng.integers(2 * border + 1, size=2)
    return padded[top : top + size, left : left + size]


@dataclasses.dataclass(frozen=True)
class Flip:
  """Mirrors half of the images, left to right."""

  def __call__(self, image: np.ndarray, rng: np.random.Generator, size: int) -> np.ndarray:
    return np.take(image, np.arange(image.shape[1])[::-1], 1) if rng.integers(2) else image


@dataclasses.dataclass(frozen=True)
class ToChannels:
  """Converts grey (1) to RGB (3) or back (the luma of ITU-R BT.601)."""

  num_channels: int

  def __post_init__(self):
    if self.num_channels not in (1, 3):
      raise ValueError(f'num_channels is {self.num_channels}; it must be 1 (grey) or 3 (RGB).')

  def __call__(self, image: np.ndarray, rng: np.random.Generator, size: int) -> np.ndarray:
    if image.shape[-1] == self.num_channels:
      return image
    if self.num_channels == 3:
      return np.repeat(image, 3, axis=-1)
    luma = image @ np.array([0.299, 0.587, 0.114], np.float32)
    return (np.round(luma) if image.dtype == np.uint8 else luma).astype(image.dtype)[..., None]


def to_levels(image: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
  """float32 levels in [-1, 1] of uint8 images; other images have such levels already."""
  if out is None:
    if image.dtype == np.float32:
      return image
    out = np.empty(image.shape, np.float32)
  out[...] = image
  if image.dtype == np.uint8:
    out *= np.float32(2 / 255)
    out -= np.float32(1)
  return out
