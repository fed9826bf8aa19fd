"""What benchmarks/restart.py puts into the run that it starts, by a gin file that imports it.

gin files are read when the main's own imports are done.
"""

import json
import os
import time
from pathlib import Path

STARTED, STEPS, OUT = 'RESTART_STARTED', 'RESTART_STEPS', 'RESTART_OUT'  # environment variables


def install():
  """Registers the action LeaveAfter and the function timed_get_dataset with gin."""
  import gin
  from het_plugin import data
  from het_plugin.operations import run_clock
  from het_plugin.training import actions

  imported = time.time()
  seen = {'data_set': 0.0, 'steps': 0}

  class SeenClock(run_clock.RunClock):
    def __init__(self, **settings):
      super().__init__(**{**settings, 'began': None})  # imports are a part of their own
      seen['called'] = time.time()
      seen['clock'] = self

  run_clock.RunClock = SeenClock

  @gin.configurable
  def timed_get_dataset(cfg, rows):
    start = time.time()
    dataset = data.get_dataset(cfg, rows)
    seen['data_set'] += time.time() - start
    return dataset

  @gin.configurable
  class LeaveAfter(actions.BaseAction):
    """Ends the process after some steps, as a crash would, and writes down where the time went."""

    def run(self, train_state, metrics_by_task):
      seen['steps'] += 1
      if seen['steps'] < int(os.environ[STEPS]):
        return False
      total = time.time() - float(os.environ[STARTED])
      seconds = seen['clock'].snapshot().seconds
      parts = {
        'imports': imported - float(os.environ[STARTED]),
        'configuration': seen['called'] - imported,
        'data_set': seen['data_set'],
        'shapes': seconds[run_clock.START] - seen['data_set'],
        'restore': seconds[run_clock.RESTORE],
        'compile': seconds[run_clock.COMPILE],
      }
      parts['first_step'] = total - sum(parts.values())
      Path(os.environ[OUT]).write_text(json.dumps({**parts, 'total': total}))
      os._exit(0)


if STARTED in os.environ:
  install()
