"""Towers of timm and transformers: parity with the projects where they are installed, and names,
shapes and settings without them.
"""

import functools
import json

import jax
import numpy as np
import pytest
from flax import traverse_util

from het_plugin import runs, weights
from het_plugin.backbones import ConvNeXt, ResNet, TextTransformer, ViT, transformer
from het_plugin.backbones.vit import rotary_2d
from het_plugin.commands import fewshot, zeroshot
from het_plugin.training import checkpoint_reader
from het_plugin.weights import descriptions, renaming, towers, transfer

SIZES = {'hidden_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 4}
SIZES |= {'intermediate_size': 48, 'image_size': 28, 'patch_size': 7}
NO_MLP = {k: v for k, v in SIZES.items() if k != 'intermediate_size'} | {'mlp_ratio': 2}
# Model, its settings, and its representation of an image.
TRANSFORMERS = {
  'ViT': (SIZES, 'pooler_output', renaming.HALF),
  'DeiT': (SIZES, 'last_hidden_state', renaming.IMAGENET),
  'Dinov2': ({**NO_MLP, 'use_swiglu_ffn': True}, 'pooler_output', renaming.IMAGENET),
  'Dinov2WithRegisters': (NO_MLP, 'pooler_output', renaming.IMAGENET),
  'DINOv3ViT': (
    {**SIZES, 'use_gated_mlp': True, 'hidden_act': 'silu', 'num_register_tokens': 4},
    'pooler_output',
    renaming.IMAGENET,
  ),
  'DINOv3ViT query_bias': (
    {**SIZES, 'query_bias': False, 'mlp_bias': False},
    'pooler_output',
    renaming.IMAGENET,
  ),
  'DINOv3ViT value_bias': (
    {**SIZES, 'value_bias': False, 'proj_bias': False},
    'pooler_output',
    renaming.IMAGENET,
  ),
  'SiglipVision': (SIZES, 'pooler_output', renaming.HALF),
  'CLIPVision': ({**SIZES, 'projection_dim': 12}, 'image_embeds', renaming.CLIP),
  'MetaClip2Vision': ({**SIZES, 'projection_dim': 12}, 'image_embeds', renaming.CLIP),
  'Aimv2Vision': ({**SIZES, 'use_head': False}, 'last_hidden_state', renaming.HALF),
  'IJepa': (SIZES, 'last_hidden_state', renaming.IMAGENET),
  'ViTMSN': (SIZES, 'last_hidden_state', renaming.IMAGENET),
  'ViTMAE': ({**SIZES, 'mask_ratio': 0.0}, 'last_hidden_state', renaming.IMAGENET),
  'FlavaImage': (SIZES, 'pooler_output', renaming.HALF),
  'Beit': ({**SIZES, 'use_relative_position_bias': True}, 'pooler_output', renaming.HALF),
  'Data2VecVision': (
    {**SIZES, 'use_shared_relative_position_bias': True, 'use_mean_pooling': False},
    'last_hidden_state',
    renaming.HALF,
  ),
  'Tipsv2Vision': (NO_MLP, 'pooler_output', ((0.0,) * 3, (1.0,) * 3)),
  'InternVLVision': (SIZES, 'last_hidden_state', renaming.IMAGENET),
  'Radio': (
    {**NO_MLP, 'mlp_ratio': 2.0, 'max_img_size': 28, 'num_registers': 2, 'summary_idxs': [2, 0]},
    'summary',
    renaming.CLIP,
  ),
}


def phi_of(tower, image):
  params = traverse_util.unflatten_dict(dict(tower.params), sep='/')
  kinds = {'vit': ViT, 'convnext': ConvNeXt, 'resnet': ResNet}
  backbone = kinds[tower.backbone](**tower.settings)
  return jax.jit(backbone.apply)({'params': params['backbone']}, 2 * image - 1)[0]


def text_embeddings(tower, text):
  params = traverse_util.unflatten_dict(dict(tower.params), sep='/')
  phi, _ = jax.jit(TextTransformer(**tower.settings).apply)({'params': params['text_tower']}, text)
  return phi @ params['text_projection']['kernel'] + params['text_projection']['bias']


@pytest.mark.parametrize('name', TRANSFORMERS)
def test_parity_with_transformers(name):
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  settings, output, (mean, std) = TRANSFORMERS[name]
  name, _, _ = name.partition(' ')
  config = getattr(transformers, f'{name}Config')(**settings)
  with_projection = 'WithProjection' * name.endswith(('CLIPVision', 'MetaClip2Vision'))
  model = getattr(transformers, f'{name}Model{with_projection}')(config)
  torch.manual_seed(0)
  with torch.no_grad():
    for p in model.parameters():
      p.add_(0.2 * torch.randn_like(p))
    image = np.random.default_rng(0).random((2, 28, 28, 3)).astype(np.float32)
    pixels = torch.tensor(((image - mean) / std).transpose(0, 3, 1, 2), dtype=torch.float32)
    inputs = {'pixel_values': pixels}
    if name == 'Radio':  # it normalises its pixels itself
      inputs = {'pixel_values': torch.tensor(image.transpose(0, 3, 1, 2))}
    expected = model.eval()(**inputs)[output].numpy()
  if expected.ndim == 3 and name in ('Aimv2Vision', 'InternVLVision', 'IJepa'):
    expected = expected[:, -16:].mean(axis=1)  # patches
  elif expected.ndim == 3:
    expected = expected[:, 0]
  arrays = {key: x.numpy() for key, x in model.state_dict().items()}
  if name == 'DeiT':
    arrays = {k: x for k, x in arrays.items() if not k.startswith('pooler')}
  tower = weights.read_tower(arrays, {**config.to_dict(), 'image_mean': mean, 'image_std': std})
  np.testing.assert_allclose(phi_of(tower, image), expected, atol=2e-5)
  assert tower.image_size == 28


@pytest.mark.parametrize('name', ['llava', 'paligemma', 'smolvlm', 'internvl'])
def test_parity_with_towers_of_language_models(name, tmp_path):
  """transformers 4 writes of a vision_config only what is not usual."""
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  usual = transformers.AutoConfig.for_model(name)
  of_text = {x: SIZES[x] for x in ('hidden_size', 'num_attention_heads', 'intermediate_size')}
  of_text |= {'model_type': usual.text_config.model_type, 'num_hidden_layers': 1, 'head_dim': 8}
  of_text |= {'vocab_size': 64, 'pad_token_id': 0, 'num_key_value_heads': 4}
  vision = type(usual.vision_config)(**SIZES).to_dict()
  config = type(usual)(vision_config=vision, text_config=of_text, image_token_id=3)
  model = transformers.AutoModelForImageTextToText.from_config(config).eval().model
  tower = getattr(model, 'vision_tower', None) or model.vision_model
  mean, std = renaming.CLIP if name == 'llava' else renaming.HALF
  image = np.random.default_rng(0).random((2, 28, 28, 3)).astype(np.float32)
  torch.manual_seed(0)
  with torch.no_grad():
    for p in tower.parameters():
      p.add_(0.2 * torch.randn_like(p))
    pixels = torch.tensor(((image - mean) / std).transpose(0, 3, 1, 2), dtype=torch.float32)
    found = tower(pixels)
  expected = found.pooler_output
  if expected is None:
    expected = found.last_hidden_state[:, -16:].mean(axis=1)
  model.save_pretrained(tmp_path)
  path = tmp_path / 'config.json'
  described = json.loads(path.read_text())
  kept = (*SIZES, *(['model_type'] if name == 'llava' else []))
  described['vision_config'] = {x: described['vision_config'][x] for x in kept}
  path.write_text(json.dumps(described | {'image_mean': mean, 'image_std': std}))
  file = tmp_path / 'model.safetensors'
  read = weights.read_tower(weights.read_arrays(file), weights.read_config(file))
  np.testing.assert_allclose(phi_of(read, image), expected.numpy(), atol=2e-5)


@pytest.mark.parametrize('version', ['v1', 'v2'])
@pytest.mark.parametrize('project', ['timm', 'transformers'])
def test_parity_of_convnext(project, version):
  torch = pytest.importorskip('torch')
  library = pytest.importorskip(project)
  widths = (8, 16, 32, 64)
  depths = (1, 2, 1, 1)
  v2 = version == 'v2'
  if project == 'timm':
    scale = None if v2 else 1e-6
    settings = {'dims': widths, 'depths': depths, 'conv_mlp': v2, 'use_grn': v2}
    model = library.models.ConvNeXt(**settings, ls_init_value=scale, num_classes=3)
  else:
    name = 'ConvNextV2' if v2 else 'ConvNext'
    settings = {'hidden_sizes': widths, 'depths': depths, 'num_labels': 3}
    config = getattr(library, f'{name}Config')(**settings)
    model = getattr(library, f'{name}ForImageClassification')(config)
  torch.manual_seed(0)
  with torch.no_grad():
    for p in model.parameters():
      p.add_(0.2 * torch.randn_like(p))
    image = np.random.default_rng(0).random((2, 32, 64, 3)).astype(np.float32)
    mean, std = renaming.IMAGENET
    pixels = torch.tensor(((image - mean) / std).transpose(0, 3, 1, 2), dtype=torch.float32)
    expected = model.eval()(pixels)
    expected = getattr(expected, 'logits', expected).numpy()
  tower = weights.read_tower({k: x.numpy() for k, x in model.state_dict().items()}, {})
  assert tower.settings == {'depths': depths, 'width': 8, 'version': version}
  assert tower.bindings()[:2] == ['BACKBONE = @convnext()', 'IMAGE_SIZE = 224']
  logits = phi_of(tower, image) @ tower.params['head/kernel'] + tower.params['head/bias']
  np.testing.assert_allclose(logits, expected, atol=2e-5)


def test_parity_of_dinov3_convnext():
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  settings = {'hidden_sizes': [8, 16, 32, 64], 'depths': [1, 2, 1, 1], 'layer_norm_eps': 1e-3}
  config = transformers.DINOv3ConvNextConfig(**settings, layer_scale_init_value=1.0)
  model = transformers.DINOv3ConvNextModel(config).eval()
  image = np.random.default_rng(0).random((2, 32, 64, 3)).astype(np.float32)
  torch.manual_seed(0)
  with torch.no_grad():
    for p in model.parameters():
      p.add_(0.2 * torch.randn_like(p))
    mean, std = renaming.IMAGENET
    pixels = torch.tensor(((image - mean) / std).transpose(0, 3, 1, 2), dtype=torch.float32)
    expected = model(pixels).pooler_output.numpy()
  arrays = {k: x.numpy() for k, x in model.state_dict().items()}
  tower = weights.read_tower(arrays, config.to_dict())
  np.testing.assert_allclose(phi_of(tower, image), expected, atol=2e-5)


@pytest.mark.parametrize('kind', ['basic', 'bottleneck'])
def test_parity_of_resnets_of_transformers(kind):
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  widths = [64, 128, 256] if kind == 'basic' else [256, 512, 1024]
  config = transformers.ResNetConfig(
    hidden_sizes=widths, depths=[1, 2, 1], layer_type=kind, num_labels=3
  )
  model = transformers.ResNetForImageClassification(config).eval()
  torch.manual_seed(0)
  with torch.no_grad():
    for name, x in model.named_buffers():
      if name.endswith(('running_mean', 'running_var')):
        x.add_(0.5 * torch.rand_like(x))
    image = np.random.default_rng(0).random((2, 40, 64, 3)).astype(np.float32)
    mean, std = renaming.IMAGENET
    pixels = torch.tensor(((image - mean) / std).transpose(0, 3, 1, 2), dtype=torch.float32)
    expected = model(pixels).logits.numpy()
  arrays = {k: x.numpy() for k, x in model.state_dict().items()}
  tower = weights.read_tower(arrays, config.to_dict())
  logits = phi_of(tower, image) @ tower.params['head/kernel'] + tower.params['head/bias']
  np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max())


