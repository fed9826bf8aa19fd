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

Index = jax.Array | np.ndarray  # a constant where it is known
# (keys [B], sample indices [s], number of normals) -> [B, s, number of normals]
Sampler = Callable[[jax.Array, Index, int], jax.Array]

# Coefficients of erfinv(x) / x, highest power first: of w - 2.5, and of sqrt(w) - 3 in the tail.
_CENTRE = (
  2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
  -0.00125372503, -0.00417768164, 0.246640727, 1.50140941,
)  # fmt: skip
_TAIL = (
  -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773,
  -0.0076224613, 0.00943887047, 1.00167406, 2.83297682,
)  # fmt: skip


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
    ValueError: key is no key, or index is no array of integers [B].
  """
  shape = jnp.shape(index)
  dtype = jnp.result_type(index)
  if len(shape) != 1 or not jnp.issubdtype(dtype, jnp.integer):
    raise ValueError(
      f'example_keys: index must be integers [B], one per example; got {dtype} {shape}'
    )
  return jax.vmap(jax.random.fold_in, (None, 0))(_one_key('example_keys', key), index)


def shared_key(key: jax.Array) -> jax.Array:
  """A typed or raw PRNG key as typed keys [1], which an integrator uses for all examples."""
  return _one_key('shared_key', key)[None]


def _one_key(owner: str, key: jax.Array) -> jax.Array:
  """A typed or raw key as a typed one of the kind 'threefry2x32'."""
  dtype = getattr(key, 'dtype', None)
  is_typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
  if not (is_typed and key.ndim == 0) and not (dtype == np.uint32 and key.ndim == 1):
    found = type(key).__name__ if dtype is None else f'{dtype} {list(key.shape)}'
    raise ValueError(f'{owner}: key must be one PRNG key, such as jax.random.key(0); got {found}')
  return _threefry(key)


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


# Sobol's sequence

# Of Sobol's sequence by S. Joe and F. Y. Kuo, "Constructing Sobol sequences with better
# two-dimensional projections", SIAM Journal on Scientific Computing 30 (2008), table
# new-joe-kuo-6.21201, which scipy.stats.qmc uses. One entry per dimension from the second on: the
# primitive polynomial over GF(2), as the bits of its coefficients, and as many initial direction
# numbers m_1, m_2, ... as its degree.
_JOE_KUO = """
  3,1; 7,1,3; 11,1,3,1; 13,1,1,1; 19,1,1,3,3; 25,1,3,5,13; 37,1,1,5,5,17; 41,1,1,5,5,5;
  47,1,1,7,11,19; 55,1,1,5,1,1; 59,1,1,1,3,11; 61,1,3,5,5,31; 67,1,3,3,9,7,49;
  91,1,1,1,15,21,21; 97,1,3,1,13,27,49; 103,1,1,1,15,7,5; 109,1,3,1,15,13,25; 115,1,1,5,5,19,61;
  131,1,3,7,11,23,15,103; 137,1,3,7,13,13,15,69; 143,1,1,3,13,7,35,63; 145,1,3,5,9,1,25,53;
  157,1,3,1,13,9,35,107; 167,1,3,1,5,27,61,31; 171,1,1,5,11,19,41,61; 185,1,3,5,3,3,13,69;
  191,1,1,7,13,1,19,1; 193,1,3,7,5,13,19,59; 203,1,1,3,9,25,29,41; 211,1,3,5,13,23,1,55;
  213,1,3,7,3,13,59,17; 229,1,3,1,3,5,53,69; 239,1,1,5,5,23,33,13; 241,1,1,7,7,1,61,123;
  247,1,1,7,9,13,61,49; 253,1,3,3,5,3,55,33; 285,1,3,1,15,31,13,49,245;
  299,1,3,5,15,31,59,63,97; 301,1,3,1,11,11,11,77,249; 333,1,3,1,11,27,43,71,9;
  351,1,1,7,15,21,11,81,45; 355,1,3,7,3,25,31,65,79; 357,1,3,1,1,19,11,3,205;
  361,1,1,5,9,19,21,29,157; 369,1,3,7,11,1,33,89,185; 391,1,3,3,3,15,9,79,71;
  397,1,3,7,11,15,39,119,27; 425,1,1,3,1,11,31,97,225; 451,1,1,1,3,23,43,57,177;
  463,1,3,7,7,17,17,37,71; 487,1,3,1,5,27,63,123,213; 501,1,1,3,5,11,43,53,133;
  529,1,3,5,5,29,17,47,173,479; 539,1,3,3,11,3,1,109,9,69; 545,1,1,1,5,17,39,23,5,343;
  557,1,3,1,5,25,15,31,103,499; 563,1,1,1,11,11,17,63,105,183; 601,1,1,5,11,9,29,97,231,363;
  607,1,1,5,15,19,45,41,7,383; 617,1,3,7,7,31,19,83,137,221; 623,1,1,1,3,23,15,111,223,83;
  631,1,1,5,13,31,15,55,25,161; 637,1,1,3,13,25,47,39,87,257
