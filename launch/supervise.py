"""Runs a training command and restarts it after preemptions and crashes.

    python -m launch.supervise --folder=runs/het_xl -- python -m het_plugin.train ...

Exit code 42 of the command (preempted, checkpoint saved) restarts it, at most --max_restarts times.
A signal, or an exit code above 128 that stands for a signal (134: the process lost others or was
stuck), restarts it at most --max_failures times. Any other code ends the supervisor with that code.

The folder receives the output of the command, `supervisor.log`, and `supervisor.json` with pid,
restarts, failures and exit_code. exit_code is null while the command runs, and 2 if it cannot be
started; failures count as restarts too. Only one supervisor at a time may use a folder: it locks
supervisor.json.

With --available the command may go on with fewer processes, hosts or slices, and with more again:
"{n}" in it becomes the number that this shell command prints. It is asked every --poll_seconds;
when it has twice printed another number, the command gets SIGTERM, so that it saves, and starts
again with this number. Such a restart, and that of a command that ended while there were fewer,
counts neither as a restart nor as a failure. At 0 the supervisor waits.

    python -m launch.supervise --folder=runs/het_xl --available='nvidia-smi -L | wc -l' -- \
      python -m launch.local --processes={n} --gpus_per_process=1 -- python -m het_plugin.train ...

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
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from launch import processes

NUMBER = '{n}'  # in a command
POLL_SECONDS = 30
_ASK_SECONDS = 60
_SLEEP_SECONDS = 0.2


def read_state(folder: Path) -> dict[str, int | None]:
  """The contents of supervisor.json in the folder; empty if there is none."""
  with contextlib.suppress(FileNotFoundError, ValueError):
    return json.loads((folder / 'supervisor.json').read_text())
  return {}


class Available:
  """How many processes can run now."""

  def __init__(self, command: str, poll_seconds: float):
    """The shell command prints the number; it is asked again after so many seconds."""
    self._command = command
    self._poll_seconds = poll_seconds

  def now(self) -> int | None:
    """The number; None if the command failed or printed something else."""
    with contextlib.suppress(ValueError, subprocess.SubprocessError):
      done = subprocess.run(
        self._command, shell=True, check=True, capture_output=True, text=True, timeout=_ASK_SECONDS
      )
      return int(done.stdout)

  def wait(self, is_stopped: Callable[[], bool]) -> int:
    """The number once it is not 0; 0 if it `is_stopped` before."""
    asked = -math.inf
    while not is_stopped():
      if time.monotonic() > asked + self._poll_seconds:
        if number := self.now():
          return number
        asked = time.monotonic()
      time.sleep(_SLEEP_SECONDS)
    return 0

  @contextlib.contextmanager
  def watched(self, number: int, changed: Callable[[], None]) -> Iterator[None]:
    """Calls `changed` in a thread, once, when the number has twice been another one than 0."""
    over = threading.Event()
    deciding = threading.Lock()

    def watch() -> None:
      last = number
      while not over.wait(self._poll_seconds):
        before = last
        last = self.now() or number
        if last == before != number:
          with deciding:
            if not over.is_set():
              changed()
          return

    threading.Thread(target=watch, daemon=True).start()
    try:
      yield
    finally:
      with deciding:
        over.set()


def supervise(
  command: Sequence[str],
  folder: Path,
  max_restarts: int,
  max_failures: int,
  grace_seconds: float,
  available: str | None = None,
  poll_seconds: float = POLL_SECONDS,
) -> int:
  """Runs the command with restarts; returns its last exit code. The flags explain the settings.

  Raises:
    ValueError: the command has no place for the number that is `available`.
    OSError: another supervisor uses the folder, a file of it is a link, or the command cannot be
      started.
  """
  if available is not None and not any(NUMBER in word for word in command):
    raise ValueError(f'--available={available} needs {NUMBER} in the command, which it replaces')
  known = None if available is None else Available(available, poll_seconds)
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

    code = processes.PREEMPTED
    while True:
      write(None)
      number = 1 if known is None else known.wait(lambda: group.stopping)
      if not number:
        write(code)
        return code
      if known is not None:
        group.take([word.replace(NUMBER, str(number)) for word in command])
      watched = contextlib.nullcontext() if known is None else known.watched(number, group.end)
      try:
        with watched:
          code = group.run()
      except OSError:
        write(processes.WRONG)
        raise
      preempted = code == processes.PREEMPTED
      again = preemptions < max_restarts if preempted else code > 128 and failures < max_failures
      ended = preempted or code > 128
      resized = known is not None and ended and known.now() not in (number, None)
      again |= resized
      if again and not group.stopping:
        group.await_orphans()
      if group.stopping or not again:  # a signal may have come while it waited
        write(code)
        return code
      if resized:
        why = f'exit code {code}: restart with another number than {number}'
      elif preempted:
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
  parser.add_argument(
    '--available', help='Shell command that prints how many processes {n} can run now.'
  )
  parser.add_argument(
    '--poll_seconds', type=float, default=POLL_SECONDS, help='How often --available is asked.'
  )
  try:
    return supervise(**vars(parser.parse_args()))
  except (ValueError, OSError) as error:
    print(f'Error: {error}', file=sys.stderr)
    return processes.WRONG


if __name__ == '__main__':
  sys.exit(main())
