"""Who a process takes for the others of its run; tests/launch/test_local.py lets them join."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from het_plugin.system import distributed, exit_codes
from launch import local, processes

ROOT = Path(__file__).parents[2]
EXPLICIT = {
  'JAX_COORDINATOR_ADDRESS': 'localhost:1234',
  'JAX_NUM_PROCESSES': '2',
  'JAX_PROCESS_ID': '1',
}
SLURM = {'SLURM_PROCID': '0', 'SLURM_STEP_NODELIST': 'a,b', 'SLURM_NTASKS': '2'}


def test_explicit_variables():
  assert distributed.explicit_settings(EXPLICIT) == {
    'coordinator_address': 'localhost:1234',
    'num_processes': 2,
    'process_id': 1,
  }
  assert distributed.explicit_settings({}) is None
  # jax.distributed.initialize takes the address alone beside what a cluster says.
  assert distributed.explicit_settings({'JAX_COORDINATOR_ADDRESS': 'a:1'}) is None
  assert distributed.explicit_settings({'JAX_NUM_PROCESSES': '1'}) == {}


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'JAX_PROCESS_ID': '2'}, r'JAX_PROCESS_ID=2 must be in 0\.\.1'),
    ({'JAX_NUM_PROCESSES': 'two'}, 'JAX_NUM_PROCESSES=two must be a number >= 1'),
    ({'JAX_NUM_PROCESSES': None}, 'JAX_NUM_PROCESSES is not set'),
    ({'JAX_COORDINATOR_ADDRESS': 'localhost:99999'}, 'must be HOST:PORT'),
  ],
)
def test_wrong_variables_are_one_sentence(changes, message):
  environment = {k: v for k, v in {**EXPLICIT, **changes}.items() if v is not None}
  with pytest.raises(ValueError, match=message):
    distributed.explicit_settings(environment)


@pytest.mark.parametrize(
  ('environment', 'platforms', 'expected'),
  [
    ({}, None, None),
    (SLURM, None, 'Slurm, 2 tasks'),
    ({**SLURM, 'SLURM_NTASKS': '1'}, None, None),
    ({**SLURM, 'SLURM_STEP_NUM_TASKS': '1'}, None, None),  # a shell that srun --pty gave
    ({'SLURM_NTASKS': '2'}, None, None),  # a batch script outside of srun
    ({'OMPI_COMM_WORLD_SIZE': '4'}, None, 'Open MPI, 4 ranks'),
    ({'TPU_WORKER_HOSTNAMES': 'a,b'}, 'tpu,cpu', '1 TPU slices of 2 hosts'),
    ({'TPU_WORKER_HOSTNAMES': 'a,b'}, 'cpu', None),
    ({'TPU_WORKER_HOSTNAMES': 'localhost'}, 'tpu,cpu', None),
    (
      {'TPU_WORKER_HOSTNAMES': 'a', 'MEGASCALE_NUM_SLICES': '2'},
      'tpu,cpu',
      '2 TPU slices of 1 hosts',
    ),
    ({'TPU_PROCESS_ADDRESSES': 'a:1,b:1'}, 'tpu,cpu', '1 TPU slices of 2 hosts'),
    ({}, 'tpu,cpu', 'the metadata of a TPU VM'),
    ({'TPU_SKIP_MDS_QUERY': '1'}, 'tpu,cpu', None),
  ],
)
def test_clusters(environment, platforms, expected):
  assert distributed.cluster(environment, platforms) == expected


JOIN = """
import sys
from het_plugin.cli import command_line
from het_plugin.cli.settings import Processes as Settings
run = Settings.join
command_line.run_command(sys.modules['__main__'])
"""


def join(**environment):
  """(exit code, its lines of error)."""
  result = subprocess.run(
    [sys.executable, '-c', JOIN, '--initialization_timeout_seconds=1'],
    env={**os.environ, **environment},
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=300,
  )
  return result.returncode, [line for line in result.stderr.splitlines() if 'Error' in line]


@pytest.mark.slow
def test_others_that_do_not_come_are_one_sentence():
  with socket.create_server(('localhost', 0)) as nobody:
    port = nobody.getsockname()[1]
  address = f'localhost:{port}'
  code, (error,) = join(**{**EXPLICIT, 'JAX_COORDINATOR_ADDRESS': address})
  assert code == exit_codes.LOST
  assert f'process 1 of 2 through {address}) did not connect within 1 s' in error


@pytest.mark.slow
def test_a_port_in_use_is_one_sentence():
  with socket.create_server(('', 0)) as taken:
    port = taken.getsockname()[1]
    address = f'localhost:{port}'
    changes = {'JAX_COORDINATOR_ADDRESS': address, 'JAX_PROCESS_ID': '0'}
    code, (error,) = join(**{**EXPLICIT, **changes})
  assert code == 2
  assert f'{address}: process 0 cannot listen there: Address already in use' in error


@pytest.mark.slow
def test_a_cluster_that_jax_does_not_know_is_one_sentence():
  """Open MPI 5 no longer sets the variable from which jax takes the address."""
  code, (error,) = join(OMPI_COMM_WORLD_SIZE='2')
  assert code == 2
  assert '(Open MPI, 2 ranks): coordinator_address should be defined; ' in error


FAULTY = """
import dataclasses, os, signal, sys
from het_plugin.cli import command_line
from het_plugin.cli.settings import Processes
@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Processes):
  fault: str = ''
  culprit: int = 1
def run(settings):
  import jax, numpy as np
  from jax.experimental import multihost_utils
  settings.join()
  multihost_utils.process_allgather(np.ones(1))
  if jax.process_index() == settings.culprit:
    if settings.fault == 'raise':
      raise RuntimeError('no such number')
    os.kill(os.getpid(), getattr(signal, settings.fault))
  while True:
    multihost_utils.process_allgather(np.ones(1))
command_line.run_command(sys.modules['__main__'])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
  ('fault', 'culprit', 'codes'),
  [
    ('SIGKILL', 0, (128 + 9, exit_codes.LOST)),
    ('SIGSTOP', 1, (exit_codes.LOST, None)),
    ('raise', 1, (exit_codes.LOST, 1)),
  ],
)
def test_how_the_others_of_a_lost_process_end(fault, culprit, codes):
  flags = ['--heartbeat_timeout_seconds=5', f'--fault={fault}', f'--culprit={culprit}']
  started = [
    subprocess.Popen([sys.executable, '-c', FAULTY, *flags], env=environment, cwd=ROOT)
    for environment in local.environments(os.environ, local.free_port(), 2, devices=1)
  ]
  try:
    for process, code in zip(started, codes, strict=True):
      if code is not None:
        assert processes.exit_code(process.wait(300)) == code
  finally:
    for process in started:
      process.kill()
