"""Towers of timm, transformers and open_clip: their settings and parameters from a file.

ViT, DeiT, DINOv2, DINOv3 (of transformers), CLIP, SigLIP and ConvNeXt are recognised by their
names. Kernels are transposed, fused projections are split, and the normalisation of the pixels goes
into the patch embedding, so that the tower takes images in [-1, 1] like all backbones here.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from het_plugin.weights import files

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_HALF = ((0.5,) * 3, (0.5,) * 3)

# The shapes do not give the number of attention heads: a head has 64 channels, except that towers
# of these widths have 16 heads.
_SIXTEEN_HEADS = {'image': (1152, 1280, 1408, 1664, 1792), 'SigLIP': (1152, 1536), 'text': (1152,)}

_PREFIX = re.compile(
  r'^(?:(?:model|vit|deit|dinov2|dinov3|convnext|convnextv2|vision_model|visual|trunk|module)\.)+'
)
_BLOCK = re.compile(
  r'(?:blocks|encoder\.layers?|layers?|transformer\.resblocks|model\.layer)\.(\d+)\.(.+)'
)
# Of a ConvNeXt: a block, and a layer between two stages.
_STAGE_BLOCK = re.compile(r'(?:encoder\.)?stages\.(\d+)\.(?:blocks|layers)\.(\d+)\.(.+)')
_STAGE_START = re.compile(r'(?:encoder\.)?stages\.(\d+)\.downsampl(?:e|ing_layer)\.([01])')

_OPEN_CLIP = 'open_clip_config.json'
# config.json's names and ours.
_ACTIVATIONS = {
  'gelu': 'gelu_exact',
  'quick_gelu': 'quick_gelu',
  'gelu_pytorch_tanh': 'gelu',
  'silu': 'swiglu',
}

# Arrays of a tower that are not used.
_SKIPPED = re.compile(
  r'(?:.*\.)?(?:mask_token|position_ids|logit_scale|logit_bias|rope\w*\..*|'
  r'(?:head_dist|distillation_classifier)\.(?:weight|bias))'
)


def _table(text: str) -> dict[str, str]:
  """{their name: ours} from lines of ours and theirs."""
  rows = (line.split() for line in text.strip().splitlines())
  return {name: ours for ours, *theirs in rows for name in theirs}


# Ours, and theirs without the prefix and '.weight' or '.bias', outside and inside blocks.
_OUTER = _table("""
class_token            cls_token embeddings.cls_token class_embedding embeddings.class_embedding
position_embedding     pos_embed positional_embedding
position_embedding     embeddings.position_embeddings embeddings.position_embedding
registers              reg_token embeddings.register_tokens
distillation           dist_token embeddings.distillation_token
embedding              patch_embed.proj conv1 embeddings.patch_embeddings.projection
embedding              embeddings.patch_embedding embeddings.patch_embeddings
pre_norm               norm_pre ln_pre pre_layrnorm
encoder_norm           norm layernorm ln_post post_layernorm
representation         pooler.dense
projection             visual_projection proj
pooling/probe          head.probe attn_pool.latent
pooling/attention/qkv  head.attention.in_proj_weight head.attention.in_proj_bias
pooling/attention/query  attn_pool.q
pooling/attention/kv   attn_pool.kv
pooling/attention/out  head.attention.out_proj attn_pool.proj
pooling/mlp_norm       head.layernorm attn_pool.norm
pooling/mlp/wi         head.mlp.fc1 attn_pool.mlp.fc1
pooling/mlp/wo         head.mlp.fc2 attn_pool.mlp.fc2
head                   head classifier cls_classifier
""")
_INNER = _table("""
attention_norm        norm1 layernorm_before layer_norm1 ln_1
attention/qkv         attn.qkv attn.in_proj_weight attn.in_proj_bias
attention/query       attention.attention.query self_attn.q_proj attention.q_proj
attention/key         attention.attention.key self_attn.k_proj attention.k_proj
attention/value       attention.attention.value self_attn.v_proj attention.v_proj
attention/out         attention.output.dense self_attn.out_proj attention.o_proj
attention/out         attn.proj attn.out_proj
attention/query_norm  attn.q_norm
attention/key_norm    attn.k_norm
attention_scale       ls1.gamma layer_scale1.lambda1
mlp_norm              norm2 layernorm_after layer_norm2 ln_2
mlp/wi                mlp.fc1 mlp.c_fc mlp.up_proj intermediate.dense
mlp/wi_gate           mlp.gate_proj
mlp/gate_and_wi       mlp.weights_in
mlp/wo                mlp.fc2 mlp.c_proj mlp.down_proj mlp.weights_out output.dense
mlp_scale             ls2.gamma layer_scale2.lambda1
""")
_CONVNEXT_OUTER = _table("""
stem       stem.0 embeddings.patch_embeddings
stem_norm  stem.1 embeddings.layernorm
norm       head.norm layernorm
head       head.fc classifier
""")
_CONVNEXT_INNER = _table("""
depthwise    conv_dw dwconv
norm         norm layernorm
wi           mlp.fc1 pwconv1
response     mlp.grn grn
wo           mlp.fc2 pwconv2
layer_scale  gamma layer_scale_parameter
""")
# Outside the blocks of text towers.
_TEXT_OUTER = _table("""
embedding           token_embedding embeddings.token_embedding
position_embedding  positional_embedding embeddings.position_embedding
encoder_norm        ln_final final_layer_norm
text_projection     text_projection head
""")
_TEXT_ROOT = re.compile(r'^(?:text_model|text)\.')


class _Params(dict[str, np.ndarray]):
  """Parameters by our names; asking for one that the file lacks is a ValueError."""

  def __missing__(self, name: str) -> np.ndarray:
    raise ValueError(f'the file lacks {name} of its tower: is it one of several files?')


@dataclasses.dataclass(frozen=True)
class Tower:
  """An image tower of another project."""

  settings: Mapping[str, Any]  # fields of `backbones.ViT`, or of `backbones.ConvNeXt`
  params: Mapping[str, np.ndarray]  # float32, by our name: 'backbone/block00/mlp/wi/kernel'
  image_size: int  # side in pixels of the images that the position embeddings are made for
  skipped: tuple[str, ...]  # names in the file that the tower does not use, such as a text tower
  backbone: str = 'vit'  # or 'convnext'

  def bindings(self) -> list[str]:
    """Gin bindings of backbone and image size."""
    settings = [f'{self.backbone}.{name} = {value!r}' for name, value in self.settings.items()]
    return [f'BACKBONE = @{self.backbone}()', f'IMAGE_SIZE = {self.image_size}', *settings]


@dataclasses.dataclass(frozen=True)
class TextTower:
  """A text tower of another project, beside its image tower.

  Token ids are theirs + 2; 1 is their end-of-sequence and 0 their padding (`data.TokenizerFile`).
  """

  settings: Mapping[str, Any]  # fields of `backbones.TextTransformer`
  params: Mapping[str, np.ndarray]  # float32, by our name: 'text_tower/block00/mlp/wi/kernel'
  length: int  # L, token ids per text
  scale: float  # factor of the similarities

  def bindings(self) -> list[str]:
    """Gin bindings of text tower, length and scale."""
    settings = [f'text_transformer.{name} = {value!r}' for name, value in self.settings.items()]
    return [f'TEXT_LENGTH = {self.length}', f'LogitScale.initial_scale = {self.scale}', *settings]


def read_text_tower(arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> TextTower:
  """The text tower of CLIP or SigLIP in a file's arrays; arguments as in `read_tower`."""
  config = config.get('text_config') or {}
  flat = _Params()
  for name, x in arrays.items():
    if name.startswith(('visual.', 'vision_model.', 'visual_projection')):
      continue
    ours, kind = _stem(_TEXT_ROOT.sub('', name), _TEXT_OUTER)
    if ours in ('embedding', 'position_embedding'):
      flat[ours] = np.asarray(x, np.float32)
    elif ours is not None:
      flat |= _converted(ours, kind, x, transpose=not name.endswith('text_projection'))
  if 'embedding' not in flat or 'text_projection/kernel' not in flat:
    raise ValueError('the file has no text tower of CLIP or SigLIP')
  table = flat.pop('embedding')  # [V, D]
  vocab_size, width = table.shape
  is_siglip = 'text_projection/bias' in flat
  # CLIP's end-of-sequence is its last id. SigLIP's is 1, which also pads; SigLIP 2 pads with 0.
  end = 1 if is_siglip else vocab_size - 1
  padding = 0 if vocab_size >= 256_000 else end
  rows = np.zeros((-(-(vocab_size + 2) // 128) * 128, width), np.float32)
  rows[0] = table[padding]
  rows[1] = table[end]
  rows[2 : vocab_size + 2] = table
  flat['embedding'] = rows
  flat.setdefault('text_projection/bias', np.zeros(flat['text_projection/kernel'].shape[1]))
  default = 'gelu_pytorch_tanh' if is_siglip else 'gelu'
  if 'text_model.embeddings.token_embedding.weight' in arrays and not is_siglip:
    default = 'quick_gelu'
  settings = {
    'vocab_size': vocab_size + 2,
    'width': width,
    **_block_settings(flat, config, 'text', width, default),
    'norm_epsilon': config.get('layer_norm_eps') or (1e-6 if is_siglip else 1e-5),
    'causal': not is_siglip,
    'reads_padding': is_siglip,
  }
  params = _placed(flat, 'text_tower', 'text_projection/')
  scale = float(np.exp(np.asarray(arrays.get('logit_scale', 0.0), np.float64)).reshape(()))
  return TextTower(settings, params, len(flat['position_embedding']), scale)


def is_tower(names: Collection[str]) -> bool:
  """Whether the arrays have the names of timm, transformers or open_clip."""
  stems = ((name, _stem(_PREFIX.sub('', name), _OUTER)[0]) for name in names)
  is_vit = any(stem == 'embedding' and 'embedding/' not in name for name, stem in stems)
  return is_vit or _is_convnext(names)


def _is_convnext(names: Collection[str]) -> bool:
  found = {_convnext_stem(_PREFIX.sub('', name))[0] for name in names}
  return {'stem', 'stage1_block01/wi'} <= found


def read_config(path: epath.PathLike) -> dict[str, Any]:
  """Settings from config.json, preprocessor_config.json and open_clip_config.json beside a file."""
  read = {}
  for name in (_OPEN_CLIP, 'config.json', 'preprocessor_config.json'):
    file = epath.Path(path).parent / name
    if file.exists():
      try:
        settings = json.loads(file.read_text())
        read |= _of_open_clip(settings) if name == _OPEN_CLIP else settings
      except ValueError as error:
        raise ValueError(f'{file} cannot be read: {error}') from error
  return {**read, **read.pop('vision_config', {}), **read.pop('pretrained_cfg', {})}


def _of_open_clip(settings: Mapping[str, Any]) -> dict[str, Any]:
  """The settings of open_clip under the names of transformers."""
  model = settings['model_cfg']
  pixels = settings.get('preprocess_cfg', {})
  image = model['vision_cfg']
  text = model['text_cfg']
  pooling = image.get('pool_type', 'tok'), text.get('pool_type', 'argmax')
  form = *pooling, text.get('no_causal_mask', False), text.get('proj_bias', False)
  if form not in (('tok', 'argmax', False, False), ('tok', 'last', True, True)):
    raise ValueError(f'its towers pool by {pooling[0]} and {pooling[1]}, unlike CLIP and SigLIP')
  activation = 'quick_gelu' if model.get('quick_gelu') else 'gelu'
  is_plain = 'width' in image  # neither a ResNet nor a model of timm
  return {
    'num_attention_heads': image['width'] // image.get('head_width', 64) if is_plain else None,
    'hidden_act': activation if is_plain else None,
    **{f'image_{name}': pixels.get(name) for name in ('mean', 'std')},
    'text_config': {
      'num_attention_heads': text.get('heads'),
      'hidden_act': activation if pooling[1] == 'argmax' else None,
    },
  }


def read_tower(arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> Tower:
  """The tower in a file's arrays; an empty `read_config` means the usual values of the project.

  Layers that the backbone does not have are a ValueError that names them.
  """
  if _is_convnext(arrays):
    return _read_convnext(arrays, config)
  flat, skipped = _renamed(arrays, 'ViT', lambda name: _stem(name, _OUTER))
  kernel = flat['embedding/kernel']  # [P, P, C, D]
  patch_size = kernel.shape[0]
  width = kernel.shape[-1]
  is_clip = 'pre_norm/scale' in flat
  is_siglip = 'pooling/probe' in flat
  is_dino = 'block00/attention_scale' in flat
  is_rotary = 'position_embedding' not in flat

  defaults = _CLIP if is_clip else _IMAGENET if is_dino or 'distillation' in flat else _HALF
  _normalise_pixels(flat, 'embedding', config, defaults)

  if 'distillation' in flat:  # DeiT's second token, which has a position
    position = flat['position_embedding']
    flat['registers'] = flat.pop('distillation') + position[1:2]
    flat['position_embedding'] = np.delete(position, 1, axis=0)
  for name in list(flat):
    if name.endswith('/query/bias'):
      flat.setdefault(name.replace('/query/', '/key/'), np.zeros(width))  # DINOv3 has none for keys
    # timm's SwiGLUPacked: gate and hidden layer in one.
    elif '/mlp/wi/' in name:
      hidden = len(flat[f'{name.partition("/wi/")[0]}/wo/kernel'])
      if flat[name].shape[-1] == 2 * hidden:
        gate, flat[name] = np.split(flat[name], 2, axis=-1)
        flat[name.replace('/wi/', '/wi_gate/')] = gate
  if is_rotary:
    image_size = _image_size(config)
  else:
    position = flat['position_embedding']
    side = math.isqrt(len(position))
    if 'class_token' in flat and side * side == len(position):  # timm's no_embed_class
      flat['position_embedding'] = np.pad(position, ((1, 0), (0, 0)))
    image_size = side * patch_size

  names = ' '.join(arrays)
  architecture = config.get('architecture', '')
  # transformers' CLIP is OpenAI's; timm names the files that have its activation.
  is_openai = 'pre_layrnorm' in names or 'quickgelu' in architecture
  # These sizes of timm's SigLIP have the tanh approximation of GELU, the others the exact one.
  is_tanh = patch_size == 32 or width == 1536 or (patch_size, width) == (16, 1152)
  is_tanh |= (width, image_size) == (1024, 512)
  is_tanh &= is_siglip or 'siglip' in architecture
  is_tanh |= 'head.probe' in names  # transformers' SigLIP, all sizes
  activation = 'quick_gelu' if is_openai else 'gelu_pytorch_tanh' if is_tanh else 'gelu'

  def width_of(name: str) -> int | None:
    return flat[name].shape[-1] if name in flat else None

  settings = {
    'patch_size': patch_size,
    'width': width,
    **_block_settings(flat, config, 'SigLIP' if is_siglip else 'image', width, activation),
    'pooling': 'map' if is_siglip else 'token' if 'class_token' in flat else 'gap',
    'norm_epsilon': config.get('layer_norm_eps') or (1e-5 if is_clip or is_rotary else 1e-6),
    'position': 'rope' if is_rotary else 'learned',
    'num_registers': len(flat.get('registers', ())),
    'qkv_bias': 'block00/attention/query/bias' in flat,
    'qk_norm': 'block00/attention/query_norm/scale' in flat,
    'layer_scale': 1e-5 if is_dino else None,
    'pre_norm': is_clip,
    'projection_size': width_of('projection/kernel'),
    'representation_size': width_of('representation/kernel'),
  }
  return Tower(settings, _placed(flat), image_size, skipped)


def _block_settings(
  flat: dict[str, np.ndarray], config: Mapping[str, Any], form: str, width: int, activation: str
) -> dict[str, Any]:
  """Settings of the blocks; `activation` is the name where the configuration has none."""
  usual_heads = 16 if width in _SIXTEEN_HEADS[form] else max(1, width // 64)
  activation = config.get('hidden_act') or activation
  if activation not in _ACTIVATIONS:
    known = ', '.join(_ACTIVATIONS)
    raise ValueError(f'hidden_act={activation!r} in config.json must be one of {known}')
  is_gated = 'block00/mlp/wi_gate/kernel' in flat
  return {
    'depth': sum(name.endswith('/attention_norm/scale') for name in flat),
    'mlp_dim': flat['block00/mlp/wi/kernel'].shape[-1],
    'num_heads': config.get('num_attention_heads') or usual_heads,
    'mlp': 'swiglu' if is_gated else _ACTIVATIONS[activation],
  }


def _read_convnext(arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> Tower:
  flat, skipped = _renamed(arrays, 'ConvNeXt', _convnext_stem)
  _normalise_pixels(flat, 'stem', config, _IMAGENET)
  blocks = [name for name in flat if name.endswith('/wo/kernel')]
  stages = sorted({name.partition('_')[0] for name in blocks})
  settings = {
    'depths': tuple(sum(name.startswith(f'{stage}_') for name in blocks) for stage in stages),
    'width': flat['stem/kernel'].shape[-1],
    'version': 'v1' if 'stage1_block01/layer_scale' in flat else 'v2',
  }
  return Tower(settings, _placed(flat), _image_size(config), skipped, 'convnext')


def _normalise_pixels(
  flat: dict[str, np.ndarray],
  layer: str,
  config: Mapping[str, Any],
  defaults: tuple[Sequence[float], Sequence[float]],
) -> None:
  """Puts the file's normalisation of x' = (x + 1) / 2 into a layer of patches; x is in [-1, 1]."""
  mean = np.asarray(config.get('image_mean') or config.get('mean') or defaults[0])
  std = np.asarray(config.get('image_std') or config.get('std') or defaults[1])
  kernel = flat[f'{layer}/kernel']  # [P, P, C, D]
  if not kernel.shape[2] == len(mean) == len(std):
    raise ValueError(
      f'the patches of the file have {kernel.shape[2]} channels, and its image_mean and image_std '
      f'{len(mean)} and {len(std)}'
    )
  bias = flat.get(f'{layer}/bias', np.zeros(kernel.shape[-1]))
  flat[f'{layer}/bias'] = bias + np.einsum('pqcd,c->d', kernel, (0.5 - mean) / std)
  flat[f'{layer}/kernel'] = kernel * (0.5 / std)[:, None]


def _image_size(config: Mapping[str, Any]) -> int:
  sizes = (config.get('image_size'), (config.get('input_size') or [None])[-1], 224)
  return next(int(size) for size in sizes if size)


def _placed(
  flat: dict[str, np.ndarray], tower: str = 'backbone', outside: str = 'head/'
) -> dict[str, np.ndarray]:
  """Parameters by our names in a model with this tower."""
  return {
    name if name.startswith(outside) else f'{tower}/{name}': np.asarray(x, np.float32)
    for name, x in flat.items()
  }


def tower_bindings(path: epath.PathLike) -> list[str]:
  """Gin bindings of backbone and image size for the tower in a file; none if there is no tower."""
  arrays = files.read_arrays(path)
  return read_tower(arrays, read_config(path)).bindings() if is_tower(arrays) else []


def _layer_and_kind(name: str) -> tuple[str, str]:
  """Their name of a layer, and 'weight' or 'bias'."""
  layer, _, kind = name.rpartition('.')
  if kind in ('weight', 'bias'):
    return layer, kind
  return name, 'bias' if kind.endswith('_bias') else 'weight'


def _stem(name: str, outer: Mapping[str, str]) -> tuple[str | None, str]:
  """Our name of a layer, None if it is unknown, and 'weight' or 'bias'."""
  name, kind = _layer_and_kind(name)
  if block := _BLOCK.fullmatch(name):
    inner = _INNER.get(block[2])
    return inner and f'block{int(block[1]):02d}/{inner}', kind
  return outer.get(name), kind


def _convnext_stem(name: str) -> tuple[str | None, str]:
  """Our name of a layer of a ConvNeXt, None if it is unknown, and 'weight' or 'bias'."""
  name, kind = _layer_and_kind(name)
  if block := _STAGE_BLOCK.fullmatch(name):
    inner = _CONVNEXT_INNER.get(block[3])
    root = f'stage{int(block[1]) + 1}_block{int(block[2]) + 1:02d}'
    return root if inner == 'depthwise' else inner and f'{root}/{inner}', kind
  if start := _STAGE_START.fullmatch(name):
    return f'stage{int(start[1]) + 1}_{("norm", "patches")[int(start[2])]}', kind
  return _CONVNEXT_OUTER.get(name), kind


def _renamed(
  arrays: Mapping[str, np.ndarray], backbone: str, stem: Callable[[str], tuple[str | None, str]]
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
  """Parameters by our names without 'backbone/', and the names that the tower does not use."""
  roots = [root for root in ('visual.', 'vision_model.') if any(root in name for name in arrays)]
  flat = _Params()
  skipped = []
  unknown = []
  for name, x in arrays.items():
    if roots and roots[0] not in name and 'visual_projection' not in name:
      skipped.append(name)  # belongs to the text tower
      continue
    ours, kind = stem(_PREFIX.sub('', name))
    if ours is not None:
      flat |= _converted(ours, kind, x, transpose=not name.endswith('proj'))
    else:
      (skipped if _SKIPPED.fullmatch(name) else unknown).append(name)
  if unknown:
    some = ', '.join(unknown[:5])
    raise ValueError(f'{len(unknown)} layers have no place in a {backbone}, such as {some}')
  return flat, tuple(sorted(skipped))


def _converted(ours: str, kind: str, x: np.ndarray, transpose: bool) -> dict[str, np.ndarray]:
  """One array of theirs as our parameters, by name."""
  x = np.asarray(x, np.float32)
  layer = ours.rpartition('/')[2]
  if layer in ('class_token', 'probe'):
    return {ours: x.reshape(-1)}
  if layer in ('position_embedding', 'registers', 'distillation'):
    return {ours: x.reshape(-1, x.shape[-1])}
  if layer in ('attention_scale', 'mlp_scale', 'layer_scale'):
    return {ours: x}
  if layer == 'response':
    return {f'{ours}_{"scale" if kind == "weight" else "bias"}': x.reshape(-1)}
  if layer.endswith('norm'):
    return {f'{ours}/{"scale" if kind == "weight" else "bias"}': x}
  if layer in ('wi', 'wo') and x.shape[2:] == (1, 1):  # timm's 1 x 1 convolutions
    x = x.reshape(x.shape[:2])
  if kind == 'weight' and transpose:
    x = x.transpose(2, 3, 1, 0) if x.ndim == 4 else x.T
  if kind == 'weight' and layer == 'embedding' and x.ndim == 2:  # SigLIP 2 NaFlex: rows of patches
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
