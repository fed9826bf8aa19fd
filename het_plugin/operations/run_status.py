"""The state and progress of a run, from its files, also on another machine.

This module imports neither JAX nor orbax, so that it answers at once.
"""

import contextlib
import dataclasses
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from het_plugin.operations import attempts as attempts_lib
from het_plugin.operations import goodput
from het_plugin.operations.attempts import FAILED, FOLDER, RUNNING, Facts
from het_plugin.system import run_files
from het_plugin.training import observer

# Further states of a run. STALE: it stopped giving signs of life, without a reason.
STARTING = 'starting'
STALE = 'stale'
KILLED = 'killed'  # an attempt that did not write how it ended

# {key of 'metrics': (scalar, title, format)}
METRICS = {
  'loss': ('train/loss', 'loss', '.4f'),
  'nll': ('train/nll', 'NLL', '.4f'),
  'tau': ('train/tau', 'tau', '.3f'),
  'gradient_norm': ('train/gradient_norm', 'gradient norm', '.4g'),
  'param_norm': ('train/param_norm', 'parameter norm', '.4g'),
  'learning_rate': ('train/learning_rate', 'learning rate', '.3g'),
  'ms_per_step': ('train/timing/ms_per_step', 'ms/step', '.1f'),
  'examples_per_second': ('train/timing/examples_per_second', 'examples/s', ',.0f'),
  'data_wait_share': ('train/timing/data_wait_share', 'data wait', '.1%'),
  'mfu': ('train/timing/mfu', 'MFU', '.1%'),
  'compile_seconds': ('train/timing/compile_seconds', 'compile, s', '.1f'),
  'save_seconds': ('train/timing/save_seconds', 'checkpoint stall, s', '.2f'),
}
CURVES = ('loss', 'tau', 'precision_at_1')
_EVALUATIONS = ('training_eval', 'infer_eval', 'fewshot', 'zeroshot')
_BEHIND_SECONDS = 10.0  # shorter waits of processes for each other are normal
_MUCH_DATA_WAIT = 0.1
_NAMED = 3  # records that could not be read, in a problem
_CORRUPT = re.compile('Unreadable \\w+ (.+): its row is masked')  # of data.reader
_PROCESS_COLUMNS = ('process', 'host', 'pid', 'state', 'phase', 'step', 'ticks')

Scalars = Mapping[str, tuple[int, float | None]]  # (step, value); None is not finite


def read(
  run_dir: epath.PathLike, stale_seconds: float = 60.0, now: float | None = None
) -> dict[str, Any]:
  """Everything that is known about a run, as JSON values; None for unknown values.

  After `stale_seconds` without a sign of life a run counts as dead. `now` is in Unix seconds.

  Raises:
    ValueError: run_dir is not a run.
  """
  folder = epath.Path(run_dir)
  now = time.time() if now is None else now
  if not folder.is_dir():
    raise ValueError(f'RUN_DIR={run_dir} does not exist, or is not a directory')
  names = {path.name for path in folder.iterdir()}
  checkpoints = run_files.numbered(folder, 'checkpoint_')
  if not names & {'config.gin', 'metrics.jsonl', FOLDER} and not checkpoints:
    raise ValueError(
      f'RUN_DIR={run_dir} is not a run: it has none of config.gin, metrics.jsonl, {FOLDER}, '
      'checkpoint_STEP'
    )
  attempts = attempts_lib.read_attempts(folder)
  newest_first = reversed(attempts_lib.folders(folder).values())
  processes = next(filter(None, map(attempts_lib.read_processes, newest_first)), [])
  scalars, damaged = _last_scalars(folder)
  rows = _process_rows(processes, now, stale_seconds)
  last_sign = max((facts.time for facts in processes), default=None)
  age = None if last_sign is None else max(0.0, now - last_sign)  # other clocks may be ahead

  # The newest attempt that has read its checkpoint, else the newest one.
  started = [facts for facts in attempts.values() if facts.start_step is not None]
  start = (started or processes[:1] or [None])[-1]
  if start is not None and start.start_step is not None:
    step = start.step
  else:  # a start that has not read its checkpoint yet: use that of the start before
    step = max([*checkpoints, *(step for step, _ in scalars.values())], default=0)
  total = processes[0].total_steps if processes else None
  state, message = _state(processes, rows)
  pace = _seconds_per_step(start, scalars)
  knows_end = state == RUNNING and total is not None and pace is not None
  found = {
    'run_dir': os.fspath(folder),
    'time': now,
    'state': state,
    'message': message,
    'seconds_since_sign_of_life': age,
    'step': step,
    'total_steps': total,
    'percent': 100 * step / total if total else None,
    'seconds_per_step': pace,
    'eta_seconds': (total - step) * pace if knows_end else None,
    'metrics_step': scalars['train/loss'][0] if 'train/loss' in scalars else None,
    'metrics': {key: scalars[x][1] for key, (x, *_) in METRICS.items() if x in scalars},
    'evaluations': _evaluations(scalars),
    'checkpoint': _checkpoint(checkpoints, now),
    'unreadable_checkpoints': list(run_files.numbered(folder, 'unreadable_checkpoint_')),
    'processes': rows,
    'attempts': _attempt_rows(attempts, state),
    'goodput': goodput.goodput(list(attempts.values())) if attempts else None,
    'nonfinite_steps': list(run_files.numbered(folder / 'nonfinite', 'step_', '.json')),
    'corrupt_records': (corrupt := int(scalars.get('data/corrupt_records', (0, 0))[1] or 0)),
    'corrupt_names': _corrupt_names(folder) if corrupt else [],
    'configs_until': list(run_files.numbered(folder, 'config_until_', '.gin')),
    'profiles': sorted(path.name for path in folder.glob('profile/plugins/profile/*')),
    'profile_is_requested': 'profile_request' in names,
  }
  return found | {'problems': [*damaged, *_problems(found)]}


