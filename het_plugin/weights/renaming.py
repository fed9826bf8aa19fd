"""Towers of other projects by our names: what the readers of all families share."""

import dataclasses
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from het_plugin.weights import pixels

_log = logging.getLogger(__name__)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALF = ((0.5,) * 3, (0.5,) * 3)
# What may stand before the names of arrays: modules of the libraries, and those that hold a tower.
_MODULES = (
  'model',
  'vit',
  'deit',
  'beit',
  'data2vec_vision',
  'resnet',
  'dinov2',
  'dinov2_with_registers',
  'dinov3',
  'convnext',
  'convnextv2',
  'vision_model',
  'visual',
  'trunk',
  'module',
)
HOLDERS = (
  'backbone',
  '_orig_mod',
  'teacher',
  'student',
  'image_encoder',
  'vision_tower',
  'base_model',
)
PREFIX = re.compile(rf'^(?:(?:{"|".join(_MODULES + HOLDERS)})\.)+')
# Arrays of a tower that are not used.
_SKIPPED = re.compile(
  r'(?:.*\.)?(?:mask_token|position_ids|relative_position_index|logit_scale|logit_bias|rope\w*\..*|'
  r'(?:head_dist|distillation_classifier)\.(?:weight|bias))'
)


def table(text: str) -> dict[str, str]:
  """{their name: ours} from lines of ours and theirs."""
  rows = (line.split() for line in text.strip().splitlines())
  return {name: ours for ours, *theirs in rows for name in theirs}


class Params(dict[str, np.ndarray]):
  """Parameters by our names; asking for one that the file lacks is a ValueError."""

  def __missing__(self, name: str) -> np.ndarray:
    raise ValueError(f'the file lacks {name} of its tower: is it one of several files?')


@dataclasses.dataclass(frozen=True)
class Tower:
  """An image tower of another project."""

  settings: Mapping[str, Any]  # fields of `backbones.ViT`, `ConvNeXt` or `ResNet`
  params: Mapping[str, np.ndarray]  # float32, by our name: 'backbone/block00/mlp/wi/kernel'
  image_size: int  # side in pixels of the images that the project gives to it
  skipped: tuple[str, ...]  # names in the file that the tower does not use, such as a text tower
  backbone: str = 'vit'  # or 'convnext' or 'resnet'
  pixels: Mapping[str, Any] | None = None  # fields of `data.preprocess.ResizeAndCrop`, and others

  def bindings(self) -> list[str]:
    """Gin bindings of backbone, image size, and how photographs become images of this size."""
    settings = [f'{self.backbone}.{name} = {value!r}' for name, value in self.settings.items()]
    found = [f'BACKBONE = @{self.backbone}()', f'IMAGE_SIZE = {self.image_size}', *settings]
    if self.pixels is None:
      return found
    made = {name: self.pixels[name] for name in pixels.FIELDS if name in self.pixels}
    shown = {'size': self.image_size, **made}
    shown |= {name: self.pixels[name] for name in ('image_mean', 'image_std')}
    texts = (f'{name}={value!r}' for name, value in shown.items())
    _log.info('Pixels as in %s: %s', self.pixels['file'], ', '.join(texts))
    found += [f'ResizeAndCrop.{name} = {value!r}' for name, value in made.items()]
    return [*found, 'DatasetConfig.resize = @ResizeAndCrop()']


def layer_and_kind(name: str) -> tuple[str, str]:
  """Their name of a layer, and 'weight' or 'bias'."""
  layer, _, kind = name.rpartition('.')
  if kind in ('weight', 'bias'):
    return layer, kind
  return name, 'bias' if kind.endswith('_bias') else 'weight'


