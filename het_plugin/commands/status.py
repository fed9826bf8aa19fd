"""Prints the state and progress of a run. RUN_DIR is its MODEL_DIR, local or gs://.

    python -m het_plugin.status runs/het_xl
    python -m het_plugin.status runs/het_xl --watch=10
    python -m het_plugin.status runs/het_xl --profile_steps=5    # asks the run for a profile

Exit codes: 0 the run could be read, in any state; 2 RUN_DIR is not a run, or a flag is wrong.
"""

import dataclasses
import sys
import time
from typing import Annotated, ClassVar

from het_plugin import reporting
from het_plugin.cli.settings import ResultFiles
from het_plugin.operations import attempts, run_status, status_report
from het_plugin.system import run_files
from het_plugin.system.ranges import Count

_CLEAR = '\x1b[H\x1b[2J'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(ResultFiles):
  """What is shown of a run.

  Attributes:
    watch: Seconds between two readings, until the run is done.
    stale_seconds: A run or process without a sign of life for this long counts as dead.
    profile_steps: Asks the run to profile its next steps; the value is their number.
  """

  takes_words: ClassVar[bool] = True

  watch: Annotated[float, '[0.1, inf)'] | None = None
  stale_seconds: Annotated[float, '[1, inf)'] = 60.0
  profile_steps: Count | None = None


def run(settings: Settings) -> None:
  """Prints the state of the run, again and again with --watch."""
  if len(settings.words) != 1:
    raise ValueError('write one RUN_DIR: python -m het_plugin.status RUN_DIR')
  if settings.profile_steps is not None:
    _request_profile(settings, settings.profile_steps)
  state = _show(settings)
  try:
    while settings.watch is not None and state != attempts.DONE:
      time.sleep(settings.watch)
      print(_CLEAR if sys.stdout.isatty() else '')
      state = _show(settings)
  except KeyboardInterrupt:
    print()


def _show(settings: Settings) -> str:
  """Prints and writes the facts about the run; returns its state."""
  found = run_status.read(settings.words[0], settings.stale_seconds)
  print(status_report.text(found), flush=True)
  if settings.json:
    reporting.write_json(found, settings.json)
  if settings.html:
    run_files.write_text(settings.html, status_report.page(found))
  return found['state']


def _request_profile(settings: Settings, steps: int) -> None:
  from het_plugin.operations import profiles  # imports JAX

  (run_dir,) = settings.words
  state = run_status.read(run_dir, settings.stale_seconds)['state']
  if state not in (attempts.RUNNING, run_status.STARTING):
    raise ValueError(f'--profile_steps={steps} needs a running run; {run_dir} is {state}')
  profiles.request(run_dir, steps)
