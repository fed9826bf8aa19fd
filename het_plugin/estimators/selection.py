"""How much noise to take, by the NLL of held-out rows: the one-standard-error rule."""

import numpy as np

# C_noise / C where nothing is chosen. For labels of people and of characters 0.001 to 0.3 was
# chosen, and 0.03 most often (studies/real_features/real_features.py).
NOISE_SHARE = 0.03
# The path of C_noise='auto' has the most noise first, because a search that starts with less noise
# than it needs may end on a plateau near DET.
NOISE_SHARES = (0.3, 0.1, 0.03, 0.01, 0.003)
HELD_OUT = 5  # one row in so many
MIN_HELD_OUT = 2  # rows: of one there is no standard error
HOPELESS = 3.0
MIN_GAIN = 1e-4  # nats: less is the tolerance of fits


def least_noise(noise: np.ndarray, nll: np.ndarray, weight: np.ndarray | None = None) -> int:
  """The number of the point with the least noise that is as good as the best one.

  It is the point of the least noise whose mean NLL is within a standard error of the least mean.
  The standard error is that of the paired difference over examples. See Breiman et al. (1984),
  Classification and Regression Trees, section 3.4.3.

      >>> noise = np.array([0.0, 0.1, 1.0])
      >>> nll = np.array([[1.1, 1.3, 1.2, 1.4], [1.0, 1.2, 1.1, 1.35], [0.9, 1.2, 1.2, 1.3]])
      >>> least_noise(noise, nll)
      1

  Args:
    noise: [points], C_noise, or another number that grows with the noise.
    nll: [points, N], NLL of held-out rows, nats.
    weight: [N]; None is 1 for each.
  """
  best = int(np.argmin(np.average(nll, axis=1, weights=weight)))
  close = [i for i in range(len(nll)) if i == best or is_close(nll[i], nll[best], weight)]
  return min(close, key=lambda i: (noise[i], i != best))


def is_close(nll: np.ndarray, best: np.ndarray, weight: np.ndarray | None = None) -> bool:
  """Whether the mean of NLLs [N] is a standard error, or `MIN_GAIN`, above the best at most."""
  mean, error = _difference(nll, best, weight)
  return mean <= max(error, MIN_GAIN)


def is_hopeless(nll: np.ndarray, best: np.ndarray, weight: np.ndarray | None = None) -> bool:
  """Whether the mean of NLLs [N] is more than `HOPELESS` standard errors above the best."""
  mean, error = _difference(nll, best, weight)
  return mean > max(HOPELESS * error, MIN_GAIN)


def _difference(nll, best, weight) -> tuple[float, float]:
  """The mean of the paired difference and its standard error."""
  weight = np.ones(len(nll)) if weight is None else weight
  difference = nll - best
  mean = np.average(difference, weights=weight)
  squares = np.square(weight * (difference - mean)).sum() / max(1 - 1 / len(weight), 0.5)
  return float(mean), float(np.sqrt(squares) / weight.sum())


def held_out_rows(label: np.ndarray, seed: int) -> np.ndarray:
  """Whether each row is held out, bool [N]: a fifth of each class, and never its only row.

  Args:
    label: int [N], classes of the rows.
    seed: of the order of the rows of a class.
  """
  order = np.random.default_rng(seed).permutation(len(label))
  order = order[np.argsort(label[order], kind='stable')]
  held_out = np.zeros(len(label), bool)
  held_out[order[HELD_OUT - 1 :: HELD_OUT]] = True
  kept = np.unique(label[~held_out])
  return held_out & np.isin(label, kept)
