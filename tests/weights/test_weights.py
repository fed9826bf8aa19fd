"""Published weights: the same forward pass, every tensor accounted for, and back."""

import errno
import functools
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from flax import traverse_util

from het_plugin import heads, weights
from het_plugin.backbones import ResNet, SparseMoe, TextTransformer, ViT
from het_plugin.integrate import Integrator
from het_plugin.models import ContrastiveModel
from het_plugin.system import run_files
from het_plugin.weights import files, layouts
from tests.weights import theirs

IMAGE = np.random.default_rng(9).normal(size=(3, theirs.SIDE, theirs.SIDE, 3)).astype(np.float32)


def our_vit(**settings):
  sizes = (theirs.PATCH, theirs.D, theirs.DEPTH, theirs.MLP, theirs.HEADS)
  return ViT(*sizes, **{'representation_size': theirs.D, **settings})


def shapes_of(backbone, head, image=IMAGE):
  """{our name: shape}."""
  key = jax.random.key(0)
  phi = jnp.zeros((1, backbone.pre_logits_dim))
  params = {
    'backbone': jax.eval_shape(backbone.init, key, image)['params'],
    'head': jax.eval_shape(head.init, key, phi)['params'],
  }
  return {name: x.shape for name, x in traverse_util.flatten_dict(params, sep='/').items()}


def load(arrays, backbone, classifier=None, image=IMAGE, **settings):
  classifier = classifier or heads.Det(theirs.CLASSES)
  settings = {'num_classes': classifier.num_classes, **settings}
  read, report = weights.load_params(arrays, shapes_of(backbone, classifier, image), **settings)
  return traverse_util.unflatten_dict(read, sep='/'), report


def pre_logits(backbone, params, image=IMAGE):
  return jax.jit(backbone.apply)({'params': params['backbone']}, image)[0]


@pytest.mark.parametrize('naming, scan', [('vision_transformer', False), ('stacked', True)])
def test_vit_forward_parity(naming, scan):
  arrays = theirs.vit()
  expected = theirs.vit_pre_logits(arrays, IMAGE)
  if naming != 'vision_transformer':
    arrays = theirs.big_vision(arrays, stacked=naming == 'stacked')
  backbone = our_vit(scan_layers=scan)
  params, report = load(arrays, backbone)
  np.testing.assert_allclose(pre_logits(backbone, params), expected, atol=1e-5)
  assert not report.initialised and not report.skipped
  logits = heads.Det(theirs.CLASSES).apply({'params': params['head']}, expected).location
  head = {name.split('/')[-1]: x for name, x in arrays.items() if 'head/' in name}
  expected_logits = expected @ head['kernel'] + head['bias']
  np.testing.assert_allclose(logits[:, : theirs.CLASSES], expected_logits, atol=1e-5)
  assert not logits[:, theirs.CLASSES :].any()


def test_vmoe():
  arrays = theirs.vmoe(theirs.vit())
  moe = SparseMoe(3, layers=(theirs.DEPTH - 1,), eval_capacity=3.0)
  backbone = our_vit(moe=moe)
  params, report = load(arrays, backbone)
  assert not report.initialised and not report.skipped
  expected = theirs.vit_pre_logits(layouts.canonical(arrays), IMAGE)
  np.testing.assert_allclose(pre_logits(backbone, params), expected, atol=1e-5)


def test_vit_of_patches_alone():
  arrays = theirs.vit(representation=False, token=False)
  backbone = our_vit(pooling='gap', representation_size=None)
  params, _ = load(arrays, backbone)
  expected = theirs.vit_pre_logits(arrays, IMAGE)
  np.testing.assert_allclose(pre_logits(backbone, params), expected, atol=1e-5)


def test_vit_with_attention_pooling():
  """big_vision's pooling='map'."""
  arrays = theirs.vit(representation=False, token=False) | theirs.arrays_of(theirs.MAP_HEAD, 2)
  backbone = our_vit(pooling='map', representation_size=None)
  params, report = load(arrays, backbone)
  expected = theirs.vit_pre_logits(arrays, IMAGE)
  np.testing.assert_allclose(pre_logits(backbone, params), expected, atol=1e-5)
  assert len(report.loaded) == len(arrays)


