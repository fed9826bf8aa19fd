"""Estimates the time per step from the peak rates of the chips; nothing is run."""

from collections.abc import Mapping, Sequence
from typing import Any

from het_plugin.planning import topology


def estimate(
  topology_name: str,
  flops: float,
  hbm_bytes: float,
  collectives: Sequence[Mapping[str, Any]],
) -> dict[str, float] | None:
  """Seconds per step, from the work of one device; None for CPUs.

  A step takes at least the longest of the three times, and their sum if nothing overlaps. A
  collective is a ring over links of both directions; an all-reduce passes twice. The network
  between slices is left out.

  Args:
    topology_name: such as 'v5e:4x4'.
    flops: FLOPs; all count as bfloat16.
    hbm_bytes: bytes read and written, as XLA counts them: the body of a loop once.
    collectives: 'kind' and 'bytes' of each kind (`hlo.Collective`).

  Returns:
    {'compute': s, 'memory': s, 'collectives': s, 'at_least': s, 'without_overlap': s}.
  """
  chip = topology.CHIPS.get(topology.parse(topology_name)[0])
  if chip is None:
    return None
  passed = sum(c['bytes'] * (2 if c['kind'] == 'all-reduce' else 1) for c in collectives)
  parts = {
    'compute': flops / (chip.flops / chip.devices),
    'memory': hbm_bytes / (chip.hbm_bytes / chip.devices),
    'collectives': passed / (2 * chip.link_bytes / chip.devices),
  }
  return parts | {'at_least': max(parts.values()), 'without_overlap': sum(parts.values())}
