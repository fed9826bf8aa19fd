"""Joins the processes of a run, on one machine or many, before anything else uses JAX.

A process learns that it is one of several from the first of these that is there:
  JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, which launch/local.py sets;
  JAX_NUM_PROCESSES=1 alone, which means that it is a single process;
  the variables of Slurm or Open MPI;
  TPU_PROCESS_ADDRESSES or TPU_WORKER_HOSTNAMES and MEGASCALE_NUM_SLICES, which GKE sets;
  a TPU VM, whose metadata server knows the other hosts of its slice and other slices.
Except for the first source, `jax.distributed.initialize` finds the other processes.
"""

import contextlib
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Generator, Mapping
from typing import TypedDict

from het_plugin.system import exit_codes, stopping

_log = logging.getLogger(__name__)

_EXPLICIT = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')
# JAX's own limit must not be reached first, because it ends the process with a C++ stack trace.
_JAX_EXTRA_SECONDS = 60
# When process 0 ends, the others end too. If all of them fail, each should report it first.
_LEAVE_SECONDS = 2


class ProcessGroup(TypedDict, total=False):
  """Arguments of `jax.distributed.initialize`."""

  coordinator_address: str
  num_processes: int
  process_id: int
  cluster_detection_method: str


def initialize(
  initialization_timeout_seconds: int = 300, heartbeat_timeout_seconds: int = 100
) -> None:
  """Joins the other processes, if there are any.

  Call this before any computation. If the others do not come in time, the process ends with one
  line and the exit code `exit_codes.LOST`.

  Args:
    initialization_timeout_seconds: how long the processes wait for each other at the start.
    heartbeat_timeout_seconds: how long one may be silent before the others end.

  Raises:
    ValueError: a variable is wrong, or the announced processes cannot be found.
  """
  import jax  # slow: --help needs none

  if jax.distributed.is_initialized():
    return
  settings = explicit_settings(os.environ)
  if settings:
    _check_port_is_free(settings)
    place = 'process {process_id} of {num_processes} through {coordinator_address}'.format(
      **settings
    )
    settings['cluster_detection_method'] = 'deactivate'
  elif settings is not None or not (
    place := cluster(os.environ, jax.config.values['jax_platforms'])
  ):
    return
  seconds = initialization_timeout_seconds
  _log.info('Waiting for the other processes (%s), at most %d s.', place, seconds)
  timer = threading.Timer(seconds, _give_up, (place, seconds))
  timer.daemon = True
  timer.start()
  try:
    with stopping.before_service():
      jax.distributed.initialize(
        **(settings or ProcessGroup()),
        initialization_timeout=seconds + _JAX_EXTRA_SECONDS,
        heartbeat_timeout_seconds=heartbeat_timeout_seconds,
      )
  except (RuntimeError, ValueError, KeyError) as error:
    reason = str(error).rstrip('.')
    raise ValueError(
      f'The processes of this run cannot join ({place}): {reason}; JAX_NUM_PROCESSES=1 runs this '
      f'one alone, {", ".join(_EXPLICIT)} say who the others are'
    ) from error
  finally:
    timer.cancel()
  _log.info(
    'Process %d of %d: %d of %d devices.',
    jax.process_index(),
    jax.process_count(),
    jax.local_device_count(),
    jax.device_count(),
  )


@contextlib.contextmanager
def leaving() -> Generator[None]:
  """Ends a process of several at once if an exception leaves this context.

  Otherwise it would wait for the others, which wait for this one. Regular exits are left to Python.
  """
  try:
    yield
  except BaseException as error:
    code = exit_codes.of(error)
    if not exit_codes.is_distributed() or code in (0, exit_codes.PREEMPTED):
      raise
    if not isinstance(error, SystemExit):
      traceback.print_exc()
    elif isinstance(error.code, str):
      print(error.code, file=sys.stderr)
    import jax

    stopping.flush()
    if jax.process_index() == 0:
      time.sleep(_LEAVE_SECONDS)
    os._exit(code)


def explicit_settings(environment: Mapping[str, str]) -> ProcessGroup | None:
  """Arguments for `jax.distributed.initialize`; empty for a single process, None if not given."""
  address, count, index = (environment.get(name) for name in _EXPLICIT)
  if count is None and index is None:
    return None  # with an address only, jax finds the rest
  if count is not None and (not count.isdecimal() or int(count) < 1):
    raise ValueError(f'JAX_NUM_PROCESSES={count} must be a number >= 1')
  if count == '1' and index in (None, '0'):
    return {}
  if address is None or count is None or index is None:
    missing = next(name for name in _EXPLICIT if name not in environment)
    raise ValueError(f'{missing} is not set. Set all of {", ".join(_EXPLICIT)}, or none')
  if not index.isdecimal() or int(index) >= int(count):
    raise ValueError(f'JAX_PROCESS_ID={index} must be in 0..{int(count) - 1}: {count} processes')
  host, colon, port = address.rpartition(':')
  if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
    raise ValueError(f'JAX_COORDINATOR_ADDRESS={address} must be HOST:PORT, of process 0')
  return {
    'coordinator_address': address,
    'num_processes': int(count),
    'process_id': int(index),
  }


def cluster(environment: Mapping[str, str], platforms: str | None) -> str | None:
  """The source that says that this is one of several processes, in words; None if there is none.

  `platforms` is `jax.config.jax_platforms`, to which importing jax adds 'tpu' if there are TPUs.
  """
  # A shell inside a Slurm job also has SLURM_NTASKS, but is not a task or the only one of its step.
  tasks = environment.get('SLURM_STEP_NUM_TASKS', environment.get('SLURM_NTASKS', '1'))
  if {'SLURM_PROCID', 'SLURM_STEP_NODELIST'} <= set(environment) and int(tasks) > 1:
    return f'Slurm, {tasks} tasks'
  ranks = environment.get('OMPI_COMM_WORLD_SIZE', '1')
  if int(ranks) > 1:
    return f'Open MPI, {ranks} ranks'
  if 'tpu' not in (platforms or '').split(','):
    return None
  hosts = environment.get('TPU_PROCESS_ADDRESSES', environment.get('TPU_WORKER_HOSTNAMES'))
  if hosts is not None:
    count = len(hosts.split(','))
    slices = int(environment.get('MEGASCALE_NUM_SLICES', '1'))
    return f'{slices} TPU slices of {count} hosts' if count * slices > 1 else None
  # Importing jax sets this if it finds no chip; users set it to forbid queries of the metadata.
  return None if 'TPU_SKIP_MDS_QUERY' in environment else 'the metadata of a TPU VM'


def _check_port_is_free(settings: ProcessGroup) -> None:
  """Checks the port on process 0, because jaxlib would crash with a segmentation fault."""
  if settings['process_id'] != 0:
    return
  port = int(settings['coordinator_address'].rpartition(':')[2])
  try:
    with socket.create_server(('', port)):
      pass
  except OSError as error:
    raise ValueError(
      f'JAX_COORDINATOR_ADDRESS={settings["coordinator_address"]}: process 0 cannot listen there: '
      f'{error.strerror}'
    ) from error


def _give_up(place: str, seconds: int) -> None:
  print(
    f'Error: the other processes ({place}) did not connect within {seconds} s '
    '(--initialization_timeout_seconds). Check that all run, and that the address belongs to '
    'process 0.',
    file=sys.stderr,
    flush=True,
  )
  os._exit(exit_codes.LOST)  # the main thread waits in C++ without a limit
