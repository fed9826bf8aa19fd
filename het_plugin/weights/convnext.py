"""Names of timm's and transformers' ConvNeXt and ConvNeXt V2."""

import re
from collections.abc import Mapping

import numpy as np

_PREFIX = re.compile(r'^(?:(?:model|module|convnext|convnextv2)\.)+')
_STEM = re.compile(r'(?:stem\.0|embeddings\.patch_embeddings)\.weight')
_STAGE = re.compile(r'(?:encoder\.)?stages\.(\d+)\.(?:blocks|layers)\.(\d+)\.(.+)')
_DOWN = re.compile(r'(?:encoder\.)?stages\.(\d+)\.downsampl(?:e|ing_layer)\.([01])')
_OUTER = {
  **dict.fromkeys(('stem.0', 'embeddings.patch_embeddings'), 'stem'),
  **dict.fromkeys(('stem.1', 'embeddings.layernorm'), 'stem_norm'),
  **dict.fromkeys(('head.norm', 'layernorm'), 'norm'),
  **dict.fromkeys(('head.fc', 'classifier'), 'head'),
}
_INNER = {
  **dict.fromkeys(('conv_dw', 'dwconv'), ''),
  **dict.fromkeys(('norm', 'layernorm'), 'norm'),
  **dict.fromkeys(('mlp.fc1', 'pwconv1'), 'wi'),
  **dict.fromkeys(('mlp.fc2', 'pwconv2'), 'wo'),
  **dict.fromkeys(('mlp.grn', 'grn'), 'response'),
}


def is_convnext(names) -> bool:
  """Whether the names of arrays are those of a ConvNeXt."""
  names = [_PREFIX.sub('', name) for name in names]
  return any(map(_STEM.fullmatch, names)) and any(map(_STAGE.fullmatch, names))


def renamed(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Parameters by our names without 'backbone/'; ValueError if ConvNeXt lacks one of them."""
  flat, unknown = {}, []
  for name, x in arrays.items():
    ours = _ours(_PREFIX.sub('', name), x)
    if ours is None:
      unknown.append(name)
    else:
      flat |= ours
  if unknown:
    raise ValueError(
      f'{len(unknown)} layers of the file have no place in a ConvNeXt, such as '
      f'{", ".join(unknown[:5])}'
    )
  return flat


def _ours(name, x):
  """{our name: parameter} of one array; None if it has no place."""
  x = np.asarray(x, np.float32)
  layer, _, kind = name.rpartition('.')
  block, down = _STAGE.fullmatch(name), _DOWN.fullmatch(layer)
  root = block and f'stage{int(block[1]) + 1}_block{int(block[2]) + 1:02d}/'
  if block and block[3] in ('gamma', 'layer_scale_parameter'):
    return {f'{root}layer_scale': x}
  if block:
    ours = _INNER.get(block[3].rpartition('.')[0])
    ours = None if ours is None else root + ours
  elif down:
    ours = f'stage{int(down[1]) + 1}_{"patches" if down[2] == "1" else "norm"}'
  else:
    ours = _OUTER.get(layer)
  if ours is None or kind not in ('weight', 'bias'):
    return None
  part = 'kernel' if kind == 'weight' else 'bias'
  if ours.endswith('response'):
    return {f'{ours}_{"scale" if kind == "weight" else "bias"}': x.reshape(-1)}
  if ours.endswith('norm'):
    return {f'{ours}/{"scale" if kind == "weight" else "bias"}': x}
  if kind == 'weight':
    x = x.reshape(x.shape[:2]) if x.shape[2:] == (1, 1) else x  # timm's 1 x 1 convolutions
    x = x.T if x.ndim == 2 else x.transpose(2, 3, 1, 0)
  return {f'{ours.rstrip("/")}/{part}': x}
