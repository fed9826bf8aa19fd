"""A plan as text."""

from collections.abc import Mapping, Sequence
from typing import Any

from het_plugin import reporting
from het_plugin.planning.topology import GIB

MIB = 2**20
QUICK = ' Memory by --quick is rough: without it, it was 0.7 to 1.5 times as much.'
# Advice for each part of the memory of the train step, and for the eval step.
_ADVICE = {
  'parameters': 'split them further: a larger model axis (--mesh), or gin/partitioning/fsdp.gin',
  'optimizer state': 'split it further: a larger model axis (--mesh), or gin/partitioning/fsdp.gin',
  'batch': 'a smaller BATCH_SIZE, or a larger data axis (--mesh)',
  'activations, gradients and samples': "Trainer.num_microbatches = 2 or more, remat = 'full' "
  "and dtype = 'bfloat16' of the backbone (vit.remat, resnet.remat, convnext.remat), a smaller "
  'BATCH_SIZE, or a larger data axis (--mesh)',
  'eval step': 'a smaller EVAL_BATCH_SIZE, or a larger data axis (--mesh)',
}


def text(plan: Mapping[str, Any]) -> str:
  """The result of `step.plan` as text."""
  mesh = ' x '.join(f'{name} {size}' for name, size in plan['mesh'].items())
  lines = [
    f'{plan["topology"]}: {plan["num_devices"]} devices ({plan["device_kind"]}), mesh {mesh}',
    f'{plan["head"]}, batch {plan["batch_size"]}, {_samples(plan)}, '
    f'{plan["num_params"] / 1e6:.1f}M parameters (with the padding of the classes)',
    '',
    _table(
      ('parameters of', 'split over', 'number', 'MiB per device'),
      [
        (g['group'], g['split_over'], g['num_params'], f'{g["bytes_per_device"] / MIB:.1f}')
        for g in plan['parameters']
      ],
    ),
    '',
    _memory(plan),
  ]
  for step in ('train', 'eval'):
    if step in plan:
      lines += ['', _step(step, plan[step])]
  return '\n'.join([*lines, '', verdict(plan)])


def verdict(plan: Mapping[str, Any]) -> str:
  """Whether the run fits; if not, the compiler's message and what to change."""
  hbm = plan['hbm_bytes_per_device']
  peak = plan['peak_bytes_per_device']
  if plan['fits']:
    less = QUICK if plan.get('quick') else ''
    return f'It fits: the peak is {peak / GIB:.2f} of {hbm / GIB:.2f} GiB ({peak / hbm:.0%}).{less}'
  lines = ['It does not fit' + (f': {peak / GIB:.2f} of {hbm / GIB:.2f} GiB.' if peak else '.')]
  if plan.get('quick'):
    lines.append(QUICK.strip())
  failing = [step for step in ('train', 'eval') if step in plan and not plan[step]['fits']]
  for step in failing:
    if message := plan[step]['compiler_message']:
      first = ' '.join(line.strip() for line in message.strip().splitlines()[:3])
      lines.append(f'The compiler on the {step} step: {first}')
  if 'train' in failing:
    name = dominant(plan)
    lines.append(f'The largest part: {name}. To reduce it: {_ADVICE[name]}.')
  if 'eval' in failing:
    lines.append(f'The eval step does not fit. To reduce it: {_ADVICE["eval step"]}.')
  return '\n'.join(lines)


def dominant(plan: Mapping[str, Any]) -> str:
  """The largest part of the memory of the train step."""
  held = dict(plan['bytes_per_device'])
  if plan['train']['peak_bytes'] is None:  # activations are what the compiler could not place
    used = sum(held.values())
    held['activations, gradients and samples'] = plan['hbm_bytes_per_device'] - used
  return max(held, key=held.get)


def line(plan: Mapping[str, Any]) -> str:
  """One line per compilation of a search."""
  peak = plan['peak_bytes_per_device']
  used = f'{peak / GIB:.2f} GiB' if peak is not None else 'more'
  verb = 'fits' if plan['fits'] else 'does not fit'
  return f'batch {plan["batch_size"]}, {_samples(plan)}: {used}, {verb}'


def _samples(plan: Mapping[str, Any]) -> str:
  return f'S = {plan["num_samples"]}' if plan['num_samples'] else 'no samples'


def _memory(plan: Mapping[str, Any]) -> str:
  peak = plan['train']['peak_bytes']
  rows = [
    (name, f'{size / MIB:.1f}', f'{size / peak:.0%}' if peak else '')
    for name, size in plan['bytes_per_device'].items()
  ]
  if peak:
    rows.append(('peak', f'{peak / MIB:.1f}', f'{peak / plan["hbm_bytes_per_device"]:.0%} of HBM'))
  return _table(('memory of a device in the train step', 'MiB', 'share'), rows)


def _step(name: str, step: Mapping[str, Any]) -> str:
  heading = f'{name} step: {step["flops"] / 1e12:.4g} TFLOP per device'
  if step['peak_bytes'] is not None:
    heading += f', peak {step["peak_bytes"] / GIB:.2f} GiB'
  heading += f', compiled in {step["compile_seconds"]:.0f} s'
  lines = [heading]
  if seconds := step['seconds']:
    ms = {name: f'{1e3 * x:.3g} ms' for name, x in seconds.items()}
    lines.append(
      f'an estimate at the peak rates of the chip: {ms["with_overlap"]}, or '
      f'{ms["without_overlap"]} if nothing overlaps (compute {ms["compute"]}, which is a lower '
      f'bound, memory {ms["memory"]}, collectives {ms["collectives"]})'
    )
  if step['collectives'] is None:
    lines.append('collectives: unknown, this jax cannot read the compiled program')
  elif step['collectives']:
    header = ('collective', 'times', 'MiB of results', 'in loops')
    mib = [f'{c["bytes"] / MIB:.1f}' for c in step['collectives']]
    cells = [
      (c['kind'], c['count'], x, c['in_loops'])
      for c, x in zip(step['collectives'], mib, strict=True)
    ]
    lines.append(_table(header, cells))
  return '\n'.join(lines)


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
  return reporting.aligned([header, *[[str(cell) for cell in row] for row in rows]])
