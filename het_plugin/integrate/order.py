"""How the samples of a call are computed: in which order, how many at once, on which devices."""

import dataclasses
import math

from het_plugin.integrate.gaussian import GaussianLogits, Hashed, Linear, Opaque
from het_plugin.integrate.placement import Placement, bytes_per_device, num_shards
from het_plugin.integrate.samplers import Sampler

# Samples per factor up to which sampling first takes less CPU time than projecting first (K = 5000,
# B = 8): of HET, of HET-H, where a hash moves every sample, and of HET-H with a full V(x), where it
# moves every factor too.
SAMPLES_PER_FACTOR = 0.7
HASHED_SAMPLES_PER_FACTOR = 0.25
HASHED_SAMPLES_PER_FULL_FACTOR = 1.0
# As many samples per factor need no budget, because factors have none either.
SAMPLES_AT_ONCE = 1.5
# Samples at one time; their logits and exponentials take about as much memory as the factors.
MAX_CHUNK = 32


@dataclasses.dataclass(frozen=True)
class Plan:
  """How the samples are computed (static under jit).

  Attributes:
    num_samples: S.
    chunk_size: samples whose logits exist at one time.
    sampler: source of the normals.
    project_first: whether the factors are projected instead of the samples.
    placement: how batch and classes are cut over devices.
  """

  num_samples: int
  chunk_size: int
  sampler: Sampler
  project_first: bool
  placement: Placement

  @property
  def num_chunks(self) -> int:
    return -(-self.num_samples // self.chunk_size)


def make_plan(
  logits: GaussianLogits,
  num_samples: int,
  sampler: Sampler,
  order: str,
  chunk_size: int | None,
  chunk_bytes: int,
) -> Plan:
  """The plan for these logits; arguments are those of `Integrator`."""
  has_factors = logits.has_factors
  if order == 'project_then_sample' and not has_factors and logits.projection is not None:
    raise ValueError(
      "Integrator.order='project_then_sample' needs remainder='rank_one' and a known projection; "
      f'got remainder={logits.noise.remainder!r} and '
      f"projection={type(logits.projection).__name__}: use 'sample_then_project' or 'auto'"
    )
  order = pick_order(logits, num_samples) if order == 'auto' else order
  project_first = has_factors and order == 'project_then_sample'
  limit = chunk_size
  if limit is None:
    limit = min(MAX_CHUNK, max(1, chunk_bytes // bytes_per_device(logits.location)))
    most = SAMPLES_AT_ONCE * logits.noise.num_normals
    if has_factors and not project_first and num_samples <= most:
      limit = num_samples
  # Chunks of nearly equal size waste less of the last one.
  chunk_size = math.ceil(num_samples / math.ceil(num_samples / limit))
  return Plan(num_samples, chunk_size, sampler, project_first, placement_of(logits))


def placement_of(logits: GaussianLogits) -> Placement:
  """The placement; ValueError if the mesh does not divide the classes."""
  if isinstance(logits.projection, Opaque):
    return Placement()  # the layout of its classes is unknown
  num_classes = logits.location.shape[-1]
  shards = num_shards('vocab')
  if num_classes % shards:
    raise ValueError(
      f'{num_classes} (padded) classes do not divide into {shards} shards of the model axis: '
      f"set the head's class_multiple to a multiple of {shards}"
    )
  return Placement.current(logits.location.shape[0])


def pick_order(logits: GaussianLogits, num_samples: int) -> str:
  """The evaluation order that costs less.

  With the linear projection (HET-XL), S samples, R factors, Q noise dimensions and K classes:

      sample then project   S (R + 1) Q + S Q K
      project then sample   (R + 1) Q K + S (R + 1) K

  Without factors (`GaussianLogits.has_factors`) only the first is possible. Without a projection
  (HET) or with a hash (HET-H), the products are about equal in both orders, and the measured ratios
  decide (`SAMPLES_PER_FACTOR`).
  """
  if not logits.has_factors:
    return 'sample_then_project'
  covariance = logits.noise
  projection = logits.projection
  factors = covariance.num_factors + 1
  match projection:
    case Linear():
      classes = logits.location.shape[-1]
      noise_dim = covariance.diag.shape[-1]
      sample_first = num_samples * (factors * noise_dim + noise_dim * classes)
      project_first = factors * noise_dim * classes + num_samples * factors * classes
    case Hashed():
      is_full = covariance.scale is None
      most = HASHED_SAMPLES_PER_FULL_FACTOR if is_full else HASHED_SAMPLES_PER_FACTOR
      sample_first = num_samples
      project_first = most * factors
    case None:
      sample_first = num_samples
      project_first = SAMPLES_PER_FACTOR * factors
  return 'sample_then_project' if sample_first < project_first else 'project_then_sample'
