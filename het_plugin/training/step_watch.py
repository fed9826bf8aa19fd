"""Looks at every training step by itself, once its metrics are on the host: those that are not
finite, and losses that stand out.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from het_plugin.training import loss_spikes, nonfinite
from het_plugin.training import metrics as metrics_lib
from het_plugin.training import step as step_lib


@dataclasses.dataclass(frozen=True)
class _Input:
  index: jax.Array | None  # of the global batch, on the devices
  dataset_state: Mapping[str, int]  # before the batch


class StepWatch:
  """Knows what the steps in flight were given, so that it can say so of one that went wrong."""

  def __init__(
    self,
    model_dir: epath.PathLike,
    resume_step: int,
    policy: nonfinite.NonFinitePolicy,
    num_skipped: int,
    spikes: loss_spikes.LossSpikes | None,
  ):
    """Takes the run's settings.

    Args:
      model_dir: of the run.
      resume_step: where this call of the run begins.
      policy: what to do at a step that is not finite.
      num_skipped: number of such steps that the run had before.
      spikes: what to report; None for nothing.
    """
    self._guard = nonfinite.NonFiniteGuard(policy, model_dir, num_skipped)
    self._spikes = None
    if spikes is not None:
      path = epath.Path(model_dir) / 'loss_spikes.jsonl'
      self._spikes = loss_spikes.SpikeReport(spikes, path, resume_step)
    self._inputs: dict[int, _Input] = {}

  @property
  def num_skipped(self) -> int:
    """Steps of the whole run whose update was left out; to be kept in checkpoints."""
    return self._guard.num_skipped

  @property
  def stop(self) -> nonfinite.NonFiniteStop | None:
    """What to raise to end the run; None while it goes on."""
    return self._guard.stop

  def dispatched(self, step: int, batch: step_lib.Batch, dataset_state: Mapping[str, int]) -> None:
    """Takes the batch of a step, and the state of the input iterator before it."""
    self._inputs[step] = _Input(batch.get('index'), dataset_state)

  def finished(
    self, step: int, metrics: metrics_lib.Metrics, now: Callable[[], nonfinite.RunState]
  ) -> None:
    """Takes the metrics of a step on the host; all processes call it for the same steps in order.

    Args:
      step: counted from 1.
      metrics: of the step.
      now: gives the run, which may have dispatched later steps; asked where the step is not finite.
    """
    given = self._inputs.pop(step)
    if not metrics_lib.is_finite(metrics):
      values = metrics_lib.compute_metrics(metrics)
      self._guard.report(step, values, _rows(given.index), given.dataset_state, now())
    elif self._spikes is not None:
      loss = float(metrics['loss'].compute())
      self._spikes.add(
        step,
        loss,
        lambda: {
          'gradient_norm': float(metrics['update'].compute()['gradient_norm']),
          'index': _rows(given.index),
        },
      )


def _rows(index: jax.Array | None) -> list[int] | None:
  """batch['index'] of the rows of all processes."""
  if index is None:
    return None
  return np.asarray(multihost_utils.process_allgather(index, tiled=True)).tolist()
