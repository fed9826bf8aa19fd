"""Runs a training command and restarts it after preemptions and crashes.

    python -m launch.supervise --folder=runs/het_xl -- python -m het_plugin.train ...

Exit code 42 of the command (preempted, checkpoint saved) restarts it, at most --max_restarts times.
A signal, or an exit code above 128 that stands for a signal (134: the process lost others or was
stuck), restarts it at most --max_failures times. Any other code ends the supervisor with that code.

The folder receives the output of the command, `supervisor.log`, and `supervisor.json` with pid,
restarts, failures and exit_code. exit_code is null while the command runs, and 2 if it cannot be
started; failures count as restarts too. Only one supervisor at a time may use a folder: it locks
supervisor.json.

SIGTERM and Ctrl-C are passed on to the command, so that it saves, and the supervisor ends with the
command's code. A second signal, or --grace_seconds without an end, kills the command. Child
processes that the command leaves in its process group are killed when it ends. If the command is a
launcher and was killed alone, its processes save first: a restart waits for them, at most
--grace_seconds (Linux only).

Needs only the standard library, so that it also runs on hosts where nothing is installed yet.
"""

import argparse
import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from launch import processes


def read_state(folder: Path) -> dict[str, int | None]:
  """The contents of supervisor.json in the folder; empty if there is none."""
  with contextlib.suppress(FileNotFoundError, ValueError):
    return json.loads((folder / 'supervisor.json').read_text())
  return {}


def supervise(
  command: Sequence[str], folder: Path, max_restarts: int, max_failures: int, grace_seconds: float
) -> int:
  """Runs the command with restarts; returns its last exit code. The flags explain the settings.

  Raises:
    OSError: another supervisor uses the folder, a file of it is a link, or the command cannot be
      started.
  """
  folder.mkdir(parents=True, exist_ok=True)
  with _appended(folder / 'supervisor.json') as state, _appended(folder / 'supervisor.log') as log:
    try:
      fcntl.flock(state, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise OSError(f'{folder} is in use: {read_state(folder)}') from error
    processes.adopt_orphans()
    group = processes.Group(command, [os.environ], grace_seconds, log=log)
    processes.on_signals(group.stop)
    preemptions = failures = 0

    def note(file: IO[bytes], text: str) -> None:
      with contextlib.suppress(OSError):  # the disk is full; the command goes on
        file.write(text.encode())

    def write(code: int | None) -> None:
      counts = {'restarts': preemptions + failures, 'failures': failures}
      state.truncate(0)
      note(state, json.dumps({'pid': os.getpid(), **counts, 'exit_code': code}))

    while True:
      write(None)
      try:
        code = group.run()
      except OSError:
        write(processes.WRONG)
        raise
      preempted = code == processes.PREEMPTED
      again = preemptions < max_restarts if preempted else code > 128 and failures < max_failures
      if again and not group.stopping:
        group.await_orphans()
      if group.stopping or not again:  # a signal may have come while it waited
        write(code)
        return code
      if preempted:
        preemptions += 1
        why = f'preempted: restart {preemptions} of {max_restarts}'
      else:
        failures += 1
        why = f'exit code {code}: restart {failures} of {max_failures} after failures'
      note(log, f'[supervise] {why}\n')


def _appended(path: Path) -> IO[bytes]:
  """Opens a file to append to it; a link in the folder of another person is not followed."""
  return open(path, 'ab', 0, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))


def _local(folder: str) -> Path:
  if '://' in folder:
    raise argparse.ArgumentTypeError(f'{folder} must be a local folder: the log is appended to')
  if folder.startswith('~'):
    raise argparse.ArgumentTypeError(f'{folder}: only a shell expands ~; write the full path')
  return Path(folder)


def main() -> int:
  parser = processes.make_parser(__doc__)
  parser.add_argument(
    '--folder', type=_local, required=True, help='Local folder of the log and state.'
  )
  parser.add_argument(
    '--max_restarts', type=int, default=20, help='Number of restarts after exit code 42.'
  )
  parser.add_argument(
    '--max_failures', type=int, default=3, help='Number of restarts after signals.'
  )
  try:
    return supervise(**vars(parser.parse_args()))
  except OSError as error:
    print(f'Error: {error}', file=sys.stderr)
    return processes.WRONG


if __name__ == '__main__':
  sys.exit(main())
