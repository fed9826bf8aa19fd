"""The facts of a process: phases that contain each other, progress, what other threads see."""

import pytest

from het_plugin.operations import recorder
from het_plugin.training import observer


class Now:
  def __init__(self):
    self.seconds = 100.0

  def __call__(self):
    return self.seconds


def test_a_phase_inside_another_counts_as_itself_only_until_the_end():
  now = Now()
  followed = recorder.Recorder(began=now() - 5, clock=now)  # imports are of the start
  now.seconds += 1
  with followed.phase(observer.STEP):
    now.seconds += 2
    with pytest.raises(KeyError), followed.phase(observer.DATA):
      now.seconds += 4
      assert followed.now().phase == observer.DATA
      raise KeyError
    now.seconds += 8
    assert followed.now().seconds == {'start': 6, 'step': 10, 'data': 4}
  followed.end()
  now.seconds += 16
  found = followed.now()
  assert (found.phase, found.seconds) == ('end', {'start': 6, 'step': 10, 'data': 4, 'end': 16})


def test_progress():
  now = Now()
  followed = recorder.Recorder(clock=now)
  now.seconds += 3
  before = followed.now()
  assert (before.idle_seconds, before.start_step, before.saved_step) == (3, None, None)
  followed.tick(step=7)
  followed.tick(step=8)
  followed.change(saved_step=8)
  after = followed.now()
  assert (after.start_step, after.step, after.saved_step, after.idle_seconds) == (7, 8, 8, 0)
  assert after.ticks == before.ticks + 2
  with followed.phase(observer.EVALUATE):
    pass
  assert followed.now().ticks == after.ticks + 2 and followed.now().step == 8


def test_a_look_from_inside_the_lock(monkeypatch):
  """As a signal handler that logs takes it, between two lines of the thread it interrupts."""
  followed = recorder.Recorder()
  turn = followed._turn_page
  seen = []
  monkeypatch.setattr(followed, '_turn_page', lambda: (turn(), seen.append(followed.now().ticks)))
  followed.tick()
  assert seen == [1]
