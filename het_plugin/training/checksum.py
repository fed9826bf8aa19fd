"""Checksums that tell whether what was read is what was saved.

Of an array of elements x_i, i its place in row-major order of the global array,

    sum_i mix(bits(x_i) xor c i)  mod 2^32,    mix one to one on 32 bits, c odd.

The sum is of integers, so it does not depend on the order, and with it not on mesh, sharding or
number of processes. As mix is one to one, a change of one element changes exactly one term to
another value, and so the sum: any change inside one element, one bit or many, is noticed for
certain. Of changes in several elements, which damage of compressed data makes, and of elements that
changed places, one in 2^32 is missed. A plain weighted sum would not do: the low half of a float32
that was bfloat16 is zero, and with it the low half of the sum.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
_STEP = 0x9E3779B1  # c: odd, so that places differ up to 2^32


def array_checksums(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
  """The checksum of each array, 0..2^32 - 1, computed where the array lies.

  All processes call it with the same names in the same order, and get the same numbers. A program
  for each shape and sharding compiles in a fraction of the time of one program for all arrays.

  Args:
    arrays: of booleans, integers or floating point numbers of at most 8 bytes; any sharding.
  """
  sums = {}
  for name, x in arrays.items():
    sums[name] = _program(_replicated(x.sharding))(x)
    if jax.default_backend() == 'cpu':
      # The threads of virtual devices are few, and collectives in flight hold them until all of
      # one have come: several processes waited for each other for ever.
      sums[name].block_until_ready()
  return {name: int(value) for name, value in jax.device_get(sums).items()}


def json_digest(value: Any) -> str:
  """SHA-256 of a JSON value, whatever the order of its keys; tuples count as lists."""
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
  place, stride = jnp.zeros(bits.shape, jnp.uint32), 1
  for axis in reversed(range(bits.ndim)):
    place += lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride % 2**32)
    stride *= bits.shape[axis]
  return jnp.sum(_mix(bits.astype(jnp.uint32) ^ (place * jnp.uint32(_STEP))), dtype=jnp.uint32)


def _mix(h: jax.Array) -> jax.Array:
  # The finaliser of MurmurHash3: shifts with xor and odd factors, each of which can be undone.
  h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
  h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
  return h ^ (h >> 16)
