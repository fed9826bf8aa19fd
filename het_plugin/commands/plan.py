"""Compiles a training run for a TPU slice, on any machine, and prints what the run needs there.

    python -m het_plugin.plan --gin_file=gin/runs/jft4b_vit_l32_het_xl.gin --topology=v3:8x8 \\
      --mesh=32,4

Takes the gin files and flags of training. The real train and eval steps are compiled ahead of time
with libtpu, which needs no TPU (`pip install 'het_plugin[plan]'`), or for virtual CPU devices
(--topology=cpu:8). Prints the parameters by sharding, the memory that a device needs and has,
FLOPs, collectives, and an estimate of the time per step from the chip's peak rates. --search finds
the largest batch or number of samples whose train step fits, or the
mesh and the microbatches of the batch. --grid compiles heads by batch sizes
by samples, as in figures 2 and 5 of the paper. Only gin files are read. Each compilation has its
own process.

Exit codes: 0 the plan is made, whether or not it fits (`fits` in --json); 2 a setting is wrong.
"""

import dataclasses
import signal
import sys
from typing import Annotated, Any, Literal

from het_plugin import reporting
from het_plugin.cli.settings import Gin, JsonFile
from het_plugin.system import run_files
from het_plugin.system.flag_values import HEADS, Head
from het_plugin.system.ranges import NOT_EMPTY, Count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Gin, JsonFile):
  """What is compiled, and for what.

  Attributes:
    topology: cpu:N, or a TPU generation and the shape of a slice in chips: v3:8x8, v4:4x4x8,
      v5e:8x16, v5p:2x2x1, v6e:16x16, tpu7x:2x2x1.
    mesh: DATA,MODEL or REPLICA,DATA,MODEL devices. Default: the mesh of the configuration.
    num_slices: Number of slices; each is a replica.
    search: Also finds the largest batch, or S, whose train step fits; or the mesh and the
      microbatches with which the batch fits.
    quick: Compiles for a TPU with few optimizations, in a third of the time. FLOPs are the same;
      memory and collectives are rough: without it, memory was 0.7 to 1.5 times as much.
    grid: Compiles a grid of heads, batches and samples.
    heads: Heads in the grid.
    batches: Batch sizes in the grid.
    samples: Numbers of samples in the grid.
    png: Where to draw the grid.
  """

  topology: str = 'cpu:8'
  mesh: tuple[Count, Count] | tuple[Count, Count, Count] | None = None
  num_slices: Count = 1
  search: Literal['batch', 'samples', 'layout'] | None = None
  quick: bool = False
  grid: bool = False
  heads: Annotated[tuple[Head, ...], NOT_EMPTY] = HEADS
  batches: Annotated[tuple[Count, ...], NOT_EMPTY] = (1024, 2048, 4096, 6144)
  samples: Annotated[tuple[Count, ...], NOT_EMPTY] = (10, 100, 1000)
  png: str | None = None


def run(settings: Settings) -> None:
  """Compiles, prints what it found, and writes it after each step, which takes minutes."""
  from het_plugin.planning import report, search, topology, worker  # import JAX

  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the process that compiles, too
  mesh = settings.mesh and list(settings.mesh)
  topology.check(settings.topology, settings.num_slices, mesh)
  files, bindings, search_paths = map(list, settings.gin)
  request = worker.Request(
    files,
    bindings,
    search_paths,
    settings.topology,
    mesh,
    settings.num_slices,
    needs_samples=settings.search == 'samples',
    quick=settings.quick,
  )
  if settings.quick and settings.topology.startswith('cpu'):
    raise ValueError(f'--quick is for TPU topologies, not --topology={settings.topology}')
  of_other = ('search',) if settings.grid else ('heads', 'batches', 'samples', 'png')
  other = 'without' if settings.grid else 'with'
  settings.refuse(of_other, f'{other} --grid', 'has an effect only')

  def save(result: Any) -> None:
    if settings.json:
      reporting.write_json(result, settings.json)

  if settings.grid:
    rows = []
    for row in search.grid(request, settings.heads, settings.batches, settings.samples):
      rows.append(row)
      save(rows)
    print(search.grid_text(rows))
    if settings.png:
      with run_files.replacing(settings.png) as unfinished:
        unfinished.write_bytes(search.grid_png(rows))
  else:
    print(
      'Compiling the train and eval steps: a minute for a small model, 6 to 15 for ViT-L/32 with '
      '30,000 classes.',
      file=sys.stderr,
    )
    result = worker.compile_in_process(request)
    print(report.text(result), flush=True)
    save(result)
    if settings.search:
      result['search'] = search.search(settings.search, request, result)
      save(result)
