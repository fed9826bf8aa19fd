"""Augmentations by name, for `DatasetConfig.augmentations`; preprocess.py has their interface."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from het_plugin.data import preprocess
from het_plugin.system import ranges
from het_plugin.system.ranges import Count, Positive


@dataclasses.dataclass(frozen=True)
class RandAugment:
  """`num_ops` random operations of strength `magnitude`, from 0 to 30 (Cubuk et al. 2020)."""

  num_ops: Count = 2
  magnitude: Annotated[float, '[0, 30]'] = 9

  def __post_init__(self):
    ranges.check(self)

  def __call__(self, image, rng: np.random.Generator, size: int) -> np.ndarray:
    if image.shape[-1] not in (1, 3):
      raise ValueError(f'RandAugment takes 1 or 3 channels; an image has {image.shape[-1]}.')
    is_float = image.dtype != np.uint8
    levels = np.round((image + 1) * 127.5).astype(np.uint8) if is_float else image
    picture = Image.fromarray(levels[..., 0] if image.shape[-1] == 1 else levels)
    for _ in range(self.num_ops):
      picture = self._apply(picture, rng)
    levels = np.asarray(picture).reshape(image.shape)
    return preprocess.to_levels(levels) if is_float else levels

  def _apply(self, x: Image.Image, rng: np.random.Generator) -> Image.Image:
    operation = rng.integers(14)
    strength = self.magnitude / 30
    signed = strength * (1 if rng.integers(2) else -1)
    width, height = x.size
    match operation:
      case 0:
        return ImageOps.autocontrast(x)
      case 1:
        return ImageOps.equalize(x)
      case 2:
        return ImageOps.posterize(x, 8 - round(4 * strength))
      case 3:
        return ImageOps.solarize(x, round(256 * (1 - strength)))
      case 4 | 5 | 6 | 7:
        enhance = ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Sharpness
        return (*enhance, ImageEnhance.Color)[operation - 4](x).enhance(1 + 0.9 * signed)
      case 8:
        return x.rotate(30 * signed, Image.Resampling.BILINEAR)
      case 9 | 10 | 11 | 12:
        shear = 0.3 * signed
        shift = 0.45 * signed
        matrix = (
          (1, shear, 0, 0, 1, 0),
          (1, 0, 0, shear, 1, 0),
          (1, 0, shift * width, 0, 1, 0),
          (1, 0, 0, 0, 1, shift * height),
        )[operation - 9]
        return x.transform(x.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    return x


@dataclasses.dataclass(frozen=True)
class RandomErasing:
  """Fills a random box with noise, its area relative to the image (Zhong et al. 2020)."""

  probability: Annotated[float, '[0, 1]'] = 0.25
  area_range: tuple[float, float] = (0.02, 1 / 3)
  aspect_range: tuple[float, float] = (0.3, 3.3)

  def __post_init__(self):
    ranges.check(self)

  def __call__(self, image, rng: np.random.Generator, size: int) -> np.ndarray:
    if rng.random() >= self.probability:
      return image
    left, top, right, bottom = preprocess.random_box(image, rng, self.area_range, self.aspect_range)
    erased = np.array(image)
    noise = rng.integers(0, 256, erased[top:bottom, left:right].shape, np.uint8)
    erased[top:bottom, left:right] = noise if erased.dtype == np.uint8 else noise / 127.5 - 1
    return erased


@dataclasses.dataclass(frozen=True)
class Mixup:
  """Weighted means of two images, whose labels get the weights (Zhang et al. 2018).

  The images at positions 2 i and 2 i + 1 of the order are mixed with each other, so that an example
  depends neither on the batch nor on the host.

  alpha: the weight is Beta(alpha, alpha).
  """

  alpha: Positive = 0.2

  def __post_init__(self):
    ranges.check(self)

  def mix(
    self, image: np.ndarray, other: np.ndarray, rng: np.random.Generator
  ) -> tuple[np.ndarray, float]:
    """The mixed image, float32 [H, H, C], and the weight of the first one's labels."""
    weight = rng.beta(self.alpha, self.alpha)
    return np.float32(weight) * image + np.float32(1 - weight) * other, weight


@dataclasses.dataclass(frozen=True)
class CutMix(Mixup):
  """A box of another image, labels weighted by area (Yun et al. 2019); pairs as in Mixup."""

  alpha: Positive = 1.0

  def mix(
    self, image: np.ndarray, other: np.ndarray, rng: np.random.Generator
  ) -> tuple[np.ndarray, float]:
    height, width = image.shape[:2]
    share = np.sqrt(1 - rng.beta(self.alpha, self.alpha))
    row = rng.integers(height)
    column = rng.integers(width)
    top, bottom = np.clip(np.round(row + share * height * np.array([-0.5, 0.5])), 0, height)
    left, right = np.clip(np.round(column + share * width * np.array([-0.5, 0.5])), 0, width)
    box = slice(int(top), int(bottom)), slice(int(left), int(right))
    mixed = image.copy()
    mixed[box] = other[box]
    return mixed, 1 - mixed[box].shape[0] * mixed[box].shape[1] / (height * width)


NAMES = {
  'inception': preprocess.InceptionCrop,
  'pad_crop': preprocess.PadCrop,
  'flip': preprocess.Flip,
  'randaugment': RandAugment,
  'random_erasing': RandomErasing,
  'mixup': Mixup,
  'cutmix': CutMix,
}


def resolve(augmentations: Sequence) -> tuple[tuple[preprocess.Preprocessor, ...], Mixup | None]:
  """The preprocessors in a list of names and objects, and the mixture that comes last, if any."""
  made = []
  for given in augmentations:
    is_known = given in NAMES if isinstance(given, str) else not isinstance(given, type)
    if not is_known or isinstance(augmentations, str):
      raise ValueError(
        f'augmentations is {augmentations!r}; it must be a list of {sorted(NAMES)} or of '
        'augmentations such as @RandAugment().'
      )
    made.append(NAMES[given]() if isinstance(given, str) else given)
  mixtures = [x for x in made if isinstance(x, Mixup)]
  if len(mixtures) > 1:
    raise ValueError(
      f'augmentations is {augmentations!r}, with two mixtures of images: choose one.'
    )
  return tuple(x for x in made if not isinstance(x, Mixup)), next(iter(mixtures), None)