def test_parity_of_bit():
  torch = pytest.importorskip('torch')
  timm = pytest.importorskip('timm')
  convolution = functools.partial(timm.layers.StdConv2d, eps=1e-8)
  norm = functools.partial(timm.layers.GroupNormAct, num_groups=32)
  model = timm.models.ResNetV2(
    (1, 2, 1, 1), stem_type='fixed', conv_layer=convolution, norm_layer=norm, num_classes=3
  )
  torch.manual_seed(0)
  with torch.no_grad():
    for p in model.parameters():
      p.add_(0.1 * torch.randn_like(p))
    image = np.random.default_rng(0).random((2, 64, 96, 3)).astype(np.float32)
    expected = model.eval()(torch.tensor(2 * image.transpose(0, 3, 1, 2) - 1)).numpy()
  arrays = {k: x.numpy() for k, x in model.state_dict().items()}
  tower = weights.read_tower(arrays, {})
  logits = phi_of(tower, image) @ tower.params['head/kernel'] + tower.params['head/bias']
  np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max())


def test_batch_normalisation_is_folded():
  """A ResNet of one basic unit in torchvision's names, against the convolutions with NumPy."""
  random = np.random.default_rng(0)
  arrays = {'fc.weight': random.normal(size=(3, 4)), 'fc.bias': np.zeros(3)}
  shapes = {'': (4, 3, 7, 7), 'layer1.0.': (4, 4, 3, 3)}
  for root, number in (('', 1), ('layer1.0.', 1), ('layer1.0.', 2)):
    arrays[f'{root}conv{number}.weight'] = random.normal(size=shapes[root])
    for part in ('weight', 'bias', 'running_mean', 'running_var'):
      arrays[f'{root}bn{number}.{part}'] = random.uniform(0.5, 1, 4)
    arrays[f'{root}bn{number}.num_batches_tracked'] = np.asarray(7)
  tower = weights.read_tower(arrays, {'image_mean': [0.2] * 3, 'image_std': [0.1] * 3})
  assert tower.bindings()[:2] == ['BACKBONE = @resnet()', 'IMAGE_SIZE = 224']

  def layer(root, number, x, stride):
    kernel = arrays[f'{root}conv{number}.weight']
    side = kernel.shape[-1]
    y = np.pad(x, ((side // 2,) * 2, (side // 2,) * 2, (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(y, (side, side), (0, 1))[::stride, ::stride]
    y = np.einsum('hwcpq,dcpq->hwd', windows, kernel)
    norm = {x: arrays[f'{root}bn{number}.{x}'] for x in ('weight', 'bias')}
    y = (y - arrays[f'{root}bn{number}.running_mean']) / np.sqrt(
      arrays[f'{root}bn{number}.running_var'] + 1e-5
    )
    return y * norm['weight'] + norm['bias']

  image = random.random((8, 8, 3)).astype(np.float32)
  x = np.pad(layer('', 1, (image - 0.2) / 0.1, 2).clip(0), ((1, 1), (1, 1), (0, 0)))
  x = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (0, 1))[::2, ::2].max(axis=(-1, -2))
  y = layer('layer1.0.', 2, layer('layer1.0.', 1, x, 1).clip(0), 1)
  expected = (x + y).clip(0).mean(axis=(0, 1))
  np.testing.assert_allclose(phi_of(tower, image[None])[0], expected, rtol=1e-4)
  wide = arrays | {'layer1.0.conv2.weight': np.ones((4, 2, 3, 3))}
  with pytest.raises(ValueError, match=r'stage1_unit01 has the shape .* should be \(3, 3, 4, 4\)'):
    weights.read_tower(wide, {})
  with pytest.raises(ValueError, match='no place in a ResNet, such as layer1.0.se.fc1.weight'):
    weights.read_tower(arrays | {'layer1.0.se.fc1.weight': np.ones(3)}, {})


TEXT = {'vocab_size': 99, 'hidden_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 4}
TEXT |= {'intermediate_size': 48, 'max_position_embeddings': 9, 'projection_size': 32}


@pytest.mark.parametrize('name', ['CLIP', 'Siglip', 'MetaClip2'])
def test_text_towers_have_parity_with_transformers(name):
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  is_siglip = name == 'Siglip'
  end = {'CLIP': 98, 'Siglip': 1, 'MetaClip2': 2}[name]
  ends = {'eos_token_id': end, 'pad_token_id': end, 'bos_token_id': 97}
  special = {} if is_siglip else {'projection_dim': 12}
  config = getattr(transformers, f'{name}Config')(
    text_config={**TEXT, **({} if is_siglip else ends)}, vision_config=SIZES, **special
  )
  model = getattr(transformers, f'{name}Model')(config).eval()
  torch.manual_seed(0)
  with torch.no_grad():
    for p in model.parameters():
      p.add_(0.2 * torch.randn_like(p))
  # Theirs: start, words, end, and padding with the end. Ours: + 2, end is 1, padding 0.
  words = [[5, 0, 33], [7]] if is_siglip else [[97, 5, 0, 33], [97, 7]]
  theirs = np.asarray([[*row, *[end] * (9 - len(row))] for row in words])
  ours = np.asarray([[*(i + 2 for i in row), 1, *[0] * (8 - len(row))] for row in words])
  with torch.no_grad():
    expected = model.get_text_features(input_ids=torch.tensor(theirs))
    expected = getattr(expected, 'pooler_output', expected).numpy()
  arrays = {key: x.numpy() for key, x in model.state_dict().items()}
  tower = weights.read_text_tower(arrays, config.to_dict())
  assert tower.length == 9
  assert tower.scale == pytest.approx(np.exp(arrays['logit_scale']).item())
  np.testing.assert_allclose(text_embeddings(tower, ours), expected, atol=2e-5)


OF_SIGLIP = {'no_causal_mask': True, 'proj_bias': True, 'pool_type': 'last'}
OF_SIGLIP |= {'norm_kwargs': {'eps': 1e-6}, 'act_kwargs': {'approximate': 'tanh'}}


@pytest.mark.parametrize(
  'model, quick_gelu, text',
  [
    ('CLIP', True, {}),
    ('CustomTextCLIP', False, {'norm_kwargs': {'eps': 0.1}}),
    ('CustomTextCLIP', False, OF_SIGLIP),
    ('CustomTextCLIP', False, OF_SIGLIP | {'act_kwargs': None}),
  ],
)
def test_parity_with_open_clip(model, quick_gelu, text, tmp_path):
  torch = pytest.importorskip('torch')
  open_clip = pytest.importorskip('open_clip')
  blocks = {'width': 32, 'layers': 2, 'mlp_ratio': 1.5}
  image_cfg = {**blocks, 'image_size': 28, 'patch_size': 7, 'head_width': 8}
  text_cfg = {**blocks, 'context_length': 9, 'vocab_size': 99, 'heads': 2, **text}
  config = {'embed_dim': 32, 'quick_gelu': quick_gelu}
  config |= {'vision_cfg': image_cfg, 'text_cfg': text_cfg}
  theirs = getattr(open_clip.model, model)(**config).eval()
  torch.manual_seed(0)
  with torch.no_grad():
    for p in theirs.parameters():
      p.add_(0.2 * torch.randn_like(p))
  path = tmp_path / 'open_clip_model.safetensors'
  weights.write_arrays(path, {name: x.numpy() for name, x in theirs.state_dict().items()})
  mean = (0.4, 0.5, 0.6)
  std = (0.3, 0.2, 0.1)
  settings = {'model_cfg': config, 'preprocess_cfg': {'mean': mean, 'std': std}}
  (tmp_path / 'open_clip_config.json').write_text(json.dumps(settings))
  arrays = weights.read_arrays(path)
  settings = weights.read_config(path)

  image = np.random.default_rng(0).random((2, 28, 28, 3)).astype(np.float32)
  pixels = torch.tensor(((image - mean) / std).transpose(0, 3, 1, 2), dtype=torch.float32)
  end = 1 if 'pool_type' in text else 98
  rows = [[5, 3, 33, end], [7, end]]
  ids = np.asarray([[*row, *[end] * (9 - len(row))] for row in rows])
  with torch.no_grad():
    alpha = theirs.encode_image(pixels).numpy()
    beta = theirs.encode_text(torch.tensor(ids)).numpy()
  np.testing.assert_allclose(phi_of(weights.read_tower(arrays, settings), image), alpha, atol=2e-5)
  ours = [[*(i + 2 for i in row[:-1]), 1, *[0] * (9 - len(row))] for row in rows]
  tower = weights.read_text_tower(arrays, settings)
  np.testing.assert_allclose(text_embeddings(tower, np.asarray(ours)), beta, atol=2e-5)


def test_towers_of_open_clip_that_pool_otherwise_are_refused(tmp_path):
  path = tmp_path / 'open_clip_model.safetensors'
  for image, sentence in (
    ({'width': 64, 'pool_type': 'none'}, "pool_type='none' .* must be 'tok' or 'avg'"),
    ({'width': 64, 'attentional_pool': True}, 'attentional_pool=True .* cannot be read'),
    (
      {'width': 64, 'act_kwargs': {'inplace': True}},
      "act_kwargs=.* must have .*'approximate' alone",
    ),
  ):
    config = {'vision_cfg': image, 'text_cfg': {}}
    (tmp_path / 'open_clip_config.json').write_text(json.dumps({'model_cfg': config}))
    with pytest.raises(ValueError, match=sentence):
      weights.read_config(path)
  # An image tower is read whatever the text tower is.
  config = {'vision_cfg': {'width': 64, 'image_size': 28}, 'text_cfg': {'hf_model_name': 'roberta'}}
  config['quick_gelu'] = True
  (tmp_path / 'open_clip_config.json').write_text(json.dumps({'model_cfg': config}))
  config = weights.read_config(path)
  assert config['num_attention_heads'] == 1
  # A preprocessor tells nothing of the tower.
  (tmp_path / 'preprocessor_config.json').write_text(
    '{"image_processor_type": "CLIPImageProcessor", "image_mean": [0.1, 0.2, 0.3]}'
  )
  assert weights.read_config(path) == config
  found = weights.read_config(tmp_path / 'model.safetensors')
  assert found.pop('image_mean') == [0.1, 0.2, 0.3]
  assert found['num_attention_heads'] == 1 and found['hidden_act'] == 'quick_gelu'
  (tmp_path / 'preprocessor_config.json').unlink()
  # Many models of the hub have a file of timm or of transformers, too, with its own config.json.
  (tmp_path / 'config.json').write_text('{"num_attention_heads": 4}')
  assert weights.read_config(path) == config
  assert weights.read_config(tmp_path / 'model.safetensors') == {'num_attention_heads': 4}
  with pytest.raises(ValueError, match='the text tower is one of transformers'):
    weights.read_text_tower({}, config)


def clip_arrays():
  """A small CLIP under the names of transformers, with random arrays."""
  rng = np.random.default_rng(0)
  width = 16
  hidden = 24
  shapes = {'logit_scale': (), 'visual_projection.weight': (8, width)}
  shapes['text_projection.weight'] = (8, width)
  embeddings = 'vision_model.embeddings'
  shapes[f'{embeddings}.class_embedding'] = (width,)
  shapes[f'{embeddings}.patch_embedding.weight'] = (width, 3, 4, 4)
  shapes[f'{embeddings}.position_embedding.weight'] = (5, width)
  shapes['text_model.embeddings.token_embedding.weight'] = (30, width)
  shapes['text_model.embeddings.position_embedding.weight'] = (7, width)
  norms = [
    'vision_model.pre_layrnorm',
    'vision_model.post_layernorm',
    'text_model.final_layer_norm',
  ]
  for tower in ('vision_model', 'text_model'):
    root = f'{tower}.encoder.layers.0'
    norms += [f'{root}.layer_norm1', f'{root}.layer_norm2']
    sizes = {f'self_attn.{x}_proj': (width, width) for x in ('q', 'k', 'v', 'out')}
    for layer, shape in (sizes | {'mlp.fc1': (hidden, width), 'mlp.fc2': (width, hidden)}).items():
      shapes |= {f'{root}.{layer}.weight': shape, f'{root}.{layer}.bias': shape[:1]}
  shapes |= {f'{norm}.{x}': (width,) for norm in norms for x in ('weight', 'bias')}
  return {name: 0.3 * rng.normal(size=s).astype(np.float32) for name, s in shapes.items()}


@pytest.fixture
def clip_file(tmp_path):
  """(path, image tower, text tower) of a small CLIP."""
  arrays = clip_arrays()
  path = tmp_path / 'clip.safetensors'
  weights.write_arrays(path, arrays)
  heads = {'num_attention_heads': 2}
  config = json.dumps({'text_config': heads, 'vision_config': heads})
  (tmp_path / 'config.json').write_text(config)
  config = weights.read_config(path)
  return path, weights.read_tower(arrays, config), weights.read_text_tower(arrays, config)


def unit(x):
  return x / np.linalg.norm(x, axis=1, keepdims=True)


@pytest.mark.slow
def test_both_towers_of_a_file_are_opened_without_a_gin_file(clip_file):
  path, image_tower, text_tower = clip_file
  looped = ['text_transformer.scan_layers = True']
  run = runs.open_run(path, bindings=looped, published=runs.opening.PUBLISHED_PAIRS)
  text = np.asarray([[4, 9, 1, 0, 0, 0, 0], [5, 1, 0, 0, 0, 0, 0]])
  beta = run.model.text_embeddings(run.params, text)
  np.testing.assert_allclose(beta, unit(text_embeddings(text_tower, text)), atol=1e-5)
  image = np.random.default_rng(1).random((2, 8, 8, 3)).astype(np.float32)
  alpha = run.model.image_embeddings(run.params, {'image': 2 * image - 1})
  np.testing.assert_allclose(alpha, unit(phi_of(image_tower, image)), atol=1e-5)
  with pytest.raises(ValueError, match='no text tower'):
    weights.read_text_tower({'visual.proj': np.zeros((2, 2))}, {})
  arrays = clip_arrays()
  odd = 'text_model.encoder.layers.0.layer_scale'
  with pytest.raises(ValueError, match=f'not that of CLIP or SigLIP: it has {odd}'):
    weights.read_text_tower(arrays | {odd: np.ones(16)}, {})
  normless = {x: y for x, y in arrays.items() if not x.endswith('layer_norm1.bias')}
  with pytest.raises(ValueError, match='it has a normalisation without bias'):
    weights.read_text_tower(normless, {})
  weights.read_text_tower(arrays | {'text_model.embeddings.position_ids': np.arange(7)}, {})


def test_few_and_zero_shot_of_a_file(clip_file, tmp_path, run_main):
  tokenizers = pytest.importorskip('tokenizers')
  file, image_tower, text_tower = clip_file
  words = {'a': 0, 'photo': 1, 'of': 2, '.': 3, 'wren': 15, 'robin': 22, '</s>': 29}
  tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token='a'))
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
    single='$A </s>', special_tokens=[('</s>', 29)]
  )
  tokenizer.save(str(tmp_path / 'tokenizer.json'))
  colours = np.random.default_rng(0).integers(0, 256, (60, 1, 1, 3)).astype(np.uint8)
  images = np.broadcast_to(colours, (60, 8, 8, 3))
  split = np.repeat(['train', 'test'], 30)
  label = np.arange(60) % 2
  names = {'class_name': np.asarray(['robin', 'wren'])}
  np.savez(tmp_path / 'birds.npz', image=images, label=label, split=split, **names)

  common = (f'--checkpoint={file}', '--batch_size=8', f'--json={tmp_path}/out.json')
  run_main(zeroshot, *common, f'--dataset={tmp_path}/birds.npz')
  text = np.asarray([[2, 3, 4, 2, 2 + words[x], 5, 1] for x in ('robin', 'wren')])
  alpha = phi_of(image_tower, images[30:] / 255)
  beta = text_embeddings(text_tower, text)
  predicted = np.argmax(alpha @ unit(beta).T, axis=1)
  top1 = json.loads((tmp_path / 'out.json').read_text())['top1']
  assert top1 == pytest.approx(np.mean(predicted == label[30:]))
  assert len(set(predicted.tolist())) == 2

  run_main(fewshot, *common, f'--dataset={tmp_path}/birds.npz', '--shots=5', '--seeds=0')
  (row,) = json.loads((tmp_path / 'out.json').read_text())['rows']
  assert row['shots'] == 5 and row['run'] == 'clip'


