"""What timm, transformers and open_clip write beside a file about the tower in it.

Settings have the names of transformers. One that nothing here reads, and that is not the usual one,
is an error that names it.
"""

import functools
import json
import logging
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from het_plugin.weights import hub, pixels

_log = logging.getLogger(__name__)
# What vision_cfg may have: the rest is read, or told by shapes.
_OPEN_CLIP_IMAGE = re.compile(
  r'image_size|layers|width|head_width|mlp_ratio|patch_size|patch_dropout|no_ln_pre|'
  r'pos_embed_type|final_ln_after_pool|pool_type|output_tokens|act_kwargs|norm_kwargs'
)
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
  r'attn_pool_mlp_ratio|pos_embed_grid_size|use_post_transformer_norm|cardinality|base_width|use_(?:shared_)?rel_pos_bias)'
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
# What the library takes where config.json says nothing and arrays do not tell; of a vision_config
# it writes only what differs from this.
_SIGLIP = {'hidden_act': 'gelu_pytorch_tanh'}
_INTERNVL = {'use_mean_pooling': True}
_VIT = {'layer_norm_eps': 1e-12}
_BEIT = {**_VIT, 'use_mean_pooling': True}
_AIMV2 = {'num_attention_heads': 8, 'rms_norm_eps': 1e-5}
# Models of transformers whose towers were compared with those here, or that hold one of these.
# Others can have the same names of arrays, and other layers between them.
_MODELS: Mapping[str, Mapping[str, Any]] = {
  **dict.fromkeys(
    'clip clip_vision_model chinese_clip chinese_clip_vision_model altclip altclip_vision_model '
    'clipseg clipseg_vision_model metaclip_2 metaclip_2_vision_model git_vision_model llava '
    'llava_next vipllava vision-text-dual-encoder vit_msn dinov2 dinov2_with_registers '
    'intern_vit_6b radio resnet tipsv2 tipsv2_vision_model'.split(),
    {},
  ),
  **dict.fromkeys(
    'siglip siglip_vision_model siglip2 siglip2_vision_model idefics3 idefics3_vision smolvlm '
    'smolvlm_vision paligemma gemma3 shieldgemma2 llava_onevision lfm2_vl modernvbert '
    'deepseek_vl'.split(),
    _SIGLIP,
  ),
  **dict.fromkeys('internvl internvl_vision qianfan_ocr qianfan_ocr_vision'.split(), _INTERNVL),
  **dict.fromkeys('vit vit_mae ijepa deit flava_image_model convnext convnextv2'.split(), _VIT),
  **dict.fromkeys('beit data2vec-vision'.split(), _BEIT),
  **dict.fromkeys('aimv2 aimv2_vision_model'.split(), _AIMV2),
  'dinov3_vit': {'rope_theta': 100.0},
  'dinov3_convnext': {'layer_norm_eps': 1e-6},
}
# The settings of a tower that we understand in a config.json of transformers. Any other may change
# the features. Names that begin with an underscore are the library's own and change none.
_KNOWN = frozenset(
  # Read here, or by the readers of arrays.
  'model_type hidden_act layer_norm_eps rms_norm_eps rope_theta num_attention_heads '
  'num_hidden_layers image_size use_mean_pooling summary_idxs use_swiglu_ffn '
  'rope_parameters interpolate_antialias interpolate_offset '
  'downsample_in_first_stage downsample_in_bottleneck pooler_act apply_layernorm use_qk_norm '
  'qk_normalization eos_token_id vision_config text_config quantization_config peft_type '
  # Told by the names and shapes of arrays.
  'hidden_size hidden_sizes embedding_size intermediate_size mlp_ratio depths num_stages '
  'layer_type patch_size patch_dim num_channels num_patches max_img_size num_cls_tokens '
  'num_registers num_register_tokens norm_mean norm_std norm_type is_native projection_dim '
  'projection_size pooler_output_size use_head vision_use_head use_gated_mlp use_mask_token '
  'mask_token use_bias attention_bias qkv_bias query_bias key_bias value_bias proj_bias mlp_bias '
  'layerscale_value layer_scale_init_value logit_scale_init_value '
  'use_absolute_position_embeddings use_relative_position_bias use_shared_relative_position_bias '
  'vocab_size max_position_embeddings '
  # Of training, and of outputs that are not the features.
  'dropout attention_dropout hidden_dropout_prob attention_probs_dropout_prob projection_dropout '
  'drop_path_rate initializer_range initializer_factor pos_embed_shift pos_embed_jitter '
  'pos_embed_rescale mask_ratio norm_pix_loss decoder_hidden_size decoder_intermediate_size '
  'decoder_num_attention_heads decoder_num_hidden_layers encoder_stride out_features out_indices '
  'stage_names reshape_hidden_states add_fpn pool_scales use_auxiliary_head auxiliary_channels '
  'auxiliary_concat_input auxiliary_loss_weight auxiliary_num_convs semantic_loss_ignore_index '
  'projector_hidden_act num_image_tokens max_image_size size use_base_siglip video_patch_dim '
  'video_temporal_patch_size segmentation_indices return_class_token gradient_checkpointing '
  'loss_type padding '
  # Of RADIO's own code.
  'args version max_resolution preferred_resolution adaptor_configs adaptor_names '
  # Of every model, in this version and in older ones.
  'architectures auto_map dtype torch_dtype transformers_version torchscript '
  'chunk_size_feed_forward id2label label2id num_labels problem_type finetuning_task '
  'tokenizer_class return_dict use_return_dict output_attentions output_hidden_states '
  'output_scores use_cache use_bfloat16 use_flash_attn attn_implementation '
  'tie_word_embeddings tie_encoder_decoder tf_legacy_loss task_specific_params prefix is_decoder '
  'is_encoder_decoder add_cross_attention pruned_heads bos_token_id pad_token_id sep_token_id '
  'decoder_start_token_id forced_bos_token_id forced_eos_token_id suppress_tokens '
  'begin_suppress_tokens bad_words_ids max_length min_length length_penalty repetition_penalty '
  'diversity_penalty exponential_decay_length_penalty no_repeat_ngram_size '
  'encoder_no_repeat_ngram_size num_beams num_beam_groups num_return_sequences '
  'return_dict_in_generate remove_invalid_values do_sample early_stopping temperature top_k top_p '
  'typical_p output_past transformers.js_config unsloth_fixed '.split()
)
# The types of settings that are read before their values are checked.
_TYPES = {
  'a JSON object': 'vision_config text_config pretrained_cfg model_args image_processor model_cfg '
  'vision_cfg text_cfg preprocess_cfg rope_parameters'.split(),
  'text': 'architecture model_type'.split(),
  'a list of numbers': 'input_size image_mean mean'.split(),
  'a list of numbers above 0': 'image_std std'.split(),
  'a number, or a JSON object of numbers': 'size crop_size'.split(),
}
_IS: Mapping[str, Callable[[Any], bool]] = {
  'a JSON object': lambda x: isinstance(x, dict),
  'text': lambda x: isinstance(x, str),
  'a list of numbers': lambda x: _is_numbers(x),
  'a list of numbers above 0': lambda x: _is_numbers(x) and all(y > 0 for y in x),
  'a number, or a JSON object of numbers': lambda x: (
    _is_number(x) or (isinstance(x, dict) and all(y is None or _is_number(y) for y in x.values()))
  ),
}
# Settings of transformers with the one value that the towers here have.
_FIXED = {
  'pooler_act': 'tanh',
  'apply_layernorm': True,
  'use_qk_norm': False,
  'qk_normalization': False,
  # Of DINOv2 with registers.
  'interpolate_antialias': True,
  'interpolate_offset': 0.0,
}
_ROPE = {'rope_type': 'default', 'partial_rotary_factor': 1.0}


