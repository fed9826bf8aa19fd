"""RankMe, the effective rank of representations, which needs no labels.

Garrido et al. 2023, "RankMe: assessing the downstream performance of pretrained self-supervised
representations by their rank" (https://arxiv.org/abs/2210.02885), eq. 1: for the singular values
sigma_1 .. sigma_r, r = min(N, D), of the representations Z [N, D], not centred,

    p_k = sigma_k / sum_j sigma_j + eps,   RankMe(Z) = exp(-sum_k p_k log p_k),   eps = 1e-7.

According to the paper 25,600 examples are enough for D = 2048.
"""

import numpy as np
import scipy  # which imports its `linalg` when it is first used

EPS = 1e-7
MAX_EXAMPLES = 25_600


def singular_values(features: np.ndarray, max_examples: int = MAX_EXAMPLES) -> np.ndarray:
  """Singular values of features, finite float [N, D]: float64 [min(N, D)], descending.

  They are computed from the features themselves, because the eigenvalues of the Gram matrix lose
  singular values below 1e-8 of the largest. If there are more than `max_examples` rows, a random
  choice is taken, which depends on N only.
  """
  if len(features) > max_examples:
    # The raw stream: numpy keeps it across versions, which it does not promise for permutation().
    bits = np.random.PCG64(np.random.SeedSequence([0, len(features)])).random_raw(len(features))
    features = features[np.sort(np.argsort(bits, kind='stable')[:max_examples])]
  features = np.asarray(features)
  if not features.any():
    raise ValueError(f'all {len(features)} rows of the features are zero; they have no rank')
  return scipy.linalg.svdvals(features.astype(np.float64), overwrite_a=True)


def rankme(sigma: np.ndarray) -> float:
  """Eq. 1 of the paper: the exponential of the entropy of normalised singular values.

      >>> import numpy as np
      >>> from het_plugin.measures import rankme
      >>> x = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
      >>> round(rankme.rankme(rankme.singular_values(x)), 3)
      2.0

  Args:
    sigma: float [r], at least 0 and not all 0 (`singular_values`).

  Returns:
    The effective rank, in [1, r] apart from eps.
  """
  p = sigma / sigma.sum() + EPS
  return float(np.exp(-(p * np.log(p)).sum()))
