"""Where a run stands, from the files that it leaves; reads runs of other places and older ones too.

Knows neither JAX nor orbax: it is to answer at once.
"""

import concurrent.futures
import dataclasses
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from het_plugin.operations import goodput
from het_plugin.operations.facts import (
  DONE,
  FAILED,
  FOLDER,
  RUNNING,
  Facts,
  attempts,
  read_attempts,
  read_processes,
)
from het_plugin.training import observer, run_files

# Further states of a run. STALE: it gives no sign of life any more, and did not say why.
STARTING, STALE = 'starting', 'stale'
KILLED = 'killed'  # of an attempt that did not say how it ended

_SCALARS = {
  'loss': 'train/loss',
  'nll': 'train/nll',
  'tau': 'train/tau',
  'gradient_norm': 'train/gradient_norm',
  'param_norm': 'train/param_norm',
  'learning_rate': 'train/learning_rate',
  'ms_per_step': 'train/timing/ms_per_step',
  'examples_per_second': 'train/timing/examples_per_second',
  'data_wait_share': 'train/timing/data_wait_share',
  'mfu': 'train/timing/mfu',
  'compile_seconds': 'train/timing/compile_seconds',
  'save_seconds': 'train/timing/save_seconds',
}
_EVALUATIONS = ('training_eval', 'infer_eval', 'fewshot')
_BEFORE_TRAINING = (observer.START, observer.RESTORE, observer.COMPILE)
_BEHIND_SECONDS = 10.0  # shorter waits of processes for each other are no sign of anything
_MUCH_DATA_WAIT = 0.1
_READERS = 16
_PROCESS_COLUMNS = ('process', 'host', 'pid', 'state', 'phase', 'step', 'ticks')

Scalars = Mapping[str, tuple[int, float | None]]


@dataclasses.dataclass(frozen=True)
class _Run:
  """What was read.

  Attributes:
    folder: of the run.
    attempts: facts of process 0 of each attempt, by number.
    processes: facts of all processes of the newest attempt, by their numbers.
    scalars: {name: (step, value)} of the last time that each was written; None is not finite.
    checkpoints: by step, those being written to an object store included.
    now: when, in Unix seconds.
    stale_seconds: a process that gave no sign of life for so long does not run any more.
  """

  folder: epath.Path
  attempts: Mapping[int, Facts]
  processes: Sequence[Facts]
  scalars: Scalars
  checkpoints: Mapping[int, epath.Path]
  now: float
  stale_seconds: float

  @property
  def last(self) -> Facts | None:
    """Process 0 of the newest attempt, or another one where it is not seen."""
    return self.processes[0] if self.processes else None

  @property
  def start(self) -> Facts | None:
    """The newest attempt that has read its checkpoint, or the newest at all."""
    attempts = [facts for facts in self.attempts.values() if facts.start_step is not None]
    return attempts[-1] if attempts else self.last

  @property
  def last_sign(self) -> float | None:
    """When the run last wrote something, in Unix seconds."""
    if self.processes:
      return max(facts.time for facts in self.processes)
    # Of a version that kept no facts.
    times = [_modified(self.folder / name) for name in ('metrics.jsonl', 'config.gin')]
    return max((time for time in times if time is not None), default=None)

  def age(self, then: float | None) -> float | None:
    """Seconds since; other machines' clocks may be ahead."""
    return None if then is None else max(0.0, self.now - then)

  def is_fresh(self, then: float | None) -> bool:
    return then is not None and self.age(then) < self.stale_seconds


def read(
  run_dir: epath.PathLike, stale_seconds: float = 60.0, now: float | None = None
) -> dict[str, Any]:
  """Everything that is known of a run, as values for JSON; None for what is not known.

  Args:
    run_dir: MODEL_DIR of the run.
    stale_seconds: a run that gave no sign of life for so long does not run any more.
    now: unix seconds; None for the clock's.

  Raises:
    ValueError: there is no run.
  """
  folder = epath.Path(run_dir)
  if not folder.is_dir():
    raise ValueError(f'RUN_DIR={run_dir} does not exist, or is no directory')
  names = {path.name for path in folder.iterdir()}
  checkpoints = run_files.numbered(folder, 'checkpoint_')
  if not names & {'config.gin', 'metrics.jsonl', FOLDER} and not checkpoints:
    raise ValueError(
      f'RUN_DIR={run_dir} is no run: it has none of config.gin, metrics.jsonl, {FOLDER}, '
      'checkpoint_STEP'
    )
  processes_by_attempt = map(read_processes, reversed(attempts(folder).values()))
  run = _Run(
    folder=folder,
    attempts=read_attempts(folder),
    processes=next(filter(None, processes_by_attempt), []),
    scalars=_last_scalars(folder),
    checkpoints=checkpoints,
    now=time.time() if now is None else now,
    stale_seconds=stale_seconds,
  )
  progress = _progress(run)
  facts = {
    'run_dir': os.fspath(folder),
    'time': run.now,
    **progress,
    'metrics_step': run.scalars['train/loss'][0] if 'train/loss' in run.scalars else None,
    'metrics': {key: run.scalars[name][1] for key, name in _SCALARS.items() if name in run.scalars},
    'evaluations': _evaluations(run.scalars),
    'checkpoint': _checkpoint(run),
    'unreadable_checkpoints': list(run_files.numbered(folder, 'unreadable_checkpoint_')),
    'processes': _processes(run),
    'attempts': _attempts(run, progress['state']),
    'goodput': _goodput(run),
    'loss_spikes': list(run_files.read_lines(folder / 'loss_spikes.jsonl')),
    'nonfinite_steps': list(run_files.numbered(folder / 'nonfinite', 'step_', '.json')),
    'corrupt_records': _corrupt_records(run.scalars),
    'configs_until': list(run_files.numbered(folder, 'config_until_', '.gin')),
    'profiles': _profiles(folder),
    'profile_is_requested': 'profile_request' in names,
  }
  return facts | {'problems': _problems(facts)}


