"""Traces of ranges of steps."""

import socket

import jax
import jax.numpy as jnp
import pytest

from het_plugin.operations import profiling, run_clock
from het_plugin.operations.profile_requests import Steps


def train(profiler, steps):
  x = jnp.ones(())
  for step in steps:
    profiler.before(step)
    x = x + 1
    profiler.after(step, x)


def traces(folder):
  return sorted(
    str(path.parent.relative_to(folder / 'plugins' / 'profile'))
    for path in folder.rglob('process-00000.*.xplane.pb')
  )


def test_ranges(tmp_path):
  clock = run_clock.RunClock()
  profiler = profiling.StepProfiler(tmp_path, (2, 3), clock)
  late, ahead, past = Steps(1, 5), Steps(7, 8), Steps(1, 2)
  train(profiler, [1, 2])
  assert not profiler.is_done(Steps(2, 3)) and traces(tmp_path) == []
  train(profiler, [3])
  assert profiler.is_done(Steps(2, 3)) and traces(tmp_path) == ['step_2']
  for steps in (late, past, ahead):
    profiler.plan(steps)
  train(profiler, [4])  # what is ahead of the late one
  assert not profiler.is_done(late) and profiler.is_done(past)
  train(profiler, range(5, 9))
  assert profiler.is_done(late) and profiler.is_done(ahead)
  assert traces(tmp_path) == ['step_1', 'step_2', 'step_7']
  assert clock.snapshot().seconds['actions'] > 0


def test_the_end_of_a_run_ends_its_trace(tmp_path):
  profiler = profiling.StepProfiler(tmp_path, (1, 9), run_clock.RunClock())
  train(profiler, [1, 2])
  profiler.close()
  profiler.close()
  assert traces(tmp_path) == ['step_1']


def test_training_goes_on_without_a_trace_that_fails(tmp_path, caplog):
  profiler = profiling.StepProfiler(tmp_path, (1, 2), run_clock.RunClock())
  jax.profiler.start_trace(tmp_path / 'of somebody else')
  try:
    train(profiler, [1, 2, 3])
  finally:
    jax.profiler.stop_trace()
  assert profiler.is_done(Steps(1, 2))
  assert 'Could not trace steps 1 to 2: Profile has already been started' in caplog.text


def test_a_disk_that_is_full(tmp_path, caplog):
  (tmp_path / 'profile').write_text('no directory')
  profiler = profiling.StepProfiler(tmp_path / 'profile', (1, 1), run_clock.RunClock())
  train(profiler, [1, 2])
  assert profiler.is_done(Steps(1, 1)) and 'Could not trace' in caplog.text


def test_a_port_for_profilers():
  with socket.create_server(('', 0)) as taken:
    port = taken.getsockname()[1]
    with (
      pytest.raises(ValueError, match=f'profiler_port={port}: process 0 cannot listen'),
      profiling.server(port),
    ):
      pass
  for _ in range(2):  # it is given back
    with profiling.server(port), socket.create_connection(('localhost', port), timeout=10):
      pass
  with pytest.raises(ValueError, match='profiler_port=70000'), profiling.server(70000):
    pass
