"""Whose files have which parameter under which name.

    vit   vision_transformer's and big_vision's ViTs, and uncertainty-baselines' on top of them
          (https://github.com/google-research/vision_transformer, .../big_vision,
          https://github.com/google/uncertainty-baselines)
    bit   Big Transfer's ResNets (https://github.com/google-research/big_transfer)

Heads: a linear one, or edward2's MCSoftmaxDenseFA and MCSigmoidDenseFA as uncertainty-baselines has
them: loc_layer, diag_layer (softplus + 1e-3 gives d), scale_layer_heteroscedastic (v),
scale_layer_homoscedastic (J, with bias) and pre_sigmoid_temperature (t); with a `latent_dim` the
noise is HET-XL's.
"""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

LAYOUTS = ('vit', 'bit')
# What trainers put in front of all names.
_PREFIX = re.compile(r'^(?:opt/)?(?:target/|params/)*')
_HEAD_PREFIXES = ('head', 'multiclass_head', 'multilabel_head')
_VIT_BLOCK = 'Transformer/encoderblock'


class Entry(NamedTuple):
  """One parameter's name in a file, and how its array there becomes ours ([D, H, D / H] to [D, D],
  say) by a reshape alone.
  """

  name: str
  shape: Callable[[tuple[int, ...], int], tuple[int, ...]]  # (our shape, heads) -> theirs


def _same(shape, num_heads):
  return shape


