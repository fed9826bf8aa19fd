"""What the noise does in trained runs, as an analysis of an ablation."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from het_plugin.config import trained_run
from het_plugin.evaluation import class_covariance
from het_plugin.experiments import examples
from het_plugin.integrate import GaussianLogits, shared_key


@dataclasses.dataclass(frozen=True)
class NoiseEffect:
  """How large the noise is, and how much worse the same parameters predict without it:

    noise / tau: root of the mean variance of logits / tau over classes and examples, where what
      all classes of an example have in common, which the softmax does not see, is left out;
    NLL without noise: that of the noise-free logits less that of the run's own integrator, nats an
      example.

  Both are 0 for a deterministic head.

  Attributes:
    split: of the run's task.
    num_examples: at most; a fixed random choice of the split.

  Raises:
    ValueError: the head has no factors.
  """

  split: str = 'validation[50%:]'
  num_examples: int = 2048

  def __call__(self, run_dir: Path) -> dict[str, float]:
    run = trained_run.open_run(run_dir)
    reason = class_covariance.why_none(run.model.head)
    if reason and hasattr(run.model.head, 'num_factors'):  # not a deterministic one
      raise ValueError(f'NoiseEffect: {reason}')
    size = 16 * run.partitioner.data_shards  # rows are R + 1 times the size of logits
    parts = examples.per_example(
      run, lambda params, batch: _of_batch(run.model, params, batch), self.split,
      self.num_examples, size,
    )  # fmt: skip
    rows = list(parts)
    variance, without = (np.concatenate([x[k] for x in rows]) for k in ('variance', 'nll_rise'))
    return {
      'noise / tau': math.sqrt(variance.mean(dtype=np.float64)),
      'NLL without noise': without.mean(dtype=np.float64),
    }


def _of_batch(model, params, batch) -> dict[str, jax.Array]:
  """Of each example [B]: the variance, and how much the NLL rises."""
  logits = model.logits(params, batch)
  bare = logits.replace(covariance=None, projection=None)
  keys = shared_key(jax.random.key(0))  # ignored
  nll = model.eval_integrator.nll(bare, batch['label'], keys)
  nll_rise = nll + model.score_batch(params, batch)
  return {'variance': _variance(logits), 'nll_rise': nll_rise}


def _variance(logits: GaussianLogits) -> jax.Array:
  """Mean over classes of Var(logits - their mean over classes) / tau^2, [B]."""
  if logits.covariance is None:
    return jnp.zeros(len(logits.location))
  factors = logits.factors()[..., : logits.num_classes] / logits.temperature  # [B, R + 1, K]
  factors -= factors.mean(-1, keepdims=True)
  return jnp.square(factors).sum(1).mean(-1)
