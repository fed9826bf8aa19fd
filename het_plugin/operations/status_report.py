"""The state and progress of a run (`run_status`), as text and as a page."""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from het_plugin import reporting
from het_plugin.operations import goodput, run_status
from het_plugin.system import run_files, terminal

Found = Mapping[str, Any]

_MISSING = '–'
_SHOWN_PROCESSES = 16
_SHOWN_ATTEMPTS = 10
_STEPS = {
  'unreadable_checkpoints': 'unreadable, set aside',
  'configs_until': 'configuration changed at step',
  'nonfinite_steps': 'steps that were not finite',
  'profiles': 'profiles',
}


def headline(found: Found) -> str:
  """One sentence: the state, the step, the time left."""
  parts = [f'{found["state"]}: step {found["step"]:,}']
  if found['total_steps'] is not None:
    parts[0] += f' of {found["total_steps"]:,}'
  if found['percent'] is not None:
    parts[0] += f' ({found["percent"]:.0f}%)'
  if found['eta_seconds'] is not None:
    parts.append(f'about {goodput.duration(found["eta_seconds"])} left')
  if found['state'] != run_status.STALE and found['seconds_since_sign_of_life'] is not None:
    parts.append(f'last sign of life {_ago(found["seconds_since_sign_of_life"])}')
  return ', '.join(parts) + '.'


def text(found: Found) -> str:
  """The report for a terminal, without a newline at its end."""
  lines = [found['run_dir'], headline(found)]
  if found['problems']:
    lines += ['', *(f'! {problem}' for problem in found['problems'])]
  lines = (terminal.printable(line.replace('\n', ' ')) for line in lines)
  return '\n\n'.join(['\n'.join(lines), *map(reporting.plain_table, tables(found))])


def page(found: Found) -> str:
  """The report as an HTML document."""
  report = reporting.Report(
    title=found['run_dir'],
    introduction=headline(found),
    json=found,
    alarms=found['problems'],
    tables=tables(found),
  )
  return report.page('het_plugin.status', _figures(found['run_dir']))


def _figures(run_dir: str) -> list[reporting.Figure]:
  """The curves of training and evaluations against the step."""
  path = epath.Path(run_dir) / 'metrics.jsonl'
  # The problems of the run tell of damaged lines.
  lines = run_files.read_lines(path, lambda _: None, run_files.TAIL_BYTES)
  curves = run_status.curves(lines)
  if not curves:
    return []
  caption = f'Training and evaluations: {", ".join(curves)}'
  return [reporting.Figure(reporting.curve_pngs(curves), caption)]


def tables(found: Found) -> list[reporting.Table]:
  """The tables that have rows."""
  metrics = [
    (title, reporting.cell(found['metrics'][key], spec=spec))
    for key, (_, title, spec) in run_status.METRICS.items()
    if key in found['metrics']
  ]
  evaluations = [
    (group, f'{values["step"]:,}', metric, reporting.cell(value, spec='.4g'))
    for group, values in found['evaluations'].items()
    for metric, value in values.items()
    if metric != 'step'
  ]
  step = found['metrics_step']  # None before the first line of losses
  training = 'training' if step is None else f'training, last written at step {step}'
  made = [
    reporting.Table(training, ('', ''), metrics),
    reporting.Table('evaluations', ('', 'step', 'metric', 'value'), evaluations),
    reporting.Table('files', ('', ''), _files(found)),
    _processes(found['processes']),
    _attempts(found['attempts']),
    _goodput(found['goodput']),
  ]
  return [table for table in made if table.lines]


def _files(found: Found) -> list[tuple[str, str]]:
  lines = []
  if checkpoint := found['checkpoint']:
    size = f'{checkpoint["bytes"] / 1e6:,.1f} MB'
    age = _MISSING if checkpoint['age_seconds'] is None else _ago(checkpoint['age_seconds'])
    lines.append(('last complete checkpoint', f'step {checkpoint["step"]:,}, {age}, {size}'))
  lines += [(title, _enumeration(found[key])) for key, title in _STEPS.items() if found[key]]
  if found['profile_is_requested']:
    lines.append(('profile', 'requested'))
  if found['corrupt_records']:
    lines.append(('corrupt records', f'{found["corrupt_records"]:,}'))
  return lines


def _processes(processes: Sequence[Mapping[str, Any]]) -> reporting.Table:
  shown = processes
  caption = 'processes'
  if len(processes) > _SHOWN_PROCESSES:
    order = sorted(
      processes,
      key=lambda row: (not row['is_silent'], not row['is_behind'], -row['idle_seconds']),
    )
    shown = order[:_SHOWN_PROCESSES]
    caption = f'processes: {len(shown)} of {len(processes)}, those without progress first'
  lines = [
    (
      *(str(row[key]) for key in ('process', 'host', 'pid', 'state', 'phase', 'step')),
      f'{row["idle_seconds"]:.0f} s',
      _ago(row['beat_seconds_ago']),
      ', '.join(word for word in ('silent', 'behind') if row[f'is_{word}']),
    )
    for row in shown
  ]
  header = ('', 'host', 'pid', 'state', 'phase', 'step', 'no progress for', 'last sign', '')
  return reporting.Table(caption, header, lines)


def _attempts(attempts: Sequence[Mapping[str, Any]]) -> reporting.Table:
  lines = [
    (
      str(row['attempt']),
      f'{datetime.datetime.fromtimestamp(row["began"]):%Y-%m-%d %H:%M:%S}',
      goodput.duration(row['wall_seconds']),
      _MISSING if row['start_step'] is None else f'{row["start_step"]:,} to {row["step"]:,}',
      reporting.cell(row['saved_step'], spec=','),
      row['ended'],
    )
    for row in attempts[-_SHOWN_ATTEMPTS:]
  ]
  caption = f'starts: {len(attempts)}, {reporting.counted(len(attempts) - 1, "restart")}'
  return reporting.Table(caption, ('', 'began', 'lasted', 'steps', 'saved', 'ended'), lines)


def _goodput(found: Mapping[str, Any] | None) -> reporting.Table:
  if not found or not found['wall_seconds']:
    return reporting.Table('', (), ())
  wall = found['wall_seconds']
  parts = {part: value for part, value in found['seconds'].items() if value}
  lines = [
    (goodput.PARTS.get(part, part), goodput.duration(value), f'{value / wall:.1%}')
    for part, value in sorted(parts.items(), key=lambda item: -item[1])
  ]
  caption = f'goodput {found["share"]:.1%} of {goodput.duration(wall)}'
  if found['repeated_steps']:
    caption += f', {found["repeated_steps"]:,} steps repeated'
  return reporting.Table(caption, ('', 'time', 'share'), lines)


def _enumeration(values: Sequence[Any], shown: int = 8) -> str:
  """The last of the values as text."""
  more = f'{len(values) - shown:,} more, ' if len(values) > shown else ''
  return more + ', '.join(str(value) for value in values[-shown:])


def _ago(seconds: float) -> str:
  return f'{goodput.duration(seconds)} ago' if round(seconds) else 'now'
