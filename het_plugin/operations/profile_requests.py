"""Profiles on request: a file in a run's directory asks, all processes trace the same steps.

    touch runs/digits/profile_request                  # or, with the number of steps:
    echo '{"steps": 20}' > runs/digits/profile_request

Process 0 sees the request and writes into it which steps these are, far enough ahead for the others
to read it before; when its trace is written, it removes the file. Whoever asks for certain steps
writes {"first": 1000, "last": 1010}.
"""

import dataclasses
import json
import logging
import math
from typing import Any

from etils import epath

from het_plugin.training import run_files

_log = logging.getLogger(__name__)

FILE = 'profile_request'
STEPS = 5  # of a request that says nothing


@dataclasses.dataclass(frozen=True)
class Steps:
  """Steps to trace, both inclusive, counted from 1."""

  first: int
  last: int

  def __str__(self) -> str:
    return f'steps {self.first} to {self.last}'


def parse(text: str) -> int | Steps:
  """The number of steps, or the steps, that a request asks for.

  Raises:
    ValueError: it is no request.
  """
  try:
    value = json.loads(text) if text.strip() else {}
  except ValueError:
    value = None
  if value == {}:
    return STEPS
  if _has_counts(value, 'steps'):
    return value['steps']
  if _has_counts(value, 'first', 'last') and value['first'] <= value['last']:
    return Steps(value['first'], value['last'])
  raise ValueError(
    f'{FILE} holds {text.strip()[:80]!r}: it must be empty, {{"steps": N}} or '
    '{"first": FIRST, "last": LAST}.'
  )


def _has_counts(value: Any, *names: str) -> bool:
  is_named = isinstance(value, dict) and value.keys() == set(names)
  return is_named and all(type(x) is int and x >= 1 for x in value.values())


def request(model_dir: epath.PathLike, steps: int) -> None:
  """Asks a run for a profile of its next steps.

  Raises:
    ValueError: there is a request already.
  """
  path = epath.Path(model_dir) / FILE
  if path.exists():
    raise ValueError(f'{path} exists: a profile is asked for already.')
  run_files.write_json(path, {'steps': steps})


class Requests:
  """Follows the requests of one run; every process has one and asks it every few seconds."""

  def __init__(
    self,
    model_dir: epath.PathLike,
    profiler: Any,
    *,
    is_first: bool,
    lead_seconds: float,
    last_step: int,
  ):
    """Takes what it needs; nothing is read.

    Args:
      model_dir: of the run.
      profiler: `profiling.StepProfiler`.
      is_first: whether this is process 0, which answers requests.
      lead_seconds: from the answer to the first step traced, at least: until then all processes
        have called `poll`.
      last_step: of the run.
    """
    self._path = epath.Path(model_dir) / FILE
    self._profiler = profiler
    self._is_first = is_first
    self._lead_seconds = lead_seconds
    self._last_step = last_step
    self._planned: Steps | None = None

  def poll(self, step: int, seconds_per_step: float | None) -> None:
    """Looks for a request; called every few seconds, from one thread.

    Args:
      step: the last one done.
      seconds_per_step: at present; None before the first step, when nothing can be planned.
    """
    self._finish()
    try:
      asked = parse(self._path.read_text())
    except OSError:
      return
    except ValueError as error:
      self._drop(str(error))
      return
    if self._planned is not None:
      return
    if self._is_first and seconds_per_step is not None:
      self._answer(asked, step, seconds_per_step)
    elif not self._is_first and isinstance(asked, Steps) and asked.last > step:
      self._plan(asked)

  def close(self, done: bool) -> None:
    """Called after the last step; `done` when the run has ended and nobody will answer any more."""
    self._finish()
    if done and self._is_first and self._path.exists():
      self._drop(f'{FILE} comes too late: the run is done.')

  def _finish(self) -> None:
    if self._planned is not None and self._profiler.is_done(self._planned):
      if self._is_first:
        self._path.unlink(missing_ok=True)
      self._planned = None

  def _drop(self, why: str) -> None:
    if self._is_first:
      _log.warning('%s The request is removed.', why)
      self._path.unlink(missing_ok=True)

  def _answer(self, asked: int | Steps, step: int, seconds_per_step: float) -> None:
    if isinstance(asked, int) or asked.first <= step:
      count = asked if isinstance(asked, int) else asked.last - asked.first + 1
      first = step + 1 + math.ceil(self._lead_seconds / seconds_per_step)
      asked = Steps(first, first + count - 1)
    if asked.last > self._last_step:
      self._drop(f'{FILE} cannot be met: {asked} are beyond the end, {self._last_step}.')
      return
    run_files.write_json(self._path, dataclasses.asdict(asked))
    self._plan(asked)

  def _plan(self, steps: Steps) -> None:
    _log.info('A profile is asked for: %s will be traced.', steps)
    self._planned = steps
    self._profiler.plan(steps)