def test_the_activation_of_clip():
  def mlp(arrays, **config):
    return weights.read_tower(arrays, config).settings['mlp']

  arrays = clip_arrays()
  assert mlp(arrays) == 'quick_gelu'
  assert mlp(arrays, hidden_act='gelu') == 'gelu_exact'
  timm = {name.replace('pre_layrnorm', 'norm_pre'): x for name, x in arrays.items()}
  assert mlp(timm, architecture='vit_base_patch16_clip_224') == 'gelu_exact'
  assert mlp(timm, architecture='vit_base_patch16_clip_quickgelu_224') == 'quick_gelu'


def siglip_arrays(project, width=32, patch_size=7, side=4):
  """An image tower of SigLIP with one block under a project's names, with random arrays."""
  timm = project == 'timm'
  block, pool = ('blocks.0', 'attn_pool') if timm else ('encoder.layers.0', 'head')
  root = '' if timm else 'vision_model.'
  rng = np.random.default_rng(0)
  hidden = width + 16
  names = {
    'norms': ('norm1', 'norm2') if timm else ('layer_norm1', 'layer_norm2'),
    'attention': 'attn' if timm else 'self_attn',
    'out': 'proj' if timm else 'out_proj',
  }
  shapes = {f'{root}{pool}.{"latent" if timm else "probe"}': (1, 1, width)}
  embedding = 'patch_embed.proj' if timm else 'embeddings.patch_embedding'
  shapes[f'{root}{embedding}.weight'] = (width, 3, patch_size, patch_size)
  shapes[f'{root}{embedding}.bias'] = (width,)
  if timm:
    shapes['pos_embed'] = (1, side**2, width)
  else:
    shapes[f'{root}embeddings.position_embedding.weight'] = (side**2, width)
  norms = [f'{block}.{name}' for name in names['norms']]
  norms += ['norm' if timm else 'post_layernorm', f'{pool}.{"norm" if timm else "layernorm"}']
  shapes |= {f'{root}{norm}.{x}': (width,) for norm in norms for x in ('weight', 'bias')}
  dense = {f'{block}.{names["attention"]}.{names["out"]}': (width, width)}
  if timm:
    dense |= {f'{block}.attn.qkv': (3 * width, width), f'{pool}.q': (width, width)}
    dense |= {f'{pool}.kv': (2 * width, width), f'{pool}.proj': (width, width)}
  else:
    dense |= {f'{block}.self_attn.{x}_proj': (width, width) for x in 'qkv'}
    dense[f'{pool}.attention.out_proj'] = (width, width)
    shapes[f'{root}{pool}.attention.in_proj_weight'] = (3 * width, width)
    shapes[f'{root}{pool}.attention.in_proj_bias'] = (3 * width,)
  for mlp in (f'{block}.mlp', f'{pool}.mlp'):
    dense |= {f'{mlp}.fc1': (hidden, width), f'{mlp}.fc2': (width, hidden)}
  for name, shape in dense.items():
    shapes |= {f'{root}{name}.weight': shape, f'{root}{name}.bias': shape[:1]}
  return {name: 0.3 * rng.normal(size=s).astype(np.float32) for name, s in shapes.items()}


