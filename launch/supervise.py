"""Runs a training command and restarts it after preemptions and crashes.

    python -m launch.supervise --folder=runs/het_xl -- python -m het_plugin.train ...

Exit code 42 of the command (preempted, checkpoint saved) restarts it, at most --max_restarts times.
A signal, or an exit code above 128 that stands for a signal (134: the process lost its peers or was
stuck), restarts it at most --max_failures times. Any other code ends the supervisor with that code.

The folder receives the output of the command, `supervisor.log`, and `supervisor.json` with pid,
end_with, restarts, failures and exit_code. exit_code is null while the command runs; failures count
as restarts too. Only one supervisor at a time may use a folder.

SIGTERM and Ctrl-C are passed on to the command, so that it saves, and the supervisor ends with the
command's code. A second signal, or --grace_seconds without an end, kills the command. Child
processes that the command leaves in its process group are killed when it ends.

Needs only the standard library, so that it also runs on hosts where nothing is installed yet.
"""

import argparse
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

PREEMPTED = 42  # het_plugin.training.exit_codes.PREEMPTED
WRONG = 2  # the folder is in use, or the command cannot be started
POLL_SECONDS = 0.2


class FolderInUseError(Exception):
  """Another supervisor uses the folder."""


def on_signals(handler: Callable[..., None]) -> None:
  """Calls the handler on SIGTERM, Ctrl-C and SIGHUP, unless nohup made SIGHUP ignored."""
  for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
      signal.signal(number, handler)


def kill_group(process: subprocess.Popen) -> None:
  """Kills a process that was started with start_new_session, and all of its process group."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)


def exit_code(returncode: int) -> int:
  """The code of a `Popen.returncode` as shells give it: 128 + the signal that ended a process."""
  return returncode if returncode >= 0 else 128 - returncode


def make_parser(description: str) -> argparse.ArgumentParser:
  """A parser with the arguments that `launch.local` and `launch.supervise` share."""
  parser = argparse.ArgumentParser(
    description=description, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    '--grace_seconds', type=float, default=300, help='Seconds from SIGTERM until SIGKILL.'
  )
  parser.add_argument('command', nargs='+', help='The command to run, after "--".')
  return parser


@contextlib.contextmanager
def state_file(folder: Path) -> Iterator[IO[str]]:
  """Opens supervisor.json in the folder and holds a lock on it while it is open.

  Raises:
    FolderInUseError: another process holds the lock.
  """
  folder.mkdir(parents=True, exist_ok=True)
  with open(folder / 'supervisor.json', 'a+') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise FolderInUseError(f'{folder} is in use: {read_state(folder)}') from error
    yield file


def write_state(file: IO[str], **state: int | None) -> None:
  file.seek(0)
  file.truncate()
  json.dump({'pid': os.getpid(), **state}, file)
  file.flush()


def read_state(folder: Path) -> dict[str, int | None]:
  """The contents of supervisor.json in the folder; empty if there is none."""
  with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
    return json.loads((folder / 'supervisor.json').read_text())
  return {}


class Supervisor:
  """Runs one command and passes signals on to it."""

  def __init__(self, command: Sequence[str], log: IO[bytes], grace_seconds: float):
    self._command = command
    self._log = log
    self._grace_seconds = grace_seconds
    self._process = None
    self._stop_at = None  # when to kill; None while no stop was requested

  @property
  def stopping(self) -> bool:
    return self._stop_at is not None

  def stop(self, *_) -> None:
    """Asks the command to end. Serves as signal handler."""
    patience = 0 if self.stopping else self._grace_seconds
    self._stop_at = time.monotonic() + patience
    if self._process is not None and self._process.poll() is None:
      self._process.send_signal(signal.SIGTERM)

  def watch(self, pid: int) -> None:
    """Stops the command when the process `pid` is gone, however that ended."""
    while not self.stopping:
      try:
        os.kill(pid, 0)
      except ProcessLookupError:
        self.stop()
      time.sleep(POLL_SECONDS)

  def run(self) -> int:
    """Runs the command once and returns its exit code, or 128 + the signal that ended it.

    SIGTERM goes to the first process of the command only: its data workers must live until it has
    saved.
    """
    self._process = subprocess.Popen(
      self._command, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
    )
    if self.stopping:  # the signal came before the process existed
      self._process.send_signal(signal.SIGTERM)
    while (code := self._process.poll()) is None:
      if self.stopping and time.monotonic() > self._stop_at:
        kill_group(self._process)
      time.sleep(POLL_SECONDS)
    kill_group(self._process)
    return exit_code(code)


def supervise(
  command: Sequence[str],
  folder: Path,
  max_restarts: int,
  max_failures: int,
  grace_seconds: float,
  end_with: int | None = None,
) -> int:
  """Runs the command with restarts; returns its last exit code. The flags explain the settings.

  Raises:
    FolderInUseError: another supervisor uses the folder.
    OSError: the command cannot be started.
  """
  with state_file(folder) as state, open(folder / 'supervisor.log', 'ab') as log:
    supervisor = Supervisor(command, log, grace_seconds)
    on_signals(supervisor.stop)
    if end_with is not None:
      threading.Thread(target=supervisor.watch, args=(end_with,), daemon=True).start()
    preemptions = failures = 0

    def write(code: int | None) -> None:
      restarts = preemptions + failures
      write_state(state, end_with=end_with, restarts=restarts, failures=failures, exit_code=code)

    write(None)
    while True:
      code = supervisor.run()
      if code == PREEMPTED and not supervisor.stopping and preemptions < max_restarts:
        preemptions += 1
        why = f'preempted: restart {preemptions} of {max_restarts}'
      elif code > 128 and not supervisor.stopping and failures < max_failures:
        failures += 1
        why = f'exit code {code}: restart {failures} of {max_failures} after failures'
      else:
        write(code)
        return code
      write(None)
      log.write(f'[supervise] {why}\n'.encode())
      log.flush()


def main() -> int:
  parser = make_parser(__doc__)
  parser.add_argument('--folder', type=Path, required=True, help='Folder of the log and state.')
  parser.add_argument(
    '--max_restarts', type=int, default=20, help='Number of restarts after exit code 42.'
  )
  parser.add_argument(
    '--max_failures', type=int, default=3, help='Number of restarts after signals.'
  )
  parser.add_argument(
    '--end_with', type=int, help='A process id: when that process is gone, the command is stopped.'
  )
  args = parser.parse_args()
  try:
    return supervise(
      args.command,
      args.folder,
      args.max_restarts,
      args.max_failures,
      args.grace_seconds,
      args.end_with,
    )
  except (FolderInUseError, OSError) as error:
    print(f'Error: {error}', file=sys.stderr)
    return WRONG


if __name__ == '__main__':
  sys.exit(main())
