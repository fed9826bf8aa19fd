"""Traces of ranges of steps: bound, requested, refused."""

import json
import socket

import jax
import jax.numpy as jnp
import pytest

from het_plugin.operations import attempts, profiles, recorder
from het_plugin.training import observer


def make(folder, steps=None, process=0, lead_seconds=0.0):
  run = observer.ObservedRun(profiles.epath.Path(folder), 1000, profile_steps=steps)
  profiler = profiles.Profiler(run, recorder.Recorder(), lead_seconds)
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
  now = attempts.Facts(0, 1, 'h', 1, 0.0, 0.0, 1000, step=step, start_step=0, seconds=times)
  profiler._recorder.now = lambda: now
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
  profiler._planned = {(1, 5), (1, 2), (7, 8)}  # late, past, ahead
  train(profiler, range(4, 8))
  profiler.close()
  profiler.close()
  assert traces(tmp_path) == ['step_1', 'step_2', 'step_7']
  assert profiler._recorder.now().seconds['actions'] > 0


def test_steps_after_the_last_are_refused(tmp_path):
  make(tmp_path, (1000, 1005))
  with pytest.raises(ValueError, match='begin after the last step, 1000'):
    make(tmp_path, (1001, 1005))


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
      pytest.raises(ValueError, match=f'profiler_port={port}: process 0 .* {port}'),
      profiles.server(port),
    ):
      pass
  for _ in range(2):  # it is given back
    with profiles.server(port), socket.create_connection(('localhost', port), timeout=10):
      pass


def test_a_request_follows_no_link_out_of_the_folder(tmp_path):
  (tmp_path / 'run').mkdir()
  (tmp_path / 'run' / profiles.REQUEST).symlink_to('../other')
  with pytest.raises(ValueError, match='profile_request is a link to'):
    profiles.request(tmp_path / 'run', 5)
  assert not (tmp_path / 'other').exists()


def test_all_processes_trace_the_same_steps_and_another_request_follows(tmp_path, path):
  profiles.request(tmp_path, 5)
  with pytest.raises(ValueError, match='profile_request exists'):
    profiles.request(tmp_path, 5)
  first = make(tmp_path, lead_seconds=6.0)
  second = make(tmp_path, process=1)
  poll(second, 100, 0.5)
  poll(first, 0)  # the pace is not known yet
  assert not second._planned and not first._planned  # process 0 has not said which
  poll(first, 100, 0.5)
  assert json.loads(path.read_text()) == {'first': 113, 'last': 117}  # 6 s, 12 steps ahead
  poll(second, 104, 0.5)
  assert first._planned == second._planned == {(113, 117)}
  poll(second, 118, 0.5)
  assert path.exists()
  poll(first, 118, 0.5)
  assert not path.exists()
  path.touch()
  poll(first, 120, 0.5)
  assert (133, 137) in first._planned
  second.end()
  assert path.exists()
  first.end()
  assert not path.exists()


def test_a_request_near_the_end_of_the_run(tmp_path, path, caplog):
  profiler = make(tmp_path, lead_seconds=1.0)
  path.touch()
  poll(profiler, 987)
  assert json.loads(path.read_text()) == {'first': 998, 'last': 1000}
  path.write_text('{}')
  poll(profiler, 991)
  assert not path.exists() and 'too late' in caplog.text and 'step 1000' in caplog.text