def read_config(path: epath.PathLike) -> dict[str, Any]:
  """Settings from the descriptions beside a file: config.json, preprocessor_config.json,
  processor_config.json (transformers 5) and the tokenizer's.

  open_clip_config.json alone describes a file whose name begins with open_clip. It describes others
  only where no config.json is beside them, and what the other files say comes before it.

  Raises:
    ValueError: a description is no JSON object, or says what cannot be read.
  """
  file = epath.Path(hub.local(path))
  folder = file.parent
  names = (pixels.OPEN_CLIP, pixels.CONFIG, pixels.PREPROCESSOR, pixels.PROCESSOR)
  beside = {name: found for name in names if (found := _json(folder / name)) is not None}
  if pixels.OPEN_CLIP in beside and file.name.startswith('open_clip'):
    beside = {pixels.OPEN_CLIP: beside[pixels.OPEN_CLIP]}
  elif pixels.CONFIG in beside:  # open_clip's is of another file with the same model
    beside.pop(pixels.OPEN_CLIP, None)
  read: dict[str, Any] = {}
  for name, settings in beside.items():
    if name == pixels.OPEN_CLIP:
      settings = _of_open_clip(settings)
    elif name == pixels.PROCESSOR:
      settings = settings.get('image_processor', {})
    elif name == pixels.CONFIG:
      of_tower = settings.get('vision_config', settings)
      if of_tower.get('model_type', settings.get('model_type')) in _MODELS:
        check_known(of_tower, str(folder / name))
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
  made = pixels.read(beside)
  if made is None:
    return read
  return {**read, 'pixels': made, **{name: made[name] for name in ('image_mean', 'image_std')}}


def check_known(settings: Mapping[str, Any], where: str) -> None:
  """ValueError if the settings of a tower of transformers have one that may change its features."""
  for name, value in settings.items():
    is_off = value is None or value is False or value == {}
    if not is_off and not name.startswith('_') and name not in _KNOWN:
      raise ValueError(
        f'{name}={value!r} in {where} is not known here and may change the features: remove it if '
        'it does not'
      )