def numbered(arrays):
  """As some of Big Transfer's files have it."""
  return {
    name.replace('c/standardized_conv2d/', 'c/standardized_conv2d_1/'): x
    for name, x in arrays.items()
  }


@pytest.mark.parametrize('naming', [dict, numbered, theirs.big_vision_bit])
def test_resnet_forward_parity(naming):
  arrays = theirs.bit()
  backbone = ResNet(theirs.UNITS, theirs.WIDTH)
  image = np.random.default_rng(1).normal(size=(2, 32, 32, 3)).astype(np.float32)
  params, report = load(naming(arrays), backbone, image=image)
  expected = theirs.bit_pre_logits(arrays, image)
  np.testing.assert_allclose(pre_logits(backbone, params, image), expected, rtol=1e-4, atol=1e-4)
  assert len(report.loaded) == len(arrays)


@pytest.mark.parametrize('prefix, latent', [('head', True), ('multilabel_head', False)])
def test_heteroscedastic_head_parity(prefix, latent):
  """Logits of given normals: theirs by sampling, ours by the factors; tau by its parameter."""
  noise_dim = theirs.D if latent else theirs.CLASSES
  arrays = theirs.vit()
  del arrays['head/kernel'], arrays['head/bias']
  head_arrays = theirs.het_head(prefix, noise_dim)
  arrays = {f'opt/target/{name}': x for name, x in {**arrays, **head_arrays}.items()}
  settings = {
    'num_factors': theirs.R,
    'factor_bias': True,
    'temperature': heads.LearnedTemperature(tau_min=0.3, tau_max=3.0),
  }
  head = (heads.HetXL if latent else heads.Het)(theirs.CLASSES, **settings)
  params, report = load(arrays, our_vit(), head)
  assert not report.initialised and not report.skipped
  phi = np.random.default_rng(2).normal(size=(3, theirs.D)).astype(np.float32)
  rng = np.random.default_rng(3)
  z = rng.normal(size=(5, theirs.R))
  z_diag = rng.normal(size=(5, 1))
  expected = theirs.het_logits(head_arrays, prefix, np.float64(phi), z, z_diag, latent)

  logits = head.apply({'params': params['head']}, phi)
  normals = np.concatenate([z, z_diag], axis=1)
  eps = logits.covariance.noise(jnp.asarray(normals, jnp.float32)[None])
  noise = eps @ logits.projection.kernel if latent else eps
  got = (logits.location[:, None] + noise)[..., : theirs.CLASSES]
  np.testing.assert_allclose(got, expected, atol=1e-4)
  t = head_arrays[f'{prefix}/pre_sigmoid_temperature'][0]
  np.testing.assert_allclose(logits.temperature, 0.3 + 2.7 / (1 + np.exp(-t)), rtol=1e-6)


def test_a_deterministic_file_starts_het_xl():
  head = heads.HetXL(theirs.CLASSES, num_factors=2, temperature=heads.LearnedTemperature())
  params, report = load(theirs.vit(), our_vit(), head)
  assert set(params['head']) == {'kernel', 'bias'}
  assert {name.split('/')[1] for name in report.initialised} == {'covariance', 'temperature'}
  assert 'initialised: head/covariance/J' in report.text()


def test_positions_are_resampled_and_the_class_token_keeps_its_own():
  arrays = theirs.vit()  # 2 x 2 patches
  image = np.zeros((1, 16, 16, 3), np.float32)  # 4 x 4
  params, report = load(arrays, our_vit(), image=image)
  old = arrays['Transformer/posembed_input/pos_embedding'][0]
  new = params['backbone']['position_embedding']
  assert new.shape == (17, theirs.D)
  np.testing.assert_array_equal(new[0], old[0])
  corners = new[1:].reshape(4, 4, -1)[::3, ::3].reshape(4, -1)
  np.testing.assert_allclose(corners, old[1:], atol=1e-6)
  middle = new[1:].reshape(4, 4, -1)[0, 1]
  np.testing.assert_allclose(middle, old[1] * 2 / 3 + old[2] / 3, atol=1e-6)
  assert 'resampled from 2 x 2 to 4 x 4 patches' in report.text()


