"""Attempts, the starts of a run, and the facts that each process writes about itself.

An attempt has a folder, attempts/attempt_0001, with a file process-00000.json of each process,
written every few seconds.
A process replaces its file as a whole, so a killed attempt leaves its last facts.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, get_args

from etils import epath

from het_plugin.system import ranges, run_files
from het_plugin.training import observer

FOLDER = 'attempts'
_PREFIX = 'attempt_'
_READERS = 16
_Number = Annotated[int, '[0, 9223372036854775808)']
_Text = Annotated[str, 'text']
_Seconds = Annotated[float, '[0, 8589934592)']  # up to a date that Python can write

# The states of a process. The file of a killed process still says that it is running.
State = Literal['running', 'done', 'preempted', 'failed']
RUNNING, DONE, PREEMPTED, FAILED = get_args(State)


@dataclasses.dataclass(frozen=True)
class Facts:
  """Facts about one process of an attempt.

  Attributes:
    process, processes: its index, and their number.
    began, time: when the process began and the facts were written, Unix seconds by its own clock.
    total_steps: last step of the run.
    beat: number of times the facts have been written.
    phase: one of `observer.PHASES`.
    seconds: seconds per phase so far; time in an inner phase does not count for the outer one.
    idle_seconds: seconds since the last progress.
    ticks: number of signs of progress so far. All processes have the same ones in the same order,
      so a process with fewer than another one is behind.
    start_step: the step from which the attempt continued; None until that is known.
    step: number of training steps dispatched.
    saved_step: step of the last checkpoint whose writing began; None before the first.
    message, exit_code: why and how the process ended; '' and None while it runs.
  """

  process: _Number
  processes: _Number
  host: _Text
  pid: _Number
  began: _Seconds
  time: _Seconds
  total_steps: _Number
  beat: _Number = 0
  phase: _Text = observer.START
  seconds: Mapping[str, _Seconds] = dataclasses.field(default_factory=dict)
  idle_seconds: _Seconds = 0.0
  ticks: _Number = 0
  start_step: _Number | None = None
  step: _Number = 0
  saved_step: _Number | None = None
  state: State = RUNNING
  message: _Text = ''
  exit_code: _Number | None = None

  @property
  def name(self) -> str:
    return f'process {self.process} (host {self.host}, pid {self.pid})'

  @property
  def place(self) -> str:
    return f'in phase {self.phase} at step {self.step}'

  @property
  def wall_seconds(self) -> float:
    return sum(self.seconds.values())

  @property
  def steps(self) -> int:
    """Steps done by this attempt."""
    return 0 if self.start_step is None else self.step - self.start_step


def file(attempt: epath.PathLike, process: int) -> epath.Path:
  """The file of a process in the folder of an attempt."""
  return epath.Path(attempt) / f'process-{process:05d}.json'


def write(attempt: epath.PathLike, facts: Facts) -> None:
  """Writes the file of the process, at once: a reader sees all of it or none."""
  run_files.write_json(file(attempt, facts.process), dataclasses.asdict(facts))


def remove(attempt: epath.PathLike, process: int) -> None:
  """Removes the facts of a process; the last one of an attempt takes the folder with it."""
  file(attempt, process).unlink(missing_ok=True)
  if not run_files.is_remote(attempt):  # an object store has no folders
    with contextlib.suppress(OSError):  # another process is still there
      os.rmdir(attempt)
      os.rmdir(epath.Path(attempt).parent)


def read(path: epath.PathLike) -> Facts | None:
  """The facts in a file; None if there is no file or no facts in it."""
  try:
    found = Facts(**(run_files.read_json(path) or {}))
    ranges.check(found)  # a run may be of other people
  except Exception:  # object stores raise their own types
    return None
  return found


def folders(model_dir: epath.PathLike) -> dict[int, epath.Path]:
  """The folders of a run's attempts, by number and in order."""
  return run_files.numbered(epath.Path(model_dir) / FOLDER, _PREFIX)


def new_folder(model_dir: epath.PathLike) -> epath.Path:
  """Makes the folder of the next attempt."""
  number = max(folders(model_dir), default=0) + 1
  folder = epath.Path(model_dir) / FOLDER / f'{_PREFIX}{number:04d}'
  folder.mkdir(parents=True, exist_ok=True)
  return folder


def read_attempts(model_dir: epath.PathLike) -> dict[int, Facts]:
  """The facts of process 0 of each attempt by number; unreadable ones are left out."""
  numbered = folders(model_dir)
  found = _read_all(file(folder, 0) for folder in numbered.values())
  return {n: facts for n, facts in zip(numbered, found, strict=True) if facts is not None}


def read_processes(attempt: epath.PathLike) -> list[Facts]:
  """The facts of all processes of an attempt by their numbers; unreadable ones are left out."""
  found = _read_all(run_files.numbered(attempt, 'process-', '.json').values())
  return [facts for facts in found if facts is not None]


def _read_all(paths: Iterable[epath.Path]) -> list[Facts | None]:
  with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
    return list(pool.map(read, paths))
