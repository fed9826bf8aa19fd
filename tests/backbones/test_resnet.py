import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import traverse_util
from flax.linen import partitioning

from het_plugin.backbones import ConvNeXt, ResNet, convnext, resnet, wide_resnet
from het_plugin.backbones.convnext import per_channel
from het_plugin.backbones.resnet import StandardizedConv
from tests.meshes import make_mesh, on_mesh
from tests.params import drawn

P = jax.sharding.PartitionSpec
RULES = (('batch', 'data'), ('mlp', 'model'), ('embed', None))


def images(batch=4, size=32, channels=3):
  return jax.random.normal(jax.random.key(7), (batch, size, size, channels))


def num_params(model):
  shapes = jax.eval_shape(model.init, jax.random.key(0), images(1))
  return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes['params']))


@pytest.mark.parametrize(
  ('model', 'num_classes', 'published'),
  [
    (resnet('50x1', version='v1.5'), 1000, 25_557_032),
    (resnet('50x1', version='v2'), 1000, 25_549_352),
    # As torchvision counts a ResNeXt-50 32x4d and a Wide ResNet-50-2.
    (resnet('50x1', version='v1.5', groups=32, inner_factor=2), 1000, 25_028_904),
    (resnet('50x1', version='v1.5', inner_factor=2), 1000, 68_883_240),
    # As timm counts them; Liu et al. and Woo et al. give 28.6M and 3.7M.
    (convnext('T', version='v1'), 1000, 28_589_128),
    (convnext('A', version='v2'), 1000, 3_708_400),
    # Zagoruyko and Komodakis 2016 give 36.5M and 2.7M (tables 4 and 5); uncertainty-baselines'
    # model of 28-10 has 36,479,194.
    (wide_resnet('28-10'), 10, 36_479_194),
    (wide_resnet('16-4'), 10, 2_748_890),
  ],
)
def test_with_a_head_it_has_the_published_number_of_parameters(model, num_classes, published):
  assert num_params(model) + num_classes * (model.pre_logits_dim + 1) == published


def test_152x1_has_the_parameters_of_table_3():
  assert round((num_params(resnet('152x1')) + 2049 * 21_843) / 1e6, 1) == 102.9


def test_a_small_stem_keeps_the_resolution():
  model = ResNet((1, 1), width=32, stem='3x3')
  (_, intermediates), variables = jax.eval_shape(
    model.init_with_output, jax.random.key(0), images(1, 16)
  )
  assert [intermediates[name].shape[1] for name in ('root', 'stage1', 'stage2')] == [16, 16, 8]
  assert variables['params']['conv_root']['kernel'].shape == (3, 3, 3, 32)


@pytest.mark.parametrize('stride, same_padding', [(1, True), (2, False)])
def test_convolution_is_that_of_flax_on_a_standardized_kernel(stride, same_padding):
  x = images(2, 9, 5)
  conv = StandardizedConv(7, 3, (None, 'embed'), stride, same_padding)
  kernel = drawn(conv.init, x)['kernel']
  flat = np.asarray(kernel, np.float64).reshape(-1, 7)
  standardized = ((flat - flat.mean(0)) / flat.std(0)).reshape(kernel.shape)
  plain = nn.Conv(7, (3, 3), stride, 'SAME' if same_padding else 1, use_bias=False)

  @jax.jit
  def both(*kernels):
    return [
      y.apply({'params': {'kernel': z}}, x) for y, z in zip((conv, plain), kernels, strict=True)
    ]

  np.testing.assert_allclose(*both(kernel, standardized.astype(np.float32)), atol=1e-4)


@pytest.mark.slow
def test_representations():
  model = ResNet((1, 2), width=32)
  phi, intermediates = jax.jit(model.apply)({'params': drawn(model.init, images())}, images())
  assert phi.shape == (4, model.pre_logits_dim) == (4, 256)
  assert phi.dtype == np.float32
  shapes = {name: x.shape for name, x in intermediates.items()}
  assert shapes == {
    'root': (4, 8, 8, 32),
    'stage1': (4, 8, 8, 128),
    'stage2': (4, 4, 4, 256),
    'pre_logits': (4, 256),
  }
  np.testing.assert_array_equal(phi, intermediates['pre_logits'])


@pytest.mark.slow
@pytest.mark.parametrize(
  'model',
  [
    ResNet((1,), width=32, version='v1.5'),
    ResNet((1,), width=32, version='v2'),
    ConvNeXt((1, 1), width=8, version='v1'),
    ConvNeXt((1, 1), width=8, version='v2'),
  ],
)
def test_gradients_reach_every_parameter(model):
  image = images()
  params = drawn(model.init, image)
  gradients = jax.jit(jax.grad(lambda p: model.apply({'params': p}, image)[0].var()))(params)
  assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in jax.tree.leaves(gradients))


