"""Traces of ranges of steps: bound, asked for, refused."""

import json
import socket

import jax
import jax.numpy as jnp
import pytest

from het_plugin.operations import profiles, run_clock
from het_plugin.operations.profiles import Steps
from het_plugin.training import observer


def make(folder, steps=None, process=0, lead_seconds=0.0, last_step=1000):
  run = observer.ObservedRun(profiles.epath.Path(folder), last_step, profile_steps=steps)
  profiler = profiles.Profiler(run, run_clock.RunClock(), lead_seconds)
  profiler._is_first = process == 0
  return profiler


def train(profiler, steps):
  x = jnp.ones(())
  for step in steps:
    profiler.before(step)
    x = x + 1
    profiler.after(step, x)


def poll(profiler, step, seconds_per_step=0.1):
  """At this step of a run that began at step 0 and takes so long per step."""
  times = {observer.STEP: step * seconds_per_step}
  snapshot = run_clock.Snapshot(step, 0, None, 0, observer.STEP, 0.0, times)
  profiler._clock.snapshot = lambda: snapshot
  profiler.poll()


def traces(folder):
  found = folder.rglob('process-00000.*.xplane.pb')
  return sorted(str(path.parent.relative_to(folder / 'profile/plugins/profile')) for path in found)


@pytest.fixture
def path(tmp_path):
  return tmp_path / profiles.REQUEST


def test_ranges(tmp_path):
  profiler = make(tmp_path, (2, 3))
  train(profiler, [1, 2])
  assert traces(tmp_path) == []
  train(profiler, [3])
  assert traces(tmp_path) == ['step_2']
  profiler._planned = [Steps(1, 5), Steps(1, 2), Steps(7, 8)]  # late, past, ahead
  train(profiler, range(4, 8))
  profiler.close()
  profiler.close()
  assert traces(tmp_path) == ['step_1', 'step_2', 'step_7']
  assert profiler._clock.snapshot().seconds['actions'] > 0


def test_training_goes_on_without_a_trace_that_fails(tmp_path, caplog):
  profiler = make(tmp_path, (1, 2))
  jax.profiler.start_trace(tmp_path / 'another')
  try:
    train(profiler, [1, 2, 3])
  finally:
    jax.profiler.stop_trace()
  assert 'Could not trace steps 1 to 2: Profile has already been started' in caplog.text
  (tmp_path / 'file').write_text('no directory')
  train(make(tmp_path / 'file', (1, 1)), [1, 2])
  assert 'Could not trace steps 1 to 1' in caplog.text


def test_a_port_for_profilers():
  with socket.create_server(('', 0)) as taken:
    port = taken.getsockname()[1]
    with (
      pytest.raises(ValueError, match=f'profiler_port={port}: process 0 cannot listen'),
      profiles.server(port),
    ):
      pass
  for _ in range(2):  # it is given back
    with profiles.server(port), socket.create_connection(('localhost', port), timeout=10):
      pass
  with pytest.raises(ValueError, match='profiler_port=70000'), profiles.server(70000):
    pass


@pytest.mark.parametrize(
  ('text', 'value'),
  [
    ('', profiles.STEPS),
    (' \n', profiles.STEPS),
    ('{}', profiles.STEPS),
    ('{"steps": 20}', 20),
    ('{"first": 7, "last": 7}', Steps(7, 7)),
  ],
)
def test_requests(text, value):
  assert profiles.parse(text) == value


@pytest.mark.parametrize(
  'text',
  [
    *('5', '[5]', 'five', '{"steps": 0}', '{"steps": "5"}', '{"steps": true}', '{"steps": 5'),
    *('{"steps": 5, "first": 1}', '{"first": 1}', '{"first": 9, "last": 8}', '{"first": 1.5}'),
  ],
)
def test_broken_requests_are_reported_and_removed(text, tmp_path, path, caplog):
  path.write_text(text)
  poll(make(tmp_path, process=1), 3)
  assert path.exists() and not caplog.records  # process 0 removes it
  profiler = make(tmp_path)
  poll(profiler, 3)
  assert not path.exists() and not profiler._planned
  assert text in caplog.text and '{"steps": N}' in caplog.text


def test_all_processes_trace_the_same_steps_and_another_request_follows(tmp_path, path):
  profiles.request(tmp_path, 5)
  with pytest.raises(ValueError, match='profile_request exists'):
    profiles.request(tmp_path, 5)
  first, second = make(tmp_path, lead_seconds=6.0), make(tmp_path, process=1)
  poll(second, 100, 0.5)
  assert not second._planned  # process 0 has not said which
  poll(first, 100, 0.5)
  steps = Steps(113, 117)  # 6 s, 12 steps ahead
  assert json.loads(path.read_text()) == {'first': 113, 'last': 117}
  for process in (first, second, second):
    poll(process, 104, 0.5)
  assert first._planned == second._planned == [steps]

  first._planned = second._planned = []  # traced
  poll(second, 118, 0.5)
  assert path.exists() and not second._planned
  poll(first, 118, 0.5)
  assert not path.exists()
  path.write_text('{"steps": 2}')
  poll(first, 120, 0.5)
  assert first._planned == [Steps(133, 134)]


@pytest.mark.parametrize(
  ('step', 'planned'),
  [
    (100, [Steps(500, 510)]),
    (505, [Steps(506, 516)]),  # left by a killed run: moved
    (0, []),  # the pace is not known yet
  ],
)
def test_certain_steps(tmp_path, path, step, planned):
  path.write_text('{"first": 500, "last": 510}')
  profiler = make(tmp_path)
  poll(profiler, step)
  assert profiler._planned == planned and path.exists()


def test_requests_that_cannot_be_met_are_removed(tmp_path, path, caplog):
  path.touch()
  poll(make(tmp_path, last_step=12), 10)
  assert not path.exists() and 'steps 11 to 15 are beyond the end, 12' in caplog.text
  path.touch()
  make(tmp_path).end(done=False)
  assert path.exists()  # for the next start
  make(tmp_path, process=1).end(done=True)
  assert path.exists()
  make(tmp_path).end(done=True)
  assert not path.exists() and 'comes too late' in caplog.text