def test_the_gelu_of_siglip():
  """Exact in most files of timm, the tanh approximation in files of transformers."""

  def mlp(project, sizes=(), **config):
    tower = weights.read_tower(siglip_arrays(project, *sizes), config)
    assert tower.settings['pooling'] == 'map' and not tower.skipped
    return tower.settings['mlp']

  assert mlp('timm') == mlp('timm', architecture='vit_base_patch16_siglip_224') == 'gelu_exact'
  assert mlp('transformers') == mlp('transformers', hidden_act='gelu_pytorch_tanh') == 'gelu'
  assert mlp('transformers', hidden_act='gelu') == 'gelu_exact'
  for sizes in ((32, 32, 2), (1536, 2, 1), (1152, 16, 1), (1024, 16, 32)):
    assert mlp('timm', sizes) == 'gelu', sizes
  for sizes in ((1152, 14, 1), (1024, 16, 24)):
    assert mlp('timm', sizes) == 'gelu_exact', sizes
  without_head = siglip_arrays('transformers')
  without_head = {name: x for name, x in without_head.items() if '.head.' not in name}
  for kind in ('idefics3', 'smolvlm_vision', 'siglip_vision_model'):
    tower = weights.read_tower(without_head, {'model_type': kind})
    assert (tower.settings['mlp'], tower.settings['pooling']) == ('gelu', 'gap')


def test_usual_values_are_those_of_transformers(tmp_path):
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  compared = []
  # Usual towers of these have no positions, and a pooling that is not read.
  changed = dict.fromkeys(('beit', 'data2vec-vision'), {'use_relative_position_bias': True})
  changed['aimv2_vision_model'] = {'use_head': False}
  for kind in descriptions._MODELS.keys() - {'intern_vit_6b', 'radio'}:
    config = transformers.AutoConfig.for_model(kind, **changed.get(kind, {}))
    config.save_pretrained(tmp_path)
    weights.read_config(tmp_path / 'model.safetensors')  # knows all of its settings
    if hasattr(config, 'vision_config'):
      continue
    if type(config) not in transformers.AutoModel._model_mapping:
      continue
    with torch.device('meta'):
      model = transformers.AutoModel.from_config(config)
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    arrays = {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}
    whole = weights.read_tower(arrays, config.to_dict())
    assert weights.read_tower(arrays, {'model_type': kind}).settings == whole.settings, kind
    compared.append(kind)
  assert len(compared) > 15 and changed.keys() <= set(compared)


@pytest.mark.parametrize(
  'kind, epsilon, heads, pooling',
  [('beit', 1e-12, 2, 'gap'), ('data2vec-vision', 1e-12, 2, 'gap'), ('aimv2', 1e-5, 8, 'token')],
)
def test_usual_values_where_config_json_says_nothing(kind, epsilon, heads, pooling):
  arrays = siglip_arrays('timm', width=128)
  arrays = {name: x for name, x in arrays.items() if not name.startswith('attn_pool')}
  arrays['cls_token'] = np.zeros((1, 1, 128), np.float32)
  arrays = {name.replace('attn.qkv', 'attn.in_proj'): x for name, x in arrays.items()}
  for part in ('weight', 'bias'):
    arrays[f'blocks.0.attn.in_proj_{part}'] = arrays.pop(f'blocks.0.attn.in_proj.{part}')
  found = weights.read_tower(arrays, {'model_type': kind}).settings
  expected = {'norm_epsilon': epsilon, 'num_heads': heads, 'pooling': pooling}
  assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize('act_layer', [None, 'gelu_tanh'])
def test_parity_with_siglip_of_timm(act_layer):
  torch = pytest.importorskip('torch')
  timm = pytest.importorskip('timm')
  sizes = {'img_size': 28, 'patch_size': 7, 'embed_dim': 32, 'depth': 2, 'num_heads': 4}
  special = {'class_token': False, 'global_pool': 'map', 'num_classes': 0, 'act_layer': act_layer}
  model = timm.models.VisionTransformer(**sizes, **special).eval()
  torch.manual_seed(0)
  with torch.no_grad():
    for p in model.parameters():
      p.add_(0.2 * torch.randn_like(p))
  image = np.random.default_rng(0).random((2, 28, 28, 3)).astype(np.float32)
  with torch.no_grad():
    expected = model(torch.tensor((2 * image - 1).transpose(0, 3, 1, 2))).numpy()
  arrays = {name: x.numpy() for name, x in model.state_dict().items()}
  config = {'num_attention_heads': 4} | ({'hidden_act': 'gelu_pytorch_tanh'} if act_layer else {})
  np.testing.assert_allclose(phi_of(weights.read_tower(arrays, config), image), expected, atol=2e-5)


def timm_arrays(params):
  """Parameters of a DINOv2-like ViT of ours under timm's names, written out independently."""
  p = params
  arrays = {}

  def linear(name, layers):
    arrays[f'{name}.weight'] = np.concatenate([x['kernel'].T for x in layers])
    arrays[f'{name}.bias'] = np.concatenate([x['bias'] for x in layers])

  def norm(name, layer):
    arrays[f'{name}.weight'] = layer['scale']
    arrays[f'{name}.bias'] = layer['bias']

  arrays['cls_token'] = p['class_token'][None, None]
  arrays['reg_token'] = p['registers'][None]
  arrays['pos_embed'] = p['position_embedding'][None]
  arrays['patch_embed.proj.weight'] = p['embedding']['kernel'].transpose(3, 2, 0, 1)
  arrays['patch_embed.proj.bias'] = p['embedding']['bias']
  norm('norm', p['encoder_norm'])
  for i in range(2):
    b = p[f'block{i:02d}']
    root = f'blocks.{i}'
    norm(f'{root}.norm1', b['attention_norm'])
    norm(f'{root}.norm2', b['mlp_norm'])
    linear(f'{root}.attn.qkv', [b['attention'][name] for name in ('query', 'key', 'value')])
    linear(f'{root}.attn.proj', [b['attention']['out']])
    linear(f'{root}.mlp.fc1', [b['mlp']['wi_gate'], b['mlp']['wi']])
    linear(f'{root}.mlp.fc2', [b['mlp']['wo']])
    arrays[f'{root}.ls1.gamma'] = b['attention_scale']
    arrays[f'{root}.ls2.gamma'] = b['mlp_scale']
  arrays['head.weight'] = np.ones((5, 16))
  arrays['head.bias'] = np.zeros(5)
  return arrays


@pytest.fixture
def ours():
  model = ViT(7, 16, 2, 24, 2, num_registers=3, mlp='swiglu', layer_scale=1e-5)
  image = np.random.default_rng(0).random((2, 28, 28, 3)).astype(np.float32)
  params = jax.jit(model.init)(jax.random.key(0), image)['params']
  random = np.random.default_rng(1)
  params = jax.tree.map(lambda x: np.asarray(x) + 0.2 * random.normal(size=x.shape), params)
  return model, jax.tree.map(np.float32, params), image


def test_names_and_settings_of_timm(ours):
  model, params, image = ours
  no_change = {'image_mean': (0.5,) * 3, 'image_std': (0.5,) * 3, 'num_attention_heads': 2}
  tower = weights.read_tower(timm_arrays(params), no_change)
  for name, value in {**tower.settings, 'mlp': 'swiglu'}.items():
    assert getattr(model, name) == value, name
  expected, _ = jax.jit(model.apply)({'params': params}, 2 * image - 1)
  np.testing.assert_allclose(phi_of(tower, image), expected, atol=1e-5)
  # DINOv2's own mean and deviation, where no file says another one.
  mean, std = renaming.IMAGENET
  default = weights.read_tower(timm_arrays(params), {'num_attention_heads': 2})
  expected, _ = jax.jit(model.apply)({'params': params}, ((image - mean) / std).astype(np.float32))
  np.testing.assert_allclose(phi_of(default, image), expected, atol=1e-5)


