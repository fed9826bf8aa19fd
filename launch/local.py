"""Runs a command as several processes of this machine, which find each other.

    python -m launch.local --processes=2 --devices=4 -- python -m het_plugin.train ...

Each process gets JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, which the mains of
het_plugin read. --devices=N gives each N virtual CPU devices, --gpus_per_process=N each GPUs of its
own; without either all see all devices. Their lines are printed behind their numbers: [1] ...

SIGTERM and Ctrl-C go to all of them as SIGTERM, so that training saves; a second one, or
--grace_seconds without an end, kills. When a process fails, the others, which wait for it, get
SIGTERM and are killed --end_seconds later. What processes leave running of their own process groups
is killed when they end; they also get SIGTERM when this program is killed (on Linux).

Exit codes: 0 all done; 42 preempted, with a checkpoint saved; else that of the process that failed
first, 128 + the signal if one killed it; 2 also for a setting that is wrong.

Needs the standard library only.
"""

import argparse
import contextlib
import ctypes
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from launch.supervise import PREEMPTED, WRONG

_PR_SET_PDEATHSIG = 1  # Linux, prctl(2)
_POLL_SECONDS = 0.2


def free_port() -> int:
  """A TCP port that nobody listens on right now."""
  with socket.create_server(('', 0)) as server:
    return server.getsockname()[1]


def environments(
  base: Mapping[str, str],
  port: int,
  processes: int,
  devices: int | None = None,
  gpus_per_process: int | None = None,
) -> list[dict[str, str]]:
  """The environment of each process.

  Args:
    base: what they have in common.
    port: of the coordinator, which is process 0.
    processes: how many.
    devices: virtual CPU devices of each; None leaves the platform as it is.
    gpus_per_process: GPUs of each, of those in CUDA_VISIBLE_DEVICES or else from 0; None: all.

  Raises:
    ValueError: a number is wrong, both are given, or there are too few GPUs.
  """
  numbers = {'processes': processes, 'devices': devices, 'gpus_per_process': gpus_per_process}
  for name, value in numbers.items():
    if value is not None and value < 1:
      raise ValueError(f'--{name}={value} must be at least 1')
  if devices is not None and gpus_per_process is not None:
    raise ValueError(
      f'--devices={devices} is of the CPU, --gpus_per_process={gpus_per_process} is not: give one'
    )
  common = {
    **base,
    'JAX_COORDINATOR_ADDRESS': f'localhost:{port}',
    'JAX_NUM_PROCESSES': str(processes),
    'PYTHONUNBUFFERED': '1',  # what it printed before it died is what tells why
    'HET_PLUGIN_LINES_ARE_NUMBERED': '1',  # by `_print_lines`
  }
  if devices is not None:
    count = f'--xla_force_host_platform_device_count={devices}'
    others = re.sub(r'--xla_force_host_platform_device_count=\S*', '', base.get('XLA_FLAGS', ''))
    common |= {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ' '.join([*others.split(), count])}
  made = [common | {'JAX_PROCESS_ID': str(index)} for index in range(processes)]
  if gpus_per_process is not None:
    needed = processes * gpus_per_process
    visible = base.get('CUDA_VISIBLE_DEVICES')
    gpus = [str(i) for i in range(needed)] if visible is None else visible.split(',')
    if len(gpus) < needed:
      raise ValueError(
        f'--gpus_per_process={gpus_per_process} needs {needed} GPUs for {processes} processes; '
        f'CUDA_VISIBLE_DEVICES={visible}'
      )
    for index, environment in enumerate(made):
      own = gpus[index * gpus_per_process : (index + 1) * gpus_per_process]
      environment['CUDA_VISIBLE_DEVICES'] = ','.join(own)
  return made


