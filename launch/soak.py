"""Kills a training run again and again and shows that it ends as the run that nothing happened to.

    python -m launch.soak --rounds=50 --processes=2 --json=soak.json

First the run is trained to its end as a reference. Then it is trained once more in another folder,
and in every round one process or all of them get SIGKILL, or in some further rounds SIGTERM, at a
moment aimed at in turn: start-up, restoring, compiling, a step, an evaluation, its actions, saving,
a checkpoint being written. The same command starts it again, until it is done. In the end the two
must agree: the newest checkpoint bit for bit (step, parameters, temperature, optimizer, input
position), metrics.jsonl line by line (all but times), and the examples of each row of each step.

With --reshape every start takes another number of processes and devices and another mesh. The
examples must be the same, floats agree to --tolerance.

What is trained: after "--" the arguments of het_plugin.train, but for MODEL_DIR, TRAIN_STEPS,
SAVE_PERIOD, EVAL_PERIOD and STATS_PERIOD, which are bound here; without, a tiny HET-XL on digits
with dropout and a few-shot evaluation. All on virtual CPU devices of this machine; needs Linux.

Exit codes: 0 they agree; 1 they do not, or training ended by itself; 2 a setting is wrong.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from launch import run_comparison
from launch.supervise import PREEMPTED, WRONG

DEFAULT_TRAINING = (
  '--gin_file=het_plugin/gin/runs/digits_smoke.gin',
  '--gin_file=het_plugin/gin/heads/het_xl.gin',
  *('--gin.vit.width=16', '--gin.vit.depth=1', '--gin.vit.mlp_dim=16', '--gin.vit.num_heads=2'),
  *('--gin.vit.dropout=0.1', '--gin.BATCH_SIZE=16', '--gin.EVAL_STEPS=2', '--gin.WARMUP_STEPS=0'),
  "--gin.ACTIONS={'TRAIN_EVAL': [@FewShotAction()]}",
  *('--gin.FewShotAction.image_size=8', '--gin.FewShotAction.channels=1'),
  *('--gin.FewShotAction.shots=(1,)', '--gin.FewShotAction.seeds=(0,)'),
  *('--gin.FewShotAction.batch_size=64', '--gin.FewShotAction.datasets=(@FewShotDataset(),)'),
  *("--gin.FewShotDataset.name='digits'", "--gin.FewShotDataset.task='digits'"),
  *('--gin.FewShotDataset.max_train=100', '--gin.FewShotDataset.max_test=64'),
  '--gin.FewShotAction.period=12',
  # The gradient of a key's bias is rounding around zero, of which Adam makes whole steps: on
  # another mesh they are others.
  '--gin.adamw.eps=1e-5',
)
WORKER = 'launch.recorded_train'
REFERENCE, KILLED = 'reference', 'killed'  # the runs' folders
SAVE_PERIOD, EVAL_PERIOD, STEPS_PER_ROUND = 2, 3, 6

WRITE = 'checkpoint write'  # orbax has not renamed it yet
# What is aimed at: a phase of the run (het_plugin/operations/run_clock.py), or WRITE.
AIMS = ('start', 'restore', 'compile', 'step', 'evaluate', 'actions', 'save', WRITE, WRITE)
ALL, LAUNCHER = 'all', 'launcher'
_TEMPORARY = '.orbax-checkpoint-tmp'
_POLL_SECONDS = 0.003
_END_SECONDS = 2  # launch.local's, after the first process has ended
_LIMIT_SECONDS = 900  # nothing here takes as long
_TOKEN = 'HET_PLUGIN_SOAK'  # the environment variable by which processes are found again


@dataclasses.dataclass(frozen=True)
class Shape:
  """Processes, devices of each, and the length of the mesh's model axis."""

  processes: int
  devices: int
  partitions: int

  def __str__(self) -> str:
    data = self.processes * self.devices // self.partitions
    return f'{self.processes} x {self.devices}, mesh {data} x {self.partitions}'


@dataclasses.dataclass(frozen=True)
class Plan:
  """What is to happen in a round.

  Attributes:
    aim: one of AIMS.
    signal: its name.
    victim: the number of a process, ALL or LAUNCHER.
    steps: how many to let pass before the aim counts.
    delay: when after the beginning of what is aimed at, as a part of how long that usually takes.
    shape: of this start.
  """

  aim: str
  signal: str
  victim: int | str
  steps: int
  delay: float
  shape: Shape