def _last_scalars(folder: epath.Path) -> tuple[Scalars, list[str]]:
  """{name: (step, last value)}, and sentences about damaged lines."""
  path = folder / 'metrics.jsonl'
  found = {}
  damaged = []
  for line in run_files.read_lines(path, damaged.append, run_files.TAIL_BYTES):
    step = line.pop('step')
    numbers = {k: x for k, x in line.items() if x is None or type(x) in (int, float)}
    found |= {name: (step, _finite(value)) for name, value in numbers.items()}
  return found, damaged


def curves(metrics: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
  """{'train' or 'training_eval/TASK': {'step': [N], 'loss': [N], ...}}, what CURVES names.

  `metrics` are the lines of a run's metrics.jsonl. NaN where a value is missing or not finite.
  """
  found: dict[str, dict[str, list[float]]] = {}
  for line in metrics:
    for group in [key.removesuffix('/loss') for key in line if key.endswith('/loss')]:
      curve = found.setdefault(group, {name: [] for name in ('step', *CURVES)})
      curve['step'].append(line['step'])
      for name in CURVES:
        value = line.get(f'{group}/{name}')
        is_number = type(value) in (int, float) and _finite(value) is not None
        curve[name].append(value if is_number else math.nan)
  return found


def _corrupt_names(folder: epath.Path) -> list[str]:
  """What the logs name of the records that could not be read."""
  found = {}
  for path in run_files.numbered(folder / 'logs', 'process-', '.jsonl').values():
    for line in run_files.read_lines(path, lambda _: None, run_files.TAIL_BYTES):
      if match := _CORRUPT.match(str(line.get('message'))):
        found[match[1]] = None
  return list(found)


def _finite(value: float | None) -> float | None:
  """The value as it is if it is in the range of a float32, as scalars of a run are; else None."""
  return value if value is not None and abs(value) < 2.0**128 else None


def _state(processes: Sequence[Facts], rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
  """(state, why)."""
  if not processes:
    return STALE, ''
  if failed := [facts for facts in processes if facts.state == FAILED]:
    return FAILED, failed[0].message
  first = processes[0]
  if first.state != RUNNING:
    return first.state, first.message
  if all(row['is_silent'] for row in rows if row['state'] == RUNNING):
    return STALE, ''
  return (STARTING if first.phase in observer.BEFORE_TRAINING else RUNNING), ''


def _seconds_per_step(start: Facts | None, scalars: Scalars) -> float | None:
  """Seconds per step since the last start, including evaluations and checkpoints."""
  if start is not None and start.steps:
    lost = (*observer.BEFORE_TRAINING, observer.END)
    return sum(x for phase, x in start.seconds.items() if phase not in lost) / start.steps
  milliseconds = scalars.get('train/timing/ms_per_step', (0, None))[1]
  return None if milliseconds is None else milliseconds / 1e3


def _evaluations(scalars: Scalars) -> dict[str, dict[str, Any]]:
  """{'training_eval/TASK': {'step': of the last one, metric: value}}."""
  last: dict[str, int] = {}
  for name, (step, _) in scalars.items():
    group = name.rpartition('/')[0]
    if group.split('/')[0] in _EVALUATIONS:
      last[group] = max(step, last.get(group, step))
  found = {group: {'step': step} for group, step in last.items()}
  for name, (step, value) in scalars.items():
    group, _, metric = name.rpartition('/')
    if last.get(group) == step and metric != 'step':
      found[group][metric] = value
  return found


def _checkpoint(checkpoints: Mapping[int, epath.Path], now: float) -> dict[str, Any] | None:
  """The newest complete checkpoint.

  Its name shows that it is complete; in an object store, where nothing can be renamed, the file
  that is written last does.
  """
  for step, path in reversed(checkpoints.items()):
    if not run_files.is_remote(path) or (path / 'commit_success.txt').exists():
      metadata = run_files.read_json(path / '_CHECKPOINT_METADATA') or {}
      nanoseconds = metadata.get('commit_timestamp_nsecs')
      is_known = run_files.is_count(nanoseconds) and nanoseconds
      age = max(0.0, now - nanoseconds / 1e9) if is_known else None
      return {'step': step, 'age_seconds': age, 'bytes': _num_bytes(path)}
  return None


def _num_bytes(folder: epath.Path) -> int:
  found = 0
  for root, _, names in folder.walk():
    for name in names:
      with contextlib.suppress(OSError):  # the run is deleting this checkpoint
        found += epath.Path(root, name).stat().length
  return found


def _process_rows(
  processes: Sequence[Facts], now: float, stale_seconds: float
) -> list[dict[str, Any]]:
  """A row per process; `is_behind` means that all wait and this one has made less progress."""
  rows = []
  for facts in processes:
    age = max(0.0, now - facts.time)
    runs = facts.state == RUNNING
    rows.append(
      {
        **{name: getattr(facts, name) for name in _PROCESS_COLUMNS},
        'idle_seconds': facts.idle_seconds + (age if runs else 0.0),
        'beat_seconds_ago': age,
        'is_silent': runs and age >= stale_seconds,
      }
    )
  waiting = all(row['idle_seconds'] >= _BEHIND_SECONDS for row in rows if row['state'] == RUNNING)
  ticks = [row['ticks'] for row in rows]
  for row in rows:
    is_least = row['ticks'] == min(ticks) < max(ticks)
    row['is_behind'] = waiting and row['state'] == RUNNING and is_least
  return rows


def _attempt_rows(attempts: Mapping[int, Facts], state: str) -> list[dict[str, Any]]:
  rows = []
  for number, facts in attempts.items():
    ended = facts.state
    if ended == RUNNING:  # a killed attempt cannot write that it was killed
      ended = state if number == max(attempts) and state != STALE else KILLED
    values = dataclasses.asdict(facts) | {'ended': ended, 'wall_seconds': facts.wall_seconds}
    rows.append({'attempt': number, **values})
  return rows


def _problems(found: Mapping[str, Any]) -> list[str]:
  """Problems that deserve a look, one sentence each."""
  problems = []
  state = found['state']
  age = found['seconds_since_sign_of_life']
  metrics = found['metrics']
  if state == FAILED:
    reason = (found['message'] or 'no reason is given').rstrip('.')
    problems.append(f'The run failed: {reason}.')
  if state == STALE and age is not None:
    problems.append(f'No sign of life for {goodput.duration(age)}: it was killed, or it hangs.')
  if state in (RUNNING, STARTING):
    for key, words in (('is_silent', 'Silent: {}.'), ('is_behind', 'The others wait for {}.')):
      if numbers := [str(row['process']) for row in found['processes'] if row[key]]:
        plural = 'es' if len(numbers) > 1 else ''
        problems.append(words.format(f'process{plural} {", ".join(numbers)}'))
  for name in ('loss', 'gradient_norm'):
    if name in metrics and metrics[name] is None:
      problems.append(f'{name} is not finite at step {found["metrics_step"]}.')
  if (metrics.get('data_wait_share') or 0.0) > _MUCH_DATA_WAIT:
    problems.append(f'Training waits for data {metrics["data_wait_share"]:.0%} of its time.')
  if found['unreadable_checkpoints']:
    steps = ', '.join(map(str, found['unreadable_checkpoints']))
    problems.append(f'Checkpoints that could not be read were set aside: {steps}.')
  if steps := found['nonfinite_steps']:
    plural = 's' if len(steps) > 1 else ''
    problems.append(f'{len(steps):,} step{plural} not finite, the last one {steps[-1]}.')
  if found['corrupt_records']:
    names = found['corrupt_names'][:_NAMED]
    more = ', ...' if len(names) < found['corrupt_records'] else ''
    named = f' ({", ".join(names)}{more})' if names else ''
    problems.append(f'Records that could not be read: {found["corrupt_records"]:,}{named}.')
  return problems