@pytest.mark.slow
@pytest.mark.parametrize(
  ('model', 'layer'),
  [
    (ResNet((1, 1), width=32), ('stage1_unit01', 'conv1')),
    (ConvNeXt((1, 1), width=8, remat='full'), ('stage1_block01', 'wi')),
  ],
)
def test_a_mesh_shards_the_channels_and_changes_nothing(model, layer):
  image = images()
  params = drawn(model.init, image)
  expected = jax.jit(model.apply)({'params': params}, image)[0]
  with on_mesh(make_mesh(2, 4), RULES):
    axes = jax.eval_shape(model.init, jax.random.key(0), image)['params_axes']
    kernel = axes[layer[0]][layer[1]]['kernel_axes'].names
    assert partitioning.logical_to_mesh_axes(kernel) == P(*[None] * (len(kernel) - 1), 'model')
    got = jax.jit(lambda p, x: model.apply({'params': p}, x)[0])(params, image)
  np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
  ('make', 'words'),
  [
    (lambda: resnet('18x1'), "variant='18x1'"),
    (lambda: resnet('50x1', patch_size=3), 'patch_size'),
    (lambda: ResNet((1,), width=48), 'width=48'),
    (lambda: ResNet((1,), stochastic_depth=1.0), 'stochastic_depth=1.0'),
    (lambda: ResNet((1,), dtype='bf16'), "dtype='bf16'"),
    (lambda: wide_resnet('10-1', dtype='bf16'), "dtype='bf16'"),
    (lambda: ConvNeXt((1,), 8, dtype='bf16'), "dtype='bf16'"),
    (lambda: ConvNeXt((), 8), r'depths=\(\)'),
    (lambda: ConvNeXt((1, 1), 8).init(jax.random.key(0), images(1, 12)), ' 8 pixels, .*12x12'),
  ],
)
def test_bad_settings_are_one_sentence(make, words):
  with pytest.raises(ValueError, match=words):
    make()


@pytest.mark.parametrize(('dtype', 'error'), [(np.float32, 1e-5), (np.float64, 1e-13)])
def test_a_cpu_adds_shifted_images_for_a_convolution_per_channel(dtype, error):
  random = np.random.default_rng(0)
  x = random.normal(size=(2, 5, 6, 3)).astype(dtype)
  kernel = random.normal(size=(7, 7, 1, 3)).astype(dtype)

  def convolution(kernel):
    layout = ('NHWC', 'HWIO', 'NHWC')
    return jax.lax.conv_general_dilated(
      x, kernel, (1, 1), 'SAME', dimension_numbers=layout, feature_group_count=3
    )

  def ours(kernel):
    return per_channel(x, kernel)

  with jax.enable_x64(dtype == np.float64):
    np.testing.assert_allclose(ours(kernel), convolution(kernel), atol=error)
    slopes = [jax.grad(lambda k, f=f: jnp.square(f(k)).sum())(kernel) for f in (ours, convolution)]
  np.testing.assert_allclose(*slopes, rtol=10 * error, atol=100 * error)


def test_groups_are_blocks_of_a_kernel():
  """A ResNeXt against the ResNet whose 3 x 3 kernels are zero between the groups."""
  settings = {'stages': (2,), 'width': 4, 'version': 'v1.5', 'norm': 'folded', 'inner_factor': 2}
  grouped = ResNet(groups=2, **settings)
  image = jax.random.normal(jax.random.key(0), (2, 32, 32, 3))
  params = grouped.init(jax.random.key(1), image)['params']
  flat = traverse_util.flatten_dict(params, sep='/')
  assert flat['stage1_unit01/conv2/kernel'].shape == (3, 3, 4, 8)
  for name, kernel in flat.items():
    if name.endswith('conv2/kernel'):
      first, second = np.split(kernel, 2, axis=-1)
      flat[name] = np.zeros((3, 3, 8, 8), np.float32)
      flat[name][:, :, :4, :4] = first
      flat[name][:, :, 4:, 4:] = second
  whole = {'params': traverse_util.unflatten_dict(flat, sep='/')}
  expected, _ = ResNet(**settings).apply(whole, image)
  found, _ = grouped.apply({'params': params}, image)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  with pytest.raises(ValueError, match=r'ResNet.groups=3 must divide the 8 channels'):
    ResNet(groups=3, **settings)
  with pytest.raises(ValueError, match=r"ResNet.groups .* need ResNet.block='bottleneck'"):
    ResNet(groups=2, block='basic', stages=(1,))