def test_a_tower_starts_a_run_of_another_resolution(ours, caplog):
  _, params, _ = ours
  tower = weights.read_tower(timm_arrays(params), {'num_attention_heads': 2})
  shapes = {name: x.shape for name, x in tower.params.items()}
  shapes |= {'backbone/position_embedding': (1 + 36, 16), 'head/covariance/J': (2, 16)}
  shapes |= {'head/kernel': (16, 128), 'head/bias': (128,)}
  shapes['backbone/blocks/adapter/wi/kernel'] = (2, 16, 4)
  read, report = weights.load_params(timm_arrays(params), shapes)
  assert read['backbone/position_embedding'].shape == (37, 16)
  for name in ('head/covariance/J', 'backbone/block01/adapter/wi/kernel'):
    assert f'initialised: {name}' in report.text()
  np.testing.assert_array_equal(read['head/kernel'][:, :5], 1)
  with caplog.at_level('INFO'):
    report.log('a file')
  *_, summary, names = caplog.messages
  assert summary == f'a file: {report.text().partition(chr(10))[0]}' and 'initialised: ' in names


def test_relative_positions_of_beit():
  """Rows of a table for 2 x 3 patches and a class token, and one table for all blocks."""
  places = transformer.relative_places((2, 3))
  patches = [(row, column) for row in range(2) for column in range(3)]
  for i, (row, column) in enumerate(patches, start=1):
    for j, (other_row, other_column) in enumerate(patches, start=1):
      assert places[i, j] == (row - other_row + 1) * 5 + column - other_column + 2
  assert places[0, 0] == 17 and set(places[0, 1:]) == {15} and set(places[1:, 0]) == {16}


def test_families_that_differ_from_dinov2_by_their_names(ours):
  """BEiT's tables, AIMv2's normalisation and MLPs, and InternViT without a last normalisation."""
  image = ours[2]
  dino = timm_arrays(ours[1])
  dino = {x: y for x, y in dino.items() if 'reg_token' not in x and 'head' not in x}

  def read(arrays, **config):
    tower = weights.read_tower(arrays, {'num_attention_heads': 2, **config})
    assert np.isfinite(phi_of(tower, image)).all()
    return tower

  beit = {name: x for name, x in dino.items() if name != 'pos_embed'}
  table = np.random.default_rng(0).normal(size=(7 * 7 + 3, 2))
  tower = read(beit | {'rel_pos_bias.relative_position_bias_table': table})
  assert tower.settings['position'] == 'relative' and tower.image_size == 28
  for block in ('block00', 'block01'):
    own = tower.params[f'backbone/{block}/attention/relative_position']
    np.testing.assert_array_equal(own, np.float32(table))
  shared = {'rel_pos_bias.relative_position_bias_table': table}
  with pytest.raises(ValueError, match='relative and absolute positions'):
    read(dino | shared)
  with pytest.raises(ValueError, match='relative positions of all blocks and of each'):
    read(beit | shared | {'blocks.0.attn.relative_position_bias_table': table})
  with pytest.raises(ValueError, match='no positions, and its config.json has no rope_theta'):
    read(beit, model_type='beit')
  with pytest.raises(ValueError, match="model_type='phi4_multimodal_vision' in config.json is"):
    read(dino, model_type='phi4_multimodal_vision')

  tower = read(dino | {'reg_token': np.ones((1, 0, 16))})
  assert tower.params.keys() == read(dino).params.keys()
  tower = read({x: y for x, y in dino.items() if not x.endswith('attn.proj.bias')})
  np.testing.assert_array_equal(tower.params['backbone/block01/attention/out/bias'], 0)
  hidden = dino['blocks.1.mlp.fc2.bias']  # is kept
  np.testing.assert_array_equal(tower.params['backbone/block01/mlp/wo/bias'], hidden)

  def aimv2_name(name):
    for ours_, theirs in (('norm1', 'norm_1'), ('norm2', 'norm_2'), ('mlp.fc2', 'mlp.fc2')):
      name = name.replace(ours_, theirs)
    return f'trunk.{name}' if name.startswith('blocks') else name

  aimv2 = {aimv2_name(x): y for x, y in dino.items() if x not in ('norm.weight', 'cls_token')}
  aimv2 = {x: y for x, y in aimv2.items() if not (x.startswith('trunk') and x.endswith('bias'))}
  aimv2 |= {'trunk.post_trunk_norm.weight': np.ones(16), 'pos_embed': dino['pos_embed'][:, 1:]}
  aimv2 = {x: y for x, y in aimv2.items() if x != 'norm.bias'}
  aimv2['preprocessor.patchifier.norm.weight'] = np.ones(16)
  for i in range(2):
    gate, hidden = np.split(aimv2[f'trunk.blocks.{i}.mlp.fc1.weight'], 2)
    aimv2 |= {f'trunk.blocks.{i}.mlp.fc1.weight': gate, f'trunk.blocks.{i}.mlp.fc3.weight': hidden}
  tower = read(aimv2)
  expected = {'norm': 'rms_norm', 'patch_norm': True, 'pooling': 'gap', 'qkv_bias': False}
  assert {name: tower.settings[name] for name in expected} == expected
  np.testing.assert_array_equal(tower.params['backbone/block01/mlp/wi_gate/kernel'], gate.T)

  with pytest.raises(ValueError, match='lacks encoder_norm/scale'):
    read({name: x for name, x in dino.items() if not name.startswith('norm.')})
  intern = {
    x.replace('.ls1.gamma', '.ls1').replace('.ls2.gamma', '.ls2'): y for x, y in dino.items()
  }
  tower = read({name: x for name, x in intern.items() if not name.startswith('norm.')})
  assert not tower.settings['last_norm'] and tower.settings['pooling'] == 'token'


def test_an_adapter_and_a_bit_of_another_normalisation_are_refused(ours):
  arrays = timm_arrays(ours[1]) | {'blocks.0.attn.qkv.lora_A.weight': np.ones((2, 16))}
  with pytest.raises(ValueError, match='the file is an adapter .* merge it into its base model'):
    weights.read_tower(arrays, {})
  assert 'adapter (LoRA): merge' in towers.not_recognised(['blocks.0.attn.qkv.lora_A.weight'])
  bit = {'norm.weight': np.ones(4)}
  kernels = 'stem.conv.weight', 'stages.0.blocks.0.conv1.weight'
  bit |= dict.fromkeys(kernels, np.ones((4, 3, 1, 1)))
  for name in ('mean', 'image_mean', 'std'):
    with pytest.raises(ValueError, match=rf'{name[-4:]}=.*0\.4.* must be 0\.5'):
      weights.read_tower(bit, {name: [0.5, 0.4, 0.5]})


def test_layers_without_a_place_are_named(ours):
  arrays = timm_arrays(ours[1]) | {'fc_norm.weight': np.ones(16)}
  with pytest.raises(ValueError, match='fc_norm.weight is the second layer .* encoder_norm/scale'):
    weights.read_tower(arrays, {})
  with pytest.raises(ValueError, match='ViT, such as blocks.0.rel_pos'):
    weights.read_tower(timm_arrays(ours[1]) | {'blocks.0.rel_pos': np.ones(16)}, {})
  arrays = timm_arrays(ours[1])
  kernel = arrays['patch_embed.proj.weight']
  with pytest.raises(ValueError, match='have 1 channels, and its image_mean and image_std 3 and 3'):
    weights.read_tower(arrays | {'patch_embed.proj.weight': kernel[:, :1]}, {})
  for name, missing in (('patch_embed.proj', 'embedding'), ('blocks.0.mlp.fc1', 'block00/mlp/wi')):
    some = {theirs: x for theirs, x in arrays.items() if theirs != f'{name}.weight'}
    with pytest.raises(ValueError, match=f'the file lacks {missing}/kernel of its tower'):
      weights.read_tower(some, {})
  with pytest.raises(ValueError, match="hidden_act='relu' in config.json .* gelu"):
    weights.read_tower(timm_arrays(ours[1]), {'hidden_act': 'relu'})


@pytest.mark.parametrize(
  'name, settings',
  [
    ('test_vit', {}),
    ('vit_tiny_patch16_224', {'num_heads': 6}),
    ('vit_tiny_patch16_224', {'global_pool': 'avg'}),
    ('vit_tiny_patch16_224', {'global_pool': 'avg', 'fc_norm': False}),
    ('vit_tiny_patch16_224', {'act_layer': 'gelu_tanh'}),
    ('deit_tiny_distilled_patch16_224', {}),
    ('vit_so150m_patch16_reg4_gap_256', {}),
    ('vit_small_patch16_dinov3', {}),
    ('vit_small_patch16_dinov3_qkvb', {}),
    ('vit_small_plus_patch16_dinov3', {}),
    ('vit_base_patch16_siglip_gap_224', {}),
    ('eva_giant_patch14_224', {'img_size': 56, 'embed_dim': 64, 'num_heads': 4}),
    ('eva02_tiny_patch14_224', {'img_size': 70}),
    ('eva02_base_patch14_224', {'img_size': 56, 'embed_dim': 64, 'num_heads': 4}),
    ('eva02_base_patch16_clip_224', {'embed_dim': 64, 'num_heads': 4}),
    ('vit_pe_core_tiny_patch16_384', {}),
    ('vit_pe_spatial_tiny_patch16_512', {}),
    ('vit_pe_core_base_patch16_224', {'embed_dim': 64, 'num_heads': 4}),
    ('vit_base_patch16_rope_reg1_gap_256', {'embed_dim': 64, 'num_heads': 4}),
    ('aimv2_large_patch14_224', {'img_size': 56, 'embed_dim': 64, 'num_heads': 4}),
    ('beit_base_patch16_224', {'embed_dim': 64, 'num_heads': 4}),
    ('beitv2_base_patch16_224', {'embed_dim': 64, 'num_heads': 4}),
    ('vit_base_patch16_radio_v3', {'embed_dim': 64, 'num_heads': 4}),
    ('vit_intern300m_patch14_448', {'img_size': 56, 'embed_dim': 64, 'num_heads': 4}),
    ('resnet18', {'layers': (1, 2, 1, 1)}),
    ('resnet50', {'layers': (1, 2, 1, 1)}),
    ('resnext50_32x4d', {'layers': (1, 2, 1, 1)}),
    ('wide_resnet50_2', {'layers': (1, 2, 1, 1)}),
    ('convnext_xxlarge', {'depths': (1, 1, 1, 1), 'dims': (32, 64, 128, 256)}),
  ],
)
@pytest.mark.slow
def test_parity_with_files_that_timm_writes(name, settings, tmp_path):
  torch = pytest.importorskip('torch')
  timm = pytest.importorskip('timm')
  if not {'depths', 'layers'} & settings.keys():
    settings = {'img_size': 64, 'depth': 2, **settings}
  model = timm.create_model(name, **settings).eval()
  torch.manual_seed(0)
  with torch.no_grad():
    for p in model.parameters():
      p.add_(0.1 * torch.randn_like(p))
    for name, x in model.named_buffers():
      if name.endswith(('running_mean', 'running_var')):
        x.add_(0.5 * torch.rand_like(x))
  timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
  side = settings.get('img_size', 64)
  image = np.random.default_rng(0).random((2, side, side, 3)).astype(np.float32)
  mean, std = (np.asarray(model.pretrained_cfg[key]) for key in ('mean', 'std'))
  pixels = torch.tensor(((image - mean) / std).transpose(0, 3, 1, 2), dtype=torch.float32)
  with torch.no_grad():
    expected = model.forward_head(model.forward_features(pixels), pre_logits=True).numpy()
    logits = model(pixels).numpy()
  path = tmp_path / 'model.safetensors'
  tower = weights.read_tower(weights.read_arrays(path), weights.read_config(path))
  phi = phi_of(tower, image)
  np.testing.assert_allclose(phi, expected, atol=1e-5 * np.abs(expected).max())
  if 'head/kernel' in tower.params:
    ours = phi @ tower.params['head/kernel'] + tower.params['head/bias']
    np.testing.assert_allclose(ours, logits, atol=1e-5 * np.abs(logits).max())


