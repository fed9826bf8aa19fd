"""Towers of timm, transformers and open_clip: their settings and parameters from a file.

ViT, DeiT, DINOv2, DINOv3 (of transformers), CLIP, SigLIP and ConvNeXt are recognised by their
names. Kernels are transposed, fused projections are split, and the normalisation of the pixels goes
into the patch embedding, so that the tower takes images in [-1, 1] like all backbones here.
"""

import dataclasses
import functools
import json
import logging
import math
import pathlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from het_plugin.weights import hub, pixels

_log = logging.getLogger(__name__)
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_HALF = ((0.5,) * 3, (0.5,) * 3)

# The shapes do not give the number of attention heads: a head has 64 channels, except that towers
# of these widths have 16 heads.
_SIXTEEN_HEADS = {'image': (1152, 1280, 1408, 1664, 1792), 'SigLIP': (1152, 1536), 'text': (1152,)}

_PREFIX = re.compile(
  r'^(?:(?:model|vit|deit|beit|data2vec_vision|resnet|dinov2|dinov2_with_registers|dinov3|convnext|convnextv2|vision_model|visual|'
  r'trunk|module|backbone|_orig_mod|teacher|student|image_encoder|vision_tower|base_model)\.)+'
)
_STRIPPED = (
  'backbone.',
  '_orig_mod.',
  'teacher.',
  'student.backbone.',
  'image_encoder.',
  'vision_tower.',
  'base_model.model.',
)
_BLOCK = re.compile(
  r'(?:blocks|encoder\.layers?|layers?|transformer\.resblocks|model\.layer)\.(\d+)\.(.+)'
)
# Of a ConvNeXt: a block, and a layer between two stages.
_STAGE_BLOCK = re.compile(r'(?:encoder\.)?stages\.(\d+)\.(?:blocks|layers)\.(\d+)\.(.+)')
_STAGE_START = re.compile(r'(?:encoder\.)?stages\.(\d+)\.downsampl(?:e|ing_layer)\.([01])')

_OPENAI_VOCABULARY = 49_408  # whose last id is the end
# What vision_cfg may have: the rest is read, or told by shapes.
_OPEN_CLIP_IMAGE = re.compile(
  r'image_size|layers|width|head_width|mlp_ratio|patch_size|patch_dropout|no_ln_pre|'
  r'pos_embed_type|final_ln_after_pool|pool_type|output_tokens'
)
# config.json's names and ours.
_ACTIVATIONS = {
  'gelu': 'gelu_exact',
  'quick_gelu': 'quick_gelu',
  'gelu_pytorch_tanh': 'gelu',
  'silu': 'swiglu',
}

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
_BATCH_NORM_EPSILON = 1e-5

# timm's names of activations, and transformers'.
_TIMM_ACTIVATIONS = {
  'gelu': 'gelu',
  'gelu_tanh': 'gelu_pytorch_tanh',
  'quick_gelu': 'quick_gelu',
  'silu': 'silu',
  'relu': 'relu',  # of ResNets
}
# What timm's model_args may have beside what is read: shapes tell it, or training alone uses it.
_TIMM_OF_SHAPES = re.compile(
  r'(?:img_size|patch_size|embed_dim|depth|mlp_ratio|qkv_bias|qkv_fused|qk_norm|init_values|'
  r'reg_tokens|num_reg_tokens|class_token|no_embed_class|pre_norm|use_pre_transformer_norm|'
  r'fc_norm|use_fc_norm|in_chans|num_classes|dims|depths|layers|ls_init_value|conv_mlp|use_grn|'
  r'swiglu_mlp|swiglu_align_to|weight_init|fix_init|head_init_scale|dynamic_img_size|'
  r'dynamic_img_pad|strict_img_size|use_abs_pos_emb|use_rot_pos_emb|\w*_rate|'
  r'rope_(?:shift|jitter|rescale)_coords|scale_mlp|scale_attn_inner|attn_type|'
  r'attn_pool_mlp_ratio|use_post_transformer_norm|use_(?:shared_)?rel_pos_bias)'
)
_TIMM_READ = (
  'num_heads',
  'act_layer',
  'global_pool',
  'pool_include_prefix',
  'attn_pool_num_heads',
  'ref_feat_shape',
  'rope_grid_indexing',
  'rope_grid_offset',
  'rope_temperature',
)
# Settings of transformers with the one value that the towers here have.
_FIXED = {'pooler_act': 'tanh', 'apply_layernorm': True, 'use_qk_norm': False}