def _split_last(shape, num_heads):
  return (*shape[:-1], num_heads, shape[-1] // num_heads)


def _split_first(shape, num_heads):
  return (num_heads, shape[0] // num_heads, *shape[1:])


def _lead(count):
  return lambda shape, num_heads: (*(1,) * count, *shape)


_ATTENTION = {
  (name, part): (f'MultiHeadDotProductAttention_1/{name}/{part}', _split_last)
  for name in ('query', 'key', 'value')
  for part in ('kernel', 'bias')
}
_ATTENTION['out', 'kernel'] = 'MultiHeadDotProductAttention_1/out/kernel', _split_first
_ATTENTION['out', 'bias'] = 'MultiHeadDotProductAttention_1/out/bias', _same

_VIT: Mapping[str, tuple[str, Callable]] = {
  'backbone/embedding/kernel': ('embedding/kernel', _same),
  'backbone/embedding/bias': ('embedding/bias', _same),
  'backbone/class_token': ('cls', _lead(2)),
  'backbone/position_embedding': ('Transformer/posembed_input/pos_embedding', _lead(1)),
  'backbone/encoder_norm/scale': ('Transformer/encoder_norm/scale', _same),
  'backbone/encoder_norm/bias': ('Transformer/encoder_norm/bias', _same),
  'backbone/representation/kernel': ('pre_logits/kernel', _same),
  'backbone/representation/bias': ('pre_logits/bias', _same),
}
_VIT_BLOCKS = {
  'attention_norm/scale': ('LayerNorm_0/scale', _same),
  'attention_norm/bias': ('LayerNorm_0/bias', _same),
  **{f'attention/{name}/{part}': entry for (name, part), entry in _ATTENTION.items()},
  'mlp_norm/scale': ('LayerNorm_2/scale', _same),
  'mlp_norm/bias': ('LayerNorm_2/bias', _same),
  'mlp/wi/kernel': ('MlpBlock_3/Dense_0/kernel', _same),
  'mlp/wi/bias': ('MlpBlock_3/Dense_0/bias', _same),
  'mlp/wo/kernel': ('MlpBlock_3/Dense_1/kernel', _same),
  'mlp/wo/bias': ('MlpBlock_3/Dense_1/bias', _same),
}
# big_vision's names inside a block and those of vision_transformer that they replaced.
_RENAMED_IN_BLOCKS = {
  'LayerNorm_1': 'LayerNorm_2',
  'MultiHeadDotProductAttention_0': 'MultiHeadDotProductAttention_1',
  'MlpBlock_0': 'MlpBlock_3',
}
_BIT_CONVS = {
  'conv1': 'a/standardized_conv2d',
  'conv2': 'b/standardized_conv2d',
  'conv3': 'c/standardized_conv2d',
  'conv_proj': 'a/proj/standardized_conv2d',
}
_BIT_NORMS = {'norm1': 'a/group_norm', 'norm2': 'b/group_norm', 'norm3': 'c/group_norm'}
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


def layout_of(our_names) -> str:
  """The layout that has a place for our parameters.

  Raises:
    ValueError: for parameters of no backbone of ours, or of a v1.5 ResNet, which nobody publishes.
  """
  if 'backbone/embedding/kernel' in our_names:
    return 'vit'
  if 'backbone/conv_root/kernel' in our_names and 'backbone/norm/scale' in our_names:
    return 'bit'
  raise ValueError(
    "weights files exist for ViTs and for ResNets with ResNet.version='v2': the backbone is neither"
  )


def entry(our_name: str, layout: str, head_prefix: str | None) -> Entry:
  """Where a parameter of ours is in a file.

  Args:
    our_name: such as 'backbone/block00/mlp/wi/kernel', of unstacked parameters.
    layout: one of `LAYOUTS`.
    head_prefix: of a heteroscedastic head in the file; None for a linear head.
  """
  part, _, rest = our_name.partition('/')
  if part == 'head':
    return _head_entry(rest, layout, head_prefix)
  found = _vit_entry(our_name) if layout == 'vit' else _bit_entry(rest)
  return Entry(*found)


def _head_entry(rest, layout, head_prefix):
  if rest in ('kernel', 'bias'):
    if head_prefix is not None:
      return Entry(f'{head_prefix}/loc_layer/{rest}', _same)
    if layout == 'bit':
      return Entry(f'resnet/head/conv2d/{rest}', _lead(2) if rest == 'kernel' else _same)
    return Entry(f'head/{rest}', _same)
  prefix = head_prefix or 'head'
  return Entry(f'{prefix}/{_NOISE.get(rest, rest)}', _same)


def _vit_entry(our_name):
  if our_name in _VIT:
    return _VIT[our_name]
  block = re.fullmatch(r'backbone/block(\d+)/(.*)', our_name)
  name, shape = _VIT_BLOCKS[block[2]]
  return f'{_VIT_BLOCK}_{int(block[1])}/{name}', shape


def _bit_entry(rest):
  if rest == 'conv_root/kernel':
    return 'resnet/root_block/standardized_conv2d/kernel', _same
  if norm := re.fullmatch(r'norm/(scale|bias)', rest):
    return f'resnet/group_norm/{_GROUP_NORM[norm[1]]}', _same
  unit = re.fullmatch(r'stage(\d+)_unit(\d+)/(\w+)/(\w+)', rest)
  where = f'resnet/block{unit[1]}/unit{int(unit[2]):02d}'
  if unit[3] in _BIT_CONVS:
    return f'{where}/{_BIT_CONVS[unit[3]]}/{unit[4]}', _same
  return f'{where}/{_BIT_NORMS[unit[3]]}/{_GROUP_NORM[unit[4]]}', _same


def canonical(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """The arrays of a file under vision_transformer's names: without what trainers put in front,
  big_vision's newer names and its stacked blocks undone.
  """
  flat: dict[str, np.ndarray] = {}
  for name, x in arrays.items():
    name = _PREFIX.sub('', name)
    if name == 'pos_embedding':
      name = 'Transformer/posembed_input/pos_embedding'
    if name.startswith(f'{_VIT_BLOCK}/'):
      flat |= {name.replace(_VIT_BLOCK, f'{_VIT_BLOCK}_{i}', 1): x[i] for i in range(len(x))}
    else:
      flat[name] = x
  newer = any('/MlpBlock_0/' in name for name in flat)
  return {_older(name): x for name, x in flat.items()} if newer else flat


def _older(name):
  if not name.startswith(_VIT_BLOCK):
    return name
  return '/'.join(_RENAMED_IN_BLOCKS.get(part, part) for part in name.split('/'))


def head_prefix_of(names) -> str | None:
  """The name in front of a heteroscedastic head's layers; None where there is no such head."""
  for prefix in _HEAD_PREFIXES:
    if f'{prefix}/loc_layer/kernel' in names:
      return prefix
  return None


def is_head(name: str) -> bool:
  """Whether an array of a file belongs to its head."""
  return name.startswith(tuple(f'{p}/' for p in (*_HEAD_PREFIXES, 'resnet/head')))
