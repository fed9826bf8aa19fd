"""Seconds from the start of a resumed run's process to the end of its first step.

    python benchmarks/restart.py [--json OUT]
    python benchmarks/restart.py --runs=quickstart --cache=with --checkouts=../before,.

Two runs with HET-XL: the quick start on four devices, and ViT-Ti/16 on digits enlarged to 96 x 96.
`python -m het_plugin.train` trains each for three steps. Copies of the run are then resumed until
they have done a step, in turns with and without the compilation cache in its folder. Several
checkouts of the project, named by their paths, also take turns. Columns, in seconds, medians of the
rounds:

    total    from the start of the process until metrics.jsonl has the first step
    cpu      CPU time of the process until then
    compile  tracing the training step, and compiling it or reading it from the cache
"""

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from command_line import make_parser, names, report

FIRST = 3  # the step at which the runs are saved
COMMON = (f'SAVE_PERIOD={FIRST}', 'STATS_PERIOD=1', 'EVAL_PERIOD=1000', 'TRAIN_STEPS=1000')
RUNS = {
  'quickstart': ('gin/runs/glyphs_quickstart.gin', 4, ()),
  'digits': (
    'gin/runs/digits_smoke.gin',
    1,
    (
      *('IMAGE_SIZE=96', "TASK_FEATURE_LENGTHS={'image': %IMAGE_SIZE, 'label': 1}"),
      *('BATCH_SIZE=16', "vit.variant='Ti/16'", 'vit.width=192', 'vit.depth=12'),
      *('vit.mlp_dim=768', 'vit.num_heads=3'),
    ),
  ),
}


def train(args, name, checkout, folder, done, cache=True):
  """Trains until `done()`, and kills the process. Returns seconds and seconds of CPU time."""
  gin_file, devices, bindings = RUNS[name]
  bindings = (*bindings, *COMMON, *args.gin, f"MODEL_DIR='{folder}'")
  environment = {k: v for k, v in os.environ.items() if k != 'JAX_COMPILATION_CACHE_DIR'}
  environment |= {
    'PYTHONPATH': os.pathsep.join([str(checkout), os.environ.get('PYTHONPATH', '')]),
    'JAX_ENABLE_COMPILATION_CACHE': str(cache).lower(),
    'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
  }
  began, cpu = time.perf_counter(), cpu_of_children()
  log = folder.with_suffix('.log')
  with open(log, 'wb') as file:
    process = subprocess.Popen(
      [
        *(sys.executable, '-m', 'het_plugin.train', f'--gin_file={gin_file}'),
        *('--gin_file=gin/heads/het_xl.gin', *(f'--gin.{binding}' for binding in bindings)),
      ],
      cwd=checkout,
      env=environment,
      stdout=file,
      stderr=subprocess.STDOUT,
    )
    while process.poll() is None and not done():
      time.sleep(0.01)
  if process.returncode is not None:
    sys.exit(f'training ended with exit code {process.returncode}:\n{log.read_text()}')
  seconds = time.perf_counter() - began
  process.kill()
  process.wait()
  return seconds, cpu_of_children() - cpu


def cpu_of_children():
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  return used.ru_utime + used.ru_stime


def metrics(folder):
  path = folder / 'metrics.jsonl'
  lines = path.read_text().split('\n')[:-1] if path.exists() else []  # without an incomplete line
  return [json.loads(line) for line in lines]


def resume(args, name, checkout, run, saved, cache):
  """Seconds, seconds of CPU time, and seconds to compile."""
  shutil.copytree(saved, run)  # the path of the cache is part of its keys

  def stepped():
    return any('train/loss' in row for row in metrics(run))

  seconds, cpu = train(args, name, checkout, run, stepped, cache)
  compilation = [x for row in metrics(run) if (x := row.get('train/timing/compile_seconds'))]
  shutil.rmtree(run)
  return seconds, cpu, compilation[-1]


def main():
  parser = make_parser(__doc__)
  parser.add_argument('--runs', type=names(RUNS), default=list(RUNS))
  parser.add_argument('--checkouts', default=str(Path(__file__).resolve().parents[1]))
  parser.add_argument('--cache', type=names(['without', 'with']), default=['without', 'with'])
  parser.add_argument('--gin', action='append', default=[], help='a gin binding, NAME=VALUE')
  parser.add_argument('--rounds', type=int, default=5, help='restarts of each kind')
  args = parser.parse_args()
  kinds = {
    (name, checkout, cache): []
    for name in args.runs
    for checkout in args.checkouts.split(',')
    for cache in args.cache
  }
  with tempfile.TemporaryDirectory() as folder:
    folders = {kind[:2]: Path(folder) / str(i) for i, kind in enumerate(kinds)}
    for (name, checkout), run in folders.items():
      is_saved = (run / f'checkpoint_{FIRST}').exists
      train(args, name, Path(checkout).resolve(), run, is_saved)
      (run / 'metrics.jsonl').unlink()
      run.rename(run.with_suffix('.saved'))
    for _ in range(args.rounds):
      for (name, checkout, cache), rounds in kinds.items():
        run = folders[name, checkout]
        saved = run.with_suffix('.saved')
        rounds.append(resume(args, name, Path(checkout).resolve(), run, saved, cache == 'with'))
  rows = []
  for (name, checkout, cache), rounds in kinds.items():
    total, cpu, compilation = (statistics.median(column) for column in zip(*rounds, strict=True))
    row = {'run': name, 'checkout': checkout, 'cache': cache, 'total': total, 'cpu': cpu}
    extremes = {'lowest': min(rounds)[0], 'highest': max(rounds)[0]}
    rows.append(row | {'compile': compilation} | extremes)
  report(args.json, rows)


if __name__ == '__main__':
  main()