def test_position_embeddings_of_patches_alone_get_a_zero_row_for_the_class_token():
  """big_vision adds them before it prepends the class token."""
  arrays = theirs.vit()
  name = 'Transformer/posembed_input/pos_embedding'
  arrays[name] = arrays[name][:, 1:]
  params, report = load(arrays, our_vit())
  embedding = params['backbone']['position_embedding']
  assert not embedding[0].any()
  np.testing.assert_array_equal(embedding[1:], arrays[name][0])
  assert 'zero row' in report.text()


def test_another_head_is_initialised_and_theirs_skipped():
  params, report = load(theirs.vit(), our_vit(), heads.Det(5), head='init')
  assert 'head' not in params
  assert report.skipped == ['head/bias', 'head/kernel']
  assert report.initialised == ['head/bias', 'head/kernel']


def test_the_image_tower_of_a_contrastive_model():
  """LiT: beside the tower nothing is in the file."""
  backbone = our_vit(scan_layers=True)
  arrays = theirs.vit()
  text_tower = TextTransformer(vocab_size=9, width=8, depth=1, mlp_dim=8, num_heads=1)
  model = ContrastiveModel(
    backbone, text_tower, heads.ContrastiveHetXL(), None, Integrator(num_samples=1)
  )
  init = functools.partial(
    model.get_initial_variables, input_shapes={'image': IMAGE.shape, 'text': (3, 5)}
  )
  flat = traverse_util.flatten_dict(jax.eval_shape(init, jax.random.key(0))['params'], sep='/')
  read, report = weights.load_params(arrays, {k: x.shape for k, x in flat.items()}, head='init')
  assert all(name.startswith('backbone/') for name in read)
  assert set(report.initialised) == {name for name in flat if not name.startswith('backbone/')}
  params = traverse_util.unflatten_dict(read, sep='/')
  expected = theirs.vit_pre_logits(arrays, IMAGE)
  np.testing.assert_allclose(pre_logits(backbone, params), expected, atol=1e-5)


@pytest.mark.parametrize(
  'change,words',
  [
    (lambda a: a.pop('cls'), 'cls .*missing, .*backbone/class_token'),
    (lambda a: a.update(extra=np.zeros(3)), r'extra \(3,\) '),
    (
      lambda a: a.update({'embedding/bias': np.zeros(7)}),
      r'embedding/bias \(7,\) .*backbone/embedding/bias \(16,\)',
    ),
    *(
      (
        lambda a, k=k: a.update({'head/kernel': np.zeros((16, k)), 'head/bias': np.zeros(k)}),
        rf" {k} classes: .*NUM_CLASSES .*head = 'init'",
      )
      for k in (200, 128, 12, 10)  # the model has 11, padded to 128
    ),
  ],
)
def test_what_does_not_fit_is_listed(change, words):
  arrays = theirs.vit()
  change(arrays)
  with pytest.raises(ValueError, match=words):
    load(arrays, our_vit())


def test_what_is_skipped():
  arrays = theirs.vit() | {'opt/state/step': np.zeros(())}  # which is not read in any case
  skip = ('pre_logits/.*', 'opt/.*')
  _, report = load(arrays, our_vit(representation_size=None), skip=skip)
  assert list(report.skipped) == ['pre_logits/bias', 'pre_logits/kernel', 'opt/state/step']
  for skip, words in (
    ('head/.*', r"head/bias is skipped, for head/bias \(128,\): bind .*head = 'init'"),
    ('prelogits/.*', "'prelogits/.*', which matches no array of the file: Transformer/"),
  ):
    with pytest.raises(ValueError, match=words):
      load(arrays, our_vit(), skip=('cls|pre_logits/.*', skip))


def test_attention_heads_are_those_of_the_file():
  """The shapes of the model are the same for every number of them."""
  stacked = theirs.big_vision(theirs.vit(), stacked=True)
  for arrays, scan in ((theirs.vit(), False), (stacked, True)):
    backbone = our_vit(scan_layers=scan).clone(num_heads=2 * theirs.HEADS)
    with pytest.raises(ValueError, match=f'num_heads={2 * theirs.HEADS}; .* {theirs.HEADS} of the'):
      load(arrays, backbone, num_heads=backbone.num_heads)
    load(arrays, backbone.clone(num_heads=theirs.HEADS), num_heads=theirs.HEADS)