# Of a last normalisation after the pooling, and of towers that may have none.
_POOLED_NORM = r'fc_norm\.weight|pooler\.layernorm\.weight'
_SCALED_BEIT = r'lambda_1|\.ls1(?: |$)'

# Arrays of a tower that are not used.
_SKIPPED = re.compile(
  r'(?:.*\.)?(?:mask_token|position_ids|relative_position_index|logit_scale|logit_bias|rope\w*\..*|'
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
position_embedding     preprocessor.pos_embed
relative_position      rel_pos_bias.relative_position_bias_table
relative_position      shared_position_bias.relative_position_bias_table
relative_position      encoder.relative_position_bias.relative_position_bias_table
registers              reg_token embeddings.register_tokens
distillation           dist_token embeddings.distillation_token
embedding              patch_embed.proj conv1 embeddings.patch_embeddings.projection
embedding              embeddings.patch_embedding embeddings.patch_embeddings
embedding              embeddings.patch_embed preprocessor.patchifier.proj
patch_norm             patch_embed.norm embeddings.rms_norm preprocessor.patchifier.norm
pre_norm               norm_pre ln_pre pre_layrnorm
encoder_norm           norm layernorm ln_post post_layernorm fc_norm rms_norm post_trunk_norm
encoder_norm           pooler.layernorm
representation         pooler.dense
projection             visual_projection proj head.proj
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
attention_norm        norm1 layernorm_before layer_norm1 ln_1 rms_norm1 norm_1
attention/qkv         attn.qkv attn.in_proj_weight attn.in_proj_bias
attention/query       attention.attention.query self_attn.q_proj attention.q_proj
attention/query       attn.q_proj attn.q_bias
attention/key         attention.attention.key self_attn.k_proj attention.k_proj attn.k_proj
attention/value       attention.attention.value self_attn.v_proj attention.v_proj
attention/value       attn.v_proj attn.v_bias
attention/out         attention.output.dense self_attn.out_proj attention.o_proj
attention/out         attn.proj attn.out_proj attention.out_proj attention.projection_layer
attention/query_norm  attn.q_norm
attention/key_norm    attn.k_norm
attention/sub_norm    attn.norm
attention/relative_position  attn.relative_position_bias_table
attention/relative_position  relative_position_bias.relative_position_bias_table
attention/relative_position  attention.attention.relative_position_bias.relative_position_bias_table
mlp/sub_norm          mlp.norm
attention_scale       ls1.gamma layer_scale1.lambda1 gamma_1 lambda_1 ls1
mlp_norm              norm2 layernorm_after layer_norm2 ln_2 rms_norm2 norm_2
mlp/wi                mlp.fc1 mlp.c_fc mlp.up_proj intermediate.dense mlp.fc1_x
mlp/wi                ffn.up_proj mlp.fc3
mlp/wi_gate           mlp.gate_proj mlp.fc1_g ffn.gate_proj
mlp/gate_and_wi       mlp.weights_in
mlp/wo                mlp.fc2 mlp.c_proj mlp.down_proj mlp.weights_out output.dense ffn.down_proj
mlp_scale             ls2.gamma layer_scale2.lambda1 gamma_2 lambda_2 ls2
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
  tokenizer_end = config.get('tokenizer_end')
  config = config.get('text_config') or {}
  if 'unread' in config:
    raise ValueError(config['unread'])
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
  # SigLIP's end-of-sequence is 1, which also pads; SigLIP 2 pads with 0.
  end = 1 if is_siglip else _end_of(config, tokenizer_end, vocab_size)
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


def _end_of(config: Mapping[str, Any], tokenizer_end: int | None, vocab_size: int) -> int:
  """The end-of-sequence of a CLIP: of its configuration, its tokenizer, or OpenAI's vocabulary."""
  # OpenAI's configurations say 2, whatever the vocabulary; in MetaCLIP 2's it is the end.
  stated = config.get('eos_token_id')
  is_wrong = stated == 2 and config.get('model_type') != 'metaclip_2_text_model'
  end = tokenizer_end if stated is None or is_wrong else stated
  if end is None:
    end = min(vocab_size, _OPENAI_VOCABULARY) - 1
  if not 0 <= end < vocab_size:
    raise ValueError(
      f'eos_token_id={end} in the text_config of config.json must be below the {vocab_size} rows '
      'of the token embeddings'
    )
  return end


def is_tower(names: Collection[str]) -> bool:
  """Whether the arrays have the names of timm, transformers or open_clip."""
  stems = ((name, _stem(_PREFIX.sub('', name), _OUTER)[0]) for name in names)
  is_vit = any(stem == 'embedding' and 'embedding/' not in name for name, stem in stems)
  return is_vit or any(test(names) for test in (_is_convnext, _is_resnet, _is_bit))


def antialiases(names: Collection[str]) -> bool:
  """Whether the project of a tower antialiases when it resizes position embeddings.

  timm and open_clip do, transformers does not.
  """
  return not any('embeddings.' in name and 'token_embedding' not in name for name in names)


def not_recognised(names: Collection[str]) -> str:
  """A sentence on a file with arrays of these names, in which no tower was recognised."""
  some = ', '.join(sorted(names)[:3])
  return (
    f'no tower was recognised among its {len(names)} arrays, such as {some}. Read are the families '
    f'of docs/backbones.md, also with a prefix such as {", ".join(_STRIPPED)}; for another model '
    'name a gin file of it with --gin_file'
  )


def _is_convnext(names: Collection[str]) -> bool:
  found = {_convnext_stem(_PREFIX.sub('', name))[0] for name in names}
  return {'stem', 'stage1_block01/wi'} <= found


def _is_resnet(names: Collection[str]) -> bool:
  found = {_PREFIX.sub('', name) for name in names}
  return {'layer1.0.conv1.weight', 'layer1.0.bn1.weight', 'conv1.weight'} <= found or (
    'embedder.embedder.convolution.weight' in found
  )


def _is_bit(names: Collection[str]) -> bool:
  found = {_PREFIX.sub('', name) for name in names}
  return {'stem.conv.weight', 'stages.0.blocks.0.conv1.weight', 'norm.weight'} <= found


def read_config(path: epath.PathLike) -> dict[str, Any]:
  """Settings from the descriptions beside a file: config.json, preprocessor_config.json,
  processor_config.json (transformers 5), open_clip_config.json and the tokenizer's.

  Raises:
    ValueError: a description is no JSON object, or says what cannot be read.
  """
  file = epath.Path(hub.local(path))
  folder = file.parent
  names = (pixels.OPEN_CLIP, pixels.CONFIG, pixels.PREPROCESSOR, pixels.PROCESSOR)
  described = {name: found for name in names if (found := _json(folder / name)) is not None}
  read: dict[str, Any] = {}
  for name, settings in described.items():
    if name == pixels.OPEN_CLIP:
      settings = _of_open_clip(settings)
    elif name == pixels.PROCESSOR:
      settings = settings.get('image_processor', {})
    read |= settings
  if (end := _tokenizer_end(folder)) is not None:
    read['tokenizer_end'] = end
  if 'quantization_config' in read:
    raise ValueError(
      f'{folder / "config.json"} has a quantization_config: take the file of the same model that '
      'is not quantised'
    )
  if 'peft_type' in read or (folder / 'adapter_config.json').exists():
    raise ValueError(
      f'{path} is an adapter (LoRA): merge it into its base model, and save that as a whole'
    )
  read = {**read, **read.pop('vision_config', {}), **read.pop('pretrained_cfg', {})}
  made = pixels.read(described, file.name.startswith('open_clip'))
  if made is None:
    return read
  return {**read, 'pixels': made, **{name: made[name] for name in ('image_mean', 'image_std')}}


def _json(file: epath.Path) -> dict[str, Any] | None:
  """A JSON object of a file; None if there is no file."""
  if not file.exists():
    return None
  try:
    settings = json.loads(file.read_text())
  except ValueError as error:
    raise ValueError(f'{file} cannot be read: {error}') from error
  if not isinstance(settings, dict):
    raise ValueError(f'{file} must hold a JSON object, not {str(settings)[:40]}')
  return settings


def _tokenizer_end(folder: epath.Path) -> int | None:
  """The id of the end-of-sequence that the tokenizer beside a file names; None if none does."""
  token = (_json(folder / 'tokenizer_config.json') or {}).get('eos_token')
  token = token.get('content') if isinstance(token, dict) else token
  if token is None or (tokenizer := _json(folder / 'tokenizer.json')) is None:
    return None
  added = {x.get('content'): x.get('id') for x in tokenizer.get('added_tokens', [])}
  vocabulary = tokenizer.get('model', {}).get('vocab', {})
  return added.get(token, vocabulary.get(token) if isinstance(vocabulary, dict) else None)


@functools.cache
def _architectures() -> dict[str, dict[str, Any]]:
  """{architecture of timm: its settings}; `tests/weights/timm_architectures.py` writes them."""
  table = json.loads((pathlib.Path(__file__).parent / 'timm_architectures.json').read_text())
  return {
    name: {**row['settings'], 'num_heads': heads}
    for row in table['rows']
    for name, heads in row['num_heads'].items()
  }


def _of_timm(config: Mapping[str, Any]) -> dict[str, Any]:
  """The settings of a file of timm under the names of transformers."""
  architecture = config['architecture'].partition('.')[0]
  row = _architectures().get(architecture)
  if row is None:
    raise ValueError(
      f'architecture={architecture!r} in config.json is none of the ViTs, Evas, ConvNeXts and '
      'ResNets of timm that can be read; docs/backbones.md lists the families'
    )
  if 'unread' in row:
    raise ValueError(f'architecture={architecture!r} in config.json has {row["unread"]}')
  arguments = config.get('model_args') or {}
  for name, value in arguments.items():
    if name not in _TIMM_READ and not _TIMM_OF_SHAPES.fullmatch(name) and row.get(name) != value:
      raise ValueError(f'model_args has {name}={value!r} in config.json, which cannot be read')
  row = row | {name: arguments[name] for name in _TIMM_READ if name in arguments}
  stated = config.get('global_pool')
  if stated is not None and 'global_pool' not in arguments and stated != row['global_pool']:
    raise ValueError(
      f'global_pool={stated!r} in config.json, but timm makes {architecture} with '
      f'{row["global_pool"]!r}: write the one that was meant into its model_args'
    )
  activation = row['act_layer'] or 'gelu'
  if activation not in _TIMM_ACTIVATIONS:
    raise ValueError(
      f'act_layer={activation!r} in config.json must be one of {", ".join(_TIMM_ACTIVATIONS)}'
    )
  return {
    'num_attention_heads': row['num_heads'],
    'hidden_act': _TIMM_ACTIVATIONS[activation],
    'layer_norm_eps': row.get('epsilon'),
    'global_pool': row['global_pool'],
    'pool_include_prefix': row.get('pool_include_prefix', False),
    'norm': row.get('norm', 'layer_norm'),
    'last_epsilon': row.get('last_epsilon', row.get('epsilon')),
    'pool_heads': row.get('attn_pool_num_heads'),
    'rope_theta': row.get('rope_temperature'),
    'rope_grid': row.get('ref_feat_shape'),
    'rope_offset': row.get('rope_grid_offset'),
    'rope_type': row.get('rope_type'),
    'rope_axes': row.get('rope_grid_indexing'),
  }


def _of_open_clip(settings: Mapping[str, Any]) -> dict[str, Any]:
  """The settings of open_clip under the names of transformers, or of timm for its towers."""
  model = settings['model_cfg']
  image = model['vision_cfg']
  text = model.get('text_cfg', {})
  activation = 'quick_gelu' if model.get('quick_gelu') else 'gelu'
  read: dict[str, Any] = {}
  if name := image.get('timm_model_name'):
    read = {'architecture': name, 'projects': not image.get('timm_proj')}
    if pool := image.get('timm_pool'):
      read['model_args'] = {'global_pool': pool}
  elif 'width' in image:  # not a ResNet
    for name in image:
      if image[name] and not _OPEN_CLIP_IMAGE.fullmatch(name):
        raise ValueError(f'{name}={image[name]!r} in {pixels.OPEN_CLIP} cannot be read')
    pool = image.get('pool_type', 'tok')
    if pool not in ('tok', 'avg'):
      raise ValueError(f"pool_type={pool!r} in {pixels.OPEN_CLIP} must be 'tok' or 'avg'")
    read = {
      'num_attention_heads': image['width'] // image.get('head_width', 64),
      'hidden_act': activation,
      'layer_norm_eps': 1e-5,
      'global_pool': {'tok': 'token', 'avg': 'avg'}[pool],
      'pools_first': bool(image.get('final_ln_after_pool')),
    }
  form = (
    text.get('pool_type', 'argmax'),
    text.get('no_causal_mask', False),
    text.get('proj_bias', False),
  )
  of_text = {
    'num_attention_heads': text.get('heads'),
    'hidden_act': activation if form[0] == 'argmax' else None,
  }
  if 'hf_model_name' in text or form not in (('argmax', False, False), ('last', True, True)):
    of_text['unread'] = (
      f'the text tower pools by {form[0]}, or is one of transformers, unlike CLIP and SigLIP'
    )
  return {**read, 'text_config': of_text}


def read_tower(arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> Tower:
  """The tower in a file's arrays; an empty `read_config` means the usual values of the project.

  Raises:
    ValueError: layers that the backbone does not have, or a setting that it cannot have.
  """
  config = _described(config)
  if _is_convnext(arrays):
    return _read_convnext(arrays, config)
  if _is_resnet(arrays):
    return _read_resnet(arrays, config)
  if _is_bit(arrays):
    return _read_bit(arrays, config)
  _check_files(arrays)
  names = ' '.join(arrays)
  if '.mlp.fc3.' in names:  # AIMv2, whose first layer is the gate
    arrays = {name.replace('.mlp.fc1.', '.mlp.fc1_g.'): x for name, x in arrays.items()}
  if not config and 'pos_embed' in names and re.search(r'attn\.q_(?:bias|proj)', names):
    raise ValueError(
      'the file is of EVA-02 or alike, whose rotary positions no array tells: put its config.json '
      'beside it'
    )
  flat, skipped = _renamed(arrays, 'ViT', lambda name: _stem(name, _OUTER))
  kernel = flat['embedding/kernel']  # [P, P, C, D]
  patch_size = kernel.shape[0]
  width = kernel.shape[-1]
  is_clip = 'pre_norm/scale' in flat
  is_siglip = 'pooling/probe' in flat
  is_dino = 'block00/attention_scale' in flat
  is_relative = 'relative_position' in flat or 'block00/attention/relative_position' in flat
  is_rotary = 'position_embedding' not in flat and not is_relative

  defaults = _CLIP if is_clip else _IMAGENET if is_dino or 'distillation' in flat else _HALF
  _normalise_pixels(flat, 'embedding', config, defaults)

  pooling, skipped = _pooling(flat, config, names, skipped)
  if 'distillation' in flat:  # DeiT's second token, which has a position
    flat['registers'] = flat.pop('distillation')
  if config.get('projects') and 'head/kernel' in flat:  # open_clip's, by the classifier of timm
    flat |= {f'projection/{part}': flat.pop(f'head/{part}') for part in ('kernel', 'bias')}
  has_biases = 'block00/attention/out/bias' in flat  # AIMv2 has none
  for name in list(flat):
    if not has_biases and re.fullmatch(r'block\d+/(?:attention/out|mlp/w\w+)/kernel', name):
      flat[name.replace('kernel', 'bias')] = np.zeros(flat[name].shape[-1])
    if name.endswith('/query/bias'):
      flat.setdefault(name.replace('/query/', '/key/'), np.zeros(width))  # DINOv3 has none for keys
    # timm's SwiGLUPacked: gate and hidden layer in one.
    elif '/mlp/wi/' in name:
      hidden = len(flat[f'{name.partition("/wi/")[0]}/wo/kernel'])
      if flat[name].shape[-1] == 2 * hidden:
        gate, flat[name] = np.split(flat[name], 2, axis=-1)
        flat[name.replace('/wi/', '/wi_gate/')] = gate
  if is_relative:
    grid = _relative_grid(flat)
  else:
    grid = None if is_rotary else _place_positions(flat)
  image_size = grid and grid * patch_size

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

  usual_epsilon = 1e-5 if is_clip or is_rotary else 1e-6
  has_norm = 'encoder_norm/scale' in flat or not re.search(_SCALED_BEIT, names)
  if has_norm:
    _ = flat['encoder_norm/scale']  # an error where it lacks
  sub_norms = {'both': 'attention/sub_norm', 'mlp': 'mlp/sub_norm'}
  settings = {
    'patch_size': patch_size,
    'width': width,
    **_block_settings(flat, config, 'SigLIP' if is_siglip else 'image', width, activation),
    'pooling': pooling,
    'class_token': True if 'class_token' in flat and pooling in ('gap', 'all', 'map') else None,
    'norm_pooled': config.get('pools_first') or bool(re.search(_POOLED_NORM, names)),
    'norm': 'layer_norm' if 'block00/attention_norm/bias' in flat else 'rms_norm',
    'norm_epsilon': config.get('layer_norm_eps') or config.get('rms_norm_eps') or usual_epsilon,
    'position': 'rope' if is_rotary else 'relative' if is_relative else 'learned',
    'rope_theta': config.get('rope_theta') or 100.0,
    'num_registers': len(flat.get('registers', ())),
    'qkv_bias': 'block00/attention/query/bias' in flat,
    'qk_norm': 'block00/attention/query_norm/scale' in flat,
    'layer_scale': 1e-5 if is_dino else None,
    'pre_norm': is_clip,
    'patch_norm': 'patch_norm/scale' in flat,
    'last_norm': has_norm,
    'projection_bias': 'projection/bias' in flat,
    'sub_norm': next((x for x, name in sub_norms.items() if f'block00/{name}/scale' in flat), None),
    'pool_heads': config.get('pool_heads') if pooling == 'map' else None,
    'projection_size': width_of('projection/kernel'),
    'representation_size': width_of('representation/kernel'),
  }
  if config.get('rope_type') == 'cat':
    settings |= _interleaved_rope(flat, config, settings, grid)
  _check_head(flat, settings)
  made = config.get('pixels')
  if made and made['size'] % patch_size:
    raise ValueError(
      f'the images of {made["file"]} have {made["size"]} pixels a side, which must be a multiple '
      f'of the {patch_size} pixels of a patch'
    )
  return Tower(settings, _placed(flat), _image_size(config, image_size), skipped, pixels=made)


def _described(config: Mapping[str, Any]) -> Mapping[str, Any]:
  """The configuration with timm's settings under the names of transformers."""
  for name, value in _FIXED.items():
    if config.get(name, value) != value:
      raise ValueError(f'{name}={config[name]!r} in config.json must be {value!r}')
  if 'architecture' in config and 'num_attention_heads' not in config:
    return {**config, **_of_timm(config)}
  if not config:
    _log.warning(
      'There is no config.json beside the file: attention heads, activation, pooling, epsilon and '
      'pixel normalisation are the usual ones of its project.'
    )
  return config


def _interleaved_rope(
  flat: dict[str, np.ndarray],
  config: Mapping[str, Any],
  settings: Mapping[str, Any],
  grid: int | None,
) -> dict[str, Any]:
  """Settings of the rotation of timm's EVA-02 and Perception Encoder; reorders queries and keys.

  timm rotates pairs of neighbours, first those of its first axis. Here the second half of a head
  belongs to the first, and rows precede columns.
  """
  num_pairs = settings['width'] // settings['num_heads'] // 2
  pairs = np.arange(num_pairs)
  if config['rope_axes'] == 'xy':
    pairs = np.roll(pairs, num_pairs // 2)
  order = np.concatenate([2 * pairs, 2 * pairs + 1])  # [D / heads]
  for name, x in flat.items():
    if re.fullmatch(r'block\d+/attention/(?:query|key)/(?:kernel|bias)', name):
      heads = x.reshape(*x.shape[:-1], settings['num_heads'], -1)
      flat[name] = heads[..., order].reshape(x.shape)
    elif re.fullmatch(r'block\d+/attention/(?:query|key)_norm/(?:scale|bias)', name):
      flat[name] = x[order]
  reference = config.get('rope_grid') or [grid]
  return {
    'position': 'rope' if grid is None else 'learned_and_rope',
    'rope_grid': reference[0],
    'rope_offset': config['rope_offset'],
  }


def _check_files(arrays: Mapping[str, np.ndarray]) -> None:
  if any('.lora_' in name for name in arrays):
    raise ValueError('the file is an adapter (LoRA): merge it into its base model')


def _pooling(
  flat: dict[str, np.ndarray], config: Mapping[str, Any], names: str, skipped: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
  """The pooling of `backbones.ViT`, and what the tower does not use; may remove parameters."""

  def drop(*prefixes: str) -> tuple[str, ...]:
    dropped = [name for name in flat if name.startswith(prefixes)]
    for name in dropped:
      flat.pop(name)
    return (*skipped, *dropped)

  if 'representation/kernel' in flat and 'projection/kernel' in flat:
    raise ValueError(
      'the file has a pooler with tanh and a projection after it (VisionTextDualEncoder), which '
      'cannot be read: save its vision_model alone'
    )
  if 'pre_layrnorm' in names and 'head/kernel' in flat:
    raise ValueError(
      'the file has a classifier of a CLIP (CLIPForImageClassification), which takes the mean of '
      'patches that are not normalised and cannot be read: save its vision_model alone'
    )
  width = flat['embedding/kernel'].shape[-1]
  inputs = flat['head/kernel'].shape[0] if 'head/kernel' in flat else None
  stated = config.get('global_pool')
  if (is_mean := config.get('use_mean_pooling')) is not None:  # BEiT and InternViT of transformers
    # The original InternViT takes the class token.
    stated = 'avg' if is_mean and 'attn.qkv' not in names else 'token'
  if config.get('model_type') == 'aimv2_vision_model':
    stated = 'avg'
  if 'distillation' in flat and ('dist_token' in names or 'distillation_classifier' in names):
    # Each of the two tokens has a classifier: no single one takes their mean.
    return 'distilled', drop('head/')
  if 'pooling/probe' in flat:
    if 'vision_model.' in names and inputs is not None:  # SiglipForImageClassification
      return 'gap', drop('pooling/')
    if stated not in (None, 'map'):
      raise ValueError(f'global_pool={stated!r} in config.json, but the file pools by attention')
    if ('class_token' in flat or 'registers' in flat) and stated is None:
      raise ValueError('the file pools by attention and has a class token or registers')
    return 'map', skipped
  if inputs == 2 * width:  # Dinov2ForImageClassification
    return 'token_and_gap', skipped
  usual = 'token' if 'class_token' in flat else 'avg'
  pool = stated or usual
  if pool == 'avg':
    return 'all' if config.get('pool_include_prefix') else 'gap', skipped
  if pool != 'token' or 'class_token' not in flat:
    raise ValueError(
      f"global_pool={pool!r} in config.json must be 'avg', 'map', or with a class token 'token'"
    )
  return 'token', skipped


def _relative_grid(flat: dict[str, np.ndarray]) -> int:
  """The side of the grid of BEiT's tables; gives each block one where all share it."""
  shared = flat.pop('relative_position', None)
  blocks = sorted(name.partition('/')[0] for name in flat if name.endswith('/mlp/wo/kernel'))
  if shared is not None:
    flat |= {f'{block}/attention/relative_position': shared for block in blocks}
  if 'position_embedding' in flat:
    raise ValueError('the file has relative and absolute positions, which cannot be read together')
  num_differences = len(flat['block00/attention/relative_position']) - 3
  side = math.isqrt(num_differences)
  if side**2 != num_differences or not side % 2:
    raise ValueError(f'the {num_differences} relative positions of the file are of no square grid')
  return (side + 1) // 2


def _place_positions(flat: dict[str, np.ndarray]) -> int:
  """Gives registers their rows of the table and the class token a row; the side of the grid."""
  position = flat['position_embedding']
  has_token = 'class_token' in flat
  num_registers = len(flat.get('registers', ()))
  rows = {0, int(has_token), has_token + num_registers}
  fitting = [n for n in rows if math.isqrt(len(position) - n) ** 2 == len(position) - n]
  if len(fitting) != 1:
    raise ValueError(
      f'the {len(position)} position embeddings of the file do not tell which of them belong to a '
      f'square of patches, beside {int(has_token)} class tokens and {num_registers} registers'
    )
  prefix = fitting[0]
  if prefix > has_token:
    flat['registers'] = flat['registers'] + position[int(has_token) : prefix]
  token = position[:1] if has_token and prefix else np.zeros((1, position.shape[1]), np.float32)
  flat['position_embedding'] = np.concatenate([token[: int(has_token)], position[prefix:]])
  return math.isqrt(len(position) - prefix)


def _check_head(flat: Mapping[str, np.ndarray], settings: Mapping[str, Any]) -> None:
  width = settings['width'] * (2 if settings['pooling'] == 'token_and_gap' else 1)
  width = settings['representation_size'] or settings['projection_size'] or width
  if 'head/kernel' in flat and flat['head/kernel'].shape[0] != width:
    raise ValueError(
      f"the file's classifier takes {flat['head/kernel'].shape[0]} features, and its tower gives "
      f'{width}'
    )


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
  if activation == 'silu' and not is_gated:
    raise ValueError("hidden_act='silu' in config.json needs MLPs with a gate; the file has none")
  stated = config.get('hidden_act')
  if is_gated and stated not in (None, 'silu') and 'use_swiglu_ffn' not in config:
    raise ValueError(f"hidden_act={stated!r} in config.json must be 'silu' for MLPs with a gate")
  depth = sum(name.endswith('/attention_norm/scale') for name in flat)
  stated = config.get('num_hidden_layers')
  if stated is not None and stated != depth:
    raise ValueError(
      f'config.json has num_hidden_layers={stated}, and the file {depth} blocks: it is of another '
      'model, or one of several files'
    )
  return {
    'depth': depth,
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
  if config.get('hidden_act', 'gelu') != 'gelu':
    raise ValueError(f"hidden_act={config['hidden_act']!r} in config.json must be 'gelu'")
  if config.get('global_pool', 'avg') != 'avg':
    raise ValueError(f"global_pool={config['global_pool']!r} in config.json must be 'avg'")
  # transformers' configuration is of the last normalisation alone; the others have 1e-6.
  is_timm = 'last_epsilon' in config
  if is_timm and config['layer_norm_eps'] != 1e-6:
    settings['norm_epsilon'] = config['layer_norm_eps']
  last = config.get('last_epsilon') or config.get('layer_norm_eps')
  if last is not None and last != settings.get('norm_epsilon', 1e-6):
    settings['last_epsilon'] = last
  image_size = _image_size(config)
  return Tower(settings, _placed(flat), image_size, skipped, 'convnext', config.get('pixels'))


def _read_resnet(arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> Tower:
  """A ResNet of timm, torchvision or transformers; batch normalisation goes into convolutions."""
  layers: dict[str, dict[str, np.ndarray]] = {}
  unknown = []
  for name, x in arrays.items():
    layer, _, part = _PREFIX.sub('', name).rpartition('.')
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
  flat = _Params()
  for ours, parts in layers.items():
    if ours == 'head':
      flat |= {'head/kernel': parts['weight'].T, 'head/bias': parts['bias']}
      continue
    if missing := {'kernel', 'weight', 'bias', 'running_mean', 'running_var'} - parts.keys():
      raise ValueError(f'the file lacks {min(missing)} of its layer {ours}')
    scale = parts['weight'] / np.sqrt(parts['running_var'] + _BATCH_NORM_EPSILON)
    flat[f'{ours}/kernel'] = parts['kernel'].transpose(2, 3, 1, 0) * scale
    flat[f'{ours}/bias'] = parts['bias'] - parts['running_mean'] * scale
  mean = np.asarray(config.get('image_mean') or config.get('mean') or _IMAGENET[0])
  std = np.asarray(config.get('image_std') or config.get('std') or _IMAGENET[1])
  flat['conv_root/kernel'] *= 0.5 / std[:, None]
  is_basic = 'stage1_unit01/conv3/kernel' not in flat
  settings = {
    **_resnet_stages(flat),
    'version': 'v1.5',
    'norm': 'folded',
    'block': 'basic' if is_basic else 'bottleneck',
    'image_mean': tuple((2 * mean - 1).tolist()),
  }
  return Tower(settings, _placed(flat), _image_size(config), (), 'resnet', config.get('pixels'))


def _read_bit(arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> Tower:
  """A ResNet of Big Transfer in timm, whose kernels are standardised."""
  flat = _Params()
  unknown = []
  for name, x in arrays.items():
    layer, _, part = _PREFIX.sub('', name).rpartition('.')
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
  for name in ('image_mean', 'image_std'):
    value = config.get(name) or config.get(name.removeprefix('image_')) or _HALF[0]
    if tuple(value) != _HALF[0]:
      raise ValueError(f'{name}={value} must be 0.5: the kernels of the file are standardised')
  settings = {**_resnet_stages(flat), 'version': 'v2', 'kernel_epsilon': 1e-8}
  return Tower(settings, _placed(flat), _image_size(config), (), 'resnet', config.get('pixels'))


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
  for name in units:
    inner = width * 2 ** (int(name[5]) - 1)
    kernel = flat[f'{name}/conv2/kernel']
    if kernel.shape != (3, 3, inner, inner):
      raise ValueError(
        f'the second convolution of {name} has the shape {kernel.shape}, and a plain ResNet '
        f'{(3, 3, inner, inner)}: groups and other widths cannot be read'
      )
  return {
    'stages': tuple(sum(x.startswith(f'{y}_') for x in units) for y in stages),
    'width': width,
  }


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


def _image_size(config: Mapping[str, Any], of_positions: int | None = None) -> int:
  made = (config.get('pixels') or {}).get('size')
  stated = (config.get('image_size'), (config.get('input_size') or [None])[-1])
  sizes = (made, of_positions, *stated, 224)
  found = next(size for size in sizes if size)
  return int(found if isinstance(found, int) else found[0])


def _placed(
  flat: dict[str, np.ndarray], tower: str = 'backbone', outside: str = 'head/'
) -> dict[str, np.ndarray]:
  """Parameters by our names in a model with this tower."""
  return {
    name if name.startswith(outside) else f'{tower}/{name}': np.asarray(x, np.float32)
    for name, x in flat.items()
  }


def tower_bindings(path: epath.PathLike, arrays: Mapping[str, np.ndarray]) -> list[str]:
  """Gin bindings of backbone and image size for the tower in a file; none if there is no tower."""
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
    if roots and not any(part in name for part in (roots[0], 'visual_projection', 'classifier.')):
      skipped.append(name)  # belongs to the text tower
      continue
    ours, kind = stem(_PREFIX.sub('', name))
    if ours is not None:
      parts = _converted(ours, kind, x, transpose=not name.endswith('proj'))
      if twice := parts.keys() & flat.keys():
        raise ValueError(f'{name} is the second layer of the file for {min(twice)}')
      flat |= parts
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
