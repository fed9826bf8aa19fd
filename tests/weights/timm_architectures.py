"""The settings of timm's architectures, from the models that timm itself makes.

    python -m tests.weights.timm_architectures    # writes timm_architectures.json of weights/

Models are made without memory for their parameters. A row holds what names and shapes of a file
do not tell; `tests/weights/test_towers.py` compares rows with the installed timm.
"""

import json
import pathlib
from typing import Any

import timm
import torch

TABLE = pathlib.Path(__file__).parents[2] / 'het_plugin' / 'weights' / 'timm_architectures.json'
MODULES = (
  'vision_transformer',
  'deit',
  'eva',
  'beit',
  'convnext',
  'resnet',
  'resnetv2',
  'naflexvit',
)
# Classes of activations, and timm's names of them.
ACTIVATIONS = {'GELU': 'gelu', 'GELUTanh': 'gelu_tanh', 'QuickGELU': 'quick_gelu', 'SiLU': 'silu'}
NORMS = {'LayerNorm': 'layer_norm', 'RmsNorm': 'rms_norm'}
BLOCKS = ('Block', 'EvaBlock')
RESNET_LAYERS = set(
  'ResNet Conv2d BatchNorm2d ReLU MaxPool2d Sequential Bottleneck BasicBlock Identity Linear '
  'SelectAdaptivePool2d FastAdaptiveAvgPool AdaptiveAvgPool2d Flatten'.split()
)
BIT_LAYERS = set(
  'ResNetV2 StdConv2d GroupNormAct ReLU MaxPool2d ConstantPad2d Sequential ResNetStage ModuleList '
  'PreActBottleneck DownsampleConv Identity ClassifierHead SelectAdaptivePool2d Conv2d Flatten '
  'Dropout FastAdaptiveAvgPool AdaptiveAvgPool2d'.split()
)
ROPES = {'RotaryEmbeddingDinoV3': 'dinov3', 'RotaryEmbeddingCat': 'cat'}
ATTENTION = ('Attention', 'EvaAttention', 'AttentionRope')


def name_of(layer: Any) -> str:
  return type(layer).__name__


def settings(name: str) -> dict[str, Any]:
  """The row of an architecture; 'unread' says what the towers here do not have."""
  with torch.device('meta'):
    model = timm.create_model(name)
  try:
    read = {'ConvNeXt': _convnext, 'ResNet': _resnet, 'ResNetV2': _bit}.get(name_of(model), _vit)
    return read(model)
  except AttributeError as error:
    return {'num_heads': None, 'unread': f'layers of its own ({error})'}


def _convnext(model: Any) -> dict[str, Any]:
  block = model.stages[0].blocks[0]
  row = {
    'num_heads': None,
    'global_pool': model.head.global_pool.pool_type,
    'epsilon': block.norm.eps,
    'act_layer': ACTIVATIONS[name_of(block.mlp.act)],
  }
  if name_of(block.norm) not in ('LayerNorm', 'LayerNorm2d'):
    return row | {'unread': f'layers of its own ({name_of(block.norm)})'}
  last = model.head.norm.eps
  return row if last == row['epsilon'] else row | {'last_epsilon': last}


def _resnet(model: Any) -> dict[str, Any]:
  row = {'num_heads': None, 'global_pool': model.global_pool.pool_type, 'act_layer': 'relu'}
  odd = {name_of(layer) for layer in model.modules()} - RESNET_LAYERS
  convolutions = [layer for layer in model.modules() if name_of(layer) == 'Conv2d']
  if any(layer.dilation != (1, 1) for layer in convolutions):
    odd.add('dilation')
  if any(layer.eps != 1e-5 for layer in model.modules() if hasattr(layer, 'eps')):
    odd.add('epsilon')
  if name_of(model.conv1) != 'Conv2d' or name_of(model.maxpool) != 'MaxPool2d':
    odd.add('stem')
  block = model.layer2[0]
  if name_of(block) == 'Bottleneck' and block.conv1.stride != (1, 1):
    odd.add('stride')
  return row | {'unread': f'layers of its own ({", ".join(sorted(odd))})'} if odd else row


def _bit(model: Any) -> dict[str, Any]:
  row = {'num_heads': None, 'global_pool': model.head.global_pool.pool_type, 'act_layer': 'relu'}
  odd = {name_of(layer) for layer in model.modules()} - BIT_LAYERS
  return row | {'unread': f'layers of its own ({", ".join(sorted(odd))})'} if odd else row


def _vit(model: Any) -> dict[str, Any]:
  block = model.blocks[0]
  row = {
    'num_heads': block.attn.num_heads,
    'global_pool': model.global_pool,
    'epsilon': block.norm1.eps,
    'act_layer': ACTIVATIONS[name_of(block.mlp.act)],
  }
  if name_of(block.norm1) != 'LayerNorm':
    row['norm'] = NORMS[name_of(block.norm1)]
  if {name_of(model.norm), name_of(getattr(model, 'fc_norm', model.norm))} == {'Identity'}:
    row['last_norm'] = False
  if getattr(model, 'pool_include_prefix', False):
    row['pool_include_prefix'] = True
  embeds = getattr(model, 'embeds', None)  # of a NaFlex
  if embeds is not None:
    filter = 'bilinear' if embeds.pos_embed_type == 'factorized' else embeds.pos_embed_interp_mode
    antialias = '_antialias' * (embeds.pos_embed_type == 'learned' and embeds.pos_embed_antialias)
    row['naflex'] = filter + antialias
    if embeds.pos_embed_ar_preserving:
      row['naflex_square'] = True
  odd = [
    name_of(layer)
    for layer, known in (
      (block, BLOCKS),
      (block.attn, ATTENTION),
      (embeds or model.patch_embed, ('PatchEmbed', 'NaFlexEmbeds')),
    )
    if name_of(layer) not in known
  ]
  if embeds is not None and (
    embeds.pos_embed_align_corners or max(embeds.pos_embed_grid_size) > 64
  ):
    odd.append('positions of RADIO')
  rope = getattr(model, 'rope', None)
  if rope is not None:
    row['rope_temperature'] = rope.temperature
    row |= {
      'rope_type': ROPES.get(name_of(rope)),
      'rope_rotate_half': getattr(rope, 'rotate_half', None),
    }
    if row['rope_type'] == 'cat' and not rope.in_pixels and not rope.rotate_half:
      row |= {'rope_grid_offset': rope.grid_offset, 'rope_grid_indexing': rope.grid_indexing}
      if rope.ref_feat_shape is not None:
        row['ref_feat_shape'] = list(rope.ref_feat_shape)
    elif row['rope_type'] != 'dinov3' or not rope.rotate_half or rope.grid_offset:
      odd.append(name_of(rope))
  if model.global_pool == 'map' and model.attn_pool.num_heads != row['num_heads']:
    row['attn_pool_num_heads'] = model.attn_pool.num_heads
  return row | {'unread': f'layers of its own ({", ".join(odd)})'} if odd else row


def table() -> dict[str, Any]:
  """Rows {settings, {architecture: heads}} of all architectures of the modules."""
  names_of_row: dict[str, dict[str, int | None]] = {}
  for module in MODULES:
    for name in timm.list_models(module=module):
      row = settings(name)
      heads = row.pop('num_heads')
      names_of_row.setdefault(json.dumps(row), {})[name] = heads
  rows = [{'settings': json.loads(row), 'num_heads': heads} for row, heads in names_of_row.items()]
  return {'timm': timm.__version__, 'rows': rows}


if __name__ == '__main__':
  TABLE.write_text(json.dumps(table(), indent=0) + '\n')