def renamed(
  arrays: Mapping[str, np.ndarray], backbone: str, stem: Callable[[str], tuple[str | None, str]]
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
  """Parameters by our names without 'backbone/', and the names that the tower does not use."""
  towers = 'visual.', 'vision_model.', 'vision_tower.'
  roots = [root for root in towers if any(root in name for name in arrays)]
  flat = Params()
  skipped = []
  unknown = []
  for name, x in arrays.items():
    stripped = PREFIX.sub('', name)
    is_read = any(part in name for part in (*roots[:1], 'visual_projection', 'classifier.'))
    if roots and not is_read and not stripped.startswith('head.'):
      skipped.append(name)  # belongs to a text tower or a language model
      continue
    ours, kind = stem(stripped)
    if ours is not None:
      parts = converted(ours, kind, x, transpose=not name.endswith('proj'))
      if twice := parts.keys() & flat.keys():
        raise ValueError(f'{name} is the second layer of the file for {min(twice)}')
      flat |= parts
    else:
      (skipped if _SKIPPED.fullmatch(name) else unknown).append(name)
  if unknown:
    some = ', '.join(unknown[:5])
    raise ValueError(f'{len(unknown)} layers have no place in a {backbone}, such as {some}')
  return flat, tuple(sorted(skipped))


def converted(ours: str, kind: str, x: np.ndarray, transpose: bool) -> dict[str, np.ndarray]:
  """One array of theirs as our parameters, by name."""
  if np.asarray(x).dtype.kind in 'iu':
    raise ValueError(
      f'{ours} of the file has integers ({x.dtype}): take the file that is not quantised'
    )
  x = np.asarray(x, np.float32)
  layer = ours.rpartition('/')[2]
  if layer in ('class_token', 'probe'):
    return {ours: x.reshape(-1)}
  if layer == 'position_embedding' and x.ndim == 4 and x.shape[1] != x.shape[2]:
    raise ValueError(
      f'the position embeddings of the file are a table of {x.shape[1]} x {x.shape[2]} patches, '
      'which must be a square'
    )
  if layer in ('position_embedding', 'registers', 'distillation'):
    return {ours: x.reshape(-1, x.shape[-1])}
  if layer in ('attention_scale', 'mlp_scale', 'layer_scale', 'relative_position'):
    return {ours: x}
  if layer == 'response':
    return {f'{ours}_{"scale" if kind == "weight" else "bias"}': x.reshape(-1)}
  if layer.endswith('norm'):
    return {f'{ours}/{"scale" if kind == "weight" else "bias"}': x}
  if layer in ('wi', 'wo') and x.shape[2:] == (1, 1):  # timm's 1 x 1 convolutions
    x = x.reshape(x.shape[:2])
  if kind == 'weight' and transpose:
    x = x.transpose(2, 3, 1, 0) if x.ndim == 4 else x.T
  if kind == 'weight' and layer == 'embedding' and x.ndim == 2:  # NaFlex: rows of patches
    side = math.isqrt(len(x) // 3)
    x = x.reshape(side, side, 3, -1)
  parts = {
    'qkv': ('query', 'key', 'value'),
    'kv': ('key', 'value'),
    'gate_and_wi': ('wi_gate', 'wi'),
  }.get(layer, (layer,))
  root = ours.removesuffix(layer)
  kind = 'kernel' if kind == 'weight' else 'bias'
  pieces = np.split(x, len(parts), axis=-1)
  return {f'{root}{part}/{kind}': piece for part, piece in zip(parts, pieces, strict=True)}


def mean_and_std(
  config: Mapping[str, Any], defaults: tuple[Sequence[float], Sequence[float]]
) -> tuple[np.ndarray, np.ndarray]:
  """The mean and deviation [C] by which the file's project normalises pixels in [0, 1]."""
  mean = np.asarray(config.get('image_mean') or config.get('mean') or defaults[0])
  std = np.asarray(config.get('image_std') or config.get('std') or defaults[1])
  return mean, std


def normalise_pixels(
  flat: dict[str, np.ndarray],
  layer: str,
  config: Mapping[str, Any],
  defaults: tuple[Sequence[float], Sequence[float]],
) -> None:
  """Puts the file's normalisation of x' = (x + 1) / 2 into a layer of patches; x is in [-1, 1]."""
  mean, std = mean_and_std(config, defaults)
  kernel = flat[f'{layer}/kernel']  # [P, P, C, D]
  if not kernel.shape[2] == len(mean) == len(std):
    raise ValueError(
      f'the patches of the file have {kernel.shape[2]} channels, and its image_mean and image_std '
      f'{len(mean)} and {len(std)}'
    )
  bias = flat.get(f'{layer}/bias', np.zeros(kernel.shape[-1]))
  flat[f'{layer}/bias'] = bias + np.einsum('pqcd,c->d', kernel, (0.5 - mean) / std)
  flat[f'{layer}/kernel'] = kernel * (0.5 / std)[:, None]


def image_size(config: Mapping[str, Any], of_positions: int | None = None) -> int:
  """The side of the images in pixels: of the preprocessing, the positions, config.json, or 224."""
  made = (config.get('pixels') or {}).get('size')
  stated = (config.get('image_size'), (config.get('input_size') or [None])[-1])
  sizes = (made, of_positions, *stated, 224)
  found = next(size for size in sizes if size)
  return int(found if isinstance(found, int) else found[0])


def placed(
  flat: dict[str, np.ndarray], tower: str = 'backbone', outside: str = 'head/'
) -> dict[str, np.ndarray]:
  """Parameters by our names in a model with this tower."""
  return {
    name if name.startswith(outside) else f'{tower}/{name}': np.asarray(x, np.float32)
    for name, x in flat.items()
  }