def described(config: Mapping[str, Any]) -> Mapping[str, Any]:
  """The configuration with timm's settings under the names of transformers."""
  for name, value in _FIXED.items():
    if config.get(name, value) != value:
      raise ValueError(f'{name}={config[name]!r} in config.json must be {value!r}')
  is_timm = 'architecture' in config
  kind = config.get('model_type', '')
  if kind and kind not in _MODELS and not is_timm:
    raise ValueError(
      f'model_type={kind!r} in config.json is none of the models whose towers are read: '
      f'{", ".join(sorted(_MODELS))}'
    )
  if is_timm:
    is_read = 'num_attention_heads' in config
    return config if is_read else {**config, **_of_timm(config)}
  if not config:
    _log.warning(
      'There is no config.json beside the file: attention heads, activation, pooling, epsilon and '
      'pixel normalisation are the usual ones of its project.'
    )
  usual = dict(_MODELS.get(kind, {}))
  if 'rope_theta' in usual and (rope := config.get('rope_parameters')):  # of transformers 5
    usual |= {'rope_theta': rope.get('rope_theta') or usual['rope_theta']}
    others = {name: x for name, x in rope.items() if name != 'rope_theta' and x is not None}
    if any(x != _ROPE.get(name) for name, x in others.items()):
      raise ValueError(f'rope_parameters in config.json have {others}, which must be {_ROPE}')
  return {**usual, **config}


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
  return _typed(settings, file)


def _typed(settings: Mapping[str, Any], file: epath.Path) -> dict[str, Any]:
  """The settings without nulls for objects; ValueError for one of another type than is read."""
  typed = {}
  for name, value in settings.items():
    kind = next((x for x, names in _TYPES.items() if name in names), None)
    if kind and value is None:
      continue
    if kind and not _IS[kind](value):
      raise ValueError(f'{name}={value!r} in {file} must be {kind}')
    typed[name] = _typed(value, file) if kind == 'a JSON object' else value
  return typed


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)


def _is_numbers(value: Any) -> bool:
  return isinstance(value, list) and all(map(_is_number, value))


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
    'last_norm': row.get('last_norm', True),
    'pool_heads': row.get('attn_pool_num_heads'),
    'rope_theta': row.get('rope_temperature'),
    'rope_grid': row.get('ref_feat_shape'),
    'rope_offset': row.get('rope_grid_offset'),
    'rope_type': row.get('rope_type'),
    'rope_axes': row.get('rope_grid_indexing'),
    'naflex': row.get('naflex'),
    'naflex_square': row.get('naflex_square', False),
  }


def _of_open_clip(settings: Mapping[str, Any]) -> dict[str, Any]:
  """The settings of open_clip under the names of transformers, or of timm for its towers."""
  model = settings['model_cfg']
  image = model['vision_cfg']
  text = model.get('text_cfg', {})
  is_quick = bool(model.get('quick_gelu'))
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
      **_blocks_of_open_clip(image, is_quick),
      'global_pool': {'tok': 'token', 'avg': 'avg'}[pool],
      'pools_first': bool(image.get('final_ln_after_pool')),
    }
  of_text = {'num_attention_heads': text.get('heads'), **_blocks_of_open_clip(text, is_quick)}
  usual = {'pool_type': 'argmax', 'no_causal_mask': False, 'proj_bias': False}
  form = {name: text.get(name, value) for name, value in usual.items()}
  if 'hf_model_name' in text:
    of_text['unread'] = 'the text tower is one of transformers, unlike those of CLIP and SigLIP'
  elif tuple(form.values()) not in (('argmax', False, False), ('last', True, True)):
    of_text['unread'] = (
      f'the text_cfg of {pixels.OPEN_CLIP} has {form}: CLIP has {usual}, and SigLIP the others'
    )
  return {**read, 'text_config': of_text}


def _blocks_of_open_clip(tower: Mapping[str, Any], is_quick: bool) -> dict[str, Any]:
  """Activation and epsilon of a tower of open_clip."""
  norm = {'eps': 1e-5} | (tower.get('norm_kwargs') or {})
  gelu = {'approximate': 'none'} | (tower.get('act_kwargs') or {})
  if norm.keys() != {'eps'} or gelu not in ({'approximate': 'none'}, {'approximate': 'tanh'}):
    raise ValueError(
      f"norm_kwargs={norm} and act_kwargs={gelu} in {pixels.OPEN_CLIP} must have 'eps' alone, and "
      "'approximate' alone, 'none' or 'tanh'"
    )
  exact = 'quick_gelu' if is_quick else 'gelu'
  return {
    'hidden_act': 'gelu_pytorch_tanh' if gelu['approximate'] == 'tanh' else exact,
    'layer_norm_eps': norm['eps'],
  }
