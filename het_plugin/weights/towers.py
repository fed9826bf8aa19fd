"""Towers of timm, transformers and open_clip: their settings and parameters from a file.

Families (docs/backbones.md) are recognised by the names of their arrays. Kernels are transposed,
fused projections are split, and the normalisation of the pixels goes into the patch embedding, so
that the tower takes images in [-1, 1] like all backbones here.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

import numpy as np
from etils import epath

from het_plugin.weights import convolutional, files, pixels, renaming
from het_plugin.weights.descriptions import check_known, described, read_config
from het_plugin.weights.renaming import Params, Tower

_ADAPTER = 'the file is an adapter (LoRA): merge it into its base model, and save that as a whole'
# Of a resize, as PyTorch's.
Filter = Literal['bicubic_antialias', 'bicubic', 'bilinear_antialias', 'bilinear']

# The shapes do not give the number of attention heads: a head has 64 channels, except that towers
# of these widths have 16 heads.
_SIXTEEN_HEADS = {'image': (1152, 1280, 1408, 1664, 1792), 'SigLIP': (1152, 1536), 'text': (1152,)}
_BLOCK = re.compile(
  r'(?:blocks|encoder\.layers?|layers?|transformer\.resblocks|model\.layer)\.(\d+)\.(.+)'
)
_OPENAI_VOCABULARY = 49_408  # whose last id is the end
# config.json's names and ours.
_ACTIVATIONS = {
  'gelu': 'gelu_exact',
  'quick_gelu': 'quick_gelu',
  'gelu_pytorch_tanh': 'gelu',
  'silu': 'swiglu',
}
# Of a last normalisation after the pooling, and of towers that may have none.
_POOLED_NORM = r'fc_norm\.weight|pooler\.layernorm\.weight'
_SCALED_BEIT = r'lambda_1|\.ls1(?: |$)'
_NAFLEX = ('embeds.proj.weight', 'embeddings.patch_embedding.weight')
# Outside the blocks of a RADIO, and what is before these names.
_RADIO_OUTER = re.compile(
  r'^(?:radio_model\.)?(?:(?:model\.)?patch_generator|embeddings|input_conditioner)\.|^radio_model\.'
)
_RADIO = {
  'embedder.weight': 'patch_embed.proj.weight',
  'patch_projection.weight': 'patch_embed.proj.weight',
  'position_embedding': 'pos_embed',
  'cls_token.token': 'tokens',
  'cls_register_token': 'tokens',
  'pos_embed': 'pos_embed',
}
# Ours, and theirs without the prefix and '.weight' or '.bias', outside and inside blocks.
_OUTER = renaming.table("""
class_token            cls_token embeds.cls_token embeddings.cls_token class_embedding
class_token            embeddings.class_embedding
position_embedding     pos_embed embeds.pos_embed positional_embedding
position_embedding     embeddings.position_embeddings embeddings.position_embedding
position_embedding     preprocessor.pos_embed
relative_position      rel_pos_bias.relative_position_bias_table
relative_position      shared_position_bias.relative_position_bias_table
relative_position      encoder.relative_position_bias.relative_position_bias_table
registers              reg_token embeds.reg_token embeddings.register_tokens
distillation           dist_token embeddings.distillation_token
embedding              patch_embed.proj embeds.proj conv1 embeddings.patch_embeddings.projection
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
_INNER = renaming.table("""
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
# Outside the blocks of text towers.
_TEXT_OUTER = renaming.table("""
embedding           token_embedding embeddings.token_embedding
position_embedding  positional_embedding embeddings.position_embedding
encoder_norm        ln_final final_layer_norm
text_projection     text_projection head
""")
_TEXT_LAYER = re.compile(r'(?:text_model|text|transformer)\.(?!.*(?:position_ids|attn_mask)$)')
_TEXT_ROOT = re.compile(r'^(?:text_model|text)\.')


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
  flat = Params()
  unknown = []
  for name, x in arrays.items():
    if name.startswith(('visual.', 'vision_model.', 'visual_projection')):
      continue
    ours, kind = _stem(_TEXT_ROOT.sub('', name), _TEXT_OUTER)
    if ours is None and _TEXT_LAYER.match(name):
      unknown.append(name)
    if ours in ('embedding', 'position_embedding'):
      flat[ours] = np.asarray(x, np.float32)
    elif ours is not None:
      flat |= renaming.converted(ours, kind, x, transpose=not name.endswith('text_projection'))
  if 'embedding' not in flat or 'text_projection/kernel' not in flat:
    raise ValueError('the file has no text tower of CLIP or SigLIP')
  if unknown or 'block00/attention_norm/bias' not in flat:
    layer = min(unknown, default='a normalisation without bias')
    raise ValueError(f'the text tower of the file is not that of CLIP or SigLIP: it has {layer}')
  check_known(config, 'the text_config of config.json')
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
  params = renaming.placed(flat, 'text_tower', 'text_projection/')
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
  stems = ((name, _stem(renaming.PREFIX.sub('', name), _OUTER)[0]) for name in names)
  is_vit = any(stem == 'embedding' and 'embedding/' not in name for name, stem in stems)
  return is_vit or _is_radio(names) or convolutional.reader_of(names) is not None


def position_filter(names: Collection[str]) -> Filter:
  """How the project of a tower resizes position embeddings.

  timm and open_clip antialias, transformers does so for DINOv2 with registers alone.
  """
  if _is_radio(names):
    return 'bilinear'
  # TIPSv2; InternVL has attention.projection_layer here.
  if any(name.endswith('encoder.layer.0.attention.o_proj.weight') for name in names):
    return 'bilinear_antialias'
  has_theirs = any('embeddings.' in name and 'token_embedding' not in name for name in names)
  has_registers = any(name.endswith('embeddings.register_tokens') for name in names)
  return 'bicubic' if has_theirs and not has_registers else 'bicubic_antialias'


def not_recognised(names: Collection[str]) -> str:
  """A sentence on a file with arrays of these names, in which no tower was recognised."""
  if any('lora_' in name for name in names):
    return _ADAPTER
  some = ', '.join(sorted(names)[:3])
  prefixes = ', '.join(f'{holder}.' for holder in renaming.HOLDERS)
  return (
    f'no tower was recognised among its {len(names)} arrays, such as {some}. Read are the families '
    f'of docs/backbones.md, also with a prefix such as {prefixes}; for another model name a gin '
    'file of it with --gin_file'
  )


def read_tower(arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> Tower:
  """The tower in a file's arrays; an empty `read_config` means the usual values of the project.

  Raises:
    ValueError: layers that the backbone does not have, or a setting that it cannot have.
  """
  config = described(config)
  if (read := convolutional.reader_of(arrays)) is not None:
    return read(arrays, config)
  if any('.lora_' in name for name in arrays):
    raise ValueError(_ADAPTER)
  num_pooled = 1
  if is_radio := _is_radio(arrays):
    arrays, config, num_pooled = _of_radio(arrays, config)
  names = ' '.join(arrays)
  if '.mlp.fc3.' in names:  # AIMv2, whose first layer is the gate
    arrays = {name.replace('.mlp.fc1.', '.mlp.fc1_g.'): x for name, x in arrays.items()}
  if not config and 'pos_embed' in names and re.search(r'attn\.q_(?:bias|proj)', names):
    raise ValueError(
      'the file is of EVA-02 or alike, whose rotary positions no array tells: put its config.json '
      'beside it'
    )
  # Patches are rows, as they are where images have an aspect of their own.
  is_naflex = not is_radio and any(
    np.ndim(x) == 2 and name.endswith(_NAFLEX) for name, x in arrays.items()
  )
  is_of_timm = any(name.endswith('embeds.proj.weight') for name in arrays)
  if is_naflex and is_of_timm and not config.get('naflex'):
    raise ValueError(
      'the file is a NaFlex ViT of timm, whose arrays do not tell how its positions are resized: '
      'put its config.json beside it'
    )
  flat, skipped = renaming.renamed(_joined(arrays), 'ViT', lambda name: _stem(name, _OUTER))
  if not len(flat.get('registers', '-')):  # DINOv3 of transformers without registers
    del flat['registers']
  kernel = flat['embedding/kernel']  # [P, P, C, D]
  patch_size = kernel.shape[0]
  width = kernel.shape[-1]
  is_clip = 'pre_norm/scale' in flat
  is_siglip = 'pooling/probe' in flat
  is_dino = 'block00/attention_scale' in flat
  is_relative = 'relative_position' in flat or 'block00/attention/relative_position' in flat
  is_rotary = 'position_embedding' not in flat and not is_relative
  is_described = config.get('model_type') or 'architecture' in config
  if is_rotary and is_described and not config.get('rope_theta'):
    raise ValueError('the file has no positions, and its config.json has no rope_theta')

  defaults = (
    renaming.CLIP
    if is_clip
    else renaming.IMAGENET
    if is_dino or 'distillation' in flat
    else renaming.HALF
  )
  renaming.normalise_pixels(flat, 'embedding', config, defaults)

  pooling, skipped = _pooling(flat, config, names, skipped)
  if 'distillation' in flat:  # DeiT's second token, which has a position
    flat['registers'] = flat.pop('distillation')
  if config.get('projects') and 'head/kernel' in flat:  # open_clip's, by the classifier of timm
    flat |= {f'projection/{part}': flat.pop(f'head/{part}') for part in ('kernel', 'bias')}
  for name in list(flat):
    # timm's SwiGLUPacked: gate and hidden layer in one.
    if '/mlp/wi/' in name:
      hidden = len(flat[f'{name.partition("/wi/")[0]}/wo/kernel'])
      if flat[name].shape[-1] == 2 * hidden:
        gate, flat[name] = np.split(flat[name], 2, axis=-1)
        flat[name.replace('/wi/', '/wi_gate/')] = gate
  has_qkv_bias = any(f'block00/attention/{x}/bias' in flat for x in ('query', 'key', 'value'))
  # AIMv2 has no biases, and DINOv3 none for keys.
  biased = 'attention/out|mlp/wi|mlp/wi_gate|mlp/wo'
  biased += '|attention/query|attention/key|attention/value' if has_qkv_bias else ''
  for name in list(flat):
    if re.fullmatch(rf'block\d+/(?:{biased})/kernel', name):
      flat.setdefault(name.replace('kernel', 'bias'), np.zeros(flat[name].shape[-1]))
  if is_relative:
    grid = _relative_grid(flat)
  else:
    grid = None if is_rotary else _place_positions(flat)
  # RADIO's positions are those of its largest image.
  image_size = None if is_radio else grid and grid * patch_size

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
  may_lack_norm = is_radio or re.search(_SCALED_BEIT, names)
  lacks_norm = config.get('last_norm') is False  # timm's own RADIO and InternViT
  has_norm = 'encoder_norm/scale' in flat or not (may_lack_norm or lacks_norm)
  if has_norm:
    _ = flat['encoder_norm/scale']  # an error where it lacks
  sub_norms = {'both': 'attention/sub_norm', 'mlp': 'mlp/sub_norm'}
  settings = {
    'patch_size': patch_size,
    'width': width,
    **_block_settings(flat, config, 'SigLIP' if is_siglip else 'image', width, activation),
    'pooling': pooling,
    'num_pooled': num_pooled,
    'class_token': True if 'class_token' in flat and pooling in ('gap', 'all', 'map') else None,
    'norm_pooled': config.get('pools_first') or bool(re.search(_POOLED_NORM, names)),
    'norm': 'layer_norm' if 'block00/attention_norm/bias' in flat else 'rms_norm',
    'norm_epsilon': config.get('layer_norm_eps') or config.get('rms_norm_eps') or usual_epsilon,
    'position': 'rope' if is_rotary else 'relative' if is_relative else 'learned',
    'rope_theta': config.get('rope_theta') or 100.0,
    'num_registers': len(flat.get('registers', ())),
    'qkv_bias': has_qkv_bias,
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
  if is_naflex:
    settings |= {
      'naflex': config.get('naflex') or 'bilinear_antialias',
      'naflex_square': config.get('naflex_square', False),
      'stored_grid': grid,
    }
    made = made or pixels.of_transformers(
      {'image_processor_type': 'Siglip2ImageProcessor', 'patch_size': patch_size},
      'the usual values of SigLIP 2',
    )
  if made and (made['mode'] == 'patches') != is_naflex:
    kinds = 'squares', 'pictures of any aspect (NaFlex)'
    raise ValueError(
      f'{made["file"]} makes {kinds[not is_naflex]}, and the tower of the file takes '
      f'{kinds[is_naflex]}: put the description of the same model beside it'
    )
  if made and (made['size'] % patch_size or made.get('patch_size', patch_size) != patch_size):
    raise ValueError(
      f'the images of {made["file"]} have {made["size"]} pixels a side, which must be a multiple '
      f'of the {patch_size} pixels of a patch'
    )
  size = renaming.image_size({**config, 'pixels': made}, image_size)
  return Tower(settings, renaming.placed(flat), size, skipped, pixels=made)


def _joined(arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
  """The arrays, with timm's positions of rows and of columns as one table of their sums."""
  rows = next((name for name in arrays if name.endswith('embeds.pos_embed_y')), None)
  if rows is None:
    return arrays
  columns = f'{rows[:-1]}x'
  table = arrays[rows][:, :, None] + arrays[columns][:, None]  # [1, G, G, D]
  left = {name: x for name, x in arrays.items() if name not in (rows, columns)}
  return {**left, rows[:-2]: table}


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


def _is_radio(names: Collection[str]) -> bool:
  return any(name.endswith('input_conditioner.norm_mean') for name in names)


def _of_radio(
  arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, Any], int]:
  """A RADIO under the names of timm, its settings, and the number of tokens that it concatenates.

  These come first of its tokens, whose order does not matter, for they have no positions. Its own
  code and transformers have names of their own.
  """
  named = {_RADIO_OUTER.sub('', name): np.asarray(x) for name, x in arrays.items()}
  named = {name: x for name, x in named.items() if not name.startswith('video_')}
  named |= {ours: named.pop(theirs) for theirs, ours in _RADIO.items() if theirs in named}
  if missing := {*_RADIO.values(), 'norm_mean', 'norm_std'} - named.keys():
    raise ValueError(f'the file lacks {min(missing)} of a RADIO: is it one of several files?')
  mean = named.pop('norm_mean').reshape(-1).tolist()
  std = named.pop('norm_std').reshape(-1).tolist()
  first = named.pop('summary_idxs', np.asarray(config.get('summary_idxs') or [0, 1])).tolist()
  tokens = named.pop('tokens')
  tokens = tokens.reshape(-1, tokens.shape[-1])
  order = [*first, *(i for i in range(len(tokens)) if i not in first)]
  named['cls_token'] = tokens[order[0]]
  named['reg_token'] = tokens[order[1:]]
  position = named['pos_embed'].reshape(-1, tokens.shape[-1])
  named['pos_embed'] = np.pad(position, ((1, 0), (0, 0)))  # none of the class token
  kernel = named['patch_embed.proj.weight']  # [D, C P P]
  side = math.isqrt(kernel.shape[1] // len(mean))
  named['patch_embed.proj.weight'] = kernel.reshape(-1, len(mean), side, side)
  return named, {**config, 'image_mean': mean, 'image_std': std}, len(first)


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
    if 'block00/attention/relative_position' in flat:
      raise ValueError('the file has relative positions of all blocks and of each, not one of them')
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
  width = settings['width'] * (
    2 if settings['pooling'] == 'token_and_gap' else settings['num_pooled']
  )
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


def tower_bindings(
  path: epath.PathLike, arrays: Mapping[str, np.ndarray] | None = None
) -> list[str]:
  """Gin bindings of backbone and image size for the tower in a file; none if there is no tower.

  `arrays` are those of the file, where they have been read.
  """
  arrays = files.read_arrays(path) if arrays is None else arrays
  return read_tower(arrays, read_config(path)).bindings() if is_tower(arrays) else []


def _stem(name: str, outer: Mapping[str, str]) -> tuple[str | None, str]:
  """Our name of a layer, None if it is unknown, and 'weight' or 'bias'."""
  name, kind = renaming.layer_and_kind(name)
  if block := _BLOCK.fullmatch(name):
    inner = _INNER.get(block[2])
    return inner and f'block{int(block[1]):02d}/{inner}', kind
  return outer.get(name), kind
