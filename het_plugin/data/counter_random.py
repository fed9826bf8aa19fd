"""Counter-based random numbers for whole batches: a draw is a pure function of (key, counter).

The generator is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a Weyl sequence through a 64-bit
finaliser. Every example has its own key, so its draws do not depend on its batch or on earlier
draws.
"""

import functools
import statistics

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mix(state: np.ndarray) -> np.ndarray:
  """SplitMix64's finaliser: a bijection on uint64 arrays of any shape."""
  state = (state ^ (state >> np.uint64(30))) * _MIX_1
  state = (state ^ (state >> np.uint64(27))) * _MIX_2
  return state ^ (state >> np.uint64(31))


def fold(key: np.ndarray, data: np.ndarray | int) -> np.ndarray:
  """Derives new uint64 keys from keys and integers, broadcast against each other (rank >= 1)."""
  data = np.atleast_1d(np.asarray(data)).astype(np.uint64)
  return mix(key + (data + np.uint64(1)) * _GOLDEN)


def base_key(*words: int) -> np.ndarray:
  """One key, uint64 [1], named by non-negative integers such as (seed, split)."""
  key = np.zeros(1, np.uint64)
  for word in words:
    key = fold(key, word)
  return key


def uniform(key: np.ndarray, num_draws: int) -> np.ndarray:
  """Float32 draws in [0, 1), [B, num_draws], from keys uint64 [B]."""
  bits = fold(key[:, None], np.arange(num_draws))  # [B, num_draws]
  return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def standard_normal(key: np.ndarray, num_draws: int) -> np.ndarray:
  """N(0, 1) draws at 16 bits of resolution, float32 [B, num_draws], from keys uint64 [B]."""
  words = fold(key[:, None], np.arange(-(-num_draws // 4)))  # each holds four 16-bit draws
  return _normal_quantiles().take(words.view(np.uint16)[:, :num_draws])


def permutation(key: np.ndarray, size: int) -> np.ndarray:
  """The permutation of range(size), int64 [size], named by one key uint64 [1]."""
  return np.argsort(fold(key, np.arange(size)), kind='stable')


@functools.cache
def _normal_quantiles() -> np.ndarray:
  """The midpoints' quantiles of N(0, 1) cut into 2^16 equally likely parts, float32 [65536]."""
  inverse_cdf = statistics.NormalDist().inv_cdf
  return np.array([inverse_cdf((i + 0.5) / 2**16) for i in range(2**16)], np.float32)
