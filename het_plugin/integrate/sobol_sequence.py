"""Sobol's digital sequence in base 2, up to 64 dimensions, by the direction numbers of Joe and Kuo.

S. Joe and F. Y. Kuo, "Constructing Sobol sequences with better two-dimensional projections", SIAM
Journal on Scientific Computing 30 (2008), table new-joe-kuo-6.21201: the one scipy.stats.qmc uses.
"""

import jax
import jax.numpy as jnp
import numpy as np

# One entry per dimension from the second on: the primitive polynomial over GF(2), as the bits of
# its coefficients, and as many initial direction numbers m_1, m_2, ... as its degree.
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
