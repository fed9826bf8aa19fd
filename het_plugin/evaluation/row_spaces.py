"""How well the noise of a heteroscedastic head lies in the row space of W (appendix I.1, table 17).

The covariance of an example's logits is Q(x)^T Q(x). HET's Q(x) is anywhere in R^K, HET-XL's in the
span of the D rows of W. The smallest principal angle between both row spaces (Bjorck and Golub
1973) tells how far HET makes use of its freedom: its cosine is the largest singular value of the
product of orthonormal bases.

D pre-logits, K classes, R factors.
"""

import numpy as np
import scipy.linalg


def basis(rows: np.ndarray) -> np.ndarray:
  """An orthonormal basis of the row space of [N, K], float64 [rank, K]."""
  return scipy.linalg.orth(np.asarray(rows, np.float64).T).T


def cosine(basis_a: np.ndarray, basis_b: np.ndarray) -> float:
  """Cosine of the smallest principal angle between the spans of two `basis`es, [n, K] and [m, K].

  `scipy.linalg.subspace_angles` gives the same to rounding, and takes both bases anew every time.
  """
  return float(min(1.0, scipy.linalg.svdvals(basis_a @ basis_b.T)[0]))


def random_cosine(
  rng: np.random.Generator, pre_logits_dim: int, num_factors: int, num_classes: int
) -> float:
  """A draw of the cosine where W [D, K] is Gaussian and has nothing to do with Q [R, K].

  By rotation its law is that of a random R-dimensional subspace against one of D coordinates, so
  neither matrix is made.
  """
  factors = np.linalg.qr(rng.standard_normal((num_classes, num_factors)))[0]  # [K, R]
  return float(scipy.linalg.svdvals(factors[:pre_logits_dim])[0])
