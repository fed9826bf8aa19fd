"""The facts of a process that a thread writes, a run that hangs, and exit codes."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from het_plugin.operations import attempts, heartbeat, recorder
from het_plugin.system import exit_codes
from het_plugin.training import observer
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fast(monkeypatch):
  monkeypatch.setattr(heartbeat, 'PERIOD_SECONDS', 0.02)


@contextlib.contextmanager
def beating(folder, followed):
  beats = heartbeat.Heartbeat(followed, 1800, lambda: None)
  with beats:
    beats.begin(folder)
    yield


def test_the_file_follows_the_run(tmp_path):
  clock = recorder.Recorder()
  with beating(tmp_path, clock), clock.phase(observer.EVALUATE):
    clock.tick(7)
    wait_for(lambda: attempts.read_processes(tmp_path)[0].step == 7)
    (running,) = attempts.read_processes(tmp_path)
  (done,) = attempts.read_processes(tmp_path)
  assert (running.step, running.phase, running.state) == (7, 'evaluate', 'running')
  assert (running.process, running.processes) == (0, 1)
  assert (done.state, done.exit_code, done.began) == ('done', 0, running.began)
  assert done.beat > running.beat and done.ticks == running.ticks + 1


STUCK = """
import sys, time
from het_plugin.operations import heartbeat, recorder
heartbeat.PERIOD_SECONDS = 0.1
followed = recorder.Recorder()
beats = heartbeat.Heartbeat(followed, 1.0, lambda: None)
with beats, followed.phase('data'):
  beats.begin(sys.argv[1])
  for step in range(15):
    followed.tick(step)
    time.sleep(0.1)
  time.sleep(60)
"""


@pytest.mark.slow
def test_one_that_is_stuck_ends_with_its_stacks(tmp_path):
  done = subprocess.run(
    [sys.executable, '-c', STUCK, tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=300
  )
  assert done.returncode == exit_codes.LOST
  assert 'in phase data at step 14 for 1 s' in done.stderr and 'line 12 in <module>' in done.stderr
  (found,) = attempts.read_processes(tmp_path)
  assert (found.state, found.exit_code, found.step) == (attempts.FAILED, exit_codes.LOST, 14)
  assert found.message in done.stderr


@pytest.mark.parametrize(
  ('error', 'code'),
  [
    (None, 0),
    (SystemExit(), 0),
    (SystemExit(42), 42),
    (SystemExit('Error: x'), 1),
    (ValueError('x'), 2),
    (FileNotFoundError('x'), 2),
    (TypeError('x'), 1),
    # In one process there is nobody to lose.
    (RuntimeError('INTERNAL: CpuCallback error'), 1),
  ],
)
def test_exit_codes(error, code):
  assert exit_codes.of(error) == code


@pytest.mark.parametrize(
  ('error', 'lost'),
  [
    (ValueError('UNKNOWN: Gloo AllGather failed: Connection closed by peer [127.0.0.1]:55'), True),
    (RuntimeError('INTERNAL: NCCL operation failed: remote process exited'), True),
    (RuntimeError('RESOURCE_EXHAUSTED: Out of memory'), False),
    (ValueError('batch_size=3 must be divisible by 2.'), False),
    (OSError('UNAVAILABLE: disk'), False),
  ],
)
def test_errors_that_come_of_losing_another_process(monkeypatch, error, lost):
  monkeypatch.setattr('jax.distributed.is_initialized', lambda: True)
  assert exit_codes.is_lost_connection(error) is lost
  assert (exit_codes.of(error) == exit_codes.LOST) is lost
