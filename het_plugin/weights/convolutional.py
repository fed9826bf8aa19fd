"""ConvNeXts and ResNets of timm, torchvision and transformers: their settings and parameters."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from het_plugin.weights import renaming
from het_plugin.weights.renaming import Params, Tower

_BATCH_NORM_EPSILON = 1e-5
# Of a ConvNeXt: a block, and a layer between two stages.
_STAGE_BLOCK = re.compile(r'(?:encoder\.)?stages\.(\d+)\.(?:blocks|layers)\.(\d+)\.(.+)')
_STAGE_START = re.compile(r'(?:encoder\.)?stages\.(\d+)\.downsampl(?:e|ing_layer|e_layers)\.([01])')
_CONVNEXT_OUTER = renaming.table("""
stem       stem.0 embeddings.patch_embeddings stages.0.downsample_layers.0
stem_norm  stem.1 embeddings.layernorm stages.0.downsample_layers.1
norm       head.norm layernorm layer_norm
head       head.fc classifier
projection head.proj
""")
_CONVNEXT_INNER = renaming.table("""
depthwise    conv_dw dwconv depthwise_conv
norm         norm layernorm layer_norm
wi           mlp.fc1 pwconv1 pointwise_conv1
response     mlp.grn grn
wo           mlp.fc2 pwconv2 pointwise_conv2
layer_scale  gamma layer_scale_parameter
""")
# A unit of a ResNet in timm and torchvision, and in transformers.
_RESNET_UNIT = re.compile(
  r'layer(?P<stage>\d+)\.(?P<unit>\d+)\.(?:(?:conv|bn)(?P<layer>\d)|downsample\.[01])'
)
_HF_RESNET_UNIT = re.compile(
  r'encoder\.stages\.(?P<stage>\d+)\.layers\.(?P<unit>\d+)\.(?:layer\.(?P<layer>\d)|shortcut)\.'
  r'(?:convolution|normalization)'
)
# timm's BiT.
_BIT_UNIT = re.compile(
  r'stages\.(?P<stage>\d+)\.blocks\.(?P<unit>\d+)\.(?P<layer>(?:conv|norm)\d|downsample\.conv)'
)
_BIT_OUTER = {'stem.conv': 'conv_root', 'norm': 'norm', 'head.fc': 'head'}


def reader_of(
  names: Collection[str],
) -> Callable[[Mapping[str, np.ndarray], Mapping[str, Any]], Tower] | None:
  """What reads a file with arrays of these names, given them and its description; None for none."""
  bare = {renaming.PREFIX.sub('', name) for name in names}
  if {'stem', 'stage1_block01/wi'} <= {_convnext_stem(name)[0] for name in bare}:
    return _read_convnext
  if {'layer1.0.conv1.weight', 'layer1.0.bn1.weight', 'conv1.weight'} <= bare:
    return _read_resnet
  if 'embedder.embedder.convolution.weight' in bare:
    return _read_resnet
  if {'stem.conv.weight', 'stages.0.blocks.0.conv1.weight', 'norm.weight'} <= bare:
    return _read_bit
  return None


def _read_convnext(arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> Tower:
  flat, skipped = renaming.renamed(arrays, 'ConvNeXt', _convnext_stem)
  renaming.normalise_pixels(flat, 'stem', config, renaming.IMAGENET)
  if flat['stem/kernel'].shape[:2] != (4, 4):
    raise ValueError(
      f'the patches of the file have {flat["stem/kernel"].shape[0]} pixels a side, and those of a '
      'ConvNeXt 4'
    )
  blocks = [name for name in flat if name.endswith('/wo/kernel')]
  stages = sorted({name.partition('_')[0] for name in blocks})
  settings = {
    'depths': tuple(sum(name.startswith(f'{stage}_') for name in blocks) for stage in stages),
    'width': flat['stem/kernel'].shape[-1],
    'version': 'v1' if 'stage1_block01/layer_scale' in flat else 'v2',
  }
  if 'projection/kernel' in flat:
    settings['projection_size'] = flat['projection/kernel'].shape[1]
  if config.get('hidden_act', 'gelu') != 'gelu':
    raise ValueError(f"hidden_act={config['hidden_act']!r} in config.json must be 'gelu'")
  if config.get('global_pool', 'avg') != 'avg':
    raise ValueError(f"global_pool={config['global_pool']!r} in config.json must be 'avg'")
  # transformers' configuration of a ConvNeXt is of the last normalisation; the others have 1e-6.
  of_all = 'last_epsilon' in config or config.get('model_type') == 'dinov3_convnext'
  if of_all and config['layer_norm_eps'] != 1e-6:
    settings['norm_epsilon'] = config['layer_norm_eps']
  last = config.get('last_epsilon') or config.get('layer_norm_eps')
  if last is not None and last != settings.get('norm_epsilon', 1e-6):
    settings['last_epsilon'] = last
  image_size = renaming.image_size(config)
  return Tower(
    settings, renaming.placed(flat), image_size, skipped, 'convnext', config.get('pixels')
  )


def _convnext_stem(name: str) -> tuple[str | None, str]:
  """Our name of a layer of a ConvNeXt, None if it is unknown, and 'weight' or 'bias'."""
  name, kind = renaming.layer_and_kind(name)
  if name in _CONVNEXT_OUTER:
    return _CONVNEXT_OUTER[name], kind
  if block := _STAGE_BLOCK.fullmatch(name):
    inner = _CONVNEXT_INNER.get(block[3])
    root = f'stage{int(block[1]) + 1}_block{int(block[2]) + 1:02d}'
    return root if inner == 'depthwise' else inner and f'{root}/{inner}', kind
  if start := _STAGE_START.fullmatch(name):
    return f'stage{int(start[1]) + 1}_{("norm", "patches")[int(start[2])]}', kind
  return None, kind


def _read_resnet(arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> Tower:
  """A ResNet of timm, torchvision or transformers; batch normalisation goes into convolutions."""
  layers: dict[str, dict[str, np.ndarray]] = {}
  unknown = []
  for name, x in arrays.items():
    layer, _, part = renaming.PREFIX.sub('', name).rpartition('.')
    kind = 'kernel' if part == 'weight' and x.ndim == 4 else part
    if layer in ('conv1', 'bn1') or layer.startswith('embedder.embedder.'):
      ours = 'conv_root'
    elif layer in ('fc', 'classifier.1'):
      ours = 'head'
    elif unit := _RESNET_UNIT.fullmatch(layer):
      number = unit['layer'] or '_proj'
      ours = f'stage{unit["stage"]}_unit{int(unit["unit"]) + 1:02d}/conv{number}'
    elif unit := _HF_RESNET_UNIT.fullmatch(layer):
      number = '_proj' if unit['layer'] is None else int(unit['layer']) + 1
      ours = f'stage{int(unit["stage"]) + 1}_unit{int(unit["unit"]) + 1:02d}/conv{number}'
    else:
      unknown.append(name)
      continue
    layers.setdefault(ours, {})[kind] = np.asarray(x, np.float32)
  _check_resnet(unknown, config)
  flat = Params()
  for ours, parts in layers.items():
    if ours == 'head':
      flat |= {'head/kernel': parts['weight'].T, 'head/bias': parts['bias']}
      continue
    if missing := {'kernel', 'weight', 'bias', 'running_mean', 'running_var'} - parts.keys():
      raise ValueError(f'the file lacks {min(missing)} of its layer {ours}')
    scale = parts['weight'] / np.sqrt(parts['running_var'] + _BATCH_NORM_EPSILON)
    flat[f'{ours}/kernel'] = parts['kernel'].transpose(2, 3, 1, 0) * scale
    flat[f'{ours}/bias'] = parts['bias'] - parts['running_mean'] * scale
  mean, std = renaming.mean_and_std(config, renaming.IMAGENET)
  flat['conv_root/kernel'] *= 0.5 / std[:, None]
  is_basic = 'stage1_unit01/conv3/kernel' not in flat
  settings = {
    **_resnet_stages(flat),
    'version': 'v1.5',
    'norm': 'folded',
    'block': 'basic' if is_basic else 'bottleneck',
    'image_mean': tuple((2 * mean - 1).tolist()),
  }
  return Tower(
    settings, renaming.placed(flat), renaming.image_size(config), (), 'resnet', config.get('pixels')
  )


def _read_bit(arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> Tower:
  """A ResNet of Big Transfer in timm, whose kernels are standardised."""
  flat = Params()
  unknown = []
  for name, x in arrays.items():
    layer, _, part = renaming.PREFIX.sub('', name).rpartition('.')
    if unit := _BIT_UNIT.fullmatch(layer):
      inner = unit['layer'].replace('downsample.conv', 'conv_proj')
      ours = f'stage{int(unit["stage"]) + 1}_unit{int(unit["unit"]) + 1:02d}/{inner}'
    elif layer in _BIT_OUTER:
      ours = _BIT_OUTER[layer]
    else:
      unknown.append(name)
      continue
    x = np.asarray(x, np.float32)
    if ours == 'head':
      flat[f'head/{"bias" if part == "bias" else "kernel"}'] = x.reshape(len(x), -1).T.squeeze()
    elif x.ndim == 4:
      flat[f'{ours}/kernel'] = x.transpose(2, 3, 1, 0)
    else:
      flat[f'{ours}/{"scale" if part == "weight" else part}'] = x
  _check_resnet(unknown, config)
  stated = renaming.mean_and_std(config, renaming.HALF)
  for name, value in zip(('image_mean', 'image_std'), stated, strict=True):
    if (value != 0.5).any():
      raise ValueError(f'{name}={value} must be 0.5: the kernels of the file are standardised')
  settings = {**_resnet_stages(flat), 'version': 'v2', 'kernel_epsilon': 1e-8}
  return Tower(
    settings, renaming.placed(flat), renaming.image_size(config), (), 'resnet', config.get('pixels')
  )


def _check_resnet(unknown: Sequence[str], config: Mapping[str, Any]) -> None:
  if unknown:
    some = ', '.join(unknown[:5])
    raise ValueError(f'{len(unknown)} layers have no place in a ResNet, such as {some}')
  for name, only in {'hidden_act': 'relu', 'global_pool': 'avg'}.items():
    if config.get(name, only) != only:
      raise ValueError(f'{name}={config[name]!r} in config.json must be {only!r}')
  for name in ('downsample_in_first_stage', 'downsample_in_bottleneck'):
    if config.get(name):
      raise ValueError(f'{name}=True in config.json must be False')


def _resnet_stages(flat: Mapping[str, np.ndarray]) -> dict[str, Any]:
  """Numbers of units and the width; an error where the widths are not those of our ResNet."""
  units = [name.partition('/')[0] for name in flat if name.endswith('/conv1/kernel')]
  stages = sorted({unit.partition('_')[0] for unit in units})
  width = flat['conv_root/kernel'].shape[-1]
  *_, inputs, outputs = flat['stage1_unit01/conv2/kernel'].shape
  is_basic = 'stage1_unit01/conv3/kernel' not in flat
  groups = 1 if is_basic else outputs // inputs
  inner_factor = 1 if is_basic else outputs // width
  for name in units:
    inner = width * inner_factor * 2 ** (int(name[5]) - 1)
    kernel = flat[f'{name}/conv2/kernel']
    if not inner or kernel.shape != (3, 3, inner // groups, inner):
      raise ValueError(
        f'the second convolution of {name} has the shape {kernel.shape}, and after the first stage '
        f'of the file it should be {(3, 3, inner // groups, inner)}'
      )
  shape = {'groups': groups, 'inner_factor': inner_factor}
  return {
    'stages': tuple(sum(x.startswith(f'{y}_') for x in units) for y in stages),
    'width': width,
    **({} if (groups, inner_factor) == (1, 1) else shape),
  }