OPEN_CLIP = {
  'OpenAI': {'layers': 2, 'width': 64, 'patch_size': 14},
  'CLIPA': {
    'layers': 2,
    'width': 64,
    'head_width': 32,
    'patch_size': 14,
    'no_ln_pre': True,
    'pool_type': 'avg',
    'final_ln_after_pool': True,
  },
  'PE core': {'timm_model_name': 'vit_pe_core_tiny_patch16_384', 'timm_pool': 'map'},
  'linear': {'timm_model_name': 'test_vit', 'timm_pool': '', 'timm_proj': 'linear'},
  'ConvNeXt': {'timm_model_name': 'convnext_atto', 'timm_pool': '', 'timm_proj': 'linear'},
  'kwargs': {
    'layers': 1,
    'width': 64,
    'patch_size': 14,
    'act_kwargs': {'approximate': 'tanh'},
    'norm_kwargs': {'eps': 0.01},
  },
}


@pytest.mark.slow
@pytest.mark.parametrize('name', OPEN_CLIP)
def test_parity_with_image_towers_of_open_clip(name, tmp_path):
  torch = pytest.importorskip('torch')
  open_clip = pytest.importorskip('open_clip')
  side = {'PE core': 384, 'linear': 160, 'ConvNeXt': 64}.get(name, 28)
  image_settings = {'timm_proj': None, 'image_size': side, **OPEN_CLIP[name]}
  text = {'context_length': 9, 'vocab_size': 99, 'width': 16, 'heads': 2, 'layers': 1}
  if name == 'CLIPA':  # its text tower is not read
    text |= {'pool_type': 'last', 'no_causal_mask': True}
  settings = {'embed_dim': 12, 'vision_cfg': image_settings, 'text_cfg': text}
  if 'width' in image_settings:
    image_settings.pop('timm_proj')
  torch.manual_seed(0)
  model = open_clip.CustomTextCLIP(**settings).eval()
  with torch.no_grad():
    for p in model.parameters():
      p.add_(0.1 * torch.randn_like(p))
    image = np.random.default_rng(0).random((2, side, side, 3)).astype(np.float32)
    mean, std = renaming.CLIP
    pixels = torch.tensor(((image - mean) / std).transpose(0, 3, 1, 2), dtype=torch.float32)
    expected = model.encode_image(pixels).numpy()
  described = {'model_cfg': settings, 'preprocess_cfg': {'mean': mean, 'std': std}}
  (tmp_path / 'open_clip_config.json').write_text(json.dumps(described))
  arrays = {k: x.numpy() for k, x in model.state_dict().items()}
  config = weights.read_config(tmp_path / 'open_clip_model.safetensors')
  tower = weights.read_tower(arrays, config)
  phi = phi_of(tower, image)
  np.testing.assert_allclose(phi, expected, atol=1e-5 * np.abs(expected).max())
  if name == 'CLIPA':
    with pytest.raises(
      ValueError, match="text_cfg of open_clip_config.json has {'pool_type': 'last"
    ):
      weights.read_text_tower(arrays, config)
  else:
    assert weights.read_text_tower(arrays, config).length == 9


def test_the_table_is_of_the_installed_timm():
  pytest.importorskip('timm')
  from tests.weights import timm_architectures

  table = descriptions._architectures()
  for name in (
    'test_vit',
    'convnext_tiny',
    'vit_small_patch16_dinov3',
    'vit_pwee_patch16_reg1_gap_256',
  ):
    assert table[name] == timm_architectures.settings(name), name


@pytest.mark.parametrize('axes', ['ij', 'xy'])
def test_pairs_of_neighbours_rotate_as_in_timm(axes):
  """Products of queries and keys under the rotation of EVA-02 and Perception Encoder."""
  random = np.random.default_rng(0)
  names = ('block00/attention/query/kernel', 'block00/attention/key/kernel')
  flat = {name: random.normal(size=(6, 16)) for name in names}
  x = random.normal(size=(7, 6))  # a class token and 2 x 3 patches
  row, column = np.mgrid[1:3, 1:4].reshape(2, -1, 1)  # stretched to a grid of 4 x 4
  row = row / 2 * 4
  column = column / 3 * 4
  turns = np.concatenate([row, column] if axes == 'ij' else [column, row], axis=1)  # [6, 2]
  angles = (turns[:, :, None] * np.array([1.0, 0.01])).reshape(6, 4)
  turned = np.concatenate([np.ones((1, 4)), np.exp(1j * angles)])[:, None]

  def theirs(name):
    heads = (x @ flat[name]).reshape(7, 2, 8)  # pairs of neighbours as complex numbers
    heads = (heads[..., ::2] + 1j * heads[..., 1::2]) * turned
    return np.concatenate([heads.real, heads.imag], axis=-1)

  expected = np.einsum('nhd,mhd->hnm', *map(theirs, names))
  config = {'rope_axes': axes, 'rope_offset': 1.0, 'rope_grid': [4, 4]}
  settings = towers._interleaved_rope(flat, config, {'width': 16, 'num_heads': 2}, None)
  assert settings == {'position': 'rope', 'rope_grid': 4, 'rope_offset': 1.0}
  rotation = rotary_2d((2, 3), 8, 1, 10_000.0, 4, 1.0)
  heads = (np.float32(x @ flat[name]).reshape(1, 7, 2, 8) for name in names)
  ours = [transformer.rotate(x, *rotation) for x in heads]
  np.testing.assert_allclose(np.einsum('bnhd,bmhd->hnm', *ours), expected, atol=1e-5)


def test_sub_norms_and_pools_of_eva(ours):
  """EVA-02's inner normalisations, and the class token beside Perception Encoder's pooling."""
  arrays = timm_arrays(ours[1])
  arrays['blocks.0.mlp.norm.weight'] = arrays['blocks.1.mlp.norm.weight'] = np.ones(24)
  arrays['blocks.0.mlp.norm.bias'] = arrays['blocks.1.mlp.norm.bias'] = np.zeros(24)
  tower = weights.read_tower(arrays, {'num_attention_heads': 2})
  assert tower.settings['sub_norm'] == 'mlp'
  assert np.isfinite(phi_of(tower, ours[2])).all()
  for i in range(2):
    arrays[f'blocks.{i}.attn.norm.weight'] = np.ones(16)
    arrays[f'blocks.{i}.attn.norm.bias'] = np.zeros(16)
  assert weights.read_tower(arrays, {'num_attention_heads': 2}).settings['sub_norm'] == 'both'
  with pytest.raises(ValueError, match='rotary positions no array tells: put its config.json'):
    weights.read_tower(arrays | {'blocks.0.attn.q_bias': np.zeros(16)}, {})


@pytest.mark.parametrize(
  'described, settings',
  [
    ({}, {'num_heads': 2, 'mlp': 'gelu_exact', 'pooling': 'token'}),
    ({'model_args': {'num_heads': 4}}, {'num_heads': 4}),
    ({'model_args': {'act_layer': 'gelu_tanh'}}, {'mlp': 'gelu'}),
    ({'model_args': {'global_pool': 'avg'}}, {'pooling': 'gap', 'class_token': True}),
    ({'model_args': {'global_pool': 'avg', 'pool_include_prefix': True}}, {'pooling': 'all'}),
    ({'model_args': {'drop_path_rate': 0.1, 'img_size': 28}}, {'num_heads': 2}),
  ],
)
def test_what_a_file_of_timm_says(described, settings):
  arrays = siglip_arrays('timm')
  arrays = {name: x for name, x in arrays.items() if 'pool' not in name}
  arrays['cls_token'] = np.ones((1, 1, 32))
  tower = weights.read_tower(arrays, {'architecture': 'test_vit.r160_in1k', **described})
  assert {name: tower.settings[name] for name in settings} == settings


