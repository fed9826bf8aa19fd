"""Standard normal draws, one stream per example and one draw per sample index.

A draw is a pure function of (key of the example, sample index). It does not depend on the chunk
size, the evaluation order, the mesh, the number of microbatches or the rest of the batch. The draws
of every sampler are standard normal and leave the estimate of an expectation unbiased. Samplers
differ in how the samples of one example depend on each other, and so in variance.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from het_plugin.integrate.sobol_sequence import (
  MAX_DIMENSIONS,
  scrambled_directions,
  sobol_points,
)

Index = jax.Array | np.ndarray  # a constant where it is known
# (keys [B], sample indices [s], number of normals) -> [B, s, number of normals]
Sampler = Callable[[jax.Array, Index, int], jax.Array]

# Coefficients of erfinv(x) / x, highest power first: of w - 2.5, and of sqrt(w) - 3 in the tail.
_CENTRE = (
  2.81022636e-08,
  3.43273939e-07,
  -3.5233877e-06,
  -4.39150654e-06,
  0.00021858087,
  -0.00125372503,
  -0.00417768164,
  0.246640727,
  1.50140941,
)
_TAIL = (
  -0.000200214257,
  0.000100950558,
  0.00134934322,
  -0.00367342844,
  0.00573950773,
  -0.0076224613,
  0.00943887047,
  1.00167406,
  2.83297682,
)


def example_keys(key: jax.Array, index: jax.Array) -> jax.Array:
  """One key per example.

      >>> import jax, jax.numpy as jnp
      >>> from het_plugin.integrate import example_keys
      >>> keys = example_keys(jax.random.key(0), jnp.array([7, 3]))
      >>> alone = example_keys(jax.random.key(0), jnp.array([3]))  # in another batch
      >>> keys.shape, bool(keys[1] == alone[0])
      ((2,), True)

  Args:
    key: a typed or raw PRNG key.
    index: int32 [B], the identity of each example, such as its position in the global order.

  Returns:
    Typed keys [B] of the kind 'threefry2x32', whatever the kind of `key`.

  Raises:
    ValueError: index is no array of integers [B].
  """
  shape = jnp.shape(index)
  dtype = jnp.result_type(index)
  if len(shape) != 1 or not jnp.issubdtype(dtype, jnp.integer):
    raise ValueError(
      f'example_keys: index must be integers [B], one per example; got {dtype} {shape}'
    )
  return jax.vmap(jax.random.fold_in, (None, 0))(_threefry(key), index)


def shared_key(key: jax.Array) -> jax.Array:
  """A typed or raw PRNG key as typed keys [1], which an integrator uses for all examples."""
  return _threefry(key)[None]


def checked_keys(owner: str, keys: jax.Array | None, batch_size: int) -> jax.Array:
  """The keys, of the kind 'threefry2x32' as in `example_keys`.

  Raises ValueError, naming the owner, if they are no typed PRNG keys [B] or [1].
  """
  given = () if keys is None else jnp.shape(keys)
  is_fit = given in ((batch_size,), (1,))
  if keys is None or not is_fit or not jnp.issubdtype(jnp.result_type(keys), jax.dtypes.prng_key):
    raise ValueError(
      f'{owner}: samples need typed keys [{batch_size}], one per example (example_keys); got '
      f'{"none" if keys is None else f"{jnp.result_type(keys)} {list(given)}"}'
    )
  return _threefry(keys)


def _threefry(key: jax.Array) -> jax.Array:
  # Numbers of the kinds 'rbg' and 'unsafe_rbg' depend on the other keys of a `jax.vmap`: then a
  # draw would depend on the batch and the chunk.
  return jax.random.wrap_key_data(jax.random.key_data(key)[..., :2], impl='threefry2x32')


def normal_quantile(x: jax.Array) -> jax.Array:
  """The standard normal quantile at (x + 1) / 2, for x in (-1, 1), float32.

  `jax.lax.erf_inv` has another result in the tails from one version of JAX to the next. The
  polynomials are those of M. Giles, "Approximating the erfinv function" (2012).
  """
  # XLA would fuse this with the digits of Sobol's points, which then took three times as long on a
  # CPU.
  x = jax.lax.optimization_barrier(x)
  rest = 1.0 - jnp.abs(x)  # exact where it is small, as x * x is not
  w = -jnp.log(rest * (2.0 - rest))
  is_tail = w >= 5.0
  w = jnp.where(is_tail, jnp.sqrt(jnp.maximum(w, 5.0)) - 3.0, w - 2.5)
  result = jnp.zeros_like(x)
  for centre, tail in zip(_CENTRE, _TAIL, strict=True):
    result = jnp.where(is_tail, jnp.float32(tail), jnp.float32(centre)) + result * w
  return jnp.float32(2**0.5) * result * x


def iid(keys: jax.Array, sample_index: Index, num_normals: int) -> jax.Array:
  """Independent normals.

  Args:
    keys: typed PRNG keys [B] of any kind, as in `example_keys`.
    sample_index: int32 [s].
    num_normals: normals of a sample.

  Returns:
    float32 [B, s, num_normals].
  """

  def one(key, s):
    # From the bits of `jax.random.normal`.
    key = jax.random.fold_in(key, s)
    least = np.nextafter(np.float32(-1), np.float32(0))
    return normal_quantile(jax.random.uniform(key, (num_normals,), jnp.float32, least, 1.0))

  return jax.vmap(jax.vmap(one, (None, 0)), (0, None))(_threefry(keys), sample_index)


def sobol(keys: jax.Array, sample_index: Index, num_normals: int) -> jax.Array:
  """Sobol's sequence, scrambled, mapped to normals by the inverse of their CDF.

  The key of each example gives a random lower triangular matrix and a random shift of the digits of
  every dimension. The shift makes each point uniform, so the estimate is unbiased, and both keep
  the sequence's even filling of the cube. The matrices lower the error of smooth integrands, at
  small noise and S = 64 to a third. Powers of two fill the cube best, but any S works. Arguments
  and result are those of `iid`.

  The sequence has 64 dimensions; further normals are independent.
  """
  if num_normals > MAX_DIMENSIONS:
    leading = sobol(keys, sample_index, MAX_DIMENSIONS)
    rest = iid(keys, sample_index, num_normals - MAX_DIMENSIONS)
    return jnp.concatenate([leading, rest], axis=-1)

  # Indices that are constants have few digits, and zeros before them change no point.
  is_constant = isinstance(sample_index, np.ndarray)
  num_digits = int(sample_index.max()).bit_length() if is_constant else 32

  def points(key):
    bits = jax.random.bits(key, (num_normals, 33), jnp.uint32)
    directions = scrambled_directions(bits[:, :32], num_digits)
    return sobol_points(sample_index, directions) ^ bits[:, 32]

  # The middle of one of 2^23 equal intervals of (-1, 1) is exact in float32 and never an end.
  uniform = ((jax.vmap(points)(_threefry(keys)) >> 9).astype(jnp.float32) + 0.5) * 2.0**-22 - 1.0
  return normal_quantile(uniform)


@dataclasses.dataclass(frozen=True)
class FixedPoints:
  """A sampler whose points are a constant [1, S, T] of the program, for programs without keys.

  They are those of `shared_key(jax.random.key(seed))`, the same for all examples.

      >>> import jax, jax.numpy as jnp
      >>> from het_plugin.integrate import shared_key
      >>> from het_plugin.integrate.samplers import FixedPoints, sobol
      >>> fixed = FixedPoints(sobol, num_samples=4)
      >>> points = fixed(None, jnp.arange(4), 3)
      >>> bool((points == sobol(shared_key(jax.random.key(0)), jnp.arange(4), 3)).all())
      True

  Attributes:
    sampler: makes the points.
    num_samples: S of the integrator.
    seed: of the key.
  """

  sampler: Sampler
  num_samples: int
  seed: int = 0

  def __call__(self, keys: jax.Array | None, sample_index: Index, num_normals: int) -> jax.Array:
    """Points [1, s, num_normals] of sample_index int32 [s]; `keys` is ignored."""
    return jnp.take(_points(self, num_normals), sample_index, axis=1, mode='clip')


@functools.lru_cache(maxsize=16)
def _points(fixed: FixedPoints, num_normals: int) -> np.ndarray:
  # Also inside `jax.shard_map`, whose manual axes a constant does not have.
  no_mesh = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
  with jax.ensure_compile_time_eval(), no_mesh:
    draw = jax.jit(fixed.sampler, static_argnums=2)
    key = shared_key(jax.random.key(fixed.seed))
    return np.asarray(draw(key, jnp.arange(fixed.num_samples), num_normals))


SAMPLERS: dict[str, Sampler] = {'iid': iid, 'sobol': sobol}
