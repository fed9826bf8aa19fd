"""Names and shapes of our parameters in published files.

    vit   ViTs of vision_transformer, big_vision and uncertainty-baselines
          (https://github.com/google-research/vision_transformer, .../big_vision,
          https://github.com/google/uncertainty-baselines), and vmoe's ViTs with experts
          (https://github.com/google-research/vmoe)
    bit   ResNets of Big Transfer (https://github.com/google-research/big_transfer)

`towers` reads the names of timm, transformers and open_clip.

The head is linear, or edward2's MCSoftmaxDenseFA or MCSigmoidDenseFA as in uncertainty-baselines:
loc_layer (W, b), diag_layer (d = softplus + 1e-3), scale_layer_heteroscedastic (v),
scale_layer_homoscedastic (J, with a bias) and pre_sigmoid_temperature (t). With a `latent_dim` it
is HET-XL, otherwise HET.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

OURS = 'ours'  # the arrays have our names already
# Prefixes that trainers put in front of all names.
_PREFIX = re.compile(r'^(?:opt/)?(?:target/|params/)*')
# The optimizer's state in a training checkpoint.
_OPTIMIZER = re.compile(r'^opt/(?!target/|params/)')
_HEAD_PREFIXES = ('head', 'multiclass_head', 'multilabel_head')
_VIT_BLOCK = 'Transformer/encoderblock'
Shape = Callable[[tuple[int, ...], int], tuple[int, ...]]  # (our shape, H) -> shape in the file


class Entry(NamedTuple):
  """The name of a parameter in a file and its shape there.

  The arrays differ by a reshape only, for example [D, D] from [D, H, D / H] with H attention heads.
  """

  name: str
  shape: Shape


def _same(shape: tuple[int, ...], num_heads: int) -> tuple[int, ...]:
  return shape


def _split_last(shape: tuple[int, ...], num_heads: int) -> tuple[int, ...]:
  return (*shape[:-1], num_heads, shape[-1] // num_heads)


def _split_first(shape: tuple[int, ...], num_heads: int) -> tuple[int, ...]:
  return (num_heads, shape[0] // num_heads, *shape[1:])


def _lead(count: int) -> Shape:
  return lambda shape, num_heads: (*(1,) * count, *shape)


def _layer(
  ours: str, theirs: str, parts: Sequence[str] = ('kernel', 'bias'), shape: Shape = _same
) -> dict[str, tuple[str, Shape]]:
  """{parameter of ours: (name in a file, shape)} of a layer."""
  return {f'{ours}/{part}': (f'{theirs}/{part}', shape) for part in parts}


def _norm(ours: str, theirs: str) -> dict[str, tuple[str, Shape]]:
  return _layer(ours, theirs, ('scale', 'bias'))


def _mlp(ours: str, theirs: str) -> dict[str, tuple[str, Shape]]:
  return _layer(f'{ours}/wi', f'{theirs}/Dense_0') | _layer(f'{ours}/wo', f'{theirs}/Dense_1')


def _attention(ours: str, theirs: str) -> dict[str, tuple[str, Shape]]:
  layers = _layer(f'{ours}/out', f'{theirs}/out', ['kernel'], _split_first)
  layers |= _layer(f'{ours}/out', f'{theirs}/out', ['bias'])
  for name in ('query', 'key', 'value'):
    layers |= _layer(f'{ours}/{name}', f'{theirs}/{name}', shape=_split_last)
  return layers


_VIT: Mapping[str, tuple[str, Callable]] = {
  **_layer('embedding', 'embedding'),
  'class_token': ('cls', _lead(2)),
  'position_embedding': ('Transformer/posembed_input/pos_embedding', _lead(1)),
  **_norm('encoder_norm', 'Transformer/encoder_norm'),
  **_layer('representation', 'pre_logits'),
  # big_vision's pooling='map'.
  'pooling/probe': ('MAPHead_0/probe', _lead(2)),
  **_norm('pooling/mlp_norm', 'MAPHead_0/LayerNorm_0'),
  **_attention('pooling/attention', 'MAPHead_0/MultiHeadDotProductAttention_0'),
  **_mlp('pooling/mlp', 'MAPHead_0/MlpBlock_0'),
}
_VIT_BLOCKS = {
  **_norm('attention_norm', 'LayerNorm_0'),
  **_attention('attention', 'MultiHeadDotProductAttention_1'),
  **_norm('mlp_norm', 'LayerNorm_2'),
  **_mlp('mlp', 'MlpBlock_3'),
  # vmoe's experts.
  'moe/router': ('Moe/Router/dense/kernel', _same),
  **_mlp('moe/experts', 'Moe/Mlp'),
}
# Names of big_vision and vmoe inside a block, and the older names of vision_transformer.
_RENAMED_IN_BLOCKS = {
  'LayerNorm_1': 'LayerNorm_2',
  'MultiHeadDotProductAttention_0': 'MultiHeadDotProductAttention_1',
  'MlpBlock_0': 'MlpBlock_3',
  'SelfAttention': 'MultiHeadDotProductAttention_1',
  'Mlp': 'MlpBlock_3',
}
_NEWER = ('/MlpBlock_0/', '/SelfAttention/')
_BIT = {'conv_root': 'root_block/standardized_conv2d', 'norm': 'group_norm'}
_BIT_UNITS = {
  **{f'conv{i}': f'{x}/standardized_conv2d' for i, x in ((1, 'a'), (2, 'b'), (3, 'c'))},
  **{f'norm{i}': f'{x}/group_norm' for i, x in ((1, 'a'), (2, 'b'), (3, 'c'))},
  'conv_proj': 'a/proj/standardized_conv2d',
}
# big_vision's names (models/bit_paper.py) outside of units. Inside, they are ours with gn for norm.
_BIG_VISION_BIT = {
  'root_block/conv_root': 'root_block/standardized_conv2d',
  'norm-pre-head': 'group_norm',
  'head': 'head/conv2d',
}
_NUMBERED = re.compile(r'/standardized_conv2d_\d+/')
_GROUP_NORM = {'scale': 'gamma', 'bias': 'beta'}
_NOISE = {
  'covariance/v_kernel': 'scale_layer_heteroscedastic/kernel',
  'covariance/v_bias': 'scale_layer_heteroscedastic/bias',
  'covariance/J': 'scale_layer_homoscedastic/kernel',
  'covariance/J_bias': 'scale_layer_homoscedastic/bias',
  'covariance/d_kernel': 'diag_layer/kernel',
  'covariance/d_bias': 'diag_layer/bias',
  'temperature/t': 'pre_sigmoid_temperature',
}


def layout_of(our_names: Collection[str]) -> str:
  """The layout of the backbone that our parameters belong to, a ViT or a v2 ResNet."""
  if 'backbone/embedding/kernel' in our_names:
    return 'vit'
  if 'backbone/conv_root/kernel' in our_names and 'backbone/norm/scale' in our_names:
    return 'bit'
  raise ValueError(
    "weights can be exported for ViTs and for ResNets with ResNet.version='v2'; this backbone "
    'is neither'
  )


def has_our_names(arrays: Collection[str]) -> bool:
  """Whether the arrays of a file have our names, as `estimators.to_checkpoint` writes them."""
  return 'head/kernel' in arrays and all(x.startswith(('backbone/', 'head/')) for x in arrays)


def entry(our_name: str, layout: str, head_prefix: str | None) -> Entry:
  """Name and shape in a file of one of our parameters, such as 'backbone/block00/mlp/wi/kernel'.

  `head_prefix` is the prefix of a heteroscedastic head in the file; None for a linear head.
  """
  if layout == OURS:
    return Entry(our_name, _same)
  part, _, rest = our_name.partition('/')
  if part == 'head':
    return _head_entry(rest, layout, head_prefix)
  return Entry(*(_vit_entry(rest) if layout == 'vit' else _bit_entry(rest)))


def _head_entry(rest: str, layout: str, head_prefix: str | None) -> Entry:
  if rest in ('kernel', 'bias'):
    if head_prefix is not None:
      return Entry(f'{head_prefix}/loc_layer/{rest}', _same)
    if layout == 'bit':
      return Entry(f'resnet/head/conv2d/{rest}', _lead(2) if rest == 'kernel' else _same)
    return Entry(f'head/{rest}', _same)
  prefix = head_prefix or 'head'
  return Entry(f'{prefix}/{_NOISE.get(rest, rest)}', _same)


def _vit_entry(rest: str) -> tuple[str, Shape]:
  if rest in _VIT:
    return _VIT[rest]
  block = re.fullmatch(r'block(\d+)/(.*)', rest)
  if block is None or block[2] not in _VIT_BLOCKS:
    return f'backbone/{rest}', _same  # no file has it
  name, shape = _VIT_BLOCKS[block[2]]
  return f'{_VIT_BLOCK}_{int(block[1])}/{name}', shape


def _bit_entry(rest: str) -> tuple[str, Shape]:
  layer, _, parameter = rest.rpartition('/')
  if unit := re.fullmatch(r'stage(\d+)_unit(\d+)/(\w+)', layer):
    theirs = f'block{unit[1]}/unit{int(unit[2]):02d}/{_BIT_UNITS[unit[3]]}'
  else:
    theirs = _BIT[layer]
  return f'resnet/{theirs}/{_GROUP_NORM.get(parameter, parameter)}', _same


def canonical(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """The arrays of a file under vision_transformer's names.

  Removes the prefixes of trainers, renames the layers of big_vision and vmoe, and unstacks blocks.
  """
  flat: dict[str, np.ndarray] = {}
  for name, x in arrays.items():
    name = _NUMBERED.sub('/standardized_conv2d/', _PREFIX.sub('', name))
    name = re.sub('^Encoder/', 'Transformer/', name)
    if name == 'pos_embedding':
      name = 'Transformer/posembed_input/pos_embedding'
    if name.startswith(f'{_VIT_BLOCK}/'):
      flat |= {name.replace(_VIT_BLOCK, f'{_VIT_BLOCK}_{i}', 1): x[i] for i in range(len(x))}
    else:
      flat[name] = x
  if 'root_block/conv_root/kernel' in flat:
    flat = {_big_transfer(name): x for name, x in flat.items()}
  newer = any(part in name for name in flat for part in _NEWER)
  return {_older(name): x for name, x in flat.items()} if newer else flat


def _big_transfer(name: str) -> str:
  layer, _, parameter = name.rpartition('/')
  unit, _, inner = layer.rpartition('/')
  inner = _BIT_UNITS.get(inner.replace('gn', 'norm'))
  theirs = _BIG_VISION_BIT.get(layer) or (inner and f'{unit}/{inner}')
  if theirs is None:
    return name
  if theirs.endswith('group_norm'):
    parameter = _GROUP_NORM.get(parameter, parameter)
  return f'resnet/{theirs}/{parameter}'


def _older(name: str) -> str:
  if not name.startswith(_VIT_BLOCK) or '/Moe/' in name:
    return name
  return '/'.join(_RENAMED_IN_BLOCKS.get(part, part) for part in name.split('/'))


def is_optimizer_state(name: str) -> bool:
  """Whether an array of a file is optimizer state, which is not read."""
  return _OPTIMIZER.match(name) is not None


def head_prefix_of(names: Collection[str]) -> str | None:
  """Prefix of the layers of a heteroscedastic head; None if the file has no such head."""
  for prefix in _HEAD_PREFIXES:
    if f'{prefix}/loc_layer/kernel' in names:
      return prefix
  return None


def is_head(name: str) -> bool:
  """Whether an array of a file belongs to the head."""
  return name.startswith(tuple(f'{p}/' for p in (*_HEAD_PREFIXES, 'resnet/head')))
