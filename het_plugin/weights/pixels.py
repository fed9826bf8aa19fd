"""How the library of a published tower makes the pixels, from the descriptions beside its file."""

import math
import re
from collections.abc import Mapping
from typing import Any

from het_plugin.system import sheets

Settings = Mapping[str, Any]

# Of `ResizeAndCrop`.
FIELDS = ('mode', 'crop_fraction', 'filter', 'offset', 'fill', 'patch_size', 'max_patches')
CONFIG = 'config.json'
OPEN_CLIP = 'open_clip_config.json'
PREPROCESSOR = 'preprocessor_config.json'
PROCESSOR = 'processor_config.json'  # of transformers 5, with an image_processor

# Pillow's numbers of filters, as transformers writes them.
_FILTERS = ('nearest', 'lanczos', 'bilinear', 'bicubic', 'box', 'hamming')
_HALF = (0.5, 0.5, 0.5)
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

_SQUARE = {'height': 224, 'width': 224}
_OF_CLIP = {
  'size': {'shortest_edge': 224},
  'resample': 3,
  'do_center_crop': True,
  'crop_size': 224,
  'image_mean': _CLIP_MEAN,
  'image_std': _CLIP_STD,
  'one_size': 'shortest_edge',
}
# What the image processors of transformers take where a file says nothing; `one_size` is what a
# `size` that is a number means.
_PROCESSORS: Mapping[str, Settings] = {
  'ViT': {'size': _SQUARE, 'resample': 2},
  'DeiT': {'size': 256, 'resample': 3, 'do_center_crop': True, 'crop_size': 224},
  'Beit': {'size': _SQUARE, 'resample': 3, 'crop_size': 224},
  'CLIP': _OF_CLIP,
  'Llava': _OF_CLIP,
  'Bit': _OF_CLIP,
  'Siglip': {'size': _SQUARE, 'resample': 3, 'one_size': 'shortest_edge'},
  'Gemma3': {'size': _SQUARE, 'resample': 2},
  'GotOcr2': {  # of InternVL
    'size': {'height': 384, 'width': 384},
    'resample': 3,
    'image_mean': _CLIP_MEAN,
    'image_std': _CLIP_STD,
  },
  'Siglip2': {'patch_size': 16, 'max_num_patches': 256, 'resample': 2},
  'Tipsv2': {'size': {'height': 448, 'width': 448}, 'resample': 2, 'do_normalize': False},
  'ConvNext': {
    'size': {'shortest_edge': 384},
    'resample': 3,
    'crop_pct': 224 / 256,
    'one_size': 'shortest_edge',
  },
  'DINOv3ViT': {
    'size': _SQUARE,
    'resample': 2,
    'image_mean': _IMAGENET_MEAN,
    'image_std': _IMAGENET_STD,
  },
}
# Where a file does not say its image processor: that of its model_type in config.json.
_KIND_OF_MODEL = {
  'vit': 'ViT',
  'deit': 'DeiT',
  'beit': 'Beit',
  'data2vec-vision': 'Beit',
  'clip': 'CLIP',
  'clip_vision_model': 'CLIP',
  'metaclip_2': 'CLIP',
  'aimv2': 'CLIP',
  'aimv2_vision_model': 'CLIP',
  'dinov2': 'Bit',
  'dinov2_with_registers': 'Bit',
  'siglip': 'Siglip',
  'convnext': 'ConvNext',
  'convnextv2': 'ConvNext',
  'dinov3_vit': 'DINOv3ViT',
  'dinov3_convnext': 'DINOv3ViT',
  'tipsv2': 'Tipsv2',
  'tipsv2_vision_model': 'Tipsv2',
}
_KIND = re.compile(r'(\w+?)(?:ImageProcessor(?:Fast|Pil)?|FeatureExtractor)')
# What a preprocessor_config.json has beside what is read, and does not change the pixels.
_IDLE = re.compile(
  r'image_processor_type|feature_extractor_type|processor_class|_valid_processor_keys|auto_map|'
  r'(?:input_)?data_format|device|return_tensors|disable_grouping|default_to_square|use_fast|'
  r'do_convert_rgb|do_reduce_labels|reduce_labels|rescale_factor|pad_size|antialias|'
  r'image_seq_length|(?:min|max)_patches|pan_and_scan_\w+'  # of tiles, which are refused
)
_READ = {
  'do_resize': True,
  'do_rescale': True,
  'do_normalize': True,
  'do_center_crop': False,
  'size': None,
  'crop_size': None,
  'resample': None,
  'image_mean': _HALF,
  'image_std': _HALF,
}


