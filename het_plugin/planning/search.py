"""The largest batch or number of samples that fits, the mesh and microbatches with which a batch
fits, and grids of heads, batches and samples.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from het_plugin import reporting
from het_plugin.planning import report
from het_plugin.planning.topology import GIB
from het_plugin.planning.worker import Request, compile_in_process

_SEARCHED = {'batch': 'batch_size', 'samples': 'num_samples'}
_LARGEST = {'batch': 2**20, 'samples': 2**16}  # the end of a search
_MODEL_SHARDS = (1, 2, 4, 8)  # of a search: larger ones cost the backbone more than they save
TERA = 1e12


def search(what: str, request: Request, first: dict[str, Any]) -> dict[str, Any]:
  """Prints a line per compilation; returns {'what', 'largest'} of `largest_that_fits`, or {'what',
  'bindings'} of a `layout`, None if none fits.
  """
  if what == 'layout':
    found = layout(request, first)
    bindings = found and found.bindings
    print('\n'.join(f'--gin.{x}' for x in bindings) if bindings else 'The batch fits with none.')
    return {'what': what, 'bindings': bindings}

  def compile_value(value: int) -> dict[str, Any]:
    batch, num_samples = (value, None) if what == 'batch' else (None, value)
    return compile_in_process(request.for_train_step(batch, num_samples))

  print(f'\nLooking for the largest {what}:', flush=True)
  largest = largest_that_fits(what, first, compile_value)
  name = 'batch' if what == 'batch' else 'number of samples'
  found = f'The largest {name} whose train step fits: {largest}'
  print(found if largest else f'The train step fits with no {name}.')
  return {'what': what, 'largest': largest}


def largest_that_fits(
  what: str, first: dict[str, Any], compile_fn: Callable[[int], dict[str, Any]]
) -> int | None:
  """The largest batch or number of samples with which the train step fits; None if none does.

  Correct to within a sixteenth, and at most `_LARGEST`. `first` is the plan of the unchanged
  configuration. `compile_fn` maps a value to the plan of its train step. Prints a line per plan. A
  batch is a multiple of its shards, and of `SparseMoe.group_size`, times the microbatches.
  """
  unit = first['batch_unit'] if what == 'batch' else 1
  value = first[_SEARCHED[what]]

  def fits(candidate: int) -> bool:
    plan = compile_fn(candidate)
    print(report.line(plan), flush=True)
    return plan['fits']

  largest, smallest_failing = (value, None) if first['train']['fits'] else (0, value)
  while smallest_failing is None and 2 * largest <= _LARGEST[what]:
    if fits(2 * largest):
      largest *= 2
    else:
      smallest_failing = 2 * largest
  if smallest_failing is None:
    print(f'At least {largest}, where the search ends: more may fit.')
  while smallest_failing is not None and smallest_failing - largest > max(unit, largest // 16):
    middle = (largest + smallest_failing) // 2 // unit * unit
    if middle <= largest:
      break
    if fits(middle):
      largest = middle
    else:
      smallest_failing = middle
  return largest or None


@dataclasses.dataclass(frozen=True)
class Layout:
  """How a batch is split.

  Attributes:
    mesh: (data, model) or (replica, data, model) devices.
    num_microbatches: of a step.
    plan: of the train step.
  """

  mesh: tuple[int, ...]
  num_microbatches: int
  plan: dict[str, Any]

  @property
  def bindings(self) -> list[str]:
    """The bindings of gin that make a run use it."""
    *replicas, _, model = self.mesh
    return [
      f'BATCH_SIZE = {self.plan["batch_size"]}',
      f'PjitPartitioner.num_partitions = {model}',
      'PjitPartitioner.model_parallel_submesh = None',
      f'PjitPartitioner.num_replicas = {replicas[0] if replicas else 1}',
      f'Trainer.num_microbatches = {self.num_microbatches}',
    ]


def layout(request: Request, first: dict[str, Any]) -> Layout | None:
  """The mesh and the microbatches with which the train step of a run fits at its own batch.

  The fewest microbatches with which any mesh fits, and of those meshes the one with the shortest
  estimate of a step. Prints a line per compilation.

  Args:
    request: the run.
    first: its plan as it is configured, which fits or not.

  Returns:
    None if no model axis of at most 8 fits, even with one example per device in a microbatch.
  """
  batch = first['batch_size']
  slices = request.num_slices
  devices = first['num_devices'] // slices
  print(f'\nLooking for the mesh and the microbatches of batch {batch}:', flush=True)
  for num_microbatches in (2**i for i in range(batch.bit_length())):
    fitting = []
    for model in _MODEL_SHARDS:
      if devices % model or batch % (slices * devices // model * num_microbatches):
        continue
      mesh = (*([slices] if slices > 1 else []), devices // model, model)
      try:
        plan = compile_in_process(request.for_layout(mesh, num_microbatches))
      except ValueError as error:  # such as microbatches of a loss that needs the whole batch
        print(f'mesh {mesh}, {num_microbatches} microbatches: {error}', flush=True)
        continue
      print(f'mesh {mesh}, {num_microbatches} microbatches: {report.line(plan)}', flush=True)
      if plan['fits']:
        fitting.append(Layout(mesh, num_microbatches, plan))
    if fitting:
      return min(fitting, key=_seconds)  # the first where nothing is known of their time
  return None


def _seconds(found: Layout) -> float:
  seconds = found.plan['train']['seconds']
  return seconds['with_overlap'] if seconds else math.inf


def grid(
  request: Request, heads: Sequence[str], batches: Sequence[int], samples: Sequence[int]
) -> Iterator[dict[str, Any]]:
  """Compiles each head with each batch size and number of samples; a row and a line for each.

  A loss that draws no samples has one per batch size, with s = 0. A batch size that the devices do
  not divide is an error before the first.
  """
  request = dataclasses.replace(request, heads=heads, batches=batches)
  for head in heads:
    for batch in batches:
      for num_samples in samples if head != 'det' else [0]:
        plan = compile_in_process(request.for_train_step(batch, num_samples or None, head))
        print(f'{head}: {report.line(plan)}', flush=True)
        figures = ('peak_bytes_per_device', 'fits', 'flops_per_device', 'hbm_bytes_per_device')
        drawn = num_samples if plan['num_samples'] else 0
        yield {'head': head, 'b': batch, 's': drawn, **{name: plan[name] for name in figures}}
        if not drawn:  # another S changes nothing
          break


def grid_text(rows: Sequence[dict[str, Any]]) -> str:
  """The rows of `grid` as a table."""
  cells = [
    (
      row['head'],
      str(row['b']),
      str(row['s'] or '–'),
      f'{row["peak_bytes_per_device"] / GIB:.2f}' if row['peak_bytes_per_device'] else '?',
      f'{row["flops_per_device"] / TERA:.3g}',
      'yes' if row['fits'] else 'no',
    )
    for row in rows
  ]
  return reporting.aligned([('head', 'batch', 'S', 'peak GiB', 'TFLOP', 'fits'), *cells])


def grid_png(rows: Sequence[dict[str, Any]]) -> bytes:
  """Heat maps of GiB and TFLOP per device; cells that do not fit are black."""
  measures = {
    'peak, GiB per device': lambda row: row['fits'] and row['peak_bytes_per_device'] / GIB or None,
    'TFLOP per device': lambda row: row['fits'] and row['flops_per_device'] / TERA or None,
  }
  return reporting.grid_png(rows, measures)
