"""Metrics of training steps: norms of the update, speed, and summaries over a period."""

import collections
import contextlib
import dataclasses
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import clu.metrics
import flax
import jax
import jax.numpy as jnp
import numpy as np

from het_plugin.training import flops as flops_lib

_log = logging.getLogger(__name__)

PyTree = Any
Metrics = dict[str, clu.metrics.Metric]

# Steps in flight when the host dispatches the next one. With one, the device starts on step n + 1
# while the host reads the metrics of step n.
MAX_STEPS_IN_FLIGHT = 1
# Virtual CPU devices share few threads. Collectives of steps in flight hold these threads while
# they wait for each other: with 8 devices on 2 cores, 0, 1 and 8 steps in flight take the same time
# per step, and 100 abort the process.
MAX_STEPS_IN_FLIGHT_CPU = 0

# Regular expressions that are matched at the beginning of a parameter's path ('head/covariance/J').
# The matched text names a group: here 'backbone', 'head', 'head/kernel', 'head/covariance'.
GROUPS = (r'[^/]+', r'head/[^/]+')


def is_metric(x: Any) -> bool:
  """Whether x is a metric of clu, a leaf of trees of metrics."""
  return isinstance(x, clu.metrics.Metric)


def merge_metrics(a: Metrics, b: Metrics) -> Metrics:
  """Merges two mappings of the same metrics; `a` is the earlier one."""
  return jax.tree.map(lambda x, y: x.merge(y), a, b, is_leaf=is_metric)


def is_finite(metrics: Metrics) -> bool:
  """Whether loss, gradient and update of a step were finite, from the metrics of `apply_grads`."""
  return bool(metrics['update'].finite)


def compute_metrics(metrics: Metrics) -> dict[str, float]:
  """Values of clu metrics; a metric whose value is a mapping gives one entry per key.

  A metric with `absent_if_nan` gives none if it is not defined for the examples.
  """
  values = {}
  for name, metric in metrics.items():
    value = metric.compute()
    if getattr(metric, 'absent_if_nan', False) and np.isnan(value):
      continue
    values |= value if isinstance(value, Mapping) else {name: value}
  return {name: float(value) for name, value in values.items()}


def names_of(shapes: PyTree) -> tuple[str, ...]:
  """The names that `compute_metrics` gives, of clu metrics with shapes in the place of arrays."""
  return tuple(compute_metrics(jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)))


@flax.struct.dataclass
class UpdateReport(clu.metrics.Metric):
  """Norms of a step; `merge` averages them over steps.

  All norms are in one array, because each array is fetched from the device after every step.
  """

  total: jax.Array  # float32 [len(names)], sums over the steps
  count: jax.Array  # int32 [], number of steps
  finite: jax.Array  # bool [], whether loss, gradient and update of all steps were finite
  names: tuple[str, ...] = flax.struct.field(pytree_node=False)

  @classmethod
  def from_norms(cls, norms: Mapping[str, jax.Array], finite: jax.Array) -> 'UpdateReport':
    """The report of one step from scalars by name."""
    total = jnp.stack([jnp.asarray(norm, jnp.float32) for norm in norms.values()])
    return cls(total=total, count=jnp.ones((), jnp.int32), finite=finite, names=tuple(norms))

  def merge(self, other: 'UpdateReport') -> 'UpdateReport':
    return self.replace(
      total=self.total + other.total,
      count=self.count + other.count,
      finite=self.finite & other.finite,
    )

  def compute(self) -> dict[str, jax.Array]:
    """{name: mean norm}."""
    return dict(zip(self.names, self.total / self.count, strict=True))


def norms(name: str, tree: PyTree, patterns: Sequence[str]) -> dict[str, jax.Array]:
  """{name: L2 norm of a tree, name/group: norm of a group of its leaves (GROUPS)}, scalars."""
  squares: dict[str, list[jax.Array]] = {name: []}  # each leaf once: tracing them takes time
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    path = jax.tree_util.keystr(path, simple=True, separator='/')
    square = jnp.sum(jnp.square(leaf))
    squares[name].append(square)
    for group in {match[0]: None for p in patterns if (match := re.match(p, path))}:
      squares.setdefault(f'{name}/{group}', []).append(square)
  return {key: jnp.sqrt(sum(terms)) for key, terms in squares.items()}


class InFlight:
  """A queue of device values that bounds how far the host runs ahead of the devices of a mesh."""

  def __init__(self, mesh: jax.sharding.Mesh):
    is_cpu = mesh.devices.flat[0].platform == 'cpu'
    self._limit = MAX_STEPS_IN_FLIGHT_CPU if is_cpu else MAX_STEPS_IN_FLIGHT
    self._queue: collections.deque[PyTree] = collections.deque()

  def push(self, value: PyTree) -> list[PyTree]:
    """Adds a value; returns those over the limit, oldest first, fetched to the host."""
    self._queue.append(value)
    return self.drain(self._limit)

  def drain(self, limit: int = 0) -> list[PyTree]:
    """Waits for all values, or for those over a limit."""
    done = []
    while len(self._queue) > limit:
      done.append(jax.device_get(self._queue.popleft()))
    return done


@dataclasses.dataclass(frozen=True)
class Summary:
  """Metrics of the steps up to `step` since the previous summary."""

  step: int
  values: dict[str, float]


