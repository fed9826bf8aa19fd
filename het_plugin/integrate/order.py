"""The cost model: whether to project the factors and then sample, or to sample and then project."""

from het_plugin.integrate.gaussian import GaussianLogits, Hashed, Linear, Opaque

HASH_COST = 280  # multiply-adds in whose time one indexed element is moved there and back, on a CPU


def can_project_first(logits: GaussianLogits) -> bool:
  """Whether the factors have a form in logit space: not where get_logits is opaque or the remainder
  fills the noise space.
  """
  if logits.projection is None:
    return True
  return not isinstance(logits.projection, Opaque) and logits.covariance.remainder == 'rank_one'


def pick_order(logits: GaussianLogits, num_samples: int) -> str:
  """The evaluation order with fewer multiply-adds an example.

  With the linear projection (HET-XL), S samples, R factors, Q noise dimensions and K classes:

      sample then project   S (R + 1) Q + S Q K
      project then sample   (R + 1) Q K + S (R + 1) K

  Only the first is open where `can_project_first` is not. Without a projection (HET, Q = K) it
  makes S samples as large as the factors are, so the smaller number wins. For a hash (HET-H), which
  moves an element in the time of c = `HASH_COST` multiply-adds:

      sample then project   S (R + 1) H + c S K
      project then sample   c (R + 1) K + S (R + 1) K
  """
  covariance, projection = logits.covariance, logits.projection
  if not can_project_first(logits):
    return 'sample_then_project'
  factors = covariance.num_factors + 1
  classes = logits.location.shape[-1]
  noise_dim = covariance.diag.shape[-1]
  match projection:
    case Linear():
      sample_first = num_samples * (factors * noise_dim + noise_dim * classes)
      project_first = factors * noise_dim * classes + num_samples * factors * classes
    case Hashed():
      sample_first = num_samples * (factors * noise_dim + HASH_COST * classes)
      project_first = (HASH_COST + num_samples) * factors * classes
    case None:
      sample_first, project_first = num_samples, factors
  return 'sample_then_project' if sample_first < project_first else 'project_then_sample'
