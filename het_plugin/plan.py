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

import signal
import sys
from collections.abc import Sequence

from absl import flags

from het_plugin import reporting
from het_plugin.cli import command_line
from het_plugin.planning import report, search, topology, worker
from het_plugin.system import flag_values, run_files

FLAGS = flags.FLAGS


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
    'DATA,MODEL or REPLICA,DATA,MODEL devices. Default: the mesh of the configuration.',
  )
  flags.DEFINE_integer('num_slices', 1, 'Number of slices; each is a replica.')
  flags.DEFINE_enum(
    'search',
    None,
    ['batch', 'samples', 'layout'],
    'Also finds the largest batch, or S, whose train step fits; or the mesh and the microbatches '
    'with which the batch fits.',
  )
  flags.DEFINE_bool(
    'quick',
    False,
    'Compiles for a TPU with few optimizations, in a third of the time. FLOPs are the same; '
    'memory and collectives are rough: without it, memory was 0.7 to 1.5 times as much.',
  )
  flags.DEFINE_bool('grid', False, 'Compiles a grid of heads, batches and samples.')
  flags.DEFINE_list('heads', list(search.HEADS), 'Heads in the grid.')
  flags.DEFINE_list('batches', ['1024', '2048', '4096', '6144'], 'Batch sizes in the grid.')
  flags.DEFINE_list('samples', ['10', '100', '1000'], 'Numbers of samples in the grid.')
  flags.DEFINE_string('png', None, 'Where to draw the grid.')
  flags.DEFINE_string('json', None, 'Where to write all numbers.')


def main(argv: Sequence[str]) -> None:
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the process that compiles, too
  with command_line.one_sentence_errors(argv):
    mesh = FLAGS.mesh
    if mesh is not None:
      mesh = flag_values.integers('mesh', mesh, least=1, lengths=(2, 3))
    topology.check(FLAGS.topology, FLAGS.num_slices, mesh)
    configuration = map(list, command_line.gin_settings())
    request = worker.Request(
      *configuration,
      FLAGS.topology,
      mesh,
      FLAGS.num_slices,
      needs_samples=FLAGS.search == 'samples',
      quick=FLAGS.quick,
    )
    if FLAGS.quick and FLAGS.topology.startswith('cpu'):
      raise ValueError(f'--quick is for TPU topologies, not --topology={FLAGS.topology}')
    of_other = ('search',) if FLAGS.grid else ('heads', 'batches', 'samples', 'png')
    for name in of_other:
      if FLAGS[name].present:
        other = 'without' if FLAGS.grid else 'with'
        raise ValueError(f'--{name} has an effect only {other} --grid')

    def save() -> None:
      if FLAGS.json:
        reporting.write_json(result, FLAGS.json)

    if FLAGS.grid:
      batches = flag_values.integers('batches', FLAGS.batches, least=1)
      samples = flag_values.integers('samples', FLAGS.samples, least=1)
      result = []
      for row in search.grid(request, FLAGS.heads, batches, samples):
        result.append(row)
        save()  # each takes minutes
      print(search.grid_text(result))
    else:
      print(
        'Compiling the train and eval steps: a minute for a small model, 6 to 15 for ViT-L/32 with '
        '30,000 classes.',
        file=sys.stderr,
      )
      result = worker.compile_in_process(request)
      print(report.text(result), flush=True)
      save()
      if FLAGS.search:
        result['search'] = search.search(FLAGS.search, request, result)
        save()
    if FLAGS.png:
      with run_files.replacing(FLAGS.png) as unfinished:
        unfinished.write_bytes(search.grid_png(result))


if __name__ == '__main__':
  command_line.run(main)