class StepMetrics:
  """Merges the metrics of steps and summarises them every `period` steps.

  Steps that were not finite do not count. `nonfinite_steps` of a summary is their number, and the
  other metrics are NaN if there was no finite step.

  A summary also has these scalars, over the same steps and without the time spent in `paused`:
    timing/ms_per_step, timing/examples_per_second;
    timing/data_wait_share: share of the time in which the loop waited for its next batch;
    timing/mfu: model FLOPs utilisation, if the peak of the device is known.
  """

  def __init__(
    self,
    period: int,
    batch_size: int,
    flops_per_step: float,
    mesh: jax.sharding.Mesh,
    on_step: Callable[[int, Metrics], None],
    open_period: Mapping[str, Any] | None = None,
  ):
    """Starts the clock.

    Args:
      period: number of steps of a summary.
      batch_size: rows of a step, over all devices.
      flops_per_step: over all devices of `mesh`.
      mesh: the devices of the run.
      on_step: called with each step and its metrics as soon as they are on the host.
      open_period: the result of the method of this name, for a resumed run to continue from.
    """
    peak = flops_lib.peak_flops(mesh.devices.flat[0].device_kind)
    self._period = period
    self._batch_size = batch_size
    self._seconds_at_peak = None if peak is None else flops_per_step / (peak * mesh.size)
    self._on_step = on_step
    self._in_flight = InFlight(mesh)
    self._resumed = open_period  # until the next step shows which metrics there are
    self._start_period(time.monotonic())

  def _start_period(self, start: float) -> None:
    self._start = start
    self._merged: Metrics | None = None  # of the finite steps
    self._left_out: Metrics | None = None  # of the last step that was not finite
    self._steps = 0
    self._nonfinite_steps = 0
    self._data_wait = 0.0

  def add(self, step: int, metrics: Metrics, data_wait: float) -> list[Summary]:
    """Takes the metrics of a step, on the device, and the seconds it waited for data.

    Returns the summaries that are due. They are due when the metrics of their last step are on the
    host, up to MAX_STEPS_IN_FLIGHT steps later.
    """
    return self._collect(self._in_flight.push((step, data_wait, metrics)))

  def drain(self) -> list[Summary]:
    """Waits for the steps in flight."""
    return self._collect(self._in_flight.drain())

  def close(self, step: int) -> list[Summary]:
    """Closes the period at `step` without the steps in flight."""
    end = time.monotonic()  # what follows is time of the next period
    if (summary := self.so_far()) is None:
      return []
    self._start_period(end)
    return [dataclasses.replace(summary, step=step)]

  def so_far(self) -> Summary | None:
    """The metrics since the last summary, without closing the period; None if there are none."""
    if not self._steps:
      return None
    seconds = (time.monotonic() - self._start) / self._steps
    if self._merged is None:
      values = dict.fromkeys(compute_metrics(self._left_out), math.nan)
    else:
      values = compute_metrics(self._merged)
    values['nonfinite_steps'] = float(self._nonfinite_steps)
    values['timing/ms_per_step'] = 1e3 * seconds
    values['timing/examples_per_second'] = self._batch_size / seconds
    values['timing/data_wait_share'] = self._data_wait / self._steps / seconds
    if self._seconds_at_peak is not None:
      values['timing/mfu'] = self._seconds_at_peak / seconds
    return Summary(self._last, values)

  def open_period(self) -> dict[str, Any] | None:
    """The steps since the last summary as a JSON value; None if there are none.

    A checkpoint keeps it, so that the next summary of a resumed run covers the same steps as
    without the interruption.
    """
    if not self._steps:
      return None
    return {
      'steps': self._steps,
      'nonfinite_steps': self._nonfinite_steps,
      'seconds': time.monotonic() - self._start,
      'data_wait_seconds': self._data_wait,
      # JSON has the digits of a float64, so float32 values come back as they were.
      'metrics': None
      if self._merged is None
      else {
        'structure': str(jax.tree.structure(self._merged)),
        'leaves': [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(self._merged)],
      },
    }

  def _resume(self, found: Mapping[str, Any], metrics: Metrics) -> None:
    """Continues from a result of `open_period`; `metrics` are the metrics of the next step."""
    leaves, structure = jax.tree.flatten(metrics)
    if saved := found['metrics']:
      if saved['structure'] != str(structure):
        _log.warning(
          'The checkpoint has other metrics than this run: its %d steps since the last line of '
          'metrics are left out of the next one.',
          found['steps'],
        )
        return
      values = [np.asarray(x, y.dtype) for x, y in zip(saved['leaves'], leaves, strict=True)]
      self._merged = jax.tree.unflatten(structure, values)
    self._steps = found['steps']
    self._nonfinite_steps = found['nonfinite_steps']
    self._start -= found['seconds']
    self._data_wait = found['data_wait_seconds']

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Excludes the time spent in this context, such as an evaluation, from the time per step."""
    start = time.monotonic()
    yield
    self._start += time.monotonic() - start

  def _collect(self, done: list[tuple[int, float, Metrics]]) -> list[Summary]:
    summaries = []
    for step, data_wait, metrics in done:
      if self._resumed is not None:
        self._resume(self._resumed, metrics)
        self._resumed = None
      self._on_step(step, metrics)
      if not is_finite(metrics):
        self._left_out = metrics
        self._nonfinite_steps += 1
      elif self._merged is None:
        self._merged = metrics
      else:
        self._merged = merge_metrics(self._merged, metrics)
      self._steps += 1
      self._last = step
      self._data_wait += data_wait
      if step % self._period == 0:
        summaries += self.close(step)
    return summaries