def of_transformers(settings: Settings, file: str) -> dict[str, Any]:
  """`Tower.pixels` of an image processor of transformers, from its JSON in `file`.

  Raises:
    ValueError: it has settings that cannot be read.
  """
  kind = settings.get('image_processor_type') or settings.get('feature_extractor_type')
  found = _KIND.fullmatch(str(kind))
  if found is None or found[1] not in _PROCESSORS:
    known = ', '.join(f'{name}ImageProcessor' for name in _PROCESSORS)
    raise ValueError(f'image_processor_type={kind!r} in {file} must be one of {known}')
  usual: dict[str, Any] = {**_READ, **_PROCESSORS[found[1]]}
  stated = {name: value for name, value in settings.items() if value is not None}
  for name, value in stated.items():
    if value and name not in usual and not _IDLE.fullmatch(name):
      raise ValueError(f'{name}={value!r} in {file} cannot be read')
  given = {**usual, **stated}
  for name in ('do_resize', 'do_rescale'):
    if not given[name]:
      raise ValueError(f'{name}={given[name]!r} in {file} must be True')
  if not math.isclose(given.get('rescale_factor', 1 / 255), 1 / 255, rel_tol=1e-6):
    raise ValueError(f'rescale_factor={given["rescale_factor"]!r} in {file} must be 1 / 255')
  if given['resample'] not in range(len(_FILTERS)):
    raise ValueError(f'resample={given["resample"]!r} in {file} must be in 0 .. 5')
  normalises = given['do_normalize']
  return {
    **_sizes(given, file, found[1]),
    'filter': _FILTERS[given['resample']],
    'offset': 'down',
    'image_mean': given['image_mean'] if normalises else (0.0,) * 3,
    'image_std': given['image_std'] if normalises else (1.0,) * 3,
    'file': file,
  }


def _sizes(given: Settings, file: str, kind: str) -> dict[str, Any]:
  """Mode, size and fraction of the crop of an image processor."""
  if kind == 'Siglip2':
    return of_patches(given['patch_size'], given['max_num_patches'])
  size = given['size']
  if isinstance(size, int):
    edge = given.get('one_size')
    size = {edge: size} if edge else {'height': size, 'width': size}
  size = {name: value for name, value in size.items() if value is not None}
  if size.keys() == {'shortest_edge'}:
    mode = 'shortest'
    before = size['shortest_edge']
  elif size.keys() == {'height', 'width'} and size['height'] == size['width']:
    mode = 'squash'
    before = size['height']
  else:
    raise ValueError(
      f"size={size} in {file} must be a square of 'height' and 'width', or have 'shortest_edge' "
      'alone'
    )
  if kind == 'ConvNext':
    if before >= 384:
      return {'mode': 'squash', 'size': before, 'crop_fraction': 1.0}
    return {'mode': 'shortest', 'size': before, 'crop_fraction': given['crop_pct']}
  if not given['do_center_crop']:
    if mode == 'shortest':
      raise ValueError(f'do_center_crop=False in {file} with size={size} gives no squares')
    return {'mode': mode, 'size': before, 'crop_fraction': 1.0}
  crop = given['crop_size']
  side = crop if isinstance(crop, int) else crop.get('height')
  if not isinstance(crop, int) and crop != {'height': side, 'width': side}:
    raise ValueError(f'crop_size={crop} in {file} must be a square')
  if side > before:
    raise ValueError(f'crop_size={side} in {file} must be at most its size, {before}')
  fraction = side / before
  if math.floor(side / fraction) < before:  # rounding
    fraction = math.nextafter(fraction, 0)
  return {'mode': mode, 'size': side, 'crop_fraction': fraction}


def of_patches(patch_size: int, max_patches: int) -> dict[str, Any]:
  """Mode and size of a NaFlex, which keeps the aspect of an image; see `ResizeAndCrop.check`."""
  size = sheets.side_of(max_patches, patch_size)
  return {'mode': 'patches', 'size': size, 'patch_size': patch_size, 'max_patches': max_patches}