@pytest.mark.parametrize(
  'described, sentence',
  [
    ({'architecture': 'vit_of_tomorrow'}, "architecture='vit_of_tomorrow' in config.json is none"),
    ({'architecture': 'vit_base_patch16_rope_mixed_224'}, 'RotaryEmbeddingMixed'),
    ({'model_args': {'act_layer': 'elu'}}, "act_layer='elu' in config.json must be one of gelu"),
    ({'model_args': {'scale_attn_norm': True}}, 'model_args has scale_attn_norm=True'),
    ({'model_args': {'global_pool': 'avgmax'}}, "global_pool='avgmax' in config.json must be"),
    ({'global_pool': 'avg'}, "global_pool='avg' in config.json, but timm makes test_vit"),
    ({'num_attention_heads': 2, 'num_hidden_layers': 9}, 'num_hidden_layers=9, and the file 1 bl'),
    ({'num_attention_heads': 2, 'pooler_act': 'relu'}, "pooler_act='relu' in config.json must be"),
  ],
)
def test_settings_that_cannot_be_read_are_named(described, sentence):
  arrays = siglip_arrays('timm')
  arrays = {name: x for name, x in arrays.items() if 'pool' not in name}
  arrays['cls_token'] = np.ones((1, 1, 32))
  with pytest.raises(ValueError, match=sentence):
    weights.read_tower(arrays, {'architecture': 'test_vit', **described})


def test_the_end_of_a_text_of_clip(tmp_path):
  """A table with one row more ends texts with the id of the configuration, or the tokenizer."""

  def row_of_end(config):
    tower = weights.read_text_tower(arrays, config)
    table = tower.params['text_tower/embedding']
    (same,) = np.flatnonzero((table[2:32] == table[1]).all(axis=1))
    return same

  arrays = clip_arrays()  # 30 rows
  assert row_of_end({}) == 29
  assert row_of_end({'text_config': {'eos_token_id': 2}}) == 29
  assert row_of_end({'text_config': {'eos_token_id': 28}}) == 28
  path = tmp_path / 'model.safetensors'
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps({'eos_token': '</s>'}))
  vocabulary = {'model': {'vocab': {'</s>': 27}}}
  (tmp_path / 'tokenizer.json').write_text(json.dumps(vocabulary))
  (tmp_path / 'config.json').write_text(json.dumps({'text_config': {'eos_token_id': 2}}))
  assert row_of_end(weights.read_config(path)) == 27
  with pytest.raises(ValueError, match='eos_token_id=30 .* must be below the 30 rows'):
    row_of_end({'text_config': {'eos_token_id': 30}})
  with pytest.raises(ValueError, match="rope='2d' in the text_config of config.json is not known"):
    row_of_end({'text_config': {'rope': '2d'}})


@pytest.mark.parametrize(
  'file,settings,message',
  [
    ('config.json', {'vision_config': 'x'}, "vision_config='x' in .* must be a JSON object"),
    ('config.json', {'architecture': 1}, 'architecture=1 in .* must be text'),
    ('config.json', {'pretrained_cfg': {'input_size': 64}}, 'input_size=64 .* a list of numbers'),
    ('config.json', {'model_args': [1]}, r'model_args=\[1\] in .* must be a JSON object'),
    ('preprocessor_config.json', {'size': '28'}, "size='28' .* a number, or a JSON object of num"),
    (
      'preprocessor_config.json',
      {'image_mean': 0.5},
      'image_mean=0.5 .* a list of numbers',
    ),
    ('preprocessor_config.json', {'image_std': [0, 1]}, 'image_std=.* a list of numbers above 0'),
    ('config.json', {'model_type': 'vit', 'softcap': 3.0}, r'softcap=3.0 in .*g.json is not known'),
    (
      'config.json',
      {'model_type': 'llava', 'vision_config': {'window': 7}},
      'window=7 in .* may change the features',
    ),
  ],
)
def test_a_description_that_cannot_be_read_is_one_sentence(tmp_path, file, settings, message):
  (tmp_path / file).write_text(json.dumps(settings))
  with pytest.raises(ValueError, match=message):
    weights.read_config(tmp_path / 'model.safetensors')


# What transformers of several versions writes of any model.
DUMPED = {
  '_attn_implementation_autoset': True,
  '_commit_hash': 'f0e1',
  '_flash_attn_2_enabled': True,
  '_name_or_path': 'a/b',
  '_num_labels': 2,
  'architectures': ['AnyModel'],
  'chunk_size_feed_forward': 0,
  'cross_attention_hidden_size': None,
  'exponential_decay_length_penalty': None,
  'gradient_checkpointing': True,
  'id2label': {'0': 'cat', '1': 'dog'},
  'is_composition': False,
  'label2id': {'cat': 0, 'dog': 1},
  'loss_type': 'ForImageClassification',
  'max_length': 128,
  'output_past': True,
  'padding': 'max_length',
  'problem_type': 'single_label_classification',
  'pruned_heads': {},
  'torch_dtype': 'float32',
  'transformers.js_config': {'kv_cache_dtype': {'q4f16': 'float16'}},
  'transformers_version': '4.48.0',
  'unsloth_fixed': True,
}
OF_BLOCKS = {
  'attention_probs_dropout_prob': 0.0,
  'hidden_act': 'gelu',
  'hidden_dropout_prob': 0.0,
  'hidden_size': 384,
  'image_size': 224,
  'initializer_range': 0.02,
  'intermediate_size': 1536,
  'layer_norm_eps': 1e-6,
  'num_attention_heads': 6,
  'num_channels': 3,
  'num_hidden_layers': 12,
  'patch_size': 14,
}
OF_STAGES = {
  'depths': [3, 3, 9, 3],
  'hidden_sizes': [96, 192, 384, 768],
  'num_channels': 3,
  'out_features': ['stage4'],
  'out_indices': [4],
  'stage_names': ['stem', 'stage1', 'stage2', 'stage3', 'stage4'],
}
OF_DINOV2 = {
  **OF_BLOCKS,
  'apply_layernorm': True,
  'drop_path_rate': 0.0,
  'layerscale_value': 1.0,
  'mlp_ratio': 4,
  'qkv_bias': True,
  'reshape_hidden_states': True,
  'use_swiglu_ffn': False,
}
OF_BEIT = {
  **OF_BLOCKS,
  'auxiliary_channels': 256,
  'layer_scale_init_value': 0.1,
  'pool_scales': [1, 2, 3, 6],
  'segmentation_indices': [3, 5, 7, 11],
  'semantic_loss_ignore_index': 255,
  'use_mean_pooling': True,
  'use_relative_position_bias': True,
  'vocab_size': 8192,
}
OF_REGISTERS = {'interpolate_antialias': True, 'interpolate_offset': 0.0, 'num_register_tokens': 4}
OF_DINOV3 = {
  **OF_BLOCKS,
  'attention_dropout': 0.0,
  'key_bias': False,
  'mlp_bias': True,
  'num_register_tokens': 4,
  'pos_embed_rescale': 2.0,
  'proj_bias': True,
  'query_bias': True,
  'return_class_token': True,
  'rope_parameters': {'rope_theta': 50.0, 'rope_type': 'default'},
  'use_gated_mlp': False,
  'value_bias': True,
}
OF_RADIO = {
  'adaptor_configs': {},
  'adaptor_names': None,
  'args': {'model': 'vit_base_patch16_224', 'cpe_max_size': 2048},
  'auto_map': {'AutoConfig': 'hf_model.RADIOConfig'},
  'max_resolution': 2048,
  'patch_size': 16,
  'preferred_resolution': [768, 768],
  'version': 'radio_v2.5-b',
  'vitdet_window_size': None,
}
PARTS_OF_CLIP = {
  'attention_dropout': 0.0,
  'hidden_size': 384,
  'initializer_factor': 1.0,
  'num_attention_heads': 6,
  'projection_dim': 512,
}


@pytest.mark.parametrize(
  'kind, dump',
  [
    ('vit', {**OF_BLOCKS, 'encoder_stride': 16, 'pooler_act': 'tanh', 'qkv_bias': True}),
    ('deit', {**OF_BLOCKS, 'encoder_stride': 16, 'pooler_output_size': 384, 'qkv_bias': True}),
    ('vit_mae', {**OF_BLOCKS, 'decoder_hidden_size': 512, 'mask_ratio': 0.75}),
    ('beit', OF_BEIT),
    ('data2vec-vision', {**OF_BEIT, 'use_shared_relative_position_bias': True}),
    ('dinov2', OF_DINOV2),
    ('dinov2_with_registers', {**OF_DINOV2, **OF_REGISTERS}),
    ('dinov3_vit', OF_DINOV3),
    ('dinov3_convnext', {**OF_STAGES, 'drop_path_rate': 0.0, 'layer_scale_init_value': 1e-6}),
    ('convnext', {**OF_STAGES, 'layer_scale_init_value': 1e-6, 'num_stages': 4}),
    ('resnet', {**OF_STAGES, 'downsample_in_first_stage': False, 'layer_type': 'bottleneck'}),
    ('siglip_vision_model', {**OF_BLOCKS, 'attention_dropout': 0.0, 'vision_use_head': True}),
    ('aimv2', {**OF_BLOCKS, 'projection_dropout': 0.0, 'rms_norm_eps': 1e-5, 'use_bias': False}),
    ('internvl_vision', {**OF_BLOCKS, 'norm_type': 'layer_norm', 'use_mask_token': False}),
    ('radio', OF_RADIO),
  ],
)
def test_settings_that_are_written_and_change_no_feature_are_known(kind, dump, tmp_path):
  dump = {**DUMPED, **dump, 'model_type': kind}
  (tmp_path / 'config.json').write_text(json.dumps(dump))
  read = descriptions.described(weights.read_config(tmp_path / 'model.safetensors'))
  assert read.get('num_attention_heads') == dump.get('num_attention_heads')
  assert read.get('rope_theta') == (50.0 if kind == 'dinov3_vit' else None)


