"""The interface between `train` and an observer of the run.

An observer never changes the result of a training. `operations.Operations` writes logs and signs of
life, notices lost processes and answers SIGTERM. A benchmark or a test may pass another observer,
or none.
"""

import contextlib
import dataclasses
from typing import Any

from etils import epath

# The phases of a run. It is always in exactly one.
START = 'start'  # imports, shapes, data sets, files
RESTORE = 'restore'  # looking for a checkpoint of the run, and reading it
INITIALISE = 'initialise'  # computing the initial state, or reading it for a warm start
COMPILE = 'compile'
DATA = 'data'  # waiting for the next batch
STEP = 'step'  # dispatching steps and waiting for their results
EVALUATE = 'evaluate'
ACTIONS = 'actions'  # and writing profiles
SAVE = 'save'  # the part of a checkpoint that training waits for
END = 'end'  # after training: closing files
PHASES = (START, RESTORE, INITIALISE, COMPILE, DATA, STEP, EVALUATE, ACTIONS, SAVE, END)
BEFORE_TRAINING = (START, RESTORE, INITIALISE, COMPILE)


@dataclasses.dataclass(frozen=True)
class ObservedRun:
  """The arguments of `train` that its observer needs."""

  model_dir: epath.Path
  total_steps: int
  profile_steps: tuple[int, int] | None = None
  profiler_port: int | None = None


class Observer:
  """Observes nothing. Subclasses override some of the methods.

  Every process of a run has an observer. `train` calls it from one thread, in the same order on all
  processes. An observer serves one call of `train`.
  """

  def observing(self, run: ObservedRun) -> contextlib.AbstractContextManager[None]:
    """Encloses the run, from the first access to its data until the last file is closed."""
    del run
    return contextlib.nullcontext()

  def begin(self) -> None:
    """The settings are checked: from here on until its end the run may write to `model_dir`.

    Raises:
      ValueError: on all processes, if the directory is in use or cannot be written.
    """

  def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
    """Encloses a phase, one of PHASES. Afterwards the run is in the previous phase again."""
    del name
    return contextlib.nullcontext()

  def resumed(self, step: int) -> None:
    """Training continues from this step; 0 for a new run. All settings have been accepted."""

  def progressed(self) -> None:
    """A sign of progress inside a phase, such as a batch of an evaluation."""

  def before_step(self, step: int) -> None:
    """A step, counted from 1, is about to be dispatched."""

  def after_step(self, step: int, metrics: Any) -> None:
    """A step has been dispatched; it computes these metrics on the devices."""

  def saved(self, step: int) -> None:
    """The checkpoint of a step is on its way to disk."""

  def stop_asked(self) -> bool:
    """Whether to save and leave now; processes call it equally often and get the same answer."""
    return False

  def leaving(self, error: BaseException | None, writer: Any) -> None:
    """Training has ended, perhaps by an error, and nothing is closed yet.

    The observer may add metrics with `writer`.
    """
