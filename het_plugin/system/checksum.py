"""Checksums of arrays that do not depend on mesh, sharding or number of processes.

The checksum of an array with elements x_i, where i is the row-major index in the global array, is

    sum_i mix(bits(x_i) xor c i)  mod 2^32,    mix a bijection of 32-bit words, c odd.

A sum of integers does not depend on the order of its terms. Because mix is a bijection, any change
within one element changes exactly one term and is always noticed. Changes of several elements, as
in damaged compressed data, and swapped elements are missed with probability 2^-32. A plain weighted
sum is not enough: the low half of a float32 that was bfloat16 is zero, and so is the low half of
the sum.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
_STEP = 0x9E3779B1  # c; odd, so that c i is different for all i < 2^32
_CHUNK = 2**18  # words that NumPy processes at a time, so that they stay in the cache


def array_checksums(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
  """The checksum of each array, 0 to 2^32 - 1, computed on the devices that hold the array.

  All processes call it with the same names in the same order and get the same numbers. Arrays are
  of booleans, integers or floating-point numbers of at most 8 bytes, with any sharding.
  """
  if jax.default_backend() == 'cpu' and jax.process_count() == 1:
    # A small run waits for longer until the programs are compiled than for everything else.
    return {name: _by_numpy(np.asarray(x)) for name, x in arrays.items()}
  return _by_devices(arrays)


def _by_devices(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
  # One program per shape and sharding compiles much faster than one program for all arrays.
  sums = {}
  for name, x in arrays.items():
    sums[name] = _program(_replicated(x.sharding))(x)
    if jax.default_backend() == 'cpu':
      # Virtual devices share few threads: with several collectives in flight, processes waited for
      # each other forever.
      sums[name].block_until_ready()
  return {name: int(value) for name, value in jax.device_get(sums).items()}


def _by_numpy(x: np.ndarray) -> int:
  words = np.ravel(x).view(_WORDS[x.dtype.itemsize])
  total = 0
  for start in range(0, len(words), _CHUNK):
    part = words[start : start + _CHUNK].astype(np.uint32)
    place = np.arange(start, start + len(part)).astype(np.uint32)  # mod 2^32
    total += int(np.sum(_mix(part ^ (place * np.uint32(_STEP))), dtype=np.uint32))
  return total % 2**32


def json_digest(value: Any) -> str:
  """SHA-256 of a JSON value; the order of keys does not count, and tuples are lists."""
  canonical = json.dumps(json.loads(json.dumps(value)), sort_keys=True)
  return hashlib.sha256(canonical.encode()).hexdigest()


@functools.cache
def _program(out_sharding: jax.sharding.Sharding) -> jax.stages.Wrapped:
  return jax.jit(_checksum, out_shardings=out_sharding)


def _replicated(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
  is_named = isinstance(sharding, NamedSharding)
  return NamedSharding(sharding.mesh, PartitionSpec()) if is_named else sharding


def _checksum(x: jax.Array) -> jax.Array:
  x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
  bits = lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize])  # 8 bytes: [..., 2]
  place = jnp.zeros(bits.shape, jnp.uint32)
  stride = 1
  for axis in reversed(range(bits.ndim)):
    place += lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride % 2**32)
    stride *= bits.shape[axis]
  return jnp.sum(_mix(bits.astype(jnp.uint32) ^ (place * jnp.uint32(_STEP))), dtype=jnp.uint32)


def _mix(h: Any) -> Any:
  # The finaliser of MurmurHash3; each xor-shift and each product with an odd factor is invertible.
  h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
  h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
  return h ^ (h >> 16)
