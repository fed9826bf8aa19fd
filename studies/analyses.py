"""Analyses of trained runs for `Ablation.analysis`: folder of a run -> {name: value}."""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from het_plugin import runs
from het_plugin.evaluation import class_covariance
from het_plugin.integrate import GaussianLogits, example_keys, shared_key
from het_plugin.models import soft_labels
from het_plugin.runs.per_example import Columns

_log = logging.getLogger(__name__)

NLL_FILE = 'nll.npz'
INDEX = 'index'
_HELD_OUT = 'NLL, tau of held-out'


def _per_example(
  run: runs.Run,
  compute: Callable[[Any, Any], dict[str, jax.Array]],
  split: str,
  num_examples: int | None,
  rows_per_shard: int,
) -> Iterator[Columns]:
  """Results of at most `num_examples` of a split, a fixed random choice (None: all), by batch.

  `compute` maps (params, batch) to arrays with a row per example and is compiled.
  """
  batch_size = rows_per_shard * run.partitioner.data_shards
  compiled = run.per_example(compute, compute)
  with run.open_split(split, num_examples, batch_size=batch_size) as (batches, _):
    yield from compiled(run.params, batches, batch_size, num_examples)


@dataclasses.dataclass(frozen=True)
class NoiseEffect:
  """The size of the noise, and how much worse the same parameters predict without it.

    noise / tau: root of the mean variance of logits / tau over classes and examples, without the
      part that all classes of an example share, to which the softmax is invariant;
    NLL without noise: NLL of the noise-free logits minus the NLL of the run's own integrator, nats
      per example.

  Both are 0 for a deterministic head.

  Attributes:
    split: split of the run's task.
    num_examples: largest number of examples, a fixed random choice of the split.

  Raises:
    ValueError: the head has no factors.
  """

  split: str = 'validation[50%:]'
  num_examples: int = 2048

  def __call__(self, run_dir: Path) -> dict[str, float]:
    run = runs.open_run(run_dir)
    reason = class_covariance.why_none(run.model.head)
    if reason and hasattr(run.model.head, 'num_factors'):  # not a deterministic head
      raise ValueError(f'NoiseEffect: {reason}')

    def effect(params, batch):
      logits = run.model.logits(params, batch)
      bare = logits.replace(covariance=None, projection=None)
      ignored = shared_key(jax.random.key(0))
      nll = soft_labels.nll(run.model.eval_integrator, bare, batch, ignored)
      nll_rise = nll + run.model.score_batch(params, batch)
      return {'variance': _variance(logits), 'nll_rise': nll_rise}

    # Factors are R + 1 times the size of logits, so batches are small.
    rows = list(_per_example(run, effect, self.split, self.num_examples, rows_per_shard=16))
    variance, without = (np.concatenate([x[k] for x in rows]) for k in ('variance', 'nll_rise'))
    return {
      'noise / tau': math.sqrt(variance.mean(dtype=np.float64)),
      'NLL without noise': without.mean(dtype=np.float64),
    }


def _variance(logits: GaussianLogits) -> jax.Array:
  """Mean over classes of Var(logits - their mean over classes) / tau^2, [B]."""
  if logits.covariance is None:
    return jnp.zeros(len(logits.location))
  factors = logits.factors()[..., : logits.num_classes] / logits.temperature  # [B, R + 1, K]
  factors -= factors.mean(-1, keepdims=True)
  return jnp.square(factors).sum(1).mean(-1)


