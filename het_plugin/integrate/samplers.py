"""Standard normal draws, one stream an example and one draw a sample index.

A draw is a pure function of (key of the example, sample index), so neither the chunk size, the
evaluation order, the mesh, the number of microbatches nor the batch an example happens to be in
changes it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

# (keys [B], sample indices [s], number of normals) -> [B, s, number of normals]
Sampler = Callable[[jax.Array, jax.Array, int], jax.Array]


def example_keys(key: jax.Array, index: jax.Array) -> jax.Array:
  """One key an example.

  Args:
    key: a typed or raw PRNG key.
    index: int32 [B], the identity of each example (its position in the global order).

  Returns:
    Typed keys [B].
  """
  if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
    key = jax.random.wrap_key_data(key)
  return jax.vmap(jax.random.fold_in, (None, 0))(key, index)


def iid(keys: jax.Array, sample_index: jax.Array, num_normals: int) -> jax.Array:
  """Independent normals, float32 [B, s, num_normals], for keys [B] and sample indices int32 [s]."""

  def one(key, s):
    return jax.random.normal(jax.random.fold_in(key, s), (num_normals,), jnp.float32)

  return jax.vmap(jax.vmap(one, (None, 0)), (0, None))(keys, sample_index)
