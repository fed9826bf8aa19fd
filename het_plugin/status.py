"""Prints the state and progress of a run. RUN_DIR is its MODEL_DIR, local or gs://.

    python -m het_plugin.status runs/het_xl
    python -m het_plugin.status runs/het_xl --watch=10
    python -m het_plugin.status runs/het_xl --profile_steps=5    # asks the run for a profile

Exit codes: 0 the run could be read, in any state; 2 RUN_DIR is not a run, or a flag is wrong.
"""

import sys
import time
from collections.abc import Sequence

from absl import flags

from het_plugin import reporting
from het_plugin.cli import command_line
from het_plugin.operations import attempts, run_status, status_report
from het_plugin.system import run_files

_CLEAR = '\x1b[H\x1b[2J'


def define_flags() -> None:
  flags.DEFINE_string('json', None, 'Where to write the same facts as JSON.')
  flags.DEFINE_string('html', None, 'Where to write them as a page.')
  flags.DEFINE_float(
    'watch', None, 'Seconds between two readings, until the run is done.', lower_bound=0.1
  )
  flags.DEFINE_float(
    'stale_seconds',
    60,
    'A run or process without a sign of life for this long counts as dead.',
    lower_bound=1,
  )
  flags.DEFINE_integer(
    'profile_steps',
    None,
    'Asks the run to profile its next steps; the value is their number.',
    lower_bound=1,
  )


def main(argv: Sequence[str]) -> None:
  with command_line.one_sentence_errors():
    if len(argv) != 2:
      raise ValueError('write one RUN_DIR: python -m het_plugin.status RUN_DIR')
    run_dir = argv[1]
    if flags.FLAGS.profile_steps is not None:
      _request_profile(run_dir, flags.FLAGS.profile_steps)
    state = _show(run_dir)
    try:
      while flags.FLAGS.watch is not None and state != attempts.DONE:
        time.sleep(flags.FLAGS.watch)
        print(_CLEAR if sys.stdout.isatty() else '')
        state = _show(run_dir)
    except KeyboardInterrupt:
      print()


def _show(run_dir: str) -> str:
  """Prints and writes the facts about the run; returns its state."""
  found = run_status.read(run_dir, flags.FLAGS.stale_seconds)
  print(status_report.text(found), flush=True)
  if flags.FLAGS.json:
    reporting.write_json(found, flags.FLAGS.json)
  if flags.FLAGS.html:
    run_files.write_text(flags.FLAGS.html, status_report.page(found))
  return found['state']


def _request_profile(run_dir: str, steps: int) -> None:
  from het_plugin.operations import profiles  # imports JAX

  state = run_status.read(run_dir, flags.FLAGS.stale_seconds)['state']
  if state not in (attempts.RUNNING, run_status.STARTING):
    raise ValueError(f'--profile_steps={steps} needs a running run; {run_dir} is {state}')
  profiles.request(run_dir, steps)


if __name__ == '__main__':
  command_line.run(main)
