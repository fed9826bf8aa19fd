"""Compiles a training run for a TPU slice, on any machine, and says what it will need there.

    python -m het_plugin.plan --gin_file=gin/runs/jft4b_vit_l32_het_xl.gin --topology=v3:8x8 \\
      --mesh=32,4

Takes the gin files and flags of training. The real train and eval steps are compiled ahead of time
with libtpu, which needs no TPU (`pip install 'het_plugin[plan]'`), or for virtual CPU devices
(--topology=cpu:8). Prints parameters by sharding, memory of a device against what it has, FLOPs and
collectives. With --search it looks for the largest batch or number of samples that fits; with
--grid it fills the paper's fig. 2 and 5: heads by batch sizes by samples. Nothing is read but gin
files; each compilation has a process of its own.

Exit codes: 0 the plan is made, whether or not it fits (`fits` in --json); 2 a setting is wrong.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from het_plugin import reporting
from het_plugin.config import command_line, flag_values
from het_plugin.planning import report, search, worker
from het_plugin.planning import topology as topology_lib
from het_plugin.planning.request import Request

HEADS = ('det', 'het', 'het_h', 'het_xl')


def define_flags() -> None:
  command_line.define_flags()
  flags.DEFINE_string(
    'topology',
    'cpu:8',
    'cpu:N, or a TPU generation and the shape of a slice in chips: v3:8x8, v4:4x4x8, v5e:8x16, '
    'v5p:2x2x1, v6e:16x16, tpu7x:2x2x1.',
  )
  flags.DEFINE_list(
    'mesh',
    None,
    'DATA,MODEL or REPLICA,DATA,MODEL devices; what the configuration says where it is not given.',
  )
  flags.DEFINE_integer('num_slices', 1, 'Slices of that shape, a replica each.')
  flags.DEFINE_enum(
    'search', None, ['batch', 'samples'], 'Also looks for the largest batch, or S, that fits.'
  )
  flags.DEFINE_bool('grid', False, 'Compiles heads by batches by samples instead of one run.')
  flags.DEFINE_list('heads', list(HEADS), 'Heads of the grid.')
  flags.DEFINE_list('batches', ['1024', '2048', '4096', '6144'], 'Batches of the grid.')
  flags.DEFINE_list('samples', ['10', '100', '1000'], 'Numbers of samples of the grid.')
  flags.DEFINE_string('png', None, 'Where the grid is drawn.')
  flags.DEFINE_string('json', None, 'Where all figures are written.')


def make_request() -> Request:
  """The request of the flags.

  Raises:
    ValueError: for a topology or a mesh that is none.
  """
  topology_lib.parse(flags.FLAGS.topology)
  if flags.FLAGS.num_slices < 1:
    raise ValueError(f'--num_slices={flags.FLAGS.num_slices} must be at least 1')
  return Request(
    gin_files=list(flags.FLAGS.gin_file),
    gin_bindings=list(flags.FLAGS.gin_bindings),
    gin_search_paths=list(flags.FLAGS.gin_search_paths),
    topology=flags.FLAGS.topology,
    mesh=None
    if flags.FLAGS.mesh is None
    else flag_values.integers('mesh', flags.FLAGS.mesh, least=1, lengths=(2, 3)),
    num_slices=flags.FLAGS.num_slices,
  )


def with_bindings(request: Request, *bindings: str) -> Request:
  return dataclasses.replace(request, gin_bindings=[*request.gin_bindings, *bindings])


def samples_bindings(num_samples: int) -> list[str]:
  return [f'{scope}/Integrator.num_samples = {num_samples}' for scope in ('train', 'eval')]


def run_search(request: Request, first: dict[str, Any]) -> dict[str, Any]:
  what = flags.FLAGS.search

  def compile_value(value: int) -> dict[str, Any]:
    bindings = [f'BATCH_SIZE = {value}'] if what == 'batch' else samples_bindings(value)
    steps = dataclasses.replace(with_bindings(request, *bindings), steps=('train',))
    return worker.compile_in_process(steps)

  print(f'\nLooking for the largest {what}:', flush=True)
  largest = search.largest_that_fits(what, first, compile_value)
  name = 'batch' if what == 'batch' else 'number of samples'
  print(f'The largest {name} that fits: {largest}' if largest else f'No {name} fits.')
  return {'what': what, 'largest': largest}


def run_grid(request: Request) -> list[dict[str, Any]]:
  """A row a cell; the deterministic head has one for each batch, with s = 0."""
  if unknown := [head for head in flags.FLAGS.heads if head not in HEADS]:
    raise ValueError(f'--heads={",".join(unknown)} unknown: choose from {", ".join(HEADS)}')
  batches = flag_values.integers('batches', flags.FLAGS.batches, least=1)
  samples = flag_values.integers('samples', flags.FLAGS.samples, least=1)
  rows = []
  for head in flags.FLAGS.heads:
    for batch in batches:
      for num_samples in samples if head != 'det' else [0]:
        cell = dataclasses.replace(
          with_bindings(
            request,
            f'BATCH_SIZE = {batch}',
            *(samples_bindings(num_samples) if num_samples else ()),
          ),
          gin_files=[*request.gin_files, f'het_plugin/gin/heads/{head}.gin'],
          steps=('train',),
        )
        plan = worker.compile_in_process(cell)
        print(f'{head}: {report.line(plan)}', flush=True)
        rows.append(
          {
            'head': head,
            'b': batch,
            's': num_samples,
            'peak_bytes_per_device': plan['peak_bytes_per_device'],
            'fits': plan['fits'],
            'flops_per_device': plan['flops_per_device'],
            'hbm_bytes_per_device': plan['hbm_bytes_per_device'],
          }
        )
  return rows


def print_grid(rows: Sequence[dict[str, Any]]) -> None:
  header = ('head', 'batch', 'S', 'peak GiB', 'TFLOP', 'fits')
  cells = [
    (
      row['head'],
      str(row['b']),
      str(row['s'] or '–'),
      f'{row["peak_bytes_per_device"] / 2**30:.2f}' if row['peak_bytes_per_device'] else '?',
      f'{row["flops_per_device"] / 1e12:.3g}',
      'yes' if row['fits'] else 'no',
    )
    for row in rows
  ]
  print(reporting.aligned([header, *cells]))


def draw_grid(rows: Sequence[dict[str, Any]], path: Path) -> None:
  """GiB a device, and TFLOP a device; black where it does not fit."""
  measures = {
    'peak, GiB a device': lambda row: row['fits'] and row['peak_bytes_per_device'] / 2**30 or None,
    'TFLOP a device': lambda row: row['fits'] and row['flops_per_device'] / 1e12 or None,
  }
  path.write_bytes(reporting.grid_png(rows, measures))


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments: {" ".join(argv[1:])}')
  with command_line.one_sentence_errors():
    request = make_request()
    if flags.FLAGS.grid:
      result = run_grid(request)
      print_grid(result)
      if flags.FLAGS.png:
        draw_grid(result, Path(flags.FLAGS.png))
    else:
      print('Compiling, which takes up to two minutes for a large model ...', file=sys.stderr)
      result = worker.compile_in_process(request)
      print(report.text(result), flush=True)
      if flags.FLAGS.search:
        result['search'] = run_search(request, result)
    if flags.FLAGS.json:
      reporting.write_json(result, flags.FLAGS.json)


if __name__ == '__main__':
  define_flags()
  command_line.run(main)
