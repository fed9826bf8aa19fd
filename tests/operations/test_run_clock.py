"""The clock of a run: phases that contain each other, progress, what other threads see."""

import time

import pytest

from het_plugin.operations import run_clock
from het_plugin.training import observer


class Now:
  def __init__(self):
    self.seconds = 100.0

  def __call__(self):
    return self.seconds

  def advance(self, seconds):
    self.seconds += seconds


def test_a_phase_inside_another_counts_as_itself_only():
  now = Now()
  clock = run_clock.RunClock(now)
  now.advance(1)
  with clock.phase(observer.STEP):
    now.advance(2)
    with clock.phase(observer.DATA):
      now.advance(4)
      assert clock.snapshot().phase == observer.DATA
    now.advance(8)
    assert clock.snapshot().seconds == {'start': 1, 'step': 10, 'data': 4}
  now.advance(16)
  assert clock.snapshot().seconds == {'start': 17, 'step': 10, 'data': 4}


def test_a_phase_ends_with_an_error_too():
  clock = run_clock.RunClock()
  with pytest.raises(RuntimeError), clock.phase(observer.SAVE):
    raise RuntimeError
  assert clock.snapshot().phase == observer.START


def test_progress():
  now = Now()
  clock = run_clock.RunClock(now)
  now.advance(3)
  assert clock.snapshot().idle_seconds == 3
  before = clock.snapshot()
  clock.tick(step=7)
  after = clock.snapshot()
  assert (before.step, after.step) == (0, 7)
  assert after.ticks == before.ticks + 1 and after.idle_seconds == 0
  with clock.phase(observer.EVALUATE):
    pass
  assert clock.snapshot().ticks == after.ticks + 2
  assert clock.snapshot().step == 7


def test_an_unknown_phase_is_named():
  with (
    pytest.raises(ValueError, match="phase='sleep' must be one of start"),
    run_clock.RunClock().phase('sleep'),
  ):
    pass


def test_what_came_before_the_clock_is_of_the_start():
  now = Now()
  clock = run_clock.RunClock(now, began=now() - 5)
  now.advance(1)
  assert clock.snapshot().seconds == {'start': 6}
  assert clock.snapshot().idle_seconds == 1


def test_the_process_began_before_now():
  began = run_clock.process_start()
  assert 0 < time.monotonic() - began < 24 * 3600
  assert run_clock.process_start() == pytest.approx(began, abs=0.1)


def test_where_training_goes_on_from_and_what_is_saved():
  clock = run_clock.RunClock()
  assert (clock.snapshot().start_step, clock.snapshot().saved_step) == (None, None)
  clock.tick(step=3)
  clock.tick(step=4)
  clock.saved(4)
  snapshot = clock.snapshot()
  assert (snapshot.start_step, snapshot.step, snapshot.saved_step) == (3, 4, 4)


def test_the_end_stays():
  now = Now()
  clock = run_clock.RunClock(now)
  now.advance(1)
  clock.end()
  now.advance(2)
  assert clock.snapshot().phase == observer.END
  assert clock.snapshot().seconds == {'start': 1, 'end': 2}


def test_a_look_from_inside_the_lock(monkeypatch):
  """As a signal handler that logs takes it, between two lines of the thread it interrupts."""
  clock = run_clock.RunClock()
  turn, seen = clock._turn_page, []
  monkeypatch.setattr(clock, '_turn_page', lambda: (turn(), seen.append(clock.snapshot().ticks)))
  clock.tick()
  assert seen == [1]
