"""Kills a training run at random and shows that it ends like a run that was never interrupted.

    python -m launch.soak --rounds=50 --processes=2 --json=soak.json

First trains a reference run to its end. Then trains the same run in another folder. In each round
one process or all of them get SIGKILL at a random moment: during start-up, between checkpoints, or
while a checkpoint is being written. Some additional rounds send SIGTERM to a process or the
launcher, or kill the launcher. The same command starts the run again until it is done. At the end
both runs must be the same bit for bit: the arrays of the newest checkpoint (parameters, optimizer,
temperature, step), its input position, and metrics.jsonl without times. Equal parameters imply
equal examples: another batch in any step would change them.

The arguments after "--" are those of het_plugin.train, without MODEL_DIR, TRAIN_STEPS, SAVE_PERIOD,
EVAL_PERIOD and STATS_PERIOD, which are set here. The default is a tiny HET-XL on digits. Runs on
virtual CPU devices of this machine; needs Linux.

Exit codes: 0 the runs are the same; 1 they differ, hang, leave processes behind or fail by
themselves; 2 a setting is wrong.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from launch.supervise import PREEMPTED, WRONG

DEFAULT_TRAINING = (
  '--gin_file=het_plugin/gin/runs/digits_smoke.gin',
  '--gin_file=het_plugin/gin/heads/het_xl.gin',
  *('--gin.vit.width=16', '--gin.vit.depth=1', '--gin.vit.mlp_dim=16', '--gin.vit.num_heads=2'),
  *('--gin.vit.dropout=0.1', '--gin.BATCH_SIZE=16', '--gin.EVAL_STEPS=2', '--gin.WARMUP_STEPS=0'),
)
REFERENCE, KILLED = 'reference', 'killed'  # folders of the two runs
SAVE_PERIOD, EVAL_PERIOD = 2, 3
STEPS_PER_ROUND = 12  # more than pass in a round before its signal
AIMS = START, STEPS, WRITE = 'start-up', 'steps', 'checkpoint write'
ALL, LAUNCHER = 'all', 'launcher'

_TEMPORARY = '.orbax-checkpoint-tmp'  # part of the name of a checkpoint that is being written
_POLL_SECONDS = 0.003
_LIMIT_SECONDS = 900  # far more than any start, round or end takes
_TOKEN = 'HET_PLUGIN_SOAK'  # environment variable that marks the processes of a soak
_TIMES = re.compile(r'(^|/)(timing|goodput)/')  # metrics that are durations, not results
_SHOWN = 3  # differences of each kind that are printed


class SoakError(Exception):
  """The run hangs, fails by itself or leaves processes behind."""


@dataclasses.dataclass
class Round:
  """A round: what is planned, and what happened.

  Attributes:
    aim: START, STEPS or WRITE.
    signal: name of the signal.
    victim: number of a process, ALL or LAUNCHER.
    checkpoints: new checkpoints to wait for first; 0 for START.
    moment: when after that, as a share of the time that the next checkpoint usually takes.
    resumed, saved: step of the newest checkpoint at the start of the round and at its end.
    signalled: number of processes that got the signal.
    torn: whether a checkpoint was left incomplete.
    exit_code: exit code of the launcher; negative for the signal that killed it.
    seconds: from the start until all processes were gone.
  """

  aim: str
  signal: str
  victim: int | str
  checkpoints: int
  moment: float
  resumed: int = 0
  saved: int = 0
  signalled: int = 0
  torn: bool = False
  exit_code: int | None = None
  seconds: float = 0.0

  def text(self) -> str:
    who = f'process {self.victim}' if isinstance(self.victim, int) else self.victim
    return (
      f'{self.signal} for {who} during {self.aim}{" (torn)" if self.torn else ""}: steps '
      f'{self.resumed} to {self.saved}, exit code {self.exit_code}, {self.seconds:.0f} s'
    )


def plan(rounds: int, sigterm_rounds: int, processes: int, seed: int) -> list[Round]:
  """Rounds in random order, with each aim equally often.

  Args:
    rounds: number of rounds with SIGKILL for processes.
    sigterm_rounds: number of rounds with SIGTERM, or with SIGKILL for the launcher.
    processes: number of processes of the run.
    seed: seed of all choices.
  """
  rng = random.Random(seed)
  planned = []
  for kill, count in ((True, rounds), (False, sigterm_rounds)):
    for aim in itertools.islice(itertools.cycle(AIMS), count):
      victim = rng.choice([*range(processes), ALL if kill else LAUNCHER])
      name = 'SIGKILL' if kill or (victim == LAUNCHER and rng.random() < 0.5) else 'SIGTERM'
      wait = 0 if aim == START else rng.randint(1, 2)
      planned.append(Round(aim, name, victim, wait, rng.random()))
  rng.shuffle(planned)
  return planned


class Soak:
  """The two runs of a soak in one folder."""

  def __init__(self, folder: Path, args: argparse.Namespace, total_steps: int):
    self._folder = folder.absolute()
    self._args = args
    self._total_steps = total_steps
    # Seconds from a start to its first checkpoint, and between two checkpoints.
    self._usual: dict[str, list[float]] = {START: [], STEPS: []}

  def run_dir(self, name: str) -> Path:
    return self._folder / name

  def train_to_end(self, name: str) -> None:
    """Trains a run to its end.

    Raises:
      SoakError: it fails.
    """
    with self._started(name) as launcher:
      self._wait_for(name, launcher, checkpoints=self._total_steps)
    if launcher.returncode:
      raise SoakError(f'{name} ended with exit code {launcher.returncode}: see {self._log(name)}')

  def interrupt(self, this: Round) -> None:
    """Starts the run KILLED, does what is planned, and writes down what happened.

    Raises:
      SoakError: it ends by itself, hangs, leaves processes behind, or does not save on SIGTERM.
    """
    run_dir, since, began = self.run_dir(KILLED), time.time(), time.monotonic()
    this.resumed = newest_step(run_dir)
    with self._started(KILLED) as launcher:
      self._wait_for(KILLED, launcher, this.checkpoints)
      if this.aim == WRITE:
        self._wait_for(KILLED, launcher, checkpoints=1, write_since=since)
        time.sleep(this.moment * 0.05)
      else:
        time.sleep(this.moment * statistics.median(self._usual[this.aim]))
      if launcher.poll() is None:
        this.signalled = self._send(this, launcher)
      if not this.signalled:
        raise SoakError(f'{KILLED} ended by itself: see {self._log(KILLED)}')
    this.seconds, this.exit_code = time.monotonic() - began, launcher.returncode
    this.saved, this.torn = newest_step(run_dir), is_writing(run_dir, since)
    # A process that has not begun to train yet ends by the signal itself.
    if this.signal == 'SIGTERM' and this.aim != START and this.exit_code not in (0, PREEMPTED):
      raise SoakError(f'exit code {this.exit_code} after SIGTERM: see {self._log(KILLED)}')

  def _wait_for(
    self,
    name: str,
    launcher: subprocess.Popen,
    checkpoints: int,
    write_since: float | None = None,
  ) -> None:
    """Waits for new checkpoints, for the beginning of a write, or for the end of the launcher."""
    step, began = newest_step(self.run_dir(name)), time.monotonic()
    kind = START if write_since is None else STEPS
    deadline = began + _LIMIT_SECONDS
    while checkpoints and launcher.poll() is None:
      if write_since is not None and is_writing(self.run_dir(name), write_since):
        return
      time.sleep(_POLL_SECONDS)
      newest, now = newest_step(self.run_dir(name)), time.monotonic()
      if newest > step:
        self._usual[kind].append(now - began)
        checkpoints -= 1
        step, began, kind, deadline = newest, now, STEPS, now + _LIMIT_SECONDS
      if now > deadline:
        raise SoakError(f'no checkpoint after step {step} in {_LIMIT_SECONDS} s: {self._log(name)}')

  @contextlib.contextmanager
  def _started(self, name: str) -> Iterator[subprocess.Popen]:
    """Starts a run; afterwards its launcher has ended and no process is left."""
    self._folder.mkdir(parents=True, exist_ok=True)
    cache = {
      'JAX_COMPILATION_CACHE_DIR': str(self._folder / 'compilation_cache'),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    }
    args, python = self._args, sys.executable
    command = [
      *(python, '-m', 'launch.local', f'--processes={args.processes}'),
      *(f'--devices={args.devices}', '--end_seconds=2', '--', python, '-m', 'het_plugin.train'),
      *(args.training or DEFAULT_TRAINING),
      f'--gin.PjitPartitioner.num_partitions={args.num_partitions}',
      *(f'--gin.TRAIN_STEPS={self._total_steps}', f'--gin.SAVE_PERIOD={SAVE_PERIOD}'),
      *(f'--gin.EVAL_PERIOD={EVAL_PERIOD}', '--gin.STATS_PERIOD=1'),
      f'--gin.MODEL_DIR={str(self.run_dir(name))!r}',
    ]
    with open(self._log(name), 'ab') as log:
      launcher = subprocess.Popen(
        command,
        env={**cache, **os.environ, _TOKEN: str(self._folder)},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
      )
    try:
      yield launcher
      deadline = time.monotonic() + _LIMIT_SECONDS
      # Processes whose launcher was killed save before they end.
      while launcher.poll() is None or self._processes():
        if time.monotonic() > deadline:
          raise SoakError(f'processes are left after {_LIMIT_SECONDS} s: {self._processes()}')
        time.sleep(0.1)
    finally:
      for pid in (launcher.pid, *self._processes()):
        with contextlib.suppress(ProcessLookupError):
          os.kill(pid, signal.SIGKILL)
      launcher.wait()

  def _log(self, name: str) -> Path:
    return self._folder / f'{name}.log'

  def _send(self, this: Round, launcher: subprocess.Popen) -> int:
    """Sends the signal and returns the number of processes that got it."""
    victims = [launcher.pid] if this.victim == LAUNCHER else []
    while not victims and launcher.poll() is None:  # the launcher may not have started them yet
      processes = self._processes().items()
      victims = [pid for pid, i in processes if i is not None and this.victim in (i, ALL)]
    for pid in victims:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.Signals[this.signal])
    return len(victims)

  def _processes(self) -> dict[int, int | None]:
    """The running processes of this soak: {pid: number in the run, None for a launcher}."""
    token, found = f'{_TOKEN}={self._folder}'.encode(), {}
    for folder in Path('/proc').glob('[0-9]*'):
      try:
        variables = (folder / 'environ').read_bytes().split(b'\0')
      except (FileNotFoundError, ProcessLookupError, PermissionError):
        continue  # it has ended, or belongs to another user
      if token in variables:
        index = next((v[15:] for v in variables if v.startswith(b'JAX_PROCESS_ID=')), None)
        found[int(folder.name)] = None if index is None else int(index)
    return found


def newest_step(run_dir: Path) -> int:
  """Step of the newest complete checkpoint; 0 if there is none."""
  names = [path.name.removeprefix('checkpoint_') for path in run_dir.glob('checkpoint_*')]
  return max((int(name) for name in names if name.isdigit()), default=0)


def is_writing(run_dir: Path, since: float) -> bool:
  """Whether there is an incomplete checkpoint that is newer than the time `since`."""
  for path in run_dir.glob(f'*{_TEMPORARY}*'):
    with contextlib.suppress(FileNotFoundError):
      if path.stat().st_mtime > since:
        return True
  return False


def compare_checkpoints(reference: Path, run: Path) -> tuple[list[str], int]:
  """Differences between the newest checkpoints of two runs, bit for bit; the number of arrays."""
  from het_plugin.training import checkpoint_reader as reader  # imports JAX, which takes seconds

  folders = [reader.find(folder) for folder in (reference, run)]
  if folders[0].name != folders[1].name:
    return [f'the newest checkpoint is {folders[1].name}, not {folders[0].name}'], 0
  expected, got = map(reader.read_arrays, folders)
  different = [f'{name} is in one of the checkpoints only' for name in expected.keys() ^ got.keys()]
  for name in expected.keys() & got.keys():
    a, b = expected[name], got[name]
    if (a.shape, a.dtype, a.tobytes()) != (b.shape, b.dtype, b.tobytes()):
      different.append(f'{folders[0].name}: {name} differs')
  positions = [reader.read_dataset_state(folder) for folder in folders]
  if positions[0] != positions[1]:
    different.append(f'the input position is {positions[1]}, not {positions[0]}')
  return _shortened(sorted(different)), len(expected)


def compare_metrics(reference: Path, run: Path) -> tuple[list[str], int]:
  """Differences between metrics.jsonl of two runs, without times; the number of lines."""
  expected, got = (metric_lines(folder / 'metrics.jsonl') for folder in (reference, run))
  different = [
    f'line {number} of metrics.jsonl is {b}, not {a}'
    for number, (a, b) in enumerate(zip(expected, got, strict=False), 1)
    if a != b
  ]
  if len(expected) != len(got):
    different.append(f'metrics.jsonl has {len(got)} lines of results, not {len(expected)}')
  return _shortened(different), len(expected)


def metric_lines(path: Path) -> list[str]:
  """The lines without times. Lines that have only times are left out."""
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  kept = [{name: x for name, x in row.items() if not _TIMES.search(name)} for row in rows]
  return [json.dumps(row) for row in kept if row.keys() - {'step'}]


def _shortened(texts: Sequence[str]) -> list[str]:
  more = [f'... and {len(texts) - _SHOWN} more of this kind'] if len(texts) > _SHOWN else []
  return [*texts[:_SHOWN], *more]


def summary(rounds: Sequence[Round]) -> dict:
  """Counts over the rounds, for --json and the last lines of the output."""
  kills = [x for x in rounds if x.signal == 'SIGKILL' and x.victim != LAUNCHER]
  return {
    'rounds': len(kills),
    'kills': sum(x.signalled for x in kills),
    'kills_of_all': sum(x.victim == ALL for x in kills),
    'torn_writes': sum(x.torn for x in kills),
    'sigterm_rounds': len(rounds) - len(kills),
    'preempted': sum(x.exit_code == PREEMPTED for x in rounds),
    'moments': {aim: sum(x.aim == aim for x in kills) for aim in AIMS},
  }


def soak(folder: Path, args: argparse.Namespace) -> dict:
  """Trains both runs and compares them. Returns what --json gets, which each round updates."""
  sigterm_rounds = round(args.sigterm_share * args.rounds)
  planned = plan(args.rounds, sigterm_rounds, args.processes, args.seed)
  total_steps = STEPS_PER_ROUND * (len(planned) + 1)
  runs, rounds, differences, compared = Soak(folder, args, total_steps), [], [], {}
  began = time.monotonic()

  def report(finished: bool = False) -> dict:
    result = {
      **summary(rounds),
      **compared,
      **{'folder': str(folder), 'total_steps': total_steps, 'finished': finished},
      **{'mismatches': len(differences), 'differences': differences},
      'seconds': time.monotonic() - began,
      'history': [dataclasses.asdict(x) for x in rounds],
    }
    if args.json is not None:
      args.json.write_text(json.dumps(result, indent=1) + '\n')
    return result

  try:
    runs.train_to_end(REFERENCE)
    print(f'reference: {total_steps} steps, {time.monotonic() - began:.0f} s', flush=True)
    for this in planned:
      runs.interrupt(this)
      rounds.append(this)
      print(f'round {len(rounds)}/{len(planned)}  {this.text()}', flush=True)
      report()
    runs.train_to_end(KILLED)
    folders = runs.run_dir(REFERENCE), runs.run_dir(KILLED)
    in_checkpoints, compared['arrays'] = compare_checkpoints(*folders)
    in_metrics, compared['metric_lines'] = compare_metrics(*folders)
    differences += in_checkpoints + in_metrics
  except SoakError as error:
    differences.append(f'after {len(rounds)} rounds: {error}')
  return report(finished=True)


def parse_args() -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--rounds', type=int, required=True, help='Number of rounds with SIGKILL.')
  parser.add_argument('--processes', type=int, default=2, help='Number of processes of the run.')
  parser.add_argument('--devices', type=int, default=2, help='Virtual CPU devices per process.')
  parser.add_argument('--num_partitions', type=int, default=2, help='Size of the model axis.')
  parser.add_argument(
    '--sigterm_share',
    type=float,
    default=0.2,
    help='Number of additional rounds, as a share of --rounds, with SIGTERM for a process or the '
    'launcher, or SIGKILL for the launcher.',
  )
  parser.add_argument('--seed', type=int, default=0, help='Seed of all choices.')
  parser.add_argument('--folder', type=Path, help='New folder for the runs; default: temporary.')
  parser.add_argument('--json', type=Path, help='File for all figures.')
  parser.add_argument('training', nargs='*', help='Arguments of het_plugin.train, after "--".')
  args = parser.parse_args()
  for name in ('rounds', 'processes', 'devices', 'num_partitions'):
    if getattr(args, name) < 1:
      raise ValueError(f'--{name}={getattr(args, name)} must be at least 1')
  devices = args.processes * args.devices
  if devices % args.num_partitions:
    raise ValueError(f'--num_partitions={args.num_partitions} must divide the {devices} devices')
  if args.sigterm_share < 0:
    raise ValueError(f'--sigterm_share={args.sigterm_share} must be at least 0')
  if args.folder is not None and args.folder.exists() and any(args.folder.iterdir()):
    raise ValueError(f'--folder={args.folder} must be new or empty')
  if not Path('/proc').is_dir():
    raise ValueError('soak needs Linux: it finds its processes in /proc')
  return args


def main() -> int:
  try:
    args = parse_args()
  except ValueError as error:
    print(f'Error: {error}', file=sys.stderr)
    return WRONG
  for number in (signal.SIGTERM, signal.SIGHUP):  # so that `finally` ends the processes
    if signal.getsignal(number) != signal.SIG_IGN:
      signal.signal(number, lambda number, _: sys.exit(128 + number))
  folder = args.folder or Path(tempfile.mkdtemp(prefix='soak-'))
  result = soak(folder, args)
  counts = {name: result[name] for name in summary(()) if name != 'moments'}
  print(', '.join(f'{name} {value}' for name, value in (counts | result['moments']).items()))
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
