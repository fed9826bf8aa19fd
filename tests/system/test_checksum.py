import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from het_plugin.system import checksum


def mix(h: int) -> int:
  h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
  h = (h ^ (h >> 13)) * 0xC2B2AE35 % 2**32
  return h ^ (h >> 16)


def reference(x: np.ndarray) -> int:
  """The definition, element by element, in Python's integers."""
  words = x.reshape(-1).view({1: np.uint8, 2: np.uint16}.get(x.dtype.itemsize, np.uint32))
  return sum(mix(int(w) ^ (i * 0x9E3779B1 % 2**32)) for i, w in enumerate(words)) % 2**32


def of(x) -> int:
  """The checksum by NumPy, as here on a CPU, which is that of the devices."""
  arrays = {'x': jnp.asarray(x)}
  found = checksum.array_checksums(arrays)
  assert checksum._by_devices(arrays) == found
  return found['x']


@pytest.mark.parametrize(
  'dtype, shape',
  [
    ('float32', (3, 4, 5)),
    ('bfloat16', (7,)),
    ('int32', ()),
    ('uint8', (0, 2)),
    ('bool', (7,)),
    ('int8', (2**18 + 5,)),  # two chunks of NumPy's
  ],
)
def test_it_is_what_it_is_defined_to_be(dtype, shape):
  x = np.asarray(np.random.default_rng(0).normal(size=shape) * 3).astype(jnp.dtype(dtype))
  assert of(x) == reference(x)


def test_it_is_the_same_on_every_mesh():
  x = np.random.default_rng(1).normal(size=(16, 24)).astype(np.float32)
  mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ('a', 'b'))
  assert of(jax.device_put(x, NamedSharding(mesh, PartitionSpec('a', 'b')))) == reference(x)


def test_swapped_blocks_are_noticed_where_only_the_high_bits_are_used(stride=2**16):
  """Blocks of a float32 array with the values of bfloat16, at distances of 2^k."""
  x = np.random.default_rng(2).normal(size=4 * stride).astype(jnp.bfloat16).astype(np.float32)
  assert of(x) != of(x.reshape(4, stride)[[1, 0, 3, 2]].reshape(-1))
