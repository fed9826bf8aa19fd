"""From the start of the process of a run that resumes to its first step done, and where it goes.

    python benchmarks/restart.py [--json OUT]
    python benchmarks/restart.py --gin=vit.depth=1 --gin=IMAGE_SIZE=16 --rounds=1

A run of `python -m het_plugin.train`, ViT-Ti/16 with HET-XL on digits enlarged to 96 x 96, is
killed after three steps. Then it is started again and again, in turns with the compilation cache
that a run keeps in its directory and without one, and each time killed after its first step.
Seconds:

    imports        the interpreter, and the modules that the main imports at the start
    configuration  reading the gin files
    data_set       opening it, for which seqio and the rest of TensorFlow are imported
    shapes         model, optimizer and devices
    restore        reading the checkpoint
    compile        tracing the train step, and compiling it or reading it from the cache
    first_step     the first batch, the step, its metrics
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import restart_probe
from command_line import print_table, write_json

ROOT = Path(__file__).resolve().parents[1]
CONFIG = """
import restart_probe
IMAGE_SIZE = 96
TASK_FEATURE_LENGTHS = {'image': %IMAGE_SIZE, 'label': 1}
vit:
  variant = 'Ti/16'
  width = 192
  depth = 12
  mlp_dim = 768
  num_heads = 3
BATCH_SIZE = 16
TRAIN_STEPS = 1000
SAVE_PERIOD = 1
STATS_PERIOD = 1
ACTIONS = {'TRAIN': [@LeaveAfter()]}
train.get_dataset_fn = @timed_get_dataset
"""


def parse_args():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--gin', action='append', default=[], help='a gin binding, NAME=VALUE')
  parser.add_argument('--rounds', type=int, default=5, help='restarts with and without the cache')
  parser.add_argument('--json', type=Path, help='write the rows here')
  return parser.parse_args()


def start(args, folder, steps, cache):
  """Trains until it is killed after some steps; where the seconds went."""
  (folder / 'restart.gin').write_text(CONFIG)
  files = ['gin/runs/digits_smoke.gin', folder / 'restart.gin', 'gin/heads/het_xl.gin']
  command = [sys.executable, '-m', 'het_plugin.train', *(f'--gin_file={file}' for file in files)]
  command += [f'--gin.{binding}' for binding in args.gin] + [f"--gin.MODEL_DIR='{folder}/run'"]
  environment = {k: v for k, v in os.environ.items() if k != 'JAX_COMPILATION_CACHE_DIR'}
  path = [ROOT / 'benchmarks', ROOT, os.environ.get('PYTHONPATH', '')]
  out = folder / 'parts.json'
  out.unlink(missing_ok=True)
  environment |= {
    'PYTHONPATH': os.pathsep.join(map(str, path)),
    'JAX_ENABLE_COMPILATION_CACHE': str(cache).lower(),
    restart_probe.OUT: str(out),
    restart_probe.STEPS: str(steps),
    restart_probe.STARTED: str(time.time()),
  }
  result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
  if not out.exists():
    sys.exit(f'{" ".join(command)} ended with {result.returncode}:\n{result.stderr}')
  return json.loads(out.read_text())


def main():
  args = parse_args()
  seconds = {'without': [], 'with': []}
  with tempfile.TemporaryDirectory() as folder:
    start(args, Path(folder), steps=3, cache=True)
    for _ in range(args.rounds):
      for cache, rounds in seconds.items():
        rounds.append(start(args, Path(folder), steps=1, cache=cache == 'with'))
  rows = []
  for cache, rounds in seconds.items():
    row = {part: statistics.median(parts[part] for parts in rounds) for part in rounds[0]}
    totals = [parts['total'] for parts in rounds]
    rows.append({'cache': cache, **row, 'lowest': min(totals), 'highest': max(totals)})
  print_table(list(rows[0]), [list(row.values()) for row in rows])
  write_json(args.json, rows)
  without, with_cache = (row['total'] for row in rows)
  print(
    f'{with_cache:.1f} s to the first step with the compilation cache, {without:.1f} s without: '
    f'{with_cache / without:.2f}; compile {rows[1]["compile"]:.1f} and {rows[0]["compile"]:.1f} s'
  )


if __name__ == '__main__':
  main()
