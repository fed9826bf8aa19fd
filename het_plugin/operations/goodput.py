"""How much of a run's time went into training that was kept, and where the rest went.

Every start of a run is an attempt. Process 0 keeps attempts/attempt_0001.json and so on, each
written anew every few seconds, so that one that is killed is there too; the time after its last
writing counts as down time.
"""

import collections
import dataclasses
import datetime
import functools
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from het_plugin.operations import run_clock
from het_plugin.training import observer, run_files

FOLDER = 'attempts'
_PREFIX = 'attempt_'
# How an attempt ends; one that was killed does not say.
DONE, PREEMPTED, FAILED = 'done', 'preempted', 'failed'

TRAINING = 'training'  # steps whose result was kept
REPEATED = 'repeated'  # steps that were done again after a restart
DOWN = 'down'  # between attempts
# The parts of a run's time: those two of the phase STEP, the other phases, and DOWN.
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
class Attempt:
  """One start of a run, as far as it has come.

  Attributes:
    began: when its process began, in unix seconds.
    written: when this was written, in unix seconds.
    seconds: by phase of run_clock.
    start_step: the step it went on from; None where it did not come so far.
    step: the last step done.
    saved_step: of the last checkpoint whose writing began; None where there was none.
    total_steps: where the run is to end.
    ended: DONE, PREEMPTED or FAILED; None while it runs, or when it was killed.
    message: of the error that ended it.
    processes: how many.
    host: of process 0.
    pid: of process 0.
  """

  began: float
  written: float
  seconds: Mapping[str, float]
  start_step: int | None = None
  step: int = 0
  saved_step: int | None = None
  total_steps: int | None = None
  ended: str | None = None
  message: str = ''
  processes: int = 1
  host: str = ''
  pid: int = 0

  @property
  def wall_seconds(self) -> float:
    return sum(self.seconds.values())

  @property
  def steps(self) -> int:
    """Steps done."""
    return 0 if self.start_step is None else self.step - self.start_step


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


def goodput(attempts: Sequence[Attempt]) -> Goodput:
  """The sum over a run's attempts, in their order.

  Steps of an attempt beyond the one that a later attempt went on from are repeated; they count with
  that attempt's mean time a step. Time after an attempt that was done is nobody's loss: who starts
  such a run again may do it next week.
  """
  seconds = collections.defaultdict(float, {part: 0.0 for part in PARTS})
  repeated_steps = 0
  for i, attempt in enumerate(attempts):
    later = attempts[i + 1 :]
    for phase, value in attempt.seconds.items():
      if phase != observer.STEP:
        seconds[phase] += value
    going_on = [other.start_step for other in later if other.start_step is not None]
    lost = min(attempt.steps, max(0, attempt.step - min(going_on, default=attempt.step)))
    stepping = attempt.seconds.get(observer.STEP, 0.0)
    if attempt.steps:
      repeated = stepping * lost / attempt.steps
    else:  # it ended in its first step
      repeated = stepping if later else 0.0
    seconds[TRAINING] += stepping - repeated
    seconds[REPEATED] += repeated
    repeated_steps += lost
    if later and attempt.ended != DONE:
      seconds[DOWN] += max(0.0, later[0].began - attempt.began - attempt.wall_seconds)
  return Goodput(dict(seconds), repeated_steps)


def describe(found: Goodput, num_attempts: int) -> str:
  """One line, the largest losses first."""
  losses = {part: s for part, s in found.seconds.items() if part != TRAINING and round(s) > 0}
  parts = [
    f'{PARTS.get(part, part)} {duration(seconds)}'
    for part, seconds in sorted(losses.items(), key=lambda item: -item[1])
  ]
  starts = f'{num_attempts} start{"s" if num_attempts > 1 else ""}'
  return (
    f'Goodput {found.share:.1%}: training steps {duration(found.seconds[TRAINING])} of '
    f'{duration(found.wall_seconds)} in {starts}' + ''.join(f', {part}' for part in parts) + '.'
  )


def duration(seconds: float) -> str:
  """'0:01:40', '2 days, 3:04:05'."""
  return str(datetime.timedelta(seconds=round(seconds)))


def read(model_dir: epath.PathLike) -> dict[int, Attempt]:
  """The attempts of a run by number, in their order; files that are none are passed over."""
  known = {field.name for field in dataclasses.fields(Attempt)}
  attempts = {}
  for number, path in _files(model_dir).items():
    value = run_files.read_json(path) or {}
    if isinstance(value.get('seconds'), dict) and {'began', 'written'} <= value.keys():
      attempts[number] = Attempt(**{name: x for name, x in value.items() if name in known})
  return attempts


def _files(model_dir: epath.PathLike) -> dict[int, epath.Path]:
  return run_files.numbered(epath.Path(model_dir) / FOLDER, _PREFIX, '.json')


class AttemptFile:
  """The file of the attempt that this process makes; for process 0."""

  def __init__(
    self, model_dir: epath.PathLike, clock: run_clock.RunClock, total_steps: int, processes: int
  ):
    """Begins an attempt, with the first free number, and writes it."""
    folder = epath.Path(model_dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    self._earlier = list(read(model_dir).values())
    self._path = folder / f'{_PREFIX}{max(_files(model_dir), default=0) + 1:04d}.json'
    self._clock = clock
    self._attempt = functools.partial(
      Attempt,
      began=time.time() - sum(clock.snapshot().seconds.values()),
      total_steps=total_steps,
      processes=processes,
      host=socket.gethostname(),
      pid=os.getpid(),
    )
    self.write()

  def write(self, ended: str | None = None, message: str = '') -> None:
    """Brings the file up to date; `ended` and `message` at the end."""
    run_files.write_json(self._path, dataclasses.asdict(self._now(ended=ended, message=message)))

  def goodput(self) -> tuple[Goodput, int]:
    """Of this attempt and those before it, and how many they are."""
    attempts = [*self._earlier, self._now()]
    return goodput(attempts), len(attempts)

  def _now(self, **how: Any) -> Attempt:
    snapshot = self._clock.snapshot()
    return self._attempt(
      written=time.time(),
      seconds=snapshot.seconds,
      start_step=snapshot.start_step,
      step=snapshot.step,
      saved_step=snapshot.saved_step,
      **how,
    )
