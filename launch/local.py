"""Runs a command as several processes of this machine that form one JAX run.

    python -m launch.local --processes=2 --devices=4 -- python -m het_plugin.train ...

Each process gets JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, which the mains of
het_plugin read. The coordinator listens on the loopback interface only, unless
JAX_COORDINATOR_BIND_ADDRESS is set to another HOST:PORT. --devices=N gives each process N virtual
CPU devices, --gpus_per_process=N its own N GPUs; without either, each process sees all devices.
Lines of output start with the number of their process: [1] ...

SIGTERM and Ctrl-C are passed on to all processes as SIGTERM, so that training saves; a second
signal, or --grace_seconds without an end, kills them. When one ends as preempted, the others get
SIGTERM, too. When one fails, the others, which wait for it, get SIGTERM and are killed
--end_seconds later. Child processes that are left are killed too. If the launcher itself is killed,
its processes get SIGTERM (Linux only).

Exit codes: 0 all done; 42 preempted, checkpoint saved; otherwise the code of the process that
failed first, or 128 + the signal that killed it; 2 also for a wrong setting.

Needs only the standard library.
"""

import os
import re
import socket
import sys
from collections.abc import Mapping

from launch import processes as processes_lib

_LOOPBACK = '127.0.0.1'


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
  """The environment of each process; `port` is the port of the coordinator, process 0.

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
    gpus = (
      [str(i) for i in range(needed)] if visible is None else [x for x in visible.split(',') if x]
    )
    if len(gpus) < needed:
      raise ValueError(
        f'--gpus_per_process={gpus_per_process} needs {needed} GPUs for {processes} processes; '
        f'CUDA_VISIBLE_DEVICES={visible}'
      )
    for index, environment in enumerate(made):
      own = gpus[index * gpus_per_process : (index + 1) * gpus_per_process]
      environment['CUDA_VISIBLE_DEVICES'] = ','.join(own)
  return made


def main() -> int:
  parser = processes_lib.make_parser(__doc__)
  parser.add_argument('--processes', type=int, required=True, help='Number of processes.')
  parser.add_argument('--devices', type=int, help='Virtual CPU devices per process.')
  parser.add_argument('--gpus_per_process', type=int, help='GPUs per process.')
  parser.add_argument('--port', type=int, help='Port of the coordinator; default: a free one.')
  parser.add_argument(
    '--end_seconds', type=float, default=10, help='How long the others may outlive a failed one.'
  )
  args = parser.parse_args()
  try:
    group = processes_lib.Group(
      args.command,
      environments(
        os.environ, args.port or free_port(), args.processes, args.devices, args.gpus_per_process
      ),
      args.grace_seconds,
      args.end_seconds,
    )
    processes_lib.on_signals(group.stop)
    return group.run()
  except (ValueError, OSError) as error:
    print(f'Error: {error}', file=sys.stderr)
    return processes_lib.WRONG


if __name__ == '__main__':
  sys.exit(main())
