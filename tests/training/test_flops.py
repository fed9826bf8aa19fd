import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import Mesh, PartitionSpec

from het_plugin.backbones import ViT
from het_plugin.training import flops


def count(fn, *args):
  return flops.count_flops(jax.make_jaxpr(fn)(*args).jaxpr)


def test_matrix_products_and_their_gradients():
  x = jnp.zeros((8, 16))
  w = jnp.zeros((16, 32))
  product = 2 * 8 * 16 * 32
  assert count(jnp.matmul, x, w) == product
  assert (
    count(jax.grad(lambda x, w: jnp.sum(jnp.square(x @ w)), argnums=(0, 1)), x, w) == 3 * product
  )


def test_what_no_output_needs_does_not_count():
  settings = {'patch_size': 4, 'width': 16, 'depth': 1, 'mlp_dim': 24, 'num_heads': 2}
  image = jnp.zeros((2, 8, 8, 3))
  counts = []
  for vit in (ViT(**settings, pooling='token'), ViT(**settings, pooling='all', class_token=True)):
    params = jax.eval_shape(vit.init, jax.random.key(0), image)
    counts.append(count(jax.jit(lambda *x, vit=vit: vit.apply(*x)[0]), params, image))
  others = 2 * 2 * 4 * (2 * 16 * 16 + 2 * 16 * 24 + 2 * 5 * 16)
  assert counts[1] - counts[0] == others


@pytest.mark.parametrize('stride', [1, 2])
def test_convolution_and_its_gradients(stride):
  """The gradient of a stride is a convolution of an input between whose pixels are zeros."""
  image = jnp.zeros((2, 8, 8, 3))
  kernel = jnp.zeros((3, 3, 3, 5))
  dims = ('NHWC', 'HWIO', 'NHWC')

  def conv(image, kernel):
    strides = (stride, stride)
    return lax.conv_general_dilated(image, kernel, strides, 'SAME', dimension_numbers=dims)

  product = 2 * (2 * (8 // stride) ** 2 * 5) * (3 * 3 * 3)
  assert count(conv, image, kernel) == product
  gradient = jax.grad(lambda *args: jnp.square(conv(*args)).sum(), argnums=(0, 1))
  assert count(gradient, image, kernel) == 3 * product


def test_loops_count_every_turn_where_cost_analysis_counts_one():
  w = jnp.zeros((16, 16))

  def fn(x):
    return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=7)[0]

  x = jnp.zeros((4, 16))
  assert count(jax.jit(fn), x) == 7 * 2 * 4 * 16 * 16
  assert jax.jit(fn).lower(x).compile().cost_analysis()['flops'] < 2 * (2 * 4 * 16 * 16)


def test_a_kernel_counts_at_every_point_of_its_grid():
  def body(x, w, out):
    out[:] = x[:] @ w[:]

  def product(x, w):
    return pl.pallas_call(
      body,
      grid=(4,),
      in_specs=[pl.BlockSpec((8, 16), lambda i: (i, 0)), pl.BlockSpec((16, 32), lambda i: (0, 0))],
      out_specs=pl.BlockSpec((8, 32), lambda i: (i, 0)),
      out_shape=jax.ShapeDtypeStruct((32, 32), jnp.float32),
      interpret=True,
    )(x, w)

  assert count(product, jnp.zeros((32, 16)), jnp.zeros((16, 32))) == 2 * 32 * 16 * 32


def test_shard_map_counts_all_devices():
  mesh = Mesh(np.asarray(jax.devices()), ('data',))
  spec = PartitionSpec('data')
  fn = jax.shard_map(lambda x: x @ jnp.ones((16, 16)), mesh=mesh, in_specs=spec, out_specs=spec)
  assert count(fn, jnp.zeros((8, 16))) == 2 * 8 * 16 * 16


@pytest.mark.parametrize(
  'kind, peak',
  [
    ('TPU v5 lite', 197e12),
    ('TPU v5', 459e12),
    ('NVIDIA H100 80GB HBM3', 989e12),
    ('NVIDIA H100 PCIe', 756e12),
    ('NVIDIA A100-SXM4-80GB', 312e12),
    ('NVIDIA L40', None),  # not an L4
    ('cpu', None),
  ],
)
def test_peak(kind, peak):
  assert flops.peak_flops(kind) == peak
