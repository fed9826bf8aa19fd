"""The thread that keeps a run's files up to date, without a run."""

import json
import logging

import pytest

from het_plugin.operations import goodput, operations, preemption, profiling, run_clock


@pytest.fixture
def clock():
  return run_clock.RunClock()


@pytest.fixture
def make(tmp_path, clock, monkeypatch):
  monkeypatch.setattr(operations, 'BEAT_SECONDS', 0.01)
  profiler = profiling.StepProfiler(tmp_path / 'profile', None, clock)
  return lambda: operations.Operations(tmp_path, clock, profiler, total_steps=10)


class Writer:
  def __init__(self):
    self.written = []

  def write_scalars(self, step, scalars):
    self.written.append((step, scalars))


def wait_for(condition):
  deadline = operations.threading.Event()
  for _ in range(1000):
    if condition():
      return
    deadline.wait(0.01)
  raise TimeoutError


def messages(tmp_path):
  lines = (tmp_path / 'logs' / 'process-00000.jsonl').read_text().splitlines()
  return [json.loads(line)['message'] for line in lines]


def test_files_follow_the_run(tmp_path, clock, make, caplog):
  caplog.set_level(logging.INFO, 'het_plugin')
  writer = Writer()
  with make() as ops:
    clock.tick(step=4)
    clock.tick(step=5)
    wait_for(lambda: goodput.read(tmp_path)[1].step == 5)
    assert goodput.read(tmp_path)[1].ended is None
    (tmp_path / 'profile_request').write_text('nonsense')
    wait_for(lambda: not (tmp_path / 'profile_request').exists())
    ops.report(writer)
  found = goodput.read(tmp_path)[1]
  assert (found.ended, found.start_step, found.step) == ('done', 4, 5)
  ((step, scalars),) = writer.written
  assert step == 5
  assert scalars['goodput/wall_seconds'] == pytest.approx(found.wall_seconds, rel=0.5)
  parts = {f'goodput/{part}_seconds' for part in goodput.PARTS}
  assert scalars.keys() == parts | {'goodput/share', 'goodput/wall_seconds'}
  assert sum(scalars[part] for part in parts) == scalars['goodput/wall_seconds']
  assert 'nonsense' in messages(tmp_path)[0]
  assert messages(tmp_path)[-1].startswith('Goodput ')


@pytest.mark.parametrize(
  ('error', 'ended', 'message'),
  [
    (preemption.Preempted(7), 'preempted', 'SIGTERM; step 7 is saved'),
    (ValueError('no such thing'), 'failed', 'ValueError: no such thing'),
    (KeyboardInterrupt(), 'failed', 'KeyboardInterrupt'),
  ],
)
def test_how_it_ended(tmp_path, make, error, ended, message):
  with pytest.raises(type(error)), make():
    raise error
  found = goodput.read(tmp_path)[1]
  assert (found.ended, found.message) == (ended, message)
  assert len(messages(tmp_path)) == (ended == 'failed')


def test_training_goes_on_where_files_cannot_be_written(tmp_path, clock, make, caplog):
  with make() as ops:
    folder = tmp_path / 'attempts'
    folder.rename(tmp_path / 'gone')
    wait_for(lambda: caplog.records)
    for _ in range(3):
      ops.beat()
    assert [r.getMessage() for r in caplog.records][0].startswith(
      'Training goes on without its attempt: '
    )
    assert len(caplog.records) == 1
    (tmp_path / 'gone').rename(folder)
    clock.tick(step=3)
    wait_for(lambda: goodput.read(tmp_path)[1].step == 3)


def test_a_writer_that_fails_does_not_hide_why_the_run_ended(tmp_path, make, caplog):
  with pytest.raises(ZeroDivisionError), make() as ops:
    try:
      raise ZeroDivisionError
    finally:
      ops.report(None)
  assert 'Training goes on without its goodput' in caplog.text