def test_a_file_in_our_names_may_have_padded_classes():
  shapes = {'head/kernel': (4, 128), 'head/bias': (128,)}

  def read(k):
    arrays = {'head/kernel': np.ones((4, k)), 'head/bias': np.ones(k)}
    return weights.load_params(arrays, shapes, num_classes=11)[0]['head/bias']

  for k in (11, 12, 128):
    np.testing.assert_array_equal(read(k), np.arange(128) < k)
  with pytest.raises(ValueError, match='the head of the file has 10 classes'):
    read(10)


def test_buckets_are_not_padded_as_classes_are():
  """The hash of HET-H into H buckets is another one than that into more."""
  shapes = {'head/kernel': (4, 128), 'head/bias': (128,), 'head/covariance/J': (2, 8)}
  arrays = {'head/kernel': np.ones((4, 11)), 'head/bias': np.ones(11)}
  with pytest.raises(ValueError, match=r'J \(2, 6\) does not fit head/covariance/J \(2, 8\)'):
    weights.load_params(arrays | {'head/covariance/J': np.ones((2, 6))}, shapes, num_classes=11)


def test_an_export_has_the_bias_that_edward2_expects():
  head = heads.HetXL(theirs.CLASSES, num_factors=theirs.R)
  shapes = shapes_of(our_vit(), head)
  params = {name: np.full(shape, 0.5, np.float32) for name, shape in shapes.items()}
  arrays = weights.export_params(params, theirs.CLASSES, theirs.HEADS)
  bias = arrays['head/scale_layer_homoscedastic/bias']
  assert bias.shape == (theirs.D,) and not bias.any()
  back, _ = weights.load_params(arrays, shapes)  # a zero bias has no place here and needs none
  assert back.keys() == params.keys()
  arrays['head/scale_layer_homoscedastic/bias'] = bias + 1
  with pytest.raises(ValueError, match='factor_bias'):
    weights.load_params(arrays, shapes)


@pytest.mark.parametrize(
  'head, noise_dim',
  [
    (heads.Het(12, num_factors=2, class_multiple=16), 12),
    (heads.HetXL(12, num_factors=2, class_multiple=16), 16),
    (heads.HetXL(12, num_factors=2, class_multiple=16, noise_dim=5), 5),
    (heads.HetH(12, num_factors=2, class_multiple=16), 16),
  ],
)
def test_an_export_cuts_the_padded_classes_alone_where_d_is_their_number(head, noise_dim):
  """The backbone has D = 16."""
  shapes = shapes_of(our_vit(), head)
  rng = np.random.default_rng(0)
  params = {name: rng.normal(size=x).astype(np.float32) for name, x in shapes.items()}
  assert head.unpadded_noise_dim(16) == noise_dim
  arrays = weights.export_params(params, 12, theirs.HEADS, noise_dim)
  assert arrays['head/loc_layer/kernel'].shape == (16, 12)
  v = arrays['head/scale_layer_heteroscedastic/kernel']
  np.testing.assert_array_equal(v, params['head/covariance/v_kernel'][:, :noise_dim])
  back, _ = weights.load_params(arrays, shapes)
  for name, x in params.items():
    real = 12 if name in ('head/kernel', 'head/bias', 'head/noise_kernel') else noise_dim
    last = slice(real if name.startswith('head/') else None)
    np.testing.assert_array_equal(back[name][..., last], x[..., last], err_msg=name)
    assert not np.any(back[name][..., real:]) or not name.startswith('head/'), name


@pytest.mark.parametrize('suffix, scan', [('npz', False), ('safetensors', True)])
def test_export_is_the_inverse(tmp_path, suffix, scan):
  arrays = theirs.vit() | theirs.het_head('head', theirs.D)
  del arrays['head/kernel'], arrays['head/bias']
  head = heads.HetXL(
    theirs.CLASSES, num_factors=theirs.R, factor_bias=True, temperature=heads.LearnedTemperature()
  )
  backbone = our_vit(scan_layers=scan)
  read, _ = weights.load_params(arrays, shapes_of(backbone, head))
  path = tmp_path / f'out.{suffix}'
  weights.write_arrays(path, weights.export_params(read, theirs.CLASSES, theirs.HEADS))
  back = weights.read_arrays(path)
  back['head/pre_sigmoid_temperature'] = back['head/pre_sigmoid_temperature'].reshape(1)
  assert back.keys() == arrays.keys()
  for name, x in arrays.items():
    np.testing.assert_array_equal(back[name], x, err_msg=name)


