"""Correlations between the logits of classes under a heteroscedastic head, for a given image.

The head's logits are Gaussian, location + z F(x) with F [R + 1, K] (`GaussianLogits.factors`), so
Sigma(x) = F^T F. The covariance of class c with all others is F[:, c]^T F, so the K x K matrix
Sigma is never built. The temperature cancels in a correlation. With HET-XL, F = F'(x) W: classes
correlate because of the covariance in the pre-logits and because their columns of W are alike.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:  # the report of estimators does not need what a run needs
  from het_plugin.runs.run import Run

PyTree = Any
_OF_ROW = ('image', 'top', 'log_prob', 'correlation', 'with_anchor')


@dataclasses.dataclass(frozen=True, eq=False)
class ClassCovariance:
  """The class correlations of one image."""

  index: int  # the example's id
  label: int  # its first label, -1 if it has none
  image: np.ndarray  # float32 [H, H, C], levels in [-1, 1]
  top: np.ndarray  # int [m], the most probable classes in order
  log_prob: np.ndarray  # float32 [m] of these
  correlation: np.ndarray  # float32 [m, m] of their logits; 1 on the diagonal
  anchor: int  # the label's class; without a label the most probable one
  with_anchor: np.ndarray  # float32 [K], correlations of all classes with the anchor


def why_none(head: Any) -> str | None:
  """Why a head has no class correlations, in one sentence; None if it has them."""
  name = type(head).__name__
  if not hasattr(head, 'num_factors'):
    return f'{name} is deterministic: it has no covariance between classes.'
  if getattr(head, 'get_logits', None) is not None:
    return f'{name} with get_logits maps the noise by a function that has no factors.'
  if head.remainder != 'rank_one':
    return f'{name}.remainder={head.remainder!r} has no factors: only rank_one is supported.'
  return None


def look(
  run: 'Run',
  batches: Iterable[Mapping[str, np.ndarray]],
  batch_size: int,
  number: int | None = None,
  index: Sequence[int] = (),
  num_top: int = 8,
) -> list[ClassCovariance]:
  """The class correlations of some examples; every process calls it.

  Args:
    run: its head has factors, see `why_none`.
    batches: whole batches of a split, the same on every process.
    batch_size: rows of the batches; few, because factors are R + 1 times as large as logits.
    number: number of examples to take from the start; None takes the examples in `index`.
    index: ids of the examples to take, in this order.
    num_top: m, the number of most probable classes, at most K.
  """
  model = run.model
  if reason := why_none(model.head):
    raise ValueError(reason)
  num_classes = model.head.num_classes

  def compute(params: PyTree, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    log_prob = model.predictive(params, batch)['log_prob']
    factors = model.logits(params, batch).factors()[..., :num_classes]  # [B, R + 1, K]
    top_log_prob, top = jax.lax.top_k(log_prob, min(num_top, num_classes))
    label = batch['label'][:, 0]
    # Not a slice of `top`, for which XLA sorts all classes on a CPU.
    anchor = jnp.where(label < 0, log_prob.argmax(axis=-1), label)
    among = correlations(factors, top)  # [B, m, K]
    return {
      'image': batch['image'],
      'top': top,
      'log_prob': top_log_prob,
      'correlation': jnp.take_along_axis(among, top[:, None], axis=-1),  # [B, m, m]
      'anchor': anchor,
      'with_anchor': correlations(factors, anchor[:, None])[:, 0],
    }

  def wanted(ids: np.ndarray) -> np.ndarray:
    return np.isin(ids, index) if number is None else np.ones(len(ids), bool)

  own = run.partitioner.batch_rows(batch_size)
  local = (
    {name: x[own] for name, x in batch.items()} for batch in batches if wanted(batch['index']).any()
  )
  found = {}
  bound = len(set(index)) if number is None else number
  compiled = run.per_example(compute, compute)
  for rows in compiled(run.params, local, batch_size):
    for i in np.flatnonzero(wanted(rows['index'])):
      index_of_row = int(rows['index'][i])
      found[index_of_row] = ClassCovariance(
        index=index_of_row,
        label=int(rows['label'][i, 0]),
        anchor=int(rows['anchor'][i]),
        **{name: rows[name][i] for name in _OF_ROW},  # a batch may say more of its examples
      )
    if len(found) >= bound:
      break
  if missing := sorted(set(index) - set(found)):
    raise ValueError(f'there is no example with id {missing[0]}')
  return [found[i] for i in index] if number is None else list(found.values())[:number]


def correlations(factors: jax.Array, classes: jax.Array) -> jax.Array:
  """Correlations of some logits with all: [B, m, K] from factors [B, R + 1, K] and classes [B, m].

  The correlation with a class without variance is undefined; 0 is returned.
  """
  largest = jnp.abs(factors).max(axis=1, keepdims=True)  # [B, 1, K]
  factors = factors / jnp.where(largest > 0, largest, 1.0)  # their squares are in float32's range
  norm = jnp.sqrt(jnp.square(factors).sum(axis=1, keepdims=True))  # [B, 1, K]
  unit = jnp.where(norm > 0, factors / jnp.where(norm > 0, norm, 1.0), 0.0)
  picked = jnp.take_along_axis(unit, classes[:, None], axis=-1)  # [B, R + 1, m]
  return jnp.clip(jnp.einsum('brm,brk->bmk', picked, unit, precision='highest'), -1.0, 1.0)