def of_timm(config: Settings, file: str) -> dict[str, Any]:
  """`Tower.pixels` of timm's config.json, `file`, whose pretrained_cfg says how images are made.

  Raises:
    ValueError: it has settings that cannot be read.
  """
  given = {name: value for name, value in config.items() if value}
  # The usual values are those of timm's `resolve_data_config`.
  mode = given.get('crop_mode', 'center')
  modes = {'center': 'shortest', 'squash': 'squash', 'border': 'longest'}
  if mode not in modes:
    raise ValueError(f'crop_mode={mode!r} in {file} must be one of {", ".join(modes)}')
  interpolation = given.get('interpolation', 'bicubic')
  if interpolation not in _FILTERS:
    raise ValueError(f'interpolation={interpolation!r} in {file} must be one of {_FILTERS}')
  fraction = given.get('crop_pct', 0.875)
  if not 0 < fraction <= 1:
    raise ValueError(f'crop_pct={fraction} in {file} must be in (0, 1]')
  channels, *sides = given.get('input_size', (3, 224, 224))
  if len(set(sides)) != 1:
    raise ValueError(f'input_size={[channels, *sides]} in {file} must be a square')
  mean = given.get('mean', _IMAGENET_MEAN)
  sizes = {'mode': modes[mode], 'size': sides[0], 'crop_fraction': fraction}
  if str(config.get('architecture')).startswith('naflexvit'):
    # As timm's --naflex-loader does, with as many patches as the images of input_size have.
    sizes = of_patches(16, (sides[0] // 16) ** 2)
  return {
    **sizes,
    'filter': interpolation,
    'offset': 'even',
    **({'fill': tuple(round(255 * x) for x in mean)} if mode == 'border' else {}),
    'image_mean': mean,
    'image_std': given.get('std', _IMAGENET_STD),
    'file': file,
  }


def of_open_clip(config: Settings, file: str) -> dict[str, Any]:
  """`Tower.pixels` of open_clip_config.json, `file`.

  Raises:
    ValueError: it has settings that cannot be read.
  """
  given = {x: value for x, value in config.get('preprocess_cfg', {}).items() if value is not None}
  size = config['model_cfg']['vision_cfg'].get('image_size', 224)
  sides = [size] if isinstance(size, int) else size
  if len(set(sides)) != 1:
    raise ValueError(f'image_size={size} in {file} must be a square')
  mode = given.get('resize_mode', 'shortest')
  modes = ('shortest', 'squash', 'longest')
  if mode not in modes:
    raise ValueError(f'resize_mode={mode!r} in {file} must be one of {", ".join(modes)}')
  interpolation = given.get('interpolation', 'bicubic')
  if interpolation not in ('bicubic', 'bilinear', 'random'):
    raise ValueError(f'interpolation={interpolation!r} in {file} must be bicubic or bilinear')
  return {
    'mode': mode,
    'size': sides[0],
    'crop_fraction': 1.0,
    'filter': 'bilinear' if interpolation == 'bilinear' else 'bicubic',
    'offset': 'even',
    **({'fill': (given.get('fill_color', 0),) * 3} if mode == 'longest' else {}),
    'image_mean': given.get('mean', _CLIP_MEAN),
    'image_std': given.get('std', _CLIP_STD),
    'file': file,
  }


def read(described: Mapping[str, Settings]) -> dict[str, Any] | None:
  """`Tower.pixels` from descriptions, {name of a JSON file: what is in it}.

  timm's settings precede those of transformers, and these those of open_clip. None if no file
  describes the pixels.

  Raises:
    ValueError: the settings cannot be read.
  """
  config = described.get(CONFIG, {})
  makers = []
  if 'architecture' in config:
    timm = {**config, **config.get('pretrained_cfg', {})}
    makers.append(lambda: of_timm(timm, CONFIG))
  nested = described.get(PROCESSOR, {}).get('image_processor')
  file = PROCESSOR if nested else PREPROCESSOR
  processor = dict(nested or described.get(PREPROCESSOR, {}))
  kind = _KIND_OF_MODEL.get(config.get('model_type'))
  if kind and not {'image_processor_type', 'feature_extractor_type'} & processor.keys():
    processor['image_processor_type'] = f'{kind}ImageProcessor'
  if processor.keys() & {'size', 'crop_size', 'resample', 'image_processor_type'}:
    makers.append(lambda: of_transformers(processor, file))
  if (open_clip := described.get(OPEN_CLIP)) is not None:
    makers.append(lambda: of_open_clip(open_clip, OPEN_CLIP))
  return makers[0]() if makers else None
