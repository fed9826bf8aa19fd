"""How much of a run's time went into training that was kept, and where the rest went."""

import collections
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from het_plugin.operations.attempts import DONE, Facts
from het_plugin.training import observer

TRAINING = 'training'  # steps whose result was kept
REPEATED = 'repeated'  # steps that were done again after a restart
DOWN = 'down'  # between attempts
_LONGEST = 1e13  # seconds that Python can write
# The parts of a run's time: TRAINING and REPEATED share the phase STEP.
PARTS = {
  TRAINING: 'training steps',
  observer.START: 'start-up',
  observer.RESTORE: 'restore',
  observer.INITIALISE: 'initialise',
  observer.COMPILE: 'compile',
  observer.DATA: 'data wait',
  observer.EVALUATE: 'evaluation',
  observer.ACTIONS: 'actions',
  observer.SAVE: 'checkpoint stalls',
  observer.END: 'closing',
  REPEATED: 'repeated steps',
  DOWN: 'down',
}


def goodput(attempts: Sequence[Facts]) -> dict[str, Any]:
  """Where the time of a run went, from the facts of process 0 of its attempts, in order.

  Steps of an attempt beyond the one from which a later attempt continued are repeated. They count
  with the mean time per step of their attempt. The time after a finished attempt is not a loss,
  because a run may be extended a week later.

  Returns:
    `seconds` by part (PARTS), their sum `wall_seconds`, `share` (time of training steps that were
    kept, over all time) and `repeated_steps`.
  """
  seconds = collections.defaultdict(float, dict.fromkeys(PARTS, 0.0))
  repeated_steps = 0
  for i, attempt in enumerate(attempts):
    later = attempts[i + 1 :]
    for phase, value in attempt.seconds.items():
      if phase != observer.STEP:
        seconds[phase] += value
    starts = [other.start_step for other in later if other.start_step is not None]
    lost = min(attempt.steps, max(0, attempt.step - min(starts, default=attempt.step)))
    stepping = attempt.seconds.get(observer.STEP, 0.0)
    if attempt.steps:
      repeated = stepping * lost / attempt.steps
    else:  # the attempt ended in its first step
      repeated = stepping if later else 0.0
    seconds[TRAINING] += stepping - repeated
    seconds[REPEATED] += repeated
    repeated_steps += lost
    if later and attempt.state != DONE:
      seconds[DOWN] += max(0.0, later[0].began - attempt.began - attempt.wall_seconds)
  wall = sum(seconds.values())
  share = seconds[TRAINING] / wall if wall else 0.0
  return {
    'share': share,
    'wall_seconds': wall,
    'seconds': dict(seconds),
    'repeated_steps': repeated_steps,
  }


def describe(found: Mapping[str, Any], num_attempts: int) -> str:
  """One line, the largest losses first."""
  seconds = found['seconds']
  losses = {part: s for part, s in seconds.items() if part != TRAINING and round(s) > 0}
  parts = [
    f', {PARTS.get(part, part)} {duration(value)}'
    for part, value in sorted(losses.items(), key=lambda item: -item[1])
  ]
  return (
    f'Goodput {found["share"]:.1%}: training steps {duration(seconds[TRAINING])} of '
    f'{duration(found["wall_seconds"])} in {num_attempts} start{"s" if num_attempts > 1 else ""}'
    f'{"".join(parts)}.'
  )


def duration(seconds: float) -> str:
  """'0:01:40', '2 days, 3:04:05'."""
  return str(datetime.timedelta(seconds=round(min(seconds, _LONGEST))))