def test_export_of_a_resnet_is_the_inverse():
  arrays = theirs.bit()
  backbone = ResNet(theirs.UNITS, theirs.WIDTH, scan_layers=True)
  image = np.zeros((1, 32, 32, 3), np.float32)
  read, _ = weights.load_params(arrays, shapes_of(backbone, heads.Det(theirs.CLASSES), image))
  back = weights.export_params(read, theirs.CLASSES)
  assert back.keys() == arrays.keys()
  for name, x in arrays.items():
    np.testing.assert_array_equal(back[name], x, err_msg=name)


def test_files(tmp_path):
  path = tmp_path / 'a.npz'
  half = np.arange(4, dtype=np.float32).astype(ml_dtypes.bfloat16)
  np.savez(path, half=half.view('V2'), count=np.int64(3))
  arrays = weights.read_arrays(path)
  np.testing.assert_array_equal(arrays['half'], np.arange(4, dtype=np.float32))
  assert arrays['count'].dtype == np.int64
  for name, words in (('b.npz', 'b.npz .*exist'), ('b.bin', 'b.bin .*.npz or .safetensors')):
    with pytest.raises(ValueError, match=words):
      weights.read_arrays(tmp_path / name)
  (tmp_path / 'c.npz').write_bytes(b'nothing')
  with pytest.raises(ValueError, match='c.npz .*zip'):
    weights.read_arrays(tmp_path / 'c.npz')


@pytest.mark.parametrize('of', ['nothing', 'checksum', 'array', 'description'])
def test_a_file_of_ours_is_as_it_was_written(tmp_path, of):
  path = tmp_path / 'head.safetensors'
  kernel = np.arange(4, dtype=np.float32)
  weights.write_arrays(
    path, {'head/kernel': kernel, 'step': np.int64(3)}, {'class_names': ['a', 'b']}
  )
  with safetensors.safe_open(path, framework='numpy') as file:
    metadata = file.metadata()
    arrays = {name: file.get_tensor(name) for name in file.keys()}
  if of == 'checksum':
    del metadata['het_plugin.sha256']
  if of == 'array':
    arrays['head/kernel'] = kernel[::-1].copy()
  if of == 'description':
    metadata['het_plugin.parameters'] = '{"class_names": ["b", "a"]}'
  safetensors.numpy.save_file(arrays, path, metadata)
  if of == 'nothing':
    np.testing.assert_array_equal(weights.read_arrays(path)['head/kernel'], kernel)
    return
  with pytest.raises(ValueError, match='head.safetensors cannot be read: .* checksum'):
    weights.read_arrays(path)


def test_arrays_much_larger_than_their_file_are_not_unpacked(tmp_path, monkeypatch):
  path = tmp_path / 'a.npz'
  np.savez_compressed(path, kernel=np.zeros(2**20, np.float32))
  assert weights.read_arrays(path)['kernel'].shape == (2**20,)
  monkeypatch.setattr(files, '_SMALL_BYTES', 2**20)
  monkeypatch.setattr(files.np.lib.npyio.NpzFile, '__getitem__', lambda *_: pytest.fail('unpacked'))
  with pytest.raises(ValueError, match='a.npz .* 4,194,'):
    weights.read_arrays(path)


def test_a_file_is_replaced_when_it_is_complete(tmp_path):
  path = tmp_path / 'page.html'
  path.write_text('old')
  with pytest.raises(OSError, match='page.html') as error, run_files.replacing(path):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
  assert error.value.errno == errno.ENOSPC
  assert path.read_text() == 'old' and list(tmp_path.iterdir()) == [path]
  link = tmp_path / 'link'
  link.symlink_to(path)
  with run_files.replacing(link) as target:
    target.write_text('new')
  assert link.is_symlink() and path.read_text() == 'new'