def _last_scalars(folder: epath.Path) -> Scalars:
  found = {}
  for line in run_files.read_lines(folder / 'metrics.jsonl'):
    step = line.pop('step', None)
    if isinstance(step, int):
      found |= {name: (step, value) for name, value in line.items()}
  return found


def _progress(run: _Run) -> dict[str, Any]:
  step, total = _step(run), _total_steps(run)
  state, message = _state(run, step == total)
  pace = _seconds_per_step(run)
  knows_end = state == RUNNING and total is not None and pace is not None
  return {
    'state': state,
    'message': message,
    'seconds_since_sign_of_life': run.age(run.last_sign),
    'step': step,
    'total_steps': total,
    'percent': 100 * step / total if total else None,
    'seconds_per_step': pace,
    'eta_seconds': (total - step) * pace if knows_end else None,
  }


def _step(run: _Run) -> int:
  """The last step done; before a start has read its checkpoint, that of the start before."""
  if run.start is not None and run.start.start_step is not None:
    return run.start.step
  return max([*run.checkpoints, *(step for step, _ in run.scalars.values())], default=0)


def _total_steps(run: _Run) -> int | None:
  if run.last is not None:
    return run.last.total_steps
  try:
    config = (run.folder / 'config.gin').read_text()
  except OSError:
    return None
  bound = re.search(r'^train\.total_steps = (?:(\d+)|%(\w+))', config, re.M)
  if bound and bound[2]:
    bound = re.search(rf'^{bound[2]} = (\d+)', config, re.M)
  return int(bound[1]) if bound else None


def _state(run: _Run, is_complete: bool) -> tuple[str, str]:
  """(state, why)."""
  failed = [facts for facts in run.processes if facts.state == FAILED]
  if failed:
    return FAILED, failed[0].message
  if run.last is None:
    if is_complete:
      return DONE, ''
    return (RUNNING if run.is_fresh(run.last_sign) else STALE), ''
  if run.last.state != RUNNING:
    return run.last.state, run.last.message
  if not any(facts.state == RUNNING and run.is_fresh(facts.time) for facts in run.processes):
    return STALE, ''
  return (STARTING if run.last.phase in _BEFORE_TRAINING else RUNNING), ''


def _modified(path: epath.Path) -> float | None:
  try:
    return float(path.stat().mtime)
  except OSError:
    return None


def _seconds_per_step(run: _Run) -> float | None:
  """With evaluations and checkpoints, since the run was last started."""
  if run.start is not None and run.start.steps:
    seconds = run.start.seconds.items()
    lost = (*_BEFORE_TRAINING, observer.END)
    return sum(value for phase, value in seconds if phase not in lost) / run.start.steps
  _, milliseconds = run.scalars.get('train/timing/ms_per_step', (0, None))
  return None if milliseconds is None else milliseconds / 1e3


def _evaluations(scalars: Scalars) -> dict[str, dict[str, Any]]:
  """{'training_eval/TASK': {'step': of the last one, metric: value}}."""
  found = {}
  for name, (step, value) in scalars.items():
    group, _, metric = name.rpartition('/')
    if group.split('/')[0] not in _EVALUATIONS:
      continue
    values = found.setdefault(group, {'step': step})
    if step > values['step']:
      values = found[group] = {'step': step}
    if step == values['step']:
      values[metric] = value
  return found


