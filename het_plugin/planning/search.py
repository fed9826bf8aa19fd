"""The largest batch or number of samples that fits, and grids of heads, batches and samples."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from het_plugin import reporting
from het_plugin.planning import report
from het_plugin.planning.topology import GIB
from het_plugin.planning.worker import Request, compile_in_process

HEADS = ('det', 'het', 'het_h', 'het_xl')
_SEARCHED = {'batch': 'batch_size', 'samples': 'num_samples'}
_LARGEST = {'batch': 2**20, 'samples': 2**16}  # the end of a search
TERA = 1e12


def search(what: str, request: Request, first: dict[str, Any]) -> dict[str, Any]:
  """Prints a line per compilation; returns {'what', 'largest'} of `largest_that_fits`."""

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


def grid(
  request: Request, heads: Sequence[str], batches: Sequence[int], samples: Sequence[int]
) -> Iterator[dict[str, Any]]:
  """Compiles each head with each batch size and number of samples; a row and a line for each.

  A loss that draws no samples has one per batch size, with s = 0. A batch size that the devices do
  not divide is an error before the first.
  """
  unknown = [head for head in heads if head not in HEADS]
  if unknown or not heads:
    raise ValueError(f'--heads={",".join(unknown)} is unknown: choose from {", ".join(HEADS)}')
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