"""


def _direction_numbers() -> np.ndarray:
  """uint32 [32, 64]: entry j of a dimension is XORed into a point whose index has bit j."""
  columns = [[1] * 32]  # the first dimension is the van der Corput sequence
  for entry in _JOE_KUO.split(';'):
    polynomial, *m = map(int, entry.split(','))
    degree = len(m)
    for j in range(degree, 32):
      value = m[j - degree]
      for k in range(1, degree + 1):
        if polynomial >> (degree - k) & 1:
          value ^= m[j - k] << k
      m.append(value)
    columns.append(m)
  shift = 31 - np.arange(32, dtype=np.uint32)
  return np.array(columns, np.uint32).T << shift[:, None]


DIRECTION_NUMBERS = _direction_numbers()
MAX_DIMENSIONS = DIRECTION_NUMBERS.shape[1]


def scrambled_directions(bits: jax.Array, num_digits: int = 32) -> jax.Array:
  """Direction numbers [num_digits, d] under random lower triangular matrices over GF(2).

  Matousek 1998.

  Args:
    bits: random uint32 [d, 32].
    num_digits: binary digits of the largest index.
  """
  unit = np.uint32(1) << np.arange(31, -1, -1, dtype=np.uint32)
  columns = (bits & (unit - 1)) | unit  # [d, 32], what a set digit becomes
  digits = (DIRECTION_NUMBERS[:num_digits, : len(bits), None] & unit) > 0  # [num_digits, d, 32]
  chosen = jnp.where(digits, columns, np.uint32(0))
  return jax.lax.reduce(chosen, np.uint32(0), jax.lax.bitwise_xor, (2,))


def sobol_points(index: jax.Array | np.ndarray, directions: jax.Array) -> jax.Array:
  """Points of the sequence by their index, in units of 2^-32.

  Point i is the XOR of the direction numbers of the bits of i, so it needs no earlier point.
  Generators that step through Gray codes (scipy's) visit the same points in another order: their
  point j is ours at j ^ (j >> 1).

  Args:
    index: int [s], not negative.
    directions: uint32 [n, d], leading rows and columns of `DIRECTION_NUMBERS` or
      `scrambled_directions`, for indices below 2^n.

  Returns:
    uint32 [s, d].
  """
  digit = np.arange(len(directions), dtype=np.uint32)
  bits = (index[:, None].astype(np.uint32) >> digit) & 1  # [s, n]
  chosen = bits[:, :, None] * directions  # [s, n, d]
  return jax.lax.reduce(chosen, np.uint32(0), jax.lax.bitwise_xor, (1,))


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


def source(sampler: Sampler) -> Sampler:
  """What makes the points: that of `FixedPoints`, or the sampler itself."""
  return sampler.sampler if isinstance(sampler, FixedPoints) else sampler


@functools.lru_cache(maxsize=16)
def _points(fixed: FixedPoints, num_normals: int) -> np.ndarray:
  # Also inside `jax.shard_map`, whose manual axes a constant does not have.
  no_mesh = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
  with jax.ensure_compile_time_eval(), no_mesh:
    draw = jax.jit(fixed.sampler, static_argnums=2)
    key = shared_key(jax.random.key(fixed.seed))
    return np.asarray(draw(key, jnp.arange(fixed.num_samples), num_normals))


SAMPLERS: dict[str, Sampler] = {'iid': iid, 'sobol': sobol}