@dataclasses.dataclass
class Round:
  """What did happen; times are seconds, steps and numbers None where it did not come so far.

  Attributes:
    plan: what was to.
    phase: of the run when the signal came, of the victim or else of process 0.
    writing: whether a checkpoint was being written then.
    torn: whether that write never came to its end.
    signalled: how many processes got the signal.
    resumed: the step the run went on from.
    step: the last one done before the signal.
    last_step: the last one done.
    first_step_seconds: from the start to the end of the first step.
    exit_code: the launcher's; negative for the signal that killed it.
    seconds: from the start until all processes were gone.
  """

  plan: Plan
  phase: str | None = None
  writing: bool = False
  torn: bool = False
  signalled: int = 0
  resumed: int | None = None
  step: int | None = None
  last_step: int | None = None
  first_step_seconds: float | None = None
  exit_code: int | None = None
  seconds: float | None = None

  @property
  def moment(self) -> str:
    return WRITE if self.writing else str(self.phase)

  def text(self) -> str:
    plan = self.plan
    who = f'process {plan.victim}' if isinstance(plan.victim, int) else plan.victim
    where = '' if self.step is None else f' at step {self.step}'
    since = '' if self.resumed is None else f', from step {self.resumed}'
    write = f', during a {WRITE}{" (torn)" if self.torn else ""}' if self.writing else ''
    return (
      f'{plan.shape}: {plan.signal} for {who} in {self.phase}{where}{since}{write}; '
      f'exit code {self.exit_code}, {self.seconds:.0f} s'
    )


class SoakError(Exception):
  """Training does not go on: what happened, in one sentence."""


def make_plans(
  rounds: int, sigterm_rounds: int, shape: Shape, shapes: Sequence[Shape], seed: int
) -> list[Plan]:
  """Plans in random order; every aim comes equally often.

  Args:
    rounds: with SIGKILL for processes.
    sigterm_rounds: with SIGTERM, or SIGKILL for the launcher, from which processes get SIGTERM.
    shape: of all starts, where there are no others.
    shapes: what each start chooses from.
    seed: of all choices.
  """
  rng = random.Random(seed)
  kinds = ['kill'] * rounds + ['preempt'] * sigterm_rounds
  rng.shuffle(kinds)
  aims, plans = {kind: [] for kind in kinds}, []
  for kind in kinds:
    if not aims[kind]:
      aims[kind] = rng.sample(AIMS, len(AIMS))
    chosen = rng.choice(shapes) if shapes else shape
    processes = range(chosen.processes)
    if kind == 'kill':
      victim, name = rng.choice([*processes, ALL]), 'SIGKILL'
    else:
      victim = rng.choice([*processes, LAUNCHER, LAUNCHER])
      name = rng.choice(['SIGTERM', 'SIGKILL']) if victim == LAUNCHER else 'SIGTERM'
    plans.append(
      Plan(
        aim=aims[kind].pop(),
        signal=name,
        victim=victim,
        steps=rng.randrange(STEPS_PER_ROUND - EVAL_PERIOD),
        delay=rng.random(),
        shape=chosen,
      )
    )
  return plans