def _checkpoint(run: _Run) -> dict[str, Any] | None:
  """The newest checkpoint that is on disk as a whole.

  Its name tells; in an object store, where nothing can be renamed, the file that is written last.
  """
  complete = (
    item
    for item in reversed(run.checkpoints.items())
    if not run_files.is_remote(item[1]) or (item[1] / 'commit_success.txt').exists()
  )
  if (newest := next(complete, None)) is None:
    return None
  step, path = newest
  metadata = run_files.read_json(path / '_CHECKPOINT_METADATA') or {}
  nanoseconds = metadata.get('commit_timestamp_nsecs')
  written = nanoseconds / 1e9 if nanoseconds else _modified(path)
  return {'step': step, 'age_seconds': run.age(written), 'bytes': _num_bytes(path)}


def _num_bytes(folder: epath.Path) -> int:
  files = [epath.Path(root, name) for root, _, names in folder.walk() for name in names]
  with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
    return sum(pool.map(_length, files))


def _length(path: epath.Path) -> int:
  try:
    return path.stat().length
  except OSError:  # the run is deleting this checkpoint
    return 0


def _processes(run: _Run) -> list[dict[str, Any]]:
  """A row per process; `is_behind`: all wait, and this one has come less far than others."""
  rows = []
  for facts in run.processes:
    age, runs = run.age(facts.time), facts.state == RUNNING
    rows.append(
      {
        **{name: getattr(facts, name) for name in _PROCESS_COLUMNS},
        'idle_seconds': facts.idle_seconds + (age if runs else 0.0),
        'beat_seconds_ago': age,
        'is_silent': runs and age >= run.stale_seconds,
      }
    )
  waiting = all(row['idle_seconds'] >= _BEHIND_SECONDS for row in rows if row['state'] == RUNNING)
  ticks = [row['ticks'] for row in rows]
  for row in rows:
    is_least = row['ticks'] == min(ticks) < max(ticks)
    row['is_behind'] = waiting and row['state'] == RUNNING and is_least
  return rows


def _attempts(run: _Run, state: str) -> list[dict[str, Any]]:
  rows = []
  for number, facts in run.attempts.items():
    ended = facts.state
    if ended == RUNNING:  # it does not say that it was killed
      is_last = number == max(run.attempts)
      ended = state if is_last and state != STALE else KILLED
    values = dataclasses.asdict(facts) | {'ended': ended, 'wall_seconds': facts.wall_seconds}
    rows.append({'attempt': number, **values})
  return rows


def _goodput(run: _Run) -> dict[str, Any] | None:
  if not run.attempts:
    return None
  found = goodput.goodput(list(run.attempts.values()))
  return {'share': found.share, 'wall_seconds': found.wall_seconds, **dataclasses.asdict(found)}


def _corrupt_records(scalars: Scalars) -> int | None:
  """Records that could not be read, which the training loop counts where there are any."""
  _, value = scalars.get('data/corrupt_records', (None, None))
  return None if value is None else int(value)


def _profiles(folder: epath.Path) -> list[str]:
  try:
    return sorted(path.name for path in (folder / 'profile/plugins/profile').iterdir())
  except OSError:
    return []


def _problems(facts: Mapping[str, Any]) -> list[str]:
  """What deserves a look, a sentence each."""
  found = []
  state, processes = facts['state'], facts['processes']
  age = facts['seconds_since_sign_of_life']
  if state == FAILED:
    found.append(f'The run failed: {facts["message"] or "no reason is given"}.')
  if state == STALE and age is not None:
    found.append(f'No sign of life for {goodput.duration(age)}: it was killed, or stands still.')
  if state in (RUNNING, STARTING):
    silent = [row['process'] for row in processes if row['is_silent']]
    behind = [row['process'] for row in processes if row['is_behind']]
    if silent:
      found.append(f'Silent: {_named(silent)}.')
    if behind:
      found.append(f'The others wait for {_named(behind)}.')
  metrics = facts['metrics']
  for name in ('loss', 'gradient_norm'):
    if name in metrics and metrics[name] is None:
      found.append(f'{name} is not finite at step {facts["metrics_step"]}.')
  if (metrics.get('data_wait_share') or 0.0) > _MUCH_DATA_WAIT:
    found.append(f'Training waits for data {metrics["data_wait_share"]:.0%} of its time.')
  if facts['unreadable_checkpoints']:
    steps = ', '.join(map(str, facts['unreadable_checkpoints']))
    found.append(f'Checkpoints that could not be read were set aside: {steps}.')
  if steps := facts['nonfinite_steps']:
    found.append(f'{_number(steps, "step")} not finite, the last one {steps[-1]}.')
  if spikes := facts['loss_spikes']:
    last = spikes[-1].get('step')
    found.append(f'{_number(spikes, "loss spike")}, the last one at step {last}.')
  if facts['corrupt_records']:
    found.append(f'Records that could not be read: {facts["corrupt_records"]:,}.')
  return found


def _named(processes: Sequence[int]) -> str:
  return f'process{"es" if len(processes) > 1 else ""} {", ".join(map(str, processes))}'


def _number(values: Sequence[Any], name: str) -> str:
  return f'{len(values):,} {name}{"s" if len(values) > 1 else ""}'
