"""Where a run stands (`training.run_status`), as text and as a page."""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from het_plugin import reporting
from het_plugin.operations import goodput, run_status

Facts = Mapping[str, Any]

_MISSING = '–'
_SHOWN_PROCESSES = 16
_SHOWN_ATTEMPTS = 10
# {key of facts['metrics']: (title, format)}
_METRICS = {
  'loss': ('loss', '.4f'),
  'nll': ('NLL', '.4f'),
  'tau': ('tau', '.3f'),
  'gradient_norm': ('gradient norm', '.4g'),
  'param_norm': ('parameter norm', '.4g'),
  'learning_rate': ('learning rate', '.3g'),
  'ms_per_step': ('ms/step', '.1f'),
  'examples_per_second': ('examples/s', ',.0f'),
  'data_wait_share': ('data wait', '.1%'),
  'mfu': ('MFU', '.1%'),
  'compile_seconds': ('compile, s', '.1f'),
  'save_seconds': ('checkpoint stall, s', '.2f'),
}


def headline(facts: Facts) -> str:
  """One sentence: the state, the step, the time left."""
  parts = [f'{facts["state"]}: step {facts["step"]:,}']
  if facts['total_steps'] is not None:
    parts[0] += f' of {facts["total_steps"]:,} ({facts["percent"]:.0f}%)'
  if facts['eta_seconds'] is not None:
    parts.append(f'about {goodput.duration(facts["eta_seconds"])} left')
  if facts['state'] != run_status.STALE and facts['seconds_since_sign_of_life'] is not None:
    parts.append(f'last sign of life {_ago(facts["seconds_since_sign_of_life"])}')
  return ', '.join(parts) + '.'


def text(facts: Facts) -> str:
  """Everything for a terminal, without a newline at its end."""
  blocks = [f'{facts["run_dir"]}\n{headline(facts)}']
  if facts['problems']:
    blocks.append('\n'.join(f'! {problem}' for problem in facts['problems']))
  return '\n\n'.join([*blocks, *map(reporting.plain_table, tables(facts))])


def page(facts: Facts) -> str:
  """Everything as one HTML document."""
  return reporting.html_page(
    title=facts['run_dir'],
    introduction=headline(facts),
    rows=(),
    tables=tables(facts),
    notes=facts['problems'],
    provenance=reporting.Provenance.of_this_process('het_plugin.status', {}),
  )


def tables(facts: Facts) -> list[reporting.Table]:
  """Those that there is something for."""
  found = [
    _metrics(facts),
    _evaluations(facts['evaluations']),
    _files(facts),
    _processes(facts['processes']),
    _attempts(facts['attempts']),
    _goodput(facts['goodput']),
  ]
  return [table for table in found if table.lines]


def _metrics(facts: Facts) -> reporting.Table:
  metrics = facts['metrics']
  lines = [
    (title, _format(metrics[key], spec))
    for key, (title, spec) in _METRICS.items()
    if key in metrics
  ]
  return reporting.Table(f'training, last written at step {facts["metrics_step"]}', ('', ''), lines)


def _evaluations(evaluations: Mapping[str, Mapping[str, Any]]) -> reporting.Table:
  lines = [
    (group, f'{values["step"]:,}', metric, _format(value, '.4g'))
    for group, values in evaluations.items()
    for metric, value in values.items()
    if metric != 'step'
  ]
  return reporting.Table('evaluations', ('', 'step', 'metric', 'value'), lines)


def _files(facts: Facts) -> reporting.Table:
  lines = []
  if checkpoint := facts['checkpoint']:
    size = f'{checkpoint["bytes"] / 1e6:,.1f} MB'
    age = checkpoint['age_seconds']
    age = _MISSING if age is None else _ago(age)
    lines.append(('last complete checkpoint', f'step {checkpoint["step"]:,}, {age}, {size}'))
  steps = {
    'unreadable, set aside': facts['unreadable_checkpoints'],
    'configuration changed at step': facts['configs_until'],
    'steps that were not finite': facts['nonfinite_steps'],
    'loss spikes at step': [spike.get('step') for spike in facts['loss_spikes']],
    'profiles': facts['profiles'],
  }
  lines += [(title, _enumeration(values)) for title, values in steps.items() if values]
  if facts['profile_is_requested']:
    lines.append(('profile', 'asked for'))
  if facts['corrupt_records'] is not None:
    lines.append(('corrupt records', f'{facts["corrupt_records"]:,}'))
  return reporting.Table('files', ('', ''), lines)


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
      str(row['process']),
      str(row['host']),
      str(row['pid']),
      str(row['state']),
      str(row['phase']),
      str(row['step']),
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
      _MISSING if row['saved_step'] is None else f'{row["saved_step"]:,}',
      row['ended'],
    )
    for row in attempts[-_SHOWN_ATTEMPTS:]
  ]
  restarts = len(attempts) - 1
  caption = f'starts: {len(attempts)}, {restarts} restart{"s" * (restarts != 1)}'
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


def _format(value: float | None, spec: str) -> str:
  return _MISSING if value is None else format(value, spec)


def _enumeration(values: Sequence[Any], shown: int = 8) -> str:
  """The last ones."""
  more = f'{len(values) - shown:,} more, ' if len(values) > shown else ''
  return more + ', '.join(str(value) for value in values[-shown:])


def _ago(seconds: float) -> str:
  return f'{goodput.duration(seconds)} ago' if round(seconds) else 'now'
