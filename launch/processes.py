"""Processes of this machine that are started and ended together; needs only the standard library.

SIGTERM goes to the first process of a command only: its data workers must live until it has saved.
What is left in its process group when it has ended is killed.
"""

import argparse
import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

PREEMPTED = 42  # het_plugin.system.exit_codes.PREEMPTED
WRONG = 2  # a setting is wrong, a folder is in use, or a command cannot be started
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2) on Linux
_POLL_SECONDS = 0.2


def on_signals(handler: Callable[..., None]) -> None:
  """Calls the handler on SIGTERM, Ctrl-C and SIGHUP, unless nohup made SIGHUP ignored."""
  for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
      signal.signal(number, handler)


def exit_code(returncode: int) -> int:
  """The code of a `Popen.returncode` as shells give it: 128 + the signal that ended a process."""
  return returncode if returncode >= 0 else 128 - returncode


def die_with_parent() -> None:
  """Runs in a new process: requests SIGTERM for when the thread that started it is gone."""
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def adopt_orphans() -> None:
  """Makes this process the parent of its descendants whose parent has died (Linux only)."""
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def make_parser(description: str) -> argparse.ArgumentParser:
  """A parser with the arguments that all launchers of a command share."""
  parser = argparse.ArgumentParser(
    description=description, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    '--grace_seconds', type=float, default=300, help='Seconds from SIGTERM until SIGKILL.'
  )
  parser.add_argument('command', nargs='+', help='The command to run, after "--".')
  return parser


