"""Goodput of hand-made histories."""

from het_plugin.operations import goodput
from het_plugin.operations.attempts import RUNNING, Facts


def attempt(began, start_step, last_step, state=RUNNING, /, **seconds):
  """An attempt whose phases last so long."""
  return Facts(
    process=0,
    processes=1,
    host='h',
    pid=1,
    time=0.0,
    total_steps=100,
    began=began,
    seconds=seconds,
    start_step=start_step,
    step=last_step,
    state=state,
  )


def parts(attempts):
  """The parts that are not zero; their sum is the wall time, without rounding."""
  found = goodput.goodput(attempts)
  assert sum(found['seconds'].values()) == found['wall_seconds']
  return {part: value for part, value in found['seconds'].items() if value}


def test_a_run_without_a_restart():
  history = [
    attempt(
      1000,
      0,
      100,
      'done',
      start=20,
      restore=2,
      compile=30,
      data=4,
      step=128,
      evaluate=8,
      actions=1,
      save=5,
      end=2,
    )
  ]
  assert parts(history) == {
    'training': 128,
    'start': 20,
    'restore': 2,
    'compile': 30,
    'data': 4,
    'evaluate': 8,
    'actions': 1,
    'save': 5,
    'end': 2,
  }
  assert goodput.goodput(history)['share'] == 128 / 200
  assert goodput.goodput(history)['repeated_steps'] == 0


def test_killed_between_checkpoints():
  """Written for the last time at step 60 of 2 s each, gone on from step 50 after 33 s."""
  history = [
    attempt(1000, 0, 60, start=10, compile=20, step=120, save=6),
    attempt(1189, 50, 100, 'done', start=10, compile=20, step=100),
  ]
  assert parts(history) == {
    'training': 100 + 100,
    'repeated': 20,
    'start': 20,
    'compile': 40,
    'save': 6,
    'down': 33,
  }
  found = goodput.goodput(history)
  assert found['repeated_steps'] == 10
  assert found['wall_seconds'] == 1189 + 130 - 1000
  assert found['share'] == 200 / 319


def test_gone_on_from_an_earlier_checkpoint_than_the_start_before():
  """Checkpoint 20 proved unreadable: all of the second start is lost, and steps of the first."""
  history = [
    attempt(1000, 0, 30, step=30),
    attempt(1030, 20, 50, step=60),
    attempt(1090, 10, 60, 'done', step=50),
  ]
  assert parts(history) == {'training': 10 + 0 + 50, 'repeated': 20 + 60}
  assert goodput.goodput(history)['repeated_steps'] == 20 + 30


def test_time_after_a_run_that_was_done_is_no_down_time():
  history = [attempt(1000, 0, 10, 'done', step=20), attempt(9000, 10, 20, 'done', step=20)]
  assert parts(history) == {'training': 40}
