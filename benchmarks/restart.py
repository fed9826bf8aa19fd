"""Seconds from the start of a resumed run's process to the end of its first step.

    python benchmarks/restart.py [--json OUT]
    python benchmarks/restart.py --gin=vit.depth=1 --gin=IMAGE_SIZE=16 --rounds=1

Trains ViT-Ti/16 with HET-XL on digits enlarged to 96 x 96 for three steps with
`python -m het_plugin.train`. Then resumes copies of that run for one step, in turns with and
without the compilation cache in its folder. Columns, in seconds, medians of the rounds:

    total    from the start of the process until metrics.jsonl has the first step
    cpu      CPU time of the process, which saves a checkpoint after that step and ends
    compile  tracing the training step, and compiling it or reading it from the cache
    imports  `import het_plugin.train` in a process of its own, with the start of the interpreter
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

from command_line import make_parser, report

ROOT = Path(__file__).resolve().parents[1]
BINDINGS = (
  *('IMAGE_SIZE=96', "TASK_FEATURE_LENGTHS={'image': %IMAGE_SIZE, 'label': 1}", 'BATCH_SIZE=16'),
  *("vit.variant='Ti/16'", 'vit.width=192', 'vit.depth=12', 'vit.mlp_dim=768', 'vit.num_heads=3'),
  *('SAVE_PERIOD=3', 'EVAL_PERIOD=1000', 'STATS_PERIOD=1', 'WARMUP_STEPS=0'),
  "warmup_schedule.decay='constant'",  # the length of another schedule is part of the program
)


def start(*arguments, cache=True, log=subprocess.DEVNULL):
  """Starts Python in the checkout."""
  environment = {k: v for k, v in os.environ.items() if k != 'JAX_COMPILATION_CACHE_DIR'}
  environment |= {
    'PYTHONPATH': os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')]),
    'JAX_ENABLE_COMPILATION_CACHE': str(cache).lower(),
  }
  return subprocess.Popen(
    [sys.executable, *arguments],
    cwd=ROOT,
    env=environment,
    stdout=log,
    stderr=subprocess.STDOUT,
  )


def train(args, folder, steps, cache=True):
  """Trains to the given step. Returns the seconds to its metrics, of CPU time, and to compile."""
  bindings = (*BINDINGS, *args.gin, f'TRAIN_STEPS={steps}', f"MODEL_DIR='{folder}'")
  seconds, began, cpu = None, time.perf_counter(), cpu_of_children()
  log = folder.with_suffix('.log')
  with open(log, 'wb') as file:
    process = start(
      *('-m', 'het_plugin.train', '--gin_file=gin/runs/digits_smoke.gin'),
      *('--gin_file=gin/heads/het_xl.gin', *(f'--gin.{binding}' for binding in bindings)),
      '--accept_config_changes',  # resumed runs have one step more
      cache=cache,
      log=file,
    )
    while process.poll() is None:
      if seconds is None and any(row['step'] == steps for row in metrics(folder)):
        seconds = time.perf_counter() - began
      time.sleep(0.01)
  if process.returncode or seconds is None:
    sys.exit(f'training ended with exit code {process.returncode}:\n{log.read_text()}')
  name = 'train/timing/compile_seconds'
  compilation = [row[name] for row in metrics(folder) if name in row][-1]
  return seconds, cpu_of_children() - cpu, compilation


def cpu_of_children():
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  return used.ru_utime + used.ru_stime


def metrics(folder):
  path = folder / 'metrics.jsonl'
  lines = path.read_text().split('\n')[:-1] if path.exists() else []  # without an incomplete line
  return [json.loads(line) for line in lines]


def main():
  parser = make_parser(__doc__)
  parser.add_argument('--gin', action='append', default=[], help='a gin binding, NAME=VALUE')
  parser.add_argument('--rounds', type=int, default=5, help='restarts with and without the cache')
  args = parser.parse_args()
  seconds, imports = {'without': [], 'with': []}, []
  with tempfile.TemporaryDirectory() as folder:
    run, saved = Path(folder) / 'run', Path(folder) / 'saved'
    train(args, run, steps=3)
    run.rename(saved)
    for _ in range(args.rounds):
      began = time.perf_counter()
      start('-c', 'import het_plugin.train').wait()
      imports.append(time.perf_counter() - began)
      for cache, rounds in seconds.items():
        shutil.copytree(saved, run)  # the path of the cache is part of its keys
        rounds.append(train(args, run, steps=4, cache=cache == 'with'))
        shutil.rmtree(run)
  rows = [
    {
      'cache': cache,
      'total': statistics.median(total for total, _, _ in rounds),
      'cpu': statistics.median(cpu for _, cpu, _ in rounds),
      'compile': statistics.median(compilation for _, _, compilation in rounds),
      'imports': statistics.median(imports),
      'lowest': min(rounds)[0],
      'highest': max(rounds)[0],
    }
    for cache, rounds in seconds.items()
  ]
  report(args.json, rows)
  without, with_cache = (row['total'] for row in rows)
  print(
    f'{with_cache:.1f} s to the first step with the compilation cache, {without:.1f} s without: '
    f'{with_cache / without:.2f}'
  )


if __name__ == '__main__':
  main()
