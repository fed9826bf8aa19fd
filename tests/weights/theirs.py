"""Arrays in the layouts of published files, and forward passes written for those arrays alone."""

import jax
import numpy as np
import scipy.special

D = 16
HEADS = 4
MLP = 24
DEPTH = 2
PATCH = 4
SIDE = 8
CLASSES = 11
R = 3


def arrays_of(shapes, seed=0):
  rng = np.random.default_rng(seed)
  return {name: 0.3 * rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def dense(name, *shape):
  return {f'{name}/kernel': shape, f'{name}/bias': shape[-1:]}


def norm(name):
  return {f'{name}/scale': (D,), f'{name}/bias': (D,)}


def attention_and_mlp(attention, mlp):
  shapes = {f'{attention}/out/kernel': (HEADS, D // HEADS, D), f'{attention}/out/bias': (D,)}
  for name in ('query', 'key', 'value'):
    shapes[f'{attention}/{name}/kernel'] = (D, HEADS, D // HEADS)
    shapes[f'{attention}/{name}/bias'] = (HEADS, D // HEADS)
  return shapes | dense(f'{mlp}/Dense_0', D, MLP) | dense(f'{mlp}/Dense_1', MLP, D)


def vit(representation=True, token=True):
  """vision_transformer's names, a linear head."""
  tokens = (SIDE // PATCH) ** 2 + token
  shapes = {
    **dense('embedding', PATCH, PATCH, 3, D),
    'Transformer/posembed_input/pos_embedding': (1, tokens, D),
    **norm('Transformer/encoder_norm'),
    **dense('head', D, CLASSES),
  }
  if token:
    shapes['cls'] = (1, 1, D)
  if representation:
    shapes |= dense('pre_logits', D, D)
  for i in range(DEPTH):
    block = f'Transformer/encoderblock_{i}'
    shapes |= attention_and_mlp(f'{block}/MultiHeadDotProductAttention_1', f'{block}/MlpBlock_3')
    shapes |= norm(f'{block}/LayerNorm_0') | norm(f'{block}/LayerNorm_2')
  return arrays_of(shapes)


def big_vision(arrays, stacked=False):
  """The same under big_vision's names."""
  renamed = {}
  for name, x in arrays.items():
    for old, new in (
      ('LayerNorm_2', 'LayerNorm_1'),
      ('MultiHeadDotProductAttention_1', 'MultiHeadDotProductAttention_0'),
      ('MlpBlock_3', 'MlpBlock_0'),
      ('Transformer/posembed_input/pos_embedding', 'pos_embedding'),
    ):
      name = name.replace(old, new)
    renamed[f'params/{name}'] = x
  if stacked:
    first = 'params/Transformer/encoderblock_0/'
    for name in [name for name in renamed if name.startswith(first)]:
      layers = [renamed.pop(name.replace('_0/', f'_{i}/', 1)) for i in range(DEPTH)]
      renamed[name.replace('_0/', '/', 1)] = np.stack(layers)
  return renamed


def vmoe(arrays, num_experts=3):
  """The same under vmoe's names, with experts in the last block."""
  renamed = {}
  for name, x in arrays.items():
    for old, new in (
      ('LayerNorm_2', 'LayerNorm_1'),
      ('MultiHeadDotProductAttention_1', 'SelfAttention'),
      ('MlpBlock_3', 'Mlp'),
      ('Transformer/', 'Encoder/'),
    ):
      name = name.replace(old, new)
    renamed[name] = x
  block = f'Encoder/encoderblock_{DEPTH - 1}'
  experts = {n: x.shape for n, x in renamed.items() if n.startswith(f'{block}/Mlp/')}
  shapes = {n.replace('/Mlp/', '/Moe/Mlp/'): (num_experts, *s) for n, s in experts.items()}
  renamed = {n: x for n, x in renamed.items() if n not in experts}
  return renamed | arrays_of(shapes | {f'{block}/Moe/Router/dense/kernel': (D, num_experts)}, 7)


def expert_mlps(p, block, y):
  """vmoe's layer with k = 2 and places for all tokens, y [B, N, D]."""
  logits = y @ p[f'{block}/Moe/Router/dense/kernel']
  gates = scipy.special.softmax(logits, axis=-1)
  gates *= gates >= np.sort(gates, axis=-1)[..., -2:-1]
  w0, b0, w1, b1 = (
    p[f'{block}/Moe/Mlp/Dense_{i}/{part}'] for i in (0, 1) for part in ('kernel', 'bias')
  )
  hidden = gelu(np.einsum('bnd,edh->bneh', y, w0) + b0)
  return np.einsum('bned,bne->bnd', np.einsum('bneh,ehd->bned', hidden, w1) + b1, gates)


def layer_norm(x, p, name):
  x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
  return x * p[f'{name}/scale'] + p[f'{name}/bias']


def gelu(x):
  return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def attend(p, layer, queries, x):
  query, key, value = (
    np.einsum('bnd,dhk->bnhk', y, p[f'{layer}/{name}/kernel']) + p[f'{layer}/{name}/bias']
    for name, y in (('query', queries), ('key', x), ('value', x))
  )
  scores = np.einsum('bnhk,bmhk->bhnm', query, key) / np.sqrt(D // HEADS)
  y = np.einsum('bhnm,bmhk->bnhk', scipy.special.softmax(scores, axis=-1), value)
  return np.einsum('bnhk,hkd->bnd', y, p[f'{layer}/out/kernel']) + p[f'{layer}/out/bias']


def vit_pre_logits(p, image):
  """phi [B, D] of images [B, H, W, 3], in float64."""
  p = {name: np.float64(x) for name, x in p.items()}
  image = np.float64(image)
  batch = image.shape[0]
  side = image.shape[1] // PATCH
  patches = image.reshape(batch, side, PATCH, side, PATCH, 3).transpose(0, 1, 3, 2, 4, 5)
  x = np.einsum('bijpqc,pqcd->bijd', patches, p['embedding/kernel']) + p['embedding/bias']
  x = x.reshape(batch, -1, D)
  if 'cls' in p:
    x = np.concatenate([np.broadcast_to(p['cls'], (batch, 1, D)), x], axis=1)
  x = x + p['Transformer/posembed_input/pos_embedding']
  for i in range(DEPTH):
    block = f'Transformer/encoderblock_{i}'
    attention = f'{block}/MultiHeadDotProductAttention_1'
    y = layer_norm(x, p, f'{block}/LayerNorm_0')
    x = x + attend(p, attention, y, y)
    y = layer_norm(x, p, f'{block}/LayerNorm_2')
    if f'{block}/Moe/Router/dense/kernel' in p:
      x = x + expert_mlps(p, block, y)
      continue
    y = y @ p[f'{block}/MlpBlock_3/Dense_0/kernel'] + p[f'{block}/MlpBlock_3/Dense_0/bias']
    x = x + gelu(y) @ p[f'{block}/MlpBlock_3/Dense_1/kernel']
    x = x + p[f'{block}/MlpBlock_3/Dense_1/bias']
  x = layer_norm(x, p, 'Transformer/encoder_norm')
  phi = x[:, 0] if 'cls' in p else x.mean(axis=1)
  if 'MAPHead_0/probe' in p:
    phi = map_head({k.removeprefix('MAPHead_0/'): v for k, v in p.items()}, x)
  if 'pre_logits/kernel' in p:
    phi = np.tanh(phi @ p['pre_logits/kernel'] + p['pre_logits/bias'])
  return phi


MAP_HEAD = {
  'MAPHead_0/probe': (1, 1, D),
  **attention_and_mlp('MAPHead_0/MultiHeadDotProductAttention_0', 'MAPHead_0/MlpBlock_0'),
  **norm('MAPHead_0/LayerNorm_0'),
}


def map_head(p, x):
  """big_vision's pooling='map': a learned query over the positions x [B, N, D]."""
  probe = np.broadcast_to(p['probe'], (len(x), 1, D))
  y = attend(p, 'MultiHeadDotProductAttention_0', probe, x)
  z = layer_norm(y, p, 'LayerNorm_0')
  z = gelu(z @ p['MlpBlock_0/Dense_0/kernel'] + p['MlpBlock_0/Dense_0/bias'])
  return (y + z @ p['MlpBlock_0/Dense_1/kernel'] + p['MlpBlock_0/Dense_1/bias'])[:, 0]


def het_head(prefix, noise_dim):
  """uncertainty-baselines' heteroscedastic head; noise_dim is its latent_dim, or the classes."""
  shapes = {
    **dense('loc_layer', D, CLASSES),
    **dense('diag_layer', D, noise_dim),
    **dense('scale_layer_homoscedastic', R, noise_dim),
    **dense('scale_layer_heteroscedastic', D, noise_dim),
    'pre_sigmoid_temperature': (1,),
  }
  return {f'{prefix}/{name}': x for name, x in arrays_of(shapes, seed=1).items()}


def het_logits(p, prefix, phi, z, z_diag, is_latent):
  """Logits [B, S, K] before the temperature for normals z [S, R] and z_diag [S, 1].

  As in edward2's MCSoftmaxDenseFA for JAX, one normal per sample multiplies the whole diagonal
  factor.
  """
  p = {name.removeprefix(f'{prefix}/'): np.float64(x) for name, x in p.items()}

  def linear(name, x):
    return x @ p[f'{name}/kernel'] + p[f'{name}/bias']

  diag = np.log1p(np.exp(linear('diag_layer', phi))) + 1e-3  # [B, Q]
  noise = linear('scale_layer_heteroscedastic', phi)[:, None] * linear(
    'scale_layer_homoscedastic', z
  )
  noise = noise + diag[:, None] * z_diag  # [B, S, Q]
  if is_latent:
    return linear('loc_layer', phi[:, None] + noise)
  return linear('loc_layer', phi)[:, None] + noise


WIDTH = 32
UNITS = (2, 1)


def bit():
  """Big Transfer's names."""
  shapes = {'resnet/root_block/standardized_conv2d/kernel': (7, 7, 3, WIDTH)}
  channels = WIDTH
  for stage, units in enumerate(UNITS):
    inner = WIDTH * 2**stage
    for unit in range(units):
      where = f'resnet/block{stage + 1}/unit{unit + 1:02d}'
      sizes = {'a': (channels, inner, 1), 'b': (inner, inner, 3), 'c': (inner, 4 * inner, 1)}
      for name, (before, after, size) in sizes.items():
        shapes[f'{where}/{name}/standardized_conv2d/kernel'] = (size, size, before, after)
        shapes |= {f'{where}/{name}/group_norm/{g}': (before,) for g in ('gamma', 'beta')}
      if not unit:
        shapes[f'{where}/a/proj/standardized_conv2d/kernel'] = (1, 1, channels, 4 * inner)
      channels = 4 * inner
  shapes |= {f'resnet/group_norm/{g}': (channels,) for g in ('gamma', 'beta')}
  shapes |= {'resnet/head/conv2d/kernel': (1, 1, channels, CLASSES)}
  shapes |= {'resnet/head/conv2d/bias': (CLASSES,)}
  return arrays_of(shapes)


def big_vision_bit(arrays):
  """The same under the names of big_vision's models/bit_paper.py."""
  renamed = {}
  for name, x in arrays.items():
    for old, new in (
      ('resnet/root_block/standardized_conv2d', 'root_block/conv_root'),
      ('resnet/head/conv2d', 'head'),
      ('a/proj/standardized_conv2d', 'conv_proj'),
      *((f'{x}/standardized_conv2d', f'conv{i}') for i, x in enumerate('abc', 1)),
      *((f'{x}/group_norm', f'gn{i}') for i, x in enumerate('abc', 1)),
      ('resnet/group_norm', 'norm-pre-head'),
      ('resnet/', ''),
      ('gamma', 'scale'),
      ('beta', 'bias'),
    ):
      name = name.replace(old, new)
    renamed[f'params/{name}'] = x[None, None, None] if name.endswith('scale') else x
  return renamed


def bit_pre_logits(p, image):
  def conv(name, x, stride=1):
    kernel = p[f'{name}/standardized_conv2d/kernel']
    kernel = kernel - kernel.mean((0, 1, 2))
    kernel = kernel / np.sqrt(kernel.var((0, 1, 2)) + 1e-10)
    pad = (kernel.shape[0] // 2,) * 2
    dims = ('NHWC', 'HWIO', 'NHWC')
    return jax.lax.conv_general_dilated(
      x, kernel, (stride,) * 2, (pad, pad), dimension_numbers=dims
    )

  def norm(name, x):
    groups = np.asarray(x).reshape(*x.shape[:3], 32, -1)
    mean = groups.mean((1, 2, 4), keepdims=True)
    groups = (groups - mean) / np.sqrt(groups.var((1, 2, 4), keepdims=True) + 1e-5)
    y = groups.reshape(x.shape) * p[f'{name}/group_norm/gamma'] + p[f'{name}/group_norm/beta']
    return np.maximum(y, 0).astype(np.float32)

  x = conv('resnet/root_block', image, 2)
  x = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
  windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(1, 2))[:, ::2, ::2]
  x = windows.max((-1, -2))
  for stage, units in enumerate(UNITS):
    for unit in range(units):
      where = f'resnet/block{stage + 1}/unit{unit + 1:02d}'
      stride = 2 if stage and not unit else 1
      y = norm(f'{where}/a', x)
      shortcut = x if unit else conv(f'{where}/a/proj', y, stride)
      y = conv(f'{where}/a', y)
      y = conv(f'{where}/b', norm(f'{where}/b', y), stride)
      x = np.asarray(shortcut + conv(f'{where}/c', norm(f'{where}/c', y)))
  return norm('resnet', x).mean((1, 2))
