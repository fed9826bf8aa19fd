"""Evaluates a model's metrics on a data set while it trains."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

from het_plugin.training import metrics as metrics_lib
from het_plugin.training import partitioning, prefetch
from het_plugin.training import step as step_lib
from het_plugin.training.state import TrainState


class Evaluator:
  """Runs a model's `eval_fn` over a data set, each time from its beginning."""

  def __init__(
    self,
    task: str,
    iterator: Any,
    batch_size: int,
    max_batches: int | None,
    partitioner: partitioning.PjitPartitioner,
  ):
    """Keeps the iterator and its current state, to which every evaluation returns.

    Rows with mask 0 do not count. `max_batches` is None for the whole data set, if it is finite.
    """
    if iterator.num_batches == 0:
      raise ValueError(f'The evaluation data set {task!r} has no batch.')
    if max_batches is None and iterator.num_batches is None:
      raise ValueError(f'The evaluation data set {task!r} is endless; it must have an end.')
    self.task = task
    self._iterator = iterator
    self._start = iterator.get_state()
    self._batch_size = batch_size
    self._max_batches = max_batches
    self._partitioner = partitioner

  def trace(self, trainer: step_lib.Trainer, train_state: TrainState) -> tuple[str, ...]:
    """Names of the metrics; raises the errors of a model that cannot be evaluated on this data set.

    It computes nothing on the data.
    """
    batch = self._partitioner.batch_spec(self._iterator.element_spec)
    return metrics_lib.names_of(trainer.trace_eval(train_state.eval_params, batch).out_info)

  def run(
    self, trainer: step_lib.Trainer, train_state: TrainState, interrupted: Callable[[], bool]
  ) -> dict[str, float] | None:
    """Metrics over the data set; None if `interrupted()`, asked before each batch, is True."""
    in_flight = metrics_lib.InFlight(self._partitioner.mesh)
    batch_metrics = []
    self._iterator.set_state(self._start)
    with prefetch.DevicePrefetcher(self._iterator, self._partitioner, self._batch_size) as batches:
      for batch in itertools.islice(batches, self._max_batches):
        if interrupted():
          return None
        batch_metrics += in_flight.push(trainer.eval_step(train_state, batch))
    batch_metrics += in_flight.drain()
    return metrics_lib.compute_metrics(functools.reduce(metrics_lib.merge_metrics, batch_metrics))
