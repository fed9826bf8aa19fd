"""Kills a training run at random and shows that it ends like a run that was never interrupted.

    python -m launch.soak --rounds=50 --processes=2 --json=soak.json

First trains a reference run to its end, then the same run in another folder. In each round one
process or all of them get SIGKILL at a random moment: during start-up, between checkpoints, or
while one is being written. Some additional rounds send SIGTERM. The same command starts the run
again until it is done. At the end both runs must be the same bit for bit: the arrays of the newest
checkpoint, its input position, and metrics.jsonl without times. Equal parameters imply equal
examples: another batch in any step would change them.

The arguments after "--" are arguments of het_plugin.train. MODEL_DIR, TRAIN_STEPS, SAVE_PERIOD,
EVAL_PERIOD and STATS_PERIOD are set here. The default is a tiny HET-XL on digits. Runs on
virtual CPU devices of this machine; needs Linux.

Exit codes: 0 the runs are the same; 1 they differ, hang or fail by themselves; 2 a setting is
wrong.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch import local
from launch.processes import PREEMPTED, WRONG, Group

DEFAULT_TRAINING = (
  '--gin_file=het_plugin/gin/runs/digits_smoke.gin',
  '--gin_file=het_plugin/gin/heads/het_xl.gin',
  '--gin.vit.width=16',
  '--gin.vit.depth=1',
  '--gin.vit.mlp_dim=16',
  '--gin.vit.num_heads=2',
  '--gin.vit.dropout=0.1',
  '--gin.BATCH_SIZE=16',
  '--gin.EVAL_STEPS=2',
  '--gin.WARMUP_STEPS=0',
)
STEPS_PER_ROUND = 12  # more than pass in a round before its signal
ALL = 'all'
_LIMIT_SECONDS = 900  # far more than any start, round or end takes
_TIMES = re.compile(r'(^|/)(timing|goodput)/')  # metrics that are durations, not results


class SoakError(Exception):
  """The run hangs or fails by itself."""


def plan(rounds: int, sigterm_rounds: int, processes: int, seed: int) -> list[dict[str, Any]]:
  """The rounds in random order: signal, victim, and when, as a share of the time of a start."""
  rng = random.Random(seed)
  planned = []
  for name, count in (('SIGKILL', rounds), ('SIGTERM', sigterm_rounds)):
    for _ in range(count):
      victim = rng.choice([*range(processes), *([ALL] if name == 'SIGKILL' else [])])
      planned.append({'signal': name, 'victim': victim, 'delay': 1.5 * rng.random()})
  rng.shuffle(planned)
  return planned


@contextlib.contextmanager
def started(run_dir: Path, args: argparse.Namespace, total_steps: int) -> Iterator[Group]:
  """Starts the run in a folder; afterwards none of its processes is left."""
  cache = {
    'JAX_COMPILATION_CACHE_DIR': str(run_dir.parent / 'compilation_cache'),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
  }
  command = [
    sys.executable,
    '-m',
    'het_plugin.train',
    *(args.training or DEFAULT_TRAINING),
    f'--gin.PjitPartitioner.num_partitions={math.gcd(2, args.processes * args.devices)}',
    f'--gin.TRAIN_STEPS={total_steps}',
    '--gin.SAVE_PERIOD=2',
    '--gin.EVAL_PERIOD=3',
    '--gin.STATS_PERIOD=5',
    f'--gin.MODEL_DIR={str(run_dir)!r}',
  ]
  environments = local.environments(
    {**cache, **os.environ}, local.free_port(), args.processes, args.devices
  )
  with open(f'{run_dir}.log', 'ab') as log:
    group = Group(command, environments, grace_seconds=_LIMIT_SECONDS, end_seconds=2, log=log)
    thread = threading.Thread(target=group.run)
    thread.start()
    try:
      yield group
      wait(run_dir, lambda: not thread.is_alive(), 'its end')
    finally:
      group.stop()
      group.stop()  # at once
      thread.join()


def wait(run_dir: Path, condition: Any, what: str) -> None:
  """Waits for a condition while the run makes checkpoints."""
  step = newest_step(run_dir)
  deadline = time.monotonic() + _LIMIT_SECONDS
  while not condition():
    time.sleep(0.003)
    if newest_step(run_dir) != step:
      step = newest_step(run_dir)
      deadline = time.monotonic() + _LIMIT_SECONDS
    if time.monotonic() > deadline:
      raise SoakError(f'{_LIMIT_SECONDS} s after step {step} there is not {what}: {run_dir}.log')


def newest_step(run_dir: Path) -> int:
  """Step of the newest complete checkpoint; 0 if there is none."""
  names = [path.name.removeprefix('checkpoint_') for path in run_dir.glob('checkpoint_*')]
  return max((int(name) for name in names if name.isdigit()), default=0)


def interrupt(
  this: dict, run_dir: Path, args: argparse.Namespace, total_steps: int, start_seconds: float
) -> None:
  """Starts the run, sends the planned signal, and adds to `this` what happened."""
  began = time.monotonic()
  first = newest_step(run_dir)
  with started(run_dir, args, total_steps) as group:

    def victims() -> list[int]:
      return [pid for index, pid in group.running().items() if this['victim'] in (index, ALL)]

    def is_time() -> bool:
      if group.code is not None:
        raise SoakError(f'the run ended by itself: see {run_dir}.log')
      far = newest_step(run_dir) >= first + STEPS_PER_ROUND // 2
      return (far or time.monotonic() > began + this['delay'] * start_seconds) and bool(victims())

    wait(run_dir, is_time, 'a process to kill')
    for pid in victims():
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.Signals[this['signal']])
  code = group.code
  this |= {'resumed': first, 'saved': newest_step(run_dir), 'exit_code': code}
  this['seconds'] = time.monotonic() - began
  if this['signal'] == 'SIGTERM' and this['saved'] > first and code not in (0, PREEMPTED):
    raise SoakError(f'exit code {code} after SIGTERM: see {run_dir}.log')


def compare(reference: Path, run: Path) -> tuple[list[str], dict[str, int]]:
  """Differences between two runs, bit for bit; how much was compared."""
  from het_plugin.training import checkpoint_reader as reader  # imports JAX, which takes seconds

  folders = [reader.find(folder) for folder in (reference, run)]
  if folders[0].name != folders[1].name:
    return [f'the newest checkpoint is {folders[1].name}, not {folders[0].name}'], {}
  expected, got = map(reader.read_state, folders)
  different = [f'{name} is in one of the checkpoints only' for name in expected.keys() ^ got.keys()]
  for name in expected.keys() & got.keys():
    a = expected[name]
    b = got[name]
    if (a.shape, a.dtype, a.tobytes()) != (b.shape, b.dtype, b.tobytes()):
      different.append(f'{name} differs')
  positions = [reader.read_dataset_state(folder) for folder in folders]
  if positions[0] != positions[1]:
    different.append(f'the input position is {positions[1]}, not {positions[0]}')
  lines = [metric_lines(folder / 'metrics.jsonl') for folder in (reference, run)]
  for a, b in itertools.zip_longest(*lines):
    if a != b:
      different.append(f'metrics.jsonl has {b}, not {a}')
  return different, {'arrays': len(expected), 'metric_lines': len(lines[0])}


def metric_lines(path: Path) -> list[str]:
  """The lines without times. Lines that have only times are left out."""
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  kept = [{name: x for name, x in row.items() if not _TIMES.search(name)} for row in rows]
  return [json.dumps(row) for row in kept if row.keys() - {'step'}]


def soak(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
  """Trains both runs and compares them; --json gets the result after each round."""
  planned = plan(args.rounds, round(args.sigterm_share * args.rounds), args.processes, args.seed)
  total_steps = STEPS_PER_ROUND * (len(planned) + 1)
  reference, killed = (folder / name for name in ('reference', 'killed'))
  history = []
  differences = []
  compared = {}
  began = time.monotonic()

  def result(finished: bool = False) -> dict[str, Any]:
    found = {
      'rounds': sum(x['signal'] == 'SIGKILL' for x in history),
      'sigterm_rounds': sum(x['signal'] == 'SIGTERM' for x in history),
      'preempted': sum(x['exit_code'] == PREEMPTED for x in history),
      **compared,
      'mismatches': len(differences),
      'differences': differences[:10],
      'finished': finished,
      'total_steps': total_steps,
      'seconds': time.monotonic() - began,
      'history': history,
    }
    if args.json is not None:
      args.json.write_text(json.dumps(found, indent=1) + '\n')
    return found

  def train_to_end(run_dir: Path) -> float:
    """Returns the seconds to the first new checkpoint."""
    start = time.monotonic()
    first = newest_step(run_dir)
    with started(run_dir, args, total_steps) as group:
      wait(run_dir, lambda: newest_step(run_dir) > first or group.code is not None, 'another')
      seconds = time.monotonic() - start
    if group.code:
      raise SoakError(f'{run_dir} ended with exit code {group.code}: see {run_dir}.log')
    return seconds

  try:
    start_seconds = train_to_end(reference)
    print(f'reference: {total_steps} steps, {time.monotonic() - began:.0f} s', flush=True)
    for this in planned:
      interrupt(this, killed, args, total_steps, start_seconds)
      history.append(this)
      print(
        f'round {len(history)}/{len(planned)}  {this["signal"]} for {this["victim"]}: steps '
        f'{this["resumed"]} to {this["saved"]}, exit code {this["exit_code"]}, '
        f'{this["seconds"]:.0f} s',
        flush=True,
      )
      result()
    train_to_end(killed)
    found, compared = compare(reference, killed)
    differences += found
  except SoakError as error:
    differences.append(f'after {len(history)} rounds: {error}')
  return result(finished=True)


def parse_args() -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--rounds', type=int, required=True, help='Number of rounds with SIGKILL.')
  parser.add_argument('--processes', type=int, default=2, help='Number of processes of the run.')
  parser.add_argument('--devices', type=int, default=2, help='Virtual CPU devices per process.')
  parser.add_argument(
    '--sigterm_share', type=float, default=0.2, help='Rounds with SIGTERM, as a share of --rounds.'
  )
  parser.add_argument('--seed', type=int, default=0, help='Seed of all choices.')
  parser.add_argument('--folder', type=Path, help='New folder for the runs; default: temporary.')
  parser.add_argument('--json', type=Path, help='File for all figures.')
  parser.add_argument('training', nargs='*', help='Arguments of het_plugin.train, after "--".')
  args = parser.parse_args()
  if min(args.rounds, args.processes, args.devices) < 1:
    raise ValueError('--rounds, --processes and --devices must be at least 1')
  if args.folder is not None and args.folder.exists() and any(args.folder.iterdir()):
    raise ValueError(f'--folder={args.folder} must be new or empty')
  return args


def main() -> int:
  try:
    args = parse_args()
    if args.json is not None:  # a path that is wrong ends it now, not after the reference run
      args.json.parent.mkdir(parents=True, exist_ok=True)
      args.json.open('a').close()
    folder = (args.folder or Path(tempfile.mkdtemp(prefix='soak-'))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
  except (ValueError, OSError) as error:
    print(f'Error: {error}', file=sys.stderr)
    return WRONG
  signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # `finally` ends all
  result = soak(folder, args)
  counts = ('rounds', 'sigterm_rounds', 'preempted')
  print(', '.join(f'{name} {result[name]}' for name in counts))
  if 'arrays' in result:
    print(f'compared {result["arrays"]} arrays and {result["metric_lines"]} lines of metrics')
  print(f'mismatches {result["mismatches"]}', *result['differences'], sep='\n')
  if result['mismatches']:
    print(f'The runs and their logs are in {folder}.')
    return 1
  if args.folder is None:
    shutil.rmtree(folder)
  return 0


if __name__ == '__main__':
  sys.exit(main())
