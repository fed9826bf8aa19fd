"""Runs a training command and starts it again when it was preempted, lost other processes or was
killed.

    python -m launch.supervise --folder=runs/het_xl -- python -m het_plugin.train ...

Exit code 42 of the command (preempted, with a checkpoint saved) starts it again, at most
--max_restarts times; a signal, or a code above 128 that stands for one (134: other processes are
lost, or it was stuck), at most --max_failures times. Any other code ends the supervisor with that
code. The folder takes the output of the command, `supervisor.log`, and `supervisor.json`: pid,
end_with, restarts, failures, and exit_code, which is null while the command runs; failures are
restarts too. One supervisor at a time may use a folder.

SIGTERM and Ctrl-C go to the command, so that it saves, and the supervisor ends with the command's
code; a second one, or --grace_seconds without an end, kills. What the command leaves running of its
own process group is killed when it ends.

Needs the standard library only: it also runs on hosts where nothing is installed yet.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

PREEMPTED = 42  # het_plugin.operations.preemption.EXIT_CODE
WRONG = 2  # the folder is in use, or the command cannot be started
POLL_SECONDS = 0.2


class FolderInUseError(Exception):
  """Another supervisor works in the folder."""


@contextlib.contextmanager
def state_file(folder: Path) -> Iterator[IO[str]]:
  """The folder's supervisor.json, locked for as long as it is open.

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
  """{pid, end_with, restarts, failures, exit_code} of the folder's supervisor; empty for none."""
  with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
    return json.loads((folder / 'supervisor.json').read_text())
  return {}


class Supervisor:
  """One command, its restarts, and the signals on the way to it."""

  def __init__(self, command: Sequence[str], log: IO[bytes], grace_seconds: float):
    self._command = command
    self._log = log
    self._grace_seconds = grace_seconds
    self._process = None
    self._stop_at = None  # when to kill; None while nobody asked to stop

  @property
  def stopping(self) -> bool:
    return self._stop_at is not None

  def stop(self, *_) -> None:
    """Asks the command to end: signal handler, and what `watch` calls."""
    patience = 0 if self.stopping else self._grace_seconds
    self._stop_at = time.monotonic() + patience
    if self._process is not None and self._process.poll() is None:
      self._process.send_signal(signal.SIGTERM)

  def watch(self, pid: int) -> None:
    """Stops when the process `pid` is gone, however it ended."""
    while not self.stopping:
      try:
        os.kill(pid, 0)
      except ProcessLookupError:
        self.stop()
      time.sleep(POLL_SECONDS)

  def run(self) -> int:
    """Runs the command once; its exit code, or 128 + the signal that ended it.

    SIGTERM goes to the command's first process alone: data workers must live until it has saved.
    """
    self._process = subprocess.Popen(
      self._command, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
    )
    if self.stopping:  # asked before the process was there
      self._process.send_signal(signal.SIGTERM)
    while (code := self._process.poll()) is None:
      if self.stopping and time.monotonic() > self._stop_at:
        self._kill_group()
      time.sleep(POLL_SECONDS)
    self._kill_group()
    return code if code >= 0 else 128 - code

  def _kill_group(self) -> None:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._process.pid, signal.SIGKILL)


def supervise(
  command: Sequence[str],
  folder: Path,
  max_restarts: int,
  max_failures: int,
  grace_seconds: float,
  end_with: int | None = None,
) -> int:
  """Runs the command until it ends with 0 or an error of its own, or too often otherwise.

  Raises:
    FolderInUseError: another supervisor works in the folder.
    OSError: the command cannot be started.
  """
  with state_file(folder) as state, open(folder / 'supervisor.log', 'ab') as log:
    supervisor = Supervisor(command, log, grace_seconds)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
      if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup's
        signal.signal(number, supervisor.stop)
    if end_with is not None:
      threading.Thread(target=supervisor.watch, args=(end_with,), daemon=True).start()
    preemptions = failures = 0

    def write(exit_code: int | None) -> None:
      restarts = preemptions + failures
      write_state(
        state, end_with=end_with, restarts=restarts, failures=failures, exit_code=exit_code
      )

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
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--folder', type=Path, required=True, help='Takes the log and the state.')
  parser.add_argument('--max_restarts', type=int, default=20, help='After exit code 42.')
  parser.add_argument(
    '--max_failures', type=int, default=3, help='Restarts after a signal or a code above 128.'
  )
  parser.add_argument(
    '--grace_seconds', type=float, default=300, help='From SIGTERM until the command is killed.'
  )
  parser.add_argument(
    '--end_with', type=int, help='A process id: SIGTERM for the command when that process is gone.'
  )
  parser.add_argument(
    '--exit_zero',
    action='store_true',
    help='Ends with 0 whatever happens; the file has the code.',
  )
  parser.add_argument('command', nargs='+', help='After "--".')
  args = parser.parse_args()
  try:
    code = supervise(
      args.command,
      args.folder,
      args.max_restarts,
      args.max_failures,
      args.grace_seconds,
      args.end_with,
    )
    return 0 if args.exit_zero else code
  except (FolderInUseError, OSError) as error:
    print(f'Error: {error}', file=sys.stderr)
    return 0 if args.exit_zero else WRONG


if __name__ == '__main__':
  sys.exit(main())
