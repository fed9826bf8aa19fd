"""The fixed hash of HET-H (section 6.1, appendix A.3): class ids to buckets."""

import numpy as np


def class_buckets(num_classes: int, num_buckets: int, seed: int = 0) -> np.ndarray:
  """h(k) for k < num_classes: int32 [num_classes] in [0, num_buckets).

  The finaliser of splitmix64 mixes (seed, k). The bucket of a class does therefore not depend on
  the version of a random number generator or on the number of classes.
  """
  x = np.arange(num_classes, dtype=np.uint64) + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
  for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
    x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)  # wraps modulo 2^64
  x ^= x >> np.uint64(31)
  return (x % np.uint64(num_buckets)).astype(np.int32)
