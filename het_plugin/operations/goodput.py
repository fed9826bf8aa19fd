"""How much of a run's time went into training that was kept, and where the rest went."""

import collections
import dataclasses
import datetime
from collections.abc import Mapping, Sequence

from het_plugin.operations import facts
from het_plugin.training import observer

TRAINING = 'training'  # steps whose result was kept
REPEATED = 'repeated'  # steps that were done again after a restart
DOWN = 'down'  # between attempts
# The parts of a run's time: TRAINING and REPEATED share the phase STEP.
PARTS = {
  TRAINING: 'training steps',
  observer.START: 'start-up',
  observer.RESTORE: 'restore',
  observer.COMPILE: 'compile',
  observer.DATA: 'data wait',
  observer.EVALUATE: 'evaluation',
  observer.ACTIONS: 'actions',
  observer.SAVE: 'checkpoint stalls',
  observer.END: 'closing',
  REPEATED: 'repeated steps',
  DOWN: 'down',
}


@dataclasses.dataclass(frozen=True)
class Goodput:
  """Where the time of a run went, since its first attempt began.

  Attributes:
    seconds: by part, see PARTS.
    repeated_steps: how many steps were done again.
  """

  seconds: Mapping[str, float]
  repeated_steps: int

  @property
  def wall_seconds(self) -> float:
    return sum(self.seconds.values())

  @property
  def share(self) -> float:
    """Time of the training steps kept over all time; 0 before any."""
    return self.seconds[TRAINING] / self.wall_seconds if self.wall_seconds else 0.0


def goodput(attempts: Sequence[facts.Facts]) -> Goodput:
  """Sums over a run's attempts, given by the facts of their process 0, in their order.

  Steps of an attempt beyond the one that a later attempt went on from are repeated; they count with
  that attempt's mean time per step. The time after an attempt that was done counts as no loss: such
  a run may be extended a week later.
  """
  seconds = collections.defaultdict(float, {part: 0.0 for part in PARTS})
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
    else:  # it ended in its first step
      repeated = stepping if later else 0.0
    seconds[TRAINING] += stepping - repeated
    seconds[REPEATED] += repeated
    repeated_steps += lost
    if later and attempt.state != facts.DONE:
      seconds[DOWN] += max(0.0, later[0].began - attempt.began - attempt.wall_seconds)
  return Goodput(dict(seconds), repeated_steps)


def describe(found: Goodput, num_attempts: int) -> str:
  """One line, the largest losses first."""
  losses = {part: s for part, s in found.seconds.items() if part != TRAINING and round(s) > 0}
  parts = [
    f', {PARTS.get(part, part)} {duration(seconds)}'
    for part, seconds in sorted(losses.items(), key=lambda item: -item[1])
  ]
  return (
    f'Goodput {found.share:.1%}: training steps {duration(found.seconds[TRAINING])} of '
    f'{duration(found.wall_seconds)} in {num_attempts} start{"s" if num_attempts > 1 else ""}'
    f'{"".join(parts)}.'
  )


def duration(seconds: float) -> str:
  """'0:01:40', '2 days, 3:04:05'."""
  return str(datetime.timedelta(seconds=round(seconds)))
