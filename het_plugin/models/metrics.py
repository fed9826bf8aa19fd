"""Classification metrics as clu metrics; merging batches gives the metrics of all rows.

B examples, K classes; a mask float32 [B] is 1 for real rows and 0 for padding.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from clu import metrics as clu_metrics
from flax import struct

ENTROPY_BINS = 64  # by either entropy, in `DisagreementCorrelation`
NUM_BINS = 15  # Guo et al. 2017 and most of the literature since


@struct.dataclass
class ExpectedCalibrationError(clu_metrics.Metric):
  """Expected calibration error (Guo et al. 2017, https://arxiv.org/abs/1706.04599, eq. 3).

  The mean gap between confidence and accuracy over NUM_BINS bins of equal width, weighted by the
  number of rows. Bin m holds the confidences in (m / NUM_BINS, (m + 1) / NUM_BINS]; bin 0 also
  holds 0.
  """

  count: jax.Array  # float32 [NUM_BINS], rows per bin
  confidence: jax.Array  # float32 [NUM_BINS], sum of confidences per bin
  correct: jax.Array  # float32 [NUM_BINS], number of correct predictions per bin

  @classmethod
  def empty(cls) -> 'ExpectedCalibrationError':
    zeros = jnp.zeros((NUM_BINS,), jnp.float32)
    return cls(count=zeros, confidence=zeros, correct=zeros)

  @classmethod
  def from_model_output(
    cls, confidence: jax.Array, correct: jax.Array, mask: jax.Array | None = None, **_
  ) -> 'ExpectedCalibrationError':
    """Takes confidence [B] in [0, 1], correct [B] in {0, 1} and mask [B]."""
    mask = jnp.ones_like(confidence) if mask is None else mask.astype(jnp.float32)
    confidence = jnp.where(mask > 0, confidence, 0.0)  # a masked row may be NaN
    bins = jnp.clip(jnp.ceil(confidence * NUM_BINS) - 1, 0, NUM_BINS - 1).astype(jnp.int32)
    member = jax.nn.one_hot(bins, NUM_BINS, axis=0) * mask  # [NUM_BINS, B]
    return cls(
      count=member.sum(-1),
      confidence=(member * confidence).sum(-1),
      correct=(member * correct).sum(-1),
    )

  def merge(self, other: 'ExpectedCalibrationError') -> 'ExpectedCalibrationError':
    return jax.tree.map(jnp.add, self, other)

  def compute(self) -> jax.Array:
    return jnp.abs(self.correct - self.confidence).sum() / self.count.sum()


@struct.dataclass
class DisagreementCorrelation(clu_metrics.Metric):
  """Spearman's rank correlation of the entropy of predictions with that of people's labels.

  Ranks need all examples at once, and a metric that is merged does not have them. It counts
  examples by bins of both entropies instead, and the examples of a bin are ties. The bins are
  equally wide in the square root of the entropy over log K, so finer where predictions are certain.
  """

  absent_if_nan: ClassVar[bool] = True  # as where each example has one label

  # float32 [ENTROPY_BINS, ENTROPY_BINS], rows by bins of the predictions' entropy and of people's
  count: jax.Array

  @classmethod
  def from_model_output(
    cls, log_prob: jax.Array, target: jax.Array, num_classes: int, mask: jax.Array
  ) -> 'DisagreementCorrelation':
    """Takes log p and the shares of the labels, both [B, Kp], the real K, and mask [B]; rows
    without a label do not count.
    """

    def member(p: jax.Array) -> jax.Array:
      entropy = jax.scipy.special.entr(p).sum(-1) / jnp.log(num_classes)
      bins = jnp.floor(jnp.sqrt(jnp.clip(entropy, 0, 1)) * ENTROPY_BINS).astype(jnp.int32)
      return jax.nn.one_hot(jnp.minimum(bins, ENTROPY_BINS - 1), ENTROPY_BINS)  # [B, bins]

    real = mask * (target.sum(-1) > 0)
    of_model = member(jnp.exp(log_prob))
    of_people = member(target)
    # A sum, because JAX wants to be told the result of a product over an axis of explicit shards.
    pairs = of_model[:, :, None] * of_people[:, None, :] * real[:, None, None]  # [B, bins, bins]
    return cls(count=pairs.sum(axis=0))

  def merge(self, other: 'DisagreementCorrelation') -> 'DisagreementCorrelation':
    return dataclasses.replace(self, count=self.count + other.count)

  def compute(self) -> jax.Array:
    """The correlation; NaN where one of the entropies has a single bin."""
    total = self.count.sum()

    def centred_ranks(counts: jax.Array) -> jax.Array:
      return jnp.cumsum(counts) - counts / 2 - total / 2

    rows = self.count.sum(1)
    columns = self.count.sum(0)
    x = centred_ranks(rows)
    y = centred_ranks(columns)
    variances = (rows * x**2).sum() * (columns * y**2).sum()
    return x @ self.count @ y / jnp.sqrt(variances)


def base_metrics(
  nll: jax.Array, correct: jax.Array, tau: jax.Array, mask: jax.Array
) -> dict[str, clu_metrics.Metric]:
  """'loss', 'nll' and 'precision_at_1', means over the real rows, with their number as `count`; and
  'tau': a merge keeps its last value. nll, correct and mask are [B], tau is a scalar.
  """
  mean_nll = clu_metrics.Average.from_model_output(nll, mask=mask)
  return {
    'loss': mean_nll,
    'nll': mean_nll,
    'precision_at_1': clu_metrics.Average.from_model_output(correct, mask=mask),
    'tau': clu_metrics.LastValue.from_model_output(tau[None]),
  }
