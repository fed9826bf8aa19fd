"""Requests of a profile: what they may say, which steps they become, who removes them."""

import json

import pytest

from het_plugin.operations import profile_requests
from het_plugin.operations.profile_requests import Steps


class Profiler:
  """Knows what is planned and what is over."""

  def __init__(self):
    self.planned, self.done = [], set()

  def plan(self, steps):
    self.planned.append(steps)

  def is_done(self, steps):
    return steps in self.done


@pytest.fixture
def path(tmp_path):
  return tmp_path / profile_requests.FILE


def requests(tmp_path, profiler, process=0, lead_seconds=6.0, last_step=1000):
  return profile_requests.Requests(
    tmp_path,
    profiler,
    is_first=process == 0,
    lead_seconds=lead_seconds,
    last_step=last_step,
  )


@pytest.mark.parametrize(
  ('text', 'value'),
  [
    ('', profile_requests.STEPS),
    (' \n', profile_requests.STEPS),
    ('{}', profile_requests.STEPS),
    ('{"steps": 20}', 20),
    ('{"first": 7, "last": 7}', Steps(7, 7)),
  ],
)
def test_requests(text, value):
  assert profile_requests.parse(text) == value


@pytest.mark.parametrize(
  'text',
  [
    *('5', '[5]', 'five', '{"steps": 0}', '{"steps": "5"}', '{"steps": true}', '{"steps": 5'),
    *('{"steps": 5, "first": 1}', '{"first": 1}', '{"first": 9, "last": 8}', '{"first": 1.5}'),
  ],
)
def test_broken_requests_are_reported_and_removed(text, tmp_path, path, caplog):
  path.write_text(text)
  profiler = Profiler()
  requests(tmp_path, profiler, process=1).poll(3, 0.1)
  assert path.exists() and not caplog.records  # process 0's business
  requests(tmp_path, profiler).poll(3, 0.1)
  assert not path.exists() and not profiler.planned
  assert text in caplog.text and '{"steps": N}' in caplog.text


def test_all_processes_trace_the_same_steps(tmp_path, path):
  path.touch()
  first, second = Profiler(), Profiler()
  process_0, process_1 = requests(tmp_path, first), requests(tmp_path, second, process=1)
  process_1.poll(100, 0.5)
  assert not second.planned  # process 0 has not said which
  process_0.poll(100, 0.5)
  steps = Steps(113, 117)  # 6 s, 12 steps ahead
  assert json.loads(path.read_text()) == {'first': 113, 'last': 117}
  process_0.poll(104, 0.5)
  for _ in range(2):
    process_1.poll(104, 0.5)
  assert first.planned == second.planned == [steps]

  first.done.add(steps)
  process_0.poll(118, 0.5)
  assert not path.exists()
  second.done.add(steps)
  process_1.poll(118, 0.5)
  assert first.planned == second.planned == [steps]


def test_another_request_follows(tmp_path, path):
  profiler = Profiler()
  process = requests(tmp_path, profiler, lead_seconds=0)
  for step, number in ((10, 2), (20, 3)):
    profile_requests.request(tmp_path, number)
    process.poll(step, 0.1)
    profiler.done.add(profiler.planned[-1])
    process.poll(step + 5, 0.1)
    assert not path.exists()
  assert profiler.planned == [Steps(11, 12), Steps(21, 23)]


def test_a_process_that_is_done_first_does_not_start_again(tmp_path, path):
  path.write_text('{"first": 10, "last": 12}')
  profiler = Profiler()
  process = requests(tmp_path, profiler, process=1)
  process.poll(5, 0.1)
  profiler.done.add(Steps(10, 12))
  for step in (12, 13):
    process.poll(step, 0.1)
  assert profiler.planned == [Steps(10, 12)] and path.exists()


def test_certain_steps_are_kept_while_they_are_ahead(tmp_path, path):
  path.write_text('{"first": 500, "last": 510}')
  profiler = Profiler()
  requests(tmp_path, profiler).poll(100, 0.1)
  assert profiler.planned == [Steps(500, 510)]


def test_a_plan_that_a_killed_run_left_is_moved(tmp_path, path):
  path.write_text('{"first": 500, "last": 510}')
  profiler = Profiler()
  requests(tmp_path, profiler, lead_seconds=0).poll(505, 0.1)
  assert profiler.planned == [Steps(506, 516)]


def test_nothing_is_planned_before_the_first_step(tmp_path, path):
  path.touch()
  profiler = Profiler()
  requests(tmp_path, profiler).poll(0, None)
  assert not profiler.planned and path.exists()


def test_steps_beyond_the_end_are_refused(tmp_path, path, caplog):
  path.touch()
  profiler = Profiler()
  requests(tmp_path, profiler, lead_seconds=0, last_step=12).poll(10, 0.1)
  assert not profiler.planned and not path.exists()
  assert 'steps 11 to 15 are beyond the end, 12' in caplog.text


def test_what_comes_when_the_run_is_done_is_removed(tmp_path, path, caplog):
  path.touch()
  requests(tmp_path, Profiler()).close(done=False)
  assert path.exists()  # for the next start
  requests(tmp_path, Profiler(), process=1).close(done=True)
  assert path.exists()
  requests(tmp_path, Profiler()).close(done=True)
  assert not path.exists() and 'comes too late' in caplog.text


def test_one_request_at_a_time(tmp_path):
  profile_requests.request(tmp_path, 5)
  with pytest.raises(ValueError, match='profile_request exists'):
    profile_requests.request(tmp_path, 5)