def shapes_for(shape: Shape) -> list[Shape]:
  """The same number of devices, and half of it, in other processes and meshes."""
  total = shape.processes * shape.devices
  return [
    Shape(processes, devices // processes, partitions)
    for devices in sorted({total, max(total // 2, 1)})
    for processes in (1, 2, 4)
    if devices % processes == 0 and processes <= 2 * shape.processes
    for partitions in (1, 2, 4, 8)
    if devices % partitions == 0
  ]


class Observer:
  """Follows a start of the run by what its processes write, and by the files of the run."""

  def __init__(self, run_dir: Path, records: Path, durations: dict[str, list[float]]):
    """Takes the folders.

    Args:
      run_dir: of the run.
      records: what recorded_train is given.
      durations: {aim: seconds}, seen so far; longer by those seen here.
    """
    self._run_dir = run_dir
    self._records = records
    self._durations = durations
    self._offsets: dict[Path, int] = {}
    self._phases: dict[str, list[tuple[str, float]]] = collections.defaultdict(list)
    self._since = time.time()
    self._writes: dict[str, float] = {}  # temporary checkpoint: when it came
    self.resumed: int | None = None
    self.step: int | None = None
    self.first_step_seconds: float | None = None
    self.write_steps: list[int] = []  # the steps at which writes began

  def poll(self) -> None:
    """Reads what is new."""
    for path in self._records.glob('process-*.jsonl'):
      with open(path, 'rb') as file:
        file.seek(self._offsets.get(path, 0))
        text = file.read()
      whole = text[: text.rfind(b'\n') + 1]
      self._offsets[path] = self._offsets.get(path, 0) + len(whole)
      for line in whole.splitlines():
        self._take(path.stem, json.loads(line))
    with contextlib.suppress(FileNotFoundError):
      present = {name for name in os.listdir(self._run_dir) if _TEMPORARY in name}
      now = time.time()
      for name in present - self._writes.keys():
        self._writes[name] = now
        self.write_steps.append(self.step or 0)
      for name in self._writes.keys() - present:
        self._durations[WRITE].append(now - self._writes.pop(name))

  def _take(self, process: str, event: dict) -> None:
    phases = self._phases[process]
    if 'enter' in event:
      if not phases:
        self._durations['start'].append(event['time'] - self._since)
      phases.append((event['enter'], event['time']))
    elif 'exit' in event:
      name, began = phases.pop()
      if name != 'step':
        self._durations[name].append(event['time'] - began)
    elif 'begin' in event:
      self._began = event['time']
    elif self.resumed is None:
      self.resumed = self.step = event['at']
    elif event['at'] > self.step:
      self.step = event['at']
      self._durations['step'].append(event['time'] - self._began)
      if self.first_step_seconds is None:
        self.first_step_seconds = event['time'] - self._since

  @property
  def writing(self) -> bool:
    return bool(self._writes)

  @property
  def steps_done(self) -> int:
    return 0 if self.step is None else self.step - self.resumed

  def phase(self, victim: int | str) -> str:
    """What process `victim`, or else process 0, is doing."""
    phases = self._phases.get(f'process-{victim if isinstance(victim, int) else 0}')
    name = phases[-1][0] if phases else 'start'
    return 'step' if name == 'data' else name

  def reached(self, plan: Plan) -> bool:
    """Whether what the plan aims at is happening, or can no longer."""
    if plan.aim in ('start', 'restore', 'compile'):
      return self.phase(plan.victim) == plan.aim or self.steps_done > 0
    if self.steps_done >= STEPS_PER_ROUND:
      return True
    if self.resumed is None or self.steps_done < plan.steps:
      return False
    if plan.aim == WRITE:
      return self.writing and self.write_steps[-1] >= self.resumed + plan.steps
    return self.phase(plan.victim) == plan.aim

  def usual_seconds(self, aim: str) -> float:
    """How long it takes; 0 where it was not seen yet."""
    return statistics.median(self._durations[aim]) if self._durations[aim] else 0.0


class Soak:
  """The two runs of a soak in one folder."""

  def __init__(self, folder: Path, worker: str, training: Sequence[str], total_steps: int):
    """Takes the settings; nothing is started.

    Args:
      folder: takes the runs `reference` and `killed`, logs and records.
      worker: the module that trains, as launch.recorded_train does.
      training: its arguments.
      total_steps: of the run.
    """
    self._worker = worker
    self._folder = folder.absolute()
    self._training = tuple(training)
    self._total_steps = total_steps
    self._durations: dict[str, list[float]] = collections.defaultdict(list)
    # Of each run, what each of its starts wrote down.
    self.records: dict[str, list[Path]] = collections.defaultdict(list)

  def run_dir(self, name: str) -> Path:
    return self._folder / name

  def train_through(self, name: str, shape: Shape) -> Round:
    """Trains a run to its end.

    Raises:
      SoakError: it fails.
    """
    result = Round(Plan('', '', '', 0, 0.0, shape))
    with self._started(name, shape, result) as (launcher, observer):
      while launcher.poll() is None:
        observer.poll()
        time.sleep(_POLL_SECONDS)
    if result.exit_code != 0:
      raise SoakError(f'{name} ended with exit code {result.exit_code}: see {self._log(name)}')
    return result

  def interrupt(self, name: str, plan: Plan) -> Round:
    """Starts a run and does what is planned.

    Raises:
      SoakError: it ends by itself, does not come to what is aimed at, does not end after the
        signal, leaves processes, or was preempted without a checkpoint.
    """
    result = Round(plan)
    with self._started(name, plan.shape, result) as (launcher, observer):
      deadline = time.monotonic() + _LIMIT_SECONDS
      while launcher.poll() is None and not observer.reached(plan):
        observer.poll()
        time.sleep(_POLL_SECONDS)
        if time.monotonic() > deadline:
          raise SoakError(f'{plan.aim} is not reached in {_LIMIT_SECONDS} s: {self._log(name)}')
      time.sleep(plan.delay * observer.usual_seconds(plan.aim))
      observer.poll()
      result.phase, result.writing = observer.phase(plan.victim), observer.writing
      result.step = observer.step
      if launcher.poll() is None:
        result.signalled = self._send(plan, launcher)
    if not result.signalled:
      raise SoakError(
        f'training ended by itself with exit code {result.exit_code}: see {self._log(name)}'
      )
    result.torn = any(_TEMPORARY in path.name for path in self.run_dir(name).glob('*'))
    answered = result.phase not in ('start', 'restore') and plan.signal == 'SIGTERM'
    if answered and result.exit_code not in (0, PREEMPTED):
      raise SoakError(
        f'after SIGTERM training ended with exit code {result.exit_code}: see {self._log(name)}'
      )
    saved = self.run_dir(name) / f'checkpoint_{result.last_step}'
    if result.exit_code == PREEMPTED and result.last_step and not saved.exists():
      raise SoakError(f'preempted at step {result.last_step} without a checkpoint of it')
    return result

  @contextlib.contextmanager
  def _started(self, name: str, shape: Shape, result: Round):
    """(launcher, observer) of a run; afterwards it has ended and the result says how."""
    records = self._folder / 'records' / 'now'
    observer = Observer(self.run_dir(name), records, self._durations)
    before = time.monotonic()
    with open(self._log(name), 'ab') as log:
      launcher = subprocess.Popen(
        self._command(name, shape, records),
        env=self._environment(),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
      )
    try:
      yield launcher, observer
      try:
        result.exit_code = launcher.wait(_LIMIT_SECONDS)
      except subprocess.TimeoutExpired as error:
        raise SoakError(f'the launcher did not end in {_LIMIT_SECONDS} s') from error
      # Without their launcher the processes save first.
      self._wait_until_gone(_LIMIT_SECONDS if result.plan.victim == LAUNCHER else 10)
    finally:
      for pid in (launcher.pid, *self._processes()):
        with contextlib.suppress(ProcessLookupError):
          os.kill(pid, signal.SIGKILL)
      launcher.wait()
    result.seconds = time.monotonic() - before
    observer.poll()
    result.resumed, result.last_step = observer.resumed, observer.step
    result.first_step_seconds = observer.first_step_seconds
    records.mkdir(parents=True, exist_ok=True)
    self.records[name].append(records.with_name(f'{name}-{len(self.records[name]):03d}'))
    records.rename(self.records[name][-1])

  def _command(self, name: str, shape: Shape, records: Path) -> list[str]:
    python = sys.executable
    return [
      *(python, '-m', 'launch.local', f'--processes={shape.processes}'),
      *(f'--devices={shape.devices}', f'--end_seconds={_END_SECONDS}', '--'),
      *(python, '-m', self._worker, str(records), *self._training),
      f'--gin.PjitPartitioner.num_partitions={shape.partitions}',
      f'--gin.TRAIN_STEPS={self._total_steps}',
      *(f'--gin.SAVE_PERIOD={SAVE_PERIOD}', f'--gin.EVAL_PERIOD={EVAL_PERIOD}'),
      *('--gin.STATS_PERIOD=1', f'--gin.MODEL_DIR={str(self.run_dir(name))!r}'),
    ]

  def _environment(self) -> dict[str, str]:
    cache = str(self._folder / 'compilation_cache')
    defaults = {
      'JAX_COMPILATION_CACHE_DIR': cache,
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    }
    return {**defaults, **os.environ, _TOKEN: str(self._folder)}

  def _log(self, name: str) -> Path:
    return self._folder / f'{name}.log'

  def _send(self, plan: Plan, launcher: subprocess.Popen) -> int:
    """Sends the signal; to how many."""
    if plan.victim == LAUNCHER:
      launcher.send_signal(signal.Signals[plan.signal])
      return 1
    sent = 0
    for pid, index in self._processes().items():
      if index is not None and plan.victim in (index, ALL):
        with contextlib.suppress(ProcessLookupError):
          os.kill(pid, signal.Signals[plan.signal])
          sent += 1
    return sent

  def _processes(self) -> dict[int, int | None]:
    """The processes of this soak that run: {pid: number in the run, None for a launcher}."""
    token, found = f'{_TOKEN}={self._folder}'.encode(), {}
    for folder in Path('/proc').glob('[0-9]*'):
      try:
        variables = (folder / 'environ').read_bytes().split(b'\0')
      except (FileNotFoundError, ProcessLookupError, PermissionError):
        continue  # gone, or another user's
      if token in variables:
        index = next((v[15:] for v in variables if v.startswith(b'JAX_PROCESS_ID=')), None)
        found[int(folder.name)] = None if index is None else int(index)
    return found

  def _wait_until_gone(self, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := self._processes():
      if time.monotonic() > deadline:
        raise SoakError(f'processes {sorted(left)} are left {seconds} s after their launcher')
      time.sleep(0.1)


def soak(
  folder: Path,
  worker: str,
  training: Sequence[str],
  plans: Sequence[Plan],
  shape: Shape,
  tolerance: float | None,
  json_path: Path | None,
) -> dict:
  """Trains both runs and compares them.

  Returns:
    What --json takes; it has the figures so far after each round, with `finished` false.
  """
  total_steps = STEPS_PER_ROUND * (len(plans) + 1)
  made = Soak(folder, worker, training, total_steps)
  result = {'folder': str(folder), 'total_steps': total_steps, 'tolerance': tolerance}
  rounds, differences = [], []
  began = time.monotonic()
  try:
    done = made.train_through(REFERENCE, shape)
    say(f'reference: {total_steps} steps, {shape}, {done.seconds:.0f} s')
    for number, plan in enumerate(plans):
      rounds.append(made.interrupt(KILLED, plan))
      say(f'round {number + 1}/{len(plans)}  {rounds[-1].text()}')
      write(json_path, result | report(rounds, differences, began))
      if len(rounds) > 1 and rounds[-2].exit_code == PREEMPTED:
        stopped, resumed = rounds[-2].last_step, rounds[-1].resumed
        if resumed not in (None, stopped):
          differences.append(f'round {number} was preempted at {stopped}, the next began {resumed}')
    last = made.train_through(KILLED, plans[-1].shape if plans else shape)
    say(f'to the end: from step {last.resumed}, {last.seconds:.0f} s')
    comparison = run_comparison.compare(
      made.run_dir(REFERENCE),
      made.run_dir(KILLED),
      made.records[REFERENCE][0],
      made.records[KILLED],
      tolerance,
    )
    differences += comparison.differences
    result |= {
      'arrays': comparison.arrays,
      'metric_lines': comparison.metric_lines,
      'examples': comparison.examples,
      'largest_differences': dict(comparison.largest),
    }
  except SoakError as error:
    differences.append(f'after {len(rounds)} rounds: {error}')
  result |= report(rounds, differences, began) | {'finished': True}
  write(json_path, result)
  return result


def report(rounds: Sequence[Round], differences: Sequence[str], began: float) -> dict:
  """The figures so far."""
  return summary(rounds) | {
    'finished': False,
    'mismatches': len(differences),
    'differences': list(differences),
    'seconds': time.monotonic() - began,
    'history': [dataclasses.asdict(each) for each in rounds],
  }


def write(path: Path | None, result: dict) -> None:
  if path is not None:
    path.write_text(json.dumps(result, indent=1) + '\n')


def summary(rounds: Sequence[Round]) -> dict:
  """Counts over the rounds."""
  kills = [
    each for each in rounds if each.plan.signal == 'SIGKILL' and each.plan.victim != LAUNCHER
  ]
  restarts = [
    each.first_step_seconds for each in rounds if each.first_step_seconds and each.resumed
  ]
  moments = {moment: sum(each.moment == moment for each in kills) for moment in dict.fromkeys(AIMS)}
  return {
    'rounds': len(kills),
    'kills': sum(each.signalled for each in kills),
    'kills_of_all': sum(each.plan.victim == ALL for each in kills),
    'kills_of_process_0': sum(each.plan.victim in (0, ALL) for each in kills),
    'torn_writes': sum(each.torn for each in kills),
    'moments': moments,
    'sigterm_rounds': len(rounds) - len(kills),
    'preempted': sum(each.exit_code == PREEMPTED for each in rounds),
    'shapes': dict(collections.Counter(str(each.plan.shape) for each in rounds)),
    'median_restart_to_first_step_seconds': statistics.median(restarts) if restarts else None,
  }


def table(result: dict) -> str:
  """What is printed at the end."""
  lines = ['', f'{"SIGKILL in":20}rounds']
  lines += [f'{moment:20}{count:6}' for moment, count in result['moments'].items()]
  lines += [
    f'{"sum":20}{result["rounds"]:6}',
    '',
    f'rounds {result["rounds"]}, kills {result["kills"]} (all processes at once '
    f'{result["kills_of_all"]} times, process 0 {result["kills_of_process_0"]} times), writes torn '
    f'{result["torn_writes"]}, SIGTERM rounds {result["sigterm_rounds"]}, ended as preempted '
    f'{result["preempted"]}',
  ]
  if 'arrays' in result:
    lines.append(
      f'compared: {result["arrays"]} arrays, {result["metric_lines"]} lines of metrics, '
      f'{result["examples"]} examples; largest differences {result["largest_differences"]}'
    )
  lines += [f'mismatches {result["mismatches"]}', *result['differences']]
  return '\n'.join(lines)


def say(text: str) -> None:
  print(text, flush=True)


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--rounds', type=int, required=True, help='With SIGKILL.')
  parser.add_argument('--processes', type=int, default=2, help='Of the run.')
  parser.add_argument('--devices', type=int, default=2, help='Virtual CPU devices of each.')
  parser.add_argument(
    '--num_partitions', type=int, default=2, help="Length of the mesh's model axis."
  )
  parser.add_argument(
    '--sigterm_share',
    type=float,
    default=0.2,
    help='Further rounds, as a share of --rounds: SIGTERM for one process or the launcher, or '
    'SIGKILL for the launcher.',
  )
  parser.add_argument(
    '--reshape', action='store_true', help='Another number of processes and mesh at each start.'
  )
  parser.add_argument(
    '--tolerance', type=float, default=1e-4, help='Of floats with --reshape; without, none.'
  )
  parser.add_argument('--seed', type=int, default=0, help='Of all choices.')
  parser.add_argument('--folder', type=Path, help='Takes the runs; else a temporary one.')
  parser.add_argument('--json', type=Path, help='Where all figures are written.')
  parser.add_argument(
    '--worker', default=WORKER, help='The module that trains; any that records as this one does.'
  )
  parser.add_argument('training', nargs='*', help='After "--": arguments of het_plugin.train.')
  args = parser.parse_args()
  try:
    check(args)
  except ValueError as error:
    print(f'Error: {error}', file=sys.stderr)
    return WRONG
  shape = Shape(args.processes, args.devices, args.num_partitions)
  plans = make_plans(
    args.rounds,
    round(args.sigterm_share * args.rounds),
    shape,
    shapes_for(shape) if args.reshape else (),
    args.seed,
  )
  for number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) != signal.SIG_IGN:
      signal.signal(number, lambda number, _: sys.exit(128 + number))
  folder = args.folder or Path(tempfile.mkdtemp(prefix='soak-'))
  (folder / 'records').mkdir(parents=True, exist_ok=True)
  result = soak(
    folder,
    args.worker,
    args.training or (DEFAULT_TRAINING if args.worker == WORKER else ()),
    plans,
    shape,
    args.tolerance if args.reshape else None,
    args.json,
  )
  say(table(result))
  if result['mismatches']:
    say(f'The runs, their logs and records are in {folder}.')
    return 1
  if args.folder is None:
    shutil.rmtree(folder)
  return 0


def check(args: argparse.Namespace) -> None:
  """Raises ValueError, one sentence, for what cannot be."""
  for name in ('rounds', 'processes', 'devices', 'num_partitions'):
    if getattr(args, name) < 1:
      raise ValueError(f'--{name}={getattr(args, name)} must be at least 1')
  if args.processes * args.devices % args.num_partitions:
    raise ValueError(
      f'--num_partitions={args.num_partitions} must divide the {args.processes * args.devices} '
      'devices'
    )
  if args.sigterm_share < 0 or not args.tolerance > 0:
    raise ValueError(
      f'--sigterm_share={args.sigterm_share} must be at least 0, --tolerance={args.tolerance} above'
    )
  if args.folder is not None and args.folder.exists() and any(args.folder.iterdir()):
    raise ValueError(f'--folder={args.folder} is not empty: it must be new')
  if not Path('/proc').is_dir():
    raise ValueError('soak finds processes in /proc, which only Linux has')


if __name__ == '__main__':
  sys.exit(main())
