"""The largest batch, or number of samples, that a topology holds."""

from collections.abc import Callable
from typing import Any

from het_plugin.planning import report

_SEARCHED = {'batch': 'batch_size', 'samples': 'num_samples'}
_LARGEST = {'batch': 2**20, 'samples': 2**16}  # where a search gives up


def largest_that_fits(
  what: str,
  first: dict[str, Any],
  compile_fn: Callable[[int], dict[str, Any]],
  say: Callable[[str], None] = print,
) -> int | None:
  """The largest batch, or number of samples, that fits, to within a sixteenth.

  Args:
    what: 'batch' or 'samples'.
    first: the plan of the configuration as it is.
    compile_fn: from a value to its plan.
    say: told of every plan.

  Returns:
    The value, a multiple of the shards that a batch is cut into; None if not even one row a shard
    fits. At `_LARGEST` it stops.
  """
  unit = 1
  if what == 'batch':
    unit = first['num_devices'] // first['mesh']['model']
  value = first[_SEARCHED[what]]

  def fits(candidate: int) -> bool:
    plan = compile_fn(candidate)
    say(report.line(plan))
    return plan['fits']

  largest, smallest_failing = (value, None) if first['fits'] else (0, value)
  while smallest_failing is None and 2 * largest <= _LARGEST[what]:
    if fits(2 * largest):
      largest *= 2
    else:
      smallest_failing = 2 * largest
  while smallest_failing is not None and smallest_failing - largest > max(unit, largest // 16):
    middle = (largest + smallest_failing) // 2 // unit * unit
    if middle <= largest:
      break
    if fits(middle):
      largest = middle
    else:
      smallest_failing = middle
  return largest or None