class Group:
  """The processes and what ends them."""

  def __init__(
    self,
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    grace_seconds: float,
    end_seconds: float,
  ):
    """Takes the settings; nothing is started.

    Args:
      command: of every process.
      environments: one for each process.
      grace_seconds: from a signal until processes are killed.
      end_seconds: from the failure of one until the others are killed.
    """
    self._command = command
    self._environments = environments
    self._grace_seconds = grace_seconds
    self._end_seconds = end_seconds
    self._processes: list[subprocess.Popen] = []
    self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()  # in the order in which they do
    self._stop_at = None  # when to kill; None while nobody asked to stop
    self._signalled = False
    self._told: set[subprocess.Popen] = set()  # those that SIGTERM was sent to

  def stop(self, *_) -> None:
    """Asks all to save and end: signal handler."""
    self._end_within(0 if self._signalled else self._grace_seconds)
    self._signalled = True

  def run(self) -> int:
    """Runs all until they have ended; the exit code.

    Raises:
      OSError: the command cannot be started.
    """
    printers = []
    try:
      for environment in self._environments:
        self._processes.append(self._start(environment))
      for index in range(len(self._processes)):
        printers.append(threading.Thread(target=self._print_lines, args=(index,), daemon=True))
        printers[-1].start()
        threading.Thread(target=self._wait, args=(index,), daemon=True).start()
      return self._watch()
    finally:
      for process in self._processes:
        if process.poll() is None:
          _kill_group(process)
      for printer in printers:
        printer.join(timeout=1)  # a process that left its group may hold the pipe

  def _start(self, environment: Mapping[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
      self._command,
      env=environment,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      start_new_session=True,
      preexec_fn=_die_with_parent,
    )

  def _watch(self) -> int:
    result, failed, running = 0, False, set(range(len(self._processes)))
    if self._stop_at is not None:  # asked while they were started
      self._tell()
    while running:
      try:
        index = self._ended.get(timeout=_POLL_SECONDS)
      except queue.Empty:
        if self._stop_at is not None and time.monotonic() > self._stop_at:
          _say(f'killing {_names(running)}, which did not end')
          self._stop_at = float('inf')
          for index in running:
            _kill_group(self._processes[index])
        continue
      running.remove(index)
      _kill_group(self._processes[index])
      code = self._processes[index].returncode
      result = result or (code if code >= 0 else 128 - code)
      if code == PREEMPTED:  # the others are about to end too
        self._end_within(self._grace_seconds, tell=False)
      elif code:
        others = f': ending {_names(running)}' if running and not failed else ''
        _say(f'process {index} {_how(code)}{others}')
        if not failed:
          self._end_within(self._end_seconds)
        failed = True
    return result

  def _end_within(self, seconds: float, tell: bool = True) -> None:
    at = time.monotonic() + seconds
    self._stop_at = at if self._stop_at is None else min(at, self._stop_at)
    if tell:
      self._tell()

  def _tell(self) -> None:
    """SIGTERM, once to each: a second one would kill a process that has saved and is ending."""
    for process in self._processes:
      if process not in self._told:
        self._told.add(process)
        process.send_signal(signal.SIGTERM)

  def _wait(self, index: int) -> None:
    self._processes[index].wait()
    self._ended.put(index)

  def _print_lines(self, index: int) -> None:
    for line in self._processes[index].stdout:
      text = line if line.endswith(b'\n') else line + b'\n'
      with contextlib.suppress(BrokenPipeError):  # who read them has gone; training goes on
        sys.stdout.buffer.write(f'[{index}] '.encode() + text)
        sys.stdout.buffer.flush()


def _die_with_parent() -> None:
  """In the new process: SIGTERM when the process that started it is gone."""
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _kill_group(process: subprocess.Popen) -> None:
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)


def _how(code: int) -> str:
  return f'ended with exit code {code}' if code >= 0 else f'died of {signal.Signals(-code).name}'


def _names(indices: set[int]) -> str:
  return f'process{"es" if len(indices) > 1 else ""} {", ".join(map(str, sorted(indices)))}'


def _say(text: str) -> None:
  print(f'[local] {text}', file=sys.stderr, flush=True)


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--processes', type=int, required=True, help='How many.')
  parser.add_argument('--devices', type=int, help='Virtual CPU devices of each process.')
  parser.add_argument('--gpus_per_process', type=int, help='GPUs of each process.')
  parser.add_argument('--port', type=int, help='Of the coordinator; a free one by default.')
  parser.add_argument(
    '--grace_seconds', type=float, default=300, help='From SIGTERM until processes are killed.'
  )
  parser.add_argument(
    '--end_seconds', type=float, default=10, help='How long the others may outlive one that failed.'
  )
  parser.add_argument('command', nargs='+', help='After "--".')
  args = parser.parse_args()
  try:
    group = Group(
      args.command,
      environments(
        os.environ, args.port or free_port(), args.processes, args.devices, args.gpus_per_process
      ),
      args.grace_seconds,
      args.end_seconds,
    )
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
      if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup's
        signal.signal(number, group.stop)
    return group.run()
  except (ValueError, OSError) as error:
    print(f'Error: {error}', file=sys.stderr)
    return WRONG


if __name__ == '__main__':
  sys.exit(main())
