"""t5x's partitioner, and ours on its mesh."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from t5x import partitioning as t5x_partitioning

from het_plugin.training import partitioning


class PjitPartitioner(t5x_partitioning.PjitPartitioner):
  """t5x's PjitPartitioner, which respects num_partitions on CPUs as on accelerators.

  t5x's own puts all CPU devices of a process on the model axis.
  """

  def __init__(
    self,
    num_partitions: int | None = None,
    model_parallel_submesh: Sequence[int] | None = None,
    **kwargs: Any,
  ):
    """Takes t5x's arguments; without both of them the model axis has size 1.

    Raises:
      ValueError: on CPUs, num_partitions does not divide the devices of a process.
    """
    if num_partitions is None and model_parallel_submesh is None:
      num_partitions = 1
    devices = jax.local_device_count()
    self._is_cpu = model_parallel_submesh is None and jax.devices()[0].platform == 'cpu'
    if self._is_cpu and (num_partitions < 1 or devices % num_partitions):
      raise ValueError(
        f'PjitPartitioner.num_partitions={num_partitions} must be at least 1 and divide the number '
        f'of devices of a process, {devices} (XLA_FLAGS=--xla_force_host_platform_device_count=8 '
        'makes 8 of a CPU).'
      )
    super().__init__(num_partitions, model_parallel_submesh, **kwargs)

  @functools.cached_property
  def mesh(self) -> jax.sharding.Mesh:
    if self._is_cpu:
      return t5x_partitioning.get_mesh((1, self._num_partitions))
    return super().mesh


def ours(partitioner: t5x_partitioning.PjitPartitioner) -> partitioning.PjitPartitioner:
  """Our partitioner with the mesh and the axis rules of t5x's.

  Axes that only our heads use are replicated, because t5x ignores unknown names.
  """
  known = {name for name, _ in partitioner.logical_axis_rules}
  own = [rule for rule in partitioning.standard_logical_axis_rules() if rule[0] not in known]
  rules = [*partitioner.logical_axis_rules, *own]
  return partitioning.PjitPartitioner.on_mesh(partitioner.mesh, rules)
