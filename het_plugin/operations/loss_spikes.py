"""Reports steps whose loss stands out from those before it."""

import collections
import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from het_plugin.training import metric_writers, run_files

_log = logging.getLogger(__name__)

# Of the normal distribution, whose standard deviation is this times its median absolute deviation.
_STD_OVER_MAD = 1.4826


@dataclasses.dataclass(frozen=True)
class LossSpikes:
  """When a loss is a spike: above median + max(threshold * 1.4826 * MAD, min_rise * |median|).

  The median and the median absolute deviation (MAD) are those of the last `window` steps.

  Attributes:
    window: steps to compare with.
    min_history: steps before the first comparison, after each start of the run.
    threshold: in robust standard deviations, 1.4826 * MAD.
    min_rise: part of the median by which a spike is above it in any case, for losses that hardly
      vary.
    min_period: steps from one report to the next.
  """

  window: int = 200
  min_history: int = 50
  threshold: float = 8.0
  min_rise: float = 0.05
  min_period: int = 100

  def __post_init__(self):
    if not 1 <= self.min_history <= self.window:
      raise ValueError(
        f'LossSpikes.min_history={self.min_history} must be at least 1 and at most '
        f'LossSpikes.window={self.window}.'
      )
    if self.threshold <= 0:
      raise ValueError(f'LossSpikes.threshold={self.threshold} must be positive.')


class SpikeReport:
  """Logs spikes and appends each as a line to a file: {step, loss, median, threshold, ...}."""

  def __init__(self, cfg: LossSpikes, path: epath.PathLike, resume_step: int):
    """Lines of steps after `resume_step` are dropped: the run goes through these again."""
    self._cfg = cfg
    self._path = epath.Path(path)
    self._losses: collections.deque[float] = collections.deque(maxlen=cfg.window)
    self._next_step = 0
    if jax.process_index() == 0:
      metric_writers.drop_later_lines(self._path, resume_step)

  def add(self, step: int, loss: float, details: Callable[[], Mapping[str, Any]]) -> None:
    """Takes the finite loss of a step; all processes call it, with the same values.

    Args:
      step: counted from 1.
      loss: of the step.
      details: more of the line, asked for when there is one.
    """
    spike = self._spike(loss)
    self._losses.append(loss)
    if spike is None or step < self._next_step:
      return
    self._next_step = step + self._cfg.min_period
    row = {'step': step, 'loss': loss, **spike, **details()}
    _log.warning(
      'Loss spike: %.4g at step %d, where the median is %.4g and a spike begins at %.4g. See %s.',
      *(loss, step, spike['median'], spike['threshold'], self._path),
    )
    if jax.process_index() == 0:
      run_files.append_text(self._path, json.dumps(row) + '\n')

  def _spike(self, loss: float) -> dict[str, float] | None:
    if len(self._losses) < self._cfg.min_history:
      return None
    losses = np.asarray(self._losses)
    median = _median(losses)
    rise = self._cfg.min_rise * abs(median)
    if loss <= median + rise:  # nearly always; it saves the other median
      return None
    rise = max(rise, self._cfg.threshold * _STD_OVER_MAD * _median(np.abs(losses - median)))
    return {'median': median, 'threshold': median + rise} if loss > median + rise else None


def _median(values: np.ndarray) -> float:
  # Every step pays for it, and np.median takes several times as long.
  low, high = (len(values) - 1) // 2, len(values) // 2
  ordered = np.partition(values, (low, high))
  return float((ordered[low] + ordered[high]) / 2)