@pytest.mark.parametrize('kind', ['clip', 'siglip'])
def test_settings_of_the_parts_of_a_dual_encoder_are_known(kind, tmp_path):
  of_parts = {
    'vision_config': {**OF_BLOCKS, 'model_type': f'{kind}_vision_model'},
    'text_config': {'max_position_embeddings': 77, 'model_type': f'{kind}_text_model'},
  }
  of_parts = {name: {**DUMPED, **PARTS_OF_CLIP, **part} for name, part in of_parts.items()}
  dump = {**DUMPED, 'logit_scale_init_value': 2.6592, 'model_type': kind, **of_parts}
  (tmp_path / 'config.json').write_text(json.dumps(dump))
  read = weights.read_config(tmp_path / 'model.safetensors')
  assert read['num_attention_heads'] == 6
  text = descriptions.described(read)['text_config']
  descriptions.check_known(text, 'config.json')
  assert text['max_position_embeddings'] == 77


@pytest.mark.parametrize(
  'settings, message',
  [
    ({'rope_parameters': {'rope_type': 'yarn', 'factor': 4.0}}, "have {'rope_type': 'yarn', 'f"),
    ({'interpolate_offset': 0.1}, 'interpolate_offset=0.1 in config.json must be 0.0'),
    ({'interpolate_antialias': False}, 'interpolate_antialias=False in config.json must be True'),
  ],
)
def test_settings_that_change_positions_are_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    descriptions.described({'model_type': 'dinov3_vit', **settings})


def test_a_null_is_no_setting(tmp_path):
  path = tmp_path / 'model.safetensors'
  (tmp_path / 'config.json').write_text('{"vision_config": null, "architecture": null}')
  assert weights.read_config(path) == {}
  # Only the tower of a model with several parts must be known.
  tower = {'model_type': 'clip_vision_model', 'rope_scaling': None, 'num_beams': 1, 'dropout': 0.0}
  described = {'model_type': 'llava', 'image_token_index': 32_000, 'vision_config': tower}
  (tmp_path / 'config.json').write_text(json.dumps(described))
  assert weights.read_config(path)['num_beams'] == 1


def test_integers_are_refused():
  arrays = clip_arrays()
  name = next(x for x in arrays if x.endswith('layers.0.mlp.fc1.weight') and 'vision' in x)
  with pytest.raises(ValueError, match='mlp/wi of the file has integers .int8.: .* not quantised'):
    weights.read_tower(arrays | {name: arrays[name].astype(np.int8)}, {})


def test_descriptions_and_shards_beside_a_file(tmp_path):
  path = tmp_path / 'model.safetensors'
  pixels = {'image_mean': [0.5] * 3, 'image_std': [0.25] * 3}
  (tmp_path / 'processor_config.json').write_text(json.dumps({'image_processor': pixels}))
  assert weights.read_config(path) == pixels
  arrays = clip_arrays()
  names = sorted(arrays)
  map_of_names = {}
  for i, some in enumerate((names[:9], names[9:])):
    shard = f'model-0000{i + 1}-of-00002.safetensors'
    weights.write_arrays(tmp_path / shard, {name: arrays[name] for name in some})
    map_of_names |= dict.fromkeys(some, shard)
  (tmp_path / f'{path.name}.index.json').write_text(json.dumps({'weight_map': map_of_names}))
  read = weights.read_arrays(path)
  assert read.keys() == arrays.keys()
  np.testing.assert_array_equal(read[names[0]], arrays[names[0]])
  index = tmp_path / f'{path.name}.index.json'
  assert weights.is_weights_file(index) and weights.read_arrays(index).keys() == arrays.keys()
  with pytest.raises(ValueError, match='but weights: name the file, such as .*index.json'):
    checkpoint_reader.find(tmp_path)
  with pytest.raises(ValueError, match='config.json is a file, but no .safetensors or .npz'):
    checkpoint_reader.find(tmp_path / 'processor_config.json')
  bindings = weights.tower_bindings(path)
  assert bindings[0] == 'BACKBONE = @vit()' and bindings == weights.tower_bindings(path, arrays)
  (tmp_path / shard).unlink()
  with pytest.raises(ValueError, match='1 of the 2 shards .* not beside it, such as model-00002'):
    weights.read_arrays(path)
  (tmp_path / 'config.json').write_text('{"quantization_config": {"quant_method": "fp8"}}')
  with pytest.raises(ValueError, match='quantization_config: take the file .* not quantised'):
    weights.read_config(path)


@pytest.mark.parametrize(
  'prefix', ['backbone.', '_orig_mod.', 'teacher.', 'student.backbone.', 'base_model.model.']
)
def test_prefixes_of_trainers_are_stripped(ours, prefix):
  _, params, image = ours
  arrays = timm_arrays(params)
  config = {'num_attention_heads': 2}
  expected = weights.read_tower(arrays, config)
  tower = weights.read_tower({prefix + name: x for name, x in arrays.items()}, config)
  assert tower.settings == expected.settings
  np.testing.assert_array_equal(tower.params['head/kernel'], expected.params['head/kernel'])


@pytest.mark.parametrize('prefix', ['vision_tower.', 'model.vision_tower.'])
def test_a_classifier_beside_a_vision_tower_is_read(ours, prefix):
  arrays = timm_arrays(ours[1])
  nested = {(name if 'head' in name else prefix + name): x for name, x in arrays.items()}
  nested['lm_head.weight'] = np.ones((7, 16))
  tower = weights.read_tower(nested, {'num_attention_heads': 2})
  np.testing.assert_array_equal(tower.params['head/kernel'], np.ones((16, 5)))
  assert tower.skipped == ('lm_head.weight',)


def test_a_radio_in_the_names_of_its_own_code():
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
  block = {f'norm{i}.{kind}': draw(8) for i in (1, 2) for kind in ('weight', 'bias')}
  shapes = {'attn.qkv': (24, 8), 'attn.proj': (8, 8), 'mlp.fc1': (16, 8), 'mlp.fc2': (8, 16)}
  block |= {f'{name}.weight': draw(*shape) for name, shape in shapes.items()}
  block |= {f'{name}.bias': draw(shape[0]) for name, shape in shapes.items()}
  arrays = {
    'input_conditioner.norm_mean': np.full((3, 1, 1), 0.4),
    'input_conditioner.norm_std': np.full((3, 1, 1), 0.2),
    'summary_idxs': np.array([0, 2]),
    'model.patch_generator.embedder.weight': draw(8, 3 * 4 * 4),
    'model.patch_generator.pos_embed': draw(1, 9, 8),
    'model.patch_generator.cls_token.token': draw(5, 8),
    'model.patch_generator.video_embedder.weight': draw(8, 3 * 4 * 4 * 2),
    **{f'model.blocks.0.{name}': x for name, x in block.items()},
  }
  arrays = {f'radio_model.{name}': x for name, x in arrays.items()}
  assert weights.is_tower(arrays)
  tower = weights.read_tower(arrays, {'image_size': 8})
  assert tower.image_size == 8 and tower.settings['num_pooled'] == 2
  backbone = ViT(**tower.settings)
  shapes = jax.eval_shape(backbone.init, jax.random.key(0), np.zeros((1, 8, 8, 3)))
  flat = traverse_util.flatten_dict({'backbone': shapes['params']}, sep='/')
  params, _ = weights.load_params(arrays, {name: x.shape for name, x in flat.items()})
  tokens = arrays['radio_model.model.patch_generator.cls_token.token']
  np.testing.assert_array_equal(params['backbone/class_token'], tokens[0])
  np.testing.assert_array_equal(params['backbone/registers'], tokens[[2, 1, 3, 4]])
  grid = arrays['radio_model.model.patch_generator.pos_embed'].reshape(3, 3, 8)
  found = params['backbone/position_embedding']
  corner = np.array([0.75, 0.25, 0.0])  # bilinear from 3 to 2, without antialiasing
  np.testing.assert_allclose(found[1], np.einsum('i,j,ijd->d', corner, corner, grid), rtol=1e-5)
  arrays.pop('radio_model.input_conditioner.norm_std')
  with pytest.raises(ValueError, match='the file lacks norm_std of a RADIO'):
    weights.read_tower(arrays, {})


def test_a_file_without_a_tower_is_refused_before_gin(tmp_path):
  path = tmp_path / 'model.safetensors'
  weights.write_arrays(path, {f'layers.{i}.mixer.A': np.zeros(3) for i in range(4)})
  with pytest.raises(ValueError, match='no tower was recognised among its 4 .*layers.2.mixer.A. '):
    runs.configuration(path)


@pytest.mark.parametrize(
  'layer, filter',
  [
    ('encoder.layer.0.attention.o_proj', 'bilinear_antialias'),  # TIPSv2
    ('encoder.layer.0.attention.projection_layer', 'bicubic'),  # InternVL
    ('encoder.layers.0.self_attn.out_proj', 'bicubic'),
    ('embeddings.register_tokens', 'bicubic_antialias'),  # DINOv2 with registers
    ('blocks.0.attn.proj', 'bicubic_antialias'),
  ],
)
def test_the_filter_of_positions_is_that_of_the_project(layer, filter):
  query = 'encoder.layer.0.attention.q_proj.weight'
  embeddings = () if 'blocks' in layer else ('embeddings.position_embeddings', query)
  name = layer if layer.endswith('tokens') else f'{layer}.weight'
  assert towers.position_filter((*embeddings, name)) == filter


@pytest.mark.parametrize(
  'size, filter, first',
  [
    (3, 'bicubic_antialias', [1.0657893, -0.0657893]),
    (3, 'bicubic', [1.0868058, -0.0868058]),
    (3, 'bilinear', [1, 0]),
    (2, 'bicubic_antialias', [0.4586777, 0.4586777, 0.1198347, -0.0371901]),
    (2, 'bicubic', [0.5, 0.59375, -0.09375, 0.0]),
    (2, 'bilinear', [0.5, 0.5, 0.0, 0.0]),
    (2, 'bilinear_antialias', [3 / 7, 3 / 7, 1 / 7, 0.0]),
  ],
)
def test_position_embeddings_are_resized_as_pytorch_does(size, filter, first):
  """The first row of a resized identity, as torch 2.13's interpolate gives it."""
  matrix = transfer._resize_matrix(len(first), size, filter)
  np.testing.assert_allclose(matrix[0], first, atol=1e-6)
