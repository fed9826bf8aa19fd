"""Runs a command as several processes of this machine that form one JAX run.

    python -m launch.local --processes=2 --devices=4 -- python -m het_plugin.train ...

Each process gets JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, which the mains of
het_plugin read. The coordinator listens on the loopback interface only, unless
JAX_COORDINATOR_BIND_ADDRESS is set to another HOST:PORT. --devices=N gives each process N virtual
CPU devices, --gpus_per_process=N its own N GPUs; without either, each process sees all devices.
Lines of output start with the number of their process: [1] ...

SIGTERM and Ctrl-C are passed on to all processes as SIGTERM, so that training saves; a second
signal, or --grace_seconds without an end, kills them. When a process fails, the others, which wait
for it, get SIGTERM and are killed --end_seconds later. Child processes that are left are killed
too. If the launcher itself is killed, its processes get SIGTERM (Linux only).

Exit codes: 0 all done; 42 preempted, checkpoint saved; otherwise the code of the process that
failed first, or 128 + the signal that killed it; 2 also for a wrong setting.

Needs only the standard library.
"""

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

from launch.supervise import PREEMPTED, WRONG, exit_code, kill_group, make_parser, on_signals

_LOOPBACK = '127.0.0.1'
_PR_SET_PDEATHSIG = 1  # prctl(2) on Linux
_POLL_SECONDS = 0.2


def free_port() -> int:
  """A TCP port of the loopback interface that is not in use."""
  with socket.create_server((_LOOPBACK, 0)) as server:
    return server.getsockname()[1]


def environments(
  base: Mapping[str, str],
  port: int,
  processes: int,
  devices: int | None = None,
  gpus_per_process: int | None = None,
) -> list[dict[str, str]]:
  """The environment of each process; `port` is that of the coordinator, process 0.

  Raises:
    ValueError: a number is below 1, both kinds of devices are given, or there are too few GPUs.
  """
  numbers = {'processes': processes, 'devices': devices, 'gpus_per_process': gpus_per_process}
  for name, value in numbers.items():
    if value is not None and value < 1:
      raise ValueError(f'--{name}={value} must be at least 1')
  if devices is not None and gpus_per_process is not None:
    raise ValueError(
      f'--devices={devices} asks for CPU devices and --gpus_per_process={gpus_per_process} for '
      'GPUs: give one of them'
    )
  address = f'{_LOOPBACK}:{port}'
  common = {
    'JAX_COORDINATOR_BIND_ADDRESS': address,  # JAX itself would listen on all interfaces
    **base,
    'JAX_COORDINATOR_ADDRESS': address,
    'JAX_NUM_PROCESSES': str(processes),
    'PYTHONUNBUFFERED': '1',  # the last lines before a crash tell its cause
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
  """Starts the processes, one per environment, and ends them together.

  A signal lets them save for grace_seconds; the others of a failed one have end_seconds.
  """

  def __init__(
    self,
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    grace_seconds: float,
    end_seconds: float,
  ):
    self._command = command
    self._environments = environments
    self._grace_seconds = grace_seconds
    self._end_seconds = end_seconds
    self._processes: list[subprocess.Popen] = []
    self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()  # in order of ending
    self._stop_at = None  # when to kill; None while no stop was requested
    self._signalled = False
    self._told: set[subprocess.Popen] = set()  # those that got SIGTERM

  def stop(self, *_) -> None:
    """Asks all processes to save and end. Serves as signal handler."""
    self._end_within(0 if self._signalled else self._grace_seconds)
    self._signalled = True

  def run(self) -> int:
    """Runs all processes to their end and returns the exit code."""
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
          kill_group(process)
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
    if self._stop_at is not None:  # the signal came while they were started
      self._tell()
    while running:
      try:
        index = self._ended.get(timeout=_POLL_SECONDS)
      except queue.Empty:
        if self._stop_at is not None and time.monotonic() > self._stop_at:
          _say(f'killing {_names(running)}, which did not end')
          self._stop_at = float('inf')
          for index in running:
            kill_group(self._processes[index])
        continue
      running.remove(index)
      kill_group(self._processes[index])
      code = self._processes[index].returncode
      result = result or exit_code(code)
      if code == PREEMPTED:  # the others save and end by themselves
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
    """Sends SIGTERM once per process: a second one would kill a process that is just saving."""
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
      with contextlib.suppress(BrokenPipeError):  # the reader is gone; training goes on
        sys.stdout.buffer.write(f'[{index}] '.encode() + text)
        sys.stdout.buffer.flush()


def _die_with_parent() -> None:
  """Runs in the new process: requests SIGTERM for when its parent is gone."""
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _how(code: int) -> str:
  return f'ended with exit code {code}' if code >= 0 else f'died of {signal.Signals(-code).name}'


def _names(indices: set[int]) -> str:
  return f'process{"es" if len(indices) > 1 else ""} {", ".join(map(str, sorted(indices)))}'


def _say(text: str) -> None:
  print(f'[local] {text}', file=sys.stderr, flush=True)


def main() -> int:
  parser = make_parser(__doc__)
  parser.add_argument('--processes', type=int, required=True, help='Number of processes.')
  parser.add_argument('--devices', type=int, help='Virtual CPU devices per process.')
  parser.add_argument('--gpus_per_process', type=int, help='GPUs per process.')
  parser.add_argument('--port', type=int, help='Port of the coordinator; default: a free one.')
  parser.add_argument(
    '--end_seconds', type=float, default=10, help='How long the others may outlive a failed one.'
  )
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
    on_signals(group.stop)
    return group.run()
  except (ValueError, OSError) as error:
    print(f'Error: {error}', file=sys.stderr)
    return WRONG


if __name__ == '__main__':
  sys.exit(main())