@dataclasses.dataclass(frozen=True)
class ExampleNLL:
  """The NLL of each example, also with a temperature that other examples have chosen.

    tau of held-out: tau times the power of 2^(1/4) from 1/2 to 2 with the least NLL on
      choose_split;
    NLL, tau of held-out: the NLL with it.

  Writes nll.npz into the folder, with 'NLL' and 'NLL, tau of held-out', float32 [N] in the order of
  the examples, and their ids 'index', int [N]. `Ablation` computes errors over examples from it.

  Attributes:
    split: split of the run's task.
    choose_split: examples that choose tau; tau is tried with the samples of training.
    num_examples: largest number of examples that choose tau, a fixed random choice.
  """

  split: str = 'validation[50%:]'
  choose_split: str = 'validation[:50%]'
  num_examples: int = 2048

  def __call__(self, run_dir: Path) -> dict[str, float]:
    run = runs.open_run(run_dir)

    def nlls_of(split, count, integrator, *scales):
      """[N, len(scales)] in the order of the examples, their ids [N], and tau."""

      def nlls(params, batch):
        logits = run.model.logits(params, batch)
        keys = example_keys(jax.random.key(run.model.eval_seed), batch['index'])

        def scaled(scale):
          changed = logits.replace(temperature=scale * logits.temperature)
          return soft_labels.nll(integrator, changed, batch, keys)

        return {
          'nll': jax.lax.map(scaled, jnp.array(scales)).T,
          'tau': jnp.broadcast_to(logits.temperature, len(batch['index'])),
        }

      rows = list(_per_example(run, nlls, split, count, rows_per_shard=128))
      index, nll, tau = (np.concatenate([x[k] for x in rows]) for k in ('index', 'nll', 'tau'))
      order = np.argsort(index)
      return nll[order], index[order], float(tau[0])

    scales = 2 ** (np.arange(-4, 5) / 4)
    rule = run.model.train_integrator
    tried, _, tau = nlls_of(self.choose_split, self.num_examples, rule, *scales)
    best = float(scales[tried.mean(0, dtype=np.float64).argmin()])
    if best in (scales[0], scales[-1]):
      _log.warning('%s: the best tau, %g, is at an end of those tried.', run_dir, best * tau)
    found, index, _ = nlls_of(self.split, None, run.model.eval_integrator, 1.0, best)
    nlls = {'NLL': found[:, 0], _HELD_OUT: found[:, 1]}
    np.savez(run_dir / NLL_FILE, **{INDEX: index}, **nlls)
    return {
      _HELD_OUT: found[:, 1].mean(dtype=np.float64),
      'tau of held-out': best * tau,
    }


@dataclasses.dataclass(frozen=True)
class RowSpaceAlignment:
  """Alignment of the noise with W (table 17).

  This is the cosine of the smallest principal angle between the row spaces of W and of Q(x), all
  R + 1 factors of the noise in logit space: mean and standard deviation over examples, and both for
  a Gaussian W instead.

  Attributes:
    split: split of the run's task.
    num_examples: largest number of examples, a fixed random choice of the split.

  Raises:
    ValueError: the head has no factors.
  """

  split: str = 'validation'
  num_examples: int = 256

  def __call__(self, run_dir: Path) -> dict[str, float]:
    run = runs.open_run(run_dir)
    if reason := class_covariance.why_none(run.model.head):
      raise ValueError(f'RowSpaceAlignment: {reason}')
    kernel = np.asarray(run.params['head']['kernel'])[:, : run.model.head.num_classes]  # [D, K]
    random = np.random.default_rng(0).standard_normal(kernel.shape)
    w_bases = [row_space(w) for w in (kernel, random)]
    q_bases = map(row_space, self._factors(run))
    found = np.array([[largest_cosine(w, q) for w in w_bases] for q in q_bases])  # [N, 2]
    mean = found.mean(axis=0)
    std = found.std(axis=0)
    return {
      'cos SPA': mean[0],
      'std': std[0],
      'cos SPA, random W': mean[1],
      'std, random W': std[1],
    }

  def _factors(self, run: runs.Run) -> Iterator[np.ndarray]:
    """Q(x) [R + 1, K] of each example."""
    num_classes = run.model.head.num_classes

    def factors(params, batch):
      return {'factors': run.model.logits(params, batch).factors()[..., :num_classes]}

    for rows in _per_example(run, factors, self.split, self.num_examples, rows_per_shard=4):
      yield from rows['factors']


def row_space(rows: np.ndarray) -> np.ndarray:
  """An orthonormal basis of the row space of [N, K], float64 [rank, K]."""
  return scipy.linalg.orth(np.asarray(rows, np.float64).T).T


def largest_cosine(basis_a: np.ndarray, basis_b: np.ndarray) -> float:
  """Cosine of the smallest principal angle between the spans of two bases, [n, K] and [m, K].

  This is the largest singular value of their product (Bjorck and Golub 1973).
  """
  return float(min(1.0, scipy.linalg.svdvals(basis_a @ basis_b.T)[0]))