class Group:
  """A command as several processes. Lines of output get the number of their process.

  Attributes:
    stopping: whether a signal has requested the end.
    code: the exit code; None until `run` has ended.
  """

  def __init__(
    self,
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    grace_seconds: float,
    end_seconds: float = 0,
    log: IO[bytes] | None = None,
  ):
    """Starts nothing.

    A signal leaves the processes `grace_seconds` to save, a failed process leaves the others
    `end_seconds`. `log` takes the output; None for stdout. A single process writes to its log
    itself, without a number.
    """
    self._command = command
    self._environments = environments
    self._grace_seconds = grace_seconds
    self._end_seconds = end_seconds
    self._log = log
    self._numbered = log is None or len(environments) > 1
    self.stopping = False
    self.code: int | None = None
    self._stop_at = None  # when to kill; None while no end was requested
    self._processes: list[subprocess.Popen] = []
    self._told: set[subprocess.Popen] = set()  # those that got SIGTERM

  def stop(self, *_) -> None:
    """Asks all processes to save and end; a second call kills. Serves as signal handler."""
    seconds = 0 if self.stopping else self._grace_seconds
    self.stopping = True
    self._end_within(seconds)

  def run(self) -> int:
    """Runs all processes to their end and returns the exit code."""
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()  # in order of ending
    self._processes = []
    printers = []
    try:
      for environment in self._environments:
        self._processes.append(self._start(environment))
      for index, process in enumerate(self._processes):
        if self._numbered:
          arguments = index, process, self._log or sys.stdout.buffer
          printers.append(threading.Thread(target=_print_lines, args=arguments, daemon=True))
          printers[-1].start()
        threading.Thread(target=_wait, args=(index, process, ended), daemon=True).start()
      self.code = self._watch(ended)
      return self.code
    finally:
      for process in self._processes:
        if process.poll() is None:
          _kill_group(process)
      for printer in printers:
        printer.join(timeout=1)  # a process that left its group may hold the pipe

  def end(self) -> None:
    """Asks all processes to save and end, for another `run`."""
    self._end_within(self._grace_seconds)

  def take(self, command: Sequence[str]) -> None:
    """Another command for the next `run`, which no `end` of an earlier one cuts short."""
    self._command = command
    self._stop_at = None
    if self.stopping:  # a signal may come at any time
      self._end_within(self._grace_seconds)

  def running(self) -> dict[int, int]:
    """{index: process id} of the processes that run."""
    return {i: process.pid for i, process in enumerate(self._processes) if process.poll() is None}

  def await_orphans(self) -> None:
    """Waits for the processes that this one has adopted (`adopt_orphans`).

    Their parent was killed, so they are saving (`die_with_parent`). They have `grace_seconds`, or
    less after a signal. Call it only where all children of this process belong to the group.
    """
    deadline = time.monotonic() + self._grace_seconds
    while True:
      try:
        ended, _ = os.waitpid(-1, os.WNOHANG)
      except ChildProcessError:  # there are none
        return
      if not ended:
        if time.monotonic() > min(deadline, self._stop_at or deadline):
          for pid in _children():
            os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)

  def _start(self, environment: Mapping[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
      self._command,
      env=environment,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE if self._numbered else self._log,
      stderr=subprocess.STDOUT,
      start_new_session=True,
      preexec_fn=die_with_parent,
    )

  def _watch(self, ended: queue.SimpleQueue[int]) -> int:
    result = 0
    failed = False
    running = set(range(len(self._processes)))
    if self._stop_at is not None:  # the signal came while they were started
      self._tell()
    while running:
      try:
        index = ended.get(timeout=_POLL_SECONDS)
      except queue.Empty:
        if self._stop_at is not None and time.monotonic() > self._stop_at:
          self._say(f'killing {_names(running)}, which did not end')
          self._stop_at = float('inf')
          for index in running:
            _kill_group(self._processes[index])
        continue
      running.remove(index)
      _kill_group(self._processes[index])
      code = self._processes[index].returncode
      result = result or exit_code(code)
      if code == PREEMPTED:  # the others save, too, or are where there is nothing to save yet
        if running:
          self._end_within(self._grace_seconds)
      elif code:
        others = f': ending {_names(running)}' if running and not failed else ''
        self._say(f'process {index} {_how(code)}{others}')
        if running and not failed:
          self._end_within(self._end_seconds)
        failed = True
    return result

  def _end_within(self, seconds: float) -> None:
    at = time.monotonic() + seconds
    self._stop_at = at if self._stop_at is None else min(at, self._stop_at)
    self._tell()

  def _tell(self) -> None:
    """Sends SIGTERM once per process: a second one would kill a process that is just saving."""
    for process in self._processes:
      if process not in self._told:
        self._told.add(process)
        process.send_signal(signal.SIGTERM)

  def _say(self, text: str) -> None:
    with contextlib.suppress(OSError):  # as in _print_lines; the other processes still have to save
      if self._log is None:
        print(f'[local] {text}', file=sys.stderr, flush=True)
      elif self._numbered:
        self._log.write(f'[local] {text}\n'.encode())
        self._log.flush()


def _kill_group(process: subprocess.Popen) -> None:
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)


def _wait(index: int, process: subprocess.Popen, ended: queue.SimpleQueue[int]) -> None:
  process.wait()
  ended.put(index)


def _children() -> list[int]:
  """The process ids of the children of this process (Linux)."""
  found = []
  for stat in Path('/proc').glob('[0-9]*/stat'):
    with contextlib.suppress(OSError):  # it has ended
      parent = int(stat.read_text().rpartition(')')[2].split()[1])
      if parent == os.getpid():
        found.append(int(stat.parent.name))
  return found


def _print_lines(index: int, process: subprocess.Popen, sink: IO[bytes]) -> None:
  for line in process.stdout:
    text = line if line.endswith(b'\n') else line + b'\n'
    with contextlib.suppress(OSError):  # the reader is gone or the disk is full; training continues
      sink.write(f'[{index}] '.encode() + text)
      sink.flush()


def _how(code: int) -> str:
  return f'ended with exit code {code}' if code >= 0 else f'died of {signal.Signals(-code).name}'


def _names(indices: set[int]) -> str:
  return f'process{"es" if len(indices) > 1 else ""} {", ".join(map(str, sorted(indices)))}'
